"""The way of one call's tokens through the routed experts, in one piece or in chunks.

    journey = Journey(dispatcher, data_path, topk_idx)        counts are exchanged
    journey.launch(tokens, topk_weights)                      tokens travel
    ...                                                       whatever needs no rows: the shared expert
    y = journey.finish(experts, (fc1, fc2), defer)            experts, and the way home

With chunks, all dispatches are launched at once, and the rows of one chunk are computed and sent home while others
travel: of the communication, the first dispatch and the last combine stand alone. The nodes of autograd come in such
an order that backward, which runs the youngest node that is ready, mirrors it: the gradients of all chunks are sent
first, and each chunk's rows go home while another's are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mt_moe.data_path import DataPath
from mt_moe.dispatcher import Dispatched, Dispatcher
from mt_moe.expert_call import Weights
from mt_moe.expert_linear import Defer
from mt_moe.functional import CombineTicket, DispatchTicket, Resend
from mt_moe.weight_gradients import WeightGradients


class Compute(Protocol):
    """The experts of this rank on their rows."""

    def __call__(self, arrived: Dispatched, *, defer: Defer | None, rows_again: Callable[[], Tensor] | None) -> Tensor:
        """Rows to rows; arguments as in `expert_mlp`."""
        ...


class Journey:
    """See the module.

    Args:
        dispatcher: moves the rows.
        data_path: how.
        topk_idx: int64 [num_tokens, num_topk], experts of every token.
    """

    def __init__(self, dispatcher: Dispatcher, data_path: DataPath, topk_idx: Tensor) -> None:
        self._dispatcher, self._data_path = dispatcher, data_path
        self._sizes = chunk_sizes(topk_idx.shape[0], data_path.num_chunks)
        parts = (topk_idx,) if len(self._sizes) == 1 else topk_idx.split(self._sizes)
        self._handles = [dispatcher.prepare(part) for part in parts]
        self._tickets: list[DispatchTicket] = []
        self._sent: Sequence[Tensor] = ()
        self._grads = False

    def launch(self, tokens: Tensor, topk_weights: Tensor) -> None:
        """Starts sending tokens [num_tokens, hidden] with topk_weights [num_tokens, num_topk]."""
        self._grads = torch.is_grad_enabled() and (tokens.requires_grad or topk_weights.requires_grad)
        whole = len(self._sizes) == 1
        self._sent = (tokens,) if whole else tokens.split(self._sizes)
        weights = (topk_weights,) if whole else topk_weights.split(self._sizes)
        for part, weight, handle in zip(self._sent, weights, self._handles, strict=True):
            self._tickets.append(self._dispatcher.launch_dispatch(part, weight, handle))

    def finish(self, experts: Compute, weights: tuple[Weights, Weights], defer: Defer | None = None) -> Tensor:
        """The sums of every token's experts, [num_tokens, hidden].

        Args:
            experts: computes rows.
            weights: of fc1 and fc2, as `experts` gives them to `expert_mlp`.
            defer: takes the weight gradients; without it they are computed in backward, at the moment that
                `DataPath.delay_wgrad` names.
        """
        delayed = None
        if self._data_path.delay_wgrad and defer is None and self._grads:
            delayed = WeightGradients(*weights, num_chunks=len(self._sizes))
            defer = delayed.put
        resends = self._data_path.save_dispatched == "redispatch" and self._grads
        home: list[CombineTicket] = []
        for index, ticket in enumerate(self._tickets):
            arrived = self._dispatcher.wait_dispatch(ticket, delayed)
            resend: Resend | None = self._dispatcher.resend(self._sent[index], ticket) if resends else None
            rows = experts(arrived, defer=defer, rows_again=None if resend is None else resend.rows)
            del arrived  # its rows are saved where backward wants them, nowhere else
            home.append(self._dispatcher.launch_combine(rows, ticket.handle, resend))
            del rows
        self._tickets.clear()
        sums = [self._dispatcher.wait_combine(ticket) for ticket in home]
        return sums[0] if len(sums) == 1 else torch.cat(sums)


def chunk_sizes(num_tokens: int, num_chunks: int) -> list[int]:
    """Sizes of `num_chunks` parts as equal as can be, the same number on every rank, some of them 0 if need be."""
    small, more = divmod(num_tokens, num_chunks)
    return [small + (index < more) for index in range(num_chunks)]
