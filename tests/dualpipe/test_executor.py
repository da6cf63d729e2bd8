"""The executor on gloo processes against serial execution of the same modules, in float64.

One spawn of four processes runs every case: pipelines of 2 ranks (twice, side by side), 3 ranks and 4 ranks live in
subgroups, so that the group argument is used and ranks are members of different numbers of groups. P = 1 runs in
test_executor_single.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm_core.runtime import trace
from dualpipe.actions import StageKey
from dualpipe.blocks import blocks_from_events
from dualpipe.edges import Edge
from dualpipe.executor import Executor
from dualpipe.module_stages import ModuleStages
from dualpipe.pipeline import Pipeline, stages_of_rank
from dualpipe.schedule import dualpipev, with_communication
from tests.dualpipe.pipelines import (
    HIDDEN,
    ROWS,
    TOLERANCE,
    Stage,
    check_hooks,
    check_memory,
    criterion,
    groups_of_four,
    make_stages,
    run_pipeline,
    serial,
    worst_error,
)
from tests.dualpipe.ragged import One, Several, ragged_steps, sizes_of_steps
from tests.pool import run_ranks

CASES = [
    ("dualpipev", 2, [3, 5, 4]),
    ("dualpipev", 3, [5, 6]),
    ("dualpipev", 4, [7, 9, 8]),
    ("dualpipe", 2, [4, 6]),
    ("dualpipe", 4, [8]),
    ("1f1b", 2, [4, 1]),
    ("1f1b", 4, [3]),
    ("dualpipev", 4, [1, 5]),
    ("zbv", 2, [3, 1, 4]),
    ("zbv", 3, [7, 2]),
    ("zbv", 4, [9]),
    ("zb1p", 2, [5, 1]),
    ("zb1p", 4, [3, 8]),
    ("zbh2", 3, [7]),
    ("zbh2", 4, [9, 2]),
    ("interleaved", 2, [5, 4]),
    ("interleaved", 3, [7, 1]),
    ("interleaved_pairs", 2, [5]),
    ("interleaved_pairs", 4, [7]),
    ("1f1b", 3, [5]),
    ("zb1p", 3, [5]),
    ("zbh2", 2, [5]),
]
RAGGED = [
    ("dualpipev", 2, Several, [5]),
    ("dualpipev", 3, Several, [7]),
    ("zbv", 4, Several, [9]),
    ("dualpipe", 4, Several, [8]),
    ("interleaved", 3, One, [5]),
]
THREE_STAGES_A_RANK = [("interleaved", 4, [7]), ("interleaved_pairs", 3, [5])]


def every_case(rank: int, seed: int) -> dict[Any, Any]:
    groups, found = groups_of_four(rank), {}
    for name, ranks, counts in CASES:
        if ranks in groups:
            found[name, ranks, *counts] = run_pipeline(groups[ranks], name, counts, seed)
    for name, ranks, counts in THREE_STAGES_A_RANK:
        if ranks in groups:
            found[name, ranks, *counts] = run_pipeline(groups[ranks], name, counts, seed, stages_per_rank=3)
    for name, ranks, kind, counts in RAGGED:
        if ranks in groups:
            with Executor(groups[ranks]) as executor:
                sizes = sizes_of_steps(seed, counts)
                found["ragged", name, ranks] = ragged_steps(executor, groups[ranks], name, kind, sizes, seed)
    found["merged"] = run_pipeline(groups[2], "dualpipev", [5], seed, backward_split=False)
    found["fault"] = swapped_gradients(groups[2], seed)
    found["inference"] = inference(groups[2], seed)
    found["trace"] = traced(groups[2], seed)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    seed = random.SystemRandom().randrange(2**31)
    print(f"model and data seed {seed}")
    return run_ranks(4, every_case, seed, timeout=240)


@pytest.mark.parametrize(("name", "ranks", "counts"), CASES + THREE_STAGES_A_RANK)
def test_equal_to_serial_execution(found, name, ranks, counts):
    seen = [answer[name, ranks, *counts] for answer in found if (name, ranks, *counts) in answer]
    assert len(seen) == (3 if ranks == 3 else 4)
    for results in seen:
        assert [result["loss"] for result in results] == [True] * len(counts)
        assert max(result["grads"] for result in results) <= TOLERANCE
        check_hooks(results, counts, name)
        check_memory(results)


@pytest.mark.parametrize(("name", "ranks"), [case[:2] for case in RAGGED])
def test_shapes_that_only_the_sender_knows(found, name, ranks):
    """Other sizes, several tensors, views and other counts from step to step, with nothing said about them."""
    seen = [answer["ragged", name, ranks] for answer in found if ("ragged", name, ranks) in answer]
    assert len(seen) == (3 if ranks == 3 else 4)
    for steps in seen:
        assert len(steps) >= 3 and all(same and error <= TOLERANCE for same, error in steps)


@pytest.mark.parametrize(("name", "ranks", "counts"), CASES[:5])
def test_peak_of_live_activations(found, name, ranks, counts):
    """2P+1 half-size (V) or P+1 (DualPipe) activations; one fewer on the V's first rank with 2P-1 microbatches."""
    for rank, answer in enumerate(found):
        if (name, ranks, *counts) not in answer:
            continue
        position = rank % 2 if ranks == 2 else rank - (ranks == 3)
        for result, count in zip(answer[name, ranks, *counts], counts, strict=True):
            bound = 2 * ranks + 1 if name == "dualpipev" else ranks + 1
            few = name == "dualpipev" and count == 2 * ranks - 1 and position == 0
            assert result["peak"] == bound - few


def test_full_backwards_without_split(found):
    for answer in found:
        assert all(result["loss"] and result["grads"] <= TOLERANCE for result in answer["merged"])
        check_hooks(answer["merged"], [5], "dualpipev")
        check_memory(answer["merged"])


class Swapped(ModuleStages):
    """A fault: stage 0 runs the backward of microbatch 0 with the gradient of microbatch 1, and the other way round."""

    def after_forward(self, key: StageKey, microbatch: int, output: Any) -> Any:
        kept = super().after_forward(key, microbatch, output)
        if key.stage == 0:
            self.__dict__.setdefault("kept", {})[microbatch] = kept
        return kept

    def backward(self, key: StageKey, microbatch: int, *rest: Any) -> Any:
        if key.stage == 0 and microbatch < 2:
            rest = (rest[0], self.__dict__["kept"][1 - microbatch], rest[2])
        return super().backward(key, microbatch, *rest)


def programs_for(
    cls: type[ModuleStages], group: Any, count: int, reference: list[Stage], x: Tensor, y: Tensor
) -> tuple[ModuleStages, dict[StageKey, Stage]]:
    keys = stages_of_rank("dualpipev", dist.get_world_size(group), dist.get_rank(group))
    modules = {key: copy.deepcopy(reference[key.stage]) for key in keys}
    edge = Edge((ROWS, HIDDEN), torch.float64, torch.device("cpu"))
    programs = cls(
        modules,
        num_stages=len(reference),
        edge=lambda payload, key, microbatch: edge,
        inputs={i: [rows] for i, rows in enumerate(x.chunk(count))},
        labels={i: [rows] for i, rows in enumerate(y.chunk(count))},
        criterion=criterion,
    )
    return programs, modules


def swapped_gradients(group: Any, seed: int) -> dict[str, float]:
    """Worst gradient error of the right programs and of the faulty ones, on the same data."""
    reference, count = make_stages(4, seed), 4
    x, y = torch.randn(2, count * ROWS, HIDDEN, dtype=torch.float64)
    serial(reference, x, y, count)
    errors = {}
    for cls in (ModuleStages, Swapped):
        programs, modules = programs_for(cls, group, count, reference, x, y)
        with Executor(group) as executor:
            executor.run(dualpipev(2, count), programs)
        errors[cls.__name__] = worst_error(group, "dualpipev", list(modules), list(modules.values()), reference)
    return errors


def test_a_planted_fault_is_seen(found):
    first_ranks = (found[0], found[2])
    for answer in found:
        assert answer["fault"]["ModuleStages"] <= TOLERANCE
    for answer in first_ranks:
        assert answer["fault"]["Swapped"] > 1e-3


def inference(group: Any, seed: int) -> Any:
    """Outputs and losses without gradients, against serial execution."""
    reference = make_stages(4, seed)
    rank, x, y = dist.get_rank(group), *torch.randn(2, 5 * ROWS, HIDDEN, dtype=torch.float64)
    mine = [copy.deepcopy(reference[key.stage]) for key in stages_of_rank("dualpipev", 2, rank)]
    with torch.no_grad(), Pipeline(mine, group=group) as pipeline:  # the ranks tell each other the shapes
        inputs, labels = ([x], [y]) if rank == 0 else ([], [])
        loss, outputs = pipeline.step(
            *inputs, num_microbatches=5, criterion=criterion, labels=labels, return_outputs=True
        )
        _, without = pipeline.step(*inputs, num_microbatches=5)
        rows = list(x.chunk(5))
        for stage in reference:
            rows = [stage(part) for part in rows]
        wanted = torch.stack([criterion(a, b) for a, b in zip(rows, y.chunk(5), strict=True)])
    if rank:
        return loss is None and outputs is None and without is None
    return torch.equal(loss, wanted) and torch.equal(outputs, torch.cat(rows)) and without is None


def test_inference(found):
    assert [answer["inference"] for answer in found] == [True] * 4


def traced(group: Any, seed: int) -> list[Any]:
    """Trace events of one traced run."""
    reference, count = make_stages(4, seed), 4
    x, y = torch.randn(2, count * ROWS, HIDDEN, dtype=torch.float64)
    programs, _ = programs_for(ModuleStages, group, count, reference, x, y)
    recorder = trace.Recorder(rank=dist.get_rank(group))
    with Executor(group) as executor, trace.recording(recorder):
        executor.run(dualpipev(2, count), programs)
    return recorder.events()


def test_the_trace_is_the_schedule(found):
    lowered = with_communication(dualpipev(2, 4))
    for rank in (0, 1):
        events = found[rank]["trace"]
        assert all(event["cat"] == event["tid"] == "pipeline" for event in events)
        # A SEND starts inside the span of its computation, so it follows it in order of start.
        assert [event["name"] for event in events] == [str(action) for action in lowered.ranks[rank]]
        pair = next(event for event in events if event["args"]["kind"] == "FB")
        assert {"stage", "microbatch", "direction", "backward_stage", "backward_microbatch"} <= set(pair["args"])
        blocks = blocks_from_events(events)
        assert [block.kind for block in blocks] == [str(action.kind) for action in lowered.ranks[rank]]
