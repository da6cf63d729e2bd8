"""The benchmark: data is checked before it is timed, every usable backend has a row, mistakes are one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from comm_core import __main__ as command
from comm_core import bench
from comm_core.backends import registry
from comm_core.runtime.errors import CommError, UsageError

SMALL = ["bench", "--tokens=40", "--hidden=64", "--topk=2", "--experts=4", "--repeats=3", "--warmup=1"]


def test_json_has_a_row_for_every_backend_and_the_plain_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*SMALL, "--device", "cpu", "--ranks", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"rows"}
    usable = {name for name, kind, reason in registry.report() if kind == "cpu" and reason is None}
    assert {"collective", "posix"} <= usable
    assert [row["backend"] for row in report["rows"]] == [*(n for n in registry.names() if n in usable), bench.PLAIN]
    assert bench.PLAIN == "all_to_all_single"
    for row in report["rows"]:
        assert set(row) == {"backend", "dispatch_us", "combine_us"}
        assert 1 < row["dispatch_us"] < 5e6
        assert 1 < row["combine_us"] < 5e6


def test_table_for_people() -> None:
    text = bench.table(bench.Settings(tokens=7), [{"backend": "some", "dispatch_us": 1.0, "combine_us": 2.0}])
    assert "tokens 7" in text
    assert text.splitlines()[-1].split() == ["some", "1", "2", "3"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--experts", "15"], "experts=15"),
        (["--ranks", "0"], "ranks=0"),
        (["--topk", "5", "--experts", "4"], "topk=5"),
        (["--tokens", "-1"], "tokens=-1"),
        (["--device", "musa", "--ranks", "64", "--experts", "64"], "64 ranks on"),
    ],
)
def test_mistakes_are_one_line(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["bench", *options]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1


class _Fixed:
    """A way with given results."""

    def __init__(self, rows: torch.Tensor, total: torch.Tensor) -> None:
        self.rows, self.total = rows, total

    def dispatch(self) -> torch.Tensor:
        return self.rows

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        return self.total

    def close(self) -> None:
        pass


def test_different_data_is_not_timed() -> None:
    rows, total = torch.randn(6, 8), torch.randn(4, 8)
    settings = replace(bench.Settings(), tokens=4)
    good = _Fixed(rows, total)
    bench._check_same({"a": good, "b": _Fixed(rows.clone(), total.clone()), bench.PLAIN: good}, settings)
    for wrong in (_Fixed(rows.flip(0), total), _Fixed(rows, total + 1e-6)):
        with pytest.raises(CommError, match="b and a give different rows or sums"):
            bench._check_same({"a": good, "b": wrong}, settings)
    with pytest.raises(CommError, match="all_to_all_single and a"):
        bench._check_same({"a": good, bench.PLAIN: _Fixed(rows, total * 1.5 + 1)}, settings)


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(CommError, match=r"bench: rank \d failed: AttributeError"):
        bench.measure(bench.Settings(tokens=2, hidden=8, topk=1, experts=2, dtype="no_dtype"))
    with pytest.raises(UsageError, match="device='tpu'"):
        bench.measure(bench.Settings(device="tpu"))
