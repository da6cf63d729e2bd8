"""Stages made of plain `torch.nn.Module`s: the simplest `StagePrograms`, and the reference for others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Payload, StageKey
from dualpipe.p2p import Edge

EdgeOf = Callable[[Payload, StageKey, int], Edge]
Criterion = Callable[..., Tensor]


class ModuleStages:
    """The stages of one rank for one step.

    Args:
        modules: the module of each stage this rank holds. Stage 0 is called with the tensors of `inputs`, any other
            with the one tensor that the previous stage returned; each returns one tensor.
        num_stages: stages of the whole model.
        edge: shape, dtype and device of what arrives from other ranks.
        inputs: model inputs by microbatch, where this rank holds a stage 0.
        labels: arguments of the criterion after the output, by microbatch, where this rank holds a last stage.
        criterion: `criterion(output, *labels) -> scalar loss`; None only for inference.
        keep_outputs: keep the last stage's outputs in `outputs`.

    Attributes:
        losses: detached loss by microbatch, on the rank of the last stage.
        outputs: detached output by microbatch, if kept.
    """

    def __init__(
        self,
        modules: Mapping[StageKey, nn.Module],
        *,
        num_stages: int,
        edge: EdgeOf,
        inputs: Mapping[int, Sequence[Tensor]],
        labels: Mapping[int, Sequence[Tensor]],
        criterion: Criterion | None,
        keep_outputs: bool = False,
    ) -> None:
        self.edge = edge
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self._modules, self._last = dict(modules), num_stages - 1
        self._inputs, self._labels, self._criterion, self._keep = inputs, labels, criterion, keep_outputs

    def forward(self, key: StageKey, microbatch: int, input: Tensor | None) -> Tensor | None:
        """Runs the module; on the last stage also the criterion, whose loss is then the output."""
        arguments = self._inputs[microbatch] if input is None else (input,)
        output: Tensor = self._modules[key](*arguments)
        if not isinstance(output, Tensor):
            raise UsageError(
                f"stage {key.stage} returned {type(output).__name__}", allowed="one tensor", fix="wrap the module"
            )
        if key.stage != self._last:
            return output
        if self._keep:
            self.outputs[microbatch] = output.detach()
        if self._criterion is None:
            return None
        loss = self._criterion(output, *self._labels.get(microbatch, ()))
        self.losses[microbatch] = loss.detach()
        return loss

    def backward(
        self, key: StageKey, microbatch: int, input: Tensor | None, output: Tensor | None, output_grad: Tensor | None
    ) -> Tensor | None:
        """Runs autograd from the loss, or from the output with its gradient, and returns the gradient of the input."""
        assert output is not None
        torch.autograd.backward(output, output_grad)
        return None if input is None else input.grad

    def no_sync(self, key: StageKey) -> AbstractContextManager[Any]:
        """The module's own `no_sync()` where it has one (data-parallel wrappers)."""
        enter = getattr(self._modules[key], "no_sync", None)
        return contextlib.nullcontext() if enter is None else enter()
