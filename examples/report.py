"""The report of a run: one HTML file that shows whether it learnt, what was executed, and with which settings.

It must open anywhere and for years, so there is no script, no font, no picture and no address outside the file, and
the page itself forbids them. Nothing that comes from settings, names or traces enters it unescaped.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from examples import charts, executed, timeline
from examples.charts import number, text
from examples.executed import Event
from examples.progress import Row
from examples.trace_file import merge_trace, write_trace

__all__ = ["merge_trace", "render", "write_report", "write_trace"]

_TEMPLATE = Path(__file__).with_name("report_template.html")

_GUIDE = """<dl>
<dt>Loss</dt><dd>Mean negative log-likelihood of a token, in nats. An untrained model starts near the logarithm of the
vocabulary's size; the curve should fall and flatten. Of a long run, lowest and highest values are kept.</dd>
<dt>Executed schedule</dt><dd>What each rank really did in one recorded step, in its order and with its times. A block
is labelled stage, kind, microbatch: <b>2F1</b> is the forward of microbatch 1 on stage 2; narrow blocks show the
microbatch alone, or nothing. The strip under the blocks holds SEND and RECV: a long RECV is time spent waiting for a
neighbour. Point at a block for its numbers.</dd>
<dt>Lane below</dt><dd>Communication of the expert-parallel layer on the same axis: token counts, tokens to experts,
results back. It runs in a queue of its own: the block above it computes meanwhile, or waits for it.</dd>
<dt>Expert load</dt><dd>Tokens that each expert got, over this whole run, divided by the mean of its layer. 1.00 is
balance; orange is above, blue is below. A layer without experts has no row.</dd>
<dt>Gradient norm</dt><dd>Before clipping. Spikes, or a steady rise, tell of a learning rate that is too high.</dd>
<dt>More</dt><dd>trace.json beside this file holds every recorded span of every rank; open it in Perfetto or
chrome://tracing. metrics.jsonl holds a row a step.</dd>
</dl>"""


def write_report(
    path: str | Path,
    *,
    config: Mapping[str, Any],
    metrics: Sequence[Row],
    trace_events: Sequence[Iterable[Event]],
    expert_load: Sequence[Sequence[float]],
    versions: Mapping[str, object],
    names: Sequence[str] | None = None,
) -> Path:
    """Writes report.html; the file appears when it is complete.

    Args:
        path: where to.
        config: the settings, sections as mappings (`Config.model_dump()`).
        metrics: a row a step.
        trace_events: for each rank the events of its recorder; empty lists where nothing was recorded.
        expert_load: tokens by layer and expert; a row of zeros for a layer without experts.
        versions: name and version of what the run was made with.
        names: for each rank what it is called.
    """
    path = Path(path)
    page = render(
        config=config,
        metrics=metrics,
        trace_events=trace_events,
        expert_load=expert_load,
        versions=versions,
        names=names,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def render(
    *,
    config: Mapping[str, Any],
    metrics: Sequence[Row],
    trace_events: Sequence[Iterable[Event]],
    expert_load: Sequence[Sequence[float]],
    versions: Mapping[str, object],
    names: Sequence[str] | None = None,
) -> str:
    """The page as text; arguments as `write_report`."""
    step = executed.last_step(trace_events)
    rank_names = list(names) if names is not None else [f"rank {rank}" for rank in range(len(trace_events))]
    name = str(config.get("name", "run"))
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=text(f"{name} - MT-MoE training report"),
        name=text(name),
        summary=text(_summary(config, len(trace_events))),
        tiles=_tiles(metrics, expert_load),
        loss=charts.line_chart([(row.step, row.loss) for row in metrics], label="Loss by step"),
        smalls=_small_charts(metrics),
        step="" if step is None or step.number is None else f" of step {step.number}",
        schedule=_schedule(step, rank_names),
        experts=f'<div class="scroll">{charts.heat_map(expert_load, row_label="layer", column_label="expert")}</div>',
        settings=_settings(config, versions),
        guide=_GUIDE,
    )


def _summary(config: Mapping[str, Any], num_ranks: int) -> str:
    parallel, train = config.get("parallel", {}), config.get("train", {})
    parts = [f"{num_ranks} ranks"]
    if "ep_size" in parallel and "pp_size" in parallel:
        parts.append(f"EP{parallel['ep_size']} x PP{parallel['pp_size']}")
    parts += [str(section[key]) for section, key in ((parallel, "schedule"), (train, "dtype")) if key in section]
    if "num_microbatches" in train:
        parts.append(f"{train['num_microbatches']} microbatches")
    return " \N{MIDDLE DOT} ".join(parts)


def _tiles(metrics: Sequence[Row], expert_load: Sequence[Sequence[float]]) -> str:
    tiles: list[tuple[str, str]] = []
    if metrics:
        first, last = metrics[0], metrics[-1]
        tiles.append((f"{number(first.loss)} \N{RIGHTWARDS ARROW} {number(last.loss)}", "loss, first and last step"))
        tiles.append((f"{len(metrics):,}", "steps"))
        tiles.append((number(statistics.median(row.tokens_per_s for row in metrics)), "tokens a second, median"))
    ratios = [max(row) * len(row) / sum(row) for row in expert_load if sum(row) > 0]
    if ratios:
        tiles.append((f"{max(ratios):.2f}", "fullest expert over the mean, worst layer"))
    return "".join(f'<div class="tile"><b>{text(value)}</b><span>{text(label)}</span></div>' for value, label in tiles)


def _small_charts(metrics: Sequence[Row]) -> str:
    columns = {
        "Gradient norm": [row.grad_norm for row in metrics],
        "Tokens a second": [row.tokens_per_s for row in metrics],
        "Expert load, max over mean": [row.imbalance for row in metrics],
    }
    figures = []
    for label, values in columns.items():
        points = list(zip((row.step for row in metrics), values, strict=True))
        chart = charts.line_chart(points, label=f"{label} by step", width=380, height=170, small=True)
        figures.append(f"<figure><figcaption>{label}</figcaption>{chart}</figure>")
    return "".join(figures)


def _schedule(step: executed.Step | None, names: Sequence[str]) -> str:
    if step is None:
        return '<p class="empty">No step was recorded; trace.num_steps in the settings says how many are.</p>'
    kinds = {str(event["args"]["kind"]) for mine in step.pipeline for event in mine}
    kinds |= {str(event["name"]) for mine in step.communication for event in mine}
    note = ""
    if not any(step.pipeline):
        note = '<p class="note">The pipeline of this run records no actions; communication alone is shown.</p>'
    picture = f'<div class="scroll wide">{timeline.draw(step, names)}</div>'
    return timeline.legend(sorted(kinds)) + picture + note + _shares_table(step, names)


def _shares_table(step: executed.Step, names: Sequence[str]) -> str:
    total = (step.end - step.start) / 1e6
    head = ("rank", "running actions", "sending", "waiting (RECV)", "no action", "EP communication", "EP bytes")
    rows = []
    for name, share in zip(names, executed.shares(step), strict=True):
        parts = (share.running, share.sending, share.waiting, share.idle, share.communicating)
        cells = [f"{1e3 * part:,.1f} ms ({part / total:.0%})" if total > 0 else "0" for part in parts]
        cells.append(f"{share.num_bytes:,}")
        rows.append(f"<tr><th>{text(name)}</th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{label}</th>" for label in head)
    return (
        f'<h3>Where {1e3 * total:,.1f} ms went</h3><div class="scroll"><table class="figures">'
        f"<thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _settings(config: Mapping[str, Any], versions: Mapping[str, object]) -> str:
    sections = {key: value for key, value in config.items() if isinstance(value, Mapping)}
    alone = {key: value for key, value in config.items() if key not in sections}
    tables = [charts.key_values(alone, caption="run"), charts.key_values(versions, caption="versions")]
    tables += [charts.key_values(values, caption=str(name)) for name, values in sections.items()]
    return "".join(f'<div class="scroll">{table}</div>' for table in tables)
