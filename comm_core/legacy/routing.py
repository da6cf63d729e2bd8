"""V1's view of a routing decision, as pure functions: who gets which token, lanes that are ranks, the handle's fields.

Channels: V1 cuts the T tokens of a rank into C equal parts of ceil(T / C) (the last ones may be short or empty) and
keeps offsets a part. Nothing here needs them, but they stand in the handle, so they are right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from comm_core.handle import EPHandle
from comm_core.runtime.errors import UsageError
from comm_core.validate import MAX_TOPK


class BufferHandle(tuple[torch.Tensor, ...]):
    """What V1's dispatch returns beside the rows: a tuple of six tensors that knows its EPHandle.

    In order, R ranks, C channels, n rows (num_worst_tokens where given), T tokens; int32 but for is_token_in_rank:

        rank_prefix_matrix [R, R]: entry (i, j): rows that ranks 0 to i send to rank j.
        channel_prefix_matrix [R, C]: entry (j, c): rows for rank j in this rank's channels 0 to c.
        recv_channel_prefix_matrix [R, C]: entry (i, c): rows that rank i sends here before its channel c.
        recv_src_idx [n]: token of each received row on its source rank; -1 beyond the rows received.
        is_token_in_rank bool [T, R]: as given.
        send_head [T, R]: position of the token among those of its channel for that rank, -1 where it does not go.

    Attributes:
        ep: the routing decision on the transport.
        num_rows: rows of the tensors that dispatch returned.
    """

    ep: EPHandle
    num_rows: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Counts of `Buffer.get_dispatch_layout`."""

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


def layout_of(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Counts tokens by rank and expert; a token counts once a rank. `topk_idx` holds valid ids.

    Returns:
        int32 [num_ranks], int32 [num_experts], bool [num_tokens, num_ranks].
    """
    num_tokens, num_local = topk_idx.shape[0], num_experts // num_ranks
    topk_idx = topk_idx.to(torch.int64)
    masked = topk_idx < 0
    per_expert = torch.bincount(topk_idx[~masked], minlength=num_experts).to(torch.int32)
    ranks = topk_idx.div(num_local, rounding_mode="floor").masked_fill(masked, num_ranks)
    goes = torch.zeros(num_tokens, num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    goes.scatter_(1, ranks, True)
    inside = goes[:, :num_ranks].contiguous()
    return Layout(inside.sum(0, dtype=torch.int32), per_expert, inside)


def lanes_of(is_token_in_rank: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Ids int64 [T, min(R, 32)] that send each token to its ranks, in ascending order: the first expert of each.

    Raises:
        UsageError: a token goes to more ranks than a routing decision has lanes.
    """
    num_ranks = is_token_in_rank.shape[1]
    width = min(num_ranks, MAX_TOPK)
    if num_ranks > width and is_token_in_rank.numel():
        most = int(is_token_in_rank.sum(1).max())
        if most > width:
            raise UsageError(
                f"a token for {most} ranks", allowed=f"at most {width} ranks a token", fix="choose fewer experts"
            )
    first = torch.arange(num_ranks, device=is_token_in_rank.device) * (num_experts // num_ranks)
    ids = first.expand(is_token_in_rank.shape).masked_fill(~is_token_in_rank, num_experts)
    ids = ids.sort(dim=1).values[:, :width]
    return ids.masked_fill(ids == num_experts, -1).contiguous()


def channel_of(num_tokens: int, num_channels: int) -> torch.Tensor:
    """int64 [num_tokens], the channel of each token."""
    return torch.arange(num_tokens).div(max(1, -(-num_tokens // num_channels)), rounding_mode="floor")


def empty_handle(ep: EPHandle, is_token_in_rank: torch.Tensor, num_channels: int, num_rows: int) -> BufferHandle:
    """A handle for `fill_handle`.

    Args:
        ep: the routing decision on the transport.
        is_token_in_rank: of this rank, bool [T, R].
        num_channels: of this rank.
        num_rows: rows of the received tensors, at least those that arrive.
    """
    num_tokens, num_ranks = is_token_in_rank.shape
    by_channel = (num_ranks, num_channels)
    prefix, ends, starts, src, head = (
        torch.empty(shape, dtype=torch.int32, device=is_token_in_rank.device)
        for shape in ((num_ranks, num_ranks), by_channel, by_channel, (num_rows,), (num_tokens, num_ranks))
    )
    handle = BufferHandle((prefix, ends, starts, src, is_token_in_rank, head))
    handle.ep, handle.num_rows = ep, num_rows
    return handle


def fill_handle(handle: BufferHandle, table: list[list[int]]) -> None:
    """Computes the fields of a handle whose counts are there.

    Args:
        handle: to fill.
        table: one line a rank: its number of tokens and of channels, then its rows for each rank.
    """
    ep, num_ranks, num_channels = handle.ep, len(table), handle[1].shape[1]
    inside = handle[4].to("cpu", torch.int64)
    channel = channel_of(inside.shape[0], num_channels)
    by_channel = torch.zeros(num_channels, num_ranks, dtype=torch.int64).index_add_(0, channel, inside)
    ends = by_channel.cumsum(0)
    head = (inside.cumsum(0) - inside - (ends - by_channel)[channel]).masked_fill(inside == 0, -1)
    recv_token = ep.layout.recv_token.cpu()
    starts, first = torch.zeros(num_ranks, num_channels, dtype=torch.int64), 0
    for source, count in enumerate(ep.layout.recv_splits):
        tokens, channels = table[source][:2]
        its = channel_of(tokens, channels)[recv_token[first : first + count]]
        counts = torch.bincount(its, minlength=channels)[:num_channels]
        starts[source, : counts.shape[0]] = counts.cumsum(0) - counts
        first += count
    src = torch.full((handle.num_rows,), -1, dtype=torch.int64)
    src[: recv_token.shape[0]] = recv_token
    prefix = torch.tensor([line[2 : 2 + num_ranks] for line in table]).cumsum(0)
    for field, values in zip((*handle[:4], handle[5]), (prefix, ends.t(), starts, src, head), strict=True):
        field.copy_(values)
