"""Modules with Transformer Engine's protocol for weight gradients, played by a stand-in: the package is not needed.

`Engine` does what Transformer Engine's linear does where it matters here: the entries are computed oldest first, one a
call, the gradient of the weight is written over what is there, that of the bias dropped where there is one already, and
no hook of the weight runs. With `fused` it adds to `main_grad` and leaves no gradient.
"""

from __future__ import annotations

import copy
import queue
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comm_core.runtime.errors import UsageError
from dualpipe import delayed
from dualpipe.module_stages import ModuleStages
from dualpipe.schedule import build
from dualpipe.split_modules import SplitWeightGrads
from dualpipe.weight_grad import WeightGradError, WeightGradStore
from tests.dualpipe import zoo
from tests.dualpipe.threads import run_threads

MICROBATCHES, ROWS, WIDTH = 5, 3, zoo.WIDTH


class EngineStore:
    def __init__(self, delay: bool) -> None:
        self.context: queue.Queue[Any] | None = queue.Queue() if delay else None

    def delay_wgrad_compute(self) -> bool:
        return self.context is not None


class _EngineProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, store: EngineStore) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store = store
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.store.context is None:
            return grad @ weight, grad.t() @ x, grad.sum(0), None
        ctx.store.context.put((grad, x))
        return grad @ weight, None, None, None


class Engine(nn.Module):
    def __init__(self, *, delay_wgrad_compute: bool = True, fused: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.wgrad_store = EngineStore(delay_wgrad_compute)
        self.fused, self.calls = fused, 0

    def forward(self, x: Tensor) -> Tensor:
        return _EngineProduct.apply(x, self.weight, self.bias, self.wgrad_store)

    def backward_dw(self) -> None:
        self.calls += 1
        assert self.wgrad_store.context is not None
        grad, x = self.wgrad_store.context.get_nowait()
        dw, db = grad.t() @ x, grad.sum(0)
        if self.fused:
            self.weight.main_grad += dw
            self.bias.main_grad += db
            return
        self.weight.grad = dw
        if self.bias.grad is None:
            self.bias.grad = db


class Stage(nn.Module):
    """One module once, one twice, and a plain linear."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.once, self.twice = Engine(**options), Engine(**options)
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.twice(torch.tanh(self.plain(self.twice(torch.tanh(self.once(x))))))
        return x, x if skip is None else skip + x


@pytest.fixture(autouse=True)
def _seeded() -> None:
    value = random.SystemRandom().randrange(2**31)
    print(f"seed {value}")
    torch.manual_seed(value)


def train(name: str, *, whole: bool = False, fused: bool = False) -> tuple[float, list[Stage]]:
    """Two ranks of threads; the distance from serial execution of undelayed modules, and the stages."""
    schedule = build(name, 2, MICROBATCHES, backward_split=not whole)
    stages = [Stage(fused=fused).double() for _ in range(schedule.num_stages)]
    reference = [Stage(delay_wgrad_compute=False).double() for _ in stages]
    for stage, other in zip(stages, reference, strict=True):
        other.load_state_dict(stage.state_dict())
        for parameter in [*stage.once.parameters(), *stage.twice.parameters()] if fused else ():
            parameter.main_grad = torch.zeros_like(parameter)
    x, y = torch.randn(2, MICROBATCHES, ROWS, WIDTH, dtype=torch.float64)
    for part, label in zip(x, y, strict=True):
        values: Any = (part,)
        for module in reference:
            values = module(*values)
        zoo.criterion(*values, label).backward()

    def rank_work(rank: int, executor: Any, _: Any) -> int:
        mine = {key: stages[key.stage] for key in schedule.stages_of(rank)}
        for module in mine.values():
            SplitWeightGrads(module, executor.store, whole=whole)
        programs = ModuleStages(
            mine,
            num_stages=schedule.num_stages,
            inputs={m: [x[m]] for m in range(MICROBATCHES)},
            labels={m: [y[m]] for m in range(MICROBATCHES)},
            criterion=zoo.criterion,
        )
        executor.run(schedule, programs)
        return executor.store.num_waiting

    assert run_threads(2, rank_work) == [0, 0]
    for stage in stages:
        for module in (stage.once, stage.twice):
            assert module.wgrad_store.context is not None and module.wgrad_store.context.empty()
            for parameter in module.parameters() if fused else ():
                assert parameter.grad is None
                parameter.grad = parameter.main_grad.detach()
    return max(zoo.difference(stage, other) for stage, other in zip(stages, reference, strict=True)), stages


@pytest.mark.parametrize("fused", [False, True], ids=["", "main_grad"])
@pytest.mark.parametrize(("name", "whole"), [("zbv", False), ("dualpipev", False), ("1f1b", True)])
def test_a_schedule_computes_what_modules_delay(name, whole, fused):
    error, stages = train(name, whole=whole, fused=fused)
    assert error < 1e-12
    assert all(stage.once.calls == MICROBATCHES and stage.twice.calls == 2 * MICROBATCHES for stage in stages)


def test_calling_it_without_care_would_lose_gradients(monkeypatch):
    def careless(self, weights, count):
        for _ in range(count):
            self.module.backward_dw()
        return [None] * len(weights)

    monkeypatch.setattr(delayed._EngineModule, "_compute", careless)
    assert train("zbv")[0] > 1e-3


def test_hooks_fire_once_in_w_and_gradients_add_up():
    module, store, fired = Engine(), WeightGradStore(), []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    before = module.weight.grad = torch.randn(WIDTH, WIDTH)
    before = before.clone()
    x = torch.randn(ROWS, WIDTH)
    with SplitWeightGrads(module, store):
        with store.collect() as entries:
            module(torch.tanh(module(x))).sum().backward()
        assert store.num_waiting == 1 and torch.equal(module.weight.grad, before)
        fired.clear()  # autograd sees these weights, and runs their hooks in I without a gradient
        store.run(entries)
    assert sorted(fired) == ["bias", "weight"] and store.num_waiting == 0 and module.calls == 2
    other = copy.copy(module)
    other.wgrad_store = EngineStore(False)
    found = torch.autograd.grad(other(torch.tanh(other(x))).sum(), module.weight)[0]
    torch.testing.assert_close(module.weight.grad, before + found)


def test_a_module_that_is_not_told_to_delay_is_refused():
    module = nn.Sequential(Engine(delay_wgrad_compute=False))
    with pytest.raises(UsageError, match=r"0: Engine without delay_wgrad_compute, .*delay_wgrad_compute=True"):
        SplitWeightGrads(module, WeightGradStore())
    SplitWeightGrads(module, WeightGradStore(), whole=True)
    # Before 2.3 there is no store; norms of the package have no matrices.
    old = type("Linear", (nn.Module,), {"__module__": "transformer_engine.pytorch.module.linear"})()
    old.weight = nn.Parameter(torch.zeros(2))
    SplitWeightGrads(nn.Sequential(old), WeightGradStore())
    old.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(UsageError, match=r"Transformer Engine 2\.3"):
        SplitWeightGrads(nn.Sequential(old), WeightGradStore())


def test_a_module_that_computes_nothing_ends_the_step():
    module, store = Engine(), WeightGradStore()
    module.backward_dw = lambda: None
    with SplitWeightGrads(module, store), store.collect() as entries:
        module(torch.randn(ROWS, WIDTH)).sum().backward()
    with pytest.raises(WeightGradError, match="left its 1 entries alone"):
        store.run(entries)


def test_what_is_kept_is_forgotten_after_an_error():
    module, store = Engine(), WeightGradStore()
    SplitWeightGrads(module, store)
    with pytest.raises(ZeroDivisionError), store.collect():
        module(torch.randn(ROWS, WIDTH)).sum().backward()
        raise ZeroDivisionError
    assert module.wgrad_store.context.qsize() == 1
    store.reset()
    assert module.wgrad_store.context.empty()


class Telling(nn.Module):
    """As mt_moe's layer: told where gradients go, or holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.defer = None

    def defer_weight_grads(self, defer: Any) -> None:
        self.defer = defer


def test_a_module_is_told_where_its_gradients_go():
    module, store = Telling(), WeightGradStore()
    with SplitWeightGrads(nn.Sequential(module), store):
        with store.collect() as entries:
            module.defer([module.weight], lambda: [torch.ones(WIDTH, WIDTH)])
        assert len(entries) == 1 and module.weight.grad is None
        store.run(entries)
    assert module.defer is None and torch.equal(module.weight.grad, torch.ones(WIDTH, WIDTH))


def test_entries_that_a_module_holds_move_to_the_queue():
    from mt_moe.weight_gradients import HeldWeightGradients

    module, store = Telling(), WeightGradStore()
    module.held_weight_gradients = held = HeldWeightGradients()
    held.put([module.weight], lambda: pytest.fail("this one is from before the step"))
    ones = torch.ones(WIDTH, WIDTH)
    with SplitWeightGrads(module, store):
        with store.collect() as entries:
            held.put([module.weight], lambda: [ones])
            held.put([module.weight], lambda: [2 * ones])
        assert len(held) == 1 and len(entries) == 2
        store.run(entries)
    assert torch.equal(module.weight.grad, 3 * ones)


class Wrapper(Engine):
    """As Megatron's TELinear and its like: passes `backward_dw` on where its configuration says so."""

    def __init__(self, delay_wgrad_compute: bool) -> None:
        super().__init__(delay_wgrad_compute=delay_wgrad_compute)
        self.config = SimpleNamespace(delay_wgrad_compute=delay_wgrad_compute)

    def backward_dw(self) -> None:
        if self.config.delay_wgrad_compute:
            super().backward_dw()


class Composite(nn.Module):
    """As Megatron's MLP: has `backward_dw` for its parts, which are found by themselves."""

    def __init__(self, delay_wgrad_compute: bool) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = Wrapper(delay_wgrad_compute), Wrapper(delay_wgrad_compute)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(torch.tanh(self.linear_fc1(x)))

    def backward_dw(self) -> None:
        pytest.fail("the parts are called, not the whole as well")


def test_wrappers_and_composites_as_megatrons_are_called_once():
    module, whole, store = Composite(True), Composite(False), WeightGradStore()
    whole.load_state_dict(module.state_dict())
    x = torch.randn(ROWS, WIDTH)
    whole(x).sum().backward()
    with SplitWeightGrads(module, store), store.collect() as entries:
        module(x).sum().backward()
    assert len(entries) == 2 and module.linear_fc1.weight.grad is None
    store.run(entries)
    assert module.linear_fc1.calls == module.linear_fc2.calls == 1 and zoo.difference(module, whole) < 1e-6


def test_the_moe_layer_defers_in_a_stage():
    from mt_moe import MoEConfig, MoELayer

    config = MoEConfig(hidden=16, ffn=16, num_experts=4, num_topk=2, shared_ffn=16, init_std=0.2)
    with torch.random.fork_rng():
        split, plain = MoELayer(config), MoELayer(config)
    store, x = WeightGradStore(), torch.randn(12, 16)
    plain(x.clone().requires_grad_()).square().sum().backward()
    with SplitWeightGrads(nn.Sequential(split), store) as patch, store.collect() as entries:
        split(x.clone().requires_grad_()).square().sum().backward()
    assert patch.modules == []
    late = {name for name, parameter in split.named_parameters() if parameter.grad is None}
    assert late >= {"experts.fc1", "experts.fc2", "shared.fc1", "shared.fc2"} and len(entries) == 4
    store.run(entries)
    for (name, one), other in zip(split.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name
    split.close()
    plain.close()
