"""Which ranks are left: agreed on through the store of torch.distributed, as the group's own connections are broken.

Calls are collective, so a rank that stops breaks the connections of its group. The others notice by the bounded wait
of the call, and each says here that it is alive. Who has not done so within the bound is left out; a rank that comes
too late finds itself left out and raises.

The store must outlive the failed rank: torchrun's does, a TCPStore hosted by the failed rank does not.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from comm_core.runtime.errors import CommError, CommTimeoutError


def _store(ranks: list[int], name: str) -> Store:
    """Part of the common store for the ranks of one group and one purpose."""
    return PrefixStore(f"ep-shrink/{'-'.join(map(str, ranks))}/{name}", distributed_c10d._get_default_store())


def survivors(ranks: list[int], name: str, timeout: float) -> list[int]:
    """Those of `ranks` (global) that call this within `timeout` seconds; every one of them gets the same answer.

    The lowest that answers decides. Where it fails in between, the others raise.

    Args:
        ranks: global ranks of the group that failed.
        name: tells the failures of this group apart; the same on all.
        timeout: seconds to wait for the others.

    Raises:
        CommError: this rank came too late. CommTimeoutError: nobody decided.
    """
    me, store = dist.get_rank(), _store(ranks, name)
    store.set(f"here{me}", "1")
    here: list[int] = []
    end = time.monotonic() + timeout
    while time.monotonic() < end and len(here) < len(ranks) and not store.check(["decided"]):
        time.sleep(0.02)
        here = [rank for rank in ranks if store.check([f"here{rank}"])]
    if here and me == here[0]:
        store.compare_set("decided", "", ",".join(map(str, here)))
    try:
        store.wait(["decided"], timedelta(seconds=timeout))
    except RuntimeError as error:
        raise CommTimeoutError(f"rank {me}: nobody of {here} said within {timeout:g} s which ranks are left") from error
    left = [int(rank) for rank in store.get("decided").decode().split(",")]
    if me not in left:
        raise CommError(f"rank {me} answered too late: the group goes on with ranks {left}; end this process")
    return left


def group_of(ranks: list[int], name: str, timeout: float) -> dist.ProcessGroup:
    """A gloo group made by `ranks` (global) alone, whatever other groups each of them is in.

    torch names such a group by how many groups a process has, so they agree on that first.
    """
    store = _store(ranks, name)
    me, have = dist.get_rank(), len(distributed_c10d._world.pg_names)
    store.set(f"have{me}", str(have))
    keys = [f"have{rank}" for rank in ranks]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        raise CommTimeoutError(f"rank {me}: not all of {ranks} make their group within {timeout:g} s") from error
    most = max(int(store.get(key)) for key in keys)
    fillers = [dist.new_group([me], backend="gloo", use_local_synchronization=True) for _ in range(most - have)]
    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), backend="gloo", use_local_synchronization=True)
    for filler in fillers:
        dist.destroy_process_group(filler)
    assert isinstance(group, dist.ProcessGroup), "this rank is one of them"
    return group
