"""Tensors between neighbouring pipeline ranks, without tags and without one message overtaking another.

NCCL (and MCCL) has no tags and runs the operations of a communicator in order. With one communicator, a send of an
activation waits behind a receive of a gradient whose sender waits for that activation: a deadlock. With one for each
direction, a rank of the V that sends an activation of one stage and a gradient of the other to the same neighbour has
them received in the wrong order. Four communicators, payload (activation, gradient) x direction (to the next, to the
previous rank), have neither problem; `validate` proves it for a given schedule. gloo runs the same way.

Sends are posted right after the computation and never waited for before they must be: tensors are kept alive until
their send is done. Receives are posted just before the computation that needs them.

Waits are bounded by the groups' timeout. With gloo the waiting rank raises; with NCCL a wait is an entry in the stream,
and torch's watchdog ends the process when the timeout has passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comm_core.runtime.errors import ClosedError, CommError, CommTimeoutError
from comm_core.runtime.groups import private_groups
from dualpipe.actions import Action, Payload, StageKey


@dataclass(frozen=True, slots=True)
class Edge:
    """Shape, dtype and device of a tensor that crosses between two ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class _Sent:
    """A send under way; holding the tensor keeps its memory from being used again too early."""

    action: Action
    peer: int
    work: Any
    tensor: Tensor


def direction_of(source: int, target: int) -> str:
    """Which way a message goes: "down" to a later rank, "up" to an earlier one."""
    return "down" if source < target else "up"


class PeerToPeer:
    """The four private groups of one pipeline and the sends under way on them.

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
        self._sent: dict[tuple[Payload | None, StageKey, int], _Sent] = {}
        self._groups: dict[tuple[Payload, str], dist.ProcessGroup] = {}
        self._global: list[int] = []
        if group is not None and self.num_ranks > 1:
            self._global = dist.get_process_group_ranks(group)
            if rank_mapping is not None:
                self.rank = rank_mapping[self.rank]
                places = dict(zip(rank_mapping, self._global, strict=True))
                self._global = [places[rank] for rank in range(self.num_ranks)]
            names = [(payload, way) for payload in Payload for way in ("down", "up")]
            self._groups = dict(zip(names, private_groups(group, len(names), timeout=timeout), strict=True))
            self._device = device or _device_of(group)
            self._connect(self._device)

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
            with self._errors(f"connecting ({payload}, {way})", target if sends else source):
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
            peer, byte = ends[self.rank == 0], torch.zeros(1, dtype=torch.uint8, device=self._device)
            with self._errors(f"connecting ({payload}, {way})", peer):
                if self.rank == source:
                    dist.send(byte, self._global[target], group=group)
                else:
                    dist.recv(byte, self._global[source], group=group)

    def send(self, action: Action, peer: int, tensor: Tensor) -> None:
        """Posts the SEND `action` of `tensor` to pipeline rank `peer` and returns at once."""
        self._check_open(action)
        tensor = tensor.detach().contiguous()
        with self._errors(str(action), peer):
            work = dist.isend(tensor, self._global[peer], group=self._group(action, self.rank, peer))
        self._sent[action.payload, action.key, action.microbatch] = _Sent(action, peer, work, tensor)
        for key in [key for key, sent in self._sent.items() if sent.work is not None and sent.work.is_completed()]:
            self._finish(key)

    def recv(self, action: Action, peer: int, edge: Edge) -> Tensor:
        """Receives what the RECV `action` names from pipeline rank `peer`.

        Returns:
            A new tensor as `edge` says, ready for the current stream.

        Raises:
            CommTimeoutError: nothing came in time. CommError: the peer is gone.
        """
        self._check_open(action)
        tensor = torch.empty(edge.shape, dtype=edge.dtype, device=edge.device)
        with self._errors(str(action), peer):
            work = dist.irecv(tensor, self._global[peer], group=self._group(action, peer, self.rank))
            if work is not None:
                work.wait()
        return tensor

    def release(self, payload: Payload, key: StageKey, microbatch: int) -> None:
        """Frees a sent tensor that has provably arrived (its gradient came back); nothing to do where none was sent."""
        if (payload, key, microbatch) in self._sent:
            self._finish((payload, key, microbatch))

    def finish(self) -> None:
        """Waits until every send is done."""
        for key in list(self._sent):
            self._finish(key)

    def close(self, *, abort: bool = False) -> None:
        """Gives the groups back. `abort` does so with operations under way, which makes gloo peers fail at once."""
        self._closed = True
        self._sent.clear()
        groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            if abort:
                with contextlib.suppress(RuntimeError, ValueError, AttributeError):
                    group.abort()
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)

    def _finish(self, key: tuple[Payload | None, StageKey, int]) -> None:
        sent = self._sent.pop(key)
        if sent.work is not None:
            with self._errors(str(sent.action), sent.peer):
                sent.work.wait()

    def _group(self, action: Action, source: int, target: int) -> dist.ProcessGroup:
        assert action.payload is not None
        return self._groups[action.payload, direction_of(source, target)]

    def _check_open(self, action: Action) -> None:
        if self._closed:
            raise ClosedError(f"{action}: the pipeline was closed; make a new one")

    @contextlib.contextmanager
    def _errors(self, what: str, peer: int) -> Iterator[None]:
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
