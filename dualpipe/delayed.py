"""Modules that keep their weight gradients by themselves until they are asked for: Transformer Engine's, and ours.

Transformer Engine's linears, built with `delay_wgrad_compute=True`, keep in `module.wgrad_store` what the weight
gradient needs, and compute the oldest entry in `module.backward_dw()`. Three things are left to whoever calls it, and
are done here so that the rules of `weight_grad` hold:

- It must be called once for each entry of a microbatch, and a module that is used twice makes two.
- It writes its result over `weight.grad`, and drops that of a bias where there is a gradient already. With several
  microbatches or uses that would lose gradients; so it finds no gradient, and what it leaves is added up.
- No hook of the weight runs. So the sum is delivered to the weight like any other. Where the module adds to a buffer
  of a data-parallel wrapper instead (`main_grad`) it leaves nothing, and calls its own hooks.

Autograd sees these weights, so their hooks run in I too, with no gradient; `data_parallel` and Megatron's own wrapper
are prepared for it.

Modules with `held_weight_gradients` (an `mt_moe` layer, also under Megatron) give the entries away as they are.
Nothing of Transformer Engine is imported; a module is known by what it has.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from comm_core.runtime.errors import UsageError
from dualpipe.weight_grad import Delayed, WeightGradError, WeightGradQueue


class _EngineModule:
    """A module with Transformer Engine's protocol."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def pending(self) -> int:
        """See `Delayed`."""
        context = self.module.wgrad_store.context
        return 0 if context is None else int(context.qsize())

    def hand_over(self, queue: WeightGradQueue, count: int) -> None:
        """See `Delayed`."""
        weights = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        queue.add(weights, lambda: self._compute(weights, count))

    def forget(self) -> None:
        """See `Delayed`."""
        while self.pending():
            self.module.wgrad_store.context.get()

    def _compute(self, weights: list[nn.Parameter], count: int) -> list[Tensor | None]:
        """The oldest entries: gradients are computed in the order of the backwards, whatever the order of the W."""
        sums: list[Tensor | None] = [None] * len(weights)
        before = [weight.grad for weight in weights]
        end = self.pending() - count
        try:
            while self.pending() > end:
                for weight in weights:
                    weight.grad = None
                left = self.pending()
                self.module.backward_dw()
                if self.pending() >= left:
                    raise WeightGradError(f"{type(self.module).__name__}.backward_dw() left its {left} entries alone")
                for index, weight in enumerate(weights):
                    sums[index] = _added(sums[index], weight.grad)
        finally:
            for weight, grad in zip(weights, before, strict=True):
                weight.grad = grad
        return sums


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


class _HoldingModule:
    """A module with `held_weight_gradients`: a list of entries with `len` and `take`."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def pending(self) -> int:
        """See `Delayed`."""
        return len(self.module.held_weight_gradients)

    def hand_over(self, queue: WeightGradQueue, count: int) -> None:
        """See `Delayed`."""
        for weights, compute in self.module.held_weight_gradients.take(count):
            queue.add(weights, compute)

    def forget(self) -> None:
        """See `Delayed`."""
        self.module.held_weight_gradients.take(self.pending())


def delayed_in(module: nn.Module) -> list[Delayed]:
    """Everything under a module that may keep weight gradients, for `WeightGradStore.watch`."""
    found: list[Delayed] = []
    for child in module.modules():
        if _delays(child):
            found.append(_EngineModule(child))
        elif hasattr(child, "held_weight_gradients"):
            found.append(_HoldingModule(child))
    return found


def _delays(module: nn.Module) -> bool:
    store = getattr(module, "wgrad_store", None)
    return store is not None and callable(getattr(module, "backward_dw", None)) and bool(store.delay_wgrad_compute())


def refuse_undelayed(module: nn.Module) -> None:
    """Finds modules of Transformer Engine whose weight gradients a schedule could not run apart.

    Raises:
        UsageError: one that was built without `delay_wgrad_compute=True`.
    """
    for name, child in module.named_modules():
        has_store = hasattr(child, "wgrad_store") and callable(getattr(child, "backward_dw", None))
        if (has_store or _is_old_engine(child)) and not _delays(child):
            raise UsageError(
                f"{name or 'the stage'}: {type(child).__name__} without delay_wgrad_compute, in a stage whose backward "
                "is split: its weight gradient would run in I",
                allowed="delay_wgrad_compute=True (Transformer Engine 2.3 or later)",
                fix="build it so (under Megatron: config.delay_wgrad_compute = True before the model is built), or do "
                "not split the backward (Pipeline: backward_split=False, PipelineSchedule: split_weight_grad=False)",
            )


def _is_old_engine(module: nn.Module) -> bool:
    """Transformer Engine's linears before 2.3, which have no store. Its norms have vectors alone."""
    ours = any(base.__module__.startswith("transformer_engine.") for base in type(module).__mro__)
    matrices = any(parameter.dim() > 1 for parameter in module._parameters.values() if parameter is not None)
    return ours and matrices and not hasattr(module, "wgrad_store")
