"""The rest of ElasticBuffer's interface: sizes, bounds, barrier, events, and what a static shape promises."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from comm_core import ElasticBuffer, sizes
from comm_core.event import CommQueue
from comm_core.runtime.errors import ClosedError, CommError, UsageError
from tests.comm_core import cases
from tests.pool import run_ranks

MIB2 = 2 << 20


def _attributes(buffer: ElasticBuffer, rank: int) -> None:
    assert (buffer.rank, buffer.rank_idx, buffer.num_ranks) == (rank, rank, 2)
    assert buffer.get_logical_domain_size() == (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, 2)
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, rank)
    assert buffer.get_comm_stream() is None
    assert buffer.capture().query()
    assert buffer.get_theoretical_num_sms(8, 2, nvlink_gbs=300.0) == buffer.get_theoretical_num_qps(4) == 0
    assert buffer.deterministic and buffer.allow_multiple_reduction and buffer.num_bytes == 0


def _barrier(buffer: ElasticBuffer, rank: int) -> None:
    start = time.monotonic()
    if rank == 1:
        time.sleep(0.4)
    buffer.barrier()
    assert rank == 1 or time.monotonic() - start > 0.3


def _refused(buffer: ElasticBuffer, rank: int, at: int, says: str, x: torch.Tensor, ids: torch.Tensor) -> None:
    """A call that is too large on rank `at` raises on both."""
    try:
        buffer.dispatch(x, ids, num_experts=4)
        raise AssertionError(f"no error: {says}")
    except UsageError as error:
        assert rank == at and says in str(error), str(error)
    except CommError as error:
        assert rank != at and says in str(error), str(error)


def _bounds(rank: int) -> None:
    ids = torch.tensor([[0, 2]]).repeat(64, 1)
    hint = ElasticBuffer.get_buffer_size_hint(None, 64, 8192, 2)
    with ElasticBuffer(num_bytes=hint, num_cpu_timeout_secs=20) as buffer:
        wide = torch.ones(64, 8192 * (1 + rank), dtype=torch.bfloat16)
        _refused(buffer, rank, 1, f"{hint} bytes, as the buffer was built", wide, ids)
        assert buffer.dispatch(torch.ones(64, 8192).bfloat16(), ids, num_experts=4)[0].shape == (128, 8192)
    with ElasticBuffer(num_max_tokens_per_rank=64, hidden=64, num_topk=2, num_cpu_timeout_secs=20) as buffer:
        assert buffer.num_bytes == ElasticBuffer.get_buffer_size_hint(None, 64, 64, 2) == MIB2
        _refused(buffer, rank, 0, "at most 64, as the buffer was built", torch.ones(64, 64 + 8 * (1 - rank)), ids)
        assert buffer.dispatch(torch.ones(64, 64), ids, num_experts=4)[3].num_max_tokens_per_rank == 64


def _epilogue(buffer: ElasticBuffer, rank: int) -> None:
    """previous_event_before_epilogue holds back what follows the transfer, not the transfer."""
    other, gate = CommQueue(torch.device("cpu"), "other"), threading.Event()
    x, ids = torch.randn(3, 8), torch.tensor([[0, 3]] * 3)
    bias = torch.zeros(3, 8)
    recv_x, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=4)
    ready = other.submit(lambda: (gate.wait(10), bias.fill_(5.0)))
    out, _, event = buffer.combine(
        recv_x, handle, bias=bias, previous_event_before_epilogue=ready, async_with_compute_stream=True
    )
    time.sleep(0.1)
    assert event.event is not None and not event.event.query()
    gate.set()
    event.current_stream_wait()
    assert torch.equal(out, bias + x + x)
    assert other.close(5.0)


def _static(buffer: ElasticBuffer, rank: int) -> None:
    """A static shape needs no answer of the others: the call returns before rank 1 has made it."""
    case = cases.Case(3, (4, 4), 16, 2, 2, torch.float32)
    data = cases.draw(case)
    if rank == 1:
        time.sleep(0.4)
    start = time.monotonic()
    got = buffer.dispatch(
        data.x[rank], data.topk_idx[rank], num_experts=4, num_max_tokens_per_rank=5, do_cpu_sync=False,
        async_with_compute_stream=True,
    )  # fmt: skip
    assert time.monotonic() - start < 0.3
    assert got[0].shape == (10, 16)
    got[4].current_stream_wait()
    assert bool((got[1][int(got[3].psum_num_recv_tokens_per_scaleup_rank[-1]) :] == -1).all())


def _everything(rank: int) -> str:
    _bounds(rank)
    buffer = ElasticBuffer(num_cpu_timeout_secs=20)
    _attributes(buffer, rank)
    _barrier(buffer, rank)
    _epilogue(buffer, rank)
    _static(buffer, rank)
    buffer.destroy()
    with pytest.raises(ClosedError):
        buffer.barrier()
    assert dist.get_world_size() == 2  # the group given lives on
    return "done"


def test_the_rest_of_the_interface() -> None:
    assert run_ranks(2, _everything, timeout=90.0) == ["done", "done"]


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("multiple", [False, True])
def test_size_hints_hold_what_calls_need(num_ranks: int, multiple: bool) -> None:
    for use_fp8 in (False, True):
        got = sizes.buffer_bytes(
            100, 7168, 8, num_ranks, use_fp8_dispatch=use_fp8, multiple_reduction=multiple
        )  # fmt: skip
        row = (7168 + 4 * 56 if use_fp8 else 2 * 7168) + 128
        need = max(num_ranks * 100 * row, (min(num_ranks, 8) if multiple else 8) * 100 * (2 * 7168 + 64))
        assert got % MIB2 == 0
        assert need <= got < need + MIB2
    largest = sizes.buffer_bytes(100, 7168, 0, num_ranks, use_fp8_dispatch=False, multiple_reduction=multiple)
    assert largest >= got
