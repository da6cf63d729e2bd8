"""The casts of `fp8_cast` as Triton kernels; imported where Triton is found and the device is no CPU.

Two shapes of work. A *tile* of 128 x 128 values holds whole blocks of both orientations, so one read of a gradient
gives its FP8 rows and its transposed FP8 tokens, with both scales found inside the tile. A *row* that fits in registers
gives one scale a row. Scales along all tokens of an expert need a first pass for the largest values.

Divisions are rounded to nearest (`div_rn`): the plain `/` of GPU code is not, and the definition is. By a power of two
the product with the reciprocal is the same number and costs one instruction instead of ten.

Triton reads the annotations of a kernel as code: names from its own language alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mt_moe.fp8_operands import FP8, Groups, RowOperand, TokenOperand, WeightOperand
from mt_moe.recipes import BLOCK, Recipe


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scale(amax: tl.tensor, POW2: tl.constexpr) -> tl.tensor:
    scale = tl.div_rn(tl.maximum(amax, 1e-4), 448.0)
    if POW2:
        bits = scale.to(tl.int32, bitcast=True)
        scale = (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _quantised(v: tl.tensor, scale: tl.tensor, POW2: tl.constexpr) -> tl.tensor:
    """v / scale in FP8; the scale of the shape of v, or with dimensions of 1."""
    if POW2:
        return (v * tl.div_rn(1.0, scale)).to(tl.float8e4nv)
    return tl.div_rn(v, tl.broadcast_to(scale, v.shape)).to(tl.float8e4nv)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _store_rows(
    v: tl.tensor, data: tl.tensor, scales: tl.tensor, start: tl.tensor, size: tl.tensor, row: tl.tensor, C: tl.tensor,
    c: tl.tensor, POW2: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of 128 x 128 values quantised along columns; `row` and `c` are the tile's first row and column."""
    i = tl.arange(0, 128)
    scale = _scale(tl.max(tl.abs(v), axis=1), POW2)
    where = (row + i).to(tl.int64)[:, None] * C + (c + i)[None, :]
    tl.store(data + where, _quantised(v, scale[:, None], POW2))
    tl.store(scales + start.to(tl.int64) * (C // 128) + (c // 128) * size + (row - start) + i, scale)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _store_tokens(
    v: tl.tensor, data: tl.tensor, scales: tl.tensor, start: tl.tensor, size: tl.tensor, row: tl.tensor, C: tl.tensor,
    c: tl.tensor, POW2: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of 128 x 128 values quantised along rows, stored transposed."""
    i = tl.arange(0, 128)
    scale = _scale(tl.max(tl.abs(v), axis=0), POW2)
    turned = tl.trans(_quantised(v, scale[None, :], POW2))
    where = start.to(tl.int64) * C + (c + i).to(tl.int64)[:, None] * size + (row - start + i)[None, :]
    tl.store(data + where, turned)
    tl.store(scales + (row // 128).to(tl.int64) * C + c + i, scale)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _cast_tile(
    x: tl.tensor, x_scales: tl.tensor, data: tl.tensor, scales: tl.tensor, turned: tl.tensor, turned_scales: tl.tensor,
    blocks: tl.tensor, num_blocks: tl.tensor, C: tl.tensor, DEQUANTISE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, POW2: tl.constexpr,
) -> None:  # fmt: skip
    c, block = tl.program_id(0) * 128, tl.program_id(1)
    # In units of 128, so that the compiler sees the alignment of what follows.
    start, size = tl.load(blocks + block) * 128, tl.load(blocks + num_blocks + block) * 128
    row = block * 128
    i = tl.arange(0, 128)
    v = tl.load(x + (row + i).to(tl.int64)[:, None] * C + (c + i)[None, :]).to(tl.float32)
    if DEQUANTISE:
        v = v * tl.load(x_scales + start.to(tl.int64) * (C // 128) + (c // 128) * size + (row - start) + i)[:, None]
    if ROWS:
        _store_rows(v, data, scales, start, size, row, C, c, POW2)
    if ROWS and TOKENS:
        # Again, from the cache: kept in registers it would halve the tiles in flight.
        v = tl.load(x + (row + i).to(tl.int64)[:, None] * C + (c + i)[None, :]).to(tl.float32)
    if TOKENS:
        _store_tokens(v, turned, turned_scales, start, size, row, C, c, POW2)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _cast_row(
    x: tl.tensor, data: tl.tensor, scales: tl.tensor, C: tl.tensor, WIDTH: tl.constexpr, POW2: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    v = tl.load(x + row * C + i, mask=i < C, other=0.0).to(tl.float32)
    scale = _scale(tl.max(tl.abs(v), axis=0), POW2)
    tl.store(data + row * C + i, _quantised(v, scale, POW2), mask=i < C)
    tl.store(scales + row, scale)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _cast_blocks(
    x: tl.tensor, data: tl.tensor, scales: tl.tensor, num_blocks: tl.tensor, POW2: tl.constexpr
) -> None:  # fmt: skip
    """64 blocks of 128 values that lie one behind the other."""
    block = tl.program_id(0) * 64 + tl.arange(0, 64)
    inside = block < num_blocks
    where = block.to(tl.int64)[:, None] * 128 + tl.arange(0, 128)[None, :]
    v = tl.load(x + where, mask=inside[:, None], other=0.0).to(tl.float32)
    scale = _scale(tl.max(tl.abs(v), axis=1), POW2)
    tl.store(data + where, _quantised(v, scale[:, None], POW2), mask=inside[:, None])
    tl.store(scales + block, scale, mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _unpack_blocks(
    data: tl.tensor, scales: tl.tensor, out: tl.tensor, num_blocks: tl.tensor, K: tl.tensor, row_stride: tl.tensor,
    column_stride: tl.tensor,
) -> None:  # fmt: skip
    block = tl.program_id(0) * 64 + tl.arange(0, 64)
    inside = block < num_blocks
    where = block.to(tl.int64)[:, None] * 128 + tl.arange(0, 128)[None, :]
    scale = tl.load(scales + (block // K).to(tl.int64) * row_stride + (block % K) * column_stride, mask=inside)
    v = tl.load(data + where, mask=inside[:, None], other=0.0).to(tl.float32) * scale[:, None]
    tl.store(out + where, v.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _column_amax(x: tl.tensor, x_scales: tl.tensor, amax: tl.tensor, C: tl.tensor, DEQUANTISE: tl.constexpr) -> None:
    """The largest magnitude of each column in 128 rows; FP8 rows with one scale a row."""
    c, block = tl.program_id(0) * 128, tl.program_id(1)
    i = tl.arange(0, 128)
    rows, columns = block * 128 + i, c + i
    v = tl.load(x + rows.to(tl.int64)[:, None] * C + columns[None, :], mask=columns[None, :] < C, other=0.0)
    v = v.to(tl.float32)
    if DEQUANTISE:
        v = v * tl.load(x_scales + rows)[:, None]
    tl.store(amax + block.to(tl.int64) * C + columns, tl.max(tl.abs(v), axis=0), mask=columns < C)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _cast_columns(
    x: tl.tensor, x_scales: tl.tensor, scales: tl.tensor, data: tl.tensor, blocks: tl.tensor, num_blocks: tl.tensor,
    C: tl.tensor, group_stride: tl.tensor, column_stride: tl.tensor, DEQUANTISE: tl.constexpr, POW2: tl.constexpr,
) -> None:  # fmt: skip
    """Rows quantised by given scales [E, C], transposed: row r of a group at its start * group_stride + r."""
    c, block = tl.program_id(0) * 128, tl.program_id(1)
    start, expert = tl.load(blocks + block) * 128, tl.load(blocks + 2 * num_blocks + block)
    i = tl.arange(0, 128)
    rows, columns = block * 128 + i, c + i
    v = tl.load(x + rows.to(tl.int64)[:, None] * C + columns[None, :], mask=columns[None, :] < C, other=0.0)
    v = v.to(tl.float32)
    if DEQUANTISE:
        v = v * tl.load(x_scales + rows)[:, None]
    scale = tl.load(scales + expert.to(tl.int64) * C + columns, mask=columns < C, other=1.0)
    turned = tl.trans(_quantised(v, scale[None, :], POW2))
    where = start.to(tl.int64) * group_stride + columns.to(tl.int64)[:, None] * column_stride
    tl.store(data + where + (block * 128 - start + i)[None, :], turned, mask=columns[:, None] < C)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _cast_weight(
    x: tl.tensor, data: tl.tensor, scales: tl.tensor, turned: tl.tensor, turned_scales: tl.tensor, N: tl.tensor,
    C: tl.tensor, width: tl.tensor, turned_width: tl.tensor, POW2: tl.constexpr,
) -> None:  # fmt: skip
    c, n, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = tl.arange(0, 128)
    base = expert.to(tl.int64) * N * C
    where = (n * 128 + i).to(tl.int64)[:, None] * C + (c * 128 + i)[None, :]
    v = tl.load(x + base + where).to(tl.float32)
    scale = _scale(tl.max(tl.max(tl.abs(v), axis=1), axis=0), POW2)
    q = _quantised(v, scale, POW2)
    tl.store(data + base + where, q)
    tl.store(turned + base + (c * 128 + i).to(tl.int64)[:, None] * N + (n * 128 + i)[None, :], tl.trans(q))
    tl.store(scales + (expert * (N // 128) + n) * width + c, scale)
    tl.store(turned_scales + (expert * (C // 128) + c) * turned_width + n, scale)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _pack_scales(
    scales: tl.tensor, packed: tl.tensor, blocks: tl.tensor, num_blocks: tl.tensor, K: tl.tensor,
    row_stride: tl.tensor, column_stride: tl.tensor, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0)
    start, size = tl.load(blocks + block) * 128, tl.load(blocks + num_blocks + block) * 128
    i, k = tl.arange(0, 128), tl.arange(0, WIDTH)
    rows = (block * 128 + i).to(tl.int64)
    v = tl.load(scales + rows[:, None] * row_stride + k[None, :] * column_stride, mask=k[None, :] < K, other=0.0)
    where = start.to(tl.int64) * K + k[:, None] * size + (block * 128 - start + i)[None, :]
    tl.store(packed + where, tl.trans(v), mask=k[:, None] < K)


def pack_row_scales(scales: Tensor, groups: Groups) -> Tensor:
    """See `fp8_cast.pack_row_scales`."""
    num_rows, width = scales.shape
    packed = torch.empty(num_rows * width, dtype=torch.float32, device=scales.device)
    num_blocks = groups.blocks.shape[1]
    _pack_scales[(num_blocks,)](
        scales, packed, groups.blocks, num_blocks, width, scales.stride(0), scales.stride(1),
        WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    return packed


def empty_rows(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Uninitialised data and packed scales of a block-scaled `RowOperand` with the rows of x."""
    rows = x.shape[0]
    scales = torch.empty(rows * columns // BLOCK, dtype=torch.float32, device=x.device)
    return torch.empty(rows, columns, dtype=FP8, device=x.device), scales


def empty_tokens(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Uninitialised data and scales of a block-scaled `TokenOperand` with the rows of x."""
    rows = x.shape[0]
    scales = torch.empty(rows // BLOCK, columns, dtype=torch.float32, device=x.device)
    return torch.empty(rows * columns, dtype=FP8, device=x.device), scales


def _tiles(
    x: Tensor, x_scales: Tensor | None, groups: Groups, recipe: Recipe, *, rows: bool, tokens: bool
) -> tuple[RowOperand | None, TokenOperand | None]:
    """One pass of tiles over x [R, C]; FP8 with its packed scales, or plain."""
    x = x.contiguous()
    columns = x.shape[1]
    data, scales = empty_rows(x, columns) if rows else (x, x)
    turned, turned_scales = empty_tokens(x, columns) if tokens else (x, x)
    num_blocks = groups.blocks.shape[1]
    _cast_tile[(columns // BLOCK, num_blocks)](
        x, x if x_scales is None else x_scales, data, scales, turned, turned_scales, groups.blocks, num_blocks, columns,
        DEQUANTISE=x_scales is not None, ROWS=rows, TOKENS=tokens, POW2=recipe.power_of_two, num_warps=8,
    )  # fmt: skip
    return (
        RowOperand(data, scales, "block") if rows else None,
        TokenOperand(turned, turned_scales, "block", columns) if tokens else None,
    )


def row_operand(x: Tensor, groups: Groups, recipe: Recipe) -> RowOperand:
    """See `fp8_cast.row_operand`."""
    if recipe.scaling == "row":
        return RowOperand(*rows_by_row(x, recipe), "row")
    result, _ = _tiles(x, None, groups, recipe, rows=True, tokens=False)
    assert result is not None, "rows were asked for"
    return result


def rows_by_row(x: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """FP8 data like x [R, C] and one scale a row."""
    x = x.contiguous()
    rows, columns = x.shape
    data = torch.empty(rows, columns, dtype=FP8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if columns == BLOCK:
        _cast_blocks[(triton.cdiv(rows, 64),)](x, data, scales, rows, POW2=recipe.power_of_two)
        return data, scales
    width = triton.next_power_of_2(columns)
    _cast_row[(rows,)](
        x, data, scales, columns, WIDTH=width, POW2=recipe.power_of_two, num_warps=8 if width > 2048 else 4
    )
    return data, scales


def unpacked(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """See `fp8_cast.Travel.unpack`; rows of whole blocks."""
    data = data.contiguous()
    rows, width = data.shape[0], data.shape[1] // BLOCK
    result = torch.empty(data.shape, dtype=dtype, device=data.device)
    column_stride = 0 if scales.shape[1] == 1 else scales.stride(1)
    _unpack_blocks[(triton.cdiv(rows * width, 64),)](
        data, scales, result, rows * width, width, scales.stride(0), column_stride
    )
    return result


def both_operands(x: Tensor, groups: Groups, recipe: Recipe) -> tuple[RowOperand | None, TokenOperand | None]:
    """See `fp8_cast.both_operands`; block scales."""
    return _tiles(x, None, groups, recipe, rows=True, tokens=True)


def token_operand(x: Tensor | RowOperand, groups: Groups, recipe: Recipe) -> TokenOperand:
    """See `fp8_cast.token_operand`."""
    source, scales = (x.data, x.scales) if isinstance(x, RowOperand) else (x, None)
    if recipe.scaling == "row":
        columns, rows = source.shape[1], source.shape[0]
        data = torch.empty(columns, rows, dtype=FP8, device=source.device)
        found = _by_column(source, scales, data, groups, recipe, group_stride=1, column_stride=rows)
        return TokenOperand(data, found, "row", columns)
    _, result = _tiles(source, scales, groups, recipe, rows=False, tokens=True)
    assert result is not None, "tokens were asked for"
    return result


def _by_column(
    x: Tensor,
    x_scales: Tensor | None,
    data: Tensor,
    groups: Groups,
    recipe: Recipe,
    *,
    group_stride: int,
    column_stride: int,
) -> Tensor:
    """Fills `data` with x quantised by one scale a column and expert; returns the scales [E, C]."""
    from mt_moe.fp8_cast import scales_of

    x = x.contiguous()
    columns, num_blocks = x.shape[1], groups.blocks.shape[1]
    grid = (triton.cdiv(columns, 128), num_blocks)
    given, dequantise = (x, False) if x_scales is None else (x_scales, True)
    amax = torch.empty(num_blocks, columns, dtype=torch.float32, device=x.device)
    _column_amax[grid](x, given, amax, columns, DEQUANTISE=dequantise, num_warps=8)
    experts = groups.blocks[2].to(torch.int64)[:, None].expand(-1, columns)
    largest = amax.new_zeros(len(groups.ends), columns).scatter_reduce_(0, experts, amax, "amax")
    scales = scales_of(largest, recipe.power_of_two)
    _cast_columns[grid](
        x, given, scales, data, groups.blocks, num_blocks, columns, group_stride, column_stride,
        DEQUANTISE=dequantise, POW2=recipe.power_of_two, num_warps=8,
    )  # fmt: skip
    return scales


def weight_operands(weights: Tensor, recipe: Recipe) -> tuple[WeightOperand, WeightOperand]:
    """See `fp8_cast.weight_operands`."""
    weights = weights.contiguous()
    experts, rows, columns = weights.shape
    turned = torch.empty(experts, columns, rows, dtype=FP8, device=weights.device)
    if recipe.scaling == "row":
        flat = weights.view(experts * rows, columns)
        data, scales = rows_by_row(flat, recipe)
        if rows % BLOCK:
            by_column, turned_scales = rows_by_row(weights.transpose(1, 2).reshape(experts * columns, rows), recipe)
            turned = by_column.view(experts, columns, rows)
        else:
            groups = Groups.of([rows * (expert + 1) for expert in range(experts)], weights.device)
            turned_scales = _by_column(
                flat, None, turned, groups, recipe, group_stride=columns, column_stride=rows
            )  # fmt: skip
        return (
            WeightOperand(data.view(weights.shape), scales.view(experts, rows), "row"),
            WeightOperand(turned, turned_scales.view(experts, columns), "row"),
        )
    data = torch.empty(weights.shape, dtype=FP8, device=weights.device)
    tall, wide = rows // BLOCK, columns // BLOCK
    scales = torch.zeros(experts, tall, -(-wide // 4) * 4, dtype=torch.float32, device=weights.device)
    turned_scales = torch.zeros(experts, wide, -(-tall // 4) * 4, dtype=torch.float32, device=weights.device)
    _cast_weight[(wide, tall, experts)](
        weights, data, scales, turned, turned_scales, rows, columns, scales.shape[2], turned_scales.shape[2],
        POW2=recipe.power_of_two, num_warps=16,
    )  # fmt: skip
    return WeightOperand(data, scales, "block"), WeightOperand(turned, turned_scales, "block")
