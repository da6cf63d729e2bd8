"""Headers, flags and bounded waits: what kernels/sync.cuh does, on host memory.

Numbers of words and offsets are read from kernels/abi.h, so that they are the kernels' own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from comm_core.kernels import library as abi
from tests.twin.memory import words

# Ticks a second of the played device's timer.
TICKS = 1_000_000
_POLL = 50e-6


@cache
def numbers() -> dict[str, int]:
    """Every enumerator and constant of abi.h that is a plain number, by its name without MT_."""
    text = (Path(abi.__file__).parent / "abi.h").read_text()
    return {name: int(value) for name, value in re.findall(r"\bMT_(\w+) = (\d+)[,;]", text)}


def word(name: str) -> int:
    """A number of abi.h."""
    return numbers()[name]


def address_in(place: np.ndarray) -> tuple[int, int]:
    """(segment, offset) as three words of a header hold them."""
    return int(place[2]), int(place[0]) | int(place[1]) << 32


class Side:
    """One kernel's view of its channel. `now` and `sleep` are the clock's."""

    def __init__(self, channel: Any, now: Callable[[], float] = time.monotonic) -> None:
        self.rank, self.num_ranks, self.number = channel.rank, channel.num_ranks, channel.number
        self.ranks = range(self.num_ranks)
        self._seconds, self._now = channel.timeout_ticks / TICKS, now
        self.state = abi.State.from_address(channel.state)
        self._fault = words(channel.fault, abi.FAULT_WORDS)
        self._peers = words(channel.peers, word("SEGMENTS") * word("MAX_RANKS"), np.uint64)
        self.seq = (self.state.seq + 1) & 0xFFFFFFFF

    def segment(self, which: int, rank: int) -> int:
        """Address of a segment of a rank, in this process."""
        return int(self._peers[which * word("MAX_RANKS") + rank])

    def header(self, reader: int, writer: int) -> np.ndarray:
        """The header that `writer` writes into the memory of `reader`."""
        size = word("HEADER_WORDS")
        index = self.seq % 2 * word("MAX_RANKS") + writer
        return words(self.segment(abi.CONTROL, reader) + index * size * 4, size)

    def mine(self, writer: int) -> np.ndarray:
        """The header that has come from `writer`."""
        return self.header(self.rank, writer)

    def announced(self, writer: int, name: str) -> int:
        """Address of what `writer` has announced in its header."""
        at = word(name)
        which, offset = address_in(self.mine(writer)[at : at + 3])
        return self.segment(which, writer) + offset

    def own(self, place: Any) -> int:
        """Address of a place of this rank."""
        return self.segment(place.segment, self.rank) + place.offset

    def send(self, reader: int, hashed: int, status: int, places: dict[str, Any], lent: int) -> None:
        """Writes the header for a rank, its number last."""
        header = self.header(reader, self.rank)
        header[word("HASH")], header[word("STATUS")], header[word("LENT")] = hashed, status, lent
        for name in ("X", "WEIGHTS", "SCALES"):
            place, at = places.get(name) or abi.Place(), word(name)
            header[at : at + 3] = place.offset & 0xFFFFFFFF, place.offset >> 32, place.segment
        header[word("SEQ")] = self.seq

    def wait_flag(self, flags: np.ndarray, index: int, peer: int, value: int | None = None) -> bool:
        """Waits until a flag has come to a number, this operation's; False where a wait has timed out."""
        start, value = self._now(), self.seq if value is None else value
        while (int(flags[index]) - value) & 0x80000000:
            if self.state.aborted:
                return False
            if self._now() - start > self._seconds:
                if not self.state.aborted:
                    self.state.aborted = 1
                    self._fault[abi.FAULT_PEER], self._fault[abi.FAULT_NUMBER] = peer, self.number
                    self._fault[abi.FAULT_SET] = 1
                return False
            time.sleep(_POLL)
        return not self.state.aborted

    def wait_headers(self) -> bool:
        """Waits for the headers of all ranks."""
        return all([self.wait_flag(self.mine(rank), word("SEQ"), rank) for rank in self.ranks])

    def headers_differ(self) -> bool:
        """True where a rank refused its call or all settings are not the same."""
        hashed = self.mine(self.rank)[word("HASH")]
        return any(
            self.mine(rank)[word("HASH")] != hashed or int(self.mine(rank)[word("STATUS")]) & word("REFUSED")
            for rank in self.ranks
        )

    def note_difference(self) -> None:
        """Tells the host which call went wrong first."""
        if not self.state.differed:
            self.state.differed = 1
            self._fault[abi.FAULT_DIFFERENT] = self.number

    def begin(self, hashed: int, status: int, places: dict[str, Any], lent: int) -> bool:
        """Headers go out and come in; False where nothing may move."""
        for rank in self.ranks:
            self.send(rank, hashed, status, places, lent)
        if not self.wait_headers():
            return False
        if not self.headers_differ():
            return True
        self.note_difference()
        return False

    def end(self, began: bool, lent: int) -> None:
        """Who lent its own memory waits until all have read it."""
        at = 2 * word("MAX_RANKS") * word("HEADER_WORDS") * 4
        for rank in self.ranks if began else ():
            if self.mine(rank)[word("LENT")]:
                words(self.segment(abi.CONTROL, rank) + at, self.num_ranks)[self.rank] = self.seq
        for rank in self.ranks if began and lent else ():
            self.wait_flag(words(self.segment(abi.CONTROL, self.rank) + at, self.num_ranks), rank, rank)
        self.state.seq = self.seq
