"""Places in the half of the ring that a call uses, and what the backend asks of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from comm_core.backends.gpu_channel import GpuChannel
from comm_core.kernels import library as abi
from comm_core.layout import align

ALIGNMENT = 256


@dataclass(slots=True)
class Ring:
    """Hands out places in the half of the ring that a call uses."""

    channel: GpuChannel
    at: int
    stream: int

    def take(self, num_bytes: int) -> Any:
        """A place for `num_bytes`."""
        place = abi.Place(offset=self.at, segment=abi.RING)
        self.at += align(num_bytes, ALIGNMENT)
        return place

    def address(self, place: Any) -> int:
        """Its address in this process."""
        return self.channel.memory.base(abi.RING) + int(place.offset)

    def copy(self, place: Any, at: int, source: torch.Tensor, source_at: int, num_bytes: int) -> None:
        """Copies bytes of a tensor to a place."""
        to = self.address(place) + at
        self.channel.library.copy(to, source.data_ptr() + source_at, num_bytes, self.stream)

    def lay(self, rows: torch.Tensor) -> Any:
        """Copies a tensor to a place, row-major."""
        place = self.take(rows.nbytes)
        if rows.nbytes:
            whole = rows if is_dense(rows) else dense(rows)
            self.copy(place, 0, whole, 0, rows.nbytes)
        return place


def bytes_a_row(rows: torch.Tensor) -> int:
    """Of a matrix."""
    return rows.shape[1] * rows.element_size()


def words_a_weight(weights: torch.Tensor | None) -> int:
    """1 for fp32, 2 for fp64; 1 without weights."""
    return 1 if weights is None else weights.element_size() // 4


def address_of(tensor: torch.Tensor | None) -> int:
    """For kernels; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def is_dense(rows: torch.Tensor) -> bool:
    """Row-major without gaps. Not is_contiguous(): a single column with a wide stride counts as such."""
    return rows.dim() == 1 or rows.stride() == (rows.shape[1], 1)


def dense(rows: torch.Tensor) -> torch.Tensor:
    """A copy without gaps."""
    return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device).copy_(rows)


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one that does not begin at a multiple of 16 bytes, as kernels read it."""
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()
