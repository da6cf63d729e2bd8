"""The main job as a newcomer starts it: real text, four processes, files, resume, and every mistake in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comm_core.runtime import env
from comm_core.runtime.errors import UsageError
from examples import progress
from examples.pretrain_deepseek_v3 import main

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 6


def _torchrun(folder: Path, *arguments: str, ranks: int = 4) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = [str(ROOT / "examples" / "pretrain_deepseek_v3.py"), "--set", f"output={folder}", *arguments]
    return subprocess.run(
        [*command, *script],
        cwd=ROOT,
        env=env.for_child(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def _train(folder: Path, *arguments: str) -> str:
    done = _torchrun(folder, "--device", "cpu", "--set", "train.seq_length=32", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, _train(folder, "--steps", str(STEPS), "--name", "whole", "--set", "checkpoint.interval=3")


def test_a_line_a_step_and_a_closing_line(trained: tuple[Path, str]) -> None:
    lines = trained[1].strip().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [f"{step}/{STEPS}" for step in range(1, STEPS + 1)], lines
    assert all(word in lines[0] for word in ("loss", "grad norm", "tokens/s", "max/mean"))
    rows = progress.read(trained[0] / "whole" / "metrics.jsonl")
    for part in (f"{rows[0].loss:.6f}", f"{rows[-1].loss:.6f}", "report.html", "trace.json", "metrics.jsonl"):
        assert part in lines[-1]


def test_what_was_written(trained: tuple[Path, str]) -> None:
    run = trained[0] / "whole"
    rows = progress.read(run / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert all(row.loss > 0 and row.grad_norm > 0 and row.tokens_per_s > 0 and row.imbalance >= 1 for row in rows)
    trace = json.loads((run / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for category, names in (("pipeline", {"F", "B", "I", "W", "FB", "SEND", "RECV"}), ("ep", {"dispatch", "combine"})):
        by_rank = [
            {
                event["args"].get("kind", event["name"])
                for event in spans
                if event["cat"] == category and event["pid"] == rank
            }
            for rank in range(4)
        ]
        assert all(names - {"FB"} <= found for found in by_rank), (category, by_rank)
    assert any(event["args"].get("kind") == "FB" for event in spans)
    report = (run / "report.html").read_text()
    assert "<svg" in report and "http://" not in report.replace("http://www.w3.org", "") and "https://" not in report
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000003", "step_00000006"]


def test_dispatch_overlaps_the_shared_expert(trained: tuple[Path, str]) -> None:
    spans = json.loads((trained[0] / "whole" / "trace.json").read_text())["traceEvents"]
    actions = [
        event for event in spans if event.get("cat") == "pipeline" and event["args"]["kind"] in ("F", "B", "I", "FB")
    ]
    moves = [event for event in spans if event.get("cat") == "ep" and event["name"] == "dispatch"]
    inside = [
        move
        for move in moves
        if any(a["pid"] == move["pid"] and a["ts"] <= move["ts"] < a["ts"] + a["dur"] for a in actions)
    ]
    assert len(inside) == len(moves) > 0
    assert {move["tid"] for move in moves}.isdisjoint({action["tid"] for action in actions})


def test_resume_reaches_the_same_losses(trained: tuple[Path, str]) -> None:
    folder = trained[0]
    shutil.copytree(folder / "whole", folder / "parts")
    # As if the run had been stopped after its first checkpoint, with rows written beyond it.
    shutil.rmtree(folder / "parts" / "checkpoints" / f"step_{STEPS:08d}")
    _train(folder, "--steps", str(STEPS), "--name", "parts", "--set", "checkpoint.interval=3", "--resume")
    whole, parts = (progress.read(folder / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert [(row.step, row.loss, row.grad_norm, row.imbalance) for row in parts] == [
        (row.step, row.loss, row.grad_norm, row.imbalance) for row in whole
    ]


def test_what_a_run_may_continue_from(tmp_path: Path) -> None:
    from examples import checkpoint

    settings = {"data": "abc", "train.seed": 1}
    for step in (3, 6):
        (tmp_path / f"step_{step:08d}").mkdir()
        (tmp_path / f"step_{step:08d}" / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "partial_00000009").mkdir()
    assert checkpoint.steps(tmp_path) == [3, 6]
    assert checkpoint.newest(tmp_path, settings, last_step=7) == 6
    with pytest.raises(UsageError, match=r"train.steps=6; allowed: more than 6 steps"):
        checkpoint.newest(tmp_path, settings, last_step=6)
    with pytest.raises(UsageError, match=r"train.seed=2; allowed: 1, as it was saved"):
        checkpoint.newest(tmp_path, {**settings, "train.seed": 2}, last_step=9)
    checkpoint.clear(tmp_path)
    assert checkpoint.steps(tmp_path) == []


def test_a_new_run_in_bf16_with_stock_parts_replaces_an_older_one(trained: tuple[Path, str]) -> None:
    folder = trained[0]
    shutil.copytree(folder / "whole", folder / "stock")
    settings = ("train.dtype=bf16", "parallel.schedule=1f1b", "parallel.moe_layer=megatron", "checkpoint.interval=9")
    arguments = [part for setting in settings for part in ("--set", setting)]
    _train(folder, "--steps", "2", "--name", "stock", *arguments)
    stock, whole = (progress.read(folder / name / "metrics.jsonl") for name in ("stock", "whole"))
    assert stock[0].loss == pytest.approx(whole[0].loss, rel=5e-3) and stock[0].loss != whole[0].loss
    assert [row.step for row in stock] == [1, 2]
    assert [path.name for path in (folder / "stock" / "checkpoints").iterdir()] == ["step_00000002"]


MISTAKES = [
    (["--set", "train.stepz=3"], "unknown key 'train.stepz'", "steps"),
    (["--set", "train.steps=many"], "train.steps='many'", "integer"),
    (["--set", "train.num_microbatches=2"], "train.num_microbatches=2", "2P-1 = 3"),
    (["--set", "model.num_layers=6"], "model.num_layers=6", "multiple of 4"),
    (["--set", "parallel.ep_size=3"], "parallel.ep_size=3", "divides 8"),
    (
        ["--set", "parallel.pp_size=4", "--set", "model.num_layers=8", "--set", "train.num_microbatches=7"],
        "4 processes",
        "8",
    ),
    (["--config", "no/such.yaml"], "no/such.yaml", "--config"),
    (["--device", "cuda"], "device cuda", "--device cpu"),
    (["--stepz", "3"], "--stepz", "--help"),
]


@pytest.mark.parametrize(("arguments", "given", "remedy"), MISTAKES, ids=[case[1] for case in MISTAKES])
def test_a_mistake_is_one_line_and_exit_2(
    arguments: list[str], given: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("examples.pretrain_deepseek_v3.GRACE_SECONDS", 0.0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for rank in ("0", "1"):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")):
            monkeypatch.setenv(name, value)
        if "cuda" in arguments:
            monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        assert main(arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        if rank == "0":
            assert shown.err.count("\n") == 1 and given in shown.err and remedy in shown.err
        else:
            assert shown.err == ""


def test_without_megatron_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import megatron_patch

    def missing(name: str) -> str:
        raise megatron_patch.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(megatron_patch.importlib.metadata, "version", missing)
    one = ["parallel.ep_size=1", "parallel.pp_size=1", "parallel.schedule=1f1b"]
    assert main([part for setting in one for part in ("--set", setting)]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "megatron-core" in shown and "pip install" in shown


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["--data", "missing.txt"], "missing.txt"),
        (["--resume", "--name", "never_ran"], "--resume without a checkpoint"),
    ],
    ids=["missing data", "nothing to resume"],
)
def test_a_mistake_that_one_rank_finds_ends_all(tmp_path: Path, arguments: list[str], given: str) -> None:
    started = time.monotonic()
    done = _torchrun(tmp_path, *arguments)
    assert done.returncode == 1 and time.monotonic() - started < 120
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and given in errors[0], done.stderr
    assert "exitcode  : 2" in done.stderr and "exitcode  : 1 " not in done.stderr
    assert "Traceback" not in done.stderr.split("error: ")[0]
