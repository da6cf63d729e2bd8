"""Settings of the layer: one frozen object, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from comm_core.runtime.errors import UsageError
from mt_moe.data_path import DataPath, is_whole
from mt_moe.recipes import BF16, BLOCK, ROW_ALIGNMENT, Recipe, recipe_of

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {"silu": F.silu, "gelu": F.gelu, "relu": torch.relu}
SCORES: Final = ("sigmoid", "softmax")
ROUTER_DTYPES: Final[dict[str, torch.dtype]] = {"fp32": torch.float32, "fp64": torch.float64}
LOAD_BALANCING: Final = ("seq_aux_loss", "aux_loss", "global_aux_loss")
DROP_POLICIES: Final = ("probs", "position")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Sizes and rules of one MoE layer.

    Args:
        hidden: width of a token.
        ffn: inner width of a routed expert.
        num_experts: routed experts over all ranks; a multiple of the number of ranks.
        num_topk: experts a token.
        shared_ffn: inner width of the shared expert; 0 for none.
        shared_gate: scale the shared expert's output by sigmoid(x @ gate.T), one number a token.
        latent: width at which tokens travel and meet the routed experts; 0 for `hidden`, without projections.
        score: "sigmoid" (DeepSeek-V3) or "softmax" (DeepSeek-V2).
        router_dtype: "fp32" or "fp64", the least that the logits are computed in.
        num_groups: groups of consecutive experts for group-limited routing.
        num_topk_groups: groups a token may choose from; `num_groups` for no limit.
        normalize_weights: the weights of a token have the sum 1: sigmoid scores are divided by theirs (a single one is
            left as it is), the softmax is taken over the chosen experts alone instead of over all.
        routed_scaling_factor: the weights are multiplied by it last.
        bias_update_rate: step of the expert bias; 0 keeps the bias as it is.
        load_balancing: the tokens over which the balance loss is taken: "seq_aux_loss" (each sequence), "aux_loss" (the
            tokens of one call on one rank), "global_aux_loss" (those of all ranks and calls since the last step).
            The last depends on the calls before; a layer that is run again in backward counts twice and meets others.
        aux_loss_coefficient: factor of the balance loss; 0 for none.
        z_loss_coefficient: factor of the z loss, which keeps logits small; 0 for none.
        capacity_factor: an expert takes at most this many times a rank's mean number of tokens an expert from the
            rank, and drops others; None drops nothing.
        drop_policy: which tokens stay: "probs" (largest weights) or "position" (first tokens).
        force_load_balancing: noise in place of the logits, for measurements with balanced experts.
        activation: "silu", "gelu" or "relu".
        gated: whether the activation gates a second projection (SwiGLU with "silu").
        expert_alignment: rows of an expert start at a multiple of it.
        recipe: numbers of the routed experts' products and of the tokens' way to them: "bf16" (the dtype of tokens),
            "blockwise" or "rowwise" (FP8, see `recipes`), or a `Recipe`.
        experts: implementation of the experts: "auto", "loop", "grouped", "te".
        init_std: standard deviation of the initial weights.
        seed: of the initial weights.
        data_path: how rows move and what of them is kept; see `DataPath`.

    Raises:
        UsageError: a value that can not work.
    """

    hidden: int
    ffn: int
    num_experts: int
    num_topk: int
    shared_ffn: int = 0
    shared_gate: bool = False
    latent: int = 0
    score: str = "sigmoid"
    router_dtype: str = "fp32"
    num_groups: int = 1
    num_topk_groups: int = 1
    normalize_weights: bool = True
    routed_scaling_factor: float = 1.0
    bias_update_rate: float = 0.0
    load_balancing: str = "seq_aux_loss"
    aux_loss_coefficient: float = 0.0
    z_loss_coefficient: float = 0.0
    capacity_factor: float | None = None
    drop_policy: str = "probs"
    force_load_balancing: bool = False
    activation: str = "silu"
    gated: bool = True
    expert_alignment: int = 1
    recipe: str | Recipe = BF16
    experts: str = "auto"
    init_std: float = 0.02
    seed: int = 0
    data_path: DataPath = field(default_factory=DataPath)

    def __post_init__(self) -> None:
        for name in ("hidden", "ffn", "num_experts", "num_topk", "num_groups", "num_topk_groups", "expert_alignment"):
            self._require(is_whole(getattr(self, name), 1), name, "a whole number, 1 or more")
        for name in ("shared_ffn", "latent"):
            self._require(is_whole(getattr(self, name), 0), name, "a whole number, 0 or more")
        for name in ("bias_update_rate", "aux_loss_coefficient", "z_loss_coefficient", "init_std"):
            self._require(getattr(self, name) >= 0, name, "0 or more")
        self._require(self.routed_scaling_factor > 0, "routed_scaling_factor", "more than 0")
        for name, known in (
            ("score", SCORES),
            ("router_dtype", ROUTER_DTYPES),
            ("load_balancing", LOAD_BALANCING),
            ("drop_policy", DROP_POLICIES),
        ):
            self._require(getattr(self, name) in known, name, " or ".join(known))
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
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Values that are each allowed and make no sense together."""
        if self.capacity_factor is not None:
            self._require(0 < self.capacity_factor < math.inf, "capacity_factor", "a finite number above 0, or None")
        self._require(self.latent < self.hidden, "latent", f"less than hidden = {self.hidden}, or 0 for no projections")
        self._require(not self.shared_gate or self.shared_ffn > 0, "shared_gate", "False where shared_ffn is 0")
        # A softmax over one chosen expert is 1 whatever the logits are: the router would learn nothing.
        constant = self.score == "softmax" and self.normalize_weights and self.num_topk == 1
        self._require(not constant, "normalize_weights", "False for softmax scores with num_topk = 1")
        recipe = recipe_of(self.recipe)
        if recipe is not None:
            self._check_recipe(recipe)

    def _check_recipe(self, recipe: Recipe) -> None:
        """What FP8 products ask of sizes and rules."""
        rows, unit = recipe.alignment, BLOCK if recipe.scaling == "block" else ROW_ALIGNMENT
        self._require(
            self.expert_alignment % rows == 0, "expert_alignment", f"a multiple of {rows} with recipe {recipe.name}"
        )
        for name in ("latent" if self.latent else "hidden", "ffn"):
            self._require(getattr(self, name) % unit == 0, name, f"a multiple of {unit} with recipe {recipe.name}")
        self._require(self.gated and self.activation == "silu", "activation", "gated silu with an FP8 recipe")
        path = self.data_path
        self._require(
            path.save_dispatched != "redispatch" and path.recompute == "activation" and path.max_tokens_per_rank == 0,
            "data_path",
            'save_dispatched "keep", recompute "activation", max_tokens_per_rank 0 with an FP8 recipe: it keeps rows '
            "in FP8 and needs the counts on the host",
        )

    def _require(self, good: bool, name: str, allowed: str) -> None:
        if not good:
            raise UsageError(f"{name} = {getattr(self, name)!r}", allowed=allowed, fix=f"change {name} in MoEConfig")

    @property
    def has_losses(self) -> bool:
        """Whether the router adds losses of its own in training."""
        return self.aux_loss_coefficient > 0 or self.z_loss_coefficient > 0

    def activation_function(self) -> Callable[[Tensor], Tensor]:
        """The elementwise function that `activation` names."""
        return ACTIVATIONS[self.activation]
