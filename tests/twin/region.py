"""The kernels of regions (kernels/region.cuh): words raised and awaited, rows read from the parts of all ranks."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from comm_core.kernels import library as abi
from tests.twin.channel import Side, word
from tests.twin.memory import words
from tests.twin.order import Span

_POLL = 50e-6


class _Waits(Side):
    """What an await sees of the other ranks."""

    def __init__(self, call: Any) -> None:
        super().__init__(call.channel)
        self.call = call

    def has_refused(self, rank: int) -> bool:
        """True where a rank has refused a call that this one has not come to."""
        done = self.state.seq
        for self.seq in (0, 1):
            header = self.mine(rank)
            behind = (int(header[word("SEQ")]) - done) & 0xFFFFFFFF
            if 0 < behind < 1 << 31 and int(header[word("STATUS")]) & word("REFUSED"):
                return True
        return False

    def came(self, index: int) -> bool:
        """Whether a word has its number."""
        call = self.call
        return not (int(words(call.words[index], 1)[0]) - call.values[index]) & 0x80000000

    def wait(self, index: int) -> bool:
        """Waits for one word; False where it is no use."""
        start, limit, passed = time.monotonic(), self._seconds, 0.0
        peer = rank = self.call.peers[index]
        while self.call.heed and not self.came(index):
            passed = time.monotonic() - start
            if self.state.aborted or passed > limit:
                break
            if (rank == peer or passed > limit / 64) and self.has_refused(rank):
                if self.came(index):
                    break
                self.note_difference()
                return False
            rank = (rank + 1) % self.num_ranks
            time.sleep(_POLL)
        self._seconds = limit - passed
        came = self.wait_flag(words(self.call.words[index], 1), 0, peer, self.call.values[index])
        self._seconds = limit
        return came


def raise_words(call: Any) -> None:
    """Raises words in the parts of others."""
    if not abi.State.from_address(call.channel.state).aborted:
        for index in range(call.count):
            words(call.words[index], 1)[0] = call.values[index]


def await_words(call: Any) -> None:
    """Waits for words of the own part, for all at a time."""
    waits = _Waits(call)
    for index in range(call.count):
        waits.wait(index)


def read(call: Any) -> None:
    """Copies rows; numbers out of range read some row."""
    for index in range(call.count):
        owner, row = (
            min(max(int(ctypes.c_int64.from_address(table + 8 * index).value), 0), last)
            for table, last in ((call.owner, call.num_ranks - 1), (call.row, call.num_rows - 1))
        )
        ctypes.memmove(call.out + index * call.width, call.tables[owner] + row * call.width, call.width)


def word_spans(call: Any, write: bool) -> list[Span]:
    """The words of a call."""
    return [Span(call.words[index], 4, write) for index in range(call.count)]


def read_spans(call: Any) -> list[Span]:
    """Tables of all ranks, numbers and rows."""
    return [
        *(Span(call.tables[rank], call.num_rows * call.width, False) for rank in range(call.num_ranks)),
        Span(call.owner, 8 * call.count, False),
        Span(call.row, 8 * call.count, False),
        Span(call.out, call.count * call.width, True),
    ]
