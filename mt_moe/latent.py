"""The latent projection: tokens travel, and meet the routed experts, at a smaller width than the model has.

    down: x [num_tokens, hidden] -> [num_tokens, latent]      before dispatch
    up:   y [num_tokens, latent] -> [num_tokens, hidden]      after combine, before the shared expert is added

Every rank holds both matrices. Router and shared expert see the tokens at their full width (Megatron's
`moe_latent_size`). A row then costs latent / hidden of the bytes on the link.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mt_moe.config import MoEConfig
from mt_moe.expert_linear import Defer, anchored, linear
from mt_moe.init import seeded_normal


class LatentProjection(nn.Module):
    """Two matrices, `down` [latent, hidden] and `up` [hidden, latent], without bias.

    Args:
        config: widths and seed.
        name: prefix of the names that the initial weights depend on.
        dtype: of the weights.
        device: of the weights.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        name: str = "latent",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        shapes = {"down": (config.latent, config.hidden), "up": (config.hidden, config.latent)}
        drawn = {
            kind: seeded_normal(shape, config.init_std, seed=config.seed, name=f"{name}.{kind}").to(device, dtype)
            for kind, shape in shapes.items()
        }
        self.down = nn.Parameter(drawn["down"])
        self.up = nn.Parameter(drawn["up"])

    def narrow(self, x: Tensor, *, defer: Defer | None = None) -> Tensor:
        """Tokens [num_tokens, hidden] to [num_tokens, latent]; `defer` takes the weight gradient out of backward."""
        return linear(x if defer is None else anchored(x, [self.down]), self.down, defer)

    def widen(self, y: Tensor, *, defer: Defer | None = None) -> Tensor:
        """Sums [num_tokens, latent] to [num_tokens, hidden]; `defer` takes the weight gradient out of backward."""
        return linear(y if defer is None else anchored(y, [self.up]), self.up, defer)
