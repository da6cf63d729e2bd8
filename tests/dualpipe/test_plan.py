"""The plan against trying everything, and its costs and memory against the simulator's."""

import itertools
import json

import pytest

from comm_core.runtime.errors import UsageError
from dualpipe.__main__ import main
from dualpipe.actions import Kind
from dualpipe.costs import Durations, of_stages
from dualpipe.plan import Workload, memory_of, plan, stage_durations
from dualpipe.schedule import SCHEDULES, build
from dualpipe.simulate import simulate

LAYER = Durations(F=1.0, I=1.1, W=0.9, FB=2.4, hop=0.2)


def everything(ranks, work, memory, names):
    """(makespan, schedule, microbatches, layers) of all choices that fit, by brute force."""
    found = []
    for name in names:
        for count in [n for n in range(1, work.samples + 1) if work.samples % n == 0]:
            try:
                schedule = build(name, ranks, count, allow_few=True)
            except UsageError:
                continue
            for layers in itertools.product(range(1, work.layers + 1), repeat=schedule.num_stages):
                if sum(layers) != work.layers or max(memory_of(work, schedule, layers)) > memory:
                    continue
                makespan = simulate(schedule, stage_durations(work, layers, count)).makespan
                found.append((makespan, name, count, layers))
    return found


@pytest.mark.parametrize("memory", [float("inf"), 80.0, 60.0])
def test_best_of_everything_where_that_can_be_tried(memory):
    work = Workload(
        layers=7,
        samples=8,
        layer=LAYER,
        embedding=Durations(F=0.5, I=0, W=0.5),
        head=Durations(F=1.5, I=1.5, W=1.5),
        overhead=0.3,
        layer_memory=3,
        head_memory=4,
        embedding_memory=4,
    )
    names = sorted(SCHEDULES)
    choices = everything(2, work, memory, names)
    best = plan(2, work, memory=memory)[0]
    assert best.makespan == pytest.approx(min(choices)[0])
    assert (best.schedule, best.microbatches, best.layers) in [c[1:] for c in choices if c[0] <= min(choices)[0] + 1e-9]
    assert max(best.memory) <= memory


def test_climbing_comes_near_the_best_where_splits_are_many():
    """Three ranks, ten layers in six stages: 126 splits, more than are all tried."""
    work = Workload(layers=10, samples=6, layer=LAYER, head=Durations(F=2.2, I=2.2, W=2.2), overhead=0.1)
    for name in ("zbv", "dualpipev"):
        best = min(choice for choice in everything(3, work, float("inf"), [name]))
        found = plan(3, work, schedules=[name])[0]
        assert best[0] <= found.makespan <= 1.03 * best[0]


def test_even_layers_cost_what_the_schedule_costs_alone():
    work = Workload(layers=8, samples=16, layer=Durations(FB=2.5, a2a=0.25, hop=0.1))
    for name in ("1f1b", "zbv", "dualpipev", "dualpipe", "interleaved"):
        schedule = build(name, 2, 8)
        layers = [8 // schedule.num_stages] * schedule.num_stages
        mine = stage_durations(work, layers, 8)
        # Two samples of four layers are 1/P of the model.
        base = Durations(F=8, I=8, W=8, FB=20, a2a=2, hop=0.2)
        assert simulate(schedule, mine).makespan == pytest.approx(
            simulate(schedule, of_stages(schedule, base)).makespan
        )
        peaks = [live * layers[0] * 2 for live in simulate(schedule).peak_live]
        assert list(memory_of(work, schedule, layers)) == pytest.approx(peaks)


def test_what_is_no_layer_is_not_hidden_by_a_pair():
    work = Workload(layers=4, samples=4, layer=Durations(FB=2), head=Durations(F=5, I=5, W=5), overhead=1)
    first, *_, last = stage_durations(work, [1, 1, 1, 1], 4)
    assert first.whole_pair == 2 + 1 and last.whole_pair == 2 + 15 + 1
    assert [last.alone(kind) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)] == [7, 7, 7, 13]


def test_more_memory_is_never_slower_and_too_little_says_what_would_do():
    work = Workload(layers=8, samples=8, layer=LAYER, layer_memory=2, overhead=0.2)
    times = []
    for memory in (28, 40, 60, 100):
        best = plan(2, work, memory=memory)[0]
        assert max(best.memory) <= memory
        times.append(best.makespan)
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    with pytest.raises(UsageError, match="a memory limit of 1; allowed: at least") as caught:
        plan(2, work, memory=1)
    least = float(str(caught.value).partition("at least ")[2].partition(";")[0])
    assert plan(2, work, memory=least)
    with pytest.raises(UsageError, match="at least"):
        plan(2, work, memory=least - 0.01)


def test_fixed_costs_ask_for_fewer_microbatches():
    few = plan(2, Workload(layers=4, samples=16, overhead=50.0), schedules=["1f1b"])[0].microbatches
    many = plan(2, Workload(layers=4, samples=16), schedules=["1f1b"])[0].microbatches
    assert few < many == 16


def test_the_head_takes_layers_from_the_last_stage():
    best = plan(4, Workload(layers=16, samples=16, head=Durations(F=2, I=2, W=2)), schedules=["1f1b"])[0]
    assert sum(best.layers) == 16 and best.layers[3] < best.layers[0]
    assert (
        best.makespan
        < simulate(
            build("1f1b", 4, 16),
            stage_durations(Workload(layers=16, samples=16, head=Durations(F=2, I=2, W=2)), [4] * 4, 16),
        ).makespan
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, "layers 0"),
        ({"overhead": -1.0}, "overhead -1"),
        ({"activation": float("nan")}, "activation nan"),
    ],
)
def test_impossible_workloads(change, words):
    with pytest.raises(UsageError, match=words):
        Workload(**{"layers": 4, "samples": 4, **change})


def test_command(capsys):
    sizes = ["plan", "--ranks", "2", "--layers", "6", "--samples", "4", "--head", "F=1,I=1,W=1"]
    assert main([*sizes, "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[0].split()[:3] == ["schedule", "microbatches", "makespan"]
    assert main([*sizes, "--json", "--schedules", "zbv,1f1b"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {item["schedule"] for item in found} <= {"zbv", "1f1b"} and sum(found[0]["layers"]) == 6
    for more, words in (
        (["--schedules", "zigzag"], "zigzag"),
        (["--memory", "0.5"], "at least"),
        (["--layers", "1"], "a layer a stage"),
        (["--costs", "F"], "cost 'F'"),
    ):
        assert main([*sizes, *more]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
