"""The launcher of the multi-process tests itself: results, tracebacks of every rank, a hard timeout."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.dist import RankFailure, run_ranks


def _sum(rank: int, offset: int) -> int:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return int(value)


def _fail(rank: int) -> None:
    raise ValueError(f"planted on {rank}")


def _hang(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


def test_results_come_back_by_rank() -> None:
    assert run_ranks(2, _sum, 10) == [21, 21]


def test_every_traceback_is_reported() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, _fail)
    assert "planted on 0" in str(caught.value) and "planted on 1" in str(caught.value)


def test_a_hanging_rank_is_killed_and_named() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1: no answer"):
        run_ranks(2, _hang, timeout=8.0)
    assert time.monotonic() - start < 30
