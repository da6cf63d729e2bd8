"""The executed step as a picture: for each rank its pipeline actions and, below them, its communication.

`dualpipe.render.svg` draws a schedule alone; here the expert-parallel lane of each rank must stand right below its
actions on the same axis, because what the picture has to show is what runs at the same time. Colours and names of
the actions are those of `dualpipe.render`, so that planned and executed schedules are read alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dualpipe.render import STYLES
from examples.charts import number, text, ticks
from examples.executed import COMMUNICATION, TRANSFER, Event, Step

MEANING = {
    "layout": "EP: token counts and ids",
    "dispatch": "EP: tokens to their experts",
    "combine": "EP: results back",
}
"""Names of the communication kinds; their colours are CSS classes of the page."""

_NARROWEST, _WIDEST, _LEFT, _RIGHT, _TOP, _BOTTOM = 1200, 4000, 92, 12, 4, 26
_ACTION, _STRIP, _SPAN, _GAP = 30, 7, 11, 14
_STRIP_Y, _SPAN_Y = _ACTION + 1, _ACTION + _STRIP + 3
_ROW = _SPAN_Y + _SPAN + _GAP
_CHARACTER = 6.3
_ROOM = 24
"""Width that an action gets on average in a long step; the page scrolls sideways then."""


def draw(step: Step, names: Sequence[str]) -> str:
    """An inline SVG of a step, with a pointer hint on every span.

    Args:
        step: the executed step.
        names: for each rank what it is called; a part in parentheses is written small below.
    """
    height = _TOP + _ROW * len(names) + _BOTTOM
    most = max((sum(e["args"]["kind"] not in TRANSFER for e in mine) for mine in step.pipeline), default=0)
    plot = min(max(_ROOM * most, _NARROWEST - _LEFT - _RIGHT), _WIDEST)
    total = _LEFT + plot + _RIGHT
    scale = plot / max(step.end - step.start, 1e-9)
    parts = [
        f'<svg class="timeline" viewBox="0 0 {total} {height}" style="min-width:{0.82 * total:.0f}px" role="img">'
        f"<title>Executed actions and communication of {len(names)} ranks</title>"
    ]
    for value in ticks(0.0, (step.end - step.start) / 1e3, 10):
        x = _LEFT + value * 1e3 * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - 24}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 8}" text-anchor="middle">{number(value)} ms</text>')
    for rank, name in enumerate(names):
        top = _TOP + _ROW * rank
        parts.append(_lane(name, top, plot))
        first_stage = min((event["args"]["stage"] for event in step.pipeline[rank]), default=0)
        for event in step.pipeline[rank]:
            x, width = _LEFT + (event["ts"] - step.start) * scale, event["dur"] * scale
            parts.append(_action(event, x, width, top, step.start, first_stage))
        for event in step.communication[rank]:
            x, width = _LEFT + (event["ts"] - step.start) * scale, max(event["dur"] * scale, 0.4)
            kind = event["name"] if event["name"] in COMMUNICATION else "layout"
            parts.append(_bar(f'class="{kind}"', x, top + _SPAN_Y, width, _SPAN, _hint(event, step.start)))
    parts.append("</svg>")
    return "".join(parts)


def legend(kinds: Sequence[str]) -> str:
    """Colour and meaning of the kinds of actions and communication that occur, and the mark of a second stage."""
    items = [_key(f'class="{kind}" fill="{style.fill}"', style.name) for kind, style in STYLES.items() if kind in kinds]
    if any(kind in STYLES for kind in kinds):
        mark = '<rect x="2" y="2" width="10" height="3" class="card"/>'
        items.append(_key('class="soft"', "bar on top: the rank's second stage", mark))
    items += [_key(f'class="{kind}"', meaning) for kind, meaning in MEANING.items() if kind in kinds]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _key(fill: str, name: str, mark: str = "") -> str:
    swatch = f'<svg viewBox="0 0 14 14" aria-hidden="true"><rect width="14" height="14" rx="3" {fill}/>{mark}</svg>'
    return f"<li>{swatch}{text(name)}</li>"


def _lane(name: str, top: int, width: int) -> str:
    main, _, detail = name.partition(" (")
    parts = [f'<text class="rank" x="0" y="{top + 14}">{text(main[:14])}</text>']
    if detail:
        parts.append(f'<text class="lane-name" x="0" y="{top + 29}">{text(detail.removesuffix(")")[:14])}</text>')
    for y, height in ((top, _ACTION + 1 + _STRIP), (top + _SPAN_Y, _SPAN)):
        parts.append(f'<rect class="back" x="{_LEFT}" y="{y}" width="{width}" height="{height}"/>')
    return "".join(parts)


def _bar(fill: str, x: float, y: float, width: float, height: float, hint: str) -> str:
    shape = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}"'
    return f"<rect {fill} {shape}><title>{text(hint)}</title></rect>"


def _action(event: Event, x: float, width: float, top: int, origin: float, first_stage: int) -> str:
    """A block with label and second-stage mark; SEND and RECV lie in the strip below."""
    arguments = event["args"]
    kind = str(arguments["kind"])
    style = STYLES[kind] if kind in STYLES else STYLES["SEND"]
    hint = _hint(event, origin)
    if kind in TRANSFER:
        return _bar(f'class="{kind}" fill="{style.fill}"', x, top + _STRIP_Y, max(width, 0.6), _STRIP, hint)
    parts = [_bar(f'class="block" fill="{style.fill}"', x, top, max(width, 0.4), _ACTION, hint)]
    second = arguments["stage"] != first_stage
    if width >= 6 and (second or kind == "FB"):
        # A pair works on both stages of its rank: the mark stands over the half (F left, B right) of the second one.
        start = x + 2 + (width / 2 if kind == "FB" and not second else 0)
        length = (width / 2 if kind == "FB" else width) - 4
        shape = f'x="{start:.2f}" y="{top + 2}" width="{max(length, 1):.2f}" height="2.5"'
        parts.append(f'<rect class="mark" fill="{style.ink}" {shape}/>')
    labels = _labels(kind, arguments, width)
    for place, label in enumerate(labels):
        y = top + (20 if len(labels) == 1 else 15 + 11 * place)
        place_at = f'x="{x + width / 2:.2f}" y="{y}" text-anchor="middle"'
        parts.append(f'<text class="ink" {place_at} fill="{style.ink}">{text(label)}</text>')
    return "".join(parts)


def _labels(kind: str, arguments: Mapping[str, Any], width: float) -> list[str]:
    """What fits into a block: stage, kind and microbatch, else the microbatch, else nothing."""
    long = [f"{arguments['stage']}{'F' if kind == 'FB' else kind}{arguments['microbatch']}"]
    short = [str(arguments["microbatch"])]
    if kind == "FB":
        long.append(f"{arguments.get('backward_stage', '?')}B{arguments.get('backward_microbatch', '?')}")
        short.append(str(arguments.get("backward_microbatch", "?")))
    return next((labels for labels in (long, short) if max(map(len, labels)) * _CHARACTER <= width - 2), [])


def _hint(event: Event, origin: float) -> str:
    """What a pointer over a span shows."""
    arguments = event["args"]
    if event["cat"] == "pipeline":
        kind = str(arguments["kind"])
        lines = [STYLES[kind].name if kind in STYLES else kind]
        lines.append(f"stage {arguments['stage']}, microbatch {arguments['microbatch']}")
        if kind == "FB":
            behind = f"{arguments.get('backward_stage', '?')}, microbatch {arguments.get('backward_microbatch', '?')}"
            lines[1] = f"F of {lines[1]}; B of stage {behind}"
        elif "payload" in arguments:
            payload = str(arguments["payload"])
            lines.append({"F": "activation", "B": "gradient"}.get(payload, payload))
    else:
        lines = [str(event["name"])]
        lines += [
            f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}" for key, value in arguments.items()
        ]
    lines.append(f"{event['dur'] / 1e3:.3f} ms, from {(event['ts'] - origin) / 1e3:.3f} ms")
    return "\n".join(lines)
