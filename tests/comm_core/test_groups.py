"""Private groups: names that nobody else has, ranks that do not come named in time, a meeting after one that failed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from comm_core import ElasticBuffer
from comm_core.backends.roll_call import RollCall
from comm_core.runtime.errors import CommError, PeerTimeout
from comm_core.runtime.groups import meet, private_groups
from tests.pool import run_ranks

SECONDS = timedelta(seconds=20)


def _sum(group: Any) -> int:
    value = torch.tensor(dist.get_rank())
    dist.all_reduce(value, group=group)
    return int(value)


def _names(rank: int) -> list[str]:
    """Groups made by others before and after, more groups on one rank than on others, and names given back."""
    bad, world = [], dist.group.WORLD
    assert world is not None
    uneven = dist.new_group([0], use_local_synchronization=True) if rank == 0 else None
    (first,) = private_groups(world, 1, timeout=SECONDS)
    if uneven is not None:
        dist.destroy_process_group(uneven)
    # torch gives this one the name that a group of its own making would have had.
    theirs = [dist.new_group([0, 1, 2], use_local_synchronization=True) for _ in range(2)]
    second, third = private_groups(world, 2, timeout=SECONDS, backends=("gloo", "gloo"))
    dist.destroy_process_group(first)
    (fourth,) = private_groups(world, 1, timeout=SECONDS)
    names = [distributed_c10d._world.pg_names[group] for group in (*theirs, second, third, fourth)]
    bad += [] if len(set(names)) == 5 else [f"names {names}"]
    bad += [f"{name}" for name, group in zip(names, (*theirs, second, third, fourth), strict=True) if _sum(group) != 3]
    return bad + _order(rank)


def _order(rank: int) -> list[str]:
    """Ranks keep the places they have in the group given."""
    turned = dist.new_group([2, 0, 1], sort_ranks=False)
    (group,) = private_groups(turned, 1, timeout=SECONDS)
    bad = [] if dist.get_rank(group) == dist.get_rank(turned) == (rank + 1) % 3 else ["another order"]
    x = torch.full((3, 8), float(rank))
    with ElasticBuffer(turned, num_cpu_timeout_secs=20) as buffer:
        rows, *_ = buffer.dispatch(x, torch.tensor([[0], [1], [2]]), num_experts=3)
    return bad + ([] if rows[:, 0].tolist() == [2.0, 0.0, 1.0] else [f"rows from {rows[:, 0].tolist()}"])


def _late(rank: int) -> list[str]:
    world = dist.group.WORLD
    assert world is not None
    bad, start = [], time.monotonic()
    if rank == 2:
        time.sleep(2.0)
    kind, says = (
        (CommError, "waited 1 s for rank 2") if rank == 2 else (PeerTimeout, "no answer from rank 2 within 1 s")
    )
    try:
        meet(world, "", what="a meeting", timeout=1.0)
        bad.append("no error")
    except CommError as error:
        took = time.monotonic() - start
        good = type(error) is kind and says in str(error) and f"a meeting on rank {rank}" in str(error)
        bad += [] if good and took < 4 else [f"{took:.1f} s: {type(error).__name__} {error}"]
    said = meet(world, f"from {rank}", what="a meeting", timeout=20.0)
    return bad + ([] if said == ["from 0", "from 1", "from 2"] else [f"said {said}"])


@pytest.mark.parametrize("piece", [_names, _late], ids=["names", "a late rank"])
def test_private_groups(piece: Any) -> None:
    assert run_ranks(3, piece, timeout=60.0) == [[], [], []]


class _Gone:
    """A store whose host has ended, at once or without a word."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent

    def check(self, keys: list[str]) -> bool:
        if self.silent:
            time.sleep(5)
        raise RuntimeError("connection reset by peer")


def _asked(store: Any, *here: int, where: str = "combine (call 7)") -> list[str]:
    """What some of four ranks answer that fail at the same time."""
    with ThreadPoolExecutor(4) as ranks:
        return list(ranks.map(lambda rank: RollCall(store, rank, 4).missing(where), here))


def test_who_is_missing() -> None:
    assert _asked(dist.HashStore(), 0, 1, 3) == ["rank 2"] * 3
    store = dist.HashStore()
    RollCall(store, 1, 4).say("has given up (ValueError: planted)")
    RollCall(store, 1, 4).say("a later word")
    assert _asked(store, 0, 2) == ["rank 3, rank 1, which has given up (ValueError: planted)"] * 2
    assert _asked(store, 3, where="dispatch (call 7)") == ["rank 1, which has given up (ValueError: planted)"]
    # All are there, but not at the same call.
    store = dist.HashStore()
    assert _asked(store, 0, 1, 2) == ["rank 3"] * 3
    assert _asked(store, 3, where="barrier (call 9)")[0].startswith("rank 0, which failed in combine (call 7), rank 1")


@pytest.mark.parametrize("store", [None, _Gone(False), _Gone(True)], ids=["none", "gone", "gone silently"])
def test_without_a_store_every_other_rank_may_be_missing(store: Any) -> None:
    start = time.monotonic()
    said = RollCall(store, 1, 3).missing("dispatch (call 1)")
    assert said == "rank 0 or rank 2 (the store that could tell which is gone too)"
    assert time.monotonic() - start < 1.9
