"""Receives move in front of computations without a change in any communicator's queue, and nothing gets stuck."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

import pytest

from dualpipe.actions import Action, Kind, Payload, parse, recv
from dualpipe.lists import Schedule
from dualpipe.schedule import SCHEDULES, build, with_communication
from dualpipe.steps import prepare
from dualpipe.validate import four_channels

SIZES = [(2, 7), (3, 6), (4, 8), (4, 13)]
CASES = [
    (name, ranks, count)
    for name in sorted(SCHEDULES)
    for ranks, count in SIZES
    if name != "dualpipe" or (ranks % 2 == 0 and count % 2 == 0)
]


def posted(schedule: Schedule, rank: int) -> list[Action]:
    """What a rank posts and computes, in order; a computation waits for its receives."""
    order: list[Action] = []
    for step in prepare(schedule, rank).steps:
        order += [*step.receives, *step.early, *([step.action] if step.action else []), *step.sends]
    return order


def queues(schedule: Schedule, rank: int, order: Any) -> dict[Any, list[str]]:
    """The messages of each communicator, in order."""
    found: dict[Any, list[str]] = defaultdict(list)
    for action in order:
        if action.payload is not None:
            found[channel_of(schedule, rank, action)].append(str(action))
    return dict(found)


def channel_of(schedule: Schedule, rank: int, action: Action) -> Any:
    ends = (rank, schedule.peer(action)) if action.kind is Kind.SEND else (schedule.peer(action), rank)
    assert action.payload is not None
    return four_channels(action.payload, *ends)


@pytest.mark.parametrize(("name", "ranks", "count"), CASES)
def test_queues_keep_their_order_and_the_schedule_ends(name, ranks, count):
    schedule = build(name, ranks, count)
    lowered = with_communication(schedule)
    orders = [posted(schedule, rank) for rank in range(ranks)]
    for rank, order in enumerate(orders):
        assert sorted(map(str, order)) == sorted(map(str, lowered.ranks[rank]))
        assert queues(schedule, rank, order) == queues(schedule, rank, lowered.ranks[rank])
        assert [a for a in order if a.payload is None] == list(schedule.ranks[rank])
    play(schedule, orders)


def play(schedule: Schedule, orders: list[list[Action]]) -> None:
    """Nothing blocks but a computation whose receives are not done; messages meet at the heads of two queues."""
    todo = [deque(order) for order in orders]
    heads: list[dict[Any, deque[Action]]] = [defaultdict(deque) for _ in orders]
    done: set[tuple[int, Action]] = set()
    moved = True
    while moved:
        moved = False
        for rank, rest in enumerate(todo):
            while rest and all((rank, need) in done for need in needs(schedule, rank, rest[0])):
                action, moved = rest.popleft(), True
                if action.payload is not None:
                    heads[rank][channel_of(schedule, rank, action)].append(action)
        for rank, channels in enumerate(heads):
            for channel, queue in channels.items():
                if queue and queue[0].kind is Kind.SEND:
                    peer = schedule.peer(queue[0])
                    theirs, target = heads[peer][channel], schedule.target(queue[0])
                    assert target is not None and queue[0].payload is not None
                    if theirs and theirs[0].kind is Kind.RECV and schedule.peer(theirs[0]) == rank:
                        assert theirs[0] == recv(queue[0].payload, target, queue[0].microbatch)
                        done.add((peer, theirs.popleft()))
                        queue.popleft()
                        moved = True
    assert not any(todo) and not any(queue for channels in heads for queue in channels.values())


def needs(schedule: Schedule, rank: int, action: Action) -> list[Action]:
    """The receives a computation waits for."""
    found = []
    for part in action.compute:
        source = None if part.kind is Kind.W else schedule.source(part)
        if source is not None and schedule.rank_of(source) != rank:
            payload = Payload.ACTIVATION if part.kind is Kind.F else Payload.GRADIENT
            found.append(recv(payload, part.key, part.microbatch))
    return found


@pytest.mark.parametrize("rank", range(4))
def test_every_receive_of_a_pair_is_posted_before_the_pair_in_front(rank):
    steps = prepare(build("dualpipev", 4, 16), rank).steps
    pairs = [
        (before, step)
        for before, step in itertools.pairwise(steps)
        if all(one.action is not None and one.action.kind is Kind.FB for one in (before, step))
    ]
    assert len(pairs) >= 8
    schedule = build("dualpipev", 4, 16)
    for before, step in pairs:
        assert step.action is not None and not step.receives
        assert list(before.early) == needs(schedule, rank, step.action)


def test_a_receive_stays_behind_the_send_of_its_communicator():
    """The second forward of a warm-up in the middle: its input is asked for when the first output is on its way."""
    first, second = prepare(build("1f1b", 4, 8), 1).steps[:2]
    assert str(first.action) == "1F0" and [str(action) for action in first.sends] == ["1SEND_F0"]
    assert first.early == () and [str(action) for action in second.receives] == ["1RECV_F1"]


def test_lists_that_hold_messages_keep_their_places():
    """A list with SEND and RECV may ask for an input long before it needs it, and send late."""
    lowered = with_communication(build("1f1b", 2, 3))
    first, *rest = lowered.ranks[1]
    second = next(action for action in rest if str(action) == "1RECV_F1")
    rest.remove(second)
    last = next(action for action in rest if str(action) == "1SEND_B0")
    rest.remove(last)
    rest.insert(rest.index(next(action for action in rest if str(action) == "1F1")) + 1, last)
    steps = prepare(replace(lowered, ranks=(lowered.ranks[0], (first, second, *rest))), 1).steps
    assert list(steps[0].receives) == [first, second]
    posted_later = [str(action) for step in steps for action in (*step.receives[2:], *step.early)]
    assert posted_later == ["1RECV_F2"]
    assert next([str(action) for action in step.sends] for step in steps if step.sends) == ["1SEND_B0"]
    assert next(step for step in steps if step.sends).action == parse("1F1")
