"""Regions on a device: the cases of region_cases on ranks that share one, and what no double of it can show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core import ElasticBuffer
from comm_core.runtime import device as devices
from comm_core.runtime.errors import UsageError
from tests.comm_core import region_cases
from tests.comm_core.experimental_cases import expect_error
from tests.dist import run_ranks

KIND = next((kind for kind in ("cuda", "musa") if devices.count(kind)), None)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(KIND is None, reason="no CUDA or MUSA device here: regions have nothing to lie on"),
]


def _buffer(rank: int, timeout: float = 30.0) -> ElasticBuffer:
    assert KIND is not None
    device = devices.of(KIND, rank % devices.count(KIND))
    return ElasticBuffer(dist.group.WORLD, backend="gpu", device=device, num_cpu_timeout_secs=timeout)


def _good(rank: int, seed: int) -> list[str]:
    bad: list[str] = []
    with _buffer(rank) as buffer:
        for turn in range(3):
            bad += region_cases.uses(buffer, seed + 10 * turn)
            bad += region_cases.messages(buffer, seed + turn)
        for mode in (True, False):
            with torch.inference_mode(mode):
                bad += region_cases.uses(buffer, seed, 8, 8)
    return bad + region_cases.lifetimes(lambda: _buffer(rank))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_results_and_lifetimes(num_ranks: int, fresh_random_data: int) -> None:
    assert run_ranks(num_ranks, _good, fresh_random_data, timeout=240) == [[]] * num_ranks


def _mistakes(rank: int, seed: int) -> list[str]:
    with _buffer(rank) as buffer:
        return region_cases.mistakes(buffer, seed)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_mistakes_raise_on_every_rank(num_ranks: int, fresh_random_data: int) -> None:
    assert run_ranks(num_ranks, _mistakes, fresh_random_data, timeout=120) == [[]] * num_ranks


def _lost(rank: int) -> list[str]:
    with _buffer(rank):  # what a process does once takes longer than the waits below
        pass
    return region_cases.lost(lambda timeout: _buffer(rank, timeout), 2.0)


def test_who_does_not_come_is_named() -> None:
    assert run_ranks(2, _lost, timeout=120) == [[], []]


def _faults(rank: int, seed: int) -> dict[str, int]:
    with _buffer(rank) as buffer:
        return region_cases.faults(buffer, seed)


def test_planted_faults_are_found(fresh_random_data: int) -> None:
    answers = run_ranks(2, _faults, fresh_random_data, timeout=120)
    total = {name: sum(answer[name] for answer in answers) for name in answers[0]}
    assert total.pop("none") == 0
    assert all(total.values()), total


def _drawn(device: torch.device, seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(2**30, (count,), generator=generator, device=device)


def _large(rank: int, seed: int) -> list[str]:
    """Messages of many MiB behind work of the caller's stream, by the copy engine and by kernels; received late."""
    bad: list[str] = []
    peer, count = 1 - rank, 3 << 20
    with _buffer(rank) as buffer:
        backend: Any = buffer._backend
        buffer.pp_set_config(4 * count, 2)
        for turn in range(12):
            backend.region_sms = (0, 4)[turn % 2]
            mine, other = (_drawn(buffer.device, seed + 2 * turn + r, count) for r in (rank, peer))
            t = mine.int()
            for _ in range(20):  # the message is what these leave
                t = t * 3 + 1
                other = other.int() * 3 + 1
            buffer.pp_send(t, peer)
            t.fill_(-1)
            result = torch.full_like(t, -2)
            buffer.pp_recv(result, peer)
            bad += [] if torch.equal(result, other) else [f"turn {turn}: {int((result != other).sum())} values"]
    return bad


def test_large_messages_are_ordered_with_the_callers_work(fresh_random_data: int) -> None:
    assert run_ranks(2, _large, fresh_random_data, timeout=120) == [[], []]


def _captured(rank: int) -> list[str]:
    """A call in a graph raises, and the next one outside works."""
    bad: list[str] = []
    with _buffer(rank) as buffer:
        buffer.pp_set_config(64, 2)
        t = torch.full((16,), float(rank), device=buffer.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            t.add_(0)
            bad += expect_error(UsageError, "while a graph is recorded", lambda: buffer.pp_send(t, 1 - rank))
        buffer.pp_send(t, 1 - rank)
        result = torch.empty_like(t)
        buffer.pp_recv(result, 1 - rank)
        bad += [] if bool((result == 1 - rank).all()) else ["the message after a refused one"]
    return bad


@pytest.mark.skipif(KIND == "musa", reason="graphs are tested through torch.cuda")
def test_calls_in_a_captured_graph_are_refused() -> None:
    assert run_ranks(2, _captured, timeout=60) == [[], []]


def _engines(rank: int) -> list[str]:
    """Kernels that messages of one rank to another launch, by torch's profiler: no copy among them by default."""
    names = []
    with _buffer(rank) as buffer:
        backend: Any = buffer._backend
        buffer.pp_set_config(1 << 22, 2)
        t = torch.ones(1 << 20, device=buffer.device)
        for sms in (0, 4):
            backend.region_sms = sms
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                buffer.pp_send(t, 1 - rank)
                buffer.pp_recv(t, 1 - rank)
                torch.cuda.synchronize()
            names.append(" ".join(item.key for item in profile.key_averages()))
    return names


@pytest.mark.skipif(KIND == "musa", reason="torch.profiler's activities are CUDA's")
def test_by_default_no_kernel_moves_bytes() -> None:
    for engine, kernel in run_ranks(2, _engines, timeout=60):
        if not engine:
            pytest.skip("torch.profiler saw nothing of the device here")
        assert "region_raise" in engine and "Memcpy" in engine and "region_copy" not in engine, engine
        assert "region_copy" in kernel and "Memcpy DtoD" not in kernel, kernel
