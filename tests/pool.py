"""Ranks that stay: processes kept through a whole test run, so that a test pays for its work and not for imports.

`run_ranks` here has the contract of `tests.dist.run_ranks`, with a group of its own for each call, but on processes
that the next call uses again. A call that fails costs its processes: what a failed rank left behind nobody knows, so
they are killed and made again when next needed. Tests that kill ranks, or that look at what a process leaves behind,
take the fresh processes of `tests.dist`.

Nothing here knows of devices: `fn` puts its rank on a device where it wants one (`comm_core.runtime.device.of`), so any
number of ranks may share one. Start a run that has little memory with few ranks: the pool grows to the largest call.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.dist import CONTEXT, RankFailure, call_in_group, failure


def _resident(pipe: Connection) -> None:
    """One rank: calls what it is sent until the other end closes."""
    while True:
        try:
            rank, num_ranks, store, timeout, fn, args = pipe.recv()
        except EOFError:
            return
        answer = call_in_group(rank, num_ranks, store, timeout, fn, args)
        try:
            pipe.send(answer)
        except Exception:  # a result that can not be pickled
            pipe.send((False, traceback.format_exc()))


class Pool:
    """Resident ranks. Calls are made one at a time."""

    def __init__(self) -> None:
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    @property
    def num_ranks(self) -> int:
        """Processes that are there now."""
        return len(self._ranks)

    @property
    def processes(self) -> list[int]:
        """Their process numbers."""
        return [process.pid or 0 for process, _ in self._ranks]

    def run(self, num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Calls `fn(rank, *args)` on the first `num_ranks` processes, joined in a new gloo group.

        Args:
            num_ranks: size of the group; missing processes are started.
            fn: a module-level function; its result must be picklable.
            timeout: seconds after which the processes are killed and those without an answer reported.

        Raises:
            RankFailure: with the traceback of every rank that raised and the name of every rank that gave no answer.
        """
        while len(self._ranks) < num_ranks:
            self._start()
        ranks = self._ranks[:num_ranks]
        try:
            with tempfile.TemporaryDirectory() as folder:
                answers = self._answers(ranks, str(Path(folder) / "store"), fn, args, timeout)
        except BaseException:  # interrupted, by the timeout of a test perhaps: answers are still to come
            self._drop(num_ranks)
            raise
        problem = failure(answers, num_ranks, lambda rank: self._ended(ranks[rank][0]))
        if problem is not None:
            self._drop(num_ranks)
            raise problem
        return [answers[rank][1] for rank in range(num_ranks)]

    def close(self) -> None:
        """Ends all processes; the next call starts new ones."""
        self._drop(len(self._ranks))

    def _start(self) -> None:
        own, other = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_resident, args=(other,), name=f"rank-{len(self._ranks)}", daemon=True)
        process.start()
        other.close()
        self._ranks.append((process, own))

    @staticmethod
    def _answers(
        ranks: list[tuple[BaseProcess, Connection]], store: str, fn: Callable[..., Any], args: Any, timeout: float
    ) -> dict[int, tuple[bool, Any]]:
        waiting: dict[Any, int] = {}
        for rank, (_, pipe) in enumerate(ranks):
            pipe.send((rank, len(ranks), store, timeout, fn, args))
            waiting[pipe] = rank
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    good = False  # the process is gone
                else:
                    good = answers[rank][0]
                if not good:
                    # Peers of a failed rank may wait for it: give them a moment to report, no more.
                    deadline = min(deadline, time.monotonic() + 5.0)
        return answers

    @staticmethod
    def _ended(process: BaseProcess) -> int | None:
        process.join(0.5)
        return process.exitcode

    def _drop(self, num_ranks: int) -> None:
        for process, pipe in self._ranks[:num_ranks]:
            pipe.close()
            process.kill()
            process.join()
        del self._ranks[:num_ranks]


# One for each process: xdist's workers have one each, and a fork of the owner has none.
_pools: dict[int, Pool] = {}


def shared() -> Pool:
    """The pool of this process, ended with it."""
    pool = _pools.get(os.getpid())
    if pool is None:
        pool = _pools[os.getpid()] = Pool()
        atexit.register(pool.close)
    return pool


def run_ranks(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """`Pool.run` on the shared pool: `tests.dist.run_ranks` on processes that stay."""
    return shared().run(num_ranks, fn, *args, timeout=timeout)


__all__ = ["Pool", "RankFailure", "run_ranks", "shared"]
