"""The wheel: what is in it, and that it works where nothing else of this repository can be seen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from comm_core.kernels import build, compiler, library
from comm_core.runtime.errors import MissingPackageError
from tests import rules

INFO = "mt_moe-0.1.0.dist-info"
TOPS = {*rules.PACKAGES, INFO}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A copy of the tracked sources: building in place would leave its folders in the tree.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(rules.ROOT / name, source / name)
    for name in (*rules.PACKAGES, "examples", "tests"):
        shutil.copytree(rules.ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel))
    return target


def _run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    given = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=given)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def _isolated(installed: Path, code: str) -> str:
    """Runs code that sees the installed wheel and the environment's other packages, and not this repository."""
    # -P -E: neither the current folder nor PYTHONPATH. An editable install of this project, where there is one, comes
    # with a finder of its own, which is removed; so what is not in the wheel can not be imported.
    isolate = (
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]\n"
        f"sys.path[:] = [{str(installed)!r}] + [p for p in sys.path if p != {str(rules.ROOT)!r}]\n"
    )
    return _run(sys.executable, "-P", "-E", "-c", isolate + code, cwd=installed.parent)


def test_the_wheel_holds_every_module_of_the_four_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == TOPS
    modules = {name for name in names if name.endswith(".py")}
    assert modules == {rules.name_of(path) for path in rules.sources(*rules.PACKAGES)}
    others = {name for name in names if name.startswith(rules.PACKAGES) and not name.startswith(f"{INFO}/")} - modules
    assert others == {rules.name_of(path) for path in build.sources()}


def test_the_wheel_names_its_license_and_its_extras(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(f"{INFO}/METADATA").decode()
    assert {"megatron", "te", "dev"} == set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.M))
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.M)
    assert set(required) | set(rules.PACKAGES) == rules.REQUIRED
    assert "Apache License" in archive.read(f"{INFO}/licenses/LICENSE").decode()


def test_an_installed_torch_satisfies_the_requirement() -> None:
    # A pin would make an install replace the CUDA or MUSA build that is there.
    assert '"torch>=2.11"' in (rules.ROOT / "setup.py").read_text()


def test_every_package_imports_from_the_wheel_alone(installed: Path) -> None:
    code = "".join(f"import {name}\nprint({name}.__file__)\n" for name in rules.PACKAGES)
    files = _isolated(installed, code).split()
    assert files == [str(installed / name / "__init__.py") for name in rules.PACKAGES]


def test_what_is_not_in_the_wheel_can_not_be_imported_there(installed: Path) -> None:
    code = "import importlib.util\nprint([importlib.util.find_spec(n) for n in ('examples', 'tests', 'benchmarks')])\n"
    assert _isolated(installed, code).strip() == "[None, None, None]"


def test_the_wheel_shows_a_schedule(installed: Path) -> None:
    command = [sys.executable, "-P", "-m", "dualpipe", "show", "dualpipev", "--ranks", "2", "--microbatches", "4"]
    shown = _run(*command, cwd=installed.parent, PYTHONPATH=str(installed))
    assert len(shown.splitlines()) >= 2 and "F" in shown, shown


def _built(installed: Path, cache: Path, **environment: str) -> Path:
    """The library that `python -m comm_core build` makes of the wheel's sources."""
    command = [sys.executable, "-P", "-m", "comm_core", "build", "--verbose"]
    told = _run(
        *command,
        cwd=installed.parent,
        PYTHONPATH=str(installed),
        EP_JIT_CACHE_DIR=str(cache),
        MT_MOE_LIBRARY="",
        **environment,
    )
    path, how, line = told.splitlines()[:3]
    assert how.startswith("compiled, ") and line.startswith(f"cd {installed / 'comm_core' / 'kernels'} && "), told
    return Path(path)


def test_the_wheel_gives_its_kernels_to_a_compiler(installed: Path, tmp_path: Path) -> None:
    pretender = tmp_path / "nvcc"
    pretender.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo release 1.2 && exit\nshift $(($# - 2))\ncat *.cuh *.cu > "$2"\n'
    )
    pretender.chmod(0o755)
    made = _built(installed, tmp_path / "cache", PATH=f"{tmp_path}:{os.environ['PATH']}")
    sources = build.sources(installed / "comm_core" / "kernels")
    given = [path for suffix in (".cuh", ".cu") for path in sources if path.suffix == suffix]
    assert made.read_bytes() == b"".join(path.read_bytes() for path in given)


@pytest.mark.slow
def test_the_wheel_builds_its_kernels(installed: Path, tmp_path: Path) -> None:
    try:
        compiler.find("cuda")
    except MissingPackageError as error:
        pytest.skip(str(error))
    library.Library(_built(installed, tmp_path / "cache"))  # loads it and compares the sizes of its structs
