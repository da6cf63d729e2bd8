"""Patches as data: applied together or not at all, reversible, only for their versions, listed with reasons."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator

import pytest

import megatron_patch
from comm_core.runtime.errors import MissingPackageError, UsageError
from megatron_patch.patches import ANY, MISSING, Patch, PatchError, PatchSet


@pytest.fixture
def target() -> Iterator[types.ModuleType]:
    module = types.ModuleType("patched_in_tests")
    module.value = 1
    module.holder = types.SimpleNamespace(inner=2)
    module.table = {"key": 3}
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def _set(name: str, value: object, versions: str = ANY) -> Patch:
    return Patch(f"patched_in_tests:{name}", lambda original: value, versions, "a test")


def test_apply_and_revert_attributes_and_keys(target: types.ModuleType) -> None:
    patches = PatchSet()
    patches.apply(
        [_set("value", 10), _set("holder.inner", 20), _set("table[key]", 30), _set("table[new]", 40)], "0.19.2"
    )
    assert (target.value, target.holder.inner, target.table) == (10, 20, {"key": 30, "new": 40})
    assert [patch.target.split(":")[1] for patch in patches.report()] == [
        *("value", "holder.inner", "table[key]", "table[new]")
    ]
    patches.revert()
    assert (target.value, target.holder.inner, target.table) == (1, 2, {"key": 3})
    assert patches.report() == []


def test_applying_again_adds_nothing(target: types.ModuleType) -> None:
    patches = PatchSet()
    add_one = Patch("patched_in_tests:value", lambda original: original + 1, ANY, "a test")
    patches.apply([add_one], None)
    patches.apply([add_one], None)
    assert target.value == 2


def test_a_missing_name_is_created_and_removed(target: types.ModuleType) -> None:
    seen = []
    patches = PatchSet()
    patches.apply([Patch("patched_in_tests:absent", lambda original: seen.append(original) or 5, ANY, "a test")], None)
    assert target.absent == 5 and seen == [MISSING]
    patches.revert()
    assert not hasattr(target, "absent")


@pytest.mark.parametrize(
    ("version", "applies"), [("0.16.1", True), ("0.17.0", False), ("0.16.0rc1", True), (None, False)]
)
def test_versions_choose(target: types.ModuleType, version: str | None, applies: bool) -> None:
    patches = PatchSet()
    patches.apply([_set("value", 9, "<0.17")], version)
    assert (target.value == 9) is applies


def test_a_wrong_target_undoes_the_whole_call(target: types.ModuleType) -> None:
    patches = PatchSet()
    with pytest.raises(PatchError, match="nowhere does not exist"):
        patches.apply([_set("value", 9), _set("nowhere.deep", 1)], "0.19.2")
    assert target.value == 1 and patches.report() == []
    with pytest.raises(PatchError, match="no_such_module cannot be imported"):
        patches.apply([Patch("no_such_module:x", lambda original: 1, ANY, "a test")], "0.19.2")


def test_revert_does_not_overwrite_a_later_replacement(target: types.ModuleType) -> None:
    patches = PatchSet()
    patches.apply([_set("value", 9), _set("holder.inner", 8)], None)
    target.value = 77
    with pytest.raises(PatchError, match="patched_in_tests:value"):
        patches.revert()
    assert target.value == 77 and target.holder.inner == 2


def test_importing_imports_no_megatron() -> None:
    code = "import sys, megatron_patch; sys.exit(any(name.split('.')[0] == 'megatron' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_megatron_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise megatron_patch.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(megatron_patch.importlib.metadata, "version", missing)
    with pytest.raises(MissingPackageError, match=r"pip install 'mt-moe\[megatron\]'"):
        megatron_patch.apply("cpu")


@pytest.mark.parametrize("version", ["0.15.3", "0.20.0", "1.0"])
def test_untested_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(megatron_patch.importlib.metadata, "version", lambda name: version)
    with pytest.raises(UsageError, match=f"megatron-core {version}.*0.16.1 and 0.19.2"):
        megatron_patch.apply("cpu")


def test_an_unknown_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_patch.importlib.metadata, "version", lambda name: "0.19.2")
    with pytest.raises(UsageError, match="device 'tpu'"):
        megatron_patch.apply("tpu")
