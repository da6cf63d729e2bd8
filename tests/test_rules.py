"""One test a rule of the house. Each applies a checker to the tree, then to a planted violation that it must find."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from tests import rules

Checker = Callable[[str, str], list[str]]


def _hold(check: Checker, *folders: str) -> None:
    """Fails with every violation in the tree, one a line."""
    found = [
        finding
        for path in rules.sources(*folders)
        for finding in check(path.read_text(encoding="utf-8"), rules.name_of(path))
    ]
    assert not found, "\n" + "\n".join(found)


def _lines(check: Checker, name: str, text: str) -> list[int]:
    return sorted({int(finding.split(":")[1].split()[0]) for finding in check(text, name)})


def test_there_is_something_to_check() -> None:
    for package in rules.PACKAGES:
        assert len(rules.sources(package)) > 1, package


def test_devices_are_named_in_three_places() -> None:
    planted = (
        "import torch\n"
        "torch.cuda.synchronize()\n"
        "x = torch.zeros(2, device='cuda:0')\n"
        "from torch import cuda\n"
        "import torch.musa.amp\n"
        "kind = 'musa'\n"
        "'''cuda in a sentence'''  # torch.cuda in a comment\n"
    )
    assert _lines(rules.device_names, "mt_moe/planted.py", planted) == [2, 3, 4, 5, 6]
    assert _lines(rules.device_names, "comm_core/runtime/device.py", planted) == []
    _hold(rules.device_names, *rules.PACKAGES)


def test_environment_is_read_in_one_file() -> None:
    planted = "import os\nos.environ['A'] = '1'\nos.getenv('B')\nfrom os import environ, path\nprint(os.path)\n"
    assert _lines(rules.environment, "dualpipe/planted.py", planted) == [2, 3, 4]
    _hold(rules.environment, *rules.PACKAGES)


def test_there_are_at_most_ten_environment_variables() -> None:
    planted = "import os\nos.environ.get('A', '1')\nos.environ['B']\n'C' in os.environ\nos.getenv('D')\nx['E']\n"
    assert rules.variables(planted) == {"A", "B", "C", "D"}
    read = rules.variables((rules.ROOT / rules.ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    assert 0 < len(read) <= rules.MAX_VARIABLES, sorted(read)


def test_megatron_is_imported_in_megatron_patch_alone() -> None:
    planted = (
        "import megatron.core\n"
        "def use():\n"
        "    from megatron.core import parallel_state\n"
        "import importlib\n"
        "importlib.import_module('megatron.core')\n"
        "import megatron_patch\n"
    )
    assert _lines(rules.megatron_imports, "mt_moe/planted.py", planted) == [1, 3, 5]
    assert _lines(rules.megatron_imports, "megatron_patch/planted.py", planted) == []
    _hold(rules.megatron_imports, *rules.PACKAGES)


def test_optional_packages_are_imported_at_use() -> None:
    planted = (
        "from typing import TYPE_CHECKING\n"
        "import transformer_engine.pytorch as te\n"
        "try:\n"
        "    import apex\n"
        "except ImportError:\n"
        "    apex = None\n"
        "if TYPE_CHECKING:\n"
        "    import torch_musa\n"
        "def use():\n"
        "    import torch_musa\n"
        "class A:\n"
        "    from megatron.core import mpu\n"
    )
    assert _lines(rules.optional_imports, "mt_moe/planted.py", planted) == [2, 4, 12]
    assert _lines(rules.optional_imports, "megatron_patch/planted.py", planted) == [2, 4]
    assert _lines(rules.optional_imports, "megatron_patch/__init__.py", planted) == [2, 4, 12]
    planted = "import triton\nfrom mt_moe import triton_kernels\ndef use():\n    from mt_moe import triton_kernels\n"
    assert _lines(rules.optional_imports, "mt_moe/planted.py", planted) == [1, 2]
    assert _lines(rules.optional_imports, "mt_moe/planted_triton.py", planted) == []
    _hold(rules.optional_imports, *rules.PACKAGES)


def test_kernels_are_annotated_in_triton_s_language() -> None:
    planted = "@triton.jit\ndef f(x: tl.tensor, N: tl.constexpr, y):\n    pass\n@triton.jit\ndef g(x: Any):\n    pass\n"
    assert _lines(rules.kernel_annotations, "mt_moe/planted_triton.py", planted) == [5]
    _hold(rules.kernel_annotations, *rules.PACKAGES)


def test_runtime_imports_the_standard_library_and_torch() -> None:
    planted = "import os\nimport torch\nimport numpy\nfrom comm_core import layout\nfrom comm_core.runtime import env\n"
    assert _lines(rules.runtime_imports, "comm_core/runtime/planted.py", planted) == [3, 4]
    _hold(rules.runtime_imports, "comm_core")


def test_only_public_names_of_comm_core_are_used_outside_it() -> None:
    planted = (
        "import comm_core\n"
        "from comm_core import ElasticBuffer, layout\n"
        "from comm_core.runtime import env\n"
        "from comm_core.backends.collective import x\n"
        "from comm_core.layout import x\n"
    )
    assert _lines(rules.private_imports, "mt_moe/planted.py", planted) == [2, 4, 5]
    assert _lines(rules.private_imports, "comm_core/planted.py", planted) == []
    _hold(rules.private_imports, *rules.PACKAGES)


def test_files_and_functions_are_short() -> None:
    long_function = "def f() -> None:\n" + "    pass\n" * 60
    assert _lines(rules.sizes, "mt_moe/planted.py", "\n" + long_function) == [2]
    assert _lines(rules.sizes, "mt_moe/planted.py", "def f() -> None:\n" + "    pass\n" * 59) == []
    assert _lines(rules.sizes, "mt_moe/planted.py", "x = 1\n" * 401) == [1]
    _hold(rules.sizes, *rules.PACKAGES, "examples")


def _probe(folder: Path, *modules: str) -> list[str]:
    command = [sys.executable, "-B", str(rules.ROOT / "tests" / "import_probe.py"), str(folder), *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def _module(path: Path) -> str:
    return rules.name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_imports_have_no_side_effects() -> None:
    modules = [
        _module(path)
        for path in rules.sources(*rules.PACKAGES)
        if path.name != "__main__.py"
        and not rules.is_megatron_side(rules.name_of(path))
        and not rules.is_triton_side(rules.name_of(path))
    ]
    assert set(rules.PACKAGES) <= set(modules)
    # The packages first: what their `__init__` pulls in must not hide behind a submodule's import.
    modules.sort(key=lambda module: module.count("."))
    found = _probe(rules.ROOT, *modules)
    assert not found, "\n" + "\n".join(found)


def test_side_effects_of_an_import_are_found(tmp_path: Path) -> None:
    (tmp_path / "megatron.py").write_text("")
    (tmp_path / "planted.py").write_text(
        "import logging, os, threading\n"
        "import megatron, torch\n"
        "os.environ['PLANTED'] = '1'\n"
        "print('hello')\n"
        "open('written.txt', 'w').close()\n"
        "torch.set_default_dtype(torch.float64)\n"
        "logging.basicConfig()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "os.system('true')\n"
    )
    found = "\n".join(_probe(tmp_path, "planted"))
    words = ("environment", "prints 'hello", "written.txt", "torch settings", "logging", "threads", "os.system")
    for expected in (*words, "imports megatron"):
        assert expected in found, expected


# One violation a contract of pyproject.toml, in its order; every module that a contract names must exist.
_PLANTED_IMPORTS = {
    "comm_core/__init__.py": "",
    "comm_core/runtime/__init__.py": "import numpy\n",
    "comm_core/backends/__init__.py": "",
    "comm_core/elastic.py": "",
    "comm_core/event.py": "",
    "comm_core/handle.py": "",
    "comm_core/layout.py": "import comm_core.elastic\n",
    "comm_core/reference.py": "",
    "dualpipe/__init__.py": "import comm_core.layout\nimport megatron.core\n",
    "mt_moe/__init__.py": "import dualpipe\nimport tests.dist\n",
    "megatron_patch/__init__.py": "",
}


def _lint_imports(folder: Path) -> tuple[list[str], str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    done = subprocess.run(
        [*command, str(rules.ROOT / "pyproject.toml")], cwd=folder, capture_output=True, text=True, timeout=120
    )
    states = [line.split()[-1] for line in done.stdout.splitlines() if line.endswith(("KEPT", "BROKEN"))]
    return states, done.stdout + done.stderr


def test_each_import_contract_holds_and_can_break(tmp_path: Path) -> None:
    contracts = tomllib.loads((rules.ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    states, output = _lint_imports(rules.ROOT)
    assert states == ["KEPT"] * len(contracts), output
    for name, text in _PLANTED_IMPORTS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    states, output = _lint_imports(tmp_path)
    assert states == ["BROKEN"] * len(contracts), output
