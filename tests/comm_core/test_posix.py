"""The posix backend's own promises: memory that is short, nothing left behind, segments that grow, sound reads."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core import ElasticBuffer
from comm_core.backends import posix as backend
from comm_core.backends import registry
from comm_core.runtime.errors import CommError, UsageError
from comm_core.shmem.posix import SharedMemoryError, SymmetricHeap
from tests.comm_core import cases
from tests.comm_core.leftovers import NOTHING, left_behind
from tests.dist import run_ranks

TIMEOUT = 20.0
CASE = cases.Case(0, (5, 3, 7), 40, 3, 4, torch.bfloat16, do_expand=True)


def _growing(rank: int, seed: int) -> list[str]:
    """Calls that need more, then less, then much more on one rank alone; rows of odd widths; two buffers at once."""
    bad = []
    with ElasticBuffer(backend="posix", num_cpu_timeout_secs=TIMEOUT) as buffer:
        for tokens, hidden in (((5, 3, 7), 40), ((20, 2, 0), 60000), ((5, 3, 7), 3), ((0, 4, 50), 60000)):
            for expand in (False, True):
                case = replace(CASE, seed=seed, tokens=tokens, hidden=hidden, do_expand=expand, num_bias=int(expand))
                bad += cases.run(buffer, case)
        heap = buffer._backend._channel.heap
        bad += [] if heap._generation >= 2 else [f"generation {heap._generation}: nothing grew"]
        bad += [] if left_behind()["names"] == 0 else ["a name in /dev/shm"]
        # The same look finds what is there while the buffer is open.
        bad += [] if left_behind()["maps"] >= 6 and left_behind()["threads"] == 1 else [f"open: {left_behind()}"]
    dist.barrier()
    left = left_behind()
    return bad + ([] if left == NOTHING else [f"left behind {left}"])


def test_segments_grow_and_nothing_is_left(fresh_random_data: int) -> None:
    assert run_ranks(3, _growing, fresh_random_data, timeout=120.0) == [[], [], []]


def _short(rank: int, seed: int) -> list[str]:
    """A rank that can not reserve memory: all raise, and the buffer works on with less."""
    data = cases.draw(replace(CASE, seed=seed))
    big = torch.ones(3000, 1000)
    ids = torch.zeros(3000, 1, dtype=torch.int64)
    bad = []
    with ElasticBuffer(backend="posix", num_cpu_timeout_secs=TIMEOUT) as buffer:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, before[1]))
        try:
            buffer.dispatch(big, ids, num_experts=3)
            bad.append("no error")
        except SharedMemoryError as error:
            if "rank 1: " not in str(error) or "shared memory can not be reserved" not in str(error):
                bad.append(str(error))
        bad += cases.run(buffer, replace(CASE, seed=seed))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        rows = buffer.dispatch(big, ids, num_experts=3)[0]
        bad += [] if rows.shape[0] == (9000 if rank == 0 else 0) and bool((rows == 1).all()) else ["rows"]
        buffer.dispatch(data.x[rank], data.topk_idx[rank], num_experts=CASE.num_experts)
    return bad


def test_short_memory_raises_on_every_rank(fresh_random_data: int) -> None:
    assert run_ranks(3, _short, fresh_random_data, timeout=120.0) == [[], [], []]


def _short_at_start(rank: int) -> str:
    def full(handle: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reserve = os.posix_fallocate
    os.posix_fallocate = full if rank == 1 else reserve
    said = "no error"
    try:
        ElasticBuffer(backend="posix", num_cpu_timeout_secs=TIMEOUT)
    except CommError as error:
        said = str(error)
    os.posix_fallocate = reserve
    with ElasticBuffer(backend="posix", num_cpu_timeout_secs=TIMEOUT) as buffer:
        return said + "".join(cases.run(buffer, replace(CASE, tokens=(4, 2))))


def test_short_memory_while_building() -> None:
    first, second = run_ranks(2, _short_at_start, timeout=90.0)
    assert first.startswith("memory of group [0, 1] can not be shared because of rank 1: ")
    assert second.endswith("send fewer tokens a call")
    assert "No space left" in second and "No space left" in first


def _planted(rank: int, seed: int) -> dict[str, int]:
    """How many of some cases notice a fault in what is this backend's own."""
    caught = {}
    arrivals, returns, done = backend._arrivals, backend._returns, SymmetricHeap.done
    case = replace(CASE, seed=seed, tokens=(40, 30, 50), hidden=256, masked=0.0)
    faults: dict[str, Callable[[], None]] = {
        "none": lambda: None,
        "arrivals": lambda: setattr(backend, "_arrivals", lambda s, t, p: arrivals(s, t, p).flip(0)),
        "returns": lambda: setattr(backend, "_returns", lambda s, t, p, r: returns(s, t, p, r).roll(1)),
        "weights": lambda: setattr(backend, "_arrivals", lambda s, t, p: arrivals(s, t, p).roll(t)),
    }
    for name, plant in faults.items():
        plant()
        with ElasticBuffer(backend="posix", num_cpu_timeout_secs=TIMEOUT) as buffer:
            found = [line for expand in (False, True) for line in cases.run(buffer, replace(case, do_expand=expand))]
        caught[name] = len(found)
        backend._arrivals, backend._returns = arrivals, returns
    # Done before reading: a rank that reads late finds the next call's rows.
    with ElasticBuffer(backend="posix", num_cpu_timeout_secs=TIMEOUT) as buffer:
        caught["early done"] = _late_reader(rank, buffer, case, done)
    return caught


def _late_reader(rank: int, buffer: ElasticBuffer, case: cases.Case, done: Callable[[SymmetricHeap], None]) -> int:
    """Rank 0 reads slowly, having said it was done; the others go on to the next call."""
    data = cases.draw(case)
    handle = buffer.dispatch(data.x[rank], data.topk_idx[rank], num_experts=case.num_experts)[3]
    wanted = buffer.dispatch(data.x[rank], handle=handle)[0]
    arrivals = backend._arrivals

    def slow(shared: Any, table: int, plans: Any) -> torch.Tensor:
        if slow.first and rank == 0:  # type: ignore[attr-defined]
            slow.first = False  # type: ignore[attr-defined]
            done(buffer._backend._channel.heap)
            time.sleep(1.0)
        return arrivals(shared, table, plans)

    slow.first = True  # type: ignore[attr-defined]
    backend._arrivals = slow
    first = buffer.dispatch(data.x[rank], handle=handle, async_with_compute_stream=True)
    # The comparison in front of the second call would wait for rank 0: share at once, as after a count exchange.
    channel = buffer._backend._channel
    if rank:
        first[4].current_stream_wait()
    x = torch.zeros_like(data.x[rank])
    event = channel.control_queue.submit(
        lambda: channel.share("next", [(x.shape[0], x)], lambda views: views[0].copy_(x), lambda shared: None)
    )
    first[4].current_stream_wait()
    event.synchronize()
    backend._arrivals = arrivals
    return int(not cases.same_bytes(first[0], wanted))


def test_planted_faults_are_caught(fresh_random_data: int) -> None:
    answers = run_ranks(3, _planted, fresh_random_data, timeout=120.0)
    for caught in answers:
        assert caught["none"] == 0
        assert all(caught[name] > 0 for name in ("arrivals", "returns", "weights"))
    assert answers[0]["early done"] == 1
    assert answers[1]["early done"] == answers[2]["early done"] == 0


def _elsewhere(rank: int) -> str:
    """Two ranks that believe to be on two hosts."""
    from comm_core.shmem import peers

    host = peers._host()
    peers._host = lambda: (f"{host[0]}-{rank}", host[1])
    try:
        ElasticBuffer(backend="posix", num_cpu_timeout_secs=TIMEOUT)
    except CommError as error:
        return str(error)
    return "no error"


def test_ranks_of_two_hosts_are_refused() -> None:
    for said in run_ranks(2, _elsewhere, timeout=90.0):
        assert "not processes of one host" in said
        assert "backend='collective'" in said


def _two_buffers_left_alone(rank: int) -> str:
    """A rank that ends without close() keeps nobody, and the automatic choice stays the collective backend."""
    assert ElasticBuffer(num_cpu_timeout_secs=TIMEOUT)._backend.name == "collective"
    ElasticBuffer(backend="posix", num_cpu_timeout_secs=TIMEOUT)
    return "good"


def test_ending_without_close() -> None:
    start = time.monotonic()
    assert run_ranks(2, _two_buffers_left_alone, timeout=90.0) == ["good", "good"]
    assert time.monotonic() - start < 60


def test_where_it_can_be_used() -> None:
    found = {(name, kind): reason for name, kind, reason in registry.report()}
    assert found["posix", "cpu"] is None
    with pytest.raises(UsageError, match=r"backend 'posix' on cuda:0; allowed: tensors of the CPU alone"):
        backend.PosixBackend(None, torch.device("cuda", 0), 1.0)  # type: ignore[arg-type]
