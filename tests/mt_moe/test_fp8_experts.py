"""The experts in FP8 with emulated products: near float64, and near an fp32 run with the same quantisation points."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comm_core.fp8 import per_token_cast
from comm_core.runtime.errors import UsageError
from mt_moe import MoEConfig, fp8_cast, fp8_products
from mt_moe.data_path import DataPath
from mt_moe.experts import expert_mlp
from mt_moe.fp8_experts import Fp8Experts, recipe_implementation
from mt_moe.recipes import RECIPES, Recipe, emulated, recipe_of
from tests.mt_moe import fp8_reference

HIDDEN, FFN, ALIGNMENT = 256, 128, 128
BLOCK, ROW = emulated("blockwise"), emulated("rowwise")
FP8_WGRAD = {"fc1_weight_grad": "fp8", "fc2_weight_grad": "fp8"}
CASES = {
    "blockwise": BLOCK,
    "blockwise, fp32 scales, BF16 kept": replace(BLOCK, power_of_two=False, keep="bf16"),
    "blockwise, BF16 weight gradients": replace(BLOCK, fc1_weight_grad="bf16", fc2_weight_grad="bf16"),
    "blockwise, fc2 in BF16": replace(BLOCK, fc2_forward="bf16", fc2_input_grad="bf16", fc2_weight_grad="bf16"),
    "rowwise": ROW,
    "rowwise, FP8 weight gradients": replace(ROW, **FP8_WGRAD, keep="fp8"),
}
NAMES = ("y", "dx", "dp", "dW1", "dW2")


class Problem:
    """Random rows of random groups, some without rows, with padding in groups and behind the last."""

    def __init__(
        self, dtype: torch.dtype, counts: Sequence[int] | None = None, *, hidden: int = HIDDEN, ffn: int = FFN
    ) -> None:
        if counts is None:
            counts = torch.randint(1, 200, (4,)).tolist()
            counts[int(torch.randint(4, ()))] = 0
        self.counts = list(counts)
        self.ends, real = [], []
        for count in counts:
            width = -(-count // ALIGNMENT) * ALIGNMENT
            real += [True] * count + [False] * (width - count)
            self.ends.append(len(real))
        self.real = torch.tensor(real + [False] * 7)
        num_rows, mask = len(self.real), self.real[:, None]
        # Rows of different size, so that a scale in the wrong place is seen, yet none far outside the bend of silu.
        spread = torch.exp2(torch.randint(-3, 2, (num_rows, 1)).float())
        self.rows = (torch.randn(num_rows, hidden) * spread * mask).to(dtype)
        self.row_weights = torch.rand(num_rows) * self.real
        self.fc1 = (torch.randn(len(counts), 2 * ffn, hidden) * hidden**-0.5).to(dtype)
        self.fc2 = (torch.randn(len(counts), hidden, ffn) * ffn**-0.5).to(dtype)
        self.grad = (torch.randn(num_rows, hidden) * mask).to(dtype)

    def move(self, device: torch.device) -> None:
        """Everything an implementation is given, to another device."""
        for name in ("real", "rows", "row_weights", "fc1", "fc2", "grad"):
            setattr(self, name, getattr(self, name).to(device))

    def inputs(self) -> list[Tensor]:
        return [t.clone().requires_grad_() for t in (self.rows, self.row_weights, self.fc1, self.fc2)]

    def ours(self, recipe: Recipe, **options: object) -> list[Tensor]:
        inputs = self.inputs()
        y = self.call(Fp8Experts(recipe), *inputs, **options)
        return [y.detach(), *torch.autograd.grad(y, inputs, self.grad)]

    def call(
        self, recipe: Fp8Experts, rows: Tensor, weights: Tensor, fc1: Tensor, fc2: Tensor, **options: object
    ) -> Tensor:
        return expert_mlp(
            rows, self.counts, weights, fc1, fc2, expert_alignment=ALIGNMENT, recipe=recipe, **options
        )  # fmt: skip

    def exact(self) -> list[Tensor]:
        """By float64 without any quantisation."""
        inputs = [t.detach().double().requires_grad_() for t in self.inputs()]
        y = expert_mlp(inputs[0], self.counts, *inputs[1:], expert_alignment=ALIGNMENT, implementation="loop")
        return [y.detach(), *torch.autograd.grad(y, inputs, self.grad.double())]

    def same_points(self, recipe: Recipe) -> list[Tensor]:
        """By the fp32 run of `fp8_reference`."""
        return fp8_reference.experts(
            recipe, self.ends, self.rows, self.row_weights, self.fc1, self.fc2, self.grad
        )  # fmt: skip


def near(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float) -> None:
    for name, one, other in zip(NAMES, got, want, strict=True):
        error = float((one.double() - other.double()).norm() / other.double().norm())
        assert error <= tolerance, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_near_float64_and_near_the_same_quantisation_points(case: str, dtype: torch.dtype) -> None:
    problem, recipe = Problem(dtype), CASES[case]
    got = problem.ours(recipe)
    near(got, problem.exact(), 1e-1)
    near(got, problem.same_points(recipe), 1e-2)
    assert torch.all(got[0][~problem.real] == 0) and torch.all(got[1][~problem.real] == 0), "padding stays zero"
    empty = [expert for expert, count in enumerate(problem.counts) if count == 0]
    assert torch.all(got[3][empty] == 0) and torch.all(got[4][empty] == 0)
    assert all(torch.equal(one, again) for one, again in zip(got, problem.ours(recipe), strict=True))


def _swapped_scales(scales: Tensor) -> Tensor:
    scales = scales.clone()
    scales[:2] = scales[:2].flip(0)
    return scales


@pytest.mark.parametrize("where", ["rows", "tokens"])
def test_swapped_scales_are_seen(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(torch.float32, counts=[100, 0, 40])
    # The first rows of two blocks differ by a factor, so that their swapped scales matter.
    problem.rows[0] *= 64
    want = problem.same_points(BLOCK)
    near(problem.ours(BLOCK), want, 1e-2)
    name = f"{where[:-1]}_operand"
    cast = getattr(fp8_cast, name)

    def faulty(*args: object) -> object:
        operand = cast(*args)
        return replace(operand, scales=_swapped_scales(operand.scales))

    monkeypatch.setattr(fp8_cast, name, faulty)
    with pytest.raises(AssertionError, match="is off by"):
        near(problem.ours(BLOCK), want, 1e-2)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("recipe", [BLOCK, ROW])
def test_deferred_weight_gradients_are_the_same_bits(recipe: Recipe, packed: bool) -> None:
    problem = Problem(torch.float32)
    want = problem.ours(recipe)
    rows, weights, fc1, fc2 = problem.inputs()
    pair = [w if packed else [one.detach().clone().requires_grad_() for one in w] for w in (fc1, fc2)]
    handed: list[tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]]]] = []
    y = problem.call(Fp8Experts(recipe), rows, weights, *pair, defer=lambda *both: handed.append(both))
    y.backward(problem.grad)
    assert torch.equal(y, want[0]) and torch.equal(rows.grad, want[1]) and torch.equal(weights.grad, want[2])
    assert len(handed) == 2, "fc2's, then fc1's"
    for (given, compute), ours, direct in zip(handed, reversed(pair), (want[4], want[3]), strict=True):
        listed = [ours] if packed else ours
        assert all(a is b for a, b in zip(given, listed, strict=True)) and all(w.grad is None for w in listed)
        grads = compute()
        assert torch.equal(grads[0] if packed else torch.stack(list(grads)), direct)


@pytest.mark.parametrize("recipe", [BLOCK, replace(ROW, dispatch="fp8", keep="fp8")])
def test_rows_that_arrive_in_fp8_give_the_same_bits(recipe: Recipe) -> None:
    problem = Problem(torch.bfloat16)
    want = problem.ours(recipe)
    inputs = problem.inputs()
    carrier = inputs[0] = torch.zeros(1, dtype=torch.bfloat16).expand(problem.rows.shape).requires_grad_()
    pair = fp8_cast.Travel(recipe).pack(problem.rows)
    y = problem.call(Fp8Experts(recipe), *inputs, quantised=pair)
    got = [y.detach(), *torch.autograd.grad(y, inputs, problem.grad)]
    assert got[1].shape == carrier.shape and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_without_rows_and_with_frozen_weights() -> None:
    none = Problem(torch.float32, counts=[0, 0])
    got = none.ours(BLOCK)
    assert all(torch.all(value == 0) for value in got) and got[3].shape == none.fc1.shape
    problem = Problem(torch.float32)
    rows, weights, fc1, fc2 = problem.inputs()
    y = problem.call(Fp8Experts(BLOCK), rows, weights, fc1.detach(), fc2)
    y.backward(problem.grad)
    assert torch.equal(rows.grad, problem.ours(BLOCK)[1]) and fc1.grad is None and fc2.grad is not None


def test_weights_are_cast_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    cast = fp8_cast.weight_operands
    monkeypatch.setattr(fp8_cast, "weight_operands", lambda *args: (calls.append(1), cast(*args))[1])
    problem, experts = Problem(torch.float32, counts=[30, 0]), Fp8Experts(BLOCK)
    inputs = problem.inputs()
    first = problem.call(experts, *inputs)
    assert torch.equal(problem.call(experts, *inputs), first) and len(calls) == 2
    with torch.no_grad():
        inputs[3].mul_(2)
    assert torch.equal(problem.call(experts, *inputs), first * 2) and len(calls) == 3, "fc2 alone is cast again"
    inputs[3].data.mul_(2)
    assert torch.equal(problem.call(experts, *inputs), first * 2), "a write past the version counter is not seen"
    experts.weights_changed()
    assert torch.equal(problem.call(experts, *inputs), first * 4)
    optimizer = torch.optim.SGD([inputs[3]], lr=1.0, fused=True)
    inputs[3].grad = inputs[3].detach().clone()
    copied = copy.deepcopy(experts)
    assert torch.equal(problem.call(copied, *inputs), first * 4)
    optimizer.step()  # fused: the version counter need not advance
    assert torch.all(problem.call(experts, *inputs) == 0) and torch.all(problem.call(copied, *inputs) == 0)
    with torch.no_grad():
        inputs[3].copy_(problem.fc2 * 4)
    other = [*inputs[:2], inputs[2], inputs[3].detach().clone()]
    assert torch.equal(problem.call(experts, *other), first * 4), "other tensors are other weights"


def test_products_are_never_emulated_unasked() -> None:
    cpu = torch.device("cpu")
    for name in RECIPES:
        reason = fp8_products.unavailable(RECIPES[name], cpu)
        assert reason is not None and "torch: " in reason and "emulated" not in reason
        with pytest.raises(UsageError, match='products="emulated"'):
            fp8_products.choose(RECIPES[name], cpu)
        assert fp8_products.choose(emulated(name), cpu).name == "emulated"


def test_a_library_with_wrong_products_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fp8_products._make("emulated", "block")
    for wrong in (
        replace(right, name="torch", rows=lambda *args: right.rows(*args) * 1.05),
        replace(right, name="torch", tokens=lambda *args: right.tokens(*args).flip(0)),
    ):
        monkeypatch.setattr(fp8_products, "_make", lambda *_, wrong=wrong: wrong)
        found, reason = fp8_products.probe.__wrapped__("torch", "block", torch.device("cpu"))
        assert found is None and "off by" in reason
    monkeypatch.setattr(fp8_products, "_make", lambda *_: right)
    assert fp8_products.probe.__wrapped__("torch", "block", torch.device("cpu")) == (right, "")


def test_a_library_is_passed_over_for_widths_that_it_can_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fp8_products._make("emulated", "block")
    have = {"torch": replace(right, name="torch", unit=512), "transformer_engine": replace(right, name="te")}
    monkeypatch.setattr(fp8_products, "probe", lambda name, *_: (have[name], ""))
    recipe, cpu = RECIPES["blockwise"], torch.device("cpu")
    assert fp8_products.choose(recipe, cpu, (1024, 512)).name == "torch"
    assert fp8_products.choose(recipe, cpu, (1024, 1408)).name == "te"
    reason = fp8_products.unavailable(replace(recipe, products="torch"), cpu, (1024, 1408))
    assert reason == "torch: width 1408 is no multiple of 512"


def test_bad_calls() -> None:
    problem = Problem(torch.float32, counts=[30, 20])
    inputs = problem.inputs()
    with pytest.raises(UsageError, match="multiples of 128"):
        expert_mlp(inputs[0], [30, 20], *inputs[1:], expert_alignment=16, recipe=Fp8Experts(BLOCK))
    with pytest.raises(UsageError, match="gated silu"):
        problem.call(Fp8Experts(BLOCK), *inputs, activation=F.gelu)
    narrow = [torch.zeros(0, 72), torch.zeros(0), torch.zeros(1, 64, 72), torch.zeros(1, 72, 32)]
    for recipe, unit in ((BLOCK, 128), (ROW, 16)):
        with pytest.raises(UsageError, match=f"72 is no multiple of {unit}"):
            expert_mlp(narrow[0], [0], *narrow[1:], recipe=Fp8Experts(recipe))
    with pytest.raises(UsageError, match="an FP8 recipe"):
        Fp8Experts("bf16")


def test_recipes_by_name() -> None:
    assert recipe_of("bf16") is None and recipe_implementation("bf16") is None
    assert recipe_of(BLOCK) is BLOCK and recipe_of("rowwise") is RECIPES["rowwise"]
    assert (BLOCK.alignment, ROW.alignment, replace(ROW, **FP8_WGRAD).alignment) == (128, 16, 128)
    with pytest.raises(UsageError, match="bf16, blockwise, rowwise"):
        recipe_of("delayed")
    for wrong in ({"scaling": "tensor"}, {"keep": "fp16"}, {"fc1_forward": "e5m2"}, {"products": "deep_gemm"}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            replace(BLOCK, **wrong)


def test_config_refuses_what_a_recipe_can_not_do() -> None:
    config = MoEConfig(hidden=256, ffn=128, num_experts=4, num_topk=2, expert_alignment=128, recipe="blockwise")
    for wrong in (
        {"expert_alignment": 64},
        {"ffn": 192},
        {"activation": "gelu"},
        {"recipe": "fp4"},
        {"data_path": DataPath(save_dispatched="redispatch")},
        {"data_path": DataPath(recompute="fc1")},
        {"data_path": DataPath(max_tokens_per_rank=64)},
    ):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            replace(config, **wrong)
    assert replace(config, recipe="rowwise", expert_alignment=16, ffn=192).recipe == "rowwise"


def test_travel_is_the_cast_of_comm_core() -> None:
    x = torch.randn(9, HIDDEN, dtype=torch.bfloat16)
    for power_of_two in (True, False):
        travel = fp8_cast.Travel(replace(BLOCK, power_of_two=power_of_two))
        data, scales = travel.pack(x)
        want, want_scales = per_token_cast(x, round_scale=power_of_two)
        assert torch.equal(data.float(), want.float()) and torch.equal(scales, want_scales)
        near_x = travel.unpack(data, scales, torch.float32)
        assert float((near_x - x).norm() / x.float().norm()) < 0.04
