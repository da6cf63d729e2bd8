"""What an implementation of the experts is given: one object with the rows, where they lie, the weights and the rules.

`mt_moe.experts.expert_mlp` checks its arguments, makes an `ExpertCall` of them and hands it to an `Implementation`
chosen by name, or to a `Recipe` (a low-precision way to compute the same), which owns everything from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from comm_core.runtime.errors import UsageError
from mt_moe.expert_linear import Defer

Weights: TypeAlias = Tensor | Sequence[Tensor]
"""One packed tensor [num_local_experts, out, in], or one tensor [out, in] an expert."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the experts' rows lie: expert e owns `counts[e]` rows from `starts[e]`; rows in no group are padding.

    `sections` cuts all rows in order into (expert, length), with expert None for padding.
    """

    counts: tuple[int, ...]
    ends: tuple[int, ...]
    sections: tuple[tuple[int | None, int], ...]

    @classmethod
    def of(cls, counts: Sequence[int], expert_alignment: int, num_rows: int) -> Rows:
        """Lays out groups whose starts are multiples of `expert_alignment`, in `num_rows` rows.

        Raises:
            UsageError: a negative count, or fewer rows than the groups need.
        """
        if expert_alignment < 1 or any(count < 0 for count in counts):
            raise UsageError(
                f"counts {list(counts)} with expert_alignment {expert_alignment}",
                allowed="counts >= 0 and expert_alignment >= 1",
                fix="pass the unaligned counts of the dispatch handle",
            )
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts]
        ends = tuple(itertools.accumulate(aligned))
        total = ends[-1] if ends else 0
        if num_rows < total:
            raise UsageError(
                f"{num_rows} rows for counts {list(counts)} at expert_alignment {expert_alignment}",
                allowed=f"at least {total} rows",
                fix="pass rows, counts and alignment of one dispatch",
            )
        sections: list[tuple[int | None, int]] = []
        for expert, (count, width) in enumerate(zip(counts, aligned, strict=True)):
            sections += [(expert, count), (None, width - count)]
        sections.append((None, num_rows - total))
        return cls(tuple(counts), ends, tuple(item for item in sections if item[0] is not None or item[1] > 0))


@dataclass(frozen=True, slots=True)
class Unit:
    """What happens between the two products: activation, gating, and where weight gradients go."""

    activation: Callable[[Tensor], Tensor]
    gated: bool
    defer: Defer | None

    def __call__(self, hidden: Tensor, row_weights: Tensor) -> Tensor:
        """[num_rows, ffn or 2 * ffn] and [num_rows] to [num_rows, ffn], in the dtype of `hidden`."""
        hidden = activated(hidden, self.activation, self.gated)
        return (hidden * row_weights.unsqueeze(-1)).to(hidden.dtype)


def activated(hidden: Tensor, activation: Callable[[Tensor], Tensor], gated: bool) -> Tensor:
    """act(gate) * up of [num_rows, 2 * ffn] = gate || up where `gated`, else act of [num_rows, ffn]."""
    if not gated:
        return activation(hidden)
    gate, up = torch.chunk(hidden, 2, dim=-1)
    return activation(gate) * up


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """One call of `expert_mlp`, checked.

    Attributes:
        rows: [num_rows, hidden], expert-major, padding rows zero.
        layout: where the rows of each expert lie, on the host; None where the device alone knows, and then rows behind
            the last group may follow.
        row_weights: [num_rows], fp32 or fp64.
        fc1: one [2 * ffn or ffn, hidden] an expert, or all packed.
        fc2: one [hidden, ffn] an expert, or all packed.
        unit: activation, gating, and `defer`, which takes weight gradients out of backward.
        ends: int32 [num_local_experts] on the device of rows, the row after the last of each aligned group.
        recompute: what backward computes again, see `DataPath`.
        rows_again: gives `rows` in backward where they are not to be saved; called at most once.
        spare_sms: multiprocessors that products leave to others.
        release: backward may free `rows` and the gradient of the result once they are read: nobody else has them.
        quantised: FP8 data [num_rows, hidden] and scales [num_rows, blocks or more] of rows that arrived so; a recipe
            reads these, and `rows` only carries the gradient.
    """

    rows: Tensor
    layout: Rows | None
    row_weights: Tensor
    fc1: Weights
    fc2: Weights
    unit: Unit
    ends: Tensor | None = None
    recompute: str = "activation"
    rows_again: Callable[[], Tensor] | None = None
    spare_sms: int = 0
    release: bool = False
    quantised: tuple[Tensor, Tensor] | None = None

    def device_ends(self) -> Tensor:
        """`ends` as given, or copied from the host."""
        if self.ends is not None:
            return self.ends
        assert self.layout is not None, "ends are known on the host or on the device"
        return torch.tensor(self.layout.ends, dtype=torch.int32, device=self.rows.device)

    def host_layout(self) -> Rows:
        """`layout`, read from the device where the host does not know it: waits. Padding counts as rows then."""
        if self.layout is not None:
            return self.layout
        ends = self.device_ends().tolist()
        counts = [end - first for first, end in itertools.pairwise((0, *ends))]
        return Rows.of(counts, 1, self.rows.shape[0])


class Implementation(Protocol):
    """One way to compute the experts; also what a recipe is."""

    @property
    def name(self) -> str:
        """For errors and traces."""
        ...

    def run(self, call: ExpertCall) -> Tensor:
        """The output rows [num_rows, hidden]; differentiable; padding rows are zero."""
        ...

    def unavailable(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> str | None:
        """Why it can not run on a device with a dtype and widths of the products; None where it can."""
        ...


@dataclass(frozen=True, slots=True)
class Named:
    """An implementation made of two functions."""

    name: str
    run: Callable[[ExpertCall], Tensor]
    unavailable: Callable[[torch.device, torch.dtype, Sequence[int]], str | None]
