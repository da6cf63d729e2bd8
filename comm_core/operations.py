"""Dispatch and combine carried out: outputs, settings to compare, and the moves a backend makes for one call.

A backend knows rows of one dtype. What else the interface offers is made of such moves here, so that every backend
has it:

* FP8 is two moves along one handle, data as bytes and scales as rows of 4-byte words.
* Combine in a single reduction (recipe C) returns the rows of each lane by themselves, by a second handle in which
  every lane is a token, and adds them up at home in one fp32 sum in lane order.
* Statistics are counts of the handle, added behind the move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from comm_core import fp8
from comm_core.backends.base import Backend, LayoutJob, MoveJob
from comm_core.backends.channel import ROW_DTYPES
from comm_core.backends.reduction import accumulator_dtype
from comm_core.event import EventHandle, EventOverlap, as_handle
from comm_core.handle import EPHandle
from comm_core.runtime import device as devices
from comm_core.validate import CombineArgs, DispatchArgs, Limits

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Operations:
    """The calls of one buffer with checked arguments.

    Attributes:
        backend: moves the rows.
        limits: of the buffer.
        multiple_reduction: expanded rows are added up on their rank before they travel back.
    """

    backend: Backend
    limits: Limits
    multiple_reduction: bool

    def start(
        self,
        op: str,
        topk_idx: torch.Tensor,
        settings: dict[str, int],
        previous_event: EventHandle | EventOverlap | None,
        *,
        copy: bool,
        num_sms: int = 0,
        static: bool = False,
    ) -> EPHandle:
        """Starts a count exchange.

        Args:
            op: name of the call.
            topk_idx: ids.
            settings: num_experts, expert_alignment, do_expand and num_max_tokens_per_rank.
            previous_event: topk_idx is ready then.
            copy: the handle keeps a copy of topk_idx.
            num_sms: hint.
            static: shapes of received tensors are those of the worst case.
        """
        settings = settings | {"buffer": self.limits.buffer_id, "num_topk": topk_idx.shape[1]}
        topk_idx = topk_idx.detach()
        kept = torch.empty_like(topk_idx) if copy else topk_idx
        given = as_handle(previous_event)
        # The copy's memory is the current stream's: it may be written only behind what that stream still does with it.
        here = EventHandle(self.backend.device) if given is None or copy else None
        event = self.backend.start_layout(LayoutJob(op, settings, topk_idx, kept, (given, here)))
        lanes = None
        if settings["do_expand"] and not self.multiple_reduction:
            each = settings | {
                "num_topk": 1,
                "num_max_tokens_per_rank": settings["num_max_tokens_per_rank"] * topk_idx.shape[1],
            }
            single = kept.view(-1, 1)
            lanes_event = self.backend.start_layout(LayoutJob("prepare", each, single, single, (event, given, here)))
            lanes = self._handle(single, each, lanes_event, 0, 0, None)
        bound = settings["num_max_tokens_per_rank"] if static else 0
        return self._handle(kept, settings, event, num_sms, bound, lanes)

    def _handle(
        self,
        topk_idx: torch.Tensor,
        settings: dict[str, int],
        event: EventHandle,
        num_sms: int,
        static_bound: int,
        lanes: EPHandle | None,
    ) -> EPHandle:
        return EPHandle(
            do_expand=bool(settings["do_expand"]),
            num_experts=settings["num_experts"],
            expert_alignment=settings["expert_alignment"],
            topk_idx=topk_idx,
            rank=self.backend.rank,
            num_ranks=self.backend.num_ranks,
            num_sms=num_sms,
            buffer_id=self.limits.buffer_id,
            event=event,
            static_bound=static_bound,
            lanes=lanes,
        )

    def dispatch(
        self, args: DispatchArgs
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventHandle]:
        """Carries out a dispatch."""
        op = "dispatch" if args.handle is None else "cached dispatch"
        pair = isinstance(args.x, tuple)
        x = (args.x[0] if pair else args.x).detach()
        weights = None if args.topk_weights is None else args.topk_weights.detach()
        settings = self._settings_of(x, weights)
        if pair:
            settings |= {"num_scales": args.x[1].shape[1], "scale_dtype": fp8.SCALE_DTYPES.index(args.x[1].dtype)}
        handle: EPHandle = args.handle
        if handle is None:
            settings |= args.layout_settings(self.limits)
            handle = self.start(
                op, args.topk_idx, settings, args.previous_event, copy=args.do_handle_copy, num_sms=args.num_sms,
                static=args.do_cpu_sync is False,
            )  # fmt: skip
        num_rows = handle.num_recv_rows  # without a static shape this waits for the counts and raises their error
        with self.backend.queue.allocating(args.allocate_on_comm_stream):
            out_x = x.new_empty(num_rows, x.shape[1])
            out_idx = None if handle.do_expand else handle.topk_idx.new_empty(num_rows, handle.num_topk)
            lanes = () if handle.do_expand else (handle.num_topk,)
            out_weights = None if weights is None else weights.new_empty(num_rows, *lanes)
        _hand_over(args, out_x, out_idx, out_weights)
        job = MoveJob(
            op=op,
            settings=None if args.handle is None else settings | {"handle": handle.number},
            handle=handle,
            x=_bytes(x),
            weights=weights,
            out_x=_bytes(out_x),
            out_idx=out_idx,
            out_weights=out_weights,
            after=self._ready(args),
            before_epilogue=as_handle(args.previous_event_before_epilogue),
            num_sms=args.num_sms or handle.num_sms,
            clears_rest=args.do_zero_padding or not handle.do_expand,
        )
        recv_x: Rows = out_x
        if pair and self.backend.capabilities.moves_scales:
            job, out_scales = self._with_scales(job, args)
            recv_x = (out_x, out_scales)
        event = self.backend.dispatch(job)
        if pair and not self.backend.capabilities.moves_scales:
            out_scales, event = self._scales(job, args, event)
            recv_x = (out_x, out_scales)
        stats = args.cumulative_local_expert_recv_stats
        if stats is not None:
            event = self.backend.queue.submit(lambda: stats.add_(handle.expert_counts), after=[event], tensors=[stats])
        return recv_x, out_idx, out_weights, handle, event

    def _with_scales(self, job: MoveJob, args: DispatchArgs) -> tuple[MoveJob, torch.Tensor]:
        """The job with the scales of its pair beside the data, and where they will be."""
        scales, num_rows = args.x[1].detach(), job.out_x.shape[0]
        with self.backend.queue.allocating(args.allocate_on_comm_stream):
            if args.use_tma_aligned_col_major_sf:
                out = fp8.empty_column_major(num_rows, scales.shape[1], scales)
            else:
                out = scales.new_empty(num_rows, scales.shape[1])
        _hand_over(args, out)
        return replace(job, scales=scales, out_scales=out), out

    def _scales(self, data: MoveJob, args: DispatchArgs, moved: EventHandle) -> tuple[torch.Tensor, EventHandle]:
        """Moves the scales behind the data, and not at all where that was refused; the event completes both."""
        scales, queue = args.x[1].detach(), self.backend.queue
        num_rows = data.out_x.shape[0]
        with queue.allocating(args.allocate_on_comm_stream):
            # Not is_contiguous(): a single column with a wide stride counts as such, but cannot be seen as bytes.
            rows = scales if scales.stride() == (scales.shape[1], 1) else scales.new_empty(scales.shape)
            arrived = scales.new_empty(num_rows, scales.shape[1])
            turned = args.use_tma_aligned_col_major_sf
            out = fp8.empty_column_major(num_rows, scales.shape[1], scales) if turned else arrived
        _hand_over(args, out)
        if rows is not scales:
            moved = queue.submit(lambda: rows.copy_(scales), after=[moved], tensors=[rows, scales])
        move = replace(
            data, settings=None, after=(moved,), x=rows, out_x=arrived, weights=None, out_weights=None, out_idx=None
        )
        event = self.backend.dispatch(move)
        if turned:
            event = queue.submit(lambda: out.copy_(arrived), after=[event], tensors=[out, arrived])
        return out, event

    def combine(self, args: CombineArgs) -> tuple[torch.Tensor, torch.Tensor | None, EventHandle]:
        """Carries out a combine."""
        x, weights = args.needed(args.x).detach(), args.needed(args.topk_weights)
        weights = None if weights is None else weights.detach()
        handle: EPHandle = args.handle
        settings = self._settings_of(x, weights) | {"handle": handle.number, "num_bias": len(args.biases)}
        biases = [item.detach() for item in args.biases]
        lanes = handle.lanes
        with self.backend.queue.allocating(args.allocate_on_comm_stream):
            out_x = x.new_empty(handle.num_tokens, x.shape[1])
            out_weights = None if weights is None else weights.new_empty(handle.num_tokens, handle.num_topk)
            by_lane = out_x if lanes is None else x.new_empty(lanes.num_tokens, x.shape[1])
        _hand_over(args, out_x, out_weights)
        epilogue = as_handle(args.previous_event_before_epilogue)
        job = MoveJob(
            op="combine",
            settings=settings,
            handle=handle,
            x=x,
            weights=weights,
            biases=biases,
            out_x=out_x,
            out_weights=out_weights,
            after=self._ready(args),
            before_epilogue=epilogue,
            num_sms=args.num_sms or handle.num_sms,
        )
        if lanes is None:
            return out_x, out_weights, self.backend.combine(job)
        back = None if out_weights is None else out_weights.view(-1, 1)
        num_rows = lanes.num_recv_rows  # of a static shape only the real rows stand in this handle
        some = None if weights is None else weights[:num_rows]
        lane_job = replace(
            job, handle=lanes, x=x[:num_rows], weights=some, biases=(), out_x=by_lane, out_weights=back
        )  # fmt: skip
        moved = self.backend.combine(lane_job)
        event = self.backend.queue.submit(
            lambda: _sum_lanes(out_x, by_lane, biases), after=[moved, epilogue], tensors=[out_x, by_lane, *biases]
        )
        return out_x, out_weights, event

    def _ready(self, args: DispatchArgs | CombineArgs) -> tuple[EventHandle | None, ...]:
        """What a move waits for: the caller's event, and the caller's stream where outputs are memory of it.

        That memory may have been another tensor's, which work given to that stream before still uses.
        """
        given = as_handle(args.previous_event)
        if given is None or args.allocate_on_comm_stream:
            return (given,)
        return given, EventHandle(self.backend.device)

    def _settings_of(self, x: torch.Tensor, weights: torch.Tensor | None) -> dict[str, int]:
        return {
            "buffer": self.limits.buffer_id,
            "hidden": x.shape[1],
            "dtype": ROW_DTYPES.index(x.dtype),
            "topk_weights": -1 if weights is None else ROW_DTYPES.index(weights.dtype),
        }


def _hand_over(args: DispatchArgs | CombineArgs, *outputs: torch.Tensor | None) -> None:
    """Outputs that are the comm stream's memory are not used again there before the caller's stream is past them."""
    if args.allocate_on_comm_stream:
        devices.keep_for_current_stream(*(item for item in outputs if item is not None))


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """FP8 rows as bytes: backends move them without a meaning."""
    return rows.view(torch.uint8) if rows.dtype in fp8.DTYPES else rows


def _sum_lanes(out: torch.Tensor, by_lane: torch.Tensor, biases: Sequence[torch.Tensor]) -> None:
    """Biases, then the rows of each token's lanes in order; a lane without a row adds 0."""
    total = torch.zeros(out.shape, dtype=accumulator_dtype(out.dtype), device=out.device)
    for bias in biases:
        total += bias
    if out.shape[0]:
        rows = by_lane.view(out.shape[0], -1, out.shape[1])
        for lane in range(rows.shape[1]):
            total += rows[:, lane]
    out.copy_(total)
