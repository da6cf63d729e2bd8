"""Sums of rows in a written order: fp32, no contraction, one rounding at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comm_core.layout import Terms


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are held in fp32, those of fp64 rows in fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def ordered_sum_into(out: torch.Tensor, rows: torch.Tensor, terms: Terms, biases: Sequence[torch.Tensor] = ()) -> None:
    """out[i] = round(biases[0][i] + biases[1][i] + first term of i + second term of i + ...), left to right.

    No step depends on a value of the device, so that nothing here waits for it.

    Args:
        out: [N, hidden], any float dtype; sums are rounded to it.
        rows: [M, hidden], same dtype.
        terms: the j-th entry is (lines, indices): rows[indices] are the j-th summands of out[lines], each line at
            most once. A line without any gets the bias, or 0.
        biases: up to two tensors like `out`.
    """
    full = bool(terms) and terms[0][0].shape[0] == out.shape[0]
    if full and len(terms) == 1 and not biases:
        torch.index_select(rows, 0, terms[0][1], out=out)
        return
    wide = accumulator_dtype(out.dtype)
    if full and not biases:
        total, rest = rows.index_select(0, terms[0][1]).to(wide), terms[1:]
    else:
        total, rest = torch.zeros(out.shape, dtype=wide, device=out.device), terms
        for bias in biases:
            total += bias
    for lines, indices in rest:
        # Each line stands once in `lines`: index_add_ adds once to it and has no order of its own.
        total.index_add_(0, lines, rows.index_select(0, indices).to(wide))
    out.copy_(total)
