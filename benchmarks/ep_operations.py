"""The operations that are measured: how each is called, with ordinary tensors or ones that need no copy, and its check.

A fresh dispatch takes ids and weights and exchanges counts; a cached one (what a backward pass does) and a combine have
a handle and rows alone. Without a host wait outputs have the size of the worst case; with it, and by a handle, the real
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import ep_data
from benchmarks.ep_data import Shape
from benchmarks.ep_low_latency import Decode
from comm_core import ElasticBuffer
from comm_core.runtime.errors import CommError

Tensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the results, before it is measured.

    Attributes:
        operation: "dispatch" or "combine".
        dtype: "fp8" (with scales) or "bf16".
        expanded: one row per (token, local expert).
        cached: a dispatch by the handle of an earlier one.
        zero_copy: what is sent lies in symmetric memory.
        host_wait: a fresh dispatch that waits on the host for its counts.
        graph: a captured graph is replayed.
        low_latency: a call of V1's interface for decoding.
    """

    operation: str
    dtype: str
    expanded: bool = False
    cached: bool = False
    zero_copy: bool = False
    host_wait: bool = False
    graph: bool = False
    low_latency: bool = False

    @property
    def static(self) -> bool:
        """Shapes are those of the worst case, so that the host waits for nothing."""
        return self.graph or (self.operation == "dispatch" and not self.cached and not self.host_wait)

    def __str__(self) -> str:
        words = [
            "low-latency" * self.low_latency,
            "cached" * self.cached,
            self.operation,
            self.dtype.upper(),
            "expanded" * self.expanded,
            "zero-copy" * self.zero_copy,
            "with host wait" * self.host_wait,
            "graph" * self.graph,
        ]
        return " ".join(word for word in words if word)


def large() -> list[Operation]:
    """Those of many tokens."""
    kinds = [
        Operation("dispatch", "fp8"),
        Operation("dispatch", "fp8", host_wait=True),
        Operation("dispatch", "fp8", cached=True),
        Operation("dispatch", "bf16"),
        Operation("dispatch", "bf16", host_wait=True),
        Operation("dispatch", "bf16", cached=True),
        Operation("dispatch", "fp8", expanded=True),
        Operation("dispatch", "fp8", expanded=True, host_wait=True),
        Operation("dispatch", "fp8", expanded=True, cached=True),
        Operation("dispatch", "bf16", expanded=True, cached=True),
        Operation("combine", "bf16"),
        Operation("combine", "bf16", expanded=True),
    ]
    return with_zero_copy(kinds)


def small() -> list[Operation]:
    """Those of a few tokens, as decoding has them."""
    plain = [Operation("dispatch", "fp8", graph=True), Operation("combine", "bf16", graph=True)]
    decode = {"graph": True, "low_latency": True}
    # A low-latency dispatch casts its tokens on the way: there is no copy to save.
    return [
        *with_zero_copy(plain),
        Operation("dispatch", "fp8", **decode),
        *with_zero_copy([Operation("combine", "bf16", **decode)]),
    ]


def with_zero_copy(kinds: Iterable[Operation]) -> list[Operation]:
    """Each twice: with ordinary tensors, and with ones in symmetric memory."""
    fields = Operation.__dataclass_fields__
    return [
        Operation(**{name: getattr(kind, name) for name in fields} | {"zero_copy": zero_copy})
        for kind in kinds
        for zero_copy in (False, True)
    ]


class Bench:
    """One buffer with the tokens of one shape.

    Args:
        buffer: of the ranks.
        shape: sizes.
        seed: of everything that is drawn, the same on all ranks.
    """

    def __init__(self, buffer: ElasticBuffer, shape: Shape, seed: int) -> None:
        self._buffer, self.shape, self._seed = buffer, shape, seed
        self.rank, self.device = buffer.rank, buffer.device
        self.tokens = ep_data.draw(shape, seed, self.device)
        self.routings = [ep_data.route(self.tokens.ids, rank, shape) for rank in range(shape.ranks)]
        self._handles: dict[tuple[bool, bool], Any] = {}
        self._inputs: dict[tuple[str, str, bool, bool, bool], Any] = {}
        self._decode = Decode(buffer, shape, self.tokens, seed, self._lent)

    def fingerprint(self) -> list[int]:
        """Equal on ranks that drew the same."""
        parts = [*self.tokens.x, *self.tokens.ids, *self.tokens.weights]
        return [int(part.view(torch.uint8).sum(dtype=torch.int64)) for part in parts]

    def remote_bytes(self, operation: Operation) -> int:
        """Bytes of rows (with their scales) that cross into the busiest rank; a low-latency row crosses once a lane."""
        by_dispatch, by_combine = ep_data.remote_rows(self.routings)
        if operation.operation == "combine":
            return by_combine * self.shape.hidden * 2
        data, scales = self.tokens.pairs[0]
        wide = data.shape[1] + scales.shape[1] * 4 if operation.dtype == "fp8" else self.shape.hidden * 2
        return by_dispatch * wide

    def call(self, operation: Operation) -> Callable[[int], Tensors]:
        """A function that carries the operation out once with a number of SMs and returns its outputs by name."""
        if operation.low_latency:
            decode = self._decode
            return (
                decode.dispatch()
                if operation.operation == "dispatch"
                else decode.combine(zero_copy=operation.zero_copy)
            )
        if operation.operation == "combine":
            return self._combine(operation)
        x = self._sent(operation)
        if operation.cached:
            handle = self._handle(operation.expanded, static=False)
            return lambda sms: _outputs(self._buffer.dispatch(x, handle=handle, num_sms=sms))
        return lambda sms: _outputs(self._fresh(x, operation.expanded, static=operation.static, sms=sms))

    def wanted(self, operation: Operation) -> Tensors:
        """What these outputs must be, from the tokens of all ranks; FP8 as bytes."""
        if operation.low_latency:
            return self._decode.arrived() if operation.operation == "dispatch" else self._decode.combined()
        static, mine = operation.static, self.routings[self.rank]
        if operation.operation == "combine":
            rows = [self._answers(rank, operation.expanded, static=static) for rank in range(self.shape.ranks)]
            ids = self.tokens.ids[self.rank]
            return [("x", ep_data.combined(rows, self.routings, ids, self.rank, self.shape, expand=operation.expanded))]
        if operation.dtype == "fp8":
            data, scales = zip(*self.tokens.pairs, strict=True)
            parts = [("x", [item.view(torch.uint8) for item in data]), ("scales", list(scales))]
        else:
            parts = [("x", self.tokens.x)]
        found = [(name, ep_data.arrived(part, mine)) for name, part in parts]
        weights = ep_data.arrived(self.tokens.weights, mine)
        if operation.expanded:
            found = [(name, ep_data.expanded(rows, mine)) for name, rows in found]
            weights = ep_data.expanded_weights(weights, mine)
        else:
            found.append(("ids", mine.local_idx))
        if not operation.cached:
            found.append(("weights", weights))
        return found

    def check(self, operation: Operation, got: Tensors, wanted: Tensors) -> list[str]:
        """What differs, in words; every byte counts, also of the empty rows behind the real ones."""
        bad = []
        got = self._decode.without_empty(got) if operation.low_latency else got
        for (name, have), (_, want) in zip(got, wanted, strict=True):
            have = have.view(torch.uint8) if have.element_size() == 1 else have
            if operation.static and operation.operation == "dispatch" and not operation.low_latency:
                if operation.expanded:  # what lies behind is left as it is
                    have = have[: want.shape[0]]
                else:
                    want = ep_data.padded(want, have.shape[0], -1 if name == "ids" else 0)
            if have.shape != want.shape or have.dtype != want.dtype:
                bad.append(f"{name} is {list(have.shape)} {have.dtype}, wanted {list(want.shape)} {want.dtype}")
                continue
            differ = (_words(have) != _words(want)).view(have.shape[0], -1).any(1).nonzero()[:, 0]
            if differ.numel():
                rows = f"{differ.numel()} of {have.shape[0]} rows, the first {int(differ[0])}"
                bad.append(f"{operation} on rank {self.rank}: {name} differs in {rows}")
        return bad

    def release(self) -> None:
        """Lets go of tensors in symmetric memory, before the buffer is closed."""
        self._inputs.clear()
        self._handles.clear()
        self._decode.release()

    def _fresh(self, x: Any, expanded: bool, *, static: bool, sms: int) -> Any:
        tokens, shape = self.tokens, self.shape
        return self._buffer.dispatch(
            x,
            tokens.ids[self.rank],
            tokens.weights[self.rank],
            num_experts=shape.experts,
            num_max_tokens_per_rank=shape.tokens,
            expert_alignment=shape.alignment,
            do_expand=expanded,
            do_cpu_sync=False if static else None,
            num_sms=sms,
        )

    def _combine(self, operation: Operation) -> Callable[[int], Tensors]:
        handle, rows = self._handle(operation.expanded, static=operation.static), self._sent(operation)

        def run(sms: int) -> Tensors:
            return [("x", self._buffer.combine(rows, handle, num_sms=sms)[0])]

        return run

    def _handle(self, expanded: bool, *, static: bool) -> Any:
        """The handle of a dispatch made once."""
        key = (expanded, static)
        if key not in self._handles:
            self._handles[key] = self._fresh(self.tokens.x[self.rank], expanded, static=static, sms=0)[3]
        return self._handles[key]

    def _answers(self, rank: int, expanded: bool, *, static: bool) -> torch.Tensor:
        """Rows that a rank gives to a combine."""
        routing = self.routings[rank]
        rows = routing.num_expanded if expanded else len(routing.local_idx)
        if static:
            rows = self._handle(expanded, static=True).num_recv_rows
        return ep_data.draw_rows(rows, self.shape.hidden, self._seed + 1 + rank, self.device)

    def _sent(self, operation: Operation) -> Any:
        """What this rank sends, made once: the tensor, or data and scales."""
        key = (operation.operation, operation.dtype, operation.expanded, operation.static, operation.zero_copy)
        if operation.operation == "dispatch":
            key = (operation.operation, operation.dtype, False, False, operation.zero_copy)
        if key not in self._inputs:
            if operation.operation == "combine":
                made: Any = self._answers(self.rank, operation.expanded, static=operation.static)
            else:
                made = (self.tokens.pairs if operation.dtype == "fp8" else self.tokens.x)[self.rank]
            if operation.zero_copy:
                made = tuple(map(self._lent, made)) if isinstance(made, tuple) else self._lent(made)
            self._inputs[key] = made
        return self._inputs[key]

    def _lent(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same in symmetric memory."""
        with self._buffer.symmetric_memory():
            lent = tensor.clone()
        pool = self._buffer._backend._channel.pool  # type: ignore[attr-defined]
        if pool.place_of(lent) is None:
            raise CommError(f"{tensor.nbytes} bytes found no room in symmetric memory; reserve more of it")
        return lent


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors hold NaN, or the largest number, until they are written: torch's own debugging aid."""
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


def spoil(output: torch.Tensor) -> None:
    """Fills an output of any strides with what no call gives."""
    if output.element_size() == 1:
        output = output.view(torch.uint8)
    output.fill_(float("nan") if output.is_floating_point() else 0x5A)


def _outputs(answer: tuple[Any, Any, Any, Any, Any]) -> Tensors:
    x, ids, weights = answer[:3]
    parts: list[tuple[str, Any]] = [("x", x[0]), ("scales", x[1])] if isinstance(x, tuple) else [("x", x)]
    return [(name, part) for name, part in [*parts, ("ids", ids), ("weights", weights)] if part is not None]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Bit patterns as whole numbers: NaN is equal to itself, -0 is not 0."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
