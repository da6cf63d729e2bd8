"""FP8 casts: against a loop over blocks, within the bound of the format, scales packed and unpacked; one process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core import fp8
from comm_core.runtime.errors import UsageError

SHAPES = ((1, 8), (3, 128), (5, 200), (130, 264), (0, 256), (7, 1032))


def _data(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Blocks of very different size, one of them zero."""
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp2(torch.randint(-24, 24, (shape[0], 1), generator=generator).float())
    x[: shape[0] // 3, : shape[1] // 2] = 0
    return x


def _by_loop(x: torch.Tensor, height: int, round_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-x.shape[0] // height), -(-x.shape[1] // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows, columns = slice(i * height, (i + 1) * height), slice(j * 128, (j + 1) * 128)
            block = x[rows, columns]
            scale = torch.tensor(max(float(block.abs().max()), 1e-4)) / 448
            if round_scale:
                mantissa, exponent = math.frexp(float(scale))
                scale = torch.tensor(2.0 ** (exponent - (mantissa == 0.5)))
            data[rows, columns], scales[i, j] = (block / scale).to(torch.float8_e4m3fn), scale
    return data, scales


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_casts_equal_a_loop_and_come_back_within_the_bound(shape: tuple[int, int], round_scale: bool) -> None:
    x = _data(shape, torch.Generator().manual_seed(torch.initial_seed()))
    for height, cast, back in (
        (1, fp8.per_token_cast, fp8.per_token_cast_back),
        (128, fp8.per_block_cast, fp8.per_block_cast_back),
    ):
        data, scales = cast(x, round_scale=round_scale)
        want_data, want_scales = _by_loop(x, height, round_scale)
        assert torch.equal(scales, want_scales)
        assert _same_bytes(data, want_data)
        wide = scales.repeat_interleave(128, 1)[:, : shape[1]].repeat_interleave(height, 0)[: shape[0]]
        error = (back(data, scales, torch.float32) - x).abs()
        bound = fp8.round_trip_bound(x, wide)
        assert bool((error <= bound).all())
        # A scale that is off by a quarter leaves the bound.
        if x.numel() and shape[0] > 2:
            assert bool(((back(data, scales * 1.25, torch.float32) - x).abs() > bound).any())


@given(st.lists(st.floats(width=32, min_value=-(2.0**60), max_value=2.0**60), min_size=1, max_size=300), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_finite_row_stays_within_the_bound(values: list[float], packed: bool) -> None:
    x = torch.tensor([values])
    data, scales = fp8.per_token_cast(x, packed=packed)
    back = fp8.per_token_cast_back(data, scales, torch.float32)
    plain = fp8.unpack_ue8m0(scales, fp8.num_blocks(len(values))) if packed else scales
    assert bool(data.float().isfinite().all())
    assert bool(((back - x).abs() <= fp8.round_trip_bound(x, plain.repeat_interleave(128, 1)[:, : len(values)])).all())


@given(st.lists(st.integers(0, 255), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_packed_scales_hold_every_exponent(exponents: list[int]) -> None:
    scales = torch.tensor([[math.nan if e == 255 else 2.0 ** (e - 127) for e in exponents]])
    packed = fp8.pack_ue8m0(scales.clamp_min(2.0**-126))
    raw = [packed[0, i // 4].item() >> 8 * (i % 4) & 0xFF for i in range(4 * packed.shape[1])]
    assert raw == [max(e, 1) for e in exponents] + [0] * (-len(exponents) % 4)
    back = fp8.unpack_ue8m0(packed, len(exponents))
    assert torch.equal(back.nan_to_num(7.0), scales.clamp_min(2.0**-126).nan_to_num(7.0))
    assert fp8.unpack_ue8m0(torch.zeros(1, 1, dtype=torch.int32), 1).item() == 2.0**-127


def test_undefined_values_spoil_their_block_alone() -> None:
    x = torch.ones(2, 256)
    x[0, 3], x[1, 200] = math.nan, math.inf
    for packed in (False, True):
        back = fp8.per_token_cast_back(*fp8.per_token_cast(x, packed=packed), torch.float32)
        assert bool(back[0, :128].isnan().all() and back[1, 128:].isnan().all())
        assert bool(back[0, 128:].isfinite().all() and back[1, :128].isfinite().all())


@pytest.mark.parametrize("num_rows", [0, 1, 4, 7])
def test_column_major_scales_begin_at_16_bytes(num_rows: int) -> None:
    scales = torch.rand(num_rows, 3)
    turned = fp8.column_major(scales)
    assert torch.equal(turned, scales)
    assert turned.stride() == (1, max(4, -(-num_rows // 4) * 4))
    data = torch.rand(num_rows, 300).to(torch.float8_e4m3fn)
    assert torch.equal(fp8.per_token_cast_back(data, turned), fp8.per_token_cast_back(data, scales))


def test_mistakes() -> None:
    with pytest.raises(UsageError, match="a float matrix"):
        fp8.per_token_cast(torch.ones(3))
    with pytest.raises(UsageError, match=r"\[2, 2\]"):
        fp8.per_token_cast_back(torch.ones(2, 200).to(torch.float8_e4m3fn), torch.ones(2, 1))
    with pytest.raises(UsageError, match="packed scales of"):
        fp8.unpack_ue8m0(torch.ones(2, 1), 2)
