"""The compilers, nvcc and mcc: where they are, which version, and the command lines that make a library of ours.

The source is compiled in `UNITS` parts side by side, as compiling takes longer than everything else at first use; nvcc
also works on the kernels of a part in several threads. mcc is clang with MUSA: it takes neither nvcc's spelling of host
options nor its architectures. Its commands are written from public build files and have never been run (torch_musa and
Mooncake: `-x musa`, `--offload-arch`, `-lmusart`).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comm_core.runtime.errors import BuildError, MissingPackageError, UsageError


@dataclass(frozen=True)
class Platform:
    """What differs between the two: names, places, and the architecture that is built where none is asked for."""

    compiler: str
    source: str
    default_arch: str
    arch_pattern: str
    usual: Path
    # The module of torch whose attribute is the toolkit that torch itself found (CUDA_HOME, MUSA_HOME).
    home: tuple[str, str]
    install: str


PLATFORMS = {
    "cuda": Platform(
        compiler="nvcc",
        source="launch.cu",
        default_arch="sm_90",
        arch_pattern=r"sm_\d+[af]?",
        usual=Path("/usr/local/cuda"),
        home=("torch.utils.cpp_extension", "CUDA_HOME"),
        install="the CUDA toolkit of your torch, with its nvcc on PATH",
    ),
    "musa": Platform(
        compiler="mcc",
        source="launch.mu",
        # The only one with warps of 32 lanes, which the kernels want.
        default_arch="mp_31",
        arch_pattern=r"mp_31",
        usual=Path("/usr/local/musa"),
        home=("torch_musa.utils.musa_extension", "MUSA_HOME"),
        install="the MUSA SDK, with its mcc on PATH",
    ),
}


# Parts that launchers.cuh cuts the library in; each takes about as long as the others.
UNITS = 3
# Threads of nvcc's for the kernels of a part. A fixed number: the commands name the library, on every host the same.
SPLIT = "8"


@dataclass(frozen=True)
class Commands:
    """The command lines that make a library, to be run in the folder of the sources.

    Attributes:
        units: one a part, which may run side by side.
        link: what makes the library of them, behind all.
        objects: what the first leave for the last.
    """

    units: tuple[tuple[str, ...], ...]
    link: tuple[str, ...]
    objects: tuple[Path, ...]


@dataclass(frozen=True)
class Compiler:
    """A compiler that was found.

    Attributes:
        platform: cuda or musa.
        path: the program.
        version: the line of `--version` that holds it.
    """

    platform: str
    path: Path
    version: str


def platform_of(name: str) -> Platform:
    """The entry of `PLATFORMS`.

    Raises:
        UsageError: no such platform.
    """
    if name not in PLATFORMS:
        raise UsageError(f"platform {name!r}", allowed=" or ".join(PLATFORMS), fix="name one of them")
    return PLATFORMS[name]


def find(platform: str) -> Compiler:
    """The compiler of a platform: on PATH, else in torch's toolkit, else in the usual folder.

    Raises:
        MissingPackageError: there is none.
        BuildError: it does not run.
    """
    entry = platform_of(platform)
    on_path = shutil.which(entry.compiler)
    places = [Path(on_path)] if on_path else [home / "bin" / entry.compiler for home in _homes(entry)]
    for path in places:
        if path.is_file():
            return Compiler(platform, path, _version(path))
    raise MissingPackageError(
        entry.compiler,
        needed_for=f"compiling the kernels for {platform}",
        install=f"{entry.install}; or set MT_MOE_LIBRARY to a library that `python -m comm_core build` made elsewhere",
    )


def compilers() -> list[Compiler]:
    """The compilers of this machine, for the doctor; one that is missing or does not run is left out."""
    found = []
    for platform in PLATFORMS:
        try:
            found.append(find(platform))
        except (MissingPackageError, BuildError):
            continue
    return found


def architectures(platform: str, asked: str | Sequence[str] | None) -> tuple[str, ...]:
    """The architectures to build for, sorted and each once; the platform's default where none is asked for.

    Raises:
        UsageError: a name that is none of the platform's.
    """
    entry = platform_of(platform)
    given = [asked] if isinstance(asked, str) else list(asked or [entry.default_arch])
    for arch in given:
        if not re.fullmatch(entry.arch_pattern, arch):
            allowed = "sm_80, sm_90, sm_100 and the like" if platform == "cuda" else entry.default_arch
            raise UsageError(f"architecture {arch!r} for {platform}", allowed=allowed, fix="name one of these")
    return tuple(sorted(set(given)))


def commands(compiler: Compiler, archs: Sequence[str], defines: Sequence[str], output: Path) -> Commands:
    """The commands that compile the library `output`; what they leave on their way lies beside it."""
    entry = platform_of(compiler.platform)
    objects = tuple(output.with_suffix(f".{unit}.o") for unit in range(1, UNITS + 1))
    options, linked = (_mcc if compiler.platform == "musa" else _nvcc)(compiler, archs)
    macros = tuple(f"-D{define}" for define in defines)
    units = tuple(
        (*options, *macros, f"-DMT_MOE_UNIT={unit}", "-c", entry.source, "-o", str(made))
        for unit, made in enumerate(objects, 1)
    )
    libraries = () if compiler.platform == "cuda" else _musa_runtime(compiler)
    return Commands(units, (*linked, *map(str, objects), *libraries, "-o", str(output)), objects)


def _nvcc(compiler: Compiler, archs: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How nvcc's lines begin that compile, and that link."""
    numbers = [arch.removeprefix("sm_") for arch in archs]
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
    side_by_side = ("--threads", str(len(archs))) if len(archs) > 1 else ()
    # No contraction: sums are defined as unfused. The runtime is linked in: torch's is another copy, same context.
    options = ("-std=c++17", "-O3", "-fmad=false", "-lineinfo", "-Xcompiler", "-fPIC", "-Xptxas", "-v")
    link = (str(compiler.path), "-shared", "-cudart", "static", *targets)
    return (str(compiler.path), *options, *side_by_side, "--split-compile", SPLIT, *targets), link


def _mcc(compiler: Compiler, archs: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The same for mcc."""
    targets = [f"--offload-arch={arch}" for arch in archs]
    return (str(compiler.path), "-x", "musa", "-std=c++17", "-O3", "-fPIC", *targets), (str(compiler.path), "-shared")


def _musa_runtime(compiler: Compiler) -> tuple[str, ...]:
    folder = compiler.path.resolve().parents[1] / "lib"
    return f"-L{folder}", "-lmusart", f"-Wl,-rpath,{folder}"


def _homes(entry: Platform) -> list[Path]:
    homes = []
    module, attribute = entry.home
    try:
        # Not there without torch_musa, or without the setuptools that torch's module wants: the usual place is left.
        home = getattr(importlib.import_module(module), attribute) if importlib.util.find_spec(module) else None
    except (ImportError, OSError):
        home = None
    if home:
        homes.append(Path(home))
    return [*homes, entry.usual]


def _version(path: Path) -> str:
    try:
        done = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{path} --version does not run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{path} --version ended with {done.returncode}\n{done.stdout}{done.stderr}")
    lines = [line.strip() for line in done.stdout.splitlines() if re.search(r"\b(release|version)\b.*\d", line)]
    return lines[0] if lines else done.stdout.strip()
