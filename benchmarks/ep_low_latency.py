"""The calls of decoding: low-latency dispatch and combine of V1's interface, and what they must give.

Rows of an expert stand in a block of fixed height, those behind its count mean nothing; outputs are compared without
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import ep_data
from benchmarks.ep_data import Shape, Tokens
from comm_core import ElasticBuffer, fp8
from comm_core.legacy import Buffer

Named = list[tuple[str, torch.Tensor]]


@dataclass
class Decode:
    """The low-latency calls over the ranks of a buffer.

    Attributes:
        buffer: whose ranks and backend are used.
        shape: sizes.
        tokens: of all ranks.
        seed: of the answers.
        lend: puts a tensor into symmetric memory.
    """

    buffer: ElasticBuffer
    shape: Shape
    tokens: Tokens
    seed: int
    lend: Callable[[torch.Tensor], torch.Tensor]
    _calls: Buffer | None = field(default=None, init=False)
    _kept: dict[Any, Any] = field(default_factory=dict, init=False)

    @property
    def calls(self) -> Buffer:
        """The V1 buffer, made when it is first needed (collective)."""
        if self._calls is None:
            timeout = self.buffer._backend._channel.timeout  # type: ignore[attr-defined]
            self._calls = Buffer(
                self.buffer.group,
                low_latency_mode=True,
                backend=self.buffer._backend.name,
                device=self.buffer.device,
                num_cpu_timeout_secs=timeout,
            )
        return self._calls

    def dispatch(self) -> Callable[[int], Named]:
        """A function that sends this rank's tokens as FP8."""
        shape, rank = self.shape, self.buffer.rank
        x, ids = self.tokens.x[rank], self.tokens.ids[rank]

        def run(_sms: int) -> Named:
            rows, counts, _, _, _ = self.calls.low_latency_dispatch(x, ids, shape.tokens, shape.experts, use_fp8=True)
            return [("x", rows[0]), ("scales", rows[1]), ("counts", counts)]

        return run

    def combine(self, *, zero_copy: bool) -> Callable[[int], Named]:
        """A function that brings answers home."""
        shape, rank = self.shape, self.buffer.rank
        x, ids, weights = self.tokens.x[rank], self.tokens.ids[rank], self.tokens.weights[rank]
        if "handle" not in self._kept:
            self._kept["handle"] = self.calls.low_latency_dispatch(x, ids, shape.tokens, shape.experts, use_fp8=False)[
                2
            ]
        if zero_copy not in self._kept:
            rows = self._answers(rank)
            self._kept[zero_copy] = self.lend(rows) if zero_copy else rows
        handle, rows = self._kept["handle"], self._kept[zero_copy]
        return lambda _sms: [("x", self.calls.low_latency_combine(rows, ids, weights, handle)[0])]

    def arrived(self) -> Named:
        """What a dispatch must give, blocks without their empty rows."""
        counts, rows = [], []
        everything = torch.cat(self.tokens.x)
        for expert in range(self.buffer.rank * self.shape.num_local, (self.buffer.rank + 1) * self.shape.num_local):
            here = self._here(expert).nonzero()[:, 0]
            counts.append(len(here))
            rows.append(everything[here])
        data, scales = fp8.per_token_cast(torch.cat(rows))
        return [
            ("x", data.view(torch.uint8)),
            ("scales", scales),
            ("counts", torch.tensor(counts, dtype=torch.int32, device=data.device)),
        ]

    def combined(self) -> Named:
        """What a combine must give: weight times row, lane by lane, fp32, rounded once."""
        rank, shape = self.buffer.rank, self.shape
        ids, weights = self.tokens.ids[rank], self.tokens.weights[rank]
        answers = torch.stack([self._answers(other) for other in range(shape.ranks)]).flatten(0, 1)
        before = torch.stack([self._here(expert) for expert in range(shape.experts)], 1).cumsum(0) - 1
        mine = before[rank * shape.tokens : (rank + 1) * shape.tokens]
        total = torch.zeros(ids.shape[0], shape.hidden, device=ids.device)
        for lane in range(ids.shape[1]):
            expert = ids[:, lane]
            rows = answers[expert.clamp_min(0), mine.gather(1, expert.clamp_min(0)[:, None])[:, 0].clamp_min(0)]
            total += (rows.float() * weights[:, lane, None]).masked_fill((expert < 0)[:, None], 0)
        return [("x", total.to(torch.bfloat16))]

    def without_empty(self, got: Named) -> Named:
        """Outputs of a dispatch without the rows behind each expert's count; others as they are."""
        counts = dict(got).get("counts")
        if counts is None:
            return got
        real = torch.arange(got[0][1].shape[1], device=counts.device) < counts[:, None]
        return [(name, item if name == "counts" else _raw(item)[real]) for name, item in got]

    def release(self) -> None:
        """Lets go of symmetric memory and of the V1 buffer (collective)."""
        self._kept.clear()
        if self._calls is not None:
            self._calls.destroy()
            self._calls = None

    def _here(self, expert: int) -> torch.Tensor:
        """bool [ranks * tokens], which tokens go to an expert, in (source rank, token) order."""
        return torch.cat([(ids == expert).any(1) for ids in self.tokens.ids])

    def _answers(self, rank: int) -> torch.Tensor:
        """bf16 [L, ranks * tokens, hidden], what a rank gives to a combine."""
        height = self.shape.ranks * self.shape.tokens
        rows = ep_data.draw_rows(
            self.shape.num_local * height, self.shape.hidden, self.seed + 101 + rank, self.buffer.device
        )
        return rows.view(self.shape.num_local, height, self.shape.hidden)


def room(shape: Shape) -> int:
    """Bytes of the answers in symmetric memory."""
    return shape.num_local * shape.ranks * shape.tokens * shape.hidden * 2


def _raw(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows
