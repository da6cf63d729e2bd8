"""Stages of plain modules with several tensors between them, weight gradients in closures and pairs by a class hook.

This is what a model written for the `dualpipe` 1.0.0 package expects of its pipeline; see `compat`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Payload, StageKey
from dualpipe.edges import Edge
from dualpipe.programs import BackwardJob, ForwardJob
from dualpipe.weight_grad import WeightGradStore


class ClosureStore(Protocol):
    """Where layers put the closures of their weight gradients."""

    enabled: bool

    def take(self) -> list[Callable[[], Any]]:
        """Takes out what was put since the last time."""
        ...


class _Live:
    """What the backward of one microbatch needs: leaf inputs, outputs with their graph, and the loss."""

    def __init__(
        self, inputs: list[Tensor | None], outputs: Sequence[Tensor | GradientEdge | None], loss: Tensor | None
    ) -> None:
        self.inputs, self.outputs, self.loss = inputs, outputs, loss


class TupleStages:
    """The stages of one rank for one step.

    Args:
        modules: module of each stage; called with one argument for each tensor, returns one tensor or several.
        num_stages: stages of the whole model.
        shapes: shapes of the tensors between two stages. Several travel as one flat tensor.
        edge: that tensor.
        inputs: arguments of stage 0 by microbatch, where this rank holds it.
        labels: arguments of the criterion after the outputs, by microbatch.
        criterion: `criterion(*outputs, *labels) -> scalar`.
        keep_outputs: keep the outputs of the last stage.

    Attributes:
        losses: detached loss by microbatch.
        outputs: detached outputs by microbatch, if kept.
    """

    def __init__(
        self,
        modules: Mapping[StageKey, nn.Module],
        *,
        num_stages: int,
        shapes: Sequence[tuple[int, ...]],
        edge: Edge,
        inputs: Mapping[int, Sequence[Tensor | None]],
        labels: Mapping[int, Sequence[Tensor | None]],
        criterion: Callable[..., Tensor] | None,
        keep_outputs: bool,
    ) -> None:
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, list[Tensor]] = {}
        self._modules, self._last, self._shapes, self._edge = modules, num_stages - 1, shapes, edge
        self._inputs, self._labels, self._criterion, self._keep = inputs, labels, criterion, keep_outputs
        self._live: dict[tuple[StageKey, int], _Live] = {}
        self._store: WeightGradStore | None = None
        self._closures: ClosureStore | None = None
        self._hook: Callable[..., Any] | None = None

    def defer_to(self, store: WeightGradStore, closures: ClosureStore | type[ClosureStore]) -> None:
        """Closures that layers put into `closures` during a backward go on to the executor's `store`."""
        self._store, self._closures = store, closures  # type: ignore[assignment]

    def pair_with(self, hook: Callable[..., Any]) -> None:
        """Runs overlapped pairs through `hook`; without it a pair is its F, then its B."""
        self._hook = hook
        self.forward_backward = self._forward_backward

    def edge(self, payload: Payload, key: StageKey, microbatch: int) -> Edge:
        """The same for everything."""
        return self._edge

    def no_sync(self, key: StageKey) -> AbstractContextManager[Any]:
        """Nothing to hold back: gradients of plain modules are not reduced."""
        return contextlib.nullcontext()

    def forward(self, key: StageKey, microbatch: int, input: Tensor | None) -> Tensor | None:
        """Runs the module, and on the last stage the criterion."""
        inputs = self._unpack(key, microbatch, input)
        result = self._modules[key](*inputs)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        loss = None
        if key.stage == self._last and self._criterion is not None:
            loss = self._criterion(*outputs, *self._labels[microbatch])
        return self._forward_done(key, microbatch, inputs, outputs, loss)

    def after_forward(self, key: StageKey, microbatch: int, output: Tensor) -> None:
        """The executor need not keep what was sent: `_Live` has what the backward needs."""

    def backward(
        self, key: StageKey, microbatch: int, input: Tensor | None, output: Tensor | None, output_grad: Tensor | None
    ) -> Tensor | None:
        """Runs autograd; what layers put into the closure store meanwhile waits for its W."""
        live = self._live.pop((key, microbatch))
        assert self._closures is not None and self._store is not None
        self._closures.enabled = True
        try:
            if live.loss is not None:
                live.loss.backward()
            else:
                grads = self._split(output_grad)
                pairs = [(o, g) for o, g in zip(_edges(live.outputs), grads, strict=True) if o is not None]
                if pairs:
                    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        finally:
            self._closures.enabled = False
        self._store.put_closures(self._closures.take())
        return self._input_grad(input, live)

    def _forward_backward(self, forward: ForwardJob, backward: BackwardJob) -> tuple[Tensor | None, Tensor | None]:
        """One overlapped pair through the class hook of the modules."""
        assert self._hook is not None
        inputs = self._unpack(*forward)
        last = forward.key.stage == self._last
        live = self._live.pop((backward.key, backward.microbatch))
        outputs, loss = self._hook(
            self._modules[forward.key],
            inputs,
            self._criterion if last else None,
            list(self._labels[forward.microbatch]) if last else [],
            self._modules[backward.key],
            live.loss,
            live.outputs if live.loss is None else None,
            self._split(backward.output_grad) if live.loss is None else None,
        )
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        packed = self._forward_done(forward.key, forward.microbatch, inputs, outputs, loss)
        return packed, self._input_grad(backward.input, live)

    def _unpack(self, key: StageKey, microbatch: int, input: Tensor | None) -> list[Tensor | None]:
        """The arguments of a stage; leaves that collect their gradients."""
        if input is None:
            return list(self._inputs[microbatch])
        if len(self._shapes) == 1:
            return [input]
        parts = [part.detach() for part in self._split(input)]
        return [part.requires_grad_(input.requires_grad) for part in parts]

    def _forward_done(
        self, key: StageKey, microbatch: int, inputs: list[Tensor | None], outputs: list[Tensor], loss: Tensor | None
    ) -> Tensor | None:
        """Keeps what the backward needs; returns what travels to the next stage, or the loss."""
        if torch.is_grad_enabled():
            # A hook for pairs runs autograd from the outputs themselves, so there they stay.
            freed = key.stage != self._last and self._hook is None
            self._live[key, microbatch] = _Live(inputs, _edges(outputs) if freed else outputs, loss)
        if key.stage != self._last:
            return self._pack(key, outputs)
        if self._keep:
            self.outputs[microbatch] = [output.detach() for output in outputs]
        if loss is not None:
            self.losses[microbatch] = loss.detach()
        return loss

    def _pack(self, key: StageKey, tensors: list[Tensor]) -> Tensor:
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if found != [(shape, self._edge.dtype) for shape in self._shapes]:
            raise UsageError(
                f"stage {key.stage} returned {', '.join(f'{shape} {dtype}' for shape, dtype in found)}",
                allowed=", ".join(f"{shape} {self._edge.dtype}" for shape in self._shapes),
                fix="call set_p2p_tensor_shapes and set_p2p_tensor_dtype with what the stages return for one chunk",
            )
        return tensors[0] if len(tensors) == 1 else torch.cat([tensor.detach().flatten() for tensor in tensors])

    def _split(self, tensor: Tensor | None) -> list[Tensor]:
        """The parts of what travelled as one."""
        assert tensor is not None
        if len(self._shapes) == 1:
            return [tensor]
        flat = tensor.split([torch.Size(shape).numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(flat, self._shapes, strict=True)]

    def _input_grad(self, input: Tensor | None, live: _Live) -> Tensor | None:
        """The gradients of the leaf inputs, packed; zeros for an input that was not used."""
        if input is None:
            return None
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in live.inputs if leaf is not None]
        return grads[0] if len(grads) == 1 else torch.cat([grad.flatten() for grad in grads])


def _edges(outputs: Sequence[Tensor | GradientEdge | None]) -> list[GradientEdge | None]:
    """Where the gradients of outputs enter the graph; None for one without."""
    return [
        (get_gradient_edge(output) if output.requires_grad else None) if isinstance(output, Tensor) else output
        for output in outputs
    ]
