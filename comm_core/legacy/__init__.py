"""The DeepEP V1 interface, `Buffer` and `Config`, over the backends of ElasticBuffer.

V1 routes by rank where V2 routes by expert: the caller says which ranks each token goes to, and the answers of a token
are added up in the order of the ranks. So a V1 call is a V2 call whose lanes are ranks, in ascending order; expert ids
and weights travel beside the rows. There is one definition of dispatch and combine, and V1 adds no transport.

    config.py       Config, size hints and defaults
    routing.py      pure functions: counts, lanes, the fields of V1's handle
    transport.py    rows of any dtype and width over an ElasticBuffer
    fresh.py        the steps of a dispatch by a new routing decision
    local.py        memory and answers of a Buffer alone
    buffer.py       Buffer: layout, dispatch, combine
    low_latency.py  the low-latency calls: expert-major blocks of fixed size, weighted combine, receive hooks
    shrink.py       which ranks are left after a failure
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comm_core.legacy.buffer import Buffer
    from comm_core.legacy.config import Config

__all__ = ["Buffer", "Config"]


def __getattr__(name: str) -> Any:
    """Loads a public name at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{name.lower()}"), name)
