"""The executor over the accelerator's own communicators (NCCL, MCCL): in-order queues, no tags, two devices."""

from __future__ import annotations

import random
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from comm_core.runtime import device as devices
from dualpipe.executor import Executor
from tests.dist import run_ranks
from tests.dualpipe.pipelines import TOLERANCE, check_hooks, run_pipeline
from tests.dualpipe.ragged import Several, ragged_steps, sizes_of_steps

KIND = devices.choose("auto", num_local_ranks=2)
CASES = [("dualpipev", [3, 4, 9]), ("dualpipe", [4, 8]), ("1f1b", [5, 2]), ("zbv", [3, 6]), ("zb1p", [5])]
CASES += [("zbh2", [5]), ("interleaved", [4, 5]), ("interleaved_pairs", [5])]

RAGGED = ["dualpipev", "zbv", "1f1b", "interleaved"]  # shapes that only the sender knows, several tensors a hop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(KIND == "cpu", reason="needs two CUDA or MUSA devices on this machine"),
]


def every_case(rank: int, kind: str, store: str, eager: bool, seed: int) -> dict[str, Any]:
    """All schedules in one group. Eager: its communicator exists from the start, and point-to-point uses it."""
    device = devices.of(kind, rank)
    dist.destroy_process_group()
    dist.init_process_group(
        devices.collective_backend(kind),
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
        device_id=device if eager else None,
    )
    found: dict[str, Any] = {
        name: run_pipeline(dist.group.WORLD, name, counts, seed, device=device) for name, counts in CASES
    }
    with Executor(dist.group.WORLD, device=device) as executor:
        found["ragged"] = [
            step
            for name in RAGGED
            for step in ragged_steps(executor, dist.group.WORLD, name, Several, sizes_of_steps(seed, [6]), seed)
        ]
    return found


@pytest.mark.parametrize("eager", [False, True])
def test_equal_to_serial_execution(eager):
    seed = random.SystemRandom().randrange(2**31)
    print(f"model and data seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        answers = run_ranks(2, every_case, KIND, str(Path(folder) / "store"), eager, seed, timeout=240)
    for answer in answers:
        for name, counts in CASES:
            assert all(result["loss"] and result["grads"] <= TOLERANCE for result in answer[name])
            check_hooks(answer[name], counts, name)
        assert len(answer["ragged"]) == 3 * len(RAGGED)
        assert all(same and error <= TOLERANCE for same, error in answer["ragged"])
