"""The definition of dispatch and combine: plain torch over lists of per-rank tensors, slow and obviously right.

Every argument is a list with one tensor a rank, every result a list with one answer a rank; nothing communicates.
Backends must equal this file: bytes for rows that are moved, `torch.equal` for sums. Loops are written out on purpose.

Dispatch, plain: a token sends one row to each rank that owns at least one of its experts. Rows received are in
(source rank, token) order. Dispatch, expanded: one row per (token, local expert); the rows of local expert e start at
start_e, start_0 = 0, start_{e+1} = start_e + count_e rounded up to a multiple of the alignment; inside an expert they
are in (source rank, token) order, and the rows of the gaps are zeros.

Combine: a token adds up one row from each rank it was sent to, in fp32 (fp64 for fp64), left to right, biases first,
then ranks in the order of the last lane of the token that each owns; one rounding to the dtype of the rows. Where rows
were expanded, those of a token on one rank are added up there first: fp32, lane order, one rounding (DeepEP V2's
recipes A and B; a single row is passed on as it is). With a single reduction every expanded row goes home and all are
added up there in lane order, biases first, one rounding (recipe C). No step is fused: each sum is rounded to fp32.

FP8: data and scales of a token are two rows that travel alike; dispatch each of them with this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Arrival:
    """One received row: where it comes from and what its lanes are here.

    Attributes:
        src_rank: rank that sent it.
        token: its token there.
        local_idx: local expert of each lane, -1 where the lane is masked or lives on another rank.
        rows: expanded row of each lane, -1 where not local.
    """

    src_rank: int
    token: int
    local_idx: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What one rank holds after a dispatch; fields as `ElasticBuffer.dispatch` returns them.

    Attributes:
        recv_x: rows.
        recv_topk_idx: int64 [n, num_topk] local ids or -1; None with do_expand.
        recv_topk_weights: [n, num_topk] as sent, or [rows] with do_expand; None without weights.
        arrivals: the received rows in order; their number is n.
        expert_counts: rows of each local expert, unaligned.
        expert_starts: first expanded row of each local expert.
        num_expanded: expanded rows, gaps included.
        topk_idx: ids of this rank's own tokens.
        do_expand: rows are expanded.
    """

    recv_x: torch.Tensor
    recv_topk_idx: torch.Tensor | None
    recv_topk_weights: torch.Tensor | None
    arrivals: tuple[Arrival, ...]
    expert_counts: tuple[int, ...]
    expert_starts: tuple[int, ...]
    num_expanded: int
    topk_idx: torch.Tensor
    do_expand: bool


def dispatch(
    x: Sequence[torch.Tensor],
    topk_idx: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor] | None = None,
    *,
    num_experts: int,
    expert_alignment: int = 1,
    do_expand: bool = False,
) -> list[Dispatched]:
    """Sends tokens to the ranks of their experts.

    Args:
        x: [num_tokens of the rank, hidden] each.
        topk_idx: int64 [num_tokens, num_topk] each, global expert ids or -1.
        topk_weights: [num_tokens, num_topk] each.
        num_experts: global number; rank r owns experts r * L to r * L + L - 1 with L = num_experts / num_ranks.
        expert_alignment: an expert's first expanded row is a multiple of it.
        do_expand: one row per (token, local expert) instead of one per token.
    """
    num_ranks = len(x)
    num_local = num_experts // num_ranks
    results = []
    for rank in range(num_ranks):
        found: list[tuple[int, int, tuple[int, ...]]] = []
        for src_rank in range(num_ranks):
            for token, ids in enumerate(topk_idx[src_rank].tolist()):
                local = tuple(e - rank * num_local if e >= 0 and e // num_local == rank else -1 for e in ids)
                if max(local) >= 0:
                    found.append((src_rank, token, local))
        counts = [sum(e in local for _, _, local in found) for e in range(num_local)]
        starts, end = [], 0
        for count in counts:
            starts.append(end)
            end += -(-count // expert_alignment) * expert_alignment
        free = list(starts)
        arrivals = []
        for src_rank, token, local in found:
            rows = []
            for e in local:
                rows.append(free[e] if e >= 0 else -1)
                if e >= 0:
                    free[e] += 1
            arrivals.append(Arrival(src_rank, token, local, tuple(rows)))
        results.append(
            _received(x, topk_idx, topk_weights, rank, arrivals, (tuple(counts), tuple(starts), end), do_expand)
        )
    return results


def _received(
    x: Sequence[torch.Tensor],
    topk_idx: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor] | None,
    rank: int,
    arrivals: list[Arrival],
    experts: tuple[tuple[int, ...], tuple[int, ...], int],
    do_expand: bool,
) -> Dispatched:
    """Fills the tensors of one rank row by row."""
    counts, starts, num_expanded = experts
    num_rows, num_topk = num_expanded if do_expand else len(arrivals), topk_idx[rank].shape[1]
    recv_x = x[rank].new_zeros(num_rows, x[rank].shape[1])
    weights = None
    if topk_weights is not None:
        weights = topk_weights[rank].new_zeros((num_rows,) if do_expand else (num_rows, num_topk))
    for position, arrival in enumerate(arrivals):
        row = x[arrival.src_rank][arrival.token]
        if not do_expand:
            recv_x[position] = row
            if weights is not None and topk_weights is not None:
                weights[position] = topk_weights[arrival.src_rank][arrival.token]
            continue
        for lane, target in enumerate(arrival.rows):
            if target >= 0:
                recv_x[target] = row
                if weights is not None and topk_weights is not None:
                    weights[target] = topk_weights[arrival.src_rank][arrival.token, lane]
    idx = torch.tensor([arrival.local_idx for arrival in arrivals], dtype=torch.int64).reshape(-1, num_topk)
    return Dispatched(
        recv_x=recv_x,
        recv_topk_idx=None if do_expand else idx,
        recv_topk_weights=weights,
        arrivals=tuple(arrivals),
        expert_counts=counts,
        expert_starts=starts,
        num_expanded=num_expanded,
        topk_idx=topk_idx[rank],
        do_expand=do_expand,
    )


def combine(
    x: Sequence[torch.Tensor],
    dispatched: Sequence[Dispatched],
    topk_weights: Sequence[torch.Tensor] | None = None,
    biases: Sequence[Sequence[torch.Tensor]] = (),
    *,
    multiple_reduction: bool = True,
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Brings rows home and adds them up.

    Args:
        x: rows of each rank, in the order `dispatched` has them.
        dispatched: result of the dispatch.
        topk_weights: of each rank, [n, num_topk] or, for expanded rows, [rows].
        biases: up to two, each one tensor [num_tokens, hidden] a rank.
        multiple_reduction: expanded rows are added up on their rank first; False adds all up at home in one sum.

    Returns:
        (combined_x [num_tokens, hidden], combined_topk_weights [num_tokens, num_topk] or None) a rank; the weight of a
        lane is the one from the rank of its expert, 0 at masked lanes.
    """
    results = []
    for rank, mine in enumerate(dispatched):
        num_tokens, num_topk = mine.topk_idx.shape
        wide = torch.float64 if x[rank].dtype == torch.float64 else torch.float32
        out_x = x[rank].new_zeros(num_tokens, x[rank].shape[1])
        out_weights = None if topk_weights is None else topk_weights[rank].new_zeros(num_tokens, num_topk)
        for token in range(num_tokens):
            home = _rows_of(rank, token, x, dispatched)
            total = x[rank].new_zeros(x[rank].shape[1], dtype=wide)
            for bias in biases:
                total = total + bias[rank][token].to(wide)
            if multiple_reduction or not mine.do_expand:
                summands = [row for _, _, row, _ in sorted(home, key=lambda item: item[0])]
            else:
                lanes = [(k, x[owner][r]) for _, owner, _, (_, a) in home for k, r in enumerate(a.rows) if r >= 0]
                summands = [row for _, row in sorted(lanes, key=lambda item: item[0])]
            for row in summands:
                total = total + row.to(wide)
            out_x[token] = total.to(out_x.dtype)
            if out_weights is not None and topk_weights is not None:
                for _, owner, _, (position, arrival) in home:
                    for lane, e in enumerate(arrival.local_idx):
                        if e >= 0:
                            given = topk_weights[owner]
                            where = arrival.rows[lane] if mine.do_expand else (position, lane)
                            out_weights[token, lane] = given[where]
        results.append((out_x, out_weights))
    return results


def _rows_of(
    rank: int, token: int, x: Sequence[torch.Tensor], dispatched: Sequence[Dispatched]
) -> list[tuple[int, int, torch.Tensor, tuple[int, Arrival]]]:
    """What each rank sends back for one token: (last lane, owner, row, where it lay)."""
    home = []
    for owner, there in enumerate(dispatched):
        for position, arrival in enumerate(there.arrivals):
            if (arrival.src_rank, arrival.token) != (rank, token):
                continue
            last_lane = max(lane for lane, e in enumerate(arrival.local_idx) if e >= 0)
            rows = [x[owner][row] for row in arrival.rows if row >= 0] if there.do_expand else [x[owner][position]]
            home.append((last_lane, owner, _added(rows), (position, arrival)))
    return home


def _added(rows: list[torch.Tensor]) -> torch.Tensor:
    """The rows of one token on one rank, added left to right and rounded once; a single row as it is."""
    if len(rows) == 1:
        return rows[0]
    wide = torch.float64 if rows[0].dtype == torch.float64 else torch.float32
    total = rows[0].to(wide)
    for row in rows[1:]:
        total = total + row.to(wide)
    return total.to(rows[0].dtype)
