"""Which work is behind which: every access to device memory must be ordered by streams, events and waits.

Each stream numbers its work. What a stream, an event or the host knows to be done is a mapping from streams to numbers
(a vector clock); events carry it from one to another. An access to memory that another stream accesses, one of the two
a write, must know of that other work. Nothing here depends on time: work that happened to be done in time, but that
nothing ordered, is reported as well.

The host has one clock for all its threads: what one thread has waited for counts as known by all.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

Clock = dict[int, int]
# Files of the double, and of torch.
_OWN = (f"{Path(__file__).parent}/", f"{Path(torch.__file__).parent}/")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that a piece of work accesses."""

    start: int
    num_bytes: int
    write: bool

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


@dataclass(frozen=True, slots=True)
class Access:
    """A span, and the work that accesses it."""

    span: Span
    stream: int
    number: int
    what: str


@dataclass
class Order:
    """The clocks of all streams, the accesses that the host has not waited for, and what was found wrong."""

    host: Clock = field(default_factory=dict)
    streams: dict[int, Clock] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _accesses: list[Access] = field(default_factory=list)
    # Memory of torch that is in use: whose stream's, and what that stream had been given when it was allocated.
    _born: dict[int, tuple[Span, int, int]] = field(default_factory=dict)
    # Memory may be freed, which is checked here, whenever Python collects it: also in the middle of a check.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def issue(self, stream: int, what: str, spans: Iterable[Span] = ()) -> Clock:
        """The next work of a stream: what it knows to be done, itself included."""
        with self._lock:
            clock = self.streams.setdefault(stream, {})
            learn(clock, self.host)
            clock[stream] = clock.get(stream, 0) + 1
            what = f"{what} ({_caller()})"
            fresh = [Access(span, stream, clock[stream], what) for span in spans if span.num_bytes > 0]
            for mine in fresh:
                for other in list(self._accesses):
                    if _clash(mine, other) and not _knows(clock, other):
                        self.fail(f"{_told(mine)}, {_told(other)}: nothing orders them")
                self._check_born(mine, clock)
            self._accesses += fresh
            return dict(clock)

    def _check_born(self, mine: Access, clock: Clock) -> None:
        """Memory may have been another tensor's before: who uses it must be behind what its stream did until then."""
        for span, owner, number in list(self._born.values()):
            if owner != mine.stream and _overlap(mine.span, span) and clock.get(owner, 0) < number:
                self.fail(f"{_told(mine)}, allocated by stream {owner:#x}, whose earlier work it does not wait for")

    def allocated(self, start: int, num_bytes: int, owner: int) -> None:
        """torch has given memory to a tensor of a stream."""
        with self._lock:
            if num_bytes:
                number = self.streams.get(owner, {}).get(owner, 0)
                self._born[start] = Span(start, num_bytes, True), owner, number

    def learn(self, stream: int, clock: Clock) -> None:
        """What follows on a stream is behind all that `clock` knows."""
        with self._lock:
            learn(self.streams.setdefault(stream, {}), clock)

    def host_waited(self, clock: Clock) -> None:
        """The host has waited for all that `clock` knows."""
        with self._lock:
            learn(self.host, clock)
            self._accesses = [item for item in self._accesses if not _knows(self.host, item)]

    def freed(self, start: int, num_bytes: int, owner: int, recorded: set[int]) -> None:
        """torch may use this memory again behind the work of stream `owner`, and of those it was recorded on."""
        with self._lock:
            gone = Span(start, num_bytes, True)
            self._born.pop(start, None)
            clock = learn(dict(self.streams.get(owner, {})), self.host)
            for item in list(self._accesses):
                if _overlap(item.span, gone) and item.stream not in {owner, *recorded} and not _knows(clock, item):
                    self.fail(f"memory of stream {owner:#x} is freed, not recorded on another: {_told(item)}")
            self._accesses = [item for item in self._accesses if not _overlap(item.span, gone)]

    def fail(self, text: str) -> None:
        """Notes what was found wrong."""
        with self._lock:
            self.failures.append(text)


def learn(clock: Clock, other: Clock) -> Clock:
    """Adds what another clock knows to a clock."""
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
    return clock


def _caller() -> str:
    """Where the code is that asked for the work: the first line outside of the double and of torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _knows(clock: Clock, access: Access) -> bool:
    return clock.get(access.stream, 0) >= access.number


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end


def _clash(one: Access, other: Access) -> bool:
    return one.stream != other.stream and (one.span.write or other.span.write) and _overlap(one.span, other.span)


def _told(access: Access) -> str:
    verb = "writes" if access.span.write else "reads"
    return f"{access.what} on stream {access.stream:#x} {verb} {access.span.num_bytes} bytes at {access.span.start:#x}"
