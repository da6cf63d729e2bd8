"""The fused activation: its definition against autograd in float64, its kernels against the definition."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mt_moe import clearing, fused_activation

LAST_BITS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def by_autograd(hidden: Tensor, weights: Tensor, grad: Tensor, act: Callable[[Tensor], Tensor], gated: bool) -> list:
    """The result and the gradients by torch, in float64."""
    leaf, weight = hidden.double().requires_grad_(), weights.double().requires_grad_()
    inner = act(leaf[:, : leaf.shape[1] // 2]) * leaf[:, leaf.shape[1] // 2 :] if gated else act(leaf)
    out = inner * weight.unsqueeze(1)
    grads = torch.autograd.grad(out, (leaf, weight), grad.double())
    return [*(item.detach() for item in grads), out.detach()]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("act", [F.silu, F.gelu, torch.relu])
@pytest.mark.parametrize("dtype", list(LAST_BITS))
def test_definition(dtype: torch.dtype, act: Callable[[Tensor], Tensor], gated: bool) -> None:
    ffn = 40
    hidden = torch.randn(9, 2 * ffn if gated else ffn).to(dtype)
    weights = torch.rand(9, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    grad = torch.randn(9, ffn).to(dtype)
    hidden[4], weights[4], grad[4] = 0, 0, 0  # padding
    found = fused_activation.backward(hidden, weights, grad, act, gated)
    wanted = by_autograd(hidden, weights, grad, act, gated)
    for got, want, kind in zip(found, wanted, (dtype, weights.dtype, dtype), strict=True):
        assert got.dtype == kind and relative(got, want) < LAST_BITS[dtype]
        assert not got[4].any()
    out = fused_activation.forward(hidden, weights, act, gated)
    assert torch.equal(out, found.out)
    assert relative(out * 1.05, wanted[2]) > LAST_BITS[dtype], "a wrong scale would not be seen"
    assert fused_activation.backward(hidden, weights, grad, act, gated, wants_out=False).out is None


def test_results_are_rounded_once() -> None:
    """In bf16 every result is the float32 one rounded, which a rounding after each product is not."""
    hidden, weights, grad = torch.randn(50, 64).bfloat16(), torch.rand(50), torch.randn(50, 32).bfloat16()
    found = fused_activation.backward(hidden, weights, grad, F.silu, True)
    wide = fused_activation.backward(hidden.float(), weights, grad.float(), F.silu, True)
    assert torch.equal(found.hidden, wide.hidden.bfloat16()) and torch.equal(found.out, wide.out.bfloat16())
    assert torch.equal(found.row_weights, wide.row_weights)
    gate, up = hidden.chunk(2, 1)
    often = (F.silu(gate) * up * weights.unsqueeze(1)).bfloat16()
    assert not torch.equal(often, found.out)


def test_rows_behind_the_groups_are_not_read() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    hidden, weights, grad = torch.randn(8, 32), torch.rand(8), torch.randn(8, 16)
    hidden[5:], grad[5:], weights[5:] = float("nan"), float("inf"), float("nan")
    found = fused_activation.backward(hidden, weights, grad, F.silu, True, ends)
    alone = fused_activation.backward(hidden[:5], weights[:5], grad[:5], F.silu, True)
    for got, want in zip(found, alone, strict=True):
        assert torch.equal(got[:5], want) and not got[5:].any()
    assert torch.equal(fused_activation.forward(hidden, weights, F.silu, True, ends), found.out)


def test_clearing() -> None:
    ends = torch.tensor([3, 3, 5, 5], dtype=torch.int32)
    rows, matrices = torch.full((9, 4), torch.nan), torch.full((4, 3, 5), torch.nan)
    rows[:5], matrices[0], matrices[2] = 1, 1, 1
    clearing.clear_tail(rows, ends)
    clearing.clear_empty(matrices, ends)
    assert rows.sum() == 20 and matrices.sum() == 30


KERNELS = """
import torch, torch.nn.functional as F
from mt_moe import clearing, fused_activation, lanes, triton_kernels
for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
    for ffn in (24, 2100):
        hidden, weights, grad = torch.randn(7, 2 * ffn).to(dtype), torch.rand(7), torch.randn(7, ffn).to(dtype)
        for ends in (None, torch.tensor([2, 2, 5], dtype=torch.int32)):
            if ends is not None:
                hidden[5:], grad[5:], weights[5:] = float("nan"), float("nan"), float("nan")
            want = fused_activation.backward_twin(hidden, weights, grad, F.silu, True, ends)
            got = triton_kernels.backward(hidden, weights, grad, ends, True)
            assert torch.equal(triton_kernels.forward(hidden, weights, ends), got[2])
            for a, b in zip(got, want):
                distance = float((a.double() - b.double()).norm() / b.double().norm())
                assert a.dtype == b.dtype and distance < limit, (dtype, ffn, distance)
ends = torch.tensor([3, 3, 5, 5], dtype=torch.int32)
rows, matrices = torch.full((1100, 1500), torch.nan), torch.full((4, 130, 300), torch.nan)
rows[:5], matrices[0], matrices[2] = 1, 1, 1
triton_kernels.clear_tail(rows, ends)
triton_kernels.clear_empty(matrices, ends)
assert rows.sum() == 5 * 1500 and matrices.sum() == 2 * 130 * 300
for num_experts, num_topk in ((64, 6), (48, 3), (8, 8)):
    order = torch.rand(70, num_experts).argsort(1)
    routing_map = order < torch.randint(0, num_topk + 1, (70, 1))
    probs = torch.rand(70, num_experts) * routing_map
    for got, want in zip(
        triton_kernels.lanes_forward(probs, routing_map, num_topk), lanes.from_map_twin(probs, routing_map, num_topk)
    ):
        assert torch.equal(got, want)
    idx, grad = lanes.from_map_twin(probs, routing_map, num_topk)[0], torch.randn(70, num_topk)
    got = triton_kernels.lanes_backward(grad, idx, num_experts, torch.float32)
    assert torch.equal(got, lanes.grad_twin(grad, idx, num_experts, torch.float32)) and got.any()
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    # A process of its own: whether Triton interprets is decided when the kernels are imported.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
