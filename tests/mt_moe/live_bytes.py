"""The most memory that torch's operations hold at once on a CPU, counted by the storages they return."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """`with LiveBytes() as memory: ...`; `memory.peak` bytes were alive at once of those made inside.

    Storages given from outside do not count, views count once, and what is freed stops to count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {self._key(value) for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self._add(value.untyped_storage(), known)
        return out

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _add(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or key in known or size == 0:
            return
        self._seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)

        def gone() -> None:
            self._seen.discard(key)
            self.alive -= size

        weakref.finalize(storage, gone)
