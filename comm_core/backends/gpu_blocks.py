"""The low-latency calls on the gpu backend: fixed shapes, no host wait, two halves, replayable in a graph as they are.

A call's first half sends, or lays down, what this rank has for the others; its second half takes what has come.
Without a receive hook both are one launch. The memory of a call is used again two calls later, so two results of each
kind may be outstanding. Kernels: kernels/low_latency.cuh.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from comm_core.backends.base import BlocksJob
from comm_core.backends.gpu_channel import GpuChannel
from comm_core.event import EventHandle
from comm_core.kernels import library as abi
from comm_core.layout import align
from comm_core.runtime import device as devices
from comm_core.runtime.errors import UsageError

DISPATCH, COMBINE = 0, 1
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HEADER_BYTES = 2 * 2 * abi.MAX_RANKS * abi.HEADER_WORDS * 4
_ALIGNMENT = 256
_ROW_ALIGNMENT = 128
_MAX_HEIGHT = 8192
# Results of a kind that may wait for their second half.
_OUTSTANDING = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides where things lie; the same on all ranks.

    Attributes:
        max_tokens: bound of tokens a rank.
        num_topk, num_local: lanes of a token, experts of a rank.
        row_bytes: of a row sent, scales and record included.
        answer_bytes: of a row that comes back.
    """

    max_tokens: int
    num_topk: int
    num_local: int
    row_bytes: int
    answer_bytes: int

    def places(self, num_ranks: int) -> tuple[Any, int]:
        """(offsets for the kernels, bytes of the segment)."""
        answer_rows = self.max_tokens * num_ranks * min(self.num_topk, self.num_local)
        table = 2 * num_ranks * 4
        sizes = {
            "headers": _HEADER_BYTES,
            "done": 2 * 2 * abi.MAX_RANKS * abi.DONE_SLOTS * 4,
            "counts": table * self.num_local,
            "begins": table * self.num_local,
            "flags": table * self.max_tokens,
            "laid": table * self.num_local * self.max_tokens,
            "rows": 2 * num_ranks * self.max_tokens * self.row_bytes,
            "answers": 2 * answer_rows * self.answer_bytes,
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name], end = end, end + align(size, _ALIGNMENT)
        return abi.BlocksPlaces(**offsets, row_bytes=self.row_bytes, answer_rows=answer_rows), end


def fit(num_topk: int, num_local: int, hidden: int, height: int) -> bool:
    """True for sizes that the kernels take: their small words have 16 bits, rows are moved by 16 bytes."""
    return num_topk <= abi.MAX_TOPK and num_local <= abi.BLOCKS_EXPERTS and hidden % 16 == 0 and height <= _MAX_HEIGHT


class GpuBlocks:
    """Low-latency calls of one channel.

    Args:
        channel: whose ranks take part.
    """

    def __init__(self, channel: GpuChannel) -> None:
        self._channel = channel
        self._shape: Shape | None = None
        self._places: Any = None
        # Calls made of each kind, and which of them still wait for their second half.
        self._made = [0, 0]
        self._open: list[set[int]] = [set(), set()]

    def dispatch(self, job: BlocksJob) -> Callable[[], EventHandle]:
        """Launches the first half; the function returned launches the second and gives its event.

        A whole job is launched at once; then the function only gives the event.
        """
        channel = self._channel
        channel.check_alive()
        answer_bytes = job.hidden * job.x.element_size()  # FP8 with its scales takes less: both have one shape
        row_bytes = align(answer_bytes + align(job.num_topk * 4, 16), _ROW_ALIGNMENT)
        self._prepare(Shape(job.max_tokens, job.num_topk, job.num_local, row_bytes, answer_bytes), job)
        return self._halves(DISPATCH, job, None)

    def combine(self, job: BlocksJob) -> Callable[[], EventHandle]:
        """The same for a combine."""
        channel = self._channel
        channel.check_alive()
        assert self._shape is not None, "a combine follows a dispatch"
        if (self._shape.max_tokens, self._shape.num_topk) != (job.max_tokens, job.num_topk):
            problem = UsageError(
                f"a combine of {job.max_tokens} tokens and {job.num_topk} lanes",
                allowed=f"those of the last dispatch, {self._shape.max_tokens} and {self._shape.num_topk}",
                fix="combine before a dispatch of another shape",
            )
            channel.refuse("combine", problem)
        pool = channel.pool
        return self._halves(COMBINE, job, None if pool is None else pool.place_of(job.x))

    def _prepare(self, shape: Shape, job: BlocksJob) -> None:
        """Makes room for a new shape: all ranks meet, as kernels may be using the old places."""
        if shape == self._shape:
            return
        channel = self._channel
        if any(self._open):
            problem = UsageError(
                f"a low-latency dispatch of another shape with {sum(map(len, self._open))} results outstanding",
                allowed="none",
                fix="call their hooks first",
            )
            channel.refuse("dispatch", problem)
        places, num_bytes = shape.places(channel.num_ranks)
        grows = channel.memory.sizes[abi.BLOCKS] < num_bytes
        if devices.is_capturing(channel.device) or abi.BLOCKS in channel.captured:
            raise UsageError(
                "a low-latency dispatch of a new shape in or after a captured graph",
                allowed="one of a shape that was used before",
                fix="make one call before capturing",
            )
        channel.meet_in_call("dispatch", job.settings)
        if grows:
            channel.replace(abi.BLOCKS, num_bytes)
        else:
            channel.quiesce()  # flags lie elsewhere now, where anything may be
            channel.library.clear(channel.memory.base(abi.BLOCKS), num_bytes, 0)
        channel.restart_blocks()
        self._shape, self._places = shape, places

    def _halves(self, kind: int, job: BlocksJob, lent: Any) -> Callable[[], EventHandle]:
        channel, queue = self._channel, self._channel.data_queue
        op = "combine" if kind else "dispatch"
        mine = self._made[kind]
        if mine - min(self._open[kind], default=mine) >= _OUTSTANDING:
            problem = UsageError(
                f"a low-latency {op} with {len(self._open[kind])} results outstanding",
                allowed=f"at most {_OUTSTANDING}, those of the last calls, as memory is used in turn",
                fix="call the hook of the oldest first",
            )
            channel.refuse(op, problem)
        number, hashed = channel.number(op, job.settings, job.problem)
        call = self._call(kind, job, number, hashed, lent)
        tensors = [item for item in job.tensors() if item is not None]
        library, num_blocks = channel.library, min(channel.num_sms, abi.DONE_SLOTS)

        def launch(half: str) -> EventHandle:
            stream = devices.raw_stream(queue.stream)
            return queue.submit(
                lambda: library.launch_half(half, call, kind, num_blocks, stream),
                after=() if half == "recv" else job.after,
                tensors=tensors,
                on_failure=channel.note_failure,
            )

        if devices.is_capturing(channel.device):
            channel.captured.add(abi.BLOCKS)
        self._made[kind] += 1
        if job.whole:
            event = launch("whole")
            return lambda: event
        launch("send")
        self._open[kind].add(mine)
        done: list[EventHandle] = []

        def second() -> EventHandle:
            if not done:  # a hook may be called again, and finds its result
                done.append(launch("recv"))
                self._open[kind].discard(mine)
            return done[0]

        return second

    def _call(self, kind: int, job: BlocksJob, number: int, hashed: int, lent: Any) -> Any:
        scales, memory = job.out_scales, self._channel.memory
        near = min(self._channel.num_ranks, abi.NEAR_RANKS)
        bases = [[memory.base(which, rank) for rank in range(near)] for which in (abi.POOL, abi.BLOCKS)]
        flat = [base for line in bases for base in [*line, *[0] * (abi.NEAR_RANKS - near)]]
        return abi.BlocksCall(
            channel=self._channel.header(number),
            places=self._places,
            near=(ctypes.c_uint64 * len(flat))(*flat),
            lent=lent or abi.Place(),
            x=job.x.data_ptr(),
            topk_idx=job.topk_idx.data_ptr(),
            topk_weights=0 if job.weights is None else job.weights.data_ptr(),
            positions=job.positions.data_ptr(),
            seq=job.seq.data_ptr() + 4 * kind,
            out_x=job.out_x.data_ptr(),
            out_scales=0 if scales is None else scales.data_ptr(),
            src_info=job.src_info.data_ptr(),
            ranges=job.ranges.data_ptr(),
            counts=job.counts.data_ptr(),
            stats=0 if job.stats is None else job.stats.data_ptr(),
            scale_expert_stride=0 if scales is None else scales.stride(0),
            scale_col_stride=0 if scales is None else scales.stride(2),
            hash=hashed,
            is_lent=lent is not None,
            num_tokens=job.topk_idx.shape[0],
            num_topk=job.num_topk,
            num_local=job.num_local,
            max_tokens=job.max_tokens,
            height=job.height,
            hidden=job.hidden,
            dtype=_DTYPES.index(job.x.dtype),
            fp8=job.fp8,
            scale_words=0 if scales is None else scales.shape[2],
        )
