"""The README's code runs as it stands there, and the files it points to exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import file_map, rules

README = (rules.ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(# .*?)\n(.*?)```", README, re.S)


def _command(how: str) -> list[str]:
    if how == "# python":
        return [sys.executable]
    (num_ranks,) = re.fullmatch(r"# torchrun --nproc-per-node (\d+)", how).groups()  # type: ignore[union-attr]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", num_ranks]


def test_every_block_says_how_it_is_run() -> None:
    assert len(BLOCKS) == README.count("```python") >= 4


def _run(command: list[str], code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(code)
    path = f"{rules.ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=120, cwd=folder, env=environment
    )


@pytest.mark.parametrize("index", [i for i, (how, _) in enumerate(BLOCKS) if not how.startswith("# part of")])
def test_code_runs(index: int, tmp_path: Path) -> None:
    how, code = BLOCKS[index]
    done = _run(_command(how), code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it prints something"


@pytest.mark.megatron
@pytest.mark.parametrize("code", [code for how, code in BLOCKS if how.startswith("# part of")])
def test_names_in_a_part_of_a_script_exist(code: str, tmp_path: Path) -> None:
    """Such a part can not run alone: its import statements and the call that applies the patches do."""
    kept = [
        ast.unparse(node)
        for node in ast.parse(code).body
        if isinstance(node, ast.Import | ast.ImportFrom) or "megatron_patch.apply(" in ast.unparse(node)
    ]
    assert len(kept) > 2
    done = _run([sys.executable], "\n".join([*kept, "print('imported')"]), tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_picture_is_what_the_show_command_draws() -> None:
    (command,) = re.findall(r"`python (-m dualpipe show [^`]*--format svg)`", README)
    done = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True, timeout=60, cwd=rules.ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (rules.ROOT / "docs" / "dualpipev.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_point_to_files(page: str) -> None:
    text = (rules.ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [link for link in links if not (rules.ROOT / link).exists()]
    assert not missing, missing


def test_the_file_map_is_up_to_date() -> None:
    """A file without a line, a line without a file, a line that says something else: all differ."""
    page = file_map.PAGE.read_text(encoding="utf-8")
    assert page == file_map.with_map(page), "run `make format`"
    line = next(line for line in page.splitlines() if line.startswith("| `dualpipe/schedule.py`"))
    assert file_map.with_map(page.replace(line + "\n", "")) == page
