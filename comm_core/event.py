"""Events and the comm queue: the one seam between "a background thread" and "a side stream".

A communication call must be able to run beside computation. On an accelerator that is a second stream and device
events; on the CPU it is a second thread and a future. Everything above this file is written once against two words:

    event = queue.submit(fn, after=[previous])    # fn runs behind all earlier work of the queue and behind `previous`
    event.current_stream_wait()                   # what the caller does next sees the results of fn

A "stream" of the CPU is the calling thread: its work up to now is done, so an event recorded there is complete, and
waiting for an event blocks the thread (the interpreter lock is released meanwhile). Waits are bounded because each
piece of work of a queue is: a failed collective ends by its timeout and everything behind it fails at once.

Verified: the CPU path, by tests/comm_core; the stream path on CUDA, by the tests marked gpu on two H200. On MUSA it is
prepared: `runtime/device.py` alone names the device module.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from comm_core.runtime import device as devices
from comm_core.runtime import env
from comm_core.runtime.errors import ClosedError, UsageError


class EventHandle:
    """A point in the work of a stream or of a comm queue.

    `EventHandle()` records the current point of the current stream, as in DeepEP. Queues make the other kind.

    Args:
        device: whose current stream is recorded; the accelerator this process uses, else the CPU.
        stream: the stream of the device that is recorded, where it is known: asking for the current one takes longer
            than recording.

    Attributes:
        number: of the call whose work this is, where that is known at once.
    """

    number: int | None = None

    @property
    def expert_starts(self) -> torch.Tensor | None:
        """Of a layout that a device made: `EPHandle.expert_starts`. None of other work."""
        return None

    @property
    def expert_counts(self) -> torch.Tensor | None:
        """Of a layout that a device made: `EPHandle.expert_counts`. None of other work."""
        return None

    def __init__(self, device: torch.device | None = None, stream: Any = None) -> None:
        self._device = device if device is not None else devices.current()
        self._future: Future[Any] | None = None
        self._event: Any = None
        if self._device.type != "cpu":
            self._event = devices.new_event(self._device)
            self._event.record(devices.current_stream(self._device) if stream is None else stream)

    @classmethod
    def of_future(cls, future: Future[Any]) -> EventHandle:
        """An event that is complete when `future` is; its exception is raised by every wait."""
        event = cls(torch.device("cpu"))
        event._future = future
        return event

    def query(self) -> bool:
        """True when the work is done (or failed); does not wait."""
        if self._future is not None:
            return self._future.done()
        return bool(self._event.query()) if self._event is not None else True

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for this point; on the CPU blocks the calling thread.

        Raises:
            MTMoEError: the error that ended the work, if it failed.
        """
        self.stream_wait(None)

    def stream_wait(self, stream: Any) -> None:
        """The same for a stream of the device; None is the current one."""
        if self._future is not None:
            self._future.result()
        elif self._event is not None:
            (devices.current_stream(self._device) if stream is None else stream).wait_event(self._event)

    def synchronize(self) -> None:
        """Blocks the calling thread until the work is done, whatever the device; raises its error."""
        if self._future is not None:
            self._future.result()
        elif self._event is not None:
            self._event.synchronize()

    def result(self) -> Any:
        """Waits for work of a host queue and returns what its function returned; None for other events."""
        self.synchronize()
        return None if self._future is None else self._future.result()


class EventOverlap:
    """What an asynchronous call returns: wait for it where its results are used.

        recv_x, ..., handle, event = buffer.dispatch(..., async_with_compute_stream=True)
        with event:
            independent_computation()      # overlaps; the wait happens at the end of the block

    Args:
        event: the event; None for a call that was complete when it returned, where waiting does nothing.
        extra_tensors: tensors kept alive until this object goes.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hook: Callable[[], Any] | None = None

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Calls `hook()` once, right after the next wait. One hook at a time.

        Raises:
            UsageError: a hook is already registered.
        """
        if self._hook is not None:
            raise UsageError(
                "a second hook for one event", allowed="one hook until the wait", fix="call both from one function"
            )
        self._hook = hook

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream (on the CPU: the calling thread) wait, then runs the hook.

        Args:
            release_handle: also drop the event and the tensors it keeps alive.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
        if release_handle:
            self.event, self.extra_tensors = None, None

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Waits and returns itself."""
        self.current_stream_wait(release_handle)
        return self

    def __enter__(self) -> EventOverlap:
        """Starts the block that overlaps with the communication."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits at the end of the block, unless the block itself failed."""
        if kind is None and self.event is not None:
            self.current_stream_wait()


def as_handle(event: EventHandle | EventOverlap | None) -> EventHandle | None:
    """Both event classes are accepted wherever DeepEP takes one of them (V1 and V2 differ in which)."""
    return event.event if isinstance(event, EventOverlap) else event


def check_events(previous_event: Any, previous_event_before_epilogue: Any = None) -> None:
    """Raises UsageError for what a call can not wait for."""
    given = {"previous_event": previous_event, "previous_event_before_epilogue": previous_event_before_epilogue}
    for name, value in given.items():
        if value is not None and not isinstance(value, EventHandle | EventOverlap):
            raise UsageError(
                f"{name} is a {type(value).__name__}",
                allowed="None, an EventHandle or an EventOverlap",
                fix="pass buffer.capture() or what a call returned",
            )


# Queues whose thread may be inside torch: it must be out before the interpreter goes, or the process aborts.
_running: weakref.WeakSet[CommQueue] = weakref.WeakSet()
_EXIT_SECONDS = 2.0


def _finish_running() -> None:
    """At exit, for programs that end without close(): time for the work queued, then for the piece under way."""
    for drop in (False, True):
        end = time.monotonic() + _EXIT_SECONDS
        for queue_ in list(_running):
            queue_.close(max(0.0, end - time.monotonic()), drop=drop)


class CommQueue:
    """Runs functions one after the other beside the caller: a thread on the CPU, a side stream on an accelerator.

    Args:
        device: where the work runs.
        name: name of the thread.
        uses: for a host queue (`device` is the CPU), an accelerator that its functions compute on: the thread has it
            as its current device and a stream of its own there, so that no work lands on the caller's stream.
    """

    def __init__(self, device: torch.device, name: str, *, uses: torch.device | None = None) -> None:
        self.device = device
        self._uses = None if uses is None or uses.type == "cpu" else uses
        self._closed = self._dropping = False
        self._pid = os.getpid()
        self._stream: Any = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._held: deque[tuple[EventHandle, tuple[torch.Tensor, ...]]] = deque()
        if device.type != "cpu":
            self._stream = devices.new_stream(device, priority=-1)
        else:
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()
            if not _running:
                atexit.unregister(_finish_running)
                atexit.register(_finish_running)
            _running.add(self)

    @property
    def stream(self) -> Any:
        """The side stream; None where a thread takes its place."""
        return self._stream

    def submit(
        self,
        fn: Callable[[], Any],
        *,
        after: Iterable[EventHandle | None] = (),
        host_check: EventHandle | None = None,
        tensors: Sequence[torch.Tensor] = (),
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> EventHandle:
        """Queues `fn` behind all earlier work of this queue.

        Args:
            fn: called without arguments under no_grad, and in inference mode where the caller is (its tensors may be
                written in no other): in the thread (CPU), or now with the side stream current.
            after: events whose work must be done first; without any, an accelerator waits for the current stream.
                An event that failed fails this work with the same error, and `fn` is not called.
            host_check: an event of a host queue with the same meaning, which a side stream does not wait for
                (that would stall the host): there its failure is reported by whoever submitted it.
            tensors: what `fn` reads and writes; kept from reuse until the side stream is past it (by record_stream,
                or with EP_AVOID_RECORD_STREAM=1 by reference until a later call finds the work done).
            on_failure: called with the error, before anyone who waits sees it, where `fn` or an event failed.
        """
        if self._closed:
            raise ClosedError("the comm queue is closed; build a new buffer on every rank of its group")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"process {os.getpid()} was forked from process {self._pid}, whose threads and connections it does not "
                "have; build a buffer in each process, on a group of its own"
            )
        events = tuple(event for event in after if event is not None)
        if self._stream is None:
            future: Future[Any] = Future()
            waits = (*events, host_check) if host_check is not None else events
            self._jobs.put(_Job(fn, waits, future, on_failure, torch.is_inference_mode_enabled()))
            return EventHandle.of_future(future)
        try:
            if not events:
                self._stream.wait_stream(devices.current_stream(self.device))
            for event in events:
                event.stream_wait(self._stream)
            with devices.use_stream(self.device, self._stream), torch.no_grad():
                fn()
        except BaseException as error:
            if on_failure is not None:
                on_failure(error)
            raise
        done = EventHandle(self.device, self._stream)
        self._hold(done, tensors)
        return done

    def _hold(self, done: EventHandle, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps memory from reuse until the side stream is past `done`."""
        if not env.avoid_record_stream():
            for tensor in tensors:
                tensor.record_stream(self._stream)
            return
        # By reference instead: the allocator then needs no event of its own, and a peak of memory is not prolonged.
        # (While a graph is recorded, no event may be asked.)
        while self._held and not devices.is_capturing(self.device) and self._held[0][0].query():
            self._held.popleft()
        self._held.append((done, tuple(tensors)))

    def allocating(self, on_queue: bool) -> contextlib.AbstractContextManager[Any]:
        """Context in which new tensors belong to this queue's stream; no difference on the CPU."""
        if on_queue and self._stream is not None:
            context: contextlib.AbstractContextManager[Any] = devices.use_stream(self.device, self._stream)
            return context
        return contextlib.nullcontext()

    def _own_stream(self) -> contextlib.AbstractContextManager[Any]:
        """For the thread of a host queue: a new thread begins on device 0 and its default stream."""
        if self._uses is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = devices.use_stream(
            self._uses, devices.new_stream(self._uses, priority=-1)
        )
        return context

    def close(self, timeout: float, *, drop: bool = False) -> bool:
        """Ends the thread after the work already queued; later submits raise ClosedError. Idempotent.

        Args:
            timeout: seconds to wait for that work.
            drop: finish the piece under way alone; events of the others raise ClosedError.

        Returns:
            False where the thread is still busy; it ends by itself once its work has failed or finished.
        """
        if os.getpid() != self._pid:
            return True  # the thread is the parent's
        self._dropping = self._dropping or drop
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _work(self) -> None:
        with self._own_stream(), torch.no_grad():
            while (job := self._jobs.get()) is not None:
                if self._dropping:
                    job.future.set_exception(ClosedError("the comm queue was closed before this work began"))
                else:
                    job.run()
                # The loop must not keep tensors of the last job alive while it waits for the next one.
                del job


@dataclass(frozen=True, slots=True)
class _Job:
    """Work of a host queue."""

    fn: Callable[[], Any]
    waits: tuple[EventHandle, ...]
    future: Future[Any]
    on_failure: Callable[[BaseException], None] | None
    inference: bool

    def run(self) -> None:
        """Waits for the events, calls the function and completes the future with its result or error."""
        try:
            for event in self.waits:
                event.synchronize()
            # Not inference_mode(False): that would allow gradients.
            with torch.inference_mode() if self.inference else contextlib.nullcontext():
                result = self.fn()
        except BaseException as error:
            if self.on_failure is not None:
                self.on_failure(error)
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
