"""Pipeline schedules as pure functions: from a number of ranks and microbatches to one list of actions a rank.

`dualpipe`   two copies of the model run through the ranks in opposite directions; stage s lives on rank s for
             direction 0 and on rank P-1-s for direction 1. Each direction takes half of the microbatches.
`dualpipev`  the same idea folded to a V: one copy of the model in 2P stages, rank r holds stages r and 2P-1-r. The last
             rank holds the turn, the first rank both the input and the loss.
`1f1b`       one stage a rank, one forward, one backward.

DualPipe(V) interleaves so that a forward of one stage and a backward of the other stand next to each other (kind FB):
one computes while the other communicates. The price is a warm-up that keeps 2P+1 stage activations alive (V).

Both DualPipe schedules share one program of eight steps. With h ranks on one leg (V: P, two-way: P/2), q the distance
of a rank from the outer end, n microbatches a direction, and "0" the stage nearer to the input of its own flow:

    1  F0                                  2(h-q-1) times
    2  F0 F1                               q+1
    3  I1 W F1      dX first, so that the other ranks start early      h-q-1
    4  F0+B1  F1+B0 overlapped pairs; the innermost rank runs its first F0, B1 apart, as its B1 needs that F0  n-2h+q+1
    5  B1  F1+B0                           h-q-1
    6  B1 B0        from half-way on only dX, dW waits                 q+1
    7  W I0         oldest dW first        h-q-1
    8  W                                   q+1

Source: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.2.1, and the published DualPipe and DualPipeV
schedules.
"""

from __future__ import annotations

import functools
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


class _Program:
    """Collects the actions of one rank; counts microbatches and keeps the queue of weights still to do."""

    def __init__(self, keys: tuple[StageKey, StageKey], first_microbatch: tuple[int, int]) -> None:
        self.keys = keys
        self.next_forward = list(first_microbatch)
        self.next_backward = list(first_microbatch)
        self.queued: list[Action] = []
        self.actions: list[Action] = []

    def _take(self, kind: Kind, phase: int, counter: list[int]) -> Action:
        counter[phase] += 1
        key = self.keys[phase]
        return Action(kind, key.stage, key.direction, counter[phase] - 1)

    def forward(self, phase: int) -> None:
        self.actions.append(self._take(Kind.F, phase, self.next_forward))

    def backward(self, phase: int, *, split: bool = False) -> None:
        action = self._take(Kind.I if split else Kind.B, phase, self.next_backward)
        self.actions.append(action)
        if split:
            self.queued.append(replace(action, kind=Kind.W))

    def weights(self) -> None:
        self.actions.append(self.queued.pop(0))

    def pair(self, forward: int, backward: int) -> None:
        first = self._take(Kind.F, forward, self.next_forward)
        self.actions.append(pair(first, self._take(Kind.B, backward, self.next_backward)))


def _eight_steps(program: _Program, *, leg: int, outer: int, share: int) -> tuple[Action, ...]:
    """The program of the module docstring for one rank: leg = h, outer = q, share = n."""
    inner, own = leg - outer - 1, outer + 1
    for _ in range(2 * inner):  # 1
        program.forward(0)
    for _ in range(own):  # 2
        program.forward(0)
        program.forward(1)
    for _ in range(inner):  # 3
        program.backward(1, split=True)
        program.weights()
        program.forward(1)
    for i in range(share - 2 * leg + own):  # 4
        if i == 0 and inner == 0:
            program.forward(0)
            program.backward(1)
        else:
            program.pair(0, 1)
        program.pair(1, 0)
    for _ in range(inner):  # 5
        program.backward(1)
        program.pair(1, 0)
    for i in range(own):  # 6
        half = own // 2
        program.backward(1, split=i > half or (i == half and outer % 2 == 1))
        program.backward(0, split=i >= half)
    for _ in range(inner):  # 7
        program.weights()
        program.backward(0, split=True)
    for _ in range(own):  # 8
        program.weights()
    return tuple(program.actions)


def _check_positive(name: str, ranks: int, microbatches: int) -> None:
    for what, value in (("ranks", ranks), ("microbatches", microbatches)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(
                f"{name} with {what} {value!r}", allowed="a whole number from 1", fix=f"pass another number of {what}"
            )


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: 2*ranks stages in a V, one direction.

    Raises:
        UsageError: fewer than 2*ranks - 1 microbatches.
    """
    _check_positive("dualpipev", ranks, microbatches)
    if microbatches < 2 * ranks - 1:
        raise UsageError(
            f"dualpipev with {ranks} ranks and {microbatches} microbatches",
            allowed=f"at least 2*ranks - 1 = {2 * ranks - 1} microbatches",
            fix="use more microbatches (a smaller microbatch size) or fewer pipeline ranks",
        )
    last = 2 * ranks - 1
    lists = [
        _eight_steps(
            _Program((StageKey(rank), StageKey(last - rank)), (0, 0)), leg=ranks, outer=rank, share=microbatches
        )
        for rank in range(ranks)
    ]
    placement = tuple(min(stage, last - stage) for stage in range(2 * ranks))
    return Schedule("dualpipev", ranks, 2 * ranks, microbatches, (placement,), tuple(lists))


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """DualPipe: `ranks` stages, each on two ranks, half of the microbatches in each direction.

    Raises:
        UsageError: an odd number of ranks or microbatches, or fewer than 2*ranks microbatches.
    """
    _check_positive("dualpipe", ranks, microbatches)
    for what, value in (("ranks", ranks), ("microbatches", microbatches)):
        if value % 2:
            raise UsageError(
                f"dualpipe with {value} {what}",
                allowed=f"an even number of {what}",
                fix=f"use {value + 1} {what}, or the dualpipev schedule",
            )
    if microbatches < 2 * ranks:
        raise UsageError(
            f"dualpipe with {ranks} ranks and {microbatches} microbatches",
            allowed=f"at least 2*ranks = {2 * ranks} microbatches",
            fix="use more microbatches (a smaller microbatch size) or fewer pipeline ranks",
        )
    share, lists = microbatches // 2, []
    for rank in range(ranks):
        mirrored = rank >= ranks // 2
        # In the second half the flow that enters nearby is direction 1, so the program is the mirror image.
        near = 1 if mirrored else 0
        outer = min(rank, ranks - 1 - rank)
        keys = (StageKey(outer, near), StageKey(ranks - 1 - outer, 1 - near))
        program = _Program(keys, (near * share, (1 - near) * share))
        lists.append(_eight_steps(program, leg=ranks // 2, outer=outer, share=share))
    placement = (tuple(range(ranks)), tuple(reversed(range(ranks))))
    return Schedule("dualpipe", ranks, ranks, microbatches, placement, tuple(lists))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B: rank r runs min(P-r-1, M) forwards ahead, then one forward and one backward in turn."""
    _check_positive("1f1b", ranks, microbatches)
    lists = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, microbatches)
        forward = [Action(Kind.F, rank, 0, i) for i in range(microbatches)]
        backward = [Action(Kind.B, rank, 0, i) for i in range(microbatches)]
        steady = [action for both in zip(forward[ahead:], backward, strict=False) for action in both]
        lists.append((*forward[:ahead], *steady, *backward[microbatches - ahead :]))
    return Schedule("1f1b", ranks, ranks, microbatches, (tuple(range(ranks)),), tuple(lists))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
    "1f1b": one_f_one_b,
}


def build(name: str, ranks: int, microbatches: int, *, backward_split: bool = True) -> Schedule:
    """Builds a schedule by its name. Equal arguments give the same object, so an executor prepares it once.

    Args:
        name: a key of `SCHEDULES`.
        ranks: pipeline ranks.
        microbatches: microbatches a step, both directions together.
        backward_split: False runs every I as a full B and drops every W (see `merge_backward`).

    Raises:
        UsageError: an unknown name, or sizes the schedule can not run.
    """
    if name not in SCHEDULES:
        raise UsageError(f"schedule {name!r}", allowed=", ".join(sorted(SCHEDULES)), fix="choose one of them")
    _check_positive(name, ranks, microbatches)
    return _build(name, ranks, microbatches, backward_split)


@functools.lru_cache(maxsize=64)
def _build(name: str, ranks: int, microbatches: int, backward_split: bool) -> Schedule:
    schedule = SCHEDULES[name](ranks, microbatches)
    return schedule if backward_split else merge_backward(schedule)


def _map(schedule: Schedule, change: Callable[[Action], Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(new for action in actions for new in change(action)) for actions in schedule.ranks)


def merge_backward(schedule: Schedule) -> Schedule:
    """The schedule without split backwards: I becomes B and W disappears. Needs no weight-gradient store."""

    def change(action: Action) -> Sequence[Action]:
        if action.kind is Kind.W:
            return ()
        return (replace(action, kind=Kind.B),) if action.kind is Kind.I else (action,)

    return replace(schedule, ranks=_map(schedule, change))


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
