"""Grouped FP8 products, each by a library that is tried before it is trusted.

    rows(a, w)    every row of expert e times W_e.T: forward and input gradients     [R, N]
    tokens(g, x)  g_e.T @ x_e over the rows of expert e: weight gradients            [E, N, C]

    "torch"               block: one `torch._scaled_mm` an expert (cuBLASLt's 1 x 128 and 128 x 128 scales, Hopper);
                          row: one `torch._scaled_grouped_mm` for all experts
    "transformer_engine"  block: its grouped product (cuBLASLt on several streams)
    "emulated"            operands dequantised, then an ordinary product: the numerics, not the speed

Importing a library says nothing about whether its products are right here (a wheel built for another torch imports and
then fails, or answers wrongly), so `choose` computes a small product with each and compares it with a dequantised one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comm_core.runtime.errors import UsageError
from mt_moe.expert_linear import grouped_product
from mt_moe.fp8_cast import row_operand, token_operand, weight_operands
from mt_moe.fp8_operands import Groups, RowOperand, TokenOperand, WeightOperand
from mt_moe.recipes import BLOCK, Recipe

_FAILURES = (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError, AssertionError, ImportError)


@dataclass(frozen=True, slots=True)
class Products:
    """One way to compute grouped FP8 products.

    Attributes:
        name: how it is called in `Recipe.products`.
        rows: (rows, weights, groups, dtype) to [R, N].
        tokens: (gradients, rows, groups, dtype) to [E, N, C]; zero for an expert without rows.
        unit: what the width that `rows` reduces over must be a multiple of.
    """

    name: str
    rows: Callable[[RowOperand, WeightOperand, Groups, torch.dtype], Tensor]
    tokens: Callable[[TokenOperand, TokenOperand, Groups, torch.dtype], Tensor]
    unit: int = 1


def _emulated_rows(a: RowOperand, w: WeightOperand, groups: Groups, dtype: torch.dtype) -> Tensor:
    return plain_rows(_plain(a.dequantised(groups), dtype), _plain(w.dequantised(), dtype), groups).to(dtype)


def _emulated_tokens(g: TokenOperand, x: TokenOperand, groups: Groups, dtype: torch.dtype) -> Tensor:
    return plain_tokens(
        _plain(g.dequantised(groups), dtype), _plain(x.dequantised(groups), dtype), groups
    ).to(dtype)  # fmt: skip


def _plain(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantised values as the product takes them: fp32 on a CPU, where that is what runs, else rounded."""
    return values if values.device.type == "cpu" else values.to(dtype)


def plain_rows(a: Tensor, w: Tensor, groups: Groups) -> Tensor:
    """Every row of expert e times W_e.T, unquantised: the product of a recipe's BF16 parts."""
    product = grouped_product()
    if a.device.type != "cpu" and product is not None and groups.num_rows:
        return product(a, w.transpose(-2, -1), offs=groups.device_ends)
    y = a.new_empty(a.shape[0], w.shape[1])
    for expert, start, end in groups.bounds():
        torch.matmul(a[start:end], w[expert].t(), out=y[start:end])
    return y


def plain_tokens(g: Tensor, x: Tensor, groups: Groups) -> Tensor:
    """g_e.T @ x_e for every expert, unquantised."""
    product = grouped_product()
    if x.device.type != "cpu" and product is not None and groups.num_rows:
        return _emptied(product(g.t(), x, offs=groups.device_ends), groups)
    result = x.new_empty(len(groups.ends), g.shape[1], x.shape[1])
    for expert, start, end in groups.bounds():
        torch.matmul(g[start:end].t(), x[start:end], out=result[expert])
    return _emptied(result, groups)


def _emptied(result: Tensor, groups: Groups) -> Tensor:
    # A group without rows is a product over an empty axis, which device kernels may leave unwritten.
    for expert in groups.empty:
        result[expert].zero_()
    return result


def _torch_row_rows(a: RowOperand, w: WeightOperand, groups: Groups, dtype: torch.dtype) -> Tensor:
    return torch._scaled_grouped_mm(
        a.data, w.data.transpose(-2, -1), a.scales, w.scales,
        offs=groups.device_ends, out_dtype=dtype, use_fast_accum=True,
    )  # fmt: skip


def _torch_row_tokens(g: TokenOperand, x: TokenOperand, groups: Groups, dtype: torch.dtype) -> Tensor:
    y = torch._scaled_grouped_mm(
        g.data, x.data.t(), g.scales.view(-1), x.scales.view(-1),
        offs=groups.device_ends, out_dtype=dtype, use_fast_accum=True,
    )  # fmt: skip
    return _emptied(y, groups)


def _torch_block_rows(a: RowOperand, w: WeightOperand, groups: Groups, dtype: torch.dtype) -> Tensor:
    y = torch.empty(a.data.shape[0], w.data.shape[1], dtype=dtype, device=a.data.device)
    for expert, start, end in groups.bounds():
        data, scales = a.group(start, end)
        weight, weight_scales = w.expert(expert)
        _scaled_mm(data, weight, scales, weight_scales, y[start:end])
    return y


def _torch_block_tokens(g: TokenOperand, x: TokenOperand, groups: Groups, dtype: torch.dtype) -> Tensor:
    y = torch.empty(len(groups.ends), g.num_columns, x.num_columns, dtype=dtype, device=g.data.device)
    for expert, start, end in groups.bounds():
        left, left_scales = g.group(expert, start, end)
        right, right_scales = x.group(expert, start, end)
        _scaled_mm(left, right, left_scales, right_scales, y[expert])
    return _emptied(y, groups)


def _scaled_mm(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, out: Tensor) -> None:
    """out = a @ b.T with the scales of both sides given as [rows or blocks, blocks of columns]."""
    torch._scaled_mm(a, b.t(), scale_a=a_scales, scale_b=b_scales.t(), out_dtype=out.dtype, out=out)


class _TransformerEngine:
    """Transformer Engine's grouped product on operands that we quantised: wrapped, not cast."""

    def __init__(self) -> None:
        gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions.gemm")
        storage = importlib.import_module("transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage")
        tensor = importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
        tex = importlib.import_module("transformer_engine_torch")
        self._product = gemm.general_grouped_gemm
        self._storage = storage.Float8BlockwiseQTensorStorage
        self._dtype = tex.DType.kFloat8E4M3
        self._quantizers = {
            dims: tensor.Float8BlockQuantizer(self._dtype, rowwise=True, columnwise=False, block_scaling_dim=dims)
            for dims in (1, 2)
        }

    def _wrap(self, data: Tensor, scales: Tensor, dims: int, dtype: torch.dtype) -> Any:
        return self._storage(
            data.view(torch.uint8), scales, None, None, self._dtype, self._quantizers[dims], dims == 2, fake_dtype=dtype
        )

    def rows(self, a: RowOperand, w: WeightOperand, groups: Groups, dtype: torch.dtype) -> Tensor:
        """Every row of expert e times W_e.T."""
        y = torch.empty(a.data.shape[0], w.data.shape[1], dtype=dtype, device=a.data.device)
        left: list[Any] = []
        right: list[Any] = []
        splits: list[int] = []
        for expert, start, end in groups.bounds():
            data, scales = a.group(start, end)
            left.append(self._wrap(w.data[expert], w.scales[expert], 2, dtype))
            right.append(self._wrap(data, scales.t(), 1, dtype))
            splits.append(end - start)
        self._product(
            left, right, [y], [None] * len(left), dtype,
            m_splits=splits, single_output=True, use_split_accumulator=True,
        )  # fmt: skip
        return y

    def tokens(self, g: TokenOperand, x: TokenOperand, groups: Groups, dtype: torch.dtype) -> Tensor:
        """g_e.T @ x_e for every expert."""
        y = torch.empty(len(groups.ends), g.num_columns, x.num_columns, dtype=dtype, device=g.data.device)
        left: list[Any] = []
        right: list[Any] = []
        outputs: list[Tensor] = []
        for expert, start, end in groups.bounds():
            for operand, wrapped in ((x, left), (g, right)):
                data, scales = operand.group(expert, start, end)
                wrapped.append(self._wrap(data, scales.t(), 1, dtype))
            outputs.append(y[expert])
        self._product(left, right, outputs, [None] * len(left), dtype, use_split_accumulator=True)
        return _emptied(y, groups)


def _make(name: str, scaling: str) -> Products:
    if name == "emulated":
        return Products(name, _emulated_rows, _emulated_tokens)
    if name == "torch" and scaling == "row":
        return Products(name, _torch_row_rows, _torch_row_tokens)
    if name == "torch":
        # Rows of 128 x 128 scales begin at multiples of 16 bytes for cuBLASLt, and torch takes them unpadded alone.
        return Products(name, _torch_block_rows, _torch_block_tokens, unit=4 * BLOCK)
    if scaling == "row":
        raise NotImplementedError("Transformer Engine has no grouped product with one scale a row")
    if importlib.util.find_spec("transformer_engine") is None:
        raise ImportError("transformer_engine is not installed")
    engine = _TransformerEngine()
    return Products(name, engine.rows, engine.tokens)


@functools.cache
def probe(name: str, scaling: str, device: torch.device) -> tuple[Products | None, str]:
    """Tries small products of one library.

    Returns:
        the products and "", or None and the reason why they can not be used on this device.
    """
    recipe = Recipe(name="probe", scaling=scaling)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    try:
        products = _make(name, scaling)
        # One expert without rows, unequal groups, more than one block each way.
        groups = Groups.of((256, 256, 640), device)
        rows, grads = random(640, 512), random(640, 1024)
        weights, _ = weight_operands(random(3, 1024, 512), recipe)
        a, x, g = row_operand(rows, groups, recipe), token_operand(rows, groups, recipe), None
        g = token_operand(grads, groups, recipe)
        pairs = (
            (products.rows(a, weights, groups, torch.bfloat16), plain_rows_fp32(a, weights, groups)),
            (products.tokens(g, x, groups, torch.bfloat16), plain_tokens_fp32(g, x, groups)),
        )
        for got, want in pairs:
            error = float((got.float() - want).norm() / want.norm())
            if not error < 1e-2:
                return None, f"its products are off by {error:.1e} on {device.type}"
    except _FAILURES as error:
        return None, str(error).splitlines()[0] if str(error) else type(error).__name__
    return products, ""


def plain_rows_fp32(a: RowOperand, w: WeightOperand, groups: Groups) -> Tensor:
    """The product of dequantised operands in fp32, expert by expert: what a library's product must equal."""
    values, weights = a.dequantised(groups), w.dequantised()
    return torch.cat([values[start:end] @ weights[expert].t() for expert, start, end in groups.bounds()])


def plain_tokens_fp32(g: TokenOperand, x: TokenOperand, groups: Groups) -> Tensor:
    """The weight gradient of dequantised operands in fp32."""
    left, right = g.dequantised(groups), x.dequantised(groups)
    result = left.new_zeros(len(groups.ends), g.num_columns, x.num_columns)
    for expert, start, end in groups.bounds():
        result[expert] = left[start:end].t() @ right[start:end]
    return result


def unavailable(recipe: Recipe, device: torch.device, widths: Sequence[int] = ()) -> str | None:
    """Why a recipe has no products on a device for these widths; None where it has."""
    found = _first(recipe, device, widths)
    return found if isinstance(found, str) else None


def choose(recipe: Recipe, device: torch.device, widths: Sequence[int] = ()) -> Products:
    """The products of a recipe on a device.

    Raises:
        UsageError: nothing that the recipe allows holds in a probe, with every reason.
    """
    found = _first(recipe, device, widths)
    if isinstance(found, str):
        raise UsageError(
            f"recipe {recipe.name!r} on {device.type} ({found})",
            allowed="a device and a library with FP8 products",
            fix='use recipe bf16, or products="emulated" for the numerics alone',
        )
    return found


def _first(recipe: Recipe, device: torch.device, widths: Sequence[int]) -> Products | str:
    """The first products that hold, or why none do. Never the emulation, unless it is asked for by name."""
    reasons = []
    for name in ("torch", "transformer_engine") if recipe.products == "auto" else (recipe.products,):
        products, reason = probe(name, recipe.scaling, device)
        odd = [] if products is None else [width for width in widths if width % products.unit]
        if products is not None and not odd:
            return products
        reasons.append(f"{name}: {reason if products is None else f'width {odd[0]} is no multiple of {products.unit}'}")
    return "; ".join(reasons)
