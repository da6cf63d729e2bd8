"""Products with a weight whose backward returns the gradient of the input and puts that of the weight into a store.

The weight is hidden from autograd (see `weight_grad`), so the node must be reached in backward for the sake of the
weight alone, too: where the input needs no gradient an anchor, a scalar that does, stands in for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe.weight_grad import WeightGradStore


def _anchor(x: Tensor) -> Tensor | None:
    return None if x.requires_grad else torch.zeros((), requires_grad=True)


class _SplitLinear(torch.autograd.Function):
    """y = x W^T + b whose backward returns dX (and db) and puts dW into a store."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        owner: list[Tensor],
        store: WeightGradStore,
        anchor: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The list hides the parameter: autograd.Function would take a bare tensor argument as an input of the graph.
        ctx.owner, ctx.store = owner, store
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        rows, flat = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        ctx.store.put(ctx.owner[0], lambda: rows.t().matmul(flat))
        return dx, None, db, None, None, None


def split_linear(x: Tensor, weight: Tensor, store: WeightGradStore, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` that defers the gradient of its weight to `store`.

    Uses the ordinary function where deferring would lose the gradient or its dtype: without gradients, with a frozen
    weight, with one that is no plain tensor (DTensor), or under autocast.

    Args:
        x: (..., in_features), any floating dtype.
        weight: (out_features, in_features), a parameter or what is computed of parameters.
        store: where dW goes.
        bias: (out_features) or None; its gradient is not deferred.

    Returns:
        (..., out_features).
    """
    plain = not (torch.is_grad_enabled() and weight.requires_grad) or type(weight) not in (Tensor, nn.Parameter)
    if plain or torch.is_autocast_enabled(x.device.type):
        return nn.functional.linear(x, weight, bias)
    result: Tensor = _SplitLinear.apply(x, weight.detach(), bias, [weight], store, _anchor(x))
    return result


@functools.cache
def grouped_functions() -> tuple[Callable[..., Tensor], ...]:
    """torch's grouped matrix product under its public and its older name, as far as this torch has them."""
    found = getattr(nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)
    return tuple(function for function in found if function is not None)


class _SplitGroupedMM(torch.autograd.Function):
    """y[group] = x[group] W[group] whose backward returns dX and puts dW into a store."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        offs: Tensor,
        owner: list[Tensor],
        store: WeightGradStore,
        anchor: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, offs)
        ctx.owner, ctx.store = owner, store
        return grouped_functions()[0](x, weight, offs=offs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        x, weight, offs = ctx.saved_tensors
        grad = grad.contiguous()
        dx = grouped_functions()[0](grad, weight.transpose(-2, -1), offs=offs) if ctx.needs_input_grad[0] else None
        by_columns = weight.stride(-2) == 1
        ctx.store.put(ctx.owner[0], lambda: _grouped_weight_grad(x, grad, offs, by_columns))
        return dx, None, None, None, None, None


@torch.no_grad()
def _grouped_weight_grad(x: Tensor, grad: Tensor, offs: Tensor, by_columns: bool) -> Tensor:
    """[groups, in, out], laid out as the weight; zero for a group without rows, which kernels may leave unwritten."""
    product = grouped_functions()[0]
    dw = product(grad.t(), x, offs=offs).transpose(-2, -1) if by_columns else product(x.t(), grad, offs=offs)
    empty = offs.diff(prepend=offs.new_zeros(1)) == 0
    return dw.masked_fill_(empty[:, None, None], 0)


def split_grouped_mm(x: Tensor, weight: Tensor, offs: Tensor, store: WeightGradStore) -> Tensor:
    """`torch.nn.functional.grouped_mm(x, weight, offs=offs)` that defers the gradient of its weight to `store`.

    Args:
        x: [rows, in], in the dtypes that torch's function takes; rows in order of their group.
        weight: [groups, in, out], a parameter or a view of one, for example transposed.
        offs: int32 [groups], the row after the last of each group. Rows behind the last are nobody's: what they come
            out as, and their gradient, is undefined, as in torch's function.
        store: where dW goes.

    Returns:
        [rows, out].
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return grouped_functions()[0](x, weight, offs=offs)
    result: Tensor = _SplitGroupedMM.apply(x, weight.detach(), offs, [weight], store, _anchor(x))
    return result
