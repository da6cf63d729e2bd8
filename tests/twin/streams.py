"""Streams and events of the played device: one thread a stream carries its work out in order, behind the caller's back.

Kernels and copies are queued, as on a device: a kernel that waits for another rank keeps its stream, and nobody else.
Operations of torch on tensors of the device wait for the current stream and run at once; their order is checked all the
same (order.py).
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tests.twin.order import Clock, Order, Span

KIND = "musa"
# Waits of the double itself; kernels have their own, shorter ones.
_LONGEST = 120.0
# A default stream has handle 0 on every device, so it needs a number of its own here.
_DEFAULT = 1 << 48


class Point:
    """A point in the work of a stream: what is done when it is reached, and whether it is."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.reached = clock, threading.Event()

    def wait(self) -> None:
        if not self.reached.wait(_LONGEST):
            raise RuntimeError(f"work of the played device has not ended within {_LONGEST:g} s")


class Lane:
    """The work of one stream, and the thread that carries it out. Work that has nothing to wait for needs no thread."""

    def __init__(self, order: Order, number: int) -> None:
        self.order, self.number = order, number
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._pending, self._lock = [0], threading.Lock()
        self.thread = threading.Thread(
            target=self._run, args=(self._work, self._pending, self._lock, order), daemon=True, name=f"lane-{number:#x}"
        )
        self.thread.start()

    def put(self, what: str, spans: Iterable[Span], work: Callable[[], object]) -> Clock:
        """Queues work that accesses `spans`; what is known to be done once it is."""
        clock = self.order.issue(self.number, what, spans)
        self._put(work)
        return clock

    def mark(self) -> Point:
        """The point behind all work queued up to now."""
        point = Point(self.order.issue(self.number, "event"))
        if self._idle():
            point.reached.set()
        else:
            self._put(point.reached.set)
        return point

    def wait_for(self, point: Point) -> None:
        """What is queued from now on comes behind a point of another stream."""
        self.order.learn(self.number, point.clock)
        if not point.reached.is_set():
            self._put(point.wait)

    def synchronize(self) -> None:
        """Waits, on the host, until all work is done."""
        point = self.mark()
        point.wait()
        self.order.host_waited(point.clock)

    def at_once(self, what: str, spans: Iterable[Span]) -> None:
        """Issues work that the caller carries out itself, now that everything before it is done."""
        if not self._idle():
            self.mark().wait()
        self.order.issue(self.number, what, spans)

    def close(self) -> None:
        """Ends the thread behind the work that is queued."""
        self._work.put(None)

    def _idle(self) -> bool:
        with self._lock:
            return self._pending[0] == 0

    def _put(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._pending[0] += 1
        self._work.put(work)

    @staticmethod
    def _run(work: queue.SimpleQueue[Callable[[], object] | None], pending: list[int], lock: Any, order: Order) -> None:
        while (item := work.get()) is not None:
            try:
                item()
            except Exception:
                order.fail(f"work of a stream failed: {traceback.format_exc()}")
            del item
            with lock:
                pending[0] -= 1


class Device:
    """What the process knows of the played devices: streams by their handles, the current ones.

    Attributes:
        order: what was ordered by what.
        count: number of devices.
        handle: name of the attribute of a stream that holds its handle.
        index: of the current device.
        waits: False plants a fault: streams wait for no event.
    """

    def __init__(self, count: int, handle: str) -> None:
        self.order, self.count, self.handle, self.waits = Order(), count, handle, True
        self.index = 0
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._ending: list[Lane] = []
        self._handles = itertools.count(0x7000_0000_1000, 0x40)
        self._current = threading.local()
        # Streams may end, which is noted here, whenever Python collects them: also in the middle of a change.
        self._lock = threading.RLock()

    def lane(self, index: int, handle: int) -> Lane:
        """The stream of a device with a handle; 0 is its default stream."""
        with self._lock:
            key = (index, handle)
            if handle == 0 and key not in self._lanes:
                self._lanes[key] = Lane(self.order, _DEFAULT + index)
            if key not in self._lanes:
                raise RuntimeError(f"invalid resource handle: no stream {handle:#x} on {KIND}:{index}")
            return self._lanes[key]

    def new_handle(self, index: int) -> int:
        """A new stream."""
        with self._lock:
            handle = next(self._handles)
            self._lanes[index, handle] = Lane(self.order, handle)
            return handle

    def drop(self, index: int, handle: int) -> None:
        """Ends a stream that no object stands for any more."""
        with self._lock:
            lane = self._lanes.pop((index, handle), None)
            self._ending = [item for item in self._ending if item.thread.is_alive()]
            if lane is not None:
                lane.close()
                self._ending.append(lane)

    def lanes(self, index: int) -> list[Lane]:
        """All streams of a device."""
        with self._lock:
            return [lane for (where, _), lane in self._lanes.items() if where == index]

    def current(self, index: int) -> Stream:
        """The current stream of this thread."""
        stream = getattr(self._current, "streams", {}).get(index)
        return stream if stream is not None else Stream(self, index, 0)

    @contextlib.contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        """Context in which a stream is this thread's current one, and its device the current device."""
        if stream is None:
            yield
            return
        before, index = dict(getattr(self._current, "streams", {})), self.index
        self._current.streams = {**before, stream.device.index: stream}
        self.index = stream.device.index
        try:
            yield
        finally:
            self._current.streams, self.index = before, index

    def synchronize(self, index: int) -> None:
        """Waits for all work of a device."""
        for lane in self.lanes(index):
            lane.synchronize()

    def close(self) -> None:
        """Ends all threads, each behind its work."""
        with self._lock:
            lanes = [*self._ending, *self._lanes.values()]
            for lane in self._lanes.values():
                lane.close()
            self._lanes.clear()
        for lane in lanes:
            lane.thread.join(_LONGEST)


class Stream:
    """torch.musa.Stream. Its handle is an attribute whose name is that of the vendor (`musa_stream`)."""

    def __init__(self, device: Device, index: int, handle: int | None = None) -> None:
        self._device, self.device = device, torch.device(KIND, index)
        self._handle = device.new_handle(index) if handle is None else handle
        if handle is None:
            weakref.finalize(self, device.drop, index, self._handle)

    def __getattr__(self, name: str) -> Any:
        if name == self._device.handle:
            return self._handle
        raise AttributeError(f"streams of the played device have no {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self._handle) == (other.device, other._handle)

    def __hash__(self) -> int:
        return hash((self.device, self._handle))

    @property
    def lane(self) -> Lane:
        return self._device.lane(self.device.index, self._handle)

    def wait_event(self, event: Event) -> None:
        if event.point is not None and self._device.waits:
            self.lane.wait_for(event.point)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._device)
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        self.lane.synchronize()


class Event:
    """torch.musa.Event."""

    def __init__(self, device: Device, enable_timing: bool = False) -> None:
        self._device, self._timing = device, enable_timing
        self.point: Point | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._device.current(self._device.index)
        self.point = stream.lane.mark()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current(self._device.index)).wait_event(self)

    def query(self) -> bool:
        if self.point is None or not self.point.reached.is_set():
            return self.point is None
        self._device.order.host_waited(self.point.clock)
        return True

    def synchronize(self) -> None:
        if self.point is not None:
            self.point.wait()
            self._device.order.host_waited(self.point.clock)
