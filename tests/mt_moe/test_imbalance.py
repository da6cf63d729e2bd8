"""Lopsided routing: right results, gradients that still synchronise under DDP, memory that follows the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from comm_core import ElasticBuffer
from comm_core.runtime import device as devices
from mt_moe import MoELayer
from mt_moe.ddp import local_names
from mt_moe.drop import expert_capacity
from tests.mt_moe.layer_cases import (
    SIGMOID,
    Batch,
    Place,
    by_definition,
    errors,
    force,
    initial,
    joined,
    own,
    portable,
    step,
)  # fmt: skip
from tests.mt_moe.live_bytes import LiveBytes
from tests.pool import run_ranks

CONFIG = replace(
    SIGMOID, num_topk=2, num_groups=1, num_topk_groups=1, normalize_weights=False, expert_alignment=1, shared_gate=False
)
NUM_TOKENS = 48
EVEN = {1: [48], 2: [24, 24], 4: [12, 12, 12, 12]}
# One rank has all tokens, or some have none.
UNEVEN = {1: [48], 2: [48, 0], 4: [0, 30, 0, 18]}
SCENARIOS = ("balanced", "one expert", "zipf", "empty experts", "no tokens on a rank", "no experts at all")


def experts_of(scenario: str, seed: int) -> Tensor:
    """The experts of all tokens, int64 [NUM_TOKENS, 2]."""
    generator = torch.Generator().manual_seed(seed)
    num_experts = CONFIG.num_experts
    if scenario == "one expert":
        return torch.tensor([[3, -1]]).repeat(NUM_TOKENS, 1)
    if scenario == "no experts at all":
        return torch.full((NUM_TOKENS, 2), -1)
    shares = torch.ones(num_experts)
    if scenario == "zipf":
        shares = torch.arange(1, num_experts + 1) ** -1.2
    elif scenario == "empty experts":
        shares = torch.tensor([1.0 if expert in (0, 5, 7) else 0.0 for expert in range(num_experts)])
    else:
        first = torch.arange(NUM_TOKENS).add(seed) % num_experts
        return torch.stack([first, (first + 3) % num_experts], dim=1)
    return torch.multinomial(shares.expand(NUM_TOKENS, -1), 2, generator=generator)


def splits_of(scenario: str, num_ranks: int) -> list[int]:
    return (UNEVEN if scenario == "no tokens on a rank" else EVEN)[num_ranks]


def scenarios(rank: int, place: Place, num_ranks: int, seed: int, fault: bool) -> list[dict[str, Any]]:
    """Every scenario in float64: results, and as "memory" the rows of this rank and the most bytes alive at once."""
    found = []
    with (
        place.buffer(rank) as buffer,
        MoELayer(CONFIG, buffer=buffer, dtype=torch.float64, device=place.device(rank)) as layer,
    ):
        for scenario in SCENARIOS:
            splits = splits_of(scenario, num_ranks)
            batch, topk_idx = Batch.of(seed, NUM_TOKENS, CONFIG.hidden, torch.float64), experts_of(scenario, seed)
            if fault and scenario == "zipf" and rank == num_ranks - 1:
                topk_idx = topk_idx.roll(1, dims=0)
            force(layer, own(topk_idx, splits, rank).contiguous())
            x, grad = own(batch.x, splits, rank), own(batch.grad, splits, rank)
            result = step(layer, x, grad)
            result["memory"] = torch.tensor(measured(layer, x, grad))
            found.append(portable(result))
    return found


def measured(layer: MoELayer, x: Tensor, grad: Tensor) -> tuple[int, int]:
    """The rows of this rank for its tokens many `times`, and the most bytes alive in forward and backward."""
    arrived: list[int] = []
    hook = layer.experts.register_forward_pre_hook(lambda _, args: arrived.append(args[0].shape[0]))
    device = layer.router.weight.device
    layer.router.topk_idx = layer.router.topk_idx.repeat(times(device.type), 1)
    x, grad = (tensor.repeat(times(device.type), 1).to(device) for tensor in (x, grad))
    x.requires_grad_()
    layer.zero_grad()
    if device.type == "cpu":
        with LiveBytes() as memory:
            layer(x).backward(grad)
        peak = memory.peak
    else:
        module = devices.accelerator(device.type)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        layer(x).backward(grad)
        peak = module.max_memory_allocated(device) - before
    hook.remove()
    return arrived[0], peak


def times(kind: str) -> int:
    """So often tokens are repeated when memory is measured, that rows take more of it than anything else."""
    return 8 if kind == "cpu" else 512


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_scenarios(num_ranks: int, fresh_random_data: int) -> None:
    check_scenarios(num_ranks, Place(), fresh_random_data)


def check_scenarios(num_ranks: int, place: Place, seed: int) -> None:
    by_rank = run_ranks(num_ranks, scenarios, place, num_ranks, seed, False, timeout=120)
    for scenario, results in zip(SCENARIOS, zip(*by_rank, strict=True), strict=True):
        memory = [result.pop("memory") for result in results]
        got, topk_idx = joined(list(results)), experts_of(scenario, seed)
        assert torch.equal(got["topk_idx"], topk_idx.double())
        want = by_definition(
            CONFIG, initial(CONFIG, torch.float64), Batch.of(seed, NUM_TOKENS, CONFIG.hidden, torch.float64), topk_idx
        )
        found = errors(got, want)
        assert max(found.values()) < 1e-12, (scenario, found)
        unused = sorted(set(range(CONFIG.num_experts)) - set(topk_idx.flatten().tolist()))
        assert not got["experts.fc1"][unused].any() and not got["experts.fc2"][unused].any()
        pairs = [(int(rows), int(peak)) for rows, peak in memory]
        check_memory(scenario, topk_idx, pairs, splits_of(scenario, num_ranks), place)
    if num_ranks > 1:
        faulty = run_ranks(num_ranks, scenarios, place, num_ranks, seed, True, timeout=120)
        got = joined([results[SCENARIOS.index("zipf")] for results in faulty])
        want = by_definition(
            CONFIG, initial(CONFIG, torch.float64), Batch.of(seed, NUM_TOKENS, CONFIG.hidden, torch.float64),
            experts_of("zipf", seed),
        )  # fmt: skip
        assert max(errors(got, want).values()) > 1e-2


def check_memory(
    scenario: str, topk_idx: Tensor, memory: Sequence[tuple[int, ...]], splits: Sequence[int], place: Place
) -> None:
    """A rank holds the rows of its experts and nothing for others: no padding to the fullest expert or rank."""
    num_local, often = CONFIG.num_experts // len(memory), times(place.kind)
    slack = 0 if place.kind == "cpu" else 8 << 20  # workspaces of the products
    weights = 3 * CONFIG.hidden * CONFIG.ffn * num_local + 3 * CONFIG.hidden * CONFIG.shared_ffn
    for rank, ((rows, peak), num_tokens) in enumerate(zip(memory, splits, strict=True)):
        wanted = often * int(((topk_idx >= rank * num_local) & (topk_idx < (rank + 1) * num_local)).sum())
        # Values of a row: input, output and their gradients, as sent and as received; around the activation.
        a_row, a_token = 4 * CONFIG.hidden + 6 * CONFIG.ffn, 6 * CONFIG.hidden + 6 * CONFIG.shared_ffn
        bound = 8 * (a_row * rows + a_token * often * num_tokens + weights) + slack
        print(f"{scenario}, rank {rank} of {len(memory)}: {rows} rows, {peak / 1024:.0f} KiB of {bound / 1024:.0f}")
        assert rows == wanted and peak <= bound, (scenario, rank)
        assert place.kind != "cpu" or peak >= 8 * rows * (CONFIG.hidden + 4 * CONFIG.ffn), "too little was counted"


def capped(rank: int, place: Place, num_ranks: int, seed: int) -> tuple[int, int]:
    """Everything wants one expert, which takes no more than its capacity."""
    config = replace(CONFIG, num_topk=1, capacity_factor=1.0)
    rows: list[int] = []
    with place.buffer(rank) as buffer, MoELayer(config, buffer=buffer, device=place.device(rank)) as layer:
        layer.router.expert_bias[0] = 100.0
        layer.experts.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[0]))
        batch = Batch.of(seed, NUM_TOKENS, config.hidden, torch.float32)
        step(layer, own(batch.x, EVEN[num_ranks], rank), own(batch.grad, EVEN[num_ranks], rank))
    capacity = expert_capacity(NUM_TOKENS // num_ranks, config)
    assert capacity is not None
    return rows[0], capacity


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_capacity_bounds_the_rows_of_the_fullest_rank(num_ranks: int, fresh_random_data: int) -> None:
    (rows, capacity), *others = run_ranks(num_ranks, capped, Place(), num_ranks, fresh_random_data)
    assert rows == num_ranks * capacity < NUM_TOKENS and all(others_rows == 0 for others_rows, _ in others)


def with_ddp(rank: int, place: Place, num_ranks: int, seed: int, fault: bool) -> list[dict[str, Any]]:
    """Every scenario under DDP, forward and backward twice."""
    with place.buffer(rank) as buffer:
        return [one_with_ddp(buffer, place, scenario, seed, fault) for scenario in SCENARIOS]


def one_with_ddp(buffer: ElasticBuffer, place: Place, scenario: str, seed: int, fault: bool) -> dict[str, Any]:
    rank, splits = buffer.rank, splits_of(scenario, buffer.num_ranks)
    batch, device = Batch.of(seed, NUM_TOKENS, CONFIG.hidden, torch.float64), place.device(buffer.rank)
    with MoELayer(CONFIG, buffer=buffer, dtype=torch.float64, device=device) as layer:
        force(layer, own(experts_of(scenario, seed), splits, rank).contiguous())
        layer.router.tokens_per_expert[0] = rank
        ignored = [name for name in local_names(layer) if name != "router.tokens_per_expert" or not fault]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, ignored)
        model = DistributedDataParallel(layer)
        for _ in range(2):
            layer.zero_grad()
            x = own(batch.x, splits, rank).clone().to(device).requires_grad_()
            y = model(x)
            (y * own(batch.grad, splits, rank).to(device)).sum().backward()
        result = {name: parameter.grad for name, parameter in layer.named_parameters()}
        assert all(gradient is not None for gradient in result.values()), "a gradient is zero, never None"
        counted = layer.router.tokens_per_expert[:1]
        return portable({"y": y.detach(), "x": x.grad, "counted": counted, **result})


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_synchronise_under_ddp(num_ranks: int, fresh_random_data: int) -> None:
    check_ddp(num_ranks, Place(), fresh_random_data)


def check_ddp(num_ranks: int, place: Place, seed: int) -> None:
    by_rank = run_ranks(num_ranks, with_ddp, place, num_ranks, seed, False, timeout=120)
    for scenario, results in zip(SCENARIOS, zip(*by_rank, strict=True), strict=True):
        assert [float(result.pop("counted")[0]) for result in results] == list(range(num_ranks)), "counts were shared"
        for name in results[0]:
            if name.startswith(("router.", "shared.")):
                assert all((result[name] == results[0][name]).all() for result in results), (scenario, name)
        got = joined(list(results))
        want = by_definition(
            CONFIG, initial(CONFIG, torch.float64), Batch.of(seed, NUM_TOKENS, CONFIG.hidden, torch.float64),
            experts_of(scenario, seed),
        )  # fmt: skip
        # The mean over the ranks, summed over them again by `joined`, is the sum.
        assert max(errors(got, want).values()) < 1e-12, (scenario, errors(got, want))
    if place.kind == "cpu" and num_ranks == 2:
        faulty = run_ranks(num_ranks, with_ddp, place, num_ranks, seed, True, timeout=120)
        assert {float(results[0]["counted"][0]) for results in faulty} == {0.0}, "DDP should have overwritten a count"
