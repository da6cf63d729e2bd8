"""Sizes of the domains of a group. Groups are one level here: everything is scale-up."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist

from comm_core.runtime.errors import UsageError


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """(scale-out domains, ranks of a scale-up domain) of a group: (1, its size)."""
    return 1, group.size()


def get_logical_domain_size(group: dist.ProcessGroup, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """The same as a buffer over the group uses them."""
    return 1, group.size()


def get_nccl_comm_handle(group: dist.ProcessGroup, force_new_comm: bool = False) -> NoReturn:
    """Not there: buffers make private groups of torch.distributed and share no raw communicator.

    Raises:
        UsageError: always.
    """
    raise UsageError("get_nccl_comm_handle", allowed="torch.distributed groups", fix="pass the group to a buffer")


def destroy_all_managed_nccl_comm() -> None:
    """Nothing to do: there are none."""
