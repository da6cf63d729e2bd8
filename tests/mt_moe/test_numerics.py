"""The layer against float64 by definition, one routing fed to both: every output and gradient, and the Jacobian."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from mt_moe import MoEConfig, MoELayer
from tests.mt_moe.layer_cases import (
    CONFIGS,
    SIGMOID,
    SPLITS,
    Batch,
    Place,
    by_definition,
    errors,
    initial,
    joined,
    own,
    portable,
    step,
)  # fmt: skip
from tests.pool import run_ranks

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def all_cases(rank: int, place: Place, splits: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """Each configuration in each dtype, then one with a fault; weight gradients also deferred, which changes no bit."""
    found = []
    with place.buffer(rank) as buffer:
        for dtype in BOUNDS:
            for config in (*CONFIGS.values(), SIGMOID):
                batch = Batch.of(seed, sum(splits), config.hidden, dtype)
                x, grad = own(batch.x, splits, rank), own(batch.grad, splits, rank)
                with MoELayer(config, buffer=buffer, dtype=dtype, device=place.device(rank)) as layer:
                    if len(found) % 4 == 3:
                        fault = 1 + 30 * BOUNDS[dtype]
                        layer.router.register_forward_hook(
                            lambda _, __, out, fault=fault: out._replace(topk_weights=out.topk_weights * fault)
                        )
                    found.append(step(layer, x, grad))
                    late = step(layer, x, grad, defer=True)
                    assert all(torch.equal(value, late[name]) for name, value in found[-1].items()), "deferring differs"
    return [portable(result) for result in found]


def check(num_ranks: int, place: Place, seed: int) -> None:
    splits = SPLITS[num_ranks]
    by_rank = run_ranks(num_ranks, all_cases, place, splits, seed, timeout=200)
    cases = [joined(results) for results in zip(*by_rank, strict=True)]
    for dtype, bound in BOUNDS.items():
        *good, faulty = cases[: len(CONFIGS) + 1]
        del cases[: len(CONFIGS) + 1]
        for config, got in zip(CONFIGS.values(), good, strict=True):
            want = by_definition(
                config, initial(config, dtype), Batch.of(seed, sum(splits), config.hidden, dtype), got["topk_idx"]
            )
            found = errors(got, want)
            print(num_ranks, dtype, {name: f"{error:.1e}" for name, error in found.items()})
            assert set(want) == set(got) - {"topk_idx"} and all(float(value.norm()) > 0 for value in want.values())
            assert max(found.values()) <= bound, found
        assert bool((good[2]["topk_idx"] < 0).any()), "nothing was dropped"
        want = by_definition(
            SIGMOID, initial(SIGMOID, dtype), Batch.of(seed, sum(splits), SIGMOID.hidden, dtype), faulty["topk_idx"]
        )
        seen = {name for name, error in errors(faulty, want).items() if error > bound}
        assert seen >= {"y", "x", "experts.fc1", "experts.fc2"}, f"the fault was seen in {seen} alone"


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_near_float64(num_ranks: int, fresh_random_data: int) -> None:
    check(num_ranks, Place(), fresh_random_data)


SMALL = MoEConfig(
    hidden=3, ffn=2, num_experts=4, num_topk=2, shared_ffn=2, shared_gate=True, init_std=0.7, seed=2,
    aux_loss_coefficient=0.2, z_loss_coefficient=0.3,
)  # fmt: skip
NARROW = replace(SMALL, latent=2, score="softmax", shared_gate=False, expert_alignment=3, load_balancing="aux_loss")
STOP, FORWARD, BACKWARD = 0, 1, 2


class Everywhere:
    """The layer of all ranks as one function: all tokens and all weights to all outputs and every rank's losses.

    Rank 0 calls it; the others `serve`, and take part in the same collective calls in the same order.
    """

    def __init__(self, layer: MoELayer, splits: Sequence[int], fault: float) -> None:
        self.layer, self.splits, self.fault = layer, list(splits), fault
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.parameters = dict(layer.named_parameters())
        self.shapes = {"x": torch.Size((sum(splits), layer.config.hidden))}
        for name, parameter in self.parameters.items():
            first, *others = parameter.shape
            self.shapes[name] = torch.Size((first * (self.num_ranks if name.startswith("experts.") else 1), *others))
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.num_outputs = self.sizes[0] + 2 * self.num_ranks

    def serve(self) -> None:
        """Takes part until rank 0 stops."""
        while self.call(STOP) is not None:
            pass

    def call(self, command: int, inputs: Sequence[Tensor] = (), grad: Tensor | None = None) -> Tensor | None:
        """All outputs [num_outputs], or with BACKWARD the gradients of all inputs as one vector; None with STOP."""
        message = torch.zeros(1 + sum(self.sizes) + self.num_outputs, dtype=torch.float64)
        message[0] = command
        if inputs:
            message[1 : 1 + sum(self.sizes)] = torch.cat([value.detach().flatten() for value in inputs])
        if grad is not None:
            message[-self.num_outputs :] = grad
        dist.broadcast(message, 0)
        told, given, grad = message.split([1, sum(self.sizes), self.num_outputs])
        if int(told) == STOP:
            return None
        result = self.run(int(told), given, grad)
        dist.all_reduce(result)
        return result

    def parts(self, vector: Tensor) -> dict[str, Tensor]:
        """This rank's part of what all ranks hold, as views."""
        found = {}
        for (name, shape), values in zip(self.shapes.items(), vector.split(self.sizes), strict=True):
            whole = values.view(shape)
            if name == "x":
                whole = own(whole, self.splits, self.rank)
            elif name.startswith("experts."):
                whole = whole.chunk(self.num_ranks)[self.rank]
            found[name] = whole
        return found

    def run(self, command: int, given: Tensor, grad: Tensor) -> Tensor:
        """This rank's part of the result; zeros in the others."""
        parts = self.parts(given)
        with torch.enable_grad():
            x = parts["x"].clone().requires_grad_()
            for name, parameter in self.parameters.items():
                parameter.data.copy_(parts[name])
            losses: list[Tensor] = []
            y = self.layer(x, aux_losses=losses)
            own_ends = torch.stack(losses)
        result = torch.zeros(self.num_outputs if command == FORWARD else sum(self.sizes), dtype=torch.float64)
        if command == FORWARD:
            rows, ends = self.outputs(result)
            rows.copy_(y.detach())
            ends.copy_(own_ends.detach())
            return result
        grads = self.outputs(grad)
        found = torch.autograd.grad((y, own_ends), [x, *self.parameters.values()], grads)
        for (name, part), value in zip(self.parts(result).items(), found, strict=True):
            part.copy_(value * (self.fault if name == "experts.fc1" else 1))
        return result

    def outputs(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of all outputs, as views: its rows and its losses."""
        rows, ends = vector.split([self.sizes[0], 2 * self.num_ranks])
        return own(rows.view(self.shapes["x"]), self.splits, self.rank), ends.view(-1, 2)[self.rank]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, everywhere: Everywhere, *inputs: Tensor) -> Tensor:
        ctx.everywhere = everywhere
        ctx.save_for_backward(*inputs)
        outputs = everywhere.call(FORWARD, inputs)
        assert outputs is not None
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        everywhere = ctx.everywhere
        found = everywhere.call(BACKWARD, ctx.saved_tensors, grad)
        grads = zip(found.split(everywhere.sizes), everywhere.shapes.values(), strict=True)
        return (None, *(values.view(shape) for values, shape in grads))


def jacobian(rank: int, seed: int, splits: Sequence[int], fast: bool) -> list[str]:
    """gradcheck of two configurations, and of one with a fault; what it says."""
    said = []
    with Place().buffer(rank) as buffer:
        for config, fault in ((SMALL, 1.0), (NARROW, 1.0), (SMALL, 1.1)):
            with MoELayer(config, buffer=buffer, dtype=torch.float64) as layer:
                everywhere = Everywhere(layer, splits, fault)
                if rank > 0:
                    everywhere.serve()
                    continue
                generator = torch.Generator().manual_seed(seed)
                inputs = [
                    torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
                    for shape in everywhere.shapes.values()
                ]
                try:
                    # Two sums of the same terms, in another order, may differ: this is not about bits.
                    good = torch.autograd.gradcheck(
                        lambda *values, everywhere=everywhere: _Function.apply(everywhere, *values),
                        inputs, eps=1e-6, atol=1e-7, rtol=1e-4, nondet_tol=1e-12, fast_mode=fast,
                        check_undefined_grad=False,
                    )  # fmt: skip
                    said.append("good" if good else "bad")
                except GradcheckError as error:
                    said.append(str(error).splitlines()[0])
                finally:
                    everywhere.call(STOP)
    return said


def check_jacobian(splits: list[int], fast: bool, seed: int) -> None:
    said, *others = run_ranks(len(splits), jacobian, seed, splits, fast, timeout=60 if fast else 200)
    assert said[:2] == ["good", "good"] and "Jacobian" in said[2] and not any(others), said


@pytest.mark.parametrize("splits", [[5], [3, 2], pytest.param([2, 0, 1, 2], marks=pytest.mark.slow)], ids=str)
def test_a_random_product_of_the_jacobian(splits: list[int], fresh_random_data: int) -> None:
    check_jacobian(splits, True, fresh_random_data)


@pytest.mark.slow
def test_the_whole_jacobian(fresh_random_data: int) -> None:
    check_jacobian([3, 2], False, fresh_random_data)
