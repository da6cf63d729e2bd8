"""The layers that bench_moe_layer.py compares: Megatron's own by dispatcher, and ours on the same weights."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from comm_core.runtime import device as devices
from mt_moe import DataPath, MoEConfig, MoELayer
from mt_moe.recipes import emulated


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a layer: tokens a rank are sequence times batch."""

    hidden: int
    ffn: int
    num_experts: int
    num_topk: int
    sequence: int
    batch: int

    @property
    def num_tokens(self) -> int:
        """Tokens of a rank."""
        return self.sequence * self.batch


SHAPES = {
    "lite": Shape(2048, 1408, 64, 6, 4096, 4),
    "v3": Shape(7168, 2048, 64, 8, 4096, 2),
    "tiny": Shape(128, 128, 8, 3, 16, 2),
}


def megatron_config(shape: Shape, *, flex: bool = False, grouped: bool = True) -> Any:
    """Megatron's configuration of one layer; `flex` for its DeepEP dispatcher, else alltoall."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    kind: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    if flex:
        kind = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
    return TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=16,
        ffn_hidden_size=shape.ffn,
        moe_ffn_hidden_size=shape.ffn,
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.num_topk,
        expert_model_parallel_size=dist.get_world_size(),
        moe_grouped_gemm=grouped,
        moe_permute_fusion=grouped,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=grouped,
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        moe_router_load_balancing_type="none",
        moe_router_score_function="sigmoid",
        moe_router_dtype="fp32",
        moe_aux_loss_coeff=0.0,
        gradient_accumulation_fusion=False,
        **kind,
    )


def stock_layer(shape: Shape, device: torch.device, *, flex: bool = False) -> Any:
    """Megatron's layer, its experts Transformer Engine's grouped linears on a device and plain ones on the CPU."""
    from megatron.core.transformer.moe.moe_layer import MoELayer as Stock

    on_device = device.type != "cpu"
    config = megatron_config(shape, flex=flex, grouped=on_device)
    layer = Stock(config, submodules(shape, grouped=on_device), layer_number=1)
    layer = layer.to(device)
    layer.set_layer_number(1)
    return layer


def submodules(shape: Shape, *, grouped: bool) -> Any:
    """Of the stock layer."""
    import functools

    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    spec = get_moe_module_spec(use_te=grouped, num_experts=shape.num_experts, moe_grouped_gemm=grouped)
    if isinstance(spec, functools.partial):
        return spec.keywords["submodules"] if "submodules" in spec.keywords else spec.args[0]
    return spec.submodules


def our_layer(stock: Any, data_path: DataPath, *, implementation: str = "auto") -> Any:
    """The drop-in layer with the weights of a stock one."""
    from megatron_patch.moe_spec import MTMoELayer

    weight = next(stock.parameters())
    layer = MTMoELayer(
        stock.config, stock.submodules, layer_number=1, data_path=data_path, experts_implementation=implementation
    )
    layer = layer.to(weight.device)
    layer.load_state_dict(stock.state_dict())
    layer.set_layer_number(1)
    return layer


def own_layer(shape: Shape, buffer: Any, data_path: DataPath, recipe: str, device: torch.device) -> MoELayer:
    """Our layer without Megatron, the experts' products by a recipe; on the CPU an FP8 recipe is emulated."""
    kind = emulated(recipe) if device.type == "cpu" and recipe != "bf16" else recipe
    config = MoEConfig(
        hidden=shape.hidden,
        ffn=shape.ffn,
        num_experts=shape.num_experts,
        num_topk=shape.num_topk,
        recipe=kind,
        expert_alignment=1 if recipe == "bf16" else 128,
        data_path=data_path,
    )
    return MoELayer(config, buffer=buffer, dtype=torch.bfloat16, device=device)


def deepep_missing() -> str | None:
    """Why Megatron's flex dispatcher has no DeepEP here; None where it has. Ours under that name does not count."""
    spec = importlib.util.find_spec("deep_ep")
    if spec is None:
        return "deep_ep is not installed"
    return "deep_ep is this package's own" if "comm_core" in str(spec.origin) else None


def inputs(shape: Shape, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [sequence, batch, hidden] that need gradients, and the gradient of the output; random by rank and seed."""
    generator = torch.Generator(device).manual_seed(seed + dist.get_rank())
    form = (shape.sequence, shape.batch, shape.hidden)
    x, grad = (torch.randn(form, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    return x.requires_grad_(), grad


def step(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Forward and backward with fresh gradients."""
    x.grad = None
    layer.zero_grad(set_to_none=True)
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(grad)
    return y


def distances(one: Any, other: Any, x: torch.Tensor, grad: torch.Tensor) -> float:
    """Largest relative distance between two layers over output and all gradients, on any rank."""
    found = []
    for layer in (one, other):
        y = step(layer, x, grad)
        assert x.grad is not None
        found.append([y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
        layer.zero_grad(set_to_none=True)
    worst = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*found, strict=True))
    everywhere = torch.tensor(worst, device=x.device)
    dist.all_reduce(everywhere, dist.ReduceOp.MAX)
    return float(everywhere)


class Memory:
    """What a layer takes of a device: what stays with it between steps, and what a step takes at its largest."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._used()

    def _used(self) -> int:
        devices.synchronize(self._device)
        devices.release_cached(self._device)
        return devices.memory_used(self._device)

    def gib(self, layer: Any, x: torch.Tensor, grad: torch.Tensor) -> float:
        """Bytes in GiB since this object was made, `layer` being what was made since, by the driver's count."""
        step(layer, x, grad)
        x.grad = None
        layer.zero_grad(set_to_none=True)
        stays = self._used()
        for _ in range(3):
            step(layer, x, grad)
        devices.synchronize(self._device)
        peak = devices.memory_used(self._device)
        x.grad = None
        layer.zero_grad(set_to_none=True)
        self._used()
        return (max(peak, stays) - self._begin) / 2**30
