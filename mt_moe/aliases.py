"""One tensor used several times, its gradients added in an order that no schedule changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _FanOut(torch.autograd.Function):
    """Aliases of one tensor; the gradients are added in the order of the aliases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_aliases: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.zeros_like = (x.shape, x.dtype, x.device)
        return tuple(x.view_as(x) for _ in range(num_aliases))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total: Tensor | None = None
        for grad in grads:
            if grad is not None:
                total = grad if total is None else total + grad
        if total is None:
            shape, dtype, device = ctx.zeros_like
            total = torch.zeros(shape, dtype=dtype, device=device)
        return total, None


def fan_out(x: Tensor, num_aliases: int) -> tuple[Tensor, ...]:
    """Returns aliases of `x` whose gradients are added in a fixed order, (g0 + g1) + g2 and so on.

    Autograd adds the gradients of a tensor used several times in the order in which they arrive. Moving the shared
    expert between launch and wait changes that order and with it the last bit of the sum; aliases keep the order.
    """
    return tuple(_FanOut.apply(x, num_aliases))
