"""What all measurements share: medians of device-timed repetitions, and a record of what they were made with."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from comm_core.runtime import device as devices


def median_ms(work: Callable[[], object], device: torch.device, *, repeats: int = 20, warmup: int = 5) -> float:
    """Median time of `work` in milliseconds, by events of an accelerator; ranks start each repetition together."""
    return medians_ms({"work": work}, device, repeats=repeats, warmup=warmup)["work"]


def medians_ms(
    works: Mapping[str, Callable[[], object]], device: torch.device, *, repeats: int = 20, warmup: int = 5
) -> dict[str, float]:
    """Medians of several pieces of work, in turn, so that what changes with time changes all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(warmup + repeats):
        for name, work in works.items():
            taken = _time_ms(work, device)
            if number >= warmup:
                times[name].append(taken)
    return {name: statistics.median(values) for name, values in times.items()}


def _time_ms(work: Callable[[], object], device: torch.device) -> float:
    devices.synchronize(device)
    dist.barrier()
    if device.type == "cpu":
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e3
    start, end = devices.new_event(device, timing=True), devices.new_event(device, timing=True)
    start.record()
    work()
    end.record()
    devices.synchronize(device)
    return float(start.elapsed_time(end))


def top_kernels(
    work: Callable[[], object], device: torch.device, *, steps: int = 3, most: int = 25
) -> list[dict[str, Any]]:
    """Where the device's time of one call of `work` goes: the kernels with the most, in ms and launches a call.

    On the CPU, which has none, the same of torch's operators.
    """
    from torch.profiler import ProfilerActivity, profile

    on_device = device.type != "cpu"
    activities = [ProfilerActivity.CPU] if not on_device else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    devices.synchronize(device)
    dist.barrier()
    with profile(activities=activities) as recorded:
        for _ in range(steps):
            work()
        devices.synchronize(device)
    found = []
    for event in recorded.key_averages():
        of_kernels = on_device and event.device_type.name != "CPU"
        spent = event.self_device_time_total if on_device else event.self_cpu_time_total
        if (of_kernels or not on_device) and spent:
            found.append({"kernel": event.key[:110], "ms": spent / steps / 1e3, "launches": event.count / steps})
    return sorted(found, key=lambda item: -item["ms"])[:most]


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
