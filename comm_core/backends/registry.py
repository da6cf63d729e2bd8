"""Which backends there are. A new backend is one file and one line here."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from comm_core.backends.base import Backend
from comm_core.runtime.errors import UsageError

# In the order in which "auto" tries them; imported when chosen.
_BACKENDS = {
    "gpu": "comm_core.backends.gpu:GpuBackend",
    "collective": "comm_core.backends.collective:CollectiveBackend",
    "posix": "comm_core.backends.posix:PosixBackend",
}


def names() -> tuple[str, ...]:
    """Names accepted by `ElasticBuffer(backend=...)`, besides "auto"."""
    return tuple(_BACKENDS)


def names_for(kind: str) -> tuple[str, ...]:
    """Names of the backends that move tensors of a kind of device, on machines that have it."""
    return tuple(name for name in _BACKENDS if kind in _load(name).capabilities.device_kinds)


def create(name: str, group: dist.ProcessGroup, device: torch.device, timeout: float) -> Backend:
    """Builds a backend on every rank of `group` (a collective call).

    Args:
        name: one of `names()`.
        group: the group it serves; used to bootstrap only.
        device: where the tensors live.
        timeout: bound of every wait in seconds.

    Raises:
        UnavailableError: on every rank, where it can not be used between them.
        CommTimeoutError: a rank did not arrive.
    """
    with torch.inference_mode(False):  # memory made here outlives the caller's mode
        backend: Backend = _load(name)(group, device, timeout)
    return backend


def candidates(name: str, device: torch.device) -> list[str]:
    """The backends that a name means for a device, the best first: several for "auto". Does not communicate.

    Raises:
        UsageError: an unknown name, or a backend that can not be used with such a device here.
    """
    if name == "auto":
        return [known for known in _BACKENDS if _load(known).why_not(device.type) is None]
    if name not in _BACKENDS:
        raise UsageError(f"backend {name!r}", allowed=f"auto, {', '.join(_BACKENDS)}", fix="choose one of them")
    reason = _load(name).why_not(device.type)
    if reason is not None:
        raise UsageError(f"backend {name!r} on {device}", allowed=reason, fix="choose another backend or device")
    return [name]


def report() -> list[tuple[str, str, str | None]]:
    """(backend, device kind, why it can not be used here or None) for every backend and kind of device it knows."""
    return [
        (name, kind, backend.why_not(kind))
        for name in _BACKENDS
        for backend in [_load(name)]
        for kind in backend.capabilities.device_kinds
    ]


def _load(name: str) -> Any:
    module, _, attribute = _BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
