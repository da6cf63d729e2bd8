"""What the two ends of a hop know of each other: who sends what, in which shapes, before memory for it is needed.

At the start of a run each rank tells every rank it sends to what will come: the messages of each payload in their order
and, in the fixed form (`StagePrograms.edge` says shapes), the shapes. The receiver compares with its own list before
its first receive from that rank. Ranks with different shapes, schedules or microbatch counts thus end with an error
that names the message, where a receive of the wrong size would wait for ever, or be misread. What was told before is
not told again: one word says so.

Without fixed shapes (`edge` gives None) they are negotiated, for activations alone; a gradient has the shapes of its
activation. With each activation goes a header of five words, from host to host: which message it is, which of its
tensors have a gradient, and whether shapes and dtypes are those of the last time; if not, they follow. Both ends keep
the last ones of each (stage, microbatch), over runs, so that both know what the receiver expects:

- Expected shapes: the receive is posted early, before the header is read. The header is heard when the tensors are
  needed, at which time it has long been there. Nothing is answered: no round trip, in any case.
- Nothing expected (the first time, or shapes that changed the last time): the header is heard first, then the receive
  is posted.
- Expected, but changed: the sender first sends tensors of the expected shapes, for the receive that is posted, then the
  right ones. That is once a change: nothing is expected after it until shapes have come twice.

The header of an activation is sent when its forward is launched, so a device's receiver waits for the sender's host at
most, never for a device. The header is written in the order of the messages of its communicator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from comm_core.runtime.errors import CommError, UsageError
from dualpipe.actions import Action, Kind, Payload, StageKey
from dualpipe.edges import Edge, Form, Value, tensors_of
from dualpipe.p2p import Posted, direction_of
from dualpipe.programs import StagePrograms
from dualpipe.steps import RankPlan

Message = tuple[Payload, StageKey, int]
"""Payload, the stage that receives, microbatch: equal on both ends."""
Agreement = tuple[tuple[Message, tuple[int, ...]], ...]
"""The messages to one rank, payload by payload in their order, with the words of their shapes; none if negotiated."""

_SAME = -1


class Transport(Protocol):
    """What `p2p.PeerToPeer` is for the hops and the executor."""

    rank: int
    device: torch.device

    def send(self, action: Action, peer: int, tensors: tuple[Tensor, ...]) -> None:
        """Posts a send."""

    def post(self, action: Action, peer: int, edges: tuple[Edge, ...]) -> Posted:
        """Posts a receive."""
        ...

    def tell(self, what: str, peer: int, words: list[int]) -> None:
        """Sends whole numbers."""

    def hear(self, what: str, peer: int, number: int) -> list[int]:
        """Receives whole numbers."""
        ...


@dataclass(slots=True)
class _Last:
    """The shapes a (stage, microbatch) had the last time, and whether they are expected again."""

    form: Form | None = None
    steady: bool = True

    @property
    def expected(self) -> Form | None:
        return self.form if self.steady else None

    def update(self, form: Form) -> None:
        self.steady = self.form is None or self.form.same_tensors(form)
        self.form = form


@dataclass(slots=True)
class HopMemory:
    """What lasts from run to run; the executor keeps it. Equal on both ends of each link."""

    told: dict[int, Agreement] = field(default_factory=dict)
    heard: dict[int, Agreement] = field(default_factory=dict)
    sent: dict[tuple[int, Message], _Last] = field(default_factory=dict)
    received: dict[tuple[int, Message], _Last] = field(default_factory=dict)


@dataclass(slots=True)
class _Incoming:
    """A receive: posted or, while its shapes are not known, not yet."""

    action: Action
    form: Form | None
    posted: Posted | None
    settled: bool


class Hops:
    """The messages of one run on one rank."""

    def __init__(self, plan: RankPlan, programs: StagePrograms, p2p: Transport, memory: HopMemory) -> None:
        self._schedule, self._programs, self._p2p, self._memory = plan.schedule, programs, p2p, memory
        self._incoming: dict[Message, _Incoming] = {}
        self._unsettled: dict[tuple[Payload, str], _Incoming] = {}
        self._negotiated: dict[tuple[StageKey, int], Form] = {}  # of activations whose gradient is to come or to go
        self._agreed: set[int] = set()
        self._fixed: dict[Message, Form | None] = {}
        self._sends: dict[int, list[Action]] = {}
        self._receives: dict[int, list[Action]] = {}
        for action in plan.lowered.ranks[p2p.rank]:
            if action.payload is not None:
                side = self._sends if action.kind is Kind.SEND else self._receives
                side.setdefault(self._schedule.peer(action), []).append(action)
                message = self._message(action)
                edge = programs.edge(*message)
                self._fixed[message] = None if edge is None else Form.given(edge)

    @property
    def left(self) -> list[Message]:
        """Receives that nobody has taken."""
        return list(self._incoming)

    def begin(self) -> None:
        """Tells every rank that gets messages from this one what will come."""
        for peer, actions in self._sends.items():
            agreement = self._agreement(actions)
            what = f"the messages of the step, before {actions[0]}"
            if self._memory.told.get(peer) == agreement:
                self._p2p.tell(what, peer, [_SAME])
                continue
            words = _words_of(agreement)
            self._p2p.tell(what, peer, [len(words)])
            self._p2p.tell(what, peer, words)
            self._memory.told[peer] = agreement

    def post(self, action: Action) -> None:
        """Posts a RECV, if its shapes are known or expected; `take` does so otherwise."""
        peer, message = self._schedule.peer(action), self._message(action)
        self._agree(action, peer)
        channel = self._channel(action, peer)
        self._settle(channel)
        form, settled = self._fixed[message], True
        if form is None and action.payload is Payload.GRADIENT:
            form = self._negotiated.pop((StageKey(action.stage + 1, action.direction), action.microbatch))
        elif form is None:
            last = self._memory.received.setdefault((peer, message), _Last())
            form, settled = last.expected, False
        posted = None if form is None else self._p2p.post(action, peer, _wire(form, message))
        incoming = self._incoming[message] = _Incoming(action, form, posted, settled)
        if not settled:
            self._unsettled[channel] = incoming

    def take(self, action: Action) -> tuple[Value, tuple[bool, ...]]:
        """Waits for what a RECV names.

        Returns:
            (value, grads): what the stage gets, and which of its tensors have a gradient.
        """
        message = self._message(action)
        incoming = self._incoming.pop(message)
        if not incoming.settled:
            self._settle(self._channel(action, self._schedule.peer(action)))
        form, posted = incoming.form, incoming.posted
        assert form is not None and posted is not None
        tensors = posted.wait()
        if action.payload is Payload.GRADIENT:
            return form.gradient(tensors), ()
        return form.value(tensors), tuple(edge.has_grad for edge in form.edges)

    def send(self, action: Action, value: Value | None) -> None:
        """Posts a SEND of a stage's output, or of the gradient of its input.

        Raises:
            UsageError: shapes or dtypes that the receiver does not wait for.
        """
        peer, message = self._schedule.peer(action), self._message(action)
        self._settle(self._channel(action, peer))
        form = self._fixed[message]
        if action.payload is Payload.GRADIENT:
            if form is None:
                form = self._negotiated.pop((action.key, action.microbatch))
            tensors = _gradients(form, value)
        else:
            tensors = tensors_of(value)
            if form is None:
                form = Form.seen(tensors[0] if value is tensors[0] else tensors, self._p2p.device)
                self._announce(action, peer, message, form)
        self._check(action, tensors, _wire(form, message))
        self._p2p.send(action, peer, tensors)

    def _check(self, action: Action, tensors: tuple[Tensor, ...], edges: tuple[Edge, ...]) -> None:
        if [(tuple(t.shape), t.dtype) for t in tensors] != [(tuple(edge.shape), edge.dtype) for edge in edges]:
            # The receiver could only wait for the right number of bytes, or misread them.
            raise UsageError(
                f"{action} on pipeline rank {self._p2p.rank} with "
                + ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors),
                allowed=", ".join(map(str, edges)) + ", what the receiver waits for",
                fix=f"return such tensors from stage {action.stage}, or correct the edge",
            )

    def _announce(self, action: Action, peer: int, message: Message, form: Form) -> None:
        """The header of an activation, and what an expecting receiver has posted for where that has changed."""
        _, key, microbatch = message
        last = self._memory.sent.setdefault((peer, message), _Last())
        same = last.form is not None and last.form.same_tensors(form)
        words = [] if same else form.words()
        self._p2p.tell(str(action), peer, [*key, microbatch, form.mask, len(words)])
        if words:
            self._p2p.tell(str(action), peer, words)
        if last.expected is not None and not same:
            filler = [torch.empty(edge.shape, dtype=edge.dtype, device=edge.device) for edge in last.expected.edges]
            self._p2p.send(action, peer, tuple(filler))
        last.update(form)
        if not self._schedule.forward_only:
            self._negotiated[key, microbatch] = form

    def _settle(self, channel: tuple[Payload, str]) -> None:
        """Hears the header of the receive that is last on a communicator, and posts what it says."""
        incoming = self._unsettled.pop(channel, None)
        if incoming is None:
            return
        action, peer, message = incoming.action, self._schedule.peer(incoming.action), self._message(incoming.action)
        stage, direction, microbatch, mask, number = self._p2p.hear(str(action), peer, 5)
        if (StageKey(stage, direction), microbatch) != message[1:]:
            raise CommError(
                f"{action} on pipeline rank {self._p2p.rank}: the message in turn is for {stage}F{microbatch}"
            )
        last = self._memory.received[peer, message]
        if number:
            form = Form.of_words(self._p2p.hear(str(action), peer, number), self._p2p.device)
            if incoming.posted is not None:
                incoming.posted.wait()  # of the shapes that were expected; nothing to keep
            incoming.posted = None
        else:
            assert last.form is not None
            form = last.form
        last.update(form)
        incoming.form, incoming.settled = form.with_mask(mask), True
        if incoming.posted is None:
            incoming.posted = self._p2p.post(action, peer, incoming.form.edges)
        if not self._schedule.forward_only:
            self._negotiated[message[1:]] = incoming.form

    def _agree(self, action: Action, peer: int) -> None:
        """Before the first receive from a rank: compares what it says it will send with what this rank waits for."""
        if peer in self._agreed:
            return
        self._agreed.add(peer)
        (number,) = self._p2p.hear(str(action), peer, 1)
        if number != _SAME:
            self._memory.heard[peer] = _of_words(self._p2p.hear(str(action), peer, number))
        theirs, mine = self._memory.heard.get(peer, ()), self._agreement(self._receives[peer])
        if theirs == mine:
            return
        place = next(
            (i for i, (one, other) in enumerate(zip(theirs, mine, strict=False)) if one != other),
            min(len(theirs), len(mine)),
        )
        mismatch, comes = mine[place] if place < len(mine) else None, theirs[place] if place < len(theirs) else None
        raise UsageError(
            f"pipeline rank {self._p2p.rank} waits for {self._told(mismatch)}, where pipeline rank {peer} sends "
            f"{self._told(comes)}",
            allowed="the same on both ranks",
            fix="give all ranks the same schedule, microbatches and shapes between stages",
        )

    def _told(self, part: tuple[Message, tuple[int, ...]] | None) -> str:
        if part is None:
            return "nothing more"
        (payload, key, microbatch), words = part
        form = str(Form.of_words(words, self._p2p.device)) if words else "shapes that its header tells"
        name = "input" if payload is Payload.ACTIVATION else "output gradient"
        return (
            f"{key.stage}RECV_{payload}{microbatch} (the {name} of stage {key.stage}, microbatch {microbatch}): {form}"
        )

    def _agreement(self, actions: Iterable[Action]) -> Agreement:
        parts = []
        for message in sorted(map(self._message, actions), key=lambda message: message[0]):  # stable: keeps their order
            form = self._fixed[message]
            words = [] if form is None else Form(_wire(form, message), form.bare).words()
            parts.append((message, tuple(words)))
        return tuple(parts)

    def _message(self, action: Action) -> Message:
        assert action.payload is not None
        key = self._schedule.target(action) if action.kind is Kind.SEND else action.key
        assert key is not None
        return action.payload, key, action.microbatch

    def _channel(self, action: Action, peer: int) -> tuple[Payload, str]:
        assert action.payload is not None
        ends = (self._p2p.rank, peer) if action.kind is Kind.SEND else (peer, self._p2p.rank)
        return action.payload, direction_of(*ends)


def _wire(form: Form, message: Message) -> tuple[Edge, ...]:
    """The tensors that travel."""
    return form.edges if message[0] is Payload.ACTIVATION else form.with_gradients_alone()


def _gradients(form: Form, value: Value | None) -> tuple[Tensor, ...]:
    """The gradients that travel, out of what `backward` returned; zeros for an input that was not used."""
    if isinstance(value, Tensor):
        return (value,)
    parts = (None,) * len(form.edges) if value is None else value
    return tuple(
        torch.zeros(edge.shape, dtype=edge.dtype, device=edge.device) if part is None else part
        for edge, part in zip(form.edges, parts, strict=True)
        if edge.has_grad
    )


def _words_of(agreement: Agreement) -> list[int]:
    words: list[int] = []
    for (payload, key, microbatch), form in agreement:
        words += [int(payload is Payload.GRADIENT), *key, microbatch, len(form), *form]
    return words


def _of_words(words: list[int]) -> Agreement:
    rest, parts = iter(words), []
    for gradient in rest:
        payload = Payload.GRADIENT if gradient else Payload.ACTIVATION
        key, microbatch, number = StageKey(next(rest), next(rest)), next(rest), next(rest)
        parts.append(((payload, key, microbatch), tuple(next(rest) for _ in range(number))))
    return tuple(parts)
