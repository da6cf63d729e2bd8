"""The builder of the kernel library, with compilers that pretend: command lines, cache, lock, failures, settings."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from comm_core import __main__ as command_line
from comm_core.kernels import build, compiler, resources
from comm_core.runtime import env
from comm_core.runtime.errors import BuildError, MissingPackageError, UsageError

# Writes its arguments to a log, then "compiles": the output holds the source, or the objects that are linked. FAIL and
# SLOW are macros of the build.
_PRETENDER = r"""#!/bin/sh
if [ "$1" = --version ]; then echo "pretending compiler, release 1.2"; exit 0; fi
echo "$@" >> "LOG"
for argument in "$@"; do
  case $argument in *.cu|*.mu) source=$argument;; *.[0-9].o) objects="$objects $argument";; esac
  case $argument in -DFAIL) echo "line 7: no such thing"; exit 3;; -DSLOW) sleep 1;; esac
  if [ "$previous" = -o ]; then output=$argument; fi
  previous=$argument
done
cat ${source:-$objects} > "$output"
echo "ptxas info    : said while compiling"
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Puts pretending compilers on PATH and a cache of the test's own; gives the lines they were run with, sorted."""
    programs, log = tmp_path / "sdk" / "bin", tmp_path / "log"
    programs.mkdir(parents=True)
    for name in ("nvcc", "mcc"):
        (programs / name).write_text(_PRETENDER.replace("LOG", str(log)))
        (programs / name).chmod(0o755)
    for name in env.DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("EP_JIT_CACHE_DIR", str(tmp_path / "cache"))
    return lambda: sorted(log.read_text().splitlines()) if log.exists() else []


def _builds(lines: list[str]) -> int:
    """How many libraries were begun: each has one first part."""
    return sum("-DMT_MOE_UNIT=1 " in line for line in lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sources that are not the kernels."""
    made = tmp_path / "sources"
    made.mkdir()
    (made / "launch.cu").write_text("first\n")
    (made / "launch.mu").write_text("first\n")
    (made / "rows.cuh").write_text("rows\n")
    return made


def test_a_library_is_compiled_once_and_found_again(runs: Callable[[], list[str]]) -> None:
    first = build.build()
    assert first.compiled and first.path.is_file() and "said while compiling" in first.log
    assert first.path.read_text() == (build.FOLDER / "launch.cu").read_text() * compiler.UNITS
    again = build.build()
    assert again.path == first.path and not again.compiled and again.log == first.log
    assert build.library_path() == first.path and len(runs()) == compiler.UNITS + 1
    assert sorted(path.suffix for path in first.path.parent.iterdir()) == [".lock", ".log", ".so"]


def test_whatever_decides_the_library_names_it(
    runs: Callable[[], list[str]], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [build.build(folder=folder).path]

    def another(**given: object) -> None:
        library = build.build(**{"folder": folder, **given})  # type: ignore[arg-type]
        assert library.compiled and library.path not in seen, given
        seen.append(library.path)

    another(arch="sm_80")
    another(arch=["sm_90", "sm_80"])
    another(defines=["MT_MOE_CHAOS=7"])
    another(defines=["MT_MOE_CHAOS=8"])
    another(platform="musa")
    (folder / "rows.cuh").write_text("rows changed\n")
    another()
    (folder / "more.cuh").write_text("")
    another()
    program = tmp_path / "sdk" / "bin" / "nvcc"
    program.write_text(program.read_text().replace("release 1.2", "release 1.3"))
    another()
    # What decides nothing: order and repetition of architectures, files that are not compiled.
    (folder / "notes.txt").write_text("notes")
    assert build.build(folder=folder).path == seen[-1]
    both = build.build(arch=["sm_90", "sm_80", "sm_90"], folder=folder).path
    assert both == build.build(arch=["sm_80", "sm_90"], folder=folder).path


def test_commands_of_nvcc() -> None:
    nvcc = compiler.Compiler("cuda", Path("/opt/cuda/bin/nvcc"), "")
    made = compiler.commands(nvcc, ("sm_90",), ("MT_MOE_CHAOS=7",), Path("/cache/x.so"))
    assert [" ".join(line) for line in made.units] == [
        "/opt/cuda/bin/nvcc -std=c++17 -O3 -fmad=false -lineinfo -Xcompiler -fPIC -Xptxas -v --split-compile 8 "
        f"-gencode=arch=compute_90,code=sm_90 -DMT_MOE_CHAOS=7 -DMT_MOE_UNIT={unit} -c launch.cu -o /cache/x.{unit}.o"
        for unit in (1, 2, 3)
    ]
    assert " ".join(made.link) == (
        "/opt/cuda/bin/nvcc -shared -cudart static -gencode=arch=compute_90,code=sm_90 "
        "/cache/x.1.o /cache/x.2.o /cache/x.3.o -o /cache/x.so"
    )
    several = compiler.commands(nvcc, ("sm_100", "sm_90a"), (), Path("x.so"))
    for line in (*several.units, several.link):
        assert "-gencode=arch=compute_100,code=sm_100 -gencode=arch=compute_90a,code=sm_90a" in " ".join(line)
    assert all("--threads 2" in " ".join(line) for line in several.units)


def test_commands_of_mcc() -> None:
    mcc = compiler.Compiler("musa", Path("/opt/musa/bin/mcc"), "")
    made = compiler.commands(mcc, ("mp_31",), ("MT_MOE_CHAOS=7",), Path("/cache/x.so"))
    assert [" ".join(line) for line in made.units] == [
        "/opt/musa/bin/mcc -x musa -std=c++17 -O3 -fPIC --offload-arch=mp_31 -DMT_MOE_CHAOS=7 "
        f"-DMT_MOE_UNIT={unit} -c launch.mu -o /cache/x.{unit}.o"
        for unit in (1, 2, 3)
    ]
    assert " ".join(made.link) == (
        "/opt/musa/bin/mcc -shared /cache/x.1.o /cache/x.2.o /cache/x.3.o "
        "-L/opt/musa/lib -lmusart -Wl,-rpath,/opt/musa/lib -o /cache/x.so"
    )
    # clang is no nvcc: what its wrapper filters out or never knew may not be in the line.
    for word in (
        "-Xcompiler",
        "--expt-relaxed-constexpr",
        "--extended-lambda",
        "-ccbin",
        "-gencode",
        "-cudart",
        "fmad",
    ):
        assert all(word not in " ".join(line) for line in (*made.units, made.link))


def test_the_commands_are_what_is_run(runs: Callable[[], list[str]], folder: Path, tmp_path: Path) -> None:
    library = build.build("musa", defines=["A=1"], folder=folder)
    assert library.commands is not None
    shown = sorted(" ".join(line[1:]) for line in (*library.commands.units, library.commands.link))
    # The same but for the outputs, which are files beside the library until it is whole.
    stem = f".{library.path.stem}.{os.getpid()}"
    assert [line.replace(stem, library.path.stem) for line in runs()] == shown != runs()
    assert all("-DA=1" in line for line in runs() if " -c " in line)
    assert [line.startswith("-x musa") or f"-L{tmp_path / 'sdk' / 'lib'}" in line for line in runs()] == [True] * 4
    assert sorted(path.suffix for path in library.path.parent.iterdir()) == [".lock", ".log", ".so"]
    assert library.log.count("said while compiling") == compiler.UNITS + 1


@pytest.mark.parametrize(
    ("platform", "arch", "said"),
    [
        ("cuda", "mp_31", "allowed: sm_80, sm_90"),
        ("cuda", ["sm_90", "90"], "architecture '90' for cuda"),
        ("musa", "mp_22", "allowed: mp_31"),
        ("rocm", None, "allowed: cuda or musa"),
    ],
)
def test_unknown_targets_are_refused(platform: str, arch: str | list[str] | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build.build(platform, arch)


def test_compilers_are_found_on_path_then_in_the_toolkit(
    runs: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.why_not("cuda") is build.why_not("musa") is None
    found = {item.platform: item for item in build.compilers()}
    assert found["musa"].path == tmp_path / "sdk" / "bin" / "mcc" and found["cuda"].version.endswith("release 1.2")
    monkeypatch.setenv("PATH", str(tmp_path))
    entry = compiler.PLATFORMS["musa"]
    for home in (tmp_path / "sdk", tmp_path / "nothing"):
        monkeypatch.setitem(compiler.PLATFORMS, "musa", _with_usual(entry, home))
        monkeypatch.setitem(compiler.PLATFORMS, "cuda", _with_usual(compiler.PLATFORMS["cuda"], home))
        assert len(build.compilers()) == (2 if home.exists() else 0)
    said = r"for musa needs mcc.*MUSA SDK.*or set MT_MOE_LIBRARY"
    with pytest.raises(MissingPackageError, match=said):
        build.build("musa")
    assert re.search(said, build.why_not("musa") or "")
    monkeypatch.setenv("MT_MOE_LIBRARY", "given.so")
    assert build.why_not("musa") is None


def _with_usual(entry: compiler.Platform, home: Path) -> compiler.Platform:
    # Whatever toolkit torch has found on this machine is not what is tested.
    return replace(entry, usual=home, home=("comm_core.kernels.no_such_module", "HOME"))


def test_the_toolkit_that_torch_found_comes_before_the_usual_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "FOUND_HOME", str(tmp_path), raising=False)
    entry = replace(compiler.PLATFORMS["cuda"], home=("comm_core.kernels.build", "FOUND_HOME"))
    assert compiler._homes(entry) == [tmp_path, Path("/usr/local/cuda")]


def test_a_compiler_that_does_not_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\necho broken install; exit 4\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(BuildError, match=r"(?s)nvcc --version ended with 4.*broken install"):
        build.build()
    assert all(item.platform != "cuda" for item in build.compilers())


def test_a_failure_shows_the_command_and_what_the_compiler_said(
    runs: Callable[[], list[str]], folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(BuildError) as caught:
        build.build(defines=["FAIL"], folder=folder)
    text = str(caught.value)
    assert "exit code 3" in text and "line 7: no such thing" in text
    assert f"cd {folder} && {tmp_path}/sdk/bin/nvcc -std=c++17" in text and "-DFAIL" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    assert not list((tmp_path / "cache").glob("*.so")) and not list((tmp_path / "cache").glob(".*"))
    with pytest.raises(BuildError, match="exit code 3"):  # nothing of it is kept: it is tried again
        build.build(defines=["FAIL"], folder=folder)
    assert _builds(runs()) == 2


def test_a_compiler_that_hangs_is_ended(
    runs: Callable[[], list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0.2)
    with pytest.raises(BuildError, match=r"(?s)-DSLOW.*timed out after"):
        build.build(defines=["SLOW"], folder=folder)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_cache_that_others_may_write_to_is_refused(
    runs: Callable[[], list[str]], folder: Path, tmp_path: Path, mode: int
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(UsageError, match=r"with mode d.*not writable by others.*EP_JIT_CACHE_DIR"):
        build.build(folder=folder)
    assert not list(cache.iterdir()) and not runs()
    cache.chmod(0o755)
    assert build.build(folder=folder).path.parent == cache


def test_a_cache_of_another_user_is_refused(
    runs: Callable[[], list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.build(folder=folder)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UsageError, match=f"of user {owner};"):
        build.build(folder=folder)


def test_a_cache_that_can_not_be_made_is_told(
    runs: Callable[[], list[str]], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EP_JIT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(UsageError, match="set EP_JIT_CACHE_DIR to a folder of your own"):
        build.build(folder=folder)


def test_without_a_setting_the_cache_is_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EP_JIT_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build.cache_dir() == tmp_path / ".cache" / "mt-moe"
    assert build.cache_dir().stat().st_mode & 0o777 == 0o700


def _slow_build(folder: Path) -> build.Library:
    return build.build(defines=["SLOW"], folder=folder)


def test_builders_at_the_same_time_compile_once(runs: Callable[[], list[str]], folder: Path, tmp_path: Path) -> None:
    # Forked, so that nobody imports torch first: all three come while the first compiles.
    with multiprocessing.get_context("fork").Pool(3) as pool:
        libraries = pool.map_async(_slow_build, [folder] * 3, chunksize=1).get(timeout=60)
    assert len({library.path for library in libraries}) == 1
    assert sorted(library.compiled for library in libraries) == [False, False, True]
    assert _builds(runs()) == 1
    assert not list((tmp_path / "cache").glob(".*"))


def test_who_waits_for_a_builder_says_so_and_not_for_ever(
    runs: Callable[[], list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = build.build(folder=folder).path.with_suffix(".lock")
    lock.with_suffix(".so").unlink()
    monkeypatch.setattr(build, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(build, "WAIT_SECONDS", 0.3)
    hold = "import fcntl, sys\nfile = open(sys.argv[1])\nfcntl.flock(file, 2)\nprint(flush=True)\ninput()"
    command = [sys.executable, "-S", "-c", hold, str(lock)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout and holder.stdout.readline()
        start = time.monotonic()
        with pytest.raises(BuildError, match="another process has held"):
            build.build(folder=folder)
        assert time.monotonic() - start < 10
        assert capsys.readouterr().err.count("waiting for another process that compiles the kernels") == 1
    finally:
        holder.kill()
        holder.communicate()
    # The lock of a process that died is free, and what it left half written goes.
    left = lock.with_name(f".{lock.stem}.123.so")
    left.touch()
    assert build.build(folder=folder).compiled and not left.exists()


def test_a_library_given_by_the_setting_is_used_as_it_is(
    runs: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given.so"
    monkeypatch.setenv("MT_MOE_LIBRARY", str(given))
    with pytest.raises(UsageError, match=r"MT_MOE_LIBRARY=.*given\.so.*correct it or unset it"):
        build.library_path()
    given.touch()
    assert build.library_path() == build.library_path("musa") == given and not runs()
    assert env.in_use()["MT_MOE_LIBRARY"] == str(given)
    # A library with macros is another one.
    assert build.library_path(defines=["MT_MOE_CHAOS=1"]) != given and _builds(runs()) == 1


_PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN2mt13dispatch_implI4int4Li4EEEv14MtDispatchCall' for 'sm_90'
ptxas info    : Function properties for _ZN2mt13dispatch_implI4int4Li4EEEv14MtDispatchCall
    48 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 1808 bytes smem
ptxas info    : Compiling entry function 'plain' for 'sm_80'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, 352 bytes cmem[0]
"""


def test_the_report_tells_registers_spills_and_shared_memory() -> None:
    wide, plain = resources.parse(_PTXAS)
    assert wide.kernel == "_ZN2mt13dispatch_implI4int4Li4EEEv14MtDispatchCall" and wide.arch == "sm_90"
    assert (wide.registers, wide.stack, wide.spill_stores, wide.spill_loads, wide.shared) == (64, 48, 8, 12, 1808)
    assert plain == resources.Resources("plain", "sm_80", 22, 0, 0, 0, 0)
    lines = resources.table(_PTXAS).splitlines()
    assert len(lines) == 3 and lines[1].split()[:5] == ["sm_90", "64", "48", "20", "1808"]
    assert resources.table("") == "the compiler says nothing of registers"


def test_the_command_line_builds(runs: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command_line.main(["build", "--arch", "sm_80", "sm_90", "--define", "A", "--define", "B=2", "--verbose"]) == 0
    )
    path, how, line, report = capsys.readouterr().out.splitlines()
    assert Path(path).is_file() and how.startswith("compiled, ") and report == "the compiler says nothing of registers"
    assert line.startswith(f"cd {build.FOLDER} && ") and "-DA -DB=2 -DMT_MOE_UNIT=1 -c launch.cu" in line
    assert command_line.main(["build", "--arch", "sm_80", "sm_90", "--define", "A", "--define", "B=2"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("there already")
    assert command_line.main(["build", "--platform", "musa"]) == 0
    assert "_musa_" in capsys.readouterr().out
    assert command_line.main(["build", "--define", "FAIL"]) == 1
    assert "BuildError: the kernels do not compile" in capsys.readouterr().err
