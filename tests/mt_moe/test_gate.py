"""The router's linear map: three BF16 numbers are one fp32 number, and products of them are those of it."""

from __future__ import annotations

import pytest
import torch

from comm_core.runtime import device as devices
from mt_moe import gate

KIND = devices.choose("auto", num_local_ranks=1)
ON_DEVICE = pytest.param(
    KIND, marks=[pytest.mark.gpu, pytest.mark.skipif(KIND == "cpu", reason="needs a CUDA or MUSA device")], id="device"
)


def test_three_parts_are_the_number() -> None:
    values = torch.randn(200, 30) * 10.0 ** torch.randint(-20, 20, (200, 30))
    parts = gate.split(values)
    assert parts.dtype == torch.bfloat16 and parts.shape == (200, 90)
    assert torch.equal(parts.double().view(200, 3, 30).sum(1), values.double())
    assert not torch.equal(parts[:, :60].double().view(200, 2, 30).sum(1), values.double())


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", ["cpu", ON_DEVICE])
def test_near_float64(kind: str, narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits to fp32, gradients to their own dtype, whichever way they are computed."""
    device = devices.of(kind, 0)
    if kind != "cpu" and narrow and not gate.multiplies_narrow(device):
        pytest.skip(f"{device} has no product of BF16 matrices with fp32 results")
    monkeypatch.setattr(gate, "multiplies_narrow", lambda _: narrow)
    x, weight = torch.randn(300, 512).bfloat16(), torch.randn(16, 512).bfloat16()
    grad = torch.randn(300, 16)
    leaves = [value.clone().to(device).requires_grad_() for value in (x, weight)]
    logits = gate.gate_logits(*leaves, torch.float32)
    logits.backward(grad.to(device))
    wide = [value.double().requires_grad_() for value in (x, weight)]
    want = wide[0] @ wide[1].t()
    want.backward(grad.double())
    assert logits.dtype == torch.float32
    assert (logits.detach().cpu() - want.detach()).norm() <= 1e-6 * want.detach().norm()
    for leaf, wanted in zip(leaves, wide, strict=True):
        rounded = wanted.grad.bfloat16()
        assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16
        # Nearly all are the numbers that the exact gradient rounds to; with two parts of the gradient fewer are.
        assert float((leaf.grad.cpu() == rounded).double().mean()) > 0.999
