"""The names of the `deep_ep` package, and `install()`, which makes `import deep_ep` mean this one.

    import comm_core.deep_ep
    comm_core.deep_ep.install()
    from deep_ep import Buffer            # comm_core's, also inside Megatron, if it is imported after this
    from deep_ep.utils import EventOverlap

Nothing happens without the call: a program that has the upstream package keeps it. For programs that are not to be
changed: `python -m comm_core.deep_ep SCRIPT ...`, child processes included.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from comm_core.deep_ep.finder import install, uninstall

if TYPE_CHECKING:
    from comm_core.deep_ep.utils.comm import get_logical_domain_size, get_physical_domain_size
    from comm_core.elastic import ElasticBuffer
    from comm_core.event import EventHandle, EventOverlap
    from comm_core.handle import EPHandle
    from comm_core.legacy import Buffer, Config
    from comm_core.runtime.env import topk_idx_t

# The upstream version whose interface this is.
__version__ = "2.1.0"

_WHERE = {
    "Buffer": "comm_core.legacy",
    "Config": "comm_core.legacy",
    "EPHandle": "comm_core.handle",
    "ElasticBuffer": "comm_core.elastic",
    "EventHandle": "comm_core.event",
    "EventOverlap": "comm_core.event",
    "get_logical_domain_size": "comm_core.deep_ep.utils.comm",
    "get_physical_domain_size": "comm_core.deep_ep.utils.comm",
    "topk_idx_t": "comm_core.runtime.env",
}

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "install",
    "topk_idx_t",
    "uninstall",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Loads a public name at its first use."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
