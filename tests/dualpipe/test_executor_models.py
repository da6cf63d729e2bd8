"""Models that pipelines get wrong, on gloo ranks in float64, by every schedule against serial execution.

Microbatches of unequal size, told or negotiated, activation checkpointing (both kinds), and a weight that the stages of
a rank share. The stages of `pipelines` use one weight twice as well. Two ranks and one each time; three and four, and
two side by side, with the slow tests.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
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
from tests.dualpipe.pipelines import (
    CPU,
    HIDDEN,
    TOLERANCE,
    Stage,
    criterion,
    groups_of_four,
    make_stages,
    share_of,
    worst_error,
)
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


def step(
    name: str,
    seed: int,
    group: Any,
    *,
    stage: type[Stage] = Stage,
    uneven: bool = False,
    told: bool = False,
    tied: bool = False,
    fault: Callable[[nn.ModuleList], None] | None = None,
) -> tuple[bool, float]:
    """Whether the losses are those of serial execution, and the distance of the gradients."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    count = 2 * ranks if name == "dualpipe" else 2 * ranks + 1
    rows = 2 * count if not uneven else 3 * count + (1 + count // 2 if name != "dualpipe" else 2)
    reference = make_stages(build(name, ranks, count).num_stages, seed)
    for module in reference:
        module.__class__ = stage
    if tied:  # the stages that rank 0 holds
        first, second = (key.stage for key in stages_of_rank(name, ranks, 0))
        reference[second].down.weight = reference[first].down.weight
    keys = stages_of_rank(name, ranks, rank)
    mine = copy.deepcopy(nn.ModuleList([reference[key.stage] for key in keys]))  # together, so that tied stays tied
    if fault is not None:
        fault(mine)
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
    with Pipeline(list(mine), schedule=name, group=group, edge_shape=edge if told else None) as pipeline:
        inputs = share_of(name, x, rank, ranks - 1, of_stage="first")
        labels = share_of(name, y, rank, ranks - 1, of_stage="last")
        loss, _ = pipeline.step(*inputs, num_microbatches=count, criterion=criterion, labels=labels)
        pipeline.add_mirrored_gradients()
    wanted = share_of(name, torch.stack(losses).detach(), rank, ranks - 1, of_stage="last")
    same = loss is None if not wanted else loss is not None and torch.equal(loss, wanted[0])
    return same, worst_error(group, "added", keys, list(mine), reference)  # type: ignore[arg-type]


VARIANTS: dict[str, dict[str, Any]] = {
    "unequal microbatches, told": {"uneven": True, "told": True},
    "unequal microbatches": {"uneven": True},
    "checkpointing, reentrant": {"stage": Checkpointed},
    "checkpointing": {"stage": CheckpointedAnew},
    "tied weights": {"tied": True},
}


def cases_of(ranks: int, *, short: bool = False) -> list[tuple[str, str]]:
    """Tied weights where one rank has both stages; with dualpipe on two ranks, so does the other.

    Those of `make test` are short: sizes that are told go the same way in every schedule.
    """
    return [
        (variant, name)
        for variant in VARIANTS
        for name in sorted(SCHEDULES)
        if (name != "dualpipe" or ranks % 2 == 0)
        and (variant != "tied weights" or len(stages_of_rank(name, ranks, 0)) == 2)
        and (variant != "tied weights" or name != "dualpipe" or ranks == 2)
        and not (short and "told" in variant and name not in ("dualpipe", "dualpipev", "1f1b"))
    ]


CASES = cases_of(RANKS, short=True)


def every_case(rank: int, seed: int) -> list[tuple[bool, float]]:
    return [step(name, seed, dist.group.WORLD, **VARIANTS[variant]) for variant, name in CASES]


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


@pytest.mark.parametrize(("variant", "name"), cases_of(1))
def test_one_rank(variant, name, fresh_random_data):
    same, error = step(name, fresh_random_data, None, **VARIANTS[variant])
    assert same and error <= TOLERANCE


def on_three_and_four(rank: int, seed: int) -> dict[tuple[int, str, str], tuple[bool, float]]:
    groups = groups_of_four(rank)
    return {
        (ranks, *case): step(case[1], seed, groups[ranks], **VARIANTS[case[0]])
        for ranks in (2, 3, 4)
        if ranks in groups
        for case in cases_of(ranks)
    }


@pytest.mark.slow
def test_all_of_it_on_two_three_and_four_ranks():
    seed = random.SystemRandom().randrange(2**31)
    print(f"model and data seed {seed}")
    answers = run_ranks(4, on_three_and_four, seed, timeout=600)
    assert len({key for answer in answers for key in answer}) == sum(len(cases_of(ranks)) for ranks in (2, 3, 4))
    wrong = {(rank, *key): found for rank, answer in enumerate(answers) for key, found in answer.items()
             if not found[0] or not found[1] <= TOLERANCE}  # fmt: skip
    assert not wrong, wrong


class Forgetful(Stage):
    """What is computed again in the backward is another function."""

    def forward(self, x: Tensor) -> Tensor:
        calls = iter((1.0, 2.0))

        def body(y: Tensor) -> Tensor:
            z = Stage.forward(self, y)
            return torch.sin(next(calls) * z) if z.requires_grad else z

        return checkpoint(body, x, use_reentrant=False)


def untie(mine: nn.ModuleList) -> None:
    mine[1].down.weight = nn.Parameter(mine[1].down.weight.detach().clone())


def forget(mine: nn.ModuleList) -> None:
    for stage in mine:
        stage.__class__ = Forgetful


@pytest.mark.parametrize(("variant", "fault"), [("tied weights", untie), ("checkpointing", forget)])
def test_a_planted_fault_is_seen(variant, fault, fresh_random_data):
    _, error = step("zbv", fresh_random_data, None, fault=fault, **VARIANTS[variant])
    assert error > 1e-3


def test_microbatches_were_unequal():
    assert len(set(sizes_of("zbv", 5, 18))) == 2 and len(set(sizes_of("dualpipe", 4, 14))) == 2
