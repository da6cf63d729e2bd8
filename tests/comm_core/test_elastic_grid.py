"""What DeepEP's own test of its elastic buffer claims, in its 144 combinations of options, on CPU ranks.

Expectations come from the inputs of all ranks and the handle's metadata: which row is which token follows from
recv_src_metadata alone, so that these checks hold for any order inside a source rank. Sums come from the reference.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from comm_core import ElasticBuffer, EPHandle, EventOverlap, fp8, reference
from comm_core.backends import registry
from tests.comm_core import cases
from tests.pool import run_ranks

CASE = cases.Case(0, (7, 6, 5), 256, 4, 4, torch.bfloat16, num_bias=2)
# previous_event asks for allocate_on_comm_stream, so of eight combinations of the last three options six are left.
STREAMS = [(previous, on_comm, later) for previous, on_comm in ((0, 0), (0, 1), (1, 1)) for later in (0, 1)]
GRID = list(itertools.product((True, False), (128, 1), (False, True), (0, 1, 2), STREAMS))


@dataclass
class Combination:
    """One cell of the grid on one rank, with the inputs of all ranks."""

    buffer: ElasticBuffer
    data: cases.Data
    copy: bool
    alignment: int
    use_fp8: bool
    num_bias: int
    previous: bool
    on_comm: bool
    later: bool

    def streams(self) -> dict[str, Any]:
        """Options that change when and where, not what."""
        return {
            "previous_event": self.buffer.capture() if self.previous else None,
            "allocate_on_comm_stream": self.on_comm,
            "async_with_compute_stream": self.later,
        }

    def finish(self, event: EventOverlap) -> None:
        assert (event.event is not None) == self.later
        event.current_stream_wait()

    def parts(self, rank: int) -> tuple[torch.Tensor, ...]:
        """What a rank sends, as tensors with a row a token."""
        x = self.data.x[rank]
        return fp8.per_token_cast(x) if self.use_fp8 else (x,)

    def send(self, **options: Any) -> tuple[tuple[torch.Tensor, ...], Any, Any, EPHandle]:
        """A dispatch; rows as a tuple of tensors."""
        mine = self.parts(self.buffer.rank)
        assert self.data.weights is not None
        weights = self.data.weights[self.buffer.rank]
        x = mine if self.use_fp8 else mine[0]
        got = self.buffer.dispatch(x, topk_weights=weights, **options, **self.streams())
        self.finish(got[4])
        return got[0] if self.use_fp8 else (got[0],), got[1], got[2], got[3]

    def fresh(self, do_expand: bool, **options: Any) -> Any:
        return self.send(
            topk_idx=self.data.topk_idx[self.buffer.rank],
            num_experts=CASE.num_experts,
            num_max_tokens_per_rank=8,
            expert_alignment=self.alignment,
            do_handle_copy=self.copy,
            do_expand=do_expand,
            **options,
        )

    def sources(self, handle: EPHandle) -> list[tuple[int, int]]:
        """(source rank, token) of each received row."""
        return [divmod(value, 8) for value in handle.recv_src_metadata[:, 0].tolist()]


def _same(left: Any, right: Any) -> None:
    assert cases.same_bytes(left, right)


def _check_plain(it: Combination) -> EPHandle:
    rank, num_local, weights = it.buffer.rank, CASE.num_local, it.data.weights
    assert weights is not None
    stats = torch.zeros(num_local, dtype=torch.int32)
    parts, idx, got_weights, handle = it.fresh(False, cumulative_local_expert_recv_stats=stats)
    ids = it.data.topk_idx[rank]
    assert (handle.topk_idx.data_ptr() == ids.data_ptr()) == (not it.copy)
    found = it.sources(handle)
    here = [
        (src, token)
        for src, all_ids in enumerate(it.data.topk_idx)
        for token, line in enumerate(all_ids.tolist())
        if any(e // num_local == rank for e in line if e >= 0)
    ]
    assert sorted(found) == here
    assert [src for src, _ in found] == sorted(src for src, _ in found)
    ends = [sum(src <= last for src, _ in here) for last in range(it.buffer.num_ranks)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == ends
    counts = [0] * num_local
    for row, (src, token) in enumerate(found):
        for got, sent in zip(parts, it.parts(src), strict=True):
            _same(got[row], sent[token])
        local = [e - rank * num_local if e >= 0 and e // num_local == rank else -1 for e in
                 it.data.topk_idx[src][token].tolist()]  # fmt: skip
        assert idx[row].tolist() == local
        for lane, e in enumerate(local):
            if e >= 0:
                counts[e] += 1
                assert got_weights[row, lane] == weights[src][token, lane]
    aligned = [-(-count // it.alignment) * it.alignment for count in counts]
    assert stats.tolist() == handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    assert handle.num_recv_tokens_per_expert_list == aligned
    assert handle.psum_num_recv_tokens_per_expert.tolist() == list(itertools.accumulate(aligned))
    again = it.send(handle=handle)
    twice = it.fresh(False)
    for other in (again, twice):
        for left, right in zip((*parts, idx, got_weights), (*other[0], other[1], other[2]), strict=True):
            _same(left, right)
        for name in ("recv_src_metadata", "dst_buffer_slot_idx", "psum_num_recv_tokens_per_expert"):
            _same(getattr(handle, name), getattr(other[3], name))
        assert other[3].num_recv_tokens_per_expert_list == aligned
    assert again[3] is handle
    return handle


def _check_expanded(it: Combination, plain: EPHandle) -> EPHandle:
    weights = it.data.weights
    assert weights is not None
    parts, idx, got_weights, handle = it.fresh(True, do_zero_padding=True)
    assert idx is None
    assert handle.num_recv_tokens == plain.num_recv_tokens
    assert handle.num_recv_tokens_per_expert_list == plain.num_recv_tokens_per_expert_list
    filled = set()
    for (src, token), rows in zip(it.sources(handle), handle.recv_src_metadata[:, 2:].tolist(), strict=True):
        for lane, row in enumerate(rows):
            if row >= 0:
                filled.add(row)
                assert got_weights[row] == weights[src][token, lane]
                for got, sent in zip(parts, it.parts(src), strict=True):
                    _same(got[row], sent[token])
    counts, aligned = handle.num_unaligned_recv_tokens_per_expert.tolist(), handle.num_recv_tokens_per_expert_list
    starts = [end - size for end, size in zip(itertools.accumulate(aligned), aligned, strict=True)]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    assert filled == {row for start, end in zip(starts, ends, strict=True) for row in range(start, end)}
    again = it.send(handle=handle, do_expand=True, do_zero_padding=True)
    gaps = sorted(set(range(sum(aligned))) - filled)
    for rows in (*parts, got_weights, *again[0], again[2]):
        assert rows.shape[0] == sum(aligned)
        assert not rows[gaps].float().any()
    for left, right in zip((*parts, got_weights), (*again[0], again[2]), strict=True):
        _same(left, right)
    return handle


def _check_sums(it: Combination, handle: EPHandle, wanted: list[reference.Dispatched]) -> None:
    rank, weights = it.buffer.rank, it.data.weights
    assert weights is not None
    generator = torch.Generator().manual_seed(CASE.hidden)
    rows = [cases.order_sensitive(there.recv_x.shape, generator).bfloat16() for there in wanted]
    biases = it.data.biases[: it.num_bias]
    back = [there.recv_topk_weights for there in wanted]
    own = tuple(bias[rank] for bias in biases)
    got, got_weights, event = it.buffer.combine(
        rows[rank],
        handle,
        topk_weights=back[rank],
        bias=None if not own else own[0] if len(own) == 1 else own,
        **it.streams(),
    )
    it.finish(event)
    assert torch.equal(got, reference.combine(rows, wanted, None, biases)[rank][0])
    # Weights come home as they were sent, masked lanes as 0.
    assert torch.equal(got_weights, weights[rank].masked_fill(it.data.topk_idx[rank] < 0, 0))


def _grid(rank: int, backend: str, seed: int) -> int:
    data = cases.draw(replace(CASE, seed=seed))
    wanted = {
        (alignment, expand): reference.dispatch(
            data.x, data.topk_idx, data.weights, num_experts=12, expert_alignment=alignment, do_expand=expand
        )
        for alignment in (128, 1)
        for expand in (False, True)
    }
    with ElasticBuffer(backend=backend, num_cpu_timeout_secs=60) as buffer:
        for copy, alignment, use_fp8, num_bias, (previous, on_comm, later) in GRID:
            it = Combination(
                buffer, data, copy, alignment, use_fp8, num_bias, bool(previous), bool(on_comm), bool(later)
            )
            plain = _check_plain(it)
            expanded = _check_expanded(it, plain)
            _check_sums(it, plain, wanted[alignment, False])
            _check_sums(it, expanded, wanted[alignment, True])
    return len(GRID)


@pytest.mark.slow
@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_every_combination(backend: str, fresh_random_data: int) -> None:
    assert run_ranks(3, _grid, backend, fresh_random_data, timeout=280.0) == [144] * 3
