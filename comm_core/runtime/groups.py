"""Private process groups over the members of another group, made by those members alone.

`torch.distributed.new_group(use_local_synchronization=True)` lets members make a group without the other ranks, but it
names the group by its ranks and by how many groups this process is in. Two things go wrong with that: members that are
in different numbers of groups (a pipeline's first and last rank share an embedding group) get different names and wait
for each other until the timeout; and a name comes back after `destroy_process_group`, with the dead addresses of the
old group still in the store. Both are avoided here by agreeing on the number first and never using one twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

# Per set of ranks: the first number that no group of this process has used. torch's names are process-wide too.
_next_number: dict[tuple[int, ...], int] = {}


def _num_groups() -> int:
    """Groups this process is in, as torch counts them for names."""
    return len(distributed_c10d._world.pg_names)


def private_groups(
    parent: dist.ProcessGroup, count: int, *, timeout: timedelta, backends: Sequence[str] | None = None
) -> list[dist.ProcessGroup]:
    """Makes `count` groups with the members of `parent`. Collective over `parent`.

    Args:
        parent: the group whose members call this, all of them, in the same order as other calls of theirs.
        count: how many groups to make.
        timeout: bound of every operation on the new groups.
        backends: torch.distributed backend of each group; that of `parent` by default.

    Returns:
        The groups, in the same order on every member. Give each back with `torch.distributed.destroy_process_group`.
    """
    ranks = dist.get_process_group_ranks(parent)
    me, key = dist.get_rank(), tuple(sorted(ranks))
    mine = max(_num_groups(), _next_number.get(key, 0))
    offers: list[int] = [0] * len(ranks)
    dist.all_gather_object(offers, mine, group=parent)
    number = max(offers)
    fillers = []
    while _num_groups() < number:
        fillers.append(dist.new_group([me], backend="gloo", use_local_synchronization=True))
    kinds = [dist.get_backend(parent)] * count if backends is None else list(backends)
    assert len(kinds) == count, "one backend a group"
    groups = [dist.new_group(ranks, timeout=timeout, backend=kind, use_local_synchronization=True) for kind in kinds]
    _next_number[key] = number + count
    for filler in fillers:
        dist.destroy_process_group(filler)
    return groups
