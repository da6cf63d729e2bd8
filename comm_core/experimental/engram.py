"""Entries stored across the ranks, fetched by number: engram_write, engram_fetch.

Each rank writes its shard; entry g lives on rank g // num_entries. A fetch reads rows wherever they are. FP8 entries
have scales, which every rank holds for all entries: they are gathered locally and never travel.

Fetched data lie in one area of the buffer, and the next fetch overwrites them. The hook of an earlier fetch therefore
raises once there is a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from comm_core import fp8, validate
from comm_core.backends.base import Region
from comm_core.backends.channel import ROW_DTYPES
from comm_core.experimental.context import Context, raw
from comm_core.runtime import trace
from comm_core.runtime.errors import UsageError

DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
_HINT = "get_engram_storage_size_hint"

Fetched = tuple[torch.Tensor, torch.Tensor | None]


class Engram:
    """Stored entries of one buffer.

    Args:
        context: of the buffer.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._region: Region | None = None
        self._scales: torch.Tensor | None = None
        self._num_entries, self._hidden, self._dtype = 0, 0, DTYPES[0]
        self._area = torch.empty(0, dtype=torch.uint8, device=context.backend.device)
        self._fetches = 0

    def write(self, storage: Any, sf: Any) -> None:
        """Stores this rank's shard; returns when all ranks have. Collective."""
        context = self._context
        context.require("engram_write", lambda: self._check_write(storage, sf))
        num_entries, hidden = storage.shape
        settings = {
            "num_entries": num_entries,
            "hidden": hidden,
            "dtype": ROW_DTYPES.index(storage.dtype),
            "num_scales": -1 if sf is None else sf.shape[1],
            "scale_dtype": -1 if sf is None else fp8.SCALE_DTYPES.index(sf.dtype),
        }
        # All ranks have these settings, so all open a larger region or none does.
        if self._region is None or self._region.num_bytes < storage.nbytes:
            self._region = context.renewed("engram_write", settings, self._region, storage.nbytes, 1)
        else:
            context.backend.agree("engram_write", settings, drained=True).synchronize()
        self._region.local[: storage.nbytes].copy_(raw(storage))
        self._scales = None if sf is None else sf.detach()
        self._num_entries, self._hidden, self._dtype = num_entries, hidden, storage.dtype
        context.backend.barrier().synchronize()

    def fetch(self, indices: Any, *, column_major: bool) -> Callable[[], Fetched]:
        """Starts reading entries; the function returned waits for them."""
        context = self._context
        backend = context.backend
        if backend.capabilities.one_sided_reads:
            context.check_open()
            self._check_fetch(indices)
        else:
            context.require("engram_fetch", lambda: self._check_fetch(indices))
        region, number = self._region, self._fetches + 1
        assert region is not None
        num_tokens, per_token = indices.shape
        width = self._hidden * self._dtype.itemsize
        flat = indices.reshape(-1).to(torch.int64)
        if not context.host_checked:  # numbers out of range could not be refused: they read some entry
            flat = flat.clamp(0, self._num_entries * backend.num_ranks - 1)
        data = self._take_area(flat.shape[0] * width).view(self._dtype).view(num_tokens, per_token * self._hidden)
        rows = raw(data).view(flat.shape[0], width)
        owner, row = flat // self._num_entries, flat % self._num_entries
        table = self._scales
        scales = None if table is None else _empty_scales(table, num_tokens, per_token, column_major)

        def work() -> None:
            with trace.span("engram_fetch", "ep", lane="ep", bytes=rows.nbytes):
                region.read("engram_fetch", {"buffer": backend.buffer_id, "hidden": self._hidden}, owner, row, rows)
                if scales is not None and table is not None:
                    scales.copy_(table[flat].view(scales.shape))

        tensors = [data, owner, row, flat, *(item for item in (scales, table) if item is not None)]
        event = backend.queue.submit(work, tensors=tensors, on_failure=backend.note_failure)
        self._fetches = number

        def hook() -> Fetched:
            context.check_open()
            if self._fetches != number:
                raise UsageError(
                    f"the hook of fetch {number} after fetch {self._fetches}",
                    allowed="the last fetch: each overwrites the data of the one before",
                    fix="call the hook and use its data before the next engram_fetch",
                )
            event.current_stream_wait()
            return data, scales

        return hook

    def _take_area(self, num_bytes: int) -> torch.Tensor:
        if self._area.numel() < num_bytes:
            with torch.inference_mode(False):  # it outlives the caller's mode
                self._area = torch.empty(num_bytes, dtype=torch.uint8, device=self._area.device)
        return self._area[:num_bytes]

    def _check_write(self, storage: Any, sf: Any) -> None:
        device = self._context.backend.device
        storage = validate.tensor("storage", storage, dims=2, dtypes=DTYPES, device=device)
        num_entries, hidden = storage.shape
        if not num_entries or not hidden:
            raise UsageError(
                f"storage of shape {[num_entries, hidden]}",
                allowed="an entry at least",
                fix="store the same everywhere",
            )
        if (storage.dtype in fp8.DTYPES) != (sf is not None):
            raise UsageError(
                f"storage of {storage.dtype} {'without' if sf is None else 'with'} sf",
                allowed="sf with FP8 and without it none",
                fix="pass the scales of all entries beside FP8 data",
            )
        total = num_entries * self._context.backend.num_ranks
        if sf is not None:
            sf = validate.tensor("sf", sf, dims=2, dtypes=fp8.SCALE_DTYPES, device=device)
            validate.same_shape("sf", sf, (total, sf.shape[1]), "one row an entry of any rank")
        if total > torch.iinfo(torch.int32).max:
            raise UsageError(f"{total} entries", allowed="numbers of int32", fix="store fewer entries a rank")
        most = None if self._context.num_bytes is None else self._context.num_cpu_bytes
        self._context.bound("storage", storage.nbytes, most, f"{_HINT} for num_cpu_bytes")

    def _check_fetch(self, indices: Any) -> None:
        context = self._context
        if self._region is None:
            raise UsageError("engram_fetch before engram_write", allowed="after it", fix="write on all ranks first")
        indices = validate.tensor("indices", indices, dims=2, dtypes=(torch.int32,), device=context.backend.device)
        need = indices.numel() * self._hidden * self._dtype.itemsize
        most = None if context.num_bytes is None else context.num_bytes - context.num_cpu_bytes
        context.bound("fetched entries", need, most, _HINT)
        total = self._num_entries * context.backend.num_ranks
        if context.host_checked and indices.numel():
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= total:
                raise UsageError(
                    f"an entry number of {low if low < 0 else high}", allowed=f"0 to {total - 1}", fix="see indices"
                )


def _empty_scales(table: torch.Tensor, num_tokens: int, per_token: int, column_major: bool) -> torch.Tensor:
    columns = per_token * table.shape[1]
    return fp8.empty_column_major(num_tokens, columns, table) if column_major else table.new_empty(num_tokens, columns)
