"""The order of parts when the forward of one layer runs beside the backward of another.

    comm     combine B | dispatch F | dispatch B        | combine F
    compute  attn F    | mlp B      | mlp W, mlp F      | attn B, attn W

Each communication runs beside computation that does not need it, the order of DeepSeek's published training trace.
What one side does not have is left out: a dense layer sends nothing, and a layer without a partner runs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple


class Part(NamedTuple):
    """One piece of a pair.

    Attributes:
        name: "attention", "dispatch", "mlp" or "combine".
        kind: "F" forward, "B" backward for inputs, "W" backward for weights.
    """

    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name}({self.kind})"


GOLDEN: Final = (
    Part("combine", "B"),
    Part("attention", "F"),
    Part("mlp", "B"),
    Part("dispatch", "F"),
    Part("dispatch", "B"),
    Part("mlp", "W"),
    Part("mlp", "F"),
    Part("attention", "B"),
    Part("attention", "W"),
    Part("combine", "F"),
)
COMMUNICATION: Final = ("dispatch", "combine")


class Place(NamedTuple):
    """A part of a layer, by the layer's number in its stage."""

    part: Part
    layer: int


def parts_of_pair(forward: bool | None, backward: bool | None) -> list[Part]:
    """The parts of two layers, one on each side.

    Args:
        forward: whether the layer of the forward communicates; None where there is no layer.
        backward: the same of the layer of the backward.
    """
    sides = {"F": forward, "B": backward, "W": backward}
    return [
        part for part in GOLDEN if sides[part.kind] is not None and (sides[part.kind] or part.name not in COMMUNICATION)
    ]


def order(forward: Sequence[bool], backward: Sequence[bool]) -> list[Place]:
    """All parts of two stages: the first layer forward beside the last one backward, and so on; the rest runs alone.

    Args:
        forward: for each layer of the forward whether it communicates; empty for none.
        backward: the same of the backward, in the order of the layers (backward starts at the last).
    """
    found = []
    for step in range(max(len(forward), len(backward))):
        below = len(backward) - 1 - step
        ahead = forward[step] if step < len(forward) else None
        back = backward[below] if below >= 0 else None
        found += [Place(part, step if part.kind == "F" else below) for part in parts_of_pair(ahead, back)]
    return found
