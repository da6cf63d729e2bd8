"""Initial weights as a pure function of (seed, name, index), so that layouts of ranks can be compared.

Drawing from one running generator ties a weight to everything drawn before it: the same expert would start differently
under another ep_size. Here each tensor has a generator of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def seeded_normal(shape: Sequence[int], std: float, *, seed: int, name: str, index: int = 0) -> Tensor:
    """A normal draw N(0, std^2), fp32 on the CPU, that depends on nothing but its arguments.

    The generator's seed is the first 8 bytes (big-endian, top bit cleared) of SHA-256 over "seed/name/index".

    Args:
        shape: of the result.
        std: standard deviation.
        seed: of the model.
        name: of the parameter, such as "experts.fc1".
        index: global number of the expert; 0 for what exists once.
    """
    digest = hashlib.sha256(f"{seed}/{name}/{index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(*shape, generator=generator) * std
