"""Overlapped pairs: the forward of one microbatch beside the backward of another, so that both hide communication.

    stage0, stage1 = OverlapStage(layers), OverlapStage(other_layers)
    y = stage0(x)                                            # a microbatch goes forward alone
    y.backward(grad)                                         # or backward
    outputs, loss = OverlapStage.overlapped_forward_backward(stage0, [x], None, [], stage1, None, [y1], [grad1])

A stage always runs in parts (`overlap_layer`), and its whole graph is one node of autograd. Backward of that node runs
the parts of backward one after the other; in a pair they run between the parts of the forward, in the order of
`overlap_order`. To the outside a stage is an ordinary module: the pair finds the parts of its backward by running
autograd from the loss, or from the outputs, to that node, which then only notes the gradient that arrives.

Streams: parts compute on the current stream, communication runs on the buffer's own; events between them are those of
`overlap_layer`. The host waits for nothing but the counts of a dispatch, which left with attention one part before
(not even for them with `DataPath.max_tokens_per_rank`). The forward draws random numbers in the order of its layers,
the backward none, so a pair has the dropout of its forward run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from comm_core.runtime import trace
from comm_core.runtime.errors import UsageError
from mt_moe.expert_linear import Defer
from mt_moe.overlap_layer import OverlapLayer, run_of
from mt_moe.overlap_order import Place, order

TRACE_CATEGORY = "overlap"


class _StageRun:
    """One microbatch in one stage: its layers' runs, forward and then backward.

    Args:
        stage: whose layers.
        x: the input of the first layer.
    """

    def __init__(self, stage: OverlapStage, x: Tensor) -> None:
        self.stage = stage
        self.communicates = [layer.communicates for layer in stage.layers]
        self._runs = [run_of(layer, stage.aux_losses, stage.aux_loss_scale) for layer in stage.layers]
        self._value: Tensor | None = x.detach().requires_grad_(x.requires_grad)
        self._edge = get_gradient_edge(x) if x.requires_grad else None
        self._is_own = stage.before is not None

    def perform(self, place: Place) -> None:
        """Runs one part of one layer."""
        (name, kind), layer = place
        with trace.span(str(place.part), TRACE_CATEGORY, layer=layer, part=name, kind=kind):
            run = self._runs[layer]
            if (name, kind) == ("attention", "F"):
                run.attention_forward(self._arrived(layer))
            elif (name, kind) == ("attention", "B"):
                self._value = run.attention_backward()
                if layer:
                    self._hand_down(layer - 1)
            else:
                getattr(run, f"{name}_{_METHODS[kind]}")()

    def _arrived(self, layer: int) -> Tensor:
        """What a layer begins with: the end of the layer before, which waits for its results here."""
        value, self._value = self._value, None
        if layer:
            return self._runs[layer - 1].finish()
        assert value is not None, "a stage run forward twice"
        return value

    def finish(self) -> Tensor:
        """The output of the last layer."""
        return self._runs[-1].finish()

    def begin_backward(self, grad: Tensor, defer: Defer | None) -> None:
        """Takes the gradient of the output; `defer` takes all weight gradients, else W parts compute them."""
        for run in self._runs:
            run.defer_to(defer)
        self._value = grad
        self._hand_down(len(self._runs) - 1)

    def _hand_down(self, layer: int) -> None:
        """Gives a layer the gradient of its output; what is sent of it is then ready, before W of the layer above."""
        grad, self._value = self._value, None
        self._runs[layer].receive(grad)

    def end_backward(self) -> Tensor | None:
        """The gradient of the caller's input; None where it needs none, or `before` made it and has got it here."""
        if self._is_own:
            self.pass_on()
        grad, self._value = self._value, None
        self._runs = []
        return grad

    def pass_on(self) -> None:
        """Runs autograd on from the input of the layers, to `before` or to the leaf of the caller."""
        grad, self._value = self._value, None
        self._runs = []
        if grad is not None and self._edge is not None:
            torch.autograd.backward([self._edge], [grad])


_METHODS = {"F": "forward", "B": "backward", "W": "weights"}


class _Node(torch.autograd.Function):
    """The whole graph of a microbatch in a stage; autograd follows the anchor where the input needs no gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, run: _StageRun, y: Tensor) -> Tensor:
        ctx.run = run
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: _StageRun | None
        run, ctx.run = ctx.run, None
        if run is None:
            raise UsageError(
                "a second backward through one forward of an OverlapStage", allowed="one", fix="run forward again"
            )
        noted = run.stage.noted
        if noted is not None:
            noted.append((run, grad))
            return None, None, None, None
        run.begin_backward(grad, run.stage.defer)
        for place in order([], run.communicates):
            run.perform(place)
        return None, run.end_backward(), None, None


class OverlapStage(nn.Module):
    """Layers of a pipeline stage, whose forward and backward can run beside those of another stage.

    Args:
        layers: at least one.
        before: makes the first layer's input of the stage's (an embedding); runs in one piece.
        after: makes the stage's output of the last layer's (a head); runs in one piece.
        defer: takes the weight gradients of every backward that is not in a pair, called as (weights, compute):
            `WeightGradStore.put_many` of a pipeline that splits backward. Without it they are computed in backward,
            where they hide communication; in a pair they always are.
        aux_loss_scale: gradient of the router's losses: 1 adds them to the loss as they are.

    Attributes:
        aux_losses: the router's losses of all forwards, detached, in their order; clear it as you like.

    Raises:
        UsageError: no layers, or one that is no `OverlapLayer`.
    """

    def __init__(
        self,
        layers: Sequence[OverlapLayer],
        *,
        before: nn.Module | None = None,
        after: nn.Module | None = None,
        defer: Defer | None = None,
        aux_loss_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if not layers or not all(isinstance(layer, OverlapLayer) for layer in layers):
            raise UsageError(
                f"layers of {sorted({type(layer).__name__ for layer in layers}) or 'nothing'}",
                allowed="one or more OverlapLayer",
                fix="wrap attention and MLP of each layer in OverlapLayer",
            )
        self.layers: Any = nn.ModuleList(layers)
        self.before, self.after, self.defer = before, after, defer
        self.aux_loss_scale = aux_loss_scale
        self.aux_losses: list[Tensor] = []
        self.noted: list[tuple[_StageRun, Tensor]] | None = None

    def forward(self, *inputs: Tensor) -> Tensor:
        """The stage alone: [..., hidden] to [..., hidden] between `before` and `after`.

        Without gradients the layers run in one piece each.
        """
        x = self._begin(*inputs)
        if not torch.is_grad_enabled():
            for layer in self.layers:
                losses: list[Tensor] = []
                x = layer(x, aux_losses=losses)
                self.aux_losses += losses
            return x if self.after is None else self.after(x)
        run = _StageRun(self, x)
        for place in order(run.communicates, []):
            run.perform(place)
        return self._end(run, x)

    def defer_weight_grads(self, defer: Defer | None) -> None:
        """Sets `defer`: how a pipeline splits the backward of its stages."""
        self.defer = defer

    def _begin(self, *inputs: Tensor) -> Tensor:
        if self.before is not None:
            x: Tensor = self.before(*inputs)
            return x
        if len(inputs) != 1:
            raise UsageError(
                f"{len(inputs)} inputs of an OverlapStage without `before`", allowed="one", fix="pass before="
            )
        return inputs[0]

    def _end(self, run: _StageRun, x: Tensor) -> Tensor:
        # Noting a gradient runs autograd on from the node without one, which what `before` keeps would not survive.
        caller = x.detach() if self.before is not None else x
        y: Tensor = _Node.apply(torch.empty(0, requires_grad=True), caller, run, run.finish().detach())
        return y if self.after is None else self.after(y)

    def _note(self, roots: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor | None]) -> tuple[_StageRun, Tensor]:
        """Runs autograd from outputs or loss back to the layers: the microbatch that they are of, and its gradient."""
        noted: list[tuple[_StageRun, Tensor]] = []
        self.noted = noted
        try:
            torch.autograd.backward(roots, grads)  # type: ignore[arg-type]
        finally:
            self.noted = None
        if len(noted) != 1:
            raise UsageError(
                f"outputs1 or loss1 of {len(noted)} forwards of module1",
                allowed="those of one",
                fix="pass what one forward of module1 returned, and the module that returned it",
            )
        return noted[0]

    @staticmethod
    def overlapped_forward_backward(
        module0: OverlapStage,
        inputs0: Sequence[Tensor],
        criterion0: Callable[..., Tensor] | None,
        labels0: Sequence[Any],
        module1: OverlapStage,
        loss1: Tensor | None,
        outputs1: Sequence[Tensor | GradientEdge] | None,
        output_grads1: Sequence[Tensor | None] | None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Forward of `module0` beside backward of `module1`, as pipelines call it.

        Args:
            module0: runs forward.
            inputs0: its arguments, leaves where they need gradients.
            criterion0: `criterion(*outputs, *labels) -> scalar`, on the last stage.
            labels0: arguments of the criterion.
            module1: runs backward, weight gradients included; may be module0.
            loss1: a loss of its earlier forward, on the last stage; detached here.
            outputs1: else what that forward returned, or places in its graph.
            output_grads1: and their gradients.

        Returns:
            ([output], loss): loss is None without a criterion. Gradients of module1's inputs are in their `grad`.

        Raises:
            UsageError: neither or both of loss1 and outputs1, or those of another module.
        """
        if (loss1 is None) == (outputs1 is None) or (outputs1 is None) != (output_grads1 is None):
            raise UsageError(
                "overlapped_forward_backward with "
                + ("neither" if loss1 is None and outputs1 is None else "not one")
                + " of loss1 and outputs1 with output_grads1",
                allowed="loss1 on the last stage, outputs1 with output_grads1 on others",
                fix="pass one of them",
            )
        if loss1 is not None:
            backward, grad = module1._note([loss1], [None])
            if not loss1._is_view():
                loss1.detach_()
        else:
            backward, grad = module1._note(outputs1 or [], output_grads1 or [])
        x = module0._begin(*inputs0)
        forward = _StageRun(module0, x)
        backward.begin_backward(grad, None)
        del grad
        for place in order(forward.communicates, backward.communicates):
            (forward if place.part.kind == "F" else backward).perform(place)
        output = module0._end(forward, x)
        backward.pass_on()
        return [output], None if criterion0 is None else criterion0(output, *labels0)
