"""Dense sums equal the ordered ones, also where the order of the summands shows."""

from __future__ import annotations

import pytest
import torch

from comm_core import layout
from comm_core.backends.dense_sum import DenseSum, pays
from comm_core.backends.reduction import ordered_sum_into
from tests.comm_core.cases import DTYPES, order_sensitive


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lines", "hidden", "most"), [(50, 24, 1), (7, 70_000, 2), (900, 600, 3), (300, 1000, 6)])
def test_equal_to_ordered_sums(dtype: torch.dtype, lines: int, hidden: int, most: int, fresh_random_data: int) -> None:
    generator = torch.Generator().manual_seed(fresh_random_data)
    rows = order_sensitive(torch.Size((90, hidden)), generator).to(dtype)
    rows[60] = 0
    chosen = torch.randint(0, 60, (lines, most), generator=generator)
    chosen[torch.rand(chosen.shape, generator=generator) < 0.2] = -1
    terms, adder = layout.terms_of(chosen), DenseSum()
    assert pays(terms, lines)
    wanted, got = torch.empty(2, lines, hidden, dtype=dtype)
    for _ in range(2):  # the second time in kept memory
        ordered_sum_into(wanted, rows, terms)
        adder.into(got.fill_(7), rows, terms, 60)
        assert torch.equal(got, wanted)
    if most > 2 and dtype != torch.float64:  # fp64 holds these sums exactly
        adder.into(got, rows, layout.terms_of(chosen.flip(1)), 60)
        assert not torch.equal(got, wanted)


def test_pays_for_full_lines_alone() -> None:
    full, few = torch.arange(10), torch.arange(2)
    assert pays(((full, full), (few, few)), 10)
    assert not pays(((few, few), (few, few)), 10)
    assert not pays((), 10)
    assert not pays(((full[:0], full[:0]),), 0)
