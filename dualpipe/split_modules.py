"""Which modules of a stage defer their weight gradients, and how each kind is brought to it.

    nn.Linear                  its forward becomes `split_linear`
    a module with weights      torch's grouped product of an input with one of them (or a view of it), called in the
    of three dimensions        module's forward, becomes `split_grouped_mm`
    `defer_weight_grads`       a module with this method (mt_moe.MoELayer) is given the store's `put_many`
    `backward_dw`              Transformer Engine's modules and others that keep what they owe: see `delayed`

Everything else keeps its weight gradients in I: norms, biases, embeddings, convolutions. That is right, only not split.

A weight that two modules share is deferred where both defer, and both of its gradients meet before it is delivered. It
is left whole where one of them does not. What modules do not show is found in the backward (`WeightGradQueue.check`).
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from comm_core.runtime.errors import UsageError
from dualpipe.delayed import delayed_in, refuse_undelayed
from dualpipe.split_functions import grouped_functions, split_grouped_mm, split_linear
from dualpipe.weight_grad import Delayed, WeightGradStore, leaf_of


class _SplitForward:
    """The forward of one patched nn.Linear. A class, so that a patched module can still be copied and pickled."""

    def __init__(self, module: nn.Linear, store: WeightGradStore) -> None:
        self._module, self._store = module, store

    def __call__(self, input: Tensor) -> Tensor:
        return split_linear(input, self._module.weight, self._store, self._module.bias)


class _GroupedForward:
    """The forward of a module that has weights for grouped products."""

    def __init__(self, module: nn.Module, store: WeightGradStore) -> None:
        self._module, self._store = module, store

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weights = {id(p) for p in self._module._parameters.values() if p is not None and p.dim() == 3}
        with _GroupedMode(weights, self._store):
            return type(self._module).forward(self._module, *args, **kwargs)


class _GroupedMode(TorchFunctionMode):
    """Sees torch's functions while a forward runs, and splits the grouped products with the given weights."""

    def __init__(self, weights: set[int], store: WeightGradStore) -> None:
        super().__init__()
        self._weights, self._store = weights, store

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in grouped_functions() and torch.is_grad_enabled():
            x, weight, offs, bias, dtype = _product_arguments(*args, **kwargs)
            leaf = leaf_of(weight) if weight.requires_grad and weight.dim() == 3 and x.dim() == 2 else None
            if id(leaf) in self._weights and offs is not None and bias is None and dtype in (None, x.dtype):
                return split_grouped_mm(x, weight, offs, self._store)
        return func(*args, **kwargs)


def _product_arguments(
    x: Tensor,
    weight: Tensor | None = None,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    mat2: Tensor | None = None,
    mat_b: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, torch.dtype | None]:
    found = [given for given in (weight, mat2, mat_b) if given is not None]
    return x, found[0], offs, bias, out_dtype


class SplitWeightGrads:
    """Makes the modules under a stage defer their dW, by the table of this module, from construction to `revert()`.

    Usable as a context manager. Modules of a kind with a forward of their own and those that are patched already are
    left alone; `modules` lists what was patched.

    Args:
        module: the stage.
        store: where dW goes.
        whole: defer nothing, but take over what modules keep by themselves (`delayed`), which would be lost.

    Raises:
        UsageError: a module of Transformer Engine that was built without `delay_wgrad_compute`, or a stage under FSDP.
    """

    def __init__(self, module: nn.Module, store: WeightGradStore, *, whole: bool = False) -> None:
        self.modules: list[nn.Module] = []
        self._store, self._told = store, list[Any]()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._delayed: list[Delayed] = delayed_in(module)
        if not whole:
            refuse_undelayed(module)
            _refuse_sharded(module)
            self._patch(module)
        for delayed in self._delayed:
            store.watch(delayed)

    def _patch(self, stage: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in stage.named_parameters()}
        for child in _splittable(stage):
            forward = _SplitForward if isinstance(child, nn.Linear) else _GroupedForward
            child.__dict__["forward"] = forward(child, self._store)  # type: ignore[arg-type]
            self.modules.append(child)
            for weight in _weights_of(child):
                if weight.requires_grad:
                    note = functools.partial(_note, self._store, weight, names.get(id(weight), "a weight"))
                    self._hooks.append(weight.register_hook(note))
        for child in stage.modules():
            tell = getattr(child, "defer_weight_grads", None)
            if tell is not None:
                tell(self._store.put_many)
                self._told.append(tell)

    def revert(self) -> None:
        """Gives every module its own forward back; harmless when repeated."""
        for module in self.modules:
            module.__dict__.pop("forward", None)
        for hook in self._hooks:
            hook.remove()
        for tell in self._told:
            tell(None)
        for delayed in self._delayed:
            self._store.unwatch(delayed)
        self.modules, self._hooks, self._told, self._delayed = [], [], [], []

    def __enter__(self) -> SplitWeightGrads:
        return self

    def __exit__(self, *_: object) -> None:
        self.revert()


def split_weight_grads(module: nn.Module, store: WeightGradStore) -> SplitWeightGrads:
    """Defers the dW under `module` to `store`; see `SplitWeightGrads`."""
    return SplitWeightGrads(module, store)


def _note(store: WeightGradStore, weight: Tensor, name: str, _: Tensor) -> None:
    store.saw(weight, name)


def _weights_of(module: nn.Module) -> list[Tensor]:
    """What a module would defer; nothing where a parametrization computes it."""
    if isinstance(module, nn.Linear):
        weight = module._parameters.get("weight")
        return [] if weight is None else [weight]
    return [p for p in module._parameters.values() if p is not None and p.dim() == 3]


def _can_split(module: nn.Module) -> bool:
    if "forward" in module.__dict__ or hasattr(module, "wgrad_store") or hasattr(module, "defer_weight_grads"):
        return False
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    if hasattr(module, "held_weight_gradients") or isinstance(module, torch.jit.ScriptModule):
        return False
    return bool(_weights_of(module))


def _splittable(stage: nn.Module) -> list[nn.Module]:
    """Modules all of whose weights are deferred by everyone who owns them."""
    owners: dict[int, list[nn.Module]] = defaultdict(list)
    inner = {id(part) for child in stage.modules() if hasattr(child, "defer_weight_grads") for part in child.modules()}
    for child in stage.modules():
        for parameter in child._parameters.values():
            owners[id(parameter)].append(child)
    found = []
    for child in stage.modules():
        if _can_split(child) and id(child) not in inner:
            linear = isinstance(child, nn.Linear)
            others = [owner for weight in _weights_of(child) for owner in owners[id(weight)]]
            if all(_can_split(owner) and isinstance(owner, nn.Linear) == linear for owner in others):
                found.append(child)
    return found


def _refuse_sharded(stage: nn.Module) -> None:
    """FSDP takes the gradients out at the end of I, and frees the weights that W would still read."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name))
    if any(isinstance(child, kinds) for child in stage.modules()):
        raise UsageError(
            "a stage under FSDP whose backward is split",
            allowed="plain modules or DistributedDataParallel",
            fix="do not split the backward (backward_split=False), or use DistributedDataParallel",
        )
