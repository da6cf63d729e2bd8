"""Proves that a schedule is complete, ordered and free of deadlock, or names the cell that breaks it.

Three passes: every stage does all its work for every microbatch once; each rank's own order makes sense (F before B,
I before W, receive before use); and the ranks together come to an end when messages match as they do under NCCL:
each communicator of a rank is a queue, an operation leaves it only at its head, and it is done when it meets its
counterpart at the head of the peer's queue. A receive blocks its rank, a send does not. A message must also be the one
the receiver waits for, since nothing but the order identifies it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from comm_core.runtime.errors import MTMoEError
from dualpipe.actions import Action, Kind, Payload, StageKey
from dualpipe.schedule import Schedule, with_communication

Channel = Callable[[Payload, int, int], Hashable]
"""Names the communicator of a message, given its payload, source rank and target rank."""


class ScheduleError(MTMoEError, ValueError):
    """A schedule that can not run.

    Attributes:
        rank: whose list is at fault, or None where the number of lists is wrong.
        index: position in that list, or None.
    """

    def __init__(self, problem: str, *, rank: int | None = None, index: int | None = None) -> None:
        super().__init__(problem)
        self.rank, self.index = rank, index


def four_channels(payload: Payload, source: int, target: int) -> Hashable:
    """The communicators of `p2p.PeerToPeer`: payload x direction, each shared by all ranks of the pipeline."""
    return payload, source < target


def validate(schedule: Schedule, channel: Channel = four_channels, *, max_live: int | None = None) -> None:
    """Checks a schedule, with or without SEND and RECV.

    Args:
        schedule: what to check; without SEND and RECV it is lowered by `with_communication` first.
        channel: which communicator a message uses; the default is what the executor does.
        max_live: most stage activations a rank may hold at once, from F until the end of B or I.

    Raises:
        ScheduleError: names the rank, the position and the action at fault.
    """
    if len(schedule.ranks) != schedule.num_ranks:
        raise ScheduleError(f"{len(schedule.ranks)} lists for {schedule.num_ranks} ranks; one list a rank is needed")
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            _check_cell(schedule, rank, index, action)
    _check_work(schedule)
    if max_live is not None:
        _check_live(schedule, max_live)
    if any(action.payload is not None for actions in schedule.ranks for action in actions):
        _check_messages(schedule, channel)
        return
    lowered = with_communication(schedule)
    try:
        _check_messages(lowered, channel)
    except ScheduleError as error:
        assert error.rank is not None and error.index is not None
        index = _given_index(lowered.ranks[error.rank], error.index)
        problem = str(error).replace(f"position {error.index}", f"position {index}", 1)
        raise ScheduleError(problem, rank=error.rank, index=index) from None


def _check_live(schedule: Schedule, most: int) -> None:
    for rank, actions in enumerate(schedule.ranks):
        live = 0
        for index, action in enumerate(actions):
            live += action.forward is not None
            if live > most:
                raise ScheduleError(
                    f"{_cell(rank, index, action)}: {live} live activations, at most {most} are allowed",
                    rank=rank,
                    index=index,
                )
            live -= action.backward is not None


def _check_messages(lowered: Schedule, channel: Channel) -> None:
    for rank in range(lowered.num_ranks):
        _check_order(lowered, rank)
    _Rendezvous(lowered, channel).run()


def _given_index(lowered: tuple[Action, ...], index: int) -> int:
    """Position in the list before lowering; for SEND and RECV that of the computation they belong to."""
    before = sum(action.payload is None for action in lowered[:index])
    return before - 1 if lowered[index].kind is Kind.SEND else before


def _cell(rank: int, index: int, action: Action) -> str:
    return f"rank {rank}, position {index}, {action}"


def _check_cell(schedule: Schedule, rank: int, index: int, action: Action) -> None:
    """The parts of an action make sense, exist, and belong to this rank."""
    where = _cell(rank, index, action)
    if action.kind is Kind.FB and [part.kind for part in action.parts] != [Kind.F, Kind.B]:
        raise ScheduleError(f"{where}: a pair holds one F and one B", rank=rank, index=index)
    if (action.kind in (Kind.SEND, Kind.RECV)) != (action.payload is not None):
        raise ScheduleError(f"{where}: SEND and RECV carry a payload, nothing else does", rank=rank, index=index)
    for part in action.parts or (action,):
        inside = 0 <= part.direction < schedule.num_directions and 0 <= part.stage < schedule.num_stages
        if not inside or part.microbatch not in schedule.microbatches_of(part.direction):
            raise ScheduleError(f"{where}: no such stage, direction or microbatch", rank=rank, index=index)
        if schedule.rank_of(part.key) != rank:
            owner = schedule.rank_of(part.key)
            raise ScheduleError(f"{where}: stage {part.stage} lives on rank {owner}", rank=rank, index=index)
    if action.payload is not None:
        other = schedule.target(action) if action.kind is Kind.SEND else schedule.source(action)
        if other is None or schedule.rank_of(other) == rank:
            raise ScheduleError(f"{where}: there is no other rank to talk to", rank=rank, index=index)


def _check_work(schedule: Schedule) -> None:
    """Every stage has exactly one F, one B or I, and one W where it has an I, for every microbatch."""
    seen: Counter[tuple[Kind, StageKey, int]] = Counter()
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            for part in action.compute:
                seen[part.kind, part.key, part.microbatch] += 1
                doubled = seen[part.kind, part.key, part.microbatch] > 1
                both = seen[Kind.B, part.key, part.microbatch] and seen[Kind.I, part.key, part.microbatch]
                if doubled or both:
                    raise ScheduleError(f"{_cell(rank, index, action)}: done twice", rank=rank, index=index)
    for direction in range(schedule.num_directions):
        for stage in range(schedule.num_stages):
            key = StageKey(stage, direction)
            for microbatch in schedule.microbatches_of(direction):
                _check_complete(schedule, seen, key, microbatch)


def _check_complete(
    schedule: Schedule, seen: Counter[tuple[Kind, StageKey, int]], key: StageKey, microbatch: int
) -> None:
    has = {kind for kind in (Kind.F, Kind.B, Kind.I, Kind.W) if seen[kind, key, microbatch]}
    allowed = [{Kind.F}] if schedule.forward_only else [{Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}]
    if has not in allowed:
        rank = schedule.rank_of(key)
        wanted = "F alone" if schedule.forward_only else "F with B, or F with I and W"
        raise ScheduleError(
            f"rank {rank}, stage {key.stage}, microbatch {microbatch}: work is {', '.join(sorted(has)) or 'missing'}; "
            f"needed is {wanted}",
            rank=rank,
        )


def _check_order(lowered: Schedule, rank: int) -> None:
    """Each action finds what it needs earlier in the list of its own rank."""
    done: set[tuple[str, StageKey, int]] = set()
    for index, action in enumerate(lowered.ranks[rank]):
        for part in (action,) if action.payload is not None else action.compute:
            for need, reason in _needs(lowered, rank, part):
                if need not in done:
                    raise ScheduleError(f"{_cell(rank, index, action)}: {reason}", rank=rank, index=index)
        for part in (action,) if action.payload is not None else action.compute:
            done.add((_what(part), part.key, part.microbatch))


def _what(action: Action) -> str:
    """Name of an event in the books of `_check_order`; B and I both finish the backward for inputs."""
    if action.payload is not None:
        return f"{action.kind}_{action.payload}"
    return "dX" if action.kind in (Kind.B, Kind.I) else str(action.kind)


def _needs(lowered: Schedule, rank: int, action: Action) -> list[tuple[tuple[str, StageKey, int], str]]:
    """What must have happened on this rank before `action`, each with the complaint if it has not."""
    own = action.key, action.microbatch
    if action.kind is Kind.RECV:
        return []
    if action.kind is Kind.SEND:
        return [(("F" if action.payload is Payload.ACTIVATION else "dX", *own), "sent before it is computed")]
    if action.kind is Kind.W:
        return [(("dX", *own), "W before its I")]
    source, is_forward = lowered.source(action), action.kind is Kind.F
    needs = [] if is_forward else [(("F", *own), "backward before its F")]
    complaint = "F before its input" if is_forward else "backward before its gradient"
    if source is not None and lowered.rank_of(source) == rank:
        needs.append((("F" if is_forward else "dX", source, action.microbatch), complaint + " (local turn)"))
    elif source is not None:
        needs.append((("RECV_F" if is_forward else "RECV_B", *own), complaint + " arrives"))
    return needs


@dataclass(slots=True)
class _Posted:
    """A SEND or RECV that its rank has posted. `message` is equal on both ends of the right match."""

    rank: int
    index: int
    action: Action
    peer: int
    message: tuple[Payload | None, StageKey, int]
    done: bool = False


@dataclass(slots=True)
class _Rank:
    """Progress of one rank: next position, and the receive it waits in."""

    position: int = 0
    waits_for: _Posted | None = None
    queues: dict[Hashable, deque[_Posted]] = field(default_factory=dict)


class _Rendezvous:
    """Plays a lowered schedule through in-order queues, one a rank and communicator."""

    def __init__(self, lowered: Schedule, channel: Channel) -> None:
        self._lowered, self._channel = lowered, channel
        self._ranks = [_Rank() for _ in range(lowered.num_ranks)]

    def run(self) -> None:
        todo = deque(range(self._lowered.num_ranks))
        while todo:
            rank = todo.popleft()
            self._advance(rank)
            for queue in list(self._ranks[rank].queues):
                todo.extend(self._match(rank, queue))
        for rank, state in enumerate(self._ranks):
            stuck = state.waits_for or next((queue[0] for queue in state.queues.values() if queue), None)
            if stuck is not None:
                raise ScheduleError(
                    f"{_cell(rank, stuck.index, stuck.action)}: deadlock, its counterpart on rank {stuck.peer} "
                    "never comes to the head of its queue",
                    rank=rank,
                    index=stuck.index,
                )

    def _advance(self, rank: int) -> None:
        """Posts actions until a receive blocks or the list ends."""
        state, actions = self._ranks[rank], self._lowered.ranks[rank]
        while state.position < len(actions):
            if state.waits_for is not None:
                if not state.waits_for.done:
                    return
                state.waits_for = None
            action = actions[state.position]
            if action.payload is not None:
                self._post(rank, state, action)
            state.position += 1
        if state.waits_for is not None and state.waits_for.done:
            state.waits_for = None

    def _post(self, rank: int, state: _Rank, action: Action) -> None:
        peer = self._lowered.peer(action)
        assert action.payload is not None
        if action.kind is Kind.SEND:
            receiver, ends = self._lowered.target(action), (rank, peer)
        else:
            receiver, ends = action.key, (peer, rank)
        assert receiver is not None
        posted = _Posted(rank, state.position, action, peer, (action.payload, receiver, action.microbatch))
        state.queues.setdefault(self._channel(action.payload, *ends), deque()).append(posted)
        if action.kind is Kind.RECV:
            state.waits_for = posted

    def _match(self, rank: int, name: Hashable) -> list[int]:
        """Completes operations at the head of one queue; returns the ranks that may go on."""
        moved: list[int] = []
        mine = self._ranks[rank].queues[name]
        while mine:
            head = mine[0]
            theirs = self._ranks[head.peer].queues.get(name)
            if not theirs or theirs[0].peer != rank or theirs[0].action.kind is head.action.kind:
                return moved
            other = theirs[0]
            if other.message != head.message:
                receiver = head if head.action.kind is Kind.RECV else other
                sender = other if receiver is head else head
                raise ScheduleError(
                    f"{_cell(receiver.rank, receiver.index, receiver.action)}: mismatch, the message in turn is "
                    f"{sender.action} of rank {sender.rank}",
                    rank=receiver.rank,
                    index=receiver.index,
                )
            head.done = other.done = True
            mine.popleft()
            theirs.popleft()
            moved += [rank, head.peer]
        return moved
