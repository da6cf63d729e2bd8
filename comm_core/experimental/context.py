"""What the experimental parts of one buffer share: its backend, its bounds, and how a mistake is told.

Like dispatch and combine, calls that all ranks make are compared across ranks; where one rank is wrong, `require` takes
part in the call to say so, and the call raises on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from comm_core import validate
from comm_core.backends.base import Backend, Region
from comm_core.runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Context:
    """One buffer as its experimental parts see it.

    Attributes:
        backend: carries the bytes.
        num_bytes: size of the buffer, stored entries included; None for no bound.
        num_cpu_bytes: of these, for stored entries.
        check_open: raises once the buffer is closed.
    """

    backend: Backend
    num_bytes: int | None
    num_cpu_bytes: int
    check_open: Callable[[], None]

    @property
    def host_checked(self) -> bool:
        """True where each call is compared across ranks before its data move."""
        return self.backend.device.type in self.backend.capabilities.host_checked_kinds

    def others(self) -> list[int]:
        """All ranks but this one, beginning behind it, so that not all ranks turn to the same one first."""
        rank, num_ranks = self.backend.rank, self.backend.num_ranks
        return [(rank + step) % num_ranks for step in range(1, num_ranks)]

    def require(self, op: str, check: Callable[[], object]) -> None:
        """Carries a check of a call's arguments out; a mistake raises on every rank."""
        self.check_open()
        kinds = self.backend.capabilities.region_kinds
        if self.backend.device.type not in kinds:  # the same on all ranks
            raise validate.unsupported(
                f"{op} with backend {self.backend.name!r} on {self.backend.device}",
                f"devices of {', '.join(kinds) or 'another backend'}",
            )
        problem = validate.problem_of(check)
        if problem is not None:
            self.backend.refuse(op, problem)

    def bound(self, what: str, num_bytes: int, most: int | None, hint: str) -> None:
        """Raises where something is larger than its part of the buffer."""
        if most is not None and num_bytes > most:
            raise UsageError(
                f"{what} of {num_bytes} bytes", allowed=f"{most} bytes, as the buffer was built", fix=f"see {hint}"
            )

    def renewed(
        self, op: str, settings: Mapping[str, int], old: Region | None, num_bytes: int, num_lanes: int
    ) -> Region:
        """Compares a call, lets all work end on all ranks, and opens a region in place of an older one. Collective."""
        self.backend.agree(op, settings, drained=True).synchronize()
        if old is not None:
            self.backend.queue.submit(old.close)
        return self.backend.open_region(op, num_bytes, num_lanes)

    def tensor(self, name: str, value: Any) -> torch.Tensor:
        """A contiguous tensor of any dtype and shape on the buffer's device."""
        dims = value.dim() if isinstance(value, torch.Tensor) else 0
        dtypes = (value.dtype,) if isinstance(value, torch.Tensor) else ()
        return validate.tensor(name, value, dims=dims, dtypes=dtypes, device=self.backend.device)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [number of bytes] over a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)
