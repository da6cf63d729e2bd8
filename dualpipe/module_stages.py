"""Stages made of plain `torch.nn.Module`s: the simplest `StagePrograms`, and the reference for others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dualpipe import data_parallel
from dualpipe.actions import Payload, StageKey
from dualpipe.edges import Edge, Value, tensors_of
from dualpipe.programs import BackwardJob, ForwardJob

EdgeOf = Callable[[Payload, StageKey, int], Edge | Sequence[Edge] | None]
Criterion = Callable[..., Tensor]


class ModuleStages:
    """The stages of one rank for one step.

    Args:
        modules: the module of each stage this rank holds. Stage 0 is called with the tensors of `inputs`, any other
            with what the previous stage returned: a tensor, or each tensor of a tuple as an argument. Tensors may be
            views. A gradient goes back through those that are floating, unless both ranks know that none is needed.
        num_stages: stages of the whole model.
        edge: shape, dtype and device of what arrives from other ranks; None where the ranks tell each other.
        inputs: model inputs by microbatch, where this rank holds a stage 0.
        labels: arguments of the criterion after the output, by microbatch, where this rank holds a last stage.
        criterion: `criterion(output, *labels) -> scalar loss`, with each tensor of a tuple as an argument; None only
            for inference.
        keep_outputs: keep the last stage's outputs in `outputs`.

    A module may be under torch's DistributedDataParallel, see `data_parallel`. Where all modules are of one class with
    `overlapped_forward_backward` (mt_moe.OverlapStage), pairs run through it as `compat` does, with places in the graph
    for outputs.

    Attributes:
        losses: detached loss by microbatch, on the rank of the last stage.
        outputs: detached output by microbatch, if kept; a tensor or a tuple.
    """

    def __init__(
        self,
        modules: Mapping[StageKey, nn.Module],
        *,
        num_stages: int,
        edge: EdgeOf | None = None,
        inputs: Mapping[int, Sequence[Tensor]],
        labels: Mapping[int, Sequence[Tensor]],
        criterion: Criterion | None,
        keep_outputs: bool = False,
    ) -> None:
        data_parallel.refuse_unsupported(modules.values())
        self._edge = edge
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Value] = {}
        self._modules, self._last = dict(modules), num_stages - 1
        self._inputs, self._labels, self._criterion, self._keep = inputs, labels, criterion, keep_outputs
        kinds = {type(module) for module in modules.values()}
        if len(kinds) == 1 and getattr(kinds.pop(), "overlapped_forward_backward", None) is not None:
            self.forward_backward = self._forward_backward

    def edge(self, payload: Payload, key: StageKey, microbatch: int) -> Edge | Sequence[Edge] | None:
        """What arrives from another rank."""
        return None if self._edge is None else self._edge(payload, key, microbatch)

    def forward(self, key: StageKey, microbatch: int, input: Value | None) -> Value | None:
        """Runs the module; on the last stage also the criterion, whose loss is then the output."""
        arguments = self._inputs[microbatch] if input is None else tensors_of(input)
        with data_parallel.quiet(self._modules[key]):
            output: Any = self._modules[key](*arguments)
        tensors = tensors_of(output, stage=key.stage)
        if key.stage != self._last:
            return output if isinstance(output, Tensor) else tensors
        loss = None if self._criterion is None else self._criterion(*tensors, *self._labels.get(microbatch, ()))
        return self._ended(microbatch, tensors, isinstance(output, Tensor), loss)

    def _ended(self, microbatch: int, tensors: Sequence[Tensor], is_bare: bool, loss: Tensor | None) -> Tensor | None:
        """Keeps what the last stage has found; returns the loss."""
        if self._keep:
            detached = tuple(tensor.detach() for tensor in tensors)
            self.outputs[microbatch] = detached[0] if is_bare else detached
        if loss is not None:
            self.losses[microbatch] = loss.detach()
        return loss

    def _forward_backward(self, forward: ForwardJob, backward: BackwardJob) -> tuple[Value | None, Value | None]:
        """One overlapped pair through the class hook of the modules."""
        module, other = self._modules[forward.key], self._modules[backward.key]
        last, is_loss = forward.key.stage == self._last, backward.key.stage == self._last
        grads = backward.output_grad if isinstance(backward.output_grad, tuple) else (backward.output_grad,)
        pairs = [] if is_loss else [(o, g) for o, g in zip(backward.output, grads, strict=True) if g is not None]
        outputs, loss = type(module).overlapped_forward_backward(  # type: ignore[attr-defined]
            module,
            list(self._inputs[forward.microbatch] if forward.input is None else tensors_of(forward.input)),
            self._criterion if last else None,
            list(self._labels.get(forward.microbatch, ())) if last else [],
            other,
            backward.output if is_loss else None,
            None if is_loss else [output for output, _ in pairs],
            None if is_loss else [grad for _, grad in pairs],
        )
        tensors = tensors_of(outputs if isinstance(outputs, Tensor) else tuple(outputs), stage=forward.key.stage)
        value: Value = tensors[0] if len(tensors) == 1 else tensors
        found = self._ended(forward.microbatch, tensors, len(tensors) == 1, loss) if last else value
        return found, self._input_grad(backward.input)

    def after_forward(self, key: StageKey, microbatch: int, output: Value) -> list[GradientEdge | None]:
        """Where the gradients of an output enter the graph. With it the output's memory need not stay."""
        return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors_of(output)]

    def backward(
        self, key: StageKey, microbatch: int, input: Value | None, output: Any, output_grad: Value | None
    ) -> Value | None:
        """Runs autograd from the loss, or from the output with its gradient, and returns the gradient of the input."""
        if key.stage == self._last:
            torch.autograd.backward(output)
        else:
            grads = output_grad if isinstance(output_grad, tuple) else [output_grad] * len(output)
            pairs = [(o, g) for o, g in zip(output, grads, strict=True) if o is not None and g is not None]
            if pairs:  # no parameter before this point is trained otherwise
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return self._input_grad(input)

    @staticmethod
    def _input_grad(input: Value | None) -> Value | None:
        if input is None or isinstance(input, Tensor):
            return None if input is None else input.grad
        return tuple(_gradient(tensor) for tensor in tensors_of(input))

    def no_sync(self, key: StageKey) -> AbstractContextManager[Any]:
        """The module's own `no_sync()` where it has one (data-parallel wrappers)."""
        enter = getattr(self._modules[key], "no_sync", None)
        return contextlib.nullcontext() if enter is None else enter()

    def last_weights(self, key: StageKey) -> AbstractContextManager[Any]:
        """Under DistributedDataParallel the gradients of the stage are reduced here."""
        return data_parallel.reducing(self._modules[key])


def _gradient(leaf: Tensor) -> Tensor | None:
    """Of one of several inputs: zeros for one that was not used, None for one that has no gradient."""
    return torch.zeros_like(leaf) if leaf.grad is None and leaf.requires_grad else leaf.grad
