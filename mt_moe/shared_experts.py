"""The shared expert: a plain MLP that every token passes, and the work that hides the dispatch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from comm_core.runtime import trace
from comm_core.runtime.errors import UsageError
from mt_moe.config import MoEConfig
from mt_moe.expert_call import activated
from mt_moe.expert_linear import Defer, anchored, linear
from mt_moe.init import seeded_normal


class SharedExperts(nn.Module):
    """One MLP of inner width `shared_ffn` over all tokens of this rank (several shared experts are one wider MLP).

    `fc1` [2 * shared_ffn or shared_ffn, hidden], `fc2` [hidden, shared_ffn]; with `shared_gate` also `gate`
    [1, hidden], and the output of a token is multiplied by sigmoid(x @ gate.T).

    Args:
        config: sizes, activation and seed.
        name: prefix of the names that the initial weights depend on.
        dtype: of the weights.
        device: of the weights.

    Raises:
        UsageError: a config without shared expert.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        name: str = "shared",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if config.shared_ffn < 1:
            raise UsageError("shared_ffn = 0", allowed="1 or more", fix="leave the shared expert out of the layer")
        self.config = config
        width = (2 if config.gated else 1) * config.shared_ffn
        shapes = {"fc1": (width, config.hidden), "fc2": (config.hidden, config.shared_ffn)}
        drawn = {
            kind: seeded_normal(shape, config.init_std, seed=config.seed, name=f"{name}.{kind}").to(device, dtype)
            for kind, shape in shapes.items()
        }
        self.fc1 = nn.Parameter(drawn["fc1"])
        self.fc2 = nn.Parameter(drawn["fc2"])
        self.gate: nn.Parameter | None = None
        if config.shared_gate:
            gate = seeded_normal((1, config.hidden), config.init_std, seed=config.seed, name=f"{name}.gate")
            self.gate = nn.Parameter(gate.to(device, dtype))

    def forward(self, x: Tensor, *, defer: Defer | None = None) -> Tensor:
        """[num_tokens, hidden] to [num_tokens, hidden]; `defer` takes the weight gradients as in `expert_mlp`."""
        with trace.span("shared_experts", "moe", num_rows=x.shape[0]):
            if defer is not None:
                for weight in self.parameters():
                    x = anchored(x, [weight])
            hidden = activated(linear(x, self.fc1, defer), self.config.activation_function(), self.config.gated)
            y = linear(hidden, self.fc2, defer)
            return y if self.gate is None else y * torch.sigmoid(linear(x, self.gate, defer))
