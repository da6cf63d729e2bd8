"""Mistakes and lost ranks in the experimental calls: every rank raises, nobody waits, the buffer works on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core import ElasticBuffer
from comm_core.backends import registry
from comm_core.runtime.errors import CommError, CommTimeoutError, UsageError
from tests.comm_core import cases, experimental_cases
from tests.comm_core.experimental_cases import expect_error
from tests.dist import RankFailure
from tests.dist import run_ranks as run_fresh_ranks
from tests.pool import run_ranks

BACKENDS = registry.names_for("cpu")

# name: (rank at fault, its call, the call of the others, what every message must say)
Call = Callable[[ElasticBuffer], Any]
BF = torch.zeros(4, 8).bfloat16()
FP8 = torch.zeros(4, 8).to(torch.float8_e4m3fn)
INDEX = torch.zeros(3, 2, dtype=torch.int32)
SCALES = torch.ones(12, 1)


def _write(buffer: ElasticBuffer) -> None:
    buffer.engram_write(BF)


def _fetch(buffer: ElasticBuffer) -> Any:
    return buffer.engram_fetch(INDEX)()


def _configure(buffer: ElasticBuffer) -> None:
    buffer.agrs_set_config(1024, 2)


def _pipes(buffer: ElasticBuffer) -> None:
    buffer.pp_set_config(64, 2)


def _session(call: Call) -> Call:
    """The call in a session of its own, and its handles."""

    def within(buffer: ElasticBuffer) -> None:
        with buffer.agrs_new_session():
            found = call(buffer)
            if isinstance(found, tuple) and callable(found[-1]):
                found[-1]()

    return within


def _gather(*shape: int) -> Call:
    return _session(lambda buffer: buffer.all_gather(torch.zeros(shape or (4,))))


def _one_too_many(buffer: ElasticBuffer) -> Any:
    return [buffer.all_gather(torch.zeros(4))[1] for _ in range(3)][-1]()


def _out_of_turn(buffer: ElasticBuffer) -> Any:
    return buffer.all_gather(buffer.agrs_get_inplace_tensor(((4,), (4,)), torch.float32)[1])


def _in_a_session(call: Call) -> Call:
    return _session(lambda buffer: call(buffer))


LOCAL: dict[str, tuple[int, Call, Call, str]] = {
    "dtype": (1, lambda b: b.engram_write(BF.float()), _write, "storage of torch.float32"),
    "no scales": (0, lambda b: b.engram_write(FP8), _write, "float8_e4m3fn without sf"),
    "scales": (2, lambda b: b.engram_write(BF, SCALES), _write, "bfloat16 with sf"),
    "rows of scales": (1, lambda b: b.engram_write(FP8, SCALES[:4]), _write, "sf of shape [4, 1]; allowed: [12, 1]"),
    "nothing stored": (1, lambda b: b.engram_write(BF[:0]), _write, "an entry at least"),
    "strided": (0, lambda b: b.engram_write(BF[:, ::2]), _write, "contiguous"),
    "tensor bytes": (1, lambda b: b.pp_set_config(0, 1), _pipes, "num_max_tensor_bytes=0"),
    "in flight": (2, lambda b: b.pp_set_config(64, True), _pipes, "num_max_inflight_tensors=True"),
    "session bytes": (0, lambda b: b.agrs_set_config(-1, 1), _configure, "num_max_session_bytes=-1"),
    "all-gathers": (1, lambda b: b.agrs_set_config(1024, 33), _configure, "at most 32"),
    "configured inside": (
        2,
        _in_a_session(lambda b: b.agrs_set_config(1024, 2)),
        _in_a_session(lambda b: b.all_gather(torch.zeros(4))),
        "agrs_set_config in a session",
    ),
    "twice": (0, _in_a_session(lambda b: b.create_agrs_session()), _gather(), "a session in a session"),
    "no session": (1, lambda b: b.all_gather(torch.zeros(4)), lambda b: b.create_agrs_session(), "without a session"),
    "no end": (2, lambda b: b.destroy_agrs_session(), lambda b: b.create_agrs_session(), "without a session"),
    "no place": (0, lambda b: b.agrs_get_inplace_tensor((4,), BF.dtype), _configure, "without a session"),
    "nothing": (1, _session(lambda b: b.all_gather([])), _gather(), "all_gather of nothing"),
    "strided part": (2, _session(lambda b: b.all_gather(torch.zeros(8)[::2])), _gather(), "contiguous"),
    "too large": (0, _gather(96), _gather(), "1152 bytes in a session; allowed: 1024"),
    "too large a place": (
        1, _session(lambda b: b.agrs_get_inplace_tensor((96,), torch.float32)), _gather(), "1152 bytes in a session",
    ),
    "a bad shape": (2, _session(lambda b: b.agrs_get_inplace_tensor((-1,), BF.dtype)), _gather(), "a size in shapes"),
    "out of turn": (0, _session(_out_of_turn), _gather(), "the next place, or other memory"),
}  # fmt: skip
SPLIT: dict[str, tuple[int, Call, Call, str]] = {
    "entries": (1, lambda b: b.engram_write(BF[:3]), _write, "num_entries: rank 0 4, rank 1 3"),
    "hidden": (0, lambda b: b.engram_write(BF.view(4, 8)[:, :4].contiguous()), _write, "hidden: rank 0 4, rank 1 8"),
    "stored dtype": (2, lambda b: b.engram_write(FP8, SCALES), _write, "rank 2 torch.float8_e4m3fn"),
    "sizes of tensors": (0, lambda b: b.pp_set_config(65, 2), _pipes, "num_max_tensor_bytes: rank 0 65, rank 1 64"),
    "sizes of sessions": (2, lambda b: b.agrs_set_config(992, 2), _configure, "num_max_session_bytes: rank 0 1024"),
    "part": (1, _gather(5), _gather(), "tensor_bytes: rank 0 16, rank 1 20, rank 2 16"),
    "another call": (2, _write, _configure, "call: rank 0 agrs_set_config, rank 1 agrs_set_config, rank 2 e"),
}  # fmt: skip


def _mistakes(rank: int, backend: str, seed: int) -> list[str]:
    bad = []
    with ElasticBuffer(backend=backend, num_cpu_timeout_secs=20) as buffer:
        for call, says in (
            (buffer.create_agrs_session, "a session before agrs_set_config"),
            (lambda: buffer.engram_fetch(INDEX), "engram_fetch before engram_write"),
            (lambda: buffer.pp_send(torch.zeros(8), 0), "pp_send before pp_set_config"),
        ):
            bad += expect_error(UsageError, says, call)
        for prepare in (_write, _configure, _pipes):
            prepare(buffer)
        for name, (at, wrong, right, says) in (LOCAL | SPLIT).items():
            kind = UsageError if name in LOCAL and rank == at else CommError
            found = expect_error(kind, says, lambda call=wrong if rank == at else right: call(buffer))
            bad += [f"{name}: {item}" for item in found]
            buffer._sessions.give_up()  # of calls that began one
        bad += _mistakes_in_a_session(rank, buffer) + _mistakes_of_a_fetch(rank, buffer)
        bad += experimental_cases.sessions(buffer, seed, num_tensors=8) + experimental_cases.engram(buffer, seed)
        bad += _mistakes_of_messages(rank, buffer) + experimental_cases.pipeline(buffer, seed, num_messages=10)
        bad += cases.run(buffer, cases.Case(seed, (5, 0, 7), 40, 3, 4, torch.bfloat16))
    return bad


def _mistakes_in_a_session(rank: int, buffer: ElasticBuffer) -> list[str]:
    """All ranks ask too much; one refused call spoils a session, and the next is good again."""
    bad = []
    with buffer.agrs_new_session():
        bad += expect_error(UsageError, "all_gather 3 of a session; allowed: 2", lambda: _one_too_many(buffer))
    buffer.create_agrs_session()
    part = torch.zeros(4 if rank else 8)
    bad += expect_error(CommError, "disagree on tensor_bytes", lambda: buffer.all_gather(part)[1]())
    bad += expect_error(UsageError, "in which one was refused", lambda: buffer.all_gather(part))
    bad += expect_error(UsageError, "in which one was refused", lambda: buffer.agrs_get_inplace_tensor((1,), BF.dtype))
    buffer.destroy_agrs_session()
    with buffer.agrs_new_session():
        gathered, handle = buffer.all_gather(torch.full((4,), rank))
        handle()
        bad += [] if gathered[:, 0].tolist() == [0, 1, 2] else ["after a spoiled session"]
    return bad


def _mistakes_of_a_fetch(rank: int, buffer: ElasticBuffer) -> list[str]:
    """Told to the others where they take part."""
    bad = []
    one_sided = buffer._backend.capabilities.one_sided_reads
    for wrong, says in (
        (INDEX.long(), "indices of torch.int64"),
        (INDEX - 1, "an entry number of -1; allowed: 0 to 11"),
        (INDEX + 12, "an entry number of 12"),
        (INDEX.t(), "contiguous"),
    ):
        if rank == 1:
            bad += expect_error(UsageError, says, lambda wrong=wrong: buffer.engram_fetch(wrong))
        elif not one_sided:
            bad += expect_error(CommError, says, lambda: _fetch(buffer))
        else:
            bad += [] if _fetch(buffer)[0].shape == (3, 16) else ["fetch"]
    return bad


def _mistakes_of_messages(rank: int, buffer: ElasticBuffer) -> list[str]:
    """A sender's mistake reaches the receiver; the next message is good."""
    bad = []
    _pipes(buffer)
    peer = 1 - rank
    if rank == 2:
        for to in (2, 3, -1, "0"):
            bad += expect_error(UsageError, "a neighbour in the ring: 0 or 1", lambda to=to: buffer.pp_send(BF, to))
            bad += expect_error(UsageError, f"src_rank_idx={to!r}", lambda to=to: buffer.pp_recv(BF, to))
        return bad
    for wrong, says in (
        (torch.zeros(9), "36 bytes; allowed: a multiple of 32"),
        (torch.zeros(32), "128 bytes; allowed: at most 64"),
        (torch.zeros(32)[::2], "contiguous"),
        ("text", "t is a str"),
    ):
        t = torch.zeros(16)
        if rank == 0:
            bad += expect_error(UsageError, says, lambda wrong=wrong: buffer.pp_send(wrong, peer))
            buffer.pp_send(torch.full((16,), 7.0), peer)
            bad += expect_error(UsageError, says, lambda wrong=wrong: buffer.pp_recv(wrong, peer))
        else:
            bad += expect_error(CommError, "it was not sent, because of t ", lambda t=t: buffer.pp_recv(t, peer))
            buffer.pp_recv(t, peer)
            bad += [] if bool((t == 7).all()) else ["the message after one that was refused"]
    if rank == 0:
        buffer.pp_send(torch.ones(8), peer)
        buffer.pp_send(torch.ones(16), peer)
    else:
        t = torch.zeros(16)
        bad += expect_error(
            UsageError, "into a tensor of 64 bytes; allowed: 32 bytes, as sent", lambda: buffer.pp_recv(t, 0)
        )
        buffer.pp_recv(t, 0)
        bad += [] if bool((t == 1).all()) else ["the message after one of another size"]
    return bad


@pytest.mark.parametrize("backend", BACKENDS)
def test_mistakes_raise_on_every_rank(backend: str, fresh_random_data: int) -> None:
    assert run_ranks(3, _mistakes, backend, fresh_random_data) == [[], [], []]


def _lost(rank: int, backend: str, folder: str) -> None:
    """A rank that comes late, and one that ends in the middle; afterwards a new buffer works."""
    bad: list[str] = []
    buffer = ElasticBuffer(backend=backend, num_cpu_timeout_secs=2)
    _pipes(buffer)
    if rank == 2:
        time.sleep(3.0)
    else:
        bad += expect_error(CommTimeoutError, "from rank 2", lambda: buffer.pp_recv(torch.zeros(8), 2), 4.0)
        bad += expect_error(CommError, "build a new one", lambda: buffer.pp_send(torch.zeros(8), 2), 2.0)
    buffer._backend.close(collective=False)
    dist.barrier()
    buffer = ElasticBuffer(backend=backend, num_cpu_timeout_secs=20)
    bad += experimental_cases.pipeline(buffer, 5, num_messages=6)
    _pipes(buffer)
    _configure(buffer)
    buffer.create_agrs_session()
    if rank == 2:
        os._exit(7)
    if rank == 0:
        bad += expect_error(CommTimeoutError, "rank 2", lambda: buffer.pp_recv(torch.zeros(8), 2))
    else:
        bad += expect_error(CommTimeoutError, "rank", lambda: buffer.all_gather(torch.zeros(4))[1]())
    buffer.close()
    bad += [f"thread {item.name}" for item in threading.enumerate() if item.name.startswith("ep-")]
    Path(folder, str(rank)).write_text("\n".join(bad) or "good")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_is_lost(backend: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"rank 2: no answer \(exit code 7\)"):
        run_fresh_ranks(3, _lost, backend, str(tmp_path))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "good", "1": "good"}
