"""Arithmetic of the tests: alignment, differences, hashes, FP8 casts."""

from __future__ import annotations

from typing import Any

import torch

from comm_core import fp8
from comm_core.layout import align

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "create_grouped_scores",
    "hash_tensor",
    "hash_tensors",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def safe_div(a: float, b: float) -> float:
    """a / b, where 0 / 0 is 0."""
    return 0.0 if a == 0 and b == 0 else a / b


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2<x+1, y+1> / (|x+1|^2 + |y+1|^2) in fp64: 0 for equal tensors, and for empty ones."""
    a, b = x.double() + 1, y.double() + 1
    squares = float((a * a + b * b).sum())
    return 1 - 2 * float((a * b).sum()) / squares if squares else 0.0


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as e4m3 and a fp32 scale per 128 columns, the last group may be shorter."""
    return fp8.per_token_cast(x)


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """The bf16 rows of FP8 rows and their scales: fp32 or packed exponents, any shape that holds those of each row."""
    if not x_fp8.numel():
        return x_fp8.to(torch.bfloat16)
    return fp8.per_token_cast_back(x_fp8, x_scales.reshape(x_fp8.shape[0], -1))


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Replaces each row by its different values (0 to num_slots - 1), descending, then -1."""
    seen = torch.zeros(x.shape[0], num_slots + 1, dtype=torch.bool, device=x.device)
    seen.scatter_(1, x.masked_fill(x < 0, num_slots).long(), True)
    ids = torch.arange(num_slots, device=x.device).expand(x.shape[0], -1).masked_fill(~seen[:, :num_slots], -1)
    width = min(num_slots, x.shape[1])
    found = ids.sort(dim=1, descending=True).values[:, :width]
    x.fill_(-1)
    x[:, :width] = found


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Scores [T, E] with 0 outside the groups chosen for each token, group_idx [T, n]."""
    keep = torch.zeros(scores.shape[0], num_groups, dtype=torch.bool, device=scores.device).scatter_(1, group_idx, True)
    return scores * keep.repeat_interleave(scores.shape[1] // num_groups, dim=1)


def hash_tensor(t: torch.Tensor) -> int:
    """A sum of the tensor's memory: 4-byte words where elements have 4 bytes or rows fill words, else bytes."""
    raw = t.contiguous()
    words = raw.element_size() == 4 or (raw.dim() > 0 and raw.shape[-1] * raw.element_size() % 4 == 0)
    return int(raw.view(torch.int32 if words else torch.uint8).sum(dtype=torch.int64))


def hash_tensors(*tensors: Any) -> int:
    """The exclusive or of the hashes of all tensors in nested tuples; None counts as nothing."""
    value = 0
    for item in tensors:
        if isinstance(item, tuple | list):
            value ^= hash_tensors(*item)
        elif isinstance(item, torch.Tensor):
            value ^= hash_tensor(item)
    return value


def count_bytes(*tensors: Any) -> int:
    """Bytes of all tensors in nested tuples; None counts as nothing."""
    return sum(
        count_bytes(*item) if isinstance(item, tuple | list) else item.numel() * item.element_size()
        for item in tensors
        if item is not None
    )
