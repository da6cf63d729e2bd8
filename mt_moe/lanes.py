"""From a dense routing map to lanes: [num_tokens, num_experts] of flags and weights to [num_tokens, num_topk] of ids.

Routers that decide by a dense map (Megatron's) name no ids. Sorting the map would cost more than the router; but each
token's lanes are the flags in order, so a running count along the experts says where each goes: one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_moe.fused_activation import kernels_on, why_no_kernels


def from_map_twin(probs: Tensor, routing_map: Tensor, num_topk: int) -> tuple[Tensor, Tensor]:
    """The definition of the forward pass; arguments and results as in `from_map`."""
    num_experts = routing_map.shape[1]
    lane = (routing_map.cumsum(1) - 1).masked_fill(~routing_map, num_topk).clamp_max(num_topk)
    experts = torch.arange(num_experts, device=probs.device).expand_as(lane)
    # One column more than there are lanes takes what is not routed.
    idx = torch.full((probs.shape[0], num_topk + 1), -1, dtype=torch.int64, device=probs.device)
    idx = idx.scatter_(1, lane, experts)[:, :num_topk].contiguous()
    weights = probs.gather(1, idx.clamp_min(0)).to(_weight_dtype(probs))
    return idx, weights.masked_fill_(idx < 0, 0)


def grad_twin(grad: Tensor, idx: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    """The gradient of probs from that of the weights, [num_tokens, num_experts]."""
    found = torch.zeros(grad.shape[0], num_experts + 1, dtype=dtype, device=grad.device)
    return found.scatter_(1, idx.masked_fill(idx < 0, num_experts), grad.to(dtype))[:, :num_experts]


def _weight_dtype(probs: Tensor) -> torch.dtype:
    return torch.float64 if probs.dtype == torch.float64 else torch.float32


def _by_kernel(probs: Tensor) -> bool:
    return probs.device.type != "cpu" and probs.dtype != torch.float64 and why_no_kernels(probs.device.type) is None


class _FromMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, routing_map: Tensor, num_topk: int) -> tuple[Tensor, Tensor]:
        if _by_kernel(probs):
            idx, weights = kernels_on(probs.device.type).lanes_forward(probs, routing_map, num_topk)
        else:
            idx, weights = from_map_twin(probs, routing_map, num_topk)
        ctx.mark_non_differentiable(idx)
        ctx.save_for_backward(idx)
        ctx.form = probs.shape[1], probs.dtype
        return idx, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _idx: Tensor, grad: Tensor) -> tuple[Tensor, None, None]:
        (idx,) = ctx.saved_tensors
        num_experts, dtype = ctx.form
        if _by_kernel(grad):
            return kernels_on(grad.device.type).lanes_backward(grad.contiguous(), idx, num_experts, dtype), None, None
        return grad_twin(grad, idx, num_experts, dtype), None, None


def from_map(probs: Tensor, routing_map: Tensor, num_topk: int) -> tuple[Tensor, Tensor]:
    """Lanes of every token, its experts in ascending order.

    Args:
        probs: [num_tokens, num_experts] routing weights.
        routing_map: bool [num_tokens, num_experts], at most `num_topk` set in a row.
        num_topk: lanes a token.

    Returns:
        topk_idx int64 [num_tokens, num_topk], -1 in unused lanes; topk_weights of the same shape, fp32 (fp64 for fp64),
        0 in unused lanes. Gradients flow to `probs` where it is routed.
    """
    idx, weights = _FromMap.apply(probs.contiguous(), routing_map.contiguous(), num_topk)
    return idx, weights
