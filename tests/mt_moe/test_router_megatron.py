"""Given equal logits, our router and Megatron's `TopKRouter` decide alike, bit for bit, and their losses are equal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore

from comm_core.runtime import device as devices
from mt_moe.config import MoEConfig
from mt_moe.drop import capacity_mask, expert_capacity
from mt_moe.router import Router
from mt_moe.routing import route

pytestmark = pytest.mark.megatron
LOSSES = ("seq_aux_loss", "aux_loss", "global_aux_loss")


KIND = devices.choose("auto", num_local_ranks=1)
ON_DEVICE = pytest.param(
    KIND, marks=[pytest.mark.gpu, pytest.mark.skipif(KIND == "cpu", reason="needs a CUDA or MUSA device")], id="device"
)


@pytest.fixture(scope="module", params=["cpu", ON_DEVICE])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Megatron usable on the device, and left as it was."""
    import megatron_patch

    megatron_patch.apply(request.param, split_weight_grad=False)
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    before = MoEAuxLossAutoScaler.main_loss_backward_scale
    device = devices.of(request.param, 0)
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0, device=device)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield device
    dist.destroy_process_group()
    MoEAuxLossAutoScaler.main_loss_backward_scale = before
    megatron_patch.revert()


def random_config(rng: random.Random, **given: Any) -> MoEConfig:
    """A configuration that Megatron has too."""
    num_groups, size = rng.choice([(1, 5), (1, 16), (4, 4), (8, 2), (2, 9)])
    num_topk_groups = rng.randint(1, num_groups)
    # Megatron adds the best num_topk // num_topk_groups of a group, which is none where there are more groups.
    least = num_topk_groups if num_topk_groups < num_groups else 1
    num_topk = rng.randint(least, min(8, num_topk_groups * size))
    score = rng.choice(["sigmoid", "softmax"])
    settings = {
        "score": score,
        "num_topk": num_topk,
        "num_groups": num_groups,
        "num_topk_groups": num_topk_groups,
        "normalize_weights": score == "sigmoid" or (num_topk > 1 and rng.random() < 0.5),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        **given,
    }
    return MoEConfig(hidden=num_groups * size, ffn=1, num_experts=num_groups * size, **settings)


def theirs(config: MoEConfig, device: torch.device, *, pad: bool = False, bias: bool = True) -> Any:
    """Megatron's router with the same rules, alone in its groups."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    limited = config.num_topk_groups < config.num_groups
    alone = dist.group.WORLD
    settings = TransformerConfig(
        num_layers=1, hidden_size=config.hidden, num_attention_heads=1, num_moe_experts=config.num_experts,
        add_bias_linear=False, moe_router_topk=config.num_topk, moe_router_score_function=config.score,
        moe_router_num_groups=config.num_groups if limited else None,
        moe_router_group_topk=config.num_topk_groups if limited else None,
        moe_router_pre_softmax=config.score == "softmax" and not config.normalize_weights,
        moe_router_topk_scaling_factor=config.routed_scaling_factor, moe_router_dtype=config.router_dtype,
        moe_router_enable_expert_bias=bias and config.score == "sigmoid",
        moe_router_load_balancing_type=config.load_balancing, moe_aux_loss_coeff=config.aux_loss_coefficient,
        moe_z_loss_coeff=config.z_loss_coefficient or None, moe_expert_capacity_factor=config.capacity_factor,
        moe_token_drop_policy=config.drop_policy, moe_pad_expert_input_to_capacity=pad,
        use_cpu_initialization=True,
    )  # fmt: skip
    router = TopKRouter(settings, SimpleNamespace(tp=alone, cp=alone, tp_cp=alone, tp_dp_cp=alone))
    router.set_layer_number(1)
    return router.to(device).train()


def ours(config: MoEConfig, device: torch.device) -> Router:
    """Our router whose logits are its input."""
    router = Router(config, device=device)
    with torch.no_grad():
        router.weight.copy_(torch.eye(config.num_experts))
    return router


def with_bias(config: MoEConfig, router: Router, other: Any) -> None:
    if config.score == "sigmoid":
        router.expert_bias.normal_(std=0.2)
        other.expert_bias.copy_(router.expert_bias)


def logits_of(rng: random.Random, config: MoEConfig, num_tokens: int, device: torch.device) -> Tensor:
    """Normal logits, or few different values, so that most choices are between equals."""
    logits = torch.randn(num_tokens, config.num_experts, device=device)
    return (logits.round() if rng.random() < 0.5 else logits).requires_grad_()


def dense(config: MoEConfig, topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and map [num_tokens, num_experts] from lanes; the last column takes masked lanes."""
    lanes = torch.where(topk_idx < 0, config.num_experts, topk_idx)
    probs = topk_weights.new_zeros(len(lanes), config.num_experts + 1).scatter(1, lanes, topk_weights)
    routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter(1, lanes, True)
    return probs[:, :-1], routing_map[:, :-1]


def check_decision(rng: random.Random, config: MoEConfig, device: torch.device, fault: float = 0.0) -> None:
    """One decision of both and the gradient of the logits."""
    router, other = ours(config, device), theirs(config, device)
    with_bias(config, router, other)
    router.expert_bias[0] += fault
    logits = logits_of(rng, config, rng.choice([1, 7, 64]), device)
    wanted, wanted_map = other.routing(logits.unsqueeze(1))
    grad = torch.randn_like(wanted)
    (wanted_grad,) = torch.autograd.grad(wanted, logits, grad)
    found = router(logits)
    probs, routing_map = dense(config, found.topk_idx, found.topk_weights)
    assert torch.equal(found.logits, logits) and torch.equal(routing_map, wanted_map)
    assert torch.equal(probs.to(wanted.dtype), wanted)
    (found_grad,) = torch.autograd.grad(probs, logits, grad.to(probs.dtype))
    torch.testing.assert_close(found_grad, wanted_grad, rtol=1e-6, atol=1e-7)
    if config.score == "sigmoid":
        assert torch.equal(router.tokens_per_expert, other.local_tokens_per_expert.long())


def test_decisions(fresh_random_data: int, device: torch.device) -> None:
    rng = random.Random(fresh_random_data)
    for _ in range(60):
        check_decision(rng, random_config(rng), device)
    with pytest.raises(AssertionError):
        for _ in range(20):
            check_decision(rng, random_config(rng, score="sigmoid"), device, fault=0.3)


def test_drops(fresh_random_data: int, device: torch.device) -> None:
    rng = random.Random(fresh_random_data)
    for _ in range(40):
        policy, factor = rng.choice(["probs", "position"]), rng.choice([0.3, 0.8, 1.0, 1.7, 6.0])
        check_decision(rng, random_config(rng, drop_policy=policy, capacity_factor=factor), device)


def test_padding_to_capacity(fresh_random_data: int, device: torch.device) -> None:
    """What Megatron adds to the map has weight zero; the map itself is that of `capacity_mask`."""
    rng, added = random.Random(fresh_random_data), 0
    for _ in range(20):
        policy, factor = rng.choice(["probs", "position"]), rng.choice([0.3, 1.0, 1.7])
        config = random_config(rng, drop_policy=policy, capacity_factor=factor)
        router, other = ours(config, device), theirs(config, device, pad=True)
        logits = logits_of(rng, config, 32, device)
        wanted, wanted_map = other.routing(logits.unsqueeze(1))
        probs, routing_map = dense(config, *router(logits)[:2])
        assert torch.equal(probs, wanted) and torch.all(wanted[wanted_map & ~routing_map] == 0)
        capacity = expert_capacity(32, config)
        if capacity is not None:
            whole = dense(config, *route(logits, None, config))
            assert torch.equal(capacity_mask(*whole, capacity, policy), wanted_map)
            assert torch.all(wanted_map.sum(dim=0) == capacity) and torch.all(routing_map.sum(dim=0) <= capacity)
        added += int((wanted_map & ~routing_map).sum())
    assert added > 0


def test_logits_in_fp64(fresh_random_data: int, device: torch.device) -> None:
    """Scores are fp32 in both; 0.16.1 then divides and scales in fp64, where 0.19.2 (and we) round to fp32."""
    import megatron.core

    rng, rounded = random.Random(fresh_random_data), tuple(map(int, megatron.core.__version__.split(".")[:2])) < (0, 17)
    for _ in range(30):
        config = random_config(rng, router_dtype="fp64")
        logits = torch.randn(50, config.num_experts, dtype=torch.float64, device=device)
        wanted, wanted_map = theirs(config, device).routing(logits.unsqueeze(1))
        probs, routing_map = dense(config, *route(logits, None, config))
        assert wanted.dtype == torch.float64
        if rounded:  # sums of groups too are fp64 there: two groups may be equal for one and not for the other
            same = (routing_map == wanted_map).all(dim=1)
            assert int(same.sum()) >= len(same) - 1
            torch.testing.assert_close(probs[same].double(), wanted[same], rtol=5e-7, atol=0)
        else:
            assert torch.equal(routing_map, wanted_map) and torch.equal(probs.double(), wanted)
        assert ours(config, device)(torch.randn(3, config.hidden, device=device)).logits.dtype == torch.float64


def check_losses(rng: random.Random, config: MoEConfig, device: torch.device, masked: bool, fault: float = 1.0) -> None:
    """The gradients of two calls, which "global_aux_loss" averages over, and of one after a restart."""
    # Megatron can not count tokens for the bias under a mask: it combines [num_tokens, num_experts] with [num_tokens].
    router, other = ours(config, device), theirs(config, device, bias=False)
    num_sequences, length = rng.choice([(1, 12), (3, 8), (12, 1)])
    for call in range(3):
        if call == 2:
            router.restart_counts()
            other.reset_global_aux_loss_tracker()
        logits = torch.randn(num_sequences * length, config.num_experts, requires_grad=True, device=device)
        mask = torch.rand(num_sequences, length, device=device) < 0.7 if masked else None
        # Megatron's tokens are [sequence, batch], ours [batch, sequence].
        turned = logits.view(num_sequences, length, -1).transpose(0, 1).contiguous()
        probs, _ = other.routing(turned, None if mask is None else ~mask.t())
        (wanted,) = torch.autograd.grad(probs.sum() * 0, logits)
        losses = router.losses(
            router(logits), num_sequences=num_sequences, token_mask=None if mask is None else mask.flatten()
        )
        assert len(losses) == (config.aux_loss_coefficient > 0) + (config.z_loss_coefficient > 0)
        (found,) = torch.autograd.grad(sum(losses) * fault, logits)
        # Where all experts are chosen alike, what a balance loss leaves of its terms is rounding.
        scale = max(float(wanted.norm()), 0.01 * config.aux_loss_coefficient)
        assert scale > 0 and (found - wanted).norm() <= 2e-6 * scale


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("load_balancing", LOSSES)
def test_losses(load_balancing: str, masked: bool, fresh_random_data: int, device: torch.device) -> None:
    rng = random.Random(fresh_random_data)
    for coefficients in ((0.01, 0.0), (0.0, 0.001), (0.02, 0.003)):
        config = random_config(
            rng,
            load_balancing=load_balancing,
            aux_loss_coefficient=coefficients[0],
            z_loss_coefficient=coefficients[1],
        )
        check_losses(rng, config, device, masked)
    with pytest.raises(AssertionError):
        check_losses(rng, config, device, masked, fault=1.0001)
