"""The ranks that the low-latency calls run on: all of the group, or those left after failures and masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist

from comm_core.legacy import shrink
from comm_core.legacy.transport import Transport
from comm_core.runtime import env
from comm_core.runtime.errors import CommError, UsageError

ResultT = TypeVar("ResultT")


class Members:
    """Transports over the unmasked ranks of a group, made when a call finds the mask changed.

    Args:
        whole: transport of the whole group.
        group: the group.
        shrinks: a call that a rank fails in is repeated without it.
        timeout: bound of every wait in seconds; None for the default.
        backend: of the transports.

    Attributes:
        transport: of the ranks that are left.
        ranks: those ranks, as ranks of the group.
        number: changes with `transport`.
        masked: ranks that are left out.
    """

    # Buffers of one set of ranks are told apart in the store by the order in which they were built.
    _built: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(
        self, whole: Transport, group: dist.ProcessGroup, shrinks: bool, timeout: float | None, backend: str
    ) -> None:
        self._whole, self._shrinks, self._backend = whole, shrinks, backend
        self._global = dist.get_process_group_ranks(group)
        self._timeout = env.timeout_seconds() if timeout is None else float(timeout)
        self._group: dist.ProcessGroup | None = None
        self._votes = 0
        key = tuple(self._global)
        self._built[key] += 1
        self._name = f"buffer{self._built[key]}"
        self.transport, self.ranks, self.number = whole, list(range(whole.num_ranks)), 0
        self.masked: set[int] = set()

    def attempt(self, work: Callable[[Transport], ResultT]) -> ResultT:
        """Runs a collective piece of work on the ranks that are left; with `shrinks`, again where one of them failed.

        A mistake in arguments leaves the connections whole and is raised; only broken connections count as a failure.
        """
        while True:
            self._follow_mask()
            try:
                return work(self.transport)
            except (CommError, UsageError):
                if not self._shrinks or self._works():
                    raise
            self._vote()

    def close(self) -> None:
        """Closes every transport; with ranks masked, without waiting for them."""
        self._leave()
        if self.masked:
            self._whole.elastic.__exit__(CommError, None, None)
        else:
            self._whole.elastic.close()

    def need_shrink(self) -> None:
        """Raises UsageError where the buffer was built without enable_shrink."""
        if not self._shrinks:
            raise UsageError(
                "a mask of ranks without enable_shrink", allowed="enable_shrink=True", fix="build the buffer with it"
            )

    def mask(self, rank: int, masked: bool) -> None:
        """Leaves a rank out, or takes it in again, from the next call on."""
        self.need_shrink()
        if not isinstance(rank, int) or not 0 <= rank < self._whole.num_ranks or rank == self._whole.rank:
            others = [other for other in range(self._whole.num_ranks) if other != self._whole.rank]
            raise UsageError(f"rank {rank!r} to mask", allowed=f"one of {others}", fix="name another rank")
        (self.masked.add if masked else self.masked.discard)(rank)

    def _works(self) -> bool:
        """True where the ranks that are left can still talk to each other; all of them ask at the same call."""
        try:
            self.transport.spread([0])
        except CommError:
            return False
        return True

    def _vote(self) -> None:
        self._votes += 1
        ranks = [self._global[rank] for rank in self.ranks]
        left = shrink.survivors(ranks, f"{self._name}/vote{self._votes}", self._timeout)
        lost = {rank for rank in self.ranks if self._global[rank] not in left}
        if not lost:
            raise CommError(f"the connections of ranks {ranks} broke though all of them answer; build a new buffer")
        self.masked |= lost

    def _follow_mask(self) -> None:
        wanted = [rank for rank in range(self._whole.num_ranks) if rank not in self.masked]
        if wanted == self.ranks:
            return
        self._leave()
        self.ranks, self.number = wanted, self.number + 1
        if len(wanted) == self._whole.num_ranks:
            self.transport = self._whole
            return
        ranks = [self._global[rank] for rank in wanted]
        self._group = shrink.group_of(ranks, f"{self._name}/group{self.number}", self._timeout)
        self.transport = Transport(self._group, self._timeout, self._backend, self._whole.device)

    def _leave(self) -> None:
        """Gives back the transport of fewer ranks, without a word to the others: one of them may be gone."""
        if self.transport is not self._whole:
            self.transport.elastic.__exit__(CommError, None, None)
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self.transport, self._group = self._whole, None


def fill_status(masked: set[int], status: torch.Tensor) -> None:
    """Writes 1 for masked ranks and 0 for the others."""
    status.zero_()
    if masked:
        status[sorted(masked)] = 1
