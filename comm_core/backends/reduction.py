"""Sums of rows in a written order: fp32, no contraction, one rounding at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comm_core.layout import Terms

# On the CPU sums are made in blocks of 2^18 fp32 values (1 MiB): smaller ones pay for their calls, larger ones for
# fresh pages at every call. Measured up to four times faster than one block at 1,024 to 4,096 rows.
_CPU_BLOCK = 1 << 18


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are held in fp32, those of fp64 rows in fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def ordered_sum_into(out: torch.Tensor, rows: torch.Tensor, terms: Terms, biases: Sequence[torch.Tensor] = ()) -> None:
    """out[i] = round(biases[0][i] + biases[1][i] + first term of i + second term of i + ...), left to right.

    No step depends on a value of an accelerator, so that nothing here waits for one.

    Args:
        out: [N, hidden], any float dtype; sums are rounded to it.
        rows: [M, hidden], same dtype.
        terms: the j-th entry is (lines, indices): rows[indices] are the j-th summands of out[lines], each line at
            most once, lines ascending. A line without any gets the bias, or 0.
        biases: up to two tensors like `out`.
    """
    num_lines = out.shape[0]
    if len(terms) == 1 and not biases and terms[0][0].shape[0] == num_lines:
        torch.index_select(rows, 0, terms[0][1], out=out)
        return
    if out.device.type != "cpu" and not biases:
        sum_in_place(out, rows, terms)
        return
    step = max(1, _CPU_BLOCK // out.shape[1]) if out.device.type == "cpu" else max(1, num_lines)
    if step >= num_lines:
        _sum_block(out, rows, terms, biases)
        return
    starts = range(0, num_lines, step)
    edges = torch.tensor([*starts, num_lines])
    cuts = [torch.searchsorted(lines, edges).tolist() for lines, _ in terms]
    for block, start in enumerate(starts):
        parts = tuple(
            (lines[cut[block] : cut[block + 1]] - start, indices[cut[block] : cut[block + 1]])
            for (lines, indices), cut in zip(terms, cuts, strict=True)
        )
        _sum_block(out[start : start + step], rows, parts, [bias[start : start + step] for bias in biases])


def _sum_block(out: torch.Tensor, rows: torch.Tensor, terms: Terms, biases: Sequence[torch.Tensor]) -> None:
    wide = accumulator_dtype(out.dtype)
    if not biases and terms and terms[0][0].shape[0] == out.shape[0]:
        total, rest = rows.index_select(0, terms[0][1]).to(wide), terms[1:]
    else:
        total, rest = torch.zeros(out.shape, dtype=wide, device=out.device), terms
        for bias in biases:
            total += bias
    for lines, indices in rest:
        # Each line stands once in `lines`: index_add_ adds once to it and has no order of its own.
        total.index_add_(0, lines, rows.index_select(0, indices).to(wide))
    out.copy_(total)


def sum_in_place(out: torch.Tensor, rows: torch.Tensor, terms: Terms) -> None:
    """The sums of `ordered_sum_into` without biases, with as little memory traffic as whole-tensor calls allow.

    One or two 16-bit rows need no fp32 copy: a sum of two rounds to the same value in one step as through fp32, whose
    24 bits are more than twice the 11 (or 8) of a 16-bit significand, plus two. Lines with three or more are added up
    in fp32, they alone.
    """
    if not terms or rows.shape[0] == 0:
        out.zero_()
        return
    lines, first = terms[0]
    if lines.shape[0] == out.shape[0]:
        torch.index_select(rows, 0, first, out=out)
    else:
        out.zero_().index_copy_(0, lines, rows.index_select(0, first))
    wide = accumulator_dtype(out.dtype)
    exact = 2 if wide != out.dtype else len(terms)  # so many rows are added up in `out` itself
    for line, index in terms[1:exact]:
        out.index_add_(0, line, rows.index_select(0, index))
    if len(terms) <= exact:
        return
    many = terms[exact][0]  # the lines with more: a part of those before, ascending like them
    total = rows.index_select(0, first[torch.searchsorted(lines, many)]).to(wide)
    for line, index in terms[1:exact]:
        total += rows.index_select(0, index[torch.searchsorted(line, many)])
    for line, index in terms[exact:]:
        if line.shape[0] == many.shape[0]:
            total += rows.index_select(0, index)
        else:
            total.index_add_(0, torch.searchsorted(many, line), rows.index_select(0, index).to(wide))
    out.index_copy_(0, many, total.to(out.dtype))
