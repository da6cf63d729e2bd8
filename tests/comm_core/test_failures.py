"""Ranks that come late, die or raise: every wait ends in time with an error that says who, where and how long."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core import ElasticBuffer
from comm_core.backends import registry
from comm_core.event import CommQueue
from comm_core.runtime import trace
from comm_core.runtime.errors import CommError, CommTimeoutError
from tests.comm_core import cases
from tests.dist import run_ranks

TIMEOUT = 2.0
CASE = cases.Case(0, (5, 3, 7), 40, 3, 4, torch.bfloat16, do_expand=True)


def _expect(kind: type[Exception], limit: float, call: Any, *says: str) -> list[str]:
    """What is wrong with the way `call` fails."""
    start = time.monotonic()
    try:
        call()
    except kind as error:
        took, missing = time.monotonic() - start, [word for word in says if word not in str(error)]
        late = [] if took < limit else [f"took {took:.1f} s: {error}"]
        return late + ([f"{missing} not in: {error}"] if missing else [])
    except Exception as error:
        return [f"{type(error).__name__} instead of {kind.__name__}: {error}"]
    return ["no error"]


def _late(rank: int, backend: str, seed: int) -> list[str]:
    case = replace(CASE, seed=seed)
    data = cases.draw(case)
    buffer = ElasticBuffer(backend=backend, num_cpu_timeout_secs=TIMEOUT)

    def dispatch() -> None:
        buffer.dispatch(data.x[rank], data.topk_idx[rank], num_experts=case.num_experts)

    if rank == 2:
        time.sleep(TIMEOUT + 1.0)
        bad = _expect(CommError, TIMEOUT + 2, dispatch, "rank 2", "[0, 1, 2]")
    else:
        where = (f"dispatch (call 1) on rank {rank} of group [0, 1, 2]", "within 2 s")
        bad = _expect(CommTimeoutError, TIMEOUT + 2, dispatch, *where)
    bad += _expect(CommError, 0.5, dispatch, "build a new one")
    start = time.monotonic()
    buffer.close()
    bad += [] if time.monotonic() - start < 1 else ["close() of a broken buffer waits"]
    bad += [f"thread {item.name} left" for item in threading.enumerate() if item.name.startswith("ep-")]
    with ElasticBuffer(backend=backend, num_cpu_timeout_secs=20) as again:
        bad += cases.run(again, case)
    return bad


def _own_trouble(rank: int, backend: str, seed: int) -> list[str]:
    """A rank whose own work fails, or that leaves its block by an exception, keeps nobody for longer than agreed."""
    case = replace(CASE, seed=seed)
    data = cases.draw(case)
    x, ids = data.x[rank], data.topk_idx[rank]
    bad = []
    try:
        with ElasticBuffer(backend=backend, num_cpu_timeout_secs=TIMEOUT) as buffer:
            handle = buffer.prepare(ids, num_experts=case.num_experts)
            if rank == 0:
                start = time.monotonic()
                raise ZeroDivisionError
            # Rank 0 may give up before or after its part of prepare is done, so either call may be the one that fails.
            bad += _expect(CommError, TIMEOUT + 2, lambda: buffer.dispatch(x, handle=handle), f"on rank {rank}")
    except ZeroDivisionError:
        bad += [] if time.monotonic() - start < 1.5 else ["leaving the block waits"]
    queue = CommQueue(torch.device("cpu"), "user")
    dist.barrier()  # building waits no longer than other calls, and the ranks come here at different times
    with ElasticBuffer(backend=backend, num_cpu_timeout_secs=TIMEOUT) as buffer:
        handle = buffer.prepare(ids, num_experts=case.num_experts)
        failed = queue.submit(lambda: 1 // int(rank != 1))
        kinds = (ZeroDivisionError, "zero") if rank == 1 else (CommError, "cached dispatch")
        bad += _expect(
            kinds[0], TIMEOUT + 2, lambda: buffer.dispatch(x, handle=handle, previous_event=failed), kinds[1]
        )
        bad += _expect(CommError, TIMEOUT + 2, lambda: buffer.dispatch(x, handle=handle), "build a new one")
    return bad


def _asynchronous(rank: int, backend: str, seed: int) -> list[str]:
    case = replace(CASE, seed=seed)
    data = cases.draw(case)
    wanted = cases.reference.dispatch(data.x, data.topk_idx, num_experts=case.num_experts, do_expand=True)
    recorder, bad = trace.Recorder(rank), []
    queue, gate = CommQueue(torch.device("cpu"), "user"), threading.Event()
    with trace.recording(recorder), ElasticBuffer(backend=backend, num_cpu_timeout_secs=20) as buffer:
        x = torch.zeros_like(data.x[rank])
        ready = queue.submit(lambda: (gate.wait(15), x.copy_(data.x[rank])))
        start = time.monotonic()
        handle = buffer.prepare(data.topk_idx[rank], num_experts=case.num_experts, do_expand=True)
        recv_x, _, _, _, event = buffer.dispatch(x, handle=handle, previous_event=ready, async_with_compute_stream=True)
        seconds = time.monotonic() - start
        ElasticBuffer.capture().current_stream_wait()  # the wrong event: it is not the dispatch's
        assert event.event is not None
        if event.event.query() or cases.same_bytes(recv_x, wanted[rank].recv_x):
            bad.append("complete before the input was there: previous_event does nothing")
        ticks, end = 0, time.monotonic() + 0.2
        while time.monotonic() < end:
            ticks += 1
        gate.set()
        event.current_stream_wait()
        if not cases.same_bytes(recv_x, wanted[rank].recv_x):
            bad.append("recv_x after the event")
        buffer.combine(recv_x, handle)
    spans = [(span.name, span.category, span.lane, span.args.get("num_tokens")) for span in recorder.spans()]
    if spans != [("layout", "ep", "ep", case.tokens[rank]), ("dispatch", "ep", "ep", case.tokens[rank]),
                 ("combine", "ep", "ep", case.tokens[rank])]:  # fmt: skip
        bad.append(f"spans {spans}")
    if not all(span.args["bytes"] > 0 for span in recorder.spans()):
        bad.append("bytes of spans")
    return bad + ([] if ticks > 1000 else [f"only {ticks} steps while waiting"]) + ([] if seconds < 15 else ["blocked"])


PIECES = {
    "asynchronous calls wait for their events": _asynchronous,
    "a rank that comes late": _late,
    "a rank whose own work fails": _own_trouble,
}


def _everything(rank: int, backend: str, seed: int) -> dict[str, list[str]]:
    return {name: piece(rank, backend, seed) for name, piece in PIECES.items()}


@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_failures_end_in_time(backend: str, fresh_random_data: int, subtests: pytest.Subtests) -> None:
    answers = run_ranks(3, _everything, backend, fresh_random_data, timeout=120.0)
    for name in PIECES:
        with subtests.test(name):
            assert [answer[name] for answer in answers] == [[], [], []]
