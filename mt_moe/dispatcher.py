"""One routing decision from counts to sums: prepare, dispatch and combine of one buffer for one layer's experts.

A dispatcher holds settings and no state. What a call needs later is in the handle and the tickets it returns, so one
dispatcher serves any number of microbatches in flight, and backward reads nothing from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from comm_core import ElasticBuffer, EPHandle, EventHandle
from mt_moe import functional
from mt_moe.functional import Cast, CombineTicket, DispatchTicket, Resend, StaticRouting
from mt_moe.weight_gradients import WeightGradients


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The rows of this rank's experts, arrived.

    Attributes:
        rows: [num_rows, hidden], expert-major, inside an expert by (source rank, token); alignment gaps are zero.
        row_weights: [num_rows], the routing weight of each row.
        counts: rows of each local expert, unaligned, on the host; None where the host does not wait for them.
        handle: what `launch_combine` needs.
        quantised: data and scales of rows that travelled so; `rows` then only carries their gradient.
    """

    rows: Tensor
    row_weights: Tensor
    counts: list[int] | None
    handle: EPHandle
    quantised: tuple[Tensor, Tensor] | None = None

    @property
    def ends(self) -> Tensor | None:
        """int32 [num_local_experts] on the device, the row after the last of each aligned group.

        None on the CPU where the counts say the same.
        """
        if self.counts is not None and self.rows.device.type == "cpu":
            return None
        return self.handle.expert_starts[1:]


class Dispatcher:
    """Moves tokens to experts and results home, as launch and wait nodes of autograd.

    Args:
        buffer: endpoint of this rank; may serve several layers.
        num_experts: over all ranks.
        expert_alignment: rows of an expert start at a multiple of it.
        max_tokens_per_rank: where not 0, shapes are those of the worst case for this bound, and nothing waits for the
            host.
        num_sms: multiprocessors of each dispatch and combine at most; 0 for automatic.

    Attributes:
        cast: packs tokens on their way to the experts; None sends them as they are.
        grad_cast: packs the gradients of the results on theirs.
    """

    def __init__(
        self,
        buffer: ElasticBuffer,
        num_experts: int,
        expert_alignment: int = 1,
        *,
        max_tokens_per_rank: int = 0,
        num_sms: int = 0,
    ) -> None:
        self.buffer = buffer
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.max_tokens_per_rank = max_tokens_per_rank
        self.num_sms = num_sms
        self.cast: Cast | None = None
        self.grad_cast: Cast | None = None

    def prepare(self, topk_idx: Tensor) -> EPHandle | StaticRouting:
        """Starts the count exchange for topk_idx int64 [num_tokens, num_topk] and returns at once.

        With a bound there is none to start: counts stay on the device and go with the dispatch.
        """
        if self.max_tokens_per_rank:
            return StaticRouting(topk_idx, self.num_experts, self.expert_alignment, self.max_tokens_per_rank)
        return self.buffer.prepare(
            topk_idx, num_experts=self.num_experts, do_expand=True, expert_alignment=self.expert_alignment
        )

    def launch_dispatch(
        self, x: Tensor, topk_weights: Tensor, handle: EPHandle | StaticRouting, after: EventHandle | None = None
    ) -> DispatchTicket:
        """Starts sending x [num_tokens, hidden] with topk_weights [num_tokens, num_topk]; waits for the counts."""
        return functional.launch_dispatch(
            self.buffer, x, topk_weights, handle, num_sms=self.num_sms, cast=self.cast, after=after
        )

    def wait_dispatch(self, ticket: DispatchTicket, weight_gradients: WeightGradients | None = None) -> Dispatched:
        """Makes the current stream wait for the rows; see `functional.wait_dispatch`."""
        rows, row_weights = functional.wait_dispatch(ticket, weight_gradients)
        counts = None if self.max_tokens_per_rank else ticket.handle.num_unaligned_recv_tokens_per_expert_list
        return Dispatched(rows, row_weights, counts, ticket.handle, ticket.quantised)

    def resend(self, x: Tensor, ticket: DispatchTicket) -> Resend:
        """The tokens of a dispatch, to be sent again in backward."""
        return Resend(self.buffer, x, ticket, self.num_sms)

    def launch_combine(
        self, rows: Tensor, handle: EPHandle, resend: Resend | None = None, after: EventHandle | None = None
    ) -> CombineTicket:
        """Starts sending the experts' results [num_rows, hidden] home."""
        return functional.launch_combine(
            self.buffer, rows, handle, num_sms=self.num_sms, resend=resend, cast=self.grad_cast, after=after
        )

    def wait_combine(self, ticket: CombineTicket) -> Tensor:
        """Makes the current stream wait for the sums [num_tokens, hidden]."""
        return functional.wait_combine(ticket)
