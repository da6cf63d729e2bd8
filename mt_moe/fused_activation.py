"""What stands between the two products of the experts, in one pass over memory each way: SwiGLU times routing weight.

    forward     out = act(gate) * up * p                         reads [N, 2F], writes [N, F]
    backward    a = act(gate) * up,  g = gradient of out
                d up = g * p * act(gate),  d gate = g * p * up * act'(gate),  d p = sum over F of g * a
                out again, as the operand of fc2's weight gradient

The numerics are defined by `forward_twin` and `backward_twin` in plain torch: everything is computed in the widest of
fp32, the dtype of the rows and that of the weights, products from left to right, and each result is rounded once.
A kernel in Triton computes the same where Triton runs; it is looked for at the first use on a device. Sums over F run
in another order there, and exp is the device's, so the two agree to the last bits of fp32, not bit by bit.

Rows behind `ends[-1]` belong to no expert: what they hold is not read, and their results are exact zeros. Padding
inside a group has zero rows, weights and gradients, which give exact zeros too.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ActivationGrads(NamedTuple):
    """Results of the backward pass.

    Attributes:
        hidden: gradient of the first product, in its shape and dtype.
        row_weights: [num_rows], in the dtype of the weights.
        out: the result of the forward pass again; None where not asked for.
    """

    hidden: Tensor
    row_weights: Tensor
    out: Tensor | None


Activation = Callable[[Tensor], Tensor]


def _wide(hidden: Tensor, row_weights: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(hidden.dtype, torch.float32), row_weights.dtype)


def _real(hidden: Tensor, ends: Tensor | None) -> Tensor | None:
    """bool [num_rows, 1], the rows that belong to an expert or its padding; None for all."""
    if ends is None:
        return None
    return (torch.arange(hidden.shape[0], device=hidden.device) < ends[-1]).unsqueeze(1)


def _only(real: Tensor | None, value: Tensor) -> Tensor:
    # Not a product: what lies in the other rows may be NaN.
    return value if real is None else torch.where(real, value, torch.zeros((), dtype=value.dtype, device=value.device))


def forward_twin(
    hidden: Tensor, row_weights: Tensor, activation: Activation, gated: bool, ends: Tensor | None = None
) -> Tensor:
    """The definition of the forward pass; arguments as in `forward`."""
    wide = _wide(hidden, row_weights)
    real = _real(hidden, ends)
    gate, up = _parts(_only(real, hidden).to(wide), gated)
    value = activation(gate) if up is None else activation(gate) * up
    return (value * _only(real, row_weights.unsqueeze(1)).to(wide)).to(hidden.dtype)


def backward_twin(
    hidden: Tensor,
    row_weights: Tensor,
    grad: Tensor,
    activation: Activation,
    gated: bool,
    ends: Tensor | None = None,
    *,
    wants_out: bool = True,
) -> ActivationGrads:
    """The definition of the backward pass; arguments as in `backward`."""
    wide, real = _wide(hidden, row_weights), _real(hidden, ends)
    gate, up = _parts(_only(real, hidden).to(wide), gated)
    grad, weight = _only(real, grad).to(wide), _only(real, row_weights.unsqueeze(1)).to(wide)
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        active = activation(leaf)
        weighted = grad * weight
        (grad_gate,) = torch.autograd.grad(active, leaf, weighted if up is None else weighted * up)
    active = active.detach()
    value = active if up is None else active * up
    parts = [grad_gate] if up is None else [grad_gate, weighted * active]
    return ActivationGrads(
        torch.cat([part.to(hidden.dtype) for part in parts], dim=1),
        (grad * value).sum(1).to(row_weights.dtype),
        (value * weight).to(hidden.dtype) if wants_out else None,
    )


def _parts(hidden: Tensor, gated: bool) -> tuple[Tensor, Tensor | None]:
    if not gated:
        return hidden, None
    gate, up = hidden.chunk(2, dim=1)
    return gate, up


def forward(
    hidden: Tensor, row_weights: Tensor, activation: Activation, gated: bool, ends: Tensor | None = None
) -> Tensor:
    """act(gate) * up * weight of every row.

    Args:
        hidden: [num_rows, 2 * ffn] = gate || up where `gated`, else [num_rows, ffn]; contiguous.
        row_weights: [num_rows] fp32 or fp64.
        activation: elementwise, differentiable by torch.
        gated: whether the activation gates a second half.
        ends: int32, the row after the last of each group; where given, rows behind the last group are made zero.

    Returns:
        [num_rows, ffn] in the dtype of hidden.
    """
    kernels = _kernels_for(hidden, row_weights, activation, gated)
    if kernels is None:
        return forward_twin(hidden, row_weights, activation, gated, ends)
    out: Tensor = kernels.forward(hidden, row_weights, ends)
    return out


def backward(
    hidden: Tensor,
    row_weights: Tensor,
    grad: Tensor,
    activation: Activation,
    gated: bool,
    ends: Tensor | None = None,
    *,
    wants_out: bool = True,
) -> ActivationGrads:
    """All gradients of `forward`, and its result once more where `wants_out`, from one pass.

    Args:
        hidden: as given to `forward`.
        row_weights: as given to `forward`.
        grad: [num_rows, ffn], of its result; contiguous.
        activation: as given to `forward`.
        gated: as given to `forward`.
        ends: as given to `forward`.
        wants_out: compute the result again.
    """
    kernels = _kernels_for(hidden, row_weights, activation, gated)
    if kernels is None:
        return backward_twin(hidden, row_weights, grad, activation, gated, ends, wants_out=wants_out)
    return ActivationGrads(*kernels.backward(hidden, row_weights, grad, ends, wants_out))


def _kernels_for(hidden: Tensor, row_weights: Tensor, activation: Activation, gated: bool) -> ModuleType | None:
    """The module of kernels where it has one for this call: SwiGLU in up to fp32 on an accelerator that runs Triton."""
    if hidden.device.type == "cpu" or not gated or activation is not F.silu:
        return None
    if hidden.dtype == torch.float64 or row_weights.dtype != torch.float32:
        return None
    return kernels_on(hidden.device.type) if why_no_kernels(hidden.device.type) is None else None


@functools.cache
def kernels_on(kind: str) -> ModuleType:
    """The module of kernels, imported at the first use on a kind of device."""
    from mt_moe import triton_kernels

    return triton_kernels


@functools.cache
def why_no_kernels(kind: str) -> str | None:
    """Why the kernels do not run on a kind of device, found by a tiny example; None where they do."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        kernels = kernels_on(kind)
        hidden = torch.linspace(-3, 3, 2 * 48, device=kind).view(2, 48).to(torch.bfloat16)
        weights, ends = torch.tensor([0.5, 2.0], device=kind), torch.tensor([1], dtype=torch.int32, device=kind)
        grad = torch.ones(2, 24, dtype=torch.bfloat16, device=kind)
        wanted = backward_twin(hidden, weights, grad, F.silu, True, ends)
        found = (kernels.forward(hidden, weights, ends), *kernels.backward(hidden, weights, grad, ends, True))
        for got, want in zip(found, (wanted.out, *wanted), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3)
    except Exception as error:
        # Whatever a compiler or driver that does not fit raises: the twin computes the same.
        detail = str(error).splitlines() or [type(error).__name__]
        return f"triton does not work on {kind}: {detail[0]}"
    return None
