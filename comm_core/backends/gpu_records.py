"""Mapped host memory that kernels write and the host reads: the fault record of a channel, and one record a layout."""

from __future__ import annotations

import ctypes

from comm_core.kernels import library as abi
from comm_core.kernels.library import Library
from comm_core.runtime.errors import UsageError

# Records are made so many at a time: mapping memory stops the device, and can not be done while a graph is recorded.
_AT_ONCE = 32


class Words:
    """32-bit words at two addresses.

    Args:
        host, device: where the host and kernels see them.
        count: how many.

    Attributes:
        at: the words, for the host.
    """

    def __init__(self, host: int, device: int, count: int) -> None:
        self.host, self.device = host, device
        self.at = (ctypes.c_uint32 * count).from_address(host)


class Records:
    """The records of a channel.

    Args:
        library: maps the memory.
        num_words: length of each.

    Attributes:
        fault: the fault record.
    """

    def __init__(self, library: Library, num_words: int) -> None:
        self._library, self._num_words = library, num_words
        self._slabs: list[int] = []
        self._free: list[Words] = []
        # Handed back before the device has written them.
        self._pending: list[Words] = []
        self.fault = self._map(1, abi.FAULT_WORDS)[0]
        self._free += self._map(_AT_ONCE, num_words)

    def take(self, *, capturing: bool) -> Words:
        """A cleared record.

        Raises:
            UsageError: none is left, and none can be made while a graph is recorded.
        """
        self._free += [words for words in self._pending if words.at[abi.REC_SEQ]]
        self._pending = [words for words in self._pending if not words.at[abi.REC_SEQ]]
        if not self._free:
            if capturing:
                raise UsageError(
                    f"a layout in a graph with {_AT_ONCE} handles outstanding",
                    allowed="fewer",
                    fix="drop handles that are done before capturing",
                )
            self._free += self._map(_AT_ONCE, self._num_words)
        words = self._free.pop()
        ctypes.memset(words.host, 0, 4 * self._num_words)
        return words

    def give(self, words: Words) -> None:
        """Takes a record back: one that is written is handed out again, another once it is."""
        self._pending.append(words)

    def close(self) -> None:
        """Unmaps everything; no kernel may write any more."""
        for slab in self._slabs:
            self._library.host_free(slab)

    def _map(self, number: int, num_words: int) -> list[Words]:
        host, device = self._library.host_alloc(4 * num_words * number)
        self._slabs.append(host)
        return [Words(host + at, device + at, num_words) for at in range(0, 4 * num_words * number, 4 * num_words)]
