"""Dispatch and combine by kernels over symmetric memory: CUDA, and MUSA from the same source.

Rows are pulled. A rank lays what it sends into its own symmetric memory once, and every rank reads the rows it is to
have straight into its outputs, plain or expanded: no staging where they arrive, no epilogue, one order. Outputs are
ordinary tensors of torch, so they may be resized, viewed and recorded as any other; nothing of a call has to be kept
for its results. Combine is the same the other way round: the rank of the token reads and adds.

Kernels: comm_core/kernels. Who waits for whom: kernels/sync.cuh. What the host does: gpu_channel.py, gpu_layout.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from comm_core.backends import gpu_blocks
from comm_core.backends.base import BlocksJob, Capabilities, LayoutJob, MoveJob, Region
from comm_core.backends.gpu_blocks import GpuBlocks
from comm_core.backends.gpu_channel import GpuChannel
from comm_core.backends.gpu_layout import CountsEvent, DeviceLayout, ring_half, start_layout
from comm_core.backends.gpu_region import GpuRegions
from comm_core.backends.gpu_ring import ALIGNMENT, Ring, address_of, aligned, bytes_a_row, is_dense, words_a_weight
from comm_core.event import EventHandle
from comm_core.kernels import build
from comm_core.kernels import library as abi
from comm_core.layout import align
from comm_core.runtime import device as devices
from comm_core.runtime import trace
from comm_core.runtime.errors import UsageError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Multiprocessors of a call that names none: more do not move rows over the link faster, fewer do it slower.
DEFAULT_SMS = 16
# The same where the memory of this rank is the limit and not the link: rows that are replicated, or added up, here.
REPLICATING_SMS, SUMMING_SMS = 64, 96
_DISPATCH_THREADS, _COMBINE_THREADS = 1024, 512
_POLL_SECONDS = 2e-5


class GpuBackend:
    """The backend named "gpu"; see `base.Backend` for its operations."""

    name = "gpu"
    capabilities = Capabilities(
        device_kinds=("cuda", "musa"),
        dtypes=_DTYPES,
        hidden_multiple=8,
        needs_token_bound=False,
        host_checked_kinds=(),
        fp8_kinds=("cuda", "musa"),
        worst_case_outputs=True,
        single_reduction=True,
        moves_scales=True,
        zero_copy=True,
        low_latency=True,
        region_kinds=("cuda", "musa"),
        one_sided_reads=True,
    )

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        channel = GpuChannel.acquire(group, device, timeout)
        assert isinstance(channel, GpuChannel)
        channel.blocks = channel.blocks or GpuBlocks(channel)
        channel.regions = channel.regions or GpuRegions(channel)
        self._channel, self.device = channel, device
        self.rank, self.num_ranks = channel.rank, channel.num_ranks
        self.buffer_id = channel.next_buffer_id()
        self.queue = channel.data_queue
        # Bytes a second that this rank reads from the others at most, in GB/s; None for as fast as it goes.
        self.pace_gbs: float | None = None
        # Multiprocessors that move messages of regions; 0 for the copy engine.
        self.region_sms = 0

    @staticmethod
    def why_not(kind: str) -> str | None:
        """It needs a device, and a compiler or a library compiled before."""
        if kind == "cpu":
            return "kernels need a device"
        if not devices.count(kind):
            return f"no {kind} device is visible to torch {torch.__version__}"
        return build.why_not(devices.vendor_of(kind).platform)

    def start_layout(self, job: LayoutJob) -> EventHandle:
        """Launches the count exchange; its result waits for mapped memory alone."""
        return start_layout(self._channel, job)

    def dispatch(self, job: MoveJob) -> EventHandle:
        """Pulls rows, weights and scales of the tokens routed here."""
        channel, layout = self._begin(job)
        tensors = [item for item in (job.x, job.weights, job.scales) if item is not None]
        tokens = job.handle.static_bound or max(self._counts(job).num_tokens_of)
        need = sum(align(tokens * bytes_a_row(item), ALIGNMENT) for item in tensors)
        settings = (job.settings or {}) | {"handle": self._counts_event(job).number}
        channel.make_room(abi.RING, 2 * need, job.op, settings)
        number, hashed = channel.number(job.op, settings, lambda: None)
        lent = self._lent(job.x)
        row_bytes, words = bytes_a_row(job.x), words_a_weight(job.weights)
        sms = self._sms(job, REPLICATING_SMS if job.handle.do_expand else DEFAULT_SMS)

        def launch() -> None:
            _wait(job.before_epilogue)
            ring = self._ring(number)
            out_scales, out_idx = job.out_scales, job.out_idx
            if out_idx is not None and out_idx.dtype != torch.int64:  # kernels know one width
                out_idx = torch.empty_like(out_idx, dtype=torch.int64)
            call = abi.DispatchCall(
                channel=channel.header(number),
                layout=layout.struct,
                x=lent or ring.lay(job.x),
                weights=ring.lay(job.weights) if job.weights is not None else abi.Place(),
                scales=ring.lay(job.scales) if job.scales is not None else abi.Place(),
                out_x=job.out_x.data_ptr(),
                out_idx=address_of(out_idx),
                out_weights=address_of(job.out_weights),
                out_scales=address_of(out_scales),
                scale_row_stride=0 if out_scales is None else out_scales.stride(0),
                scale_col_stride=0 if out_scales is None else out_scales.stride(1),
                num_out_rows=job.out_x.shape[0],
                ticks_per_byte=self._ticks_per_byte(),
                hash=hashed,
                lent=lent is not None,
                row_bytes=row_bytes,
                scale_words=0 if job.scales is None else job.scales.shape[1],
                weight_words=words,
                num_sms=sms,
                threads=_DISPATCH_THREADS,
                clears_rest=job.clears_rest,
            )
            with trace.span("dispatch", "ep", lane="ep", num_tokens=job.x.shape[0], bytes=job.out_x.nbytes):
                channel.library.launch("dispatch", call, ring.stream)
            if job.out_idx is not None and out_idx is not None and out_idx is not job.out_idx:
                job.out_idx.copy_(out_idx)

        return self._submit(job, launch, layout.memory())

    def combine(self, job: MoveJob) -> EventHandle:
        """Reads the rows of each token from the ranks that had them, and adds them up."""
        channel, layout = self._begin(job)
        num_topk, hidden = job.handle.num_topk, job.x.shape[1]
        if job.handle.static_bound:
            most = job.handle.static_bound * self.num_ranks
        else:
            most = max(sum(column) for column in zip(*self._counts(job).matrix, strict=True))
        words = words_a_weight(job.weights)
        need = align(most * bytes_a_row(job.x), ALIGNMENT) + align(most * num_topk * words * 4, ALIGNMENT)
        settings = (job.settings or {}) | {"handle": self._counts_event(job).number}
        channel.make_room(abi.RING, 2 * need, job.op, settings)
        number, hashed = channel.number(job.op, settings, lambda: None)
        lays = job.handle.do_expand or bool(job.handle.static_bound)
        sms = self._sms(job, SUMMING_SMS if lays else DEFAULT_SMS, at_least=1 + lays)

        def launch() -> None:
            _wait(job.before_epilogue)
            ring = self._ring(number)
            lent = None if job.handle.do_expand else self._lent(job.x)
            given = replace(job, x=aligned(job.x))  # kept until the launch
            x, weights, local, lay = self._lay_answers(given, ring, layout, most, lent)
            pullers = sms
            if lay is not None:
                pullers = max(1, sms * 3 // 8)  # the others lay down
                lay.num_sms = max(1, sms - pullers)
            biases = [*map(aligned, job.biases), None, None]
            call = abi.CombineCall(
                channel=channel.header(number),
                layout=layout.struct,
                x=x,
                weights=weights,
                local_x=local,
                out_x=job.out_x.data_ptr(),
                out_weights=address_of(job.out_weights),
                bias0=address_of(biases[0]),
                bias1=address_of(biases[1]),
                ticks_per_byte=self._ticks_per_byte(),
                hash=hashed,
                lent=lent is not None,
                hidden=hidden,
                dtype=_DTYPES.index(job.x.dtype),
                weight_words=words,
                num_sms=pullers,
                threads=_COMBINE_THREADS,
            )
            with trace.span("combine", "ep", lane="ep", num_tokens=job.out_x.shape[0], bytes=job.x.nbytes):
                if lay is None:
                    channel.library.launch("combine", call, ring.stream)
                else:
                    channel.library.combine_reduced(call, lay, ring.stream)

        return self._submit(job, launch, layout.memory())

    def blocks_fit(self, num_topk: int, num_local: int, hidden: int, height: int) -> bool:
        """True for sizes that the low-latency kernels take."""
        return gpu_blocks.fit(num_topk, num_local, hidden, height)

    def blocks_dispatch(self, job: BlocksJob) -> Callable[[], EventHandle]:
        """Launches the first half of a low-latency dispatch; the function returned launches the second."""
        return self._channel.blocks.dispatch(job)

    def blocks_combine(self, job: BlocksJob) -> Callable[[], EventHandle]:
        """The same for a low-latency combine."""
        return self._channel.blocks.combine(job)

    def reserve(self, num_bytes: int) -> None:
        """Makes room for symmetric tensors (collective)."""
        self._channel.reserve(num_bytes)

    def symmetric_memory(self) -> contextlib.AbstractContextManager[None]:
        """Context in which tensors are made in symmetric memory; needs `reserve`."""
        if self._channel.pool is None:
            raise UsageError(
                "symmetric_memory() without room", allowed="after reserve_symmetric(num_bytes)", fix="call it once"
            )
        return self._channel.pool.use()

    def barrier(self) -> EventHandle:
        """A call without rows on the comm stream; behind it everything issued before is done on all ranks."""
        self._channel.check_alive()
        event = self.queue.submit(lambda: self._channel.launch_barrier("barrier", {"buffer": self.buffer_id}, None))
        return _Checked(event, self._channel)

    def agree(self, op: str, settings: Any, *, drained: bool = False) -> EventHandle:
        """Compares a call, here and now; `drained` waits for the device first."""
        self._channel.check_alive()
        if drained:
            _Checked(self.queue.submit(lambda: None), self._channel).synchronize()
        done: Future[Any] = Future()
        done.set_result(self._channel.meet_in_call(op, dict(settings)))
        return EventHandle.of_future(done)

    def open_region(self, op: str, num_bytes: int, num_lanes: int) -> Region:
        """Memory shared by IPC (collective)."""
        return self._channel.regions.open(self, op, num_bytes, num_lanes)

    def note_failure(self, error: BaseException) -> None:
        """Later calls raise; the others find out by their timeout."""
        self._channel.note_failure(error)

    def refuse(self, op: str, problem: UsageError) -> NoReturn:
        """Takes part in the call `op` only to say that it is wrong here; raises `problem`."""
        self._channel.refuse(op, problem)

    def close(self, *, collective: bool) -> None:
        """Waits for the device and the other ranks (`collective`), then frees memory."""
        channel = self._channel
        together = collective and channel.broken is None and dist.is_initialized()
        try:
            if together:
                self.barrier().synchronize()
                channel.regions.close(self)
        finally:
            channel.release(wait=together and channel.broken is None)

    def _begin(self, job: MoveJob) -> tuple[GpuChannel, DeviceLayout]:
        self._channel.check_alive()
        return self._channel, self._counts_event(job).device_layout

    def _counts_event(self, job: MoveJob) -> CountsEvent:
        event = job.handle.event
        assert isinstance(event, CountsEvent)
        return event

    def _counts(self, job: MoveJob) -> Any:
        return self._counts_event(job).result()

    def _sms(self, job: MoveJob, automatic: int, *, at_least: int = 1) -> int:
        """Multiprocessors of a call."""
        return max(at_least, min(job.num_sms or automatic, self._channel.num_sms))

    def _ticks_per_byte(self) -> float:
        return 0.0 if self.pace_gbs is None else self._channel.ticks_per_second / (self.pace_gbs * 1e9)

    def _ring(self, number: int) -> Ring:
        return Ring(self._channel, ring_half(self._channel, number), devices.raw_stream(self.queue.stream))

    def _submit(self, job: MoveJob, launch: Any, kept: list[torch.Tensor]) -> EventHandle:
        tensors = [job.x, job.weights, job.scales, job.out_x, job.out_idx, job.out_weights, job.out_scales, *job.biases]
        return self._channel.submit(launch, job.after, [*(item for item in tensors if item is not None), *kept])

    def _lent(self, rows: torch.Tensor) -> Any:
        """Where rows lie in the pool of symmetric tensors; None for others."""
        pool = self._channel.pool
        return None if pool is None or not is_dense(rows) else pool.place_of(rows)

    def _lay_answers(
        self, job: MoveJob, ring: Ring, layout: DeviceLayout, most: int, lent: Any
    ) -> tuple[Any, Any, int, Any]:
        """Where rows and weights of a combine are laid down, and the address of those for this rank.

        The last is what the kernel has to lay down itself, None where the copy engine does it or nothing is to be done.
        """
        row_bytes, words, num_topk = bytes_a_row(job.x), words_a_weight(job.weights), job.handle.num_topk
        weights = abi.Place()
        if job.weights is not None:
            weights = ring.take(most * num_topk * words * 4)
        if lent is not None:
            if job.weights is not None and job.weights.nbytes:
                ring.copy(weights, 0, job.weights, 0, job.weights.nbytes)
            return lent, weights, job.x.data_ptr(), None
        rows = ring.take(most * row_bytes)
        if not job.handle.do_expand and not job.handle.static_bound:
            # The host knows the counts: the copy engine moves what others will read, this rank's rows stay.
            splits = self._counts(job).recv_splits
            first = sum(splits[: self.rank])
            last = first + splits[self.rank]
            for begin, end in ((0, first), (last, sum(splits))):
                if end > begin:
                    offset = begin * row_bytes
                    ring.copy(rows, offset, job.x, offset, (end - begin) * row_bytes)
            if job.weights is not None and job.weights.nbytes:
                ring.copy(weights, 0, job.weights, 0, job.weights.nbytes)
            return rows, weights, job.x.data_ptr(), None
        lay = abi.ReduceCall(
            layout=layout.struct,
            x=job.x.data_ptr(),
            rows=ring.address(rows),
            weights=address_of(job.weights),
            lane_weights=ring.address(weights) if job.weights is not None else 0,
            hidden=job.x.shape[1],
            dtype=_DTYPES.index(job.x.dtype),
            weight_words=words,
            num_ranks=self.num_ranks,
        )
        return rows, weights, ring.address(rows), lay


class _Checked(EventHandle):
    """An event whose host wait also finds what went wrong on the device."""

    def __init__(self, event: EventHandle, channel: GpuChannel) -> None:
        super().__init__(torch.device("cpu"))
        self._inner, self._channel = event, channel

    def query(self) -> bool:
        """True when the work is done."""
        return self._inner.query()

    def stream_wait(self, stream: Any) -> None:
        """Makes a stream wait."""
        self._inner.stream_wait(stream)

    def synchronize(self) -> None:
        """Blocks until the work is done, and raises what ended it."""
        while not self._inner.query():
            self._channel.check_alive()  # the others may be meeting about an earlier call, and not make this one
            time.sleep(_POLL_SECONDS)
        self._channel.check_alive()


def _wait(event: EventHandle | None) -> None:
    if event is not None:
        event.current_stream_wait()
