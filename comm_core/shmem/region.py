"""Memory of a fixed size that each rank owns a part of: the other ranks read it, its owner says when.

`SymmetricHeap.share` is a round that all ranks make together. Here a rank lays a message down and goes on; the rank it
is for picks it up when it likes, the others need not know. So there is a count for each lane and pair of ranks instead
of a common round: how many messages the sender has laid down, and how many of them the receiver has given back. Each
count has one writer and only grows.

A message stays in its sender's memory and is read from there, once. The memory of another rank is mapped for reading.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence

import torch

from comm_core.runtime.errors import CommError
from comm_core.shmem.posix import SharedMemoryError, SymmetricHeap
from comm_core.shmem.segment import Window, make_file

_PAGE = mmap.PAGESIZE
_TEXT_BYTES = 512


class SharedRegion:
    """One rank's view of a region; see `backends.base.Region` for its operations. Building is collective.

    Args:
        heap: what the ranks of the group share already.
        where: operation, for messages.
        num_bytes: size of each rank's part.
        num_lanes: lanes of messages between each pair of ranks.
        check_alive: raises where the ranks can not communicate any more.

    Raises:
        SharedMemoryError: on every rank, where one can not reserve or map the memory.
    """

    def __init__(
        self, heap: SymmetricHeap, where: str, num_bytes: int, num_lanes: int, check_alive: Callable[[], None]
    ) -> None:
        self._heap, self._check_alive, self.num_bytes = heap, check_alive, num_bytes
        self.rank, self._num_ranks = heap.rank, len(heap.ranks)
        self._num_lanes = num_lanes
        self._data_at = -(-16 * num_lanes * self._num_ranks // _PAGE) * _PAGE
        self._length = self._data_at + max(1, -(-num_bytes // _PAGE)) * _PAGE
        self._taken = [[0] * self._num_ranks for _ in range(num_lanes)]
        self._words: list[memoryview] = []
        self._heads: list[mmap.mmap] = []
        self._window: Window | None = None
        self.local, self._file = torch.empty(0, dtype=torch.uint8), -1
        try:
            self._agree(where, self._reserve)
            self._agree(where, self._map)
        except BaseException:
            self.close()
            raise
        finally:
            if self._file >= 0:
                os.close(self._file)

    def put(self, where: str, lane: int, peers: Sequence[int], at: int, data: torch.Tensor) -> None:
        """Lays a message for some ranks down in the own memory and tells them."""
        self._check_alive()
        place = self.local[at : at + data.numel()]
        if place.data_ptr() != data.data_ptr():
            place.copy_(data)
        self._heap.fence()
        for peer in peers:
            self._words[self.rank][self._laid(lane, peer)] += 1

    def take(self, where: str, lane: int, peer: int, at: int, out: torch.Tensor) -> None:
        """Waits for the next message of a rank and copies it."""
        self._check_alive()
        count = self._taken[lane][peer] + 1
        self._wait_for(where, [peer], self._laid(lane, self.rank), count)
        self._taken[lane][peer] = count
        out.copy_(self._memory(peer)[at : at + out.numel()])

    def release(self, lane: int, peers: Sequence[int]) -> None:
        """Gives back to some ranks the places of all messages that were taken from them."""
        self._heap.fence()
        for peer in peers:
            self._words[self.rank][self._back(lane, peer)] = self._taken[lane][peer]

    def settle(self, where: str, lane: int, peers: Sequence[int], unreleased: int = 0) -> None:
        """Waits until some ranks have given back all messages laid down for them but the last few."""
        self._check_alive()
        for peer in peers:
            target = self._words[self.rank][self._laid(lane, peer)] - unreleased
            self._wait_for(where, [peer], self._back(lane, self.rank), target)

    def read(
        self, op: str, settings: Mapping[str, int], owner: torch.Tensor, row: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Reads rows of the tables at the beginning of the ranks' memory; needs nothing of the other ranks."""
        self._check_alive()
        width = out.shape[1]
        for peer in range(self._num_ranks):
            here = torch.nonzero(owner == peer).flatten()
            if here.numel() and width:
                table = self._memory(peer)[: self.num_bytes // width * width].view(-1, width)
                out[here] = table.index_select(0, row[here])

    def close(self) -> None:
        """Lets go of the memory; what tensors over the own part still hold stays until they are gone. Idempotent."""
        for words in self._words:
            words.release()
        for head in self._heads:
            head.close()
        if self._window is not None:
            self._window.close()
        self._words, self._heads, self._window = [], [], None
        self.local = torch.empty(0, dtype=torch.uint8)

    def _laid(self, lane: int, receiver: int) -> int:
        """Place of a sender's count of messages for `receiver` among its words."""
        return lane * self._num_ranks + receiver

    def _back(self, lane: int, sender: int) -> int:
        """Place of a receiver's count of messages given back to `sender` among its words."""
        return (self._num_lanes + lane) * self._num_ranks + sender

    def _memory(self, peer: int) -> torch.Tensor:
        if peer == self.rank:
            return self.local
        assert self._window is not None
        begin = peer * self._length + self._data_at
        return self._window.memory[begin : begin + self.num_bytes]

    def _wait_for(self, where: str, peers: list[int], word: int, target: int) -> None:
        self._heap.wait_for(where, peers, lambda some: [peer for peer in some if self._words[peer][word] < target])

    def _reserve(self) -> None:
        self._file = make_file(self._length)

    def _map(self) -> None:
        """Maps the own memory for writing and that of the others for reading."""
        files = self._heap.hand_over(self._file, self._length)
        try:
            own = mmap.mmap(self._file, self._length, mmap.MAP_SHARED)
            # Tensors over the own part keep the mapping: it is gone with the last of them.
            self.local = torch.frombuffer(own, dtype=torch.uint8)[self._data_at : self._data_at + self.num_bytes]
            self._window = Window(self._num_ranks, self._length)
            for peer, handle in enumerate(files):
                if peer == self.rank:
                    self._words.append(memoryview(own)[: self._data_at].cast("q"))
                    continue
                self._window.place(peer, handle, self._length, writable=False)
                self._heads.append(mmap.mmap(handle, self._data_at, mmap.MAP_SHARED, mmap.PROT_READ))
                self._words.append(memoryview(self._heads[-1]).cast("q"))
        except OSError as error:
            raise CommError(f"{self._length} bytes can not be mapped: {error}") from error
        finally:
            for handle in files:
                if handle >= 0:
                    os.close(handle)

    def _agree(self, where: str, step: Callable[[], None]) -> None:
        """A step of building: raises on every rank where it fails on one."""
        problem = None
        try:
            step()
        except CommError as error:
            problem = error
        text = b"" if problem is None else f"rank {self.rank}: {problem}".encode()[:_TEXT_BYTES]
        said = [line.rstrip(b"\0") for line in self._heap.gather(where, text.ljust(_TEXT_BYTES, b"\0"))]
        reasons = "; ".join(line.decode(errors="replace") for line in said if line)
        if reasons:
            raise SharedMemoryError(f"{where} failed on every rank because of {reasons}") from problem
