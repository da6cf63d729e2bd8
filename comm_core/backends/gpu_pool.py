"""Tensors in symmetric memory, so that what is sent need not be copied first.

    with buffer.symmetric_memory():
        y = grouped_gemm(...)          # its output lies where the other ranks can read it
    buffer.combine(y, handle)

They are ordinary tensors of torch from a pool of its allocator: they may be viewed, resized, recorded on streams and
freed as any other. Where the pool is full a tensor is allocated as usual and copied when it is sent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from comm_core.kernels import library as abi
from comm_core.kernels.library import Library
from comm_core.runtime import device as devices
from comm_core.runtime.errors import UsageError


class SymmetricPool:
    """The pool of one rank.

    Args:
        library: keeps the list of free places.
        device: whose memory it is.
        base: address of the segment.
        num_bytes: its size.
    """

    _taken: ClassVar[set[int]] = set()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, library: Library, device: torch.device, base: int, num_bytes: int) -> None:
        self._library, self._device, self.base, self.num_bytes = library, device, base, num_bytes
        with self._lock:
            free = [index for index in range(abi.MAX_POOLS) if index not in self._taken]
            if not free:
                raise UsageError(
                    f"pool number {abi.MAX_POOLS + 1} of this process",
                    allowed=f"{abi.MAX_POOLS} groups with symmetric tensors",
                    fix="close buffers that are done",
                )
            self._index = free[0]
            self._taken.add(self._index)
        library.set_pool(self._index, base, num_bytes)
        self._pool: Any = devices.memory_pool(device, str(library.path), "mt_pool_alloc", "mt_pool_free")

    def place_of(self, tensor: torch.Tensor) -> Any:
        """Where a tensor lies in the segment; None for one of ordinary memory, or not at a multiple of 16 bytes."""
        offset = tensor.data_ptr() - self.base
        if tensor.nbytes == 0 or not 0 <= offset <= self.num_bytes - tensor.nbytes or offset % 16:
            return None
        return abi.Place(offset=offset, segment=abi.POOL)

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """What this thread allocates on the device in the block comes from the pool, as long as there is room."""
        self._library.choose_pool(self._index)
        try:
            with devices.in_pool(self._device, self._pool):
                yield
        finally:
            self._library.choose_pool(-1)

    def close(self) -> None:
        """Gives the number back. Tensors that are left have addresses of memory that is gone."""
        self._pool = None
        self._library.set_pool(self._index, 0, 0)
        with self._lock:
            self._taken.discard(self._index)
