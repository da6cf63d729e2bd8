"""When each action of a schedule runs, given how long each kind takes: the plan in time.

Every rank works its list in order; an action starts when its rank is free and its inputs are there. The results of a
B are taken to be ready at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Action, Kind, Payload, StageKey
from dualpipe.blocks import Block, label_of
from dualpipe.costs import Durations, length
from dualpipe.lists import Schedule
from dualpipe.validate import ScheduleError

__all__ = ["Durations", "Simulation", "simulate"]


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
    def idle(self) -> float:
        """Makespan minus the time a rank computes, of the rank where this is largest."""
        return self.makespan - min(self.busy, default=0.0)

    @property
    def bubble_ratio(self) -> float:
        """Idle time over ranks times makespan."""
        total = len(self.busy) * self.makespan
        return 1.0 - sum(self.busy) / total if total else 0.0


class _Clock:
    """Times of results, and how far each rank has come."""

    def __init__(self, schedule: Schedule, durations: Sequence[Durations]) -> None:
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
        return end + self.durations[source.stage].hop

    def run(self, rank: int, action: Action) -> bool:
        """Runs one action; False if it must wait for another rank."""
        begin = self.now[rank]
        if action.kind is Kind.SEND:
            self._note(rank, action, begin, begin + self.durations[action.stage].hop)
            return True
        arrivals = [self.arrival(rank, part) for part in (action.compute or (action,))]
        if any(time is None for time in arrivals):
            return False
        start = max([begin, *(time for time in arrivals if time is not None)])
        if action.kind is Kind.RECV:
            self.now[rank] = start
            self._note(rank, action, begin, start)
            return True
        duration = length(action, self.durations)
        self.now[rank] = start + duration
        self.busy[rank] += duration
        for part in action.compute:
            if part.kind is not Kind.W:
                payload = Payload.ACTIVATION if part.kind is Kind.F else Payload.GRADIENT
                self.ready[payload, part.key, part.microbatch] = start + duration
        self._note(rank, action, start, start + duration)
        return True

    def _note(self, rank: int, action: Action, start: float, end: float) -> None:
        block = Block(rank, str(action.kind), action.stage, action.microbatch, start, end, label_of(action))
        self.blocks.append(block)


def simulate(schedule: Schedule, durations: Durations | Sequence[Durations] | None = None) -> Simulation:
    """Plays a schedule, with or without SEND and RECV.

    Args:
        schedule: what to play.
        durations: durations of every stage, or of each stage by itself; F = I = W = 1 by default. To compare schedules
            at equal work pass `costs.of_stages(schedule, ...)`.

    Raises:
        ScheduleError: the lists wait for each other in a circle.
        UsageError: a number of durations that is not the number of stages.
    """
    if durations is None or isinstance(durations, Durations):
        durations = [durations or Durations()] * schedule.num_stages
    if len(durations) != schedule.num_stages:
        raise UsageError(
            f"durations of {len(durations)} stages",
            allowed=f"{schedule.num_stages}, the stages of the {schedule.name} schedule",
            fix="pass one a stage, or one for all",
        )
    clock = _Clock(schedule, durations)
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
