"""Writes the file map of CONTRIBUTING.md: the first line of each module's docstring.

`make format` runs it as `python -m tests.file_map`; tests/test_readme.py compares.
"""

from __future__ import annotations

import ast
import re
import subprocess

from tests import rules

FOLDERS = {
    "comm_core": "EP communication. Knows no `nn.Module` and no Megatron",
    "mt_moe": "the MoE layer, plain torch",
    "dualpipe": "pipeline schedules. Knows no MoE and no Megatron",
    "megatron_patch": "the only importer of Megatron",
    "examples": "run from the repository, not installed",
    "benchmarks": "measurements, each of which checks its results first",
}
PAGE = rules.ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- file map: made by `make format` -->", "<!-- end of the file map -->"


def table(folder: str, title: str) -> str:
    """The files of one folder that git tracks, one a line."""
    command = ["git", "ls-files", f"{folder}/*.py"]
    names = subprocess.run(command, cwd=rules.ROOT, capture_output=True, text=True, check=True).stdout.split()
    rows = []
    for name in sorted(names):
        if (rules.ROOT / name).exists() and name not in ("examples/__init__.py", "benchmarks/__init__.py"):
            text = ast.get_docstring(ast.parse((rules.ROOT / name).read_text(encoding="utf-8"))) or ""
            first = text.partition("\n")[0].rstrip(".").replace("|", "\\|")
            rows.append(f"| `{name}` | {first} |")
    return "\n".join([f"**{folder}** - {title}", "", "| file | what |", "|---|---|", *rows])


def with_map(page: str) -> str:
    """The page with the map as the tree has it now."""
    tables = "\n\n".join(table(folder, title) for folder, title in FOLDERS.items())
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{tables}\n\n{END}", page, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
