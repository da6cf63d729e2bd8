"""Runs any valid schedule on one rank of a process group: one loop over the rank's list of actions.

The executor moves tensors and keeps books; it knows no model and calls no autograd. What a forward or a backward is,
a `StagePrograms` says: plain modules (`module_stages.ModuleStages`), or a training framework's own step functions.

The rule of a full backward (B, and the B of a pair): dX first, then its SEND, then dW, so that the previous stage
does not wait for weights. In the lists a B is one action; the executor runs the SENDs that follow it in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from comm_core.runtime import env, trace
from comm_core.runtime.errors import ClosedError, MTMoEError, UsageError
from dualpipe.actions import Action, Kind, Payload, StageKey
from dualpipe.blocks import TRACE_CATEGORY
from dualpipe.p2p import Edge, PeerToPeer
from dualpipe.schedule import Schedule, with_communication
from dualpipe.validate import validate
from dualpipe.weight_grad import WeightGradQueue, WeightGradStore

TRACE_LANE = "pipeline"
_MAX_PLANS = 64  # prepared schedules kept; a caller that builds new ones each step must not fill the memory


class ForwardJob(NamedTuple):
    """One forward: the arguments of `StagePrograms.forward`."""

    key: StageKey
    microbatch: int
    input: Tensor | None


class BackwardJob(NamedTuple):
    """One backward: the arguments of `StagePrograms.backward`."""

    key: StageKey
    microbatch: int
    input: Tensor | None
    output: Tensor | None
    output_grad: Tensor | None


class StagePrograms(Protocol):
    """What the stages of one rank compute. A `StageKey` is (stage, direction).

    May also define `forward_backward(forward: ForwardJob, backward: BackwardJob) -> (output, input_grad)`, which
    runs an overlapped pair; without it a pair is its F, then its B.
    """

    def forward(self, key: StageKey, microbatch: int, input: Tensor | None) -> Tensor | None:
        """Runs the forward of a stage.

        Args:
            key: which stage.
            microbatch: which microbatch, counted across directions.
            input: output of the previous stage, a leaf that requires grad when gradients are on; None on stage 0,
                which fetches its own.

        Returns:
            What the next stage gets. The loss stage may return anything it wants back in `backward`, or None.
        """
        ...

    def backward(
        self, key: StageKey, microbatch: int, input: Tensor | None, output: Tensor | None, output_grad: Tensor | None
    ) -> Tensor | None:
        """Runs the backward for inputs; deferred dW land in the store's open queue.

        Args:
            key: which stage.
            microbatch: which microbatch.
            input: what `forward` was given.
            output: what `forward` returned.
            output_grad: gradient of `output`; None on the loss stage.

        Returns:
            The gradient of `input`; None on stage 0.
        """
        ...

    def no_sync(self, key: StageKey) -> AbstractContextManager[Any]:
        """A context in which gradient hooks accumulate only; entered around all but a stage's last backward and W."""
        ...

    def edge(self, payload: Payload, key: StageKey, microbatch: int) -> Edge:
        """What arrives: the input of a stage (activation) or the gradient of its output (gradient)."""
        ...


class PipelineStateError(MTMoEError, RuntimeError):
    """After a step something was left over, or a program returned nothing where a neighbour waits for a tensor."""


@dataclass(frozen=True, slots=True)
class RunStats:
    """What one run did on this rank: `peak_live` is the largest number of forwards whose backward had not run yet."""

    peak_live: int


class _Step(NamedTuple):
    """One action with the SENDs that directly follow it."""

    action: Action
    sends: tuple[Action, ...]


class _Plan(NamedTuple):
    """A schedule prepared for one rank."""

    schedule: Schedule
    steps: tuple[_Step, ...]
    last: dict[StageKey, int]
    goes_round: bool


def _prepare(schedule: Schedule, rank: int) -> _Plan:
    """Validates, lowers and groups the list of one rank, and finds the last microbatch of each of its stages."""
    validate(schedule)
    communicates = any(action.payload is not None for actions in schedule.ranks for action in actions)
    lowered = schedule if communicates else with_communication(schedule)
    groups: list[list[Action]] = []
    last_input: dict[StageKey, int] = {}
    last: dict[StageKey, int] = {}
    for action in lowered.ranks[rank]:
        if action.kind is Kind.SEND and groups:
            groups[-1].append(action)
        else:
            groups.append([action])
        for part in action.compute:
            if part.kind in (Kind.B, Kind.I):
                last_input[part.key] = part.microbatch
            if part.kind in (Kind.B, Kind.W):
                last[part.key] = part.microbatch
    if last != last_input:
        # Some gradients are ready at I and some at W: both must be last for the same microbatch.
        raise UsageError(
            f"{schedule.name} schedule: the last W of a stage on rank {rank} is not of the microbatch of its last I",
            allowed="the W of a stage in the order of its I",
            fix="reorder the W",
        )
    goes_round = any(abs(here - there) > 1 for ranks in schedule.placement for here, there in pairwise(ranks))
    return _Plan(schedule, tuple(_Step(group[0], tuple(group[1:])) for group in groups), last, goes_round)


class Executor:
    """Runs schedules on this rank.

    Args:
        group: the pipeline's ranks in order; None for a single process without torch.distributed.
        store: where the programs' layers defer their dW; a new one by default (`executor.store`).
        timeout: bound of every wait; `comm_core.runtime.env.timeout_seconds` by default.
        device: where tensors live; by default the CPU for gloo, else the current accelerator.
        rank_mapping: place in the pipeline of each rank of the group; their own order by default.

    Construction and `run` are collective over the group. The microbatch count, the schedule and the programs may
    change from run to run. After an error in `run` the executor is closed, so that peers fail instead of waiting.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        store: WeightGradStore | None = None,
        timeout: timedelta | None = None,
        device: torch.device | None = None,
        rank_mapping: Sequence[int] | None = None,
    ) -> None:
        self.store = WeightGradStore() if store is None else store
        limit = timedelta(seconds=env.timeout_seconds()) if timeout is None else timeout
        self._p2p = PeerToPeer(group, timeout=limit, device=device, rank_mapping=rank_mapping)
        self.rank, self.num_ranks = self._p2p.rank, self._p2p.num_ranks
        self._plans: dict[int, _Plan] = {}
        self._closed = False

    def run(self, schedule: Schedule, programs: StagePrograms) -> RunStats:
        """Runs every action of this rank once.

        Raises:
            ScheduleError: the schedule is not valid. UsageError: it is for another number of ranks.
            CommTimeoutError, CommError: a neighbour did not answer.
            PipelineStateError: something was left over at the end.
        """
        if self._closed:
            raise ClosedError("Executor.run: the executor was closed (by close(), or after an error); make a new one")
        if schedule.num_ranks != self.num_ranks:
            raise UsageError(
                f"a {schedule.name} schedule for {schedule.num_ranks} ranks",
                allowed=f"{self.num_ranks} ranks, the size of the pipeline group",
                fix="build the schedule for this group",
            )
        try:
            plan = self._plan(schedule)
            if plan.goes_round:
                self._p2p.connect_ring()
            return _Run(plan, programs, self._p2p, self.store).execute()
        except BaseException:
            self.store.reset()
            self.close(abort=True)
            raise

    def _plan(self, schedule: Schedule) -> _Plan:
        plan = self._plans.get(id(schedule))
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            # Holding the schedule in the plan keeps its id from being given to another object.
            plan = self._plans[id(schedule)] = _prepare(schedule, self.rank)
        return plan

    def close(self, *, abort: bool = False) -> None:
        """Gives the private groups back; harmless when repeated."""
        if not self._closed:
            self._closed = True
            self._p2p.close(abort=abort)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(abort=kind is not None)


class _Run:
    """The state of one run: tensors on their way, live forwards, weights to do. All of it is empty at the end."""

    def __init__(self, plan: _Plan, programs: StagePrograms, p2p: PeerToPeer, store: WeightGradStore) -> None:
        self.schedule, self.plan, self.programs, self.p2p, self.store = plan.schedule, plan, programs, p2p, store
        self.inbox: dict[tuple[Payload, StageKey, int], Tensor] = {}
        self.outbox: dict[tuple[Payload, StageKey, int], Tensor] = {}
        self.live: dict[tuple[StageKey, int], tuple[Tensor | None, Tensor | None]] = {}
        self.queues: dict[tuple[StageKey, int], WeightGradQueue] = {}
        self.num_live = self.peak_live = 0

    def execute(self) -> RunStats:
        for action, sends in self.plan.steps:
            try:
                with _span(action):
                    self._perform(action, sends)
            except Exception as error:
                work = ", ".join(f"{a.kind} of stage {a.stage}, microbatch {a.microbatch}" for a in action.compute)
                error.add_note(f"in {action} on pipeline rank {self.p2p.rank}" + (f" ({work})" if work else ""))
                raise
        self.p2p.finish()
        self._check_empty()
        return RunStats(peak_live=self.peak_live)

    def _perform(self, action: Action, sends: tuple[Action, ...]) -> None:
        if action.kind is Kind.RECV:
            self._recv(action)
        elif action.kind is Kind.W:
            self._weights(action)
        elif action.compute:
            self._compute(action)
        for send in sends:
            self._send(send)
        if action.backward is not None and action.backward.kind is Kind.B:
            self._weights(action.backward)

    def _recv(self, action: Action) -> None:
        assert action.payload is not None
        edge = self.programs.edge(action.payload, action.key, action.microbatch)
        tensor = self.p2p.recv(action, self.schedule.peer(action), edge)
        self.inbox[action.payload, action.key, action.microbatch] = tensor

    def _send(self, action: Action) -> None:
        assert action.payload is not None
        tensor = self.outbox.pop((action.payload, action.key, action.microbatch))
        target = self.schedule.target(action)
        assert target is not None
        edge = self.programs.edge(action.payload, target, action.microbatch)
        if (tuple(tensor.shape), tensor.dtype) != (tuple(edge.shape), edge.dtype):
            # The receiver could only wait for the right number of bytes, or misread them.
            raise UsageError(
                f"{action} on pipeline rank {self.p2p.rank} with {tuple(tensor.shape)} {tensor.dtype}",
                allowed=f"{tuple(edge.shape)} {edge.dtype}, what `edge` says of it",
                fix=f"return such a tensor from stage {action.stage}, or correct the edge",
            )
        with _span(action):
            self.p2p.send(action, self.schedule.peer(action), tensor)

    def _compute(self, action: Action) -> None:
        """Runs F, B, I or a pair. An F counts as live before the backward of its pair ends."""
        forward = self._forward_job(action.forward) if action.forward is not None else None
        backward = self._backward_job(action.backward) if action.backward is not None else None
        output = input_grad = None
        paired = getattr(self.programs, "forward_backward", None)
        if forward is not None and (backward is None or paired is None):
            output = self.programs.forward(*forward)
            self._forward_done(action.forward, forward, output)
        if backward is not None:
            with self._maybe_no_sync(backward.key, backward.microbatch), self.store.collect() as queue:
                if forward is not None and paired is not None:
                    output, input_grad = paired(forward, backward)
                else:
                    input_grad = self.programs.backward(*backward)
            if forward is not None and paired is not None:
                self._forward_done(action.forward, forward, output)
            self._backward_done(action.backward, backward, input_grad, queue)

    def _forward_job(self, action: Action) -> ForwardJob:
        received = None
        if self.schedule.source(action) is not None:
            received = self.inbox.pop((Payload.ACTIVATION, action.key, action.microbatch)).detach()
            if torch.is_grad_enabled() and not self.schedule.forward_only and received.is_floating_point():
                received.requires_grad_()
        if not self.schedule.forward_only:
            self.num_live += 1
            self.peak_live = max(self.peak_live, self.num_live)
        return ForwardJob(action.key, action.microbatch, received)

    def _forward_done(self, action: Action | None, job: ForwardJob, output: Tensor | None) -> None:
        assert action is not None
        if not self.schedule.forward_only:
            self.live[job.key, job.microbatch] = (job.input, output)
        self._deliver(Payload.ACTIVATION, action, output)

    def _backward_job(self, action: Action) -> BackwardJob:
        grad = None
        if self.schedule.source(action) is not None:
            grad = self.inbox.pop((Payload.GRADIENT, action.key, action.microbatch))
        received, output = self.live.pop((action.key, action.microbatch))
        return BackwardJob(action.key, action.microbatch, received, output, grad)

    def _backward_done(
        self, action: Action | None, job: BackwardJob, input_grad: Tensor | None, queue: WeightGradQueue
    ) -> None:
        assert action is not None
        self.num_live -= 1
        self.queues[job.key, job.microbatch] = queue
        self.p2p.release(Payload.ACTIVATION, job.key, job.microbatch)
        self._deliver(Payload.GRADIENT, action, input_grad)

    def _deliver(self, payload: Payload, action: Action, tensor: Tensor | None) -> None:
        """Hands a result to the next stage's inbox on this rank (the turn of the V) or to the SEND that follows."""
        target = self.schedule.target(action)
        if target is None:
            return
        if tensor is None:
            raise PipelineStateError(
                f"{action} on rank {self.p2p.rank} returned None, but stage {target.stage} waits for its "
                f"{'output' if payload is Payload.ACTIVATION else 'input gradient'}"
            )
        if self.schedule.rank_of(target) == self.p2p.rank:
            self.inbox[payload, target, action.microbatch] = tensor.detach()
        else:
            self.outbox[payload, action.key, action.microbatch] = tensor

    def _weights(self, action: Action) -> None:
        queue = self.queues.pop((action.key, action.microbatch))
        with self._maybe_no_sync(action.key, action.microbatch):
            self.store.run(queue)

    def _maybe_no_sync(self, key: StageKey, microbatch: int) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if microbatch == self.plan.last.get(key) else self.programs.no_sync(key)

    def _check_empty(self) -> None:
        left: dict[str, Collection[object]] = {
            "received": self.inbox,
            "to send": self.outbox,
            "live": self.live,
            "weights": self.queues,
        }
        found = [f"{name}: {sorted(str(item) for item in items)}" for name, items in left.items() if items]
        if self.store.num_waiting:
            found.append(f"weight-gradient queues: {self.store.num_waiting}")
        if found:
            raise PipelineStateError(f"left over after a step on rank {self.p2p.rank}: " + "; ".join(found))


def _span(action: Action) -> AbstractContextManager[None]:
    """The trace span of one action; its args are what a drawing needs."""
    if trace.active() is None:
        return contextlib.nullcontext()
    args: dict[str, Any] = {
        "kind": str(action.kind),
        "stage": action.stage,
        "microbatch": action.microbatch,
        "direction": action.direction,
    }
    if action.payload is not None:
        args["payload"] = str(action.payload)
    if action.kind is Kind.FB and action.backward is not None:
        args["backward_stage"] = action.backward.stage
        args["backward_microbatch"] = action.backward.microbatch
    return trace.span(str(action), TRACE_CATEGORY, lane=TRACE_LANE, **args)
