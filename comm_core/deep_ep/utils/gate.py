"""Router scores that favour the experts of rank 0."""

from __future__ import annotations

import torch

_HALVINGS = 20


def get_unbalanced_scores(  # noqa: D417 (described together)
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool = False
) -> torch.Tensor:
    """Random scores [num_tokens, num_experts], positive, whose top-k sends rank 0 more tokens than the others.

    Args:
        num_tokens, num_experts, num_ranks, num_topk: sizes.
        ratio: tokens that reach rank 0 over the mean of the other ranks; 1 for balanced scores.
        precise: the factor is fitted to these scores; otherwise to a draw of its own.
    """
    scores = torch.rand(num_tokens, num_experts) + 1e-3
    if ratio == 1.0 or num_ranks == 1 or not num_tokens:
        return scores
    sample = scores if precise else torch.rand(max(num_tokens, 1024), num_experts) + 1e-3
    low, high = 0.0, 64.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _ratio(_favoured(sample, num_ranks, middle), num_ranks, num_topk) > ratio:
            high = middle
        else:
            low = middle
    return _favoured(scores, num_ranks, low)


def _favoured(scores: torch.Tensor, num_ranks: int, factor: float) -> torch.Tensor:
    first = torch.arange(scores.shape[1], device=scores.device) < scores.shape[1] // num_ranks
    return torch.where(first, scores * factor, scores)


def _ratio(scores: torch.Tensor, num_ranks: int, num_topk: int) -> float:
    ranks = scores.topk(num_topk, dim=1).indices // (scores.shape[1] // num_ranks)
    reached = torch.nn.functional.one_hot(ranks, num_ranks).amax(1).sum(0).double()
    return float(reached[0] / reached[1:].mean().clamp_min(1e-9))
