"""The report shows what happened and lets nothing in; the trace file is what viewers read."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from comm_core.runtime import trace
from dualpipe.render import STYLES
from examples import charts, executed, report, timeline
from examples.progress import Row
from examples.trace_file import merge_trace, write_trace

EVIL = "<script>alert('x')</script>\"&\x00\ud800"
CONFIG = {"name": "tiny", "output": "runs", "train": {"steps": 3, "dtype": "fp32"}, "data": {"file": None}}
VERSIONS = {"torch": "2.13.0"}


def span(name: str, category: str, start: float, end: float, *, lane: str = "pipeline", **args: Any) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": 0,
        "tid": lane,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def action(kind: str, start: float, end: float, *, stage: int = 0, microbatch: int = 0, **args: Any) -> dict[str, Any]:
    name = f"{stage}{kind}{microbatch}"
    return span(name, "pipeline", start, end, kind=kind, stage=stage, microbatch=microbatch, direction=0, **args)


def executed_step(number: int, origin: float) -> list[dict[str, Any]]:
    """A step of one rank with every kind of action, 1000 us long."""
    return [
        span("step", "step", origin, origin + 1000, lane="MainThread", step=number),
        action("F", origin + 10, origin + 200, microbatch=1),
        action("SEND", origin + 150, origin + 190, payload="F", microbatch=1),
        action("RECV", origin + 200, origin + 300, stage=3, payload="F"),
        action("FB", origin + 300, origin + 500, microbatch=2, stage=3, backward_stage=0, backward_microbatch=0),
        action("B", origin + 500, origin + 600, stage=3),
        action("I", origin + 600, origin + 650),
        action("W", origin + 700, origin + 760),
        span("dispatch", "ep", origin + 40, origin + 90, lane="ep", num_tokens=128, bytes=4096),
        span("combine", "ep", origin + 80, origin + 120, lane="ep", num_tokens=128, bytes=1024),
        span("layout", "ep", origin + 15, origin + 35, lane="ep", num_tokens=128, bytes=16),
    ]


def rows(count: int = 3) -> list[Row]:
    return [Row(step, 6.0 / step, 1.0, 1000.0, 1.5) for step in range(1, count + 1)]


def render(**changes: Any) -> str:
    arguments: dict[str, Any] = {
        "config": CONFIG,
        "metrics": rows(),
        "trace_events": [executed_step(7, 5e9), executed_step(7, 5e9 + 20)],
        "expert_load": [[0, 0, 0, 0], [40, 20, 20, 0]],
        "versions": VERSIONS,
    }
    return report.render(**{**arguments, **changes})


class Page(HTMLParser):
    """Collects tags and text and checks that elements close in order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> in {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


# ---- report


def test_the_page_is_one_file_without_network_or_script() -> None:
    page = render()
    parsed = Page(page)
    names = {name for name, _ in parsed.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a", "image", "use"}
    for name, attributes in parsed.tags:
        assert not any(key.startswith("on") or key in ("src", "href", "xlink:href", "action") for key in attributes), (
            name
        )
    assert "url(" not in page and "@import" not in page and "http://" not in page and "https://" not in page
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_everything_that_was_asked_for_is_there() -> None:
    parsed = Page(render())
    for expected in ("Executed schedule of step 7", "Expert load", "How to read this", "6 \N{RIGHTWARDS ARROW} 2"):
        assert expected in parsed.text
    for expected in ("fp32", "2.13.0", "2 ranks", "rank 0", "rank 1"):
        assert expected in parsed.text
    # A layer without experts has no row; the others show each expert against the mean.
    assert "\nlayer\n0\n1\n2\n3\nmax\n1\n2.00\n1.00\n1.00\n0.00\n2.00\nSettings" in parsed.text


def test_every_kind_is_drawn_in_a_colour_of_its_own() -> None:
    parsed = Page(render())
    fills: dict[str, str] = {}
    hints = re.findall(r"<rect (?:class=\"(\w+)\" )?fill=\"(#\w+)\"[^>]*><title>([^<]*)</title>", render())
    for _, fill, hint in hints:
        fills.setdefault(hint.split()[0], fill)
    assert set(fills) == {"F", "B", "I", "W", "FB", "SEND", "RECV"} == set(STYLES)
    assert len(set(fills.values())) == 7
    for style in STYLES.values():
        assert style.name in parsed.text
    classes = {attributes.get("class") for name, attributes in parsed.tags if name == "rect"}
    assert {"layout", "dispatch", "combine"} <= classes
    colours = set(re.findall(r"--(?:layout|dispatch|combine): (#\w+)", render()))
    assert len(colours) == 6 and not colours & {style.fill for style in STYLES.values()}


def test_blocks_stand_where_they_ran() -> None:
    step = executed.last_step([executed_step(7, 1000.0), executed_step(7, 1000.0)])
    assert step is not None
    picture = timeline.draw(step, ["rank 0", "rank 1"])
    found = re.findall(r'<rect class="block" fill="(#\w+)" x="([\d.]+)" y="(\d+)" width="([\d.]+)"', picture)
    assert len(found) == 10
    scale = (1200 - 92 - 12) / (step.end - step.start)
    fill, x, y, width = found[1]
    assert fill == STYLES["FB"].fill
    assert float(x) == pytest.approx(92 + 290 * scale, abs=0.01)
    assert float(width) == pytest.approx(200 * scale, abs=0.01)
    assert int(found[6][2]) > int(y)
    assert ">3F2</text>" in picture and ">0B0</text>" in picture
    assert "F of stage 3, microbatch 2; B of stage 0, microbatch 0" in picture
    assert "num_tokens 128\nbytes 4,096\n0.050 ms, from 0.030 ms" in picture


@pytest.mark.parametrize("place", ["name", "value", "key", "version", "rank", "span", "kind", "argument"])
def test_whatever_comes_in_is_escaped(place: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {}
    events = [executed_step(7, 0.0)]
    if place == "name":
        changes["config"] = {**CONFIG, "name": EVIL}
    elif place == "value":
        changes["config"] = {**CONFIG, "data": {"file": EVIL}, "train": {"dtype": EVIL, "num_microbatches": EVIL}}
    elif place == "key":
        changes["config"] = {**CONFIG, EVIL: {EVIL: 1}}
    elif place == "version":
        changes["versions"] = {EVIL: EVIL}
    elif place == "rank":
        changes["names"] = [f"{EVIL} ({EVIL})"]
    elif place == "span":
        events[0].append(span(EVIL, "ep", 50, 60, lane=EVIL))
    elif place == "kind":
        events[0].append(action(EVIL, 800, 900, microbatch=EVIL, stage=0))  # type: ignore[arg-type]
    else:
        events[0].append(span("dispatch", "ep", 50, 60, **{"num_tokens": EVIL}))
    page = render(trace_events=events, **changes)
    parsed = Page(page)
    assert "script" not in {name for name, _ in parsed.tags}
    assert "<script" not in page.lower()
    written = report.write_report(
        tmp_path / "report.html",
        **{
            "config": CONFIG,
            "metrics": rows(),
            "trace_events": events,
            "expert_load": [],
            "versions": VERSIONS,
            **changes,
        },
    )
    assert "\x00" not in written.read_text(encoding="utf-8")
    if place != "rank":
        shown = parsed.text + "".join(str(v) for _, attributes in parsed.tags for v in attributes.values())
        assert "<script>alert('x')</script>\"&" in shown


def test_a_missing_escape_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is only worth something if it fails when a value enters as it is."""
    monkeypatch.setattr(charts, "text", str)
    page = render(config={**CONFIG, "data": {"file": EVIL}})
    assert "script" in {name for name, _ in Page(page).tags}


def test_runs_without_trace_or_numbers() -> None:
    assert "No step was recorded" in render(trace_events=[[], []])
    assert "No counts" in render(expert_load=[[0, 0]])
    page = render(metrics=[Row(1, math.nan, math.inf, 5.0, 1.0), Row(2, 3.0, 1.0, 5.0, 1.0)])
    assert "1 steps without a finite value" in page and ">nan<" not in page
    assert "No finite values" in render(metrics=[])
    # Stock schedules record no actions: the communication is shown alone.
    events = [[event for event in executed_step(7, 0.0) if event["cat"] != "pipeline"]]
    assert "communication alone is shown" in render(trace_events=events)


def test_a_report_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {
        "config": CONFIG,
        "metrics": rows(),
        "trace_events": [executed_step(1, 0.0)],
        "expert_load": [[1.0]],
        "versions": VERSIONS,
    }
    path = report.write_report(tmp_path / "run" / "report.html", **arguments)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(report.os, "replace", lambda *unused: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception):
            report.write_report(path, **{**arguments, "metrics": rows(9)})
    assert path.read_bytes() == before
    assert report.write_report(path, **{**arguments, "metrics": rows(9)}).read_bytes() != before
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


# ---- what was executed


def test_the_last_step_that_all_ranks_recorded() -> None:
    first, second, third = executed_step(3, 0.0), executed_step(4, 2000.0), executed_step(5, 4000.0)
    step = executed.last_step([first + second, first + second + third])
    assert step is not None and step.number == 4
    assert (step.start, step.end) == (2010.0, 2760.0)
    assert [len(mine) for mine in step.pipeline] == [7, 7] and [len(mine) for mine in step.communication] == [3, 3]
    assert executed.last_step([]) is None and executed.last_step([[], []]) is None


def test_shares_of_time() -> None:
    step = executed.last_step([executed_step(1, 0.0)])
    assert step is not None
    share = executed.shares(step)[0]
    # From 10 to 760 us: F 190 with a SEND of 40 inside, RECV 100, FB 200, B 100, I 50, a gap of 50, W 60.
    assert share.running == pytest.approx(560e-6)
    assert share.sending == pytest.approx(40e-6)
    assert share.waiting == pytest.approx(100e-6)
    assert share.idle == pytest.approx(50e-6)
    # Dispatch 40 to 90 and combine 80 to 120 overlap.
    assert share.communicating == pytest.approx(100e-6)
    assert share.num_bytes == 4096 + 1024 + 16


def test_covered_against_counting() -> None:
    rng = random.Random(random.random())
    for _ in range(100):
        intervals = [(start, start + rng.randint(0, 9)) for start in (rng.randint(0, 40) for _ in range(6))]
        cells = {cell for start, end in intervals for cell in range(start, end)}
        assert executed.covered(intervals) == len(cells)


# ---- charts


def test_ticks_are_round_and_cover() -> None:
    rng = random.Random(random.random())
    for _ in range(300):
        low = rng.uniform(-1e3, 1e3)
        high = low + 10 ** rng.uniform(-4, 5)
        found = charts.ticks(low, high, 5)
        assert 2 <= len(found) <= 12
        assert all(low - 1e-6 * (high - low) <= value <= high + 1e-6 * (high - low) for value in found)
        step = found[1] - found[0]
        assert round(step / 10 ** math.floor(math.log10(step) + 1e-6), 6) in (1, 2, 5, 10)
    assert charts.ticks(3.0, 3.0, 5) == [3.0]


def test_thinning_keeps_extremes_and_ends() -> None:
    rng = random.Random(random.random())
    points = [(float(x), rng.random()) for x in range(50_000)]
    points[12_345], points[40_001] = (12_345.0, 9.0), (40_001.0, -9.0)
    kept = charts.thin_out(points)
    assert len(kept) <= 1300 and kept[0] == points[0] and kept[-1] == points[-1]
    assert points[12_345] in kept and points[40_001] in kept
    assert kept == sorted(kept) and len(set(kept)) == len(kept)
    assert charts.thin_out(points[:100]) == points[:100]


def test_many_experts_stay_readable() -> None:
    dense = charts.heat_map([[1.0] * 255 + [3.0]], row_label="layer", column_label="expert")
    assert dense.count("<td") == 257 and "dense" in dense and "(2.98 of the mean)" in dense


# ---- trace


def recorded(rank: int) -> list[dict[str, Any]]:
    recorder = trace.Recorder(rank)
    with trace.recording(recorder):
        with trace.span("2F0", "pipeline", lane="pipeline", kind="F", stage=2, microbatch=0):
            with trace.span("dispatch", "ep", lane="ep", bytes=7):
                pass
            with trace.span("2SEND_F0", "pipeline", lane="pipeline", kind="SEND", stage=2, microbatch=0):
                pass
        with trace.span("experts", "moe", num_rows=3):
            pass
    return recorder.events()


def test_the_trace_of_all_ranks(tmp_path: Path) -> None:
    names = ["rank 0 (pp 0, ep 0)", EVIL]
    events = [recorded(0), recorded(1)]
    path = write_trace(tmp_path / "new" / "trace.json", events, names)
    found = json.loads(path.read_text(encoding="ascii"), parse_constant=lambda name: pytest.fail(name))
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 8 and min(event["ts"] for event in spans) == 0
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in found["traceEvents"]
        if event["name"] == "thread_name"
    }
    processes = [event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"]
    assert processes == names
    assert sorted(named.values()) == sorted(2 * ["MainThread", "ep", "pipeline"])
    for rank, mine in enumerate(events):
        first = min(event["ts"] for one in events for event in one)
        expected = sorted((event["name"], event["tid"], event["ts"] - first, event["dur"]) for event in mine)
        got = sorted((e["name"], named[rank, e["tid"]], e["ts"], e["dur"]) for e in spans if e["pid"] == rank)
        for want, have in zip(expected, got, strict=True):
            assert want[:2] == have[:2] and have[2:] == pytest.approx(want[2:], abs=2e-3)
    assert all(isinstance(event["tid"], int) for event in found["traceEvents"])
    order = {e["name"] for e in found["traceEvents"] if e["ph"] == "M"}
    assert order == {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def test_spans_of_a_thread_nest_in_the_file() -> None:
    rng = random.Random(random.random())
    starts = [rng.uniform(0, 100) for _ in range(200)]
    events = [span(f"s{i}", "ep", start, start + rng.uniform(0, 20), lane="ep") for i, start in enumerate(starts)]
    events += [span("whole", "ep", -5, 300, lane="ep"), span("zero", "ep", 7, 7, lane="ep")]
    found = merge_trace([events], ["rank 0"])["traceEvents"]
    spans = [event for event in found if event["ph"] == "X"]
    assert sorted(event["name"] for event in spans) == sorted(event["name"] for event in events)
    threads: dict[int, list[dict[str, Any]]] = {}
    for event in spans:
        threads.setdefault(event["tid"], []).append(event)
    for mine in threads.values():
        for one in mine:
            for other in mine:
                low, high = sorted([(one["ts"], one["ts"] + one["dur"]), (other["ts"], other["ts"] + other["dur"])])
                assert high[0] >= low[1] - 1e-6 or high[1] <= low[1] + 1e-6 or low[0] == high[0]
    names = [event["args"]["name"] for event in found if event["name"] == "thread_name"]
    assert names[:2] == ["ep", "ep (2)"] and len(names) == len(threads)


def test_a_trace_takes_any_argument() -> None:
    events = [[span("x", "moe", 0, 1, number=math.nan, inner={"a": (1, object())}, text=EVIL)]]
    found = json.loads(json.dumps(merge_trace(events, ["r"]), allow_nan=False))["traceEvents"][-1]["args"]
    assert found["number"] == "nan" and found["inner"]["a"][0] == 1 and found["text"] == EVIL
    assert merge_trace([[], []], ["a", "b"])["traceEvents"][0]["args"] == {"name": "a"}
