"""Who did what, when: spans of one process, written as Chrome trace events.

    recorder = trace.Recorder(rank=0)
    with trace.recording(recorder):
        with trace.span("dispatch", "ep", num_tokens=512):
            ...
    recorder.events()      # dictionaries for a Chrome trace / Perfetto file, times in microseconds

Spans cost nothing while no recorder is active. On the CPU a span is the time between entry and exit. On an
accelerator it is measured by two device events on the stream that is current in the span, and placed on the host's
clock through one synchronised reference, so that it shows when the work ran and not when it was issued.
The clock is `time.monotonic_ns`, which all processes of a Linux host share.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from comm_core.runtime import device as devices


@dataclass(slots=True)
class Span:
    """One piece of work of one thread: times in microseconds of `time.monotonic_ns`."""

    name: str
    category: str
    lane: str
    start_us: float
    end_us: float
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Pending:
    """A span between two device events, resolved when the recorder is read."""

    name: str
    category: str
    lane: str
    start: Any
    end: Any
    args: dict[str, Any]


class Recorder:
    """Collects the spans of one process; safe to use from several threads.

    Args:
        rank: the process number written to the trace ("pid").
        device: an accelerator device switches to device-event timing.
    """

    def __init__(self, rank: int, device: torch.device | None = None) -> None:
        self.rank = rank
        self._device = device if device is not None and device.type != "cpu" else None
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._pending: list[_Pending] = []
        if self._device is not None:
            devices.synchronize(self._device)
            self._reference = devices.new_event(self._device, timing=True)
            self._reference.record()
            devices.synchronize(self._device)
            self._reference_us = time.monotonic_ns() / 1e3

    @contextlib.contextmanager
    def span(
        self, name: str, category: str, *, lane: str | None = None, on_host: bool = False, **args: Any
    ) -> Iterator[None]:
        """Records the body as one span.

        Args:
            name: what was done.
            category: the family it belongs to, such as "ep".
            lane: the row it is drawn in; the thread's name by default.
            on_host: time it by the host's clock on an accelerator too, for work that the host does.
            args: what else to know of it, plain values.
        """
        lane = lane or threading.current_thread().name
        if self._device is None or on_host:
            start = time.monotonic_ns()
            try:
                yield
            finally:
                end = time.monotonic_ns()
                with self._lock:
                    self._spans.append(Span(name, category, lane, start / 1e3, end / 1e3, args))
            return
        begin = devices.new_event(self._device, timing=True)
        begin.record()
        try:
            yield
        finally:
            finish = devices.new_event(self._device, timing=True)
            finish.record()
            with self._lock:
                self._pending.append(_Pending(name, category, lane, begin, finish, args))

    def spans(self) -> list[Span]:
        """All spans so far, in order of their start; waits for the device where events are pending."""
        if self._device is not None:
            devices.synchronize(self._device)
        with self._lock:
            for item in self._pending:
                start = self._reference_us + self._reference.elapsed_time(item.start) * 1e3
                end = self._reference_us + self._reference.elapsed_time(item.end) * 1e3
                self._spans.append(Span(item.name, item.category, item.lane, start, end, item.args))
            self._pending.clear()
            return sorted(self._spans, key=lambda span: span.start_us)

    def events(self) -> list[dict[str, Any]]:
        """The spans as complete events ("ph": "X") of the Chrome trace format."""
        return [
            {
                "name": span.name,
                "cat": span.category,
                "ph": "X",
                "pid": self.rank,
                "tid": span.lane,
                "ts": span.start_us,
                "dur": span.end_us - span.start_us,
                "args": span.args,
            }
            for span in self.spans()
        ]


_active: Recorder | None = None


def active() -> Recorder | None:
    """The recorder that spans go to now, if any."""
    return _active


@contextlib.contextmanager
def recording(recorder: Recorder | None) -> Iterator[Recorder | None]:
    """Sends the spans of every thread of this process to `recorder` while the body runs; None records nothing."""
    global _active
    before, _active = _active, recorder
    try:
        yield recorder
    finally:
        _active = before


def span(
    name: str, category: str, *, lane: str | None = None, on_host: bool = False, **args: Any
) -> contextlib.AbstractContextManager[None]:
    """A span in the active recorder (see `Recorder.span`); a null context where none is active."""
    recorder = _active
    if recorder is None:
        return contextlib.nullcontext()
    return recorder.span(name, category, lane=lane, on_host=on_host, **args)
