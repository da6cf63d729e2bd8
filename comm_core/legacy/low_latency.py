"""The low-latency calls: blocks of fixed size an expert, weights applied in combine, receive hooks.

Each (token, expert) pair is a row of its own, so that combine can weigh it: the token's rank multiplies each returned
row by its weight and adds them up in lane order, fp32, unfused, one rounding. On the transport a lane is a token with
one expert. Shapes are fixed by num_max_dispatch_tokens_per_rank; rows that nothing arrived for are 0.

On the CPU a dispatch with a hook or an event waits for no other rank: counts, rows and what they are laid out in are
complete when the hook or the event is, and a mistake of another rank is raised there. (An accelerator's queue runs on
the calling thread, which waits for the counts.) A combine starts from the counts of its dispatch; with those complete
it waits for nobody either. With enable_shrink every call ends when its work has. Any number of results may be
outstanding; where kernels carry the calls out, two (a third waits for a hook).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from comm_core import fp8
from comm_core.event import EventHandle, EventOverlap
from comm_core.handle import EPHandle
from comm_core.legacy import blocks, checks_low_latency, fast, logfmt
from comm_core.legacy import config as configs
from comm_core.legacy.blocks import BlockHandle
from comm_core.legacy.checks_low_latency import CombineArgs, DispatchArgs
from comm_core.legacy.costs import WaitCosts
from comm_core.legacy.members import Members, fill_status
from comm_core.legacy.transport import Transport, fits, packed, unpacked
from comm_core.runtime.errors import UsageError

Hook = Callable[[], None]
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class LowLatency:
    """Base of Buffer: the low-latency calls and the ranks they run on.

    Args:
        transport: of the whole group.
        group: that group.
        enable_shrink: a rank that fails in a call is masked and the call repeated without it; calls then wait.
        timeout, backend: of transports over fewer ranks.
    """

    def __init__(
        self,
        transport: Transport,
        group: dist.ProcessGroup,
        enable_shrink: bool,
        timeout: float | None,
        backend: str,
    ) -> None:
        self._transport, self._waits = transport, enable_shrink
        self._members = Members(transport, group, enable_shrink, timeout, backend)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that two outstanding low-latency results take; a Buffer of any size works."""
        return configs.low_latency_size(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, torch.Tensor, BlockHandle, EventOverlap, Hook | None]:
        """Sends each token to its experts; each local expert gets a block of num_ranks * max rows.

        Args:
            x: [T, hidden], bf16 (fp16 and fp32 too), contiguous, T at most the bound.
            topk_idx: int64 [T, num_topk], global ids, -1 masked, none twice in a row.
            num_max_dispatch_tokens_per_rank: bound of tokens a rank, the same on all.
            num_experts: global number, a multiple of the ranks.
            cumulative_local_expert_recv_stats: int32 [L], the rows of each local expert are added to it.
            dispatch_wait_recv_cost_stats: int64 [R] on the CPU, for each source the microseconds that this rank waited
                for its rows are added (`costs.py` says how they are told apart). On all ranks or on none.
            use_fp8: rows arrive as FP8 with a scale per 128 columns.
            round_scale: scales are powers of two.
            use_ue8m0: scales are exponents, four in an int32; needs round_scale.
            async_finish: return at once; wait for the event.
            return_recv_hook: return at once; call the hook before reading. Not both.

        Returns:
            recv_x [L, R * max, hidden], or (FP8, scales [L, R * max, ceil(hidden / 128)] fp32, or int32 with a quarter
            of the columns; stride 1 along the rows); recv_count int32 [L]; the handle; the event; the hook or None.

        Raises:
            UsageError, CommError, CommTimeoutError, ClosedError: as Buffer.dispatch.
        """
        args = DispatchArgs(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats, use_fp8, round_scale, use_ue8m0, async_finish, return_recv_hook,
        )  # fmt: skip
        if self._is_fast(lambda: args.check(self._transport.elastic._limits, values=False), "dispatch") and (
            fast.possible(self._transport, args)
        ):
            return self._fast_dispatch(args)
        start = time.time_ns()
        recv_x, counts, handle, event = self._members.attempt(lambda transport: self._dispatch(transport, args, start))
        return recv_x, counts, handle, *_ending(event, async_finish, return_recv_hook)

    def low_latency_combine(  # noqa: D417 (some arguments are described together)
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: BlockHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Brings rows back: the sum of weight times row over the lanes of each token.

        Args:
            x: [L, R * max, hidden], bf16 (fp16 and fp32 too), contiguous; the blocks of the dispatch.
            topk_idx: int64 [T, num_topk] of the dispatch; lanes that are -1 here are left out.
            topk_weights: fp32 [T, num_topk].
            handle: of that dispatch.
            use_logfmt: rows are rounded as LogFMT-10 does it (`logfmt.py`); they travel as fp32, so it saves no bytes.
            zero_copy: the rows are those of get_next_low_latency_combine_buffer; x gives their shape.
            async_finish, return_recv_hook: as in low_latency_dispatch.
            out: [T, hidden] of x's dtype, where the result goes.
            combine_wait_recv_cost_stats: as in low_latency_dispatch; with it the host waits for the ranks to call.

        Returns:
            [T, hidden] of x's dtype; 0 for tokens without any lane; the event; the hook or None.

        Raises: as low_latency_dispatch.
        """
        args = CombineArgs(
            x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish, return_recv_hook, out,
            combine_wait_recv_cost_stats,
        )  # fmt: skip
        if self._is_fast(lambda: args.check(self._transport.device, self._members, values=False), "combine") and (
            args.handle.fast is not None and args.cost is None and not args.use_logfmt
        ):
            result = args.x.new_empty(args.topk_idx.shape[0], args.handle[3]) if out is None else out
            second = fast.combine(self._transport, args, result)
            return result, *_fast_ending(second, async_finish, return_recv_hook)
        start = time.time_ns()
        result, event = self._members.attempt(lambda transport: self._combine(transport, args, start))
        return result, *_ending(event, async_finish, return_recv_hook)

    def get_next_low_latency_combine_buffer(self, handle: BlockHandle) -> torch.Tensor:
        """[L, R * max, hidden] bf16 to be filled and sent by the next combine of `handle` with zero_copy=True."""
        if not isinstance(handle, BlockHandle):
            raise UsageError(
                f"handle is a {type(handle).__name__}",
                allowed="a handle that low_latency_dispatch returned",
                fix="pass it on as it is",
            )
        height, num_local = handle[0].shape[1], handle[0].shape[0]
        handle.staged = handle[0].new_zeros(num_local, height, handle[3], dtype=torch.bfloat16)
        return handle.staged

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Waits for all ranks; there is nothing to clean, the calls share no memory with others."""
        configs.low_latency_size(num_max_dispatch_tokens_per_rank, hidden, self._transport.num_ranks, num_experts)
        self._members.attempt(lambda transport: transport.spread([0]))

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leaves a rank out of the low-latency calls (mask=True) or takes it in again.

        From the next call on; every rank that is left must set the same mask. Needs enable_shrink.
        """
        self._members.mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Fills int32 [R] with 1 for masked ranks (by call or by failure) and 0 for the others."""
        self._members.need_shrink()
        checks_low_latency.status(mask_status, self._transport.num_ranks)
        fill_status(self._members.masked, mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Takes every rank in again; after a failure the connections of all ranks stay broken."""
        self._members.need_shrink()
        self._members.masked.clear()

    def _close(self) -> None:
        self._members.close()

    def _dispatch(
        self, transport: Transport, args: DispatchArgs, start: int
    ) -> tuple[Rows, torch.Tensor, BlockHandle, EventHandle]:
        num_ranks, members = self._transport.num_ranks, self._members.ranks
        transport.checked(lambda: args.check(self._transport.elastic._limits))
        num_local, num_topk = args.num_experts // num_ranks, args.topk_idx.shape[1]
        height = num_ranks * args.bound
        costs = WaitCosts(transport, members, args.cost, start)
        ids = blocks.lane_ids(args.topk_idx, members, num_ranks, num_local)
        ep = transport.elastic.prepare(
            ids,
            num_experts=num_local * transport.num_ranks,
            num_max_tokens_per_rank=args.bound * num_topk,
            previous_event=costs.told,
        )
        sent: tuple[torch.Tensor, ...] = (args.x.detach(),)
        if args.use_fp8:
            sent = fp8.per_token_cast(args.x.detach(), round_scale=args.round_scale, packed=args.use_ue8m0)
        repeated = [item.repeat_interleave(num_topk, dim=0) for item in sent]
        rows = repeated[0] if len(sent) == 1 and fits(repeated[0]) else packed(repeated)
        found, moved = transport.move(ep, rows, compared=False)
        outs = [sent[0].new_zeros(num_local, height, sent[0].shape[1])]
        if args.use_fp8:
            # Scales are read along the rows: that is the dimension of stride 1.
            outs.append(sent[1].new_zeros(num_local, sent[1].shape[1], height).transpose(1, 2))
        handle = self._handle_of(args, ep, num_local, height)
        counts = torch.zeros(num_local, dtype=torch.int32, device=args.x.device)

        def settle() -> None:
            place = blocks.blocks_of(ep, members, num_ranks, height)
            flat = place.flat.to(counts.device)
            got = [found[0]] if rows is repeated[0] else unpacked(found[0], repeated)
            for out, item in zip(outs, got, strict=True):
                _raw(out)[flat // height, flat % height] = _raw(item)
            handle[0].view(-1)[flat] = (ep.layout.recv_token // num_topk).to(torch.int32)
            handle[1].copy_(place.layout_range)
            counts.copy_(place.counts)
            if args.stats is not None:
                args.stats.add_(counts)
            costs.add()

        event = transport.then(settle, [moved], [*outs, rows, *handle[:2], counts])
        self._settle(event)
        return (outs[0], outs[1]) if args.use_fp8 else outs[0], counts, handle, event

    def _is_fast(self, check: Callable[[], object], op: str) -> bool:
        """True where the backend has kernels for such calls and the arguments are right; a mistake raises."""
        if self._waits or not self._transport.elastic._backend.capabilities.low_latency:
            return False
        self._transport.elastic._check_open()
        self._transport.checked(check, op)
        return True

    def _fast_dispatch(self, args: DispatchArgs) -> tuple[Rows, torch.Tensor, BlockHandle, EventOverlap, Hook | None]:
        num_local = args.num_experts // self._transport.num_ranks
        handle = self._handle_of(args, None, num_local, self._transport.num_ranks * args.bound)
        outs, counts, second = fast.dispatch(self._transport, args, handle)
        rows = (outs[0], outs[1]) if args.use_fp8 else outs[0]
        return rows, counts, handle, *_fast_ending(second, args.async_finish, args.return_recv_hook)

    def _handle_of(self, args: DispatchArgs, ep: EPHandle | None, num_local: int, height: int) -> BlockHandle:
        """The handle, its first two fields still to be filled."""
        device = args.x.device
        src_info = torch.full((num_local, height), -1, dtype=torch.int32, device=device)
        ranges = torch.zeros(num_local, self._transport.num_ranks, dtype=torch.int64, device=device)
        handle = BlockHandle((src_info, ranges, args.bound, args.x.shape[1], args.num_experts))
        handle.ep, handle.topk_idx, handle.number = ep, args.topk_idx.clone(), self._members.number
        handle.owner, handle.staged, handle.fast = self._members, None, None
        return handle

    def _combine(self, transport: Transport, args: CombineArgs, start: int) -> tuple[torch.Tensor, EventHandle]:
        transport.checked(lambda: args.check(self._transport.device, self._members), "combine")
        handle, members = args.handle, self._members
        num_topk, hidden = handle.topk_idx.shape[1], handle[3]
        num_local, height = handle[0].shape
        costs = WaitCosts(transport, members.ranks, args.cost, start)
        transport.wait(costs.told)
        ep = handle.ep
        if ep is None or handle.number != members.number:
            ids = blocks.lane_ids(handle.topk_idx, members.ranks, self._transport.num_ranks, num_local)
            ep = transport.elastic.prepare(
                ids, num_experts=num_local * transport.num_ranks, num_max_tokens_per_rank=handle[2] * num_topk
            )
        source = handle.staged if args.zero_copy else args.x.detach()
        where = blocks.flat_rows(ep, members.ranks, handle[1], height).to(source.device)
        rows = source.reshape(-1, hidden)[where]
        back, event = transport.bring(ep, logfmt.round_trip(rows) if args.use_logfmt else rows)
        out = rows.new_empty(handle.topk_idx.shape[0], hidden) if args.out is None else args.out
        weights = args.topk_weights.detach().masked_fill(args.topk_idx < 0, 0)

        def settle() -> None:
            lanes, total = back.view(-1, num_topk, hidden), torch.zeros_like(out, dtype=torch.float32)
            for lane in range(num_topk):
                total += lanes[:, lane].float() * weights[:, lane : lane + 1]
            out.copy_(total)
            costs.add()

        event = transport.then(settle, [event], [back, out, weights])
        self._settle(event)
        return out, event

    def _settle(self, event: EventHandle) -> None:
        """Where failures are to be found and repaired, a call ends when its work has."""
        if self._waits:
            event.synchronize()


def _ending(event: EventHandle, async_finish: bool, return_recv_hook: bool) -> tuple[EventOverlap, Hook | None]:
    """The event and the hook that a call returns."""
    if return_recv_hook:
        return EventOverlap(), event.current_stream_wait
    return Transport.finish(event, async_finish), None


def _fast_ending(second: fast.Second, async_finish: bool, return_recv_hook: bool) -> tuple[EventOverlap, Hook | None]:
    """The same for a call whose second half is still to be launched: by the hook, or now."""
    if return_recv_hook:
        return EventOverlap(), lambda: second().current_stream_wait()
    return Transport.finish(second(), async_finish), None


def _raw(rows: torch.Tensor) -> torch.Tensor:
    """FP8 rows as bytes: not every operation knows the type."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows
