"""Compiles the kernels into a library at first use, once a host, and finds it again by what it was made of.

The name of a library holds a hash of the sources, the command and the compiler's version, so a library that is there is
the right one. Processes of one host that want the same library meet at a lock: the first compiles, the others wait and
load. It compiles parts side by side, one a core. A library appears by a rename, so nobody loads half of one. What is
loaded runs in this process, so a cache folder that somebody else owns or may write to is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from comm_core.kernels import compiler as compiling
from comm_core.kernels.compiler import Commands, Compiler, compilers
from comm_core.runtime import env
from comm_core.runtime.errors import BuildError, MissingPackageError, UsageError

__all__ = ["Library", "build", "cache_dir", "compile_to", "compilers", "library_path", "sources"]

SUFFIXES = (".h", ".cuh", ".cu", ".mu")
FOLDER = Path(__file__).resolve().parent
# A compilation takes seconds; these bound one that hangs, and a wait for one that does.
COMPILE_SECONDS = 600.0
WAIT_SECONDS = 660.0
# After this much waiting a process says what it waits for.
QUIET_SECONDS = 5.0
# Bits of a mode that let others write.
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Library:
    """A library that can be loaded.

    Attributes:
        path: the shared library.
        commands: what compiled it, to be run in `FOLDER`; None for a library that was given.
        log: what the compiler said when it was compiled (ptxas tells registers there).
        compiled: False where it was there already.
    """

    path: Path
    commands: Commands | None
    log: str
    compiled: bool

    @property
    def shown(self) -> str:
        """What a shell would run to compile it again."""
        if self.commands is None:
            return "a library that was given"
        return _shown(FOLDER, *self.commands.units, self.commands.link)


def library_path(platform: str = "cuda", arch: str | Sequence[str] | None = None, defines: Sequence[str] = ()) -> Path:
    """The kernel library, compiled where it is not there yet.

    Args:
        platform: cuda or musa.
        arch: one architecture (sm_90, mp_31) or several; None is the platform's default.
        defines: macros of the build, as `NAME` or `NAME=VALUE`. Where there are none, MT_MOE_LIBRARY is used if it is
            set; a library with macros is always compiled.

    Raises:
        MissingPackageError: no compiler.
        UsageError: an unknown platform or architecture, a cache folder that others may write to, MT_MOE_LIBRARY that
            is no file.
        BuildError: the compiler failed; the message holds the command and its output.
    """
    return build(platform, arch, defines).path


def build(
    platform: str = "cuda",
    arch: str | Sequence[str] | None = None,
    defines: Sequence[str] = (),
    folder: Path = FOLDER,
) -> Library:
    """As `library_path`, with how it came about; `folder` holds the sources."""
    entry = compiling.platform_of(platform)
    archs = compiling.architectures(platform, arch)
    given = env.kernel_library()
    if given and not defines:
        if not given.is_file():
            raise UsageError(f"MT_MOE_LIBRARY={given}", allowed="a library that exists", fix="correct it or unset it")
        return Library(given, None, "", compiled=False)
    found = compiling.find(platform)
    cache = cache_dir()
    key = _key(found, archs, defines, folder)
    target = cache / f"{Path(entry.source).stem}_{platform}_{key}.so"
    commands = compiling.commands(found, archs, defines, target)
    if target.is_file():
        return Library(target, commands, _log(target), compiled=False)
    with _lock(target.with_suffix(".lock")):
        if target.is_file():  # another process was first
            return Library(target, commands, _log(target), compiled=False)
        log = compile_to(found, archs, defines, target, folder)
    return Library(target, commands, log, compiled=True)


def why_not(platform: str) -> str | None:
    """Why there can be no library of a platform here; None where it is there or can be compiled."""
    if env.kernel_library() is not None:
        return None
    try:
        compiling.find(platform)
    except (MissingPackageError, BuildError) as error:
        return str(error)
    return None


def sources(folder: Path = FOLDER) -> list[Path]:
    """The files a library is made of, by name.

    Raises:
        BuildError: there are none, so this installation is broken.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if not files:
        raise BuildError(f"no kernel sources in {folder}: install mt-moe again, from a wheel or its repository")
    return files


def cache_dir() -> Path:
    """Where libraries are kept: EP_JIT_CACHE_DIR, else ~/.cache/mt-moe; made where it is not there.

    Raises:
        UsageError: it can not be made, is not this user's, or others may write to it.
    """
    folder = env.kernel_cache_dir() or Path.home() / ".cache" / "mt-moe"
    fix = "set EP_JIT_CACHE_DIR to a folder of your own that nobody else may write to (chmod 700)"
    allowed = "a folder of the user that runs this, not writable by others"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = folder.resolve(strict=True)
        found = folder.stat()
    except OSError as error:
        raise UsageError(f"cache folder {folder}: {error}", allowed=allowed, fix=fix) from error
    if found.st_uid != os.geteuid():
        raise UsageError(f"cache folder {folder} of user {found.st_uid}", allowed=allowed, fix=fix)
    if found.st_mode & OTHERS_WRITE:
        mode = stat.filemode(found.st_mode)
        raise UsageError(f"cache folder {folder} with mode {mode}", allowed=allowed, fix=fix)
    return folder


def _key(found: Compiler, archs: Sequence[str], defines: Sequence[str], folder: Path) -> str:
    """Hash of all that decides what the library holds. The output's name is no part: it has the key in it."""
    digest = hashlib.sha256()
    for path in sources(folder):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    lines = compiling.commands(found, archs, defines, Path("output.so"))
    digest.update(f"{_shown(Path(), *lines.units, lines.link)}\n{found.version}\n".encode())
    return digest.hexdigest()[:20]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds a file's lock; the system drops it when its holder ends, however that comes."""
    with path.open("a") as file:
        start, said = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            except OSError as error:
                fix = "set EP_JIT_CACHE_DIR to a folder on a disk of this host"
                raise UsageError(f"{path}: {error}", allowed="a file system with locks", fix=fix) from error
            waited = time.monotonic() - start
            if waited > WAIT_SECONDS:
                raise BuildError(
                    f"another process has held {path} for {waited:.0f} s; end it (fuser names it), try again"
                )
            if waited > QUIET_SECONDS and not said:
                said = True
                print(f"mt-moe: waiting for another process that compiles the kernels ({path})", file=sys.stderr)
            time.sleep(0.05)
        yield


def compile_to(
    found: Compiler, archs: Sequence[str], defines: Sequence[str], target: Path, folder: Path = FOLDER
) -> str:
    """Compiles the sources of `folder`, whatever is there already, and moves the library to `target`.

    The caller sees to it that nobody else does so at the same time.

    Returns:
        What the compiler said.

    Raises:
        BuildError: it failed; the message holds the command and its output.
    """
    for left in target.parent.glob(f".{target.stem}.*"):  # of a builder that was killed
        left.unlink(missing_ok=True)
    temporary = target.with_name(f".{target.stem}.{os.getpid()}.so")
    lines = compiling.commands(found, archs, defines, temporary)
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores:
            said = list(cores.map(partial(_run, folder), lines.units, lines.objects))
        said.append(_run(folder, lines.link, temporary))
        log = "".join(said)
        target.with_suffix(".log").write_text(log, encoding="utf-8")
        temporary.chmod(0o700)
        temporary.replace(target)
    except OSError as error:
        raise BuildError(f"the kernels could not be compiled to {target}: {error}") from error
    finally:
        for made in (temporary, *lines.objects):
            made.unlink(missing_ok=True)
    return log


def _run(folder: Path, line: Sequence[str], made: Path) -> str:
    """What one command says, which makes a file."""
    shown = _shown(folder, line)
    try:
        done = subprocess.run(
            line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMPILE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the kernels could not be compiled: {shown}\n{error}") from error
    if done.returncode != 0 or not made.is_file():
        raise BuildError(f"the kernels do not compile (exit code {done.returncode}): {shown}\n{done.stdout}")
    return done.stdout


def _shown(folder: Path, *lines: Sequence[str]) -> str:
    return " && ".join([f"cd {shlex.quote(str(folder))}", *map(shlex.join, lines)])


def _log(target: Path) -> str:
    with suppress(OSError):
        return target.with_suffix(".log").read_text(encoding="utf-8")
    return ""
