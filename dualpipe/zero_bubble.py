"""Zero-bubble schedules: every backward is split, and the W, which nobody waits for, fill what would be idle.

`zb1p`  (ZB-H1) 1F1B order with I for B. Rank r keeps r of its W back, so that the I travel up without waiting for W.
        As many live activations as 1F1B.
`zbh2`  (ZB-H2) twice the warm-up and twice the W kept back: no idle time between the first and the last action of any
        rank when F, I and W take equal time, for nearly twice the activations.
`zbv`   (ZB-V) the model folded to a V as in dualpipev. As many activations as 1F1B, and no idle time inside a rank's
        span when F, I and W take equal time.

Source: Zero Bubble Pipeline Parallelism (arXiv:2401.10241) and Pipeline Parallelism with Controllable Memory
(arXiv:2405.15362).
"""

from __future__ import annotations

from collections.abc import Callable

from dualpipe.actions import Action, StageKey
from dualpipe.bidirectional import fewest_that_fill, vee_placement
from dualpipe.lists import Schedule, check_positive, keep_microbatches
from dualpipe.program import Program


def _one_stage_a_rank(
    name: str, ranks: int, microbatches: int, *, ahead: Callable[[int], int], kept_back: Callable[[int], int]
) -> Schedule:
    """1F1B order with split backwards: `ahead` forwards before the first I, `kept_back` W after the last one."""
    check_positive(name, ranks, microbatches)
    lists = []
    for rank in range(ranks):
        program = Program([StageKey(rank)])
        forwards = min(ahead(rank), microbatches)
        for _ in range(forwards):
            program.forward(0)
        for step in range(microbatches):
            program.backward(0, split=True)
            if step >= kept_back(rank):
                program.weights()
            if forwards < microbatches:
                program.forward(0)
                forwards += 1
        for _ in range(min(kept_back(rank), microbatches)):
            program.weights()
        lists.append(tuple(program.actions))
    return Schedule(name, ranks, ranks, microbatches, (tuple(range(ranks)),), tuple(lists))


def zb1p(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1: one stage a rank, at most `ranks` live activations."""
    return _one_stage_a_rank("zb1p", ranks, microbatches, ahead=lambda rank: ranks - rank, kept_back=lambda rank: rank)


def zbh2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H2: one stage a rank, at most 2*ranks - 1 live activations."""
    return _one_stage_a_rank(
        "zbh2", ranks, microbatches, ahead=lambda rank: 2 * (ranks - rank) - 1, kept_back=lambda rank: 2 * rank
    )


def zbv(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: 2*ranks stages in a V. Below 2*ranks - 1 microbatches as in `dualpipev`, by leaving out."""
    check_positive("zbv", ranks, microbatches)
    filled = max(microbatches, fewest_that_fill(ranks))
    lists = tuple(_vee_program(ranks, rank, filled) for rank in range(ranks))
    schedule = Schedule("zbv", ranks, 2 * ranks, filled, (vee_placement(ranks),), lists)
    return schedule if filled == microbatches else keep_microbatches(schedule, microbatches)


def _vee_program(ranks: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    """One rank of ZB-V: phase 0 on the way down, phase 1 on the way up."""
    program, below = Program([StageKey(rank), StageKey(2 * ranks - 1 - rank)]), ranks - rank

    def backward_with_weights(phase: int) -> None:
        program.backward(phase, split=True)
        program.weights(phase)

    for _ in range(2 * below - 1):
        program.forward(0)
    for _ in range(rank):
        program.forward(1)
        program.forward(0)
    for _ in range(below):
        program.forward(1)
        backward_with_weights(1)
    for step in range(microbatches - ranks):
        if step < microbatches - (2 * ranks - 1 - rank):
            program.forward(0)
        backward_with_weights(0)
        program.forward(1)
        backward_with_weights(1)
    # All forwards are done. The I hurry up the V, the W that are left fill the wait.
    for _ in range(rank):
        program.backward(0, split=True)
        program.backward(1, split=True)
    for _ in range(below):
        program.backward(0, split=True)
        program.weights(0)
    for phase in (1, 0):
        for _ in range(rank):
            program.weights(phase)
    return tuple(program.actions)
