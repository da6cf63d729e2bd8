"""LogFMT-10: ten bits a value, a sign and the logarithm on a scale of its own for every 128 columns.

V1 may send the rows of a low-latency combine in this format. Here they travel as they are, but with `use_logfmt` they
have the values that the format leaves of them, so that a program meets the numerics it will meet elsewhere. Base-2
logarithms, of each block of 128 columns of a row: a = log2 max|x|, b = max(log2 min|x|, a - 32), s = (a - b) / 510.

    code(x)  = max(0, floor((log2|x| - b) / s + 2 - log2((1 + 2^s) / 2) / s))       0 to 511
    value(k) = 0 for k = 0, else sign(x) * 2^(b + (k - 1) s)

The offset puts the border between two codes in the middle of their values, not of their logarithms, so that the
rounding is unbiased. A block is coded where it pays: its chunk of 1,024 columns (512 where hidden is a multiple of 512
alone) has no block with a >= 0 or a = b; what is not coded stays exact. (Source: DeepSeek, "Insights into DeepSeek-V3",
arXiv 2505.09343, section on LogFMT, and the constants of DeepEP's kernel. Its logarithms are approximate, so bits may
differ there by one code.)
"""

from __future__ import annotations

import torch

BLOCK = 128
LEVELS = 510.0  # steps between the least and the largest value: codes 1 to 511
RANGE = 32.0  # octaves below the largest value


def round_trip(rows: torch.Tensor) -> torch.Tensor:
    """The fp32 values that rows [n, hidden] of any float dtype have after the format."""
    num_rows, hidden = rows.shape
    wide = rows.float()
    chunk = 512 if hidden % 512 == 0 and hidden % 1024 else 1024
    padded = torch.nn.functional.pad(wide, (0, -hidden % chunk))
    blocks = padded.view(num_rows, padded.shape[1] // chunk, chunk // BLOCK, BLOCK)
    magnitude = blocks.abs()
    # Columns behind the last must not count as the least value.
    inside = (torch.arange(padded.shape[1], device=rows.device) < hidden).view(blocks.shape[1:])
    high = magnitude.amax(3, keepdim=True).log2()
    low = torch.maximum(magnitude.masked_fill(~inside, float("inf")).amin(3, keepdim=True).log2(), high - RANGE)
    exists = inside.any(2, keepdim=True)
    coded = (((high < 0) & (low < high)) | ~exists).all(2, keepdim=True)
    step = (high - low) / LEVELS
    offset = 2 - ((1 + step.exp2()) / 2).log2() / step
    code = ((magnitude.log2() - low) / step + offset).floor().clamp_min(0)
    value = torch.where(code == 0, 0.0, (low + (code - 1) * step).exp2()).copysign(blocks)
    return torch.where(coded, value, blocks).view(padded.shape)[:, :hidden].contiguous()
