"""Events."""

from comm_core.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
