"""The type of every schedule, and the passes over it: change, lower, read, write.

A schedule is one list of actions a rank and the place of each stage. The builders (`bidirectional`, `zero_bubble`,
`interleaving`) give computations alone; `with_communication` adds SEND and RECV.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Action, Kind, Payload, StageKey, pair, parse, recv, send, with_direction


@dataclass(frozen=True, slots=True)
class Schedule:
    """One list of actions a rank, and where each stage lives.

    Attributes:
        name: name of the builder, for messages.
        num_ranks: pipeline ranks P.
        num_stages: stages of one copy of the model.
        num_microbatches: microbatches a step, all directions together.
        placement: `placement[direction][stage]` is the rank that holds the stage.
        ranks: `ranks[rank]` is the list of actions of a rank, in order.
        forward_only: no backward at all (inference).
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    placement: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    @property
    def num_directions(self) -> int:
        """Flows of data: 2 for dualpipe, else 1."""
        return len(self.placement)

    def rank_of(self, key: StageKey) -> int:
        """The rank that holds a stage in a direction."""
        return self.placement[key.direction][key.stage]

    def microbatches_of(self, direction: int) -> range:
        """The microbatches of one direction: equal consecutive shares."""
        share = self.num_microbatches // self.num_directions
        return range(direction * share, (direction + 1) * share)

    def stages_of(self, rank: int) -> tuple[StageKey, ...]:
        """The stages a rank holds, ordered by direction, then stage."""
        return tuple(
            StageKey(stage, direction)
            for direction, ranks in enumerate(self.placement)
            for stage, owner in enumerate(ranks)
            if owner == rank
        )

    def source(self, action: Action) -> StageKey | None:
        """The stage that produces what a RECV, F, B or I needs; None at the model's input and at its loss."""
        step = -1 if action.payload is Payload.ACTIVATION or action.kind is Kind.F else 1
        stage = action.stage + step
        return StageKey(stage, action.direction) if 0 <= stage < self.num_stages else None

    def target(self, action: Action) -> StageKey | None:
        """The stage that consumes what a SEND, F, B or I produces; None at the loss and at the model's input."""
        step = 1 if action.payload is Payload.ACTIVATION or action.kind is Kind.F else -1
        stage = action.stage + step
        return StageKey(stage, action.direction) if 0 <= stage < self.num_stages else None

    def peer(self, action: Action) -> int:
        """The other rank of a SEND or RECV."""
        key = self.target(action) if action.kind is Kind.SEND else self.source(action)
        if action.payload is None or key is None:
            raise UsageError(f"action {action}", allowed="SEND or RECV between stages", fix="ask for another action")
        return self.rank_of(key)

    def to_csv(self) -> str:
        """One line a rank, actions in torch's notation separated by commas."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.ranks)


def check_positive(name: str, *values: int, what: str = "") -> None:
    """Refuses what is no whole number from 1; `what` names the value, the ranks and the microbatches by default."""
    for label, value in zip((what,) if what else ("ranks", "microbatches"), values, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(
                f"{name} with {label} {value!r}", allowed="a whole number from 1", fix=f"pass another number of {label}"
            )


def _map(schedule: Schedule, change: Callable[[Action], Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(new for action in actions for new in change(action)) for actions in schedule.ranks)


def merge_backward(schedule: Schedule) -> Schedule:
    """The schedule without split backwards: I becomes B and W disappears. Needs no weight-gradient store."""

    def change(action: Action) -> Sequence[Action]:
        if action.kind is Kind.W:
            return ()
        return (replace(action, kind=Kind.B),) if action.kind is Kind.I else (action,)

    return replace(schedule, ranks=_map(schedule, change))


def merge_cooldown(schedule: Schedule) -> Schedule:
    """The schedule with full backwards in the cool-down: an I whose W stands behind its rank's last F becomes a B.

    No weight gradient is kept for the end of the step, where it would fill what is then idle. Some V schedules run this
    way by default.
    """
    ranks = []
    for actions in schedule.ranks:
        last = max((i for i, action in enumerate(actions) if action.forward is not None), default=-1)
        late = {(a.key, a.microbatch) for a in actions[last + 1 :] if a.kind is Kind.W}
        kept = (a for a in actions if a.kind is not Kind.W or (a.key, a.microbatch) not in late)
        ranks.append(
            tuple(replace(a, kind=Kind.B) if a.kind is Kind.I and (a.key, a.microbatch) in late else a for a in kept)
        )
    return replace(schedule, ranks=tuple(ranks))


def keep_microbatches(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule with its first `microbatches` alone: the actions of all others are dropped, a pair shrinks.

    What is left keeps its order, so every dependency still holds. It runs a schedule below the number of microbatches
    that fills it. Only for one direction.
    """
    if schedule.num_directions != 1:
        raise UsageError(f"{schedule.name} schedule", allowed="a schedule with one direction", fix="use another one")

    def change(action: Action) -> Sequence[Action]:
        whole = action.parts or (action,)
        kept = tuple(part for part in whole if part.microbatch < microbatches)
        return (action,) if len(kept) == len(whole) else kept

    return replace(schedule, num_microbatches=microbatches, ranks=_map(schedule, change))


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule for inference: the forwards alone, in the same order."""

    def change(action: Action) -> Sequence[Action]:
        return () if action.forward is None else (action.forward,)

    return replace(schedule, ranks=_map(schedule, change), forward_only=True)


def with_communication(schedule: Schedule) -> Schedule:
    """Inserts every RECV right before the computation that needs it and every SEND right after its producer.

    Late receives keep the fewest buffers and, with one queue for each payload and direction, never block one another.
    Where two neighbouring stages share a rank (the turn of the V) nothing is inserted.
    """

    def remote(action: Action, key: StageKey | None) -> bool:
        return key is not None and schedule.rank_of(key) != schedule.rank_of(action.key)

    def change(action: Action) -> Sequence[Action]:
        moves = [(part, Payload(part.kind if part.kind is Kind.F else "B")) for part in action.compute]
        moves = [(part, payload) for part, payload in moves if part.kind is not Kind.W]
        before = [recv(payload, p.key, p.microbatch) for p, payload in moves if remote(p, schedule.source(p))]
        after = [send(payload, p.key, p.microbatch) for p, payload in moves if remote(p, schedule.target(p))]
        return *before, action, *after

    if any(action.payload is not None for actions in schedule.ranks for action in actions):
        raise UsageError(
            f"{schedule.name} schedule with SEND and RECV", allowed="a schedule without them", fix="lower it only once"
        )
    return replace(schedule, ranks=_map(schedule, change))


def from_csv(text: str, like: Schedule) -> Schedule:
    """Reads lists written by `to_csv` (or by torch) into the shape and placement of `like`.

    The notation holds no direction: an action belongs to the direction in which its rank holds its stage.

    Raises:
        UsageError: a wrong number of lines, a cell that is no action, or a stage its rank does not hold.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) != like.num_ranks:
        raise UsageError(f"{len(lines)} lines", allowed=f"{like.num_ranks}, one a rank", fix="pass the whole schedule")
    ranks = []
    for rank, line in enumerate(lines):
        cells = [cell for cell in line.split(",") if cell.strip()]
        ranks.append(tuple(_placed(parse(cell), rank, like) for cell in cells))
    return replace(like, ranks=tuple(ranks))


def read_csv(text: str, name: str = "CSV") -> Schedule:
    """Reads lists whose shape is not known: the sizes and the place of each stage are those that the cells name.

    Stages that all stand on two mirrored ranks are taken for the two directions of `dualpipe`. A stage that is on
    several ranks otherwise belongs to the one with most of its cells.

    Raises:
        UsageError: no lines, or a cell that is no action.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    rows = [[parse(cell) for cell in line.split(",") if cell.strip()] for line in lines]
    counts: Counter[tuple[int, int]] = Counter()
    parts = [(rank, part) for rank, row in enumerate(rows) for action in row for part in action.compute]
    if not parts:
        raise UsageError(
            "a file without any computation", allowed="one line of actions a rank", fix="pass another file"
        )
    counts.update((part.stage, rank) for rank, part in parts)
    ranks, stages = len(rows), max(stage for stage, _ in counts) + 1
    two_way = stages == ranks > 1 and all(counts[s, s] and counts[s, ranks - 1 - s] for s in range(stages))
    owners = tuple(max(range(ranks), key=lambda rank, s=stage: counts[s, rank]) for stage in range(stages))  # type: ignore[misc]
    shape = Schedule(
        name,
        ranks,
        stages,
        max(part.microbatch for _, part in parts) + 1,
        (tuple(range(ranks)), tuple(reversed(range(ranks)))) if two_way else (owners,),
        ((),) * ranks,
        forward_only=all(part.kind is Kind.F for _, part in parts),
    )
    return from_csv(text, like=shape)


def _placed(action: Action, rank: int, like: Schedule) -> Action:
    """The parsed action with the direction in which `rank` holds its stage."""
    if action.kind is Kind.FB:
        forward, backward = (_placed(part, rank, like) for part in action.parts)
        return pair(forward, backward)
    for key in like.stages_of(rank):
        if key.stage == action.stage:
            return with_direction(action, key.direction)
    held = ", ".join(str(key.stage) for key in like.stages_of(rank))
    raise UsageError(f"action {action} on rank {rank}", allowed=f"stages {held} there", fix="correct this cell")
