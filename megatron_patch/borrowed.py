"""Our experts on the weights of a stock experts module, whose parameters, keys and hooks stay as they are.

The stock modules hold one parameter an expert: SequentialMLP in one module each, TEGroupedMLP as `weight0`, `weight1`
and so on of a grouped linear. A grouped product wants them in one tensor. Stacking them would copy all weights at each
call; so at the first call parameters that own their memory are moved, once, into one tensor of which they become
views. Parameters that lie in somebody else's memory (the buffers of a distributed optimizer) stay where they are:
they are used as one tensor if they lie at equal distances there, and else by Transformer Engine's product, which takes
them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mt_moe import experts as implementations
from mt_moe.data_path import DataPath
from mt_moe.dispatcher import Dispatched
from mt_moe.expert_call import Implementation
from mt_moe.expert_linear import Defer
from mt_moe.experts import expert_mlp
from mt_moe.products import packed_view


def pack(parameters: Sequence[Tensor]) -> bool:
    """Makes parameters of one shape views of one tensor, where they own their memory; values do not change.

    Returns:
        True where they are views of one tensor now, at equal distances; False where their memory is another's.
    """
    if packed_view(parameters) is not None:
        return True
    if any(p.untyped_storage().nbytes() != p.nbytes or p.data_ptr() == 0 for p in parameters):
        return False
    with torch.no_grad():
        whole = torch.empty(
            len(parameters), *parameters[0].shape, dtype=parameters[0].dtype, device=parameters[0].device
        )
        for place, parameter in zip(whole, parameters, strict=True):
            place.copy_(parameter)
            parameter.data = place
    return True


class BorrowedExperts:
    """The local experts of a stock module.

    Args:
        experts: the stock module.
        data_path: what is kept for backward, and multiprocessors.
        implementation: of `expert_mlp`.

    Attributes:
        recipe: computes instead of the implementation where one is set.
    """

    def __init__(self, experts: Any, data_path: DataPath, implementation: str) -> None:
        self._experts, self._data_path, self._implementation = experts, data_path, implementation
        self._packs, self._at = True, (0, 0)
        self.recipe: Implementation | None = None
        self._parts = [module for module in experts.modules() if module is not experts]

    @staticmethod
    def why_not(experts: Any, config: Any) -> str | None:
        """Why the arithmetic of a stock module is not `expert_mlp`'s; None where it is."""
        plain = {
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "moe_mlp_glu_interleave_size": None,
            "activation_func_clamp_value": None,
            "glu_linear_offset": 0.0,
            "fp8": None,
            "fp4": None,
            "fine_grained_activation_offloading": False,
        }
        for name, wanted in plain.items():
            if getattr(config, name, wanted) != wanted:
                return f"{name}={getattr(config, name)!r}"
        known = hasattr(experts, "local_experts") or hasattr(getattr(experts, "linear_fc1", None), "weight0")
        return None if known else f"weights of {type(experts).__name__}"

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters of fc1 and fc2, one an expert."""
        if hasattr(self._experts, "local_experts"):
            local = self._experts.local_experts
            pair = [expert.linear_fc1.weight for expert in local], [expert.linear_fc2.weight for expert in local]
        else:
            linears = self._experts.linear_fc1, self._experts.linear_fc2
            # Not getattr on the module, which looks in several places for each of many names.
            first, second = ([own._parameters[f"weight{index}"] for index in range(own.num_gemms)] for own in linears)
            pair = first, second
        return pair

    def __call__(self, arrived: Dispatched, *, defer: Defer | None, rows_again: Callable[[], Tensor] | None) -> Tensor:
        """Rows that have arrived, through their experts."""
        self._call_hooks()
        fc1, fc2 = self.weights()
        path = self._data_path
        return expert_mlp(
            arrived.rows,
            arrived.counts,
            arrived.row_weights,
            fc1,
            fc2,
            defer=defer,
            implementation=self._choose(arrived.rows, fc1, fc2),
            recipe=self.recipe,
            ends=arrived.ends,
            recompute=path.recompute,
            rows_again=rows_again,
            spare_sms=path.gemm_spare_sms,
            release=path.release,
        )

    def _choose(self, rows: Tensor, fc1: Sequence[Tensor], fc2: Sequence[Tensor]) -> str:
        """The implementation asked for; for "auto" on an accelerator the one that copies no weights."""
        if self._implementation != "auto" or rows.device.type == "cpu":
            return self._implementation
        # Where they were found last time they need not be looked for: a parameter that moves has another address.
        at = fc1[0].data_ptr(), fc2[-1].data_ptr()
        if at != self._at:
            self._at, self._packs = at, pack(fc1) and pack(fc2)
            if self._packs:
                self._at = fc1[0].data_ptr(), fc2[-1].data_ptr()
        if self._packs:
            return "auto"
        widths = rows.shape[1], fc1[0].shape[0], fc2[0].shape[1]
        return "auto" if implementations.unavailable("te", rows.device, rows.dtype, widths) else "te"

    def _call_hooks(self) -> None:
        """What waits in front of the forward of the linears: data parallelism gathers their parameters there."""
        for module in self._parts:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
