"""The router: which experts a token goes to, and with what weight (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    scores  = sigmoid(x @ W.T)  or  softmax(x @ W.T)           at least fp32, whatever the dtype of x
    choice  = scores + expert_bias                             chooses, and does nothing else
    groups  : the num_topk_groups best by the sum of their two best choices; other experts are out
    experts : the num_topk best choices left
    weights = scores of those / their sum * routed_scaling_factor

The bias balances the load without a loss: after each step it moves by a fixed amount towards the experts with less than
the mean load. It never enters the weights, so it disturbs no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn

from comm_core.runtime.errors import UsageError
from mt_moe.config import MoEConfig
from mt_moe.init import seeded_normal


class Routing(NamedTuple):
    """The decision for every token.

    Attributes:
        topk_idx: int64 [num_tokens, num_topk], global experts by falling choice, -1 in masked tokens.
        topk_weights: [num_tokens, num_topk], fp32 (fp64 for fp64 tokens), 0 in masked tokens.
        scores: [num_tokens, num_experts], before bias and limits, in the dtype of the weights.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    scores: Tensor


def choose(scores: Tensor, expert_bias: Tensor | None, config: MoEConfig) -> Tensor:
    """The experts of every token, int64 [num_tokens, num_topk], from scores [num_tokens, num_experts]."""
    choice = scores.detach()
    if expert_bias is not None:
        choice = choice + expert_bias
    if config.num_topk_groups < config.num_groups:
        grouped = rearrange(choice, "token (group expert) -> token group expert", group=config.num_groups)
        best = reduce(grouped.topk(min(2, grouped.shape[2]), dim=2).values, "token group expert -> token group", "sum")
        allowed = torch.zeros_like(best, dtype=torch.bool)
        allowed.scatter_(1, best.topk(config.num_topk_groups, dim=1).indices, True)
        limited = grouped.masked_fill(~allowed.unsqueeze(2), float("-inf"))
        choice = rearrange(limited, "token group expert -> token (group expert)")
    return choice.topk(config.num_topk, dim=1).indices


def balance_loss(scores: Tensor, config: MoEConfig, *, num_sequences: int, token_mask: Tensor | None = None) -> Tensor:
    """The sequence-wise balance loss of DeepSeek-V3 (equations 17 to 20), averaged over the sequences.

    For each sequence of T tokens, with s the scores normalised over the experts:
    loss = sum over experts i of f_i * P_i, f_i = num_experts / (num_topk * T) * (tokens that have i among their
    num_topk best scores), P_i = mean of s_i. Gradients flow through P alone.

    Args:
        scores: [num_sequences * T, num_experts] of a `Routing`.
        config: gives num_experts, num_topk and the coefficient.
        num_sequences: the tokens are that many sequences of equal length, one after the other.
        token_mask: bool [num_sequences * T]; False leaves the token out.

    Returns:
        A scalar, already multiplied by `aux_loss_coefficient`; 0 without tokens.
    """
    if num_sequences < 1 or scores.shape[0] % num_sequences:
        raise UsageError(
            f"num_sequences = {num_sequences} for {scores.shape[0]} tokens",
            allowed="a divisor of the number of tokens",
            fix="pass the number of sequences in the batch",
        )
    shares = scores / scores.sum(dim=1, keepdim=True)
    chosen = torch.zeros_like(scores).scatter_(1, scores.detach().topk(config.num_topk, dim=1).indices, 1.0)
    if token_mask is not None:
        shares = shares.masked_fill(~token_mask.unsqueeze(1), 0)
        chosen = chosen.masked_fill(~token_mask.unsqueeze(1), 0)
    pattern = "(sequence token) expert -> sequence expert"
    selected = reduce(chosen, pattern, "sum", sequence=num_sequences)
    # Each token selects num_topk experts, which counts the tokens that are not masked.
    length = (selected.sum(dim=1, keepdim=True) / config.num_topk).clamp_min(1)
    load = selected * config.num_experts / (config.num_topk * length)
    share = reduce(shares, pattern, "sum", sequence=num_sequences) / length
    return config.aux_loss_coefficient * (load * share).sum(dim=1).mean()


class Router(nn.Module):
    """Scores tokens with one linear map and chooses their experts.

    Attributes:
        weight: [num_experts, hidden].
        expert_bias: fp32 [num_experts], saved with the model; moved by `update_expert_bias` alone.
        tokens_per_expert: int64 [num_experts], tokens routed in training mode since the last update; not saved.

    Args:
        config: sizes and rules.
        name: prefix of the name that the initial weight depends on.
        dtype: of the weight.
        device: of the weight.
    """

    expert_bias: Tensor
    tokens_per_expert: Tensor

    def __init__(
        self,
        config: MoEConfig,
        *,
        name: str = "router",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.num_experts, config.hidden)
        initial = seeded_normal(shape, config.init_std, seed=config.seed, name=f"{name}.weight")
        self.weight = nn.Parameter(initial.to(device, dtype))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, device=device))
        counts = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Routing:
        """Routes x [num_tokens, hidden].

        Args:
            x: any float dtype; scores are computed in fp32, or fp64 if x is.
            token_mask: bool [num_tokens]; a token with False goes nowhere and gets a zero output.
        """
        config = self.config
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = torch.sigmoid(logits) if config.score == "sigmoid" else torch.softmax(logits, dim=1)
        topk_idx = choose(scores, self.expert_bias, config)
        topk_weights = scores.gather(1, topk_idx)
        if config.normalize_weights:
            # The smallest normal number keeps a row of vanished scores finite without moving any other.
            topk_weights = topk_weights / topk_weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(wide).tiny)
        topk_weights = topk_weights * config.routed_scaling_factor
        if token_mask is not None:
            topk_idx = topk_idx.masked_fill(~token_mask.unsqueeze(1), -1)
            topk_weights = topk_weights.masked_fill(~token_mask.unsqueeze(1), 0)
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert += torch.bincount(topk_idx[topk_idx >= 0], minlength=config.num_experts)
        return Routing(topk_idx, topk_weights, scores)

    @torch.no_grad()
    def update_expert_bias(self, tokens_per_expert: Tensor) -> None:
        """Moves the bias of each expert by `bias_update_rate` towards the mean load.

        expert_bias += bias_update_rate * sign(mean(tokens_per_expert) - tokens_per_expert)

        Args:
            tokens_per_expert: [num_experts], summed over all ranks that share this router (the router's own buffer
                counts this rank's tokens only). A load equal to the mean moves nothing.
        """
        if tuple(tokens_per_expert.shape) != (self.config.num_experts,):
            raise UsageError(
                f"tokens_per_expert of shape {list(tokens_per_expert.shape)}",
                allowed=f"[{self.config.num_experts}], one count for every expert of all ranks",
                fix="pass the counts summed over the ranks",
            )
        load = tokens_per_expert.to(torch.float64)
        self.expert_bias += self.config.bias_update_rate * torch.sign(load.mean() - load).to(self.expert_bias.dtype)
