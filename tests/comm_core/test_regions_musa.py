"""Regions of the gpu backend over the double of torch_musa: every case of region_cases in `make test`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch.distributed as dist

from comm_core import ElasticBuffer
from comm_core.runtime import device as devices
from tests.comm_core import region_cases
from tests.dist import RankFailure
from tests.pool import Pool
from tests.twin.torch_musa import played


def _buffer(rank: int, timeout: float = 30.0, **options: Any) -> ElasticBuffer:
    device = devices.of("musa", rank % 2)
    return ElasticBuffer(dist.group.WORLD, backend="gpu", device=device, num_cpu_timeout_secs=timeout, **options)


def _good(rank: int, seed: int) -> list[str]:
    with played() as musa:
        with _buffer(rank) as buffer:
            bad = region_cases.uses(buffer, seed, num_messages=16, num_tensors=12)
            bad += region_cases.messages(buffer, seed)
        if buffer.num_ranks > 1:
            moved = {"region_raise", "region_await", "region_read", "region_copy"} - set(musa.library.launched)
            bad += [f"no {name}" for name in sorted(moved)]
        return bad + region_cases.lifetimes(lambda: _buffer(rank))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_results_and_lifetimes(ranks: Pool, num_ranks: int, fresh_random_data: int) -> None:
    assert ranks.run(num_ranks, _good, fresh_random_data) == [[]] * num_ranks


def _mistakes(rank: int, seed: int) -> list[str]:
    with played(), _buffer(rank) as buffer:
        return region_cases.mistakes(buffer, seed)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_mistakes_raise_on_every_rank(ranks: Pool, num_ranks: int, fresh_random_data: int) -> None:
    assert ranks.run(num_ranks, _mistakes, fresh_random_data) == [[]] * num_ranks


def _lost(rank: int) -> list[str]:
    with played():
        return region_cases.lost(lambda timeout: _buffer(rank, timeout), 1.0)


def test_who_does_not_come_is_named(ranks: Pool) -> None:
    assert ranks.run(2, _lost) == [[], []]


def _failing(rank: int) -> list[str]:
    """Work of a side stream that raises: who submitted it is told before the error goes on."""
    told: list[BaseException] = []

    def work() -> None:
        raise KeyError("work")

    with played(), _buffer(rank) as buffer, pytest.raises(KeyError, match="work"):
        buffer._backend.queue.submit(work, on_failure=told.append)
    return [str(error) for error in told]


def test_work_that_fails_is_told_to_who_submitted_it(ranks: Pool) -> None:
    assert ranks.run(1, _failing) == [["'work'"]]


def _altered(rank: int) -> None:
    """A region with another number for its memory."""
    vendors = devices.VENDORS
    good = vendors["musa"]
    vendors["musa"] = dataclasses.replace(good, dlpack=vendors["cuda"].dlpack)
    try:
        with played(), _buffer(rank, 5.0) as buffer:
            buffer.agrs_set_config(64, 1)
    finally:
        vendors["musa"] = good


def test_the_number_of_the_vendors_memory_is_needed(ranks: Pool) -> None:
    with pytest.raises(RankFailure, match="no memory of the played device in a capsule of device type 2"):
        ranks.run(1, _altered)


def _faults(rank: int, seed: int) -> dict[str, int]:
    with played(), _buffer(rank) as buffer:
        return region_cases.faults(buffer, seed)


def test_planted_faults_are_found(ranks: Pool, fresh_random_data: int) -> None:
    answers = ranks.run(2, _faults, fresh_random_data)
    total = {name: sum(answer[name] for answer in answers) for name in answers[0]}
    assert total.pop("none") == 0
    assert all(total.values()), total
