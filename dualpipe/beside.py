"""A schedule as it was planned and as it was executed, in one text, picture or trace.

Both are blocks drawn by the same code in the same colours, stretched to the same length: what stands below (or beside)
something else took the same share of the step. What is longer than planned, and the waits it causes, shows at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dualpipe.blocks import Block
from dualpipe.costs import Durations
from dualpipe.render import Panel, cell_names, chrome_trace, svg_panels, text_grid
from dualpipe.schedule import Schedule
from dualpipe.simulate import simulate

_EXCHANGES = ("SEND", "RECV")


class Beside:
    """One schedule planned and executed.

    Args:
        schedule: the plan, with or without SEND and RECV.
        executed: its blocks in milliseconds, as `executed.executed_blocks` finds them.
        durations: of the plan; F = I = W = 1 by default.
    """

    def __init__(self, schedule: Schedule, executed: Sequence[Block], durations: Durations | None = None) -> None:
        self.schedule = schedule
        self.planned = simulate(schedule, durations).blocks
        self.executed = executed if any(block.kind in _EXCHANGES for block in self.planned) else _compute(executed)

    def text(self) -> str:
        """`text_grid` of the plan, and to the right of it the execution in as many rows of equal time.

        A cell of the execution names what starts in its row, `|` is an action that goes on, `.` an idle rank.
        """
        planned = text_grid(self.schedule).splitlines()
        rows, ranks = len(planned) - 1, range(self.schedule.num_ranks)
        origin, end = _ends(_compute(self.executed))
        unit = (end - origin) / rows or 1.0
        cells = [[""] * rows for _ in ranks]
        names = [iter(cell_names(self.schedule, rank)) for rank in ranks]
        for block in sorted(_compute(self.executed), key=lambda block: block.start):
            column, first = cells[block.rank], min(int((block.start - origin) / unit), rows - 1)
            for row in range(first + 1, min(math.ceil((block.end - origin) / unit - 1e-9), rows)):
                column[row] = "|"
            begun = "" if column[first] == "|" else column[first]
            column[first] = f"{begun} {next(names[block.rank])}".strip()
        table = [["ms", *(f"rank {rank}" for rank in ranks)]]
        table += [[f"{row * unit:.3g}", *(column[row] or "." for column in cells)] for row in range(rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        left = max(map(len, planned))
        lines = [f"{'planned'.ljust(left)}  ||  executed"]
        for before, line in zip(planned, table, strict=True):
            after = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            lines.append(f"{before.ljust(left)}  ||  {after}")
        return "\n".join([*lines, *self._captions()]) + "\n"

    def svg(self, title: str) -> str:
        """The plan above, the execution below it."""
        planned, executed = self._captions()
        panels = [
            Panel(self.planned, "forwards of one stage", planned),
            Panel(self.executed, "ms", executed),
        ]
        return svg_panels(panels, num_ranks=self.schedule.num_ranks, title=title)

    def trace(self) -> str:
        """A Chrome trace in which each rank has two processes, 2r planned and 2r+1 executed; the plan stretched."""
        (start, end), (origin, last) = _ends(self.planned), _ends(self.executed)
        factor = (last - origin) / (end - start or 1.0)
        names: dict[int, str] = {}
        sides = (self.planned, 0, start, factor), (self.executed, 1, origin, 1.0)
        blocks = [
            replace(b, rank=2 * b.rank + side, start=(b.start - zero) * scale, end=(b.end - zero) * scale)
            for side_blocks, side, zero, scale in sides
            for b in side_blocks
        ]
        for rank in range(self.schedule.num_ranks):
            names |= {2 * rank: f"rank {rank} planned", 2 * rank + 1: f"rank {rank} executed"}
        return chrome_trace(blocks, names=names)

    def _captions(self) -> tuple[str, str]:
        """Length and idle share of both, counted in computations alone."""
        texts = []
        for blocks, name, unit in (
            (self.planned, "planned", "forwards of one stage"),
            (self.executed, "executed", "ms"),
        ):
            start, end = _ends(_compute(blocks))
            busy = sum(block.end - block.start for block in _compute(blocks))
            idle = 1.0 - busy / ((end - start) * self.schedule.num_ranks or 1.0)
            texts.append(f"{name}: {end - start:.4g} {unit}, {idle:.1%} idle")
        return texts[0], texts[1]


def _compute(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if block.kind not in _EXCHANGES]


def _ends(blocks: Sequence[Block]) -> tuple[float, float]:
    return min((block.start for block in blocks), default=0.0), max((block.end for block in blocks), default=0.0)
