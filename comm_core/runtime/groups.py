"""Private process groups over the members of another group, made by those members alone.

`torch.distributed.new_group(use_local_synchronization=True)` lets members make a group without the other ranks, but it
names the group by its ranks and by how many groups this process is in. Three things go wrong with that: members that
are in different numbers of groups (a pipeline's first and last rank share an embedding group) get different names and
wait for each other until the timeout; a name comes back after `destroy_process_group`, with the dead addresses of the
old group still in the store; and a group that somebody else makes in this way may take the name of a living one. Here
the members meet first and agree on a name that nobody ever had.

They meet in the store that torch.distributed started with: no collective on the group given, whose timeout is another
one (often half an hour), so that a rank which does not come is named in time.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from comm_core.runtime.errors import CommError, PeerTimeout

_SHORTEST, _LONGEST = 1e-3, 1e-2
# How often this process has met the others of a group; groups live longer than what is built on them.
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_naming = threading.Lock()


def store_of(group: dist.ProcessGroup) -> Any:
    """The key-value store of a group, for keys of ours; None where torch keeps none."""
    _, store = distributed_c10d._world.pg_map.get(group, (None, None))
    return None if store is None else PrefixStore("mt-moe", store)


def meet(group: dist.ProcessGroup, value: str, *, what: str, timeout: float) -> list[str]:
    """A text from each rank of a group, in rank order. Collective; moves no tensors.

    Args:
        group: who meets.
        value: this rank's text.
        what: what the ranks do, for messages ("building a buffer").
        timeout: bound of the wait in seconds.

    Raises:
        PeerTimeout: a rank did not come; names it.
        CommError: the others were here and have gone, since a rank (this one, perhaps) did not come in time.
    """
    rank, num_ranks, store = dist.get_rank(group), dist.get_world_size(group), store_of(group)
    if store is None:
        found: list[str] = [""] * num_ranks
        dist.all_gather_object(found, value, group=group)
        return found
    number = _meetings[group] = _meetings.get(group, 0) + 1
    keys = [f"meeting {number}/{peer}" for peer in range(num_ranks)]
    ended = f"meeting {number}/ended"
    who = f"{what} on rank {rank} of group {dist.get_process_group_ranks(group)}"
    store.set(keys[rank], value)
    pending = [peer for peer in range(num_ranks) if peer != rank]
    end, pause = time.monotonic() + timeout, _SHORTEST
    while True:
        pending = [peer for peer in pending if not store.check([keys[peer]])]
        if not pending:
            break
        if time.monotonic() > end or store.check([ended]):
            names = ", ".join(f"rank {peer}" for peer in pending)
            store.set(ended, f"the other ranks waited {timeout:g} s for {names} and have gone")
            raise PeerTimeout(
                f"{who} got no answer from {names} within {timeout:g} s; check that every rank is alive and makes the "
                "same calls, or raise num_cpu_timeout_secs"
            )
        time.sleep(pause)
        pause = min(_LONGEST, 1.5 * pause)
    if store.check([ended]):
        raise CommError(f"{who}: {store.get(ended).decode()}; do it again on every rank")
    found = [store.get(key).decode() for key in keys]
    if number > 1:
        store.delete_key(f"meeting {number - 1}/{rank}")  # everybody is here: nobody reads that any more
    return found


def private_groups(
    parent: dist.ProcessGroup, count: int, *, timeout: timedelta, backends: Sequence[str] | None = None
) -> list[dist.ProcessGroup]:
    """Makes `count` groups with the members of `parent`. Collective over `parent`.

    Args:
        parent: the group whose members call this, all of them, in the same order as other calls of theirs.
        count: how many groups to make.
        timeout: bound of every operation on the new groups, and of the wait for the other members here.
        backends: torch.distributed backend of each group; that of `parent` by default.

    Returns:
        The groups, in the same order on every member. Give each back with `torch.distributed.destroy_process_group`.

    Raises:
        PeerTimeout: a member did not come; names it.
    """
    ranks = dist.get_process_group_ranks(parent)
    what = "building private groups"
    word = meet(parent, secrets.token_hex(8), what=what, timeout=timeout.total_seconds())[0]
    kinds = [dist.get_backend(parent)] * count if backends is None else list(backends)
    assert len(kinds) == count, "one backend a group"
    # Ranks keep the places they have in the parent; torch sorts them otherwise.
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    with _names(f"mt-moe-{word}"):
        return [
            dist.new_group(ranks, timeout=timeout, backend=kind, use_local_synchronization=True, **order)
            for kind in kinds
        ]


@contextlib.contextmanager
def _names(prefix: str) -> Iterator[None]:
    """Groups that this thread makes in the block are named after `prefix`; torch has no argument for it."""
    thread, numbers = threading.get_ident(), itertools.count()
    with _naming:
        usual = distributed_c10d._process_group_name

        def name(*args: Any, **named: Any) -> Any:
            return f"{prefix}-{next(numbers)}" if threading.get_ident() == thread else usual(*args, **named)

        distributed_c10d._process_group_name = name
        try:
            yield
        finally:
            distributed_c10d._process_group_name = usual
