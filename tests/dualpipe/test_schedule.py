"""The builders against the published counts and their own constraints; torch's lists are in test_schedule_torch."""

from collections import Counter

import pytest

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Kind, Payload, StageKey
from dualpipe.schedule import (
    SCHEDULES,
    build,
    dualpipe,
    dualpipev,
    forward_only,
    from_csv,
    interleaved,
    interleaved_pairs,
    merge_backward,
    merge_cooldown,
    one_f_one_b,
    with_communication,
)
from dualpipe.steps import prepare
from dualpipe.validate import validate


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("dualpipev", 4, 10), ("dualpipe", 8, 20)])
def test_published_counts(name, ranks, microbatches):
    """Repetitions of the eight steps in the README figures of DualPipe (8 ranks) and DualPipeV (4 ranks)."""
    # (step 1 forwards, step 2 x2, step 3 x3, step 4 pairs x2, step 5 x2, step 6 x2, step 7 x2, step 8) by distance.
    steps = [[6, 1, 3, 3, 3, 1, 3, 1], [4, 2, 2, 4, 2, 2, 2, 2], [2, 3, 1, 5, 1, 3, 1, 3], [0, 4, 0, 6, 0, 4, 0, 4]]
    schedule = build(name, ranks, microbatches)
    for rank, actions in enumerate(schedule.ranks):
        distance = min(rank, ranks - 1 - rank) if name == "dualpipe" else rank
        s1, s2, s3, s4, s5, s6, s7, s8 = steps[distance]
        unfused = int(distance == 3)  # the first F0, B1 of the innermost rank
        counts = Counter(action.kind for action in actions)
        assert counts[Kind.F] == s1 + 2 * s2 + s3 + unfused
        assert counts[Kind.FB] == 2 * s4 + s5 - unfused == [9, 10, 11, 11][distance]
        assert counts[Kind.I] == counts[Kind.W] == s3 + s7 + s8 == 2 * 4 - distance - 1
        assert counts[Kind.B] == s5 + 2 * s6 - (s8) + unfused


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_dualpipev_with_the_fewest_microbatches_has_all_work(ranks):
    schedule = dualpipev(ranks, 2 * ranks - 1)
    done = Counter((part.kind, part.stage) for actions in schedule.ranks for a in actions for part in a.compute)
    for stage in range(2 * ranks):
        assert done[Kind.F, stage] == 2 * ranks - 1
        assert done[Kind.B, stage] + done[Kind.I, stage] == 2 * ranks - 1
        assert done[Kind.I, stage] == done[Kind.W, stage]


@pytest.mark.parametrize("name", ["dualpipev", "zbv"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_few_microbatches_leave_out_what_does_not_exist(name, ranks):
    full = build(name, ranks, 2 * ranks - 1)
    for microbatches in range(1, 2 * ranks - 1):
        few = build(name, ranks, microbatches, allow_few=True)
        assert few.num_microbatches == microbatches
        for actions, all_actions in zip(few.ranks, full.ranks, strict=True):
            parts = [part for action in all_actions for part in action.compute if part.microbatch < microbatches]
            assert [part for action in actions for part in action.compute] == parts
            # A pair stays a pair only with both of its parts.
            pairs = [a for a in all_actions if a.parts and all(part.microbatch < microbatches for part in a.parts)]
            assert [action for action in actions if action.kind is Kind.FB] == pairs


def test_interleaved_lists():
    assert interleaved(2, 2).to_csv() == "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n"
    text = interleaved_pairs(2, 4).to_csv().splitlines()[1]
    assert text.startswith("1F0,1F1,3F0,(3F1;3B0)OVERLAP_F_B,(1F2;3B1)OVERLAP_F_B,(1F3;1B0)OVERLAP_F_B")
    assert interleaved(1, 2, 3).to_csv() == "0F0,1F0,2F0,2B0,0F1,1B0,1F1,0B0,2F1,2B1,1B1,0B1\n"
    assert [interleaved(3, 3, 2).rank_of(StageKey(stage)) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert build("interleaved", 2, 4, stages_per_rank=3).num_stages == 6


@pytest.mark.parametrize(("name", "value"), [("zbv", 2), ("interleaved", 0), ("interleaved", 1.5)])
def test_stages_per_rank_where_it_makes_no_sense(name, value):
    with pytest.raises(UsageError, match="stages a rank"):
        build(name, 2, 4, stages_per_rank=value)


def test_zero_bubble_order():
    """The W of a stage come in the order of its I, and rank r keeps r (zb1p) or 2r (zbh2) of them back."""
    for name, factor in (("zb1p", 1), ("zbh2", 2)):
        for rank, actions in enumerate(build(name, 4, 12).ranks):
            kinds = [action.kind for action in actions]
            inputs = [action.microbatch for action in actions if action.kind is Kind.I]
            weights = [action.microbatch for action in actions if action.kind is Kind.W]
            assert inputs == weights == list(range(12))
            last = len(kinds) - 1 - kinds[::-1].index(Kind.I)
            assert kinds[last + 1 :].count(Kind.W) == max(1, factor * rank + 1)
            ahead = kinds.index(Kind.I)
            assert ahead == (4 - rank if name == "zb1p" else 2 * (4 - rank) - 1)


def test_1f1b_lists():
    assert one_f_one_b(2, 3).to_csv() == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert one_f_one_b(3, 1).to_csv() == "0F0,0B0\n1F0,1B0\n2F0,2B0\n"


def test_placement():
    two_way, vee = dualpipe(4, 8), dualpipev(4, 8)
    assert [two_way.rank_of(StageKey(stage, 1)) for stage in range(4)] == [3, 2, 1, 0]
    assert two_way.stages_of(0) == (StageKey(0, 0), StageKey(3, 1))
    assert list(two_way.microbatches_of(1)) == [4, 5, 6, 7]
    assert [vee.rank_of(StageKey(stage)) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert vee.stages_of(1) == (StageKey(1), StageKey(6))


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "words"),
    [
        ("dualpipev", 4, 6, "at least 2\\*ranks - 1 = 7"),
        ("dualpipe", 3, 8, "an even number of ranks"),
        ("dualpipe", 4, 9, "an even number of microbatches"),
        ("dualpipe", 4, 6, "at least 2\\*ranks = 8"),
        ("1f1b", 0, 8, "a whole number from 1"),
        ("1f1b", 2, 0, "a whole number from 1"),
        ("dualpipev", -2, 8, "a whole number from 1"),
        ("dualpipev", 2, 4.0, "a whole number from 1"),
        ("dualpipev", True, 4, "a whole number from 1"),
        ("zigzag", 2, 4, "1f1b, dualpipe, dualpipev, interleaved, interleaved_pairs, zb1p, zbh2, zbv"),
    ],
)
def test_impossible_sizes_are_refused_with_what_is_allowed(name, ranks, microbatches, words):
    with pytest.raises(UsageError, match=words):
        build(name, ranks, microbatches)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [(name, 4, 8) for name in sorted(SCHEDULES)])
@pytest.mark.parametrize("change", [lambda s: s, with_communication, merge_backward, forward_only])
def test_csv_round_trip(name, ranks, microbatches, change):
    schedule = change(build(name, ranks, microbatches))
    assert from_csv(schedule.to_csv(), like=schedule) == schedule


def test_csv_mistakes_are_named():
    schedule = dualpipev(2, 4)
    with pytest.raises(UsageError, match="1 lines; allowed: 2"):
        from_csv("0F0\n", like=schedule)
    with pytest.raises(UsageError, match=r"1F0 on rank 0; allowed: stages 0, 3"):
        from_csv("0F0,1F0\n1F0\n", like=schedule)
    with pytest.raises(UsageError, match="'nonsense'"):
        from_csv("0F0,nonsense\n1F0\n", like=schedule)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_lowering_puts_receives_first_and_sends_last(name):
    lowered = with_communication(build(name, 4, 8))
    for rank, actions in enumerate(lowered.ranks):
        for index, action in enumerate(actions):
            if action.payload is None:
                continue
            near = actions[index + 1 :] if action.kind is Kind.RECV else reversed(actions[:index])
            partner = next(other for other in near if other.payload is None)
            kinds = (Kind.F,) if action.payload is Payload.ACTIVATION else (Kind.B, Kind.I)
            parts = [part for part in partner.compute if part.key == action.key and part.kind in kinds]
            assert [part.microbatch for part in parts] == [action.microbatch]
            assert abs(lowered.peer(action) - rank) in ((1, 3) if name.startswith("interleaved") else (1,))
    assert sum(len(a) for a in lowered.ranks) > sum(len(a) for a in build(name, 4, 8).ranks)
    with pytest.raises(UsageError, match="only once"):
        with_communication(lowered)


def test_turn_of_the_v_needs_no_messages():
    assert with_communication(dualpipev(1, 4)) == dualpipev(1, 4)
    text = with_communication(dualpipev(3, 6)).to_csv().splitlines()[2].split(",")
    assert not [cell for cell in text if cell.startswith(("2SEND_F", "3RECV_F", "3SEND_B", "2RECV_B"))]


def test_without_split_every_backward_is_full():
    kinds = {
        part.kind
        for actions in build("dualpipev", 3, 6, backward_split=False).ranks
        for a in actions
        for part in a.compute
    }
    assert kinds == {Kind.F, Kind.B}


def test_equal_arguments_give_the_same_object():
    assert build("dualpipev", 3, 7) is build("dualpipev", 3, 7)
    assert build("dualpipev", 3, 7) is not build("dualpipev", 3, 7, backward_split=False)
    with pytest.raises(UsageError, match=r"ranks \[3\]"):
        build("dualpipev", [3], 7)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_full_backwards_in_the_cool_down(name):
    """No W behind the last F of its rank; what is split before stays split; valid, and an executor takes it."""
    for ranks, microbatches in ((2, 4), (4, 8), (4, 12)):
        full, found = (
            build(name, ranks, microbatches),
            build(name, ranks, microbatches, backward_split="before_cooldown"),
        )
        assert found == merge_cooldown(full)
        validate(found)
        for rank, (actions, before) in enumerate(zip(found.ranks, full.ranks, strict=True)):
            prepare(found, rank)
            last = max(i for i, action in enumerate(actions) if action.forward is not None)
            assert all(action.kind not in (Kind.I, Kind.W) for action in actions[last:])
            work = Counter((p.kind, p.key, p.microbatch) for a in actions for p in a.compute)
            old = Counter((p.kind, p.key, p.microbatch) for a in before for p in a.compute)
            assert work - old == Counter({(Kind.B, *rest): 1 for _, *rest in old - work}.keys()), "I and W became B"
    with pytest.raises(UsageError, match=r"backward_split 'sometimes'.*before_cooldown"):
        build(name, 2, 4, backward_split="sometimes")
