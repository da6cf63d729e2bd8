"""The names of the upstream extension that callers take from it; nothing here is compiled."""

from typing import Any

from comm_core.event import EventHandle
from comm_core.legacy.config import Config
from comm_core.runtime import env

__all__ = ["Config", "EventHandle", "topk_idx_t"]  # noqa: F822 (topk_idx_t is found by __getattr__)


def __getattr__(name: str) -> Any:
    """`topk_idx_t`, which depends on the environment."""
    if name != "topk_idx_t":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return env.topk_idx_dtypes()[0]
