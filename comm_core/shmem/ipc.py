"""Symmetric memory of devices: each rank allocates, and opens what the others allocated through their IPC handles.

A segment is one plain allocation of the runtime (not of torch, whose blocks can not be shared one by one). Several
processes may share one device. Making or replacing a segment is a collective call; what one rank can not do is raised
on all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from comm_core.kernels import library as abi
from comm_core.kernels.library import Library
from comm_core.runtime.errors import CommError, UnavailableError

# Gathers one picklable object from each rank, in rank order; bounded by itself.
Gather = Callable[[Any], list[Any]]


class PeerMemory:
    """Segments of a rank (control, ring, pool, blocks), and where those of the others lie in this process.

    Args:
        library: allocates and opens.
        device: index of this rank's device.
        rank: this rank.
        num_ranks: size of the group.
        gather: how the ranks meet.

    Attributes:
        peers: device address of the table char* [segment][rank] that kernels read.
        sizes: bytes of each segment, the same on all ranks; 0 where there is none.
    """

    def __init__(self, library: Library, device: int, rank: int, num_ranks: int, gather: Gather) -> None:
        self._library, self._device, self._rank, self._num_ranks = library, device, rank, num_ranks
        self._gather = gather
        self._bases: list[list[int]] = [[0] * num_ranks for _ in range(abi.SEGMENTS)]
        self.sizes = [0] * abi.SEGMENTS
        self.peers = 0
        self.make(abi.CONTROL, abi.CONTROL_BYTES)
        self.peers = self.base(abi.CONTROL) + abi.AT_PEERS
        self._write_table()

    def base(self, which: int, rank: int | None = None) -> int:
        """Address in this process of a rank's segment, this rank's by default; 0 without."""
        return self._bases[which][self._rank if rank is None else rank]

    def make(self, which: int, num_bytes: int) -> None:
        """Makes or replaces a segment (collective). No kernel may be using the old one, on any rank.

        Raises:
            UnavailableError: on every rank, where one is out of memory or can not open another's.
        """
        self.drop(which)
        self._bases[which], self.sizes[which] = self.allocate(num_bytes), num_bytes
        if self.peers:
            self._write_table()

    def allocate(self, num_bytes: int) -> list[int]:
        """Memory of this size on each rank, cleared (collective): addresses in this process, by rank.

        Raises:
            UnavailableError: on every rank, where one is out of memory or can not open another's.
        """
        mine, handle = self._try(lambda: self._allocated(num_bytes))
        said = self._gather(handle if isinstance(handle, str) else bytes(handle))
        opened: list[int] | str = [0] * self._num_ranks
        if not any(isinstance(item, str) for item in said):
            opened = self._opened(said, mine)
        problems = [item if isinstance(item, str) else None for item in said]
        late = self._gather(opened if isinstance(opened, str) else None)
        found = [f"rank {r}: {a or b}" for r, (a, b) in enumerate(zip(problems, late, strict=True)) if a or b]
        if found:
            if isinstance(opened, list) and any(opened):
                self.close_views(opened)
            self._gather(None)  # nobody has it open any more
            if mine:
                self._library.free(mine)
            raise UnavailableError(f"no symmetric memory of {num_bytes} bytes: {'; '.join(found)}")
        assert isinstance(opened, list)
        return opened

    def close_views(self, bases: list[int]) -> None:
        """Closes what this rank has open of the others' memory; once all ranks have, its owner may free it."""
        for rank, base in enumerate(bases):
            if rank != self._rank:
                self._library.close(base)

    def drop(self, which: int) -> None:
        """Frees a segment, where there is one: first the others' views of it, then the memory (collective)."""
        if not self.sizes[which]:
            return
        self.close_views(self._bases[which])
        self._gather(None)
        self._library.free(self.base(which))
        self._bases[which], self.sizes[which] = [0] * self._num_ranks, 0

    def close(self, *, collective: bool) -> None:
        """Frees everything. Without the other ranks the memory stays until the process ends: they may read it."""
        if collective:
            for which in reversed(range(abi.SEGMENTS)):
                self.drop(which)

    def _allocated(self, num_bytes: int) -> tuple[int, bytes]:
        address = self._library.alloc(self._device, num_bytes)
        try:
            return address, self._library.share(address)
        except CommError:
            self._library.free(address)
            raise

    def _opened(self, handles: list[bytes], mine: int) -> list[int] | str:
        found: list[int] = []
        try:
            for rank, handle in enumerate(handles):
                found.append(mine if rank == self._rank else self._library.open(self._device, handle))
        except CommError as error:
            self.close_views(found)
            return (
                f"memory of rank {len(found)} can not be opened ({error}); it needs devices of one host that see each "
                "other, in one container, without CUDA_VISIBLE_DEVICES hiding the other's"
            )
        return found

    def _write_table(self) -> None:
        flat = [base for which in self._bases for base in [*which, *[0] * (abi.MAX_RANKS - self._num_ranks)]]
        table = (ctypes.c_uint64 * len(flat))(*flat)
        self._library.copy(self.peers, ctypes.addressof(table), ctypes.sizeof(table), 0)
        self._library.synchronize()

    @staticmethod
    def _try(make: Callable[[], tuple[int, bytes]]) -> tuple[int, bytes | str]:
        try:
            return make()
        except CommError as error:
            return 0, str(error)
