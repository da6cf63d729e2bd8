"""The two copies of a dualpipe stage: gradients added, the same bits on both, and mistakes that end every rank."""

from __future__ import annotations

import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_core.runtime.errors import UsageError
from dualpipe import add_mirrored_gradients, replicas
from tests.pool import run_ranks

RANKS, PLACES = 4, [2, 0, 3, 1]
LIMIT = timedelta(seconds=1.0)


class Stage(nn.Module):
    """Two dtypes, a weight that is frozen, one that is never used and one that may be shared by the rank's stages."""

    def __init__(self, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(5, 7, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(2))
        self.shared = nn.Parameter(torch.zeros(4, dtype=torch.float64)) if shared is None else shared


def gradients(place: int, seed: int) -> list[list[torch.Tensor]]:
    """What the stages r and P-1-r of a rank have; any rank can tell those of another."""
    numbers = torch.Generator().manual_seed(seed + place)
    shapes = [((5, 7), torch.float64), ((3,), torch.bfloat16), ((4,), torch.float64)]
    return [[torch.randn(s, generator=numbers).to(d) for s, d in shapes] for _ in range(2)]


def stages_with(place: int, seed: int, *, tied: bool = False) -> list[Stage]:
    first = Stage()
    stages = [first, Stage(first.shared if tied else None)]
    for stage, (wide, bias, shared) in zip(stages, gradients(place, seed), strict=True):
        stage.wide.grad, stage.bias.grad, stage.shared.grad = wide.t().contiguous().t(), bias, shared
    return stages


def added(rank: int, seed: int, tied: bool, bucket: int) -> bool:
    """Whether every gradient is the sum of both copies', bit by bit; ranks have other places than their own."""
    place = PLACES[rank]
    stages, mirrored = stages_with(place, seed, tied=tied), gradients(RANKS - 1 - place, seed)[::-1]
    if place == 1:
        stages[0].bias.grad = None  # the other copy has one
    before, replicas._BUCKET = replicas._BUCKET, bucket
    try:
        add_mirrored_gradients(stages, rank_mapping=PLACES)
    finally:
        replicas._BUCKET = before
    same = []
    for i, (stage, mine, other) in enumerate(zip(stages, gradients(place, seed), mirrored, strict=True)):
        same.append(stage.wide.grad.equal(mine[0] + other[0]))
        lost = {(1, 0): other[1], (2, 1): mine[1]}
        same.append(stage.bias.grad.equal(lost.get((place, i), mine[1] + other[1])))
        same.append(stage.frozen.grad is None and stage.unused.grad is None)
        if not tied:
            same.append(stage.shared.grad.equal(mine[2] + other[2]))
    if tied:  # counted once: the gradient that was set last is that of the second stage
        other = gradients(RANKS - 1 - place, seed)[1][2]
        same.append(stages[0].shared.grad.equal(gradients(place, seed)[1][2] + other))
    return all(same)


def mistaken(stages: list[Any], mistake: str) -> None:
    """Of pipeline rank 1, whose mirrored rank is 2."""
    if mistake == "shape":
        stages[1].wide = nn.Parameter(torch.zeros(7, 5))
    elif mistake == "name":
        stages[0].more = nn.Parameter(torch.zeros(1))
    elif mistake == "frozen":
        stages[0].frozen.requires_grad_(True)
    elif mistake == "sparse":
        stages[0].wide.grad = torch.eye(5, 7, dtype=torch.float64).to_sparse()
    elif mistake == "one module":
        del stages[1]


def outcome(rank: int, seed: int, mistake: str) -> tuple[str, float]:
    stages = stages_with(rank, seed)
    if rank == 1:
        mistaken(stages, mistake)
    start = time.monotonic()
    try:
        add_mirrored_gradients(stages, timeout=None if mistake else LIMIT)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", 0.0


MISTAKES = ["shape", "name", "frozen", "sparse", "one module"]


def every_case(rank: int, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{tied} {bucket}": added(rank, seed, tied, bucket) for tied in (False, True) for bucket in (1, 100, 1 << 20)
    }
    for mistake in MISTAKES:
        found[mistake] = outcome(rank, seed, mistake)
    found["afterwards"] = added(rank, seed, False, 1 << 20)
    three = dist.new_group([0, 1, 2])
    if rank < 3:
        with pytest.raises(UsageError, match="an even number of ranks"):
            add_mirrored_gradients([], group=three)
    with pytest.raises(UsageError, match="rank_mapping"):
        add_mirrored_gradients([], rank_mapping=[0, 0, 1, 2])
    found["late"] = outcome(rank, seed, "") if rank else ("", 0.0)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    seed = random.SystemRandom().randrange(2**31)
    print(f"data seed {seed}")
    return run_ranks(RANKS, every_case, seed, timeout=60)


def test_both_copies_have_the_sum(found):
    for answer in found:
        sums = {key: value for key, value in answer.items() if isinstance(value, bool)}
        assert len(sums) == 7 and all(sums.values()), sums


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (
            "shape",
            [
                "stage 2.wide (5, 7) torch.float64 on pipeline rank 2",
                "stage 2.wide (7, 5) torch.float32 on pipeline rank 1",
            ],
        ),
        ("name", ["stage 1.more (1,) torch.float32 on pipeline rank 1"]),
        (
            "frozen",
            [
                "stage 1.frozen (2,) torch.float32 on pipeline rank 1",
                "stage 1.frozen (2,) torch.float32 frozen on pipeline rank 2",
            ],
        ),
        ("sparse", ["pipeline rank 1 has a gradient of stage 1.wide that is not dense"]),
        ("one module", ["pipeline rank 1 has 1 modules; allowed: two"]),
    ],
)
def test_copies_that_differ_end_every_rank_with_the_same_words(found, mistake, words):
    told = {answer[mistake][0] for answer in found}
    assert len(told) == 1 and next(iter(told)).startswith("UsageError: "), told
    assert all(word in next(iter(told)) for word in words), told


def test_a_rank_that_does_not_come_is_named_in_time(found):
    for answer in found[1:]:
        text, seconds = answer["late"]
        assert text.startswith(("PeerTimeout: ", "CommError: ")) and "rank 0" in text
        assert seconds < 5 * LIMIT.total_seconds()


def test_without_a_group():
    with pytest.raises(UsageError, match="init_process_group"):
        add_mirrored_gradients([Stage(), Stage()])
