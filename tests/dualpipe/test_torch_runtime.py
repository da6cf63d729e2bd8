"""Our CSV in torch's own pipeline runtime: an independent executor trains by our lists, with serial gradients."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from dualpipe.schedule import SCHEDULES, build
from tests.pool import run_ranks

HIDDEN, ROWS, RANKS = 6, 2, 2
CASES = [(name, count) for name in sorted(set(SCHEDULES) - {"dualpipe"}) for count in (4, 5)]
TOLERANCE = 1e-12


def criterion(output: Any, target: Any) -> Any:
    return (output - target).square().sum()


def train(name: str, count: int, folder: str, seed: int) -> tuple[float, float]:
    """Worst relative error of the gradients and of the losses on this rank."""
    torch.manual_seed(seed)
    schedule, rank = build(name, RANKS, count), dist.get_rank()
    full = [
        nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN, bias=False)).double()
        for _ in range(schedule.num_stages)
    ]
    x, y = torch.randn(2, count * ROWS, HIDDEN, dtype=torch.float64)
    keys = schedule.stages_of(rank)
    mine = [copy.deepcopy(full[key.stage]) for key in keys]
    stages = [
        PipelineStage(module, key.stage, schedule.num_stages, torch.device("cpu"))
        for key, module in zip(keys, mine, strict=True)
    ]
    runtime = _PipelineScheduleRuntime(stages, count, loss_fn=criterion, scale_grads=False)
    runtime._load_csv(str(Path(folder) / f"{name}{count}.csv"))
    assert [str(action) for action in runtime.pipeline_order[rank]] == [str(action) for action in schedule.ranks[rank]]
    has_loss = any(key.stage == schedule.num_stages - 1 for key in keys)
    losses: list[Any] = []
    runtime.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if has_loss else {}))
    wanted = []
    for rows, target in zip(x.chunk(count), y.chunk(count), strict=True):
        for stage in full:
            rows = stage(rows)
        wanted.append(criterion(rows, target))
        wanted[-1].backward()
    pairs = [
        (got.grad, p.grad)
        for key, module in zip(keys, mine, strict=True)
        for got, p in zip(module.parameters(), full[key.stage].parameters(), strict=True)
    ]
    loss = float((torch.stack(losses) - torch.stack(wanted)).abs().max().detach()) if has_loss else 0.0
    return max(float((got - want).norm() / want.norm()) for got, want in pairs), loss


def every_case(rank: int, folder: str, seed: int) -> list[tuple[float, float]]:
    return [train(name, count, folder, seed) for name, count in CASES]


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> list[list[tuple[float, float]]]:
    seed, folder = random.SystemRandom().randrange(2**31), tmp_path_factory.mktemp("lists")
    print(f"model and data seed {seed}")
    for name, count in CASES:
        (folder / f"{name}{count}.csv").write_text(build(name, RANKS, count).to_csv())
    return run_ranks(RANKS, every_case, str(folder), seed, timeout=120)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{name}-{count}" for name, count in CASES])
def test_gradients_of_serial_execution(found, case):
    for answers in found:
        grads, loss = answers[case]
        assert grads <= TOLERANCE and loss <= TOLERANCE * 100
