"""From logits to experts and weights: the rules of Megatron's `TopKRouter`, bit for bit on the same device.

    sigmoid               scores = sigmoid(logits)                  (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)
    softmax, not normal   scores = softmax(logits)                  "pre-softmax" in Megatron (DeepSeek-V2)
    softmax, normalised   scores = logits                           the softmax is taken over the chosen experts alone

    choice  = scores + expert_bias                                  chooses, and does nothing else
    groups  : the num_topk_groups best by the sum of their num_topk // num_topk_groups best choices; others are out
    experts : the num_topk best choices left
    weights = scores of those (sigmoid: divided by their sum), times routed_scaling_factor

Which of two equal choices wins is up to `torch.topk` on that device. The calls of it here have the arguments that
Megatron's have, so that equal logits give equal experts, ties included.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_moe.config import MoEConfig

_MASK = (1 << 32) - 1


def choose(scores: Tensor, expert_bias: Tensor | None, config: MoEConfig) -> Tensor:
    """The experts of every token by falling choice, int64 [num_tokens, num_topk], of scores [num_tokens, num_experts].

    Where a token may choose from more groups than it has experts, a group counts by its best choice.
    """
    choice = scores.detach()
    if expert_bias is not None:
        choice = choice + expert_bias
    if config.num_topk_groups < config.num_groups:
        num_tokens, num_experts = choice.shape
        grouped = choice.view(num_tokens, config.num_groups, num_experts // config.num_groups)
        best = grouped.topk(max(1, config.num_topk // config.num_topk_groups), dim=-1).values.sum(dim=-1)
        allowed = torch.zeros_like(best, dtype=torch.bool)
        allowed.scatter_(1, best.topk(config.num_topk_groups, dim=-1, sorted=False).indices, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(2), -math.inf).view(num_tokens, num_experts)
    return choice.topk(config.num_topk, dim=1).indices


def route(
    logits: Tensor, expert_bias: Tensor | None, config: MoEConfig, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Experts and weights of every token.

    Args:
        logits: [num_tokens, num_experts], fp32 or fp64.
        expert_bias: [num_experts], added to what chooses; None for none.
        config: the rules.
        dtype: of scores and weights; fp32 as in Megatron, or fp64 for a layer that is fp64 throughout.

    Returns:
        topk_idx int64 [num_tokens, num_topk] by falling choice, topk_weights [num_tokens, num_topk] in `dtype`.
    """
    if config.score == "sigmoid":
        scores = torch.sigmoid(logits.to(dtype))
        topk_idx = choose(scores, expert_bias, config)
        weights = scores.gather(1, topk_idx)
        if config.normalize_weights and config.num_topk > 1:
            # Too small to move any other sum, it keeps a row of vanished scores finite.
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    elif config.normalize_weights:
        topk_idx = choose(logits, expert_bias, config)
        weights = torch.softmax(logits.gather(1, topk_idx), dim=-1, dtype=dtype)
    else:
        scores = torch.softmax(logits, dim=-1, dtype=dtype)
        topk_idx = choose(scores, expert_bias, config)
        weights = scores.gather(1, topk_idx)
    if config.routed_scaling_factor != 1.0:
        weights = weights * config.routed_scaling_factor
    return topk_idx, weights


class _StraightThrough(torch.autograd.Function):
    """Other values forward, the same gradient backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def forced_logits(logits: Tensor, seed: str) -> Tensor:
    """Normal noise in place of logits [num_tokens, num_experts], for measurements with balanced experts.

    Megatron draws anew at each call from a generator of its own. Here the noise is a hash of (seed, token, expert):
    recomputed activations and captured graphs meet the same decision. Gradients pass to the logits unchanged.

    Args:
        logits: gives shape, dtype and device.
        seed: any text; name the layer and the rank in it.
    """
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    values = (torch.arange(logits.numel(), device=logits.device, dtype=torch.int64) + start) & _MASK
    # Two rounds of shift and multiply (the constants are those of Chris Wellons' "lowbias32").
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        values = ((values ^ (values >> shift)) * factor) & _MASK
    # 23 bits and a half are exact in fp32, so that no draw is infinite.
    uniform = (((values ^ (values >> 16)) >> 9).to(torch.float32) + 0.5) / (1 << 23)
    noise = torch.erfinv(2 * uniform - 1) * math.sqrt(2)
    result: Tensor = _StraightThrough.apply(logits, noise.to(logits.dtype).view(logits.shape))
    return result
