"""The kernels that move rows (kernels/dispatch.cuh, combine.cuh) in loops over rows and tokens.

A pace for remote bytes is not kept: it changes when rows come, not which.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.twin.channel import Side
from tests.twin.layout import tables
from tests.twin.memory import numbers_at, words

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _bytes(address: int, rows: int, row_bytes: int) -> np.ndarray:
    return words(address, rows * row_bytes, np.uint8).reshape(rows, row_bytes)


def dispatch(call: Any) -> None:
    """Reads the rows of this rank from all ranks into its outputs."""
    side = Side(call.channel)
    moves = side.begin(call.hash, 0, {"X": call.x, "WEIGHTS": call.weights, "SCALES": call.scales}, call.lent)
    table, outputs = tables(call.layout, side.num_ranks), _Outputs(call)
    base = [int(row) if moves else 0 for row in table["row_base"]]
    for source in side.ranks:
        rows = range(base[source], base[source + 1])
        sources = {name: side.announced(source, name) for name in ("X", "WEIGHTS", "SCALES")} if rows else {}
        for row in rows:
            targets = [int(place) for place in table["expand_row"][row]] if call.layout.expand else [row]
            outputs.put(row, targets, int(table["recv_token"][row]), table["local_idx"][row], sources)
    real = base[-1]
    if call.layout.expand and moves:
        starts, counts = table["expert_starts"], table["expert_counts"]
        real = int(starts[-1])
        for expert in range(call.layout.num_local):
            for row in range(int(starts[expert] + counts[expert]), int(starts[expert + 1])):
                outputs.clear(row)
    for row in range(real, call.num_out_rows if call.clears_rest else 0):
        outputs.clear(row)
    side.end(moves, call.lent)


class _Outputs:
    """The output tensors of a dispatch as arrays; weights and scales are 32-bit words whatever they mean."""

    def __init__(self, call: Any) -> None:
        self._call, self._lanes = call, call.layout.num_topk
        rows, per_weight = call.num_out_rows, call.weight_words
        per_row = 1 if call.layout.expand else self._lanes
        self.x = _bytes(call.out_x, rows, call.row_bytes)
        self.idx = words(call.out_idx, rows * self._lanes, np.int64).reshape(rows, -1) if call.out_idx else None
        self.weights = None
        if call.out_weights:
            self.weights = words(call.out_weights, rows * per_row * per_weight).reshape(rows, per_row, per_weight)

    def put(self, row: int, targets: list[int], token: int, ids: np.ndarray, sources: dict[str, int]) -> None:
        """One received row: to its plain row, or to the expanded row of each lane."""
        call = self._call
        content = words(sources["X"] + token * call.row_bytes, call.row_bytes, np.uint8)
        for to in targets:
            if to >= 0:
                self.x[to] = content
        if self.idx is not None:
            self.idx[row] = ids
        if self.weights is not None:
            size = self._lanes * call.weight_words
            sent = words(sources["WEIGHTS"] + token * size * 4, size).reshape(self._lanes, call.weight_words)
            if call.layout.expand:
                for lane, to in enumerate(targets):
                    if to >= 0:
                        self.weights[to, 0] = sent[lane]
            else:
                self.weights[row] = sent
        if call.out_scales:
            scales = words(sources["SCALES"] + token * call.scale_words * 4, call.scale_words)
            for to in targets:
                if to >= 0:
                    self._put_scales(to, scales)

    def clear(self, row: int) -> None:
        """An output row that shows nothing."""
        self.x[row] = 0
        if self.idx is not None:
            self.idx[row] = -1
        if self.weights is not None:
            self.weights[row] = 0
        if self._call.out_scales:
            self._put_scales(row, np.zeros(self._call.scale_words, np.uint32))

    def _put_scales(self, row: int, scales: np.ndarray) -> None:
        for column, value in enumerate(scales):
            at = row * self._call.scale_row_stride + column * self._call.scale_col_stride
            words(self._call.out_scales + at * 4, 1)[0] = value


def _sum(biases: list[torch.Tensor], rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """fp32, unfused, biases first, rounded once."""
    total = torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))
    for summand in [*biases, *rows]:
        total = total + summand.to(total.dtype)
    return total.to(like.dtype)


def combine(call: Any) -> None:
    """Reads the rows of each token from the ranks that had them and adds them up."""
    side, layout, hidden = Side(call.channel), call.layout, call.hidden
    moves = side.begin(call.hash, 0, {"X": call.x, "WEIGHTS": call.weights}, call.lent)
    table, dtype = tables(layout, side.num_ranks), _DTYPES[call.dtype]
    first = [int(table["matrix"][: side.rank, rank].sum()) for rank in side.ranks]
    sent = [int(table["matrix"][side.rank, rank]) if moves else 0 for rank in side.ranks]
    rows_at = [call.local_x if rank == side.rank else side.announced(rank, "X") for rank in side.ranks] if moves else []
    weights_at = [side.announced(rank, "WEIGHTS") for rank in side.ranks] if moves else []
    row_bytes, size = hidden * dtype.itemsize, layout.num_topk * call.weight_words
    for token in range(layout.num_tokens):
        last, rows = int(table["last_lanes"][token]), []
        for lane, position in enumerate(table["lane_row"][token]):
            rank = int(table["topk_idx"][token, lane]) // layout.num_local if position >= 0 else 0
            valid = 0 <= position < sent[rank]
            row = first[rank] + int(position)
            if call.out_weights:
                at = lane * call.weight_words
                back = words(call.out_weights + (token * size + at) * 4, call.weight_words)
                back[:] = words(weights_at[rank] + (row * size + at) * 4, call.weight_words) if valid else 0
            if valid and last >> lane & 1:
                rows.append(numbers_at(rows_at[rank] + row * row_bytes, hidden, dtype))
        biases = [numbers_at(at + token * row_bytes, hidden, dtype) for at in (call.bias0, call.bias1) if at]
        out = numbers_at(call.out_x + token * row_bytes, hidden, dtype)
        out.copy_(_sum(biases, rows, out))
    side.end(moves, call.lent)


def reduce(call: Any) -> None:
    """Lays the rows of a combine down for the others: expanded rows of a token added up, plain rows as they are."""
    layout, dtype, hidden = call.layout, _DTYPES[call.dtype], call.hidden
    table = tables(layout, call.num_ranks)
    row_bytes, lanes, words_a_weight = hidden * dtype.itemsize, layout.num_topk, call.weight_words
    for row in range(int(table["row_base"][call.num_ranks])):
        from_rows = [row]
        if layout.expand:
            from_rows = [int(table["expand_row"][row, k]) for k in range(lanes) if table["local_idx"][row, k] >= 0]
        out = numbers_at(call.rows + row * row_bytes, hidden, dtype)
        out.copy_(_sum([], [numbers_at(call.x + at * row_bytes, hidden, dtype) for at in from_rows], out))
        for lane in range(lanes if call.weights else 0):
            here = table["local_idx"][row, lane] >= 0
            at = int(table["expand_row"][row, lane]) if layout.expand else row * lanes + lane
            back = words(call.lane_weights + (row * lanes + lane) * words_a_weight * 4, words_a_weight)
            given = words(call.weights + at * words_a_weight * 4, words_a_weight) if here or not layout.expand else 0
            back[:] = given


def barrier(call: Any) -> None:
    """A call without rows."""
    side = Side(call.channel)
    side.end(side.begin(call.hash, call.status, {}, 0), 0)
