"""Where the second supported Megatron-core lies, for tests that compare two versions in one run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".megatron-0.19"


def run_with_second_megatron(code: str, *argv: str, timeout: float = 120.0) -> str:
    """Runs Python code in a process that imports the second Megatron-core; returns what it printed.

    Skips the calling test, with the reason, where that version is not installed.
    """
    if not (FOLDER / "megatron" / "core").is_dir():
        pytest.skip(f"the second megatron-core is not in {FOLDER.name} (`make test` installs it)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *argv],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
