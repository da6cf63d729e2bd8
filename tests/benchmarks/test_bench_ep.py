"""bench_ep without a device: options, the form of the results, the floors, and that wrong data would be found.

The answers it compares with are held against `comm_core.reference`, and its calls are made on CPU ranks through another
backend. Times, symmetric memory and graphs need a device.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import bench_ep, ep_data, ep_floors, ep_operations, ep_timing
from benchmarks.ep_data import Shape
from benchmarks.ep_floors import Measured
from benchmarks.ep_operations import Bench, Operation
from benchmarks.ep_timing import Timer
from comm_core import ElasticBuffer, reference
from comm_core.runtime import device as devices
from comm_core.runtime.errors import CommError, UsageError
from tests.pool import run_ranks

CPU = torch.device("cpu")
ROW = {
    *("operation", "dtype", "expanded", "cached", "zero_copy", "tokens", "ranks", "us", "sms"),
    *("peer_gbs", "over_ceiling"),
}


def test_options() -> None:
    given = bench_ep.parse([])
    assert (given.tokens, given.hidden, given.topk, given.experts) == (8192, 7168, 8, 256)
    assert given.sms == (16, 24, 32, 64) and given.device == "cuda" and given.output is None
    quick = bench_ep.parse(["--quick", "--sms", "24,8,8,16", "--tokens", "64"])
    assert quick.sms == (8, 24) and quick.tokens == 64 and quick.repeats < given.repeats
    for wrong in (["--sms", "0"], ["--sms", "a,2"], ["--repeats", "0"], ["--device", "cpu"]):
        with pytest.raises(SystemExit):
            bench_ep.parse(wrong)


def test_only_a_full_run_of_the_standard_sizes_writes_the_results() -> None:
    standard, given = ep_floors.STANDARD, bench_ep.parse([])
    assert bench_ep.output_of(given, standard, shared=False) == bench_ep.RESULTS
    assert bench_ep.output_of(given, standard, shared=True) is None
    assert bench_ep.output_of(given, replace(standard, tokens=4096), shared=False) is None
    assert bench_ep.output_of(given, replace(standard, ranks=4), shared=False) is None
    for option in (["--quick"], ["--only", "combine"]):
        assert bench_ep.output_of(bench_ep.parse(option), standard, shared=False) is None
    named = bench_ep.parse(["--quick", "--output", "x.json"])
    assert bench_ep.output_of(named, standard, shared=True) == Path("x.json")


def test_without_a_device_it_says_so_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "count", lambda kind: 0)
    assert bench_ep.main([]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setattr(devices, "count", lambda kind: 2)
    monkeypatch.delenv("RANK", raising=False)
    assert bench_ep.main([]) == 2
    assert "torchrun" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench_ep.main(["--experts", "9"]) == 2
    assert "--experts 9" in capsys.readouterr().err


def test_sizes_that_can_not_be_are_refused() -> None:
    for change in ({"experts": 255}, {"topk": 300}, {"hidden": 24}, {"tokens": 0}, {"alignment": 0}):
        with pytest.raises(UsageError):
            replace(ep_floors.STANDARD, **change).check()
    ep_floors.STANDARD.check()


def _measured(operation: Operation, us: float, **change: Any) -> Measured:
    standard = Measured(operation, 8192, 2, 58_000_000, {16: us}, {"dispatch": 16, "layout": 64}, 16)
    return replace(standard, **change)


def test_rows_have_the_form_of_the_results() -> None:
    made = ep_floors.row(_measured(Operation("dispatch", "fp8", zero_copy=True), 200.0), 350.0)
    assert set(made) == ROW
    assert made["zero_copy"] is True and made["expanded"] is False and made["sms"] == 16
    assert made["peer_gbs"] == 290.0  # 58 MB in 200 us
    assert made["over_ceiling"] == pytest.approx(200 / (58e6 / 350e9 * 1e6), abs=1e-3)
    assert json.loads(json.dumps(made)) == made
    graph = ep_floors.row(_measured(Operation("combine", "bf16", graph=True), 14.0), 350.0)
    assert set(graph) == ROW | {"graph"} and graph["graph"] is True
    waits = ep_floors.row(_measured(Operation("dispatch", "bf16", host_wait=True), 14.0), 350.0)
    assert set(waits) == ROW | {"host_wait"}


def test_the_fastest_number_of_sms_within_the_limit_counts() -> None:
    assert ep_floors.best({8: 30.0, 16: 20.0, 32: 10.0}, 16) == 16
    assert ep_floors.best({8: 19.0, 16: 20.0, 32: 10.0}, 16) == 8
    assert ep_floors.best({24: 19.0, 32: 10.0}, 16) == 24


def test_verdicts() -> None:
    dispatch = Operation("dispatch", "fp8")
    assert ep_floors.verdict(_measured(dispatch, 255.0)) == "pass"
    assert ep_floors.verdict(_measured(dispatch, 255.1)).startswith("missed by 0.1 us")
    lent = replace(dispatch, zero_copy=True)
    assert ep_floors.verdict(_measured(lent, 200.0)) == "pass"
    assert ep_floors.verdict(_measured(lent, 255.0)).startswith("missed by 55.0 us")
    wide = _measured(lent, 190.0, by_sms={24: 190.0}, sms=24, kernels={"dispatch": 24})
    assert ep_floors.verdict(wide) == "missed: 24 SMs, 16 allowed"
    # A kernel beside the one that was asked for counts as well.
    beside = _measured(Operation("combine", "bf16", expanded=True), 300.0, kernels={"combine": 16, "reduce": 132})
    assert ep_floors.verdict(beside) == "missed: 132 SMs, 64 allowed"
    assert ep_floors.verdict(_measured(replace(dispatch, host_wait=True), 1e9)) == ""
    assert ep_floors.build_verdict(9.9).endswith("pass") and "missed by 2.0 s" in ep_floors.build_verdict(12.0)
    assert "not measured" in ep_floors.build_verdict(None)


def test_the_table_has_a_line_for_each_row_and_every_floor_is_measured() -> None:
    measured = [_measured(operation, 100.0) for operation in ep_operations.large() + ep_operations.small()]
    lines = ep_floors.table(measured, 350.0, judged=True).splitlines()
    assert len(lines) == 1 + len(measured)
    for floor in ep_floors.FLOORS:
        for zero_copy in (False, True):
            operation = replace(floor.operation, zero_copy=zero_copy)
            if operation not in [item.operation for item in measured]:
                assert operation.low_latency and operation.operation == "dispatch"  # it casts, there is no copy to save
                continue
            name, wanted = str(operation), floor.us(zero_copy)
            (line,) = [line for line in lines if line.startswith(f"{name}  ")]
            if wanted is not None:
                assert line.endswith("pass" if wanted >= 100 else "missed by 86.0 us (614%)"), line
    plain = ep_floors.table(measured, 350.0, judged=False)
    assert "pass" not in plain and "DeepEP" not in plain


def _timer(monkeypatch: pytest.MonkeyPatch, samples: list[list[tuple[float, bool]]]) -> tuple[Timer, list[float]]:
    """A timer of two ranks whose samples are given, series by series, and the delays that it chose."""
    delays: list[float] = []
    left = [list(series) for series in samples]

    def sample(self: Timer, call: Any, calls: int, delay: float) -> tuple[float, bool, Any]:
        delays.append(delay)
        return (*left[0].pop(0), f"answer {len(delays)}")

    def gathered(value: Any) -> list[Any]:
        if not isinstance(value, list):
            return [value, value * 3]
        left.pop(0)
        return [value, [(took + 1, False) for took, _ in value]]  # the other rank takes longer

    monkeypatch.setattr(Timer, "_sample", sample)
    monkeypatch.setattr(Timer, "_issue_seconds", lambda self, call, calls: 1e-3)
    monkeypatch.setattr(ep_timing, "gathered", gathered)
    buffer: Any = SimpleNamespace(_backend=SimpleNamespace(_channel=None))
    return Timer(buffer, repeats=3, warmup=0), delays


def test_a_series_is_the_median_of_the_slowest_rank_and_late_samples_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = [(10.0, False), (30.0, False), (20.0, False)]
    timer, delays = _timer(monkeypatch, [good])
    assert timer.series(lambda: None) == (21.0, "answer 3")
    assert delays == pytest.approx([2 * 3e-3 + 3e-4] * 3)  # twice what the slowest host takes
    timer, delays = _timer(monkeypatch, [[(5.0, True), (30.0, False), (20.0, False)]])
    assert timer.series(lambda: None) == (26.0, "answer 3")
    late = [(1.0, True), (2.0, True), (3.0, False)]
    timer, delays = _timer(monkeypatch, [late, good])
    assert timer.series(lambda: None) == (21.0, "answer 6")
    assert delays[3] == 2 * delays[0]
    timer, delays = _timer(monkeypatch, [late])
    assert timer.series(lambda: None, waits=True)[0] == 3.0
    timer, delays = _timer(monkeypatch, [late] * 6)
    with pytest.raises(CommError, match="longer to issue"):
        timer.series(lambda: None)


def test_launches_are_seen_and_the_library_is_left_as_it_was() -> None:
    class Launcher:
        done: ClassVar[list[str]] = []

        def launch(self, name: str, call: Any, stream: int) -> None:
            self.done.append(name)

        def combine_reduced(self, call: Any, lay: Any, stream: int) -> None:
            self.done.append("reduced")

    library = Launcher()
    channel = SimpleNamespace(library=library, num_sms=132)
    buffer: Any = SimpleNamespace(_backend=SimpleNamespace(_channel=channel))
    with ep_timing.launches(buffer) as seen:
        library.launch("layout", SimpleNamespace(num_blocks=3, layout=SimpleNamespace(num_tokens=8192)), 0)
        library.launch("dispatch", SimpleNamespace(num_sms=264), 0)
        library.combine_reduced(SimpleNamespace(num_sms=16), SimpleNamespace(num_sms=48), 0)
        library.launch("barrier", SimpleNamespace(), 0)
    library.launch("later", SimpleNamespace(), 0)
    assert seen == {"layout": 2 * 32 + 3 + 1, "dispatch": 132, "combine": 64, "barrier": 1}
    assert Launcher.done == ["layout", "dispatch", "reduced", "barrier", "later"] and not vars(library)


def _shape(ranks: int, **change: Any) -> Shape:
    return replace(Shape(tokens=13, hidden=48, topk=4, experts=4 * ranks, ranks=ranks), **change)


def _arrivals(shape: Shape, seed: int, *, masked: bool) -> tuple[ep_data.Tokens, list[ep_data.Routing]]:
    tokens = ep_data.draw(shape, seed, CPU)
    if masked:
        for ids in tokens.ids:
            ids[torch.rand(ids.shape) < 0.3] = -1
    return tokens, [ep_data.route(tokens.ids, rank, shape) for rank in range(shape.ranks)]


@pytest.mark.parametrize("ranks, alignment, masked", [(2, 1, False), (2, 4, True), (3, 5, True), (1, 1, False)])
@pytest.mark.parametrize("expand", [False, True])
def test_answers_are_those_of_the_reference(
    ranks: int, alignment: int, masked: bool, expand: bool, fresh_random_data: int
) -> None:
    shape = _shape(ranks, alignment=alignment)
    tokens, routings = _arrivals(shape, fresh_random_data, masked=masked)
    wanted = reference.dispatch(
        tokens.x, tokens.ids, tokens.weights, num_experts=shape.experts, expert_alignment=alignment, do_expand=expand
    )
    rows = [torch.randn(there.recv_x.shape).to(torch.bfloat16) for there in wanted]
    sums = reference.combine(rows, wanted)
    for rank, (mine, routing) in enumerate(zip(wanted, routings, strict=True)):
        got = ep_data.arrived(tokens.x, routing)
        weights = ep_data.arrived(tokens.weights, routing)
        if expand:
            got, weights = ep_data.expanded(got, routing), ep_data.expanded_weights(weights, routing)
        else:
            assert mine.recv_topk_idx is not None and torch.equal(routing.local_idx, mine.recv_topk_idx)
        assert torch.equal(got, mine.recv_x)
        assert mine.recv_topk_weights is not None and torch.equal(weights, mine.recv_topk_weights)
        total = ep_data.combined(rows, routings, tokens.ids[rank], rank, shape, expand=expand)
        assert torch.equal(total, sums[rank][0])


def test_remote_rows_are_those_of_the_busiest_rank() -> None:
    shape = Shape(tokens=3, hidden=16, topk=1, experts=2, ranks=2)
    ids = [torch.tensor([[0], [1], [1]]), torch.tensor([[1], [1], [0]])]
    routings = [ep_data.route(ids, rank, shape) for rank in range(2)]
    assert ep_data.remote_rows(routings) == (2, 2)  # rank 0 sends two rows to rank 1, which sends one
    ids[0][0, 0] = 1
    routings = [ep_data.route(ids, rank, shape) for rank in range(2)]
    assert ep_data.remote_rows(routings) == (3, 3)


def _carried_out(rank: int, seed: int, plant: bool) -> list[str]:
    """What the checks find wrong with every operation that CPU ranks can carry out."""
    bad = []
    operations = [item for item in ep_operations.large() if not item.zero_copy]
    # Without a graph the same calls, of static shape.
    operations += [replace(item, graph=False) for item in ep_operations.small() if not item.zero_copy]
    with ElasticBuffer(backend="collective", device="cpu", num_cpu_timeout_secs=30) as buffer:
        bench = Bench(buffer, _shape(2, alignment=3), seed)
        for operation in operations:
            call, wanted = bench.call(operation), bench.wanted(operation)
            with ep_operations.poisoned():
                got = call(4)
            if plant and rank == 1:
                part = got[-1][1]
                if operation.low_latency and operation.operation == "dispatch":  # behind the counts nothing is compared
                    part = got[0][1][int(got[-1][1].argmax())][:1]
                part.view(torch.uint8).view(-1)[0] += 1  # what lies behind the last expert's rows is not looked at
            found = bench.check(operation, got, wanted)
            bad += found or [f"nothing found: {operation}"] * plant
        bench.release()
    return bad


def test_the_calls_give_what_they_are_compared_with_and_one_wrong_bit_is_found(fresh_random_data: int) -> None:
    assert run_ranks(2, _carried_out, fresh_random_data, False) == [[], []]
    zero, one = run_ranks(2, _carried_out, fresh_random_data, True)
    number = sum(not item.zero_copy for item in [*ep_operations.large(), *ep_operations.small()])
    assert len(zero) == len(one) == number
    assert all(line.startswith("nothing found") for line in zero)
    assert all("differs in 1 of" in line for line in one), one


def test_the_file_and_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_ep.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(devices, "count", lambda kind: 2)
    output = tmp_path / "made" / "found.json"
    given = bench_ep.parse(["--output", str(output), "--commit", "abc"])
    ceiling = bench_ep.ep_ceiling.Ceiling({8: 340.0, 16: 334.0}, {8: 300.0, 16: 320.5})
    measured = [_measured(Operation("dispatch", "fp8", zero_copy=True), 201.0)]
    bench_ep.report(given, ep_floors.STANDARD, CPU, (ceiling, measured), 4.5)
    told = json.loads(output.read_text())
    assert {"machine", "versions", "date", "commit", "ceiling_gbs", "rows"} <= set(told)
    assert told["commit"] == "abc" and told["ceiling_gbs"] == 340.0 and told["cold_build_seconds"] == 4.5
    assert told["rows"] == [ep_floors.row(measured[0], 340.0)] and told["machine"] == "2 x CPU"
    printed = capsys.readouterr().out
    assert "340.0 GB/s stores, 320.5 GB/s reads" in printed and "missed by 1.0 us" in printed
    monkeypatch.setattr(devices, "count", lambda kind: 1)
    bench_ep.report(bench_ep.parse([]), ep_floors.STANDARD, CPU, (ceiling, measured), None)
    printed = capsys.readouterr().out
    assert "times mean nothing" in printed and "nothing is written" in printed and "missed" not in printed
