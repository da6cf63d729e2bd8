"""Zeros where a grouped product writes nothing, without the host knowing where that is.

With shapes of the worst case the rows behind the last group, and the weight gradients of groups without rows, are
memory that nobody wrote. Which they are stands in `ends` on the device. Kernels in Triton touch that memory alone;
without them a masked pass over everything does, and on the CPU, where nothing is gained by not looking, slices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mt_moe.fused_activation import kernels_on, why_no_kernels


def clear_tail(rows: Tensor, ends: Tensor) -> None:
    """Makes the rows behind the last group zero: rows [num_rows, width] contiguous, ends int32 [num_groups]."""
    if rows.device.type == "cpu":
        rows[int(ends[-1]) :].zero_()
    elif why_no_kernels(rows.device.type) is None:
        kernels_on(rows.device.type).clear_tail(rows, ends)
    else:
        behind = torch.arange(rows.shape[0], device=rows.device) >= ends[-1]
        rows.masked_fill_(behind.unsqueeze(1), 0)


def clear_empty(matrices: Tensor, ends: Tensor) -> None:
    """Makes the matrices of groups without rows zero: matrices [num_groups, out, in] contiguous."""
    if matrices.device.type != "cpu" and why_no_kernels(matrices.device.type) is None:
        kernels_on(matrices.device.type).clear_empty(matrices, ends)
        return
    empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
    matrices.masked_fill_(empty.view(-1, 1, 1), 0)
