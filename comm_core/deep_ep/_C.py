"""The names of the upstream extension that callers take from it; nothing here is compiled."""

from comm_core.event import EventHandle
from comm_core.legacy.config import Config
from comm_core.validate import topk_idx_t

__all__ = ["Config", "EventHandle", "topk_idx_t"]
