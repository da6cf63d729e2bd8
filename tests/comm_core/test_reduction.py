"""Sums in a written order: against a loop over rows, in blocks and in one piece; one process."""

from __future__ import annotations

import pytest
import torch

from comm_core import layout
from comm_core.backends import reduction
from tests.comm_core.cases import DTYPES, order_sensitive


def _by_loop(rows: torch.Tensor, index: torch.Tensor, biases: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    out = rows.new_zeros(index.shape[0], rows.shape[1])
    for line, picks in enumerate(index.tolist()):
        total = torch.zeros(rows.shape[1], dtype=wide)
        for item in [*(bias[line] for bias in biases), *(rows[pick] for pick in picks if pick >= 0)]:
            total = total + item.to(wide)
        out[line] = total.to(rows.dtype)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_bias", [0, 1, 2])
@pytest.mark.parametrize("block", [1, 40, 1 << 18])
def test_sums_equal_a_loop(dtype: torch.dtype, num_bias: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "_CPU_BLOCK", block)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    for num_lines, width, empty in ((0, 3, 0.5), (1, 1, 0.0), (13, 5, 0.4), (40, 6, 0.0), (9, 2, 1.1)):
        rows = order_sensitive(torch.Size((29, 16)), generator).to(dtype)
        index = torch.randint(0, 29, (num_lines, width), generator=generator)
        index[torch.rand(index.shape, generator=generator) < empty] = -1
        biases = [order_sensitive(torch.Size((num_lines, 16)), generator).to(dtype) for _ in range(num_bias)]
        out = torch.full((num_lines, 16), 7.0, dtype=dtype)
        reduction.ordered_sum_into(out, rows, layout.terms_of(index), biases)
        assert torch.equal(out, _by_loop(rows, index, biases))
        if not biases:  # the way of accelerators, on the CPU
            reduction.sum_in_place(out.fill_(7.0), rows, layout.terms_of(index))
            assert torch.equal(out, _by_loop(rows, index, biases))


def test_the_order_is_seen() -> None:
    generator = torch.Generator().manual_seed(torch.initial_seed())
    rows = order_sensitive(torch.Size((32, 64)), generator).bfloat16()
    index = torch.rand(64, 32, generator=generator).argsort(dim=1)[:, :6]
    out, other = torch.empty(2, 64, 64, dtype=torch.bfloat16)
    reduction.ordered_sum_into(out, rows, layout.terms_of(index))
    reduction.ordered_sum_into(other, rows, layout.terms_of(index.flip(1)))
    assert not torch.equal(out, other)
