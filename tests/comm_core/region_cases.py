"""Uses of regions on the gpu backend, of whatever device: results, lifetimes, mistakes, lost ranks, planted faults.

Each function is called on every rank with a buffer and returns what was wrong there; data are drawn from one seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core import ElasticBuffer
from comm_core.backends.gpu_region import GpuRegion, GpuRegions
from comm_core.runtime.errors import ClosedError, CommError, CommTimeoutError, UnavailableError, UsageError
from tests.comm_core import experimental_cases
from tests.comm_core.cases import same_bytes
from tests.comm_core.experimental_cases import expect_error

_SIZES = (0, 1, 16, 17, 100, 4096)
_WIDTHS = (1, 3, 4, 16, 20, 48, 1040)


def uses(buffer: ElasticBuffer, seed: int, num_messages: int = 40, num_tensors: int = 48) -> list[str]:
    """The experimental calls, by the copy engine and by kernels."""
    backend: Any = buffer._backend
    bad = experimental_cases.engram(buffer, seed)
    for sms in (0, 2):
        backend.region_sms = sms
        bad += [f"{sms} SMs: {line}" for line in experimental_cases.sessions(buffer, seed + sms, num_tensors)]
        if buffer.num_ranks > 1:
            found = experimental_cases.pipeline(buffer, seed + sms, num_messages)
            bad += [f"{sms} SMs: {line}" for line in found]
    backend.region_sms = 0
    return bad + experimental_cases.barrier(buffer, seed)


def messages(buffer: ElasticBuffer, seed: int) -> list[str]:
    """Messages of any size between all pairs on two lanes, and tables of any width, of one region."""
    rng, bad, rank, backend = random.Random(seed), [], buffer.rank, buffer._backend
    region = backend.open_region("pp_set_config", 1 << 16, 2)
    others, step = [peer for peer in range(buffer.num_ranks) if peer != rank], 1 << 13
    for turn in range(8):
        lane, num_bytes = turn % 2, rng.choice(_SIZES)
        drawn = [_bytes(seed + 100 * turn + peer, num_bytes) for peer in range(buffer.num_ranks)]
        # Each sender has a place on each lane; the message lies there already in every other pair of turns.
        first = lane * buffer.num_ranks * step
        place = region.local[first + rank * step :][:num_bytes]
        own = place if turn % 4 > 1 else torch.empty_like(place)
        region.settle("a turn", lane, others)
        own.copy_(drawn[rank])
        region.put("a message", lane, others, first + rank * step, own)
        for peer in others:
            place = region.local[first + peer * step :][:num_bytes]
            out = place if turn % 3 else torch.full((num_bytes,), 77, dtype=torch.uint8, device=buffer.device)
            region.take(f"message {turn}", lane, peer, first + peer * step, out)
            bad += [] if same_bytes(out, drawn[peer]) else [f"{num_bytes} bytes from rank {peer} on lane {lane}"]
        region.release(lane, others)
    bad += _reads(buffer, region, rng, seed)
    region.close()
    region.close()
    return bad + ([] if region.local.numel() == 0 else ["a closed region has memory"])


def _bytes(seed: int, num_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)


def _reads(buffer: ElasticBuffer, region: Any, rng: random.Random, seed: int) -> list[str]:
    buffer.barrier()
    parts = torch.stack([_bytes(seed + peer, region.num_bytes) for peer in range(buffer.num_ranks)])
    region.local.copy_(parts[buffer.rank])
    buffer.barrier()
    bad = []
    for width in _WIDTHS:
        count, rows = rng.choice((0, 1, 33)), region.num_bytes // width
        generator = torch.Generator().manual_seed(seed + width)
        owner = torch.randint(0, buffer.num_ranks, (count,), generator=generator)
        row = torch.randint(0, rows, (count,), generator=generator)
        row[-1:] = rows - 1
        out = torch.empty(count, width, dtype=torch.uint8, device=buffer.device)
        region.read("engram_fetch", {}, owner.to(buffer.device), row.to(buffer.device), out)
        tables = parts[:, : rows * width].view(buffer.num_ranks, rows, width)
        bad += [] if same_bytes(out, tables[owner, row]) else [f"{count} rows of {width} bytes"]
    far = torch.tensor([10**12, -5], device=buffer.device)
    out = torch.empty(2, 16, dtype=torch.uint8, device=buffer.device)
    region.read("engram_fetch", {}, far, far, out)
    wanted = torch.stack([parts[-1, -16:], parts[0, :16]])
    return bad + ([] if same_bytes(out, wanted) else ["numbers out of range are not held to the tables"])


def lifetimes(make: Callable[[], ElasticBuffer]) -> list[str]:
    """Results are views of memory that stays under them, and is given back behind the last of them."""
    bad: list[str] = []
    buffer = make()
    left = GpuRegions._left
    before = len(left)
    ones = torch.ones(9, device=buffer.device)
    buffer.agrs_set_config(4096, 2)
    with buffer.agrs_new_session():
        first = buffer.agrs_get_inplace_tensor((9,), torch.float32)
        first.copy_(ones * buffer.rank)
        gathered, handle = buffer.all_gather(first)
        handle()
        same = gathered[buffer.rank].data_ptr() == first.data_ptr()
        bad += [] if same else ["an in-place tensor is copied"]
        second, handle = buffer.all_gather((ones,))
        handle()
        step = second.data_ptr() - gathered.data_ptr()
        bad += [] if step == buffer.num_ranks * 36 + -buffer.num_ranks * 36 % 32 else [f"places {step} bytes apart"]
        wanted = torch.arange(float(buffer.num_ranks)).view(-1, 1).expand(-1, 9)
        bad += [] if torch.equal(gathered.cpu(), wanted) else ["gathered"]
    buffer.agrs_set_config(8192, 2)  # the region before is closed, with results over it
    del first, second
    bad += [] if torch.equal(gathered.cpu(), wanted) else ["memory went with its region"]
    bad += [] if len(left) == before + 1 else [f"{len(left) - before} parts kept for their tensors"]
    buffer.engram_write(ones.bfloat16().view(1, 9))
    buffer.close()
    bad += [] if torch.equal(gathered.cpu(), wanted) else ["memory went with the buffer"]
    del gathered
    with make() as again:
        again.agrs_set_config(64, 1)
        bad += [] if len(left) == before else [f"{len(left) - before} parts are kept for nobody"]
    for call in (buffer.create_agrs_session, lambda: buffer.pp_send(ones, 0)):
        bad += expect_error(ClosedError, "", call)
    return bad


def mistakes(buffer: ElasticBuffer, seed: int) -> list[str]:
    """What is wrong on rank 1 alone, or differs, raises on all ranks, and the buffer works on."""
    bad, last, device = [], buffer.rank == 1, buffer.device
    table = torch.zeros(4, 8, dtype=torch.bfloat16, device=device)
    x = torch.ones(4, device=device)

    def gather(wrong: Callable[[], Any]) -> None:
        """In a session; ranks that do nothing wrong hear of it at its end at the latest."""
        buffer.create_agrs_session()
        try:
            if last:
                wrong()
            for _ in range(2):
                buffer.all_gather(x)[1]()
        finally:
            buffer._sessions.give_up()
        buffer.barrier()

    own = UsageError if last else CommError
    for says, kind, call in (
        ("storage of torch.float32", own, lambda: buffer.engram_write(table.float() if last else table)),
        ("num_entries: rank 0 4, rank 1 3", CommError, lambda: buffer.engram_write(table[:3] if last else table)),
        ("num_max_session_bytes=-1", own, lambda: buffer.agrs_set_config(-1 if last else 1024, 2)),
        ("num_max_session_bytes: rank 0", CommError, lambda: buffer.agrs_set_config(992 if last else 1024, 2)),
        ("num_max_inflight_tensors=0", own, lambda: buffer.pp_set_config(64, 0 if last else 2)),
    ):
        bad += expect_error(kind, says, call)
    bad += _no_memory(buffer, last)
    buffer.agrs_set_config(1024, 4)
    for says, wrong in (
        ("all_gather of nothing", lambda: buffer.all_gather([])),
        ("a size in shapes", lambda: buffer.agrs_get_inplace_tensor((-1,), torch.float32)),
        ("a session in a session", buffer.create_agrs_session),
    ):
        bad += [f"in a session: {line}" for line in expect_error(own, says, lambda wrong=wrong: gather(wrong))]
        with buffer.agrs_new_session():
            out, handle = buffer.all_gather(x * buffer.rank)
            handle()
            good = out[:, 0].tolist() == list(range(buffer.num_ranks))
            bad += [] if good else [f"after {says!r}: {out.tolist()}"]
    return bad + experimental_cases.sessions(buffer, seed, num_tensors=8) + experimental_cases.engram(buffer, seed)


def _no_memory(buffer: ElasticBuffer, last: bool) -> list[str]:
    """Rank 1 has no memory for a larger region: no rank opens it, and none uses the one it was to take the place of."""
    library = buffer._backend._channel.library  # type: ignore[attr-defined]

    def none(device: int, num_bytes: int) -> int:
        raise CommError("mt_alloc failed: out of memory")

    buffer.agrs_set_config(64, 2)
    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setattr(library, "alloc", none)
        said = "rank 1: mt_alloc failed: out of memory"
        bad = expect_error(UnavailableError, said, lambda: buffer.agrs_set_config(1 << 22, 2))
    buffer.create_agrs_session()
    x = torch.ones(4, device=buffer.device)
    bad += expect_error(ClosedError, "configure it again", lambda: buffer._sessions._region.put("", 0, [], 0, x))  # type: ignore[union-attr]
    buffer._sessions._session.ended = True
    return bad


def lost(make: Callable[[float], ElasticBuffer], limit: float) -> list[str]:
    """A message that nobody sends, and one that nobody receives: the peer is named, and a new buffer works."""
    bad: list[str] = []
    for kind in ("recv", "send"):
        buffer = make(limit)
        buffer.pp_set_config(64, 1)
        t = torch.ones(16, device=buffer.device)
        dist.barrier()
        if buffer.rank == 0:
            start, last = time.monotonic(), buffer.num_ranks - 1
            if kind == "recv":
                buffer.pp_recv(t, last)
            else:
                buffer.pp_send(t, last)
                buffer.pp_send(t, last)  # waits for the place of the first
            said = f"pp_{kind} {'from' if kind == 'recv' else 'to'} rank {last} (message {1 if kind == 'recv' else 2})"
            bad += expect_error(CommTimeoutError, said, buffer.barrier, limit + 5)
            bad += [] if time.monotonic() - start > limit / 2 else ["too early"]
            bad += expect_error(CommError, "build a new one", partial(buffer.pp_send, t, last), 1.0)
            bad += (
                []
                if (torch.arange(3, device=buffer.device) + 1).tolist() == [1, 2, 3]
                else ["the device does not work any more"]
            )
        dist.barrier()
        buffer._backend.close(collective=False)
        dist.barrier()
    with make(30.0) as again:
        bad += experimental_cases.sessions(again, 3, num_tensors=4)
        bad += experimental_cases.pipeline(again, 3, num_messages=6)
    return bad


def hurried(buffer: ElasticBuffer, seed: int) -> list[str]:
    """More messages than there are places, sent at once and received later."""
    buffer.pp_set_config(64, 2)
    if buffer.rank == 0:
        for number in range(6):
            buffer.pp_send(torch.full((16,), float(number), device=buffer.device), 1)
        return []
    time.sleep(0.2)
    bad = []
    for number in range(6 if buffer.rank == 1 else 0):
        t = torch.empty(16, device=buffer.device)
        buffer.pp_recv(t, 0)
        bad += [] if t.tolist() == [float(number)] * 16 else [f"message {number}"]
    return bad


def faults(buffer: ElasticBuffer, seed: int) -> dict[str, int]:
    """How many mistakes the cases find in a region that does something wrong."""
    put, read, words = GpuRegion.put, GpuRegion.read, GpuRegion._words

    def put_elsewhere(self: Any, where: str, lane: int, peers: Any, at: int, data: torch.Tensor) -> None:
        put(self, where, lane, peers, at, data.flip(0).contiguous())

    def next_row(self: Any, op: str, settings: Any, owner: Any, row: torch.Tensor, out: torch.Tensor) -> None:
        read(self, op, settings, owner, (row - 1).clamp_min(0), out)

    def next_owner(self: Any, op: str, settings: Any, owner: torch.Tensor, row: Any, out: torch.Tensor) -> None:
        read(self, op, settings, (owner + 1) % 2, row, out)

    def no_wait(self: Any, kernel: str, where: str, some: Any, stream: int) -> None:
        """Places are used again before they are free."""
        if kernel != "region_await" or "pp_send" not in where:
            words(self, kernel, where, some, stream)

    found = {}
    for name, attribute, fault, case in (
        ("data elsewhere", "put", put_elsewhere, experimental_cases.sessions),
        ("another row", "read", next_row, messages),
        ("another rank", "read", next_owner, experimental_cases.engram),
        ("places not free", "_words", no_wait, hurried),
        ("none", "_words", words, hurried),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GpuRegion, attribute, fault)
            found[name] = len(case(buffer, seed))
            buffer.barrier()
    return found
