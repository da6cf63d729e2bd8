"""A piece of a graph with both ends cut off, so that its backward runs when a schedule says so.

Autograd runs backward through everything it can reach. To run the backward of one part of a layer now and of the next
one after something else, each part is a graph of its own: its inputs enter through a node that keeps the gradient it is
given instead of passing it on, and its outputs are remembered as places in the graph.

Neither end holds data. A leaf in place of the cut would hold its tensor until the end of backward and copy gradients
that others hold too; outputs kept for their graph would hold memory that backward does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge


class _Cut(torch.autograd.Function):
    """The same memory, whose gradient goes to `box`; the anchor is there for autograd to follow."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, box: list[Tensor | None]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.box = box
        # No view: rows on their way are written beside this, which autograd would take for a change of the view.
        return x.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None]:
        ctx.box[0] = grad
        return None, None, None


class Segment:
    """Runs `function(*inputs)` and keeps its graph for one `backward`.

    Args:
        function: returns the outputs, any of which may need no gradient.
        inputs: tensors of other graphs; gradients are kept for those that require one.

    Attributes:
        outputs: detached, with the `requires_grad` they had; taken by the first `take`.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
        self._boxes: list[list[Tensor | None]] = [[None] for _ in inputs]
        anchor = torch.empty(0, requires_grad=True)
        with torch.enable_grad():
            cut = [
                _Cut.apply(anchor, x.detach(), box) if x.requires_grad else x
                for x, box in zip(inputs, self._boxes, strict=True)
            ]
            outputs = function(*cut)
            del cut
        self._edges: list[GradientEdge | None] = [get_gradient_edge(y) if y.requires_grad else None for y in outputs]
        self._outputs: tuple[Tensor, ...] = tuple(
            y.detach().requires_grad_() if edge is not None else y for y, edge in zip(outputs, self._edges, strict=True)
        )

    def take(self) -> tuple[Tensor, ...]:
        """Hands the outputs out, once: leaves that require gradients where the outputs did."""
        outputs, self._outputs = self._outputs, ()
        return outputs

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs backward, once; gradients of parameters inside accumulate as always.

        Args:
            grads: one for each output; None for none.

        Returns:
            One for each input; None where it needs none or nothing reached it.
        """
        edges, self._edges = self._edges, []
        roots = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge is not None and grad is not None]
        if roots:
            torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
        found = [box[0] for box in self._boxes]
        self._boxes = []
        return found
