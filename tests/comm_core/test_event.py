"""Events and the comm queue on the CPU: order, dependencies, errors, hooks; one process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from comm_core import EventHandle, EventOverlap
from comm_core.event import CommQueue, as_handle
from comm_core.runtime import device as devices
from comm_core.runtime.errors import ClosedError, CommError, UsageError

CPU = torch.device("cpu")


@pytest.fixture
def queue() -> Iterator[CommQueue]:
    queue = CommQueue(CPU, "test-queue")
    yield queue
    assert queue.close(5.0)


def test_work_runs_in_order_in_its_thread_without_gradients(queue: CommQueue) -> None:
    seen: list[object] = []
    events = [queue.submit(lambda i=i: seen.append(i)) for i in range(50)]
    last = queue.submit(lambda: (threading.current_thread().name, torch.is_grad_enabled()))
    assert last.result() == ("test-queue", False)
    assert seen == list(range(50))
    assert all(event.query() for event in events)
    assert torch.is_grad_enabled()


def test_reading_before_the_event_is_incomplete(queue: CommQueue) -> None:
    gate = threading.Event()
    out = torch.zeros(4)
    event = queue.submit(lambda: (gate.wait(10), out.fill_(7.0)))
    wrong = EventOverlap(EventHandle())  # recorded on the caller's stream: says nothing about the queue
    wrong.current_stream_wait()
    assert not event.query()
    assert out.sum() == 0
    gate.set()
    EventOverlap(event).current_stream_wait()
    assert event.query()
    assert out.sum() == 28


def test_work_waits_for_its_dependencies(queue: CommQueue) -> None:
    gate = threading.Event()
    other = CommQueue(CPU, "other-queue")
    first = other.submit(lambda: gate.wait(10))
    second = queue.submit(lambda: gate.is_set(), after=[None, first])
    time.sleep(0.05)
    assert not second.query()
    gate.set()
    assert second.result() is True
    other.close(5.0)


def test_failures_reach_everyone_who_depends(queue: CommQueue) -> None:
    noted: list[BaseException] = []

    def fail() -> None:
        raise CommError("planted")

    event = queue.submit(fail, on_failure=noted.append)
    ran: list[int] = []
    behind = queue.submit(lambda: ran.append(1), after=[event], on_failure=noted.append)
    checked = queue.submit(lambda: ran.append(2), host_check=event)
    free = queue.submit(lambda: ran.append(3))
    for item in (event, behind, checked):
        with pytest.raises(CommError, match="planted"):
            item.current_stream_wait()
    free.synchronize()
    assert ran == [3]
    assert [str(error) for error in noted] == ["planted", "planted"]


def test_a_host_queue_computes_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[tuple[str, object]] = []

    @contextlib.contextmanager
    def use_stream(device: torch.device, stream: object) -> Iterator[None]:
        entered.append((threading.current_thread().name, (device.type, stream)))
        yield
        entered.append((threading.current_thread().name, "left"))

    monkeypatch.setattr(devices, "use_stream", use_stream)
    monkeypatch.setattr(devices, "new_stream", lambda device, priority: f"stream {priority}")
    queue = CommQueue(CPU, "with stream", uses=torch.device("meta"))
    assert queue.submit(lambda: list(entered)).result() == [("with stream", ("meta", "stream -1"))]
    assert queue.close(5.0)
    assert entered[1:] == [("with stream", "left")]


def test_waiting_leaves_other_threads_running(queue: CommQueue) -> None:
    gate, ticks = threading.Event(), 0
    event = queue.submit(lambda: gate.wait(10))
    waiter = threading.Thread(target=event.current_stream_wait)
    waiter.start()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        ticks += 1
    gate.set()
    waiter.join(5)
    assert ticks > 1000


def test_overlap_runs_one_hook_after_the_wait(queue: CommQueue) -> None:
    order: list[str] = []
    overlap = EventOverlap(queue.submit(lambda: order.append("work")), (torch.zeros(1),))
    overlap.register_hook_after_wait(lambda: order.append("hook"))
    with pytest.raises(UsageError, match="second hook"):
        overlap.register_hook_after_wait(lambda: None)
    with overlap as same:
        assert same is overlap
    assert order == ["work", "hook"]
    assert overlap(release_handle=True) is overlap
    assert order == ["work", "hook"]
    assert overlap.event is None
    assert overlap.extra_tensors is None
    overlap.register_hook_after_wait(lambda: order.append("again"))
    overlap.current_stream_wait()
    assert order[-1] == "again"


def test_a_failed_block_is_not_hidden_by_the_wait(queue: CommQueue) -> None:
    def fail() -> None:
        raise CommError("of the queue")

    with pytest.raises(ZeroDivisionError), EventOverlap(queue.submit(fail)):
        raise ZeroDivisionError
    with pytest.raises(CommError, match="of the queue"), EventOverlap(queue.submit(fail)):
        pass


def test_either_class_is_accepted_as_previous_event() -> None:
    handle = EventHandle()
    assert as_handle(handle) is handle
    assert as_handle(EventOverlap(handle)) is handle
    assert as_handle(EventOverlap()) is None
    assert as_handle(None) is None
    assert handle.query()
    assert handle.result() is None


def test_a_closed_queue_finishes_what_it_has_and_takes_no_more() -> None:
    queue = CommQueue(CPU, "closing")
    slow = queue.submit(lambda: time.sleep(0.3) or "done")
    assert not queue.close(0.0)
    with pytest.raises(ClosedError):
        queue.submit(lambda: None)
    assert queue.close(5.0)
    assert slow.result() == "done"
    assert "closing" not in [thread.name for thread in threading.enumerate()]


def test_a_closing_queue_can_drop_what_has_not_begun() -> None:
    queue, gate = CommQueue(CPU, "dropping"), threading.Event()
    under_way = queue.submit(lambda: gate.wait(10))
    waiting = queue.submit(lambda: None)
    time.sleep(0.05)
    queue.close(0.0, drop=True)
    gate.set()
    assert queue.close(5.0)
    assert under_way.result() is True
    with pytest.raises(ClosedError, match="before this work began"):
        waiting.synchronize()


PROGRAM = """
import sys, torch
from comm_core.event import CommQueue
x = torch.ones(1200, 1200)
queue = CommQueue(torch.device("cpu"), "left open")
for _ in range(200):
    queue.submit(lambda: x @ x)
sys.exit(3)
"""


def test_a_program_that_leaves_a_queue_open_keeps_its_exit_code() -> None:
    root = str(Path(__file__).resolve().parents[2])
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (3, "")
