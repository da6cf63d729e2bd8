"""Lanes of a dense map, token by token; its kernels are tested with the others in test_fused_activation."""

from __future__ import annotations

import pytest
import torch

from mt_moe.lanes import from_map


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lanes_from_a_dense_map(dtype: torch.dtype) -> None:
    num_experts, num_topk = 9, 4
    order = torch.rand(50, num_experts).argsort(1)
    routing_map = order < torch.randint(0, num_topk + 1, (50, 1))
    probs = (torch.rand(50, num_experts) * routing_map).to(dtype).requires_grad_()
    idx, weights = from_map(probs, routing_map, num_topk)
    for token in range(50):
        experts = routing_map[token].nonzero().flatten().tolist()
        spare = num_topk - len(experts)
        assert idx[token].tolist() == experts + [-1] * spare
        assert weights[token].tolist() == probs[token, experts].tolist() + [0.0] * spare
    grad = torch.randn(50, num_topk, dtype=weights.dtype)
    weights.backward(grad)
    want = torch.zeros(50, num_experts, dtype=dtype)
    for token in range(50):
        for lane, expert in enumerate(idx[token].tolist()):
            if expert >= 0:
                want[token, expert] = grad[token, lane]
    assert probs.grad is not None and probs.grad.dtype == dtype and torch.equal(probs.grad, want)


def test_no_tokens() -> None:
    idx, weights = from_map(torch.zeros(0, 5), torch.zeros(0, 5, dtype=torch.bool), 2)
    assert idx.shape == weights.shape == (0, 2)
