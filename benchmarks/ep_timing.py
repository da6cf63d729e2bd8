"""How an operation is timed: by device events around all that it puts on the device, the same for every row.

Launching from Python takes longer than many an operation, and ranks come out of a host barrier apart from each other.
So each sample begins with a delay on the device, behind which the host issues everything, and a barrier between the
devices, behind which the ranks start together:

    stream of the caller:  delay | barrier | start event | operation ... | end event

The operation runs on the comm stream, as in a program; the two changes of stream are part of its time. A sample whose
start event has passed before all was issued does not count; where that is half of them, the delay is made longer and
the series repeated. The time of a sample is that of the slowest rank, the result is the median of the samples.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from comm_core import ElasticBuffer
from comm_core.kernels import library as abi
from comm_core.runtime import device as devices
from comm_core.runtime.errors import CommError

_SLACK_SECONDS = 300e-6
_LONGEST_DELAY = 0.2
_ATTEMPTS = 6


def gathered(value: Any) -> list[Any]:
    """A value of each rank, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@dataclass
class Timer:
    """Times calls of one buffer's ranks.

    Attributes:
        buffer: whose ranks start together.
        repeats: samples of a series.
        warmup: calls before it.
    """

    buffer: ElasticBuffer
    repeats: int
    warmup: int
    _channel: Any = field(init=False)

    def __post_init__(self) -> None:
        self._channel = self.buffer._backend._channel  # type: ignore[attr-defined]

    @property
    def num_sms(self) -> int:
        """Multiprocessors of the device."""
        return int(self._channel.num_sms)

    def series(self, call: Callable[[], Any], *, calls: int = 1, waits: bool = False) -> tuple[float, Any]:
        """Microseconds of a call, and what the last one returned. Collective.

        Args:
            call: issues the operation to the current stream.
            calls: how many of them stand between the events, for operations of a few microseconds.
            waits: the host waits in the call, so that its launches can not all be issued ahead.

        Raises:
            CommError: the host is too slow to issue the calls ahead, whatever the delay.
        """
        delay = max(gathered(self._issue_seconds(call, calls))) * 2 + _SLACK_SECONDS
        for _ in range(_ATTEMPTS):
            samples, last = [], None
            with _no_collection():
                for _ in range(self.repeats):
                    last = None  # its memory is free for the next
                    took, late, last = self._sample(call, calls, min(delay, _LONGEST_DELAY))
                    samples.append((took, late and not waits))
            by_sample = list(zip(*gathered(samples), strict=True))
            slowest = [max(took for took, _ in ranks) for ranks in by_sample if not any(late for _, late in ranks)]
            if len(slowest) * 2 > self.repeats:
                return statistics.median(slowest), last
            delay *= 2
        raise CommError(f"a call takes the host longer to issue than {_LONGEST_DELAY:g} s; is the machine busy?")

    def _issue_seconds(self, call: Callable[[], Any], calls: int) -> float:
        """The longest time the host took to issue a sample's calls, of some that warm up."""
        longest = 0.0
        for turn in range(max(2, self.warmup)):
            devices.synchronize(self.buffer.device)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if turn:  # the first compiles, allocates, grows
                longest = max(longest, time.perf_counter() - start)
        return longest

    def _sample(self, call: Callable[[], Any], calls: int, delay: float) -> tuple[float, bool, Any]:
        """(microseconds a call on this rank, the device was ahead of the host, what the last call returned)."""
        device = self.buffer.device
        start, end = devices.new_event(device, timing=True), devices.new_event(device, timing=True)
        devices.synchronize(device)
        dist.barrier()
        stream = devices.raw_stream(devices.current_stream(device))
        self._channel.library.delay(int(delay * self._channel.ticks_per_second), stream)
        self.buffer._backend.barrier().current_stream_wait()
        start.record()
        for _ in range(calls):
            answer = call()
        end.record()
        late = bool(start.query())
        devices.synchronize(device)
        return float(start.elapsed_time(end)) * 1e3 / calls, late, answer


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector does not stop the host in the middle of a sample."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def launches(buffer: ElasticBuffer) -> Iterator[dict[str, int]]:
    """A table of what is launched: operation of the library to blocks of its widest kernel, at most one an SM."""
    channel: Any = buffer._backend._channel  # type: ignore[attr-defined]
    library = channel.library
    launch, seen = library.launch, dict[str, int]()

    def noted(name: str, call: Any, *rest: Any) -> Any:
        blocks = int(getattr(call, "num_sms", 0) or getattr(call, "num_blocks", 1))
        if name == "layout":  # two for each block of tokens, those that receive, and one for the host
            blocks += 1 + 2 * max(1, -(-int(call.layout.num_tokens) // abi.TOKENS))
        seen[name] = max(seen.get(name, 0), min(blocks, channel.num_sms))
        return launch(name, call, *rest)

    together = library.combine_reduced

    def noted_together(call: Any, lay: Any, stream: int) -> Any:
        seen["combine"] = min(int(call.num_sms) + int(lay.num_sms), channel.num_sms)
        return together(call, lay, stream)

    library.launch, library.combine_reduced = noted, noted_together
    try:
        yield seen
    finally:
        del library.launch, library.combine_reduced


def captured(device: torch.device, call: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of a call, and the outputs that each replay fills. The call must have run before."""
    module: Any = devices.accelerator(device.type)
    devices.synchronize(device)
    graph = module.CUDAGraph() if hasattr(module, "CUDAGraph") else module.MUSAGraph()
    with module.graph(graph):
        outputs = call()
    return graph, outputs
