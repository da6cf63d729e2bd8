"""The resident ranks of the tests: the same processes again, groups of any size, and new processes after a failure."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankFailure, shared


def _sum(rank: int, offset: int) -> tuple[int, int]:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return int(value), os.getpid()


def _fail(rank: int) -> None:
    if rank < 2:
        raise ValueError(f"planted on {rank}")
    dist.barrier()  # its peers do not come


def _end(rank: int) -> object:
    dist.barrier()
    if rank == 1:
        os._exit(7)
    return (lambda: None) if rank == 2 else None  # which can not be pickled


def _hang(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


def test_processes_stay_whatever_the_size_of_the_group(pool: Pool) -> None:
    first = pool.run(2, _sum, 10)
    assert [value for value, _ in first] == [21, 21]
    assert [value for value, _ in pool.run(3, _sum, 10)] == [33, 33, 33]
    assert pool.run(2, _sum, 10) == first
    assert pool.run(1, _sum, 10) == [(10, first[0][1])]
    processes = pool.processes
    assert len(set(processes)) == 3
    pool.close()
    assert not any(psutil.pid_exists(process) for process in processes)


def test_every_failed_rank_is_reported_and_replaced(pool: Pool) -> None:
    before = [process for _, process in pool.run(3, _sum, 0)]
    with pytest.raises(RankFailure) as caught:
        pool.run(3, _fail)
    assert "planted on 0" in str(caught.value) and "planted on 1" in str(caught.value)
    with pytest.raises(RankFailure) as caught:
        pool.run(3, _end)
    assert "rank 1: no answer (exit code 7)" in str(caught.value) and "pickle" in str(caught.value)
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1: no answer"):
        pool.run(2, _hang, timeout=3.0)
    assert time.monotonic() - start < 10
    again = pool.run(3, _sum, 0)
    assert [value for value, _ in again] == [3, 3, 3]
    assert not {process for _, process in again} & set(before)


def test_a_call_that_is_interrupted_leaves_no_answers_behind(pool: Pool) -> None:
    def ring(*args: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    pool.run(2, _sum, 0)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run(2, _hang)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [value for value, _ in pool.run(2, _sum, 1)] == [3, 3]


def test_one_pool_a_process() -> None:
    assert shared() is shared()
