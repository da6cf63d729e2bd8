"""The experts as one node: what is kept, shapes of the worst case, forms of weights, weight gradients added up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mt_moe.experts import expert_mlp
from mt_moe.grouped_mlp import WeightGrad
from mt_moe.products import Groups, LoopProducts, TorchProducts, packed, packed_view, why_not
from tests.mt_moe.test_experts import Problem, assert_near, assert_same_bits


@pytest.mark.parametrize("recompute", ["activation", "fc1", "nothing"])
@pytest.mark.parametrize("again", [False, True])
def test_what_is_kept_changes_no_bit(recompute: str, again: bool) -> None:
    problem = Problem([5, 0, 9, 3], alignment=8, tail=3, dtype=torch.float32)
    want = problem.ours("grouped")
    calls: list[int] = []

    def rows_again() -> Tensor:
        calls.append(1)
        return problem.rows

    got = problem.ours("grouped", recompute=recompute, rows_again=rows_again if again else None)
    assert_same_bits(got, want)
    assert len(calls) == again


def _kept_bytes(problem: Problem, **options: Any) -> int:
    """Bytes that a call saves for backward besides its weights and arguments."""
    saved: dict[int, int] = {}
    rows, row_weights, fc1, fc2 = problem.leaves()
    given = {tensor.data_ptr() for tensor in (row_weights, *fc1, *fc2)}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in given:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        expert_mlp(rows, problem.counts, row_weights, fc1, fc2, implementation="grouped", **options)
    return sum(saved.values())


def test_bytes_that_are_kept() -> None:
    problem = Problem([5, 9], dtype=torch.float32)
    hidden, ffn, num_rows = problem.rows.shape[1], problem.fc2[0].shape[1], 14
    of_rows, of_hidden, of_active = (4 * num_rows * width for width in (hidden, 2 * ffn, ffn))
    assert _kept_bytes(problem) == of_rows + of_hidden
    assert _kept_bytes(problem, recompute="fc1") == of_rows
    assert _kept_bytes(problem, recompute="nothing") == of_rows + of_hidden + of_active
    assert _kept_bytes(problem, rows_again=lambda: problem.rows) == of_hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("counts", [[5, 0, 9, 3], [0, 0, 0], [0, 8]])
def test_ends_on_the_device_alone(counts: list[int], dtype: torch.dtype) -> None:
    """Without counts, with rows behind the last group that hold anything: as with counts, and zeros there."""
    problem = Problem(counts, alignment=8, tail=6, dtype=dtype)
    want = problem.ours("grouped")
    ends = torch.tensor([8 * -(-count // 8) for count in counts], dtype=torch.int32).cumsum(0).to(torch.int32)

    def fn(rows: Tensor, _: list[int], row_weights: Tensor, fc1: list[Tensor], fc2: list[Tensor]) -> Tensor:
        return expert_mlp(rows, None, row_weights, fc1, fc2, ends=ends, implementation="grouped", expert_alignment=8)

    got = problem.run(fn)
    assert_same_bits(got, want)
    assert not got[0][~problem.real].any() and not got[1][~problem.real].any() and not got[2][~problem.real].any()
    assert_near(problem.run(fn), want, 0.0)


def test_gradcheck_of_the_node() -> None:
    counts, hidden, ffn = [2, 0, 3], 3, 2
    shapes = [(6, hidden), (6,), *[(2 * ffn, hidden)] * 3, *[(hidden, ffn)] * 3]
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def fn(rows: Tensor, row_weights: Tensor, *weights: Tensor) -> Tensor:
        return expert_mlp(
            rows, counts, row_weights, weights[:3], weights[3:], expert_alignment=2, implementation="grouped"
        )

    assert torch.autograd.gradcheck(fn, inputs)


def test_weights_that_lie_side_by_side_are_not_copied() -> None:
    whole = torch.randn(5, 4, 6)
    for views in (list(whole.unbind(0)), list(whole[1:4].unbind(0)), [whole[0], whole[2], whole[4]], [whole[2]]):
        view = packed_view(views)
        assert view is not None and view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert torch.equal(view, torch.stack(views))
    others: list[Sequence[Tensor]] = [
        [whole[1], whole[0]],
        [whole[0], whole[1], whole[3]],
        [whole[0], torch.randn(4, 6)],
        list(whole.transpose(1, 2).unbind(0)),
    ]
    for weights in others:
        assert packed_view(weights) is None and torch.equal(packed(weights), torch.stack(list(weights)))


@pytest.mark.parametrize("products", [LoopProducts(), TorchProducts()], ids=lambda item: item.name)
@pytest.mark.parametrize("packed", [True, False])
def test_weight_gradients_of_chunks_are_one_product(products: Any, packed: bool) -> None:
    chunks = [((16, 16, 32), 40), ((4, 12, 12), 12), ((0, 0, 0), 0)]
    want = torch.zeros(3, 8, 16, dtype=torch.float64)
    parts = []
    for bounds, num_rows in chunks:
        groups = Groups(torch.tensor(bounds, dtype=torch.int32), bounds)
        grad, x = torch.randn(num_rows, 8), torch.randn(num_rows, 16)
        parts.append(WeightGrad(products, grad, x, groups, packed, 0))
        for expert, (start, end) in enumerate(itertools.pairwise((0, *bounds))):
            want[expert] += grad[start:end].double().t() @ x[start:end].double()
    merged = WeightGrad.merged(parts)
    assert merged is not None
    found = merged()
    assert [tuple(part.shape) for part in found] == ([(3, 8, 16)] if packed else [(8, 16)] * 3)
    assert float((merged.packed() - want).norm() / want.norm()) < 1e-6
    unknown = WeightGrad(products, torch.randn(4, 8), torch.randn(4, 16), Groups(torch.tensor([4]), None), packed, 0)
    assert WeightGrad.merged([parts[0], unknown]) is None


def test_products_that_are_wrong_are_not_used() -> None:
    class Wrong(LoopProducts):
        name = "wrong"

        def input_grad(self, grad: Tensor, weights: Any, groups: Groups, *, clear: bool = True) -> Tensor:
            return super().input_grad(grad, weights, groups) * 1.5

    assert why_not(LoopProducts(), torch.device("cpu"), torch.float32) is None
    assert "wrong's grouped product does not work" in str(why_not(Wrong(), torch.device("cpu"), torch.float32))
