"""What a traced training step did, read back from the spans of all ranks.

The drawing shows what was executed, not what was planned, so everything here comes from the trace: which step was the
last one that all ranks recorded, which actions the pipeline ran in it, what communication went on beside it, and how
much of the time each rank worked, waited or communicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
Interval = tuple[float, float]

COMPUTE = ("F", "B", "I", "W", "FB")
TRANSFER = ("SEND", "RECV")
COMMUNICATION = ("layout", "dispatch", "combine")


@dataclass(frozen=True, slots=True)
class Step:
    """One executed step of all ranks; times in microseconds on the common clock.

    Attributes:
        number: the training step, None where the trace does not say.
        start, end: from the first to the last span of pipeline and communication.
        pipeline: for each rank its pipeline spans, by start.
        communication: for each rank its expert-parallel spans, by start.
    """

    number: int | None
    start: float
    end: float
    pipeline: list[list[Event]]
    communication: list[list[Event]]


@dataclass(frozen=True, slots=True)
class Share:
    """How one rank spent the step, in seconds.

    Attributes:
        running: in F, B, I, W or FB, sends taken off; waiting for expert-parallel communication is part of it.
        sending, waiting: in SEND and in RECV.
        idle: in no action.
        communicating: in expert-parallel communication, whatever the pipeline did meanwhile.
        num_bytes: as that communication counts its bytes.
    """

    running: float
    sending: float
    waiting: float
    idle: float
    communicating: float
    num_bytes: int


def last_step(trace_events: Sequence[Iterable[Event]]) -> Step | None:
    """The last step that every rank recorded; None where nothing was recorded.

    Args:
        trace_events: for each rank the events of its recorder; a span of category "step" marks a step.
    """
    ranks = [sorted(mine, key=lambda event: event["ts"]) for mine in trace_events]
    windows = [
        {event["args"]["step"]: (event["ts"], _end(event)) for event in mine if event["cat"] == "step"}
        for mine in ranks
    ]
    common = set.intersection(*(set(mine) for mine in windows)) if windows else set()
    number = max(common) if common else None
    pipeline, communication = [], []
    for mine, window in zip(ranks, windows, strict=True):
        low, high = window[number] if number is not None else (float("-inf"), float("inf"))
        inside = [event for event in mine if low <= event["ts"] < high]
        pipeline.append([event for event in inside if event["cat"] == "pipeline"])
        communication.append([event for event in inside if event["cat"] == "ep"])
    spans = [event for mine in (*pipeline, *communication) for event in mine]
    if not spans:
        return None
    start, end = min(event["ts"] for event in spans), max(_end(event) for event in spans)
    return Step(number, start, end, pipeline, communication)


def shares(step: Step) -> list[Share]:
    """How each rank spent the step. A SEND stands inside the action that made what is sent, and is taken off it."""
    result = []
    for mine, others in zip(step.pipeline, step.communication, strict=True):
        kinds: dict[str, list[Interval]] = {}
        for event in mine:
            kinds.setdefault(str(event["args"]["kind"]), []).append((event["ts"], _end(event)))
        compute = [interval for kind in COMPUTE for interval in kinds.get(kind, [])]
        send, receive = kinds.get("SEND", []), kinds.get("RECV", [])
        busy = covered([*compute, *send, *receive])
        result.append(
            Share(
                running=(covered([*compute, *send]) - covered(send)) / 1e6,
                sending=covered(send) / 1e6,
                waiting=covered(receive) / 1e6,
                idle=(step.end - step.start - busy) / 1e6,
                communicating=covered([(event["ts"], _end(event)) for event in others]) / 1e6,
                num_bytes=sum(int(event["args"].get("bytes", 0)) for event in others),
            )
        )
    return result


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])
