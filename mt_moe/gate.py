"""The router's linear map: logits in fp32 from tokens and weights in BF16, without wide copies of the tokens.

    logits = x @ W.T        dx = dlogits @ W        dW = dlogits.T @ x

A product of two BF16 numbers is exact in fp32, so where the device multiplies BF16 with fp32 sums, converting tokens
and weights first gains nothing and costs passes over all tokens. Backward multiplies an fp32 gradient. Rounding it to
BF16 would lose bits; instead it is written as a sum of three BF16 numbers, which has all 24 bits of the mantissa:

    g = g1 + g2 + g3,   g1 = bf16(g),   g2 = bf16(g - g1),   g3 = bf16(g - g1 - g2)

The three stand side by side, [num_tokens, 3 * num_experts], so that each gradient is one product of BF16 matrices,
whose fp32 sums are those of the wide product in another order. Other dtypes, and devices without such a product,
convert.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Gate(torch.autograd.Function):
    """Keeps x and weight as they came for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.narrow = (
            x.dtype == weight.dtype == torch.bfloat16 and dtype == torch.float32 and multiplies_narrow(x.device)
        )
        if ctx.narrow:
            return wide_product(x, weight.t())
        return F.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if ctx.narrow:
            parts = split(grad)
            if needs_x:
                grad_x = parts.mm(weight.repeat(3, 1))
            if needs_weight:
                grad_weight = wide_product(parts.t(), x).view(3, *weight.shape).sum(dim=0).to(weight.dtype)
        else:
            if needs_x:
                grad_x = grad.matmul(weight.to(grad.dtype)).to(x.dtype)
            if needs_weight:
                grad_weight = grad.t().matmul(x.to(grad.dtype)).to(weight.dtype)
        return grad_x, grad_weight, None


def gate_logits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits x [num_tokens, hidden] @ weight [num_experts, hidden].T in `dtype`, summed in it forward and backward.

    Args:
        x: any float dtype.
        weight: any float dtype.
        dtype: fp32 or fp64, no narrower than both.
    """
    logits: Tensor = _Gate.apply(x, weight, dtype)
    return logits


def split(values: Tensor) -> Tensor:
    """Three BF16 numbers for each fp32 number of values [rows, columns], side by side: [rows, 3 * columns].

    Their sum is the number, to the last bit where none of the three is subnormal.
    """
    first = values.to(torch.bfloat16)
    rest = values - first
    second = rest.to(torch.bfloat16)
    return torch.cat([first, second, (rest - second).to(torch.bfloat16)], dim=1)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of BF16 matrices with fp32 sums and an fp32 result."""
    if a.device.type == "cpu":
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


@functools.cache
def multiplies_narrow(device: torch.device) -> bool:
    """Whether the device multiplies BF16 matrices with fp32 sums, tried on an example with long sums."""
    if device.type == "cpu":
        return False
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 4096, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    try:
        got = wide_product(a, b.t())
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    want = a.double() @ b.double().t()
    return float((got - want).norm()) <= 1e-5 * float(want.norm())
