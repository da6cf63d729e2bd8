"""A transformer layer cut in attention, dispatch, MLP and combine, each part with a forward and a backward of its own.

    attention   x -> attention, norm, router, count exchange        its linear maps and the latent's narrowing
    dispatch    tokens on their way to the experts
    mlp         shared expert, experts
    combine     results on their way home

A dense layer has attention and MLP alone. The backward of a part comes as two: gradients of inputs (B) and, of
attention and MLP, of weights (W). What stands after combine, the sum with shared expert and residual, is cheap: it
runs where the next part begins.

Communication is issued behind an event of its own, recorded as soon as what is sent was computed. The order in which
parts are issued then says nothing about when they run: dispatch of one microbatch, issued behind the MLP of another,
does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from comm_core import EventHandle
from comm_core.runtime.errors import UsageError
from mt_moe.aliases import fan_out
from mt_moe.deferred_linear import LinearDeferral
from mt_moe.dispatcher import Dispatched
from mt_moe.expert_linear import Defer
from mt_moe.functional import CombineTicket, DispatchTicket, Resend
from mt_moe.layer import MoELayer
from mt_moe.segment import Segment
from mt_moe.weight_gradients import HeldWeightGradients


class OverlapLayer(nn.Module):
    """A transformer layer of plain modules: `h = attention(x); y = h + mlp(norm(h))`.

    Called by itself it is that. In an `overlap.OverlapStage` it runs in parts.

    Args:
        attention: [..., hidden] to the same; with norm and residual of its own, as far as the model has them. The
            weight gradients of its plain `nn.Linear`s can be taken out of backward, others are computed in it.
        mlp: a `MoELayer`, whose tokens travel, or any module: a dense layer.
        norm: before the MLP; none by default.

    Raises:
        UsageError: a `MoELayer` that sends its tokens in chunks.
    """

    def __init__(self, attention: nn.Module, mlp: nn.Module, *, norm: nn.Module | None = None) -> None:
        super().__init__()
        if isinstance(mlp, MoELayer) and mlp.config.data_path.num_chunks != 1:
            raise UsageError(
                f"DataPath(num_chunks={mlp.config.data_path.num_chunks}) in an OverlapLayer",
                allowed="1: communication runs beside the other microbatch",
                fix="leave num_chunks at 1 in this layer's config",
            )
        self.attention, self.mlp = attention, mlp
        self.norm = nn.Identity() if norm is None else norm
        self.deferral = LinearDeferral(attention, *([] if isinstance(mlp, MoELayer) else [mlp]))

    @property
    def communicates(self) -> bool:
        """Whether the layer has dispatch and combine."""
        return isinstance(self.mlp, MoELayer)

    def forward(self, x: Tensor, *, aux_losses: list[Tensor] | None = None) -> Tensor:
        """The whole layer at once; `aux_losses` as in `MoELayer`."""
        residual, inner = fan_out(self.attention(x), 2)
        inner = self.norm(inner)
        y: Tensor = self.mlp(inner, aux_losses=aux_losses) if isinstance(self.mlp, MoELayer) else self.mlp(inner)
        return residual + y


class LayerRun(Protocol):
    """One microbatch in one layer. The parts of each side are called in their order, once each."""

    def attention_forward(self, x: Tensor) -> None:
        """Begins."""
        ...

    def finish(self) -> Tensor:
        """The layer's output."""
        ...

    def receive(self, grad: Tensor | None) -> None:
        """Begins backward with the gradient of the output."""
        ...

    def attention_backward(self) -> Tensor | None:
        """The gradient of the input; None where it needs none."""
        ...


class _Run:
    """What runs of dense and of MoE layers share: attention, and where weight gradients go.

    Args:
        layer: whose parts run.
        aux_losses: takes the router's losses, detached.
        aux_loss_scale: the gradient of each of them.
    """

    def __init__(self, layer: OverlapLayer, aux_losses: list[Tensor], aux_loss_scale: float) -> None:
        self._layer, self._aux_losses, self._aux_loss_scale = layer, aux_losses, aux_loss_scale
        self._held = {"attention": HeldWeightGradients(), "mlp": HeldWeightGradients()}
        self._outer: Defer | None = None
        self._attention: Segment | None = None
        self._grads: list[Tensor | None] = []

    def defer_to(self, outer: Defer | None) -> None:
        """Who takes the weight gradients of the backward to come, instead of parts of their own."""
        self._outer = outer

    def _put(self, part: str) -> Defer:
        """The target of a part's forward; where it leads is decided in backward."""

        def put(weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
            target = self._held[part].put if self._outer is None else self._outer
            target(weights, compute)

        return put

    def attention_weights(self) -> None:
        """W of attention."""
        self._held["attention"].run()

    def mlp_weights(self) -> None:
        """W of the MLP."""
        self._held["mlp"].run()

    def _run_attention(self, x: Tensor) -> tuple[Tensor, ...]:
        layer = self._layer
        with layer.deferral.to(self._put("attention")):
            self._attention = Segment(self._attention_part, [x])
        return self._attention.take()

    def _attention_part(self, x: Tensor) -> Sequence[Tensor]:
        residual, inner = fan_out(self._layer.attention(x), 2)
        return residual, self._layer.norm(inner)

    def attention_backward(self) -> Tensor | None:
        """Backward of the first part."""
        segment, grads = self._attention, self._grads
        assert segment is not None, "backward before forward, or twice"
        self._attention, self._grads = None, []
        with self._layer.deferral.to(self._put("attention")):
            return segment.backward(grads)[0]


class DenseRun(_Run):
    """Of a layer without communication; the methods are those of `LayerRun` and W."""

    def attention_forward(self, x: Tensor) -> None:
        """Attention and norm."""
        self._inputs = self._run_attention(x)

    def mlp_forward(self) -> None:
        """The MLP and the residual."""
        inputs, self._inputs = self._inputs, ()
        with self._layer.deferral.to(self._put("mlp")):
            self._mlp = Segment(lambda residual, inner: [residual + self._layer.mlp(inner)], inputs)

    def finish(self) -> Tensor:
        """The output."""
        return self._mlp.take()[0]

    def receive(self, grad: Tensor | None) -> None:
        """Of the output."""
        self._grad = grad

    def mlp_backward(self) -> None:
        """B of the MLP."""
        grad, self._grad = self._grad, None
        with self._layer.deferral.to(self._put("mlp")):
            self._grads = self._mlp.backward([grad])


class MoERun(_Run):
    """Of a layer whose tokens travel; the methods are those of `LayerRun`, dispatch, combine and W."""

    def __init__(self, layer: OverlapLayer, aux_losses: list[Tensor], aux_loss_scale: float) -> None:
        super().__init__(layer, aux_losses, aux_loss_scale)
        assert isinstance(layer.mlp, MoELayer)
        self._moe = layer.mlp
        self._resend: Resend | None = None
        self._shared: Segment | None = None

    def _event(self) -> EventHandle:
        """Now, on the stream that computes."""
        return EventHandle(self._moe.buffer.device)

    def attention_forward(self, x: Tensor) -> None:
        """Attention, norm, router; the exchange of counts begins."""
        outputs = self._run_attention(x)
        self._residual, self._sent, self._weights, self._to_shared, *losses = outputs
        self._aux_losses += [loss.detach() for loss in losses]
        self._loss_grads = [torch.full_like(loss, self._aux_loss_scale) for loss in losses]
        self._ready = self._event()

    def _attention_part(self, x: Tensor) -> Sequence[Tensor]:
        moe = self._moe
        residual, inner = super()._attention_part(x)
        moe.check_tokens(inner)
        if torch.is_autocast_enabled(x.device.type):
            raise UsageError(
                "a pair of microbatches under autocast",
                allowed="without",
                fix="build the layers in the dtype of tokens",
            )
        tokens = inner.reshape(-1, moe.config.hidden)
        to_dispatch, to_router, to_shared = fan_out(tokens, 3)
        routing = moe.router(to_router)
        self._handle = moe.dispatcher.prepare(routing.topk_idx)
        losses: list[Tensor] = []
        if moe.training and moe.config.has_losses:
            sequences = max(1, tokens.shape[0] // x.shape[-2]) if x.dim() > 1 and x.shape[-2] else 1
            losses = moe.router.losses(routing, num_sequences=sequences, group=moe.buffer.group)
        latent = moe.latent
        sent = to_dispatch if latent is None else latent.narrow(to_dispatch, defer=self._put("attention"))
        return residual, sent, routing.topk_weights, to_shared, *losses

    def dispatch_forward(self) -> None:
        """Tokens leave behind the end of attention, whatever was issued since."""
        tickets: list[DispatchTicket] = []

        def launch(sent: Tensor, weights: Tensor) -> Sequence[Tensor]:
            ticket = self._moe.dispatcher.launch_dispatch(sent, weights, self._handle, self._ready)
            tickets.append(ticket)
            return ticket.rows, ticket.row_weights

        self._launched = Segment(launch, [self._sent, self._weights])
        if self._moe.config.data_path.save_dispatched == "redispatch":
            self._resend = self._moe.dispatcher.resend(self._sent, tickets[0])
        rows, row_weights = self._launched.take()
        # A ticket whose tensors begin a graph of their own.
        self._dispatch = replace(tickets[0], rows=rows, row_weights=row_weights)
        del self._sent, self._weights

    def mlp_forward(self) -> None:
        """The shared expert while rows travel, then the experts."""
        moe, put = self._moe, self._put("mlp")
        if moe.shared is not None:
            shared = moe.shared
            self._shared = Segment(lambda x: [shared(x, defer=put)], [self._to_shared])
        del self._to_shared
        arrived: list[Dispatched] = []
        ticket = self._dispatch

        def wait(rows: Tensor, row_weights: Tensor) -> Sequence[Tensor]:
            arrived.append(moe.dispatcher.wait_dispatch(replace(ticket, rows=rows, row_weights=row_weights)))
            return arrived[0].rows, arrived[0].row_weights

        def experts(rows: Tensor, row_weights: Tensor) -> Sequence[Tensor]:
            here = replace(arrived[0], rows=rows, row_weights=row_weights)
            return [moe._on_rows(here, defer=put, rows_again=None if self._resend is None else self._resend.rows)]

        self._arrival = Segment(wait, [ticket.rows, ticket.row_weights])
        self._experts = Segment(experts, self._arrival.take())
        # Only its handle and its backward are wanted from here on: the rows stay where backward reads them.
        self._dispatch = replace(ticket, rows=ticket.rows.new_empty(0), row_weights=ticket.row_weights.new_empty(0))
        self._ready = self._event()

    def combine_forward(self) -> None:
        """Results leave behind the end of the experts."""
        tickets: list[CombineTicket] = []

        def launch(rows: Tensor) -> Sequence[Tensor]:
            tickets.append(self._moe.dispatcher.launch_combine(rows, self._dispatch.handle, self._resend, self._ready))
            return [tickets[0].y]

        self._returned = Segment(launch, self._experts.take())
        self._combine = replace(tickets[0], y=self._returned.take()[0])

    def finish(self) -> Tensor:
        """Waits for the results; adds shared expert and residual."""
        moe, ticket = self._moe, self._combine
        self._home = Segment(lambda y: [moe.dispatcher.wait_combine(replace(ticket, y=y))], [ticket.y])
        self._combine = replace(ticket, y=ticket.y.new_empty(0))

        def tail(residual: Tensor, y: Tensor, *shared: Tensor) -> Sequence[Tensor]:
            if moe.latent is not None:
                y = moe.latent.widen(y, defer=self._put("mlp"))
            for more in shared:
                y = y + more
            return [residual + y.view(residual.shape)]

        shared = () if self._shared is None else self._shared.take()
        self._tail = Segment(tail, [self._residual, *self._home.take(), *shared])
        del self._residual
        return self._tail.take()[0]

    def receive(self, grad: Tensor | None) -> None:
        """Of the output; the gradient to send is ready."""
        self._residual_grad, self._y_grad, *self._shared_grad = self._tail.backward([grad])
        self._ready = self._event()

    def combine_backward(self) -> None:
        """Gradients of the results leave."""
        grad, self._y_grad = self._y_grad, None
        self._combine.start_after(self._ready)
        self._returned_grads = self._home.backward([grad])

    def mlp_backward(self) -> None:
        """B of the shared expert while gradients travel, then of the experts."""
        shared, self._shared = self._shared, None
        self._to_shared_grad = shared.backward(self._shared_grad)[0] if shared is not None else None
        self._shared_grad = []
        grads, self._returned_grads = self._returned_grads, []
        self._row_grads = self._experts.backward(self._returned.backward(grads))
        self._ready = self._event()

    def dispatch_backward(self) -> None:
        """Gradients of the rows leave for home, behind the experts' B."""
        grads, self._row_grads = self._row_grads, []
        self._dispatch.start_after(self._ready)
        self._sent_grads = self._arrival.backward(grads)

    def attention_backward(self) -> Tensor | None:
        """Waits for the tokens' gradients, then B of attention and router."""
        sent, weights = self._launched.backward(self._sent_grads)
        self._sent_grads = []
        self._grads = [self._residual_grad, sent, weights, self._to_shared_grad, *self._loss_grads]
        self._residual_grad = self._to_shared_grad = None
        return super().attention_backward()


def run_of(layer: OverlapLayer, aux_losses: list[Tensor], aux_loss_scale: float) -> DenseRun | MoERun:
    """A run for the next microbatch of a layer."""
    kind = MoERun if layer.communicates else DenseRun
    return kind(layer, aux_losses, aux_loss_scale)
