"""Dispatch and combine as autograd nodes, two nodes each, so that overlap holds in forward and in backward alike.

A communication that is one autograd node can hide behind nothing in backward: the engine runs the node, waits for its
result, and only then goes on. Here each one is a pair, *launch* and *wait*:

    ticket = launch_dispatch(buffer, x, topk_weights, handle)       # starts, returns at once
    shared = shared_experts(aliases[2])                             # runs meanwhile
    rows, row_weights = wait_dispatch(ticket)                       # the current stream waits

The backward of *wait* launches the opposite communication and the backward of *launch* waits for it. Autograd runs
ready nodes youngest first, so the backward of whatever stands between the two in forward runs between them in backward.

What belongs to a call travels in its ticket and in the nodes' ctx (handle and event), never on the buffer: any number
of microbatches and layers may be in flight. Every rank runs the same nodes whatever its counts: gradients that nobody
produced are materialised as zeros, because a node that is skipped on one rank leaves its peers waiting.

The node that launches the last communication of a layer's backward, *wait* of the dispatch, can hold work for the time
it takes: given a `WeightGradients` it computes what is left of them behind the launch and returns them as its own
gradients, so that accumulation and hooks of the weights are those of autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from comm_core import ElasticBuffer, EPHandle, EventHandle, EventOverlap
from mt_moe.weight_gradients import WeightGradients


@dataclass(frozen=True, slots=True)
class StaticRouting:
    """A routing decision whose dispatch has the shape of the worst case and waits for nothing on the host.

    Attributes:
        topk_idx: int64 [num_tokens, num_topk].
        num_experts: over all ranks.
        expert_alignment: an expert's rows start at a multiple of it.
        max_tokens_per_rank: bound of tokens a rank, from which the shapes follow.
    """

    topk_idx: Tensor
    num_experts: int
    expert_alignment: int
    max_tokens_per_rank: int


class Cast(Protocol):
    """How rows travel in fewer bytes than they have. The cast is straight-through: its gradient is the identity."""

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Data and scales of rows [n, hidden]."""
        ...

    def unpack(self, data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of data and scales."""
        ...


class Resend:
    """The tokens of a dispatch, to be sent once more in backward: the rows need not be kept meanwhile.

    Args:
        buffer: the endpoint of this rank.
        x: [num_tokens, hidden], as dispatched; must not change before backward.
        ticket: of the dispatch.
        num_sms: as in `launch_dispatch`.
    """

    def __init__(self, buffer: ElasticBuffer, x: Tensor, ticket: DispatchTicket, num_sms: int = 0) -> None:
        self._buffer, self._x, self._handle, self._num_sms = buffer, x.detach().contiguous(), ticket.handle, num_sms
        self._rows: Tensor | None = None
        self._event: EventOverlap | None = None

    def launch(self) -> None:
        """Starts sending, on every rank at the same place in the order of calls."""
        self._rows, _, _, _, self._event = self._buffer.dispatch(
            self._x,
            handle=self._handle,
            num_sms=self._num_sms,
            do_zero_padding=True,
            async_with_compute_stream=True,
        )

    def rows(self) -> Tensor:
        """The rows, for the current stream. Handed out once."""
        rows, event, self._rows, self._event = self._rows, self._event, None, None
        assert rows is not None and event is not None, "rows of a resend without a launch"
        event.current_stream_wait()
        return rows


class _Exchange:
    """What the launch and wait node of one call share: the event in flight and, in backward, its results."""

    __slots__ = (
        "after", "buffer", "cast", "event", "handle", "num_sms", "pending", "quantised", "resend", "sent",
        "weight_gradients",
    )  # fmt: skip

    def __init__(self, buffer: ElasticBuffer, handle: EPHandle | StaticRouting, num_sms: int) -> None:
        self.buffer = buffer
        self.handle = handle
        self.num_sms = num_sms
        self.after: EventHandle | None = None
        self.cast: Cast | None = None
        self.quantised: tuple[Tensor, Tensor] | None = None
        self.sent: tuple[Tensor, Tensor] | None = None  # held until it has been read
        self.resend: Resend | None = None
        self.weight_gradients: WeightGradients | None = None
        self.event: EventOverlap | None = None
        self.pending: tuple[Tensor, ...] = ()

    def wait(self) -> None:
        """Makes the current stream wait for the communication launched last; a second wait is an error of ours."""
        event, self.event = self.event, None
        assert event is not None, "wait without a launch before it"
        event.current_stream_wait()
        self.sent = None

    def beside(self) -> dict[str, Any]:
        """How a transfer starts: behind the event in `after`, for one time, else behind the current stream's work."""
        after, self.after = self.after, None
        ready = {} if after is None else {"previous_event": after, "allocate_on_comm_stream": True}
        return {"num_sms": self.num_sms, "async_with_compute_stream": True, **ready}

    def packed(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Rows as they travel."""
        if self.cast is None:
            return x
        self.sent = self.cast.pack(x)
        return self.sent

    def take(self) -> tuple[Tensor, ...]:
        """The results that the backward of the wait node left here, once they have arrived."""
        self.wait()
        pending, self.pending = self.pending, ()
        return pending

    def routing(self) -> dict[str, Any]:
        """What says to `dispatch` where tokens go: a handle, or ids and the bound that gives the shapes."""
        if isinstance(self.handle, EPHandle):
            return {"handle": self.handle}
        given = self.handle
        return {
            "topk_idx": given.topk_idx,
            "num_experts": given.num_experts,
            "expert_alignment": given.expert_alignment,
            "num_max_tokens_per_rank": given.max_tokens_per_rank,
            "do_expand": True,
            "do_cpu_sync": False,
        }

    def known(self) -> EPHandle:
        """The handle, after the launch."""
        assert isinstance(self.handle, EPHandle), "a handle is there once the dispatch is launched"
        return self.handle


@dataclass(frozen=True, slots=True)
class DispatchTicket:
    """A dispatch under way. `rows` and `row_weights` must not be read before `wait_dispatch`."""

    rows: Tensor
    row_weights: Tensor
    handle: EPHandle
    _exchange: _Exchange

    @property
    def quantised(self) -> tuple[Tensor, Tensor] | None:
        """Data and scales of rows that travel so; `rows` then has no values and carries their gradient."""
        return self._exchange.quantised

    def start_after(self, event: EventHandle) -> None:
        """The backward of this communication starts behind `event`, not behind all work of the current stream."""
        self._exchange.after = event


@dataclass(frozen=True, slots=True)
class CombineTicket:
    """A combine under way. `y` must not be read before `wait_combine`."""

    y: Tensor
    handle: EPHandle
    _exchange: _Exchange

    def start_after(self, event: EventHandle) -> None:
        """The backward of this communication starts behind `event`, not behind all work of the current stream."""
        self._exchange.after = event


class _LaunchDispatch(torch.autograd.Function):
    """Forward starts the dispatch; backward waits for the combine that brings the gradients home."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, topk_weights: Tensor, exchange: _Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        rows, _, row_weights, exchange.handle, exchange.event = exchange.buffer.dispatch(
            exchange.packed(x),
            topk_weights=topk_weights,
            do_zero_padding=True,
            **exchange.beside(),
            **exchange.routing(),
        )
        assert row_weights is not None, "weights were given"
        if isinstance(rows, tuple):
            # Autograd would cast the gradient of an FP8 tensor to FP8: a tensor of one element stands for the rows.
            exchange.quantised = rows
            rows = x.new_zeros(1).expand(rows[0].shape)
        return rows, row_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _rows: Tensor, _row_weights: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_topk_weights = ctx.exchange.take()
        needs = ctx.needs_input_grad
        return grad_x if needs[0] else None, grad_topk_weights if needs[1] else None, None


class _WaitDispatch(torch.autograd.Function):
    """Forward waits for the rows; backward starts the combine of their gradients and passes placeholders on.

    `weights` are those whose gradients backward computes behind that launch, if any.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, row_weights: Tensor, exchange: _Exchange, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        exchange.wait()
        return rows.view_as(rows), row_weights.view_as(row_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_row_weights: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        grad_x, grad_topk_weights, exchange.event = exchange.buffer.combine(
            grad_rows.contiguous(),
            exchange.known(),
            topk_weights=grad_row_weights.contiguous(),
            **exchange.beside(),
        )
        exchange.pending = (grad_x, grad_topk_weights)
        held = exchange.weight_gradients
        # Autograd checks shapes, so the launch node is given the gradients of the rows; it ignores them.
        return grad_rows, grad_row_weights, None, *(() if held is None else held.finish())


class _LaunchCombine(torch.autograd.Function):
    """Forward starts the combine; backward waits for the dispatch that brings the gradients of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange, ctx.dtype = exchange, rows.dtype
        y, _, exchange.event = exchange.buffer.combine(rows, exchange.known(), **exchange.beside())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _y: Tensor) -> tuple[Tensor | None, ...]:
        grad_rows, *scales = ctx.exchange.take()
        return ctx.exchange.cast.unpack(grad_rows, scales[0], ctx.dtype) if scales else grad_rows, None


class _WaitCombine(torch.autograd.Function):
    """Forward waits for the sums; backward starts the cached dispatch of their gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        alias: Tensor = y.view_as(y)
        return alias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        grad_rows, _, _, _, exchange.event = exchange.buffer.dispatch(
            exchange.packed(grad_y.contiguous()),
            handle=exchange.known(),
            do_zero_padding=True,
            **exchange.beside(),
        )
        exchange.pending = grad_rows if isinstance(grad_rows, tuple) else (grad_rows,)
        if exchange.resend is not None:
            exchange.resend.launch()
        return grad_y, None


def launch_dispatch(
    buffer: ElasticBuffer,
    x: Tensor,
    topk_weights: Tensor,
    handle: EPHandle | StaticRouting,
    *,
    num_sms: int = 0,
    cast: Cast | None = None,
    after: EventHandle | None = None,
) -> DispatchTicket:
    """Starts sending every token to the ranks of its experts, one row for each (token, local expert).

    Args:
        buffer: the endpoint of this rank.
        x: [num_tokens, hidden]. Not kept for backward: its storage may be freed once the wait is over, not before.
        topk_weights: [num_tokens, num_topk] fp32 or fp64; lanes masked in `topk_idx` are ignored and get gradient 0.
        handle: from `buffer.prepare(topk_idx, num_experts=..., do_expand=True, expert_alignment=...)`; or a
            `StaticRouting`, whose ids are sent along.
        num_sms: multiprocessors to use at most, here and in backward; 0 for automatic.
        cast: packs the tokens, which then arrive as `ticket.quantised`. Their gradients travel as they are.
        after: starts behind this event, at which the tokens are ready; without it behind all work issued before.

    Returns:
        A ticket for `wait_dispatch`. Gradients flow to `x` (sum over its rows) and to `topk_weights`.
    """
    exchange = _Exchange(buffer, handle, num_sms)
    exchange.cast, exchange.after = cast, after
    rows, row_weights = _LaunchDispatch.apply(x.contiguous(), topk_weights.contiguous(), exchange)
    return DispatchTicket(rows, row_weights, exchange.known(), exchange)


def wait_dispatch(ticket: DispatchTicket, weight_gradients: WeightGradients | None = None) -> tuple[Tensor, Tensor]:
    """Makes the current stream wait for a dispatch.

    Args:
        ticket: of the dispatch.
        weight_gradients: computed in backward while the gradients of the rows travel home, where given.

    Returns:
        rows [num_rows, hidden] in expert-major order, inside an expert by (source rank, token), alignment gaps zero;
        row_weights [num_rows] in the dtype of `topk_weights`, the routing weight of each row.
    """
    ticket._exchange.weight_gradients = weight_gradients
    weights = () if weight_gradients is None else weight_gradients.weights
    rows, row_weights = _WaitDispatch.apply(ticket.rows, ticket.row_weights, ticket._exchange, *weights)
    return rows, row_weights


def launch_combine(
    buffer: ElasticBuffer,
    rows: Tensor,
    handle: EPHandle,
    *,
    num_sms: int = 0,
    resend: Resend | None = None,
    cast: Cast | None = None,
    after: EventHandle | None = None,
) -> CombineTicket:
    """Starts bringing the experts' results home, where the rows of each token are added without weights.

    Args:
        buffer: the endpoint of this rank.
        rows: [num_rows, hidden] in the order of the dispatch. Not kept for backward; to be left alone until the wait.
        handle: the handle of that dispatch (`ticket.handle`).
        num_sms: as in `launch_dispatch`.
        resend: launched in backward behind the gradients of the rows.
        cast: packs the gradients of the sums, which are unpacked where they arrive. The sums travel as they are.
        after: as in `launch_dispatch`.
    """
    exchange = _Exchange(buffer, handle, num_sms)
    exchange.resend, exchange.cast, exchange.after = resend, cast, after
    y = _LaunchCombine.apply(rows.contiguous(), exchange)
    return CombineTicket(y, handle, exchange)


def wait_combine(ticket: CombineTicket) -> Tensor:
    """Makes the current stream wait for a combine. Returns y [num_tokens, hidden]; zero where a token has no expert."""
    y: Tensor = _WaitCombine.apply(ticket.y, ticket._exchange)
    return y
