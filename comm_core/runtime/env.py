"""The only reader of os.environ. Each variable has one function, one default and one meaning."""

from __future__ import annotations

import os

from comm_core.runtime.errors import UsageError


def local_rank() -> int:
    """Index of this process on its host, as torchrun sets it (LOCAL_RANK); 0 outside torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Processes on this host (LOCAL_WORLD_SIZE); 1 outside torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    """Rank of this process before a process group exists (RANK); 0 outside torchrun."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes before a process group exists (WORLD_SIZE); 1 outside torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def has_launcher() -> bool:
    """True where torchrun (or a launcher with its variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def timeout_seconds() -> float:
    """Bound of every host wait in seconds (EP_CPU_TIMEOUT_SECS, DeepEP's name); 300 by default."""
    text = os.environ.get("EP_CPU_TIMEOUT_SECS", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(
            f"EP_CPU_TIMEOUT_SECS={text!r}", allowed="seconds, above 0", fix="set it to a number or unset it"
        )
    return seconds


def for_child(**defaults: str) -> dict[str, str]:
    """The environment for a process that this one starts; `defaults` hold where the user set nothing."""
    return {**defaults, **os.environ}
