"""Losses of the router: three kinds of balance (Megatron's aux losses) and the size of the logits (z loss).

For a set of T tokens, with s the scores normalised over the experts and c_i the tokens that have expert i among their
num_topk best scores (neither bias nor groups nor drops count here):

    balance = coefficient * num_experts / (num_topk * T) * sum over experts i of c_i * mean over tokens of s_i

Gradients flow through s alone. The set is what `load_balancing` names:

    seq_aux_loss      each sequence, averaged over them (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20)
    aux_loss          all tokens of the call (Switch Transformer, arXiv 2101.03961)
    global_aux_loss   c and T of all ranks, averaged over the calls since the last step (arXiv 2501.11873)

    z = coefficient * mean over tokens of logsumexp(logits)^2           (ST-MoE, arXiv 2202.08906, equation 5)
"""

from __future__ import annotations

import torch
from einops import reduce
from torch import Tensor

from comm_core.runtime.errors import UsageError
from mt_moe.config import MoEConfig


def balance_scores(logits: Tensor, config: MoEConfig, dtype: torch.dtype = torch.float32) -> Tensor:
    """The scores of the balance losses, [num_tokens, num_experts] in `dtype`, each row with sum 1."""
    if config.score == "softmax":
        return torch.softmax(logits, dim=-1, dtype=dtype)
    scores = torch.sigmoid(logits.to(dtype))
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def balance_terms(
    logits: Tensor, config: MoEConfig, token_mask: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Scores and choices as the balance losses count them.

    Args:
        logits: [num_tokens, num_experts].
        config: gives score and num_topk.
        token_mask: bool [num_tokens]; False leaves the token out.
        dtype: of both results.

    Returns:
        scores [num_tokens, num_experts]; chosen [num_tokens, num_experts], 1 where the expert is among the best scores.
    """
    scores = balance_scores(logits, config, dtype)
    chosen = torch.zeros_like(scores).scatter_(1, scores.detach().topk(config.num_topk, dim=1).indices, 1.0)
    if token_mask is not None:
        scores, chosen = scores * token_mask.unsqueeze(1), chosen * token_mask.unsqueeze(1)
    return scores, chosen


def balance_loss(scores: Tensor, counts: Tensor, num_tokens: Tensor | int, config: MoEConfig) -> Tensor:
    """The balance loss of one set of tokens, or the mean over several sets.

    Args:
        scores: [..., num_experts], the sum of the scores of this rank's tokens, for each set.
        counts: [..., num_experts], the tokens of the whole set that choose each expert.
        num_tokens: T, of each set.
        config: gives num_experts, num_topk and the coefficient.

    Returns:
        A scalar, already multiplied by `aux_loss_coefficient`; 0 without tokens.
    """
    # Without tokens the sums are zero; the 1 keeps the quotient so.
    length = num_tokens or 1 if isinstance(num_tokens, int) else torch.where(num_tokens > 0, num_tokens, 1)
    factor = config.num_experts * config.aux_loss_coefficient / (config.num_topk * length * length)
    return (scores * counts).sum(dim=-1).mean() * factor


def sequence_balance_loss(
    logits: Tensor,
    config: MoEConfig,
    *,
    num_sequences: int = 1,
    token_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The balance loss of the sequences of one call; with `num_sequences=1` that of all its tokens.

    Args:
        logits: [num_sequences * T, num_experts].
        config: gives score, num_experts, num_topk and the coefficient.
        num_sequences: the tokens are that many sequences of equal length, one after the other.
        token_mask: bool [num_sequences * T]; False leaves the token out. As in Megatron, T is then the mean number of
            tokens that are left of a sequence.
        dtype: of the scores.

    Raises:
        UsageError: sequences that do not divide the tokens.
    """
    if num_sequences < 1 or logits.shape[0] % num_sequences:
        raise UsageError(
            f"num_sequences = {num_sequences} for {logits.shape[0]} tokens",
            allowed="a divisor of the number of tokens",
            fix="pass the number of sequences in the batch",
        )
    scores, chosen = balance_terms(logits, config, token_mask, dtype)
    pattern = "(sequence token) expert -> sequence expert"
    total = reduce(scores, pattern, "sum", sequence=num_sequences)
    counts = reduce(chosen, pattern, "sum", sequence=num_sequences)
    length: Tensor | int = logits.shape[0] // num_sequences
    if token_mask is not None:
        length = token_mask.sum().to(dtype) / num_sequences
    return balance_loss(total, counts, length, config)


def z_loss(logits: Tensor, config: MoEConfig, token_mask: Tensor | None = None) -> Tensor:
    """The z loss of logits [num_tokens, num_experts], multiplied by `z_loss_coefficient`; 0 without tokens.

    Args:
        logits: fp32 or fp64.
        config: gives the coefficient.
        token_mask: bool [num_tokens]; False leaves the token out.
    """
    values = torch.logsumexp(logits, dim=-1).square()
    if token_mask is None:
        return values.sum() / max(1, logits.shape[0]) * config.z_loss_coefficient
    return (values * token_mask).sum() / token_mask.sum().clamp_min(1) * config.z_loss_coefficient
