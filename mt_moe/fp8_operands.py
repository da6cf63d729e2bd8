"""The operands of grouped FP8 products: data and scales, laid out as the products read them.

Rows are expert-major and every group of rows is aligned, so a group owns whole blocks of 128 rows where blocks run
along tokens. Three kinds of operands, E experts, R rows, C columns:

    RowOperand     [R, C], reduced along C. Scales "row": [R]. Scales "block": flat, the group of rows [s, t) at
                   s * C / 128 as a matrix [C / 128, t - s], which is what products with 1 x 128 scales read.
    TokenOperand   the same values reduced along rows: transposed. "block": flat data, the group [s, t) at s * C as
                   [C, t - s]; scales [R / 128, C]. "row": data [C, R]; scales [E, C].
    WeightOperand  [E, N, C], reduced along C. Scales "row": [E, N]. "block": [E, N / 128, C / 128 rounded up to 4].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_moe.recipes import BLOCK

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Groups:
    """Where the rows of each expert lie, on the host and on the device.

    Attributes:
        ends: the row after the last of each aligned group.
        device_ends: the same, int32 [E].
        blocks: int32 [3, R / 128]: for each 128 rows the first block of its group, the blocks of its group, its expert;
            empty where groups are not whole blocks.
        empty: experts whose group has no row.
    """

    ends: tuple[int, ...]
    device_ends: Tensor
    blocks: Tensor
    empty: tuple[int, ...]

    @classmethod
    def of(cls, ends: Sequence[int], device: torch.device, device_ends: Tensor | None = None) -> Groups:
        """Groups that end at `ends`."""
        if device_ends is None:
            device_ends = torch.tensor(ends, dtype=torch.int32, device=device)
        whole = all(end % BLOCK == 0 for end in ends)
        blocks = _blocks(device_ends, ends[-1] // BLOCK if whole else 0)
        empty = tuple(expert for expert, (start, end) in enumerate(itertools.pairwise((0, *ends))) if start == end)
        return cls(tuple(ends), device_ends, blocks, empty)

    @property
    def num_rows(self) -> int:
        """Rows of all groups."""
        return self.ends[-1]

    def bounds(self) -> Iterator[tuple[int, int, int]]:
        """(expert, first row, row after the last) of every group that has rows."""
        for expert, (start, end) in enumerate(itertools.pairwise((0, *self.ends))):
            if start < end:
                yield expert, start, end


def _blocks(device_ends: Tensor, num_blocks: int) -> Tensor:
    """The table `Groups.blocks`, made on the device: a copy from the host would wait for all that runs there."""
    ends = device_ends // BLOCK
    index = torch.arange(num_blocks, dtype=torch.int32, device=device_ends.device)
    expert = torch.searchsorted(ends, index, right=True, out_int32=True)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    return torch.stack((starts[expert], (ends - starts)[expert], expert))


@dataclass(frozen=True, slots=True)
class RowOperand:
    """Rows reduced along columns; see the module."""

    data: Tensor
    scales: Tensor
    scaling: str

    def group(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Data [n, C] and scales, [n, 1] or [n, C / 128] with strides (1, n), of rows [start, end)."""
        if self.scaling == "row":
            return self.data[start:end], self.scales[start:end, None]
        width = self.data.shape[1] // BLOCK
        return self.data[start:end], self.scales[start * width : end * width].view(width, end - start).t()

    def dequantised(self, groups: Groups) -> Tensor:
        """The values, fp32 [R, C]."""
        parts = [_scaled(*self.group(start, end)) for _, start, end in groups.bounds()]
        return torch.cat(parts) if parts else self.data.float()


@dataclass(frozen=True, slots=True)
class TokenOperand:
    """Rows reduced along tokens; see the module."""

    data: Tensor
    scales: Tensor
    scaling: str
    num_columns: int

    def group(self, expert: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Data [C, n] and scales, [C, 1] or [C, n / 128] with strides (1, C), of one expert's rows [start, end)."""
        if self.scaling == "row":
            return self.data[:, start:end], self.scales[expert, :, None]
        columns = self.num_columns
        data = self.data[start * columns : end * columns].view(columns, end - start)
        return data, self.scales[start // BLOCK : end // BLOCK].t()

    def dequantised(self, groups: Groups) -> Tensor:
        """The values, fp32 [R, C]."""
        parts = [_scaled(*self.group(*bounds)).t() for bounds in groups.bounds()]
        return torch.cat(parts) if parts else self.data.new_zeros(0, self.num_columns, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class WeightOperand:
    """Weights reduced along their last dimension; see the module."""

    data: Tensor
    scales: Tensor
    scaling: str

    def expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """Data [N, C] and scales, [N, 1] or [N / 128, C / 128]."""
        if self.scaling == "row":
            return self.data[expert], self.scales[expert, :, None]
        return self.data[expert], self.scales[expert, :, : self.data.shape[2] // BLOCK]

    def dequantised(self) -> Tensor:
        """The values, fp32 [E, N, C]."""
        return torch.stack([_scaled(*self.expert(expert)) for expert in range(self.data.shape[0])])


def _scaled(data: Tensor, scales: Tensor) -> Tensor:
    """data * scale in fp32, each scale standing for its part of the rows and columns."""
    wide = scales.repeat_interleave(data.shape[0] // scales.shape[0], dim=0)
    return data.float() * wide.repeat_interleave(data.shape[1] // scales.shape[1], dim=1)
