"""Dispatch and combine over any torch.distributed group: gloo, NCCL, MCCL.

One row per (token, rank) crosses. The receive buffer of an all-to-all is in (source rank, token) order by itself, so
plain dispatch writes straight into its output; expanding is a local gather after arrival, and combining expanded rows
adds up locally first (fp32, lane order, one rounding) and sends one row per (token, rank) back.

Rows travel as bytes: every dtype works on every group. Counts, settings and expert ids travel on the host's control
group, from a thread: on an accelerator neither the caller nor the compute stream waits for them until a count is read.

The layout is computed where topk_idx lives, by one code for all devices. On an accelerator the thread has a stream of
its own, begins behind the event that made topk_idx, and copies only counts and the id rows that cross to the host and
back. It ends with a wait for that stream: whoever has the layout has finished tensors, and the data queue needs no
further order. What the data queue then reads of it is named to the allocator.

Verified: every test runs on the CPU with gloo. On accelerators the conformance suite (marked gpu) runs the same code;
the layout on the device has not been timed there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
import torch.distributed as dist

from comm_core import layout
from comm_core.backends.base import Capabilities, LayoutJob, MoveJob, Region
from comm_core.backends.channel import DTYPES, Channel
from comm_core.backends.group_region import GroupRegion
from comm_core.backends.reduction import ordered_sum_into
from comm_core.event import EventHandle
from comm_core.handle import RankLayout
from comm_core.runtime import device as devices
from comm_core.runtime import trace
from comm_core.runtime.errors import ClosedError, CommError, UsageError


class CollectiveBackend:
    """The backend named "collective"; see `base.Backend` for its operations."""

    name = "collective"
    capabilities = Capabilities(
        device_kinds=devices.KINDS,
        dtypes=DTYPES,
        hidden_multiple=1,
        needs_token_bound=False,
        host_checked_kinds=("cpu",),
        fp8_kinds=devices.KINDS,
        worst_case_outputs=True,
        single_reduction=True,
        region_kinds=("cpu",),
    )

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self._channel = Channel.acquire(group, device, timeout)
        self.device = device
        self.rank, self.num_ranks = self._channel.rank, self._channel.num_ranks
        self.buffer_id = self._channel.next_buffer_id()
        self.queue = self._channel.data_queue
        self._regions: list[Region] = []

    @staticmethod
    def why_not(kind: str) -> str | None:
        """It can be used wherever torch.distributed can."""
        return devices.why_no_collectives(kind)

    def start_layout(self, job: LayoutJob) -> EventHandle:
        """Exchanges counts and ids on the control queue."""
        self._channel.check_alive()
        return self._channel.control_queue.submit(
            lambda: self._layout(job), after=job.after, on_failure=self._channel.note_failure
        )

    def dispatch(self, job: MoveJob) -> EventHandle:
        """Moves rows to the ranks of their experts."""
        return self._move(job, self._dispatch)

    def combine(self, job: MoveJob) -> EventHandle:
        """Moves rows back and adds them up."""
        return self._move(job, self._combine)

    def barrier(self) -> EventHandle:
        """Waits for the data queue, then meets the other ranks on the control queue."""
        return self.agree("barrier", {}, drained=True)

    def agree(self, op: str, settings: Mapping[str, int], *, drained: bool = False) -> EventHandle:
        """Meets the other ranks on the control queue; `drained`: once the data queue has come to this point."""
        self._channel.check_alive()
        here = self.queue.submit(lambda: None, tensors=()) if drained else None
        return self._channel.submit_agreed(op, {"buffer": self.buffer_id, **settings}, None, 0, after=here)

    def open_region(self, op: str, num_bytes: int, num_lanes: int) -> Region:
        """Makes a region on the control queue, where it comes in the same order on all ranks."""
        self._channel.check_alive()
        with torch.inference_mode(False):  # the region outlives the caller's mode
            making = self._channel.control_queue.submit(
                lambda: self._make_region(op, num_bytes, num_lanes), on_failure=self._channel.note_failure
            )
        region: Region = making.result()
        self._regions.append(region)
        return region

    def note_failure(self, error: BaseException) -> None:
        """Breaks the channel, unless all ranks have the error."""
        self._channel.note_failure(error)

    def refuse(self, op: str, problem: UsageError) -> NoReturn:
        """Tells the other ranks, then raises."""
        self._channel.check_alive()
        try:
            self._channel.submit_agreed(op, {}, problem, 0).synchronize()
        except CommError as error:
            raise problem from error
        raise problem

    def close(self, *, collective: bool) -> None:
        """Waits for queued work and the other ranks (`collective`), then frees groups and threads."""
        try:
            if collective and self._channel.broken is None and dist.is_initialized():
                self._channel.submit_agreed("close", {"buffer": self.buffer_id}, None, 0).synchronize()
        finally:
            with contextlib.suppress(ClosedError):  # the program is ending: memory goes with it
                for region in self._regions:
                    self.queue.submit(region.close)  # behind work that may still use it
            self._channel.release(wait=collective)

    def _make_region(self, op: str, num_bytes: int, num_lanes: int) -> Region:
        return GroupRegion(self._channel, self._channel.next_buffer_id(), num_bytes, num_lanes)

    def _layout(self, job: LayoutJob) -> RankLayout:
        num_experts, alignment = job.settings["num_experts"], job.settings["expert_alignment"]
        if job.kept is not job.topk_idx:
            job.kept.copy_(job.topk_idx)
        topk_idx = job.kept.to(torch.int64)  # callers may have narrower ids
        problem = layout.check_ids(topk_idx, num_experts)
        num_tokens, num_topk = topk_idx.shape
        send = None if problem else layout.plan_send(topk_idx, num_experts, self.num_ranks)
        splits = [0] * self.num_ranks if send is None else send.send_counts.tolist()
        num_bytes = 4 * (num_topk + 1) * sum(splits)
        with trace.span("layout", "ep", lane="ep", on_host=True, num_tokens=num_tokens, bytes=num_bytes):
            said = self._channel.agree(job.op, job.settings, problem, num_tokens, splits)
            assert send is not None  # agree() raised otherwise
            recv_splits = [line[self.rank] for line in said.rows]
            # Ids and token numbers go together, one small row beside each row of data to come.
            meta = torch.cat([topk_idx[send.send_token], send.send_token[:, None]], dim=1).to("cpu", torch.int32)
            arrived = torch.empty(sum(recv_splits), num_topk + 1, dtype=torch.int32)
            self._channel.finish(
                self._channel.at(f"{job.op} (ids)"),
                lambda: self._channel.all_to_all_host(arrived, recv_splits, meta, splits),
            )
        ids = arrived.to(self.device).to(torch.int64)
        recv_counts = torch.tensor(recv_splits, device=self.device)
        recv = layout.plan_recv(ids[:, :num_topk], recv_counts, num_experts, self.rank, alignment)
        stride = job.settings["num_max_tokens_per_rank"] or max(1, *said.num_tokens)
        counts = recv.expert_counts.tolist()
        tokens = ids[:, num_topk].contiguous()
        devices.synchronize_stream(self.device)
        return RankLayout(send, recv, tokens, stride, splits, recv_splits, counts, said.number)

    def _move(self, job: MoveJob, work: Callable[[MoveJob], None]) -> EventHandle:
        self._channel.check_alive()
        check = None
        if job.settings is not None:
            check = self._channel.submit_agreed(job.op, job.settings, None, job.x.shape[0])
        tensors = [job.x, job.weights, job.out_x, job.out_weights, job.out_idx, *job.biases]
        plans = []
        if self.device.type != "cpu":  # memory of the layout's stream, which the data stream is about to read
            plans = layout.tensors_of(job.handle.layout.send) + layout.tensors_of(job.handle.layout.recv)
        return self.queue.submit(
            lambda: work(job.fitted()),
            after=job.after,
            host_check=check,
            tensors=[*(item for item in tensors if item is not None), *plans],
            on_failure=self._channel.note_failure,
        )

    def _dispatch(self, job: MoveJob) -> None:
        handle, x, out = job.handle, job.x, job.out_x
        plans = handle.layout
        send, recv = plans.send, plans.recv
        scratch, num_rows = self._channel.scratch, sum(plans.recv_splits)
        rows = scratch.take("send", sum(plans.send_splits), x)
        torch.index_select(x, 0, send.send_token, out=rows)
        weights = None if job.weights is None else job.weights.index_select(0, send.send_token)
        num_bytes = rows.nbytes + (0 if weights is None else weights.nbytes)
        with trace.span("dispatch", "ep", lane="ep", num_tokens=x.shape[0], bytes=num_bytes):
            got = scratch.take("recv", num_rows, x) if handle.do_expand else out
            got_weights = None if weights is None else weights.new_empty(num_rows, weights.shape[1])
            if not handle.do_expand and job.out_weights is not None:
                got_weights = job.out_weights
            self._exchange(job.op, [(got, rows), (got_weights, weights)], plans.recv_splits, plans.send_splits)
            self._wait_epilogue(job)
            if job.out_idx is not None:
                job.out_idx.copy_(recv.local_idx)
            if handle.do_expand:
                _expand_into(out, got, recv)
                if job.out_weights is not None and got_weights is not None:
                    pick = recv.expand_src.clamp_min(0) * handle.num_topk + recv.expand_lane.clamp_min(0)
                    _gather_into(job.out_weights, got_weights.flatten(), pick, recv.expand_src < 0)

    def _combine(self, job: MoveJob) -> None:
        handle, x, out = job.handle, job.x, job.out_x
        plans = handle.layout
        send, recv = plans.send, plans.recv
        rows, weights, scratch = x, job.weights, self._channel.scratch
        with trace.span(
            "combine", "ep", lane="ep", num_tokens=out.shape[0], bytes=sum(plans.recv_splits) * x[:1].nbytes
        ):
            if handle.do_expand:
                rows = scratch.take("send", sum(plans.recv_splits), x)
                ordered_sum_into(rows, x, recv.reduce_terms)
                weights = None if weights is None else _lane_weights(weights, recv.expand_row)
            sums = scratch.take("recv", sum(plans.send_splits), x)
            back = None if weights is None else weights.new_empty(sums.shape[0], handle.num_topk)
            self._exchange(job.op, [(sums, rows), (back, weights)], plans.send_splits, plans.recv_splits)
            self._wait_epilogue(job)
            ordered_sum_into(out, sums, send.return_terms, job.biases)
            if job.out_weights is not None and back is not None:
                lanes = torch.arange(handle.num_topk, device=self.device)
                pick = send.send_row.clamp_min(0) * handle.num_topk + lanes
                _gather_into(job.out_weights, back.flatten(), pick, send.send_row < 0)

    def _exchange(
        self,
        op: str,
        pairs: list[tuple[torch.Tensor | None, torch.Tensor | None]],
        out_rows: list[int],
        in_rows: list[int],
    ) -> None:
        starts = [
            lambda out=out, rows=rows: self._channel.all_to_all(out, out_rows, rows, in_rows)
            for out, rows in pairs
            if out is not None and rows is not None
        ]
        self._channel.finish(self._channel.at(f"{op} (rows)"), *starts)

    def _wait_epilogue(self, job: MoveJob) -> None:
        if job.before_epilogue is not None:
            job.before_epilogue.current_stream_wait()


def _gather_into(out: torch.Tensor, source: torch.Tensor, pick: torch.Tensor, empty: torch.Tensor) -> None:
    """Fills out with source[pick], 0 where `empty`; works without any source."""
    if source.numel() == 0:
        out.zero_()
        return
    out.copy_(source[pick].masked_fill(empty, 0))


def _expand_into(out: torch.Tensor, rows: torch.Tensor, recv: layout.RecvPlan) -> None:
    """Expanded rows of what arrived, zeros in the alignment gaps."""
    if rows.shape[0] == 0 or out.numel() == 0:
        out.zero_()
        return
    torch.index_select(rows, 0, recv.expand_src.clamp_min(0), out=out)
    if recv.gap_rows.shape[0]:
        out.index_fill_(0, recv.gap_rows, 0)


def _lane_weights(weights: torch.Tensor, expand_row: torch.Tensor) -> torch.Tensor:
    """[n, num_topk] weights of received rows from those of expanded rows [E], 0 where a lane is not local."""
    lanes = torch.empty(expand_row.shape, dtype=weights.dtype, device=weights.device)
    _gather_into(lanes, weights, expand_row.clamp_min(0), expand_row < 0)
    return lanes
