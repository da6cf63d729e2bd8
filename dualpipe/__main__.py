"""`python -m dualpipe show | simulate | compare | validate | plan`: pipeline schedules drawn, timed, checked, chosen.

Each command explains itself: `python -m dualpipe compare --help`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, get_args

from comm_core.runtime.errors import MTMoEError, UsageError
from dualpipe.beside import Beside
from dualpipe.compare import columns, compare, report, table
from dualpipe.costs import parse as parse_costs
from dualpipe.executed import executed_blocks, read_trace
from dualpipe.lists import read_csv
from dualpipe.plan import Workload, plan
from dualpipe.render import chrome_trace, svg, text_grid
from dualpipe.schedule import SCHEDULES, BackwardSplit, Schedule, build, with_communication
from dualpipe.simulate import Durations, simulate
from dualpipe.validate import validate

_HOP = 0.25
_PLAN = (
    "Prints the schedules, numbers of microbatches and layers a stage that take least time and fit in memory. Costs "
    "are for one layer and one sample."
)
_TITLES = {
    "dualpipe": "DualPipe",
    "dualpipev": "DualPipeV",
    "zbv": "ZB-V",
    "zb1p": "ZB-H1",
    "zbh2": "ZB-H2",
    "interleaved": "Interleaved 1F1B",
    "interleaved_pairs": "Interleaved 1F1B with pairs",
    "1f1b": "1F1B",
}


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> _Parser:
    parser = _Parser(prog="python -m dualpipe", description="Pipeline schedules drawn, timed, checked and chosen.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    _add_show(commands.add_parser("show", help="print a schedule", description="Prints a schedule."))
    timed = commands.add_parser(
        "simulate",
        help="time one schedule",
        description="Prints makespan, idle (of the rank where it is largest), bubble_ratio (idle of all ranks over "
        "ranks x makespan) and the peak of live activations of each rank.",
    )
    _add_schedule(timed)
    _add_costs(timed)
    timed.add_argument(
        "--stage-costs",
        action="append",
        default=[],
        metavar="STAGE:F=2,...",
        help="costs of one stage that differ; may be repeated",
    )
    several = commands.add_parser(
        "compare", help="time every schedule", description="Prints every schedule for one setting, fastest first."
    )
    _add_sizes(several)
    _add_costs(several)
    checked = commands.add_parser(
        "validate",
        help="check a schedule in a file",
        description="Checks a schedule written by show --format csv, or by torch: complete, in order, no deadlock.",
    )
    checked.add_argument("file", type=Path, help="CSV, a row a rank")
    checked.add_argument("--max-live", type=int, metavar="N", help="most stage activations a rank may hold at once")
    _add_plan(commands.add_parser("plan", help="choose a schedule", description=_PLAN))
    return parser


def _add_show(show: argparse.ArgumentParser) -> None:
    _add_schedule(show)
    show.add_argument(
        "--format",
        choices=("text", "csv", "svg", "trace"),
        default="text",
        help="text grid, CSV (a row a rank), SVG, Chrome trace (a forward is 1 ms)",
    )
    show.add_argument("--comm", action="store_true", help="with SEND and RECV")
    show.add_argument(
        "--executed",
        type=Path,
        metavar="TRACE.json",
        help="beside it, in the same colours, the last step of a trace that ran it (text, svg, trace)",
    )
    show.add_argument("--output", type=Path, help="file to write; standard output by default")


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ranks", type=int, required=True, help="pipeline ranks P")
    command.add_argument("--layers", type=int, required=True, help="layers without embedding and head")
    command.add_argument("--samples", type=int, required=True, help="samples a step of one pipeline")
    command.add_argument("--costs", default="FB=3", help="durations of a layer for one sample, as in simulate")
    for name, costs in (("embedding", "F=0,I=0,W=0"), ("head", "F=0,I=0,W=0")):
        command.add_argument(
            f"--{name}", default=costs, metavar="COSTS", help=f"durations of the {name}, for one sample"
        )
    numbers = {
        "overhead": "fixed time of every action",
        "activation": "memory that a layer keeps for one sample",
        "layer-memory": "memory of a layer's parameters, gradients and optimizer state",
        "embedding-memory": "the same of the embedding",
        "head-memory": "the same of the head",
    }
    for name, text in numbers.items():
        default = 1.0 if name == "activation" else 0.0
        command.add_argument(
            f"--{name}", type=float, default=default, metavar="X", help=f"{text} (default {default:g})"
        )
    command.add_argument("--memory", type=float, default=math.inf, metavar="X", help="most memory a rank may use")
    command.add_argument("--schedules", help="names to choose from, with commas; all by default")
    command.add_argument("--max-stages-per-rank", type=int, default=2, metavar="V", help="of the interleaved schedules")
    command.add_argument("--top", type=int, default=5, metavar="N", help="choices to print (default 5)")
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_sizes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ranks", type=int, required=True, help="pipeline ranks P")
    command.add_argument("--microbatches", type=int, required=True, help="microbatches a step M")
    command.add_argument(
        "--stages-per-rank", type=int, metavar="V", help="stages a rank of the interleaved schedules (default 2)"
    )


def _add_schedule(command: argparse.ArgumentParser) -> None:
    command.add_argument("schedule", help=f"one of: {', '.join(sorted(SCHEDULES))}")
    _add_sizes(command)
    command.add_argument(
        "--backward-split",
        choices=[choice.replace("_", "-") for choice in get_args(BackwardSplit)],
        default="always",
        help="where I and W may stand apart: where the schedule says (default), before each rank's cool-down, nowhere",
    )


def _add_costs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--costs",
        default="FB=3",
        help="durations, for example F=1,I=1,W=1,FB=3,hop=0.25,a2a=0.5; B is I+W and FB is F+B where not given; a2a is "
        "the all-to-all that an F, I or B alone can not hide (default F=1,I=1,W=1,FB=3)",
    )
    command.add_argument(
        "--cost-unit",
        choices=("model", "stage"),
        default="model",
        help="costs and activations are for 1/P of the model, so that schedules compare at equal work (default), or "
        "for one stage of the schedule",
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def _build(options: argparse.Namespace) -> Schedule:
    return build(
        options.schedule,
        options.ranks,
        options.microbatches,
        backward_split=options.backward_split.replace("-", "_"),
        stages_per_rank=options.stages_per_rank,
        allow_few=True,
    )


def _show(options: argparse.Namespace) -> str:
    """The schedule in one format. Picture and trace: F = I = W = 1, B = 2, FB = 3, and a hop of 0.25 with --comm."""
    plain = _build(options)
    schedule = with_communication(plain) if options.comm else plain
    title = f"{_TITLES[schedule.name]}: {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
    costs = Durations(hop=_HOP if options.comm else 0.0)
    if options.executed is not None:
        if options.format == "csv":
            raise UsageError("--executed with --format csv", allowed="text, svg, trace", fix="choose one of them")
        both = Beside(schedule, executed_blocks(plain, read_trace(options.executed)), costs)
        return {"text": both.text, "trace": both.trace, "svg": lambda: both.svg(title)}[options.format]()
    if options.format == "csv":
        return schedule.to_csv()
    if options.format == "text":
        return text_grid(schedule)
    timed = simulate(schedule, costs)
    if options.format == "trace":
        return chrome_trace(timed.blocks)
    if options.comm:
        title += f", a hop takes {_HOP:g} of a forward"
    return svg(timed.blocks, num_ranks=schedule.num_ranks, title=title, unit="forwards of one stage")


def _simulate(options: argparse.Namespace) -> str:
    overrides = []
    for text in options.stage_costs:
        stage, separator, costs = text.partition(":")
        if not separator or not stage.strip().isdigit():
            raise UsageError(f"--stage-costs {text}", allowed="STAGE:NAME=NUMBER,...", fix="for example 0:F=2,W=1.5")
        overrides.append((int(stage), costs))
    costs = parse_costs(options.costs)
    result = report(_build(options), costs, cost_unit=options.cost_unit, overrides=overrides)
    if options.json:
        return json.dumps(result.as_dict()) + "\n"
    peaks = " ".join(f"{peak:g}" for peak in result.peak_activations)
    return (
        f"{result.schedule}: {result.ranks} ranks, {result.microbatches} microbatches, {result.stages} stages\n"
        f"makespan          {result.makespan:.6g}\n"
        f"idle              {result.idle:.6g}\n"
        f"bubble_ratio      {result.bubble_ratio:.4f}\n"
        f"peak activations  {peaks}\n"
    )


def _compare(options: argparse.Namespace) -> str:
    reports, refused = compare(
        options.ranks,
        options.microbatches,
        parse_costs(options.costs),
        cost_unit=options.cost_unit,
        stages_per_rank=2 if options.stages_per_rank is None else options.stages_per_rank,
    )
    if options.json:
        return json.dumps({"schedules": [item.as_dict() for item in reports], "refused": refused}) + "\n"
    return table(reports, refused)


def _validate(options: argparse.Namespace) -> str:
    schedule = read_csv(options.file.read_text(encoding="utf-8"), name=str(options.file))
    validate(schedule, max_live=options.max_live)
    return (
        f"valid: {schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, "
        f"at most {max(simulate(schedule).peak_live)} live activations a rank\n"
    )


def _plan(options: argparse.Namespace) -> str:
    nothing = Durations(F=0.0, I=0.0, W=0.0)
    work = Workload(
        layers=options.layers,
        samples=options.samples,
        layer=parse_costs(options.costs),
        embedding=parse_costs(options.embedding, base=nothing),
        head=parse_costs(options.head, base=nothing),
        overhead=options.overhead,
        activation=options.activation,
        layer_memory=options.layer_memory,
        embedding_memory=options.embedding_memory,
        head_memory=options.head_memory,
    )
    plans = plan(
        options.ranks,
        work,
        memory=options.memory,
        schedules=options.schedules.split(",") if options.schedules else None,
        max_stages_per_rank=options.max_stages_per_rank,
    )[: max(1, options.top)]
    if options.json:
        return json.dumps([item.as_dict() for item in plans]) + "\n"
    rows = [["schedule", "microbatches", "makespan", "bubble", "memory", "layers of the stages"]]
    for item in plans:
        name = item.schedule + (f" v={item.stages_per_rank}" if item.stages_per_rank else "")
        layers = " ".join(map(str, item.layers))
        rows.append(
            [
                name,
                str(item.microbatches),
                f"{item.makespan:.6g}",
                f"{item.bubble_ratio:.1%}",
                f"{max(item.memory):g}",
                layers,
            ]
        )
    return columns(rows)


_COMMANDS: dict[str, Callable[[argparse.Namespace], str]] = {
    "show": _show,
    "simulate": _simulate,
    "compare": _compare,
    "validate": _validate,
    "plan": _plan,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, or 2 for a user's error, told in one line on stderr."""
    options = _parser().parse_args(arguments)
    output: Path | None = getattr(options, "output", None)
    try:
        document = _COMMANDS[options.command](options)
        if output is None:
            sys.stdout.write(document)
        else:
            output.write_text(document, encoding="utf-8")
    except MTMoEError as error:
        print(f"python -m dualpipe: error: {error}", file=sys.stderr)
        return 2
    except (OSError, UnicodeDecodeError) as error:
        verb, path = ("read", options.file) if options.command == "validate" else ("write", output)
        print(f"python -m dualpipe: error: can not {verb} {path}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
