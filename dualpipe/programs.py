"""What a stage computes, as the executor calls it.

A value between stages is a tensor or a tuple of tensors, in any form: contiguous, a view, empty. What the executor
needs to know of it is in `edges`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from dualpipe.actions import Payload, StageKey
from dualpipe.edges import Edge, Value


class ForwardJob(NamedTuple):
    """One forward: the arguments of `StagePrograms.forward`."""

    key: StageKey
    microbatch: int
    input: Any


class BackwardJob(NamedTuple):
    """One backward: the arguments of `StagePrograms.backward`."""

    key: StageKey
    microbatch: int
    input: Any
    output: Any
    output_grad: Any


class PairResults(Protocol):
    """Takes the results of an overlapped pair as soon as they are there, and sends them while the pair still runs.

    What was not given here is sent after the pair. The methods may be called in any order, each at most once, on the
    stream on which the value is ready.
    """

    def output(self, value: Value) -> None:
        """The output of the pair's F."""

    def input_grad(self, value: Value) -> None:
        """The input gradient of the pair's B."""


class StagePrograms(Protocol):
    """What the stages of one rank compute. A `StageKey` is (stage, direction).

    A value between stages is a tensor or a tuple of tensors; the next stage gets what the stage returned. The tensors
    may be views and need not be contiguous.

    May also define:

    - `forward_backward(forward: ForwardJob, backward: BackwardJob[, results: PairResults]) -> (output, input_grad)`,
      which runs an overlapped pair; without it a pair is its F, then its B, and the F's output is sent between the two.
    - `after_forward(key, microbatch, output) -> Any`: what `backward` gets as `output` instead of the output itself,
      for example its gradient edges. Nobody but the send under way then holds the output's memory. Not called for the
      loss stage.
    - `last_weights(key)`: a context entered around a stage's last W (or what a last B leaves of it), after which its
      gradients are complete.
    """

    def forward(self, key: StageKey, microbatch: int, input: Any) -> Any:
        """Runs the forward of a stage.

        Args:
            key: which stage.
            microbatch: which microbatch, counted across directions.
            input: output of the previous stage; its tensors are leaves that require grad when gradients are on and the
                tensor has one. None on stage 0, which fetches its own.

        Returns:
            What the next stage gets. The loss stage may return anything it wants back in `backward`, or None.
        """
        ...

    def backward(self, key: StageKey, microbatch: int, input: Any, output: Any, output_grad: Any) -> Any:
        """Runs the backward for inputs; deferred dW land in the store's open queue.

        Args:
            key: which stage.
            microbatch: which microbatch.
            input: what `forward` was given.
            output: what `forward` returned, or what `after_forward` made of it.
            output_grad: gradient of `output`; None on the loss stage. Of a tuple a tuple, with None for tensors that
                have no gradient.

        Returns:
            The gradient of `input`, in its form; None on stage 0. In a tuple, None stands for zeros.
        """
        ...

    def no_sync(self, key: StageKey) -> AbstractContextManager[Any]:
        """A context in which gradient hooks accumulate only; entered around all but a stage's last backward and W."""
        ...

    def edge(self, payload: Payload, key: StageKey, microbatch: int) -> Edge | Sequence[Edge] | None:
        """What arrives: the input of a stage (activation) or the gradient of its output (gradient).

        Returns:
            One `Edge` for a tensor, a sequence of them for a tuple; None where the ranks tell each other (`hops`).
            Asked for every message before a run; the same on both ends. Of a gradient's tuple those without
            `has_grad` are left out by the executor.
        """
        ...
