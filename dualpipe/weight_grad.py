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
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comm_core.runtime.errors import MTMoEError


class WeightGradError(MTMoEError, RuntimeError):
    """Deferred weight gradients were used in a way that would lose or double some."""


class WeightGradQueue:
    """The deferred dW of one backward. Filled inside `WeightGradStore.collect`, emptied by `WeightGradStore.run`."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[Tensor, ...], Callable[[], Sequence[Tensor]]]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, weights: Sequence[Tensor], compute_dws: Callable[[], Sequence[Tensor]]) -> None:
        """Appends one closure that computes the gradients of `weights`, in their order."""
        self._entries.append((tuple(weights), compute_dws))

    def pop_all(self) -> list[tuple[tuple[Tensor, ...], Callable[[], Sequence[Tensor]]]]:
        """Takes every entry out; the queue is empty afterwards."""
        entries, self._entries = self._entries, []
        return entries


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
        """
        if self._open is not None:
            raise WeightGradError("WeightGradStore.collect() was entered inside itself; run one backward at a time")
        queue = WeightGradQueue()
        self._open = queue
        try:
            yield queue
        finally:
            self._open = None
            if len(queue):
                self._waiting[id(queue)] = queue

    def put(self, weight: Tensor, compute_dw: Callable[[], Tensor]) -> None:
        """Defers the gradient of one weight: `compute_dw()` returns it, in the shape of the weight."""
        self.put_many([weight], lambda: [compute_dw()])

    def put_many(self, weights: Sequence[Tensor], compute_dws: Callable[[], Sequence[Tensor]]) -> None:
        """Defers the gradients of several weights that one call computes together (a grouped GEMM).

        Args:
            weights: leaf parameters.
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
        remaining = Counter(id(weight) for weights, _ in entries for weight in weights)
        partial: dict[int, Tensor] = {}
        for weights, compute_dws in entries:
            dws = compute_dws()
            if len(dws) != len(weights):
                raise WeightGradError(f"{len(dws)} gradients were computed for {len(weights)} weights")
            done: list[tuple[Tensor, Tensor]] = []
            for weight, dw in zip(weights, dws, strict=True):
                remaining[id(weight)] -= 1
                total = partial.pop(id(weight)) + dw if id(weight) in partial else dw
                if remaining[id(weight)]:
                    partial[id(weight)] = total
                elif weight.requires_grad:
                    done.append((weight, total))
            if done:
                torch.autograd.backward([weight for weight, _ in done], [dw for _, dw in done])

    def reset(self) -> None:
        """Forgets everything that waits (after an error)."""
        self._open = None
        self._waiting.clear()


class _SplitLinear(torch.autograd.Function):
    """y = x W^T + b whose backward returns dX (and db) and puts dW into a store."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owner: list[Tensor], store: WeightGradStore
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The list hides the parameter: autograd.Function would take a bare tensor argument as an input of the graph.
        ctx.owner, ctx.store = owner, store
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows, flat = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        ctx.store.put(ctx.owner[0], lambda: rows.t().matmul(flat))
        return dx, None, db, None, None


def split_linear(x: Tensor, weight: Tensor, store: WeightGradStore, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` that defers the gradient of its weight to `store`.

    Uses the ordinary function where deferring would lose the gradient or its dtype: without gradients, with an
    input that needs none (then no backward of this function would run), with a frozen weight, or under autocast.

    Args:
        x: (..., in_features), any floating dtype.
        weight: (out_features, in_features), a leaf parameter.
        store: where dW goes.
        bias: (out_features) or None; its gradient is not deferred.

    Returns:
        (..., out_features).
    """
    plain = not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad)
    if plain or torch.is_autocast_enabled(x.device.type):
        return nn.functional.linear(x, weight, bias)
    result: Tensor = _SplitLinear.apply(x, weight.detach(), bias, [weight], store)
    return result


class _SplitForward:
    """The forward of one patched nn.Linear. A class, so that a patched module can still be copied and pickled."""

    def __init__(self, module: nn.Linear, store: WeightGradStore) -> None:
        self._module, self._store = module, store

    def __call__(self, input: Tensor) -> Tensor:
        return split_linear(input, self._module.weight, self._store, self._module.bias)


class SplitWeightGrads:
    """Makes every plain nn.Linear under a module defer its dW. Active from construction to `revert()`.

    Usable as a context manager. Subclasses of nn.Linear with their own forward and modules that are already patched
    are left alone; `modules` lists those that were patched.
    """

    def __init__(self, module: nn.Module, store: WeightGradStore) -> None:
        self.modules: list[nn.Linear] = []
        for child in module.modules():
            own_forward = type(child).forward is not nn.Linear.forward or "forward" in child.__dict__
            if isinstance(child, nn.Linear) and not own_forward:
                child.__dict__["forward"] = _SplitForward(child, store)
                self.modules.append(child)

    def revert(self) -> None:
        """Gives every module its own forward back; harmless when repeated."""
        for module in self.modules:
            module.__dict__.pop("forward", None)
        self.modules = []

    def __enter__(self) -> SplitWeightGrads:
        return self

    def __exit__(self, *_: object) -> None:
        self.revert()


def split_weight_grads(module: nn.Module, store: WeightGradStore) -> SplitWeightGrads:
    """Defers the dW of every plain nn.Linear under `module` to `store`; see `SplitWeightGrads`."""
    return SplitWeightGrads(module, store)
