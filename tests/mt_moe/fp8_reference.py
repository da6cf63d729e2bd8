"""The experts in fp32 with the quantisation points of a recipe, written apart from the package.

Nothing here is shared with `mt_moe`: E4M3 is rounded by arithmetic, gradients of the activation come from autograd, and
every expert is computed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def e4m3(value: Tensor) -> Tensor:
    """The nearest E4M3 number, ties to even, in fp32: 3 fraction bits, exponents from -6, at most 448."""
    exponent = torch.frexp(value.abs().clamp_min(2.0**-20)).exponent - 1
    step = torch.ldexp(torch.ones_like(value), exponent.clamp_min(-6) - 3)
    return (torch.round(value / step) * step).clamp(-448, 448)


def snapped(value: Tensor, height: int | None, width: int | None, power_of_two: bool) -> Tensor:
    """What a matrix is after a cast to FP8 and back in blocks of height x width; None is all of a dimension."""
    value = value.float()
    high, wide = height or value.shape[0], width or value.shape[1]
    blocks = value.unfold(0, high, high).unfold(1, wide, wide)
    scale = blocks.abs().amax((2, 3), keepdim=True).clamp_min(1e-4) / torch.tensor(448.0)
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    back = e4m3(blocks / scale) * scale
    return back.permute(0, 2, 1, 3).reshape(value.shape)


class Snap:
    """The casts of one recipe; a product that it leaves in BF16 gets its operand rounded to the rows' dtype alone."""

    def __init__(self, recipe: Any, dtype: torch.dtype) -> None:
        self.recipe, self.dtype = recipe, dtype
        self.block = 128 if recipe.scaling == "block" else None

    def fp8(self, product: str) -> bool:
        return bool(getattr(self.recipe, product) == "fp8")

    def rows(self, x: Tensor, product: str) -> Tensor:
        return snapped(x, 1, self.block, self.recipe.power_of_two) if self.fp8(product) else self.rounded(x)

    def tokens(self, x: Tensor, product: str) -> Tensor:
        return snapped(x, self.block, 1, self.recipe.power_of_two) if self.fp8(product) else self.rounded(x)

    def weight(self, weight: Tensor, product: str, *, turned: bool) -> Tensor:
        if not self.fp8(product):
            return weight.float()
        shape = (128, 128) if self.block else (None, 1) if turned else (1, None)
        return snapped(weight, *shape, self.recipe.power_of_two)

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).float()


def one_expert(snap: Snap, x: Tensor, p: Tensor, fc1: Tensor, fc2: Tensor, dy: Tensor) -> list[Tensor]:
    """(y, dx, dp, dW1, dW2) of one expert on its aligned rows, fp32."""
    kept = snap.rows(x, "fc1_forward")
    hidden = snap.rounded(kept @ snap.weight(fc1, "fc1_forward", turned=False).t()).requires_grad_()
    weight = p.float().clone().requires_grad_()
    gate, up = hidden.chunk(2, dim=1)
    act = F.silu(gate) * up * weight[:, None]
    y = snap.rows(act.detach(), "fc2_forward") @ snap.weight(fc2, "fc2_forward", turned=False).t()
    dact = snap.rounded(snap.rows(dy, "fc2_input_grad") @ snap.weight(fc2, "fc2_input_grad", turned=True))
    dhidden, dp = torch.autograd.grad(act, (hidden, weight), dact)
    dx = snap.rows(dhidden, "fc1_input_grad") @ snap.weight(fc1, "fc1_input_grad", turned=True)
    if snap.recipe.keep == "bf16":
        kept = x.float()
    act = act.detach()
    if snap.block is None:
        dhidden, act = snap.rounded(dhidden), snap.rounded(act)
    dw1 = snap.tokens(dhidden, "fc1_weight_grad").t() @ snap.tokens(kept, "fc1_weight_grad")
    dw2 = snap.tokens(dy, "fc2_weight_grad").t() @ snap.tokens(act, "fc2_weight_grad")
    return [y, dx, dp, dw1, dw2]


def experts(
    recipe: Any, ends: Sequence[int], x: Tensor, p: Tensor, fc1: Tensor, fc2: Tensor, dy: Tensor
) -> list[Tensor]:
    """(y, dx, dp, dW1, dW2) of all experts, whose aligned rows end at `ends`; zeros behind the last."""
    results = [torch.zeros(t.shape) for t in (x, x, p, fc1, fc2)]
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            part = one_expert(
                Snap(recipe, x.dtype), x[start:end], p[start:end], fc1[expert], fc2[expert], dy[start:end]
            )
            for total, value in zip(results[:3], part[:3], strict=True):
                total[start:end] = value
            results[3][expert], results[4][expert] = part[3], part[4]
        start = end
    return results
