"""Imports modules in this (fresh) process and prints, as JSON, what each import did beyond defining names.

    python -B tests/import_probe.py FOLDER MODULE...

Watched: files opened for writing, processes, sockets, environment, standard output and error, threads, hooks of the
interpreter, logging, signal handlers, global settings of torch, and packages that only come with an extra.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import einops
import numpy
import torch
import torch.distributed

OPTIONAL = ("megatron", "transformer_engine", "torch_musa", "apex", "tokenizers", "psutil", "pydantic", "yaml")
STATE: dict[str, Callable[[], Any]] = {
    "environment": lambda: dict(os.environ),
    "sys.path": lambda: list(sys.path),
    "interpreter hooks": lambda: (sys.excepthook, sys.displayhook, list(sys.meta_path), list(sys.path_hooks)),
    "threads": threading.active_count,
    "logging": lambda: (logging.root.level, list(logging.root.handlers)),
    "warning filters": lambda: list(warnings.filters),
    "signal handlers": lambda: [signal.getsignal(number) for number in signal.valid_signals()],
    "torch settings": lambda: (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.initial_seed(),
        torch.get_default_device(),
    ),
    "a process group": torch.distributed.is_initialized,
    "an accelerator": torch.cuda.is_initialized,
    "numpy settings": numpy.geterr,
    "einops backends": lambda: einops.__name__,
}
WATCHED = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "socket.bind", "socket.connect", "os.mkdir")
_events: list[str] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        _events.append(f"opens {args[0]} for writing")
    elif event in WATCHED:
        _events.append(f"{event} {args[0]!r}")


def probe(module: str) -> list[str]:
    """Imports one module and returns what the import changed."""
    before = {name: read() for name, read in STATE.items()}
    loaded = {name for name in OPTIONAL if name in sys.modules}
    _events.clear()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        importlib.import_module(module)
    found = [f"{module}: {event}" for event in _events]
    found += [f"{module}: changes {name}" for name, read in STATE.items() if read() != before[name]]
    found += [f"{module}: imports {name}" for name in OPTIONAL if name in sys.modules and name not in loaded]
    if printed.getvalue():
        found.append(f"{module}: prints {printed.getvalue()[:80]!r}")
    return found


if __name__ == "__main__":
    sys.path[0] = sys.argv[1]
    sys.addaudithook(_audit)
    print(json.dumps([finding for module in sys.argv[2:] for finding in probe(module)]))
