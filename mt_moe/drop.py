"""Expert capacity: how many tokens of one rank an expert takes, and which ones it drops.

    capacity = ceil(num_tokens * num_topk / num_experts * capacity_factor)          num_tokens: those of this rank

"probs" keeps the tokens with the largest weights; "position" those that `torch.topk` puts first among equals, which on
a GPU are the first tokens. The calls of `torch.topk` have the arguments that Megatron's have, so that the same tokens
are kept on the same device.

Megatron can pad every expert to its capacity with tokens of weight zero. Such a row adds exactly zero to every output
and every gradient. It is not sent here: what padding is for, a bound of the rows known before, is `expert_capacity`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mt_moe.config import MoEConfig


def expert_capacity(num_tokens: int, config: MoEConfig) -> int | None:
    """The most tokens that one expert takes from a rank of `num_tokens` tokens; None without a bound below num_tokens.

    An expert has at most `num_ranks` times as many rows, and a rank `num_local_experts` times as many as an expert.
    """
    if config.capacity_factor is None:
        return None
    capacity = math.ceil(num_tokens * config.num_topk / config.num_experts * config.capacity_factor)
    return capacity if capacity < num_tokens else None


def capacity_mask(probs: Tensor, routing_map: Tensor, capacity: int, drop_policy: str) -> Tensor:
    """The tokens that each expert takes, as many as its capacity says: bool [num_tokens, num_experts].

    Where fewer are routed to an expert, the mask has tokens that were not: `&` it with the map. Unmasked, it is the map
    that Megatron pads to capacity.

    Args:
        probs: [num_tokens, num_experts], the weight of each routed pair, else 0.
        routing_map: bool [num_tokens, num_experts].
        capacity: at most num_tokens.
        drop_policy: "probs" or "position".
    """
    order = probs if drop_policy == "probs" else routing_map.int()
    kept = torch.topk(order, k=capacity, dim=0, sorted=False).indices
    return torch.zeros_like(routing_map, dtype=torch.bool).scatter_(0, kept, True)


@torch.no_grad()
def kept_lanes(topk_idx: Tensor, topk_weights: Tensor, config: MoEConfig, token_mask: Tensor | None = None) -> Tensor:
    """The lanes that stay within capacity, bool [num_tokens, num_topk].

    Args:
        topk_idx: int64 [num_tokens, num_topk], distinct experts in a row.
        topk_weights: [num_tokens, num_topk].
        config: gives capacity and policy.
        token_mask: bool [num_tokens]; a token with False takes no place.
    """
    capacity = expert_capacity(topk_idx.shape[0], config)
    kept = torch.ones_like(topk_idx, dtype=torch.bool) if token_mask is None else token_mask.unsqueeze(1)
    kept = kept.expand(topk_idx.shape)
    if capacity is None:
        return kept
    shape = (topk_idx.shape[0], config.num_experts)
    probs = topk_weights.new_zeros(shape).scatter(1, topk_idx, topk_weights.masked_fill(~kept, 0))
    routing_map = kept.new_zeros(shape).scatter(1, topk_idx, kept)
    return kept & capacity_mask(probs, routing_map, capacity, config.drop_policy).gather(1, topk_idx)
