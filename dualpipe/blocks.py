"""A block: one action with its start and end.

Planned schedules (`simulate`) and executed ones (a trace) both become blocks, so that one drawing code shows both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dualpipe.actions import Action, Kind

TRACE_CATEGORY = "pipeline"
"""Category of the executor's trace spans."""


@dataclass(frozen=True, slots=True)
class Block:
    """One action in time.

    Attributes:
        rank: the lane it is drawn in.
        kind: F, B, I, W, FB, SEND or RECV.
        stage: stage of the action; of the F for a pair.
        microbatch: microbatch of the action; of the F for a pair.
        start: start time, in any unit.
        end: end time, not before the start.
        label: what is written into it, for example "3", or "7|3" for a pair.
    """

    rank: int
    kind: str
    stage: int
    microbatch: int
    start: float
    end: float
    label: str


def label_of(action: Action) -> str:
    """The microbatch of an action; "F's|B's" for a pair."""
    if action.kind is Kind.FB:
        return "|".join(str(part.microbatch) for part in action.parts)
    return str(action.microbatch)


def blocks_from_events(events: Iterable[Mapping[str, Any]], lanes: Mapping[int, int] | None = None) -> list[Block]:
    """The executed schedule out of Chrome trace events of all processes.

    Args:
        events: complete events as `comm_core.runtime.trace.Recorder.events` gives them; others are ignored.
        lanes: process number (the event's "pid") -> pipeline rank; events of other processes are left out. By default
            every process is its own lane.

    Returns:
        Blocks in milliseconds since the first chosen event.
    """
    chosen = [
        event
        for event in events
        if event.get("cat") == TRACE_CATEGORY
        and event.get("ph", "X") == "X"
        and (lanes is None or event["pid"] in lanes)
    ]
    origin = min((float(event["ts"]) for event in chosen), default=0.0)
    return [_block(event, event["pid"] if lanes is None else lanes[event["pid"]], origin) for event in chosen]


def _block(event: Mapping[str, Any], rank: int, origin: float) -> Block:
    args = event["args"]
    label = str(args["microbatch"])
    if args["kind"] == Kind.FB:
        label += f"|{args['backward_microbatch']}"
    start = (float(event["ts"]) - origin) / 1e3
    end = start + float(event["dur"]) / 1e3
    return Block(rank, str(args["kind"]), int(args["stage"]), int(args["microbatch"]), start, end, label)
