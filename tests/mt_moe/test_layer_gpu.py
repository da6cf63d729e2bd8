"""Experts and layer on an accelerator: against float64 on the CPU, and grouped products against the loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from comm_core.runtime import device as devices
from mt_moe import MoEConfig, MoELayer, experts
from tests.mt_moe.reference import moe_token
from tests.mt_moe.test_experts import CASES, FFN, HIDDEN, Problem, assert_near

KIND = devices.choose("auto", num_local_ranks=1)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(KIND == "cpu", reason="needs a CUDA or MUSA device"),
]

CONFIG = MoEConfig(
    hidden=64, ffn=32, num_experts=8, num_topk=3, shared_ffn=48, num_groups=4, num_topk_groups=2, init_std=0.1,
    expert_alignment=16,
)  # fmt: skip


def on_cpu(item: Any) -> Any:
    """A tensor or a list of tensors, moved."""
    return [tensor.cpu() for tensor in item] if isinstance(item, list) else item.cpu()


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.cpu().double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("implementation", ["loop", "grouped"])
@pytest.mark.parametrize(("counts", "alignment", "tail"), [*CASES, ([40, 0, 100, 7], 16, 0)])
def test_experts_near_float64(counts: list[int], alignment: int, tail: int, implementation: str) -> None:
    device = devices.of(KIND, 0)
    reason = experts.unavailable(implementation, device, torch.bfloat16, (HIDDEN, FFN))
    if reason is not None:
        pytest.skip(reason)
    problem = Problem(counts, alignment=alignment, tail=tail, dtype=torch.bfloat16)
    want = problem.by_row()
    problem.move(device)
    got = problem.ours(implementation)
    assert_near(tuple(on_cpu(item) for item in got), want, 2e-2)
    handed: list[tuple[Any, Any]] = []
    again = problem.ours(implementation, defer=lambda *pair: handed.append(pair))
    late = [grad for _, compute in reversed(handed) for grad in compute()]
    assert all(torch.equal(one, other) for one, other in zip(late, [*got[3], *got[4]], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(again[:3], got[:3], strict=True))


@pytest.mark.parametrize("implementation", ["loop", "auto"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 5e-2)]
)
def test_layer_near_float64(dtype: torch.dtype, tolerance: float, implementation: str) -> None:
    """One process. Tokens whose choice of experts hangs on rounding are left out by a clear bias."""
    config = replace(CONFIG, experts=implementation)
    device = devices.of(KIND, 0)
    bias = torch.randn(config.num_experts) * 3
    with MoELayer(config, dtype=dtype, device=device) as layer:
        layer.router.expert_bias.copy_(bias)
        x = torch.randn(20, config.hidden).to(dtype)
        leaf = x.clone().to(device).requires_grad_()
        grad = torch.randn(20, config.hidden).to(dtype)
        y = layer(leaf)
        y.backward(grad.to(device))
        got = {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
        weights = {name: p.detach().cpu().double().requires_grad_() for name, p in layer.named_parameters()}
    wide = x.double().requires_grad_()
    want_y = torch.stack([moe_token(token, weights, bias.tolist(), config, True) for token in wide])
    want_y.backward(grad.double())
    want = {"y": want_y.detach(), "x": wide.grad, **{name: w.grad for name, w in weights.items()}}
    assert set(got) == set(want)
    for name in want:
        if float(want[name].norm()) > 0:
            assert relative(got[name], want[name]) < tolerance, name
