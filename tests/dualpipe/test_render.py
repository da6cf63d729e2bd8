"""Pictures and grids: they parse, escape, show every action, and can be read."""

import xml.etree.ElementTree as ElementTree

import pytest

from comm_core.runtime.errors import UsageError
from dualpipe.blocks import Block, blocks_from_events
from dualpipe.render import STYLES, svg, text_grid
from dualpipe.schedule import build, with_communication
from dualpipe.simulate import Durations, simulate

SVG = "{http://www.w3.org/2000/svg}"


def drawn(blocks, num_ranks, title="t", unit="ms"):
    return ElementTree.fromstring(svg(blocks, num_ranks=num_ranks, title=title, unit=unit))


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("dualpipev", 4, 10), ("dualpipe", 8, 20), ("1f1b", 2, 3)])
def test_every_action_is_a_cell_in_its_lane(name, ranks, microbatches):
    plan = simulate(with_communication(build(name, ranks, microbatches)), Durations(hop=0.2))
    root = drawn(plan.blocks, ranks)
    cells = root.findall(f"{SVG}g")
    assert len(cells) == len(plan.blocks)
    tops = {}
    for cell, block in zip(cells, plan.blocks, strict=True):
        tip = cell.find(f"{SVG}title").text
        assert tip.startswith(f"{block.kind} stage {block.stage} microbatch {block.label}: ")
        shape = cell.find(f"{SVG}rect")
        assert shape.get("fill") == STYLES[block.kind].fill
        tops.setdefault((block.rank, block.kind in ("SEND", "RECV")), set()).add(shape.get("y"))
    assert all(len(ys) == 1 for ys in tops.values()) and len({min(ys) for ys in tops.values()}) == len(tops)
    labels = [text.text for cell in cells for text in cell.findall(f"{SVG}text")]
    assert labels == [block.label for block in plan.blocks if block.kind not in ("SEND", "RECV")]


def test_cells_are_placed_by_time():
    root = drawn([Block(0, "F", 0, 0, 5.0, 6.0, "0"), Block(0, "B", 0, 0, 8.0, 10.0, "0")], 1)
    first, second = (cell.find(f"{SVG}rect") for cell in root.findall(f"{SVG}g"))
    unit = float(first.get("width")) + 1
    assert float(second.get("x")) - float(first.get("x")) == pytest.approx(3 * unit, rel=1e-3)
    assert float(second.get("width")) + 1 == pytest.approx(2 * unit, rel=1e-3)


def test_hostile_text_is_escaped():
    hostile = "</text><script>alert('1')</script>&\"\x00\x1f\ud800\ufffe"
    document = svg([Block(0, "F", 0, 0, 0.0, 1.0, hostile)], num_ranks=1, title=hostile, unit=hostile)
    assert "<script" not in document
    root = ElementTree.fromstring(document.encode("utf-8"))
    assert root.find(f"{SVG}title").text.startswith("</text><script>alert('1')</script>&\"\ufffd")


@pytest.mark.parametrize(
    "block",
    [
        Block(2, "F", 0, 0, 0.0, 1.0, "0"),
        Block(-1, "F", 0, 0, 0.0, 1.0, "0"),
        Block(0, "X", 0, 0, 0.0, 1.0, "0"),
        Block(0, "F", 0, 0, 1.0, 0.0, "0"),
        Block(0, "F", 0, 0, 0.0, float("nan"), "0"),
    ],
)
def test_blocks_that_can_not_be_drawn_are_refused(block):
    with pytest.raises(UsageError, match="Block"):
        svg([block], num_ranks=2, title="t", unit="ms")


def test_nothing_to_draw_and_instant_blocks_still_draw():
    assert drawn([], 2).findall(f"{SVG}g") == []
    assert len(drawn([Block(0, "SEND", 0, 0, 3.0, 3.0, "0")], 1).findall(f"{SVG}g")) == 1


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_are_distinct_and_text_on_them_can_be_read():
    assert set(STYLES) == {"F", "B", "I", "W", "FB", "SEND", "RECV"}
    assert len({style.fill for style in STYLES.values()}) == 7
    for style in STYLES.values():
        assert contrast(style.fill, style.ink) >= 4.5  # WCAG AA


def test_text_grid():
    assert text_grid(build("1f1b", 2, 2)) == (
        "time  rank 0  rank 1\n"
        "0     0F0     .\n"
        "1     0F1     1F0\n"
        "2     .       1B0\n"
        "3     .       |\n"
        "4     0B0     1F1\n"
        "5     |       1B1\n"
        "6     .       |\n"
        "7     0B1     .\n"
        "8     |       .\n"
    )
    lines = text_grid(with_communication(build("dualpipev", 2, 3))).splitlines()
    assert lines[1].split() == ["0", "0F0>", "."] and any("<" in line and "+" in line for line in lines)


def test_executed_events_become_blocks():
    def event(pid, kind, start, **more):
        args = {"kind": kind, "stage": 1, "microbatch": 2, "direction": 0, **more}
        return {"cat": "pipeline", "ph": "X", "pid": pid, "tid": "pipeline", "ts": start, "dur": 500.0, "args": args}

    events = [
        event(5, "FB", 10_000.0, backward_stage=6, backward_microbatch=0),
        event(4, "F", 9_000.0),
        {"cat": "ep", "ph": "X", "pid": 5, "ts": 0.0, "dur": 1.0, "args": {}},
    ]
    assert blocks_from_events(events) == [
        Block(5, "FB", 1, 2, 1.0, 1.5, "2|0"),
        Block(4, "F", 1, 2, 0.0, 0.5, "2"),
    ]
    assert blocks_from_events(events, lanes={5: 0}) == [Block(0, "FB", 1, 2, 0.0, 0.5, "2|0")]
