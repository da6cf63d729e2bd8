"""The doctor: a report on any machine, never an exception. Links, with a driver's library that is played."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_core import __main__ as command
from comm_core import doctor
from comm_core.backends import registry
from comm_core.runtime import device, env, links


def test_report_names_versions_devices_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch: {torch.__version__}" in text and f"Python {sys.version_info.major}" in text
    assert "collective on cpu: usable (verified" in text
    assert "collective on musa" in text and "prepared, not verified on hardware" in text
    for word in ("megatron-core", "transformer-engine", "gloo: available", "nccl: ", "mccl: ", "nvcc: ", "mcc: "):
        assert word in text, word
    if not any(device.count(kind) for kind in device.KINDS if kind != "cpu"):
        assert "no accelerator" in text


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == set(doctor.PROBES) and set(report["versions"]) == set(doctor.PACKAGES)
    found = {(item["backend"], item["device"]): item for item in report["backends"]}
    assert set(found) == {(name, kind) for name, kind, _ in registry.report()}
    assert {("collective", kind) for kind in device.KINDS} | {("posix", "cpu")} <= set(found)
    assert found["collective", "cpu"]["usable"]
    for kind in ("cuda", "musa"):
        item = found["collective", kind]
        assert item["usable"] == (device.count(kind) > 0)
        assert item["usable"] or "no " in item["reason"]


def test_foreign_packages_of_our_names_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dualpipe").mkdir()
    (tmp_path / "dualpipe" / "__init__.py").touch()
    (tmp_path / "deep_ep.py").touch()
    copy = tmp_path / "copy"  # of this package, installed elsewhere
    for name in ("comm_core", "dualpipe"):
        (copy / name).mkdir(parents=True)
        (copy / name / "__init__.py").touch()
    on_path = Path(doctor.__file__).parent / "deep_ep" / "on_path"  # ours, for children of deep_ep's command
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(copy), str(on_path)])
    monkeypatch.setattr(
        doctor.importlib.metadata, "packages_distributions", lambda: {"megatron_patch": ["Pai", "mt-moe"]}
    )
    report = doctor.examine()["foreign"]
    assert report["dualpipe"] == str(tmp_path / "dualpipe") and report["deep_ep"] == str(tmp_path / "deep_ep.py")
    assert report["megatron_patch"] == "distribution Pai"
    command.main(["doctor"])
    assert str(tmp_path / "deep_ep.py") in capsys.readouterr().out


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*env.DEFAULTS, *env.DEEPEP_UNUSED):
        monkeypatch.delenv(name, raising=False)
    assert doctor.PROBES["variables"]() == {"variables": "none set"}
    for name, value in (("EP_CPU_TIMEOUT_SECS", "7"), ("EP_NUM_TOPK_IDX_BITS", "16"), ("EP_DISABLE_GIN", "1")):
        monkeypatch.setenv(name, value)
    report = doctor.PROBES["variables"]()
    assert report["EP_CPU_TIMEOUT_SECS"] == "7" and "allowed: 32 or 64" in report["EP_NUM_TOPK_IDX_BITS"]
    assert "ignored" in report["EP_DISABLE_GIN"] and len(report) == 3


def _fail(error: BaseException) -> Callable[[], Any]:
    def probe() -> Any:
        raise error

    return probe


@pytest.mark.parametrize("name", [*doctor.PROBES, "all"])
def test_a_failing_probe_is_a_line_and_not_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = list(doctor.PROBES) if name == "all" else [name]
    cheap = {item: lambda: "fine" for item in doctor.PROBES}
    errors = (RuntimeError("planted"), SystemExit("planted"))
    for error in errors:
        with monkeypatch.context() as patch:
            patch.setattr(doctor, "PROBES", cheap | {item: _fail(error) for item in failing})
            assert command.main(["doctor"]) == 0
            text = capsys.readouterr().out
            assert text.count(f"failed: {type(error).__name__}: planted") == len(failing)
            assert command.main(["doctor", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)[failing[0]].startswith("failed:")


def test_what_a_probe_asks_may_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the probes themselves but what they call: drivers, torch, metadata, compilers, folders."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("planted")

    for module, name in (
        (doctor.platform, "platform"),
        (device, "names"),
        (device, "count"),
        (doctor.importlib.metadata, "version"),
        (torch.distributed, "is_available"),
        (doctor.shutil, "which"),
        (doctor.importlib.metadata, "packages_distributions"),
        (env, "in_use"),
        (registry, "report"),
    ):
        monkeypatch.setattr(module, name, fail)
    report = doctor.examine()
    wrong = {name for name, value in report.items() if value == "failed: OSError: planted"}
    assert wrong == set(doctor.PROBES) - {"toolkits"}
    assert command.main(["doctor"]) == 0
    assert capsys.readouterr().out.count("planted") == len(wrong)


def test_without_torch_there_is_a_report(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from comm_core.__main__ import main; sys.exit(main(['doctor']))"
    root = Path(doctor.__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "backends    failed: ModuleNotFoundError" in done.stdout and "torch: " in done.stdout


class _Driver:
    """Plays libnvidia-ml: device A has two links up, B none; A and B are linked, the others are not."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = {b"GPU-A": 1, b"GPU-B": 2, b"GPU-C": 3}.get(uuid, 0)
        return 0 if handle._obj.value else 6

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: Any, up: Any) -> int:
        if link.value >= 3 or handle.value != 1:
            return 3
        up._obj.value = int(link.value != 1)
        return 0

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, what: Any, status: Any) -> int:
        status._obj.value = 0 if {one.value, other.value} == {1, 2} and what.value == 2 else 1
        return 0


def _devices(monkeypatch: pytest.MonkeyPatch, uuids: str) -> None:
    module = SimpleNamespace(
        get_device_properties=lambda index: SimpleNamespace(uuid=uuids[index]),
        can_device_access_peer=lambda one, other: (one, other) != (1, 2),
    )
    monkeypatch.setattr(device, "accelerator", lambda kind: module)
    monkeypatch.setattr(device, "count", lambda kind: len(uuids))


def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    _devices(monkeypatch, "ABC")
    told = links.between("cuda", lambda: links.Nvml(_Driver()))
    assert told == {
        "0": "2 NVLink links up", "1": "0 NVLink links up", "2": "0 NVLink links up",
        "0-1": "peer access over NVLink", "0-2": "peer access over PCIe", "1-2": "no peer access",
    }  # fmt: skip
    _devices(monkeypatch, "AX")
    assert "nvmlDeviceGetHandleByUUID returned 6" in links.between("cuda", lambda: links.Nvml(_Driver()))["0-1"]
    _devices(monkeypatch, "AB")
    assert links.between("musa") == {"0-1": "peer access, over what is not told"}

    def missing(name: str) -> None:
        raise OSError(f"no {name}")

    monkeypatch.setattr(links.ctypes, "CDLL", missing)
    assert links.between("cuda") == {
        "0-1": "peer access, over what is not told; NVML is not there: no libnvidia-ml.so.1"
    }
