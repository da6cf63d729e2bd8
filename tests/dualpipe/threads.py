"""A pipeline of threads: real executors over a transport in memory, which writes down the order of what happens."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comm_core.runtime.errors import CommTimeoutError
from dualpipe.actions import Action
from dualpipe.edges import Edge
from dualpipe.executor import Executor

WAIT = 20.0


class _Queues(dict[Any, "queue.Queue[Any]"]):
    """A queue for every key. A defaultdict makes two where two threads ask for a new one at the same time."""

    _lock = threading.Lock()

    def __getitem__(self, key: Any) -> queue.Queue[Any]:
        with self._lock:
            return self.setdefault(key, queue.Queue())


class Wires:
    """What connects the ranks: one queue for each payload and pair of ranks, and one for words."""

    def __init__(self) -> None:
        self.messages = _Queues()
        self.words = _Queues()


class Taken:
    """A posted receive. Tensors are copied, as a network does."""

    def __init__(self, p2p: MemoryP2P, action: Action, peer: int, edges: list[Edge]) -> None:
        self.p2p, self.action, self.peer, self.edges = p2p, action, peer, edges

    def wait(self) -> tuple[Tensor, ...]:
        self.p2p.log.append(("wait", str(self.action)))
        wire, tensors = self.p2p.wires.messages[self.action.payload, self.peer, self.p2p.rank], []
        for edge in self.edges:
            if torch.Size(edge.shape).numel():
                came = _get(wire, str(self.action))
                assert (tuple(came.shape), came.dtype) == (tuple(edge.shape), edge.dtype), "bytes would be misread"
                assert came.is_contiguous()
                tensors.append(came.clone())
                del came
            else:
                tensors.append(torch.empty(edge.shape, dtype=edge.dtype))
        return tuple(tensors)


def _get(wire: queue.Queue[Any], what: str) -> Any:
    try:
        return wire.get(timeout=WAIT)
    except queue.Empty:
        raise CommTimeoutError(f"{what}: nothing came") from None


class MemoryP2P:
    """Stands for `dualpipe.p2p.PeerToPeer`; `log` holds (what, action, ...) in order."""

    def __init__(self, wires: Wires, rank: int, num_ranks: int) -> None:
        self.wires, self.rank, self.num_ranks = wires, rank, num_ranks
        self.device = torch.device("cpu")
        self.log: list[tuple[Any, ...]] = []

    def send(self, action: Action, peer: int, tensors: Any) -> None:
        self.log.append(("send", str(action), [tuple(tensor.shape) for tensor in tensors]))
        for tensor in tensors:
            if tensor.numel():
                self.wires.messages[action.payload, self.rank, peer].put(tensor.detach().contiguous())

    def post(self, action: Action, peer: int, edges: Any) -> Taken:
        self.log.append(("post", str(action)))
        return Taken(self, action, peer, list(edges))

    def tell(self, what: str, peer: int, words: list[int]) -> None:
        self.log.append(("tell", what, list(words)))
        self.wires.words[self.rank, peer].put(list(words))

    def hear(self, what: str, peer: int, number: int) -> list[int]:
        self.log.append(("hear", what))
        words: list[int] = _get(self.wires.words[peer, self.rank], what)
        assert len(words) == number
        return words

    def release(self, *_: Any) -> None:
        pass

    def connect_ring(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self, **_: Any) -> None:
        pass


def run_threads(num_ranks: int, fn: Callable[[int, Executor, MemoryP2P], Any]) -> list[Any]:
    """Calls `fn(rank, executor, p2p)` in a thread a rank; results in their order, errors instead where it raised."""
    wires, answers = Wires(), [None] * num_ranks
    executors = []
    for rank in range(num_ranks):
        p2p = MemoryP2P(wires, rank, num_ranks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dualpipe.executor.PeerToPeer", lambda *_, p2p=p2p, **__: p2p)
            executors.append((Executor(None), p2p))

    def work(rank: int) -> None:
        try:
            answers[rank] = fn(rank, *executors[rank])
        except Exception as error:
            answers[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=4 * WAIT)
        assert not thread.is_alive()
    return answers
