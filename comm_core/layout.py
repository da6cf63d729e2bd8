"""Where each row goes: counts, prefix sums, destination rows, lane bookkeeping. One implementation for every backend.

Two sides, both vectorised over tokens:

* `plan_send` looks at this rank's `topk_idx` [num_tokens, num_topk] and says which tokens go to which rank (a token
  crosses once per rank, however many of its experts live there) and in which order the answers are added up again.
* `plan_recv` looks at the ids that arrived, one row per (source rank, token), and says which local expert and which
  expanded row each lane has.

Orders: rows to one rank are in token order, rows received are in (source rank, token) order, expanded rows are
expert-major with start_{e+1} = align(start_e + count_e) and, inside an expert, in the order of the received rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from comm_core.runtime.errors import UsageError

# Summands by position: entry j holds (lines, rows), rows[i] being the j-th summand of line lines[i], lines ascending.
Terms = tuple[tuple[torch.Tensor, torch.Tensor], ...]


def align(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def worst_case_rows(
    num_max_tokens_per_rank: int, num_ranks: int, num_topk: int, num_local: int, expert_alignment: int, expand: bool
) -> int:
    """Rows of a dispatch whose shape must hold any routing: every token of every rank comes here, to all it can."""
    most = num_max_tokens_per_rank * num_ranks
    if not expand:
        return most
    return align(most * min(num_topk, num_local) + (expert_alignment - 1) * num_local, expert_alignment)


@dataclass(frozen=True, slots=True)
class SendPlan:
    """What this rank sends. S = number of (token, rank) pairs.

    Attributes:
        dst_rank: int64 [num_tokens, num_topk], rank that owns the lane's expert, -1 where masked.
        is_last_lane: bool [num_tokens, num_topk], the lane is the last (highest) of its token on its rank.
        send_counts: int64 [num_ranks], rows to each rank.
        send_token: int64 [S], token of each row to send, in (destination rank, token) order.
        send_row: int64 [num_tokens, num_topk], row in that order that carries the lane, -1 where masked.
        return_terms: rows (in the sending order) to add up for each token, ordered by last lane.
    """

    dst_rank: torch.Tensor
    is_last_lane: torch.Tensor
    send_counts: torch.Tensor
    send_token: torch.Tensor
    send_row: torch.Tensor
    return_terms: Terms


@dataclass(frozen=True, slots=True)
class RecvPlan:
    """What this rank receives. n = received rows, L = local experts, E = expanded rows.

    Attributes:
        recv_counts: int64 [num_ranks], rows from each rank.
        local_idx: int64 [n, num_topk], local expert id of the lane, -1 where it lives elsewhere or is masked.
        expert_counts: int64 [L], rows of each local expert, unaligned.
        expert_starts: int64 [L], first expanded row of each local expert.
        num_expanded: E, sum of the aligned counts.
        expand_row: int64 [n, num_topk], expanded row of the lane, -1 where not local.
        expand_src: int64 [E], received row shown in the expanded row, -1 in alignment gaps.
        expand_lane: int64 [E], its lane, -1 in alignment gaps.
        gap_rows: int64 [number of gaps], the expanded rows that show nothing.
        reduce_terms: expanded rows to add up for each received row, in lane order.
    """

    recv_counts: torch.Tensor
    local_idx: torch.Tensor
    expert_counts: torch.Tensor
    expert_starts: torch.Tensor
    num_expanded: int
    expand_row: torch.Tensor
    expand_src: torch.Tensor
    expand_lane: torch.Tensor
    gap_rows: torch.Tensor
    reduce_terms: Terms


def check_ids(topk_idx: torch.Tensor, num_experts: int) -> UsageError | None:
    """The error for the first id out of range or repeated in a row; None where all are good. Waits for the values."""
    bad = ((topk_idx < -1) | (topk_idx >= num_experts)).nonzero()
    if bad.shape[0]:
        token, lane = (int(value) for value in bad[0])
        return UsageError(
            f"topk_idx[{token}, {lane}] = {int(topk_idx[token, lane])}",
            allowed=f"-1 (masked) or 0 to {num_experts - 1}",
            fix="check the router, or num_experts",
        )
    ordered = topk_idx.sort(dim=1).values
    same = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).nonzero()
    if same.shape[0]:
        token, lane = (int(value) for value in same[0])
        return UsageError(
            f"topk_idx[{token}] = {topk_idx[token].tolist()} names expert {int(ordered[token, lane])} twice",
            allowed="each expert at most once a token",
            fix="mask the repetition with -1",
        )
    return None


def terms_of(rows: torch.Tensor) -> Terms:
    """The entries >= 0 of each line, in column order, as `Terms`; as many positions as the longest line has."""
    counts = (rows >= 0).sum(1)
    position = (rows >= 0).cumsum(1).sub_(1).masked_fill(rows < 0, -1)
    most = int(counts.max()) if rows.numel() else 0
    found = []
    for wanted in range(most):
        line, column = (position == wanted).nonzero(as_tuple=True)
        found.append((line, rows[line, column]))
    return tuple(found)


def plan_send(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> SendPlan:
    """Plans the sending side.

    Args:
        topk_idx: int64 [num_tokens, num_topk], global expert ids or -1, valid by `check_ids`.
        num_experts: global number, a multiple of `num_ranks`; rank r owns the r-th equal part.
        num_ranks: size of the group.
    """
    num_tokens, num_topk = topk_idx.shape
    device = topk_idx.device
    masked = topk_idx < 0
    dst = topk_idx.div(num_experts // num_ranks, rounding_mode="floor").masked_fill(masked, -1)
    column = dst.masked_fill(masked, num_ranks)  # one scratch column takes the masked lanes
    lanes = torch.arange(num_topk, device=device).expand(num_tokens, num_topk)
    last = torch.full((num_tokens, num_ranks + 1), -1, dtype=torch.int64, device=device)
    last.scatter_reduce_(1, column, lanes, "amax")
    is_last = (last.gather(1, column) == lanes) & ~masked
    goes = (last[:, :num_ranks] >= 0).t().contiguous()  # [num_ranks, num_tokens]: rank-major is the sending order
    row_of = goes.flatten().cumsum(0).sub_(1).view(num_ranks, num_tokens)
    send_row = row_of.t().gather(1, dst.clamp_min(0)).masked_fill(masked, -1)
    return SendPlan(
        dst_rank=dst,
        is_last_lane=is_last,
        send_counts=goes.sum(1),
        send_token=goes.nonzero()[:, 1].contiguous(),
        send_row=send_row,
        return_terms=terms_of(send_row.masked_fill(~is_last, -1)),
    )


def plan_recv(
    recv_topk: torch.Tensor, recv_counts: torch.Tensor, num_experts: int, rank: int, expert_alignment: int
) -> RecvPlan:
    """Plans the receiving side.

    Args:
        recv_topk: int64 [n, num_topk], global ids of the received rows in (source rank, token) order.
        recv_counts: int64 [num_ranks], how many of them each rank sent.
        num_experts: global number.
        rank: this rank.
        expert_alignment: each expert's first expanded row is a multiple of it.
    """
    num_ranks = recv_counts.shape[0]
    num_local = num_experts // num_ranks
    device = recv_topk.device
    local = recv_topk - rank * num_local
    local = local.masked_fill((recv_topk < 0) | (local < 0) | (local >= num_local), -1)
    source, lane = (local >= 0).nonzero(as_tuple=True)
    expert = local[source, lane]
    counts = torch.bincount(expert, minlength=num_local)
    aligned = (counts + expert_alignment - 1).div(expert_alignment, rounding_mode="floor") * expert_alignment
    starts = aligned.cumsum(0) - aligned
    num_expanded = int(aligned.sum())
    order = expert.argsort(stable=True)
    first = counts.cumsum(0) - counts
    rows = torch.empty_like(expert)
    sorted_expert = expert[order]
    rows[order] = starts[sorted_expert] + torch.arange(expert.shape[0], device=device) - first[sorted_expert]
    expand_row = torch.full_like(local, -1)
    expand_row[source, lane] = rows
    expand_src = torch.full((num_expanded,), -1, dtype=torch.int64, device=device)
    expand_src[rows] = source
    expand_lane = torch.full_like(expand_src, -1)
    expand_lane[rows] = lane
    return RecvPlan(
        recv_counts=recv_counts,
        local_idx=local,
        expert_counts=counts,
        expert_starts=starts,
        num_expanded=num_expanded,
        expand_row=expand_row,
        expand_src=expand_src,
        expand_lane=expand_lane,
        gap_rows=(expand_src < 0).nonzero()[:, 0],
        reduce_terms=terms_of(expand_row),
    )


def tensors_of(plan: SendPlan | RecvPlan) -> list[torch.Tensor]:
    """All tensors of a plan, for whoever must keep their memory."""
    values = [getattr(plan, item.name) for item in fields(plan)]
    found = [value for value in values if isinstance(value, torch.Tensor)]
    return found + [tensor for value in values if isinstance(value, tuple) for pair in value for tensor in pair]
