"""One routing decision from counts to sums: prepare, dispatch and combine of one buffer for one layer's experts.

A dispatcher holds settings and no state. What a call needs later is in the handle and the tickets it returns, so one
dispatcher serves any number of microbatches in flight, and backward reads nothing from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from comm_core import ElasticBuffer, EPHandle
from mt_moe import functional
from mt_moe.functional import CombineTicket, DispatchTicket


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The rows of this rank's experts, arrived.

    Attributes:
        rows: [num_rows, hidden], expert-major, inside an expert by (source rank, token); alignment gaps are zero.
        row_weights: [num_rows], the routing weight of each row.
        counts: rows of each local expert, unaligned, on the host.
        handle: what `launch_combine` needs.
    """

    rows: Tensor
    row_weights: Tensor
    counts: list[int]
    handle: EPHandle


class Dispatcher:
    """Moves tokens to experts and results home, as launch and wait nodes of autograd.

    Args:
        buffer: endpoint of this rank; may serve several layers.
        num_experts: over all ranks.
        expert_alignment: rows of an expert start at a multiple of it.
    """

    def __init__(self, buffer: ElasticBuffer, num_experts: int, expert_alignment: int = 1) -> None:
        self.buffer = buffer
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment

    def prepare(self, topk_idx: Tensor) -> EPHandle:
        """Starts the count exchange for topk_idx int64 [num_tokens, num_topk] and returns at once."""
        return self.buffer.prepare(
            topk_idx, num_experts=self.num_experts, do_expand=True, expert_alignment=self.expert_alignment
        )

    def launch_dispatch(self, x: Tensor, topk_weights: Tensor, handle: EPHandle) -> DispatchTicket:
        """Starts sending x [num_tokens, hidden] with topk_weights [num_tokens, num_topk]; waits for the counts."""
        return functional.launch_dispatch(self.buffer, x, topk_weights, handle)

    def wait_dispatch(self, ticket: DispatchTicket) -> Dispatched:
        """Makes the current stream wait for the rows."""
        rows, row_weights = functional.wait_dispatch(ticket)
        counts = ticket.handle.num_unaligned_recv_tokens_per_expert_list
        return Dispatched(rows, row_weights, counts, ticket.handle)

    def launch_combine(self, rows: Tensor, handle: EPHandle) -> CombineTicket:
        """Starts sending the experts' results [num_rows, hidden] home."""
        return functional.launch_combine(self.buffer, rows, handle)

    def wait_combine(self, ticket: CombineTicket) -> Tensor:
        """Makes the current stream wait for the sums [num_tokens, hidden]."""
        return functional.wait_combine(ticket)
