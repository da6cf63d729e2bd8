"""Symmetric memory of the processes of one host: everybody writes its own segment and reads those of the others.

There are two ways to exchange something, both collective and in the same order on every rank:

* `gather`: a short line from each rank to all;
* `share`: each rank lays tables of rows into its segment, and all read from all until they say `done`.

Each is one round. A rank writes, then sets its word READY to the number of the round; it reads when the words of all
ranks have come so far. Each word has one writer and only grows, so there is nothing to lock and nothing to reset. Rows
are read where their owner put them, straight into their final place: they cross once, and no rank can spoil memory of
another, because the segments of others are mapped for reading alone.

A segment grows when its owner needs more: a new file, handed over with a generation number. What was there before is
no longer read by then, because a rank lays nothing down before all are done with what it shared last.

Waiting is polling with growing sleeps, without the interpreter lock. It is bounded, and it ends early where the other
rank says that it has left or failed, or where its process is gone.

Stores are seen in the order they were made on x86; elsewhere the lock in `_fence` makes them so (not tried there).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from comm_core.runtime.errors import CommError, PeerTimeout
from comm_core.shmem.peers import Gather, Peers
from comm_core.shmem.segment import Window, make_file, row_bytes

# Words of the control page of a rank, int64 each.
_STATE, _READY, _DONE, _REFUSED, _GENERATION, _BASES = 0, 1, 2, 3, 4, 8
_NUM_BASES, _STARTS = 8, 16
_OPEN, _LEFT, _FAILED = 0, 1, 2
_TEXT_BYTES = 512
_PAGE = 4096
# Segments are this large at first, and grow to twice their size at least.
_FIRST_BYTES = 1 << 21
# Polls without a sleep, then sleeps in seconds; liveness is looked at less often, it costs a system call a rank.
_SPINS, _SHORTEST, _LONGEST, _LIVENESS = 50, 2e-5, 2e-4, 0.02


class SharedMemoryError(CommError):
    """A rank could not reserve shared memory. Raised on every rank of the group, which can go on."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the ranks have laid down in one round.

    Attributes:
        window: addresses of all segments.
        bases: bases[rank][table] is the row of `rows(table)` at which the rank's table begins.
        starts: starts[rank][j], numbers each rank added for rank j.
    """

    window: Window
    bases: list[list[int]]
    starts: list[list[int]]

    def rows(self, like: torch.Tensor) -> torch.Tensor:
        """All segments as one table of rows like those of a 2-D tensor, to be indexed from `bases`."""
        return self.window.rows(like)


class SymmetricHeap:
    """The segments of all ranks as one rank sees them. Building is collective; calls are made by one thread at a time.

    Args:
        rank: this rank.
        ranks: names of the ranks for messages; their number is the size of the group.
        gather: how the ranks meet to build it; bounded by itself.
        timeout: bound of every wait in seconds.

    Raises:
        CommError: on every rank, where one can not share memory.
    """

    def __init__(self, rank: int, ranks: Sequence[int], gather: Gather, timeout: float) -> None:
        self.rank, self.ranks, self.timeout = rank, list(ranks), timeout
        num_ranks = len(self.ranks)
        self._others = [peer for peer in range(num_ranks) if peer != rank]
        self._line_bytes = 8 * (64 + num_ranks)
        self._lines_at = -(-(8 * (_STARTS + num_ranks) + _TEXT_BYTES) // _PAGE) * _PAGE
        self._round = self._gathers = self._last_share = 0
        self._capacity, self._generation = 0, 0
        self._known = [0] * num_ranks
        self._aborted = False
        self._fence_lock = threading.Lock()
        self._maps: list[mmap.mmap] = []
        self._words: list[memoryview] = []
        self._window: Window | None = None
        self._peers: Peers | None = None
        self._length = self._lines_at + 2 * self._line_bytes
        self._page_file = -1
        try:
            self._step(self._make_page, gather)
            self._step(lambda: self._connect(gather), gather)
        except BaseException:
            self.close()
            raise
        finally:
            if self._page_file >= 0:
                os.close(self._page_file)

    def gather(self, where: str, line: bytes) -> list[bytes]:
        """A line from each rank, all of one length.

        Raises:
            PeerTimeout: a rank did not come, with its number.
        """
        assert len(line) <= self._line_bytes, f"a line of {len(line)} bytes"
        # Two places in turn: who writes a third line knows that all have read the first.
        at = self._lines_at + self._gathers % 2 * self._line_bytes
        self._gathers += 1
        self._round += 1
        self._maps[self.rank][at : at + len(line)] = line
        self._post(_READY, self._round)
        self._wait(_READY, self._round, where)
        return [item[at : at + len(line)] for item in self._maps]

    def share(
        self,
        where: str,
        tables: Sequence[tuple[int, torch.Tensor]],
        fill: Callable[[list[torch.Tensor]], object],
        starts: Sequence[int] = (),
    ) -> Shared:
        """Lays tables down and returns when all ranks have; call `done` after reading.

        Args:
            where: operation, for messages.
            tables: (number of rows, a 2-D tensor with such rows) of each table; the same kinds of rows on all ranks.
            fill: writes the tables, given as views [number of rows, columns] of this rank's segment.
            starts: a number for each rank to read.

        Raises:
            PeerTimeout: a rank did not come, with its number.
            SharedMemoryError: on every rank, where one can not reserve the memory.
        """
        assert self._window is not None and len(tables) <= _NUM_BASES
        self._round += 1
        self._wait(_DONE, self._last_share, where)
        self._last_share = self._round
        words, problem = self._words[self.rank], None
        need = sum((num_rows + 1) * row_bytes(like) for num_rows, like in tables)
        try:
            self._grow(need)
        except CommError as error:
            problem = error
            text = f"rank {self.rank}: {error}".encode()[:_TEXT_BYTES]
            at = self._text_at()
            self._maps[self.rank][at : at + len(text)] = text
            words[_REFUSED] = len(text)
        else:
            words[_REFUSED] = 0
            fill(self._lay_out(tables))
            for peer, start in enumerate(starts):
                words[_STARTS + peer] = start
        self._post(_READY, self._round)
        self._wait(_READY, self._round, where)
        self._check_refusals(where, problem)
        self._update_window()
        return Shared(
            self._window,
            [list(item[_BASES : _BASES + len(tables)]) for item in self._words],
            [list(item[_STARTS : _STARTS + len(self.ranks)]) for item in self._words],
        )

    def done(self) -> None:
        """Nothing that was shared last is read any more by this rank."""
        self._post(_DONE, self._round)

    def fail(self) -> None:
        """Tells the other ranks that this one will not answer any more."""
        if self._words and self._words[self.rank][_STATE] == _OPEN:
            self._post(_STATE, _FAILED)

    def abort(self) -> None:
        """Ends waits of this rank under way in another thread, and tells the other ranks."""
        self._aborted = True
        self.fail()

    def close(self) -> None:
        """Leaves: frees memory and connections. No thread may be in a call; idempotent."""
        if self._words and self._words[self.rank][_STATE] == _OPEN:
            self._post(_STATE, _LEFT)
        for words in self._words:
            words.release()
        for item in self._maps:
            item.close()
        self._words, self._maps = [], []
        if self._window is not None:
            self._window.close()
        if self._peers is not None:
            self._peers.close()

    def _step(self, step: Callable[[], None], gather: Gather) -> None:
        """A step of building: raises on every rank where it fails on one."""
        problem = None
        try:
            step()
        except CommError as error:
            problem = error
        said = gather(None if problem is None else str(problem))
        reasons = "; ".join(f"rank {peer}: {text}" for peer, text in enumerate(said) if text is not None)
        if reasons:
            raise problem or CommError(f"memory of group {self.ranks} can not be shared because of {reasons}")

    def _make_page(self) -> None:
        self._page_file = make_file(self._length)

    def _connect(self, gather: Gather) -> None:
        """Connects to the others and maps their control pages."""
        num_ranks = len(self.ranks)
        self._peers = Peers(self.rank, num_ranks, gather, self.timeout)
        for peer in self._others:
            self._peers.send_file(peer, self._page_file, 0, self._length)
        for peer in range(num_ranks):
            own = peer == self.rank
            handle = self._page_file if own else self._peers.take_file(peer)[0]
            rights = mmap.PROT_READ | (mmap.PROT_WRITE if own else 0)
            self._maps.append(mmap.mmap(handle, self._length, mmap.MAP_SHARED, rights))
            self._words.append(memoryview(self._maps[-1])[: 8 * (_STARTS + num_ranks)].cast("q"))
            if not own:
                os.close(handle)
        self._window = Window(num_ranks)

    def _grow(self, need: int) -> None:
        """Replaces the own segment by a larger one where it has to be."""
        assert self._window is not None and self._peers is not None
        if need <= self._capacity:
            return
        most = self._window.stride
        if need > most:
            raise CommError(f"{need} bytes in one call; a segment has room for {most}; send fewer tokens a call")
        size = min(most, max(2 * self._capacity, -(-need // _FIRST_BYTES) * _FIRST_BYTES))
        handle = make_file(size)
        try:
            self._window.place(self.rank, handle, size, writable=True)
            self._generation += 1
            for peer in self._others:
                self._peers.send_file(peer, handle, self._generation, size)
        finally:
            os.close(handle)
        self._capacity = size
        self._words[self.rank][_GENERATION] = self._generation

    def _lay_out(self, tables: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        """Places of the tables in the own segment, each beginning at a whole row of its window."""
        assert self._window is not None
        views = []
        at = self.rank * self._window.stride
        for index, (num_rows, like) in enumerate(tables):
            base = -(-at // row_bytes(like))
            self._words[self.rank][_BASES + index] = base
            views.append(self._window.rows(like)[base : base + num_rows])
            at = (base + num_rows) * row_bytes(like)
        return views

    def _update_window(self) -> None:
        """Maps the new segments of the others."""
        assert self._window is not None and self._peers is not None
        for peer in self._others:
            while self._known[peer] < self._words[peer][_GENERATION]:
                handle, self._known[peer], size = self._peers.take_file(peer)
                try:
                    self._window.place(peer, handle, size, writable=False)
                finally:
                    os.close(handle)

    def _check_refusals(self, where: str, problem: CommError | None) -> None:
        reasons = []
        for item, words in zip(self._maps, self._words, strict=True):
            if words[_REFUSED]:
                at = self._text_at()
                reasons.append(item[at : at + words[_REFUSED]].decode(errors="replace"))
        if reasons:
            self.done()
            raise SharedMemoryError(
                f"{self._who(where)} failed on every rank because of {'; '.join(reasons)}"
            ) from problem

    def _text_at(self) -> int:
        return 8 * (_STARTS + len(self.ranks))

    def _post(self, word: int, value: int) -> None:
        self._fence()
        self._words[self.rank][word] = value

    def _fence(self) -> None:
        """Stores made before are seen before those made after."""
        with self._fence_lock:
            pass
        with self._fence_lock:
            pass

    def _wait(self, word: int, target: int, where: str) -> None:
        self.wait_for(where, self._others, lambda peers: [peer for peer in peers if self._words[peer][word] < target])

    def wait_for(self, where: str, peers: list[int], missing: Callable[[list[int]], list[int]]) -> None:
        """Waits until every one of `peers` has written something; any thread may.

        Args:
            where: operation, for messages.
            peers: ranks to wait for.
            missing: those of a list of ranks that have not written it yet.

        Raises:
            PeerTimeout: a rank did not come in time or never will, with its number.
        """
        pending = missing(peers)
        start = time.monotonic()
        looked, spins, pause = start, 0, _SHORTEST
        while pending:
            now = time.monotonic()
            if self._aborted:
                raise CommError(f"{self._who(where)} was given up because the buffer is closed")
            if now - looked > _LIVENESS or now - start > self.timeout:
                self._raise_if_lost(missing, where, pending)
                looked = now
            if now - start > self.timeout:
                names = ", ".join(f"rank {peer}" for peer in pending)
                raise PeerTimeout(
                    f"{self._who(where)} got no answer from {names} within {self.timeout:g} s; check that every rank "
                    "is alive and makes the same calls, or raise num_cpu_timeout_secs"
                )
            if spins < _SPINS:
                time.sleep(0)
            else:
                time.sleep(pause)
                pause = min(_LONGEST, 1.5 * pause)
            spins += 1
            pending = missing(pending)
        self._fence()

    def fence(self) -> None:
        """Stores that this rank made before are seen before those it makes after."""
        self._fence()

    def hand_over(self, handle: int, num_bytes: int) -> list[int]:
        """Gives a file to every other rank and takes theirs: their descriptors by rank, -1 for this one. Collective.

        The caller closes them. Runs where `share` runs, so that files of segments do not come in between.
        """
        assert self._peers is not None
        self._update_window()
        for peer in self._others:
            self._peers.send_file(peer, handle, -1, num_bytes)
        return [-1 if peer == self.rank else self._peers.take_file(peer)[0] for peer in range(len(self.ranks))]

    def _raise_if_lost(self, missing: Callable[[list[int]], list[int]], where: str, pending: list[int]) -> None:
        """Raises where a rank that has not answered never will."""
        assert self._peers is not None
        for peer in pending:
            state, gone = self._words[peer][_STATE], self._peers.ended(peer)
            # A rank may answer and then leave: its word was written before.
            if (state == _OPEN and not gone) or not missing([peer]):
                continue
            who = f"{self._who(where)} waits for rank {peer}, which"
            if gone and state == _OPEN:
                raise PeerTimeout(f"{who} has ended (its process is gone); look at its own error first")
            if state == _LEFT:
                raise PeerTimeout(f"{who} has closed its buffer; close buffers on all ranks of a group together")
            raise PeerTimeout(f"{who} has given up; look at its own error first")

    def _who(self, where: str) -> str:
        return f"{where} on rank {self.rank} of group {self.ranks}"
