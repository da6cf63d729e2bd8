"""A mistake on one rank, or ranks that disagree, raise on every rank at the same call; the buffer works on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from comm_core import ElasticBuffer
from comm_core.backends import registry
from comm_core.runtime.errors import ClosedError, MTMoEError, UsageError
from tests.comm_core import cases
from tests.pool import run_ranks

CASE = cases.Case(0, (5, 0, 7), 40, 3, 4, torch.bfloat16, masked=0.0)
Call = Callable[[ElasticBuffer, int, "Inputs"], Any]


class Inputs:
    """Good inputs of this rank, a finished dispatch, and a second buffer."""

    def __init__(self, rank: int, seed: int, buffer: ElasticBuffer, other: ElasticBuffer) -> None:
        data = cases.draw(replace(CASE, seed=seed))
        assert data.weights is not None
        self.x, self.ids, self.weights = data.x[rank], data.topk_idx[rank], data.weights[rank]
        self.good = {"num_experts": CASE.num_experts}
        self.recv_x, _, _, self.handle, _ = buffer.dispatch(self.x, self.ids, **self.good)
        self.foreign = other.dispatch(self.x, self.ids, **self.good)[3]

    def ids_with(self, value: int) -> torch.Tensor:
        """Ids with one replaced; every rank with tokens can spoil its own."""
        ids = self.ids.clone()
        ids[0, 1] = value
        return ids


def _only(at: int, bad: Call, good: Call) -> Call:
    return lambda buffer, rank, given: (bad if rank == at else good)(buffer, rank, given)


def _dispatch(buffer: ElasticBuffer, rank: int, given: Inputs, **changes: Any) -> Any:
    arguments = {"topk_idx": given.ids, **given.good, **changes}
    return buffer.dispatch(arguments.pop("x", given.x), **arguments)


def _cached(buffer: ElasticBuffer, rank: int, given: Inputs, **changes: Any) -> Any:
    arguments = {"handle": given.handle, **changes}
    return buffer.dispatch(arguments.pop("x", given.x), **arguments)


def _combine(buffer: ElasticBuffer, rank: int, given: Inputs, **changes: Any) -> Any:
    arguments = {"x": given.recv_x, "handle": given.handle, **changes}
    return buffer.combine(arguments.pop("x"), arguments.pop("handle"), **arguments)


def _pair(given: Inputs, num_rows: int | None = None, columns: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = given.x.shape[0] if num_rows is None else num_rows
    return given.x.to(torch.float8_e4m3fn), torch.ones(num_rows, columns)


def _prepare(buffer: ElasticBuffer, rank: int, given: Inputs, **changes: Any) -> Any:
    return buffer.prepare(changes.pop("topk_idx", given.ids), **{**given.good, **changes}).num_recv_tokens


# name: (rank at fault, its call, the call of the others, what every message must say)
LOCAL: dict[str, tuple[int, Call, Call, str]] = {
    "id out of range": (0, lambda b, r, g: _dispatch(b, r, g, topk_idx=g.ids_with(12)), _dispatch, "0 to 11"),
    "negative id": (2, lambda b, r, g: _prepare(b, r, g, topk_idx=g.ids_with(-2)), _prepare, "topk_idx[0, 1] = -2"),
    "expert twice": (2, lambda b, r, g: _dispatch(b, r, g, topk_idx=g.ids_with(int(g.ids[0, 0]))), _dispatch, "twice"),
    "dtype of ids": (1, lambda b, r, g: _dispatch(b, r, g, topk_idx=g.ids.int()), _dispatch, "torch.int32"),
    "more rows": (2, lambda b, r, g: _dispatch(b, r, g, x=g.x.new_zeros(9, 40)), _dispatch, "x with 9 rows"),
    "dtype of x": (1, lambda b, r, g: _dispatch(b, r, g, x=g.x.long()), _dispatch, "x of torch.int64"),
    "strided x": (2, lambda b, r, g: _cached(b, r, g, x=g.x.repeat(1, 2)[:, ::2]), _cached, "contiguous"),
    "weights": (0, lambda b, r, g: _cached(b, r, g, topk_weights=g.weights[1:]), _cached, "one weight a lane"),
    "rows of combine": (2, lambda b, r, g: _combine(b, r, g, x=g.recv_x.new_zeros(1, 40)), _combine, "x with 1 rows"),
    "bias": (1, lambda b, r, g: _combine(b, r, g, bias=g.x.new_zeros(3, 40)), _combine, "bias of shape [3, 40]"),
    "three biases": (0, lambda b, r, g: _combine(b, r, g, bias=(g.x,) * 3), _combine, "3 biases"),
    "foreign handle": (0, lambda b, r, g: _combine(b, r, g, handle=g.foreign), _combine, "handle of another buffer"),
    "no handle": (1, lambda b, r, g: _combine(b, r, g, handle=None), _combine, "handle is a NoneType"),
    "too many tokens": (2, lambda b, r, g: _prepare(b, r, g, num_max_tokens_per_rank=6), _prepare, "at most 6 tokens"),
    "experts": (1, lambda b, r, g: _prepare(b, r, g, num_experts=13), _prepare, "a multiple of 3"),
    "alignment": (0, lambda b, r, g: _prepare(b, r, g, expert_alignment=0), _prepare, "expert_alignment=0"),
    "ids and handle": (0, lambda b, r, g: _cached(b, r, g, topk_idx=g.ids), _cached, "topk_idx and a handle"),
    "other experts": (2, lambda b, r, g: _cached(b, r, g, num_experts=24), _cached, "made with 12"),
    "scales": (1, lambda b, r, g: _cached(b, r, g, x=(g.x, g.x)), _cached, "scales of torch.bfloat16"),
    "rows of scales": (2, lambda b, r, g: _cached(b, r, g, x=_pair(g, 1)), _cached, "scales of shape [1, 1]"),
    "data of scales": (0, lambda b, r, g: _cached(b, r, g, x=(g.x, g.x.float())), _cached, "x of torch.bfloat16"),
    "fp8 back": (0, lambda b, r, g: _combine(b, r, g, x=_pair(g)), _combine, "x as a pair"),
    "cpu sync": (1, lambda b, r, g: _dispatch(b, r, g, do_cpu_sync=False), _dispatch, "do_cpu_sync=False without"),
    "cached cpu sync": (2, lambda b, r, g: _cached(b, r, g, do_cpu_sync=True), _cached, "do_cpu_sync=True with a"),
    "counted twice": (
        2,
        lambda b, r, g: _cached(b, r, g, cumulative_local_expert_recv_stats=g.ids[0].int()),
        _cached,
        "recv_stats with a handle",
    ),
    "event": (1, lambda b, r, g: _dispatch(b, r, g, previous_event=True), _dispatch, "previous_event is a bool"),
    "event of combine": (
        0,
        lambda b, r, g: _combine(b, r, g, previous_event_before_epilogue="now"),
        _combine,
        "previous_event_before_epilogue is a str",
    ),
    "expand in words": (2, lambda b, r, g: _dispatch(b, r, g, do_expand="yes"), _dispatch, "do_expand='yes'"),
    "padding": (0, lambda b, r, g: _dispatch(b, r, g, do_zero_padding=True), _dispatch, "do_zero_padding without"),
    "statistics": (
        0,
        lambda b, r, g: _dispatch(b, r, g, cumulative_local_expert_recv_stats=g.ids[0]),
        _dispatch,
        "cumulative_local_expert_recv_stats of torch.int64",
    ),
}
SPLIT: dict[str, tuple[int, Call, Call, str]] = {
    "num_experts": (1, lambda b, r, g: _prepare(b, r, g, num_experts=24), _prepare, "rank 0 12, rank 1 24"),
    "num_topk": (
        0,
        lambda b, r, g: _prepare(b, r, g, topk_idx=g.ids[:, :2].contiguous()),
        _prepare,
        "num_topk: rank 0 2, rank 1 3",
    ),
    "expand": (2, lambda b, r, g: _dispatch(b, r, g, do_expand=True), _dispatch, "rank 1 False, rank 2 True"),
    "aligned": (2, lambda b, r, g: _dispatch(b, r, g, expert_alignment=4), _dispatch, "expert_alignment: rank 0 1"),
    "bound": (0, lambda b, r, g: _dispatch(b, r, g, num_max_tokens_per_rank=8), _dispatch, "num_max_tokens_per_rank"),
    "hidden": (1, lambda b, r, g: _dispatch(b, r, g, x=g.x.repeat(1, 2)), _dispatch, "hidden: rank 0 40, rank 1 80"),
    "hidden of cached": (0, lambda b, r, g: _cached(b, r, g, x=g.x.repeat(1, 2)), _cached, "hidden: rank 0 80"),
    "dtype": (2, lambda b, r, g: _combine(b, r, g, x=g.recv_x.float()), _combine, "rank 2 torch.float32"),
    "weights given": (1, lambda b, r, g: _cached(b, r, g, topk_weights=g.weights), _cached, "rank 0 none given"),
    "weights of combine": (
        1,
        lambda b, r, g: _combine(b, r, g, topk_weights=torch.ones(g.recv_x.shape[0], 3)),
        _combine,
        "topk_weights: rank 0 none given, rank 1 torch.float32",
    ),
    "pair": (2, lambda b, r, g: _cached(b, r, g, x=_pair(g)), _cached, "dtype: rank 0 torch.bfloat16"),
    "columns of scales": (
        1,
        lambda b, r, g: _cached(b, r, g, x=_pair(g, columns=2)),
        lambda b, r, g: _cached(b, r, g, x=_pair(g)),
        "num_scales: rank 0 1, rank 1 2",
    ),
    "another call": (2, _combine, _cached, "call: rank 0 cached dispatch, rank 1 cached dispatch, rank 2 combine"),
    "another exchange": (0, _combine, _dispatch, "call: rank 0 combine, rank 1 dispatch"),
}  # fmt: skip


# Options of a buffer that rank 1 gives: those of the others are 8 tokens a rank and 20 s.
BUILDING: dict[str, tuple[dict[str, Any], str, str]] = {
    "negative": ({"num_topk": -1}, "UsageError", "num_topk=-1"),
    "not whole": ({"num_bytes": 100}, "UsageError", "a multiple of 2097152"),
    "backend": ({"backend": "nccl4"}, "UsageError", "backend 'nccl4'"),
    "device": ({"device": "bogus"}, "UsageError", "device='bogus'"),
    "timeout": ({"num_cpu_timeout_secs": -1}, "UsageError", "num_cpu_timeout_secs=-1"),
    "no time": ({"num_cpu_timeout_secs": "soon"}, "UsageError", "num_cpu_timeout_secs='soon'"),
    "bound": ({"num_max_tokens_per_rank": 9}, "CommError", "num_max_tokens_per_rank: rank 0 8, rank 1 9, rank 2 8"),
    "sums": ({"allow_multiple_reduction": False}, "CommError", "allow_multiple_reduction: rank 0 True, rank 1 False"),
    "seconds": ({"num_cpu_timeout_secs": 21}, "CommError", "num_cpu_timeout_secs: rank 0 20.0, rank 1 21.0"),
}


def _building(rank: int, backend: str) -> list[str]:
    """A mistake in building, with another buffer of the group alive and without."""
    wrong, good = [], {"backend": backend, "num_cpu_timeout_secs": 20, "num_max_tokens_per_rank": 8}
    for alive in (False, True):
        with ElasticBuffer(**good) if alive else contextlib.nullcontext():
            for name, (changes, kind, says) in BUILDING.items():
                start = time.monotonic()
                try:
                    ElasticBuffer(**(good | changes if rank == 1 else good))
                    wrong.append(f"building, {name}: no error")
                except MTMoEError as error:
                    text, wanted = str(error), kind if rank == 1 else "CommError"
                    named = rank == 1 or kind == "CommError" or "because of rank 1: " in text
                    if type(error).__name__ != wanted or says not in text or not named:
                        wrong.append(f"building, {name}: {type(error).__name__} {text}")
                if time.monotonic() - start > 5:
                    wrong.append(f"building, {name}: took {time.monotonic() - start:.1f} s")
    return wrong


def _misuse(rank: int, backend: str, seed: int) -> list[str]:
    wrong = _building(rank, backend)
    with (
        ElasticBuffer(backend=backend, num_cpu_timeout_secs=20) as buffer,
        ElasticBuffer(backend=backend, num_cpu_timeout_secs=20) as other,
    ):
        given = Inputs(rank, seed, buffer, other)
        for name, (at, bad, good, says) in (LOCAL | SPLIT).items():
            # Spoiled ids need a token; rank 1 has none by construction.
            wanted = "UsageError" if name in LOCAL and rank == at else "CommError"
            start = time.monotonic()
            try:
                _only(at, bad, good)(buffer, rank, given)
                wrong.append(f"{name}: no error")
            except MTMoEError as error:
                text = str(error)
                named = name in SPLIT or rank == at or f"because of rank {at}: " in text
                if type(error).__name__ != wanted or says not in text or not named:
                    wrong.append(f"{name}: {type(error).__name__} {text}")
            if time.monotonic() - start > 5:
                wrong.append(f"{name}: took {time.monotonic() - start:.1f} s")
            if name in ("bias", "dtype", "another exchange"):
                wrong += cases.run(buffer, replace(CASE, seed=seed + 1, do_expand=name == "bias"))
        wrong += cases.run(buffer, CASE)
    buffer.close()  # a second time
    for call in (_prepare, _dispatch, _combine):
        try:
            call(buffer, rank, given)
            wrong.append(f"{call.__name__} after close")
        except ClosedError:
            pass
    return wrong


@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_mistakes_raise_on_every_rank(backend: str, fresh_random_data: int) -> None:
    assert run_ranks(3, _misuse, backend, fresh_random_data, timeout=120.0) == [[], [], []]


def test_a_buffer_needs_a_group() -> None:
    with pytest.raises(UsageError, match="call init_process_group"):
        ElasticBuffer()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_max_tokens_per_rank": -1}, "num_max_tokens_per_rank=-1"),
        ({"hidden": 1.5}, "hidden=1.5"),
        ({"num_cpu_bytes": 8}, "num_cpu_bytes=8"),
        ({"num_bytes": 100}, "a multiple of 2097152"),
        ({"num_bytes": 0}, "num_bytes=0"),
    ],
)
def test_options_that_are_not_there(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ElasticBuffer(**options)
