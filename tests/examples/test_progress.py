"""Lines on the screen and rows in metrics.jsonl: every step once, also after a crash and a resume."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from comm_core.runtime.errors import UsageError
from examples import progress
from examples.progress import Progress, Row


def row(step: int, loss: float = 2.5) -> Row:
    return Row(step=step, loss=loss, grad_norm=1.25, tokens_per_s=1234.5, imbalance=1.5)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_and_a_row_a_step(tmp_path: Path) -> None:
    path, screen = tmp_path / "run" / "metrics.jsonl", io.StringIO()
    with Progress(path, total_steps=200, stream=screen) as shown:
        for step in range(1, 4):
            shown.step(row(step, loss=3.0 / step))
            # Written at once: a reader sees the step while the run goes on.
            assert len(path.read_text().splitlines()) == step
        shown.finish(["a/report.html", Path("a/trace.json")])
    lines = screen.getvalue().splitlines()
    assert len(lines) == 4
    assert " ".join(lines[1].split()) == (
        "step 2/200 loss 1.500000 grad norm 1.250000 1,234 tokens/s expert load max/mean 1.50"
    )
    assert lines[3] == (
        "loss 3.000000 at step 1, 1.000000 at step 3 (33% of the first); wrote a/report.html, a/trace.json"
    )
    assert [json.loads(text) for text in path.read_text().splitlines()][1] == {
        "step": 2,
        "loss": 1.5,
        "grad_norm": 1.25,
        "tokens_per_s": 1234.5,
        "imbalance": 1.5,
    }
    assert progress.read(path) == [row(step, loss=3.0 / step) for step in range(1, 4)]


def test_a_terminal_also_gets_a_bar(tmp_path: Path) -> None:
    screen = Terminal()
    with Progress(tmp_path / "m.jsonl", total_steps=2, stream=screen) as shown:
        shown.step(row(1))
        shown.step(row(2))
        shown.finish(["x"])
    text = screen.getvalue()
    assert "50%|" in text and "/2 [" in text
    assert text.count("step 1/2 ") == 1 and text.count("step 2/2 ") == 1
    assert text.rstrip().endswith("wrote x")
    plain = io.StringIO()
    with Progress(tmp_path / "m.jsonl", total_steps=2, stream=plain) as shown:
        shown.step(row(1))
    assert "|" not in plain.getvalue() and "\r" not in plain.getvalue()


def test_resume_removes_the_steps_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Progress(path, total_steps=6, stream=io.StringIO()) as shown:
        for step in range(1, 6):
            shown.step(row(step, loss=10.0 + step))
    with Progress(path, total_steps=6, start_step=4, stream=io.StringIO()) as shown:
        assert [kept.step for kept in shown.rows] == [1, 2, 3]
        for step in range(4, 7):
            shown.step(row(step, loss=20.0 + step))
    found = progress.read(path)
    assert [entry.step for entry in found] == [1, 2, 3, 4, 5, 6]
    assert [entry.loss for entry in found] == [11.0, 12.0, 13.0, 24.0, 25.0, 26.0]


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("this is no row\n" * 3)
    with Progress(path, total_steps=1, stream=io.StringIO()) as shown:
        shown.step(row(1))
    assert progress.read(path) == [row(1)]


def test_a_torn_last_line_is_dropped_and_never_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(row(1).to_json() + "\n" + row(2).to_json()[:20])
    assert progress.read(path) == [row(1)]
    with Progress(path, total_steps=2, start_step=2, stream=io.StringIO()) as shown:
        shown.step(row(2))
    assert progress.read(path) == [row(1), row(2)]


@pytest.mark.parametrize("bad", ["{}", "[1]", "nonsense", '{"step": "x", "loss": 1}'])
def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{row(1).to_json()}\n{bad}\n{row(3).to_json()}\n")
    with pytest.raises(UsageError, match="line 2"):
        progress.read(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        progress.read(tmp_path / "absent.jsonl")


def test_numbers_that_json_can_not_hold_survive(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Progress(path, total_steps=2, stream=io.StringIO()) as shown:
        shown.step(row(1, loss=math.nan))
        shown.step(row(2, loss=math.inf))
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    assert [math.isnan(entry.loss) for entry in progress.read(path)] == [True, True]


def test_the_file_is_closed_when_training_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="step failed"),
        Progress(tmp_path / "m.jsonl", total_steps=2, stream=io.StringIO()) as shown,
    ):
        shown.step(row(1))
        raise RuntimeError("step failed")
    with pytest.raises(ValueError, match="closed"):
        shown.step(row(2))
