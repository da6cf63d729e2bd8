"""The doctor: a report on any machine, never an exception."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from comm_core import __main__ as doctor
from comm_core.backends import registry
from comm_core.runtime import device


def test_report_names_versions_devices_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"torch: {torch.__version__}" in text
    assert "collective on cpu: usable (verified" in text
    assert "collective on musa" in text
    assert "never run" in text


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["versions"]) == set(doctor.PACKAGES)
    found = {(item["backend"], item["device"]): item for item in report["backends"]}
    assert set(found) == {("collective", kind) for kind in device.KINDS} | {("posix", "cpu")}
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
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    report = doctor.examine()["foreign_packages"]
    assert report["dualpipe"] == [str(tmp_path / "dualpipe")]
    assert report["deep_ep"] == [str(tmp_path / "deep_ep.py")]
    assert report["megatron_patch"] == []
    doctor.main(["doctor"])
    assert str(tmp_path / "deep_ep.py") in capsys.readouterr().out


def test_a_failing_probe_is_a_line_and_not_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    for module, name in ((registry, "report"), (device, "names"), (doctor, "_compilers"), (doctor, "_version")):
        monkeypatch.setattr(module, name, fail)
    assert doctor.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.count("failed: RuntimeError: planted") == 1 + 2 + 1 + len(doctor.PACKAGES)
    assert doctor.main(["doctor", "--json"]) == 0
