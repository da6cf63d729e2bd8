"""What hypothesis draws for the tests: routing decisions of all ranks of a group."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

# Ids of all ranks, the number of experts and an alignment.
Routing = tuple[list[torch.Tensor], int, int]


@st.composite
def routings(draw: st.DrawFn, num_ranks: int | None = None) -> Routing:
    """Any routing of up to six tokens a rank.

    Args:
        draw: hypothesis's.
        num_ranks: size of the group; up to five ranks by default.
    """
    num_ranks = draw(st.integers(1, 5)) if num_ranks is None else num_ranks
    num_local = draw(st.integers(1, 5))
    num_experts = num_ranks * num_local
    num_topk = draw(st.integers(1, min(num_experts, 6)))
    row = st.lists(st.integers(0, num_experts - 1), min_size=num_topk, max_size=num_topk, unique=True)
    mask = st.lists(st.booleans(), min_size=num_topk, max_size=num_topk)
    ids = []
    for _ in range(num_ranks):
        lines = draw(st.lists(st.tuples(row, mask), max_size=6))
        values = [[-1 if hidden else e for e, hidden in zip(*line, strict=True)] for line in lines]
        ids.append(torch.tensor(values, dtype=torch.int64).reshape(-1, num_topk))
    return ids, num_experts, draw(st.sampled_from((1, 2, 4, 128)))
