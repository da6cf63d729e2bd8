"""What one rank finds out, every rank knows: results and mistakes of rank 0 reach the others before they wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_rank_zero(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and gives its result, or raises its error, on every rank."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    result: T = box[0]
    return result
