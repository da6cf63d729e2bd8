"""The double finds what it is there for: each check fails where its fault is planted, and only there."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core.kernels import library as abi
from comm_core.kernels.library import Library
from comm_core.runtime import device as devices
from comm_core.runtime.errors import CommError
from tests.pool import Pool
from tests.twin.channel import Side, numbers, word
from tests.twin.library import TwinLibrary
from tests.twin.torch_musa import OrderError, Played, played, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


def _gated(musa: Played, stream: Any, work: Callable[[], object], spans: Any = ()) -> threading.Event:
    """Queues work on a stream that begins when the event returned is set."""
    gate = threading.Event()
    stream.lane.put("work", spans, lambda: (gate.wait(20), work()))
    return gate


def _found(body: Callable[[Played], None]) -> str:
    """What the double says of a body at its end."""
    try:
        with played() as musa:
            body(musa)
    except OrderError as error:
        return str(error)
    return ""


def _device() -> torch.device:
    """A device of the kind; torch knows it from the first play on."""
    with played():
        return torch.device("musa", 0)


def _copy(musa: Played, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
    musa.library.copy(to.data_ptr(), source.data_ptr(), to.nbytes, devices.raw_stream(stream))


def _orders(rank: int) -> dict[str, str]:
    """Copies between two streams, ordered in several ways and not at all."""
    device = _device()
    found: dict[str, str] = {}

    def with_way(order: Callable[[Any, torch.Tensor], None]) -> Callable[[Played], None]:
        def body(musa: Played) -> None:
            source, to = torch.arange(4, device=device), torch.zeros(4, dtype=torch.int64, device=device)
            side = devices.new_stream(device)
            side.wait_stream(devices.current_stream(device))
            gate = _gated(musa, side, lambda: None)
            _copy(musa, to, source, side)
            assert not side.query()
            for tensor in (source, to):
                tensor.record_stream(side)
            threading.Timer(0.05, gate.set).start()
            order(side, to)

        return body

    def event(side: Any, to: torch.Tensor) -> None:
        done = devices.new_event(device)
        done.record(side)
        devices.current_stream(device).wait_event(done)
        assert to.tolist() == [0, 1, 2, 3]

    def host(side: Any, to: torch.Tensor) -> None:
        side.synchronize()
        assert to.cpu().tolist() == [0, 1, 2, 3]

    def whole(side: Any, to: torch.Tensor) -> None:
        devices.synchronize(device)
        assert (to + 1).tolist() == [1, 2, 3, 4]

    def polled(side: Any, to: torch.Tensor) -> None:
        done = side.record_event()
        while not done.query():
            time.sleep(0.001)
        assert to[1:].tolist() == [1, 2, 3]

    def in_time(side: Any, to: torch.Tensor) -> None:
        time.sleep(0.3)  # by now it is done, but nothing says so
        to.tolist()

    def early(side: Any, to: torch.Tensor) -> None:
        done = side.record_event()
        _copy(_now[0], to, to, side)
        devices.current_stream(device).wait_event(done)
        to.fill_(1)

    _now: list[Played] = []
    for way in (event, host, whole, polled, in_time):
        found[way.__name__] = _found(with_way(way))

    def late(musa: Played) -> None:
        _now.append(musa)
        with_way(early)(musa)

    found["early"] = _found(late)
    return found


def test_accesses_must_be_ordered(ranks: Pool) -> None:
    found = ranks.run(1, _orders)[0]
    assert {name for name, text in found.items() if text} == {"in_time", "early"}, found
    assert "test_gpu_twin.py" in found["in_time"] and "nothing orders them" in found["in_time"]
    assert re.search(r"fill_.* writes .*copy.* (reads|writes)", found["early"])


def _misuse(rank: int) -> dict[str, str]:
    device, found = _device(), dict[str, str]()

    def said(call: Callable[[], object]) -> str:
        with contextlib.suppress(CommError):
            call()
            return ""
        return "CommError"

    def freed(recorded: bool) -> Callable[[Played], None]:
        def body(musa: Played) -> None:
            side, source, to = devices.new_stream(device), torch.ones(4, device=device), torch.ones(4, device=device)
            side.wait_stream(devices.current_stream(device))
            gate = _gated(musa, side, lambda: None)
            _copy(musa, to, source, side)
            for tensor in (source, to) if recorded else (source,):
                tensor.record_stream(side)
            del source, to, tensor
            gc.collect()
            gate.set()
            side.synchronize()

        return body

    found["recorded"], found["not recorded"] = _found(freed(True)), _found(freed(False))

    def reused(waits: bool) -> Callable[[Played], None]:
        def body(musa: Played) -> None:
            side, source = devices.new_stream(device), torch.ones(4, device=device)
            side.wait_stream(devices.current_stream(device))
            (source + 1).sub_(1)  # its memory is free again, and may be that of the next tensor
            to = torch.empty(4, device=device)
            if waits:
                side.wait_stream(devices.current_stream(device))
            _copy(musa, to, source, side)
            side.synchronize()

        return body

    found["waits for reuse"], found["reused"] = _found(reused(True)), _found(reused(False))

    def host_memory(musa: Played) -> None:
        here, there = torch.ones(4), torch.zeros(4, device=device)
        _copy(musa, there, here, None)  # from the host, as runtimes do
        assert there.tolist() == [1, 1, 1, 1]
        found["to the host"] = said(lambda: _copy(musa, here, there, None))
        found["beyond"] = said(lambda: musa.library.clear(there.data_ptr(), 1 << 20, 0))
        host, seen = musa.library.host_alloc(128)
        found["host's address"] = said(lambda: musa.library.clear(host, 128, 0))
        found["device's address"] = said(lambda: musa.library.clear(seen, 128, 0))
        found["read by the host"] = said(lambda: musa.library.wait_word(seen + 60, host, 0.01))
        found["own handle"] = said(lambda: musa.library.open(0, musa.library.share(musa.library.alloc(0, 64))))
        found["stream"] = said(lambda: musa.library.clear(seen, 64, 12345))
        assert musa.library.wait_word(host + 60, host, 0.01) == 1
        musa.library.host_free(host)

    found["host memory"] = _found(host_memory)

    def failing(musa: Played) -> None:
        side = devices.new_stream(device)
        side.lane.put("work", (), lambda: 1 // 0)
        devices.synchronize(device)

    found["failing"] = _found(failing)
    return found


def test_misuse_is_told(ranks: Pool) -> None:
    found = ranks.run(1, _misuse)[0]
    assert "not recorded on another" in found.pop("not recorded") and "ZeroDivisionError" in found.pop("failing")
    assert "whose earlier work it does not wait for" in found.pop("reused")
    silent = {"recorded", "waits for reuse", "device's address", "host memory"}
    assert {name for name, text in found.items() if not text} == silent, found
    assert {text for text in found.values() if text} == {"CommError"}


def _shared(rank: int) -> str:
    """Rank 1 writes into rank 0's segment, which rank 0 frees too early."""

    def body(musa: Played) -> None:
        library = musa.library
        base = library.alloc(0, 4096) if rank == 0 else 0
        said: list[Any] = [library.share(base) if rank == 0 else None]
        dist.broadcast_object_list(said)
        if rank == 1:
            seen = library.open(1, said[0])
            sevens = torch.full((4,), 7, dtype=torch.int32)
            library.copy(seen, sevens.data_ptr(), 16, 0)
            library.synchronize()
        dist.barrier()
        if rank == 0:
            assert (abi.ctypes.c_uint32 * 4).from_address(base)[:] == [7] * 4
            library.free(base)
        dist.barrier()
        if rank == 1:
            library.close(seen)

    return _found(body)


def test_segments_are_shared_and_freed_last(ranks: Pool) -> None:
    owner, other = ranks.run(2, _shared)
    assert "freed while another rank has it open" in owner and other == ""


def _registered(rank: int) -> list[Any]:
    with played(count=2) as musa:
        devices.of("musa", 1)
        x = torch.randn(3, 5).to("musa:1")
        with torch.inference_mode():
            y = torch.tensor([1.5, 2.5], device="musa:0") * 2
        facts = [str(x.device), x.is_cuda, str(torch.empty(2, device="musa").device), y.tolist(), str(y.device)]
        facts += [devices.count("musa"), devices.architecture(x.device), devices.platform(x.device)]
        facts += [str(devices.current()), devices.choose("auto", num_local_ranks=2), devices.names("musa")[0]]
        facts += [x.view(torch.uint8).shape[1], x[1:].data_ptr() - x.data_ptr(), musa.failures]
    return [*facts, hasattr(torch, "musa"), devices.count("musa")]


def test_torch_has_a_device_of_the_kind_while_it_is_played(ranks: Pool) -> None:
    assert ranks.run(1, _registered)[0] == [
        "musa:1", False, "musa:1", [3.0, 5.0], "musa:0", 2, "mp_31", "musa", "musa:1", "musa", "played MTT S5000",
        20, 20, [], False, 0,
    ]  # fmt: skip


def test_the_twin_has_the_methods_and_words_of_the_library() -> None:
    public = {name for name in vars(Library) if not name.startswith("_")}
    assert public <= {name for name in vars(TwinLibrary) if not name.startswith("_")} | {"path"}
    assert (word("MAX_RANKS"), word("TOKENS")) == (abi.MAX_RANKS, abi.TOKENS)
    assert [word(f"REC_{name}") for name in ("SEQ", "STATUS", "DIFFERENT", "ROWS", "EXPANDED", "TABLES")] == [
        abi.REC_SEQ, abi.REC_STATUS, abi.REC_DIFFERENT, abi.REC_ROWS, abi.REC_EXPANDED, abi.REC_TABLES,
    ]  # fmt: skip
    assert (word("SEGMENTS"), word("HEADER_WORDS")) == (abi.SEGMENTS, abi.HEADER_WORDS)
    assert (word("BAD_ID"), word("REFUSED")) == (abi.BAD_ID, abi.REFUSED) and len(numbers()) > 20
    assert Side.__init__.__defaults__ == (time.monotonic,)
