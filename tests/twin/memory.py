"""Memory of the played device outside torch: segments that other processes open by a handle, and mapped host memory.

A segment is a file in memory without a name; its handle says which process has it open as which file, and 64 bytes
are enough for that. Mapped host memory is mapped twice, so that the host's address and the device's are not the same:
who takes one for the other is told.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

import numpy as np
import torch

_HANDLE = struct.Struct("<8sqqq")
_MAGIC = b"mt-twin\0"


def words(address: int, count: int, dtype: type = np.uint32) -> np.ndarray:
    """An array over memory at an address."""
    size = np.dtype(dtype).itemsize
    if count == 0:
        return np.empty(0, dtype)
    assert address % size == 0, f"address {address:#x} is no multiple of {size}"
    return np.frombuffer((ctypes.c_uint8 * (count * size)).from_address(address), dtype)


def numbers_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory at an address."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address), dtype=dtype)


@dataclass(slots=True)
class Mapping:
    """A file in memory, mapped into this process.

    Attributes:
        file: its descriptor here.
        pages: the mapping.
        address: where it begins.
        own: made here, not opened.
    """

    file: int
    pages: mmap.mmap
    address: int
    own: bool

    @classmethod
    def of(cls, file: int, num_bytes: int, *, own: bool) -> Mapping:
        pages = mmap.mmap(file, num_bytes)
        return cls(file, pages, ctypes.addressof(ctypes.c_char.from_buffer(pages)), own)

    @property
    def num_bytes(self) -> int:
        return len(self.pages)

    def close(self) -> None:
        """Unmaps; `from_buffer` above holds the pages no longer than its own object lived."""
        self.pages.close()
        os.close(self.file)


class Segments:
    """The mappings of a process, by their addresses; errors are the runtime's in words."""

    def __init__(self) -> None:
        self._mapped: dict[int, Mapping] = {}

    def make(self, num_bytes: int) -> Mapping:
        file = os.memfd_create("mt-twin", os.MFD_CLOEXEC)
        os.ftruncate(file, num_bytes)
        return self._note(Mapping.of(file, num_bytes, own=True))

    def handle(self, address: int) -> bytes:
        """What names a segment to other processes."""
        segment = self._own(address)
        return _HANDLE.pack(_MAGIC, os.getpid(), segment.file, segment.num_bytes).ljust(64, b"\0")

    def open(self, handle: bytes) -> Mapping:
        """A segment of another process; a lock on the file says that it is open."""
        magic, process, number, num_bytes = _HANDLE.unpack(handle[: _HANDLE.size])
        if magic != _MAGIC or process == os.getpid():
            raise RuntimeError("invalid device context: a handle of this process, or none")
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(file, fcntl.LOCK_SH)
        return self._note(Mapping.of(file, num_bytes, own=False))

    def again(self, segment: Mapping) -> Mapping:
        """The same memory at another address."""
        return self._note(Mapping.of(os.dup(segment.file), segment.num_bytes, own=segment.own))

    def take(self, address: int, *, own: bool) -> Mapping:
        """Takes a mapping off the list, to be closed."""
        if address not in self._mapped or self._mapped[address].own != own:
            raise RuntimeError(f"invalid argument: {address:#x} is no memory of this kind")
        return self._mapped.pop(address)

    def is_open_elsewhere(self, address: int) -> bool:
        """True where another process has a segment of this one open."""
        file = os.open(f"/proc/self/fd/{self._own(address).file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def holds(self, start: int, num_bytes: int) -> bool:
        """True where a range lies in one mapping."""
        return any(a <= start and start + num_bytes <= a + item.num_bytes for a, item in list(self._mapped.items()))

    def _own(self, address: int) -> Mapping:
        if address not in self._mapped or not self._mapped[address].own:
            raise RuntimeError(f"invalid argument: {address:#x} is no allocation")
        return self._mapped[address]

    def _note(self, segment: Mapping) -> Mapping:
        self._mapped[segment.address] = segment
        return segment


class Pool:
    """Places in a range of memory, first fit; the twin of kernels/pool.cuh.

    Args:
        base: where the range begins.
        num_bytes: its size.
    """

    ALIGNMENT = 512

    def __init__(self, base: int, num_bytes: int) -> None:
        self._base, self._end = base, base + num_bytes
        self._used: dict[int, int] = {}

    def take(self, num_bytes: int) -> int | None:
        """A place, or None where there is no room."""
        at = self._base
        for start, size in sorted(self._used.items()):
            if start - at >= num_bytes:
                break
            at = start + -(-size // self.ALIGNMENT) * self.ALIGNMENT
        if at + num_bytes > self._end:
            return None
        self._used[at] = num_bytes
        return at

    def give(self, at: int) -> None:
        """Gives a place back."""
        del self._used[at]
