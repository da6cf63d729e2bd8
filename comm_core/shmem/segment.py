"""Memory that several processes map: anonymous files without a name, and one address range over those of all ranks.

A memfd has no name in any file system, so nothing can be left behind, however a process ends. Its pages are reserved
when it is made: memory that is short raises here, where it is an error with a text, and not later as SIGBUS in the
middle of a copy. It is sealed: no process can shrink it under the others.

`Window` maps the files of all ranks at fixed distances in one reserved address range. A row of any rank then has a
number in one tensor, and gathering rows from all ranks is a single index_select.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

import torch

from comm_core.runtime.errors import CommError

# Linux values that Python's modules do not have in every version.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x2, 0x4
_MADV_HUGEPAGE = 14
# Below this fresh memory is touched quickly in any way.
_LARGE = 1 << 22
_MAP_FAILED = ctypes.c_void_p(-1).value
# Addresses for the segments of all ranks together, and at most for one; nothing but addresses is reserved.
_RANGE, _STRIDE = 1 << 42, 1 << 36


def why_not() -> str | None:
    """Why this machine can not share memory in this way; None where it can."""
    if not hasattr(os, "memfd_create"):
        return "needs Linux (memfd_create)"
    return None


def make_file(num_bytes: int) -> int:
    """A file descriptor of reserved, sealed, zeroed memory.

    Raises:
        CommError: the memory is not there; says how much was asked for.
    """
    handle = os.memfd_create("mt-moe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(handle, num_bytes)
        os.posix_fallocate(handle, 0, num_bytes)
        fcntl.fcntl(handle, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
    except OSError as error:
        os.close(handle)
        raise CommError(
            f"{num_bytes} bytes of shared memory can not be reserved ({error.strerror}); free memory, raise the limit "
            "of this process or container, or send fewer tokens a call"
        ) from error
    return handle


class Window:
    """One address range in which rank j's segment begins at j * stride; gaps are not accessible.

    Args:
        num_ranks: number of segments.
        stride: bytes between two of them, a multiple of the page size; by default as many as addresses allow.

    Attributes:
        stride: bytes between the beginnings of two segments, the most one can hold.
        memory: uint8 [num_ranks * stride] over all of it. Only mapped parts may be touched, and only one's own
            segment may be written.
    """

    def __init__(self, num_ranks: int, stride: int | None = None) -> None:
        self.stride = min(_STRIDE, _RANGE >> (num_ranks - 1).bit_length()) if stride is None else stride
        self._length = num_ranks * self.stride
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._base = self._mmap(None, self._length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self.memory = torch.frombuffer((ctypes.c_uint8 * self._length).from_address(self._base), dtype=torch.uint8)

    def place(self, rank: int, handle: int, num_bytes: int, *, writable: bool) -> None:
        """Maps a file as the segment of a rank, in place of an earlier one that was not larger."""
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mmap(self._base + rank * self.stride, num_bytes, rights, mmap.MAP_SHARED | _MAP_FIXED, handle)

    def rows(self, like: torch.Tensor) -> torch.Tensor:
        """The whole range as rows like those of a 2-D tensor, row 0 at its beginning."""
        width = row_bytes(like)
        return self.memory[: self._length // width * width].view(like.dtype).view(-1, like.shape[1])

    def close(self) -> None:
        """Unmaps everything. No tensor over the range may be used after that; idempotent."""
        base, self._base = self._base, 0
        self.memory = torch.empty(0, dtype=torch.uint8)
        if base:
            self._libc.munmap(base, self._length)

    def _mmap(self, address: int | None, num_bytes: int, rights: int, flags: int, handle: int) -> int:
        found = self._libc.mmap(address, num_bytes, rights, flags, handle, 0)
        if found is None or found == _MAP_FAILED:
            number = ctypes.get_errno()
            raise CommError(
                f"{num_bytes} bytes of addresses can not be mapped ({errno.errorcode.get(number, number)}); "
                "raise the limit on address space (ulimit -v) or use backend='collective'"
            )
        return int(found)


def row_bytes(like: torch.Tensor) -> int:
    """Bytes of one row of a 2-D tensor."""
    return like.shape[1] * like.element_size()


def prefer_large_pages(fresh: torch.Tensor) -> None:
    """Asks the kernel for large pages under a tensor that is about to be written first; a hint, without effect on it.

    Page faults of a fresh 64 MiB take longer than its copy: 50 ms against 14 ms with large pages, measured.
    """
    if fresh.nbytes < _LARGE:
        return
    first = -(-fresh.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (fresh.data_ptr() + fresh.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    advise(first, num_bytes, _MADV_HUGEPAGE)
