"""Where rows lie in the fixed blocks of the low-latency calls: [local experts, num_ranks * max, hidden].

The rows of an expert are contiguous, ordered by (source rank, token); those of one source rank begin where
`layout_range` says. A dispatch and the combines after it use the same positions, also where ranks were lost between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from comm_core.handle import EPHandle


class BlockHandle(tuple[torch.Tensor, torch.Tensor, int, int, int]):
    """What low_latency_dispatch returns to be given to low_latency_combine.

    In order, L local experts, R ranks:

        src_info int32 [L, R * max]: token of each row on its source rank, -1 where there is no row.
        layout_range int64 [L, R]: (first row << 32) | number of rows of each source rank.
        num_max_dispatch_tokens_per_rank, hidden, num_experts.

    Attributes:
        ep: the routing decision on the transport; a lane of a token counts as a token there.
        topk_idx: int64 [T, num_topk], the ids sent.
        number: of the transport it was made on.
        owner: tells buffers apart.
        fast: what the kernels of a backend keep for the combine (`fast.Kept`); None on the general way.
        staged: bf16 blocks for the next combine with zero_copy, or None.
    """

    ep: EPHandle | None
    fast: Any
    topk_idx: torch.Tensor
    number: int
    owner: object
    staged: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Positions of received rows.

    Attributes:
        flat: int64 [n] (host), row in the blocks seen as [L * R * max, hidden].
        layout_range: int64 [L, R] (host), as in BlockHandle.
        counts: int32 [L].
    """

    flat: torch.Tensor
    layout_range: torch.Tensor
    counts: torch.Tensor


def lane_ids(topk_idx: torch.Tensor, members: list[int], num_ranks: int, num_local: int) -> torch.Tensor:
    """Ids [T * num_topk, 1] among the experts of `members`; -1 where masked or where the expert's rank is lost."""
    slot = torch.full((num_ranks,), -1)
    slot[members] = torch.arange(len(members))
    ids = topk_idx.reshape(-1, 1)
    place = slot.to(topk_idx.device)[ids.clamp_min(0).div(num_local, rounding_mode="floor")]
    return (place * num_local + ids % num_local).masked_fill((ids < 0) | (place < 0), -1)


def blocks_of(ep: EPHandle, members: list[int], num_ranks: int, height: int) -> Blocks:
    """Lays out received rows.

    Args:
        ep: routing decision; its rows are (source rank, token * num_topk + lane), one lane each.
        members: group rank of each rank of the transport.
        num_ranks: ranks of the group.
        height: rows of an expert's block.
    """
    num_local = ep.num_local_experts
    expert, source = _expert_and_source(ep, members)
    counts = torch.bincount(source * num_local + expert, minlength=num_ranks * num_local).view(num_ranks, num_local)
    ranges = (((counts.cumsum(0) - counts) << 32) | counts).t().contiguous()
    return Blocks(flat_rows(ep, members, ranges, height), ranges, counts.sum(0).to(torch.int32))


def flat_rows(ep: EPHandle, members: list[int], layout_range: torch.Tensor, height: int) -> torch.Tensor:
    """int64 [n] (host), rows of `ep` in the blocks, also where those were laid out for more members."""
    expert, source = _expert_and_source(ep, members)
    begin = layout_range.cpu() >> 32
    return expert * height + begin[expert, source] + _position(source * ep.num_local_experts + expert)


def _expert_and_source(ep: EPHandle, members: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Local expert and source rank of each received row, on the host."""
    splits = torch.tensor(ep.layout.recv_splits)
    return ep.layout.recv.local_idx[:, 0].cpu(), torch.repeat_interleave(torch.tensor(members), splits)


def _position(key: torch.Tensor) -> torch.Tensor:
    """How many earlier entries have the same value."""
    order = key.argsort(stable=True)
    counts = torch.bincount(key)
    first = counts.cumsum(0) - counts
    position = torch.empty_like(key)
    position[order] = torch.arange(key.shape[0]) - first[key[order]]
    return position
