"""A plan beside its execution: found in a trace among other work, drawn in the same colours, or refused."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from comm_core.runtime import trace
from comm_core.runtime.errors import UsageError
from dualpipe.__main__ import main
from dualpipe.beside import Beside
from dualpipe.blocks import blocks_from_events
from dualpipe.executed import executed_blocks, read_trace
from dualpipe.pipeline import Pipeline
from dualpipe.render import STYLES, text_grid
from dualpipe.schedule import SCHEDULES, build, with_communication
from dualpipe.simulate import Durations, simulate
from tests.dualpipe.pipelines import HIDDEN, criterion, make_stages

SVG = "{http://www.w3.org/2000/svg}"
COSTS = Durations(F=1.2, I=0.9, W=0.7, FB=2.5, hop=0.3)


def events_of(schedule, start, *, first_process=0, unit=1000.0):
    """What executors write of a step, with times of a simulation."""
    lowered, found = with_communication(schedule), []
    positions = [iter(actions) for actions in lowered.ranks]
    for block in simulate(lowered, COSTS).blocks:
        action = next(positions[block.rank])
        args = {"kind": block.kind, "stage": action.stage, "microbatch": action.microbatch}
        args["direction"] = action.key.direction if action.kind != "FB" else action.parts[0].direction
        if action.kind == "FB":
            args |= {"backward_stage": action.parts[1].stage, "backward_microbatch": action.parts[1].microbatch}
        times = {"ts": start + block.start * unit, "dur": (block.end - block.start) * unit}
        pid = first_process + block.rank
        found.append({"name": str(action), "cat": "pipeline", "ph": "X", "pid": pid, "tid": 1, "args": args, **times})
    return found


def a_trace(schedule):
    """Two steps, an evaluation behind them, the same stages in other processes too, and other work."""
    first, second = events_of(schedule, 5e6, unit=800.0), events_of(schedule, 9e6)
    evaluation = [event for event in events_of(schedule, 15e6) if event["args"]["kind"] == "F"]
    noise = [{"name": "dispatch", "cat": "ep", "ph": "X", "pid": 0, "tid": 2, "ts": 9e6, "dur": 5.0, "args": {}}]
    names = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}}]
    return [*names, *evaluation, *second, *noise, *events_of(schedule, 9e6, first_process=40, unit=900.0), *first]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_last_step_is_found_among_other_work(name, ranks):
    schedule = build(name, ranks, 2 * ranks)
    found = executed_blocks(schedule, a_trace(schedule))
    wanted = simulate(with_communication(schedule), COSTS).blocks
    assert len(found) == len(wanted)

    def order(block):
        return block.rank, block.kind, block.stage, block.label, block.start

    for one, other in zip(sorted(found, key=order), sorted(wanted, key=order), strict=True):
        assert order(one)[:-1] == order(other)[:-1]
        assert (one.start, one.end) == pytest.approx((other.start, other.end), abs=1e-5)


def swapped(events):
    first, second = [event for event in events if event["args"]["kind"] == "F" and event["pid"] == 1][:2]
    first["ts"], second["ts"] = second["ts"], first["ts"]
    return events


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda events: [e for e in events if e["pid"] != 1], "none with the stages 1, 2 of rank 1"),
        (lambda events: [e for e in events if e["args"]["kind"] != "W"], r"rank 0 does \S+ where 3W0 is planned"),
        (swapped, "rank 1 does 1F1 where 2F0 is planned|rank 1 does .* where 1F. is planned"),
        (lambda events: events[: len(events) // 2], "does nothing where"),
        (lambda events: [], "a trace of 0 processes"),
        (lambda events: [{k: v for k, v in e.items() if k != "ts"} for e in events], "a pipeline event without 'ts'"),
    ],
)
def test_what_was_not_executed_as_planned_is_named(change, words):
    with pytest.raises(UsageError, match=words):
        executed_blocks(build("dualpipev", 2, 4), change(events_of(build("dualpipev", 2, 4), 0.0)))
    with pytest.raises(UsageError, match=r"rank 0 does .* is planned"):
        executed_blocks(build("dualpipev", 2, 5), a_trace(build("dualpipev", 2, 4)))


def write(tmp_path, events):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_both_in_one_picture_in_the_same_colours(tmp_path, capsys):
    schedule = build("zbv", 2, 4)
    path = write(tmp_path, a_trace(schedule))
    sizes = ["show", "zbv", "--ranks", "2", "--microbatches", "4", "--executed", str(path)]
    for comm in (False, True):
        assert main([*sizes, "--format", "svg", *(["--comm"] if comm else [])]) == 0
        root = ElementTree.fromstring(capsys.readouterr().out)
        number = len(simulate(with_communication(schedule) if comm else schedule).blocks)
        cells = root.findall(f"{SVG}g")
        assert len(cells) == 2 * number
        planned, executed = ([looks(cell) for cell in half] for half in (cells[:number], cells[number:]))
        assert sorted(planned) == sorted(executed)
        assert {colour for _, colour in planned} <= {style.fill for style in STYLES.values()}
        tops = [[float(cell.find(f"{SVG}rect").get("y")) for cell in half] for half in (cells[:number], cells[number:])]
        assert max(tops[0]) < min(tops[1])
        ends = [max(float(c.find(f"{SVG}rect").get("x")) for c in half) for half in (cells[:number], cells[number:])]
        assert ends[0] == pytest.approx(ends[1], rel=0.1)  # stretched to the same length
        captions = [text.text for text in root.findall(f"{SVG}text")]
        assert any(text.startswith("planned: 25") for text in captions) or comm
        assert any(text.startswith("executed: ") and text.endswith("% idle") for text in captions)


def looks(cell):
    """What a cell says it is, and its colour."""
    what, _, _ = cell.find(f"{SVG}title").text.partition(":")
    return what, cell.find(f"{SVG}rect").get("fill")


def test_both_in_one_trace(tmp_path, capsys):
    schedule = build("dualpipev", 2, 4)
    path = write(tmp_path, a_trace(schedule))
    assert (
        main(["show", "dualpipev", "--ranks", "2", "--microbatches", "4", "--format", "trace", "--executed", str(path)])
        == 0
    )
    events = json.loads(capsys.readouterr().out)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "rank 0 planned", 1: "rank 0 executed", 2: "rank 1 planned", 3: "rank 1 executed"}
    planned, executed = (blocks_from_events(events, lanes=lanes) for lanes in ({0: 0, 2: 1}, {1: 0, 3: 1}))
    for rank in (0, 1):
        # Equal names: viewers give them the same colour.
        one, other = ([(b.kind, b.stage, b.label) for b in blocks if b.rank == rank] for blocks in (planned, executed))
        assert one == other and len(one) == len(schedule.ranks[rank])
    assert max(b.end for b in planned) == pytest.approx(max(b.end for b in executed), rel=1e-6)


def test_both_in_one_text(tmp_path, capsys):
    """Executed with the plan's own durations, both sides are the same grid."""
    schedule = build("zbv", 2, 4)
    blocks = simulate(schedule).blocks
    lines = Beside(schedule, blocks).text().splitlines()
    assert lines[0].split() == ["planned", "||", "executed"]
    grid = text_grid(schedule).splitlines()
    for line, planned in zip(lines[1:], grid, strict=False):
        left, right = line.split("  ||  ")
        assert left.rstrip() == planned and right.split()[-2:] == planned.split()[-2:]
    assert lines[-2].startswith("planned: ") and lines[-1].startswith("executed: ")
    assert lines[-2].partition(", ")[2] == lines[-1].partition(", ")[2]
    # Twice as slow in one action: the others stand elsewhere.
    path = write(tmp_path, a_trace(schedule))
    assert main(["show", "zbv", "--ranks", "2", "--microbatches", "4", "--executed", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[1].split() == ["time", "rank", "0", "rank", "1", "||", "ms", "rank", "0", "rank", "1"]
    for rank, actions in enumerate(schedule.ranks):
        assert all(text.count(str(action)) >= 2 for action in actions), rank


def test_mistakes_of_the_command(tmp_path, capsys):
    sizes = ["show", "zbv", "--ranks", "2", "--microbatches", "4", "--executed"]
    text = tmp_path / "not.json"
    text.write_text("{")
    other = tmp_path / "other.json"
    other.write_text('{"traceEvents": 3}')
    good = write(tmp_path, a_trace(build("1f1b", 2, 4)))
    for more, words in (
        ([str(tmp_path / "none.json")], "none.json"),
        ([str(text)], "not.json"),
        ([str(other)], "no list of events"),
        ([str(good)], "none with the stages 0, 3 of rank 0"),
        ([str(good), "--format", "csv"], "--executed with --format csv"),
    ):
        assert main([*sizes, *more]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and words in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("name", ["dualpipev", "zbv", "interleaved"])
def test_what_the_executor_recorded(name, tmp_path):
    """One process, real spans of two steps, an inference and another number of microbatches before them."""
    stages, recorder = make_stages(2, 3), trace.Recorder(rank=7)
    x = torch.randn(12, HIDDEN, dtype=torch.float64)
    with Pipeline(stages, schedule=name) as pipeline, trace.recording(recorder):
        for count in (6, 4, 4):
            pipeline.step(x, num_microbatches=count, criterion=criterion, labels=[x])
        with torch.no_grad():
            pipeline.step(x, num_microbatches=4, criterion=criterion, labels=[x])
    schedule = build(name, 1, 4)
    blocks = executed_blocks(schedule, read_trace(write(tmp_path, recorder.events())))
    assert [b.kind for b in blocks] == [str(a.kind) for a in schedule.ranks[0]]
    assert blocks == sorted(blocks, key=lambda b: b.start) and blocks[0].start == 0.0
    assert len(Beside(schedule, blocks).text().splitlines()) == len(text_grid(schedule).splitlines()) + 3
