"""Buffer: V1's layout, dispatch and combine.

    counts = buffer.get_dispatch_layout(topk_idx, num_experts)
    recv_x, recv_idx, recv_weights, per_expert, handle, event = buffer.dispatch(x, ...the counts, topk_idx, weights)
    combined, _, event = buffer.combine(rows, handle)

Differences to V2: ranks are chosen by the caller, weights of lanes that live elsewhere arrive as 0, and the rows of a
token are added up in the order of the ranks (fp32, biases first, one rounding). A mistake raises on every rank.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist

from comm_core import layout, validate
from comm_core.elastic import Event
from comm_core.event import EventHandle, EventOverlap, as_handle
from comm_core.legacy import checks, routing
from comm_core.legacy import config as configs
from comm_core.legacy.config import Config
from comm_core.legacy.fresh import FreshDispatch
from comm_core.legacy.local import LocalMemory, Runtime
from comm_core.legacy.low_latency import LowLatency
from comm_core.legacy.routing import BufferHandle
from comm_core.legacy.transport import Transport
from comm_core.runtime.errors import UsageError

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Buffer(LowLatency):
    """Expert-parallel communication with DeepEP's V1 interface. Building and closing are collective calls.

    Args:
        group: ranks that share the experts; any number of them.
        num_nvl_bytes, num_rdma_bytes: sizes as the caller planned them, of what get_local_buffer_tensor shows; the
            backends here take memory as they need it, calls of any size work.
        low_latency_mode: accepted; the low-latency calls work on every buffer.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl: hints for other transports.
        explicitly_destroy: accepted; call `destroy` (or leave it to the end of the process).
        enable_shrink: a rank that fails in a low-latency call is masked and the others go on; see `shrink.py`.
        comm: only None (an MPI communicator elsewhere).
        num_cpu_timeout_secs, backend, device: as in ElasticBuffer.

    Attributes:
        rank, group_size, group: place in the group.
        num_sms: hint for kernels, of the class (`set_num_sms`).
        device: where tensors live.
        runtime: answers of V1's extension object (`Runtime`); None after destroy.
        num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy, enable_shrink: as given.

    Raises:
        UsageError: an argument is wrong. CommTimeoutError: a rank did not arrive.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        num_cpu_timeout_secs: float | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        if comm is not None:
            raise UsageError("comm", allowed="group, a torch.distributed group", fix="pass group and leave comm out")
        self.num_nvl_bytes = validate.whole("num_nvl_bytes", num_nvl_bytes, least=0)
        self.num_rdma_bytes = validate.whole("num_rdma_bytes", num_rdma_bytes, least=0)
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self.group = validate.member_of(group)
        transport = Transport(self.group, num_cpu_timeout_secs, backend, device)
        super().__init__(transport, self.group, enable_shrink, num_cpu_timeout_secs, backend)
        self.rank, self.group_size, self.device = transport.rank, transport.num_ranks, transport.device
        self._memory = (
            LocalMemory("num_nvl_bytes", self.num_nvl_bytes, self.device),
            LocalMemory("num_rdma_bytes", self.num_rdma_bytes, self.device),
        )
        self.runtime: Runtime | None = Runtime(self)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: what callers ask it for, FP8 rows, works everywhere. Nothing is compiled for one architecture."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Sets the number of processors that new default configurations name; even."""
        Buffer.num_sms = configs.even_sms(new_num_sms)

    @staticmethod
    def capture() -> EventOverlap:
        """An event at the current point of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A configuration for dispatch; any number of ranks."""
        return configs.dispatch_config(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """A configuration for combine; any number of ranks."""
        return configs.combine_config(Buffer.num_sms, num_ranks)

    def get_comm_stream(self) -> Any:
        """The stream that communication runs on; None on the CPU, where it is a thread."""
        return self._transport.elastic._backend.queue._stream

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """A view of this rank's own memory of num_nvl_bytes (or num_rdma_bytes), zeros at first.

        All views of one of the two share it; they stay valid after `destroy`. Communication does not use this memory:
        nothing written here is sent or overwritten.

        Args:
            dtype: element type.
            size: shape; all that fits, in one dimension, without it.
            offset: where the view begins, in bytes, a multiple of an element.
            use_rdma_buffer: the memory of num_rdma_bytes.

        Raises:
            UsageError: there is not that much. ClosedError: after destroy().
        """
        self._transport.elastic._check_open()
        return self._memory[int(use_rdma_buffer)].view(dtype, size, offset)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts what a routing decision sends where. Local, but a mistake raises on the other ranks' next call.

        Args:
            topk_idx: int64 [T, num_topk], global ids, -1 masked, none twice in a row.
            num_experts: global number, a multiple of the ranks.
            previous_event: topk_idx is ready then.
            async_finish: return the event of the counts.
            allocate_on_comm_stream: needs previous_event and async_finish.

        Returns:
            num_tokens_per_rank int32 [R]; None (counts between domains); num_tokens_per_expert int32 [num_experts];
            is_token_in_rank bool [T, R]; the event.
        """
        transport = self._transport

        def check() -> None:
            checks.stream_options(previous_event, async_finish, allocate_on_comm_stream)
            validate.routing(topk_idx, num_experts, 1, 0, transport.elastic._limits)
            transport.wait(previous_event)
            problem = layout.check_ids(topk_idx, num_experts)
            if problem is not None:
                raise problem

        transport.checked(check)
        counts = routing.layout_of(topk_idx, num_experts, transport.num_ranks)
        event = EventOverlap(EventHandle(transport.device)) if async_finish else EventOverlap()
        return counts.num_tokens_per_rank, None, counts.num_tokens_per_expert, counts.is_token_in_rank, event

    def dispatch(  # noqa: D417 (some arguments are described together)
        self,
        x: Rows,
        handle: BufferHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, BufferHandle | None, EventOverlap]:
        """Sends each token to its ranks; rows arrive in (source rank, token) order.

        The host waits for the counts of the other ranks, unless num_worst_tokens and async_finish are given: then, on
        the CPU, the call waits for nobody. A cached dispatch waits where the counts of its handle are not there yet.

        Args:
            x: [T, hidden] of any dtype and width, contiguous; or (FP8 [T, hidden], scales fp32 or int32 [T, P] with
                any strides).
            handle: a cached dispatch along an earlier one; then nothing but x and the options below may be given.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: as get_dispatch_layout returns them.
            num_tokens_per_rdma_rank: ignored; there is one domain.
            topk_idx, topk_weights: int64 and fp32 [T, num_topk], both or neither; they travel with the rows.
            expert_alignment: the counts an expert are rounded up to it.
            num_worst_tokens: rows of every result, at least those that arrive; needs topk_idx. What lies beyond is
                -1 in recv_topk_idx and 0 elsewhere.
            config: its number of channels shapes the handle.
            previous_event, async_finish, allocate_on_comm_stream: as in get_dispatch_layout.

        Returns:
            recv_x (or the pair, scales row-major); recv_topk_idx int64 [n, num_topk], local ids, -1 elsewhere;
            recv_topk_weights, 0 elsewhere; aligned counts of the local experts ([] with num_worst_tokens); the handle;
            the event, which completes the tensors of the handle too and raises mistakes that show in values where
            the host does not wait. A cached dispatch returns None for all but the first and the last.

        Raises:
            UsageError: this rank's arguments are wrong. CommError: another rank's are, or the ranks disagree.
            CommTimeoutError: a rank did not answer. ClosedError: after destroy().
        """
        args = checks.DispatchArgs(
            x, handle, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights,
            expert_alignment, num_worst_tokens, config, previous_event, async_finish, allocate_on_comm_stream,
        )  # fmt: skip
        transport = self._transport
        transport.checked(
            lambda: args.check(transport.device, transport.num_ranks, transport.elastic._limits.buffer_id)
        )
        if handle is not None:
            return self._cached(args)
        call = FreshDispatch(transport, args, Buffer.num_sms // 2 if config is None else config.num_channels)
        event = call.run()
        idx, weights = (None, None) if topk_idx is None else call.outs[-2:]
        done = transport.finish(event, async_finish)
        return _rows(x, call.outs), idx, weights, call.expert_counts(), call.handle, done

    def internode_dispatch(
        self,
        x: Rows,
        handle: BufferHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        num_worst_tokens: int = 0,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, BufferHandle | None, EventOverlap]:
        """`dispatch`: which hosts the ranks are on makes no difference. The handle is dispatch's, too."""
        return self.dispatch(
            x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert,
            topk_idx, topk_weights, expert_alignment, num_worst_tokens, config, previous_event, async_finish,
            allocate_on_comm_stream,
        )  # fmt: skip

    def combine(  # noqa: D417 (some arguments are described together)
        self,
        x: torch.Tensor,
        handle: BufferHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sends rows back and adds up those of a token: fp32, biases first, then ranks ascending, one rounding.

        Args:
            x: [n, hidden] rows of the dispatch, bf16, fp16, fp32 or fp64, any width, contiguous.
            handle: of that dispatch.
            topk_weights: fp32 [n, num_topk]; added up over the ranks of a token, lane by lane.
            bias: none, one or two tensors [T, hidden] of x's dtype.
            config: checked; the backends need none.
            previous_event, async_finish, allocate_on_comm_stream: as in get_dispatch_layout.

        Returns:
            [T, hidden] of x's dtype; fp32 [T, num_topk] or None; the event.

        Raises: as dispatch.
        """
        args = checks.CombineArgs(
            x, handle, topk_weights, bias, config, previous_event, async_finish, allocate_on_comm_stream
        )
        transport = self._transport
        transport.checked(lambda: args.check(transport.device, transport.elastic._limits.buffer_id), "combine")
        num_rows = handle.ep.num_recv_tokens  # complete with the event of the dispatch
        out, event = transport.bring(
            handle.ep,
            x.detach()[:num_rows],
            [item.detach() for item in args.biases],
            after=as_handle(previous_event),
            on_comm_stream=allocate_on_comm_stream,
        )
        weights = None
        if topk_weights is not None:
            weights, event = transport.bring(handle.ep, topk_weights.detach()[:num_rows], after=event)
        return out, weights, transport.finish(event, async_finish)

    def internode_combine(
        self,
        x: torch.Tensor,
        handle: BufferHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """`combine`: which hosts the ranks are on makes no difference."""
        return self.combine(
            x, handle, topk_weights, bias, config, previous_event, async_finish, allocate_on_comm_stream
        )

    def destroy(self) -> None:
        """Waits for the work queued and for the other ranks, then frees groups and threads. Collective, idempotent."""
        self.runtime = None
        self._close()

    def _cached(self, args: checks.DispatchArgs) -> tuple[Rows, None, None, None, None, EventOverlap]:
        """A dispatch along the handle in `args`."""
        parts = [item.detach() for item in (args.x if isinstance(args.x, tuple) else (args.x,))]
        outs, event = self._transport.send(
            args.handle.ep, parts[0], parts[1:], num_rows=args.handle.num_rows, after=as_handle(args.previous_event),
            on_comm_stream=args.allocate_on_comm_stream,
        )  # fmt: skip
        return _rows(args.x, outs), None, None, None, None, self._transport.finish(event, args.async_finish)


def _rows(x: Rows, outs: list[torch.Tensor]) -> Rows:
    return (outs[0], outs[1]) if isinstance(x, tuple) else outs[0]
