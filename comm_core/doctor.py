"""`python -m comm_core doctor [--json]`: what this machine offers, which backends can be used, and why not.

The doctor never raises: each probe stands alone, and one that fails becomes a line of the report. It starts nothing
but compilers' `--version`, and asks drivers and torch for the rest.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("mt-moe", "torch", "megatron-core", "transformer-engine", "einops", "numpy", "torch-musa")
# Names of packages here that other projects use too; one found elsewhere on the path may be imported instead.
SHARED_NAMES = ("dualpipe", "megatron_patch", "deep_ep")


def _platform() -> str:
    cpus = len(os.sched_getaffinity(0))
    return f"{platform.platform()}, Python {platform.python_version()}, {cpus} CPUs"


def _accelerators() -> list[str]:
    from comm_core.runtime import device

    return [kind for kind in device.KINDS if kind != "cpu"]


def _devices() -> dict[str, str]:
    from comm_core.runtime import device

    found: dict[str, str] = {}
    for kind in _accelerators():
        names = device.names(kind)
        found |= {f"{kind}:{index}": name for index, name in enumerate(names)}
    return found or {"accelerators": "no accelerator: tensors live on the CPU"}


def _links() -> dict[str, str]:
    from comm_core.runtime import device, links

    found: dict[str, str] = {}
    for kind in _accelerators():
        if device.count(kind):
            found |= {f"{kind}:{name}": told for name, told in links.between(kind).items()}
    return found or {"links": "none: no accelerator"}


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _toolkits() -> dict[str, str]:
    """What torch was built for."""
    import torch

    return {kind: str(getattr(torch.version, kind, None) or "not in this torch") for kind in _accelerators()}


def _collectives() -> dict[str, str]:
    """gloo, NCCL and MCCL: the version, or why there is none."""
    import torch

    from comm_core.runtime import device

    found = {}
    for kind in device.KINDS:
        name = device.collective_backend(kind)
        if not torch.distributed.is_available() or not torch.distributed.is_backend_available(name):
            found[name] = "not in this torch"
            continue
        try:
            version = "" if kind == "cpu" else importlib.import_module(f"torch.{kind}.{name}").version()
        except Exception as error:
            version = f"version not told ({type(error).__name__}: {error})"
        text = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
        found[name] = text or "available"
    return found


def _compilers() -> dict[str, str]:
    from comm_core.kernels import compiler

    found = {entry.compiler: "not found" for entry in compiler.PLATFORMS.values()}
    for item in compiler.compilers():
        found[compiler.PLATFORMS[item.platform].compiler] = f"{item.path}, {item.version}"
    host = shutil.which("c++") or shutil.which("g++")
    found["c++"] = "not found" if host is None else f"{host}, {_first_line(host)}"
    return found


def _first_line(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    return next(iter((done.stdout or done.stderr).splitlines()), "no version")


def _foreign() -> dict[str, str]:
    """Where packages of our names lie outside this installation."""
    ours = Path(__file__).resolve().parents[1]
    installed = importlib.metadata.packages_distributions()
    found = {}
    for name in SHARED_NAMES:
        places = []
        for entry in dict.fromkeys(Path(item or ".").resolve() for item in sys.path):
            folder, module = entry / name, entry / f"{name}.py"
            # Beside a comm_core they are another copy of ours: an installed one, seen from a checkout.
            own = entry == ours or ours / "comm_core" in entry.parents or (entry / "comm_core").is_dir()
            if not own and (module.is_file() or (folder / "__init__.py").is_file()):
                places.append(str(folder if folder.is_dir() else module))
        places += [f"distribution {item}" for item in installed.get(name, []) if item.lower() != "mt-moe"]
        found[name] = ", ".join(dict.fromkeys(places)) or "none"
    return found


def _variables() -> dict[str, str]:
    """Variables of this package and of DeepEP: what is set, what of it is wrong, what has no meaning here."""
    from comm_core.runtime import env
    from comm_core.runtime.errors import UsageError

    found = dict(env.in_use())
    for read in (env.timeout_seconds, env.device_timeout_seconds, env.avoid_record_stream, env.topk_idx_dtypes):
        try:
            read()
        except UsageError as problem:
            name = next(item for item in env.DEFAULTS if str(problem).startswith(f"{item}="))
            found[name] = f"wrong: {problem}"
    found |= {name: "set, and ignored: it has no meaning here" for name in env.unused()}
    return found or {"variables": "none set"}


def _backends() -> list[dict[str, Any]]:
    from comm_core.backends import registry
    from comm_core.runtime import device

    return [
        {"backend": name, "device": kind, "usable": reason is None, "reason": reason, "status": device.STATUS[kind]}
        for name, kind, reason in registry.report()
    ]


# Each part of the report: its name and what finds it out.
PROBES: dict[str, Callable[[], Any]] = {
    "platform": _platform,
    "devices": _devices,
    "links": _links,
    "versions": _versions,
    "toolkits": _toolkits,
    "collectives": _collectives,
    "compilers": _compilers,
    "foreign": _foreign,
    "variables": _variables,
    "backends": _backends,
}


def _probe(what: Callable[[], Any]) -> Any:
    """The result of a probe, or the text of its error."""
    try:
        return what()
    except (Exception, SystemExit) as error:  # a package that is imported may do anything
        return f"failed: {type(error).__name__}: {error}"


def examine() -> dict[str, Any]:
    """The whole report as plain data: text, or a table of names and texts; `backends` is a list."""
    return {name: _probe(what) for name, what in PROBES.items()}


def lines(report: dict[str, Any]) -> list[str]:
    """The report as text."""
    out = []
    for title, value in report.items():
        items = [f"{name}: {told}" for name, told in value.items()] if isinstance(value, dict) else [str(value)]
        if isinstance(value, list):
            items = [_backend_line(item) for item in value]
        out += [f"{title:<12}{item}" for item in items]
    return out


def _backend_line(item: dict[str, Any]) -> str:
    state = "usable" if item["usable"] else f"not usable: {item['reason']}"
    return f"{item['backend']} on {item['device']}: {state} ({item['status']})"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints the report; always 0."""
    report = examine()
    print(json.dumps(report, indent=2) if options.json else "\n".join(lines(report)))
    return 0
