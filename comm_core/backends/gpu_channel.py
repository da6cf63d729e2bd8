"""The device side of one process group: symmetric memory, numbered calls, and what the host hears of them.

Every operation begins with an exchange of headers between the devices. In it stand the number and a hash of the
call's settings, and whether a rank refuses its call. So a disagreement is found where the data would move, nothing
moves, and a word of mapped host memory names the call. The host finds that word when it reads counts or makes its next
call; then all ranks meet on the control group (gloo) to say what differs, and the channel works on. In the usual case
the host takes part in nothing but the reading of counts, from mapped memory.

A rank that does not come is found by the waits of the kernels: each ends by itself, names the peer in mapped memory,
and everything behind it ends at once. The channel is broken then; the device's context is not.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from comm_core.backends.channel import Agreement, Channel
from comm_core.backends.gpu_pool import SymmetricPool
from comm_core.backends.gpu_records import Records, Words
from comm_core.event import EventHandle
from comm_core.kernels import library as abi
from comm_core.kernels.library import Library, load
from comm_core.layout import align
from comm_core.runtime import device as devices
from comm_core.runtime import env
from comm_core.runtime.errors import ClosedError, CommError, MTMoEError, PeerTimeout, UnavailableError, UsageError
from comm_core.shmem.ipc import PeerMemory

# Calls whose settings are kept for an error that may still come; tokens a rank where no bound is given.
_REMEMBERED = 256
DEFAULT_BOUND = 65536
# The host waits this much longer than the device, so that the device can name the peer.
_GRACE_SECONDS = 1.0
# Segments are multiples of this.
_GRANULE = 1 << 21


@dataclass(slots=True)
class Call:
    """One call as the host remembers it.

    Attributes:
        op: its name.
        settings: what must be equal on all ranks.
        problem: gives what is wrong with it on this rank, or None; asked only where something is.
        error: the error it ended with.
        where: of a move of a region: what it is, in words.
        behind: of a move: number of the last call before it; calls after it are void where it went wrong.
    """

    op: str
    settings: dict[str, int]
    problem: Callable[[], UsageError | None]
    error: MTMoEError | None = None
    where: str = ""
    behind: int | None = None


class GpuChannel(Channel):
    """A channel whose rows travel by kernels over symmetric memory.

    Attributes:
        library: the kernels.
        device_timeout: bound of the kernels' waits in seconds (EP_GPU_TIMEOUT_SECS, else the buffer's).
        memory: segments of the ranks.
        blocks: the low-latency calls.
        regions: memory for messages and stored entries.
        records: mapped memory for counts.
        pool: symmetric tensors, where they were asked for.
        num_sms: multiprocessors of the device.
        ticks_per_second: of the kernels' timer.
        captured: segments whose addresses are in a captured graph; they must stay where they are.
    """

    _shared: ClassVar[dict[tuple[dist.ProcessGroup, torch.device, float], Channel]] = {}
    has_data_group = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        super().__init__(group, device, timeout)
        self.issued = 0
        self.device_timeout = env.device_timeout_seconds() or timeout
        self._comparing = False
        # Ids of the last layouts: a mistake in them may be found after their handle is gone.
        self.recent_ids: deque[torch.Tensor] = deque(maxlen=8)
        self.captured: set[int] = set()
        self.pool: SymmetricPool | None = None
        # GpuBlocks and GpuRegions, which the first backend of the channel makes.
        self.blocks: Any = None
        self.regions: Any = None
        self._log: dict[int, Call] = {}
        try:
            self.library = self._loaded()
            index = int(device.index or 0)
            self.num_sms, self.ticks_per_second = self.library.properties(index)
            self.memory = PeerMemory(self.library, index, self.rank, self.num_ranks, self.meet)
            counts = abi.REC_TABLES + self.num_ranks * (self.num_ranks + 1) + abi.MAX_LOCAL_EXPERTS
            self.records = Records(self.library, counts)
            self.fault = self.records.fault
        except BaseException:
            self.data_queue.close(1.0)
            self.control_queue.close(1.0)
            if dist.is_initialized():
                dist.destroy_process_group(self.control_group)
            raise
        self._state = self.memory.base(abi.CONTROL) + abi.AT_STATE

    def release(self, *, wait: bool) -> None:
        """Gives the channel back; the last user frees memory, group and threads."""
        if self._users == 1:
            together = wait and self.broken is None and dist.is_initialized()
            if together:
                devices.synchronize(self.device)
                self.meet(None)
                if self.pool is not None:
                    self.pool.close()
                if self.regions is not None:
                    self.regions.close()
            self.memory.close(collective=together)
            if together:
                self.records.close()
        super().release(wait=wait)

    def meet(self, value: Any) -> list[Any]:
        """Gathers an object from each rank on the control group.

        Raises:
            CommTimeoutError, CommError: a rank did not come.
        """
        found: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(found, value, group=self.control_group)
        except RuntimeError as error:
            self.broken = self._translated(
                "meeting the other ranks", error, self._roll_call.missing("meeting the other ranks")
            )
            raise self.broken from error
        return found

    def header(self, number: int) -> Any:
        """The part of a kernel call that says who is who."""
        return abi.Channel(
            state=self._state,
            peers=self.memory.peers,
            fault=self.fault.device,
            timeout_ticks=int(self.device_timeout * self.ticks_per_second),
            rank=self.rank,
            num_ranks=self.num_ranks,
            number=number,
        )

    def number(self, op: str, settings: dict[str, int], problem: Callable[[], UsageError | None]) -> tuple[int, int]:
        """Notes the next call: (its number, the hash of what must be equal)."""
        self.issued += 1
        self._log[self.issued] = Call(op, settings, problem)
        self._log.pop(self.issued - _REMEMBERED, None)
        text = repr((op, sorted(settings.items())))
        return self.issued, zlib.crc32(text.encode())

    def call_of(self, number: int) -> Call:
        """A call that was made, or a move of a region; one long gone has no settings any more."""
        found = self._log.get(number) or (self.regions.call_of(number) if self.regions is not None else None)
        return found or Call("barrier", {}, lambda: None)

    def refuse(self, op: str, problem: UsageError) -> NoReturn:
        """Takes part in a call only to say that it is wrong here."""
        self.check_alive()
        number = self.launch_barrier(op, {}, problem)
        self.resolve(number)

    def launch_barrier(self, op: str, settings: dict[str, int], problem: UsageError | None) -> int:
        """Launches a call without rows on the comm stream; with a problem it says that the call is refused."""
        number, hashed = self.number(op, settings, lambda: problem)
        status = abi.OK if problem is None else abi.REFUSED
        stream = devices.raw_stream(self.data_queue.stream)
        self.library.launch("barrier", abi.BarrierCall(channel=self.header(number), hash=hashed, status=status), stream)
        return number

    def check_open(self) -> None:
        """Raises ClosedError where mapped memory is gone."""
        if not self._users:
            raise ClosedError("the buffer that made this handle is closed; build a new one on every rank of its group")

    def check_alive(self) -> None:
        """Raises where a wait of a kernel ended in vain, or where an earlier call turned out to be wrong."""
        super().check_alive()
        if self._comparing:
            return
        if self.fault.at[abi.FAULT_SET]:
            self._lost()
        if self.fault.at[abi.FAULT_DIFFERENT]:
            self.resolve(int(self.fault.at[abi.FAULT_DIFFERENT]))

    def wait(self, record: Words, number: int) -> None:
        """Waits until a record is written, without the interpreter lock.

        Raises:
            PeerTimeout: a rank did not come.
        """
        seconds = max(self.timeout, self.device_timeout) + _GRACE_SECONDS
        ended = self.library.wait_word(record.host, self.fault.host, seconds)
        if ended == 0:
            return
        if ended == 3:
            # An earlier call went wrong: the others may be meeting about it already, and not make this one.
            self.resolve(int(self.fault.at[abi.FAULT_DIFFERENT]))
        if not self.fault.at[abi.FAULT_SET]:
            call = self.call_of(number)
            self.broken = PeerTimeout(
                f"{call.op} (call {number}) on rank {self.rank} of group {self.ranks}: the device has not finished it "
                f"within {seconds:g} s; work in front of it on the comm stream may be waiting for something else"
            )
            raise self.broken
        self._lost()

    def resolve(self, number: int) -> NoReturn:
        """Meets all ranks about a call that differs between them or is wrong on one; raises what is wrong with it.

        Calls made after it, which some ranks may have issued before they noticed, are void on all ranks.
        """
        call = self.call_of(number)
        if call.error is not None:
            raise call.error
        last = number if call.behind is None else call.behind
        self._calls = number - 1 if call.behind is None else last
        rows = [0] * self.num_ranks
        error: MTMoEError
        try:
            self._compare(call.op, call.settings, call.problem(), rows)
            error = CommError(f"{call.op} (call {number}) was refused by a rank of group {self.ranks}")
            self._agreed.add(error)
        except MTMoEError as found:
            error = found
        call.error = error
        if self.broken is None:
            self._settle()
            for later in range(last + 1, self.issued + 1):
                self.call_of(later).error = CommError(f"call {later} is void: it followed call {last}: {error}")
        raise error

    def agreed(self, error: Exception) -> None:
        """Notes an error behind which the channel works on: all ranks have it, or nobody waits because of it."""
        self._agreed.add(error)

    def _compare(self, op: str, settings: dict[str, int], problem: UsageError | None, rows: list[int]) -> Agreement:
        """Compares a call on the host, in the control thread, where other exchanges of the control group run."""
        self._comparing = True  # the exchange asks whether the channel is alive
        try:
            said: Agreement = self.control_queue.submit(lambda: self.agree(op, settings, problem, 0, rows)).result()
            return said
        finally:
            self._comparing = False

    def replace(self, which: int, num_bytes: int) -> None:
        """Replaces a segment behind `meet_in_call` (collective)."""
        self.data_queue.stream.synchronize()
        self.memory.make(which, max(self.meet(align(num_bytes, _GRANULE))))

    def quiesce(self) -> None:
        """Returns when everything issued is done on all ranks (collective, behind `meet_in_call`)."""
        self.data_queue.stream.synchronize()
        self.meet(None)

    def restart_blocks(self) -> None:
        """Low-latency calls are numbered from 1 again, as their flags in a new segment are."""
        self.library.clear(self._state + abi.State.blocks_seq.offset, 8, 0)
        devices.synchronize(self.device)
        self.meet(None)

    def meet_in_call(self, op: str, settings: dict[str, int]) -> Agreement:
        """Meets all ranks in one call before they do something on the host; raises on all where one is elsewhere."""
        self._calls = self.issued
        try:
            return self._compare(op, settings, None, [0] * self.num_ranks)
        except MTMoEError:
            if self.broken is None:
                self._settle()
            raise

    def _settle(self) -> None:
        """Behind an error that all ranks have: brings them to the same call number with nothing under way."""
        last = max(self.meet(self.issued))
        void = UsageError("a call behind one that failed", allowed="none until it is settled", fix="see its error")
        while self.issued < last:
            self.launch_barrier("barrier", {}, void)
        self.data_queue.stream.synchronize()
        self.library.clear(self._state + abi.State.differed.offset, 4, 0)
        devices.synchronize(self.device)
        self.fault.at[abi.FAULT_DIFFERENT] = 0
        self.meet(None)
        if self.regions is not None:
            self.regions.resume()

    def submit(
        self, launch: Callable[[], object], after: Iterable[EventHandle | None], tensors: Sequence[torch.Tensor]
    ) -> EventHandle:
        """Launches an operation on the comm stream; `tensors` are kept from reuse until it is past them.

        In a captured graph, replayed among calls that the host does not know of, a call without rows goes in front and
        another follows: what the graph lays down is laid where nobody reads any more, and read before others go on.
        """

        def fenced() -> None:
            self.captured.add(abi.RING)
            self.launch_barrier("barrier", {}, None)
            launch()
            self.launch_barrier("barrier", {}, None)

        capturing = devices.is_capturing(self.device)
        return self.data_queue.submit(
            fenced if capturing else launch, after=after, tensors=tensors, on_failure=self.note_failure
        )

    def reserve(self, num_bytes: int) -> None:
        """Makes the pool of symmetric tensors, where there is none yet (collective).

        Raises:
            UnavailableError: on every rank, where one has no memory.
        """
        if self.pool is None:
            self.meet_in_call("barrier", {})
            self.replace(abi.POOL, num_bytes)
            base, size = self.memory.base(abi.POOL), self.memory.sizes[abi.POOL]
            self.pool = SymmetricPool(self.library, self.device, base, size)

    def make_room(self, which: int, num_bytes: int, op: str, settings: dict[str, int]) -> None:
        """Makes a segment at least this large, all ranks in the same call. Settings are compared on the host then.

        Raises:
            CommError: on every rank, where they disagree, one refuses the call, or one is out of memory.
        """
        num_bytes = align(num_bytes, _GRANULE)
        if self.memory.sizes[which] >= num_bytes:
            return
        if which in self.captured or devices.is_capturing(self.device):
            raise UsageError(
                f"{num_bytes} bytes of symmetric memory in or after a captured graph",
                allowed=f"{self.memory.sizes[which]}, as the graph has the addresses",
                fix="make the largest call once before capturing",
            )
        self.meet_in_call(op, settings)
        self.replace(which, num_bytes)

    def _loaded(self) -> Library:
        library: Library | None = None
        problem = None
        try:
            library = load(devices.platform(self.device), devices.architecture(self.device))
        except MTMoEError as error:
            problem = str(error)
        found = [f"rank {rank}: {text}" for rank, text in enumerate(self.meet(problem)) if text is not None]
        if found or library is None:
            raise UnavailableError(f"the kernels are not there on every rank of group {self.ranks}: {'; '.join(found)}")
        return library

    def _lost(self) -> NoReturn:
        number, peer = int(self.fault.at[abi.FAULT_NUMBER]), int(self.fault.at[abi.FAULT_PEER])
        call = self.call_of(number)
        what = call.where or f"{call.op} (call {number})"
        self.broken = PeerTimeout(
            f"{what} on rank {self.rank} of group {self.ranks} got no answer from rank {peer} within "
            f"{self.device_timeout:g} s; check that every rank is alive and makes the same calls, or raise "
            "num_cpu_timeout_secs. The device's context is usable; close the buffer and build a new one"
        )
        raise self.broken
