"""Transformer Engine's grouped product on borrowed weights: one plain product an expert on several streams.

It takes one matrix an expert as it lies, so weights that can not be seen as one tensor need no copy. It needs the
bounds of the groups on the host. The function used is not a stable interface: it is tried with a tiny product first
(`products.why_not`), and what does not fit is the reason given.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mt_moe.expert_call import Weights
from mt_moe.products import Groups, listed


def missing(device: torch.device) -> str | None:
    """Why there is nothing to try on a device; None where there is."""
    if device.type == "cpu":
        return "Transformer Engine needs an accelerator"
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer-engine is not installed"
    return None


@functools.cache
def _function() -> Any:
    from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

    return general_grouped_gemm


class TeProducts:
    """See `products.Products`."""

    name = "te"

    def forward(self, x: Tensor, weights: Weights, groups: Groups, *, clear: bool = True) -> Tensor:
        """See `Products`."""
        return self._rows(x, weights, groups, "TN", listed(weights)[0].shape[0])

    def input_grad(self, grad: Tensor, weights: Weights, groups: Groups, *, clear: bool = True) -> Tensor:
        """See `Products`."""
        return self._rows(grad, weights, groups, "NN", listed(weights)[0].shape[1])

    def weight_grad(self, grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
        """See `Products`."""
        bounds = groups.bounds()
        total = grad.new_empty(len(bounds), grad.shape[1], x.shape[1])
        for matrix, (first, last) in zip(total, bounds, strict=True):
            if first == last:
                matrix.zero_()
        # Groups without rows are left out: their zeros are written.
        real = [(index, slice(first, last)) for index, (first, last) in enumerate(bounds) if last > first]
        if real:
            xs, grads = [x[rows] for _, rows in real], [grad[rows] for _, rows in real]
            _call(xs, grads, [total[index] for index, _ in real], "NT", grad=True)
        return total

    @staticmethod
    def _rows(rows: Tensor, weights: Weights, groups: Groups, layout: str, width: int) -> Tensor:
        out, bounds = rows.new_empty(rows.shape[0], width), groups.bounds()
        end = bounds[-1][1]
        if end:
            splits = [last - first for first, last in bounds]
            parts = torch.split(rows[:end], splits)
            _call(
                list(listed(weights)), list(parts), [out[:end]], layout, splits=splits, single=True, grad=layout == "NN"
            )
        out[end:].zero_()
        return out


def _call(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    out: list[Tensor],
    layout: str,
    *,
    splits: list[int] | None = None,
    single: bool = False,
    grad: bool = False,
) -> None:
    _function()(
        a, b, out, [None] * len(a), out[0].dtype, layout=layout, m_splits=splits, single_output=single, grad=grad,
    )  # fmt: skip


PRODUCTS = TeProducts()
