"""Makespan, idle time and activations of every schedule against closed forms and a table of known figures.

All at equal work: the same model on the same ranks, F = I = W = 1 and FB = 3 for 1/P of it, unless said otherwise.
"""

import pytest

from comm_core.runtime.errors import UsageError
from dualpipe.compare import compare, report, table
from dualpipe.costs import Durations, length, of_stages, parse
from dualpipe.schedule import SCHEDULES, build, dualpipev
from dualpipe.simulate import simulate

UNIT = Durations(FB=3)
ORDER = ["1f1b", "interleaved", "interleaved_pairs", "zb1p", "zbh2", "zbv", "dualpipev", "dualpipe"]
MAKESPAN = {
    (2, 4): [15, 13.5, 13.5, 13, 13, 12.5, 13, 12],
    (2, 8): [27, 25.5, 25.5, 25, 25, 24.5, 25, 24],
    (4, 8): [33, 28.5, 28.5, 27, 27, 25.5, 27, 26],
    (4, 16): [57, 52.5, 52.5, 51, 51, 49.5, 51, 50],
    (8, 16): [69, 58.5, 58.5, 55, 55, 51.5, 55, 54],
    (8, 32): [117, 106.5, 106.5, 103, 103, 99.5, 103, 102],
    (16, 32): [141, 118.5, 118.5, 111, 111, 103.5, 111, 110],
    (16, 64): [237, 214.5, 214.5, 207, 207, 199.5, 207, 206],
}
IDLE = {
    "1f1b": lambda p: 3 * (p - 1),
    "interleaved": lambda p: 1.5 * (p - 1),
    "interleaved_pairs": lambda p: 1.5 * (p - 1),
    "zb1p": lambda p: p - 1,
    "zbh2": lambda p: p - 1,
    "zbv": lambda p: (p - 1) / 2,
    "dualpipev": lambda p: p - 1,
    "dualpipe": lambda p: p - 2,
}
PEAK = {
    "1f1b": lambda p: p,
    "interleaved": lambda p: 1.5 * p - 0.5,
    "interleaved_pairs": lambda p: 1.5 * p,
    "zb1p": lambda p: p,
    "zbh2": lambda p: 2 * p - 1,
    "zbv": lambda p: p,
    "dualpipev": lambda p: p + 0.5,
    "dualpipe": lambda p: p + 1,
}


@pytest.mark.parametrize(("ranks", "microbatches"), MAKESPAN)
def test_equal_work_without_communication(ranks, microbatches):
    """Table of makespans, and with it the closed forms of idle time and activations."""
    for name, makespan in zip(ORDER, MAKESPAN[ranks, microbatches], strict=True):
        result = report(build(name, ranks, microbatches), UNIT)
        assert result.makespan == makespan, name
        assert result.idle == IDLE[name](ranks) == makespan - 3 * microbatches, name
        assert result.bubble_ratio == pytest.approx(result.idle / makespan), name  # all ranks idle alike
        assert max(result.peak_activations) == PEAK[name](ranks), name
        assert result.copies == (2 if name == "dualpipe" else 1)
    for name in ("zbv", "dualpipev", "dualpipe"):
        assert len(set(report(build(name, ranks, microbatches), UNIT).peak_activations)) == 1, name
    assert report(build("1f1b", ranks, microbatches)).peak_activations == tuple(range(ranks, 0, -1))


@pytest.mark.parametrize(("ranks", "microbatches"), MAKESPAN)
def test_zero_bubble_schedules_do_not_idle_inside_a_rank_s_span(ranks, microbatches):
    for name, spans in (("zbh2", 0), ("zbv", 0)):
        schedule = build(name, ranks, microbatches)
        result = simulate(schedule, of_stages(schedule, UNIT))
        for rank in range(ranks):
            mine = [block for block in result.blocks if block.rank == rank]
            span = max(block.end for block in mine) - min(block.start for block in mine)
            # The last microbatches of ZB-H2 need 2P of them; both tables have M >= 2P.
            assert span - result.busy[rank] == spans, (name, rank)


@pytest.mark.parametrize("stages", [4, 8, 16, 32])
@pytest.mark.parametrize("factor", [2, 4])
def test_equal_number_of_stages(stages, factor):
    """DualPipe's own convention: unit cost a stage; the V has half of the ranks."""
    for name, ranks in (("dualpipe", stages), ("dualpipev", stages // 2)):
        schedule = build(name, ranks, factor * stages)
        full = report(schedule, UNIT, cost_unit="stage")
        assert full.idle == 2 * (stages / 2 - 1)
        assert full.bubble_ratio * full.makespan == pytest.approx(full.idle)
        assert set(full.peak_activations) == {stages + 1}
        half = simulate(schedule, Durations(FB=2))
        idles = [half.makespan - busy for busy in half.busy]
        assert (max(idles), min(idles)) == (stages / 2 - 1, 1)
    assert report(build("1f1b", stages, factor * stages), UNIT, cost_unit="stage").idle == 3 * (stages - 1)
    assert report(build("zb1p", stages, factor * stages), UNIT, cost_unit="stage").idle == stages - 1


@pytest.mark.parametrize(
    ("costs", "formula", "idle"),
    [
        (Durations(F=1, I=1.3, W=0.8, FB=3.1), 8.4, 7.5),
        (Durations(F=1, I=0.8, W=0.8, FB=2.6), 5.4, 6.0),
        (Durations(F=1.2, I=1, W=1, FB=3.2), 6.6, 7.2),
    ],
)
def test_the_closed_form_is_no_bound_for_unequal_costs(costs, formula, idle):
    assert (8 / 2 - 1) * (costs.whole_pair + costs.full_backward - 3 * costs.W) == pytest.approx(formula)
    for name, ranks in (("dualpipe", 8), ("dualpipev", 4)):
        assert report(build(name, ranks, 32), costs, cost_unit="stage").idle == pytest.approx(idle)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("more", [0, 1])
def test_without_split_backwards_in_the_cool_down(ranks, more):
    """Unit costs a stage: full backwards at the end idle twice as long, 4(P-1) for 2(P-1), and hold no more.

    Without any split it is more still: step 3 passes its dX on later.
    """
    for microbatches in (2 * ranks + more, 4 * ranks + more):
        idle = {}
        for split in ("always", "before_cooldown", "never"):
            schedule = build("dualpipev", ranks, microbatches, backward_split=split)
            result = report(schedule, UNIT, cost_unit="stage")
            assert result.bubble_ratio * result.makespan == pytest.approx(result.idle), "all ranks idle alike"
            assert set(result.peak_activations) == {2 * ranks + 1}
            idle[split] = result.idle
        assert (idle["always"], idle["before_cooldown"]) == (2 * (ranks - 1), 4 * (ranks - 1))
        assert idle["never"] > idle["before_cooldown"] or ranks <= 2


EXPOSED = {
    (8, 16, 0.5): [92, 78, 66.5, 69.25, 65.25, 64.5],
    (8, 32, 0.5): [156, 142, 114.5, 133.25, 113.25, 112.5],
    (8, 16, 1): [115, 97.5, 74.5, 87, 75.5, 75],
    (8, 32, 1): [195, 177.5, 122.5, 167, 123.5, 123],
    (8, 64, 1): [355, 337.5, 218.5, 327, 219.5, 219],
    (16, 64, 0.5): [316, 286, 230.5, 267.25, 227.25, 226.5],
}


@pytest.mark.parametrize(("ranks", "microbatches", "a2a"), EXPOSED)
def test_exposed_all_to_all(ranks, microbatches, a2a):
    """F = I = 1 + x alone, W = 1, and a pair of 3 that hides it."""
    names = ["1f1b", "interleaved", "interleaved_pairs", "zbv", "dualpipev", "dualpipe"]
    for name, makespan in zip(names, EXPOSED[ranks, microbatches, a2a], strict=True):
        assert report(build(name, ranks, microbatches), Durations(FB=3, a2a=a2a)).makespan == makespan, name


def test_compare_has_every_schedule_and_the_reason_of_those_that_can_not_run():
    reports, refused = compare(4, 8, UNIT)
    assert {item.schedule for item in reports} == set(SCHEDULES) and not refused
    assert [item.makespan for item in reports] == sorted(item.makespan for item in reports)
    reports, refused = compare(3, 2, UNIT, stages_per_rank=3)
    assert set(refused) == {"dualpipe"} and "even number of ranks" in refused["dualpipe"]
    assert next(item.stages for item in reports if item.schedule == "interleaved") == 9
    lines = table(reports, refused).splitlines()
    assert lines[0].startswith("schedule") and lines[-1].startswith("dualpipe: not with these sizes")
    assert len(lines) == 1 + len(SCHEDULES)


def test_more_stages_a_rank_make_the_bubble_smaller():
    for stages in (1, 2, 3, 4):
        result = report(build("interleaved", 4, 8, stages_per_rank=stages), UNIT)
        assert result.idle == pytest.approx(3 * 3 / stages)


def test_durations_of_stages_that_differ():
    """Only stage 0 is slower: the makespan grows by its extra work, which is on the critical path."""
    plain = report(build("1f1b", 3, 6), UNIT, cost_unit="stage")
    slow = report(build("1f1b", 3, 6), UNIT, cost_unit="stage", overrides=[(0, "F=2,W=2")])
    assert plain.makespan == 24 and slow.makespan > plain.makespan
    assert slow.idle == slow.makespan - 18  # the largest idle is that of a rank with the old work
    schedule = dualpipev(2, 4)
    durations = [Durations(F=1, I=1, W=1, FB=2), *[Durations(F=2, I=2, W=2, FB=6)] * 3]
    pairs = [a for actions in schedule.ranks for a in actions if a.parts]
    mixed = next(pair for pair in pairs if 0 in [part.stage for part in pair.parts])
    # The parts of both pairs in the ratio 1:2 of F and B alone: 2/3 + 4 or 2 + 4/3.
    assert length(mixed, durations) == pytest.approx(2 / 3 + 4 if mixed.parts[0].stage == 0 else 2 + 4 / 3)
    with pytest.raises(UsageError, match="stage 9"):
        report(schedule, UNIT, overrides=[(9, "F=2")])
    with pytest.raises(UsageError, match="durations of 2 stages; allowed: 4"):
        simulate(schedule, durations[:2])


def test_costs_in_words():
    assert parse("F=1.5, W=2,hop=0.25") == Durations(F=1.5, W=2, hop=0.25)
    assert parse("B=3").full_backward == 3 and parse("I=2").full_backward == 3 and parse("I=2").whole_pair == 4
    for text in ("G=1", "F", "F=x", "", "F=1;W=2"):
        with pytest.raises(UsageError, match="cost"):
            parse(text)
    with pytest.raises(UsageError, match="duration F=-1"):
        parse("F=-1")


def test_a_hop_delays_once_a_stage_and_is_not_scaled():
    """One microbatch goes down and up: 2(P-1) hops, whatever the size of a stage."""
    one = report(build("1f1b", 4, 1), parse("hop=0.5"))
    assert one.makespan == 4 * 3 + 6 * 0.5
    # Eight F and I of half the size, four hops, the W that rank 1 does between its two I, and rank 0's last W.
    assert report(build("zbv", 2, 1), parse("hop=0.5")).makespan == 8 * 0.5 + 4 * 0.5 + 2 * 0.5
