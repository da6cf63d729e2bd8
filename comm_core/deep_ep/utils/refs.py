"""The oracle of the elastic tests: dispatch by torch's all-to-all, combine on the token's own rank.

Combine needs no communication here: what every expert returns for a token is a function of the token's global index
(`generate_pre_combine_data`), so its rank can compute all of it. Independent of the buffers on purpose.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from comm_core.deep_ep.utils import envs

_PRIME = 131071


def dispatch(
    x: Any, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_max_tokens_per_rank: int, num_experts: int
) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Sends each token once to each rank of its experts, over the default group.

    Returns:
        rows (or FP8 rows and scales), local ids, weights as sent, src_rank * num_max_tokens_per_rank + token of each
        row (ascending), rows from each rank.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_local = num_experts // num_ranks
    owner = torch.where(topk_idx >= 0, topk_idx // num_local, -1)
    tokens = [(owner == target).any(1).nonzero()[:, 0] for target in range(num_ranks)]
    order, sent = torch.cat(tokens), [item.shape[0] for item in tokens]
    counts: list[Any] = [None] * num_ranks
    dist.all_gather_object(counts, sent)
    arriving = [line[rank] for line in counts]

    def moved(item: torch.Tensor) -> torch.Tensor:
        rows = item[order].contiguous()
        got = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(got.view(torch.uint8), rows.view(torch.uint8), arriving, sent)
        return got

    recv = tuple(moved(item) for item in x) if isinstance(x, tuple) else moved(x)
    index = torch.arange(topk_idx.shape[0], device=topk_idx.device) + rank * num_max_tokens_per_rank
    local = moved(topk_idx) - rank * num_local
    local.masked_fill_((local < 0) | (local >= num_local), -1)
    return recv, local, moved(topk_weights), moved(index[:, None])[:, 0].to(torch.int32), arriving


def generate_pre_combine_data(
    src_token_global_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> torch.Tensor:
    """What the expert of each lane returns for a token: bf16 [n, num_topk, hidden], a function of its index alone.

    sin(((seed * P mod M) + 1) / M * column + sin(global seed)), columns from 1, seed = index * num_topk + lane,
    M = ranks * num_max_tokens_per_rank * num_topk, P a prime.
    """
    most = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    lanes = torch.arange(num_topk, device=src_token_global_idx.device)
    seeds = src_token_global_idx.long()[:, None] * num_topk + lanes
    phase = ((seeds * _PRIME % most).float() + 1) / most
    columns = torch.arange(1, hidden + 1, device=phase.device, dtype=torch.float32)
    return torch.sin(phase[:, :, None] * columns + math.sin(envs.get_global_seed())).to(torch.bfloat16)


def ordered_accumulate(y: torch.Tensor) -> torch.Tensor:
    """Sum over lanes [n, lanes, hidden] -> bf16 [n, hidden]: fp32, in order, one rounding."""
    total = torch.zeros(y.shape[0], y.shape[2], dtype=torch.float32, device=y.device)
    for lane in range(y.shape[1]):
        total += y[:, lane].float()
    return total.to(torch.bfloat16)


def combine(  # noqa: D417 (described together)
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: torch.Tensor | tuple[torch.Tensor, ...] | None,
    reduce_in_rank: bool,
    reduce_in_scaleup: bool,
) -> torch.Tensor:
    """Adds up the lanes of each token, bf16 [T, hidden]: bias first (two are added in fp32 before), then the lanes.

    Args:
        y: bf16 [T, num_topk, hidden], 0 at masked lanes.
        topk_idx: [T, num_topk].
        num_scaleout_ranks, num_scaleup_ranks: sizes of the domains.
        num_experts: global number.
        bias: none, one or two [T, hidden].
        reduce_in_rank: lanes of one rank are added and rounded first; the sum stands at the last of them.
        reduce_in_scaleup: then those of one scale-up domain.
    """
    per_rank = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_rank:
        y = _grouped(y, torch.where(topk_idx >= 0, topk_idx // per_rank, -1))
    if reduce_in_scaleup:
        y = _grouped(y, torch.where(topk_idx >= 0, topk_idx // (per_rank * num_scaleup_ranks), -1))
    biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    total = torch.zeros(y.shape[0], y.shape[2], dtype=torch.float32, device=y.device)
    for item in biases:
        total += item.float()
    for lane in range(y.shape[1]):
        total += y[:, lane].float()
    return total.to(torch.bfloat16)


def _grouped(y: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Each group's sum, rounded, at its last lane; 0 at its other lanes."""
    out = torch.zeros_like(y)
    for last in range(y.shape[1]):
        later = (group[:, last + 1 :] == group[:, last : last + 1]).any(1)
        total = torch.zeros(y.shape[0], y.shape[2], dtype=torch.float32, device=y.device)
        for lane in range(last + 1):
            same = (group[:, lane] == group[:, last]) & (group[:, last] >= 0) & ~later
            total += torch.where(same[:, None], y[:, lane].float(), 0.0)
        out[:, last] = total.to(y.dtype)
    return out
