"""The layer by definition: one token and one expert at a time, in the dtype of its inputs; slow and obviously right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_moe.config import MoEConfig

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": torch.relu}


def route_token(logits: Tensor, bias: list[float], config: MoEConfig) -> tuple[list[int], list[Tensor]]:
    """Experts of one token in falling order of choice, and their weights."""
    scores = torch.sigmoid(logits) if config.score == "sigmoid" else torch.exp(logits) / torch.exp(logits).sum()
    late = config.score == "softmax" and config.normalize_weights  # the softmax comes after the choice
    choice = [float(score.detach()) + b for score, b in zip(logits if late else scores, bias, strict=True)]
    size = config.num_experts // config.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_groups)]
    best_of_group = max(1, config.num_topk // config.num_topk_groups)
    value = [sum(sorted((choice[e] for e in group), reverse=True)[:best_of_group]) for group in groups]
    best = sorted(range(config.num_groups), key=lambda g: value[g], reverse=True)[: config.num_topk_groups]
    candidates = [e for g in best for e in groups[g]]
    experts = sorted(candidates, key=lambda e: choice[e], reverse=True)[: config.num_topk]
    return experts, weights_of(logits, experts, config)


def weights_of(logits: Tensor, experts: list[int], config: MoEConfig) -> list[Tensor]:
    """The weights of one token's experts, whichever chose them."""
    scores = torch.sigmoid(logits) if config.score == "sigmoid" else torch.exp(logits) / torch.exp(logits).sum()
    weights = [scores[e] for e in experts]
    if config.normalize_weights and len(weights) > 1:
        total = torch.stack(weights).sum()
        weights = [weight / total for weight in weights]
    return [weight * config.routed_scaling_factor for weight in weights]


def mlp(x: Tensor, fc1: Tensor, fc2: Tensor, config: MoEConfig) -> Tensor:
    """One token through one MLP."""
    inner = fc1 @ x
    act = ACTIVATIONS[config.activation]
    half = inner.shape[0] // 2
    return fc2 @ (act(inner[:half]) * inner[half:] if config.gated else act(inner))


def moe_token(
    x: Tensor,
    weights: dict[str, Tensor],
    bias: list[float],
    config: MoEConfig,
    routed: bool,
    decision: tuple[list[int], list[Tensor]] | None = None,
) -> Tensor:
    """One token through its experts (none where not `routed`; those of `decision` if given) and the shared expert."""
    narrow = weights["latent.down"] @ x if config.latent else x
    y = torch.zeros_like(narrow)
    if routed:
        if decision is None:
            decision = route_token(weights["router.weight"] @ x, bias, config)
        for expert, weight in zip(*decision, strict=True):
            y = y + weight * mlp(narrow, weights["experts.fc1"][expert], weights["experts.fc2"][expert], config)
    if config.latent:
        y = weights["latent.up"] @ y
    if config.shared_ffn:
        shared = mlp(x, weights["shared.fc1"], weights["shared.fc2"], config)
        y = y + (shared * torch.sigmoid(weights["shared.gate"][0] @ x) if config.shared_gate else shared)
    return y


def balance_loss_of(tokens: list[Tensor], weight: Tensor, config: MoEConfig) -> Tensor:
    """The balance loss of one sequence, as the paper writes it."""
    loss = weight.new_zeros(())
    scores = [torch.sigmoid(weight @ x) if config.score == "sigmoid" else F.softmax(weight @ x, 0) for x in tokens]
    top = [set(s.topk(config.num_topk).indices.tolist()) for s in scores]
    for expert in range(config.num_experts):
        fraction = config.num_experts / (config.num_topk * len(tokens)) * sum(expert in chosen for chosen in top)
        mean = torch.stack([s[expert] / s.sum() for s in scores]).sum() / len(tokens)
        loss = loss + fraction * mean
    return config.aux_loss_coefficient * loss
