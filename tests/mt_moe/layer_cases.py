"""The layer on ranks, one routing fed to both sides: what each rank computes, and the same by definition in float64.

A case runs on CPU processes and, by the same code, on ranks that each have a device: `Place` is the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comm_core import ElasticBuffer
from comm_core.runtime import device as devices
from mt_moe import MoEConfig, MoELayer
from mt_moe.gate import gate_logits
from mt_moe.router import Router, Routing
from tests.mt_moe.reference import moe_token, weights_of

SIGMOID = MoEConfig(
    hidden=64, ffn=32, num_experts=8, num_topk=4, shared_ffn=48, shared_gate=True, num_groups=4, num_topk_groups=2,
    routed_scaling_factor=2.5, init_std=0.15, expert_alignment=4, seed=5,
)  # fmt: skip
LATENT = replace(SIGMOID, latent=32, score="softmax", shared_gate=False, expert_alignment=1)
DROPPED = replace(
    SIGMOID, score="softmax", normalize_weights=False, capacity_factor=0.8, num_groups=1, num_topk_groups=1,
    shared_ffn=0, shared_gate=False,
)  # fmt: skip
CONFIGS = {"sigmoid": SIGMOID, "latent": LATENT, "dropped": DROPPED}
# Tokens of each rank.
SPLITS = {1: [24], 2: [17, 7], 4: [9, 0, 12, 3]}
Results = dict[str, Tensor]
Hook = Callable[[Routing], Routing]


@dataclass(frozen=True)
class Place:
    """Where the ranks compute: "cpu", or the kind of device that they have, or share."""

    kind: str = "cpu"

    def device(self, rank: int) -> torch.device:
        return devices.of(self.kind, 0 if self.kind == "cpu" else rank % devices.count(self.kind))

    def buffer(self, rank: int) -> ElasticBuffer:
        if self.kind == "cpu":
            return ElasticBuffer(dist.group.WORLD)
        return ElasticBuffer(dist.group.WORLD, backend="gpu", device=self.device(rank))


@dataclass(frozen=True)
class Batch:
    """All ranks' tokens and the gradients of their outputs, float64 and exact in `dtype`; the same on every rank."""

    x: Tensor
    grad: Tensor

    @classmethod
    def of(cls, seed: int, num_tokens: int, hidden: int, dtype: torch.dtype) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        x, grad = torch.randn(2, num_tokens, hidden, generator=generator, dtype=torch.float64).to(dtype).double()
        return cls(x, grad)


class Forced(Router):
    """A router whose experts are given, [num_tokens, num_topk] with -1 for none; weights and gradients are its own."""

    topk_idx: Tensor

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Routing:
        logits = gate_logits(x, self.weight, torch.promote_types(x.dtype, torch.float32))
        masked = self.topk_idx < 0
        weights = torch.sigmoid(logits).gather(1, self.topk_idx.clamp_min(0)).masked_fill(masked, 0)
        return Routing(self.topk_idx, weights * self.config.routed_scaling_factor, logits)


def force(layer: MoELayer, topk_idx: Tensor) -> None:
    """Gives a layer, whose config has sigmoid scores without normalisation, its experts."""
    router = Forced(layer.config, device=layer.router.weight.device, dtype=layer.router.weight.dtype)
    router.load_state_dict(layer.router.state_dict())
    router.topk_idx = topk_idx.to(layer.router.weight.device)
    layer.router = router


def step(layer: MoELayer, x: Tensor, grad: Tensor, defer: bool = False) -> Results:
    """Forward and backward of one rank's tokens; every gradient, and the experts that its tokens went to."""
    layer.zero_grad()
    device, dtype = layer.router.weight.device, layer.router.weight.dtype
    decided: list[Tensor] = []
    hook = layer.router.register_forward_hook(lambda _, __, out: decided.append(out.topk_idx))
    leaf = x.clone().to(device, dtype).requires_grad_()
    handed: list[tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]]]] = []
    losses: list[Tensor] = []
    y = layer(leaf, aux_losses=losses, defer=(lambda *pair: handed.append(pair)) if defer else None)
    ((y * grad.to(device, dtype)).sum() + sum(losses)).backward()
    for weights, compute in handed:
        for weight, weight_grad in zip(weights, compute(), strict=True):
            assert weight.grad is None
            weight.grad = weight_grad
    hook.remove()
    found = {"y": y.detach(), "x": leaf.grad, "topk_idx": decided[0]}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{name}: a gradient is zero, never None"
        found[name] = parameter.grad.clone()
    return found


def portable(results: Results) -> dict[str, Any]:
    """As arrays of float64, which cross processes."""
    return {name: value.cpu().double().numpy() for name, value in results.items()}


def joined(results: Sequence[dict[str, Any]]) -> Results:
    """The ranks' results as one: tokens and experts put together, what every rank holds summed."""
    out = {}
    for name in results[0]:
        parts = [torch.from_numpy(result[name]) for result in results]
        whole = name in ("y", "x", "topk_idx") or name.startswith("experts.")
        out[name] = torch.cat(parts) if whole else torch.stack(parts).sum(0)
    return out


def initial(config: MoEConfig, dtype: torch.dtype) -> Results:
    """The weights that the layer starts from, all experts, as float64 leaves."""
    with MoELayer(config, dtype=dtype) as layer:
        return {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}


def by_definition(config: MoEConfig, weights: Results, batch: Batch, topk_idx: Tensor) -> Results:
    """The batch one token and one expert at a time in float64, with the experts given."""
    x = batch.x.clone().requires_grad_()
    rows = []
    for token, lanes in zip(x, topk_idx.long().tolist(), strict=True):
        experts = [expert for expert in lanes if expert >= 0]
        chosen = weights_of(weights["router.weight"] @ token, experts, config) if experts else []
        rows.append(moe_token(token, weights, [], config, True, (experts, chosen)))
    y = torch.stack(rows)
    (y * batch.grad).sum().backward()
    zero = torch.zeros(())
    return {
        "y": y.detach(),
        "x": x.grad if x.grad is not None else torch.zeros_like(x),
        **{
            name: weight.grad if weight.grad is not None else zero.expand(weight.shape)
            for name, weight in weights.items()
        },
    }


def errors(got: Results, want: Results) -> dict[str, float]:
    """||got - want|| / ||want|| of each result; where the wanted one is zero, the norm itself."""
    return {
        name: float((got[name] - value).norm() / (value.norm() if value.norm() > 0 else 1))
        for name, value in want.items()
    }


def own(tensor: Tensor, splits: Sequence[int], rank: int) -> Tensor:
    return tensor.split(list(splits))[rank]
