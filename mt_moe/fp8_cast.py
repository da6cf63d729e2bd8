"""Casts to FP8 for the experts: the definition in plain torch, and the choice of the Triton kernel that fuses it.

Every cast is one formula in fp32 over some block of values, the one of `comm_core.fp8`:

    scale = max(largest |v| of the block, 1e-4) / 448, rounded up to a power of two by config
    data  = v / scale to the nearest E4M3

What differs is the shape of the block (1 x 128, a row, 128 or all tokens of an expert, 128 x 128), the layout of the
result (`fp8_operands`) and what computes v: rows as they are, FP8 rows dequantised, or the activation. On a GPU a cast
of its own costs a pass over memory, so the activation writes its FP8 results itself, and a gradient is read once for
both of its orientations. `fp8_triton` and `fp8_triton_activation` hold these kernels; this module is what they must
equal: bit for bit where v is read, to rounding of exp where v is computed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mt_moe.fp8_operands import FP8, Groups, RowOperand, TokenOperand, WeightOperand
from mt_moe.recipes import BLOCK, RECIPES, Recipe, recipe_of

MAX = 448.0
AMAX_FLOOR = 1e-4


CASTS, ACTIVATION = "mt_moe.fp8_triton", "mt_moe.fp8_triton_activation"


def kernels(device: torch.device, module: str = CASTS) -> ModuleType | None:
    """A module of Triton kernels where they run and are right: never on a CPU."""
    if device.type == "cpu" or why_no_kernels(device.type) is not None:
        return None
    return importlib.import_module(module)


@functools.cache
def why_no_kernels(kind: str) -> str | None:
    """Why the kernels do not run on a kind of device, found by a tiny example; None where they do."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    recipe, here, there = RECIPES["blockwise"], torch.device("cpu"), torch.device(kind)
    x, weights = torch.linspace(-3, 3, 128 * 256).view(128, 256).to(torch.bfloat16), torch.linspace(0.5, 2, 128)
    try:
        casts, activation = importlib.import_module(CASTS), importlib.import_module(ACTIVATION)
        groups = Groups.of((128,), there)
        found = (
            *casts.both_operands(x.to(there), groups, recipe),
            activation.activate_row_operand(x.to(there), weights.to(there), groups, recipe),
        )
        groups = Groups.of((128,), here)
        wanted = (
            *both_operands(x, groups, recipe, rows=True, tokens=True),
            activate_row_operand(x, weights, groups, recipe),
        )
        for got, want in zip(found, wanted, strict=True):
            assert got is not None and want is not None, "rows and tokens were asked for"
            torch.testing.assert_close(got.scales.cpu(), want.scales, rtol=1e-5, atol=0)
            # A value of the activation may fall on the other side of a tie.
            torch.testing.assert_close(got.data.cpu().float(), want.data.float(), rtol=0.13, atol=1e-2)
    except Exception as error:
        # Whatever a compiler or driver that does not fit raises: the definition computes the same, slowly.
        detail = str(error).splitlines() or [type(error).__name__]
        return f"triton does not work on {kind}: {detail[0]}"
    return None


def scales_of(amax: Tensor, power_of_two: bool) -> Tensor:
    """Scales, fp32, of blocks with these largest magnitudes."""
    # By a tensor: torch divides by a number with its reciprocal on CUDA, which rounds differently.
    scales = amax.float().clamp_min(AMAX_FLOOR) / torch.full_like(amax, MAX, dtype=torch.float32)
    if power_of_two:
        bits = scales.view(torch.int32).to(torch.int64) + 0x7FFFFF >> 23
        scales = (bits.clamp_max(255).to(torch.int32) << 23).view(torch.float32)
    return scales


def quantised(blocks: Tensor, dims: tuple[int, ...], power_of_two: bool) -> tuple[Tensor, Tensor]:
    """FP8 data like `blocks` and fp32 scales with the block's dimensions kept as 1."""
    blocks = blocks.float()
    scales = scales_of(blocks.abs().amax(dims, keepdim=True), power_of_two)
    return (blocks / scales).to(FP8), scales


def pack_row_scales(scales: Tensor, groups: Groups) -> Tensor:
    """Scales [R, C / 128] in the flat layout of a block-scaled `RowOperand`."""
    fast = kernels(scales.device)
    if fast is not None and scales.shape[0]:
        packed: Tensor = fast.pack_row_scales(scales, groups)
        return packed
    parts = [scales[start:end].t().reshape(-1) for _, start, end in groups.bounds()]
    return torch.cat(parts) if parts else scales.new_empty(0)


def row_operand(x: Tensor, groups: Groups, recipe: Recipe) -> RowOperand:
    """Rows [R, C] quantised along columns."""
    fast = kernels(x.device)
    if fast is not None and x.shape[0]:
        return fast.row_operand(x, groups, recipe)
    num_rows, columns = x.shape
    if recipe.scaling == "row":
        data, scales = quantised(x, (1,), recipe.power_of_two)
        return RowOperand(data, scales.view(-1), "row")
    data, scales = quantised(x.reshape(num_rows, columns // BLOCK, BLOCK), (2,), recipe.power_of_two)
    return RowOperand(data.view(num_rows, columns), pack_row_scales(scales.squeeze(2), groups), "block")


def token_operand(x: Tensor | RowOperand, groups: Groups, recipe: Recipe) -> TokenOperand:
    """Rows [R, C], or quantised rows, quantised along tokens and transposed."""
    source = x.data if isinstance(x, RowOperand) else x
    fast = kernels(source.device)
    if fast is not None and source.shape[0]:
        return fast.token_operand(x, groups, recipe)
    values = x.dequantised(groups) if isinstance(x, RowOperand) else x.float()
    num_rows, columns = values.shape
    if recipe.scaling == "block":
        data, scales = quantised(values.view(num_rows // BLOCK, BLOCK, columns), (1,), recipe.power_of_two)
        data = data.view(num_rows, columns)
        parts = [data[start:end].t().reshape(-1) for _, start, end in groups.bounds()]
        flat = torch.cat(parts) if parts else data.view(-1)
        return TokenOperand(flat, scales.squeeze(1), "block", columns)
    scales = scales_of(values.new_zeros(len(groups.ends), columns), recipe.power_of_two)
    data = torch.empty(columns, num_rows, dtype=FP8, device=values.device)
    for expert, start, end in groups.bounds():
        part, scale = quantised(values[start:end], (0,), recipe.power_of_two)
        data[:, start:end], scales[expert] = part.t(), scale[0]
    return TokenOperand(data, scales, "row", columns)


def both_operands(
    x: Tensor, groups: Groups, recipe: Recipe, *, rows: bool, tokens: bool
) -> tuple[RowOperand | None, TokenOperand | None]:
    """Rows [R, C] quantised along columns, along tokens or both; from one pass over x where a kernel can."""
    fast = kernels(x.device)
    if fast is not None and x.shape[0] and rows and tokens and recipe.scaling == "block":
        return fast.both_operands(x, groups, recipe)
    return (
        row_operand(x, groups, recipe) if rows else None,
        token_operand(x, groups, recipe) if tokens else None,
    )


def weight_operands(weights: Tensor, recipe: Recipe) -> tuple[WeightOperand, WeightOperand]:
    """Weights [E, N, C] quantised for x @ W.T (reduced along C) and for dy @ W (transposed, reduced along N)."""
    fast = kernels(weights.device)
    if fast is not None:
        return fast.weight_operands(weights, recipe)
    experts, rows, columns = weights.shape
    if recipe.scaling == "row":
        data, scales = quantised(weights, (2,), recipe.power_of_two)
        turned, turned_scales = quantised(weights.transpose(1, 2), (2,), recipe.power_of_two)
        return (
            WeightOperand(data, scales.squeeze(2), "row"),
            WeightOperand(turned.contiguous(), turned_scales.squeeze(2), "row"),
        )
    tiles = weights.reshape(experts, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    data, scales = quantised(tiles, (2, 4), recipe.power_of_two)
    data, scales = data.view(weights.shape), scales.view(experts, rows // BLOCK, columns // BLOCK)
    return (
        WeightOperand(data, padded_to_four(scales), "block"),
        WeightOperand(data.transpose(1, 2).contiguous(), padded_to_four(scales.transpose(1, 2)), "block"),
    )


def padded_to_four(scales: Tensor) -> Tensor:
    """The last dimension filled up with zeros to a multiple of 4: 16 bytes, what block-scaled products read."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4)).contiguous()


def silu_parts(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(gate, up, sigmoid(gate), silu(gate)) in fp32 of [R, 2 * F] = gate || up."""
    gate, up = hidden.float().chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    return gate, up, sigmoid, gate * sigmoid


def activate(hidden: Tensor, row_weights: Tensor) -> Tensor:
    """silu(gate) * up * weight of [R, 2 * F] in fp32, not rounded."""
    _, up, _, act = silu_parts(hidden)
    return act * up * row_weights.float().unsqueeze(1)


def activate_row_operand(hidden: Tensor, row_weights: Tensor, groups: Groups, recipe: Recipe) -> RowOperand:
    """silu(gate) * up * weight of hidden [R, 2 * F], quantised along columns without being rounded before."""
    fast = kernels(hidden.device, ACTIVATION)
    if fast is not None and hidden.shape[0]:
        return fast.activate_row_operand(hidden, row_weights, groups, recipe)
    return row_operand(activate(hidden, row_weights), groups, recipe)


def activation_gradients(hidden: Tensor, grad: Tensor, row_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, in fp32, through a = silu(gate) * up * weight.

    Args:
        hidden: [R, 2 * F], gate || up.
        grad: [R, F], of a.
        row_weights: [R].

    Returns:
        the gradient of hidden [R, 2 * F], that of the weights [R], and a [R, F] again.
    """
    gate, up, sigmoid, act = silu_parts(hidden)
    grad, weight = grad.float(), row_weights.float().unsqueeze(1)
    product = act * up
    scaled = grad * weight
    grad_gate = scaled * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    return torch.cat((grad_gate, scaled * act), dim=1), (grad * product).sum(1), product * weight


def activation_backward(
    hidden: Tensor, grad: Tensor, row_weights: Tensor, groups: Groups, recipe: Recipe
) -> tuple[dict[str, Any], Tensor]:
    """`activation_gradients`, every result in the form in which the recipe's products read it.

    Returns:
        operands: "grad_rows" and "grad_tokens", hidden's gradient for the input and the weight gradient of fc1, and
        "act_tokens", a for the weight gradient of fc2; each an operand, or a tensor like `grad` where that product is
        BF16. And the gradient of the weights, fp32 [R].
    """
    fast = kernels(hidden.device, ACTIVATION)
    if fast is not None and hidden.shape[0]:
        return fast.activation_backward(hidden, grad, row_weights, groups, recipe)
    grad_hidden, grad_weights, act = activation_gradients(hidden, grad, row_weights)
    plain_grad, plain_act = grad_hidden.to(grad.dtype), act.to(grad.dtype)
    # One scale a column of an expert takes two passes, the second over what the first wrote: rounded to grad's dtype.
    by_tile = recipe.scaling == "block"
    first, second = (grad_hidden, act) if by_tile else (plain_grad, plain_act)
    return {
        "grad_rows": row_operand(grad_hidden, groups, recipe) if recipe.fc1_input_grad == "fp8" else plain_grad,
        "grad_tokens": token_operand(first, groups, recipe) if recipe.fc1_weight_grad == "fp8" else plain_grad,
        "act_tokens": token_operand(second, groups, recipe) if recipe.fc2_weight_grad == "fp8" else plain_act,
    }, grad_weights


class Travel:
    """How rows travel under a recipe: `functional.Cast` with a scale a block of 128 values, or a row."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """FP8 data of rows [n, hidden] and fp32 scales [n, hidden / 128], or [n, 1] with one a row."""
        num_rows, hidden = x.shape
        fast = kernels(x.device)
        width = hidden if self._recipe.scaling == "row" else BLOCK
        if fast is not None and num_rows:
            data, scales = fast.rows_by_row(x.reshape(-1, width), self._recipe)
        else:
            data, scales = quantised(x.reshape(-1, width), (1,), self._recipe.power_of_two)
        return data.view(num_rows, hidden), scales.view(num_rows, hidden // width)

    def unpack(self, data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of data and scales, rounded to `dtype`."""
        num_rows, hidden = data.shape
        fast = kernels(data.device)
        if fast is not None and num_rows and hidden % BLOCK == 0:
            return fast.unpacked(data, scales, dtype)
        parts = scales.shape[1]  # all sizes are named: with no rows torch can not work one out
        blocks = data.view(num_rows, parts, hidden // parts).float() * scales[:, :, None]
        return blocks.view(num_rows, hidden).to(dtype)


def travel_casts(recipe: str | Recipe) -> tuple[Travel | None, Travel | None]:
    """What packs tokens on their way to the experts, and gradients on theirs; None where they travel as they are."""
    found = recipe_of(recipe)
    if found is None:
        return None, None
    travel = Travel(found)
    return travel if found.dispatch == "fp8" else None, travel if found.dispatch_grad == "fp8" else None
