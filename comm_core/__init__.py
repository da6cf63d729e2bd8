"""Expert-parallel communication: dispatch and combine behind DeepEP's interface. Knows no model and no Megatron."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comm_core.elastic import ElasticBuffer
    from comm_core.event import EventHandle, EventOverlap
    from comm_core.handle import EPHandle
    from comm_core.legacy import Buffer, Config
    from comm_core.runtime.env import topk_idx_t

# Resolved at first use, so that importing comm_core.runtime or comm_core.layout loads nothing else.
_WHERE = {
    "Buffer": ("comm_core.legacy", "Buffer"),
    "Config": ("comm_core.legacy", "Config"),
    "ElasticBuffer": ("comm_core.elastic", "ElasticBuffer"),
    "EPHandle": ("comm_core.handle", "EPHandle"),
    "EventHandle": ("comm_core.event", "EventHandle"),
    "EventOverlap": ("comm_core.event", "EventOverlap"),
    "topk_idx_t": ("comm_core.runtime.env", "topk_idx_t"),
}

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t"]


def __getattr__(name: str) -> Any:
    """Loads a public name at its first use."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _WHERE[name]
    return getattr(importlib.import_module(module), attribute)
