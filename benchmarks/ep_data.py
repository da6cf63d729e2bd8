"""Tokens of all ranks from one seed, and what each operation must give of them: plain torch, no communication.

Every rank draws what all ranks hold and computes its own answer, so a wrong byte can not hide behind a wrong partner.
`comm_core.reference` defines the operations token by token; this says the same with whole tensors, as 8,192 tokens a
rank need. tests/benchmarks compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from comm_core import fp8
from comm_core.runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one measurement: tokens a rank, elements and experts a token, experts of all ranks, ranks."""

    tokens: int
    hidden: int
    topk: int
    experts: int
    ranks: int
    alignment: int = 1

    @property
    def num_local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ranks

    def check(self) -> None:
        """Raises UsageError for what can not be run."""
        for name in ("tokens", "hidden", "topk", "experts", "alignment"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} {getattr(self, name)}", allowed="at least 1", fix="pass another")
        if self.hidden % 16:
            raise UsageError(f"--hidden {self.hidden}", allowed="a multiple of 16", fix="pass another")
        if self.experts % self.ranks or self.topk > self.experts:
            raise UsageError(
                f"--experts {self.experts} with --topk {self.topk} on {self.ranks} ranks",
                allowed="a multiple of the ranks, at least topk",
                fix="pass others",
            )


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the ranks send, one entry a rank.

    Attributes:
        x: bf16 [tokens, hidden].
        pairs: the same cast to FP8: data and scales.
        ids: int64 [tokens, topk].
        weights: fp32 [tokens, topk].
    """

    x: list[torch.Tensor]
    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Routing:
    """What comes to one rank. n rows, in (source rank, token) order.

    Attributes:
        tokens: of each source rank, the tokens that come, ascending.
        local_idx: int64 [n, topk], local expert or -1.
        expand_row: int64 [n, topk], expanded row or -1.
        num_expanded: expanded rows, alignment gaps included.
    """

    tokens: list[torch.Tensor]
    local_idx: torch.Tensor
    expand_row: torch.Tensor
    num_expanded: int

    def rows_of(self, source: int) -> slice:
        """The rows that come from a rank."""
        first = sum(len(tokens) for tokens in self.tokens[:source])
        return slice(first, first + len(self.tokens[source]))


def draw(shape: Shape, seed: int, device: torch.device) -> Tokens:
    """The same on every rank of devices of one kind."""
    generator = torch.Generator(device).manual_seed(seed)
    options: dict[str, Any] = {"device": device, "generator": generator}
    x, ids, weights = [], [], []
    for _ in range(shape.ranks):
        x.append(torch.randn(shape.tokens, shape.hidden, **options).to(torch.bfloat16))
        ids.append(torch.rand(shape.tokens, shape.experts, **options).topk(shape.topk, dim=1).indices)
        weights.append(torch.rand(shape.tokens, shape.topk, **options))
    return Tokens(x, [fp8.per_token_cast(item) for item in x], ids, weights)


def draw_rows(num_rows: int, hidden: int, seed: int, device: torch.device) -> torch.Tensor:
    """Rows for a combine, bf16."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(num_rows, hidden, device=device, generator=generator, dtype=torch.bfloat16)


def draw_bytes(num_bytes: int, seed: int, device: torch.device) -> torch.Tensor:
    """Bytes to copy, uint8."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device).random_(generator=generator)


def route(ids: list[torch.Tensor], rank: int, shape: Shape) -> Routing:
    """What comes to `rank`."""
    tokens, local = [], []
    for source in ids:
        here = torch.where(source // shape.num_local == rank, source - rank * shape.num_local, -1)
        here = here.masked_fill(source < 0, -1)
        tokens.append((here >= 0).any(1).nonzero()[:, 0])
        local.append(here[tokens[-1]])
    local_idx = torch.cat(local)
    flat = local_idx.flatten()
    lanes = (flat >= 0).nonzero()[:, 0]  # by row, then lane
    by_expert = flat[lanes].argsort(stable=True)
    experts = flat[lanes][by_expert]
    counts = torch.bincount(experts, minlength=shape.num_local)
    aligned = (counts + shape.alignment - 1) // shape.alignment * shape.alignment
    starts, before = aligned.cumsum(0) - aligned, counts.cumsum(0) - counts
    expand_row = torch.full_like(flat, -1)
    expand_row[lanes[by_expert]] = starts[experts] + torch.arange(len(experts), device=flat.device) - before[experts]
    return Routing(tokens, local_idx, expand_row.view_as(local_idx), int(aligned.sum()))


def arrived(parts: list[torch.Tensor], routing: Routing) -> torch.Tensor:
    """Rows [n, ...] of what each rank has [tokens, ...], as a plain dispatch brings them."""
    return torch.cat([part[tokens] for part, tokens in zip(parts, routing.tokens, strict=True)])


def expanded(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Expanded rows of received ones [n, width]; gaps are zeros."""
    out = rows.new_zeros(routing.num_expanded, rows.shape[1])
    for lane in range(routing.expand_row.shape[1]):
        target = routing.expand_row[:, lane]
        out[target[target >= 0]] = rows[target >= 0]
    return out


def expanded_weights(weights: torch.Tensor, routing: Routing) -> torch.Tensor:
    """One weight an expanded row of received ones [n, topk]; 0 in gaps."""
    out = weights.new_zeros(routing.num_expanded)
    out[routing.expand_row[routing.expand_row >= 0]] = weights[routing.expand_row >= 0]
    return out


def combined(
    rows: list[torch.Tensor], routings: list[Routing], ids: torch.Tensor, rank: int, shape: Shape, *, expand: bool
) -> torch.Tensor:
    """What a combine gives to `rank`.

    Args:
        rows: of each rank, [n, hidden] or expanded ones.
        routings: of each rank.
        ids: of this rank's tokens.
        rank: this rank.
        shape: sizes.
        expand: rows are expanded: those of a token on one rank are added there first and rounded.
    """
    num_tokens, hidden = ids.shape[0], rows[rank].shape[1]
    owner = torch.where(ids >= 0, ids // shape.num_local, -1)
    lanes = torch.arange(ids.shape[1], device=ids.device)
    last = torch.stack([torch.where(owner == r, lanes, -1).amax(1) for r in range(shape.ranks)], 1)
    home = rows[rank].new_zeros(shape.ranks, num_tokens, hidden)
    for other, routing in enumerate(routings):
        mine = routing.rows_of(rank)
        answers = _added(rows[other], routing.expand_row[mine]) if expand else rows[other][mine]
        home[other, routing.tokens[rank]] = answers
    total = torch.zeros(num_tokens, hidden, dtype=torch.float32, device=ids.device)
    tokens = torch.arange(num_tokens, device=ids.device)
    for chosen in last.argsort(dim=1).unbind(1):  # ranks in the order of the last lane that each owns
        there = last[tokens, chosen] >= 0
        total += home[chosen, tokens].float().masked_fill(~there[:, None], 0)
    return total.to(rows[rank].dtype)


def _added(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows at [n, topk] places (-1 for none) added in lane order, rounded once."""
    total = torch.zeros(places.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for place in places.unbind(1):
        total += rows[place.clamp_min(0)].float().masked_fill((place < 0)[:, None], 0)
    return total.to(rows.dtype)


def padded(wanted: torch.Tensor, num_rows: int, empty: int = 0) -> torch.Tensor:
    """The wanted rows and, behind them, the empty ones of an output that has the size of the worst case."""
    more = torch.full((num_rows - wanted.shape[0], *wanted.shape[1:]), empty, dtype=wanted.dtype, device=wanted.device)
    return torch.cat([wanted, more])


def room(shape: Shape, routings: list[Routing]) -> int:
    """Bytes that one rank's inputs of all operations take, at most."""
    rows = shape.tokens * shape.ranks + max(routing.num_expanded for routing in routings)
    token = shape.hidden * 3 + fp8.num_blocks(shape.hidden) * 4
    return 2 * shape.hidden * rows + token * shape.tokens


def remote_rows(routings: list[Routing]) -> tuple[int, int]:
    """Rows that cross into the busiest rank: by a dispatch, by a combine."""
    ranks = range(len(routings))
    matrix = [[0 if s == d else len(routings[d].tokens[s]) for d in ranks] for s in ranks]
    return max(sum(line[d] for line in matrix) for d in ranks), max(map(sum, matrix))
