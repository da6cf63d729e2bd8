"""How long a low-latency call waited for each source rank, from the times at which the ranks made it.

A backend learns that all rows are there, not whose came last. So where a caller asks for the times, the ranks tell each
other when they called (one number, in front of the data). Rows of a source can not be there before it calls; all of
them are there some time after the last one did. That gives, with t the time of each call and `end` when this rank had
everything:

    cost[source] = max(0, t[source] - t[here]) + (end - max over all t)

The first part is what this rank waited for that source, the second what moving took, the same for all. Clocks are the
hosts' wall clocks: between hosts the numbers are as good as their synchronisation.
"""

from __future__ import annotations

import time

import torch

from comm_core.event import EventHandle
from comm_core.legacy.transport import Transport


class WaitCosts:
    """Times of one call.

    Args:
        transport: of the ranks that take part.
        ranks: those ranks, as ranks of the group.
        stats: int64 [ranks of the group] on the CPU, microseconds are added; None for a call nobody asks about. It must
            be given on all ranks or on none.
        start: `time.time_ns()` when this rank called.

    Attributes:
        told: when the times are there; None where nobody asked. What follows must not begin where this failed: it does
            where a rank did not ask.
    """

    def __init__(self, transport: Transport, ranks: list[int], stats: torch.Tensor | None, start: int) -> None:
        self._ranks, self._stats, self._start = ranks, stats, start
        self.told: EventHandle | None = None
        if stats is not None:
            self._table, self.told = transport.spread_later(1, lambda: [start])

    def add(self) -> None:
        """Adds the costs; called when all rows are there."""
        if self._stats is None:
            return
        times = [line[0] for line in self._table]
        moving = max(0, time.time_ns() - max(times))
        for rank, called in zip(self._ranks, times, strict=True):
            self._stats[rank] += (max(0, called - self._start) + moving) // 1000
