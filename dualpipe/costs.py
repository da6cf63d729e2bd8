"""How long each kind of action takes, alone and in an overlapped pair.

Schedules cut the model in different numbers of stages, so a duration needs a unit of work. `of_stages` takes durations
of 1/P of the model, where P is the number of ranks, and gives those of one stage of a schedule: then every schedule
does the same work, and makespans compare. A stage of dualpipev, zbv or interleaved (v = 2) is half of it, a stage of
`dualpipe` all of it, on each of the two ranks that hold it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Action, Kind
from dualpipe.lists import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Duration of each kind, in any one unit.

    Attributes:
        F: forward.
        I: backward for inputs.
        W: backward for weights.
        B: full backward; I + W by default.
        FB: overlapped pair; F + B by default, which is no gain over running them one after the other.
        hop: time from the end of an action to the arrival of its result on another rank; the sender goes on meanwhile.
        a2a: all-to-all of one pass (dispatch and combine) that is exposed in an F, I or B alone. A pair hides it: `FB`
            is the whole duration of a pair.
    """

    F: float = 1.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0
    B: float | None = None
    FB: float | None = None
    hop: float = 0.0
    a2a: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UsageError(f"duration {item.name}={value}", allowed="a finite number from 0", fix="correct it")

    @property
    def full_backward(self) -> float:
        """B without its all-to-all."""
        return self.I + self.W if self.B is None else self.B

    @property
    def whole_pair(self) -> float:
        """FB."""
        return self.F + self.full_backward if self.FB is None else self.FB

    def alone(self, kind: Kind) -> float:
        """Duration of an F, I, W or B that is not in a pair."""
        if kind is Kind.W:
            return self.W
        return self.a2a + {Kind.F: self.F, Kind.I: self.I, Kind.B: self.full_backward}[kind]

    def share_of_pair(self, kind: Kind) -> float:
        """What the F or the B of this stage adds to a pair: its part of `FB`, in the ratio of the two alone."""
        both = self.F + self.full_backward
        part = self.F if kind is Kind.F else self.full_backward
        return self.whole_pair * (part / both if both else 0.5)

    def scaled(self, factor: float) -> Durations:
        """The durations of `factor` times the work. A hop stays as it is: what crosses has the size of a microbatch."""
        work = {
            item.name: value * factor
            for item in fields(self)
            if item.name != "hop" and (value := getattr(self, item.name)) is not None
        }
        return replace(self, **work)


def part_of_model(schedule: Schedule) -> float:
    """The size of one stage, in units of 1/P of the model."""
    return schedule.num_ranks / schedule.num_stages


def of_stages(schedule: Schedule, durations: Durations) -> Durations:
    """Durations of one stage of `schedule`, given those of 1/P of the model."""
    return durations.scaled(part_of_model(schedule))


def length(action: Action, durations: Sequence[Durations]) -> float:
    """Duration of a computation, given the durations of each stage.

    In a pair of stages with different durations each side adds its `share_of_pair`.
    """
    if action.kind is not Kind.FB:
        return durations[action.stage].alone(action.kind)
    forward, backward = action.parts
    first, second = durations[forward.stage], durations[backward.stage]
    if first == second:
        return first.whole_pair
    return first.share_of_pair(Kind.F) + second.share_of_pair(Kind.B)


def parse(text: str, base: Durations | None = None) -> Durations:
    """Reads "F=1,I=1,W=1,FB=3,hop=0.25" over the values of `base`.

    Raises:
        UsageError: an unknown name, or a value that is no number from 0.
    """
    names = [item.name for item in fields(Durations)]
    values: dict[str, float] = {}
    for cell in text.split(","):
        name, separator, value = (part.strip() for part in cell.partition("="))
        try:
            if not separator or name not in names:
                raise ValueError
            values[name] = float(value)
        except ValueError:
            raise UsageError(
                f"cost {cell.strip()!r}", allowed=f"NAME=NUMBER with a name of {', '.join(names)}", fix="correct it"
            ) from None
    return replace(base or Durations(), **values)
