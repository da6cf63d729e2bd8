"""What one pipeline rank does at one point of a schedule, as a value.

A schedule is a list of actions a rank. Everything else (validation, simulation, drawing, execution, tracing) reads
the same list, so an action must say all there is to know: what is done, for which stage, which microbatch, and in
which direction the data flows.

Kinds:
    F     forward of a stage
    B     full backward: the gradient of the input, then the gradients of the weights
    I     backward for the input alone (dX)
    W     backward for the weights alone (dW), always after the I of the same stage and microbatch
    FB    an overlapped pair: the F of one microbatch and the B of another, run together
    SEND  the result of an F or of a B / I leaves for the neighbouring rank
    RECV  the input of an F or the gradient of an output arrives from the neighbouring rank

`direction` tells two flows apart: 0 enters at the first rank, 1 enters at the last rank. Only the `dualpipe` schedule
has two. Microbatches are numbered across directions, so (stage, microbatch) names a piece of work uniquely.

The written form is the action notation of `torch.distributed.pipelining`: `2F0` is the forward of microbatch 0 on
stage 2, `(0F7;7B3)OVERLAP_F_B` a pair, `1SEND_F3` sends the output of stage 1, `2RECV_F3` receives the input of
stage 2, `2SEND_B3` sends the input gradient of stage 2, `1RECV_B3` receives the output gradient of stage 1. It does
not hold the direction, which follows from the rank and the stage (see `schedule.from_csv`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from comm_core.runtime.errors import UsageError


class Kind(StrEnum):
    """What an action does; the module docstring explains each."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the established name of the backward for inputs
    W = "W"
    FB = "FB"
    SEND = "SEND"
    RECV = "RECV"


class Payload(StrEnum):
    """What a SEND or RECV moves, written as the F or B it belongs to."""

    ACTIVATION = "F"
    GRADIENT = "B"


class StageKey(NamedTuple):
    """A stage as one direction sees it. In `dualpipe` a stage lives on two ranks, once a direction."""

    stage: int
    direction: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank.

    Attributes:
        kind: what is done.
        stage: index of the stage, from 0 (input) to num_stages - 1 (loss). For FB the stage of its F; for SEND the
            stage whose result leaves; for RECV the stage that needs what arrives.
        direction: 0 or 1, see the module docstring.
        microbatch: index of the microbatch, counted across directions. For FB that of its F.
        payload: activation or gradient for SEND and RECV, None otherwise.
        parts: the F and the B of an FB, in this order; empty otherwise.
    """

    kind: Kind
    stage: int
    direction: int
    microbatch: int
    payload: Payload | None = None
    parts: tuple[Action, ...] = ()

    @property
    def key(self) -> StageKey:
        """The stage and direction this action works on."""
        return StageKey(self.stage, self.direction)

    @property
    def compute(self) -> tuple[Action, ...]:
        """The single computations in it: both parts of a pair, nothing for SEND and RECV, else itself."""
        if self.kind is Kind.FB:
            return self.parts
        return () if self.payload is not None else (self,)

    @property
    def forward(self) -> Action | None:
        """The F in this action, if any."""
        return next((part for part in self.compute if part.kind is Kind.F), None)

    @property
    def backward(self) -> Action | None:
        """The B or I in this action, if any."""
        return next((part for part in self.compute if part.kind in (Kind.B, Kind.I)), None)

    def __str__(self) -> str:
        if self.kind is Kind.FB:
            return f"({';'.join(map(str, self.parts))})OVERLAP_F_B"
        kind = self.kind if self.payload is None else f"{self.kind}_{self.payload}"
        return f"{self.stage}{kind}{self.microbatch}"


def pair(forward: Action, backward: Action) -> Action:
    """The overlapped pair of an F and a B."""
    return Action(Kind.FB, forward.stage, forward.direction, forward.microbatch, parts=(forward, backward))


def send(payload: Payload, key: StageKey, microbatch: int) -> Action:
    """Sends the output (activation) or the input gradient (gradient) of a stage."""
    return Action(Kind.SEND, key.stage, key.direction, microbatch, payload)


def recv(payload: Payload, key: StageKey, microbatch: int) -> Action:
    """Receives the input (activation) or the output gradient (gradient) of a stage."""
    return Action(Kind.RECV, key.stage, key.direction, microbatch, payload)


_SINGLE = re.compile(r"(\d+)(F|B|I|W|SEND_F|SEND_B|RECV_F|RECV_B)(\d+)")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def parse(text: str) -> Action:
    """Reads the written form of one action; the direction is set to 0.

    Raises:
        UsageError: text that is no action of this notation.
    """
    text = text.strip()
    if match := _PAIR.fullmatch(text):
        first, second = parse(match[1]), parse(match[2])
        if first.kind is Kind.F and second.kind is Kind.B:
            return pair(first, second)
    elif match := _SINGLE.fullmatch(text):
        kind, _, payload = match[2].partition("_")
        return Action(Kind(kind), int(match[1]), 0, int(match[3]), Payload(payload) if payload else None)
    raise UsageError(
        f"action {text!r}",
        allowed="<stage><F|B|I|W|SEND_F|SEND_B|RECV_F|RECV_B><microbatch> or (<F action>;<B action>)OVERLAP_F_B",
        fix="correct this cell, for example 2F0 or (0F7;7B3)OVERLAP_F_B",
    )


def with_direction(action: Action, direction: int) -> Action:
    """The same action in another direction; parts of a pair keep theirs."""
    return replace(action, direction=direction)
