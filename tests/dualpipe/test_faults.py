"""What goes wrong on one rank ends every rank within the timeout, with stage, microbatch and action in the error."""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualpipe.actions import StageKey
from dualpipe.edges import Edge
from dualpipe.executor import Executor
from dualpipe.module_stages import ModuleStages
from dualpipe.schedule import build
from tests.dist import RankFailure, run_ranks

RANKS, COUNT, TIMEOUT, STALL = 3, 6, 20.0, 2.5


class Faulty(nn.Module):
    """A linear stage whose second forward or backward goes wrong."""

    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.linear, self.fault, self.calls = nn.Linear(4, 4), fault, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        if self.calls != 2 or self.fault is None:
            return y
        if self.fault == "forward":
            raise ZeroDivisionError("planted")
        if self.fault == "backward":
            y.register_hook(self._fail)
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stall":
            time.sleep(2 * STALL)
        return {"shape": y[:, :3], "dtype": y.double()}.get(self.fault, y)

    @staticmethod
    def _fail(_: Tensor) -> None:
        raise ZeroDivisionError("planted in the backward")


class WrongGradient(ModuleStages):
    """Stage 1 gives the gradient of microbatch 1 back in another shape than its input had."""

    def backward(self, key: StageKey, microbatch: int, *rest: Any) -> Any:
        grad = super().backward(key, microbatch, *rest)
        return grad[:1] if (key.stage, microbatch) == (1, 1) else grad


def one_step(rank: int, fault: str) -> str:
    """Runs zbv with the fault in stage 1; gives the whole report of this rank's error, its notes included."""
    schedule = build("zbv", RANKS, COUNT)
    if fault == "order":
        swapped = list(schedule.ranks[1])
        swapped[0], swapped[-1] = swapped[-1], swapped[0]
        schedule = replace(schedule, ranks=(schedule.ranks[0], tuple(swapped), schedule.ranks[2]))
    if fault == "deadlock":  # rank 0 waits for the end of the V before it feeds its start
        late = next(action for action in schedule.ranks[0] if str(action) == "5F0")
        rest = tuple(action for action in schedule.ranks[0] if action is not late)
        schedule = replace(schedule, ranks=((late, *rest), *schedule.ranks[1:]))
    modules = {key: Faulty(fault if key.stage == 1 else None) for key in schedule.stages_of(rank)}
    width = 5 if fault == "other shapes" and rank == 1 else 4
    edge = Edge((2, width), torch.float32, torch.device("cpu"))
    data = {i: [torch.randn(2, 4)] for i in range(COUNT)}
    stages = (WrongGradient if fault == "gradient" else ModuleStages)(
        modules,
        num_stages=schedule.num_stages,
        edge=None if fault == "gradient" else lambda payload, key, microbatch: edge,
        inputs=data,
        labels={},
        criterion=lambda output: output.square().sum(),
    )
    executor = Executor(dist.group.WORLD, timeout=timedelta(seconds=STALL if fault == "stall" else TIMEOUT))
    if fault == "kill":
        executor.run(schedule, stages)  # the errors of the others are told by run_ranks
    try:
        executor.run(schedule, stages)
    except Exception as error:
        return "".join(traceback.format_exception_only(error))
    return "no error"


FAULTS = ["forward", "backward", "shape", "dtype", "gradient", "other shapes", "order", "deadlock", "stall"]


def every_fault(rank: int) -> dict[str, tuple[str, float]]:
    found = {}
    for fault in FAULTS:
        dist.barrier()
        start = time.monotonic()
        found[fault] = one_step(rank, fault), time.monotonic() - start
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[str, float]]]:
    return run_ranks(RANKS, every_fault, timeout=120)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("forward", ["ZeroDivisionError: planted", "in 1F1 on pipeline rank 1 (F of stage 1, microbatch 1)"]),
        ("backward", ["planted in the backward", "in 1I1 on pipeline rank 1 (I of stage 1, microbatch 1)"]),
        ("shape", ["UsageError: 1SEND_F1 on pipeline rank 1 with (2, 3) torch.float32; allowed: (2, 4) torch.float32"]),
        ("dtype", ["UsageError: 1SEND_F1 on pipeline rank 1 with (2, 4) torch.float64"]),
        (
            "gradient",
            ["UsageError: 1SEND_B1 on pipeline rank 1 with (1, 4) torch.float32; allowed: (2, 4) torch.float32"],
        ),
    ],
)
def test_the_rank_at_fault_names_the_action_and_the_others_name_what_they_waited_for(found, fault, words):
    for rank, answers in enumerate(found):
        text, seconds = answers[fault]
        assert seconds < TIMEOUT
        if rank == 1:
            assert all(word in text for word in words), text
        else:
            assert "CommError" in text and f"on pipeline rank {rank} failed with pipeline rank" in text, text
            assert re.search(
                rf"in \d(RECV|SEND)_[FB]\d on pipeline rank {rank} \(.* of stage \d, microbatch \d\)", text
            ), text


def test_a_rank_that_says_other_shapes_than_its_peers_is_named_before_anything_is_misread(found):
    for rank, answers in enumerate(found):
        text, seconds = answers["other shapes"]
        assert seconds < TIMEOUT
        assert re.search(rf"in \dRECV_[FB]\d on pipeline rank {rank} \(RECV_. of stage \d, microbatch \d\)", text), text
    told = [answers["other shapes"][0] for answers in found if "UsageError" in answers["other shapes"][0]]
    assert told  # who looks first; it may end the others
    for text in told:
        assert re.search(r"waits for \dRECV_[FB]\d \(the (input|output gradient) of stage \d, microbatch \d\)", text), (
            text
        )
        assert "(2, 5) torch.float32" in text and "(2, 4) torch.float32" in text


@pytest.mark.parametrize(
    ("fault", "words"),
    [("order", r"ScheduleError: rank 1, position 0, \dW\d: "), ("deadlock", r"rank 0, position 0, 5RECV_F0: deadlock")],
)
def test_a_list_that_can_not_end_is_refused_on_every_rank_before_anything_is_sent(found, fault, words):
    for answers in found:
        text, seconds = answers[fault]
        assert re.search(words, text) and seconds < TIMEOUT, text


def test_a_rank_that_stalls(found):
    """Its neighbours give up after their timeout, the first of them, and name what they waited for."""
    told = [answers["stall"] for answers in found]
    assert any("CommTimeoutError" in text for text, _ in (told[0], told[2])), told
    for rank, (text, seconds) in enumerate(told):
        assert seconds < 2 * STALL + TIMEOUT / 2
        assert re.search(rf"in \d(RECV|SEND)_[FB]\d on pipeline rank {rank} \(.* of stage \d, microbatch \d\)", text), (
            text
        )


def test_a_rank_that_is_killed():
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(RANKS, one_step, "kill", timeout=90)
    text = str(caught.value)
    assert time.monotonic() - start < 90
    assert "--- rank 1: no answer (exit code -9)" in text
    assert text.count("CommError: ") == 2 and "on pipeline rank 0 failed with pipeline rank 1" in text
    for rank in (0, 2):
        assert re.search(rf"in \d(RECV|SEND)_[FB]\d on pipeline rank {rank} \(.* of stage \d, microbatch \d\)", text), (
            text
        )
