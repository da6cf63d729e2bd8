"""Stages under torch's DistributedDataParallel: gradients are reduced once a step, at the last W.

DDP counts the gradient hooks of one backward, and reduces a bucket when each of its parameters has had one. A pipeline
runs many backwards, of which the last I gives some parameters their last gradient (norms, biases) and the last W the
others; between the two the W of earlier microbatches run, whose hooks must not count. So DDP counts nothing until the
last W: forwards run in `no_sync`, where it prepares nothing. Then it is told to expect a backward, W delivers, and
parameters that W gave nothing get a gradient of zero, which changes no sum and lets their hook run. Everything a
parameter has gathered is reduced then, whether it came by I or by W.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from comm_core.runtime.errors import UsageError


def refuse_unsupported(modules: Iterable[nn.Module]) -> None:
    """Settings under which DDP would reduce too early or twice.

    Raises:
        UsageError: `find_unused_parameters`, `static_graph`, DDP inside of a stage, a parameter of two stages with DDP.
    """
    owned: set[int] = set()
    for module in modules:
        if any(isinstance(child, DistributedDataParallel) for child in module.modules() if child is not module):
            raise UsageError(
                "DistributedDataParallel inside of a stage",
                allowed="around a whole stage",
                fix="wrap the module that is given to the pipeline",
            )
        mine = {id(parameter) for parameter in module.parameters()}
        if isinstance(module, DistributedDataParallel):
            for name in ("find_unused_parameters", "static_graph"):
                if getattr(module, name):
                    raise UsageError(
                        f"a stage under DistributedDataParallel with {name}=True: it looks for parameters in the graph "
                        "of one forward, where weights that are deferred to W are not",
                        allowed=f"{name}=False",
                        fix="leave it out: parameters without a gradient are reduced as zero",
                    )
            if mine & owned:
                raise UsageError(
                    "a parameter of two stages under DistributedDataParallel: each would reduce it",
                    allowed="parameters of one stage",
                    fix="untie them, or reduce the gradients after the step instead",
                )
        owned |= mine


def quiet(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """For a forward: DDP prepares for no backward."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()


@contextlib.contextmanager
def reducing(module: nn.Module) -> Iterator[None]:
    """Around the last W of a stage: all of its gradients are reduced when the block ends."""
    if not isinstance(module, DistributedDataParallel):
        yield
        return
    left = {id(parameter): parameter for parameter in module.module.parameters() if parameter.requires_grad}

    def delivered(parameter: Tensor) -> None:
        left.pop(id(parameter), None)

    hooks = [parameter.register_post_accumulate_grad_hook(delivered) for parameter in left.values()]
    module.reducer.prepare_for_backward([])
    try:
        yield
        others: list[Tensor] = list(left.values())
        if others:
            torch.autograd.backward(others, [other.new_zeros(()).expand_as(other) for other in others])
    finally:
        for hook in hooks:
            hook.remove()
