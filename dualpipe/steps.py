"""A schedule prepared for one rank: which receives are posted before which computation, and what is sent after it.

A receive that is posted right before the computation that needs it is never hidden: the message starts when its
receiver already waits. So each receive moves in front of the computation before that one, as far as communicators
allow. They are in-order queues (`validate`), and nothing may be overtaken in them:

- Within one communicator (payload x direction) the order of operations stays as the lowered list has it, on every
  rank. A receive thus stays behind a SEND of the communicator, and sends never wait for a receive they did not wait
  for before. Since each operation is posted no later than in the list that `validate` has proven free of deadlock, and
  nothing changes its place in a queue, the steps are free of it, too.
- One receive a communicator moves at a time, by one computation: one more buffer for each is all that it costs.

In the steady state of DualPipe(V) this puts the receives of a pair in front of the pair before, and of 1F1B those of a
forward in front of the backward before. In the warm-up, where forwards of one stage follow each other, each receive is
behind the SEND of the forward before and stays where it was.

Sends go out as soon as their tensor is there: that of a B when dX is, before dW; that of the F of a pair before its B
runs (when the programs run pairs themselves: when they say so, or at the end). Nobody waits for a send.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Action, Kind, StageKey
from dualpipe.lists import Schedule, with_communication
from dualpipe.validate import four_channels, validate


class Step(NamedTuple):
    """One computation and the messages around it.

    Attributes:
        receives: RECVs to post before anything else.
        action: what to compute; None where only messages are left.
        early: RECVs of later steps, to post when the inputs of this one are there, before it computes.
        sends: SENDs of its results, in their order.
    """

    receives: tuple[Action, ...]
    action: Action | None
    early: tuple[Action, ...]
    sends: tuple[Action, ...]


class RankPlan(NamedTuple):
    """What one rank does.

    Attributes:
        schedule: the schedule, without or with SEND and RECV, as it was given.
        lowered: every rank's list with SEND and RECV.
        steps: the steps of this rank.
        last: the last microbatch of each of its stages.
        goes_round: messages go between ranks that are no neighbours.
    """

    schedule: Schedule
    lowered: Schedule
    steps: tuple[Step, ...]
    last: dict[StageKey, int]
    goes_round: bool


def prepare(schedule: Schedule, rank: int) -> RankPlan:
    """Validates and lowers a schedule and groups the list of one rank.

    Raises:
        ScheduleError: the schedule can not run. UsageError: its W are not in the order of its I.
    """
    validate(schedule)
    communicates = any(action.payload is not None for actions in schedule.ranks for action in actions)
    lowered = schedule if communicates else with_communication(schedule)
    goes_round = any(abs(here - there) > 1 for ranks in schedule.placement for here, there in pairwise(ranks))
    last = _last_microbatches(schedule, rank)
    return RankPlan(schedule, lowered, _post_early(_grouped(lowered, rank), lowered, rank), last, goes_round)


def _last_microbatches(schedule: Schedule, rank: int) -> dict[StageKey, int]:
    last_input: dict[StageKey, int] = {}
    last: dict[StageKey, int] = {}
    for part in (part for action in schedule.ranks[rank] for part in action.compute):
        if part.kind in (Kind.B, Kind.I):
            last_input[part.key] = part.microbatch
        if part.kind in (Kind.B, Kind.W):
            last[part.key] = part.microbatch
    if last != last_input:
        # Some gradients are ready at I and some at W: both must be last for the same microbatch.
        raise UsageError(
            f"{schedule.name} schedule: the last W of a stage on rank {rank} is not of the microbatch of its last I",
            allowed="the W of a stage in the order of its I",
            fix="reorder the W",
        )
    return last


def _grouped(lowered: Schedule, rank: int) -> list[Step]:
    """Each computation with the RECVs before it and the SENDs after it."""
    steps: list[Step] = []
    receives: list[Action] = []
    for action in lowered.ranks[rank]:
        if action.kind is Kind.RECV:
            receives.append(action)
        elif action.kind is Kind.SEND and steps and not receives:
            steps[-1] = steps[-1]._replace(sends=(*steps[-1].sends, action))
        else:
            sends = (action,) if action.kind is Kind.SEND else ()
            steps.append(Step(tuple(receives), None if sends else action, (), sends))
            receives = []
    return [*steps, Step(tuple(receives), None, (), ())] if receives else steps


def _post_early(steps: list[Step], lowered: Schedule, rank: int) -> tuple[Step, ...]:
    """Moves receives in front of the computation before, by the rules of the module docstring."""

    def channel(action: Action) -> object:
        ends = (rank, lowered.peer(action)) if action.kind is Kind.SEND else (lowered.peer(action), rank)
        assert action.payload is not None
        return four_channels(action.payload, *ends)

    for index in range(1, len(steps)):
        before, step = steps[index - 1], steps[index]
        if before.action is None:
            continue
        taken = {channel(action) for action in before.sends}
        early: list[Action] = []
        stay: list[Action] = []
        for action in step.receives:
            (stay if channel(action) in taken else early).append(action)
            taken.add(channel(action))
        steps[index - 1] = before._replace(early=tuple(early))
        steps[index] = step._replace(receives=tuple(stay))
    return tuple(steps)
