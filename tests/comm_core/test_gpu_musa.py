"""The gpu backend's MUSA path on the CPU: a double of torch_musa, and the kernels' twin (tests/twin).

What runs here is the host code of the backend, as a device of the kind "musa" drives it: streams, events, memory that
others open, mapped words, calls that differ or never come. The double fails where work is ordered by nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from comm_core import ElasticBuffer
from comm_core.runtime import device as devices
from comm_core.runtime.errors import MTMoEError, PeerTimeout
from tests.comm_core import cases, conformance
from tests.comm_core.cases import Case
from tests.dist import RankFailure
from tests.pool import Pool
from tests.twin.tensors import PlayedTensor
from tests.twin.torch_musa import Played, played, why_not

BASE = Case(1, (6, 4, 5), 24, 4, 3, torch.bfloat16)
CASES = [
    BASE,
    replace(BASE, do_expand=True, alignment=4, num_bias=2),
    replace(BASE, tokens=(0, 7, 0), asynchronous=True, previous=True),
    replace(BASE, hidden=136, scales="packed", column_major=True, do_expand=True, alignment=2),
    replace(BASE, hidden=8, dtype=torch.float32, masked=1.1, num_bias=1),
    replace(BASE, one_expert=True, weights=False, prepared=True, do_expand=True),
    replace(BASE, static=True, bound=9, dtype=torch.float16),
    replace(BASE, static=True, bound=9, do_expand=True, hidden=128, scales="fp32", asynchronous=True),
]
TIMEOUT = 1.0
pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


def _buffer(rank: int, **options: Any) -> ElasticBuffer:
    # Two devices: the third rank shares one with the first.
    device = devices.of("musa", rank % 2)
    settings: dict[str, Any] = {"backend": "gpu", "device": device, "num_cpu_timeout_secs": 20} | options
    return ElasticBuffer(dist.group.WORLD, **settings)


def _case(case: Case, seed: int) -> Case:
    tokens = case.tokens[: dist.get_world_size()]
    return replace(case, seed=seed, tokens=tokens, num_topk=min(case.num_topk, case.num_local * len(tokens)))


def _conform(rank: int, seed: int) -> list[str]:
    bad = []
    with played():
        for multiple in (True, False):
            with _buffer(rank, allow_multiple_reduction=multiple) as buffer:
                some = CASES if multiple else [case for case in CASES if case.do_expand][:2]
                for index, case in enumerate(some):
                    bad += cases.run(buffer, _case(case, seed + index))
    return bad


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_equal_to_the_reference(ranks: Pool, num_ranks: int, fresh_random_data: int) -> None:
    assert ranks.run(num_ranks, _conform, fresh_random_data) == [[]] * num_ranks


def _said(call: Callable[[], object]) -> tuple[str, str]:
    """The class and the text of the error that a call ends with."""
    try:
        call()
    except MTMoEError as error:
        return type(error).__name__, str(error)
    return "none", ""


def _mistakes(rank: int, seed: int) -> dict[str, tuple[str, str]]:
    """What the ranks hear of calls that are wrong on rank 1 alone or differ; the buffer works on after each."""
    found, last, case = {}, rank == 1, _case(BASE, seed)
    data = cases.draw(case)
    with played(), _buffer(rank) as buffer:
        x, ids = data.x[rank].to(buffer.device), data.topk_idx[rank].to(buffer.device)
        wrong = ids.clone()
        wrong[0, 0] = case.num_experts

        def dispatch(rows: torch.Tensor, indices: torch.Tensor, num_experts: int = case.num_experts) -> None:
            handle = buffer.dispatch(rows, indices, num_experts=num_experts)[3]
            handle.recv_src_metadata.tolist()

        found["id"] = _said(lambda: dispatch(x, wrong if last else ids))
        found["id, works on"] = _said(lambda: dispatch(x, ids))
        found["experts"] = _said(lambda: dispatch(x, ids, case.num_experts * (2 if last else 1)))
        found["refused"] = _said(lambda: dispatch(x[:, :7] if last else x, ids))
        handle = buffer.dispatch(x, ids, num_experts=case.num_experts)[3]
        rows = torch.zeros(handle.num_recv_tokens, 24 if last else 32, dtype=x.dtype, device=x.device)
        # Nobody waits for counts in a combine: the host hears of it in a later call.
        found["combine"] = _said(
            lambda: (buffer.combine(rows, handle), devices.synchronize(x.device), dispatch(x, ids))
        )
        bad = cases.run(buffer, case)
        found["works on"] = ("none", "") if not bad else ("bad", str(bad))
    return found


def test_mistakes_raise_on_every_rank_and_the_buffer_works_on(ranks: Pool, fresh_random_data: int) -> None:
    answers = ranks.run(2, _mistakes, fresh_random_data)
    for rank, found in enumerate(answers):
        own = "UsageError" if rank == 1 else "CommError"
        kinds = {name: kind for name, (kind, _) in found.items()}
        assert kinds == {
            "id": own, "id, works on": "none", "experts": "CommError", "refused": own, "combine": "CommError",
            "works on": "none",
        }, found  # fmt: skip
        assert "disagree on num_experts" in found["experts"][1] and "disagree on hidden" in found["combine"][1]
    assert "rank 1" in answers[0]["id"][1] and "rank 1" in answers[0]["refused"][1]


def _absent(rank: int, seed: int) -> list[str]:
    """Rank 2 does not come to a call; the others name it in time, and all build a buffer that works."""
    case, bad = _case(BASE, seed), []
    data = cases.draw(case)
    with played():
        buffer = _buffer(rank, num_cpu_timeout_secs=TIMEOUT)
        x, ids = data.x[rank].to(buffer.device), data.topk_idx[rank].to(buffer.device)
        if rank != 2:
            start = time.monotonic()
            try:
                buffer.dispatch(x, ids, num_experts=case.num_experts)
                bad.append("no error")
            except PeerTimeout as error:
                if "rank 2" not in str(error) or time.monotonic() - start > TIMEOUT + 5:
                    bad.append(f"after {time.monotonic() - start:.1f} s: {error}")
            kind, text = _said(lambda: buffer.dispatch(x, ids, num_experts=case.num_experts))
            bad += [] if kind == "CommError" and "build a new one" in text else [f"then {kind}: {text}"]
        dist.barrier()
        kind, text = _said(buffer.close)  # for rank 2 nothing is wrong until the others do not come to close
        bad += [] if (kind, "rank 0" in text) == (("PeerTimeout", True) if rank == 2 else ("none", False)) else [text]
        with _buffer(rank) as again:
            bad += cases.run(again, case)
    return bad


def test_a_rank_that_does_not_come_is_named(ranks: Pool, fresh_random_data: int) -> None:
    assert ranks.run(3, _absent, fresh_random_data) == [[], [], []]


def _derived(rank: int) -> str:
    """The device of a buffer that is told none, from the group's backend."""
    with played() as musa:
        torch.musa.set_device(rank)  # type: ignore[attr-defined]
        group = dist.new_group(backend="cpu:gloo,musa:mccl")
        with ElasticBuffer(group, num_cpu_timeout_secs=20) as buffer:
            assert musa.library.launched == []
            return f"{buffer._backend.name} on {buffer.device}"


def test_the_device_follows_from_mccl(ranks: Pool) -> None:
    assert ranks.run(2, _derived) == ["gpu on musa:0", "gpu on musa:1"]


def _altered(rank: int, field: str, value: str) -> tuple[list[str], str]:
    """A round trip with one entry of the vendor's table changed."""
    vendors = devices.VENDORS
    good = vendors["musa"]
    vendors["musa"] = dataclasses.replace(good, **{field: value})
    try:
        with played() as musa, _buffer(rank, num_cpu_timeout_secs=5) as buffer:
            bad = cases.run(buffer, _case(BASE, 0))
            buffer.reserve_symmetric(1 << 21)
        derived = _derived(rank)
        assert derived == f"gpu on musa:{rank}", f"a buffer of an MCCL group is {derived}"
        return bad, str(musa.library.launched)
    finally:
        vendors["musa"] = good


ENTRIES = {
    "module": ("muse", "device musa needs torch_musa|torch_musa"),
    "collectives": ("nccl", "a buffer of an MCCL group is [a-z]+ on cpu"),
    "stream_handle": ("cuda_stream", "a stream of class Stream|streams of the played device have no cuda_stream"),
    "arch_prefix": ("sm", "no kernels of platform musa for sm_31"),
    "platform": ("cuda", "this device takes kernels of platform musa, not cuda"),
    "allocator": ("CUDAPluggableAllocator", "no attribute 'CUDAPluggableAllocator'"),
}


@pytest.mark.parametrize("field", ENTRIES)
def test_every_entry_of_the_table_is_needed(ranks: Pool, field: str) -> None:
    value, says = ENTRIES[field]
    assert value != getattr(devices.VENDORS["musa"], field)
    with pytest.raises(RankFailure, match=says):
        ranks.run(1, _altered, field, value, timeout=30.0)


def test_no_entry_is_left_out() -> None:
    """Of the others, test_runtime needs the package and what to install, test_regions_musa DLPack's number."""
    fields = {field.name for field in dataclasses.fields(devices.Vendor)}
    assert fields == ENTRIES.keys() | {"package", "install", "dlpack"}


def test_the_table_as_it_is_works(ranks: Pool) -> None:
    bad, launched = ranks.run(1, _altered, "module", "musa")[0]
    assert bad == [] and "dispatch" in launched and "combine" in launched


def _planted(rank: int, fault: str, seed: int) -> list[str]:
    case = _case(replace(BASE, tokens=(9, 9, 9), masked=0.0), seed)
    with played() as musa:
        _plant(musa, fault)
        with _buffer(rank) as buffer:
            bad = cases.run(buffer, case)
            return bad + cases.run(buffer, replace(case, do_expand=True))


def _plant(musa: Played, fault: str) -> None:
    if fault == "flipped row":
        musa.library.flipped = True
    elif fault == "no event":
        # The comm stream no longer waits for the caller's stream, nor the caller for it.
        musa.device.waits = False


def _dropped(rank: int, recorded: bool) -> None:
    """Rows of a call are dropped while the call is still to come: the allocator must have been told of the stream."""
    told = PlayedTensor.record_stream if recorded else lambda tensor, stream: None
    with mock.patch.object(PlayedTensor, "record_stream", told), played(), _buffer(rank) as buffer:
        ids = torch.tensor([[0, 1], [1, 2]]).to(buffer.device)
        handle = buffer.dispatch(torch.ones(2, 8).bfloat16().to(buffer.device), ids, num_experts=3)[3]
        x = torch.ones(2, 8).bfloat16().to(buffer.device)
        event = buffer.dispatch(x, handle=handle, async_with_compute_stream=True)[4]
        del x
        event.current_stream_wait()


def test_memory_is_kept_for_the_comm_stream(ranks: Pool) -> None:
    ranks.run(1, _dropped, True)
    with pytest.raises(RankFailure, match="is freed, not recorded on another"):
        ranks.run(1, _dropped, False)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_the_whole_suite(ranks: Pool, num_ranks: int, fresh_random_data: int) -> None:
    reports = ranks.run(num_ranks, _whole, fresh_random_data, timeout=280.0)
    assert [report.bad for report in reports] == [[]] * num_ranks
    assert all(report.ran > 60 for report in reports)


def _whole(rank: int, seed: int) -> conformance.Report:
    with played():
        return conformance.on_rank(rank, "gpu", "musa", seed, num_random=30, tiny=False)


def test_a_flipped_row_in_the_layout_is_noticed(ranks: Pool, fresh_random_data: int) -> None:
    answers = ranks.run(2, _planted, "flipped row", fresh_random_data)
    assert any("recv_x" in line for line in answers[0]) and all(answers)


def test_streams_that_do_not_wait_are_noticed(ranks: Pool, fresh_random_data: int) -> None:
    with pytest.raises(RankFailure, match="nothing orders them"):
        ranks.run(1, _planted, "no event", fresh_random_data)
