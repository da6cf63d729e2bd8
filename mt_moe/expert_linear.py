"""The linear product of the experts as autograd nodes whose weight gradient can be taken out of backward.

A pipeline schedule that splits backward into I (gradients of the inputs) and W (gradients of the weights) needs to
compute W later, at a moment of its own. So each product exists twice: with the weight as an autograd input, or with the
weight hidden from autograd and its gradient handed as a closure to a `Defer` callable. Both run the same products on
the same shapes, so that deferring changes no bit:

    y = x @ W.T          dx = dy @ W          dW = dy.T @ x
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from comm_core.runtime import trace
from comm_core.runtime.errors import UsageError

Defer: TypeAlias = Callable[[Sequence[Tensor], Callable[[], Sequence[Tensor]]], None]
"""Takes (weights, compute): `compute()` returns their gradients, in order, and may be called later, once."""


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    with trace.span("expert_weight_grad", "moe", num_rows=x.shape[0]):
        return grad.t().matmul(x)


class _Linear(torch.autograd.Function):
    """x @ weight.T with both gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        with trace.span("expert_input_grad", "moe", num_rows=x.shape[0]):
            grad_x = grad.matmul(weight) if needs_x else None
        return grad_x, _weight_grad(grad, x) if needs_weight else None


class _DeferredLinear(torch.autograd.Function):
    """x @ weight.T, the weight invisible to autograd; backward hands its gradient to `add` as a closure."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, add: Callable[[Callable[[], Tensor]], None]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.add = add
        return torch.matmul(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.add(lambda: _weight_grad(grad, x))
        with trace.span("expert_input_grad", "moe", num_rows=x.shape[0]):
            return grad.matmul(weight), None, None


class Collector:
    """Gathers the weight gradients of all experts of one layer and hands them to `defer` in one call.

    One call a layer (not one an expert) serves weights held as one packed tensor too, whose gradient is one tensor.
    """

    def __init__(self, weights: Tensor | Sequence[Tensor], defer: Defer) -> None:
        self._weights = weights
        self._defer = defer
        self._parts: dict[int, Callable[[], Tensor]] = {}

    def slot(self, expert: int) -> Callable[[Callable[[], Tensor]], None]:
        """The place where the backward of one local expert leaves its closure."""

        def add(compute: Callable[[], Tensor]) -> None:
            self._parts[expert] = compute
            if len(self._parts) == len(self._weights):
                self._hand_over()

        return add

    def _hand_over(self) -> None:
        parts, self._parts = self._parts, {}
        ordered = [parts[expert] for expert in sorted(parts)]
        if isinstance(self._weights, Tensor):
            self._defer([self._weights], lambda: [torch.stack([part() for part in ordered])])
        else:
            self._defer(list(self._weights), lambda: [part() for part in ordered])


def linear(x: Tensor, weight: Tensor, defer: Defer | None = None) -> Tensor:
    """The product x [num_rows, in] @ weight [out, in].T, its weight gradient deferred where `defer` is given.

    With `defer`, `x` must take part in autograd (see `anchored`), else backward never reaches this product.
    """
    if defer is None or not weight.requires_grad:
        result: Tensor = _Linear.apply(x, weight)
        return result
    return collected_linear(x, weight, Collector([weight], defer).slot(0))


def collected_linear(x: Tensor, weight: Tensor, add: Callable[[Callable[[], Tensor]], None]) -> Tensor:
    """The product x @ weight.T of one expert, whose weight gradient goes to a slot of a `Collector`."""
    result: Tensor = _DeferredLinear.apply(x, weight.detach(), add)
    return result


def anchored(x: Tensor, weights: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns `x`, made a leaf that needs gradients where hidden weights do and backward would not come here.

    Raises:
        UsageError: some of the weights are frozen and some are not, which one deferred gradient can not express.
    """
    trainable = [weight.requires_grad for weight in ([weights] if isinstance(weights, Tensor) else weights)]
    if any(trainable) and not all(trainable):
        raise UsageError(
            f"defer with {sum(trainable)} of {len(trainable)} expert weights requiring gradients",
            allowed="all of them or none",
            fix="freeze every expert of the layer, or call without defer",
        )
    if any(trainable) and torch.is_grad_enabled() and not x.requires_grad:
        return x.detach().requires_grad_()
    return x


def grouped_product() -> Callable[..., Tensor] | None:
    """The grouped matrix product of torch under its public or its older name; None where this torch has neither."""
    product: Callable[..., Tensor] | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    return product
