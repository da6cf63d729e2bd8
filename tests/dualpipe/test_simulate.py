"""Simulated times against closed forms and published figures."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core.runtime.errors import UsageError
from dualpipe.schedule import SCHEDULES, build, dualpipev, from_csv, with_communication
from dualpipe.simulate import Durations, simulate
from dualpipe.validate import ScheduleError

UNIT = Durations()


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("dualpipe", 8, 20), ("dualpipev", 4, 10)])
def test_readme_figures_take_66_units_with_6_idle(name, ranks, microbatches):
    result = simulate(build(name, ranks, microbatches), UNIT)
    assert result.makespan == 66 and set(result.busy) == {60}
    assert result.bubble_ratio == pytest.approx(6 / 66)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_idle_is_the_closed_form(ranks, extra):
    """Unit costs: 1F1B 3(P-1); DualPipeV 2(P-1) in units of a half-size stage; DualPipe 2(P/2-1)."""
    one = simulate(build("1f1b", ranks, 2 * ranks + extra), UNIT)
    assert {one.makespan - busy for busy in one.busy} == {3 * (ranks - 1)}
    vee = simulate(build("dualpipev", ranks, 2 * ranks + extra), UNIT)
    assert {vee.makespan - busy for busy in vee.busy} == {2 * (ranks - 1)}
    two = simulate(build("dualpipe", 2 * ranks, 4 * ranks + 2 * extra), UNIT)
    assert {two.makespan - busy for busy in two.busy} == {2 * (ranks - 1)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_peak_activations(ranks):
    assert set(simulate(dualpipev(ranks, 2 * ranks)).peak_live) == {2 * ranks + 1}
    assert set(simulate(dualpipev(ranks, 4 * ranks + 1)).peak_live) == {2 * ranks + 1}
    assert set(simulate(build("dualpipe", 2 * ranks, 6 * ranks)).peak_live) == {2 * ranks + 1}
    assert simulate(build("1f1b", ranks, 3 * ranks)).peak_live == tuple(ranks - rank for rank in range(ranks))


COST = st.floats(0.1, 4.0)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), COST, COST, COST, COST, COST, st.floats(0, 2))
def test_dependencies_hold_for_any_durations(name, f, i, w, b, fb, hop):
    schedule = build(name, 4, 8 if name == "dualpipe" else 9)
    result = simulate(schedule, Durations(F=f, I=i, W=w, B=b, FB=fb, hop=hop))
    lengths = {"F": f, "I": i, "W": w, "B": b, "FB": fb}
    ends, position, now = {}, [0] * 4, [0.0] * 4
    for block in result.blocks:
        action = schedule.ranks[block.rank][position[block.rank]]
        position[block.rank] += 1
        assert block.start >= now[block.rank] and str(action.kind) == block.kind
        assert block.end - block.start == pytest.approx(lengths[block.kind])
        now[block.rank] = block.end
        for part in action.compute:
            if part.kind != "W":
                ends[part.kind == "F", part.key, part.microbatch] = block.rank, block.start, block.end
    for (forward, key, microbatch), (rank, start, _) in ends.items():
        before = key._replace(stage=key.stage + (-1 if forward else 1))
        if (forward, before, microbatch) in ends:
            other, _, end = ends[forward, before, microbatch]
            assert start >= end + (hop if other != rank else 0) - 1e-9
    assert position == [len(actions) for actions in schedule.ranks]
    assert result.makespan == pytest.approx(max(now))


def test_send_and_receive_do_not_change_the_plan():
    costs = Durations(F=1.1, I=0.9, W=0.7, B=1.8, FB=2.5, hop=0.4)
    plain, lowered = simulate(dualpipev(4, 9), costs), simulate(with_communication(dualpipev(4, 9)), costs)
    assert lowered.makespan == plain.makespan and lowered.peak_live == plain.peak_live
    compute = [block for block in lowered.blocks if block.kind not in ("SEND", "RECV")]
    assert sorted(compute, key=str) == sorted(plain.blocks, key=str)


def test_a_circle_is_refused():
    bad = from_csv("0F0,3F0,0B0,3B0\n1B0,1F0,2F0,2B0\n", like=dualpipev(2, 3))
    with pytest.raises(ScheduleError, match="rank 0, position 1, 3F0"):
        simulate(bad)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_impossible_durations_are_refused(value):
    with pytest.raises(UsageError, match="duration W"):
        Durations(W=value)
