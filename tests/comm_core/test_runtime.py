"""The runtime leaf: errors that survive a process border, devices, spans."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pickle
import re
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import comm_core
import comm_core.deep_ep
from comm_core import event
from comm_core.runtime import device, env, trace
from comm_core.runtime.errors import CommTimeoutError, MissingPackageError, MTMoEError, UsageError


@pytest.mark.parametrize(
    "error",
    [
        UsageError("x=3", allowed="1 or 2", fix="pass one"),
        MissingPackageError("foo", needed_for="bar", install="pip install foo"),
        CommTimeoutError("late"),
    ],
)
def test_errors_survive_pickling(error: MTMoEError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)


def test_usage_errors_say_given_allowed_and_fix() -> None:
    assert str(UsageError("x=3", allowed="1 or 2", fix="pass one")) == "x=3; allowed: 1 or 2; pass one"


def test_devices() -> None:
    assert device.choose("cpu", num_local_ranks=64) == "cpu"
    assert device.indexed("cpu") == device.of_collective_backend("gloo") == torch.device("cpu")
    assert device.of_collective_backend("undefined") == torch.device("cpu")
    assert device.choose("auto", num_local_ranks=10**6) == "cpu"
    with pytest.raises(UsageError, match="auto, cpu, cuda or musa"):
        device.choose("tpu", num_local_ranks=1)
    with pytest.raises(UsageError, match="start fewer processes"):
        device.choose("cuda", num_local_ranks=10**6)
    with pytest.raises(UsageError, match="allowed: cuda or musa"):
        device.accelerator("cpu")
    assert device.count("cpu") == 1


def test_a_vendor_is_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is asked of a third vendor follows from its entry alone; its package is imported at the first use."""
    new = {"module": "played", "package": "torch_played", "install": "its wheel", "collectives": "pccl"}
    new |= {"stream_handle": "played_stream", "arch_prefix": "pl"}
    monkeypatch.setitem(device.VENDORS, "played", replace(device.VENDORS["musa"], **new))
    with pytest.raises(MissingPackageError, match=r"torch_played.*its wheel"):
        device.accelerator("played")
    assert device.count("played") == 0
    (tmp_path / "torch_played.py").write_text(
        "import torch\n"
        "class played:\n"
        "    device_count = staticmethod(lambda: 3)\n"
        "    is_available = staticmethod(lambda: True)\n"
        "    get_device_capability = staticmethod(lambda device: (4, 2))\n"
        "    current_stream = staticmethod(lambda device: f'stream of {device.index}')\n"
        "torch.played = played\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        where: Any = SimpleNamespace(type="played", index=2)
        assert (device.count("played"), device.collective_backend("played")) == (3, "pccl")
        assert (device.architecture(where), device.platform(where)) == ("pl_42", "musa")
        assert device.current_stream(where) == "stream of 2"
        assert device.raw_stream(SimpleNamespace(played_stream=77)) == 77
    finally:
        del torch.played
        del sys.modules["torch_played"]
    with pytest.raises(UsageError, match="cuda_stream or musa_stream or played_stream"):
        device.raw_stream(SimpleNamespace(other_stream=1))
    assert device.raw_stream(None) == 0


@pytest.mark.skipif(importlib.util.find_spec("torch_musa") is not None, reason="torch_musa itself is installed here")
def test_musa_comes_with_torch_musa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(torch, "musa", raising=False)
    with pytest.raises(MissingPackageError, match=r"torch_musa.*MUSA SDK"):
        device.accelerator("musa")
    (tmp_path / "torch_musa.py").write_text("import torch\ntorch.musa = 'the module'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert device.accelerator("musa") == "the module"
    finally:
        del torch.musa
        del sys.modules["torch_musa"]


def test_a_port_that_answers_for_cuda_does_not_hide_musa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports for MUSA patch torch.cuda to answer for torch.musa; it may be patched before or after ours is imported."""
    module = SimpleNamespace(
        device_count=lambda: 8, is_available=lambda: True, is_initialized=lambda: True, current_device=lambda: 5
    )
    monkeypatch.setattr(torch, "musa", module, raising=False)
    for name in ("device_count", "is_available", "is_initialized"):
        monkeypatch.setattr(torch.cuda, name, getattr(module, name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "musa:5")
    made: list[tuple[str, int]] = []
    monkeypatch.setattr(device.torch, "device", lambda kind, index: made.append((kind, index)))
    device.current()
    device.of_collective_backend("cpu:gloo,musa:mccl")
    assert made == [("musa", 5), ("musa", 5)] and device.choose("auto", num_local_ranks=8) == "musa"


def test_no_code_asks_a_tensor_whether_it_is_on_cuda() -> None:
    """`is_cuda` says what a port has patched it to say; `device.type` says what it is."""
    root = Path(comm_core.__file__).parents[1]
    asking = re.compile(r"\.is_cuda\b|\.is_musa\b")
    for package in ("comm_core", "mt_moe", "dualpipe", "megatron_patch"):
        for path in (root / package).rglob("*.py"):
            assert not asking.search(path.read_text(encoding="utf-8")), path


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*env.DEFAULTS, *env.DEEPEP_UNUSED):
        monkeypatch.delenv(name, raising=False)


def test_variables_of_deepep(monkeypatch: pytest.MonkeyPatch) -> None:
    _forget(monkeypatch)
    assert (env.timeout_seconds(), env.device_timeout_seconds(), env.avoid_record_stream()) == (300, None, False)
    assert env.kernel_cache_dir() is None and env.topk_idx_dtypes() == (torch.int64,)
    assert env.in_use() == {} and env.unused() == []
    given = {"EP_CPU_TIMEOUT_SECS": "7.5", "EP_GPU_TIMEOUT_SECS": "9", "EP_AVOID_RECORD_STREAM": "1"}
    given |= {"EP_JIT_CACHE_DIR": "/some/place", "EP_NUM_TOPK_IDX_BITS": "32"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert (env.timeout_seconds(), env.device_timeout_seconds(), env.avoid_record_stream()) == (7.5, 9, True)
    assert env.kernel_cache_dir() == Path("/some/place")
    assert env.topk_idx_dtypes() == (torch.int32, torch.int64) and env.in_use() == given
    for module in (comm_core, comm_core.deep_ep, importlib.import_module("comm_core.deep_ep._C"), env):
        assert module.topk_idx_t == torch.int32
    for text in ("0", "64", ""):  # 0 is automatic
        monkeypatch.setenv("EP_NUM_TOPK_IDX_BITS", text)
        assert comm_core.topk_idx_t == torch.int64
    monkeypatch.setenv("EP_NIC_NAME", "mlx5_1")
    monkeypatch.setenv("EP_JIT_DEBUG", "0")
    assert env.unused() == ["EP_NIC_NAME", "EP_JIT_DEBUG"]


@pytest.mark.parametrize(
    ("name", "value", "read", "allowed"),
    [
        ("EP_CPU_TIMEOUT_SECS", "soon", env.timeout_seconds, "above 0"),
        ("EP_GPU_TIMEOUT_SECS", "-1", env.device_timeout_seconds, "above 0"),
        ("EP_AVOID_RECORD_STREAM", "yes", env.avoid_record_stream, "0 or 1"),
        ("EP_NUM_TOPK_IDX_BITS", "16", env.topk_idx_dtypes, "32 or 64"),
    ],
)
def test_a_wrong_variable_is_named(
    name: str, value: str, read: Callable[[], object], allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name}='{value}'; allowed: .*{allowed}"):
        read()


class _FakeDevice:
    """Stands for comm_core.runtime.device: streams whose events are complete when the test says so."""

    def __init__(self) -> None:
        self.done = self.capturing = False
        self.recorded: list[Any] = []

    def new_stream(self, device: torch.device, *, priority: int = 0) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self, device: torch.device) -> Any:
        return None

    def use_stream(self, device: torch.device, stream: Any) -> Any:
        return contextlib.nullcontext()

    def is_capturing(self, device: torch.device) -> bool:
        return self.capturing

    def new_event(self, device: torch.device) -> Any:
        return SimpleNamespace(record=lambda stream: None, query=lambda: self.done)


@pytest.mark.parametrize("avoid", ["0", "1"])
def test_record_stream_can_be_avoided(avoid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either the allocator is told about a tensor, or the queue holds it until its work is done."""
    fake = _FakeDevice()
    monkeypatch.setattr(event, "devices", fake)
    monkeypatch.setenv("EP_AVOID_RECORD_STREAM", avoid)

    class Storage(torch.Tensor):
        def record_stream(self, stream: Any) -> None:
            fake.recorded.append(stream)

    queue = event.CommQueue(torch.device("meta"), "q")
    first = torch.zeros(3).as_subclass(Storage)
    alive = weakref.ref(first)
    queue.submit(lambda: None, tensors=[first])
    del first
    assert fake.recorded == ([] if avoid == "1" else [queue.stream])
    assert (alive() is not None) == (avoid == "1")
    queue.submit(lambda: None)
    assert (alive() is not None) == (avoid == "1"), "the work is not done yet"
    fake.done = fake.capturing = True
    queue.submit(lambda: None)
    assert (alive() is not None) == (avoid == "1"), "an event may not be asked now"
    fake.capturing = False
    queue.submit(lambda: None)
    assert alive() is None


def test_spans_of_all_threads_are_recorded_while_a_recorder_is_active() -> None:
    def inner() -> None:
        with trace.span("inner", "y", lane="ep"):
            pass

    recorder = trace.Recorder(rank=3)
    with trace.span("before", "x"):
        pass
    with trace.recording(recorder), trace.span("outer", "x", num_tokens=5):
        thread = threading.Thread(target=inner, name="t")
        thread.start()
        thread.join()
        with trace.span("second", "y"):
            pass
    with trace.span("after", "x"):
        pass
    outer, first, second = recorder.spans()
    assert [outer.name, first.name, second.name] == ["outer", "inner", "second"]
    assert [outer.lane, first.lane, outer.args] == [threading.current_thread().name, "ep", {"num_tokens": 5}]
    assert outer.start_us <= first.start_us <= first.end_us <= second.start_us <= second.end_us <= outer.end_us
    event = recorder.events()[0]
    assert (event["ph"], event["pid"], event["cat"]) == ("X", 3, "x")
    assert event["dur"] == outer.end_us - outer.start_us
