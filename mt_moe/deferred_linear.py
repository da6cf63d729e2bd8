"""Weight gradients of plain `nn.Linear`s taken out of backward, call by call.

A module that knows nothing of pipelines computes the gradients of its inputs and of its weights in one backward. Here
its linear maps are given a forward that hands the gradient of the weight to whoever is named at that moment:

    deferral = LinearDeferral(attention)
    with deferral.to(held.put):
        y = attention(x)            # the backward of this call calls held.put(weights, compute)
    y = attention(x)                # the backward of this one computes them by itself

Both ways run the same products, so that deferring changes no bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mt_moe.expert_linear import Defer


class _Linear(torch.autograd.Function):
    """F.linear; the gradient of the weight is computed in backward, or handed to `defer` where the weight is hidden."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owner: list[Tensor], defer: Defer | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The list hides the parameter: a bare tensor argument would be an input of the graph.
        ctx.owner, ctx.defer = owner, defer
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows, flat = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        grad_weight = None
        if ctx.defer is not None:
            ctx.defer(ctx.owner, lambda: [rows.t().matmul(flat)])
        elif ctx.needs_input_grad[1]:
            grad_weight = rows.t().matmul(flat)
        return grad_x, grad_weight, grad_bias, None, None


class _Forward:
    """The forward of one patched nn.Linear. A class, so that a patched module can still be copied and pickled."""

    def __init__(self, module: nn.Linear, deferral: LinearDeferral) -> None:
        self._module, self._deferral = module, deferral

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias, defer = self._module.weight, self._module.bias, self._deferral.defer
        if torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        # An input without a gradient would keep backward from reaching a hidden weight.
        hides = defer is not None and torch.is_grad_enabled() and input.requires_grad and weight.requires_grad
        result: Tensor = _Linear.apply(
            input, weight.detach() if hides else weight, bias, [weight] if hides else [], defer if hides else None
        )
        return result


class LinearDeferral:
    """Patches every plain nn.Linear under some modules; those with a forward of their own are left alone.

    Args:
        modules: whose linear maps defer their weight gradients while a `to` is entered.

    Attributes:
        defer: who takes them now; None for nobody.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self.defer: Defer | None = None
        for module in modules:
            for child in module.modules():
                own_forward = type(child).forward is not nn.Linear.forward or "forward" in child.__dict__
                if isinstance(child, nn.Linear) and not own_forward:
                    child.__dict__["forward"] = _Forward(child, self)

    @contextlib.contextmanager
    def to(self, defer: Defer | None) -> Iterator[None]:
        """Forwards in this block defer to `defer`; backward needs it too, for forwards that checkpoints repeat."""
        before, self.defer = self.defer, defer
        try:
            yield
        finally:
            self.defer = before
