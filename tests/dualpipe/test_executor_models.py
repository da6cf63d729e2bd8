"""Models that pipelines get wrong, on two gloo ranks in float64, by every schedule against serial execution.

Microbatches of unequal size, activation checkpointing (both kinds), and a weight that the first and the last stage of a
V share. The stages of `pipelines` use one weight twice as well.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dualpipe.actions import StageKey
from dualpipe.edges import Edge
from dualpipe.pipeline import Pipeline, stages_of_rank
from dualpipe.schedule import SCHEDULES, build
from tests.dualpipe.pipelines import CPU, HIDDEN, TOLERANCE, Stage, criterion, make_stages, share_of, worst_error
from tests.pool import run_ranks

RANKS = 2


class Checkpointed(Stage):
    """Keeps only its input, and computes the rest again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        # The older kind loses the gradients of weights where the input needs none.
        return checkpoint(super().forward, x, use_reentrant=x.requires_grad)


class CheckpointedAnew(Stage):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def sizes_of(name: str, count: int, rows: int) -> list[int]:
    """Rows of each microbatch: what tensor_split gives, for each direction."""
    shares = [torch.empty(rows)] if name != "dualpipe" else torch.empty(rows).chunk(2)
    return [len(part) for share in shares for part in share.tensor_split(count // len(shares))]


def step(name: str, seed: int, *, stage: type[Stage] = Stage, rows: int = 10, tied: bool = False) -> tuple[bool, float]:
    """Whether the losses are those of serial execution, and the distance of the gradients."""
    rank, count = dist.get_rank(), 4 if name == "dualpipe" else 5
    reference = make_stages(build(name, RANKS, count).num_stages, seed)
    for module in reference:
        module.__class__ = stage
    if tied:
        reference[-1].down.weight = reference[0].down.weight
    keys = stages_of_rank(name, RANKS, rank)
    mine = copy.deepcopy(nn.ModuleList([reference[key.stage] for key in keys]))  # together, so that tied stays tied
    x, y = torch.randn(2, rows, HIDDEN, dtype=torch.float64)
    sizes = sizes_of(name, count, rows)
    losses = []
    for part, label in zip(x.split(sizes), y.split(sizes), strict=True):
        for module in reference:
            part = module(part)
        losses.append(criterion(part, label))
        losses[-1].backward()

    def edge(payload: Any, key: StageKey, microbatch: int) -> Edge:
        return Edge((sizes[microbatch], HIDDEN), torch.float64, CPU)

    # Without `edge` the ranks tell each other.
    with Pipeline(list(mine), schedule=name, edge_shape=edge if rows != 10 else None) as pipeline:
        inputs = share_of(name, x, rank, RANKS - 1, of_stage="first")
        labels = share_of(name, y, rank, RANKS - 1, of_stage="last")
        loss, _ = pipeline.step(*inputs, num_microbatches=count, criterion=criterion, labels=labels)
    wanted = share_of(name, torch.stack(losses).detach(), rank, RANKS - 1, of_stage="last")
    same = loss is None if not wanted else loss is not None and torch.equal(loss, wanted[0])
    return same, worst_error(dist.group.WORLD, name, keys, list(mine), reference)  # type: ignore[arg-type]


VARIANTS: dict[str, dict[str, Any]] = {
    "unequal microbatches": {"rows": 18},
    "checkpointing, reentrant": {"stage": Checkpointed},
    "checkpointing": {"stage": CheckpointedAnew},
    "tied weights": {"tied": True},
}
CASES = [
    (variant, name)
    for variant in VARIANTS
    for name in sorted(SCHEDULES)
    if variant != "tied weights" or name in ("dualpipev", "zbv")  # elsewhere the two stages are on two ranks
]


def every_case(rank: int, seed: int) -> list[tuple[bool, float]]:
    return [step(name, seed, **VARIANTS[variant]) for variant, name in CASES]


@pytest.fixture(scope="module")
def found() -> list[list[tuple[bool, float]]]:
    seed = random.SystemRandom().randrange(2**31)
    print(f"model and data seed {seed}")
    return run_ranks(RANKS, every_case, seed, timeout=150)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{variant}: {name}" for variant, name in CASES])
def test_equal_to_serial_execution(found, case):
    for answers in found:
        same, error = answers[case]
        assert same and error <= TOLERANCE


def test_microbatches_were_unequal():
    assert len(set(sizes_of("zbv", 5, 18))) == 2 and len(set(sizes_of("dualpipe", 4, 18))) == 2
