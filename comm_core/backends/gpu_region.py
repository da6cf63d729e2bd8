"""Regions of devices: pipeline messages, all-gather sessions and stored entries over memory that ranks share by IPC.

A message is pushed: its bytes go straight to their place in the receiver's part, then a word there is raised. The
receiver waits for the word; where it wants the message at its place, as all-gathers do, nothing is left to move. When
it is done with a place it raises a word in the sender's part. So each rank waits for words of its own memory alone,
every word has one writer, and its numbers only grow. Stored entries are read where they lie.

What uses multiprocessors: raising and awaiting words, kernels of one small block each (an await keeps its block until
the message is there), and `read`, a gather of 16 blocks. What does not: the bytes of messages. They are moved by the
runtime's asynchronous copy, which is the copy engine between devices, and on MUSA its counterpart; within one device
the runtime may choose a kernel of its own. `GpuBackend.region_sms` above 0 moves them by loads and stores of so many
blocks instead: faster where messages are small or copy engines slow.

The host issues and goes on. Numbers of messages are counted on the host, so these calls can not be recorded in a graph.
Where CUDA_DEVICE_MAX_CONNECTIONS is 1, an await holds up all that is launched behind it, on whichever stream: there the
ranks must receive in an order in which the others send.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from comm_core.kernels import library as abi
from comm_core.kernels.library import Library
from comm_core.layout import align
from comm_core.runtime import device as devices
from comm_core.runtime.errors import ClosedError, UsageError
from comm_core.shmem import foreign

if TYPE_CHECKING:
    from comm_core.backends.gpu_channel import Call, GpuChannel

# Words and data begin at multiples of a page; allocations are shared whole, so they are multiples of what one takes.
_PAGE, _GRANULE = 1 << 12, 1 << 21
# Numbers of moves in errors are above all numbers of calls.
_FIRST_MOVE = 1 << 31
_REMEMBERED = 256
_READ_BLOCKS = 16
# Calls of the comm queue, which all ranks make in one order: what one refuses the others do not wait for.
_ORDERED = {"agrs_set_config": "all_gather"}


@dataclass(slots=True)
class Shared:
    """Memory of one region.

    Attributes:
        bases: where the ranks' parts lie in this process.
        is_unused: says that no tensor is left over the own part.
    """

    bases: list[int]
    is_unused: Callable[[], bool]


class GpuRegions:
    """The regions of one channel.

    Args:
        channel: whose ranks take part.
    """

    # Own parts that no other rank has open any more, under tensors that live on: (library, address, is_unused).
    _left: ClassVar[list[tuple[Library, int, Callable[[], bool]]]] = []

    def __init__(self, channel: GpuChannel) -> None:
        self.channel = channel
        self._open: list[GpuRegion] = []
        self._closed: list[Shared] = []
        self._moves = 0
        self._log: dict[int, Call] = {}

    def open(self, backend: Any, op: str, num_bytes: int, num_lanes: int) -> GpuRegion:
        """A new region (collective), behind a comparison of the call.

        Raises:
            UnavailableError: on every rank, where one has no memory.
        """
        self.channel.check_alive()
        self._give_back()
        region = GpuRegion(self, backend, op, num_bytes, num_lanes)
        self._open.append(region)
        return region

    def note(self, op: str, where: str) -> int:
        """Remembers a move for an error that may come; its number."""
        from comm_core.backends.gpu_channel import Call

        self._moves = (self._moves + 1) % _FIRST_MOVE
        number = _FIRST_MOVE + self._moves
        self._log[number] = Call(op, {}, lambda: None, where=where, behind=self.channel.issued)
        self._log.pop(number - _REMEMBERED, None)
        return number

    def call_of(self, number: int) -> Call | None:
        """A move that was noted."""
        return self._log.get(number)

    def closed(self, region: GpuRegion, memory: Shared) -> None:
        """Takes the memory of a region that is closed, on all ranks in the same order."""
        self._open.remove(region)
        self._closed.append(memory)

    def resume(self) -> None:
        """Behind an error that all ranks have, with nothing under way (collective): what was put counts as taken."""
        ordered = [region for region in self._open if region.ordered]
        said = self.channel.meet([region.laid for region in ordered])
        for index, region in enumerate(ordered):
            region.resume([lines[index] for lines in said])

    def close(self, backend: Any = None) -> None:
        """Closes the regions of a backend, or with None all, and then gives memory back (collective)."""
        for region in [item for item in self._open if backend is None or item.backend is backend]:
            region.close()
        if backend is None:
            self._give_back()

    def _give_back(self) -> None:
        """Frees memory of closed regions (collective), but for what tensors are left over: that, when they are gone."""
        if self._closed:
            channel, closed = self.channel, self._closed
            self._closed = []
            devices.synchronize(channel.device)
            for memory in closed:
                channel.memory.close_views(memory.bases)
            channel.meet(None)
            self._left.extend((channel.library, item.bases[channel.rank], item.is_unused) for item in closed)
        for entry in [item for item in self._left if item[2]()]:
            self._left.remove(entry)
            entry[0].free(entry[1])


class GpuRegion:
    """One rank's view of a region; see `base.Region` for its operations. Made by `GpuRegions.open`.

    Args:
        regions: of the channel.
        backend: whose it is; `region_sms` says how bytes are moved.
        op: the call that opens it.
        num_bytes: size of each rank's part.
        num_lanes: lanes of messages between each pair of ranks.

    Attributes:
        ordered: all ranks make its calls in one order.
        laid: messages put, by lane and receiver.
    """

    def __init__(self, regions: GpuRegions, backend: Any, op: str, num_bytes: int, num_lanes: int) -> None:
        channel = regions.channel
        self._regions, self._channel, self.backend, self.num_bytes = regions, channel, backend, num_bytes
        self._op, self.ordered = _ORDERED.get(op, op), op in _ORDERED
        self._num_lanes, num_ranks = num_lanes, channel.num_ranks
        self._data_at = align(2 * num_lanes * num_ranks * 4, _PAGE)
        self._bases = channel.memory.allocate(align(self._data_at + max(1, num_bytes), _GRANULE))
        self.laid = [[0] * num_ranks for _ in range(num_lanes)]
        self._taken = [[0] * num_ranks for _ in range(num_lanes)]
        with torch.inference_mode(False):  # it outlives the caller's mode
            whole, is_unused = foreign.tensor_over(channel.device, self._data(channel.rank), max(1, num_bytes))
            self.local = whole[:num_bytes]
        self._memory: Shared | None = Shared(self._bases, is_unused)
        # Runtimes load a kernel where it is first launched, and may wait for all others then: no await is there yet.
        with self._stream() as stream:
            for kernel in ("region_raise", "region_await"):
                channel.library.launch(kernel, abi.RegionWords(channel=channel.header(0)), stream)

    def put(self, where: str, lane: int, peers: Sequence[int], at: int, data: torch.Tensor) -> None:
        """Moves a message to its place in the memory of some ranks and raises their words."""
        self._channel.check_alive()
        raised = []
        with self._stream() as stream:
            for peer in peers:
                self._move(self._data(peer) + at, data.data_ptr(), data.numel(), stream)
                self.laid[lane][peer] += 1
                raised.append((peer, self._laid_word(peer, lane, self._channel.rank), self.laid[lane][peer]))
            self._words("region_raise", where, raised, stream)

    def take(self, where: str, lane: int, peer: int, at: int, out: torch.Tensor) -> None:
        """Waits for the next message of a rank, and moves it from its place where it is wanted elsewhere."""
        self._channel.check_alive()
        rank = self._channel.rank
        with self._stream() as stream:
            self._taken[lane][peer] += 1
            awaited = (peer, self._laid_word(rank, lane, peer), self._taken[lane][peer])
            self._words("region_await", where, [awaited], stream)
            self._move(out.data_ptr(), self._data(rank) + at, out.numel(), stream)

    def release(self, lane: int, peers: Sequence[int]) -> None:
        """Gives back to some ranks the places of all messages that were taken from them, also after an error."""
        rank = self._channel.rank
        with self._stream() as stream:
            raised = [(peer, self._back_word(peer, lane, rank), self._taken[lane][peer]) for peer in peers]
            self._words("region_raise", "giving places back", raised, stream)

    def settle(self, where: str, lane: int, peers: Sequence[int], unreleased: int = 0) -> None:
        """Waits until some ranks have given back all messages put for them but the last few."""
        self._channel.check_alive()
        rank = self._channel.rank
        with self._stream() as stream:
            awaited = [
                (peer, self._back_word(rank, lane, peer), self.laid[lane][peer] - unreleased)
                for peer in peers
                if self.laid[lane][peer] > unreleased
            ]
            self._words("region_await", where, awaited, stream)

    def read(
        self, op: str, settings: Mapping[str, int], owner: torch.Tensor, row: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Reads rows of the tables at the beginning of the ranks' parts; needs nothing of the other ranks."""
        channel, (count, width) = self._channel, out.shape
        channel.check_alive()
        with self._stream() as stream:
            if not count or not width:
                return
            call = abi.RegionRead(
                owner=owner.data_ptr(),
                row=row.data_ptr(),
                out=out.data_ptr(),
                count=count,
                num_rows=self.num_bytes // width,
                width=width,
                num_ranks=channel.num_ranks,
                num_sms=self.backend.region_sms or _READ_BLOCKS,
            )
            for peer in range(channel.num_ranks):
                call.tables[peer] = self._data(peer)
            channel.library.launch("region_read", call, stream)

    def resume(self, said: list[list[list[int]]]) -> None:
        """What the ranks said they have put counts as taken."""
        for lane, taken in enumerate(self._taken):
            taken[:] = [lines[lane][self._channel.rank] for lines in said]

    def close(self) -> None:
        """Lets go of the memory; it stays under tensors over the own part. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self.local = torch.empty(0, dtype=torch.uint8, device=self._channel.device)
            self._regions.closed(self, memory)

    def _data(self, rank: int) -> int:
        return self._bases[rank] + self._data_at

    def _laid_word(self, at: int, lane: int, sender: int) -> int:
        """Address, in the part of rank `at`, of the number of messages that `sender` has put there."""
        return self._bases[at] + 4 * (lane * self._channel.num_ranks + sender)

    def _back_word(self, at: int, lane: int, receiver: int) -> int:
        """Address, in the part of rank `at`, of the number of its messages that `receiver` has given back."""
        return self._bases[at] + 4 * ((self._num_lanes + lane) * self._channel.num_ranks + receiver)

    def _move(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        """Moves bytes behind the work of a stream; those that are there already stay."""
        if num_bytes == 0 or to == source:
            return
        if self.backend.region_sms:
            self._channel.library.copy_by_kernel(to, source, num_bytes, self.backend.region_sms, stream)
        else:
            self._channel.library.copy(to, source, num_bytes, stream)

    def _words(self, kernel: str, where: str, some: list[tuple[int, int, int]], stream: int) -> None:
        """Launches a kernel over words: (rank, address, number) each."""
        if not some:
            return
        channel = self._channel
        number = self._regions.note(self._op, where)
        call = abi.RegionWords(channel=channel.header(number), count=len(some), heed=self.ordered)
        for index, (peer, address, value) in enumerate(some):
            call.peers[index], call.words[index], call.values[index] = peer, address, value & 0xFFFFFFFF
        channel.library.launch(kernel, call, stream)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[int]:
        """The current stream of the device, for launches from this thread whatever device is its current one."""
        device = self._channel.device
        if self._memory is None:  # the call that was to open another in its place has failed, on all ranks
            raise ClosedError(f"the region of {self._op} is closed; configure it again on every rank")
        if devices.is_capturing(device):
            problem = UsageError(
                f"{self._op} while a graph is recorded",
                allowed="outside of graphs: messages are counted on the host",
                fix="make the call before or after the capture",
            )
            self._channel.agreed(problem)  # nothing was done, so nobody waits for the rest of it
            raise problem
        stream = devices.current_stream(device)
        with devices.use_stream(device, stream):
            yield devices.raw_stream(stream)
