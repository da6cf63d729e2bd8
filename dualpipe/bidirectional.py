"""DualPipe and DualPipeV: a forward of one microbatch runs together with a backward of another.

`dualpipe`   two copies of the model run through the ranks in opposite directions; stage s lives on rank s for
             direction 0 and on rank P-1-s for direction 1. Each direction takes half of the microbatches.
`dualpipev`  the same idea folded to a V: one copy of the model in 2P stages, rank r holds stages r and 2P-1-r. The last
             rank holds the turn, the first rank both the input and the loss.

DualPipe(V) interleaves so that a forward of one stage and a backward of the other stand next to each other (kind FB):
one computes while the other communicates. The price is a warm-up that keeps 2P+1 stage activations alive (V).

Both DualPipe schedules share one program of eight steps. With h ranks on one leg (V: P, two-way: P/2), q the distance
of a rank from the outer end, n microbatches a direction, and "0" the stage nearer to the input of its own flow:

    1  F0                                  2(h-q-1) times
    2  F0 F1                               q+1
    3  I1 W F1      dX first, so that the other ranks start early      h-q-1
    4  F0+B1  F1+B0 overlapped pairs; the innermost rank runs its first F0, B1 apart, as its B1 needs that F0  n-2h+q+1
    5  B1  F1+B0                           h-q-1
    6  B1 B0        from half-way on only dX, dW waits                 q+1
    7  W I0         oldest dW first        h-q-1
    8  W                                   q+1

Source: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.2.1, and the published DualPipe and DualPipeV
schedules.
"""

from __future__ import annotations

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Action, StageKey
from dualpipe.lists import Schedule, check_positive, keep_microbatches
from dualpipe.program import Program


def _eight_steps(program: Program, *, leg: int, outer: int, share: int) -> tuple[Action, ...]:
    """The program of the module docstring for one rank: leg = h, outer = q, share = n."""
    inner, own = leg - outer - 1, outer + 1
    for _ in range(2 * inner):  # 1
        program.forward(0)
    for _ in range(own):  # 2
        program.forward(0)
        program.forward(1)
    for _ in range(inner):  # 3
        program.backward(1, split=True)
        program.weights()
        program.forward(1)
    for i in range(share - 2 * leg + own):  # 4
        if i == 0 and inner == 0:
            program.forward(0)
            program.backward(1)
        else:
            program.pair(0, 1)
        program.pair(1, 0)
    for _ in range(inner):  # 5
        program.backward(1)
        program.pair(1, 0)
    for i in range(own):  # 6
        half = own // 2
        program.backward(1, split=i > half or (i == half and outer % 2 == 1))
        program.backward(0, split=i >= half)
    for _ in range(inner):  # 7
        program.weights()
        program.backward(0, split=True)
    for _ in range(own):  # 8
        program.weights()
    return tuple(program.actions)


def fewest_that_fill(ranks: int) -> int:
    """The number of microbatches from which a V of `ranks` ranks runs full: 2*ranks - 1."""
    return 2 * ranks - 1


def vee_placement(ranks: int) -> tuple[int, ...]:
    """The rank of each of 2*ranks stages in a V: down to the last rank and back up."""
    return (*range(ranks), *reversed(range(ranks)))


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: 2*ranks stages in a V, one direction.

    Below 2*ranks - 1 microbatches the pipeline never fills: the lists are those of 2*ranks - 1 without the actions of
    the microbatches that do not exist.
    """
    check_positive("dualpipev", ranks, microbatches)
    filled = max(microbatches, fewest_that_fill(ranks))
    last = 2 * ranks - 1
    lists = [
        _eight_steps(Program((StageKey(rank), StageKey(last - rank)), (0, 0)), leg=ranks, outer=rank, share=filled)
        for rank in range(ranks)
    ]
    schedule = Schedule("dualpipev", ranks, 2 * ranks, filled, (vee_placement(ranks),), tuple(lists))
    return schedule if filled == microbatches else keep_microbatches(schedule, microbatches)


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """DualPipe: `ranks` stages, each on two ranks, half of the microbatches in each direction.

    Raises:
        UsageError: an odd number of ranks or microbatches, or fewer than 2*ranks microbatches.
    """
    check_positive("dualpipe", ranks, microbatches)
    for what, value in (("ranks", ranks), ("microbatches", microbatches)):
        if value % 2:
            raise UsageError(
                f"dualpipe with {value} {what}",
                allowed=f"an even number of {what}",
                fix=f"use {value + 1} {what}, or the dualpipev schedule",
            )
    if microbatches < 2 * ranks:
        raise UsageError(
            f"dualpipe with {ranks} ranks and {microbatches} microbatches",
            allowed=f"at least 2*ranks = {2 * ranks} microbatches",
            fix="use more microbatches (a smaller microbatch size) or fewer pipeline ranks",
        )
    share, lists = microbatches // 2, []
    for rank in range(ranks):
        mirrored = rank >= ranks // 2
        # In the second half the flow that enters nearby is direction 1, so the program is the mirror image.
        near = 1 if mirrored else 0
        outer = min(rank, ranks - 1 - rank)
        keys = (StageKey(outer, near), StageKey(ranks - 1 - outer, 1 - near))
        program = Program(keys, (near * share, (1 - near) * share))
        lists.append(_eight_steps(program, leg=ranks // 2, outer=outer, share=share))
    placement = (tuple(range(ranks)), tuple(reversed(range(ranks))))
    return Schedule("dualpipe", ranks, ranks, microbatches, placement, tuple(lists))
