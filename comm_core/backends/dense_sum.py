"""Sums of rows in a written order where most lines have the same number of summands: one pass, no fresh memory.

A line with fewer summands gets a row of zeros in place of the missing ones, so that every step works on whole blocks:
select into kept memory, add. Adding 0 changes no value (-0 becomes +0). Two summands need no fp32 copy: adding two
16-bit rows is done in fp32 and rounded once by itself.
"""

from __future__ import annotations

import torch

from comm_core.backends.reduction import accumulator_dtype
from comm_core.layout import Terms

# Elements of a block: 512 KiB in 16 bits, so that what is selected is still in the cache when it is added.
_BLOCK = 1 << 18


def pays(terms: Terms, num_lines: int) -> bool:
    """True where at least half of the summands would be real."""
    return 2 * sum(lines.shape[0] for lines, _ in terms) >= len(terms) * num_lines > 0


class DenseSum:
    """Adds rows; keeps its blocks between calls, as fresh pages cost as much as the sums."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}

    def into(self, out: torch.Tensor, rows: torch.Tensor, terms: Terms, zero_row: int) -> None:
        """out[i] = first term of i + second term of i + ..., as `reduction.ordered_sum_into` without biases.

        Args:
            out: [N, hidden], any float dtype.
            rows: [M, hidden], same dtype.
            terms: as there, at least one.
            zero_row: a row of zeros among `rows`.
        """
        num_lines, hidden = out.shape
        columns = []
        for lines, indices in terms:
            column = torch.full((num_lines,), zero_row)
            column[lines] = indices
            columns.append(column)
        step = min(num_lines, max(1, _BLOCK // hidden))
        for start in range(0, num_lines, step):
            part = out[start : start + step]
            self._add(part, rows, [column[start : start + step] for column in columns])

    def _add(self, out: torch.Tensor, rows: torch.Tensor, columns: list[torch.Tensor]) -> None:
        if len(columns) == 1:
            torch.index_select(rows, 0, columns[0], out=out)
            return
        wide = accumulator_dtype(out.dtype)
        first, second = (self._block(out, out.dtype, which) for which in (0, 1))
        torch.index_select(rows, 0, columns[0], out=first)
        if len(columns) == 2:
            torch.index_select(rows, 0, columns[1], out=second)
            torch.add(first, second, out=out)
            return
        total, term = (self._block(out, wide, which) for which in (2, 3))
        total.copy_(first)
        for column in columns[1:]:
            torch.index_select(rows, 0, column, out=second)
            total.add_(term.copy_(second))
        out.copy_(total)

    def _block(self, like: torch.Tensor, dtype: torch.dtype, which: int) -> torch.Tensor:
        """Kept memory of the shape of `like`."""
        key = (dtype, like.shape[1], which)
        kept = self._blocks.get(key)
        if kept is None or kept.shape[0] < like.shape[0]:
            self._blocks = {known: block for known, block in self._blocks.items() if known[1] == like.shape[1]}
            with torch.inference_mode(False):  # it outlives the caller's mode
                kept = self._blocks[key] = torch.empty(like.shape, dtype=dtype)
        return kept[: like.shape[0]]
