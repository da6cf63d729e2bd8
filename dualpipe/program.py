"""Collects the actions of one rank: the builders say F, I, W in order, and this counts microbatches.

A phase is one of the stages a rank holds, by its place in `keys`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from dualpipe.actions import Action, Kind, StageKey, pair


class Program:
    """The list of one rank under construction.

    Args:
        keys: the stages of the rank; their positions are the phases.
        first_microbatch: where each phase starts to count; 0 by default.

    Attributes:
        actions: what was said so far.
    """

    def __init__(self, keys: Sequence[StageKey], first_microbatch: Sequence[int] | None = None) -> None:
        self.actions: list[Action] = []
        self._keys = tuple(keys)
        self._next_forward = list(first_microbatch or [0] * len(keys))
        self._next_backward = list(self._next_forward)
        self._queued: deque[tuple[int, Action]] = deque()

    def _take(self, kind: Kind, phase: int, counter: list[int]) -> Action:
        counter[phase] += 1
        key = self._keys[phase]
        return Action(kind, key.stage, key.direction, counter[phase] - 1)

    def forward(self, phase: int) -> None:
        """F of the next microbatch of a phase."""
        self.actions.append(self._take(Kind.F, phase, self._next_forward))

    def backward(self, phase: int, *, split: bool = False) -> None:
        """B of the next microbatch; with `split` I, whose W is queued."""
        action = self._take(Kind.I if split else Kind.B, phase, self._next_backward)
        self.actions.append(action)
        if split:
            self._queued.append((phase, replace(action, kind=Kind.W)))

    def weights(self, phase: int | None = None) -> None:
        """The oldest queued W, of one phase or of all."""
        item = next(item for item in self._queued if phase is None or item[0] == phase)
        self._queued.remove(item)
        self.actions.append(item[1])

    def pair(self, forward: int, backward: int) -> None:
        """The F of one phase together with the B of another."""
        first = self._take(Kind.F, forward, self._next_forward)
        self.actions.append(pair(first, self._take(Kind.B, backward, self._next_backward)))
