"""Dispatch and combine between processes of one host, over shared memory.

Each rank lays its tokens into its own segment once; every rank then gathers the rows it wants from all segments
straight into the rows of its output, plain or expanded, in one pass. Nothing is packed for a destination, nothing is
staged where it arrives, and the outputs are ordinary memory of their owner. (Writing into the memory of the receiver
would move each row as often, but a token once per rank where this moves it once, and would need a second copy or
outputs that are not ordinary memory.)

Combining is the same the other way: the rank of the experts lays one row per (token, rank) down, expanded rows added
up straight into the segment, and the rank of the token reads and adds.

Plans, settings and mistakes are those of the collective backend; only what carries the bytes differs. A process group
is used to meet, not afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from comm_core.backends.base import MoveJob, Region
from comm_core.backends.channel import Channel
from comm_core.backends.collective import CollectiveBackend
from comm_core.backends.dense_sum import DenseSum, pays
from comm_core.backends.reduction import ordered_sum_into
from comm_core.handle import RankLayout
from comm_core.runtime import trace
from comm_core.runtime.errors import CommError, UsageError
from comm_core.shmem import segment
from comm_core.shmem.posix import Shared, SharedMemoryError, SymmetricHeap
from comm_core.shmem.region import SharedRegion


class PosixChannel(Channel):
    """A channel whose lines and rows travel through shared memory.

    Attributes:
        heap: segments of the ranks.
    """

    _shared: ClassVar[dict[tuple[dist.ProcessGroup, torch.device, float], Channel]] = {}

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        super().__init__(group, device, timeout)
        try:
            self.heap = SymmetricHeap(self.rank, self.ranks, self._meet, timeout)
        except BaseException:
            self.control_queue.close(1.0)
            dist.destroy_process_group(self.data_group)
            dist.destroy_process_group(self.control_group)
            raise

    def release(self, *, wait: bool) -> None:
        """Gives the channel back; the last user frees segments, groups and threads."""
        last = self._users == 1
        if last and not wait:
            self.heap.abort()
        super().release(wait=wait)
        # Memory that a thread may still read stays; it goes with the process.
        if last and self.control_queue.close(0.5):
            self.heap.close()

    def finish(self, where: str, *starts: Callable[[], Any]) -> None:
        """Carries exchanges out, one after the other."""
        self.check_alive()
        try:
            for start in starts:
                start()(where)
        except CommError as error:
            self._lost(error)
            raise

    def share(
        self,
        where: str,
        tables: list[tuple[int, torch.Tensor]],
        fill: Callable[[list[torch.Tensor]], object],
        read: Callable[[Shared], object],
        starts: list[int] | None = None,
    ) -> None:
        """Lays tables down with the other ranks (`SymmetricHeap.share`), then reads."""

        def exchange(where: str) -> None:
            read(self.heap.share(where, tables, fill, starts or ()))
            self.heap.done()

        self.finish(self.at(where), lambda: exchange)

    def note_failure(self, error: BaseException) -> None:
        """Breaks the channel, and tells the other ranks, unless all have the error."""
        super().note_failure(error)
        if self.broken is not None:
            self.heap.fail()

    def all_to_all_host(self, out: torch.Tensor, out_rows: list[int], rows: torch.Tensor, in_rows: list[int]) -> Any:
        """Moves rows of host tensors, given in rank order; works inside `finish` alone."""

        def exchange(where: str) -> None:
            starts = [0, *accumulate(in_rows)][:-1]
            shared = self.heap.share(where, [(rows.shape[0], rows)], lambda views: views[0].copy_(rows), starts)
            everything, at = shared.rows(rows), 0
            for peer, count in enumerate(out_rows):
                first = shared.bases[peer][0] + shared.starts[peer][self.rank]
                out[at : at + count] = everything[first : first + count]
                at += count
            self.heap.done()

        return exchange

    def _gather(self, where: str, line: torch.Tensor) -> torch.Tensor:
        found: list[bytes] = []
        text = line.view(torch.uint8).numpy().tobytes()
        self.finish(where, lambda: lambda where: found.extend(self.heap.gather(where, text)))
        return torch.frombuffer(bytearray(b"".join(found)), dtype=line.dtype).view(self.num_ranks, -1)

    def _meet(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(found, value, group=self.control_group)
        except RuntimeError as error:
            missing = self._roll_call.missing("sharing memory")
            raise self._translated("sharing memory", error, missing) from error
        return found

    def _lost(self, error: CommError) -> None:
        if isinstance(error, SharedMemoryError):
            self._agreed.add(error)
        elif self.broken is None:
            self.broken = error
            self.heap.fail()


class PosixBackend(CollectiveBackend):
    """The backend named "posix"; see `base.Backend` for its operations."""

    name = "posix"
    capabilities = replace(CollectiveBackend.capabilities, device_kinds=("cpu",), one_sided_reads=True)
    _channel: PosixChannel

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        reason = self.why_not(device.type)
        if reason is not None:
            raise UsageError(f"backend 'posix' on {device}", allowed=reason, fix="use backend='collective'")
        channel = PosixChannel.acquire(group, device, timeout)
        assert isinstance(channel, PosixChannel)
        self._channel, self.device = channel, device
        self.rank, self.num_ranks = channel.rank, channel.num_ranks
        self.buffer_id = channel.next_buffer_id()
        self.queue = channel.data_queue
        self._regions = []
        self._sum = DenseSum()

    @staticmethod
    def why_not(kind: str) -> str | None:
        """It needs tensors in host memory, and Linux."""
        return segment.why_not() if kind == "cpu" else "tensors of the CPU alone"

    def _make_region(self, op: str, num_bytes: int, num_lanes: int) -> Region:
        channel, made = self._channel, []

        def make(where: str) -> None:
            made.append(SharedRegion(channel.heap, where, num_bytes, num_lanes, channel.check_alive))

        channel.finish(f"{op} (memory)", lambda: make)
        return made[0]

    def _dispatch(self, job: MoveJob) -> None:
        handle, plans = job.handle, job.handle.layout
        recv = plans.recv
        given = [job.x] if job.weights is None else [job.x, job.weights]

        def read(shared: Shared) -> None:
            self._wait_epilogue(job)
            rows = _arrivals(shared, 0, plans)
            if job.out_idx is not None:
                job.out_idx.copy_(recv.local_idx)
            if handle.do_expand:
                rows = _picked(rows, recv.expand_src)
            _select_into(job.out_x, shared.rows(job.x), rows, recv.gap_rows if handle.do_expand else None)
            if job.weights is None or job.out_weights is None:
                return
            weights, rows = shared.rows(job.weights), _arrivals(shared, 1, plans)
            if handle.do_expand:
                lanes = _picked(rows, recv.expand_src) * handle.num_topk + recv.expand_lane.clamp_min(0)
                _select_into(job.out_weights, weights.view(-1), lanes, recv.gap_rows)
            else:
                _select_into(job.out_weights, weights, rows, None)

        num_bytes = sum(item.nbytes for item in given)
        with trace.span("dispatch", "ep", lane="ep", num_tokens=job.x.shape[0], bytes=num_bytes):
            self._channel.share(f"{job.op} (rows)", [(item.shape[0], item) for item in given], _copy(given), read)

    def _combine(self, job: MoveJob) -> None:
        handle, plans, num_topk = job.handle, job.handle.layout, job.handle.num_topk
        send, recv = plans.send, plans.recv
        num_rows = sum(plans.recv_splits)
        weights = job.weights
        if handle.do_expand and weights is not None:
            lanes = weights.new_empty(num_rows, num_topk)
            _select_into(lanes.view(-1), weights, recv.expand_row.clamp_min(0).view(-1), None)
            weights = lanes.masked_fill_(recv.expand_row < 0, 0)
        given = [job.x] if weights is None else [job.x, weights]

        def fill(views: list[torch.Tensor]) -> None:
            views[0][num_rows:].zero_()
            if handle.do_expand:
                ordered_sum_into(views[0][:num_rows], job.x, recv.reduce_terms)
            else:
                views[0][:num_rows].copy_(job.x)
            _copy(given[1:])(views[1:])

        def read(shared: Shared) -> None:
            self._wait_epilogue(job)
            rows = _returns(shared, 0, plans, self.rank)
            terms = tuple((lines, rows[indices]) for lines, indices in send.return_terms)
            segment.prefer_large_pages(job.out_x)
            if not job.biases and pays(terms, job.out_x.shape[0]):
                self._sum.into(job.out_x, shared.rows(job.x), terms, shared.bases[self.rank][0] + num_rows)
            else:
                ordered_sum_into(job.out_x, shared.rows(job.x), terms, job.biases)
            if job.out_weights is None or weights is None:
                return
            rows = _picked(_returns(shared, 1, plans, self.rank), send.send_row.view(-1)).view(send.send_row.shape)
            lanes = (rows * num_topk + torch.arange(num_topk)).view(-1)
            _select_into(job.out_weights.view(-1), shared.rows(weights).view(-1), lanes, None)
            job.out_weights.masked_fill_(send.send_row < 0, 0)

        starts = [0, *accumulate(plans.recv_splits)][:-1]
        # A row of zeros follows the rows, for tokens with fewer answers than others.
        tables = [(num_rows + (item is job.x), item) for item in given]
        num_bytes = sum(num_rows * item[:1].nbytes for item in given)
        with trace.span("combine", "ep", lane="ep", num_tokens=job.out_x.shape[0], bytes=num_bytes):
            self._channel.share(f"{job.op} (rows)", tables, fill, read, starts)


def _copy(given: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], None]:
    def fill(views: list[torch.Tensor]) -> None:
        for view, item in zip(views, given, strict=True):
            view.copy_(item)

    return fill


def _arrivals(shared: Shared, table: int, plans: RankLayout) -> torch.Tensor:
    """int64 [n], where each received row stands: at its token in the segment of its source rank."""
    bases = torch.tensor([bases[table] for bases in shared.bases])
    return torch.repeat_interleave(bases, plans.recv.recv_counts) + plans.recv_token


def _returns(shared: Shared, table: int, plans: RankLayout, rank: int) -> torch.Tensor:
    """int64 [rows sent], where the answer to each row that was sent stands, in the order of sending."""
    parts = [
        torch.arange(bases[table] + starts[rank], bases[table] + starts[rank] + count)
        for bases, starts, count in zip(shared.bases, shared.starts, plans.send_splits, strict=True)
    ]
    return torch.cat(parts)


def _picked(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """rows[index], anything where the index is -1, and all -1 where there are no rows."""
    return rows[index.clamp_min(0)] if rows.shape[0] else torch.full_like(index, -1)


def _select_into(out: torch.Tensor, source: torch.Tensor, index: torch.Tensor, gaps: torch.Tensor | None) -> None:
    """out[i] = source[index[i]], 0 in the gaps and everywhere where there is nothing to read."""
    if out.numel() == 0:
        return
    segment.prefer_large_pages(out)
    if source.shape[0] == 0 or bool(index[0] < 0):
        out.zero_()
        return
    torch.index_select(source, 0, index, out=out)
    if gaps is not None and gaps.shape[0]:
        out.index_fill_(0, gaps, 0)
