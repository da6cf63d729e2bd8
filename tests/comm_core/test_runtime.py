"""The runtime leaf: errors that survive a process border, devices, spans."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch

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


def test_the_timeout_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EP_CPU_TIMEOUT_SECS", raising=False)
    assert env.timeout_seconds() == 300
    monkeypatch.setenv("EP_CPU_TIMEOUT_SECS", "7.5")
    assert env.timeout_seconds() == 7.5


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
