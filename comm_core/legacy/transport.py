"""Rows of any dtype and width over an ElasticBuffer.

ElasticBuffer moves floating-point rows whose width is a multiple of 8. What V1 moves is wider than that: FP8 data,
scales with any strides, expert ids, counts. A tensor that fits travels as it is; everything else travels as bytes, all
of it in one row beside the data, padded to 16 bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from comm_core.elastic import ElasticBuffer, Event
from comm_core.event import EventHandle, EventOverlap, as_handle
from comm_core.handle import EPHandle
from comm_core.runtime.errors import UsageError
from comm_core.validate import MAX_TOPK, problem_of

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WIDTH_MULTIPLE = 8  # every backend takes rows of a multiple of it
_ROW_BYTES = 2 * WIDTH_MULTIPLE


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of 2-D tensors side by side, padded, as bf16 rows (they are moved, never read as numbers)."""
    num_rows = tensors[0].shape[0]
    width = sum(item.shape[1] * item.element_size() for item in tensors)
    rows = torch.zeros(num_rows, padded_width(width), dtype=torch.uint8, device=tensors[0].device)
    start = 0
    for item in tensors:
        end = start + item.shape[1] * item.element_size()
        if end > start:
            rows[:, start:end] = item.contiguous().view(torch.uint8)
        start = end
    return rows.view(torch.bfloat16)


def unpack_into(outs: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
    """Fills the leading rows of `outs`, contiguous tensors like those that were packed."""
    raw, start = rows.view(torch.uint8), 0
    for out in outs:
        end = start + out.shape[1] * out.element_size()
        if end > start:
            out.view(torch.uint8)[: raw.shape[0]] = raw[:, start:end]
        start = end


def padded_width(num_bytes: int) -> int:
    """Bytes of a packed row."""
    return max(1, -(-num_bytes // _ROW_BYTES)) * _ROW_BYTES


def fits(x: torch.Tensor) -> bool:
    """True where a tensor travels as it is."""
    return x.dtype in FLOATS and x.shape[1] > 0 and x.shape[1] % WIDTH_MULTIPLE == 0 and x.is_contiguous()


class Transport:
    """An ElasticBuffer that moves any rows. Every method but `wait` and `then` is a collective call.

    Args:
        group: ranks of the group.
        timeout: bound of every wait in seconds; None for the default.
        backend, device: as in ElasticBuffer.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, timeout: float | None, backend: str, device: torch.device | str | None
    ) -> None:
        self.elastic = ElasticBuffer(group, num_cpu_timeout_secs=timeout, backend=backend, device=device)
        self.rank, self.num_ranks, self.device = self.elastic.rank, self.elastic.num_ranks, self.elastic.device
        self._everywhere: EPHandle | None = None

    def checked(self, check: Callable[[], object], op: str = "dispatch") -> None:
        """Runs a check of a call ("dispatch" or "combine"); a mistake it finds raises on every rank."""
        problem = problem_of(check)
        if problem is not None:
            self.refuse(problem, op)

    def refuse(self, problem: UsageError, op: str = "dispatch") -> NoReturn:
        """Raises a mistake of this rank on every rank."""
        self.elastic._check_open()
        self.elastic._backend.refuse(op, problem)

    def spread(self, values: Sequence[int]) -> list[list[int]]:
        """The values of every rank, one line a rank; as many on each, within 64 bits."""
        if self._everywhere is None:
            lanes = torch.arange(self.num_ranks, device=self.device).split(MAX_TOPK)
            width = lanes[0].shape[0]
            ids = torch.full((len(lanes), width), -1, device=self.device)
            for line, some in enumerate(lanes):
                ids[line, : some.shape[0]] = some
            self._everywhere = self.elastic.prepare(ids, num_experts=self.num_ranks)
        num_copies = self._everywhere.num_tokens
        row = torch.tensor([list(values)] * num_copies, dtype=torch.int64, device=self.device)
        got = self.elastic.dispatch(packed([row]), handle=self._everywhere)[0]
        table = row.new_empty(got.shape[0], len(values))
        unpack_into([table], got)
        return table.tolist()

    def send(
        self,
        handle: EPHandle,
        x: torch.Tensor,
        beside: Sequence[torch.Tensor] = (),
        *,
        num_rows: int | None = None,
        after: EventHandle | None = None,
        on_comm_stream: bool = False,
    ) -> tuple[list[torch.Tensor], EventHandle]:
        """Dispatches rows along a handle.

        Args:
            handle: made by `self.elastic.prepare`; not expanded.
            x: [T, H] of any dtype.
            beside: further 2-D tensors with a row a token.
            num_rows: rows to return, those beyond the rows that arrive are 0.
            after: everything is ready then.
            on_comm_stream: outputs belong to the comm stream.

        Returns:
            [x as received, then the others], and the event that completes all of them.
        """
        num_rows = handle.num_recv_tokens if num_rows is None else num_rows
        groups = [[x], list(beside)] if fits(x) and beside else [[x, *beside]]
        outs: list[torch.Tensor] = []
        for tensors in groups:
            whole = len(tensors) == 1 and fits(tensors[0])
            rows = tensors[0] if whole else packed(tensors)
            got, _, _, _, moved = self.elastic.dispatch(
                rows,
                handle=handle,
                previous_event=after,
                async_with_compute_stream=True,
                allocate_on_comm_stream=on_comm_stream,
            )
            after = as_handle(moved)
            if whole and num_rows == got.shape[0]:
                outs.append(got)
                continue
            with self.elastic._backend.queue.allocating(on_comm_stream):
                mine = [got.new_zeros(num_rows, item.shape[1], dtype=item.dtype) for item in tensors]
            source = [rows] if whole else tensors
            after = self.then(functools.partial(unpack_into, mine, got), after, [got, *mine, *source])
            outs += mine
        assert after is not None  # at least one group
        return outs, after

    def bring(
        self,
        handle: EPHandle,
        x: torch.Tensor,
        biases: Sequence[torch.Tensor] = (),
        *,
        after: EventHandle | None = None,
        on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, EventHandle]:
        """Combines floating-point rows [n, H] along a handle: fp32, biases, then ranks ascending, one rounding."""
        hidden = x.shape[1]
        gap = -hidden % WIDTH_MULTIPLE or (0 if hidden else WIDTH_MULTIPLE)
        if gap:
            self.wait(after)
            x = torch.nn.functional.pad(x, (0, gap))
            biases = [torch.nn.functional.pad(bias, (0, gap)) for bias in biases]
        out, _, done = self.elastic.combine(
            x,
            handle,
            bias=tuple(biases) or None,
            previous_event=None if gap else after,
            async_with_compute_stream=True,
            allocate_on_comm_stream=on_comm_stream and not gap,
        )
        event = as_handle(done)
        assert event is not None  # asynchronous calls have one
        if not gap:
            return out, event
        narrow = out.new_empty(out.shape[0], hidden)
        return narrow, self.then(lambda: narrow.copy_(out[:, :hidden]), event, [out, narrow])

    def then(
        self, fn: Callable[[], Any], after: EventHandle | None, tensors: Sequence[torch.Tensor] = ()
    ) -> EventHandle:
        """Queues local work behind an event; `tensors` are what it reads and writes."""
        return self.elastic._backend.queue.submit(fn, after=(after,), tensors=tensors)

    @staticmethod
    def wait(event: Event | None) -> None:
        """Makes what this thread does next see the work of an event."""
        handle = as_handle(event)
        if handle is not None:
            handle.current_stream_wait()

    @staticmethod
    def finish(event: EventHandle, asynchronous: bool) -> EventOverlap:
        """What a call returns: the event, or an empty one after waiting for it."""
        if asynchronous:
            return EventOverlap(event)
        event.current_stream_wait()
        return EventOverlap()
