"""The router: which experts a token goes to, and with what weight; what it costs to be out of balance.

    logits = x @ W.T                    in fp32 or fp64, whatever the dtype of x
    experts, weights                    `routing` has the rules
    capacity                            `drop` says which tokens an expert takes
    losses                              `routing_losses`

The bias balances the load without a loss: after each step it moves by a fixed amount towards the experts with less than
the mean load. It never enters the weights, so it disturbs no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm_core.runtime.errors import UsageError
from mt_moe.config import ROUTER_DTYPES, MoEConfig
from mt_moe.drop import kept_lanes
from mt_moe.gate import gate_logits
from mt_moe.init import seeded_normal
from mt_moe.routing import forced_logits, route
from mt_moe.routing_losses import balance_loss, balance_terms, sequence_balance_loss, z_loss


class Routing(NamedTuple):
    """The decision for every token.

    Attributes:
        topk_idx: int64 [num_tokens, num_topk], global experts by falling choice, -1 in masked tokens and where an
            expert dropped the token.
        topk_weights: [num_tokens, num_topk], fp32 (fp64 for fp64 tokens), 0 where `topk_idx` is -1.
        logits: [num_tokens, num_experts], fp32 or fp64, what the losses are computed from.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    logits: Tensor


class Router(nn.Module):
    """Scores tokens with one linear map and chooses their experts.

    Attributes:
        weight: [num_experts, hidden].
        expert_bias: fp32 [num_experts], saved with the model; moved by `update_expert_bias` alone.
        tokens_per_expert: int64 [num_experts], tokens sent in training mode since the last update; not saved.
        balance_counts: fp32 [num_experts + 1], what "global_aux_loss" has counted since the last update: the tokens of
            all ranks that have each expert among their best scores, then the number of calls; not saved.

    Args:
        config: sizes and rules.
        name: prefix of the name that the initial weight (and forced logits) depend on.
        dtype: of the weight.
        device: of the weight.
        rank: makes forced logits differ between ranks.
    """

    expert_bias: Tensor
    tokens_per_expert: Tensor
    balance_counts: Tensor

    def __init__(
        self,
        config: MoEConfig,
        *,
        name: str = "router",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rank: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.num_experts, config.hidden)
        initial = seeded_normal(shape, config.init_std, seed=config.seed, name=f"{name}.weight")
        self.weight = nn.Parameter(initial.to(device, dtype))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, device=device))
        counts = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.register_buffer("balance_counts", torch.zeros(config.num_experts + 1, device=device), persistent=False)
        self._noise_seed = f"{config.seed}/{name}/{rank}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """What `to`, `bfloat16` and the like do. Bias and counts stay fp32: in BF16 small steps of them are lost."""
        before = {name: self._buffers[name] for name in ("expert_bias", "balance_counts")}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != torch.float32:
                self._buffers[name] = old.to(new.device)
        return self

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Routing:
        """Routes x [num_tokens, hidden].

        Args:
            x: any float dtype; scores are computed in fp32, or fp64 if x is.
            token_mask: bool [num_tokens]; a token with False goes nowhere and gets a zero output.
        """
        if torch.is_autocast_enabled(x.device.type):  # it would round the logits
            with torch.autocast(x.device.type, enabled=False):
                return self.forward(x, token_mask)
        config = self.config
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = gate_logits(x, self.weight, torch.promote_types(wide, ROUTER_DTYPES[config.router_dtype]))
        if config.force_load_balancing:
            logits = forced_logits(logits, self._noise_seed)
        topk_idx, topk_weights = route(logits, self.expert_bias, config, dtype=wide)
        if token_mask is not None or config.capacity_factor is not None:
            dropped = ~kept_lanes(topk_idx, topk_weights, config, token_mask)
            topk_idx, topk_weights = topk_idx.masked_fill(dropped, -1), topk_weights.masked_fill(dropped, 0)
        # Without gradients a pass is an evaluation, or one that recomputation will repeat.
        if self.training and torch.is_grad_enabled():
            self.tokens_per_expert += _count(topk_idx, config.num_experts)
        return Routing(topk_idx, topk_weights, logits)

    def losses(
        self,
        routing: Routing,
        *,
        num_sequences: int = 1,
        token_mask: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> list[Tensor]:
        """The losses that the config asks for, scalars to be added to the model's: balance, then z.

        Args:
            routing: what `forward` returned.
            num_sequences: the tokens are that many sequences of equal length, one after the other.
            token_mask: bool [num_tokens]; False leaves the token out.
            group: all ranks whose tokens this router sees, for "global_aux_loss", which is collective; the default
                group if None, and no others where there is none.

        Raises:
            UsageError: sequences that do not divide the tokens.
        """
        config, logits, wide = self.config, routing.logits, routing.topk_weights.dtype
        found: list[Tensor] = []
        if config.aux_loss_coefficient > 0:
            if config.load_balancing == "global_aux_loss":
                loss = self._global_balance_loss(logits, token_mask, group, wide)
            else:
                sequences = num_sequences if config.load_balancing == "seq_aux_loss" else 1
                loss = sequence_balance_loss(logits, config, num_sequences=sequences, token_mask=token_mask, dtype=wide)
            found.append(loss)
        if config.z_loss_coefficient > 0:
            found.append(z_loss(logits, config, token_mask))
        return found

    def _global_balance_loss(
        self, logits: Tensor, token_mask: Tensor | None, group: dist.ProcessGroup | None, dtype: torch.dtype
    ) -> Tensor:
        """This rank's part: its own scores against the counts of all ranks, averaged over the calls of a step."""
        scores, chosen = balance_terms(logits, self.config, token_mask, dtype)
        counts = chosen.sum(dim=0)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(counts, group=group)
        num_tokens = counts.sum() / self.config.num_topk
        seen = self.balance_counts + torch.cat([counts, counts.new_ones(1)])
        if self.training and torch.is_grad_enabled():
            self.balance_counts.copy_(seen)
        return balance_loss(scores.sum(dim=0), seen[:-1] / seen[-1], num_tokens, self.config)

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

    @torch.no_grad()
    def restart_counts(self) -> None:
        """Starts a new step: `tokens_per_expert` and `balance_counts` count anew."""
        self.tokens_per_expert.zero_()
        self.balance_counts.zero_()


@torch.no_grad()
def _count(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Tokens of each expert, int64 [num_experts], without a wait for the device."""
    lanes = topk_idx.flatten()
    bins = torch.where(lanes < 0, num_experts, lanes)
    return lanes.new_zeros(num_experts + 1).scatter_add_(0, bins, torch.ones_like(bins))[:num_experts]
