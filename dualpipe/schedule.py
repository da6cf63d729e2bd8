"""Every schedule by its name: pure functions from a number of ranks and microbatches to one list of actions a rank.

    dualpipev          V of 2P stages, overlapped pairs                                  `bidirectional`
    dualpipe           two copies of the model in opposite directions, overlapped pairs  `bidirectional`
    zbv                V of 2P stages, split backwards                                   `zero_bubble`
    zb1p, zbh2         one stage a rank, split backwards (ZB-H1, ZB-H2)                  `zero_bubble`
    interleaved        v stages a rank, one forward, one backward                        `interleaving`
    interleaved_pairs  the same with one more warm-up and overlapped pairs               `interleaving`
    1f1b               one stage a rank, one forward, one backward                       `interleaving`

The files named have the algorithms and their sources; `lists` has the type `Schedule` and the passes over it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, get_args

from comm_core.runtime.errors import UsageError
from dualpipe.bidirectional import dualpipe, dualpipev, fewest_that_fill
from dualpipe.interleaving import interleaved, interleaved_pairs, one_f_one_b
from dualpipe.lists import (
    Schedule,
    check_positive,
    forward_only,
    from_csv,
    keep_microbatches,
    merge_backward,
    merge_cooldown,
    with_communication,
)
from dualpipe.zero_bubble import zb1p, zbh2, zbv

__all__ = [
    "SCHEDULES",
    "STAGES_PER_RANK",
    "BackwardSplit",
    "Schedule",
    "build",
    "dualpipe",
    "dualpipev",
    "forward_only",
    "from_csv",
    "interleaved",
    "interleaved_pairs",
    "keep_microbatches",
    "merge_backward",
    "merge_cooldown",
    "one_f_one_b",
    "with_communication",
    "zb1p",
    "zbh2",
    "zbv",
]

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
    "zbv": zbv,
    "zb1p": zb1p,
    "zbh2": zbh2,
    "interleaved": interleaved,
    "interleaved_pairs": interleaved_pairs,
    "1f1b": one_f_one_b,
}
"""Builders by name, each a function of (ranks, microbatches)."""

STAGES_PER_RANK = frozenset({"interleaved", "interleaved_pairs"})
"""The builders that also take a number of stages a rank."""

BackwardSplit = Literal["always", "before_cooldown", "never"]
"""Where backwards may be split in I and W: where the schedule says, only before each rank's cool-down, or nowhere."""


def build(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    backward_split: bool | BackwardSplit = True,
    stages_per_rank: int | None = None,
    allow_few: bool = False,
) -> Schedule:
    """Builds a schedule by its name. Equal arguments give the same object, so an executor prepares it once.

    Args:
        name: a key of `SCHEDULES`.
        ranks: pipeline ranks.
        microbatches: microbatches a step, both directions together.
        backward_split: False ("never") runs every I as a full B and drops every W (see `merge_backward`);
            "before_cooldown" does so only for a W behind its rank's last F (see `merge_cooldown`); True is "always".
        stages_per_rank: stages a rank, only for the interleaved schedules (2 by default there).
        allow_few: also give dualpipev below the 2*ranks - 1 microbatches that fill it, where pairs are few or none.

    Raises:
        UsageError: an unknown name, or sizes the schedule can not run.
    """
    if name not in SCHEDULES:
        raise UsageError(f"schedule {name!r}", allowed=", ".join(sorted(SCHEDULES)), fix="choose one of them")
    check_positive(name, ranks, microbatches)
    if stages_per_rank is not None:
        if name not in STAGES_PER_RANK:
            raise UsageError(
                f"{name} with {stages_per_rank!r} stages a rank",
                allowed=f"a number of stages a rank for {', '.join(sorted(STAGES_PER_RANK))}",
                fix="leave it out",
            )
        check_positive(name, stages_per_rank, what="stages a rank")
    if name == "dualpipev" and not allow_few and microbatches < fewest_that_fill(ranks):
        raise UsageError(
            f"dualpipev with {ranks} ranks and {microbatches} microbatches",
            allowed=f"at least 2*ranks - 1 = {fewest_that_fill(ranks)} microbatches",
            fix="use more microbatches (a smaller microbatch size) or fewer pipeline ranks",
        )
    split = ("always" if backward_split else "never") if isinstance(backward_split, bool) else backward_split
    if split not in get_args(BackwardSplit):
        raise UsageError(
            f"backward_split {backward_split!r}",
            allowed=f"True, False, {', '.join(get_args(BackwardSplit))}",
            fix="choose one of them",
        )
    return _build(name, ranks, microbatches, split, stages_per_rank)


@functools.lru_cache(maxsize=64)
def _build(name: str, ranks: int, microbatches: int, backward_split: str, stages_per_rank: int | None) -> Schedule:
    more = () if stages_per_rank is None else (stages_per_rank,)
    schedule = SCHEDULES[name](ranks, microbatches, *more)
    change = {"never": merge_backward, "before_cooldown": merge_cooldown}.get(backward_split)
    return schedule if change is None else change(schedule)
