"""`python -m comm_core COMMAND`: doctor, bench and build.

Each command is a line of `COMMANDS` and a module or class with `configure(parser)` and `run(options) -> exit code`. It
is loaded when it is asked for, so that the doctor works where other commands could not be imported.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from typing import Any


class _Build:
    """`build`: compiles the kernel library, or finds it in the cache."""

    @staticmethod
    def configure(parser: argparse.ArgumentParser) -> None:
        """Options of the command."""
        from comm_core.kernels.compiler import PLATFORMS

        parser.add_argument("--platform", choices=tuple(PLATFORMS), default=next(iter(PLATFORMS)))
        parser.add_argument("--arch", nargs="+", help="architectures, sm_90 or mp_31 where none is named")
        parser.add_argument("--define", action="append", default=[], metavar="NAME[=VALUE]", help="a macro")
        parser.add_argument("--verbose", action="store_true", help="the command, and registers and spills of kernels")

    @staticmethod
    def run(options: argparse.Namespace) -> int:
        """Builds, and says where the library is."""
        from comm_core.kernels import build, resources

        start = time.perf_counter()
        library = build.build(options.platform, options.arch, options.define)
        seconds = time.perf_counter() - start
        print(f"{library.path}\n{'compiled' if library.compiled else 'there already'}, {seconds:.1f} s")
        if options.verbose:
            print(f"{library.shown}\n{resources.table(library.log)}")
        return 0


# Name, what it does, and where it is.
COMMANDS: dict[str, tuple[str, Any]] = {
    "doctor": ("what this machine offers and which backends can be used", "comm_core.doctor"),
    "bench": ("dispatch and combine of every usable backend, and a plain all-to-all", "comm_core.bench"),
    "build": ("compile the kernel library, or find it in the cache", _Build),
}


def main(arguments: list[str] | None = None) -> int:
    """The command line; an error of ours is one line and exit code 1."""
    given = sys.argv[1:] if arguments is None else arguments
    chosen = next((item for item in given if item in COMMANDS), None)
    parser = argparse.ArgumentParser(prog="python -m comm_core", description="Expert-parallel communication core.")
    parsers = parser.add_subparsers(dest="command", required=True)
    command: Any = None
    for name, (does, where) in COMMANDS.items():
        one = parsers.add_parser(name, help=does)
        if name == chosen:
            command = importlib.import_module(where) if isinstance(where, str) else where
            command.configure(one)
    options = parser.parse_args(given)
    from comm_core.runtime.errors import MTMoEError

    try:
        return int(command.run(options))
    except MTMoEError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
