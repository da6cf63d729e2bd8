"""Random uses of the experimental calls on a buffer of any backend and device, compared with what all ranks drew.

As in `cases`, every rank draws the data of all ranks from one seed, so that no test data cross the group under test.
Each function returns what was wrong on this rank. They hold what DeepEP's test_engram, test_pp, test_agrs and
test_barrier assert, and more sizes and dtypes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from comm_core import ElasticBuffer, fp8
from tests.comm_core.cases import same_bytes

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def engram(buffer: ElasticBuffer, seed: int) -> list[str]:
    """Entries written and fetched: bf16 and FP8, both layouts of scales, again and again."""
    rng, bad = random.Random(seed), []
    for round_ in range(6):
        dtype = rng.choice((BF16, FP8)) if round_ > 1 else (BF16, FP8)[round_]
        bad += _engram_round(buffer, rng, dtype, large=round_ == 0)
    return bad


def _engram_round(buffer: ElasticBuffer, rng: random.Random, dtype: torch.dtype, *, large: bool) -> list[str]:
    """One table. A `large` one is never so small that a wrong row could be the right one."""
    num_entries, hidden = rng.choice((1, 7, 64)), rng.choice((3, 16, 128, 200))
    num_entries = 64 if large else num_entries
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    values = torch.randn(buffer.num_ranks * num_entries, hidden, generator=generator)
    table, scales = values.to(BF16), None
    if dtype == FP8:
        table, scales = fp8.per_token_cast(values, packed=rng.random() < 0.5)
    mine = slice(buffer.rank * num_entries, (buffer.rank + 1) * num_entries)
    buffer.engram_write(table[mine].to(buffer.device), None if scales is None else scales.to(buffer.device))
    bad: list[str] = []
    for _ in range(3):
        shapes = [(rng.choice((0, 1, 5, 33)), rng.choice((1, 4))) for _ in range(buffer.num_ranks)]
        shapes = [(33, 4)] * buffer.num_ranks if large else shapes
        turned, seed = rng.random() < 0.5, rng.randrange(2**31)
        own = torch.Generator().manual_seed(seed + buffer.rank)
        shape = shapes[buffer.rank]
        indices = torch.randint(0, table.shape[0], shape, generator=own, dtype=torch.int32)
        given = indices.clone().to(buffer.device)
        hook = buffer.engram_fetch(given, use_tma_aligned_col_major_sf=turned)
        given.fill_(-1)  # the call has read them
        data, sf = hook()
        what = f"fetch {list(shape)} of {num_entries} x {hidden} {dtype} on rank {buffer.rank}/{buffer.num_ranks}"
        rows = indices.view(-1).long()
        bad += [] if same_bytes(data, _side_by_side(table, rows, shape)) else [what]
        if (sf is None) != (scales is None):
            bad.append(f"{what}: sf")
        elif sf is not None and scales is not None:
            bad += [] if same_bytes(sf, _side_by_side(scales, rows, shape)) else [f"{what}: values of sf"]
            aligned = max(4, -(-shape[0] // 4) * 4)
            bad += [] if not turned or sf.stride() == (1, aligned) else [f"{what}: strides {sf.stride()} of sf"]
        bad += [] if data is hook()[0] else [f"{what}: the hook a second time"]
    return bad


def _side_by_side(table: torch.Tensor, rows: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The rows of each token after each other."""
    picked = table.view(torch.uint8)[rows].view(table.dtype)
    return picked.view(shape[0], shape[1] * table.shape[1])


def pipeline(buffer: ElasticBuffer, seed: int, num_messages: int = 40) -> list[str]:
    """Messages around the ring in a random order that all ranks can keep to, with pauses."""
    rng, bad = random.Random(seed), []
    num_places, most = rng.choice((1, 2, 4)), 32 * rng.choice((1, 7, 100))
    buffer.pp_set_config(most, num_places)
    flying: dict[tuple[int, int], list[int]] = {}
    order: list[tuple[str, int, int, int]] = []
    num_sent = 0
    while num_sent < num_messages or any(flying.values()):
        src = rng.randrange(buffer.num_ranks)
        dst = (src + rng.choice((1, -1))) % buffer.num_ranks
        queue = flying.setdefault((src, dst), [])
        if queue and (len(queue) == num_places or num_sent == num_messages or rng.random() < 0.5):
            order.append(("recv", src, dst, queue.pop(0)))
        elif num_sent < num_messages and len(queue) < num_places:
            order.append(("send", src, dst, num_sent))
            queue.append(num_sent)
            num_sent += 1
    num_bytes = [32 * rng.randint(0, most // 32) for _ in range(num_messages)]
    pauses = random.Random(seed + buffer.rank)
    for kind, src, dst, number in order:
        if buffer.rank != (src if kind == "send" else dst):
            continue
        generator = torch.Generator().manual_seed(seed + number)
        wanted = torch.randint(0, 256, (num_bytes[number],), generator=generator, dtype=torch.uint8)
        if pauses.random() < 0.2:
            time.sleep(0.002)
        if kind == "send":
            t = wanted.to(buffer.device)
            buffer.pp_send(t, dst)
            t.fill_(0)  # free to change after the call
            continue
        result = torch.empty_like(wanted, device=buffer.device)
        buffer.pp_recv(result, src)
        if not same_bytes(result, wanted):
            bad.append(f"message {number} of {num_bytes[number]} bytes from rank {src} to {dst}, {num_places} places")
    return bad


def sessions(buffer: ElasticBuffer, seed: int, num_tensors: int = 48) -> list[str]:
    """All-gathers in sessions: single and several, in place or not, waited for in any order."""
    rng, bad = random.Random(seed), []
    most_calls, biggest = rng.choice((2, 4)), 4 * 5 * 33
    shapes = [(biggest,)] * (3 * most_calls)
    num_bytes = buffer.get_agrs_num_max_session_bytes(buffer.group, shapes, torch.int64)
    buffer.agrs_set_config(num_bytes, most_calls)
    own = random.Random(seed + 1 + buffer.rank)
    todo = num_tensors
    while todo > 0:
        with buffer.agrs_new_session():
            handles: list[tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]] = []
            for _ in range(rng.randint(1, most_calls)):
                drawn = [_drawn(buffer, rng) for _ in range(rng.randint(1, 3))]
                single = len(drawn) == 1 and rng.random() < 0.5
                todo -= len(drawn)
                handles.append(_gather(buffer, drawn, single, own))
                while handles and rng.random() < 0.4:
                    bad += _waited(buffer, *handles.pop(rng.randrange(len(handles))))
            rng.shuffle(handles)
            for handle, pairs in handles:
                bad += _waited(buffer, handle, pairs)
    return bad


def _drawn(buffer: ElasticBuffer, rng: random.Random) -> torch.Tensor:
    """Parts of all ranks, [num_ranks, ...]."""
    shape = [rng.choice((0, 1, 2, 3, 4, 4, 5)), rng.choice((1, 5)), rng.choice((1, 8, 33))][: rng.randint(1, 3)]
    dtype = rng.choice((BF16, torch.float32, torch.int64, torch.uint8, FP8))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randint(0, 100, (buffer.num_ranks, *shape), generator=generator).to(dtype)


def _gather(
    buffer: ElasticBuffer, drawn: list[torch.Tensor], single: bool, own: random.Random
) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Starts one all-gather: its handle, and results with what they should be."""
    given: list[torch.Tensor] = [wanted[buffer.rank].to(buffer.device) for wanted in drawn]
    if own.random() < 0.5:  # in place: each rank as it likes
        if len({item.dtype for item in given}) == 1:
            shapes = tuple(tuple(item.shape) for item in given)
            places = buffer.agrs_get_inplace_tensor(shapes[0] if single else shapes, given[0].dtype)
            places = [places] if single else list(places)
        else:  # of one dtype at a time only the first has a known place
            places = [buffer.agrs_get_inplace_tensor(tuple(given[0].shape), given[0].dtype), *given[1:]]
        for place, item in zip(places, given, strict=True):
            if place is not item:
                place.view(torch.uint8).copy_(item.view(torch.uint8))
        given = places
    *outs, handle = buffer.all_gather(given[0] if single else given)
    return handle, list(zip(outs, drawn, strict=True))


def _waited(buffer: ElasticBuffer, handle: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
    handle()
    return [
        f"gathered {list(wanted.shape)} {wanted.dtype} on rank {buffer.rank}/{buffer.num_ranks}"
        for got, wanted in pairs
        if not same_bytes(got, wanted)
    ]


def barrier(buffer: ElasticBuffer, seed: int) -> list[str]:
    """No rank leaves a barrier before all have come to it."""
    rng, times = random.Random(seed + buffer.rank), []
    for _ in range(20):
        if rng.random() < 0.3:
            time.sleep(0.003)
        came = time.monotonic()
        buffer.barrier()
        times.append((came, time.monotonic()))
    everybody: list[Any] = [None] * buffer.num_ranks
    dist.all_gather_object(everybody, times, group=buffer.group)
    return [
        f"barrier {number}: a rank left before another came"
        for number, ranks in enumerate(zip(*everybody, strict=True))
        if max(came for came, _ in ranks) > min(left for _, left in ranks)
    ]


def expect_error(kind: type[Exception], says: str, call: Callable[[], Any], limit: float = 5.0) -> list[str]:
    """What is wrong with the way `call` fails."""
    start = time.monotonic()
    try:
        call()
    except kind as error:
        late = [f"took {time.monotonic() - start:.1f} s: {error}"] if time.monotonic() - start > limit else []
        return late + ([] if says in str(error) else [f"{says!r} not in {type(error).__name__}: {error}"])
    except Exception as error:
        return [f"{type(error).__name__} instead of {kind.__name__} {says!r}: {error}"]
    return [f"no error: {says}"]
