"""How much memory a buffer needs: what `ElasticBuffer.get_buffer_size_hint` says and a buffer given by bytes allows.

A token on its way holds its row, its scales, its ids and weights, each padded to 32 bytes; a receiver must hold what
every rank can send at once. Combine holds one row a token for each rank that can answer, or one a lane where expanded
rows are not added up on their rank first. A buffer serves both, so it is as large as the larger, in steps of 2 MiB
(the layout of DeepEP's direct buffers, and its step).

The other uses of a buffer have formulas of DeepEP's too: entries and tensors are padded to 32 bytes, a pipeline keeps
each tensor in flight at both ends of both directions. What they take is counted apart from dispatch and combine.
"""

from __future__ import annotations

from collections.abc import Sequence

from comm_core.fp8 import num_blocks
from comm_core.layout import align

STEP = 2 << 20
# Places of tensors and entries begin at a multiple of it.
PLACE = 32
LARGEST_TOPK = 32


def dispatch_bytes(
    num_tokens: int, hidden: int, num_topk: int, num_ranks: int, *, element_size: int = 2, num_scales: int = 0
) -> int:
    """Bytes that dispatch holds on a rank, for num_tokens tokens of each."""
    row = align(hidden * element_size, 32) + align(num_scales * 4, 32) + align(num_topk * 12 + 4, 32)
    return num_ranks * num_tokens * row


def combine_bytes(
    num_tokens: int, hidden: int, num_topk: int, num_ranks: int, *, element_size: int = 2, multiple: bool = True
) -> int:
    """Bytes that combine holds on a rank of num_tokens tokens."""
    answers = min(num_ranks, num_topk) if multiple else num_topk
    return answers * num_tokens * (hidden * element_size + align(num_topk * 8, 32))


def buffer_bytes(
    num_tokens: int, hidden: int, num_topk: int, num_ranks: int, *, use_fp8_dispatch: bool, multiple_reduction: bool
) -> int:
    """Bytes for both, rounded up to 2 MiB; num_topk = 0 means the largest."""
    num_topk = num_topk or LARGEST_TOPK
    wide, scales = (1, num_blocks(hidden)) if use_fp8_dispatch else (2, 0)
    sent = dispatch_bytes(num_tokens, hidden, num_topk, num_ranks, element_size=wide, num_scales=scales)
    back = combine_bytes(num_tokens, hidden, num_topk, num_ranks, multiple=multiple_reduction)
    return align(max(sent, back), STEP)


def engram_bytes(num_entries: int, hidden: int, num_max_tokens_per_rank: int, element_size: int) -> tuple[int, int]:
    """Bytes of a rank's fetched entries (num_max_tokens_per_rank of them) and of its stored ones, each in 2 MiB."""
    entry = align(hidden * element_size, PLACE)
    return align(entry * num_max_tokens_per_rank, STEP), align(entry * num_entries, STEP)


def pipeline_bytes(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
    """Bytes of a rank's tensors in flight: to and from both neighbours; not rounded up."""
    return align(num_max_tensor_bytes, PLACE) * num_max_inflight_tensors * 4


def session_bytes(tensor_bytes: Sequence[int], num_ranks: int) -> int:
    """Bytes of the gathered tensors of one session, from those of this rank's parts."""
    return sum(align(num_ranks * num_bytes, PLACE) for num_bytes in tensor_bytes)
