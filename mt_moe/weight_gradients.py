"""The weight gradients of one layer call, taken out of the experts' backward and computed at better moments.

The gradient of fc1 is the longest piece of backward that nothing waits for: it runs while the gradients of the rows
travel home. The gradient of fc2 could too, but what it reads is large, and computed at once it is free before more
is made. Where the tokens of a call go in chunks, the parts of a gradient are added up as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mt_moe.expert_call import Weights
from mt_moe.grouped_mlp import WeightGrad

Compute = Callable[[], Sequence[Tensor]]


class WeightGradients:
    """Gathers the gradients of fc1 and fc2 over the chunks of one call; `put` is a `Defer`.

    Args:
        fc1: its weights as `expert_mlp` is given them.
        fc2: the same.
        num_chunks: calls of `expert_mlp`, each of which has its own `finish`.

    Attributes:
        weights: all of them in one list, fc1's first.
    """

    def __init__(self, fc1: Weights, fc2: Weights, num_chunks: int = 1) -> None:
        lists = [[weights] if isinstance(weights, Tensor) else list(weights) for weights in (fc1, fc2)]
        self.weights: list[Tensor] = [*lists[0], *lists[1]]
        self._lists, self._num_chunks, self._left = lists, num_chunks, num_chunks
        self._sums: list[_Sum | None] = [None, None]
        self._held: list[Compute] = []

    def put(self, weights: Sequence[Tensor], compute: Compute) -> None:
        """Takes one gradient of one chunk: fc1's is kept for `finish`, fc2's computed now."""
        if weights[0] is self._lists[0][0]:
            self._held.append(compute)
        else:
            self._add(1, compute)

    @torch.no_grad()
    def finish(self) -> Sequence[Tensor | None]:
        """Computes what is kept of a chunk. Returns all gradients in the order of `weights` with the last chunk.

        Before that, and for weights that need none, they are None.
        """
        held, self._held = self._held, []
        for compute in held:
            self._add(0, compute)
        self._left -= 1
        if self._left:
            return [None] * len(self.weights)
        found: list[Tensor | None] = []
        for total, weights in zip(self._sums, self._lists, strict=True):
            found += [None] * len(weights) if total is None else total.result()
        self._sums, self._left = [None, None], self._num_chunks
        return found

    def _add(self, which: int, compute: Compute) -> None:
        total = self._sums[which]
        if total is None:
            self._sums[which] = _Sum(compute)
        else:
            total.add(compute)


class _Sum:
    """The gradient of one product; adds into the packed tensor where the parts can."""

    def __init__(self, compute: Compute) -> None:
        self._split = compute.split if isinstance(compute, WeightGrad) else None
        self._parts = [compute.packed()] if isinstance(compute, WeightGrad) else list(compute())

    def add(self, compute: Compute) -> None:
        """Adds one more chunk's."""
        if isinstance(compute, WeightGrad):
            compute.add_to(self._parts[0])
            return
        for total, part in zip(self._parts, compute(), strict=True):
            total += part

    def result(self) -> Sequence[Tensor]:
        """The sum in the form of the weights."""
        return self._parts if self._split is None else self._split(self._parts[0])


class HeldWeightGradients:
    """Weight gradients of any number of calls, kept until `run`: a layer's `backward_dw`. `put` is a `Defer`."""

    def __init__(self) -> None:
        self._held: list[tuple[Sequence[Tensor], Compute]] = []

    def put(self, weights: Sequence[Tensor], compute: Compute) -> None:
        """Keeps the gradients of some weights."""
        self._held.append((weights, compute))

    def run(self) -> None:
        """Computes what is kept, in the order of `put`, and adds it to the weights by their own accumulation nodes."""
        held, self._held = self._held, []
        for weights, compute in held:
            torch.autograd.backward(list(weights), list(compute()))
