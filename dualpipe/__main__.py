"""`python -m dualpipe show SCHEDULE --ranks P --microbatches M [--format text|csv|svg] [--comm] [--output FILE]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from comm_core.runtime.errors import MTMoEError
from dualpipe.render import svg, text_grid
from dualpipe.schedule import SCHEDULES, Schedule, build, with_communication
from dualpipe.simulate import Durations, simulate

_HOP = 0.25
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
    parser = _Parser(prog="python -m dualpipe", description="Pipeline schedules as text, CSV or a picture.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    show = commands.add_parser("show", help="print a schedule", description="Prints a schedule.")
    show.add_argument("schedule", help=f"one of: {', '.join(sorted(SCHEDULES))}")
    show.add_argument("--ranks", type=int, required=True, help="pipeline ranks P")
    show.add_argument("--microbatches", type=int, required=True, help="microbatches a step M")
    show.add_argument("--stages-per-rank", type=int, metavar="V", help="only for the interleaved schedules (default 2)")
    show.add_argument(
        "--format", choices=("text", "csv", "svg"), default="text", help="text grid, CSV (a row a rank), SVG"
    )
    show.add_argument("--comm", action="store_true", help="with SEND and RECV")
    show.add_argument("--output", type=Path, help="file to write; standard output by default")
    return parser


def _render(schedule: Schedule, form: str, comm: bool) -> str:
    """The schedule in one format. The picture takes F = I = W = 1, B = 2, FB = 3, and a hop of 0.25 with --comm."""
    if form == "csv":
        return schedule.to_csv()
    if form == "text":
        return text_grid(schedule)
    plan = simulate(schedule, Durations(hop=_HOP if comm else 0.0))
    title = f"{_TITLES[schedule.name]}: {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
    if comm:
        title += f", a hop takes {_HOP:g} of a forward"
    return svg(plan.blocks, num_ranks=schedule.num_ranks, title=title, unit="forwards of one stage")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, or 2 for a user's error, told in one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        schedule = build(
            options.schedule,
            options.ranks,
            options.microbatches,
            stages_per_rank=options.stages_per_rank,
            allow_few=True,
        )
        if options.comm:
            schedule = with_communication(schedule)
        document = _render(schedule, options.format, options.comm)
        if options.output is None:
            sys.stdout.write(document)
        else:
            options.output.write_text(document, encoding="utf-8")
    except MTMoEError as error:
        print(f"python -m dualpipe: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"python -m dualpipe: error: can not write {options.output}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
