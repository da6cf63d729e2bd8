"""ElasticBuffer: dispatch and combine with the names and meanings of DeepEP's V2 interface.

This file checks arguments, allocates outputs and hands both to a backend. A mistake found here is not raised at
once: it goes through the backend's comparison of the call, so that it raises on every rank of the group (the rank at
fault gets the UsageError, the others a CommError that names it) and no rank is left waiting.

Beyond DeepEP there is `prepare`: it starts the count exchange right after the router, and its handle is consumed by a
cached dispatch later, so that no host wait stands between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from comm_core import validate
from comm_core.backends import registry
from comm_core.backends.base import LayoutJob, MoveJob
from comm_core.event import EventHandle, EventOverlap, as_handle
from comm_core.handle import EPHandle
from comm_core.runtime import device as devices
from comm_core.runtime import env
from comm_core.runtime.errors import ClosedError, UsageError

Event = EventHandle | EventOverlap


class ElasticBuffer:
    """Expert-parallel communication of one process group. Building and closing are collective calls.

    Args:
        group: ranks that share the experts; expert e lives on rank e // (num_experts / num_ranks). It bootstraps
            private groups and is not used afterwards. None means the default group.
        num_bytes: accepted for DeepEP's callers; a backend without a buffer of its own needs none.
        num_cpu_bytes: only 0.
        num_max_tokens_per_rank: default bound of tokens a rank; 0 for none.
        hidden, num_topk: sizes the buffer is planned for; other sizes work too where a backend has no buffer.
        use_fp8_dispatch: only False.
        deterministic: accepted; the order is always (source rank, token).
        allow_hybrid_mode: accepted; this group is one level.
        allow_multiple_reduction: only True: expanded rows are added up on their rank first.
        prefer_overlap_with_compute, sl_idx, num_allocated_qps, num_gpu_timeout_secs: hints for other transports.
        num_cpu_timeout_secs: bound of every wait in seconds; EP_CPU_TIMEOUT_SECS or 300 by default.
        explicitly_destroy: accepted; a buffer is always closed explicitly.
        backend: "auto" or a name of `backends.registry.names()`.
        device: where tensors live; the device of the group's torch.distributed backend by default.

    Attributes:
        rank, rank_idx: this rank in the group.
        num_ranks: size of the group.

    Raises:
        UsageError: an option the backend does not have, on the ranks that asked for it.
        CommTimeoutError: a rank of the group did not arrive.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        *,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = True,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float | None = None,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = True,
        backend: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        self._closed = True  # until the backend exists
        for name, value in (("hidden", hidden), ("num_topk", num_topk), ("num_bytes", num_bytes or 0)):
            validate.positive(name, value, least=0)
        self.num_max_tokens_per_rank = validate.positive(
            "num_max_tokens_per_rank", num_max_tokens_per_rank, least=0
        )
        if num_cpu_bytes or use_fp8_dispatch or not allow_multiple_reduction:
            raise validate.unsupported(
                f"num_cpu_bytes={num_cpu_bytes}, use_fp8_dispatch={use_fp8_dispatch}, "
                f"allow_multiple_reduction={allow_multiple_reduction}",
                "num_cpu_bytes=0, use_fp8_dispatch=False, allow_multiple_reduction=True",
            )
        self.group = dist.group.WORLD if group is None else group
        if self.group is None:
            raise UsageError(
                "no process group", allowed="an initialised torch.distributed group", fix="call init_process_group first"
            )
        timeout = env.timeout_seconds() if num_cpu_timeout_secs is None else float(num_cpu_timeout_secs)
        if device is None:
            device = devices.of_collective_backend(str(dist.get_backend(self.group)))
        self.device = torch.device(device)
        self._backend = registry.create(backend, self.group, self.device, timeout)
        self.rank = self.rank_idx = self._backend.rank
        self.num_ranks = self._backend.num_ranks
        self._num_handles = 0
        self._closed = False

    def prepare(
        self,
        topk_idx: torch.Tensor,
        *,
        num_experts: int,
        expert_alignment: int = 1,
        do_expand: bool = False,
        num_max_tokens_per_rank: int | None = None,
        previous_event: Event | None = None,
        do_handle_copy: bool = True,
    ) -> EPHandle:
        """Starts the count exchange of a routing decision and returns at once.

        Counts of the handle are waited for when first read. `dispatch(x, handle=handle)` then moves data without
        another count exchange.

        Args:
            topk_idx: int64 [num_tokens, num_topk], global expert ids, -1 masked, none twice in a row.
            num_experts: global number, a multiple of num_ranks.
            expert_alignment: an expert's first expanded row is a multiple of it.
            do_expand: rows of dispatch are one per (token, local expert).
            num_max_tokens_per_rank: bound of tokens a rank, equal on all ranks; the buffer's by default, 0 for none.
            previous_event: topk_idx is ready then.
            do_handle_copy: keep a copy of topk_idx; False keeps the tensor itself, which must not change then.

        Raises:
            UsageError: this rank's arguments are wrong.
            CommError, CommTimeoutError: at the first read of the handle, on all ranks, where a rank's ids are wrong,
                the ranks disagree, or one does not answer.
        """
        self._check_open()
        return self._start(
            "prepare",
            topk_idx,
            num_experts=num_experts,
            expert_alignment=expert_alignment,
            do_expand=do_expand,
            bound=num_max_tokens_per_rank,
            after=as_handle(previous_event),
            do_handle_copy=do_handle_copy,
        )

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        *,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Sends each token to the ranks of its experts.

        n is the number of received rows, in (source rank, token) order. With do_expand there is one row per (token,
        local expert), expert-major, and alignment gaps are zeros.

        Args:
            x: [num_tokens, hidden], bf16, fp16, fp32 or fp64, contiguous.
            topk_idx: as in `prepare`; None with a handle.
            topk_weights: fp32 or fp64 [num_tokens, num_topk].
            cumulative_local_expert_recv_stats: not supported here.
            num_experts, num_max_tokens_per_rank, expert_alignment: as in `prepare`; with a handle they may be left
                out and must equal the handle's otherwise.
            num_sms, num_qps: hints for backends with kernels.
            previous_event: inputs are ready then.
            previous_event_before_epilogue: what follows the transfer on this rank waits for it.
            async_with_compute_stream: return before the rows are there; wait for the event before reading them.
            allocate_on_comm_stream: outputs belong to the comm stream (accelerators).
            handle: a cached dispatch along a known routing decision, its do_expand included.
            do_handle_copy: as in `prepare`.
            do_cpu_sync: shapes are exact, which needs the counts: True (or None) for a fresh dispatch.
            do_expand: expanded rows.
            do_zero_padding: alignment gaps are zeros, as they always are here; needs do_expand.
            use_tma_aligned_col_major_sf: not supported here.

        Returns:
            recv_x [n or expanded rows, hidden]; recv_topk_idx int64 [n, num_topk] with local ids, -1 elsewhere (None
            with do_expand); recv_topk_weights [n, num_topk] as sent, unmasked, or one weight per expanded row (None
            where none were given); the handle; the event (without an event in it for a synchronous call).

        Raises:
            UsageError: this rank's arguments are wrong.
            CommError: another rank's are, or the ranks disagree.
            CommTimeoutError: a rank did not answer.
            ClosedError: after close().
        """
        self._check_open()
        after, epilogue = as_handle(previous_event), as_handle(previous_event_before_epilogue)
        fresh = handle is None

        def check() -> None:
            validate.hints(num_sms=num_sms, num_qps=num_qps)
            validate.dispatch_options(
                self._backend.capabilities,
                stats=cumulative_local_expert_recv_stats is not None,
                col_major_sf=use_tma_aligned_col_major_sf,
                do_cpu_sync=do_cpu_sync,
                cached=not fresh,
                padding_without_expand=do_zero_padding and not (do_expand or (handle is not None and handle.do_expand)),
            )
            validate.rows("x", x, self._backend.capabilities, self.device)
            idx = topk_idx
            if handle is not None:
                own = validate.own_handle(handle, self._backend.buffer_id)
                idx = own.topk_idx
                validate.cached(own, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, do_expand)
            if isinstance(idx, torch.Tensor) and idx.dim() == 2:
                validate.num_tokens(x, idx.shape[0], "one a token of the routing")
                validate.weights(topk_weights, tuple(idx.shape), "one weight a lane", self.device)

        problem = _problem_of(check)
        settings = self._settings_of(x, topk_weights) if problem is None else {}
        if handle is None:
            handle = self._start(
                "dispatch",
                topk_idx,
                num_experts=num_experts,
                expert_alignment=1 if expert_alignment is None else expert_alignment,
                do_expand=do_expand,
                bound=num_max_tokens_per_rank,
                after=after,
                do_handle_copy=do_handle_copy,
                num_sms=num_sms,
                settings=settings,
                problem=problem,
            )
        elif problem is not None:
            self._backend.refuse("cached dispatch", problem)
        else:
            settings |= {"handle": handle.number}
        layout = handle.layout  # waits for the counts; raises on all ranks where the exchange failed
        with self._backend.queue.allocating(allocate_on_comm_stream):
            out_x = x.new_empty(handle.num_recv_rows, x.shape[1])
            out_idx = None if handle.do_expand else torch.empty_like(
                layout.recv.local_idx, device=self.device
            )
            shape = (handle.num_recv_rows,) if handle.do_expand else (handle.num_recv_rows, handle.num_topk)
            out_weights = None if topk_weights is None else topk_weights.new_empty(shape)
        event = self._backend.dispatch(
            MoveJob(
                op="dispatch" if fresh else "cached dispatch",
                settings=None if fresh else settings,
                handle=handle,
                x=x.detach(),
                weights=None if topk_weights is None else topk_weights.detach(),
                out_x=out_x,
                out_idx=out_idx,
                out_weights=out_weights,
                after=(after,),
                before_epilogue=epilogue,
            )
        )
        return out_x, out_idx, out_weights, handle, self._overlap(event, async_with_compute_stream)

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        *,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sends rows back to the ranks of their tokens and adds them up. Weights are returned, not applied.

        Args:
            x: rows as dispatch returned them for `handle` ([n, hidden], or expanded rows), contiguous.
            handle: of the dispatch.
            topk_weights: fp32 or fp64 [n, num_topk], or [expanded rows]: routed back to the lanes.
            bias: none, one or two tensors [num_tokens, hidden] of x's dtype, added first.
            num_sms, num_qps, previous_event, previous_event_before_epilogue, async_with_compute_stream,
                allocate_on_comm_stream: as in dispatch.

        Returns:
            combined_x [num_tokens, hidden]; combined_topk_weights [num_tokens, num_topk], lane k from the rank of its
            expert, 0 at masked lanes (None where none were given); the event. Sums are fp32 in the order of the last
            lane of each rank, rounded once to x's dtype; expanded rows are added up on their rank first, in lane
            order, and rounded there. A token without any expert gets the bias, or 0.

        Raises:
            UsageError, CommError, CommTimeoutError, ClosedError: as in dispatch.
        """
        self._check_open()

        def check() -> tuple[torch.Tensor, ...]:
            validate.hints(num_sms=num_sms, num_qps=num_qps)
            own = validate.own_handle(handle, self._backend.buffer_id)
            validate.rows("x", x, self._backend.capabilities, self.device)
            validate.num_tokens(x, own.num_recv_rows, "as many as dispatch returned")
            expanded = (own.num_expanded_tokens,)
            shape = expanded if own.do_expand else (own.num_recv_tokens, own.num_topk)
            validate.weights(topk_weights, shape, "one a row" if own.do_expand else "one a lane", self.device)
            return validate.biases(bias, (own.num_tokens, x.shape[1]), x.dtype, self.device)

        biases: list[torch.Tensor] = []
        problem = _problem_of(lambda: biases.extend(check()))
        if problem is not None:
            self._backend.refuse("combine", problem)
        settings = self._settings_of(x, topk_weights) | {"handle": handle.number, "num_bias": len(biases)}
        with self._backend.queue.allocating(allocate_on_comm_stream):
            out_x = x.new_empty(handle.num_tokens, x.shape[1])
            shape = (handle.num_tokens, handle.num_topk)
            out_weights = None if topk_weights is None else topk_weights.new_empty(shape)
        event = self._backend.combine(
            MoveJob(
                op="combine",
                settings=settings,
                handle=handle,
                x=x.detach(),
                weights=None if topk_weights is None else topk_weights.detach(),
                biases=[item.detach() for item in biases],
                out_x=out_x,
                out_weights=out_weights,
                after=(as_handle(previous_event),),
                before_epilogue=as_handle(previous_event_before_epilogue),
            )
        )
        return out_x, out_weights, self._overlap(event, async_with_compute_stream)

    @staticmethod
    def capture() -> EventHandle:
        """An event at the current point of the current stream."""
        return EventHandle()

    def close(self) -> None:
        """Waits for the work queued and for the other ranks, then frees groups and threads. Collective, idempotent."""
        if not self._closed:
            self._closed = True
            self._backend.close(collective=True)

    destroy = close

    def __enter__(self) -> ElasticBuffer:
        """The buffer, closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes; where the block failed, without waiting for ranks that may not come."""
        if kind is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._backend.close(collective=False)

    def _start(
        self,
        op: str,
        topk_idx: Any,
        *,
        num_experts: Any,
        expert_alignment: Any,
        do_expand: bool,
        bound: int | None,
        after: EventHandle | None,
        do_handle_copy: bool,
        num_sms: int = 0,
        settings: dict[str, int] | None = None,
        problem: UsageError | None = None,
    ) -> EPHandle:
        """Starts a count exchange; tells the other ranks where this one's arguments are wrong."""
        limit = self.num_max_tokens_per_rank if bound is None else bound

        def check() -> None:
            validate.positive("num_max_tokens_per_rank", limit, least=0)
            validate.positive("expert_alignment", expert_alignment)
            validate.topk(topk_idx, num_experts, self.num_ranks, limit, self.device)

        problem = problem or _problem_of(check)
        if problem is not None:
            self._backend.refuse(op, problem)
        self._num_handles += 1
        settings = (settings or {}) | {
            "buffer": self._backend.buffer_id,
            "handle": self._num_handles,
            "num_experts": num_experts,
            "num_topk": topk_idx.shape[1],
            "expert_alignment": expert_alignment,
            "do_expand": int(do_expand),
            "num_max_tokens_per_rank": limit,
        }
        topk_idx = topk_idx.detach()
        kept = torch.empty_like(topk_idx) if do_handle_copy else topk_idx
        job = LayoutJob(op, settings, topk_idx, kept, num_experts, expert_alignment, limit, (after,))
        return EPHandle(
            do_expand=do_expand,
            num_experts=num_experts,
            expert_alignment=expert_alignment,
            topk_idx=kept,
            rank=self.rank,
            num_ranks=self.num_ranks,
            num_sms=num_sms,
            buffer_id=self._backend.buffer_id,
            number=self._num_handles,
            event=self._backend.start_layout(job),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this ElasticBuffer is closed; build a new one on every rank of its group")

    def _settings_of(self, x: torch.Tensor, weights: torch.Tensor | None) -> dict[str, int]:
        dtypes = self._backend.capabilities.dtypes
        return {
            "buffer": self._backend.buffer_id,
            "hidden": x.shape[1],
            "dtype": dtypes.index(x.dtype),
            "topk_weights": -1 if weights is None else dtypes.index(weights.dtype),
        }

    def _overlap(self, event: EventHandle, asynchronous: bool) -> EventOverlap:
        if asynchronous:
            return EventOverlap(event)
        event.current_stream_wait()
        return EventOverlap()


def _problem_of(check: Callable[[], object]) -> UsageError | None:
    """The mistake a check finds, as a value: the other ranks must hear of it before it is raised."""
    try:
        check()
    except UsageError as problem:
        return problem
    return None
