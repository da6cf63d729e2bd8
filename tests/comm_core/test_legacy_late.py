"""V1 calls that wait for no other rank, what tuning may vary, and a Buffer's own memory."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core.event import CommQueue
from comm_core.legacy import Buffer, Config
from comm_core.runtime.errors import CommError, UsageError
from tests.comm_core import legacy_cases as cases
from tests.comm_core.legacy_cases import World
from tests.dist import run_ranks

BOUND = 12


def _chunk_sizes(buffer: Buffer, world: World) -> list[str]:
    """What tuning varies changes no result; the internode names are the same calls."""
    rank, bad = buffer.rank, cases.Failures()
    counts = cases.layout_counts(buffer, world, rank, bad)
    first = buffer.dispatch(world.x[rank], **counts)
    for chunk in (1, 4, 16, 32):
        config = Config(24, chunk, 256)
        again = buffer.dispatch(world.x[rank], handle=first[4], config=config)
        fresh = buffer.internode_dispatch(world.x[rank], **counts, config=config)
        bad.need(torch.equal(again[0], first[0]) and torch.equal(fresh[0], first[0]), f"chunks of {chunk}")
        sums = [call(first[0], first[4], config=config)[0] for call in (buffer.combine, buffer.internode_combine)]
        bad.need(torch.equal(sums[0], sums[1]), f"sums with chunks of {chunk}")
    return list(bad)


def _own_memory(buffer: Buffer) -> list[str]:
    """get_local_buffer_tensor: views of one block that no call touches; the runtime object."""
    bad, size = cases.Failures(), torch.Size((3, 5))
    everything = buffer.get_local_buffer_tensor(torch.uint8)
    bad.need(everything.shape == (1 << 20,) and not everything.any(), "the whole buffer")
    part = buffer.get_local_buffer_tensor(torch.float32, size, offset=8)
    part.fill_(1.5)
    bad.need(part.shape == size and torch.equal(everything[8:68].view(torch.float32).view(size), part), "a part of it")
    end = buffer.get_local_buffer_tensor(torch.int32, offset=(1 << 20) - 8)
    bad.need(end.shape == (2,) and end.data_ptr() == everything[-8:].data_ptr(), "the end of it")
    everything.zero_()
    for wrong in (
        {"dtype": torch.float32, "offset": 2},
        {"dtype": torch.float32, "size": torch.Size((1 << 18, 2))},
        {"dtype": torch.uint8, "offset": 1 << 20},
        {"dtype": torch.uint8, "use_rdma_buffer": True},
    ):
        try:
            buffer.get_local_buffer_tensor(**wrong)
            bad.append(f"no error for {wrong}")
        except UsageError:
            pass
    runtime = buffer.runtime
    known = runtime is not None and (runtime.is_available(), runtime.get_num_rdma_ranks(), runtime.get_rdma_rank())
    bad.need(known == (True, 1, 0), f"runtime {known}")
    bad.need(runtime is not None and runtime.get_root_rdma_rank(True) == buffer.rank, "root rank")
    bad.need(buffer.is_sm90_compiled() and buffer.enable_shrink is False, "attributes")
    return list(bad)


def _rows_come_later(buffer: Buffer, world: World, key: str) -> list[str]:
    """With num_worst_tokens and async_finish the call returns though the last rank comes later; so does its mistake."""
    rank, bad, last = buffer.rank, cases.Failures(), buffer.group_size - 1
    counts, x = cases.layout_counts(buffer, world, rank, bad), world.x[rank]
    lanes = {"topk_idx": world.ids[rank], "topk_weights": world.weights[rank]}
    known = buffer.dispatch(x, **counts, **lanes)
    worst = sum(item.shape[0] for item in world.x) + 1
    if rank == last:
        for other in range(last):
            cases.wait_for(f"{key} {other}")
    options: dict[str, Any] = {"async_finish": True, "previous_event": Buffer.capture()}
    got = buffer.dispatch(x, **counts, **lanes, num_worst_tokens=worst, **options)
    if rank != last:
        bad.need(not got[5].event.query(), "complete before the last rank called")
        cases.here(f"{key} {rank}")
    got[5].current_stream_wait()
    n = known[0].shape[0]
    bad.need(
        cases.same(got[0][:n], known[0]) and not got[0][n:].any() and got[0].shape[0] == worst, "rows that came later"
    )
    bad.need(torch.equal(got[1][:n], known[1]) and bool((got[1][n:] == -1).all()), "ids that came later")
    same = all(torch.equal(a, b) for a, b in zip((*got[4][:3], got[4][5]), (*known[4][:3], known[4][5]), strict=True))
    bad.need(same and torch.equal(got[4][3][:n], known[4][3]), "the handle that came later")
    for name, changes, says in (
        ("rows", {"num_worst_tokens": 0 if not n else 1}, "num_worst_tokens=1"),
        (
            "counts",
            {"num_tokens_per_rank": counts["num_tokens_per_rank"] + 1, "num_worst_tokens": worst},
            "by the rout",
        ),
    ):
        mine = changes if rank == 0 else {"num_worst_tokens": worst}
        if name == "rows" and len(world.arrivals(0)) < 2:
            continue
        try:
            buffer.dispatch(x, **{**counts, **lanes, **mine}, **options)[5].current_stream_wait()
            bad.append(f"no error for {name}")
        except (UsageError, CommError) as error:
            bad.need(says in str(error) and isinstance(error, UsageError) == (rank == 0), f"{name}: {error}")
    again = buffer.dispatch(x, **counts)
    bad.need(cases.same(again[0], known[0]), "a call after mistakes")
    return [f"rank {rank}: {what}" for what in bad]


def _inputs_come_later(buffer: Buffer, world: World) -> list[str]:
    """previous_event: rows of every kind that are written behind it are those that are sent, and sums of them."""
    rank, bad, queue = buffer.rank, cases.Failures(), CommQueue(torch.device("cpu"), "inputs")
    counts = cases.layout_counts(buffer, world, rank, bad)
    handle = buffer.dispatch(world.x[rank], **counts)[4]
    lanes = {"topk_idx": world.ids[rank], "topk_weights": world.weights[rank]}
    for hidden, dtype in ((40, torch.bfloat16), (7, torch.float32), (24, torch.float8_e4m3fn)):
        x, wanted = torch.zeros(world.x[rank].shape[0], hidden).to(dtype), torch.tensor(rank + 1.0).to(dtype)
        scales = torch.zeros(2, x.shape[0]).t()
        sent = (x, scales) if dtype.itemsize == 1 else x

        def fill(x: torch.Tensor = x, scales: torch.Tensor = scales, wanted: torch.Tensor = wanted) -> None:
            time.sleep(0.05)
            x.copy_(wanted.expand(x.shape))
            scales.fill_(rank + 1)

        for given in ({"handle": handle}, {**counts, **lanes, "num_worst_tokens": handle.num_rows or 1}, counts):
            x.zero_()
            options = {"previous_event": queue.submit(fill), "async_finish": True}
            recv, *_, event = buffer.dispatch(sent, **given, **options)
            event.current_stream_wait()
            source = torch.tensor([source + 1.0 for source, _ in world.arrivals(rank)])[:, None]
            parts = recv if isinstance(recv, tuple) else (recv,)
            good = all(torch.equal(part[: source.shape[0]].float(), source.expand(-1, part.shape[1])) for part in parts)
            bad.need(good, f"{dtype} rows of {hidden} behind an event ({', '.join(given)})")
        if dtype.itemsize == 1:
            continue
        y, bias = torch.zeros(handle.num_rows, hidden).to(dtype), x.clone()
        written = queue.submit(lambda y=y: (time.sleep(0.05), y.fill_(1)))
        sums, _, event = buffer.combine(y, handle, bias=bias, previous_event=written, async_finish=True)
        event.current_stream_wait()
        want = bias.float() + handle[4].sum(1, keepdim=True)
        bad.need(torch.equal(sums.float(), want.to(dtype).float()), f"{dtype} sums behind an event")
    queue.close(1.0)
    return [f"rank {rank}: {what}" for what in bad]


def _blocks_come_later(buffer: Buffer, key: str) -> list[str]:
    """A dispatch with a hook returns though the last rank calls later; what was waited for it is counted for it."""
    rank, last, wrong = buffer.rank, buffer.group_size - 1, []
    world = cases.draw(7, (5, 3, 9, 4)[: last + 1], 64, 3, 2, torch.bfloat16, 0.1)
    call = (world.x[rank], world.ids[rank], BOUND, world.num_experts)
    for form in ({"use_fp8": False}, {"use_fp8": True}):
        known = buffer.low_latency_dispatch(*call, **form)
        if rank == last:
            for other in range(last):
                cases.wait_for(f"{key} {form} {other}")
            time.sleep(0.3)
        cost = torch.zeros(last + 1, dtype=torch.int64)
        got = buffer.low_latency_dispatch(*call, None, cost, **form, return_recv_hook=True)
        if rank != last:
            wrong += [] if not got[1].any() and not cost.any() else ["complete before the last rank called"]
            cases.here(f"{key} {form} {rank}")
        hook = got[4]
        assert hook is not None
        hook()
        parts = [(item if isinstance(item, tuple) else (item,)) for item in (got[0], known[0])]
        same = all(torch.equal(cases.raw(a), cases.raw(b)) for a, b in zip(*parts, strict=True))
        same &= torch.equal(got[1], known[1]) and all(torch.equal(got[2][i], known[2][i]) for i in (0, 1))
        wrong += [] if same else ["blocks that came later"]
        waited = int(cost[last] - cost.min())
        good = waited >= 250_000 if rank != last else waited == 0
        wrong += [] if good else [f"rank {rank} waited {cost.tolist()} us"]
        # A mistake of one rank reaches the others at their hook.
        bound = BOUND + (rank == 0)
        try:
            hook = buffer.low_latency_dispatch(*call[:2], bound, call[3], **form, return_recv_hook=True)[4]
            assert hook is not None
            hook()
            wrong.append("different bounds")
        except CommError as error:
            wrong += [] if "num_max_tokens_per_rank" in str(error) else [f"different bounds: {error}"]
    return wrong


def _everything(rank: int, backend: str, seed: int) -> list[str]:
    rng, wrong = random.Random(seed), []
    buffer = Buffer(dist.group.WORLD, 1 << 20, num_cpu_timeout_secs=30, backend=backend)
    for index, (hidden, dtype) in enumerate(((40, torch.bfloat16), (7, torch.float32))):
        tokens = tuple(rng.choice((1, 5, 14)) for _ in range(buffer.group_size))
        world = cases.draw(rng.randrange(2**31), tokens, hidden, 3, 2, dtype, 0.1)
        wrong += _chunk_sizes(buffer, world) + _inputs_come_later(buffer, world)
        wrong += _rows_come_later(buffer, world, f"rows {backend} {seed} {index}")
    wrong += _own_memory(buffer) + _blocks_come_later(buffer, f"blocks {backend} {seed}")
    buffer.destroy()
    return wrong


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_calls_that_wait_for_nobody(backend: str, fresh_random_data: int) -> None:
    assert run_ranks(3, _everything, backend, fresh_random_data) == [[]] * 3
