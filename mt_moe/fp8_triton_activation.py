"""SwiGLU times routing weight, forward and backward, with FP8 results: the other Triton kernels of `fp8_cast`.

A tile of the backward reads gate, up and the gradient once and leaves up to five results: the gradient of fc1's output
along columns and along tokens (both halves), and the activation along tokens. The gradient of the routing weight is a
sum over all columns; each tile leaves its part and the parts are added in a fixed order, so that two runs are equal.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_moe.fp8_operands import FP8, Groups, RowOperand, TokenOperand
from mt_moe.fp8_triton import _quantised, _scale, _store_rows, _store_tokens, empty_rows, empty_tokens, token_operand
from mt_moe.recipes import BLOCK, Recipe


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _activate_tile(
    hidden: tl.tensor, weights: tl.tensor, data: tl.tensor, scales: tl.tensor, blocks: tl.tensor,
    num_blocks: tl.tensor, F: tl.tensor, POW2: tl.constexpr,
) -> None:  # fmt: skip
    c, block = tl.program_id(0) * 128, tl.program_id(1)
    start, size = tl.load(blocks + block) * 128, tl.load(blocks + num_blocks + block) * 128
    row = block * 128
    i = tl.arange(0, 128)
    where = (row + i).to(tl.int64)[:, None] * (2 * F) + (c + i)[None, :]
    gate, up = tl.load(hidden + where).to(tl.float32), tl.load(hidden + where + F).to(tl.float32)
    weight = tl.load(weights + row + i).to(tl.float32)
    _store_rows(gate * tl.sigmoid(gate) * up * weight[:, None], data, scales, start, size, row, F, c, POW2)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _activate_row(
    hidden: tl.tensor, weights: tl.tensor, data: tl.tensor, scales: tl.tensor, F: tl.tensor, WIDTH: tl.constexpr,
    POW2: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    gate = tl.load(hidden + row * 2 * F + i, mask=i < F, other=0.0).to(tl.float32)
    up = tl.load(hidden + row * 2 * F + F + i, mask=i < F, other=0.0).to(tl.float32)
    v = gate * tl.sigmoid(gate) * up * tl.load(weights + row).to(tl.float32)
    scale = _scale(tl.max(tl.abs(v), axis=0), POW2)
    tl.store(data + row * F + i, _quantised(v, scale, POW2), mask=i < F)
    tl.store(scales + row, scale)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward_tile(
    hidden: tl.tensor, grad: tl.tensor, weights: tl.tensor, rows: tl.tensor, row_scales: tl.tensor, tokens: tl.tensor,
    token_scales: tl.tensor, act_tokens: tl.tensor, act_scales: tl.tensor, plain_grad: tl.tensor, plain_act: tl.tensor,
    parts: tl.tensor, blocks: tl.tensor, num_blocks: tl.tensor, num_rows: tl.tensor, F: tl.tensor, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, ACT: tl.constexpr, PLAIN_GRAD: tl.constexpr, PLAIN_ACT: tl.constexpr, POW2: tl.constexpr,
) -> None:  # fmt: skip
    c, block = tl.program_id(0) * 128, tl.program_id(1)
    start, size = tl.load(blocks + block) * 128, tl.load(blocks + num_blocks + block) * 128
    row = block * 128
    i = tl.arange(0, 128)
    r, k = (row + i).to(tl.int64), c + i
    wide, narrow = r[:, None] * (2 * F) + k[None, :], r[:, None] * F + k[None, :]
    weight = tl.load(weights + row + i).to(tl.float32)[:, None]
    # Each result reads its inputs again, from the cache: kept in registers over all of them they spill.
    gate, up = tl.load(hidden + wide).to(tl.float32), tl.load(hidden + wide + F).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(parts + tl.program_id(0).to(tl.int64) * num_rows + r, tl.sum(tl.load(grad + narrow) * product, axis=1))
    if ACT:
        _store_tokens(product * weight, act_tokens, act_scales, start, size, row, F, c, POW2)
    if PLAIN_ACT:
        tl.store(plain_act + narrow, (product * weight).to(plain_act.dtype.element_ty))
    for half in tl.static_range(2):
        gate, da = tl.load(hidden + wide).to(tl.float32), tl.load(grad + narrow).to(tl.float32) * weight
        sigmoid = tl.sigmoid(gate)
        if half == 0:
            v = da * tl.load(hidden + wide + F).to(tl.float32) * (sigmoid * (1 + gate * (1 - sigmoid)))
        else:
            v = da * (gate * sigmoid)
        if ROWS:
            _store_rows(v, rows, row_scales, start, size, row, 2 * F, half * F + c, POW2)
        if TOKENS:
            _store_tokens(v, tokens, token_scales, start, size, row, 2 * F, half * F + c, POW2)
        if PLAIN_GRAD:
            tl.store(plain_grad + wide + half * F, v.to(plain_grad.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward_row(
    hidden: tl.tensor, grad: tl.tensor, weights: tl.tensor, data: tl.tensor, scales: tl.tensor, plain_grad: tl.tensor,
    plain_act: tl.tensor, grad_weights: tl.tensor, F: tl.tensor, ROWS: tl.constexpr, PLAIN_GRAD: tl.constexpr,
    WIDTH: tl.constexpr, POW2: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    inside = i < F
    wide, narrow = row * 2 * F + i, row * F + i
    gate = tl.load(hidden + wide, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(hidden + wide + F, mask=inside, other=0.0).to(tl.float32)
    da = tl.load(grad + narrow, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    act = gate * sigmoid
    product = act * up
    tl.store(grad_weights + row, tl.sum(da * product, axis=0))
    tl.store(plain_act + narrow, (product * weight).to(plain_act.dtype.element_ty), mask=inside)
    da = da * weight
    grad_up = da * act
    grad_gate = da * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    if PLAIN_GRAD:
        tl.store(plain_grad + wide, grad_gate.to(plain_grad.dtype.element_ty), mask=inside)
        tl.store(plain_grad + wide + F, grad_up.to(plain_grad.dtype.element_ty), mask=inside)
    if ROWS:
        scale = _scale(tl.maximum(tl.max(tl.abs(grad_gate), axis=0), tl.max(tl.abs(grad_up), axis=0)), POW2)
        tl.store(data + wide, _quantised(grad_gate, scale, POW2), mask=inside)
        tl.store(data + wide + F, _quantised(grad_up, scale, POW2), mask=inside)
        tl.store(scales + row, scale)


def activate_row_operand(hidden: Tensor, row_weights: Tensor, groups: Groups, recipe: Recipe) -> RowOperand:
    """See `fp8_cast.activate_row_operand`."""
    rows, ffn = hidden.shape[0], hidden.shape[1] // 2
    row_weights = row_weights.contiguous()
    if recipe.scaling == "row":
        data = torch.empty(rows, ffn, dtype=FP8, device=hidden.device)
        scales = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        _activate_row[(rows,)](
            hidden, row_weights, data, scales, ffn, WIDTH=triton.next_power_of_2(ffn), POW2=recipe.power_of_two,
        )  # fmt: skip
        return RowOperand(data, scales, "row")
    data, scales = empty_rows(hidden, ffn)
    num_blocks = groups.blocks.shape[1]
    _activate_tile[(ffn // BLOCK, num_blocks)](
        hidden, row_weights, data, scales, groups.blocks, num_blocks, ffn, POW2=recipe.power_of_two, num_warps=16
    )
    return RowOperand(data, scales, "block")


def activation_backward(
    hidden: Tensor, grad: Tensor, row_weights: Tensor, groups: Groups, recipe: Recipe
) -> tuple[dict[str, Any], Tensor]:
    """See `fp8_cast.activation_backward`."""
    run = _backward_by_row if recipe.scaling == "row" else _backward_by_tile
    return run(hidden.contiguous(), grad.contiguous(), row_weights.contiguous(), groups, recipe)


def _backward_by_row(
    hidden: Tensor, grad: Tensor, row_weights: Tensor, groups: Groups, recipe: Recipe
) -> tuple[dict[str, Any], Tensor]:
    rows, ffn = grad.shape
    want_rows = recipe.fc1_input_grad == "fp8"
    data = torch.empty(hidden.shape, dtype=FP8, device=grad.device) if want_rows else grad
    scales = torch.empty(rows, dtype=torch.float32, device=grad.device)
    plain_grad, plain_act = torch.empty_like(hidden, dtype=grad.dtype), torch.empty_like(grad)
    grad_weights = torch.empty_like(scales)
    _backward_row[(rows,)](
        hidden, grad, row_weights, data, scales, plain_grad, plain_act, grad_weights, ffn,
        ROWS=want_rows, PLAIN_GRAD=True, WIDTH=triton.next_power_of_2(ffn), POW2=recipe.power_of_two, num_warps=8,
    )  # fmt: skip

    def form(name: str, plain: Tensor) -> Tensor | TokenOperand:
        return token_operand(plain, groups, recipe) if getattr(recipe, name) == "fp8" else plain

    return {
        "grad_rows": RowOperand(data, scales, "row") if want_rows else plain_grad,
        "grad_tokens": form("fc1_weight_grad", plain_grad),
        "act_tokens": form("fc2_weight_grad", plain_act),
    }, grad_weights


def _backward_by_tile(
    hidden: Tensor, grad: Tensor, row_weights: Tensor, groups: Groups, recipe: Recipe
) -> tuple[dict[str, Any], Tensor]:
    rows, ffn = grad.shape
    want_rows, want_tokens = recipe.fc1_input_grad == "fp8", recipe.fc1_weight_grad == "fp8"
    want_act, want_plain = recipe.fc2_weight_grad == "fp8", not (want_rows and want_tokens)
    data, scales = empty_rows(hidden, 2 * ffn) if want_rows else (grad, grad)
    turned, turned_scales = empty_tokens(hidden, 2 * ffn) if want_tokens else (grad, grad)
    act, act_scales = empty_tokens(hidden, ffn) if want_act else (grad, grad)
    plain_grad = torch.empty_like(hidden, dtype=grad.dtype) if want_plain else grad
    plain_act = grad if want_act else torch.empty_like(grad)
    parts = torch.empty(ffn // BLOCK, rows, dtype=torch.float32, device=grad.device)
    num_blocks = groups.blocks.shape[1]
    _backward_tile[(ffn // BLOCK, num_blocks)](
        hidden, grad, row_weights, data, scales, turned, turned_scales, act, act_scales, plain_grad, plain_act, parts,
        groups.blocks, num_blocks, rows, ffn,
        ROWS=want_rows, TOKENS=want_tokens, ACT=want_act, PLAIN_GRAD=want_plain, PLAIN_ACT=not want_act,
        POW2=recipe.power_of_two, num_warps=16,
    )  # fmt: skip
    return {
        "grad_rows": RowOperand(data, scales, "block") if want_rows else plain_grad,
        "grad_tokens": TokenOperand(turned, turned_scales, "block", 2 * ffn) if want_tokens else plain_grad,
        "act_tokens": TokenOperand(act, act_scales, "block", ffn) if want_act else plain_act,
    }, parts.sum(0)
