"""What a backend is: a protocol of a few operations and a table of what differs (`Capabilities`).

Rows of tokens go by dispatch and combine. Everything else (all-gather sessions, pipeline messages, stored entries) is
made of one thing, a `Region`: memory that each rank owns a part of, with messages that one rank lays down and another
picks up.

ElasticBuffer checks arguments, allocates the outputs and calls these; a backend moves bytes and adds rows. Where a
check fails, `refuse` takes the place of the operation: a backend must tell the other ranks, so that a mistake on one
rank raises on all of them and none is left waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn, Protocol

import torch

from comm_core.event import CommQueue, EventHandle
from comm_core.handle import EPHandle
from comm_core.runtime.errors import UsageError


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Differences between backends, as data.

    Attributes:
        device_kinds: kinds of devices whose tensors it moves.
        dtypes: element types of `x`.
        hidden_multiple: hidden must be a multiple of it.
        needs_token_bound: num_max_tokens_per_rank must be given.
        host_checked_kinds: kinds of devices where every call's settings are compared across ranks before its data
            moves; elsewhere that is so for calls with a count exchange, and others report a disagreement later.
        fp8_kinds: device kinds on which x may be a pair (data, scales).
        worst_case_outputs: dispatch without any host wait (do_cpu_sync=False).
        single_reduction: combine of expanded rows in one sum (allow_multiple_reduction=False).
        moves_scales: a dispatch takes the scales of a pair along with its data; otherwise they are a second one.
        zero_copy: it has `reserve` and `symmetric_memory`: rows made there are sent without being copied first.
        low_latency: it has `blocks_dispatch` and `blocks_combine`: the low-latency calls without a host wait.
        region_kinds: device kinds on which it has regions.
        one_sided_reads: `Region.read` needs nothing of the other ranks; otherwise it is a call that all ranks make.
    """

    device_kinds: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    hidden_multiple: int
    needs_token_bound: bool
    host_checked_kinds: tuple[str, ...]
    fp8_kinds: tuple[str, ...]
    worst_case_outputs: bool
    single_reduction: bool
    moves_scales: bool = False
    zero_copy: bool = False
    low_latency: bool = False
    region_kinds: tuple[str, ...] = ()
    one_sided_reads: bool = False


@dataclass(frozen=True, slots=True)
class LayoutJob:
    """Start of a count exchange.

    Attributes:
        op: name of the call, for errors and the comparison across ranks.
        settings: values that must be equal on all ranks; "num_experts", "expert_alignment" and
            "num_max_tokens_per_rank" are always among them.
        topk_idx: int64 [num_tokens, num_topk] as given; its values are checked when they are there.
        kept: the tensor the handle keeps; filled from topk_idx where it is another one.
        after: events before which topk_idx is not ready.
    """

    op: str
    settings: dict[str, int]
    topk_idx: torch.Tensor
    kept: torch.Tensor
    after: tuple[EventHandle | None, ...] = ()


@dataclass(frozen=True, slots=True)
class MoveJob:
    """A dispatch or combine whose counts are known. n, E: received and expanded rows of the handle.

    Attributes:
        op, settings, after: as in LayoutJob; `settings` is None where a count exchange has just compared them.
        handle: routing decision.
        x: rows to move.
        weights: weights to move, dispatch: [num_tokens, num_topk]; combine: [n, num_topk], expanded: [E].
        biases: combine, tensors shaped like the result.
        out_x, out_weights: where results go.
        out_idx: dispatch, int64 [n, num_topk], local ids.
        before_epilogue: an event that local work after the transfer must wait for.
        scales, out_scales: dispatch of a pair where the backend moves scales: 4-byte words with any strides.
        num_sms: multiprocessors to use at most, 0 for automatic.
        clears_rest: dispatch of worst-case shape: rows behind the real ones are to be zero (ids -1), not left alone.
    """

    op: str
    settings: dict[str, int] | None
    handle: EPHandle
    x: torch.Tensor
    out_x: torch.Tensor
    weights: torch.Tensor | None = None
    biases: Sequence[torch.Tensor] = ()
    out_weights: torch.Tensor | None = None
    out_idx: torch.Tensor | None = None
    after: tuple[EventHandle | None, ...] = ()
    before_epilogue: EventHandle | None = None
    scales: torch.Tensor | None = None
    out_scales: torch.Tensor | None = None
    num_sms: int = 0
    clears_rest: bool = True

    def fitted(self) -> MoveJob:
        """The same job on the rows that are really there; behind them ids become -1, the rest 0. Waits for counts."""
        if not self.handle.static_bound:
            return self
        plans = self.handle.layout
        real = plans.recv.num_expanded if self.handle.do_expand else sum(plans.recv_splits)
        if self.op == "combine":
            return replace(self, x=self.x[:real], weights=None if self.weights is None else self.weights[:real])
        for out, empty in ((self.out_x, 0), (self.out_weights, 0), (self.out_idx, -1)):
            if out is not None and self.clears_rest:
                out[real:].fill_(empty)
        return replace(
            self,
            out_x=self.out_x[:real],
            out_weights=None if self.out_weights is None else self.out_weights[:real],
            out_idx=None if self.out_idx is None else self.out_idx[:real],
        )


@dataclass(frozen=True, slots=True)
class BlocksJob:
    """A low-latency dispatch or combine, see `comm_core.legacy.low_latency`. T tokens, K lanes, L experts of this rank.

    Attributes:
        settings: values that must be equal on all ranks.
        x: dispatch, [T, hidden]; combine, [L, height, hidden].
        topk_idx: int64 [T, K].
        max_tokens: bound of T.
        height: rows of an expert's block.
        out_x: dispatch, [L, height, hidden]; combine, [T, hidden]. Rows behind the counts are not written.
        src_info, ranges, counts: of the dispatch: int32 [L, height], int64 [L, R], int32 [L].
        positions, seq: int32 [T, K] and int32 [2], kept from a dispatch for its combines.
        fp8: 0 none, 1 fp32 scales, 2 rounded to powers of two, 3 packed exponents.
        out_scales: [L, height, words], stride 1 along the rows.
        weights: combine, fp32 [T, K].
        stats: dispatch, int32 [L] or None: counts are added.
        after: events to wait for.
        problem: what is wrong with the ids of this rank, asked for when the device has found something.
        whole: nobody asks for the second half apart: both may be one launch.
    """

    settings: dict[str, int]
    x: torch.Tensor
    topk_idx: torch.Tensor
    max_tokens: int
    height: int
    out_x: torch.Tensor
    src_info: torch.Tensor
    ranges: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor
    seq: torch.Tensor
    fp8: int = 0
    out_scales: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    stats: torch.Tensor | None = None
    after: tuple[EventHandle | None, ...] = ()
    problem: Callable[[], UsageError | None] = lambda: None
    whole: bool = False

    @property
    def hidden(self) -> int:
        """Columns of a row."""
        return self.x.shape[-1]

    @property
    def num_topk(self) -> int:
        """Lanes of a token."""
        return self.topk_idx.shape[1]

    @property
    def num_local(self) -> int:
        """Experts of this rank."""
        return self.src_info.shape[0]

    def tensors(self) -> list[torch.Tensor | None]:
        """Everything the device reads or writes."""
        return [
            self.x, self.topk_idx, self.out_x, self.src_info, self.ranges, self.counts, self.positions, self.seq,
            self.out_scales, self.weights, self.stats,
        ]  # fmt: skip


class Region(Protocol):
    """Memory that each rank of the group owns a part of, all of one size. Made by `Backend.open_region`.

    Messages of one lane between two ranks are taken in the order in which they were put. A message is `num` bytes at
    place `at`, known to both ends. Whether it lies in the memory of the sender until it is taken, or in that of the
    receiver, is the backend's business; so at any time each place has at most one sender, and it keeps its message
    until every receiver has released it.

    All calls act in the calling thread; on an accelerator they are issued to the current stream and return. `where`
    names the operation in errors: CommTimeoutError with the rank waited for, CommError where the connection is gone.

    Attributes:
        num_bytes: size of each rank's part.
        local: uint8 [num_bytes], this rank's part. Tensors over it stay valid memory when the region is closed.
    """

    num_bytes: int
    local: torch.Tensor

    def put(self, where: str, lane: int, peers: Sequence[int], at: int, data: torch.Tensor) -> None:
        """Lays down a message, uint8 [num], for each of `peers` (other ranks) and goes on.

        Data may lie in `local` at `at` already, and stay there then; elsewhere they are free to change afterwards.
        """
        ...

    def take(self, where: str, lane: int, peer: int, at: int, out: torch.Tensor) -> None:
        """Waits for the next message of a rank and puts it into `out`, uint8 [num]; may be `local` at `at`."""
        ...

    def release(self, lane: int, peers: Sequence[int]) -> None:
        """Says that the places of all messages taken from `peers` may be used again."""
        ...

    def settle(self, where: str, lane: int, peers: Sequence[int], unreleased: int = 0) -> None:
        """Waits until each of `peers` has released what was put for it, all but the last `unreleased` messages."""
        ...

    def read(
        self, op: str, settings: Mapping[str, int], owner: torch.Tensor, row: torch.Tensor, out: torch.Tensor
    ) -> None:
        """out[i] = row row[i] of the table at the beginning of rank owner[i]'s part, with rows as wide as out's.

        Args:
            op: name of the call; without one-sided reads all ranks make it, and `settings` are compared.
            settings: values that must be equal on all ranks.
            owner: int64 [n], ranks.
            row: int64 [n], rows in range.
            out: uint8 [n, width].
        """
        ...

    def close(self) -> None:
        """Lets go of the memory. Idempotent; runs on the backend's queue."""
        ...


class Backend(Protocol):
    """Moves rows between the ranks of one group. Calls are issued in the same order on every rank."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    rank: int
    num_ranks: int
    device: torch.device
    buffer_id: int
    queue: CommQueue

    @staticmethod
    def why_not(kind: str) -> str | None:
        """Why the backend can not be used with a kind of device on this machine; None where it can."""
        ...

    def start_layout(self, job: LayoutJob) -> EventHandle:
        """Starts a count exchange at once; the event's result is a RankLayout."""
        ...

    def dispatch(self, job: MoveJob) -> EventHandle:
        """Moves rows and weights to the ranks of their experts."""
        ...

    def combine(self, job: MoveJob) -> EventHandle:
        """Moves rows back and adds those of a token in the order the reference defines."""
        ...

    def barrier(self) -> EventHandle:
        """An event that is complete when every rank is here with all work issued to its queue and stream so far."""
        ...

    def agree(self, op: str, settings: Mapping[str, int], *, drained: bool = False) -> EventHandle:
        """A host event, complete when all ranks have made this call with these settings; fails where they differ.

        Args:
            op: name of the call, one of `channel.CALLS`.
            settings: some of `channel.SETTINGS`.
            drained: each rank comes only when all work issued to its queue and stream so far is done.
        """
        ...

    def open_region(self, op: str, num_bytes: int, num_lanes: int) -> Region:
        """A region of `num_bytes` a rank with lanes 0 to num_lanes - 1. Collective; waits for the other ranks.

        Raises:
            CommError: on every rank, where one has no memory.
        """
        ...

    def note_failure(self, error: BaseException) -> None:
        """This rank has left a call in which others may wait for it: they are told, later calls raise here."""
        ...

    def blocks_fit(self, num_topk: int, num_local: int, hidden: int, height: int) -> bool:
        """True where `blocks_dispatch` and `blocks_combine` can carry out calls of these sizes."""
        ...

    def blocks_dispatch(self, job: BlocksJob) -> Callable[[], EventHandle]:
        """Sends; the function returned receives, where `Capabilities.low_latency`."""
        ...

    def blocks_combine(self, job: BlocksJob) -> Callable[[], EventHandle]:
        """Sends answers; the function returned adds them up, where `Capabilities.low_latency`."""
        ...

    def reserve(self, num_bytes: int) -> None:
        """Makes room for symmetric tensors (collective); where `Capabilities.zero_copy`."""
        ...

    def symmetric_memory(self) -> AbstractContextManager[None]:
        """Context in which tensors are made in symmetric memory; where `Capabilities.zero_copy`."""
        ...

    def refuse(self, op: str, problem: UsageError) -> NoReturn:
        """Takes part in the call `op` only to say that this rank's arguments are wrong; raises `problem`."""
        ...

    def close(self, *, collective: bool) -> None:
        """Frees everything; waits for the other ranks where `collective`."""
        ...
