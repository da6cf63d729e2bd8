"""Messages between neighbours of the ring of ranks: pp_set_config, pp_send, pp_recv.

A lane goes up (to the next rank) and one down, each with places for so many tensors. A sender writes the tensor into
the next place and goes on; it waits where all places hold tensors that the receiver has not taken yet. Only the two
ranks take part, so these calls are not compared across ranks as others are. A small head goes in front of each tensor
instead: its size, or the mistake that keeps the sender from sending it. So the receiver hears of a mistake of the
sender and does not wait, and tensors of different sizes at both ends raise.

Calls act in the calling thread (on an accelerator on the current stream, and without heads, as the host would have to
wait for them). They are not behind work of the comm queue.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from comm_core import sizes, validate
from comm_core.backends.base import Region
from comm_core.experimental.context import Context, raw
from comm_core.layout import align
from comm_core.runtime import trace
from comm_core.runtime.errors import CommError, UsageError

_UP, _DOWN = 0, 1
# Bytes in front of a tensor: its size, or -1 and a text.
_HEAD = 256
_SIZE = struct.Struct("=q")
_HINT = "get_pp_buffer_size_hint"


class Pipeline:
    """Pipeline messages of one buffer.

    Args:
        context: of the buffer.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._region: Region | None = None
        self._place_bytes, self._num_places = 0, 0
        self._sent, self._received = [0, 0], [0, 0]

    def configure(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Sets sizes; what was sent and not received is dropped. Collective."""
        context = self._context

        def check() -> None:
            if context.backend.num_ranks == 1:
                raise UsageError("pp_set_config on one rank", allowed="two ranks at least", fix="skip it on one rank")
            validate.whole("num_max_tensor_bytes", num_max_tensor_bytes)
            validate.whole("num_max_inflight_tensors", num_max_inflight_tensors)
            need = sizes.pipeline_bytes(num_max_tensor_bytes, num_max_inflight_tensors)
            context.bound("tensors in flight", need, context.num_bytes, _HINT)

        context.require("pp_set_config", check)
        settings = {
            "num_max_tensor_bytes": num_max_tensor_bytes,
            "num_max_inflight_tensors": num_max_inflight_tensors,
        }
        place_bytes = align(num_max_tensor_bytes, sizes.PLACE)
        num_bytes = 2 * num_max_inflight_tensors * (_HEAD + place_bytes)
        self._region = context.renewed("pp_set_config", settings, self._region, num_bytes, 2)
        self._place_bytes, self._num_places = place_bytes, num_max_inflight_tensors
        self._sent, self._received = [0, 0], [0, 0]

    def send(self, t: Any, peer: Any) -> None:
        """Sends a tensor to a neighbour."""
        region = self._ready("pp_send", "dst_rank_idx", peer)
        lane = _UP if peer == (self._context.backend.rank + 1) % self._context.backend.num_ranks else _DOWN
        problem = validate.problem_of(lambda: self._check_tensor(t))
        where = f"pp_send to rank {peer} (message {self._sent[lane] + 1})"
        data = torch.empty(0, dtype=torch.uint8) if problem is not None else raw(t)
        head, parts = torch.zeros(_HEAD, dtype=torch.uint8), 2 if self._context.host_checked else 1
        if problem is not None and parts == 1:
            raise problem
        text = b"" if problem is None else str(problem).encode()[: _HEAD - _SIZE.size]
        line = _SIZE.pack(data.numel() if problem is None else -1) + text
        head[: len(line)] = torch.frombuffer(bytearray(line), dtype=torch.uint8)

        def put() -> None:
            at = self._place(lane, self._sent[lane])
            region.settle(where, lane, [peer], parts * (self._num_places - 1))
            if parts == 2:
                region.put(where, lane, [peer], at, head)
            region.put(where, lane, [peer], at + _HEAD, data)

        self._carry_out("pp_send", data.numel(), put)
        self._sent[lane] += 1
        if problem is not None:
            raise problem

    def recv(self, t: Any, peer: Any) -> None:
        """Receives the next tensor of a neighbour into `t`."""
        region = self._ready("pp_recv", "src_rank_idx", peer)
        self._check_tensor(t)
        rank, num_ranks = self._context.backend.rank, self._context.backend.num_ranks
        lane = _UP if rank == (peer + 1) % num_ranks else _DOWN
        where = f"pp_recv from rank {peer} (message {self._received[lane] + 1})"
        out, head = raw(t), torch.zeros(_HEAD, dtype=torch.uint8)

        def take() -> int:
            at, size = self._place(lane, self._received[lane]), out.numel()
            if self._context.host_checked:
                region.take(where, lane, peer, at, head)
                size = _SIZE.unpack(bytes(head[: _SIZE.size].tolist()))[0]
            # A tensor that does not fit is taken too, so that the next call gets the next one.
            into = out if size == out.numel() else torch.empty(max(0, size), dtype=torch.uint8)
            region.take(where, lane, peer, at + _HEAD, into)
            region.release(lane, [peer])
            return size

        size = self._carry_out("pp_recv", out.numel(), take)
        self._received[lane] += 1
        if size != out.numel():
            self._not_received(where, size, out.numel(), head)

    def _not_received(self, where: str, sent: int, wanted: int, head: torch.Tensor) -> NoReturn:
        if sent < 0:
            text = bytes(head[_SIZE.size :].tolist()).rstrip(b"\0").decode(errors="replace")
            raise CommError(f"{where} on rank {self._context.backend.rank}: it was not sent, because of {text}")
        raise UsageError(
            f"{where} into a tensor of {wanted} bytes",
            allowed=f"{sent} bytes, as sent",
            fix="use one size at both ends",
        )

    def _ready(self, op: str, name: str, peer: Any) -> Region:
        """The region, where the call has a partner at all; without one nobody waits for this rank."""
        self._context.check_open()
        if self._region is None:
            raise UsageError(f"{op} before pp_set_config", allowed="after it", fix="call pp_set_config on all ranks")
        rank, num_ranks = self._context.backend.rank, self._context.backend.num_ranks
        around = sorted({(rank - 1) % num_ranks, (rank + 1) % num_ranks})
        if not isinstance(peer, int) or peer not in around:
            raise UsageError(
                f"{name}={peer!r} on rank {rank} of {num_ranks}",
                allowed=f"a neighbour in the ring: {' or '.join(map(str, around))}",
                fix="send in steps",
            )
        return self._region

    def _check_tensor(self, t: Any) -> None:
        num_bytes = self._context.tensor("t", t).nbytes
        if num_bytes > self._place_bytes:
            raise UsageError(
                f"t of {num_bytes} bytes", allowed=f"at most {self._place_bytes}", fix="raise num_max_tensor_bytes"
            )
        if num_bytes % sizes.PLACE:
            raise UsageError(f"t of {num_bytes} bytes", allowed=f"a multiple of {sizes.PLACE}", fix="pad it")

    def _place(self, lane: int, number: int) -> int:
        return (lane * self._num_places + number % self._num_places) * (_HEAD + self._place_bytes)

    def _carry_out(self, op: str, num_bytes: int, step: Callable[[], Any]) -> Any:
        try:
            with torch.no_grad(), trace.span(op, "pp", lane="pp", bytes=num_bytes):
                return step()
        except BaseException as error:
            self._context.backend.note_failure(error)
            raise
