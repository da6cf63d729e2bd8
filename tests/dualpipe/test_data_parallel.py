"""Stages under DistributedDataParallel: two pipelines of two ranks, whose gradients are the means of both batches."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_core.runtime.errors import UsageError
from dualpipe import DualPipeV, data_parallel
from dualpipe.pipeline import Pipeline, stages_of_rank
from dualpipe.schedule import build
from tests.dualpipe import zoo
from tests.dualpipe.test_delayed import Engine
from tests.pool import run_ranks

MICROBATCHES, ROWS = 5, 2
# (schedule, backward_split, fault)
CASES = [
    ("zbv", True, ""),
    ("dualpipev", True, ""),
    ("zbv", False, ""),
    ("zbv", True, "nothing reduced"),
    ("zbv", True, "reduced at the first backward"),
]


class WithEngine(zoo.Plain):
    """A stage with a module that keeps its weight gradients, which autograd is shown without one in I."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.engine = Engine(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.engine(x))


def block_of(stage: int, **options: Any) -> nn.Module:
    blocks = (zoo.Checkpointed, WithEngine, zoo.Mixed, zoo.TiedToEmbedding, zoo.Outputs)
    block = blocks[stage % len(blocks)]
    return block(**options) if block is WithEngine else block()


def step(groups: Any, name: str, split: bool, fault: str, seed: int) -> float:
    """The distance of this rank's gradients from the mean over both batches of those of serial execution."""
    rank, batch = dist.get_rank() % 2, dist.get_rank() // 2
    torch.manual_seed(seed)
    xs, ys = torch.randn(2, 2, MICROBATCHES * ROWS, zoo.WIDTH, dtype=torch.float64)
    num_stages = build(name, 2, MICROBATCHES).num_stages
    reference = [zoo.ZooStage(block_of(s, delay_wgrad_compute=False)).double() for s in range(num_stages)]
    keys = stages_of_rank(name, 2, rank)
    plain = []
    for key in keys:
        module = zoo.ZooStage(block_of(key.stage)).double()
        module.load_state_dict(reference[key.stage].state_dict())
        for one, other in zip(module.parameters(), reference[key.stage].parameters(), strict=True):
            one.requires_grad_(other.requires_grad)
        plain.append(module)
    mine = [DistributedDataParallel(module, process_group=groups["data"]) for module in plain]
    for _ in range(2):  # after the first step DDP lays out its buckets anew
        for module in [*reference, *mine]:
            module.zero_grad()
        for x, y in zip(xs, ys, strict=True):
            for part, label in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
                values: Any = (part,)
                for module in reference:
                    values = module(*values)
                (zoo.criterion(*values, label) / 2).backward()
        with pytest.MonkeyPatch.context() as patch:
            if fault == "nothing reduced":
                patch.setattr(data_parallel, "reducing", lambda module: contextlib.nullcontext())
            elif fault:
                patch.setattr(data_parallel, "quiet", lambda module: contextlib.nullcontext())
                patch.setattr(data_parallel, "reducing", lambda module: contextlib.nullcontext())
            with Pipeline(mine, schedule=name, group=groups["pipeline"], backward_split=split) as pipeline:
                pipeline.step(
                    *([xs[batch]] if rank == 0 else []),
                    num_microbatches=MICROBATCHES,
                    criterion=zoo.criterion,
                    labels=[ys[batch]] if rank == 0 else [],
                )
    return max(zoo.difference(module, reference[key.stage]) for module, key in zip(plain, keys, strict=True))


def every_case(rank: int, seed: int) -> list[float]:
    pipelines, data = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    groups = {
        "pipeline": [dist.new_group(ranks) for ranks in pipelines][rank // 2],
        "data": [dist.new_group(ranks) for ranks in data][rank % 2],
    }
    return [step(groups, *case, seed) for case in CASES] + refusals(groups)


def refusals(groups: Any) -> list[float]:
    """1.0 for each that came."""
    shared = zoo.Plain()

    def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(module, process_group=groups["data"], **options)

    wrong = [
        ([wrapped(zoo.Plain(), find_unused_parameters=True), zoo.Plain()], "find_unused_parameters=True"),
        ([wrapped(zoo.Plain(), static_graph=True), zoo.Plain()], "static_graph=True"),
        ([wrapped(shared), wrapped(copy.copy(shared))], "a parameter of two stages"),
        ([nn.Sequential(wrapped(zoo.Plain())), zoo.Plain()], "inside of a stage"),
    ]
    found = []
    for modules, message in wrong:
        with pytest.raises(UsageError, match=message):
            data_parallel.refuse_unsupported(modules)
        found.append(1.0)
    with pytest.raises(UsageError, match="under DistributedDataParallel"):
        DualPipeV((wrapped(zoo.Plain()), zoo.Plain()))
    return [*found, 1.0]


@pytest.fixture(scope="module")
def found() -> list[list[float]]:
    seed = random.SystemRandom().randrange(2**31)
    print(f"model and data seed {seed}")
    return run_ranks(4, every_case, seed, timeout=90)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{n}, split={s}: {f or 'ok'}" for n, s, f in CASES])
def test_gradients_are_the_means_of_both_batches(found, case):
    errors = [answers[case] for answers in found]
    if CASES[case][2]:
        assert min(errors) > 1e-3
    else:
        assert max(errors) < 1e-12


def test_what_ddp_would_reduce_wrongly_is_refused(found):
    assert all(answers[len(CASES) :] == [1.0] * 5 for answers in found)
