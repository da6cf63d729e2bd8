"""The kernels on a device: several ranks share it where there are fewer devices than ranks."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core import ElasticBuffer
from comm_core.kernels import build
from comm_core.runtime import device as devices
from comm_core.runtime.errors import CommError, PeerTimeout, UsageError
from tests.comm_core import cases, conformance
from tests.comm_core.cases import Case
from tests.dist import run_ranks

KIND = next((kind for kind in ("cuda", "musa") if devices.count(kind)), None)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(KIND is None, reason="no CUDA or MUSA device here: the kernels have nothing to run on"),
]
BASE = Case(5, (6, 4), 256, 4, 4, torch.bfloat16)
# Small cases of every path, for builds that are slow on purpose.
SUBSET = [
    replace(case, seed=index)
    for index, case in enumerate(
        [
            BASE,
            replace(BASE, num_bias=2),
            replace(BASE, hidden=512, scales="fp32"),
            replace(BASE, scales="packed", column_major=True),
            replace(BASE, static=True, bound=9),
            replace(BASE, one_expert=True, weights=False),
            replace(BASE, tokens=(0, 7), asynchronous=True),
            replace(BASE, dtype=torch.float32, hidden=136),
            replace(BASE, dtype=torch.float16, tokens=(300, 170)),
            replace(BASE, masked=1.1, num_bias=1),
        ]
    )
    for case in (case, replace(case, do_expand=True, alignment=16))
]


def _device(rank: int) -> torch.device:
    assert KIND is not None
    return devices.of(KIND, rank % devices.count(KIND))


def _buffer(rank: int, **options: Any) -> ElasticBuffer:
    settings: dict[str, Any] = {"backend": "gpu", "device": _device(rank), "num_cpu_timeout_secs": 30} | options
    return ElasticBuffer(dist.group.WORLD, **settings)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_conformance(num_ranks: int, fresh_random_data: int) -> None:
    assert KIND is not None
    num_random = 40 if num_ranks < 8 else 10
    for report in conformance.check("gpu", KIND, num_ranks, fresh_random_data, num_random=num_random):
        assert report.bad == []
        assert report.ran > 40


def _rounds(rank: int, seed: int, rounds: int) -> list[str]:
    rng = random.Random(seed)
    bad: list[str] = []
    with _buffer(rank) as buffer:
        for _ in range(rounds):
            case = cases.random_case(rng, dist.get_world_size())
            if conformance.lacks(buffer, case) is None:
                bad += cases.run(buffer, case)
    return bad


def test_random_rounds_on_two_ranks(fresh_random_data: int) -> None:
    assert run_ranks(2, _rounds, fresh_random_data, int(os.environ.get("ROUNDS", "200")), timeout=280) == [[], []]


def _subset(rank: int, library: str, times: int) -> list[str]:
    os.environ["MT_MOE_LIBRARY"] = library
    with _buffer(rank) as buffer:
        return [line for _ in range(times) for case in SUBSET for line in cases.run(buffer, case)]


@pytest.mark.parametrize("define", ["MT_MOE_PORTABLE", "MT_MOE_CHAOS=3"])
def test_builds_by_the_rules_of_musa_and_with_random_delays(define: str) -> None:
    arch = devices.architecture(_device(0))
    library = str(build.library_path(KIND or "cuda", arch, [define]))
    assert run_ranks(2, _subset, library, 3, timeout=280) == [[], []]


def _graph(rank: int) -> list[str]:
    """Replay, eager, replay with new data each time: all equal to an eager run on the same data."""
    device, bad = _device(rank), []
    tokens, hidden, topk, experts = 16, 256, 4, 8
    generator = torch.Generator(device=device).manual_seed(rank)
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(tokens, topk, dtype=torch.int64, device=device)
    weights = torch.zeros(tokens, topk, device=device)

    def draw() -> None:
        x.normal_(generator=generator)
        ids.copy_(torch.rand(tokens, experts, device=device, generator=generator).topk(topk, -1)[1])
        weights.uniform_(generator=generator)

    with _buffer(rank, num_max_tokens_per_rank=tokens) as buffer:

        def step() -> list[torch.Tensor]:
            got, idx, w, handle, _ = buffer.dispatch(x, ids, weights, num_experts=experts, do_cpu_sync=False)
            back, back_w, _ = buffer.combine(got * 2, handle, w)
            return [got, idx, w, back, back_w]

        draw()
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for turn in range(4):
            draw()
            eager = [item.clone() for item in step()]
            graph.replay()
            torch.cuda.synchronize()
            if not all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True)):
                bad.append(f"turn {turn}")
            if turn == 1:  # another call in between, so that numbers of calls and halves of the ring shift
                buffer.barrier()
        return bad


@pytest.mark.skipif(KIND == "musa", reason="graphs are tested through torch.cuda")
def test_graph_replays_and_eager_calls_mix() -> None:
    assert run_ranks(2, _graph, timeout=120) == [[], []]


def _lent(rank: int, seed: int) -> list[str]:
    """Rows made in symmetric memory give what rows of ordinary memory give, and more of them than fit as well."""
    bad: list[str] = []
    device = _device(rank)
    torch.manual_seed(seed + rank)
    with _buffer(rank) as buffer:
        assert buffer.reserve_symmetric(96 << 20)  # torch takes 20 MiB at a time for tensors above 1 MiB
        for turn in range(6):
            ordinary = torch.randn(200 << turn, 1024, dtype=torch.bfloat16, device=device)
            ids = torch.rand(200 << turn, 8, device=device).topk(3, -1)[1]
            with buffer.symmetric_memory():
                lent = ordinary.clone()
            pool = buffer._backend._channel.pool  # type: ignore[attr-defined]
            if turn < 3 and pool.place_of(lent) is None:
                bad.append(f"turn {turn}: not in symmetric memory")
            wanted, _, _, handle, _ = buffer.dispatch(ordinary, ids, num_experts=8)
            got, _, _, _, _ = buffer.dispatch(lent, handle=handle)
            lent.fill_(float("nan"))  # the call is done: nobody reads the rows any more
            with buffer.symmetric_memory():
                rows = wanted * 2
            a, _, _ = buffer.combine(wanted * 2, handle)
            b, _, _ = buffer.combine(rows, handle)
            rows.fill_(float("nan"))
            if not torch.equal(got, wanted) or not torch.equal(a, b):
                bad.append(f"turn {turn}: differs")
            del lent, rows
    return bad


def test_symmetric_tensors_are_sent_without_a_copy(fresh_random_data: int) -> None:
    assert run_ranks(2, _lent, fresh_random_data, timeout=120) == [[], []]


def _late(rank: int, num_late: int) -> str:
    with_error = ""
    device = _device(rank)
    x = torch.randn(8, 64, dtype=torch.bfloat16, device=device)
    ids = torch.rand(8, 4, device=device).topk(2, -1)[1]
    buffer = _buffer(rank, num_cpu_timeout_secs=2)
    _, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=4)
    assert dist.group.WORLD is not None
    dist.barrier()
    start = time.monotonic()
    if rank < num_late:
        time.sleep(6)
        return with_error
    try:
        buffer.dispatch(x, handle=handle)
        buffer.barrier()
    except PeerTimeout as error:
        with_error = f"{time.monotonic() - start < 5}: {error}"
        assert torch.equal(x + 0, x)  # the context works
        with pytest.raises(CommError):
            buffer.dispatch(x, handle=handle)
    time.sleep(max(0.0, 6 - (time.monotonic() - start)))
    return with_error


def test_a_rank_that_never_launches_is_named_within_the_timeout() -> None:
    said = run_ranks(2, _late, 1, timeout=60)
    assert said[1].startswith("True: cached dispatch (call ")
    assert "rank 0" in said[1]


def _mistakes(rank: int) -> list[str]:
    """Mistakes that the device finds, in calls that need a host wait and in calls that do not; then all goes on."""
    device, said = _device(rank), []
    x = torch.randn(8, 64, dtype=torch.bfloat16, device=device)
    ids = torch.rand(8, 4, device=device).topk(2, -1)[1]
    with _buffer(rank, num_max_tokens_per_rank=16) as buffer:

        def attempt(call: Any) -> None:
            try:
                call()
                buffer.barrier()
                said.append("nothing")
            except (UsageError, CommError) as error:
                said.append(f"{type(error).__name__}: {error}")

        bad = ids.clone()
        if rank == 1:
            bad[3, 1] = 9
        attempt(lambda: buffer.dispatch(x, bad, num_experts=4))
        attempt(lambda: buffer.dispatch(x, bad, num_experts=4, do_cpu_sync=False))
        attempt(lambda: buffer.dispatch(x, ids, num_experts=4 if rank else 8))
        attempt(lambda: buffer.dispatch(x if rank else x.double(), ids, num_experts=4))
        _, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=4)
        attempt(lambda: buffer.dispatch(x if rank else x.half(), handle=handle))
        attempt(lambda: buffer.combine(x[:1] if rank else x.new_zeros(handle.num_recv_tokens, 64), handle))
        said += cases.run(buffer, BASE)
    return said


def test_mistakes_raise_on_every_rank_and_the_buffer_works_on() -> None:
    zero, one = run_ranks(2, _mistakes, timeout=120)
    assert len(zero) == len(one) == 6, (zero, one)
    assert "topk_idx[3, 1] = 9" in one[0] and one[0].startswith("UsageError") and zero[0].startswith("CommError")
    assert "topk_idx[3, 1] = 9" in one[1] and "topk_idx[3, 1] = 9" in zero[1]
    assert "num_experts" in zero[2] and "num_experts" in one[2]
    assert zero[3].startswith("UsageError") and one[3].startswith("CommError")
    assert "dtype" in zero[4] and "dtype" in one[4]
    assert one[5].startswith("UsageError") and zero[5].startswith("CommError")


def _planted(rank: int) -> int:
    from comm_core.backends import gpu_layout

    true = gpu_layout.CountsEvent._read

    def wrong(event: Any) -> Any:
        layout = true(event)
        rows = sum(layout.recv_splits)
        if rows > 1:
            event.device_layout.table("recv_token", rows)[:2] += 1  # two rows are read from the next token
        return layout

    gpu_layout.CountsEvent._read = wrong  # type: ignore[method-assign]
    with _buffer(rank) as buffer:
        return len(cases.run(buffer, replace(BASE, tokens=(60, 60))))


def test_a_fault_in_the_layout_is_found() -> None:
    assert min(run_ranks(2, _planted, timeout=60)) > 0
