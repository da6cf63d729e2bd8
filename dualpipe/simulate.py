"""When each action of a schedule runs, given how long each kind takes: the plan in time.

Every rank works its list in order; an action starts when its rank is free and its inputs are there. The results of a
B are taken to be ready at its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Action, Kind, Payload, StageKey
from dualpipe.blocks import Block, label_of
from dualpipe.schedule import Schedule
from dualpipe.validate import ScheduleError


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Duration of each kind, in any one unit, the same for every stage.

    Attributes:
        F: forward.
        I: backward for inputs.
        W: backward for weights.
        B: full backward.
        FB: overlapped pair.
        hop: time from the end of an action to the arrival of its result on another rank; the sender goes on meanwhile.
    """

    F: float = 1.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0
    B: float = 2.0
    FB: float = 3.0
    hop: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"duration {item.name}={value}", allowed="a finite number from 0", fix="correct it")


@dataclass(frozen=True, slots=True)
class Simulation:
    """Outcome of `simulate`.

    Attributes:
        blocks: every action with its times; SEND and RECV only where the schedule has them.
        makespan: end of the last block; all ranks start at 0.
        busy: time each rank computes.
        peak_live: per rank, the largest number of stage activations held: from F until the end of B or I, the F of a
            pair counted before its B frees.
    """

    blocks: tuple[Block, ...]
    makespan: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]

    @property
    def bubble_ratio(self) -> float:
        """Idle time over ranks times makespan."""
        total = len(self.busy) * self.makespan
        return 1.0 - sum(self.busy) / total if total else 0.0


class _Clock:
    """Times of results, and how far each rank has come."""

    def __init__(self, schedule: Schedule, durations: Durations) -> None:
        self.schedule, self.durations = schedule, durations
        self.now = [0.0] * schedule.num_ranks
        self.busy = [0.0] * schedule.num_ranks
        self.blocks: list[Block] = []
        self.ready: dict[tuple[Payload, StageKey, int], float] = {}

    def arrival(self, rank: int, action: Action) -> float | None:
        """When the input of an F, B, I or RECV is there; None where its producer has not run yet."""
        source = self.schedule.source(action)
        if source is None or action.kind is Kind.W:
            return 0.0
        payload = action.payload or (Payload.ACTIVATION if action.kind is Kind.F else Payload.GRADIENT)
        end = self.ready.get((payload, source, action.microbatch))
        if end is None or self.schedule.rank_of(source) == rank:
            return end
        return end + self.durations.hop

    def run(self, rank: int, action: Action) -> bool:
        """Runs one action; False if it must wait for another rank."""
        begin = self.now[rank]
        if action.kind is Kind.SEND:
            self._note(rank, action, begin, begin + self.durations.hop)
            return True
        arrivals = [self.arrival(rank, part) for part in (action.compute or (action,))]
        if any(time is None for time in arrivals):
            return False
        start = max([begin, *(time for time in arrivals if time is not None)])
        if action.kind is Kind.RECV:
            self.now[rank] = start
            self._note(rank, action, begin, start)
            return True
        length = float(getattr(self.durations, action.kind))
        self.now[rank] = start + length
        self.busy[rank] += length
        for part in action.compute:
            if part.kind is not Kind.W:
                payload = Payload.ACTIVATION if part.kind is Kind.F else Payload.GRADIENT
                self.ready[payload, part.key, part.microbatch] = start + length
        self._note(rank, action, start, start + length)
        return True

    def _note(self, rank: int, action: Action, start: float, end: float) -> None:
        block = Block(rank, str(action.kind), action.stage, action.microbatch, start, end, label_of(action))
        self.blocks.append(block)


def simulate(schedule: Schedule, durations: Durations | None = None) -> Simulation:
    """Plays a schedule, with or without SEND and RECV.

    Raises:
        ScheduleError: the lists wait for each other in a circle.
    """
    clock = _Clock(schedule, durations or Durations())
    position = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions) and clock.run(rank, actions[position[rank]]):
                position[rank] += 1
                moved = True
    for rank, actions in enumerate(schedule.ranks):
        if position[rank] < len(actions):
            index = position[rank]
            raise ScheduleError(
                f"rank {rank}, position {index}, {actions[index]}: its input is never computed", rank=rank, index=index
            )
    makespan = max(clock.now, default=0.0)
    peaks = tuple(_peak_live(actions) for actions in schedule.ranks)
    return Simulation(tuple(clock.blocks), makespan, tuple(clock.busy), peaks)


def _peak_live(actions: tuple[Action, ...]) -> int:
    live = peak = 0
    for action in actions:
        live += action.forward is not None
        peak = max(peak, live)
        live -= action.backward is not None
    return peak
