"""Stored entries, pipeline messages and all-gather sessions on every backend: results, bounds, lifetimes, mistakes."""

from __future__ import annotations

import inspect
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from comm_core import ElasticBuffer
from comm_core.backends import registry
from comm_core.backends.group_region import GroupRegion
from comm_core.runtime.errors import ClosedError, UsageError
from comm_core.shmem.region import SharedRegion
from tests.comm_core import cases, experimental_cases
from tests.comm_core.experimental_cases import expect_error
from tests.pool import run_ranks

MIB2 = 2 << 20
BACKENDS = registry.names_for("cpu")


def _good(rank: int, backend: str, seed: int) -> list[str]:
    bad = []
    with ElasticBuffer(backend=backend, num_cpu_timeout_secs=20) as buffer:
        bad += experimental_cases.engram(buffer, seed)
        bad += experimental_cases.sessions(buffer, seed)
        if buffer.num_ranks > 1:
            bad += experimental_cases.pipeline(buffer, seed)
            bad += experimental_cases.pipeline(buffer, seed + 1)
        bad += experimental_cases.barrier(buffer, seed)
        bad += experimental_cases.sessions(buffer, seed + 1, num_tensors=8)
    return bad


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results(backend: str, num_ranks: int, fresh_random_data: int) -> None:
    assert run_ranks(num_ranks, _good, backend, fresh_random_data) == [[]] * num_ranks


def _faults(rank: int, backend: str, seed: int) -> dict[str, int]:
    """How many mistakes the cases find in a region that does something wrong."""
    kind = {"collective": GroupRegion, "posix": SharedRegion}[backend]
    put, read = kind.put, kind.read

    def put_elsewhere(self: Any, where: str, lane: int, peers: Any, at: int, data: torch.Tensor) -> None:
        put(self, where, lane, peers, at, data.flip(0).contiguous())

    def next_row(self: Any, op: str, settings: Any, owner: Any, row: torch.Tensor, out: torch.Tensor) -> None:
        read(self, op, settings, owner, (row - 1).clamp_min(0), out)

    def next_owner(self: Any, op: str, settings: Any, owner: torch.Tensor, row: Any, out: torch.Tensor) -> None:
        read(self, op, settings, (owner + 1) % 2, row, out)

    def too_early(self: Any, where: str, lane: int, peers: Any, unreleased: int = 0) -> None:
        """Places are used again before they are free."""

    found = {}
    with ElasticBuffer(backend=backend, num_cpu_timeout_secs=20) as buffer:
        for name, attribute, fault, case in (
            ("data elsewhere", "put", put_elsewhere, experimental_cases.sessions),
            ("another row", "read", next_row, experimental_cases.engram),
            ("another rank", "read", next_owner, experimental_cases.engram),
            ("places not free", "settle", too_early, _hurried),
            ("none", "settle", kind.settle, _hurried),
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kind, attribute, fault)
                found[name] = len(case(buffer, seed))
    return found


def _hurried(buffer: ElasticBuffer, seed: int) -> list[str]:
    """More messages than there are places, received once all are sent, or after a while."""
    buffer.pp_set_config(64, 2)
    store, key = distributed_c10d._get_default_store(), f"sent {buffer._backend.agree('barrier', {}).result().number}"
    if buffer.rank == 0:
        for number in range(6):
            buffer.pp_send(torch.full((16,), float(number)), 1)
        store.set(key, "")
        return []
    end = time.monotonic() + 0.5
    while time.monotonic() < end and not store.check([key]):
        time.sleep(0.01)
    bad = []
    for number in range(6):
        t = torch.empty(16)
        buffer.pp_recv(t, 0)
        bad += [] if bool((t == number).all()) else [f"message {number}"]
    return bad


@pytest.mark.parametrize("backend", BACKENDS)
def test_planted_faults_are_found(backend: str, fresh_random_data: int) -> None:
    answers = run_ranks(2, _faults, backend, fresh_random_data)
    total = {name: sum(answer[name] for answer in answers) for name in answers[0]}
    assert total.pop("none") == 0
    assert all(total.values()), total


def _places(rank: int, backend: str) -> list[str]:
    """Where results lie, and until when."""
    bad = []
    buffer = ElasticBuffer(backend=backend, num_cpu_timeout_secs=20)
    x, ones = torch.arange(9.0) + 100 * rank, torch.ones(9)
    buffer.agrs_set_config(4096, 2)
    with buffer.agrs_new_session(enabled=False):
        pass
    with buffer.agrs_new_session():
        first = buffer.agrs_get_inplace_tensor((9,), torch.float32)
        first.copy_(x)
        gathered, handle = buffer.all_gather(first)
        handle()
        bad += [] if gathered[rank].data_ptr() == first.data_ptr() else ["an in-place tensor is copied"]
        bad += [] if gathered.shape == (2, 9) and not gathered.is_set_to(first) else ["shape"]
        second, handle = buffer.all_gather((x + 1,))
        handle()
        step = second.data_ptr() - gathered.data_ptr()
        bad += [] if step == 96 else [f"the second result {step} bytes behind the first"]  # 72 in steps of 32
    with buffer.agrs_new_session():
        again, later = buffer.all_gather(ones)
        later()
        bad += [] if again.data_ptr() == gathered.data_ptr() else ["a session does not use the memory again"]
        bad += [] if bool((gathered == 1).all()) else ["results are no views"]
        bad += expect_error(UsageError, "session 1, which has ended", handle)
        _, unread = buffer.all_gather(ones)
    bad += expect_error(UsageError, "session 2, which has ended", unread)
    storage = torch.full((3, 8), float(rank)).bfloat16()
    buffer.engram_write(storage)
    early = buffer.engram_fetch(torch.tensor([[0]], dtype=torch.int32))
    old = early()[0]
    late = buffer.engram_fetch(torch.tensor([[5]], dtype=torch.int32))
    bad += expect_error(UsageError, "the hook of fetch 1 after fetch 2", early)
    data = late()[0]
    bad += [] if data.data_ptr() == old.data_ptr() and bool((old == 1).all()) else ["fetched data are no view"]
    buffer.close()
    for call in (late, unread, buffer.create_agrs_session, lambda: buffer.engram_write(storage)):
        bad += expect_error(ClosedError, "", call)
    for more in (lambda: buffer.pp_send(ones, 1 - rank), lambda: buffer.all_gather(ones)):
        bad += expect_error(ClosedError, "", more)
    # Memory stays under tensors that are still held.
    bad += [] if bool((gathered == 1).all()) and bool((data == 1).all()) else ["memory went with the buffer"]
    gathered.fill_(3)
    return bad + [f"thread {item.name}" for item in threading.enumerate() if item.name.startswith("ep-")]


def _waits(rank: int, backend: str) -> list[str]:
    """Sends wait for a place and not before; all-gathers run beside the caller; modes of the caller are kept to."""
    bad = []
    with ElasticBuffer(backend=backend, num_cpu_timeout_secs=20) as buffer:
        buffer.pp_set_config(64, 2)
        if rank == 0:
            for number in range(2):  # nobody receives
                buffer.pp_send(torch.full((16,), float(number)), 1)
            third = threading.Thread(target=lambda: buffer.pp_send(torch.full((16,), 2.0), 1), daemon=True)
            third.start()
            third.join(0.2)
            bad += [] if third.is_alive() else ["a third message in two places"]
        dist.barrier()
        for number in range(3 * rank):
            t = torch.empty(16)
            buffer.pp_recv(t, 0)
            bad += [] if bool((t == number).all()) else [f"message {number}"]
        if rank == 0:
            third.join(10)
            bad += ["the third message does not go"] if third.is_alive() else []
        buffer.agrs_set_config(4096, 4)
        with buffer.agrs_new_session():
            if rank == 1:
                dist.barrier()  # the other rank is through its call
            gathered, handle = buffer.all_gather(torch.full((4,), float(rank)))
            if rank == 0:
                dist.barrier()
            handle()
            bad += [] if gathered.tolist() == [[0.0] * 4, [1.0] * 4] else ["gathered"]
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                bad += experimental_cases.engram(buffer, 1) + experimental_cases.sessions(buffer, 2, num_tensors=8)
                bad += experimental_cases.pipeline(buffer, 3, num_messages=4)
                bad += cases.run(buffer, cases.Case(4, (5, 3), 8, 2, 2, torch.float32, do_expand=True, num_bias=1))
    return bad


def _bounds(rank: int, backend: str) -> list[str]:
    """A buffer given by bytes holds what the hints say, and no more."""
    bad = []
    area, stored = ElasticBuffer.get_engram_storage_size_hint(MIB2 // 64, 32, 1)
    with ElasticBuffer(
        num_bytes=area + stored, num_cpu_bytes=stored, backend=backend, num_cpu_timeout_secs=20
    ) as buffer:
        bad += [] if buffer._limits.num_bytes == area else ["stored entries are not taken from what dispatch may use"]
        full = torch.zeros(MIB2 // 64, 32).bfloat16()
        buffer.engram_write(full)
        buffer.engram_fetch(torch.zeros(MIB2 // 64, 1, dtype=torch.int32))()
        few = torch.zeros(MIB2 // 64 + 1, 1, dtype=torch.int32)
        bad += expect_error(UsageError, f"allowed: {area} bytes", lambda: buffer.engram_fetch(few))
        bad += expect_error(
            UsageError, f"allowed: {stored} bytes", lambda: buffer.engram_write(torch.cat([full, full[:1]]))
        )
        buffer.pp_set_config(MIB2 // 8, 4)
        bad += expect_error(
            UsageError, "tensors in flight of 4194816 bytes", lambda: buffer.pp_set_config(MIB2 // 8 + 1, 4)
        )
        buffer.agrs_set_config(area + stored, 1)
        bad += expect_error(
            UsageError, f"allowed: {area + stored} bytes", lambda: buffer.agrs_set_config(area + stored + 1, 1)
        )
    with ElasticBuffer(num_bytes=MIB2, backend=backend, num_cpu_timeout_secs=20) as buffer:
        bad += expect_error(UsageError, "allowed: 0 bytes", lambda: buffer.engram_write(full))
    size = ElasticBuffer.get_agrs_num_max_session_bytes
    bad += [] if size(None, (3, 5), torch.bfloat16) == 64 == size(None, [3, 5], torch.bfloat16) else ["one shape"]
    bad += [] if size(None, [(3, 5), torch.Size([8]), ()], torch.float32) == 128 + 64 + 32 else ["shapes"]
    return bad


def _two_ranks(rank: int, backend: str) -> dict[str, list[str]]:
    return {piece.__name__: piece(rank, backend) for piece in (_places, _waits, _bounds)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_lifetimes_waits_and_bounds(backend: str) -> None:
    good: dict[str, list[str]] = {"_places": [], "_waits": [], "_bounds": []}
    assert run_ranks(2, _two_ranks, backend) == [good, good]


def _one_rank(rank: int, backend: str) -> list[str]:
    """What one rank may do while the others do nothing."""
    bad = []
    with ElasticBuffer(backend=backend, num_cpu_timeout_secs=20) as buffer:
        able = buffer._backend.capabilities.one_sided_reads
        buffer.engram_write(torch.full((2, 4), float(rank)).bfloat16())
        if rank == 1 or not able:
            indices = torch.arange(2 * buffer.num_ranks, dtype=torch.int32).view(-1, 1)
            data, _ = buffer.engram_fetch(indices)()
            bad += [] if data[:, 0].tolist() == [0, 0, 1, 1, 2, 2] else [f"{data}"]
        if able and rank == 1:
            wrong = torch.tensor([[6]], dtype=torch.int32)
            bad += expect_error(UsageError, "an entry number of 6; allowed: 0 to 5", lambda: buffer.engram_fetch(wrong))
        dist.barrier()
    return bad


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fetch_by_one_rank(backend: str) -> None:
    assert run_ranks(3, _one_rank, backend) == [[], [], []]


def _alone(rank: int) -> None:
    with ElasticBuffer() as buffer:
        assert buffer.get_physical_domain_size() == (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (1, 1)
        with pytest.raises(UsageError, match="pp_set_config on one rank"):
            buffer.pp_set_config(64, 2)


def test_one_rank_has_no_neighbours() -> None:
    run_ranks(1, _alone)


def test_names_of_deep_eps_test_programs() -> None:
    from comm_core.deep_ep.utils import envs, math, testing

    for module, names in (
        (envs, ("init_dist", "dist_print", "get_rdma_gbs")),
        (math, ("per_token_cast_to_fp8",)),
        (testing, ("bench_kineto",)),
    ):
        assert all(callable(getattr(module, name)) for name in names)


SIGNATURES = {
    "get_engram_storage_size_hint": "num_entries, hidden, num_max_tokens_per_rank, dtype=torch.bfloat16",
    "engram_write": "self, storage, sf=None",
    "engram_fetch": "self, indices, num_qps=0, use_tma_aligned_col_major_sf=False",
    "get_pp_buffer_size_hint": "num_max_tensor_bytes, num_max_inflight_tensors",
    "pp_set_config": "self, num_max_tensor_bytes, num_max_inflight_tensors",
    "pp_send": "self, t, dst_rank_idx, num_sms=0",
    "pp_recv": "self, t, src_rank_idx, num_sms=0",
    "get_agrs_num_max_session_bytes": "group, shapes, dtype",
    "get_agrs_buffer_size_hint": "group, num_max_session_bytes",
    "agrs_set_config": "self, num_max_session_bytes, num_max_all_gathers_per_session",
    "create_agrs_session": "self",
    "destroy_agrs_session": "self",
    "agrs_new_session": "self, enabled=True",
    "agrs_get_inplace_tensor": "self, shapes, dtype",
    "all_gather": "self, t",
    "get_physical_domain_size": "self",
    "get_logical_domain_size": "self",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_of_deep_ep(name: str) -> None:
    found = inspect.signature(getattr(ElasticBuffer, name)).parameters.values()
    shown = [item.name if item.default is item.empty else f"{item.name}={item.default}" for item in found]
    assert ", ".join(shown) == SIGNATURES[name]


def test_size_hints() -> None:
    hint = ElasticBuffer.get_engram_storage_size_hint
    assert hint(1, 1, 1) == (MIB2, MIB2)
    # Entries of 7 bf16 values take 32 bytes each; 65,536 of them are 2 MiB.
    assert hint(65536, 7, 65537) == (2 * MIB2, MIB2)
    assert hint(65536, 33, 65537, torch.float8_e4m3fn) == (3 * MIB2, 2 * MIB2)
    assert ElasticBuffer.get_pp_buffer_size_hint(1, 1) == MIB2
    assert ElasticBuffer.get_pp_buffer_size_hint(MIB2 // 4 - 31, 3) == 3 * MIB2
    assert ElasticBuffer.get_pp_buffer_size_hint(MIB2 // 4 + 1, 3) == 4 * MIB2
    assert ElasticBuffer.get_agrs_buffer_size_hint(None, MIB2 + 1) == 2 * MIB2
    for call in (
        lambda: hint(0, 1, 1), lambda: ElasticBuffer.get_pp_buffer_size_hint(1, 0),
        lambda: ElasticBuffer.get_agrs_buffer_size_hint(None, 0),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="an int of at least 1"):
            call()
