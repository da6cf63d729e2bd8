"""FP8 rows of the low-latency calls: a scale per 128 columns of a row, the last group may be shorter.

scale = max(amax, 1e-4) / 448, rounded up to a power of two where asked; data = x / scale, in e4m3.
"""

from __future__ import annotations

import torch

GROUP, LARGEST, SMALLEST_AMAX = 128, 448.0, 1e-4


def cast_rows(x: torch.Tensor, round_scale: bool, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [T, hidden], scales): fp32 [T, ceil(hidden / 128)], or their exponents, four in an int32."""
    num_tokens, hidden = x.shape
    groups = -(-hidden // GROUP)
    wide = torch.nn.functional.pad(x.float(), (0, groups * GROUP - hidden)).view(num_tokens, groups, GROUP)
    scale = wide.abs().amax(2).clamp_min(SMALLEST_AMAX) / LARGEST
    if round_scale:
        scale = torch.exp2(scale.log2().ceil())
    data = (wide / scale[:, :, None]).view(num_tokens, -1)[:, :hidden].to(torch.float8_e4m3fn).contiguous()
    if not use_ue8m0:
        return data, scale
    exponents = torch.nn.functional.pad((scale.view(torch.int32) >> 23).to(torch.uint8), (0, -groups % 4))
    return data, exponents.view(torch.int32)
