"""The layout of a handle that the device made: its memory, and what the host learns of it when it asks.

Kernels write rows, ids and counts into one block of device memory; a record in mapped memory tells the host the counts.
What only debugging and the V1 interface read (the plans of `comm_core.layout`) is computed from that when asked for.
"""

from __future__ import annotations

import math
import weakref
from functools import cached_property
from typing import Any

import torch

from comm_core import layout as plans
from comm_core.backends.base import LayoutJob
from comm_core.backends.gpu_channel import DEFAULT_BOUND, GpuChannel
from comm_core.backends.gpu_records import Words
from comm_core.event import EventHandle
from comm_core.handle import RankLayout
from comm_core.kernels import library as abi
from comm_core.layout import align
from comm_core.runtime import device as devices
from comm_core.runtime.errors import MTMoEError, UsageError

# A handle gives memory back when its rows are known, where that is worth the time.
_SPARE_BYTES = 1 << 20
# Blocks that receive, at most: enough for one block of tokens each with 8,192 tokens a rank of four.
_RECEIVING_BLOCKS = 128


class DeviceLayout:
    """Device memory of one layout.

    Tables of received rows have room for as many as can come, until the host has read how many came: then `fit` leaves
    tables of that size, since a handle may be kept for long.

    Args:
        channel: whose ranks take part.
        job: the call.
        kept: int64 [num_tokens, num_topk], its ids; part of the layout.
        bound: tokens a rank at most.

    Attributes:
        struct: what kernels get.
        kept: the ids.
    """

    def __init__(self, channel: GpuChannel, job: LayoutJob, kept: torch.Tensor, bound: int) -> None:
        num_tokens, num_topk = kept.shape
        num_ranks, expand = channel.num_ranks, bool(job.settings["do_expand"])
        num_local, room = job.settings["num_experts"] // num_ranks, bound * num_ranks
        self.kept, self._stream = kept, channel.data_queue.stream
        # Tables by name: the block they lie in, the address, the shape. A tensor of each is made when it is asked for.
        self._tables: dict[str, tuple[torch.Tensor, int, tuple[int, ...]]] = {}
        self._add(
            {
                "lane_row": (num_tokens, num_topk),
                "last_lanes": (num_tokens,),
                "matrix": (num_ranks, num_ranks),
                "row_base": (num_ranks + 1,),
                "expert_counts": (num_local,),
                "expert_starts": (num_local + 1,),
                "own_counts": (-(-num_tokens // abi.TOKENS), num_ranks),
            }
        )
        self._add(_row_tables(room, num_topk, expand))
        self.struct: Any = abi.Layout(
            topk_idx=kept.data_ptr(),
            num_tokens=num_tokens,
            num_topk=num_topk,
            num_local=num_local,
            alignment=job.settings["expert_alignment"],
            expand=int(expand),
            room=room,
            **{name: self.address(name) for name in self._tables if name != "own_counts"},
        )

    def address(self, name: str) -> int:
        """Device address of a table."""
        return self._tables[name][1]

    def table(self, name: str, rows: int) -> torch.Tensor:
        """The first `rows` rows of a table, for the current stream."""
        devices.current_stream(self.kept.device).wait_stream(self._stream)
        return self._tensor(name)[:rows]

    def of_experts(self, name: str) -> torch.Tensor:
        """`expert_starts` or `expert_counts`, int32, for a stream that waits for the layout."""
        return self._tensor(name)

    def memory(self) -> list[torch.Tensor]:
        """What kernels read of it, for whoever must keep it."""
        return [*{id(block): block for block, _, _ in self._tables.values()}.values(), self.kept]

    def fit(self, rows: int) -> None:
        """Leaves room for `rows` received rows alone; on the stream that is current."""
        shapes = _row_tables(rows, self.struct.num_topk, bool(self.struct.expand))
        old = {name: self._tensor(name)[:rows] for name in shapes}
        self._add(shapes)
        for name, part in old.items():
            self._tensor(name).copy_(part)
            setattr(self.struct, name, self.address(name))
        self.struct.room = rows

    def spare(self, rows: int) -> int:
        """Bytes that `fit` would give back."""
        a_row = 4 * (1 + self.struct.num_topk * (1 + self.struct.expand))
        return int(self.struct.room - rows) * a_row

    def _add(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Makes tables in one block of memory."""
        sizes = [align(math.prod(shape), 4) for shape in shapes.values()]  # kernels store 16 bytes at once
        block = torch.empty(sum(sizes), dtype=torch.int32, device=self.kept.device)
        at = block.data_ptr()
        for (name, shape), size in zip(shapes.items(), sizes, strict=True):
            self._tables[name] = block, at, shape
            at += 4 * size

    def _tensor(self, name: str) -> torch.Tensor:
        block, at, shape = self._tables[name]
        first = (at - block.data_ptr()) // 4
        return block[first : first + math.prod(shape)].view(shape)


def _row_tables(rows: int, num_topk: int, expand: bool) -> dict[str, tuple[int, ...]]:
    return {
        "recv_token": (rows,),
        "local_idx": (rows, num_topk),
        "expand_row": (rows if expand else 0, num_topk),
    }


class GpuLayout(RankLayout):
    """`RankLayout` from counts the host has read; plans are computed when asked for."""

    def __init__(self, device: DeviceLayout, counts: dict[str, Any], rank: int, number: int) -> None:
        matrix = counts["matrix"]
        values = {
            "device": device,
            "rank": rank,
            "num_ranks": len(matrix),
            "num_tokens_of": counts["num_tokens"],
            "matrix": matrix,
            "send_splits": list(matrix[rank]),
            "recv_splits": [line[rank] for line in matrix],
            "expert_counts": counts["expert_counts"],
            "num_expanded": counts["num_expanded"],
            "token_stride": counts["bound"] or max(1, *counts["num_tokens"]),
            "number": number,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    device: DeviceLayout
    rank: int
    num_ranks: int
    num_tokens_of: list[int]
    matrix: list[list[int]]
    num_expanded: int

    @cached_property
    def send(self) -> plans.SendPlan:
        """The sending side, as `plan_send` gives it."""
        return plans.plan_send(self.device.kept, self.device.struct.num_local * self.num_ranks, self.num_ranks)

    @cached_property
    def recv(self) -> plans.RecvPlan:
        """The receiving side, as `plan_recv` gives it."""
        num_local = self.device.struct.num_local
        local = self.device.table("local_idx", sum(self.recv_splits)).to(torch.int64)
        ids = torch.where(local >= 0, local + self.rank * num_local, -1)
        splits = torch.tensor(self.recv_splits, device=ids.device)
        return plans.plan_recv(ids, splits, num_local * self.num_ranks, self.rank, self.device.struct.alignment)

    @cached_property
    def recv_token(self) -> torch.Tensor:
        """int64 [n], token number on its source rank of each received row."""
        return self.device.table("recv_token", sum(self.recv_splits)).to(torch.int64)


class CountsEvent(EventHandle):
    """Complete when the layout's kernels are; `result()` waits for the counts alone, in mapped memory.

    Args:
        channel: of the call.
        job: the call.
        device_layout: its memory.
        number: of the call.
        record: where the counts come.
    """

    number: int

    def __init__(self, channel: GpuChannel, job: LayoutJob, layout: DeviceLayout, number: int, record: Words) -> None:
        super().__init__(channel.device, channel.data_queue.stream)
        self._channel, self._record, self._words = channel, record, record.at
        self._settings, self._captured = job.settings, devices.is_capturing(channel.device)
        self.device_layout, self.number = layout, number
        self._result: GpuLayout | MTMoEError | None = None
        # A replayed graph writes its record again and again: that one is never handed out again.
        self._dropped = None if self._captured else weakref.finalize(self, channel.records.give, record)

    @property
    def expert_starts(self) -> torch.Tensor:
        """`EPHandle.expert_starts` as the kernels left it; the current stream waits for them and nothing later."""
        return self._of_experts("expert_starts")

    @property
    def expert_counts(self) -> torch.Tensor:
        """`EPHandle.expert_counts`, in the same way."""
        return self._of_experts("expert_counts")

    def _of_experts(self, name: str) -> torch.Tensor:
        self.current_stream_wait()
        table = self.device_layout.of_experts(name)
        devices.keep_for_current_stream(table)
        return table

    def result(self) -> GpuLayout:
        """The layout, as soon as its counts are there.

        Raises:
            UsageError: an id of this rank is wrong.
            CommError: another rank's are, or the ranks disagree. PeerTimeout: one did not come.
        """
        if self._result is None:
            try:
                self._result = self._read()
            except MTMoEError as error:
                self._result = error
        if isinstance(self._result, MTMoEError):
            raise self._result
        return self._result

    def _read(self) -> GpuLayout:
        channel, words = self._channel, self._words
        channel.check_open()
        void = channel.call_of(self.number).error
        if void is not None:
            raise void
        channel.wait(self._record, self.number)
        if words[abi.REC_STATUS] != abi.OK or words[abi.REC_DIFFERENT]:
            channel.resolve(self.number)
        ranks = channel.num_ranks
        at = abi.REC_TABLES
        tokens = list(words[at : at + ranks])
        at += ranks
        matrix = [list(words[at + ranks * r : at + ranks * (r + 1)]) for r in range(ranks)]
        at += ranks * ranks
        counts = {
            "num_tokens": tokens,
            "matrix": matrix,
            "expert_counts": list(words[at : at + self.device_layout.struct.num_local]),
            "num_expanded": int(words[abi.REC_EXPANDED]),
            "bound": self._settings["num_max_tokens_per_rank"],
        }
        if self._dropped is not None and self._dropped.detach():
            channel.records.give(self._record)
        if not self._captured:
            layout, rows = self.device_layout, sum(line[channel.rank] for line in matrix)
            if layout.spare(rows) > _SPARE_BYTES:
                channel.data_queue.submit(lambda: layout.fit(rows), after=[self])
        return GpuLayout(self.device_layout, counts, channel.rank, self.number)


class _Parts:
    """Parts of the ring that a layout uses, the same on every rank; see MtLayoutCall in kernels/abi.h.

    Args:
        bound: tokens a rank at most.
        num_topk, num_local, num_ranks: of the call.

    Attributes:
        table_blocks: blocks of tokens that a rank can have.
        id_bytes, num_bytes: of the ids of a rank, and of these and the counts.
    """

    def __init__(self, bound: int, num_topk: int, num_local: int, num_ranks: int) -> None:
        self.table_blocks = max(1, -(-bound // abi.TOKENS))
        lanes, columns = abi.id_lanes(num_topk), abi.count_columns(num_local)
        self.id_bytes = align(bound * lanes * 2, 256)
        self.num_bytes = self.id_bytes + align(num_ranks * self.table_blocks * columns * 2, 256)


def start_layout(channel: GpuChannel, job: LayoutJob) -> CountsEvent:
    """Launches the layout of a call on the comm stream. The bound of tokens is the caller's or DEFAULT_BOUND.

    Raises:
        UsageError: on every rank (through `refuse`), where this one's call is beyond what kernels take.
    """
    channel.check_alive()
    problem = _beyond(channel, job)
    if problem is not None:
        channel.refuse(job.op, problem)
    bound = job.settings["num_max_tokens_per_rank"] or DEFAULT_BOUND
    parts = _Parts(bound, job.topk_idx.shape[1], job.settings["num_experts"] // channel.num_ranks, channel.num_ranks)
    channel.make_room(abi.RING, 2 * parts.num_bytes, job.op, job.settings)
    number, hashed = channel.number(job.op, job.settings, _id_check(job))
    channel.recent_ids.append(job.kept)
    record = channel.records.take(capturing=devices.is_capturing(channel.device))
    queue, made = channel.data_queue, []

    def launch() -> None:
        given = job.topk_idx.to(torch.int64).contiguous()
        kept = job.kept
        if kept.dtype != torch.int64:  # kernels know one width
            kept = given if job.kept is job.topk_idx else torch.empty_like(given)
            job.kept.copy_(job.topk_idx)
        layout, at = DeviceLayout(channel, job, kept, bound), ring_half(channel, number)
        call = abi.LayoutCall(
            channel=channel.header(number),
            layout=layout.struct,
            ids=abi.Place(offset=at, segment=abi.RING),
            tables=abi.Place(offset=at + parts.id_bytes, segment=abi.RING),
            given_idx=given.data_ptr(),
            own_counts=layout.address("own_counts"),
            record=record.device,
            hash=hashed,
            num_blocks=min(_RECEIVING_BLOCKS, channel.num_ranks * parts.table_blocks),
            table_blocks=parts.table_blocks,
        )
        channel.library.launch("layout", call, devices.raw_stream(queue.stream))
        made.append(CountsEvent(channel, job, layout, number, record))

    channel.submit(launch, job.after, [job.topk_idx, job.kept])
    event: CountsEvent = made[0]
    return event


def ring_half(channel: GpuChannel, number: int) -> int:
    """Offset of the half of the ring that a call uses: two in turn, see kernels/sync.cuh."""
    return number % 2 * (channel.memory.sizes[abi.RING] // 2)


def _id_check(job: LayoutJob) -> Any:
    """What is wrong with the ids, asked for when the device has found something; the ids may be gone then."""
    kept, num_experts = weakref.ref(job.kept), job.settings["num_experts"]

    def check() -> UsageError | None:
        ids = kept()
        return None if ids is None else plans.check_ids(ids, num_experts)

    return check


def _beyond(channel: GpuChannel, job: LayoutJob) -> UsageError | None:
    num_tokens, num_topk = job.topk_idx.shape
    num_local = job.settings["num_experts"] // channel.num_ranks
    bound = job.settings["num_max_tokens_per_rank"] or DEFAULT_BOUND
    if num_topk > abi.MAX_TOPK:
        return UsageError(f"num_topk {num_topk}", allowed=f"at most {abi.MAX_TOPK} with kernels", fix="route to fewer")
    if num_local > abi.MAX_LOCAL_EXPERTS:
        return UsageError(
            f"{num_local} experts on a rank",
            allowed=f"at most {abi.MAX_LOCAL_EXPERTS} with kernels",
            fix="use more ranks",
        )
    if num_tokens > bound:
        return UsageError(
            f"{num_tokens} tokens on rank {channel.rank}",
            allowed=f"at most {bound}",
            fix="give num_max_tokens_per_rank",
        )
    return None
