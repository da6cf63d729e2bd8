"""V1's dispatch and combine written out in loops, the oracle of the legacy tests; random routing for all ranks.

It follows the words of the interface and uses no code of comm_core.legacy or comm_core.reference to know the results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from comm_core.backends import registry
from comm_core.legacy import Buffer

# Those that can be used here.
BACKENDS = tuple(name for name, kind, reason in registry.report() if kind == "cpu" and reason is None)


@dataclass(frozen=True)
class World:
    """Inputs of all ranks, the same on every rank."""

    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    num_experts: int

    @property
    def num_local(self) -> int:
        """Experts a rank."""
        return self.num_experts // len(self.x)

    def ranks_of(self, source: int, token: int) -> list[int]:
        """Ranks that a token goes to, ascending."""
        return sorted({e // self.num_local for e in self.ids[source][token].tolist() if e >= 0})

    def arrivals(self, rank: int) -> list[tuple[int, int]]:
        """(source rank, token) of every row that a rank receives."""
        return [
            (source, token)
            for source in range(len(self.x))
            for token in range(self.x[source].shape[0])
            if rank in self.ranks_of(source, token)
        ]


def draw(
    seed: int, tokens: tuple[int, ...], hidden: int, num_topk: int, num_local: int, dtype: torch.dtype, masked: float
) -> World:
    """A random world; about `masked` of all lanes are -1."""
    generator = torch.Generator().manual_seed(seed)
    num_experts = num_local * len(tokens)
    xs, ids, weights = [], [], []
    for count in tokens:
        scores = torch.rand(count, num_experts, generator=generator)
        chosen = scores.topk(num_topk, dim=1).indices
        ids.append(chosen.masked_fill(torch.rand(chosen.shape, generator=generator) < masked, -1))
        xs.append(torch.randn(count, hidden, generator=generator).to(dtype))
        weights.append(torch.rand(chosen.shape, generator=generator))
    return World(xs, ids, weights, num_experts)


def combined(world: World, rank: int, rows: list[torch.Tensor], biases: list[torch.Tensor]) -> torch.Tensor:
    """The sums that a rank gets back for `rows` of every rank: biases, then ranks ascending, one rounding."""
    index = [{pair: row for row, pair in enumerate(world.arrivals(owner))} for owner in range(len(world.x))]
    dtype, wide = rows[rank].dtype, torch.float64 if rows[rank].dtype == torch.float64 else torch.float32
    out = torch.zeros(world.x[rank].shape[0], rows[rank].shape[1], dtype=dtype)
    for token in range(out.shape[0]):
        total = torch.zeros(out.shape[1], dtype=wide)
        for bias in biases:
            total = total + bias[token].to(wide)
        for owner in world.ranks_of(rank, token):
            total = total + rows[owner][index[owner][rank, token]].to(wide)
        out[token] = total.to(dtype)
    return out


def uneven(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of very different size, so that another order of the sums gives another result."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.tensor([2.0**12, 1.0, 2.0**-13])[torch.randint(0, 3, shape, generator=generator)]
    return ((torch.randn(shape, generator=generator).sign() + 0.0) * size).to(dtype)


def after_logfmt(row: list[float]) -> list[float]:
    """What the format of ten bits leaves of a row, value by value in fp64."""
    hidden, out = len(row), list(row)
    chunk = 512 if hidden % 512 == 0 and hidden % 1024 else 1024
    for start in range(0, hidden, chunk):
        blocks = []
        for begin in range(start, min(start + chunk, hidden), 128):
            part = [abs(value) for value in row[begin : begin + 128]]
            high = math.log2(max(part)) if max(part) > 0 else -math.inf
            low = max(math.log2(min(part)) if min(part) > 0 else -math.inf, high - 32)
            blocks.append((begin, part, high, low))
        if not all(low < high < 0 for _, _, high, low in blocks):
            continue  # one block that can not be coded leaves the chunk as it is
        for begin, part, high, low in blocks:
            step = (high - low) / 510
            middle = math.log2((1 + 2**step) / 2) / step
            for column, size in enumerate(part, begin):
                code = max(0, math.floor((math.log2(size) - low) / step + 2 - middle)) if size else 0
                out[column] = math.copysign(2 ** (low + (code - 1) * step), row[column]) if code else 0.0
    return out


def narrow_ids(world: World) -> World:
    """The same world with ids of 32 bits."""
    return replace(world, ids=[ids.to(torch.int32) for ids in world.ids])


def here(key: str) -> None:
    """Tells the other ranks that this rank got as far as `key`."""
    distributed_c10d._get_default_store().set(key, "1")


def wait_for(key: str, seconds: float = 30.0) -> None:
    """Waits until a rank says so."""
    distributed_c10d._get_default_store().wait([key], timedelta(seconds=seconds))


class Failures(list[str]):
    """Collects what is wrong instead of stopping at the first, so that no rank leaves the others."""

    def need(self, good: bool, what: str) -> None:
        if not good:
            self.append(what)


def layout_counts(buffer: Buffer, world: World, rank: int, bad: Failures, **options: Any) -> dict[str, Any]:
    """V1's layout of a rank, compared with plain counting."""
    per_rank, rdma, per_expert, inside, _ = buffer.get_dispatch_layout(world.ids[rank], world.num_experts, **options)
    goes = [world.ranks_of(rank, token) for token in range(world.ids[rank].shape[0])]
    lanes = [e for line in world.ids[rank].tolist() for e in line]
    bad.need(rdma is None, "counts between domains")
    bad.need(per_expert.tolist() == [lanes.count(e) for e in range(world.num_experts)], "tokens per expert")
    bad.need(per_rank.tolist() == [sum(r in to for to in goes) for r in range(len(world.x))], "tokens per rank")
    bad.need(inside.tolist() == [[r in to for r in range(len(world.x))] for to in goes], "is_token_in_rank")
    bad.need(per_rank.dtype == per_expert.dtype == torch.int32 and inside.dtype == torch.bool, "dtypes of counts")
    return {"num_tokens_per_rank": per_rank, "is_token_in_rank": inside, "num_tokens_per_expert": per_expert}


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal in type, shape and bytes."""
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return False
    return torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def raw(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of rows of any strides."""
    return torch.empty(rows.shape, dtype=rows.dtype).copy_(rows).view(torch.uint8)
