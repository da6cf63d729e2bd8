"""Two runs give the same bits, forward and backward, however the ranks arrive; so does every run after them."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy
import pytest
import torch

from mt_moe import MoELayer
from tests.mt_moe.layer_cases import CONFIGS, SPLITS, Batch, Place, own, portable, step
from tests.pool import run_ranks

DTYPES = (torch.float32, torch.bfloat16)


def run(rank: int, place: Place, num_ranks: int, seed: int, delays: int, fault: bool) -> list[dict[str, Any]]:
    """Each configuration in each dtype, twice in one layer; `delays` seeds the pauses of this rank."""
    found, rng, splits = [], random.Random(delays + rank), SPLITS[num_ranks]
    with place.buffer(rank) as buffer:
        for dtype in DTYPES:
            for config in CONFIGS.values():
                batch = Batch.of(seed, sum(splits), config.hidden, dtype)
                with MoELayer(config, buffer=buffer, dtype=dtype, device=place.device(rank)) as layer:
                    for module in (layer.router, layer.experts):
                        module.register_forward_hook(lambda *_: time.sleep(rng.random() * 0.004))
                        module.register_full_backward_pre_hook(lambda *_: time.sleep(rng.random() * 0.004))
                    if fault:
                        layer.experts.fc1.data[0, 0, 0] *= 1.01
                    x, grad = own(batch.x, splits, rank), own(batch.grad, splits, rank)
                    first, second = step(layer, x, grad), step(layer, x, grad)
                    different = [name for name, value in first.items() if not torch.equal(value, second[name])]
                    assert not different, f"the second run of a layer differs in {different}"
                    found.append(portable(first))
    return found


def differences(one: list[list[dict[str, Any]]], other: list[list[dict[str, Any]]]) -> set[str]:
    """Names of results that differ in any bit."""
    pairs = [pair for ranks in zip(one, other, strict=True) for pair in zip(*ranks, strict=True)]
    assert len(pairs) == len(one) * len(DTYPES) * len(CONFIGS)
    return {name for first, second in pairs for name in first if not numpy.array_equal(first[name], second[name])}


def check(num_ranks: int, place: Place, seed: int) -> None:
    one, other, faulty = (
        run_ranks(num_ranks, run, place, num_ranks, seed, delays, delays == 3, timeout=120) for delays in (1, 2, 3)
    )
    assert differences(one, other) == set()
    assert differences(one, faulty) >= {"y", "x", "experts.fc1", "experts.fc2"}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_two_runs_are_equal_bit_by_bit(num_ranks: int, fresh_random_data: int) -> None:
    check(num_ranks, Place(), fresh_random_data)
