"""Stages with several tensors between them, of other sizes in each microbatch, and serial execution of the same."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe.executor import Executor
from dualpipe.module_stages import ModuleStages
from dualpipe.schedule import build
from dualpipe.split_modules import split_weight_grads
from tests.dualpipe.pipelines import HIDDEN, TOLERANCE, Stage, worst_error

_ONE_AT_A_TIME = threading.Lock()


class Several(nn.Module):
    """Four tensors a hop: rows (not contiguous), whole numbers, a scale (a view) and a float that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stage()

    def forward(
        self, x: Tensor, numbers: Tensor | None = None, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Any:
        if numbers is None or scale is None or shift is None:
            numbers, scale = torch.arange(len(x), device=x.device), x.new_ones(len(x), 1)
            shift = torch.linspace(0, 1, HIDDEN, device=x.device)
        y = self.body(x) * scale * (1 + 0.1 * numbers[:, None]) + shift.to(x)
        wide = torch.stack([torch.sigmoid(y.mean(1)), y.new_zeros(len(y))], 1)
        return y.t().contiguous().t(), numbers.flip(0), wide[:, :1], shift


class One(nn.Module):
    """One tensor a hop."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stage()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


def make(kind: type[nn.Module], num_stages: int, seed: int) -> list[Any]:
    with _ONE_AT_A_TIME:  # ranks may be threads, which have one generator
        torch.manual_seed(seed)
        return [kind().double() for _ in range(num_stages)]


def loss_of(*arguments: Tensor) -> Tensor:
    """Of the output's tensors and a label."""
    output, *rest = arguments[:-1]
    total = (output - arguments[-1]).square().sum()
    return total + sum((part.sum() for part in rest if part.requires_grad), start=total.new_zeros(()))


def serial(stages: list[Any], xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    losses = []
    for x, y in zip(xs, ys, strict=True):
        parts: Any = (x,)
        for stage in stages:
            parts = stage(*parts)
            parts = (parts,) if isinstance(parts, Tensor) else parts
        losses.append(loss_of(*parts, y))
        losses[-1].backward()
    return [loss.detach() for loss in losses]


def ragged_steps(
    executor: Executor,
    group: Any,
    name: str,
    kind: type[nn.Module],
    sizes: list[list[int]],
    seed: int,
    edge: Any = None,
) -> list[tuple[bool, float]]:
    """One step for each list of rows a microbatch: whether losses are the serial ones, and the error of gradients."""
    rank, ranks = executor.rank, executor.num_ranks
    shape = build(name, ranks, 2 * ranks)
    reference = [stage.to(executor.device) for stage in make(kind, shape.num_stages, seed)]
    mine = {key: copy.deepcopy(reference[key.stage]) for key in shape.stages_of(rank)}
    numbers, found = torch.Generator().manual_seed(seed), []
    patches = [split_weight_grads(module, executor.store) for module in mine.values()]
    for step in sizes:
        xs, ys = (
            [torch.randn(n, HIDDEN, dtype=torch.float64, generator=numbers).to(executor.device) for n in step]
            for _ in range(2)
        )
        for module in [*reference, *mine.values()]:
            module.zero_grad()
        wanted = serial(reference, xs, ys)
        schedule = build(name, ranks, len(step), allow_few=True)
        programs = ModuleStages(
            mine,
            num_stages=shape.num_stages,
            edge=edge,
            inputs={i: [x] for i, x in enumerate(xs)},
            labels={i: [y] for i, y in enumerate(ys)},
            criterion=loss_of,
        )
        executor.run(schedule, programs)
        # Not bitwise: what was not contiguous is after a hop, and sums are taken in another order.
        same = all(abs(loss - wanted[i]) <= TOLERANCE * (1 + abs(wanted[i])) for i, loss in programs.losses.items())
        found.append((same, worst_error(group, name, list(mine), list(mine.values()), reference)))
    for patch in patches:
        patch.revert()
    return found


def sizes_of_steps(seed: int, counts: list[int]) -> list[list[int]]:
    """Rows by microbatch: of each count twice the same, then others; one microbatch is empty."""
    numbers, steps = random.Random(seed), []
    for count in counts:
        first = [numbers.randint(1, 4) for _ in range(count)]
        other = [numbers.randint(1, 4) for _ in range(count)]
        other[-1] = 0
        steps += [first, first, other]
    return steps


__all__ = ["One", "Several", "loss_of", "make", "ragged_steps", "serial", "sizes_of_steps"]
