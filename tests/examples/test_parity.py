"""The parity command itself, and that its planted fault is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import parity

ROOT = Path(__file__).resolve().parent.parent.parent


def _parity(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "examples/parity.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)


@pytest.mark.megatron
def test_parity_holds() -> None:
    done = _parity()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("step ") and line.endswith(": ok") for line in lines) == 3
    assert sum("196 of 196 gradients bitwise equal" in line for line in lines) == 4
    assert sum("294 of 294 gradients bitwise equal" in line for line in lines) == 1


def test_a_planted_fault_is_found() -> None:
    done = _parity("--fault", "--microbatches", "3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("FAILED") == 5 and "0 of 98 gradients bitwise equal" in done.stdout


def test_a_gradient_that_should_be_zero_must_be() -> None:
    zero, tiny = torch.zeros(3), torch.tensor([0.0, 1e-30, 0.0])
    assert parity.relative_errors({"w": zero}, {"w": zero}) == {"w": 0.0}
    assert parity.relative_errors({"w": tiny}, {"w": zero}) == {"w": float("inf")}
    assert parity.relative_errors({"w": tiny + 1}, {"w": torch.full((3,), 2.0)}) == {"w": pytest.approx(0.5)}
    with pytest.raises(AssertionError, match="different parameters"):
        parity.relative_errors({"v": zero}, {"w": zero})
