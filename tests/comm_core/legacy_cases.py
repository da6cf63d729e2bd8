"""V1's dispatch and combine written out in loops, the oracle of the legacy tests; random routing for all ranks.

It follows the words of the interface and shares no code with comm_core.legacy or comm_core.reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
