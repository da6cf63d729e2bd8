"""Helpers of the upstream package's users and tests, device-independent."""

from comm_core.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
