"""Megatron's linears give their weight gradients to a store, so that W can run apart from I.

Column- and row-parallel linears both call one function of `megatron.core.tensor_parallel.layers` by its
module-global name; replacing that name covers attention and MLA projections, dense MLPs, SequentialMLP experts, shared
experts and the output layer. Router, norms and embedding keep their gradients in I; they are small.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from dualpipe.split_functions import split_linear
from dualpipe.weight_grad import WeightGradStore
from megatron_patch.patches import ANY, Patch

STORE = WeightGradStore()
"""Where Megatron's linears put weight gradients; a schedule collects from it. Outside a collection dW runs at once."""


def _can_split(bias: Any, fusion: bool, allreduce_dgrad: bool, sequence_parallel: bool) -> bool:
    return bias is None and not fusion and not allreduce_dgrad and not sequence_parallel and torch.is_grad_enabled()


def _split_linear(original: Any) -> Any:
    def linear_with_grad_accumulation_and_async_allreduce(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool = False,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if weight.requires_grad and _can_split(bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel):
            return split_linear(input, weight, STORE)
        return original(
            input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, *args, **kwargs
        )

    # Megatron keeps a flag of its own on the function object.
    linear_with_grad_accumulation_and_async_allreduce.warned = True  # type: ignore[attr-defined]
    linear_with_grad_accumulation_and_async_allreduce.defers = True  # type: ignore[attr-defined]
    return linear_with_grad_accumulation_and_async_allreduce


def is_deferring() -> bool:
    """True while Megatron's linears give their weight gradients to `STORE`, and so must all others."""
    layers = sys.modules.get("megatron.core.tensor_parallel.layers")
    function = getattr(layers, "linear_with_grad_accumulation_and_async_allreduce", None)
    return bool(getattr(function, "defers", False))


def patches() -> list[Patch]:
    """The one seam that lets a schedule defer the weight gradients of Megatron's local linears."""
    return [
        Patch(
            "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce",
            _split_linear,
            ANY,
            "weight gradients must be deferrable for schedules that split backward in I and W",
        )
    ]
