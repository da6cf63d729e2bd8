"""Schedules for people: a text grid, a picture, a Chrome trace. CSV is `Schedule.to_csv`.

The picture is one self-contained SVG with its own light background, so that it reads the same on light and dark
pages. Colours come from the Okabe-Ito set (distinct with common colour-vision deficiencies), darkened where text on
them needs it; every cell also carries a number and a tooltip, so colour is never the only carrier.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Kind
from dualpipe.blocks import TRACE_CATEGORY, Block
from dualpipe.schedule import Schedule
from dualpipe.simulate import simulate


class Style(NamedTuple):
    """Fill and text colour of a kind and its name in the legend."""

    fill: str
    ink: str
    name: str


STYLES: dict[str, Style] = {
    "F": Style("#0072b2", "#ffffff", "F forward"),
    "B": Style("#b84a00", "#ffffff", "B full backward"),
    "I": Style("#f0b429", "#1f2328", "I backward for inputs"),
    "W": Style("#2fb58a", "#1f2328", "W backward for weights"),
    "FB": Style("#6b3fa0", "#ffffff", "FB overlapped pair"),
    "SEND": Style("#3d4757", "#ffffff", "SEND"),
    "RECV": Style("#d68fb8", "#1f2328", "RECV"),
}

_INK, _MUTED, _PAPER, _LANE, _LINE = "#1f2328", "#59636e", "#ffffff", "#f2f4f7", "#d1d9e0"
_LEFT, _RIGHT, _TOP, _CELL, _STRIP, _GAP, _CAPTION = 64.0, 20.0, 78.0, 26.0, 7.0, 8.0, 24.0
_FONT = "ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif"


def text_grid(schedule: Schedule) -> str:
    """A table with one column a rank and one row a time unit (F, I, W: 1, B: 2, FB: 3).

    A cell names the action that starts there, `|` one that goes on, `.` an idle rank. With SEND and RECV in the
    schedule, `<` before an action says that it receives first and `>` behind it that it sends; twice for both parts of
    a pair.
    """
    cells = [[""] * math.ceil(simulate(schedule).makespan) for _ in range(schedule.num_ranks)]
    compute = [block for block in simulate(schedule).blocks if block.kind not in ("SEND", "RECV")]
    names = [iter(cell_names(schedule, rank)) for rank in range(schedule.num_ranks)]
    for block in compute:
        column, first = cells[block.rank], round(block.start)
        for row in range(first, round(block.end)):
            column[row] = "|"
        column[first] = next(names[block.rank])
    rows = [["time", *(f"rank {rank}" for rank in range(schedule.num_ranks))]]
    rows += [[str(time), *(cell or "." for cell in row)] for time, row in enumerate(zip(*cells, strict=True))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def cell_names(schedule: Schedule, rank: int) -> list[str]:
    """The short name of each computation of a rank, with its arrows."""
    names: list[str] = []
    arrows = ""
    for action in schedule.ranks[rank]:
        if action.kind is Kind.RECV:
            arrows += "<"
        elif action.kind is Kind.SEND:
            names[-1] += ">"
        else:
            names.append(arrows + "+".join(map(str, action.compute)))
            arrows = ""
    return names


class Panel(NamedTuple):
    """Blocks with a time axis of their own; a caption stands above it."""

    blocks: Sequence[Block]
    unit: str
    caption: str = ""


def svg(blocks: Sequence[Block], *, num_ranks: int, title: str, unit: str) -> str:
    """Draws blocks, one lane a rank, with a legend and a time axis.

    Args:
        blocks: planned or executed actions; SEND and RECV are drawn as a strip under the lane.
        num_ranks: number of lanes.
        title: heading.
        unit: of the times, written at the axis.

    Returns:
        A complete SVG document. Every text is escaped.

    Raises:
        UsageError: a block outside of the lanes, of unknown kind, or with times that can not be drawn.
    """
    return svg_panels([Panel(blocks, unit)], num_ranks=num_ranks, title=title)


def svg_panels(panels: Sequence[Panel], *, num_ranks: int, title: str) -> str:
    """Draws panels of equal width one below another, as `svg` draws one."""
    everything = [block for panel in panels for block in panel.blocks]
    _check(everything, num_ranks)
    width = max(_plot_width(panel.blocks, _extent(panel.blocks)[1]) for panel in panels)
    strip = _STRIP if any(block.kind in ("SEND", "RECV") for block in everything) else 0.0
    lanes = num_ranks * (_CELL + strip + _GAP)
    tops, height = [], _TOP - 44.0
    for panel in panels:
        tops.append(height + 44.0 + (_CAPTION if panel.caption else 0.0))
        height = tops[-1] + lanes
    height += 44.0
    total = _LEFT + width + _RIGHT
    first_stage = {rank: min((b.stage for b in everything if b.rank == rank), default=0) for rank in range(num_ranks)}
    second = any(block.stage != first_stage[block.rank] for block in everything)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {total:.0f} {height:.0f}" role="img" font-family="{_FONT}" font-size="12">',
        f"<title>{_escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="10" fill="{_PAPER}" stroke="{_LINE}"/>',
        f'<text x="20" y="30" font-size="17" font-weight="600" fill="{_INK}">{_escape(title)}</text>',
        _legend({block.kind for block in everything}, second),
    ]
    for panel, top in zip(panels, tops, strict=True):
        parts += _panel(panel, top, width=width, num_ranks=num_ranks, strip=strip, first_stage=first_stage)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _extent(blocks: Sequence[Block]) -> tuple[float, float]:
    """First start, and the time from there to the last end."""
    origin = min((block.start for block in blocks), default=0.0)
    return origin, max((block.end for block in blocks), default=1.0) - origin or 1.0


def _panel(
    panel: Panel, top: float, *, width: float, num_ranks: int, strip: float, first_stage: dict[int, int]
) -> list[str]:
    """Axis, lanes and cells."""
    origin, span = _extent(panel.blocks)
    lane = _CELL + strip + _GAP
    parts = [_axis(span, width, top, top + num_ranks * lane, panel.unit)]
    if panel.caption:
        parts.append(f'<text x="20" y="{top - 14:.1f}" font-weight="600" fill="{_INK}">{_escape(panel.caption)}</text>')
    for rank in range(num_ranks):
        y = top + rank * lane
        parts.append(
            f'<text x="{_LEFT - 10:.0f}" y="{y + _CELL / 2 + 4:.1f}" text-anchor="end" fill="{_INK}">rank {rank}</text>'
            f'<rect x="{_LEFT:.0f}" y="{y:.1f}" width="{width:.1f}" height="{_CELL + strip:.1f}" fill="{_LANE}"/>'
        )
    for block in panel.blocks:
        x = _LEFT + (block.start - origin) / span * width
        wide = (block.end - block.start) / span * width
        second = block.stage != first_stage[block.rank]
        parts.append(_block(block, x, top + block.rank * lane, wide, panel.unit, second))
    return parts


def _check(blocks: Sequence[Block], num_ranks: int) -> None:
    for block in blocks:
        if not 0 <= block.rank < num_ranks:
            raise UsageError(f"{block}", allowed=f"ranks 0 to {num_ranks - 1}", fix="pass the right num_ranks")
        if block.kind not in STYLES:
            raise UsageError(f"{block}", allowed=f"kinds {', '.join(STYLES)}", fix="correct the kind")
        if not (math.isfinite(block.start) and math.isfinite(block.end) and block.end >= block.start):
            raise UsageError(f"{block}", allowed="finite start and end, the end not first", fix="correct the times")


def _plot_width(blocks: Sequence[Block], span: float) -> float:
    """Wide enough for a number in a typical short cell, within what a page can show."""
    lengths = sorted(block.end - block.start for block in blocks if block.kind not in ("SEND", "RECV"))
    short = lengths[len(lengths) // 10] if lengths else 0.0
    return min(max(span / short * 22.0 if short > 0 else 0.0, 900.0), 2600.0)


def _legend(kinds: set[str], second: bool) -> str:
    """Swatches of the kinds that occur, and the mark of a rank's second stage."""
    x, parts = 20.0, []
    for kind, style in STYLES.items():
        if kind in kinds:
            parts.append(
                f'<rect x="{x:.0f}" y="46" width="14" height="14" rx="3" fill="{style.fill}"/>'
                f'<text x="{x + 20:.0f}" y="57.5" fill="{_MUTED}">{_escape(style.name)}</text>'
            )
            x += 36.0 + 6.6 * len(style.name)
    if second:
        parts.append(
            f'<rect x="{x:.0f}" y="46" width="14" height="14" rx="3" fill="{_MUTED}"/>'
            f'<rect x="{x + 2:.0f}" y="48" width="10" height="3" fill="{_PAPER}"/>'
            f'<text x="{x + 20:.0f}" y="57.5" fill="{_MUTED}">the rank\'s second stage</text>'
        )
    return "".join(parts)


def _axis(span: float, width: float, top: float, y: float, unit: str) -> str:
    """Ticks at round numbers from the first start."""
    step = 10.0 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 12)
    parts = []
    for i in range(int(span / step) + 1):
        x, value = _LEFT + i * step / span * width, f"{i * step:g}"
        parts.append(
            f'<line x1="{x:.1f}" y1="{top - 6:.0f}" x2="{x:.1f}" y2="{y + 2:.1f}" stroke="{_LINE}"/>'
            f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle" font-size="11" fill="{_MUTED}">{value}</text>'
        )
    end = _LEFT + width
    caption = _escape(f"time ({unit})")
    return "".join(parts) + (
        f'<text x="{end:.1f}" y="{y + 32:.1f}" text-anchor="end" font-size="11" fill="{_MUTED}">{caption}</text>'
    )


def _block(block: Block, x: float, y: float, width: float, unit: str, second: bool) -> str:
    """One cell with tooltip, number and second-stage mark; SEND and RECV lie in the strip below."""
    style = STYLES[block.kind]
    what = f"{block.kind} stage {block.stage} microbatch {block.label}"
    tip = _escape(f"{what}: {block.start:.6g} to {block.end:.6g} {unit}")
    if block.kind in ("SEND", "RECV"):
        shape = f'x="{x:.2f}" y="{y + _CELL + 1:.2f}" width="{max(width, 2.0):.2f}" height="{_STRIP - 1:.1f}"'
        return f'<g><title>{tip}</title><rect {shape} fill="{style.fill}"/></g>'
    inner = max(width - 1.0, 0.6)
    parts = [
        f'<g><title>{tip}</title><rect x="{x:.2f}" y="{y:.2f}" width="{inner:.2f}" height="{_CELL:.1f}" '
        f'rx="{min(3.0, inner / 4):.2f}" fill="{style.fill}"/>'
    ]
    pair = block.kind == "FB"
    if inner >= 6.0 and (second or pair):
        # A pair holds both stages of its rank: the mark sits over the half (F left, B right) of the second stage.
        start = x + 2.0 + (inner / 2 if pair and not second else 0.0)
        length = (inner / 2 if pair else inner) - 4.0
        parts.append(
            f'<rect x="{start:.2f}" y="{y + 2:.2f}" width="{max(length, 1.0):.2f}" height="3" fill="{style.ink}"/>'
        )
    if inner >= 6.6 * len(block.label) + 3.0:
        parts.append(
            f'<text x="{x + inner / 2:.2f}" y="{y + _CELL / 2 + 5.5:.2f}" text-anchor="middle" font-size="11" '
            f'fill="{style.ink}">{_escape(block.label)}</text>'
        )
    return "".join(parts) + "</g>"


def _escape(text: str) -> str:
    """Text safe inside XML elements and attributes; characters XML forbids become a replacement mark."""
    kept = "".join(c if c in "\t\n\r" or (c >= " " and not 0xD7FF < ord(c) < 0xE000) else "\ufffd" for c in text)
    return html.escape(kept.replace("\ufffe", "\ufffd").replace("\uffff", "\ufffd"), quote=True)


def chrome_trace(blocks: Sequence[Block], *, unit_us: float = 1000.0, names: Mapping[int, str] | None = None) -> str:
    """The blocks as a Chrome trace (chrome://tracing, Perfetto): one process a rank, computation and messages apart.

    Args:
        blocks: planned or executed blocks.
        unit_us: microseconds of one time unit of the blocks.
        names: what each rank is called; "rank 0" and so on by default.

    Equal actions have equal names, which viewers give equal colours.

    Returns:
        JSON, readable again by `blocks.blocks_from_events`.
    """
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": (names or {}).get(rank, f"rank {rank}")}}
        for rank in sorted({block.rank for block in blocks})
    ]
    for block in blocks:
        args: dict[str, object] = {"kind": block.kind, "stage": block.stage, "microbatch": block.microbatch}
        if "|" in block.label:
            args["backward_microbatch"] = int(block.label.partition("|")[2])
        events.append(
            {
                "name": f"{block.kind} {block.label}",
                "cat": TRACE_CATEGORY,
                "ph": "X",
                "ts": block.start * unit_us,
                "dur": (block.end - block.start) * unit_us,
                "pid": block.rank,
                "tid": block.kind if block.kind in ("SEND", "RECV") else "compute",
                "args": args,
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
