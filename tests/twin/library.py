"""The kernel library played on the CPU: the methods of comm_core.kernels.library.Library over host memory.

A launch is queued on the stream whose handle it names, and what the kernel reads and writes is checked against the
other streams and against what is memory of the device at all.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from comm_core.kernels import library as abi
from comm_core.runtime.errors import CommError
from tests.twin import blocks, layout, region, rows
from tests.twin.channel import TICKS
from tests.twin.memory import Mapping, Pool, Segments, numbers_at, words
from tests.twin.order import Clock, Span
from tests.twin.streams import Device
from tests.twin.tensors import Memory

_POLL = 50e-6


class TwinLibrary:
    """One library of a process.

    Args:
        device: its streams.
        memory: its tensors.

    Attributes:
        flipped: the debug hook: every layout exchanges two rows.
        launched: names of the kernels launched.
    """

    path = Path("the twin of the kernels")

    def __init__(self, device: Device, memory: Memory) -> None:
        self._device, self._memory = device, memory
        self.flipped = False
        self.launched: list[str] = []
        self._segments = Segments()
        self._pools: dict[int, Pool] = {}
        self._chosen = threading.local()
        # Addresses of mapped host memory: on the device, and on the host.
        self._host_of: dict[int, Mapping] = {}
        # What is known to be done by who has seen a record, by its address on the host.
        self._recorded: dict[int, Clock] = {}

    def alloc(self, device: int, num_bytes: int) -> int:
        self._set(device)
        return self._checked(lambda: self._segments.make(num_bytes)).address

    def free(self, address: int) -> None:
        if self._checked(lambda: self._segments.is_open_elsewhere(address)):
            self._device.order.fail(f"the segment at {address:#x} is freed while another rank has it open")
        self._unmap(address, own=True)

    def share(self, address: int) -> bytes:
        return self._checked(lambda: self._segments.handle(address))

    def open(self, device: int, handle: bytes) -> int:
        self._set(device)
        return self._checked(lambda: self._segments.open(handle)).address

    def close(self, address: int) -> None:
        self._unmap(address, own=False)

    def host_alloc(self, num_bytes: int) -> tuple[int, int]:
        host = self._checked(lambda: self._segments.make(num_bytes))
        seen = self._segments.again(host)
        self._host_of[seen.address] = host
        return host.address, seen.address

    def host_free(self, address: int) -> None:
        device = next((at for at, host in self._host_of.items() if host.address == address), None)
        if device is None:
            raise CommError(f"mt_host_free failed: {address:#x} is no mapped host memory")
        del self._host_of[device]
        self._unmap(device, own=True)
        self._unmap(address, own=True)

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        # Memory of the host that is not mapped is copied before the call returns.
        known = self._is_device(source, num_bytes)
        content = b"" if known else ctypes.string_at(source, num_bytes)
        spans = [Span(to, num_bytes, True), *([Span(source, num_bytes, False)] if known else [])]
        start = source if known else content
        self._queue("copy", spans, stream, lambda: ctypes.memmove(to, start, num_bytes))

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        spans = [Span(address, num_bytes, True)]
        self._queue("clear", spans, stream, lambda: ctypes.memset(address, 0, num_bytes))

    def synchronize(self) -> None:
        self._device.synchronize(self._device.index)

    def properties(self, device: int) -> tuple[int, int]:
        assert 0 <= device < self._device.count
        return 56, TICKS

    def wait_word(self, word: int, fault: int, seconds: float) -> int:
        one = ctypes.c_uint32.from_address(self._host(word))
        other = words(self._host(fault), abi.FAULT_WORDS)
        end = time.monotonic() + seconds
        while not one.value:
            if other[abi.FAULT_SET]:
                return 2
            if other[abi.FAULT_DIFFERENT]:
                return 3
            if time.monotonic() > end:
                return 1
            time.sleep(_POLL)
        self._device.order.host_waited(self._recorded.get(word, {}))
        return 0

    def combine_reduced(self, call: Any, lay: Any, stream: int) -> None:
        self.launch("reduce", lay, stream)
        self.launch("combine", call, stream)

    def launch(self, name: str, call: Any, stream: int) -> None:
        call = type(call).from_buffer_copy(call)  # what a launch is given is its own
        self.launched.append(name)
        if name != "layout":
            self._queue(name, _SPANS[name](self, call), stream, lambda: _KERNELS[name](call))
            return
        # Who has read the record knows what it tells, not that the tables are there.
        handed: queue.SimpleQueue[Clock] = queue.SimpleQueue()
        counted = self._queue(name, _layout_spans(call), stream, lambda: self._count(call, handed))
        handed.put(counted)
        self._recorded[self._on_host(call.record)] = counted
        flipped = self.flipped
        self._queue("layout tables", _table_spans(call), stream, lambda: layout.place(call, flipped))

    def _count(self, call: Any, handed: queue.SimpleQueue[Clock]) -> None:
        """Who is told by the fault record that a layout differs knows that its ids are there, too."""
        if not layout.count(call):
            self._device.order.host_waited(handed.get())

    def launch_half(self, half: str, call: Any, kind: int, sms: int, stream: int) -> None:
        call = type(call).from_buffer_copy(call)
        name = f"{('dispatch', 'combine')[kind]} {half}"
        self.launched.append(name)
        spans = [*blocks.spans(call, half, kind), *_channel(call)]
        self._queue(name, spans, stream, lambda: blocks.run(call, half, kind))

    def ceiling(self, to: int, source: int, num_bytes: int, num_sms: int, stream: int, *, threads: int = 1024) -> None:
        self.copy(to, source, num_bytes, stream)

    def copy_by_kernel(self, to: int, source: int, num_bytes: int, num_sms: int, stream: int) -> None:
        assert num_sms > 0
        self.launched.append("region_copy")
        self.copy(to, source, num_bytes, stream)

    def delay(self, ticks: int, stream: int) -> None:
        self._queue("delay", [], stream, lambda: time.sleep(ticks / TICKS))

    def set_pool(self, index: int, base: int, num_bytes: int) -> None:
        assert 0 <= index < abi.MAX_POOLS
        self._pools.pop(index, None)
        if num_bytes:
            self._pools[index] = Pool(base, num_bytes)

    def choose_pool(self, index: int) -> None:
        self._chosen.pool = self._pools.get(index)

    def placed(self, host: torch.Tensor) -> torch.Tensor:
        """A tensor made like `host` in the pool that this thread has chosen; itself where there is no room or none."""
        pool, num_bytes = getattr(self._chosen, "pool", None), host.untyped_storage().nbytes()
        at = pool.take(num_bytes) if pool is not None and num_bytes else None
        if at is None:
            return host
        memory = numbers_at(at, num_bytes, torch.uint8)
        self._memory.given[at] = lambda: pool.give(at)
        return (
            torch.empty(0, dtype=host.dtype).set_(memory.untyped_storage(), 0, host.size(), host.stride()).copy_(host)
        )

    def _queue(self, what: str, spans: list[Span], stream: int, work: Callable[[], object]) -> Clock:
        for span in spans:
            if span.num_bytes and not self._is_device(span.start, span.num_bytes):
                raise CommError(f"{what}: {span.num_bytes} bytes at {span.start:#x} are no memory of the device")
        blocks = [self._memory.block_of(span.start) for span in spans]
        kept = [block.host for block in blocks if block is not None]

        def held() -> None:
            work()
            kept.clear()

        lane = self._checked(lambda: self._device.lane(self._device.index, stream))
        return lane.put(what, spans, held)

    def _is_device(self, start: int, num_bytes: int) -> bool:
        block = self._memory.block_of(start)
        if block is not None:
            return start + num_bytes <= block.start + block.num_bytes
        on_host = any(host.address <= start < host.address + host.num_bytes for host in self._host_of.values())
        return not on_host and self._segments.holds(start, num_bytes)

    def _rest_of(self, address: int) -> int:
        """Bytes from an address to the end of its tensor; 0 in a segment, where no tensor ends."""
        block = self._memory.block_of(address)
        return 0 if block is None else block.start + block.num_bytes - address

    def _on_host(self, address: int) -> int:
        """Where the host sees an address of mapped memory."""
        start, host = next((at, host) for at, host in self._host_of.items() if at <= address < at + host.num_bytes)
        return host.address + address - start

    def _host(self, address: int) -> int:
        if not any(host.address <= address < host.address + host.num_bytes for host in self._host_of.values()):
            raise CommError(f"the host reads {address:#x}, which is no mapped host memory of the host")
        return address

    def _set(self, device: int) -> None:
        assert 0 <= device < self._device.count, f"invalid device ordinal {device}"
        self._device.index = device

    def _unmap(self, address: int, *, own: bool) -> None:
        self.synchronize()  # as the runtime does
        self._checked(lambda: self._segments.take(address, own=own)).close()

    @staticmethod
    def _checked(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (RuntimeError, OSError) as error:
            raise CommError(f"the played runtime: {error}") from error


_KERNELS: dict[str, Callable[[Any], None]] = {
    "dispatch": rows.dispatch,
    "combine": rows.combine,
    "reduce": rows.reduce,
    "barrier": rows.barrier,
    "region_raise": region.raise_words,
    "region_await": region.await_words,
    "region_read": region.read,
}


def _tables(call: Any, num_ranks: int, write: bool, names: tuple[str, ...] = ()) -> list[Span]:
    return [
        Span(getattr(call.layout, name), table.nbytes, write)
        for name, table in layout.tables(call.layout, num_ranks).items()
        if not names or name in names
    ]


def _layout_spans(call: Any) -> list[Span]:
    num_ranks, num_local = call.channel.num_ranks, call.layout.num_local
    blocks = -(-call.layout.num_tokens // abi.TOKENS)
    record = abi.REC_TABLES + num_ranks * (num_ranks + 1) + num_local
    num_bytes = call.layout.num_tokens * call.layout.num_topk * 8
    return [
        Span(call.given_idx, num_bytes, False),
        Span(call.layout.topk_idx, num_bytes if call.given_idx != call.layout.topk_idx else 0, True),
        Span(call.own_counts, blocks * num_ranks * 4, True),
        Span(call.record, record * 4, True),
        *_channel(call),
    ]


def _table_spans(call: Any) -> list[Span]:
    names = tuple(name for name in layout.tables(call.layout, call.channel.num_ranks) if name != "topk_idx")
    return [*_tables(call, call.channel.num_ranks, True, names), *_channel(call)]


def _channel(call: Any) -> list[Span]:
    channel = call.channel
    return [
        Span(channel.state, ctypes.sizeof(abi.State), True),
        Span(channel.peers, 8 * abi.SEGMENTS * abi.MAX_RANKS, False),
        Span(channel.fault, 4 * abi.FAULT_WORDS, True),
    ]


def _dispatch_spans(library: TwinLibrary, call: Any) -> list[Span]:
    count, lanes = call.num_out_rows, call.layout.num_topk
    weights = count * (1 if call.layout.expand else lanes) * call.weight_words * 4
    last = (count - 1) * call.scale_row_stride + (call.scale_words - 1) * call.scale_col_stride + 1
    names = ("row_base", "recv_token", "local_idx", "expand_row", "expert_counts", "expert_starts")
    return [
        *_tables(call, call.channel.num_ranks, False, names),
        Span(call.out_x, count * call.row_bytes, True),
        Span(call.out_idx, count * lanes * 8 if call.out_idx else 0, True),
        Span(call.out_weights, weights if call.out_weights else 0, True),
        Span(call.out_scales, last * 4 if call.out_scales and count and call.scale_words else 0, True),
        *_channel(call),
    ]


def _combine_spans(library: TwinLibrary, call: Any) -> list[Span]:
    tokens = call.layout.num_tokens
    row_bytes = call.hidden * (4 if call.dtype == 2 else 2)
    weights = tokens * call.layout.num_topk * call.weight_words * 4
    return [
        *_tables(call, call.channel.num_ranks, False, ("topk_idx", "lane_row", "last_lanes", "matrix")),
        Span(call.local_x, library._rest_of(call.local_x), False),
        Span(call.out_x, tokens * row_bytes, True),
        Span(call.out_weights, weights if call.out_weights else 0, True),
        *(Span(bias, tokens * row_bytes if bias else 0, False) for bias in (call.bias0, call.bias1)),
        *_channel(call),
    ]


def _reduce_spans(library: TwinLibrary, call: Any) -> list[Span]:
    return [
        *_tables(call, call.num_ranks, False, ("row_base", "local_idx", "expand_row")),
        Span(call.x, library._rest_of(call.x), False),
        Span(call.weights, library._rest_of(call.weights) if call.weights else 0, False),
    ]


_SPANS: dict[str, Callable[[TwinLibrary, Any], list[Span]]] = {
    "dispatch": _dispatch_spans,
    "combine": _combine_spans,
    "reduce": _reduce_spans,
    "barrier": lambda _, call: _channel(call),
    # On any stream: what they share with other kernels of the channel they read and write by flags and atomics.
    "region_raise": lambda _, call: region.word_spans(call, True),
    "region_await": lambda _, call: region.word_spans(call, False),
    "region_read": lambda _, call: region.read_spans(call),
}
