"""Helpers of the upstream package's users and tests, device-independent."""

from comm_core.deep_ep.utils import comm, envs, event, find_pkgs, gate, math, refs, semantic, testing
from comm_core.event import EventHandle, EventOverlap

__all__ = [
    "EventHandle",
    "EventOverlap",
    "comm",
    "envs",
    "event",
    "find_pkgs",
    "gate",
    "math",
    "refs",
    "semantic",
    "testing",
]
