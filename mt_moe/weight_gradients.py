"""The weight gradients of one layer call, taken out of the experts' backward and computed at better moments.

The gradient of fc1 is the longest piece of backward that nothing waits for: it runs while the gradients of the rows
travel home. The gradient of fc2 could too, but what it reads is large, and computed at once it is free before more
is made. Where the tokens of a call go in chunks, both wait for the last one, behind whose launch they run as one
product over the rows of all chunks.
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
        self._held: tuple[list[Compute], list[Compute]] = ([], [])
        self._early: Sequence[Tensor] | None = None

    def put(self, weights: Sequence[Tensor], compute: Compute) -> None:
        """Takes one gradient of one chunk. That of fc2 is computed now where there are no other chunks."""
        which = 0 if weights[0] is self._lists[0][0] else 1
        if which == 1 and self._num_chunks == 1:
            self._early = compute()
        else:
            self._held[which].append(compute)

    @torch.no_grad()
    def finish(self) -> Sequence[Tensor | None]:
        """Ends a chunk; with the last one, computes what is kept and returns all gradients in the order of `weights`.

        Before that, and for weights that need none, they are None.
        """
        self._left -= 1
        if self._left:
            return [None] * len(self.weights)
        self._left = self._num_chunks
        second, self._early = self._early, None
        second = _added_up(self._held[1]) if second is None else second
        if self._num_chunks > 1:
            # By the end of fc2's the last communication is over: nobody needs multiprocessors beside fc1's.
            for part in self._held[0]:
                if isinstance(part, WeightGrad):
                    part.spare_sms = 0
        found: list[Tensor | None] = []
        for total, weights in zip((_added_up(self._held[0]), second), self._lists, strict=True):
            found += [None] * len(weights) if total is None else total
        return found


def _added_up(held: list[Compute]) -> Sequence[Tensor] | None:
    """The sum of the chunks' gradients of one product, and the end of what they read; None without any."""
    parts, held[:] = list(held), []
    if not parts:
        return None
    alike = [part for part in parts if isinstance(part, WeightGrad)]
    if len(parts) > 1 and len(alike) == len(parts):
        merged = WeightGrad.merged(alike)
        parts = parts if merged is None else [merged]
    parts.reverse()
    total = list(parts.pop()())
    while parts:
        for whole, part in zip(total, parts.pop()(), strict=True):
            whole += part
    return total


class HeldWeightGradients:
    """Weight gradients of any number of calls, kept until `run`: a layer's `backward_dw`. `put` is a `Defer`."""

    def __init__(self) -> None:
        self._held: list[tuple[Sequence[Tensor], Compute]] = []

    def put(self, weights: Sequence[Tensor], compute: Compute) -> None:
        """Keeps the gradients of some weights."""
        self._held.append((weights, compute))

    def __len__(self) -> int:
        return len(self._held)

    def take(self, count: int) -> list[tuple[Sequence[Tensor], Compute]]:
        """Gives the last `count` away, in the order of `put`: weights, and what computes their gradients."""
        at = len(self._held) - count
        self._held, taken = self._held[:at], self._held[at:]
        return taken

    def run(self) -> None:
        """Computes what is kept, in the order of `put`, and adds it to the weights by their own accumulation nodes."""
        held, self._held = self._held, []
        for weights, compute in held:
            torch.autograd.backward(list(weights), list(compute()))
