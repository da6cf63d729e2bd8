"""Pictures of the report as inline SVG: a curve, a heat map, tables.

They are drawn as plain text because the report must be one file that opens without a network for years. Colours are
CSS variables of the page, so that the pictures follow its light and dark theme. Whatever comes from outside passes
`text` before it enters the page.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence

_MOST_POINTS = 1200
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def text(value: object) -> str:
    """Any value as text of an HTML page: escaped for elements and attributes, control characters made visible."""
    return html.escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True)


def number(value: float) -> str:
    """A number for people: four significant digits, thousands grouped, millions and more with a letter."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if limit <= size < 1e15:
            return f"{value / limit:.4g}{letter}"
    if value == 0 or 1e-3 <= size < 1e3:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e3 <= size < 1e6 else f"{value:.3g}"


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) that cover low to high with about `about` steps."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def thin_out(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most about `most` points that still show every extreme: lowest and highest of each run of neighbours."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = [points[0]]
    for start in range(0, len(points), size):
        run = points[start : start + size]
        extremes = {min(run, key=lambda p: p[1]), max(run, key=lambda p: p[1])}
        kept += [point for point in sorted(extremes) if point != kept[-1]]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def line_chart(
    points: Iterable[tuple[float, float]], *, label: str, width: int = 1160, height: int = 320, small: bool = False
) -> str:
    """A curve over training steps. Values that are not finite are left out and counted below the curve."""
    everything = list(points)
    finite = [point for point in everything if math.isfinite(point[1])]
    if not finite:
        return '<p class="empty">No finite values.</p>'
    left, right, top, bottom = (46, 8, 10, 22) if small else (54, 16, 14, 34)
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    low, high = min(ys), max(ys)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = (max(0.0, low - margin) if low >= 0 else low - margin), high + margin
    first, last = min(xs), max(xs)
    span_x = (last - first) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - first) / span_x * (width - left - right),
            top + (high - y) / (high - low) * (height - top - bottom),
        )

    parts = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img"><title>{text(label)}</title>']
    for value in ticks(low, high, 3 if small else 5):
        _, y = place(first, value)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 7}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in ticks(first, last, 3 if small else 8):
        if value == int(value):
            x, _ = place(value, low)
            # The last label must not leave the picture.
            x, anchor = (x, "middle") if x < width - 30 else (min(x + 12, width - 2), "end")
            label_at = f'x="{x:.1f}" y="{height - bottom + 16}" text-anchor="{anchor}"'
            parts.append(f'<text class="tick" {label_at}>{value:,.0f}</text>')
    if not small:
        parts.append(f'<text class="tick" x="{width - right}" y="{height - 3}" text-anchor="end">step</text>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in thin_out(finite)))
    parts.append(f'<polyline class="curve" points="{path}"/>')
    for point in (finite[0], finite[-1]):
        x, y = place(*point)
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>step {point[0]:.0f}: ')
        parts.append(f"{number(point[1])}</title></circle>")
    parts.append("</svg>")
    missing = len(everything) - len(finite)
    return "".join(parts) + (f'<p class="empty">{missing} steps without a finite value.</p>' if missing else "")


def heat_map(values: Sequence[Sequence[float]], *, row_label: str, column_label: str) -> str:
    """A table of numbers with coloured cells: each number against the mean of its row, 1 being the mean.

    A row whose sum is 0 is left out.
    """
    rows = [(place, row) for place, row in enumerate(values) if sum(row) > 0]
    if not rows:
        return '<p class="empty">No counts.</p>'
    columns = max(len(row) for _, row in rows)
    with_numbers = columns <= 32
    head = (
        "".join(f'<th scope="col">{column}</th>' for column in range(columns))
        if with_numbers
        else (f'<th scope="col" colspan="{columns}">0 to {columns - 1}</th>')
    )
    parts = [
        f'<table class="heat{"" if with_numbers else " dense"}"><caption>{text(column_label)}</caption>',
        f'<thead><tr><th scope="col">{text(row_label)}</th>{head}<th scope="col" class="max">max</th></tr></thead>',
        "<tbody>",
    ]
    for place, row in rows:
        mean = sum(row) / len(row)
        cells = []
        for column, value in enumerate(row):
            ratio = value / mean
            # Half the mean and twice the mean are equally far from it.
            away = max(-1.0, min(1.0, math.log2(ratio))) if ratio > 0 else -1.0
            tone = "over" if away > 0 else "under"
            hint = f"{row_label} {place}, {column_label} {column}: {value:,.0f} ({ratio:.2f} of the mean)"
            shown = f"{ratio:.2f}" if with_numbers else ""
            cells.append(f'<td class="{tone}" style="--a:{abs(away):.2f}" title="{text(hint)}">{shown}</td>')
        worst = max(row) / mean
        parts.append(f'<tr><th scope="row">{place}</th>{"".join(cells)}<td class="max">{worst:.2f}</td></tr>')
    parts.append("</tbody></table>")
    return "".join(parts)


def key_values(values: Mapping[str, object], *, caption: str = "") -> str:
    """A table of names and values."""
    rows = "".join(
        f'<tr><th scope="row">{text(key)}</th><td>{text(_shown(value))}</td></tr>' for key, value in values.items()
    )
    return (
        f'<table class="pairs">{f"<caption>{text(caption)}</caption>" if caption else ""}<tbody>{rows}</tbody></table>'
    )


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
