"""What all measurements share: medians of device-timed repetitions, and a record of what they were made with."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from comm_core.runtime import device as devices


def median_ms(work: Callable[[], object], device: torch.device, *, repeats: int = 20, warmup: int = 5) -> float:
    """Median time of `work` in milliseconds, by events of an accelerator; ranks start each repetition together."""
    for _ in range(warmup):
        work()
    times = []
    for _ in range(repeats):
        devices.synchronize(device)
        dist.barrier()
        start, end = devices.new_event(device, timing=True), devices.new_event(device, timing=True)
        start.record()
        work()
        end.record()
        devices.synchronize(device)
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times)


def environment(device: torch.device, commit_hash: str) -> dict[str, Any]:
    """Machine, versions, date and commit of a measurement."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("megatron-core", "transformer-engine"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "machine": f"{dist.get_world_size()} x {devices.name(device)}",
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "commit": commit_hash,
    }


def commit() -> str:
    """Short hash of the checked-out commit; "unknown" outside a checkout."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def write(path: Path, device: torch.device, rows: list[dict[str, Any]], *, commit_hash: str) -> None:
    """Writes rows with their environment as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment(device, commit_hash), "rows": rows}, indent=1) + "\n")
