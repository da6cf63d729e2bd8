"""Weight gradients that wait: the dW half of a backward, run when the schedule says W.

A backward computes two independent things: the gradient of the input (dX), which the previous stage waits for, and
the gradients of the weights (dW), which nobody waits for before the optimizer. Doing dX first shortens the pipeline's
critical path; the dW that were left over fill bubbles later.

Three rules keep data-parallel gradient hooks right:

1. The weight must not be visible in the autograd graph (the function is given `weight.detach()`). A visible weight
   whose gradient is None makes hooks count it as ready when only dX is done.
2. W delivers with `torch.autograd.backward([weight], [dW])` on the leaf. This runs the leaf's own accumulation node,
   on which the hooks sit, so they fire once a microbatch, at W.
3. Several dW of one weight in one microbatch are summed before delivery, so that hooks fire once.

From this follows what can not be deferred: a weight that one microbatch uses both in a deferring layer and where
autograd sees it would be delivered twice, at I and at W. `collect` refuses it.

Layers that defer are in `split_functions`, the modules that are given them in `split_modules`, and modules that keep
weight gradients by themselves until they are asked for (Transformer Engine's) in `delayed`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from comm_core.runtime.errors import MTMoEError, UsageError

Compute: TypeAlias = Callable[[], Sequence[Tensor | None]]
"""Computes the gradients of some weights, in their order; None for one that needs no delivery."""


class WeightGradError(MTMoEError, RuntimeError):
    """Deferred weight gradients were used in a way that would lose or double some."""


class WeightGradQueue:
    """The deferred dW of one backward. Filled inside `WeightGradStore.collect`, emptied by `WeightGradStore.run`."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[Tensor, ...], Compute]] = []
        self.seen: dict[int, str] = {}  # weights that autograd itself gave a gradient meanwhile, by id, with their name

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, weights: Sequence[Tensor], compute_dws: Compute) -> None:
        """Appends one closure that computes the gradients of `weights`, in their order."""
        self._entries.append((tuple(weights), compute_dws))

    def pop_all(self) -> list[tuple[tuple[Tensor, ...], Compute]]:
        """Takes every entry out; the queue is empty afterwards."""
        entries, self._entries = self._entries, []
        return entries

    def check(self) -> None:
        """Raises UsageError where a weight was deferred and delivered by autograd in one backward."""
        leaves = [leaf_of(weight) for weights, _ in self._entries for weight in weights]
        both = sorted({self.seen[id(leaf)] for leaf in leaves if id(leaf) in self.seen})
        if both:
            raise UsageError(
                f"{', '.join(both)}: used in a layer that defers its gradient and elsewhere in the same stage, so that "
                "gradient hooks would run at I, with a part of the gradient, and again at W",
                allowed="every use in a stage through nn.Linear modules or grouped products, outside of autocast",
                fix="call the module instead of its weight, or do not split the backward (backward_split=False)",
            )


class Delayed(Protocol):
    """A module that keeps weight gradients by itself; see `delayed`."""

    @property
    def module(self) -> Any:
        """The module."""

    def pending(self) -> int:
        """Number of weight gradients that it keeps."""
        ...

    def hand_over(self, queue: WeightGradQueue, count: int) -> None:
        """Puts into the queue what computes the last `count` of them."""
        ...

    def forget(self) -> None:
        """Throws all of them away (after an error)."""
        ...


def leaf_of(weight: Tensor) -> Tensor | None:
    """The parameter that a weight is, or is computed from by operations of one input; None where there are several."""
    node: Any = weight.grad_fn
    if node is None:
        return weight
    while not hasattr(node, "variable"):
        before = [earlier for earlier, _ in node.next_functions if earlier is not None]
        if len(before) != 1:
            return None
        node = before[0]
    leaf: Tensor = node.variable
    return leaf


def _nothing_to_deliver(closure: Callable[[], Any]) -> Sequence[Tensor]:
    closure()
    return ()


class WeightGradStore:
    """Collects deferred weight gradients of one pipeline. Two stores know nothing of each other.

        with store.collect() as queue:
            torch.autograd.backward(output, output_grad)      # dX; layers put their dW
        ...
        store.run(queue)                                      # dW, delivered to the weights' hooks

    Outside of `collect` a `put` runs at once, so a model with deferring layers also trains without a pipeline.
    """

    def __init__(self) -> None:
        self._open: WeightGradQueue | None = None
        self._waiting: dict[int, WeightGradQueue] = {}
        self._watched: dict[int, Delayed] = {}

    @property
    def collecting(self) -> bool:
        """True inside `collect`."""
        return self._open is not None

    @property
    def num_waiting(self) -> int:
        """Queues that were collected with entries and not run yet."""
        return sum(len(queue) > 0 for queue in self._waiting.values())

    @contextlib.contextmanager
    def collect(self) -> Iterator[WeightGradQueue]:
        """Sends every `put` of the body to the queue it yields.

        Raises:
            WeightGradError: when entered inside itself, since the dW of two backwards would mix.
            UsageError: at the end, see `WeightGradQueue.check`.
        """
        if self._open is not None:
            raise WeightGradError("WeightGradStore.collect() was entered inside itself; run one backward at a time")
        queue = WeightGradQueue()
        kept = [(delayed, delayed.pending()) for delayed in self._watched.values()]
        self._open = queue
        try:
            yield queue
        finally:
            self._open = None
            if len(queue):
                self._waiting[id(queue)] = queue
        for delayed, before in kept:
            if count := delayed.pending() - before:
                delayed.hand_over(queue, count)
                self._waiting[id(queue)] = queue
        queue.check()

    def watch(self, delayed: Delayed) -> None:
        """Takes over what a module keeps during a `collect`, as if it had been put. A module is watched once."""
        self._watched.setdefault(id(delayed.module), delayed)

    def unwatch(self, delayed: Delayed) -> None:
        """Ends `watch`; harmless when repeated."""
        self._watched.pop(id(delayed.module), None)

    def saw(self, weight: Tensor, name: str) -> None:
        """Notes that autograd computed a gradient of `weight`, called `name` in errors."""
        if self._open is not None:
            self._open.seen[id(weight)] = name

    def put(self, weight: Tensor, compute_dw: Callable[[], Tensor]) -> None:
        """Defers the gradient of one weight: `compute_dw()` returns it, in the shape of the weight."""
        self.put_many([weight], lambda: [compute_dw()])

    def put_many(self, weights: Sequence[Tensor], compute_dws: Compute) -> None:
        """Defers the gradients of several weights that one call computes together (a grouped GEMM).

        Args:
            weights: parameters, or what was computed of them; autograd then goes on from there at W.
            compute_dws: returns one gradient a weight, in their order and shapes.
        """
        if not any(weight.requires_grad for weight in weights):
            return
        if self._open is not None:
            self._open.add(weights, compute_dws)
            return
        queue = WeightGradQueue()
        queue.add(weights, compute_dws)
        self.run(queue)

    def put_closures(self, closures: Sequence[Callable[[], Any]]) -> None:
        """Defers closures that add a gradient to its weight by themselves; hooks of the weight do not fire."""
        for closure in closures:
            if self._open is None:
                closure()
            else:
                self._open.add((), functools.partial(_nothing_to_deliver, closure))

    def run(self, queue: WeightGradQueue) -> None:
        """Computes and delivers every dW of a queue, in the order they were put, and empties it.

        A weight is delivered as soon as its last dW of the queue is there, so that hooks can start to communicate.
        """
        self._waiting.pop(id(queue), None)
        entries = queue.pop_all()
        places = [_places(weights) for weights, _ in entries]
        if any(None in listed for listed in places):
            # Where a gradient will go on to is not known: all of them together, so that hooks still run once.
            places = [[None] * len(weights) for weights, _ in entries]
        remaining = Counter(place for listed in places for place in listed)
        partial: dict[int | None, dict[int, tuple[Tensor, Tensor]]] = defaultdict(dict)
        for (weights, compute_dws), listed in zip(entries, places, strict=True):
            dws = compute_dws()
            if len(dws) != len(weights):
                raise WeightGradError(f"{len(dws)} gradients were computed for {len(weights)} weights")
            done: list[tuple[Tensor, Tensor]] = []
            for weight, dw, place in zip(weights, dws, listed, strict=True):
                remaining[place] -= 1
                sums = partial[place]
                if dw is not None and weight.requires_grad:
                    sums[id(weight)] = weight, sums[id(weight)][1] + dw if id(weight) in sums else dw
                if not remaining[place]:
                    done += partial.pop(place).values()
            if done:
                torch.autograd.backward([weight for weight, _ in done], [dw for _, dw in done])

    def reset(self) -> None:
        """Forgets everything that waits (after an error)."""
        self._open = None
        self._waiting.clear()
        for delayed in self._watched.values():
            delayed.forget()


def _places(weights: Sequence[Tensor]) -> list[int | None]:
    """Which parameter each gradient ends in; None where that are several."""
    leaves = [leaf_of(weight) for weight in weights]
    return [None if leaf is None else id(leaf) for leaf in leaves]
