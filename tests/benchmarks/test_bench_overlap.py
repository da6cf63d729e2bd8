"""bench_overlap without a device: its figures, its lines, and one tiny run that compares before it times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bench_overlap
from benchmarks.moe_sides import SHAPES

ROOT = Path(__file__).resolve().parents[2]


def test_rows_and_lines() -> None:
    times = {"serial_ms": 20.0, "overlapped_ms": 11.0}
    row = bench_overlap.row_of("lite", times, 10.0, 45.0, 2)
    assert (row["covered"], row["ratio"]) == (0.9, 0.55) and row["megatron_ms"] is None and row["megatron_missing"]
    line = bench_overlap.line(row)
    assert "45.0 GB/s" in line and "ratio 0.550" in line and "90 % covered" in line
    nothing = bench_overlap.row_of("lite", times, 20.0, None, 2)
    assert nothing["covered"] is None and "full speed" in bench_overlap.line(nothing)


def test_the_pace_makes_communication_as_long_as_computation() -> None:
    shape = SHAPES["lite"]
    pace = bench_overlap.balanced_pace(shape, 4, 50.0, 2)
    # With six experts of 32 on each of two ranks about every token goes to both: one row of two crosses.
    seconds = 4 * 4 * shape.num_tokens * shape.hidden * 2 / (pace * 1e9)
    assert seconds == pytest.approx(0.05)


@pytest.mark.slow
def test_every_line_runs(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "benchmarks/bench_overlap.py", "--device", "cpu", "--quick", "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(output.read_text())["rows"]
    assert {"serial_ms", "overlapped_ms", "megatron_ms", "covered", "pace_gbs"} <= set(row)
    assert "the times mean nothing" in done.stdout and "no pace: pace_gbs" in done.stdout
