"""Megatron on the CPU: the stand-ins keep torch.cuda's contract, touch nothing else, and go away again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import megatron_patch
from comm_core.runtime.errors import UsageError

pytestmark = pytest.mark.megatron

_WATCHED = ("zeros", "tensor", "empty_like", "Tensor.to", "Tensor.type", "Tensor.cuda", "Tensor.record_stream")


def _watched() -> dict[str, Any]:
    found: dict[str, Any] = {
        f"cuda.{name}": value for name, value in vars(torch.cuda).items() if not name.startswith("__")
    }
    for path in _WATCHED:
        owner: Any = torch
        for name in path.split("."):
            owner = getattr(owner, name)
        found[path] = owner
    return found


@pytest.fixture
def applied() -> Iterator[None]:
    megatron_patch.apply("cpu", split_weight_grad=False)
    yield
    megatron_patch.revert()


def test_revert_restores_everything() -> None:
    megatron_patch.apply("cpu")
    megatron_patch.revert()
    before = _watched()
    megatron_patch.apply("cpu")
    during = _watched()
    megatron_patch.revert()
    after = _watched()
    assert during["zeros"] is not before["zeros"] and during["cuda.current_device"] is not before["cuda.current_device"]
    assert {name for name in before if after[name] is not before[name]} == set()
    assert megatron_patch.report() == []


def test_every_patch_has_a_reason(applied: None) -> None:
    report = megatron_patch.report()
    assert len(report) > 40
    assert all(len(patch.reason) > 10 for patch in report)
    assert len({patch.target for patch in report}) == len(report)


def test_cuda_means_cpu(applied: None) -> None:
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1.0], device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.ones(1).to("cuda:0").device.type == "cpu"
    assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
    with torch.cuda.stream(torch.cuda.Stream()):
        event = torch.cuda.current_stream().record_event()
    event.synchronize()
    assert event.query()


def test_other_devices_and_types_are_left_alone(applied: None) -> None:
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.ones(1).to(torch.float64).dtype is torch.float64
    assert torch.ones(1).type() == "torch.FloatTensor"
    assert torch.ones(1).type(torch.int32).dtype is torch.int32


def test_random_state_is_torchs_own(applied: None) -> None:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    assert torch.equal(torch.rand(4, generator=torch.Generator().manual_seed(5)), first)


def test_another_device_needs_a_revert(applied: None) -> None:
    with pytest.raises(UsageError, match=r"apply\('musa'\) while the patches for 'cpu' are in force"):
        megatron_patch.apply("musa")
