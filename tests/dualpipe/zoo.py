"""Modules that a split of the backward gets wrong easily. Each block maps [rows, WIDTH] to [rows, WIDTH]."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Twice(Plain):
    """One weight at two sites, the first of which may have an input without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.shared(torch.tanh(self.shared(x))))


class TiedLinears(Plain):
    """One parameter in two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.other(torch.tanh(self.one(x))))


class TiedToEmbedding(nn.Module):
    """One parameter in a linear and in a module that does not defer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x)) + self.table(x.argmax(-1))


class Outputs(nn.Module):
    """Nodes with several outputs, of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, _ = self.qkv(x).chunk(4, dim=-1)
        first, second = _Pair.apply(q @ k.t(), v)
        return x + self.out(torch.softmax(first, -1) @ second)


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Any:
        return 2 * one, 3 * other

    @staticmethod
    def backward(ctx: Any, grad_one: Tensor, grad_other: Tensor) -> Any:
        return 2 * grad_one, 3 * grad_other


class Normed(nn.Module):
    """A weight that is computed of two parameters, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(torch.tanh(self.linear(x)))


class Mixed(Plain):
    """A frozen weight, a convolution and weights of three dimensions in no grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.conv = nn.Linear(WIDTH, WIDTH), nn.Conv1d(1, 1, 3, padding=1)
        self.frozen.weight.requires_grad_(False)
        self.heads = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.frozen(x)[:, None]).squeeze(1)
        return super().forward(torch.einsum("rw,hwv->rv", x, self.heads) / WIDTH)


class Checkpointed(Twice):
    def forward(self, x: Tensor) -> Tensor:
        # The older kind loses the gradients of weights where the input needs none.
        return checkpoint(super().forward, x, use_reentrant=x.requires_grad)


class CheckpointedAnew(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


BLOCKS = (Plain, Twice, TiedLinears, TiedToEmbedding, Outputs, Normed, Mixed, Checkpointed, CheckpointedAnew)


class ZooStage(nn.Module):
    """Some blocks; two tensors from stage to stage, both outputs of one node."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = x
        for block in self.blocks:
            y = block(y)
        one, other = torch.stack([y, x if skip is None else skip + x]).unbind(0)
        return one, other


GROUPS = 3


class Grouped(nn.Module):
    """Experts by torch's grouped product under both names: as it is, as a view, and one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(GROUPS, 16, 16) / 4)
        self.down = nn.Parameter(torch.randn(GROUPS, 16, 16) / 4)
        self.first = nn.Linear(16, 16)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        offs = torch.tensor([1, 1, len(x)], dtype=torch.int32)  # the second has no rows
        hidden = torch.tanh(self._product(F.grouped_mm, x, self.up, offs))
        hidden = torch.tanh(self._product(torch._grouped_mm, hidden, self.up, offs))
        y = x + self._product(F.grouped_mm, hidden, self.down.transpose(-2, -1), offs)
        return y, x if skip is None else skip + x

    @staticmethod
    def _product(product: Any, x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        if x.dtype == torch.float64:  # the reference: torch's own has no such kernel
            bounds = [0, *offs.tolist()]
            return torch.cat([x[a:b] @ w for a, b, w in zip(bounds, bounds[1:], weight, strict=False)])
        return product(x, weight, offs=offs)


def criterion(y: Tensor, skip: Tensor, label: Tensor) -> Tensor:
    return (y - label).square().mean() + skip.square().mean()


def difference(module: nn.Module, reference: nn.Module) -> float:
    """Largest ||a - b|| / ||b|| over gradients; a gradient that one has and the other has not counts as infinite."""
    worst = 0.0
    for one, other in zip(module.parameters(), reference.parameters(), strict=True):
        if (one.grad is None) != (other.grad is None):
            return float("inf")
        if one.grad is not None and other.grad is not None:
            found, wanted = one.grad.detach().double(), other.grad.double()
            worst = max(worst, float((found - wanted).norm() / wanted.norm().clamp_min(1e-30)))
    return worst
