"""What the assembler says of each kernel: registers, and what did not fit into them.

A spill in a copy loop costs more than the loop's own loads, and a stack frame means an array indexed at run time; both
show in `ptxas -v` alone, so the builder keeps its output beside the library.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Resources:
    """One kernel for one architecture.

    Attributes:
        kernel: its name, readable where c++filt is installed.
        arch: sm_90 and the like.
        registers: a thread.
        stack: bytes of a thread's frame in local memory.
        spill_stores: bytes written there because registers ran out.
        spill_loads: bytes read back.
        shared: bytes of static shared memory a block.
    """

    kernel: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse(log: str) -> list[Resources]:
    """The kernels in the output of `nvcc -Xptxas -v`, in its order; empty for a compiler that says nothing (mcc)."""
    found: list[Resources] = []
    entry: tuple[str, str] | None = None
    frame = (0, 0, 0)
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry, frame = (match[1], match[2]), (0, 0, 0)
        elif match := _FRAME.search(line):
            frame = (int(match[1]), int(match[2]), int(match[3]))
        elif entry and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            found.append(Resources(*entry, int(match[1]), *frame, int(shared[1]) if shared else 0))
            entry = None
    return found


def readable(kernels: list[Resources]) -> list[Resources]:
    """The same with demangled names, where c++filt is installed."""
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if not tool or not kernels:
        return kernels
    given = "\n".join(kernel.kernel for kernel in kernels)
    done = subprocess.run([tool], input=given, capture_output=True, text=True, timeout=60)
    names = done.stdout.splitlines()
    if done.returncode != 0 or len(names) != len(kernels):
        return kernels
    return [replace(kernel, kernel=name) for kernel, name in zip(kernels, names, strict=True)]


def table(log: str) -> str:
    """The kernels of a log as a table; a line that says so where the compiler told nothing."""
    kernels = readable(parse(log))
    if not kernels:
        return "the compiler says nothing of registers"
    rows = ["arch    registers  stack  spilled  shared  kernel"]
    for kernel in kernels:
        spilled = kernel.spill_stores + kernel.spill_loads
        name = kernel.kernel.partition("(")[0].removeprefix("void ")
        rows.append(f"{kernel.arch:<8}{kernel.registers:>9}{kernel.stack:>7}{spilled:>9}{kernel.shared:>8}  {name}")
    return "\n".join(rows)
