"""One trace file of all ranks, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

Every rank records spans on its own; all ranks of a host read the same monotonic clock. So merging is a matter of
form: a process a rank, a thread a lane, names and order as metadata, and a clock that starts at zero.
The format nests the spans of a thread strictly. Spans of one lane that overlap without nesting, as two communication
queues may, are spread over as many threads as needed instead of being drawn wrong.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]

_FIRST_LANES = ("MainThread", "pipeline", "ep")


def merge_trace(events: Sequence[Iterable[Event]], names: Sequence[str]) -> dict[str, Any]:
    """Puts the spans of all ranks into one trace.

    Args:
        events: for each rank the events of its `trace.Recorder` (complete events, times in microseconds).
        names: for each rank what it is called.

    Returns:
        The trace as a JSON object: times start at 0, `pid` is the rank, `tid` an integer with the lane's name.
    """
    ranks = [sorted(mine, key=lambda event: (event["ts"], -event["dur"])) for mine in events]
    origin = min((event["ts"] for mine in ranks for event in mine), default=0.0)
    merged: list[dict[str, Any]] = []
    for rank, (mine, name) in enumerate(zip(ranks, names, strict=True)):
        merged += _metadata("process", rank, 0, name, rank)
        lanes = _lanes(mine)
        for tid, (label, spans) in enumerate(lanes, 1):
            merged += _metadata("thread", rank, tid, label, tid)
            merged += [_event(span, rank, tid, origin) for span in spans]
    return {"traceEvents": merged, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, events: Sequence[Iterable[Event]], names: Sequence[str]) -> Path:
    """Merges the spans of all ranks as `merge_trace` does and writes them; the file appears when it is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    # Escaped to ASCII and without NaN: any JSON reader, and any name, is fine.
    temporary.write_text(json.dumps(merge_trace(events, names), separators=(",", ":"), allow_nan=False))
    os.replace(temporary, path)
    return path


def _metadata(what: str, pid: int, tid: int, name: str, order: int) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": str(name)}},
        {"ph": "M", "name": f"{what}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}},
    ]


def _event(span: Event, pid: int, tid: int, origin: float) -> dict[str, Any]:
    # Both ends are rounded, not the duration: that keeps a span inside the one around it.
    start, end = round(span["ts"] - origin, 3), round(span["ts"] + max(0.0, span["dur"]) - origin, 3)
    return {
        "ph": "X",
        "name": str(span["name"]),
        "cat": str(span["cat"]),
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": round(end - start, 3),
        "args": {str(key): _plain(value) for key, value in span.get("args", {}).items()},
    }


def _plain(value: Any) -> Any:
    """A value that every JSON reader takes; what is neither number, text nor list becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def _lanes(spans: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Spans by lane, in an order that puts the pipeline and its communication on top; sorted by start."""
    by_lane: dict[str, list[Event]] = {}
    for span in spans:
        by_lane.setdefault(str(span["tid"]), []).append(span)
    rank = {name: place for place, name in enumerate(_FIRST_LANES)}
    lanes = []
    for lane in sorted(by_lane, key=lambda name: (rank.get(name, len(rank)), name)):
        threads = _nested(by_lane[lane])
        lanes += [(lane if place == 0 else f"{lane} ({place + 1})", thread) for place, thread in enumerate(threads)]
    return lanes


def _nested(spans: Sequence[Event]) -> list[list[Event]]:
    """Distributes spans, sorted by start, over the fewest first-fit threads in which they nest."""
    threads: list[tuple[list[Event], list[float]]] = []
    for span in spans:
        start, end = span["ts"], span["ts"] + span["dur"]
        for taken, open_ends in threads:
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if not open_ends or end <= open_ends[-1]:
                taken.append(span)
                open_ends.append(end)
                break
        else:
            threads.append(([span], [end]))
    return [taken for taken, _ in threads]
