"""The builders against torch's own lists, action for action."""

import pytest
from torch.distributed.pipelining import schedules as theirs

from dualpipe.schedule import dualpipev, interleaved, zb1p, zbv


def torch_lists(cls, ranks, microbatches, stages_per_rank):
    """The lists of a torch schedule as text; the object is filled by hand, since its constructor wants stages."""
    schedule = object.__new__(cls)
    schedule.pp_group_size, schedule._n_microbatches = ranks, microbatches
    schedule._num_stages = schedule.num_stages = stages_per_rank * ranks
    schedule.n_local_stages = stages_per_rank
    rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // rounds
    if stages_per_rank == 2:
        schedule.stage_index_to_group_rank = {stage: min(stage, 2 * ranks - 1 - stage) for stage in range(2 * ranks)}
    lists = [schedule._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return [[str(action) for action in actions if action is not None] for actions in lists]


def ours(schedule):
    return [[str(action) for action in actions] for actions in schedule.ranks]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_dualpipev(ranks):
    for microbatches in (2 * ranks, 2 * ranks + 1, 4 * ranks):  # torch refuses fewer
        wanted = torch_lists(theirs.ScheduleDualPipeV, ranks, microbatches, 2)
        assert ours(dualpipev(ranks, microbatches)) == wanted


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_zbv(ranks):
    for microbatches in (1, ranks, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 4 * ranks):
        wanted = torch_lists(theirs.ScheduleZBVZeroBubble, ranks, microbatches, 2)
        assert ours(zbv(ranks, microbatches)) == wanted


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_zb1p_is_torch_s_interleaved_zero_bubble_with_one_stage_a_rank(ranks):
    for microbatches in (2 * ranks, 3 * ranks, 4 * ranks):
        wanted = torch_lists(theirs.ScheduleInterleavedZeroBubble, ranks, microbatches, 1)
        assert ours(zb1p(ranks, microbatches)) == wanted


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_interleaved(ranks, stages_per_rank):
    # Where P divides M: for other numbers torch makes groups of another size.
    for microbatches in (ranks, 2 * ranks, 4 * ranks):
        wanted = torch_lists(theirs.ScheduleInterleaved1F1B, ranks, microbatches, stages_per_rank)
        assert ours(interleaved(ranks, microbatches, stages_per_rank)) == wanted
