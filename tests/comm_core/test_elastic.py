"""The rest of ElasticBuffer's interface: sizes, bounds, barrier, events, and what a static shape promises."""

from __future__ import annotations

import inspect
import os
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


def test_arguments_may_be_given_by_position_in_the_order_of_the_interface() -> None:
    wanted = {
        ElasticBuffer: "group num_bytes num_cpu_bytes num_max_tokens_per_rank hidden num_topk use_fp8_dispatch "
        "deterministic allow_hybrid_mode allow_multiple_reduction prefer_overlap_with_compute sl_idx "
        "num_allocated_qps num_cpu_timeout_secs num_gpu_timeout_secs explicitly_destroy",
        ElasticBuffer.dispatch: "self x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts "
        "num_max_tokens_per_rank expert_alignment num_sms num_qps previous_event previous_event_before_epilogue "
        "async_with_compute_stream allocate_on_comm_stream handle do_handle_copy do_cpu_sync do_expand "
        "do_zero_padding use_tma_aligned_col_major_sf",
        ElasticBuffer.combine: "self x handle topk_weights bias num_sms num_qps previous_event "
        "previous_event_before_epilogue async_with_compute_stream allocate_on_comm_stream",
    }
    for function, names in wanted.items():
        parameters = inspect.signature(function).parameters.values()
        assert [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD] == names.split()


def _more_rows(rank: int) -> list[bool]:
    """Expanded rows are found by the handle: rows behind them change nothing."""
    torch.manual_seed(rank)
    x, ids = torch.randn(6, 16), torch.rand(6, 4).topk(2).indices
    with ElasticBuffer(num_cpu_timeout_secs=20) as buffer:
        rows, _, weights, handle, _ = buffer.dispatch(x, ids, torch.rand(6, 2), num_experts=4, do_expand=True)
        wanted = buffer.combine(rows, handle, weights)
        more = torch.cat([rows, torch.full((3, 16), float("nan"))]), torch.cat([weights, weights[:1].expand(3)])
        got = buffer.combine(more[0], handle, more[1])
    return [torch.equal(a, b) for a, b in zip(got[:2], wanted[:2], strict=True)]


def test_combine_of_expanded_rows_takes_more_than_it_needs() -> None:
    assert run_ranks(2, _more_rows) == [[True, True]] * 2


def _forked(rank: int) -> str:
    with ElasticBuffer(num_cpu_timeout_secs=20) as buffer:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                buffer.dispatch(torch.randn(2, 8), torch.zeros(2, 1, dtype=torch.int64), num_experts=1)
            except ClosedError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.close(writer)
        said = os.read(reader, 1000).decode()
        os.waitpid(child, 0)
        buffer.dispatch(torch.randn(2, 8), torch.zeros(2, 1, dtype=torch.int64), num_experts=1)
    return said


def test_a_forked_process_is_told_that_the_buffer_is_not_its_own() -> None:
    (said,) = run_ranks(1, _forked)
    assert "was forked from process" in said and "build a buffer in each process" in said
