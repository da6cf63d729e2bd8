"""ElasticBuffer: dispatch and combine with the names and meanings of DeepEP's V2 interface.

This file checks arguments, allocates outputs and hands both to a backend. A mistake found here is not raised at
once: it goes through the backend's comparison of the call, so that it raises on every rank of the group (the rank at
fault gets the UsageError, the others a CommError that names it) and no rank is left waiting.

Beyond DeepEP there is `prepare`: it starts the count exchange right after the router, and its handle is consumed by a
cached dispatch later, so that no host wait stands between the two.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from comm_core import sizes, validate
from comm_core.backends import building
from comm_core.event import EventHandle, EventOverlap
from comm_core.experimental.interface import Experimental
from comm_core.handle import EPHandle
from comm_core.operations import Operations, Rows
from comm_core.pacing import Paced
from comm_core.runtime.errors import ClosedError
from comm_core.symmetric import Symmetric
from comm_core.validate import CombineArgs, DispatchArgs, Limits

Event = EventHandle | EventOverlap


class ElasticBuffer(Experimental, Symmetric, Paced):
    """Expert-parallel communication of one process group. Building and closing are collective calls.

    Operations are carried out in the order of the calls, which must be the same on all ranks. Any number of handles
    may be outstanding.

    Args:
        group: ranks that share the experts; expert e lives on rank e // (num_experts / num_ranks). It bootstraps
            private groups and is not used afterwards. None means the default group.
        num_bytes: size of the buffer, a multiple of 2 MiB; a call that needs more raises on every rank. None with
            `num_max_tokens_per_rank` and `hidden`: their `get_buffer_size_hint`; else without bound. The backends here
            take memory as they need it, the number is what calls are held to, so that they fit elsewhere too.
        num_cpu_bytes: of num_bytes, for stored entries (`get_engram_storage_size_hint`); a multiple of 2 MiB.
        num_max_tokens_per_rank: default bound of tokens a rank; 0 for none.
        hidden, num_topk: largest sizes of a call; 0 for no bound.
        use_fp8_dispatch: the size hint counts FP8 rows with scales; FP8 and others may be sent either way.
        deterministic: accepted; the order is always (source rank, token).
        allow_hybrid_mode: accepted; this group is one level.
        allow_multiple_reduction: expanded rows of a token are added up on their rank first; with False every row
            crosses, all are added up in one fp32 sum in lane order, rounded once.
        prefer_overlap_with_compute, sl_idx, num_allocated_qps, num_gpu_timeout_secs: hints for other transports.
        num_cpu_timeout_secs: bound of every wait in seconds; EP_CPU_TIMEOUT_SECS or 300 by default.
        explicitly_destroy: accepted; a buffer is always closed explicitly.
        backend: "auto" or a name of `backends.registry.names()`.
        device: where tensors live; the device of the group's torch.distributed backend by default.

    Attributes:
        rank, rank_idx: this rank in the group.
        num_ranks: size of the group.
        num_bytes: as given or as follows from the sizes, 0 without bound.
        num_scaleout_ranks, scaleout_rank_idx, num_scaleup_ranks, scaleup_rank_idx: 1, 0, num_ranks, rank.
        num_rdma_ranks, num_nvlink_ranks: 1, num_ranks.

    Raises:
        UsageError: an option of this rank that can not be.
        CommError: one of another rank, or the ranks were given different options.
        PeerTimeout: a rank of the group did not arrive.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
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
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        self._closed = True  # until the backend exists
        numbers = {"num_max_tokens_per_rank": num_max_tokens_per_rank, "hidden": hidden, "num_topk": num_topk}
        same = numbers | {"num_bytes": num_bytes, "num_cpu_bytes": num_cpu_bytes}
        same |= {"allow_multiple_reduction": allow_multiple_reduction}
        self.group, self._backend = building.build(
            group, backend, device, num_cpu_timeout_secs, same,
            lambda: building.check_sizes(num_bytes, num_cpu_bytes, numbers | {"num_allocated_qps": num_allocated_qps}),
        )  # fmt: skip
        self.rank = self.rank_idx = self._backend.rank
        self.num_ranks, self.device = self._backend.num_ranks, self._backend.device
        self.num_scaleout_ranks, self.scaleout_rank_idx = 1, 0
        self.num_scaleup_ranks, self.scaleup_rank_idx = self.num_ranks, self.rank
        self.num_rdma_ranks, self.num_nvlink_ranks = 1, self.num_ranks
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute, self.deterministic = prefer_overlap_with_compute, deterministic
        self.num_allocated_qps, self.explicitly_destroy = num_allocated_qps, explicitly_destroy
        self.num_max_tokens_per_rank, self.num_bytes = num_max_tokens_per_rank, num_bytes or 0
        if num_bytes is None and num_max_tokens_per_rank and hidden:
            self.num_bytes = sizes.buffer_bytes(
                num_max_tokens_per_rank, hidden, num_topk, self.num_ranks,
                use_fp8_dispatch=use_fp8_dispatch, multiple_reduction=allow_multiple_reduction,
            )  # fmt: skip
        self._limits = self._limits_of(None if num_bytes is None else num_bytes - num_cpu_bytes, (hidden, num_topk))
        self._operations = Operations(self._backend, self._limits, allow_multiple_reduction)
        self._start_experimental(self._backend, num_bytes, num_cpu_bytes)
        self._closed = False

    def _limits_of(self, num_bytes: int | None, sizes_given: tuple[int, int]) -> Limits:
        able = self._backend.capabilities
        return Limits(
            device=self.device,
            num_ranks=self.num_ranks,
            buffer_id=self._backend.buffer_id,
            num_max_tokens_per_rank=self.num_max_tokens_per_rank,
            dtypes=able.dtypes,
            hidden_multiple=able.hidden_multiple,
            worst_case_outputs=able.worst_case_outputs,
            fp8=self.device.type in able.fp8_kinds,
            num_bytes=num_bytes,
            sizes=sizes_given,
            multiple_reduction=self.allow_multiple_reduction,
        )

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
            do_expand: rows of dispatch are one per (token, local expert), expert-major.
            num_max_tokens_per_rank: bound of tokens a rank, equal on all ranks; the buffer's by default, 0 for none.
            previous_event: topk_idx is ready then.
            do_handle_copy: keep a copy of topk_idx; False keeps the tensor itself, which must not change then.

        Raises:
            UsageError: this rank's arguments are wrong (ids: at the first read of the handle).
            CommError, CommTimeoutError: at the first read of the handle, where another rank's arguments are wrong,
                the ranks disagree, or one does not answer.
        """
        self._check_open()
        bound = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        problem = validate.problem_of(
            lambda: validate.routing(topk_idx, num_experts, expert_alignment, bound, self._limits)
        )
        if problem is not None:
            self._backend.refuse("prepare", problem)
        return self._operations.start(
            "prepare",
            topk_idx,
            {
                "num_experts": num_experts,
                "expert_alignment": expert_alignment,
                "do_expand": int(do_expand),
                "num_max_tokens_per_rank": bound,
            },
            previous_event,
            copy=do_handle_copy,
        )

    def dispatch(  # noqa: D417 (most arguments are those of prepare)
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
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
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Sends each token to the ranks of its experts: n rows arrive here, in (source rank, token) order.

        With do_expand one row per (token, local expert) comes out, expert-major, alignment gaps zero. Arguments not
        named here are as in `prepare`.

        Args:
            x: [num_tokens, hidden], bf16, fp16, fp32 or fp64, contiguous; or (data, scales): FP8 data, scales fp32 or
                int32 [num_tokens, any number of columns] with any strides (`comm_core.fp8` makes both).
            topk_weights: fp32 or fp64 [num_tokens, num_topk].
            cumulative_local_expert_recv_stats: int32 [num_local_experts], real counts are added; not with a handle.
            num_sms, num_qps: hints for backends with kernels.
            previous_event, previous_event_before_epilogue: the transfer, what follows it here, wait for these.
            async_with_compute_stream: return before the rows are there; wait for the event before reading them.
            allocate_on_comm_stream: outputs belong to the comm stream (accelerators).
            handle: of a known routing decision (a cached dispatch); its settings may be left out.
            do_cpu_sync: False gives outputs the shape of the worst case, which follows from num_max_tokens_per_rank,
                instead of waiting for the counts: see `EPHandle.static_bound`. (On accelerators the collective backend
                still reads its counts on the host.)
            do_zero_padding: with do_expand: rows of the worst case behind the last expert's are zeros, and not left as
                they are. Gaps between experts are always zero.
            use_tma_aligned_col_major_sf: received scales, if any, lie column by column (`fp8.empty_column_major`).

        Returns:
            recv_x, or (data, scales); recv_topk_idx int64 [n, num_topk], local ids, -1 elsewhere (None with do_expand);
            recv_topk_weights [n, num_topk] as sent, or one weight a row with do_expand (None without weights); the
            handle; the event, empty for a synchronous call.

        Raises: UsageError: this rank's arguments are wrong. CommError: another rank's are, or the ranks disagree.
            CommTimeoutError: a rank did not answer. ClosedError: after close().
        """
        args = DispatchArgs(
            x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank,
            expert_alignment, num_sms, num_qps, previous_event, previous_event_before_epilogue,
            allocate_on_comm_stream, handle, do_handle_copy, do_cpu_sync, do_expand, do_zero_padding,
            use_tma_aligned_col_major_sf,
        )  # fmt: skip
        recv_x, recv_topk_idx, recv_topk_weights, handle, event = self._dispatch(args)
        return recv_x, recv_topk_idx, recv_topk_weights, handle, _overlap(event, async_with_compute_stream)

    def combine(  # noqa: D417 (most arguments are those of dispatch)
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event | None = None,
        previous_event_before_epilogue: Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sends rows back to the ranks of their tokens and adds them up. Weights are returned, not applied.

        Sums are fp32 (fp64 for fp64) in the order of the last lane of each rank, rounded once to x's dtype; expanded
        rows are added up on their rank first, in lane order, and rounded there. A token without any expert gets the
        bias, or 0. Arguments not named here are as in `dispatch`.

        Args:
            x: rows as dispatch returns them for `handle` ([n, hidden], or expanded rows, more of which are left out),
                contiguous.
            handle: of that dispatch.
            topk_weights: fp32 or fp64 [n, num_topk], or one a row with do_expand: routed back to the lanes.
            bias: none, one or two tensors [num_tokens, hidden] of x's dtype, added first.

        Returns:
            combined_x [num_tokens, hidden]; combined_topk_weights [num_tokens, num_topk], lane k from the rank of its
            expert, 0 at masked lanes (None without weights); the event, empty for a synchronous call.

        Raises: as `dispatch`.
        """
        args = CombineArgs(
            x, handle, topk_weights, bias, num_sms, num_qps, previous_event, previous_event_before_epilogue,
            allocate_on_comm_stream,
        )  # fmt: skip
        combined_x, combined_topk_weights, event = self._combine(args)
        return combined_x, combined_topk_weights, _overlap(event, async_with_compute_stream)

    @staticmethod
    def capture() -> EventHandle:
        """An event at the current point of the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The stream that moves data; None on the CPU, where a thread does."""
        return self._backend.queue.stream

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Returns when all ranks are here and the work each issued before is done. Collective.

        Args:
            use_comm_stream: accepted; both the current stream and the comm stream are waited for.
            with_cpu_sync: accepted; the host always waits.
            sequential: accepted.
        """
        self._check_open()
        self._backend.barrier().synchronize()

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """`num_bytes` for these sizes, a multiple of 2 MiB (formula: `comm_core.sizes`). Does not communicate."""
        for name, value in (("num_max_tokens_per_rank", num_max_tokens_per_rank), ("hidden", hidden)):
            validate.whole(name, value)
        validate.whole("num_topk", num_topk, least=0)
        num_ranks = dist.get_world_size(validate.member_of(group))
        return sizes.buffer_bytes(
            num_max_tokens_per_rank, hidden, num_topk, num_ranks,
            use_fp8_dispatch=use_fp8_dispatch, multiple_reduction=allow_multiple_reduction,
        )  # fmt: skip

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *speeds: float, **named: float) -> int:
        """A value for `num_sms`: 0, automatic. No backend here runs kernels of its own, so there is none to count.

        Args:
            num_experts: not used.
            num_topk: not used.
            *speeds: DeepEP's link speeds; not used.
            **named: the same by name.
        """
        return 0

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """A value for `num_qps`: 0, automatic, as in `get_theoretical_num_sms`."""
        return 0

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(scale-out ranks, scale-up ranks): the group is one level."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(RDMA ranks, NVLink ranks): the same."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

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

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this ElasticBuffer is closed; build a new one on every rank of its group")

    def _dispatch(
        self, args: DispatchArgs
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventHandle]:
        self._check_open()
        problem = validate.problem_of(lambda: args.check(self._limits))
        if problem is not None:
            self._backend.refuse("dispatch" if args.handle is None else "cached dispatch", problem)
        return self._operations.dispatch(args)

    def _combine(self, args: CombineArgs) -> tuple[torch.Tensor, torch.Tensor | None, EventHandle]:
        self._check_open()
        problem = validate.problem_of(lambda: args.check(self._limits))
        if problem is not None:
            self._backend.refuse("combine", problem)
        return self._operations.combine(args)


def _overlap(event: EventHandle, asynchronous: bool) -> EventOverlap:
    if asynchronous:
        return EventOverlap(event)
    event.current_stream_wait()
    return EventOverlap()
