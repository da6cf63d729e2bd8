"""Tensors between neighbouring pipeline ranks, without tags and without one message overtaking another.

NCCL (and MCCL) has no tags and runs the operations of a communicator in order. With one communicator, a send of an
activation waits behind a receive of a gradient whose sender waits for that activation: a deadlock. With one for each
direction, a rank of the V that sends an activation of one stage and a gradient of the other to the same neighbour has
them received in the wrong order. Four communicators, payload (activation, gradient) x direction (to the next, to the
previous rank), have neither problem; `validate` proves it for a given schedule. gloo runs the same way.

A fifth group moves whole numbers between the processes themselves, on the CPU and always over gloo: what the ranks
agree on (`hops`) must be read by the host, and a read of device memory would make it wait for the device.

Sends are posted right after the computation and never waited for before they must be: tensors are kept alive until
their send is done, and no longer. With NCCL that is looked up whenever something is posted; gloo tells only those who
wait, so there an activation is kept until its gradient comes back, a gradient until the step ends. A receive is posted
and waited for at two points of a step (`steps`).

Waits are bounded by the groups' timeout. With gloo the waiting rank raises; with NCCL a wait is an entry in the stream,
and torch's watchdog ends the process when the timeout has passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from comm_core.runtime.errors import ClosedError, CommError, CommTimeoutError
from comm_core.runtime.groups import private_groups
from dualpipe.actions import Action, Payload, StageKey
from dualpipe.edges import Edge

_CONTROL = "gloo"


@dataclass(slots=True)
class _Sent:
    """A send under way; holding the tensor keeps its memory from being used again too early."""

    action: Action
    peer: int
    work: Any
    tensor: Tensor


class Posted(Protocol):
    """A receive under way."""

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, ready for the current stream.

        Raises:
            CommTimeoutError: nothing came in time. CommError: the peer is gone.
        """
        ...


@dataclass(slots=True)
class _Posted:
    """A receive under way on real communicators."""

    p2p: PeerToPeer
    action: Action
    peer: int
    works: list[Any]
    tensors: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        with self.p2p.errors(str(self.action), self.peer):
            for work in self.works:
                work.wait()
        return self.tensors


def direction_of(source: int, target: int) -> str:
    """Which way a message goes: "down" to a later rank, "up" to an earlier one."""
    return "down" if source < target else "up"


class PeerToPeer:
    """The private groups of one pipeline and the sends under way on them.

    Args:
        group: the pipeline's ranks, in pipeline order; None for a pipeline of one process without any group.
        timeout: bound of every wait.
        device: where the tensors live; by default the CPU for gloo, else the current accelerator.
        rank_mapping: `rank_mapping[rank in the group]` is the rank in the pipeline; the same by default.

    Construction is collective over the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        timeout: timedelta,
        device: torch.device | None = None,
        rank_mapping: Sequence[int] | None = None,
    ) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self._timeout = timeout
        self._closed = self._ring = False
        self._sent: dict[tuple[Payload | None, StageKey, int], list[_Sent]] = {}
        self._told: list[tuple[Any, Tensor, str, int]] = []
        self._groups: dict[tuple[Payload, str], dist.ProcessGroup] = {}
        self._control: dist.ProcessGroup | None = None
        self._global: list[int] = []
        self.device = device or torch.device("cpu")
        if group is not None and self.num_ranks > 1:
            self._global = dist.get_process_group_ranks(group)
            if rank_mapping is not None:
                self.rank = rank_mapping[self.rank]
                places = dict(zip(rank_mapping, self._global, strict=True))
                self._global = [places[rank] for rank in range(self.num_ranks)]
            names = [(payload, way) for payload in Payload for way in ("down", "up")]
            backends = [dist.get_backend(group)] * len(names) + [_CONTROL]
            *groups, self._control = private_groups(group, len(backends), timeout=timeout, backends=backends)
            self._groups = dict(zip(names, groups, strict=True))
            self.device = device or _device_of(group)
            self._connect(self.device)

    def _connect(self, device: torch.device) -> None:
        """Sends one byte over every link, since NCCL connects a pair at its first message and blocks both sides there.

        Odd ranks receive first, so that the chain of neighbours can not wait in a circle.
        """
        for payload, way in self._groups:
            step = 1 if way == "down" else -1
            target, source = self.rank + step, self.rank - step
            sends = [target] if 0 <= target < self.num_ranks else []
            receives = [source] if 0 <= source < self.num_ranks else []
            work, byte = None, torch.zeros(1, dtype=torch.uint8, device=device)
            with self.errors(f"connecting ({payload}, {way})", target if sends else source):
                if sends and self.rank % 2 == 0:
                    work = dist.isend(byte, self._global[target], group=self._groups[payload, way])
                for peer in receives:
                    other = torch.empty_like(byte)
                    dist.recv(other, self._global[peer], group=self._groups[payload, way])
                if sends and self.rank % 2 == 1:
                    work = dist.isend(byte, self._global[target], group=self._groups[payload, way])
                if work is not None:
                    work.wait()

    def connect_ring(self) -> None:
        """Connects the last rank with the first one: interleaved schedules go round. Collective; done once.

        Neighbours are connected at construction; with two ranks these are all.
        """
        ends = (0, self.num_ranks - 1)
        if self._ring or self.num_ranks <= 2 or self.rank not in ends:
            return
        self._ring = True
        for (payload, way), group in self._groups.items():
            if (payload is Payload.ACTIVATION) != (way == "up"):
                continue  # activations go from the last rank to the first one, gradients back
            source, target = ends if way == "down" else ends[::-1]
            peer, byte = ends[self.rank == 0], torch.zeros(1, dtype=torch.uint8, device=self.device)
            with self.errors(f"connecting ({payload}, {way})", peer):
                if self.rank == source:
                    dist.send(byte, self._global[target], group=group)
                else:
                    dist.recv(byte, self._global[source], group=group)

    def send(self, action: Action, peer: int, tensors: Sequence[Tensor]) -> None:
        """Posts the SEND `action` of `tensors` to pipeline rank `peer` and returns at once."""
        self._check_open(action)
        self._drop_done()
        sent = self._sent.setdefault((action.payload, action.key, action.microbatch), [])
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            if tensor.numel():
                with self.errors(str(action), peer):
                    work = dist.isend(tensor, self._global[peer], group=self._group(action, self.rank, peer))
                sent.append(_Sent(action, peer, work, tensor))

    def post(self, action: Action, peer: int, edges: Sequence[Edge]) -> Posted:
        """Posts the receives of what the RECV `action` names from pipeline rank `peer` and returns at once.

        Returns:
            What to wait for; it gives new tensors as `edges` say.
        """
        self._check_open(action)
        self._drop_done()
        tensors = tuple(torch.empty(edge.shape, dtype=edge.dtype, device=edge.device) for edge in edges)
        works = []
        with self.errors(str(action), peer):
            for tensor in tensors:
                if tensor.numel():
                    works.append(dist.irecv(tensor, self._global[peer], group=self._group(action, peer, self.rank)))
        return _Posted(self, action, peer, [work for work in works if work is not None], tensors)

    def tell(self, what: str, peer: int, words: Sequence[int]) -> None:
        """Sends whole numbers to the process of pipeline rank `peer` and returns at once. Heard in the same order."""
        tensor = torch.tensor(words, dtype=torch.int64)
        with self.errors(what, peer):
            work = dist.isend(tensor, self._global[peer], group=self._control)
        self._told.append((work, tensor, what, peer))

    def hear(self, what: str, peer: int, number: int) -> list[int]:
        """Waits for `number` whole numbers that `peer` tells this process."""
        tensor = torch.empty(number, dtype=torch.int64)
        with self.errors(what, peer):
            dist.recv(tensor, self._global[peer], group=self._control)
        words: list[int] = tensor.tolist()
        return words

    def release(self, payload: Payload, key: StageKey, microbatch: int) -> None:
        """Frees a sent tensor that has provably arrived (its gradient came back); nothing to do where none was sent."""
        if (payload, key, microbatch) in self._sent:
            self._finish((payload, key, microbatch))

    def finish(self) -> None:
        """Waits until every send is done."""
        for key in list(self._sent):
            self._finish(key)
        told, self._told = self._told, []
        for work, _, what, peer in told:
            with self.errors(what, peer):
                work.wait()

    def close(self, *, abort: bool = False) -> None:
        """Gives the groups back. `abort` does so with operations under way, which makes gloo peers fail at once."""
        self._closed = True
        self._sent.clear()
        self._told.clear()
        groups, self._groups = [*self._groups.values(), *filter(None, [self._control])], {}
        self._control = None
        for group in groups:
            if abort:
                with contextlib.suppress(RuntimeError, ValueError, AttributeError):
                    group.abort()
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)

    def _finish(self, key: tuple[Payload | None, StageKey, int]) -> None:
        for sent in self._sent.pop(key):
            if sent.work is not None:
                with self.errors(str(sent.action), sent.peer):
                    sent.work.wait()

    def _drop_done(self) -> None:
        """Lets go of the tensors whose sends are known to be done."""
        for key, sent in list(self._sent.items()):
            if all(one.work is not None and one.work.is_completed() for one in sent):
                self._finish(key)

    def _group(self, action: Action, source: int, target: int) -> dist.ProcessGroup:
        assert action.payload is not None
        return self._groups[action.payload, direction_of(source, target)]

    def _check_open(self, action: Action) -> None:
        if self._closed:
            raise ClosedError(f"{action}: the pipeline was closed; make a new one")

    @contextlib.contextmanager
    def errors(self, what: str, peer: int) -> Iterator[None]:
        """Turns a backend's error into one that names the action, this rank and the peer."""
        try:
            yield
        except CommError:
            raise
        except RuntimeError as error:
            text = str(error)
            if "timed out" in text.lower() or "timeout" in text.lower():
                raise CommTimeoutError(
                    f"{what} on pipeline rank {self.rank}: no answer from pipeline rank {peer} within "
                    f"{self._timeout.total_seconds():g} s; look at the output of rank {peer} for its first error"
                ) from error
            raise CommError(
                f"{what} on pipeline rank {self.rank} failed with pipeline rank {peer}; look at the output of rank "
                f"{peer} for its first error ({text.splitlines()[0] if text else type(error).__name__})"
            ) from error


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors of a group's backend live: the CPU for gloo, the current accelerator device otherwise."""
    accelerator = torch.accelerator.current_accelerator()
    if dist.get_backend(group) == "gloo" or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
