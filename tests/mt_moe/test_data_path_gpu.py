"""The data path on devices: kernels in Triton against their definition, all ways on two ranks, a captured graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comm_core.runtime import device as devices
from mt_moe import DataPath, MoELayer, clearing, experts, fused_activation, lanes
from tests.mt_moe import test_routed
from tests.mt_moe.layer_cases import Place
from tests.mt_moe.test_experts import Problem, assert_near
from tests.pool import run_ranks

KIND = devices.choose("auto", num_local_ranks=1)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(KIND == "cpu", reason="needs a CUDA or MUSA device"),
]


def _kernels() -> Any:
    devices.of(KIND, 0)
    reason = fused_activation.why_no_kernels(KIND)
    if reason is not None:
        pytest.skip(reason)
    return fused_activation.kernels_on(KIND)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("ffn", [24, 1408, 2048, 5000])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_activation(ffn: int, dtype: torch.dtype, limit: float) -> None:
    kernels = _kernels()
    hidden, grad = torch.randn(300, 2 * ffn, device=KIND).to(dtype), torch.randn(300, ffn, device=KIND).to(dtype)
    weights, bounds = torch.rand(300, device=KIND), torch.tensor([0, 100, 100, 250], dtype=torch.int32, device=KIND)
    for ends in (None, bounds[1:]):  # also from an address that is no multiple of 16
        if ends is not None:
            hidden[250:], grad[250:], weights[250:] = (float("nan"),) * 3
        want = fused_activation.backward_twin(hidden, weights, grad, F.silu, True, ends)
        got = kernels.backward(hidden, weights, grad, ends, True)
        assert torch.equal(kernels.forward(hidden, weights, ends), got[2])
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype and relative(one, other) < limit
            assert ends is None or not one[250:].any()
        again = kernels.backward(hidden, weights, grad, ends, True)
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))


def test_clearing_and_lanes() -> None:
    kernels = _kernels()
    ends = torch.tensor([3, 3, 500, 500], dtype=torch.int32, device=KIND)
    rows, matrices = torch.full((3000, 7168), torch.nan, device=KIND), torch.full((4, 130, 300), torch.nan, device=KIND)
    rows[:500], matrices[0], matrices[2] = 1, 1, 1
    clearing.clear_tail(rows, ends)
    clearing.clear_empty(matrices, ends)
    assert float(rows.sum()) == 500 * 7168 and float(matrices.sum()) == 2 * 130 * 300
    for num_tokens, num_experts, num_topk in ((5000, 64, 6), (33, 256, 8), (0, 8, 2)):
        order = torch.rand(num_tokens, num_experts, device=KIND).argsort(1)
        routing_map = order < torch.randint(0, num_topk + 1, (num_tokens, 1), device=KIND)
        probs = torch.rand(num_tokens, num_experts, device=KIND) * routing_map
        want = lanes.from_map_twin(probs, routing_map, num_topk)
        got = kernels.lanes_forward(probs, routing_map, num_topk)
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
        grad = torch.randn(num_tokens, num_topk, device=KIND)
        found = kernels.lanes_backward(grad, got[0], num_experts, torch.float32)
        assert torch.equal(found, lanes.grad_twin(grad, got[0], num_experts, torch.float32))


@pytest.mark.parametrize("implementation", ["grouped", "te"])
def test_experts_near_float64_with_and_without_counts(implementation: str) -> None:
    device = devices.of(KIND, 0)
    reason = experts.unavailable(implementation, device, torch.bfloat16, (24, 80, 40))
    if reason is not None:
        pytest.skip(reason)
    problem = Problem([40, 0, 100, 7], alignment=16, tail=5, dtype=torch.bfloat16)
    want = problem.by_row()
    problem.move(device)
    aligned = torch.tensor([48, 48, 160, 176], dtype=torch.int32, device=device)

    def static(rows: Tensor, _: Any, row_weights: Tensor, fc1: list[Tensor], fc2: list[Tensor]) -> Tensor:
        return experts.expert_mlp(rows, None, row_weights, fc1, fc2, ends=aligned, implementation=implementation)

    for found in (problem.ours(implementation), problem.run(static)):
        on_cpu = [[t.cpu() for t in item] if isinstance(item, list) else item.cpu() for item in found]
        assert_near(tuple(on_cpu), want, 2e-2)  # type: ignore[arg-type]
        assert not on_cpu[0][~problem.real].any() and not on_cpu[1][~problem.real].any()


def test_every_way_gives_the_same(fresh_random_data: int) -> None:
    test_routed.check(Place(KIND), torch.bfloat16, 2e-2, fresh_random_data)


def _graph(rank: int, place: Place) -> list[str]:
    """Forward and backward of the layer, captured once: replays on new tokens equal eager runs on them."""
    num_tokens, bad = 24, []
    config = replace(test_routed.CONFIG, data_path=DataPath(max_tokens_per_rank=num_tokens))
    with place.buffer(rank) as buffer, MoELayer(config, buffer=buffer, dtype=torch.bfloat16) as layer:
        x = torch.zeros(num_tokens, config.hidden, dtype=torch.bfloat16, device=buffer.device, requires_grad=True)
        grad = torch.zeros_like(x).detach()
        generator = torch.Generator(buffer.device).manual_seed(rank)

        def draw() -> None:
            with torch.no_grad():
                x.normal_(generator=generator)
                grad.normal_(generator=generator)

        def step() -> list[Tensor]:
            x.grad = None
            layer.zero_grad(set_to_none=True)
            y = layer(x)
            y.backward(grad)
            return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

        draw()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for turn in range(3):
            draw()
            graph.replay()
            torch.cuda.synchronize()
            replayed = [item.clone() for item in captured]
            eager = [item.clone() for item in step()]
            for index, (one, other) in enumerate(zip(replayed, eager, strict=True)):
                if not torch.equal(one, other) or not one.any():
                    bad.append(f"turn {turn}, tensor {index}: {relative(one, other)}")
    return bad


@pytest.mark.skipif(KIND == "musa", reason="graphs are tested through torch.cuda")
def test_forward_and_backward_in_a_graph() -> None:
    assert run_ranks(2, _graph, Place(KIND), timeout=120) == [[], []]
