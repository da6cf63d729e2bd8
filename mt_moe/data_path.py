"""How the data of a layer moves and what of it is kept: settings that change time and memory, never the result."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final

from comm_core.runtime.errors import UsageError

SAVE_DISPATCHED: Final = ("keep", "copy", "redispatch")
RECOMPUTE: Final = ("activation", "fc1", "nothing")


def is_whole(value: Any, least: int) -> bool:
    """Whether a setting is a whole number, at least `least`; True and 2.0 are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPath:
    """Settings of the data path of one layer; equal on all ranks.

    What is kept is the choice of grouped experts. The loop keeps what its nodes keep, whatever `recompute` and
    `release` say, and refuses "redispatch"; an FP8 recipe has no `release` either.

    Args:
        num_chunks: the tokens of a call travel in so many parts, so that the rows of one part move beside the products
            of another, in forward and in backward. Sums over chunks are rounded once a chunk.
        save_dispatched: how backward has the dispatched rows, which fc1's weight gradient reads. "keep": saved. "copy":
            saved in memory of torch's allocator, which is where every backend here puts them, so the same as "keep".
            "redispatch": not saved; the tokens are sent once more in backward, beside its products.
        recompute: "activation": fc1's output is saved and the activation computed again, inside the pass that computes
            its gradients. "fc1": neither is saved, fc1 runs again. "nothing": both are saved.
        delay_wgrad: fc1's weight gradient runs while the gradients of the rows travel home, instead of before.
        release: backward gives the memory of dispatched rows and of their gradients back as soon as they are read,
            instead of when autograd lets go of them, and computes both weight gradients before the gradients of the
            rows: least memory, without `delay_wgrad`. A graph can then be run backward once.
        comm_sms: multiprocessors of dispatch and combine, 0 for automatic.
        gemm_spare_sms: multiprocessors that the products of the experts leave to what runs beside them.
        max_tokens_per_rank: where not 0, shapes are those of the worst case for this many tokens a rank, the host waits
            for nothing, as capturing forward and backward in a graph needs (a test for devices does; not run yet).

    Raises:
        UsageError: a value that can not work.
    """

    num_chunks: int = 1
    save_dispatched: str = "keep"
    recompute: str = "activation"
    delay_wgrad: bool = True
    release: bool = False
    comm_sms: int = 0
    gemm_spare_sms: int = 0
    max_tokens_per_rank: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_chunks", 1), ("comm_sms", 0), ("gemm_spare_sms", 0), ("max_tokens_per_rank", 0)):
            self._require(is_whole(getattr(self, name), least), name, f"a whole number, {least} or more")
        self._require(self.save_dispatched in SAVE_DISPATCHED, "save_dispatched", ", ".join(SAVE_DISPATCHED))
        self._require(self.recompute in RECOMPUTE, "recompute", ", ".join(RECOMPUTE))
        self._require(not (self.release and self.delay_wgrad), "release", "True with delay_wgrad=False alone")

    def _require(self, good: bool, name: str, allowed: str) -> None:
        if not good:
            raise UsageError(f"{name} = {getattr(self, name)!r}", allowed=allowed, fix=f"change {name} in DataPath")

    @property
    def tokens_a_chunk(self) -> int:
        """Bound of tokens a rank and chunk; 0 without one."""
        return -(-self.max_tokens_per_rank // self.num_chunks)
