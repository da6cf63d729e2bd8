"""Schedules side by side at equal work: what each takes, how long it idles, what it holds.

All figures are for the same model on the same ranks. Durations are those of 1/P of the model, and activations are
counted in what 1/P of the model keeps for one microbatch, which is a stage of 1F1B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from comm_core.runtime.errors import UsageError
from dualpipe.costs import Durations, of_stages, parse, part_of_model
from dualpipe.lists import Schedule, check_positive
from dualpipe.schedule import SCHEDULES, STAGES_PER_RANK, build
from dualpipe.simulate import simulate

CostUnit = Literal["model", "stage"]
"""What durations and activations are given for: 1/P of the model, or one stage of the schedule."""


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one schedule.

    Attributes:
        schedule: its name.
        ranks: pipeline ranks P.
        microbatches: microbatches a step.
        stages: stages of the model.
        copies: copies of the parameters over all ranks; 2 for dualpipe.
        makespan: time of the step.
        idle: makespan minus the time a rank computes, of the rank where this is largest.
        bubble_ratio: the idle time of all ranks over P times the makespan.
        peak_activations: per rank, the largest amount of activations held at once.
    """

    schedule: str
    ranks: int
    microbatches: int
    stages: int
    copies: int
    makespan: float
    idle: float
    bubble_ratio: float
    peak_activations: tuple[float, ...]

    def as_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return dataclasses.asdict(self)


def report(
    schedule: Schedule,
    durations: Durations | None = None,
    *,
    cost_unit: CostUnit = "model",
    overrides: Sequence[tuple[int, str]] = (),
) -> Report:
    """Simulates one schedule.

    Args:
        schedule: what to play.
        durations: durations of 1/P of the model, or of a stage with cost_unit "stage".
        cost_unit: see `CostUnit`; activations are counted in the same unit.
        overrides: (stage, costs) pairs, costs as `costs.parse` reads them, for stages that differ.
    """
    base = durations or Durations()
    stages = [base] * schedule.num_stages
    for stage, text in overrides:
        if not 0 <= stage < schedule.num_stages:
            raise UsageError(
                f"costs of stage {stage}", allowed=f"stages 0 to {schedule.num_stages - 1}", fix="correct the stage"
            )
        stages[stage] = parse(text, base=stages[stage])
    if cost_unit == "model":
        stages = [of_stages(schedule, stage) for stage in stages]
    result = simulate(schedule, stages)
    unit = part_of_model(schedule) if cost_unit == "model" else 1.0
    return Report(
        schedule=schedule.name,
        ranks=schedule.num_ranks,
        microbatches=schedule.num_microbatches,
        stages=schedule.num_stages,
        copies=schedule.num_directions,
        makespan=result.makespan,
        idle=result.idle,
        bubble_ratio=result.bubble_ratio,
        peak_activations=tuple(live * unit for live in result.peak_live),
    )


def compare(
    ranks: int,
    microbatches: int,
    durations: Durations | None = None,
    *,
    cost_unit: CostUnit = "model",
    stages_per_rank: int = 2,
) -> tuple[list[Report], dict[str, str]]:
    """Every schedule for one setting.

    Args:
        ranks: pipeline ranks.
        microbatches: microbatches a step.
        durations: as in `report`.
        cost_unit: as in `report`.
        stages_per_rank: stages a rank of the interleaved schedules.

    Returns:
        The reports, shortest makespan first, and the reason of each schedule that can not run with these sizes.
    """
    check_positive("compare", ranks, microbatches)
    check_positive("compare", stages_per_rank, what="stages a rank")
    reports, refused = [], {}
    for name in SCHEDULES:
        try:
            schedule = build(
                name,
                ranks,
                microbatches,
                stages_per_rank=stages_per_rank if name in STAGES_PER_RANK else None,
                allow_few=True,
            )
        except UsageError as error:
            refused[name] = str(error)
            continue
        reports.append(report(schedule, durations, cost_unit=cost_unit))
    return sorted(reports, key=lambda item: (item.makespan, max(item.peak_activations))), refused


def table(reports: Sequence[Report], refused: dict[str, str]) -> str:
    """The reports as text, one a line, and below them what can not run."""
    slowest = next((item.makespan for item in reports if item.schedule == "1f1b"), 0.0)
    rows = [["schedule", "makespan", "idle", "bubble", "peak activations", "parameters", "speed-up over 1f1b"]]
    for item in reports:
        low, high = min(item.peak_activations), max(item.peak_activations)
        rows.append(
            [
                item.schedule,
                f"{item.makespan:.6g}",
                f"{item.idle:.6g}",
                f"{item.bubble_ratio:.1%}",
                f"{high:g}" if low == high else f"{low:g} to {high:g}",
                f"{item.copies}x",
                f"{slowest / item.makespan:.2f}" if slowest and item.makespan else "-",
            ]
        )
    lines = [f"{name}: not with these sizes ({reason})\n" for name, reason in refused.items()]
    return columns(rows) + "".join(lines)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text, the columns aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "".join(f"{line}\n" for line in lines)
