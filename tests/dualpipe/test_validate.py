"""Valid schedules pass for any size; each planted fault is refused with the cell that holds it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute

from dualpipe.actions import Kind, parse, with_direction
from dualpipe.schedule import (
    SCHEDULES,
    STAGES_PER_RANK,
    build,
    dualpipe,
    dualpipev,
    forward_only,
    merge_backward,
    one_f_one_b,
    with_communication,
)
from dualpipe.simulate import Durations, simulate
from dualpipe.validate import ScheduleError, four_channels, validate


@st.composite
def schedules(draw, most_ranks=6):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks = draw(st.integers(1, most_ranks // 2 if name == "dualpipe" else most_ranks))
    if name == "dualpipe":
        return dualpipe(2 * ranks, 4 * ranks + 2 * draw(st.integers(0, 8)))
    stages = draw(st.integers(1, 4)) if name in STAGES_PER_RANK else None
    return build(name, ranks, draw(st.integers(1, 2 * ranks + 15)), stages_per_rank=stages, allow_few=True)


def per_pair(payload, source, target):
    """NCCL's other way: one communicator a pair of ranks, still four of each."""
    return payload, source, target


COST = st.floats(0.1, 4.0)


@settings(max_examples=15, deadline=None)
@given(schedules(most_ranks=16), COST, COST, COST, COST, st.floats(0, 2))
def test_every_schedule_validates_in_every_form_and_ends_for_any_costs(schedule, f, i, w, fb, hop):
    for form in (with_communication(schedule), merge_backward(schedule), forward_only(schedule)):
        validate(form)
        validate(form, per_pair)
    result = simulate(schedule, Durations(F=f, I=i, W=w, FB=fb, hop=hop))
    assert len(result.blocks) == sum(map(len, schedule.ranks))
    assert result.makespan >= max(result.busy) and 0 <= result.bubble_ratio < 1


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("dualpipev", 4, 9), ("1f1b", 4, 6)])
def test_torch_s_simulator_accepts_the_lowered_lists(name, ranks, microbatches):
    lowered = with_communication(merge_backward(build(name, ranks, microbatches)))
    flat = {
        rank: [_Action.from_str(str(part)) for action in actions for part in (action.compute or (action,))]
        for rank, actions in enumerate(lowered.ranks)
    }
    _simulate_comms_compute(flat, lambda stage: lowered.placement[0][stage], lowered.num_stages)


def edited(schedule, rank, edit):
    """The schedule with the list of one rank changed in place by `edit`."""
    actions = list(schedule.ranks[rank])
    edit(actions)
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :]))


def swap(first, second):
    def edit(actions):
        i, j = actions.index(parse(first)), actions.index(parse(second))
        actions[i], actions[j] = actions[j], actions[i]

    return edit


def remove(cell):
    return lambda actions: actions.remove(parse(cell))


def duplicate(cell):
    return lambda actions: actions.append(parse(cell))


def dependent_pairs(schedule, rank):
    """Positions (i, j) in the list of a rank where something in j needs, directly or through others, what i makes."""
    needs = {}
    for actions in schedule.ranks:
        for action in actions:
            for part in action.compute:
                source = None if part.kind is Kind.W else schedule.source(part)
                forward, own = part.kind is Kind.F, (part.key, part.microbatch)
                before = [] if forward else [("F" if part.kind is not Kind.W else "dX", *own)]
                before += [] if source is None else [("F" if forward else "dX", source, part.microbatch)]
                needs.setdefault(made(part), set()).update(before)
    for _ in range(3 * schedule.num_stages):  # transitive closure; no chain of one microbatch is longer
        for wanted in needs.values():
            wanted.update(*(needs[item] for item in list(wanted)))
    actions = schedule.ranks[rank]
    return [
        (i, j)
        for i, first in enumerate(actions)
        for j, second in enumerate(actions[i + 1 :], i + 1)
        if any(made(a) in needs[made(b)] for a in first.compute for b in second.compute)
    ]


def made(part):
    kind = {Kind.F: "F", Kind.W: "W"}.get(part.kind, "dX")
    return kind, part.key, part.microbatch


@settings(max_examples=60, deadline=None)
@given(schedules(most_ranks=4), st.data())
def test_any_fault_is_refused(schedule, data):
    """A dropped action, a doubled one, and two dependent ones in the wrong order; also with SEND and RECV."""
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    lowered = with_communication(schedule)
    for form in (schedule, lowered):
        index = data.draw(st.integers(0, len(form.ranks[rank]) - 1))
        faults = [lambda actions, i=index: actions.pop(i), lambda actions, i=index: actions.insert(i, actions[i])]
        for edit in faults:
            with pytest.raises(ScheduleError, match="rank"):
                validate(edited(form, rank, edit))
    pairs = dependent_pairs(schedule, rank)
    assert pairs
    i, j = data.draw(st.sampled_from(pairs))

    def swap_them(actions):
        actions[i], actions[j] = actions[j], actions[i]

    with pytest.raises(ScheduleError, match=r"rank \d+, position \d+"):
        validate(edited(schedule, rank, swap_them))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_too_many_live_activations(name):
    schedule = build(name, 4, 8)
    most = max(simulate(schedule).peak_live)
    validate(schedule, max_live=most)
    with pytest.raises(ScheduleError, match=f"{most} live activations") as caught:
        validate(schedule, max_live=most - 1)
    assert schedule.ranks[caught.value.rank][caught.value.index].forward is not None


BASE = dualpipev(3, 6)
LOWERED = with_communication(BASE)


@pytest.mark.parametrize(
    ("schedule", "rank", "edit", "words"),
    [
        (BASE, 0, remove("5W0"), "rank 0, stage 5, microbatch 0: work is F, I;"),
        (BASE, 1, remove("1F0"), "rank 1, stage 1, microbatch 0"),
        (BASE, 1, duplicate("1F0"), r"rank 1, position \d+, 1F0: done twice"),
        (BASE, 0, duplicate("5B0"), "5B0: done twice"),
        (BASE, 0, swap("5I0", "5W0"), "rank 0, position 6, 5W0: W before its I"),
        (BASE, 0, swap("5F0", "5I0"), "5I0: backward before its F"),
        (BASE, 2, swap("2F0", "3F0"), r"3F0: F before its input \(local turn\)"),
        (BASE, 1, swap("1F0", "1F1"), "mismatch"),
        (BASE, 0, swap("0F0", "5F0"), "rank 0, position 0, 5RECV_F0: deadlock"),
        (BASE, 0, lambda actions: actions.insert(0, parse("1F9")), "1F9: no such stage, direction or microbatch"),
        (BASE, 0, lambda actions: actions.append(parse("1F0")), "1F0: stage 1 lives on rank 1"),
        (BASE, 0, lambda actions: actions.append(with_direction(parse("0F0"), 1)), "no such stage, direction"),
        (LOWERED, 1, swap("1RECV_F0", "1F0"), "1F0: F before its input arrives"),
        (LOWERED, 1, swap("1F0", "1SEND_F0"), "1SEND_F0: sent before it is computed"),
        (LOWERED, 0, swap("5I0", "5SEND_B0"), "5SEND_B0: sent before it is computed"),
        (LOWERED, 0, remove("0SEND_F3"), "mismatch"),
        (LOWERED, 0, remove("5SEND_B5"), "deadlock"),
        (LOWERED, 0, lambda actions: actions.insert(0, parse("0RECV_F0")), "no other rank to talk to"),
        (LOWERED, 2, lambda actions: actions.append(parse("2SEND_F0")), "no other rank to talk to"),
    ],
)
def test_a_planted_fault_is_named(schedule, rank, edit, words):
    validate(schedule)
    with pytest.raises(ScheduleError, match=words):
        validate(edited(schedule, rank, edit))


def test_gradient_needed_before_it_arrives():
    bad = edited(LOWERED, 0, swap("0RECV_B0", "(5F3;0B0)OVERLAP_F_B"))
    with pytest.raises(ScheduleError, match="backward before its gradient arrives") as caught:
        validate(bad)
    assert caught.value.rank == 0
    assert str(bad.ranks[0][caught.value.index]) == "(5F3;0B0)OVERLAP_F_B"


def test_a_list_is_missing():
    with pytest.raises(ScheduleError, match="2 lists for 3 ranks"):
        validate(replace(BASE, ranks=BASE.ranks[:2]))


@pytest.mark.parametrize(
    "schedule", [dualpipev(2, 4), dualpipev(4, 8), dualpipe(2, 4), dualpipe(4, 8), one_f_one_b(3, 6)]
)
def test_one_communicator_deadlocks(schedule):
    validate(schedule, four_channels)
    for shared in (lambda payload, source, target: 0, lambda payload, source, target: frozenset((source, target))):
        with pytest.raises(ScheduleError, match="deadlock"):
            validate(schedule, shared)


def test_two_communicators_are_not_enough():
    with pytest.raises(ScheduleError, match="deadlock"):
        validate(dualpipev(4, 8), lambda payload, source, target: payload)
    with pytest.raises(ScheduleError, match="mismatch"):
        validate(dualpipev(4, 8), lambda payload, source, target: source < target)
