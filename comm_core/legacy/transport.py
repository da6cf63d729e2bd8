"""Rows of any dtype and width over an ElasticBuffer.

ElasticBuffer moves floating-point rows whose width is a multiple of 8. What V1 moves is wider than that: FP8 data,
scales with any strides, expert ids, counts. A tensor that fits travels as it is; everything else travels as bytes, all
of it in one row beside the data, padded to 16 bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from comm_core.backends.base import MoveJob
from comm_core.backends.channel import ROW_DTYPES
from comm_core.elastic import ElasticBuffer, Event
from comm_core.event import EventHandle, EventOverlap, as_handle
from comm_core.handle import EPHandle
from comm_core.runtime import device as devices
from comm_core.runtime.errors import UsageError
from comm_core.validate import MAX_TOPK, problem_of

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WIDTH_MULTIPLE = 8  # every backend takes rows of a multiple of it
_ROW_BYTES = 2 * WIDTH_MULTIPLE


def empty_packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Room for `pack_into`: bf16 rows of 0 (they are moved, never read as numbers)."""
    width = sum(item.shape[1] * item.element_size() for item in tensors)
    rows = torch.zeros(tensors[0].shape[0], padded_width(width), dtype=torch.uint8, device=tensors[0].device)
    return rows.view(torch.bfloat16)


def pack_into(rows: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Writes the bytes of 2-D tensors side by side."""
    raw, start = rows.view(torch.uint8), 0
    for item in tensors:
        end = start + item.shape[1] * item.element_size()
        if end > start:
            raw[:, start:end] = item.contiguous().view(torch.uint8)
        start = end


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of 2-D tensors side by side, as `empty_packed` rows."""
    rows = empty_packed(tensors)
    pack_into(rows, tensors)
    return rows


def unpacked(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in packed rows, of the dtypes and widths of `like`."""
    outs = [item.new_empty(rows.shape[0], item.shape[1]) for item in like]
    unpack_into(outs, rows)
    return outs


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


@dataclass(frozen=True, slots=True)
class _Move(MoveJob):
    """A dispatch whose outputs are sized when it runs, for the backends of the CPU.

    Attributes:
        target: takes the rows where they fit, and 0 behind them.
        found: gets the rows received.
    """

    target: torch.Tensor | None = None
    found: list[torch.Tensor] = field(default_factory=list)

    def fitted(self) -> MoveJob:
        """The job with its output; called on the queue, behind the count exchange."""
        num_rows, out = sum(self.handle.layout.recv_splits), self.target
        if out is None or out.shape[0] < num_rows:
            # Too small a target is a mistake that is reported elsewhere: the move itself must go through on all ranks.
            out = self.x.new_empty(num_rows, self.x.shape[1])
        out[num_rows:].zero_()
        self.found.append(out[:num_rows])
        return replace(self, out_x=out[:num_rows])


class Transport:
    """An ElasticBuffer that moves any rows. Every method but `wait`, `then` and `finish` is a collective call.

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
        # Routing that brings one row of each rank to all; a token has MAX_TOPK lanes, so it can take several tokens.
        lanes = torch.arange(self.num_ranks, device=self.device).split(MAX_TOPK)
        ids = torch.full((len(lanes), lanes[0].shape[0]), -1, device=self.device)
        for line, some in enumerate(lanes):
            ids[line, : some.shape[0]] = some
        self._everywhere = self.elastic.prepare(ids, num_experts=self.num_ranks)

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
        table, event = self.spread_later(len(values), lambda: values)
        event.current_stream_wait()
        return table

    def spread_later(
        self,
        width: int,
        values: Callable[[], Sequence[int]],
        after: EventHandle | None = None,
        *,
        compared: bool = True,
    ) -> tuple[list[list[int]], EventHandle]:
        """Starts `spread` of values that are computed on the queue behind `after`.

        Args:
            width: how many values, the same on all ranks.
            values: computes them.
            after: an event.
            compared: as in `move`.

        Returns:
            The table, filled when the event is complete; the event.
        """
        num_copies = self._everywhere.num_tokens
        with self.allocating(True):
            row = torch.zeros(num_copies, width + width % 2, dtype=torch.int64, device=self.device)

        def fill() -> None:
            row[:, :width] = torch.tensor(list(values()), dtype=torch.int64, device=self.device)

        filled = self.then(fill, [after], [row], here=False)
        rows = row.view(torch.bfloat16)
        found, moved = self.move(self._everywhere, rows, after=filled, compared=compared)
        table: list[list[int]] = []

        def read() -> None:
            table.extend(found[0].view(torch.int64)[:, :width].tolist())

        return table, self.then(read, [moved], [row], here=False)

    def move(
        self,
        handle: EPHandle,
        rows: torch.Tensor,
        *,
        target: torch.Tensor | None = None,
        after: EventHandle | None = None,
        compared: bool = True,
        here: bool = False,
    ) -> tuple[list[torch.Tensor], EventHandle]:
        """Starts a dispatch of rows that fit.

        Args:
            handle: not expanded.
            rows: [T, H].
            target: [at least the rows that arrive, H], where they go; 0 behind them.
            after: rows are ready then.
            compared: whether the call is compared across ranks, which waits for the counts of the handle; not needed
                right behind the `prepare` of the handle.
            here: as in `then`; for `target`, where it is the caller's memory.

        Returns:
            A list that holds the received rows when the event is complete, for work of the queue; the event.
        """
        self.elastic._check_open()
        settings = None
        if compared:
            settings = {"buffer": self.elastic._limits.buffer_id, "handle": handle.number}
            settings |= {"hidden": rows.shape[1], "dtype": ROW_DTYPES.index(rows.dtype)}
        op, backend = "cached dispatch", self.elastic._backend
        if self.device.type == "cpu":
            nothing = rows.new_empty(0, rows.shape[1])
            late = _Move(op, settings, handle, rows, nothing, after=(after,), target=target)
            return late.found, backend.dispatch(late)
        num_rows = handle.num_recv_tokens  # a queue that runs on this thread would wait for them as well
        with self.allocating(True):
            out = rows.new_empty(num_rows, rows.shape[1]) if target is None else target[:num_rows]
        point = EventHandle(self.device) if here and after is not None else None
        event = backend.dispatch(MoveJob(op, settings, handle, rows, out, after=(after, point)))
        if target is not None:
            event = self.then(target[num_rows:].zero_, [event], [target], here=False)
        return [out], event

    def send(
        self,
        handle: EPHandle,
        x: torch.Tensor,
        beside: Sequence[torch.Tensor] = (),
        *,
        num_rows: int | None = None,
        after: EventHandle | None = None,
        on_comm_stream: bool = False,
        compared: bool = True,
    ) -> tuple[list[torch.Tensor], EventHandle]:
        """Dispatches rows along a handle.

        Args:
            handle: made by `self.elastic.prepare`; not expanded.
            x: [T, H] of any dtype.
            beside: further 2-D tensors with a row a token.
            num_rows: rows to return, those beyond the rows that arrive are 0; without it the counts are waited for.
            after: everything is ready then.
            on_comm_stream: outputs belong to the comm stream.
            compared: as in `move`.

        Returns:
            [x as received, then the others], and the event that completes all of them.
        """
        num_rows = handle.num_recv_tokens if num_rows is None else num_rows
        groups = [[x], list(beside)] if fits(x) and beside else [[x, *beside]]
        outs: list[torch.Tensor] = []
        for tensors in groups:
            with self.allocating(on_comm_stream):
                mine = [item.new_empty(num_rows, item.shape[1]) for item in tensors]
            self.hand_over(on_comm_stream, *mine)
            outs += mine
            if len(tensors) == 1 and fits(tensors[0]):
                rows, target = tensors[0], mine[0]
            else:
                with self.allocating(True):
                    rows, target = empty_packed(tensors), None
                after = self.then(functools.partial(pack_into, rows, tensors), [after], [rows, *tensors], here=False)
            here = not on_comm_stream
            found, after = self.move(handle, rows, target=target, after=after, compared=compared, here=here)
            if target is None:
                after = self.then(functools.partial(_unpack, mine, found), [after], [rows, *mine], here=here)
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
            narrow = [x, *biases]
            with self.allocating(True):
                wide = [item.new_zeros(item.shape[0], hidden + gap) for item in narrow]
            after = self.then(functools.partial(_widen, wide, narrow), [after], [*wide, *narrow], here=False)
            x, biases = wide[0], wide[1:]
        out, _, done = self.elastic.combine(
            x,
            handle,
            bias=tuple(biases) or None,
            previous_event=after,
            async_with_compute_stream=True,
            allocate_on_comm_stream=on_comm_stream and after is not None,
        )
        event = as_handle(done)
        assert event is not None  # asynchronous calls have one
        if not gap:
            return out, event
        with self.allocating(on_comm_stream):
            result = out.new_empty(out.shape[0], hidden)
        self.hand_over(on_comm_stream, result)
        fill = functools.partial(result.copy_, out[:, :hidden])
        return result, self.then(fill, [event], [out, result], here=not on_comm_stream)

    def allocating(self, on_queue: bool) -> contextlib.AbstractContextManager[Any]:
        """Context in which new memory is the queue's: work of the queue need not wait for this stream to use it."""
        return self.elastic._backend.queue.allocating(on_queue)

    @staticmethod
    def hand_over(on_queue: bool, *tensors: torch.Tensor) -> None:
        """Memory of `allocating(True)` that the caller gets: the queue uses it again behind the current stream."""
        if on_queue:
            devices.keep_for_current_stream(*tensors)

    def then(
        self,
        fn: Callable[[], Any],
        after: Sequence[EventHandle | None],
        tensors: Sequence[torch.Tensor] = (),
        *,
        here: bool = True,
    ) -> EventHandle:
        """Queues local work.

        Args:
            fn: the work.
            after: events that it waits for.
            tensors: what it reads and writes.
            here: it also waits for what the current stream has been given: it writes memory allocated here, which
                may have been another tensor's, or filled here. False where all such memory is the queue's.
        """
        points = [*after, EventHandle(self.device)] if here else after
        return self.elastic._backend.queue.submit(fn, after=points, tensors=tensors)

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


def _unpack(outs: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
    """Received bytes into `outs`, 0 behind them; too few rows of `outs` are reported elsewhere, as in `_Move`."""
    rows = found[0][: outs[0].shape[0]]
    num_rows = rows.shape[0]
    unpack_into(outs, rows)
    for out in outs:
        if out.shape[1]:
            out.view(torch.uint8)[num_rows:].zero_()


def _widen(wide: Sequence[torch.Tensor], narrow: Sequence[torch.Tensor]) -> None:
    """Narrow rows into wider ones."""
    for into, item in zip(wide, narrow, strict=True):
        into[:, : item.shape[1]] = item
