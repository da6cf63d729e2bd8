"""Settings of the layer: one frozen object, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from comm_core.runtime.errors import UsageError

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {"silu": F.silu, "gelu": F.gelu, "relu": torch.relu}
SCORES: Final = ("sigmoid", "softmax")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Sizes and rules of one MoE layer.

    Args:
        hidden: width of a token.
        ffn: inner width of a routed expert.
        num_experts: routed experts over all ranks; a multiple of the number of ranks.
        num_topk: experts a token.
        shared_ffn: inner width of the shared expert; 0 for none.
        score: "sigmoid" (DeepSeek-V3) or "softmax" (DeepSeek-V2).
        num_groups: groups of consecutive experts for group-limited routing.
        num_topk_groups: groups a token may choose from; `num_groups` for no limit.
        normalize_weights: divide the weights of a token by their sum.
        routed_scaling_factor: the weights are multiplied by it last.
        bias_update_rate: step of the expert bias; 0 keeps the bias as it is.
        aux_loss_coefficient: factor of the sequence-wise balance loss; 0 for none.
        activation: "silu", "gelu" or "relu".
        gated: whether the activation gates a second projection (SwiGLU with "silu").
        expert_alignment: rows of an expert start at a multiple of it.
        experts: implementation of the experts: "auto", "loop", "grouped".
        init_std: standard deviation of the initial weights.
        seed: of the initial weights.

    Raises:
        UsageError: a value that can not work.
    """

    hidden: int
    ffn: int
    num_experts: int
    num_topk: int
    shared_ffn: int = 0
    score: str = "sigmoid"
    num_groups: int = 1
    num_topk_groups: int = 1
    normalize_weights: bool = True
    routed_scaling_factor: float = 1.0
    bias_update_rate: float = 0.0
    aux_loss_coefficient: float = 0.0
    activation: str = "silu"
    gated: bool = True
    expert_alignment: int = 1
    experts: str = "auto"
    init_std: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "ffn", "num_experts", "num_topk", "num_groups", "num_topk_groups", "expert_alignment"):
            self._require(getattr(self, name) >= 1, name, "1 or more")
        for name in ("shared_ffn", "bias_update_rate", "aux_loss_coefficient", "init_std"):
            self._require(getattr(self, name) >= 0, name, "0 or more")
        self._require(self.routed_scaling_factor > 0, "routed_scaling_factor", "more than 0")
        self._require(self.score in SCORES, "score", " or ".join(SCORES))
        self._require(self.activation in ACTIVATIONS, "activation", ", ".join(ACTIVATIONS))
        self._require(self.num_topk <= self.num_experts, "num_topk", f"at most num_experts = {self.num_experts}")
        self._require(
            self.num_experts % self.num_groups == 0, "num_groups", f"a divisor of num_experts = {self.num_experts}"
        )
        self._require(
            self.num_topk_groups <= self.num_groups, "num_topk_groups", f"at most num_groups = {self.num_groups}"
        )
        reachable = self.num_topk_groups * (self.num_experts // self.num_groups)
        self._require(self.num_topk <= reachable, "num_topk", f"at most {reachable}, the experts of num_topk_groups")

    def _require(self, good: bool, name: str, allowed: str) -> None:
        if not good:
            raise UsageError(f"{name} = {getattr(self, name)!r}", allowed=allowed, fix=f"change {name} in MoEConfig")

    def activation_function(self) -> Callable[[Tensor], Tensor]:
        """The elementwise function that `activation` names."""
        return ACTIVATIONS[self.activation]
