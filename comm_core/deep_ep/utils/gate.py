"""Router scores that favour the experts of rank 0, by chance or by construction.

By chance: the scores of rank 0's experts are scaled by a factor found by halving an interval. The other ranks then get
what a random router gives them. By construction (`precise`): for each token the ranks it reaches are chosen first, so
that rank 0 is reached by `ratio` times as many tokens as each other rank, and those by equally many, but for one; the
scores follow from the choice. How many ranks a token reaches is drawn as a random router would, where the ratio
allows it.
"""

from __future__ import annotations

import torch

from comm_core.runtime.errors import UsageError

_HALVINGS = 20


def get_unbalanced_scores(  # noqa: D417 (described together)
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool = False
) -> torch.Tensor:
    """Random scores fp32 [num_tokens, num_experts], positive, whose top-k sends rank 0 more tokens than the others.

    Args:
        num_tokens, num_experts, num_ranks, num_topk: sizes.
        ratio: tokens that reach rank 0 over those that reach another rank (their mean); 1 for balanced scores.
        precise: by construction.

    Raises:
        UsageError: the ratio can not be had: with so few experts a rank each token must reach too many ranks.
    """
    if precise and num_ranks > 1:
        return _built(num_tokens, num_experts, num_ranks, num_topk, ratio)
    scores = _random(num_tokens, num_experts)
    if ratio == 1.0 or num_ranks == 1 or not num_tokens:
        return scores
    sample = _random(max(num_tokens, 1024), num_experts)
    low, high = 0.0, 64.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _ratio(_favoured(sample, num_ranks, middle), num_ranks, num_topk) > ratio:
            high = middle
        else:
            low = middle
    return _favoured(scores, num_ranks, low)


def _random(num_tokens: int, num_experts: int) -> torch.Tensor:
    return torch.rand(num_tokens, num_experts, dtype=torch.float32) + 1e-3


def _favoured(scores: torch.Tensor, num_ranks: int, factor: float) -> torch.Tensor:
    first = torch.arange(scores.shape[1], device=scores.device) < scores.shape[1] // num_ranks
    return torch.where(first, scores * factor, scores)


def _reached(scores: torch.Tensor, num_ranks: int, num_topk: int) -> torch.Tensor:
    """bool [num_tokens, num_ranks], the ranks of the top-k."""
    ranks = scores.topk(num_topk, dim=1).indices // (scores.shape[1] // num_ranks)
    return torch.nn.functional.one_hot(ranks, num_ranks).amax(1).bool()


def _ratio(scores: torch.Tensor, num_ranks: int, num_topk: int) -> float:
    reached = _reached(scores, num_ranks, num_topk).sum(0).double()
    return float(reached[0] / reached[1:].mean().clamp_min(1e-9))


def _built(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> torch.Tensor:
    num_local, others = num_experts // num_ranks, num_ranks - 1
    least, most = -(-num_topk // num_local), min(num_topk, num_ranks, int(others / ratio) + 1)
    if least > most or ratio < 1:
        raise UsageError(
            f"ratio={ratio} with {num_topk} of {num_experts} experts a token on {num_ranks} ranks",
            allowed=f"at least 1, and low enough for tokens that reach {least} ranks or more",
            fix="lower ratio or num_topk, or pass more experts",
        )
    width = _reached(_random(num_tokens, num_experts), num_ranks, num_topk).sum(1).clamp(least, most)
    total = int(width.sum())
    first = torch.zeros(num_tokens, dtype=torch.bool, device=width.device)
    must = width == num_ranks
    want = max(int(must.sum()), min(num_tokens, round(total * ratio / (others + ratio))))
    # Random tokens, those that reach every rank in front.
    order = (torch.rand(num_tokens, device=width.device) - must.float()).argsort()
    first[order[:want]] = True
    # The other ranks take turns, so each is reached equally often, and no token reaches one twice.
    rest = width - first.long()
    start = rest.cumsum(0) - rest
    turns = torch.arange(others, device=width.device)
    chosen = torch.zeros(num_tokens, num_ranks, dtype=torch.bool, device=width.device)
    chosen[:, 0] = first
    names = 1 + torch.randperm(others, device=width.device)
    chosen[:, names] = ((turns - start[:, None]) % others) < rest[:, None]
    # One expert of each chosen rank comes first, then the others there, then the rest.
    grouped = _random(num_tokens, num_experts).view(num_tokens, num_ranks, num_local)
    best = grouped == grouped.amax(2, keepdim=True)
    level = chosen[:, :, None].long() + (chosen[:, :, None] & best).long()
    return (grouped / 2 + level).flatten(1)
