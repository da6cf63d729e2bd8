"""What crosses from one stage to the next: one tensor or several, of any shape and dtype, and their gradients.

A receiver must have memory of the right size before a message comes, so both ends must know shapes and dtypes ahead.
Either both are told (`Edge`, the fixed form), or the sender tells the receiver (`hops`). In both cases the gradient of
a hop needs no words: it has the shapes of what went the other way, for those tensors that have a gradient at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from comm_core.runtime.errors import CommError, UsageError

Value = Tensor | tuple[Tensor | None, ...]
"""One hop: a tensor, or several. Of gradients, None stands for a tensor that has none."""

MAX_TENSORS = 60  # one bit each in a word of the header

# The place in this list is what is sent: add at the end.
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


@dataclass(frozen=True, slots=True)
class Edge:
    """Shape, dtype and device of a tensor that crosses between two ranks.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        device: where the receiver wants it.
        grad: False if no gradient comes back. Tensors that are not floating never have one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool = True

    @property
    def has_grad(self) -> bool:
        """Whether a gradient comes back."""
        return self.grad and (self.dtype.is_floating_point or self.dtype.is_complex)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype}"


class Form(NamedTuple):
    """The tensors of one hop.

    Attributes:
        edges: shape and dtype of each.
        bare: the stage gives and gets a single tensor, not a tuple.
    """

    edges: tuple[Edge, ...]
    bare: bool

    @classmethod
    def given(cls, edge: Edge | Sequence[Edge]) -> Form:
        """From what `StagePrograms.edge` says."""
        return cls((edge,), True) if isinstance(edge, Edge) else cls(tuple(edge), False)

    @classmethod
    def seen(cls, value: Value, device: torch.device) -> Form:
        """From an output; a gradient comes back for what requires one."""
        tensors = tensors_of(value)
        edges = tuple(Edge(tuple(t.shape), t.dtype, device, grad=t.requires_grad) for t in tensors)
        return cls(edges, isinstance(value, Tensor))

    @classmethod
    def fixed(
        cls,
        shape: Sequence[int] | Sequence[Sequence[int]],
        dtype: torch.dtype | Sequence[torch.dtype],
        device: torch.device,
    ) -> Form:
        """From one shape, or from a sequence of shapes for a tuple; `dtype` is for each of them, or one for all.

        Raises:
            UsageError: another number of dtypes than of shapes.
        """
        whole = tuple(size for size in shape if isinstance(size, int))
        shapes = [tuple(one) for one in shape if not isinstance(one, int)] or [whole]
        bare = len(whole) == len(shape)
        dtypes = [dtype] * len(shapes) if isinstance(dtype, torch.dtype) else list(dtype)
        if len(dtypes) != len(shapes):
            raise UsageError(
                f"{len(dtypes)} dtypes for {len(shapes)} tensors between stages",
                allowed="one each, or one for all",
                fix="pass as many dtypes as shapes",
            )
        return cls(tuple(Edge(s, d, device) for s, d in zip(shapes, dtypes, strict=True)), bare)

    @property
    def mask(self) -> int:
        """Which tensors have a gradient, one bit each."""
        return sum(edge.has_grad << place for place, edge in enumerate(self.edges))

    def with_mask(self, mask: int) -> Form:
        """The same with other gradients."""
        device = self.edges[0].device if self.edges else torch.device("cpu")
        return Form(
            tuple(Edge(e.shape, e.dtype, device, grad=bool(mask >> i & 1)) for i, e in enumerate(self.edges)), self.bare
        )

    def with_gradients_alone(self) -> tuple[Edge, ...]:
        """Those that travel back."""
        return tuple(edge for edge in self.edges if edge.has_grad)

    def same_tensors(self, other: Form) -> bool:
        """Whether shapes and dtypes are equal, whatever has a gradient."""
        mine = [(tuple(edge.shape), edge.dtype) for edge in self.edges]
        return self.bare == other.bare and mine == [(tuple(edge.shape), edge.dtype) for edge in other.edges]

    def value(self, tensors: Sequence[Tensor]) -> Value:
        """What the stage gets."""
        return tensors[0] if self.bare else tuple(tensors)

    def gradient(self, tensors: Sequence[Tensor]) -> Value:
        """What the stage gets of the gradients that came: in their places, None where there is none."""
        came = iter(tensors)
        places = tuple(next(came) if edge.has_grad else None for edge in self.edges)
        return tuple(places) if not self.bare or places[0] is None else places[0]

    def words(self) -> list[int]:
        """Shapes and dtypes as whole numbers."""
        result = [int(self.bare), len(self.edges)]
        for edge in self.edges:
            if edge.dtype not in _DTYPES:
                raise UsageError(
                    f"a tensor of {edge.dtype} between stages",
                    allowed=", ".join(map(str, _DTYPES)),
                    fix="send another dtype, or view it as one of these",
                )
            result += [_DTYPES.index(edge.dtype), len(edge.shape), *edge.shape]
        return result

    @classmethod
    def of_words(cls, words: Sequence[int], device: torch.device) -> Form:
        """Reads `words`."""
        rest, edges = iter(words), []
        bare, number = bool(next(rest)), next(rest)
        for _ in range(number):
            dtype, dims = _DTYPES[next(rest)], next(rest)
            edges.append(Edge(tuple(next(rest) for _ in range(dims)), dtype, device))
        if next(rest, None) is not None:
            raise CommError(f"{len(words)} words that do not describe {number} tensors")
        return cls(tuple(edges), bare)

    def __str__(self) -> str:
        return ", ".join(map(str, self.edges)) or "nothing"


def tensors_of(value: object, *, stage: int | None = None) -> tuple[Tensor, ...]:
    """The tensors of an output.

    Raises:
        UsageError: it is no tensor and no sequence of tensors, or has too many; names `stage`, which returned it.
    """
    who = "between stages" if stage is None else f"returned by stage {stage}"
    tensors = (value,) if isinstance(value, Tensor) else value
    if not isinstance(tensors, list | tuple) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        kinds = [type(t).__name__ for t in tensors] if isinstance(tensors, list | tuple) else type(value).__name__
        raise UsageError(f"{kinds} {who}", allowed="a tensor, or a tuple of tensors", fix="return those")
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise UsageError(f"{len(tensors)} tensors {who}", allowed=f"1 to {MAX_TENSORS}", fix="concatenate some of them")
    return tuple(tensors)
