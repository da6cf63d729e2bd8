"""All-gather sessions (AGRS): gathered tensors that stay in the buffer until their session ends.

A session hands out the memory of the buffer in order, the same on all ranks: each all-gather takes num_ranks times the
bytes of its tensor, in steps of 32. A rank's own part of the next place may be written beforehand (an in-place tensor),
so that nothing is copied here. Results are views of the buffer. Ending a session is the moment from which the others
may overwrite it: it waits for the work of the current stream, then for all ranks.

An all-gather that was refused leaves the ranks with different ideas of where the next one goes. So it spoils its
session: later calls of it raise, and the next session works.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from comm_core import sizes, validate
from comm_core.backends.base import Region
from comm_core.event import EventHandle
from comm_core.experimental.context import Context, raw
from comm_core.layout import align
from comm_core.runtime import trace
from comm_core.runtime.errors import ClosedError, UsageError

MAX_ALL_GATHERS = 32
_HINT = "get_agrs_buffer_size_hint"
_LANE = 0

Shape = Sequence[int]


@dataclass(slots=True)
class _Session:
    """Attributes: number: of the session. offset, calls: bytes and all-gathers used. spoiled: a call was refused."""

    number: int
    offset: int = 0
    calls: int = 0
    spoiled: bool = False
    ended: bool = False


class Sessions:
    """All-gather sessions of one buffer, one at a time.

    Args:
        context: of the buffer.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._region: Region | None = None
        self._max_calls = 0
        self._session = _Session(0, ended=True)
        self._settled: EventHandle | None = None

    def configure(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Sets sizes. Collective."""
        context = self._context

        def check() -> None:
            if not self._session.ended:
                raise UsageError("agrs_set_config in a session", allowed="between sessions", fix="end the session")
            validate.whole("num_max_session_bytes", num_max_session_bytes)
            calls = validate.whole("num_max_all_gathers_per_session", num_max_all_gathers_per_session)
            if calls > MAX_ALL_GATHERS:
                raise UsageError(
                    f"num_max_all_gathers_per_session={calls}", allowed=f"at most {MAX_ALL_GATHERS}",
                    fix="gather several tensors in one call",
                )  # fmt: skip
            context.bound("a session", num_max_session_bytes, context.num_bytes, _HINT)

        context.require("agrs_set_config", check)
        settings = {
            "num_max_session_bytes": num_max_session_bytes,
            "num_max_all_gathers_per_session": num_max_all_gathers_per_session,
        }
        num_bytes = align(num_max_session_bytes, sizes.PLACE)
        self._region = context.renewed("agrs_set_config", settings, self._region, num_bytes, 1)
        self._max_calls = num_max_all_gathers_per_session

    def begin(self) -> None:
        """Begins a session."""

        def check() -> None:
            if self._region is None:
                raise UsageError("a session before agrs_set_config", allowed="after it", fix="call it on all ranks")
            if not self._session.ended:
                raise UsageError("a session in a session", allowed="one at a time", fix="call destroy_agrs_session")

        self._context.require("create_agrs_session", check)
        session = _Session(self._session.number + 1)
        self._compare("create_agrs_session", session)
        self._session = session

    def end(self) -> None:
        """Ends the session."""
        self._context.require("destroy_agrs_session", self._check_open)
        self._compare("destroy_agrs_session", self._session)
        self._settle()

    def give_up(self) -> None:
        """Ends the session, if there is one, on this rank alone; others hear of it at the next call they compare."""
        if not self._session.ended:
            with contextlib.suppress(ClosedError):
                self._settle()

    def _settle(self) -> None:
        """Ends the session here, and queues what must be over before its memory is used again."""
        session, region, others = self._session, self._region, self._context.others()
        session.ended = True
        where = f"the end of all-gather session {session.number}"

        def work() -> None:
            assert region is not None
            region.release(_LANE, others)
            region.settle(where, _LANE, others)

        backend = self._context.backend
        self._settled = backend.queue.submit(work, on_failure=backend.note_failure)

    def inplace(self, shapes: Any, dtype: torch.dtype) -> Any:
        """This rank's part of the next place, or of the next ones."""
        given: list[Shape] = []
        offsets: list[tuple[int, int]] = []

        def check() -> None:
            self._check_open()
            given.extend(shapes_of(shapes))
            offsets.extend(self._places([math.prod(shape) * dtype.itemsize for shape in given])[0])

        if not self._session.ended:
            self._check_good()  # not told to the others: they know, or hear of it at their next all_gather
        self._require("agrs_get_inplace_tensor", check)
        # Others may still read what the session before left there.
        if self._settled is not None:
            self._settled.current_stream_wait()
        out = tuple(
            self._part(offset, num_bytes, self._context.backend.rank).view(dtype).view(tuple(shape))
            for (offset, num_bytes), shape in zip(offsets, given, strict=True)
        )
        return out if is_batch(shapes) else out[0]

    def gather(self, given: Any) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """Gathers one tensor or several; the function returned waits for them."""
        places: list[tuple[int, int]] = []
        tensors: list[torch.Tensor] = []
        used = [0]

        def check() -> None:
            self._check_open()
            self._check_good()
            items = [given] if isinstance(given, torch.Tensor) else list(given)
            if not items:
                raise UsageError("all_gather of nothing", allowed="a tensor or several", fix="leave the call out")
            tensors.extend(self._context.tensor("t", item).detach() for item in items)
            found, used[0] = self._places([item.nbytes for item in tensors])
            places.extend(found)
            for item, (offset, num_bytes) in zip(tensors, found, strict=True):
                self._check_place(item, offset, num_bytes)

        self._require("all_gather", check)
        session, backend = self._session, self._context.backend
        session.calls, session.offset = session.calls + 1, used[0]
        event = self._start(session, tensors, places)
        out = [
            self._part(offset, num_bytes).view(item.dtype).view(backend.num_ranks, *item.shape)
            for item, (offset, num_bytes) in zip(tensors, places, strict=True)
        ]

        def handle() -> None:
            self._context.check_open()
            if session.ended:
                raise UsageError(
                    f"the handle of an all_gather of session {session.number}, which has ended",
                    allowed="its own session",
                    fix="call the handle, and use or copy the result, before the session ends",
                )
            event.current_stream_wait()

        return out, handle

    def _start(self, session: _Session, tensors: list[torch.Tensor], places: list[tuple[int, int]]) -> EventHandle:
        """Queues the comparison and the transfer of one all-gather."""
        backend, region, others = self._context.backend, self._region, self._context.others()
        assert region is not None
        where = f"all_gather {session.calls} of session {session.number}"
        check = None
        if self._context.host_checked:
            told = ",".join(str(num_bytes) for _, num_bytes in places)
            settings = {
                "session": session.number,
                "all_gather": session.calls,
                "num_tensors": len(places),
                "tensor_bytes": sum(num_bytes for _, num_bytes in places),
                "tensor_sizes": zlib.crc32(told.encode()),
            }
            check = backend.agree("all_gather", settings)

        def work() -> None:
            with trace.span("all_gather", "ep", lane="ep", bytes=sum(num_bytes for _, num_bytes in places)):
                for item, (offset, num_bytes) in zip(tensors, places, strict=True):
                    own = self._part(offset, num_bytes, backend.rank)
                    if own.data_ptr() != item.data_ptr():
                        own.copy_(raw(item))
                    region.put(where, _LANE, others, offset + backend.rank * num_bytes, own)
                for offset, num_bytes in places:
                    for peer in others:
                        at = offset + peer * num_bytes
                        region.take(where, _LANE, peer, at, self._part(offset, num_bytes, peer))

        def failed(error: BaseException) -> None:
            session.spoiled = True
            backend.note_failure(error)

        return backend.queue.submit(work, host_check=check, tensors=[*tensors, region.local], on_failure=failed)

    def _part(self, offset: int, num_bytes: int, rank: int | None = None) -> torch.Tensor:
        """The bytes of one rank, or of all, in a place of the buffer."""
        assert self._region is not None
        if rank is None:
            return self._region.local[offset : offset + self._context.backend.num_ranks * num_bytes]
        return self._region.local[offset + rank * num_bytes : offset + (rank + 1) * num_bytes]

    def _places(self, tensor_bytes: list[int]) -> tuple[list[tuple[int, int]], int]:
        """(offset, bytes a rank) of the next places, and the offset behind them."""
        assert self._region is not None
        session, num_ranks, at, found = self._session, self._context.backend.num_ranks, self._session.offset, []
        for num_bytes in tensor_bytes:
            found.append((at, num_bytes))
            at += sizes.session_bytes([num_bytes], num_ranks)
        if session.calls >= self._max_calls:
            raise UsageError(
                f"all_gather {session.calls + 1} of a session", allowed=f"{self._max_calls}", fix="end the session"
            )
        if at > self._region.num_bytes:
            raise UsageError(
                f"{at} bytes in a session", allowed=f"{self._region.num_bytes}", fix="end the session or raise the size"
            )
        return found, at

    def _check_place(self, item: torch.Tensor, offset: int, num_bytes: int) -> None:
        """Tensors of the buffer must be this rank's part of the place that they are gathered to."""
        assert self._region is not None
        first = item.data_ptr() - self._region.local.data_ptr()
        wanted = offset + self._context.backend.rank * num_bytes
        if num_bytes and -num_bytes < first < self._region.num_bytes and first != wanted:
            raise UsageError(
                f"a tensor at byte {first} of the buffer",
                allowed=f"byte {wanted}, the next place, or other memory",
                fix="gather in-place tensors in the order in which they were handed out",
            )

    def _check_open(self) -> None:
        if self._session.ended:
            raise UsageError("a call without a session", allowed="in a session", fix="call create_agrs_session first")

    def _check_good(self) -> None:
        if self._session.spoiled:
            raise UsageError(
                f"a call in session {self._session.number}, in which one was refused",
                allowed="a new session",
                fix="call destroy_agrs_session and create_agrs_session on all ranks",
            )

    def _require(self, op: str, check: Callable[[], None]) -> None:
        """A mistake in a session spoils it, as the other ranks go on."""
        try:
            self._context.require(op, check)
        except UsageError:
            self._session.spoiled = True
            raise

    def _compare(self, op: str, session: _Session) -> None:
        if self._context.host_checked:
            self._context.backend.agree(op, {"session": session.number}).synchronize()


def is_batch(shapes: Any) -> bool:
    """True for a sequence of shapes, False for one shape."""
    return len(shapes) > 0 and not isinstance(shapes[0], int)


def shapes_of(shapes: Any) -> list[Shape]:
    """One shape or several, as a list."""
    found: list[Shape] = [tuple(shape) for shape in shapes] if is_batch(shapes) else [tuple(shapes)]
    for shape in found:
        for size in shape:
            validate.whole("a size in shapes", size, least=0)
    return found
