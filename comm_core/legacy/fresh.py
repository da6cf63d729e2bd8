"""A V1 dispatch by a new routing decision, as steps on the comm queue.

    lanes     the routing decision in V2's words, and whether the caller's counts agree with it
    prepare   counts and ids are exchanged
    table     every rank tells all: shape of its rows, channels, counts, and its mistake, if any
    rows      x with its scales, ids and weights
    fields    V1's handle, local ids

A mistake that shows in values alone (they may not be there when the call is made) travels with the table, so it raises
on every rank, and the rows of a call that is going to fail still move: nobody is left waiting. With num_worst_tokens
all shapes are known, so the calling thread only queues these steps; without, it waits for the second and the third.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from comm_core import layout
from comm_core.event import EventHandle, as_handle
from comm_core.handle import EPHandle
from comm_core.legacy import checks, routing
from comm_core.legacy.routing import BufferHandle
from comm_core.legacy.transport import Transport
from comm_core.runtime.errors import CommError, UsageError
from comm_core.validate import MAX_TOPK, problem_of

_WORDS = 64  # of 8 bytes: room for the text of a mistake
_HEAD = 2  # tokens and channels, in front of the counts


class FreshDispatch:
    """One call of `Buffer.dispatch` without a handle, its arguments checked but for values.

    Args:
        transport: of the buffer.
        args: of the call.
        num_channels: shapes the handle.

    Attributes:
        handle: of the call, after `run`; its fields are complete with the event.
        outs: received tensors: x, scales where given, ids and weights where given.
        num_rows: rows of each.
    """

    def __init__(self, transport: Transport, args: checks.DispatchArgs, num_channels: int) -> None:
        self._transport, self._args, self._num_channels = transport, args, num_channels
        self._problem: UsageError | None = None
        self._table: list[list[int]] = []
        self.handle: BufferHandle
        self.outs: list[torch.Tensor] = []
        self.num_rows = args.num_worst_tokens

    def run(self) -> EventHandle:
        """Queues the steps; the event completes them and raises what was found wrong."""
        args, transport, inside = self._args, self._transport, self._args.is_token_in_rank
        previous, num_ranks = as_handle(args.previous_event), transport.num_ranks
        # Memory of the call is the caller's stream's, which the comm stream waits for then, or the comm stream's.
        on_comm = args.allocate_on_comm_stream
        with transport.allocating(on_comm):
            lanes = torch.empty(inside.shape[0], min(num_ranks, MAX_TOPK), dtype=torch.int64, device=inside.device)
        routed = transport.then(lambda: self._route(lanes), [previous], [lanes], here=not on_comm)
        ep = transport.elastic.prepare(
            lanes,
            num_experts=args.num_experts,
            expert_alignment=args.expert_alignment,
            previous_event=routed,
            do_handle_copy=False,
        )
        shape = checks.shape_of(args)
        width = len(shape) + _WORDS + _HEAD + num_ranks + args.num_experts
        told, arrived = transport.spread_later(width, lambda: self._line(ep, shape), ep.event, compared=False)
        compared = transport.then(lambda: self._compare(told, len(shape)), [arrived], here=False)
        if not args.num_worst_tokens:
            self.num_rows = ep.num_recv_tokens  # raises what is wrong with the call on every rank
            compared.synchronize()
        x = args.x if isinstance(args.x, tuple) else (args.x,)
        lists = [] if args.topk_idx is None else [args.topk_idx, args.topk_weights]
        tensors = [item.detach() for item in (*x, *lists)]
        self.outs, event = transport.send(
            ep, tensors[0], tensors[1:], num_rows=self.num_rows, after=arrived,
            on_comm_stream=on_comm, compared=False,
        )  # fmt: skip
        with transport.allocating(on_comm):
            self.handle = routing.empty_handle(ep, inside, self._num_channels, self.num_rows)
        transport.hand_over(on_comm, lanes, *self.handle)
        steps: list[Callable[[], Any]] = [lambda: routing.fill_handle(self.handle, self._table)]
        if lists:
            steps.append(lambda: localise(self.outs[-2], self.outs[-1], ep))
        tensors = [*self.outs, *self.handle]
        return transport.then(lambda: [step() for step in steps], [event, compared], tensors, here=not on_comm)

    def expert_counts(self) -> list[int]:
        """Aligned counts of the local experts, from what every rank said it sends; none with num_worst_tokens."""
        if self._args.num_worst_tokens:
            return []
        num_ranks, rank = self._transport.num_ranks, self._transport.rank
        num_local = self._args.num_experts // num_ranks
        first = _HEAD + num_ranks + rank * num_local
        sums = [sum(line[first + expert] for line in self._table) for expert in range(num_local)]
        return [layout.align(count, self._args.expert_alignment) for count in sums]

    def _route(self, lanes: torch.Tensor) -> None:
        """Fills the lanes; with a mistake nothing is sent from here."""
        lanes.fill_(-1)
        self._problem = problem_of(lambda: lanes.copy_(self._args.routing(self._transport.num_ranks)))

    def _line(self, ep: EPHandle, shape: list[int]) -> list[int]:
        """What this rank tells the others."""
        args, num_rows = self._args, sum(ep.layout.recv_splits)
        if self._problem is None and args.num_worst_tokens and num_rows > args.num_worst_tokens:
            self._problem = UsageError(
                f"num_worst_tokens={args.num_worst_tokens}",
                allowed=f"at least {num_rows}, the rows that arrive here",
                fix="raise it to num_ranks times the tokens of a rank",
            )
        counts = [*args.num_tokens_per_rank.tolist(), *args.num_tokens_per_expert.tolist()]
        return [*shape, *_words(self._problem), args.is_token_in_rank.shape[0], self._num_channels, *counts]

    def _compare(self, told: list[list[int]], num_shape: int) -> None:
        """Raises what is wrong with the call, on every rank alike; keeps the counts."""
        texts = [_text(line[num_shape : num_shape + _WORDS]) for line in told]
        if self._problem is not None:
            raise self._problem
        if any(texts):
            said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
            raise CommError(f"dispatch was refused on every rank of the group because of {said}")
        checks.same_on_all_ranks([line[:num_shape] for line in told])
        self._table = [line[num_shape + _WORDS :] for line in told]


def localise(idx: torch.Tensor, weights: torch.Tensor, ep: EPHandle) -> None:
    """Turns received global ids into local ones: -1, with weight 0, where the expert lives elsewhere."""
    num_local, num_rows = ep.num_local_experts, ep.num_recv_tokens
    local = idx[:num_rows] - ep.rank * num_local
    local.masked_fill_((idx[:num_rows] < 0) | (local < 0) | (local >= num_local), -1)
    idx[:num_rows] = local
    idx[num_rows:] = -1
    weights.masked_fill_(idx < 0, 0)


def _words(problem: UsageError | None) -> list[int]:
    """The text of a mistake as integers, all 0 for none."""
    raw = b"" if problem is None else str(problem).encode()[: 8 * _WORDS]
    raw = raw.ljust(8 * _WORDS, b"\0")
    return [int.from_bytes(raw[at : at + 8], "little", signed=True) for at in range(0, len(raw), 8)]


def _text(words: list[int]) -> str:
    raw = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
    return raw.rstrip(b"\0").decode(errors="replace")
