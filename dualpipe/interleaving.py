"""1F1B and interleaved 1F1B: full backwards, no second copy of anything; what the others are compared with.

Interleaved 1F1B cuts the model in v stages a rank, stage s on rank s mod P. A bubble is made of stages, so smaller ones
make it v times smaller; the price is v times the messages and more live activations. Microbatches go in groups of P:
one group through all stages of a rank, then the next group.

With one more forward in the warm-up, the forward and the backward of a steady step belong to different microbatches,
so they can run as overlapped pairs. This is how Megatron-core hides expert-parallel communication.

Source: PipeDream (arXiv:1806.03377), Megatron-LM (arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from dualpipe.actions import Action, Kind, StageKey
from dualpipe.lists import Schedule, check_positive
from dualpipe.program import Program


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B: rank r runs min(P-r-1, M) forwards ahead, then one forward and one backward in turn."""
    check_positive("1f1b", ranks, microbatches)
    lists = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, microbatches)
        forward = [Action(Kind.F, rank, 0, i) for i in range(microbatches)]
        backward = [Action(Kind.B, rank, 0, i) for i in range(microbatches)]
        steady = [action for both in zip(forward[ahead:], backward, strict=False) for action in both]
        lists.append((*forward[:ahead], *steady, *backward[microbatches - ahead :]))
    return Schedule("1f1b", ranks, ranks, microbatches, (tuple(range(ranks)),), tuple(lists))


def _groups(ranks: int, microbatches: int) -> list[int]:
    """Sizes of the groups that go through a rank's stages in turn: at least `ranks` each where there are as many.

    Larger ones first: the warm-up is made for the first group, and a later one must not need a longer one.
    """
    number = max(1, microbatches // ranks)
    size, more = divmod(microbatches, number)
    return [size + 1] * more + [size] * (number - more)


def _interleaved(name: str, ranks: int, microbatches: int, stages_per_rank: int, *, pairs: bool) -> Schedule:
    check_positive(name, ranks, microbatches)
    check_positive(name, stages_per_rank, what="stages a rank")
    groups = _groups(ranks, microbatches)
    phases = [phase for size in groups for phase in range(stages_per_rank) for _ in range(size)]
    backwards = [phase for size in groups for phase in reversed(range(stages_per_rank)) for _ in range(size)]
    total, lists = len(phases), []
    for rank in range(ranks):
        program = Program([StageKey(phase * ranks + rank) for phase in range(stages_per_rank)])
        ahead = min((stages_per_rank - 1) * groups[0] + 2 * (ranks - rank - 1) + pairs, total)
        for phase in phases[:ahead]:
            program.forward(phase)
        for forward, backward in zip(phases[ahead:], backwards, strict=False):
            if pairs:
                program.pair(forward, backward)
            else:
                program.forward(forward)
                program.backward(backward)
        for phase in backwards[total - ahead :]:
            program.backward(phase)
        lists.append(tuple(program.actions))
    num_stages = stages_per_rank * ranks
    placement = tuple(stage % ranks for stage in range(num_stages))
    return Schedule(name, ranks, num_stages, microbatches, (placement,), tuple(lists))


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B with any number of stages a rank; any number of microbatches."""
    return _interleaved("interleaved", ranks, microbatches, stages_per_rank, pairs=False)


def interleaved_pairs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B with one more forward in the warm-up, and overlapped pairs in the steady state."""
    return _interleaved("interleaved_pairs", ranks, microbatches, stages_per_rank, pairs=True)
