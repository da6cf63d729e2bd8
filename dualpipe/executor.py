"""Runs any valid schedule on one rank of a process group: one loop over the rank's steps.

The executor moves values and keeps books; it knows no model and calls no autograd. What a forward or a backward is,
a `StagePrograms` says: plain modules (`module_stages.ModuleStages`), or a training framework's own step functions.

A step (`steps`) goes like this: wait for the inputs of its computation; post the receives of the next one, so that
these come while this one computes; compute; send each result as soon as it is there. In a full backward (B, and the B
of a pair) dX goes out before dW is computed, and in a pair the output of the F before the B runs, so that the
neighbours wait for nothing they do not need.

An output is let go once it is handed on, where the programs say what they need in its place (`after_forward`): its
memory is then held by the send under way alone.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from comm_core.runtime import env, trace
from comm_core.runtime.errors import ClosedError, MTMoEError, UsageError
from dualpipe.actions import Action, Kind, Payload, StageKey, recv
from dualpipe.blocks import TRACE_CATEGORY
from dualpipe.edges import Value, tensors_of
from dualpipe.hops import HopMemory, Hops
from dualpipe.p2p import PeerToPeer
from dualpipe.programs import BackwardJob, ForwardJob, StagePrograms
from dualpipe.schedule import Schedule
from dualpipe.steps import RankPlan, Step, prepare
from dualpipe.weight_grad import WeightGradQueue, WeightGradStore

TRACE_LANE = "pipeline"
_MAX_PLANS = 64  # prepared schedules kept; a caller that builds new ones each step must not fill the memory


class PipelineStateError(MTMoEError, RuntimeError):
    """After a step something was left over, or a program returned nothing where a neighbour waits for a tensor."""


@dataclass(frozen=True, slots=True)
class RunStats:
    """What one run did on this rank: `peak_live` is the largest number of forwards whose backward had not run yet."""

    peak_live: int


class Executor:
    """Runs schedules on this rank.

    Args:
        group: the pipeline's ranks in order; None for a single process without torch.distributed.
        store: where the programs' layers defer their dW; a new one by default (`executor.store`).
        timeout: bound of every wait; `comm_core.runtime.env.timeout_seconds` by default.
        device: where tensors live; by default the CPU for gloo, else the current accelerator.
        rank_mapping: place in the pipeline of each rank of the group; their own order by default.

    Attributes:
        rank: this process's place in the pipeline.
        num_ranks: pipeline ranks.
        device: where negotiated tensors arrive.

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
        self.rank, self.num_ranks, self.device = self._p2p.rank, self._p2p.num_ranks, self._p2p.device
        self._plans: dict[int, RankPlan] = {}
        self._memory = HopMemory()
        self._closed = False

    def run(self, schedule: Schedule, programs: StagePrograms) -> RunStats:
        """Runs every action of this rank once.

        Raises:
            ScheduleError: the schedule is not valid.
            UsageError: it is for another number of ranks; a stage returned other shapes than `edge` says, or the ranks
                do not say the same.
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
            return _Run(plan, programs, self._p2p, self.store, self._memory).execute()
        except BaseException:
            self.store.reset()
            self.close(abort=True)
            raise

    def _plan(self, schedule: Schedule) -> RankPlan:
        plan = self._plans.get(id(schedule))
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            # Holding the schedule in the plan keeps its id from being given to another object.
            plan = self._plans[id(schedule)] = prepare(schedule, self.rank)
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


class _Results:
    """Takes the results of a step's computations: hands them to the next stage here, or sends them in their order."""

    def __init__(self, run: _Run, step: Step) -> None:
        self._run, self._sends = run, list(step.sends)
        self._step = step
        self.forward: ForwardJob | None = None
        self.backward: BackwardJob | None = None

    def output(self, value: Value) -> None:
        """Of the F. After this nothing here holds the output if the programs need not."""
        run, job = self._run, self.forward
        assert job is not None and self._step.action is not None and self._step.action.forward is not None
        self.forward = None
        run.deliver(Payload.ACTIVATION, self._step.action.forward, value)
        if not run.schedule.forward_only:
            run.live[job.key, job.microbatch] = job.input, run.kept(job, value)
        self.flush()

    def input_grad(self, value: Value | None) -> None:
        """Of the B or I."""
        run, job = self._run, self.backward
        assert job is not None and self._step.action is not None and self._step.action.backward is not None
        self.backward = None
        run.num_live -= 1
        run.p2p.release(Payload.ACTIVATION, job.key, job.microbatch)
        empty = job.input is None or not any(tensor.requires_grad for tensor in tensors_of(job.input))
        run.deliver(Payload.GRADIENT, self._step.action.backward, value, may_be_none=empty)
        self.flush()

    def flush(self) -> None:
        """Sends what is there, nothing before another of its payload."""
        behind: set[Payload | None] = set()
        for action in list(self._sends):
            message = action.payload, action.key, action.microbatch
            if action.payload in behind or message not in self._run.outbox:
                behind.add(action.payload)
                continue
            self._sends.remove(action)
            with self._run.doing(action):
                self._run.hops.send(action, self._run.outbox.pop(message))


class _Run:
    """The state of one run: values on their way, live forwards, weights to do. All of it is empty at the end."""

    def __init__(
        self, plan: RankPlan, programs: StagePrograms, p2p: PeerToPeer, store: WeightGradStore, memory: HopMemory
    ) -> None:
        self.schedule, self.plan, self.programs, self.p2p, self.store = plan.schedule, plan, programs, p2p, store
        self.hops = Hops(plan, programs, p2p, memory)
        self.turned: dict[tuple[Payload, StageKey, int], tuple[Value | None, tuple[bool, ...]]] = {}
        self.outbox: dict[tuple[Payload | None, StageKey, int], Value | None] = {}
        self.live: dict[tuple[StageKey, int], tuple[Value | None, Any]] = {}
        self.queues: dict[tuple[StageKey, int], WeightGradQueue] = {}
        self.num_live = self.peak_live = 0
        self._pairs: Callable[..., Any] | None = getattr(programs, "forward_backward", None)
        self._keep: Callable[..., Any] | None = getattr(programs, "after_forward", None)
        self._finish: Callable[..., Any] = getattr(programs, "last_weights", _nothing)
        self._pairs_send = self._pairs is not None and len(inspect.signature(self._pairs).parameters) > 2

    def execute(self) -> RunStats:
        self.hops.begin()
        for step in self.plan.steps:
            self._post(step.receives)
            self._perform(step, _Results(self, step))
        self.p2p.finish()
        self._check_empty()
        return RunStats(peak_live=self.peak_live)

    def _post(self, receives: Sequence[Action]) -> None:
        for action in receives:
            with _named(action, self.p2p.rank):
                self.hops.post(action)

    def _perform(self, step: Step, results: _Results) -> None:
        action = step.action
        if action is None:
            results.flush()
            return
        if action.forward is not None:
            results.forward = self._forward_job(action.forward)
        if action.backward is not None:
            results.backward = self._backward_job(action.backward)
        self._post(step.early)
        with self.doing(action):
            if action.kind is Kind.W:
                self._weights(action)
            else:
                self._compute(results)
            results.flush()
            if action.backward is not None and action.backward.kind is Kind.B:
                self._weights(action.backward)

    @contextlib.contextmanager
    def doing(self, action: Action) -> Iterator[None]:
        """Traces an action, and names it in an error."""
        with _named(action, self.p2p.rank), _span(action):
            yield

    def _compute(self, results: _Results) -> None:
        """Runs F, B, I or a pair. An F counts as live before the backward of its pair ends."""
        forward, backward = results.forward, results.backward
        if forward is not None and backward is not None and self._pairs is not None:
            more = (results,) if self._pairs_send else ()
            with self._collected(backward):
                output, input_grad = self._pairs(forward, backward, *more)
            if results.forward is not None:
                results.output(output)
            if results.backward is not None:
                results.input_grad(input_grad)
            return
        if forward is not None:
            results.output(self.programs.forward(*forward))
        if backward is not None:
            with self._collected(backward):
                input_grad = self.programs.backward(*backward)
            results.input_grad(input_grad)

    @contextlib.contextmanager
    def _collected(self, job: BackwardJob) -> Iterator[None]:
        """Keeps the dW that a backward defers for their W."""
        with self._maybe_no_sync(job.key, job.microbatch), self.store.collect() as queue:
            yield
        self.queues[job.key, job.microbatch] = queue

    def _forward_job(self, action: Action) -> ForwardJob:
        received, grads = self._arrived(action, Payload.ACTIVATION)
        if received is not None and torch.is_grad_enabled() and not self.schedule.forward_only:
            for tensor, has_grad in zip(tensors_of(received), grads, strict=True):
                tensor.requires_grad_(has_grad)
        if not self.schedule.forward_only:
            self.num_live += 1
            self.peak_live = max(self.peak_live, self.num_live)
        return ForwardJob(action.key, action.microbatch, received)

    def _backward_job(self, action: Action) -> BackwardJob:
        grad, _ = self._arrived(action, Payload.GRADIENT)
        received, output = self.live.pop((action.key, action.microbatch))
        return BackwardJob(action.key, action.microbatch, received, output, grad)

    def _arrived(self, action: Action, payload: Payload) -> tuple[Value | None, tuple[bool, ...]]:
        """What an F or a backward needs from another stage, and which of its tensors have a gradient."""
        source = self.schedule.source(action)
        if source is None:
            return None, ()
        if self.schedule.rank_of(source) != self.p2p.rank:
            receive = recv(payload, action.key, action.microbatch)
            with self.doing(receive):
                return self.hops.take(receive)
        return self.turned.pop((payload, action.key, action.microbatch))

    def deliver(self, payload: Payload, action: Action, value: Value | None, *, may_be_none: bool = False) -> None:
        """Hands a result to the next stage on this rank (the turn of the V) or to the SEND that follows."""
        target = self.schedule.target(action)
        if target is None:
            return
        if value is None and not may_be_none:
            raise PipelineStateError(
                f"{action} on rank {self.p2p.rank} returned None, but stage {target.stage} waits for its "
                f"{'output' if payload is Payload.ACTIVATION else 'input gradient'}"
            )
        if self.schedule.rank_of(target) == self.p2p.rank:
            grads = _have_grads(value) if payload is Payload.ACTIVATION else ()
            self.turned[payload, target, action.microbatch] = _detached(value), grads
        else:
            self.outbox[payload, action.key, action.microbatch] = value

    def kept(self, job: ForwardJob, output: Any) -> Any:
        """What the backward gets in place of the output."""
        if self._keep is None or job.key.stage == self.schedule.num_stages - 1:
            return output
        return self._keep(job.key, job.microbatch, output)

    def _weights(self, action: Action) -> None:
        queue = self.queues.pop((action.key, action.microbatch))
        if action.microbatch == self.plan.last.get(action.key):
            with self._finish(action.key):
                self.store.run(queue)
            return
        with self.programs.no_sync(action.key):
            self.store.run(queue)

    def _maybe_no_sync(self, key: StageKey, microbatch: int) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if microbatch == self.plan.last.get(key) else self.programs.no_sync(key)

    def _check_empty(self) -> None:
        left: dict[str, Collection[object]] = {
            "received": [*self.turned, *self.hops.left],
            "to send": self.outbox,
            "live": self.live,
            "weights": self.queues,
        }
        found = [f"{name}: {sorted(str(item) for item in items)}" for name, items in left.items() if items]
        if self.store.num_waiting:
            found.append(f"weight-gradient queues: {self.store.num_waiting}")
        if found:
            raise PipelineStateError(f"left over after a step on rank {self.p2p.rank}: " + "; ".join(found))


def _nothing(key: StageKey) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _detached(value: Value | None) -> Value | None:
    """The same tensors outside of the graph; those of a tuple of gradients may be None."""
    if value is None or isinstance(value, torch.Tensor):
        return None if value is None else value.detach()
    return tuple(None if tensor is None else tensor.detach() for tensor in value)


def _have_grads(value: Value | None) -> tuple[bool, ...]:
    """Which tensors of an output get a gradient: those in the graph; where programs hide it, all that may have one."""
    tensors = tensors_of(value)
    required = tuple(tensor.requires_grad for tensor in tensors)
    return required if any(required) else tuple(t.is_floating_point() or t.is_complex() for t in tensors)


@contextlib.contextmanager
def _named(action: Action, rank: int) -> Iterator[None]:
    """Names the action in an error of the body; the innermost one counts."""
    try:
        yield
    except Exception as error:
        if not any(note.startswith("in ") for note in getattr(error, "__notes__", ())):
            kinds = [
                (part.kind if part.payload is None else f"{part.kind}_{part.payload}", part)
                for part in action.compute or (action,)
            ]
            work = ", ".join(f"{kind} of stage {part.stage}, microbatch {part.microbatch}" for kind, part in kinds)
            error.add_note(f"in {action} on pipeline rank {rank} ({work})")
        raise


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
