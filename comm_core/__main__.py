"""`python -m comm_core doctor [--json]`: what this machine offers, which backends can be used, and why not.

The doctor never raises: a probe that fails becomes a line of the report. `python -m comm_core bench` measures dispatch
and combine of the backends that can be used (bench.py). `python -m comm_core build` compiles the kernel library.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "megatron-core", "transformer-engine", "einops", "numpy", "torch-musa")
COMPILERS = {"nvcc": "/usr/local/cuda/bin/nvcc", "mcc": "/usr/local/musa/bin/mcc", "c++": "/usr/bin/c++"}
# Names of packages here that other projects use too; one found elsewhere on the path may be imported instead.
SHARED_NAMES = ("dualpipe", "megatron_patch", "deep_ep")


def _probe(what: Callable[[], Any]) -> Any:
    """The result of a probe, or the text of its error."""
    try:
        return what()
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _compilers() -> dict[str, str]:
    found = {name: shutil.which(name) or (usual if Path(usual).exists() else None) for name, usual in COMPILERS.items()}
    return {name: where or "not found" for name, where in found.items()}


def _devices() -> dict[str, Any]:
    from comm_core.runtime import device

    return {kind: _probe(partial(device.names, kind)) for kind in device.KINDS if kind != "cpu"}


def _foreign() -> dict[str, list[str]]:
    """Where packages of our names lie outside this installation."""
    ours = Path(__file__).resolve().parents[1]
    found: dict[str, list[str]] = {}
    for name in SHARED_NAMES:
        places = []
        for entry in dict.fromkeys(Path(item or ".").resolve() for item in sys.path):
            folder, module = entry / name, entry / f"{name}.py"
            if entry != ours and (module.is_file() or (folder / "__init__.py").is_file()):
                places.append(str(folder if folder.is_dir() else module))
        found[name] = places
    return found


def _backends() -> list[dict[str, Any]]:
    from comm_core.backends import registry
    from comm_core.runtime import device

    return [
        {"backend": name, "device": kind, "usable": reason is None, "reason": reason, "status": device.STATUS[kind]}
        for name, kind, reason in registry.report()
    ]


def examine() -> dict[str, Any]:
    """The whole report as plain data."""
    return {
        "platform": _probe(lambda: f"{platform.platform()}, Python {platform.python_version()}"),
        "cpus": _probe(lambda: len(os.sched_getaffinity(0))),
        "devices": _probe(_devices),
        "versions": {package: _probe(partial(_version, package)) for package in PACKAGES},
        "compilers": _probe(_compilers),
        "foreign_packages": _probe(_foreign),
        "backends": _probe(_backends),
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The report as text."""
    out = [f"platform    {report['platform']}, {report['cpus']} CPUs"]
    out += _section("devices", report["devices"], lambda names: ", ".join(names) or "none")
    out += _section("versions", report["versions"], str)
    out += _section("compilers", report["compilers"], str)
    out += _section("foreign", report["foreign_packages"], lambda places: ", ".join(places) or "none")
    if isinstance(report["backends"], str):
        return [*out, f"backends    {report['backends']}"]
    for item in report["backends"]:
        state = "usable" if item["usable"] else f"not usable: {item['reason']}"
        out.append(f"backend     {item['backend']} on {item['device']}: {state} ({item['status']})")
    return out


def _section(title: str, values: Any, show: Callable[[Any], str]) -> list[str]:
    if not isinstance(values, dict):
        return [f"{title:<12}{values}"]
    return [f"{title:<12}{name}: {value if isinstance(value, str) else show(value)}" for name, value in values.items()]


def _bench(options: argparse.Namespace) -> int:
    from comm_core import bench
    from comm_core.runtime.errors import MTMoEError

    settings = bench.Settings(**{name: getattr(options, name) for name in bench.Settings.__dataclass_fields__})
    try:
        rows = bench.measure(settings)
    except MTMoEError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"rows": rows}) if options.json else bench.table(settings, rows))
    return 0


def _build(options: argparse.Namespace) -> int:
    from comm_core.kernels import build, resources
    from comm_core.runtime.errors import MTMoEError

    start = time.perf_counter()
    try:
        library = build.build(options.platform, options.arch, options.define)
    except MTMoEError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{library.path}\n{'compiled' if library.compiled else 'there already'}, {time.perf_counter() - start:.1f} s")
    if options.verbose:
        print(f"{library.shown}\n{resources.table(library.log)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    from comm_core.kernels.compiler import PLATFORMS
    from comm_core.runtime import device

    parser = argparse.ArgumentParser(prog="python -m comm_core", description="Expert-parallel communication core.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what this machine offers and which backends can be used")
    bench = commands.add_parser("bench", help="dispatch and combine of every usable backend, and a plain all-to-all")
    bench.add_argument("--device", choices=device.KINDS, default="cpu", help="where the tokens live")
    bench.add_argument("--ranks", type=int, default=2, help="processes")
    bench.add_argument("--tokens", type=int, default=4096, help="tokens a rank")
    bench.add_argument("--hidden", type=int, default=2048, help="elements a token")
    bench.add_argument("--topk", type=int, default=4, help="experts a token")
    bench.add_argument("--experts", type=int, default=16, help="experts of all ranks together")
    bench.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    bench.add_argument("--repeats", type=int, default=20, help="round trips the medians are taken of")
    bench.add_argument("--warmup", type=int, default=3, help="round trips before those")
    bench.add_argument("--seed", type=int, default=0, help="of the random tokens and ids")
    build = commands.add_parser("build", help="compile the kernel library, or find it in the cache")
    build.add_argument("--platform", choices=tuple(PLATFORMS), default=next(iter(PLATFORMS)))
    build.add_argument("--arch", nargs="+", help="architectures, sm_90 or mp_31 where none is named")
    build.add_argument("--define", action="append", default=[], metavar="NAME[=VALUE]", help="a macro of the build")
    build.add_argument("--verbose", action="store_true", help="the command, and registers and spills of kernels")
    for command in (doctor, bench):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    options = _parser().parse_args(arguments)
    if options.command == "bench":
        return _bench(options)
    if options.command == "build":
        return _build(options)
    report = examine()
    print(json.dumps(report, indent=2) if options.json else "\n".join(lines(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
