"""EPHandle: what dispatch returns and combine consumes.

A handle says how the tokens of one routing decision travel. Its counts come from the other ranks: they are exchanged
on the comm queue and waited for when first read, so that `prepare` can start the exchange right after the router and
nobody stands still until the numbers are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from comm_core.event import EventHandle
from comm_core.layout import RecvPlan, SendPlan, align, worst_case_rows
from comm_core.runtime import device as devices


@dataclass(frozen=True, eq=False)
class RankLayout:
    """The complete layout of one handle on one rank, as the count exchange left it.

    Tensors live on the buffer's device and are complete: the exchange has waited for them, no stream needs to.

    Attributes:
        send: the sending side.
        recv: the receiving side.
        recv_token: int64 [n], token number on its source rank of each received row.
        token_stride: S in src_token_global_idx = src_rank * S + token: num_max_tokens_per_rank where one was
            given, else the largest token count of any rank (at least 1).
        send_splits: rows to each rank.
        recv_splits: rows from each rank.
        expert_counts: rows of each local expert, unaligned.
        number: number of the call that exchanged the counts, the same on all ranks.
    """

    send: SendPlan
    recv: RecvPlan
    recv_token: torch.Tensor
    token_stride: int
    send_splits: list[int]
    recv_splits: list[int]
    expert_counts: list[int]
    number: int


@dataclass(frozen=True, eq=False)
class EPHandle:
    """One routing decision, shared by all dispatches and combines made with it.

    n is the number of received rows (one per token and source rank), L the number of local experts. Reading a count
    waits for the exchange and raises its error where it failed.

    Attributes:
        do_expand: rows are one per (token, local expert), expert-major.
        num_experts: global number.
        expert_alignment: an expert's first expanded row is a multiple of it; aligned counts are rounded up to it.
        topk_idx: int64 [num_tokens, num_topk], the ids sent (a copy by default).
        rank: this rank in its group.
        num_ranks: size of the group.
        num_sms: hint given to dispatch, 0 for automatic.
        buffer_id: number of the buffer that made the handle.
        event: complete when the counts are there.
        static_bound: num_max_tokens_per_rank of a dispatch without a host wait (do_cpu_sync=False), else 0. Where it is
            set, received tensors have the rows of the worst case, numbers of rows here are theirs, and what lies behind
            the real rows (the last value of psum_num_recv_tokens_per_scaleup_rank) is -1 for ids, else 0; behind
            expanded rows only with do_zero_padding.
        lanes: the same routing with each lane as a token of its own, for combine in a single reduction; else None.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    topk_idx: torch.Tensor
    rank: int
    num_ranks: int
    num_sms: int
    buffer_id: int
    event: EventHandle
    static_bound: int = 0
    lanes: EPHandle | None = None

    @property
    def layout(self) -> RankLayout:
        """The layout; waits for the count exchange."""
        layout = self.event.result()
        assert isinstance(layout, RankLayout)
        return layout

    @property
    def number(self) -> int:
        """Tells handles apart, in the same way on all ranks; waits for the counts only where it comes with them."""
        known = self.event.number
        return self.layout.number if known is None else known

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.topk_idx.shape[0]

    @property
    def num_topk(self) -> int:
        """Lanes of a token."""
        return self.topk_idx.shape[1]

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank; expert e lives on rank e // num_local_experts."""
        return self.num_experts // self.num_ranks

    @property
    def num_max_tokens_per_rank(self) -> int:
        """Stride of `src_token_global_idx`: the bound given, else the largest token count of any rank."""
        return self.layout.token_stride

    @property
    def num_recv_tokens(self) -> int:
        """n: rows received, one per (token, this rank); the worst case without a host wait."""
        return self._worst(False) if self.static_bound else sum(self.layout.recv_splits)

    @property
    def num_expanded_tokens(self) -> int:
        """Expanded rows, alignment gaps included; the worst case without a host wait."""
        return self._worst(True) if self.static_bound else sum(self._aligned())

    @property
    def num_recv_rows(self) -> int:
        """Rows of what dispatch returns: expanded rows with do_expand, else n."""
        return self.num_expanded_tokens if self.do_expand else self.num_recv_tokens

    @property
    def num_recv_tokens_per_expert_list(self) -> list[int]:
        """Aligned row counts of the local experts, as Python ints; none without a host wait, as in DeepEP."""
        return [] if self.static_bound else self._aligned()

    def _aligned(self) -> list[int]:
        return [align(count, self.expert_alignment) for count in self.layout.expert_counts]

    @property
    def num_unaligned_recv_tokens_per_expert_list(self) -> list[int]:
        """Real row counts of the local experts, as Python ints."""
        return list(self.layout.expert_counts)

    @property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """int32 [L], real row counts of the local experts."""
        return self._int32(self.layout.expert_counts)

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """int32 [num_ranks], inclusive prefix sum of the rows from each rank."""
        return self._int32(list(accumulate(self.layout.recv_splits)))

    @property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """int32 [L]: with do_expand the end of each expert's rows, else the inclusive prefix sum of aligned counts."""
        ends = list(accumulate(self._aligned()))
        if self.do_expand:
            aligned, real = self._aligned(), self.layout.expert_counts
            ends = [end - gap + count for end, gap, count in zip(ends, aligned, real, strict=True)]
        return self._int32(ends)

    @property
    def expert_starts(self) -> torch.Tensor:
        """int32 [L + 1], the first expanded row of each local expert, and behind them the number of expanded rows.

        For the current stream. The host waits only where it makes the layout itself.
        """
        made = self.event.expert_starts
        return self._int32([0, *accumulate(self._aligned())]) if made is None else made

    @property
    def expert_counts(self) -> torch.Tensor:
        """int32 [L], `num_unaligned_recv_tokens_per_expert` for the current stream, where the device made the layout.

        The host waits only where it makes the layout itself.
        """
        made = self.event.expert_counts
        return self.num_unaligned_recv_tokens_per_expert if made is None else made

    @property
    def recv_src_metadata(self) -> torch.Tensor:
        """int32 [n, 2 + num_topk], where each received row comes from.

        Column 0 is src_token_global_idx = src_rank * num_max_tokens_per_rank + token, column 1 is
        src_rank * num_topk + the last lane of the token on this rank, the others are the expanded row of each lane,
        -1 where the lane is not local and everywhere without do_expand. Rows behind the real ones are -1.
        """
        layout = self.layout
        recv = layout.recv
        device = recv.local_idx.device
        src_rank = torch.repeat_interleave(torch.arange(self.num_ranks, device=device), recv.recv_counts)
        lanes = torch.arange(self.num_topk, device=device).expand_as(recv.local_idx)
        last = torch.where(recv.local_idx >= 0, lanes, -1).amax(1)
        rows = recv.expand_row if self.do_expand else torch.full_like(recv.expand_row, -1)
        head = torch.stack([src_rank * layout.token_stride + layout.recv_token, src_rank * self.num_topk + last], dim=1)
        devices.keep_for_current_stream(recv.recv_counts, recv.local_idx, recv.expand_row, layout.recv_token)
        real = torch.cat([head, rows], dim=1).to(torch.int32)
        return torch.nn.functional.pad(real, (0, 0, 0, self.num_recv_tokens - real.shape[0]), value=-1)

    @property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """int32 [num_tokens, num_topk], rank * num_max_tokens_per_rank + position among the rows sent to that rank.

        Set at the last lane of each destination rank, -1 elsewhere.
        """
        layout = self.layout
        send = layout.send
        first = send.send_counts.cumsum(0) - send.send_counts
        slot = send.send_row - first[send.dst_rank.clamp_min(0)]
        slots = (self.rank * layout.token_stride + slot).masked_fill(~send.is_last_lane, -1)
        devices.keep_for_current_stream(send.send_counts, send.send_row, send.dst_rank, send.is_last_lane)
        return slots.to(torch.int32)

    def _worst(self, expand: bool) -> int:
        return worst_case_rows(
            self.static_bound, self.num_ranks, self.num_topk, self.num_local_experts, self.expert_alignment, expand
        )

    def _int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.topk_idx.device)
