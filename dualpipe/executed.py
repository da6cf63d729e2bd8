"""One executed step found again in a trace: which of its spans are the actions of a planned schedule.

A trace may hold many steps, evaluations between them, several processes for each pipeline rank (expert or data
parallel), and other work. A process belongs to the pipeline rank whose stages it ran. Its computations, in the order of
their start, must contain the planned list of that rank as it stands; the last place where they do is the step. So what
is drawn beside a plan is that plan executed, or an error names the first action that was not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Action, StageKey
from dualpipe.blocks import TRACE_CATEGORY, Block, blocks_from_events
from dualpipe.schedule import Schedule

Event = Mapping[str, Any]


def read_trace(path: Path) -> list[Event]:
    """The events of a Chrome trace file: an object with "traceEvents", or a list.

    Raises:
        UsageError: it can not be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        events = found.get("traceEvents") if isinstance(found, dict) else found
        problem = "no list of events"
    except (OSError, ValueError) as error:
        events, problem = None, str(error)
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UsageError(
            f"trace {path} ({problem})",
            allowed="a Chrome trace: a JSON list of events, or an object with traceEvents",
            fix="pass a trace.json of a run, or what comm_core.runtime.trace.Recorder.events gives",
        )
    return events


def executed_blocks(schedule: Schedule, events: Iterable[Event]) -> list[Block]:
    """The last execution of `schedule` in a trace.

    Args:
        schedule: what was executed, without SEND and RECV.
        events: events of all ranks as `comm_core.runtime.trace.Recorder.events` gives them. Of several processes with
            the same stages the one with the lowest number is taken.

    Returns:
        Blocks in milliseconds from the first of them, ranks as in the schedule; SEND and RECV where they were traced.

    Raises:
        UsageError: a rank of the schedule has no process, or no step with the planned actions.
    """
    try:
        by_process = _by_process(events)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"a pipeline event without {error}", allowed="the executor's events", fix="pass the trace as it was written"
        ) from None
    chosen: list[Event] = []
    for rank, keys in enumerate(map(schedule.stages_of, range(schedule.num_ranks))):
        process = min((pid for pid, mine in by_process.items() if _stages(mine) == set(keys)), default=None)
        if process is None:
            stages = ", ".join(str(key.stage) for key in keys)
            raise UsageError(
                f"a trace of {len(by_process)} processes with pipeline actions, none with the stages {stages} of rank "
                f"{rank}",
                allowed=f"one process for each of {schedule.num_ranks} ranks of {schedule.name}",
                fix="name the schedule and the number of ranks that were run",
            )
        chosen += [{**event, "pid": rank} for event in _step(schedule.ranks[rank], by_process[process], rank)]
    return blocks_from_events(chosen)


def _by_process(events: Iterable[Event]) -> dict[int, list[Event]]:
    """The pipeline events of each process, by start."""
    found: dict[int, list[Event]] = {}
    for event in events:
        if event.get("cat") == TRACE_CATEGORY and event.get("ph", "X") == "X":
            float(event["ts"]), float(event["dur"]), event["args"]["kind"]
            found.setdefault(int(event["pid"]), []).append(event)
    return {pid: sorted(mine, key=lambda event: float(event["ts"])) for pid, mine in found.items()}


def _is_compute(event: Event) -> bool:
    return event["args"]["kind"] not in ("SEND", "RECV")


def _work(event: Event) -> tuple[object, ...]:
    """What an event did, comparable with `_planned`."""
    args = event["args"]
    pair = (args["backward_stage"], args["backward_microbatch"]) if args["kind"] == "FB" else ()
    return str(args["kind"]), args["stage"], args["microbatch"], *pair


def _planned(action: Action) -> tuple[object, ...]:
    first, *rest = action.compute
    return str(action.kind), first.stage, first.microbatch, *((rest[0].stage, rest[0].microbatch) if rest else ())


def _stages(events: Sequence[Event]) -> set[StageKey]:
    """The stages that a process ran forwards of."""
    forwards = [event["args"] for event in events if event["args"]["kind"] in ("F", "FB")]
    return {StageKey(int(args["stage"]), int(args.get("direction", 0))) for args in forwards}


def _step(actions: Sequence[Action], events: Sequence[Event], rank: int) -> list[Event]:
    """The events of the last place where a process did exactly these actions in this order."""
    compute = [event for event in events if _is_compute(event)]
    wanted, done = [_planned(action) for action in actions], [_work(event) for event in compute]
    starts = [i for i in range(len(done) - len(wanted) + 1) if done[i : i + len(wanted)] == wanted]
    if not starts:
        raise UsageError(
            f"a trace in which pipeline rank {rank} {_difference(wanted, done)}",
            allowed="the actions of the schedule in their order",
            fix="name the schedule, microbatches and --backward-split that were run",
        )
    first, last = starts[-1], starts[-1] + len(wanted) - 1
    before = _end(compute[first - 1]) if first else float("-inf")
    after = float(compute[last + 1]["ts"]) if last + 1 < len(compute) else float("inf")
    begin, end = float(compute[first]["ts"]), float(compute[last]["ts"])
    # A RECV stands before the computation that needs it, a SEND within or behind the one that made what it sends.
    spans = {"RECV": (before, end), "SEND": (begin, math.nextafter(after, -math.inf))}
    kept = list(compute[first : last + 1])
    for event in events:
        low, high = spans.get(event["args"]["kind"], (1.0, 0.0))
        if low <= float(event["ts"]) <= high:
            kept.append(event)
    return sorted(kept, key=lambda event: float(event["ts"]))


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def _difference(wanted: Sequence[tuple[object, ...]], done: Sequence[tuple[object, ...]]) -> str:
    """The first action that was not executed as planned, from the last place where the first one was."""
    begins = [i for i, work in enumerate(done) if work == wanted[0]]
    if not begins:
        return f"never does {_name(wanted[0])}, the first action planned"
    length, start = max((_agreement(wanted, done[i:]), i) for i in begins)
    found = _name(done[start + length]) if start + length < len(done) else "nothing"
    return f"does {found} where {_name(wanted[length])} is planned (position {length})"


def _agreement(wanted: Sequence[object], done: Sequence[object]) -> int:
    """How many actions are equal from the start."""
    return next((i for i, (a, b) in enumerate(zip(wanted, done, strict=False)) if a != b), min(len(wanted), len(done)))


def _name(work: tuple[object, ...]) -> str:
    kind, stage, microbatch, *rest = work
    return f"{stage}F{microbatch}+{rest[0]}B{rest[1]}" if rest else f"{stage}{kind}{microbatch}"
