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

from comm_core import ElasticBuffer, fp8
from comm_core.backends.base import BlocksJob
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
    times = int(os.environ.get("TIMES", "3"))
    assert run_ranks(2, _subset, library, times, timeout=280) == [[], []]


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


def _blocks_job(rank: int, x: torch.Tensor, ids: torch.Tensor, bound: int, experts: int, fp8: int) -> BlocksJob:
    """A low-latency dispatch with fresh outputs, all of them poisoned."""
    num_ranks = dist.get_world_size()
    local, height, hidden = experts // num_ranks, bound * num_ranks, x.shape[1]
    new = {"device": x.device, "dtype": torch.int32}
    words = 0 if not fp8 else -(-hidden // 512) if fp8 == 3 else -(-hidden // 128)
    scales = None
    if fp8:
        kind = torch.int32 if fp8 == 3 else torch.float32
        scales = torch.zeros(local, words, height, device=x.device, dtype=kind).transpose(1, 2)
    return BlocksJob(
        settings={"num_experts": experts, "hidden": hidden, "num_max_tokens_per_rank": bound, "num_scales": fp8},
        x=x,
        topk_idx=ids,
        max_tokens=bound,
        height=height,
        out_x=torch.full((local, height, hidden * (1 if fp8 else 2)), 255, device=x.device, dtype=torch.uint8),
        src_info=torch.full((local, height), -9, **new),
        ranges=torch.zeros(local, num_ranks, device=x.device, dtype=torch.int64),
        counts=torch.full((local,), -9, **new),
        positions=torch.full(ids.shape, -9, **new),
        seq=torch.zeros(2, **new),
        fp8=fp8,
        out_scales=scales,
    )


def _blocks_wrong(rank: int, job: BlocksJob, xs: list[torch.Tensor], all_ids: list[torch.Tensor]) -> list[str]:
    """What a dispatch got wrong, expert by expert."""
    bad = []
    for e in range(job.num_local):
        wanted = [
            (s, t) for s, ids in enumerate(all_ids) for t in (ids == rank * job.num_local + e).any(1).nonzero()[:, 0]
        ]
        count = len(wanted)
        if int(job.counts[e]) != count or job.src_info[e, :count].tolist() != [t for _, t in wanted]:
            bad.append(f"expert {e}: counts or sources")
            continue
        if not count:
            continue
        rows = torch.stack([xs[s][t] for s, t in wanted])
        if job.fp8:
            rows, scales = fp8.per_token_cast(rows, round_scale=job.fp8 > 1, packed=job.fp8 == 3)
            assert job.out_scales is not None
            if not torch.equal(job.out_scales[e, :count].contiguous(), scales):
                bad.append(f"expert {e}: scales")
        if not torch.equal(job.out_x[e, :count], rows.view(torch.uint8)):
            bad.append(f"expert {e}: rows")
    return bad


def _low_latency(rank: int, seed: int, turns: int = 12) -> list[str]:
    """Dispatch and combine of several shapes, in two halves or one, two outstanding."""
    device, bad, num_ranks = _device(rank), [], dist.get_world_size()
    bound, hidden, topk, experts = 32, 1152, 4, 4 * num_ranks
    rng = random.Random(seed)
    with _buffer(rank) as buffer:
        backend: Any = buffer._backend

        def draw() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
            torch.manual_seed(rng.randrange(2**31))
            tokens = [rng.randrange(bound + 1) for _ in range(num_ranks)]
            xs = [torch.randn(n, hidden, device=device).bfloat16() * 3 for n in tokens]
            ids = [torch.rand(n, experts, device=device).topk(topk, -1)[1] for n in tokens]
            ids = [item.masked_fill(torch.rand(item.shape, device=device) < 0.2, -1) for item in ids]
            return xs, ids, [torch.rand(n, topk, device=device) for n in tokens]

        def back(job: BlocksJob, weights: torch.Tensor) -> tuple[BlocksJob, torch.Tensor]:
            rows = torch.randn(job.num_local, job.height, hidden, device=device).bfloat16()
            out = torch.full((job.topk_idx.shape[0], hidden), float("nan"), device=device, dtype=torch.bfloat16)
            return replace(job, x=rows, out_x=out, out_scales=None, fp8=0, weights=weights), rows

        for turn in range(turns):
            kind = turn % 4
            sets = [draw(), draw()]
            jobs = [_blocks_job(rank, xs[rank], ids[rank], bound, experts, kind) for xs, ids, _ in sets]
            jobs = [replace(job, whole=rng.random() < 0.5) for job in jobs]
            halves = [backend.blocks_dispatch(job) for job in jobs]
            for half in halves:
                half().current_stream_wait()
            for job, (xs, ids, _) in zip(jobs, sets, strict=True):
                bad += [f"turn {turn}, {line}" for line in _blocks_wrong(rank, job, xs, ids)]
            for job, (_, ids, weights) in zip(jobs, sets, strict=True):
                answer, rows = back(job, weights[rank])
                backend.blocks_combine(answer)().current_stream_wait()
                everything = [torch.empty_like(rows.cpu()) for _ in range(num_ranks)]
                dist.all_gather(everything, rows.cpu())
                if not torch.equal(answer.out_x.cpu(), _weighed(rank, job, ids, everything, weights[rank].cpu())):
                    bad.append(f"turn {turn}: combine")
    return bad


def _weighed(
    rank: int, job: BlocksJob, ids: list[torch.Tensor], rows: list[torch.Tensor], weights: torch.Tensor
) -> torch.Tensor:
    """The definition of a low-latency combine: weight times row, lane by lane, in fp32, rounded once."""
    mine = ids[rank].cpu()
    total = torch.zeros(mine.shape[0], rows[0].shape[2])
    for token in range(mine.shape[0]):
        for lane, e in enumerate(mine[token].tolist()):
            if e < 0:
                continue
            before = sum(int((item == e).any(1).sum()) for item in ids[:rank]) + int((mine[:token] == e).any(1).sum())
            total[token] += rows[e // job.num_local][e % job.num_local, before].float() * weights[token, lane]
    return total.bfloat16()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_low_latency_calls(num_ranks: int, fresh_random_data: int) -> None:
    assert run_ranks(num_ranks, _low_latency, fresh_random_data, timeout=120) == [[]] * num_ranks


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
        attempt(lambda: buffer.dispatch(x if rank else x.long(), ids, num_experts=4))
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
