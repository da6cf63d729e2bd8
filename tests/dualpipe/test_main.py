"""The command line, as a user runs it."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

import dualpipe
from dualpipe.__main__ import main
from dualpipe.blocks import blocks_from_events
from dualpipe.lists import read_csv
from dualpipe.schedule import SCHEDULES, build, dualpipev, from_csv, with_communication
from dualpipe.simulate import Durations, simulate


def show(capsys, *arguments):
    return run(capsys, "show", *arguments)


def run(capsys, *arguments):
    try:
        status = main(list(arguments))
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_formats(capsys, tmp_path):
    sizes = ("dualpipev", "--ranks", "4", "--microbatches", "10")
    status, text, _ = show(capsys, *sizes)
    assert status == 0 and text.splitlines()[0].split() == ["time", "rank", "0", "rank", "1", "rank", "2", "rank", "3"]
    assert len(text.splitlines()) == 67
    _, csv, _ = show(capsys, *sizes, "--format", "csv", "--comm")
    assert from_csv(csv, like=dualpipev(4, 10)) == with_communication(dualpipev(4, 10))
    _, trace, _ = show(capsys, *sizes, "--format", "trace", "--comm")
    planned = simulate(with_communication(dualpipev(4, 10)), Durations(hop=0.25)).blocks
    assert blocks_from_events(json.loads(trace)["traceEvents"]) == list(planned)
    target = tmp_path / "v.svg"
    status, nothing, _ = show(capsys, *sizes, "--format", "svg", "--output", str(target))
    assert (status, nothing) == (0, "")
    assert "DualPipeV: 4 ranks, 10 microbatches" in ElementTree.parse(target).getroot()[0].text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("zbv", "--ranks", "4", "--microbatches", "6", "--stages-per-rank", "3"), "stages a rank"),
        (("dualpipe", "--ranks", "3", "--microbatches", "8"), "an even number of ranks"),
        (("dualpipe", "--ranks", "4", "--microbatches", "6"), "at least 2*ranks = 8"),
        (("zigzag", "--ranks", "4", "--microbatches", "6"), "1f1b, dualpipe, dualpipev"),
        (("1f1b", "--ranks", "four", "--microbatches", "6"), "--ranks"),
        (("1f1b", "--ranks", "4"), "--microbatches"),
        (("1f1b", "--ranks", "2", "--microbatches", "2", "--format", "png"), "png"),
        (("1f1b", "--ranks", "2", "--microbatches", "2", "--output", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_a_user_s_mistake_is_one_line_and_status_2(capsys, arguments, words):
    status, out, err = show(capsys, *arguments)
    assert (status, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_simulate(capsys):
    sizes = ("--ranks", "4", "--microbatches", "8", "--costs", "F=1,I=1,W=1,FB=3,hop=0")
    status, text, _ = run(capsys, "simulate", "dualpipev", *sizes)
    assert status == 0 and [line.split() for line in text.splitlines()[1:]] == [
        ["makespan", "27"],
        ["idle", "3"],
        ["bubble_ratio", "0.1111"],
        ["peak", "activations", *["4.5"] * 4],
    ]
    _, text, _ = run(capsys, "simulate", "dualpipev", *sizes, "--json", "--cost-unit", "stage")
    found = json.loads(text)
    assert (found["makespan"], found["idle"], found["peak_activations"]) == (54, 6, [9] * 4)
    assert found["bubble_ratio"] == pytest.approx(6 / 54)
    _, text, _ = run(capsys, "simulate", "1f1b", *sizes, "--json", "--stage-costs", "3:F=2")
    assert json.loads(text)["makespan"] == 33 + 8


def test_compare(capsys):
    status, text, _ = run(capsys, "compare", "--ranks", "8", "--microbatches", "32")
    rows = {line.split()[0]: line.split() for line in text.splitlines()[1:]}
    assert status == 0 and set(rows) == set(SCHEDULES)
    assert rows["zbv"][1:6] == ["99.5", "3.5", "3.5%", "8", "1x"]
    assert rows["dualpipe"][1:6] == ["102", "6", "5.9%", "9", "2x"]
    _, text, _ = run(capsys, "compare", "--ranks", "3", "--microbatches", "4", "--stages-per-rank", "4", "--json")
    found = json.loads(text)
    assert list(found["refused"]) == ["dualpipe"] and len(found["schedules"]) == len(SCHEDULES) - 1
    assert [item["stages"] for item in found["schedules"] if item["schedule"] == "interleaved"] == [12]


@pytest.mark.parametrize(("split", "idle"), [("always", 14), ("before-cooldown", 28), ("never", 34)])
def test_where_backwards_are_split(capsys, split, idle):
    options = ("--ranks", "8", "--microbatches", "16", "--cost-unit", "stage", "--backward-split", split, "--json")
    status, text, _ = run(capsys, "simulate", "dualpipev", *options)
    assert status == 0 and json.loads(text)["idle"] == idle
    _, csv, _ = show(capsys, "dualpipev", *options[:4], "--format", "csv", "--backward-split", split)
    assert ("W" in csv) == (split != "never")


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("comm", [(), ("--comm",)])
def test_validate_reads_what_show_writes(capsys, tmp_path, name, comm):
    target = tmp_path / "lists.csv"
    run(capsys, "show", name, "--ranks", "4", "--microbatches", "8", "--format", "csv", "--output", str(target), *comm)
    schedule = build(name, 4, 8)
    assert read_csv(target.read_text(), name=name) == (with_communication(schedule) if comm else schedule)
    status, text, _ = run(capsys, "validate", str(target))
    live = max(simulate(schedule).peak_live)
    assert status == 0
    assert text == (
        f"valid: 4 ranks, {schedule.num_stages} stages, 8 microbatches, at most {live} live activations a rank\n"
    )
    assert run(capsys, "validate", str(target), "--max-live", str(live))[0] == 0
    status, _, err = run(capsys, "validate", str(target), "--max-live", str(live - 1))
    assert status == 2 and f"{live} live activations, at most {live - 1} are allowed" in err


def test_validate_names_the_cell(capsys, tmp_path):
    target = tmp_path / "lists.csv"
    for before, after, words in (
        ("2F0", "2F1", "rank 2, position 1, 2F1: done twice"),
        ("1W0", "1I0", "1I0: done twice"),
        ("3F0,3I0", "3I0,3F0", "rank 3, position 0, 3I0: backward before its F"),
        ("1F0", "2F9", "action 2F9 on rank 1; allowed: stages 1 there"),
        ("1F0", "1G0", "action '1G0'"),
    ):
        text = build("zb1p", 4, 4).to_csv()
        assert before in text
        target.write_text(text.replace(before, after, 1))
        status, _, err = run(capsys, "validate", str(target))
        assert status == 2 and words in err and err.count("\n") == 1
    for name in (tmp_path / "none.csv", tmp_path):
        status, _, err = run(capsys, "validate", str(name))
        assert status == 2 and str(name) in err and err.count("\n") == 1
    target.write_text("\n")
    assert "without any computation" in run(capsys, "validate", str(target))[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulate", "zbv", "--ranks", "2", "--microbatches", "4", "--costs", "X=1"), "cost 'X=1'"),
        (("simulate", "zbv", "--ranks", "2", "--microbatches", "4", "--stage-costs", "F=1"), "--stage-costs F=1"),
        (("simulate", "zbv", "--ranks", "2", "--microbatches", "4", "--stage-costs", "7:F=1"), "costs of stage 7"),
        (("compare", "--ranks", "0", "--microbatches", "4"), "ranks 0"),
        (("compare", "--ranks", "2", "--microbatches", "4", "--stages-per-rank", "0"), "stages a rank 0"),
        (("dance",), "dance"),
    ],
)
def test_mistakes_of_the_other_commands(capsys, arguments, words):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert words in err and err.count("\n") == 1


def test_as_a_module_without_torch_distributed():
    code = (
        "import runpy, sys; sys.argv = ['dualpipe', 'show', '1f1b', '--ranks', '2', '--microbatches', '2']\n"
        "try: runpy.run_module('dualpipe', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert 'torch.distributed' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "1F0" in done.stdout


def test_every_exported_name_loads():
    for name in dualpipe.__all__:
        assert getattr(dualpipe, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dualpipe.nothing
