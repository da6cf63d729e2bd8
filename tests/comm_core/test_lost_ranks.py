"""A rank that stops in the middle of a call: every other rank says which, in time, and the others go on without it.

Two ranks survive everything. Each scenario has a third rank of its own, in a group of the three, which stops at one
step of one call in one way. The survivors must raise PeerTimeout within the timeout and two seconds, with the name of
the operation, its number and the rank; have nothing left; and work together in a group without the lost rank.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core import ElasticBuffer
from comm_core.backends import registry
from comm_core.backends.posix import PosixChannel
from comm_core.runtime.errors import PeerTimeout
from tests.comm_core import cases
from tests.comm_core.leftovers import NOTHING, left_behind
from tests.dist import run_ranks

TIMEOUT, SURVIVORS = 2.5, (0, 1)
# What each operation is called in messages, by the step at which the rank stops.
STEPS = {
    "settings": "dispatch (call 2)",
    "ids": "dispatch (ids) (call 2)",
    "dispatch": "cached dispatch (rows) (call 2)",
    "combine": "combine (rows) (call 2)",
}
# With the exit code: who sleeps is killed at the end.
WAYS = {"never arrives": -9, "exits": 7, "raises": -9, "is killed": -9}
SHORT = [("never arrives", "dispatch"), ("exits", "settings"), ("is killed", "ids"), ("is killed", "combine")]
EVERY = [(way, step) for way in WAYS for step in STEPS]


def _stop(way: str) -> None:
    if way == "exits":
        os._exit(7)
    if way == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "raises":
        raise ZeroDivisionError("planted")
    time.sleep(60)


def _plant(buffer: ElasticBuffer, step: str, stop: Callable[[], None]) -> None:
    """This rank stops at a step: before its settings are sent, or when a part of its rows is."""
    channel: Any = buffer._backend._channel
    if step == "settings":
        channel._gather = lambda where, line: stop()
        return
    word = "(ids)" if step == "ids" else "(rows)"
    if isinstance(channel, PosixChannel):
        share = channel.heap.share

        def halfway(where: str, tables: Any, fill: Callable[[Any], object], starts: Sequence[int] = ()) -> Any:
            return share(where, tables, lambda views: (fill(views), word in where and stop()), starts)

        channel.heap.share = halfway  # type: ignore[method-assign]
        return
    finish = channel.finish

    def one_of_two(where: str, *starts: Callable[[], Any]) -> None:
        if word in where:
            _ = [start() for start in starts[:-1]]
            stop()
        finish(where, *starts)

    channel.finish = one_of_two


def _scenario(rank: int, group: dist.ProcessGroup, backend: str, way: str, step: str, data: cases.Data) -> list[str]:
    """One call of which the last rank of the group stops in the middle; what is wrong with the answer of this rank."""
    me, bad = dist.get_rank(group), []
    assert data.weights is not None
    x, ids, weights = data.x[me], data.topk_idx[me], data.weights[me]
    buffer = ElasticBuffer(group, backend=backend, num_cpu_timeout_secs=TIMEOUT)
    rows, _, row_weights, handle, _ = buffer.dispatch(x, ids, weights, num_experts=6)
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: buffer.dispatch(x, topk_weights=weights, handle=handle),
        "combine": lambda: buffer.combine(rows, handle, topk_weights=row_weights),
    }
    call = calls.get(step, lambda: buffer.dispatch(x, ids, weights, num_experts=6))
    if rank not in SURVIVORS:
        _plant(buffer, step, lambda: _stop(way))
        try:
            call()
        except ZeroDivisionError:
            time.sleep(60)
    start = time.monotonic()
    try:
        call()
        bad.append("no error")
    except PeerTimeout as error:
        seconds = time.monotonic() - start
        says = f"{STEPS[step]} on rank {me} of group" in str(error) and re.search(r"rank 2\b", str(error))
        why = "ZeroDivisionError" if way == "raises" and backend == "collective" else ""
        bad += [] if says and why in str(error) and seconds < TIMEOUT + 2 else [f"{seconds:.1f} s: {error}"]
    start = time.monotonic()
    buffer.close()
    bad += [] if time.monotonic() - start < 1 else ["close() waits"]
    left = left_behind()
    return bad + ([] if left == NOTHING else [f"left behind {left}"])


def _all(rank: int, backend: str, scenarios: list[tuple[str, str]], seed: int) -> list[str]:
    groups = [dist.new_group([*SURVIVORS, victim]) for victim in range(2, 2 + len(scenarios))]
    pair = dist.new_group(list(SURVIVORS))
    data = cases.draw(cases.Case(seed, (5, 4, 6), 40, 3, 2, torch.bfloat16))
    bad = []
    for (way, step), group in zip(scenarios, groups, strict=True):
        if rank not in dist.get_process_group_ranks(group):
            continue
        dist.barrier(group)
        found = _scenario(rank, group, backend, way, step, data)
        with ElasticBuffer(pair, backend=backend, num_cpu_timeout_secs=20) as rebuilt:
            found += cases.run(rebuilt, cases.Case(seed, (3, 4), 40, 3, 2, torch.bfloat16, do_expand=True))
        bad += [f"{way}, {step}: {what}" for what in found]
    return bad


def _check(backend: str, scenarios: list[tuple[str, str]], seed: int) -> None:
    lost = range(2, 2 + len(scenarios))
    answers = run_ranks(2 + len(scenarios), _all, backend, scenarios, seed, timeout=240.0, lost=lost)
    assert answers[:2] == [[], []]
    assert answers[2:] == [WAYS[way] for way, _ in scenarios]
    assert left_behind()["names"] == 0


@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_a_rank_stops(backend: str, fresh_random_data: int) -> None:
    _check(backend, SHORT, fresh_random_data)


@pytest.mark.slow
@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_a_rank_stops_in_every_way_at_every_step(backend: str, fresh_random_data: int) -> None:
    _check(backend, EVERY, fresh_random_data)
