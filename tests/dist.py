"""Runs a function on several fresh processes joined in one gloo group, and reports every rank that failed.

The processes are forked from a server that has imported torch and little else: it has no threads and has touched no
device, so a process costs milliseconds instead of the seconds of an import. `tests.pool` has processes that stay.
"""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "numpy", "pytest", "hypothesis", "psutil"])


class RankFailure(AssertionError):
    """Some ranks raised, died or did not finish; the message holds the traceback of each."""


def call_in_group(
    rank: int, num_ranks: int, store: str, timeout: float, fn: Callable[..., Any], args: Any
) -> tuple[bool, Any]:
    """Calls `fn(rank, *args)` inside a gloo group that is gone afterwards: (True, result) or (False, traceback)."""
    torch.set_num_threads(1)
    try:
        # A file store needs no port, so that parallel test runs can not collide.
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout)
        )
        _meet(num_ranks, timeout)
        return True, fn(rank, *args)
    except BaseException:
        return False, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(num_ranks: int, timeout: float) -> None:
    """Returns when all ranks are connected: one that is done sooner would close what others are about to connect to."""
    store, end = distributed_c10d._get_default_store(), time.monotonic() + timeout
    store.add("connected", 1)
    while store.add("connected", 0) < num_ranks:
        if time.monotonic() > end:
            raise TimeoutError(f"not all of {num_ranks} ranks have connected within {timeout:g} s")
        time.sleep(2e-3)


def failure(
    answers: dict[int, tuple[bool, Any]], num_ranks: int, exit_code: Callable[[int], int | None]
) -> RankFailure | None:
    """What to raise for the ranks that failed or gave no answer; None where all are good."""
    problems = [f"--- rank {rank}\n{value}" for rank, (good, value) in sorted(answers.items()) if not good]
    problems += [
        f"--- rank {rank}: no answer (exit code {exit_code(rank)})" for rank in range(num_ranks) if rank not in answers
    ]
    return RankFailure("\n".join(["", *problems])) if problems else None


def _child(rank: int, num_ranks: int, store: str, timeout: float, fn: Callable[..., Any], args: Any, out: Any) -> None:
    out.put((rank, *call_in_group(rank, num_ranks, store, timeout, fn, args)))


def run_ranks(
    num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, lost: Collection[int] = ()
) -> list[Any]:
    """Calls `fn(rank, *args)` on `num_ranks` fresh processes and returns their results by rank.

    Args:
        num_ranks: size of the gloo group that each process finds initialised.
        fn: a module-level function; its result must be picklable (return plain numbers or CPU tensors' copies).
        timeout: seconds after which every process still running is killed and reported.
        lost: ranks that end their process and do not answer: their result is the exit code. Those that still run when
            all others have answered are killed.

    Raises:
        RankFailure: with the traceback of every rank that raised and the name of every rank that gave no answer.
    """
    out = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        children = [
            CONTEXT.Process(target=_child, args=(rank, num_ranks, store, timeout, fn, args, out), daemon=True)
            for rank in range(num_ranks)
        ]
        for child in children:
            child.start()
        awaited = set(range(num_ranks)) - set(lost)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while awaited - set(answers) and time.monotonic() < deadline:
            try:
                rank, good, value = out.get(timeout=0.2)
                answers[rank] = (good, value)
                if not good:
                    # Peers of a failed rank may wait for it: give them a moment to report, no more.
                    deadline = min(deadline, time.monotonic() + 5.0)
            except queue.Empty:
                if all(not child.is_alive() for child in children) and out.empty():
                    break
        for rank, child in enumerate(children):
            child.join(timeout=10.0 if rank in answers and len(answers) >= len(awaited) else 0.5)
            if child.is_alive():
                child.kill()
                child.join()
    for rank in set(lost) - set(answers):
        answers[rank] = (True, children[rank].exitcode)
    problem = failure(answers, num_ranks, lambda rank: children[rank].exitcode)
    if problem is not None:
        raise problem
    return [answers[rank][1] for rank in range(num_ranks)]
