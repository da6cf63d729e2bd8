"""The kernels in Triton: SwiGLU times routing weight as `fused_activation` defines it, what `clearing` clears, `lanes`.

This module imports Triton; `fused_activation.kernels_on` imports it where a device runs it, nobody else. The gradient
of the routing weight is a sum along the row, which one program holds from end to end: no atomics, the same bits every
run. Triton reads the annotations of a kernel as code: names of its own language alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward(
    hidden: tl.tensor, weights: tl.tensor, out: tl.tensor, ends: tl.tensor, num_ends: tl.tensor, FFN: tl.constexpr,
    BLOCK: tl.constexpr, HAS_ENDS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    limit = FFN
    if HAS_ENDS:
        limit = tl.where(row < tl.load(ends + num_ends - 1), FFN, 0)
    weight = tl.load(weights + row)
    for first in range(0, FFN, BLOCK):
        column = first + tl.arange(0, BLOCK)
        real = column < limit
        gate = tl.load(hidden + row * (2 * FFN) + column, mask=real, other=0.0).to(tl.float32)
        up = tl.load(hidden + row * (2 * FFN) + FFN + column, mask=real, other=0.0).to(tl.float32)
        value = gate * (1.0 / (1.0 + tl.exp(-gate))) * up * weight
        value = tl.where(real, value, 0.0)
        tl.store(out + row * FFN + column, value.to(out.dtype.element_ty), mask=column < FFN)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward(
    hidden: tl.tensor, weights: tl.tensor, grad: tl.tensor, grad_hidden: tl.tensor, grad_weights: tl.tensor,
    out: tl.tensor, ends: tl.tensor, num_ends: tl.tensor, FFN: tl.constexpr, BLOCK: tl.constexpr,
    HAS_ENDS: tl.constexpr, WANTS_OUT: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    limit = FFN
    if HAS_ENDS:
        limit = tl.where(row < tl.load(ends + num_ends - 1), FFN, 0)
    weight = tl.load(weights + row)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, FFN, BLOCK):
        column = first + tl.arange(0, BLOCK)
        real = column < limit
        inside = column < FFN
        gate = tl.load(hidden + row * (2 * FFN) + column, mask=real, other=0.0).to(tl.float32)
        up = tl.load(hidden + row * (2 * FFN) + FFN + column, mask=real, other=0.0).to(tl.float32)
        g = tl.load(grad + row * FFN + column, mask=real, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        active = gate * sigmoid
        value = active * up
        total += g * value
        weighted = tl.where(real, g * weight, 0.0)
        grad_gate = weighted * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
        kind = grad_hidden.dtype.element_ty
        tl.store(grad_hidden + row * (2 * FFN) + column, grad_gate.to(kind), mask=inside)
        tl.store(grad_hidden + row * (2 * FFN) + FFN + column, (weighted * active).to(kind), mask=inside)
        if WANTS_OUT:
            again = tl.where(real, value * weight, 0.0)
            tl.store(out + row * FFN + column, again.to(out.dtype.element_ty), mask=inside)
    tl.store(grad_weights + row, tl.sum(total, axis=0))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _clear_tail(
    rows: tl.tensor, ends: tl.tensor, num_ends: tl.tensor, num_rows: tl.tensor, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    # The programs share the rows that are behind the last group, however many there are.
    row = tl.load(ends + num_ends - 1).to(tl.int64) + tl.program_id(0)
    while row < num_rows:
        for first in range(0, WIDTH, BLOCK):
            column = first + tl.arange(0, BLOCK)
            tl.store(rows + row * WIDTH + column, tl.zeros([BLOCK], rows.dtype.element_ty), mask=column < WIDTH)
        row += tl.num_programs(0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _clear_empty(
    matrices: tl.tensor, ends: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    group = tl.program_id(0)
    begin = 0
    if group > 0:
        begin = tl.load(ends + group - 1)
    if tl.load(ends + group) == begin:
        first = tl.program_id(1) * BLOCK
        while first < size:
            at = first + tl.arange(0, BLOCK)
            where = matrices + group.to(tl.int64) * size + at
            tl.store(where, tl.zeros([BLOCK], matrices.dtype.element_ty), mask=at < size)
            first += tl.num_programs(1) * BLOCK


_CLEARING_PROGRAMS, _CLEARING_BLOCK = 1024, 1024


def clear_tail(rows: Tensor, ends: Tensor) -> None:
    """See `clearing.clear_tail`."""
    num_rows, width = rows.shape
    _clear_tail[(_CLEARING_PROGRAMS,)](rows, ends, ends.shape[0], num_rows, WIDTH=width, BLOCK=_CLEARING_BLOCK)


def clear_empty(matrices: Tensor, ends: Tensor) -> None:
    """See `clearing.clear_empty`."""
    grid = (ends.shape[0], 32)
    _clear_empty[grid](matrices, ends, matrices.stride(0), BLOCK=_CLEARING_BLOCK)


def _sizes(ffn: int) -> tuple[int, int]:
    """Columns a step and warps of a program: eight elements a thread and load, a row of up to 2,048 in one step."""
    block = min(2048, max(256, triton.next_power_of_2(ffn)))
    return block, block // 256


def forward(hidden: Tensor, row_weights: Tensor, ends: Tensor | None) -> Tensor:
    """See `fused_activation.forward`."""
    num_rows, ffn = hidden.shape[0], hidden.shape[1] // 2
    out = torch.empty(num_rows, ffn, dtype=hidden.dtype, device=hidden.device)
    if num_rows:
        block, warps = _sizes(ffn)
        _forward[(num_rows,)](
            hidden, row_weights, out, row_weights if ends is None else ends, 0 if ends is None else ends.shape[0],
            FFN=ffn, BLOCK=block, HAS_ENDS=ends is not None, num_warps=warps,
        )  # fmt: skip
    return out


def backward(
    hidden: Tensor, row_weights: Tensor, grad: Tensor, ends: Tensor | None, wants_out: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `fused_activation.backward`."""
    num_rows, ffn = hidden.shape[0], hidden.shape[1] // 2
    grad_hidden, grad_weights = torch.empty_like(hidden), torch.empty_like(row_weights)
    out = torch.empty_like(grad) if wants_out else None
    if num_rows:
        block, warps = _sizes(ffn)
        _backward[(num_rows,)](
            hidden, row_weights, grad, grad_hidden, grad_weights, grad if out is None else out,
            row_weights if ends is None else ends, 0 if ends is None else ends.shape[0],
            FFN=ffn, BLOCK=block, HAS_ENDS=ends is not None, WANTS_OUT=wants_out, num_warps=warps,
        )  # fmt: skip
    return grad_hidden, grad_weights, out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _lanes_forward(
    probs: tl.tensor, flags: tl.tensor, idx: tl.tensor, weights: tl.tensor, num_tokens: tl.tensor,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDTH)
    inside = (token[:, None] < num_tokens) & (expert[None, :] < EXPERTS)
    at = token[:, None] * EXPERTS + expert[None, :]
    flag = tl.load(flags + at, mask=inside, other=0).to(tl.int32)
    lane = tl.cumsum(flag, axis=1) - 1
    routed = inside & (flag != 0) & (lane < TOPK)
    value = tl.load(probs + at, mask=routed, other=0.0).to(tl.float32)
    ids = tl.zeros([TOKENS, WIDTH], tl.int64) + expert[None, :]
    tl.store(idx + token[:, None] * TOPK + lane, ids, mask=routed)
    tl.store(weights + token[:, None] * TOPK + lane, value, mask=routed)
    count = tl.sum(flag, axis=1)
    for k in range(TOPK):
        unused = (token < num_tokens) & (count <= k)
        tl.store(idx + token * TOPK + k, tl.full([TOKENS], -1, tl.int64), mask=unused)
        tl.store(weights + token * TOPK + k, tl.zeros([TOKENS], tl.float32), mask=unused)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _lanes_backward(
    grad: tl.tensor, idx: tl.tensor, out: tl.tensor, num_tokens: tl.tensor, EXPERTS: tl.constexpr,
    TOPK: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDTH)
    real = token < num_tokens
    found = tl.zeros([TOKENS, WIDTH], tl.float32)
    for k in range(TOPK):
        at = token * TOPK + k
        mine = tl.load(idx + at, mask=real, other=-1)
        value = tl.load(grad + at, mask=real, other=0.0)
        found = tl.where(mine[:, None] == expert[None, :], value[:, None], found)
    inside = real[:, None] & (expert[None, :] < EXPERTS)
    tl.store(out + token[:, None] * EXPERTS + expert[None, :], found.to(out.dtype.element_ty), mask=inside)


_LANES = 2048  # flags of a program


def _lane_sizes(num_tokens: int, num_experts: int) -> tuple[int, int, int]:
    width = triton.next_power_of_2(num_experts)
    tokens = max(1, _LANES // width)
    return width, tokens, -(-num_tokens // tokens)


def lanes_forward(probs: Tensor, routing_map: Tensor, num_topk: int) -> tuple[Tensor, Tensor]:
    """See `lanes.from_map`."""
    num_tokens, num_experts = probs.shape
    idx = torch.empty(num_tokens, num_topk, dtype=torch.int64, device=probs.device)
    weights = torch.empty(num_tokens, num_topk, dtype=torch.float32, device=probs.device)
    width, tokens, programs = _lane_sizes(num_tokens, num_experts)
    if programs:
        _lanes_forward[(programs,)](
            probs, routing_map.view(torch.uint8), idx, weights, num_tokens,
            EXPERTS=num_experts, TOPK=num_topk, WIDTH=width, TOKENS=tokens,
        )  # fmt: skip
    return idx, weights


def lanes_backward(grad: Tensor, idx: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    """See `lanes.grad_twin`."""
    out = torch.empty(grad.shape[0], num_experts, dtype=dtype, device=grad.device)
    width, tokens, programs = _lane_sizes(grad.shape[0], num_experts)
    if programs:
        _lanes_backward[(programs,)](
            grad, idx, out, grad.shape[0],
            EXPERTS=num_experts, TOPK=grad.shape[1], WIDTH=width, TOKENS=tokens,
        )  # fmt: skip
    return out
