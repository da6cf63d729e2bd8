"""bench_moe_layer without a device: options, lines, what the harness measures, and one tiny run of every part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import bench_moe_layer, harness, moe_sides
from tests.pool import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def test_options() -> None:
    given = bench_moe_layer.parse([])
    assert given.shape is None and not given.release and given.pace_gbs is None and given.recipe == []
    given = bench_moe_layer.parse(["--shape", "lite", "--pace-gbs", "45", "--recipe", "blockwise", "--release"])
    assert given.shape == ["lite"] and given.pace_gbs == 45 and given.recipe == ["blockwise"] and given.release
    shapes = moe_sides.SHAPES
    assert (shapes["lite"].num_tokens, shapes["v3"].num_tokens) == (16384, 8192)


def test_lines() -> None:
    times = {"ours_forward_ms": 1.0, "ours_ms": 3.0, "alltoall_forward_ms": 2.0, "alltoall_ms": 6.0, "deepep_ms": None}
    row = {"shape": "v3", **times, "ratio": 0.5, "memory_gib": 7.0, "alltoall_memory_gib": 8.0}
    line = bench_moe_layer.line(row)
    assert "ratio 0.500" in line and "3.00 ms (alltoall 6.00" in line and "7.00 GiB (alltoall 8.00)" in line
    chunks = {"shape": "v3", "pace_gbs": 45, "num_chunks": 4, "ours_ms": 3.0, "ratio_to_whole": 0.9}
    assert "4 chunks" in bench_moe_layer.line(chunks) and "0.900" in bench_moe_layer.line(chunks)


def _measured(rank: int) -> tuple[dict[str, float], list[str]]:
    order: list[str] = []
    cpu = torch.device("cpu")
    works = {
        "short": lambda: (order.append("short"), time.sleep(0.001)),
        "long": lambda: (order.append("long"), time.sleep(0.02)),
    }
    times = harness.medians_ms(works, cpu, repeats=3, warmup=1)
    return times, order


def test_harness() -> None:
    for times, order in run_ranks(2, _measured):
        assert times["long"] > 15 > times["short"] > 0
        assert order == ["short", "long"] * 4, "the sides take turns"


@pytest.mark.slow
@pytest.mark.megatron
def test_every_part_runs(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--device", "cpu", "--quick", "--pace-gbs", "45", "--chunks", "2", "--recipe", "blockwise", "--profile"]
    command = [*torchrun, "benchmarks/bench_moe_layer.py", *options, "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(output.read_text())["rows"]
    assert [row.get("num_chunks") for row in rows] == [None, 1, 2, None]
    wanted = {
        *("shape", "dtype", "recipe", "ours_ms", "alltoall_ms", "deepep_ms", "ratio", "memory_gib"),
        "alltoall_memory_gib",
    }
    assert wanted <= set(rows[0]) and rows[0]["distance"] < bench_moe_layer.LIMIT
    assert rows[3]["recipe"] == "blockwise" and 0 < rows[3]["distance"] < 0.2
    assert "no pace: pace_gbs = 45" in done.stdout and "aten::mm" in done.stdout
