"""FP8 with one scale per block: casts, their inverses, and scales as single exponent bytes (UE8M0).

E4M3 has three fraction bits and ends at 448, so a tensor is cut into blocks whose largest value is mapped near that end
and the factor is kept beside the data: 1 x 128 blocks for activations (each token by itself, so that rows can travel),
128 x 128 blocks for weights. The last block of a row or column may be short. The formula, in fp32, for each block:

    amax  = max(largest |x| of the block, 1e-4)        scale = amax / 448
    scale = the next power of two not below it                    (round_scale only)
    data  = x / scale rounded to the nearest E4M3, ties to even   back = data * scale

The floor of 1e-4 keeps a block of zeros from dividing by zero (DeepEP's casts have the same floor and end). A block
with an infinite or undefined value comes back as NaN throughout.

Error of the round trip: E4M3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022) has normal numbers from 2^-6
with 3 fraction bits, so rounding is off by at most 2^-4 of the value, and a spacing of 2^-9 below, so by at most 2^-10
there. Multiplied by the scale: |back - x| <= max(|x| / 16, scale / 1024), see `round_trip_bound`.
"""

from __future__ import annotations

import torch

from comm_core.runtime.errors import UsageError

BLOCK = 128
MAX = 448.0
AMAX_FLOOR = 1e-4
# Element types of rows that travel with scales, and of the scales: fp32, or four exponent bytes in an int32.
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_DTYPES = (torch.float32, torch.int32)


def num_blocks(size: int, block: int = BLOCK) -> int:
    """Blocks in a dimension; the last may be short."""
    return -(-size // block)


def per_token_cast(
    x: torch.Tensor, *, round_scale: bool = False, packed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts rows in blocks of 1 x 128.

    Args:
        x: [num_tokens, hidden], any float dtype.
        round_scale: scales are powers of two.
        packed: scales as UE8M0, four to an int32 (implies round_scale).

    Returns:
        data, float8_e4m3fn [num_tokens, hidden]; scales, fp32 [num_tokens, ceil(hidden / 128)], or packed, int32
        [num_tokens, ceil(hidden / 512)].
    """
    _float_matrix(x)
    num_tokens, hidden = x.shape
    blocks = _padded(x.float(), 1, BLOCK).view(num_tokens, num_blocks(hidden), BLOCK)
    scales = _scales_of(blocks.abs().amax(2) if hidden else blocks.new_zeros(num_tokens, 0), round_scale or packed)
    data = (blocks / scales[:, :, None]).flatten(1)[:, :hidden].to(torch.float8_e4m3fn).contiguous()
    return data, pack_ue8m0(scales) if packed else scales


def per_token_cast_back(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The inverse of `per_token_cast`: data * scale in fp32, rounded to `dtype`; scales fp32 or packed, any strides."""
    scales = _plain_scales(scales, num_blocks(data.shape[1]))
    _same(scales, (data.shape[0], num_blocks(data.shape[1])))
    wide = scales.repeat_interleave(BLOCK, dim=1)[:, : data.shape[1]]
    return (data.float() * wide).to(dtype)


def per_block_cast(x: torch.Tensor, *, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts a matrix in blocks of 128 x 128.

    Args:
        x: [rows, columns], any float dtype.
        round_scale: scales are powers of two.

    Returns:
        data, float8_e4m3fn [rows, columns]; scales, fp32 [ceil(rows / 128), ceil(columns / 128)].
    """
    _float_matrix(x)
    num_rows, num_columns = x.shape
    padded = _padded(x.float(), BLOCK, BLOCK)
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = _scales_of(blocks.abs().amax((1, 3)), round_scale)
    data = (blocks / scales[:, None, :, None]).view(padded.shape)[:num_rows, :num_columns]
    return data.to(torch.float8_e4m3fn).contiguous(), scales


def per_block_cast_back(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The inverse of `per_block_cast`: data * scale in fp32, rounded to `dtype`."""
    _same(scales, (num_blocks(data.shape[0]), num_blocks(data.shape[1])))
    wide = scales.repeat_interleave(BLOCK, dim=0)[: data.shape[0]]
    return (data.float() * wide.repeat_interleave(BLOCK, dim=1)[:, : data.shape[1]]).to(dtype)


def round_trip_bound(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Largest |back - x| of a cast to fp32 and back, fp32 like x: max(|x| / 16, scale / 1024) and some ulps of fp32.

    Args:
        x: what was cast.
        scales: fp32, one for each element of x or broadcastable to it.
    """
    magnitude = x.float().abs()
    # Division and product are rounded to fp32 too: 2^-24 of the value each.
    return torch.maximum(magnitude / 16, scales / 1024) + magnitude * 2.0**-22


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two as exponent bytes e = log2(scale) + 127, four to an int32, the first in the lowest byte.

    Args:
        scales: fp32 [rows, columns], exact powers of two (anything else is rounded up to one); NaN and inf become 255.

    Returns:
        int32 [rows, ceil(columns / 4)]; bytes behind the last column are 0.
    """
    bits = scales.contiguous().view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    exponents = ((bits + 0x7FFFFF) >> 23).clamp_max(255)
    columns = torch.nn.functional.pad(exponents, (0, -scales.shape[1] % 4)).to(torch.uint8)
    # Bytes are put together by hand, so that the order does not depend on the machine's.
    four = columns.view(scales.shape[0], num_blocks(scales.shape[1], 4), 4).to(torch.int64)
    word = four[:, :, 0] | four[:, :, 1] << 8 | four[:, :, 2] << 16 | four[:, :, 3] << 24
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def unpack_ue8m0(packed: torch.Tensor, num_columns: int) -> torch.Tensor:
    """The fp32 scales [rows, num_columns] of `pack_ue8m0`: 2^(e - 127), NaN for 255.

    Raises:
        UsageError: not int32 with ceil(num_columns / 4) columns.
    """
    if packed.dtype != torch.int32:
        raise UsageError(f"packed scales of {packed.dtype}", allowed="torch.int32", fix="pass pack_ue8m0's result")
    _same(packed, (packed.shape[0], num_blocks(num_columns, 4)))
    shifts = torch.tensor([0, 8, 16, 24], device=packed.device)
    exponents = (packed.to(torch.int64)[:, :, None] >> shifts & 0xFF).flatten(1)[:, :num_columns]
    scales = (exponents.to(torch.int32) << 23).view(torch.float32)
    scales = scales.masked_fill(exponents == 0, 2.0**-127)
    return scales.masked_fill(exponents == 255, float("nan"))


def empty_column_major(num_rows: int, num_columns: int, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised scales [num_rows, num_columns], strides (1, num_rows rounded up to 4).

    Column by column, each beginning at a multiple of 16 bytes: what bulk copies (TMA) of grouped FP8 products read.
    """
    stride = max(4, num_blocks(num_rows, 4) * 4)
    return like.new_empty(num_columns, stride).t()[:num_rows]


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """The same scales with the strides of `empty_column_major`."""
    return empty_column_major(scales.shape[0], scales.shape[1], scales).copy_(scales)


def _scales_of(amax: torch.Tensor, round_scale: bool) -> torch.Tensor:
    # By a tensor: torch divides by a number with its reciprocal on CUDA, which rounds differently.
    scales = amax.clamp_min(AMAX_FLOOR) / torch.full_like(amax, MAX)
    if round_scale:
        bits = scales.view(torch.int32).to(torch.int64)
        scales = ((bits + 0x7FFFFF >> 23).clamp_max(255).to(torch.int32) << 23).view(torch.float32)
    return scales


def _plain_scales(scales: torch.Tensor, num_columns: int) -> torch.Tensor:
    return unpack_ue8m0(scales, num_columns) if scales.dtype == torch.int32 else scales


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Zeros behind the last row and column up to whole blocks: they change no largest value."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)).contiguous()


def _float_matrix(x: torch.Tensor) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise UsageError(
            f"a tensor of {x.dtype} and shape {list(x.shape)}", allowed="a float matrix", fix="reshape or convert it"
        )


def _same(scales: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(scales.shape) != shape:
        raise UsageError(
            f"scales of shape {list(scales.shape)}", allowed=str(list(shape)), fix="pass the scales of this data"
        )
