"""The layer under torch's DistributedDataParallel: what it must leave alone.

DDP makes parameters and buffers equal on all ranks. The experts of a rank are nobody else's, and what a router has
counted since the last step are its own tokens:

    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, local_names(model))
    model = DistributedDataParallel(model)

DDP takes the mean of a gradient over the ranks; an expert's gradient is the sum over the tokens of all ranks. Divide
the latter by the number of ranks, or let the loss be a sum and multiply the former.
"""

from __future__ import annotations

from torch import nn

from mt_moe.experts import Experts
from mt_moe.router import Router


def local_names(model: nn.Module) -> list[str]:
    """Names of the parameters and buffers of all MoE layers in `model` that differ between ranks.

    Experts that are all on this rank (a group of one) are equal on all ranks, and DDP's to keep so.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, Experts) and module.fc1.shape[0] < module.config.num_experts:
            found += [f"{prefix}{parameter}" for parameter, _ in module.named_parameters()]
        elif isinstance(module, Router):
            found += [f"{prefix}tokens_per_expert", f"{prefix}balance_counts"]
    return found
