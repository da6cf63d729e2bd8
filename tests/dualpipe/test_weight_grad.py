"""Deferred weight gradients equal ordinary ones, and hooks fire once, when W runs."""

import copy

import pytest
import torch
from torch import nn

from dualpipe.split_functions import split_linear
from dualpipe.split_modules import split_weight_grads
from dualpipe.weight_grad import WeightGradError, WeightGradStore


class Twice(nn.Module):
    """One weight used at two places of the same stage."""

    def __init__(self):
        super().__init__()
        self.shared, self.out = nn.Linear(6, 6), nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.out(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


def record_hooks(module):
    fired = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    return fired


def test_gradients_are_equal_and_hooks_fire_once_at_w():
    plain = Twice().double()
    split, store = copy.deepcopy(plain), WeightGradStore()
    fired = record_hooks(split)
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    grad = torch.randn(4, 5, 3, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    plain(inputs[0]).backward(grad)
    with split_weight_grads(split, store) as patched:
        assert patched.modules == [split.shared, split.out]
        with store.collect() as queue:
            split(inputs[1]).backward(grad)
    assert len(queue) == 3 and store.num_waiting == 1
    assert fired == ["shared.bias"] and split.shared.weight.grad is None
    store.run(queue)
    assert len(queue) == 0 and store.num_waiting == 0
    assert sorted(fired) == ["out.weight", "shared.bias", "shared.weight"]
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for one, other in zip(plain.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-13, atol=1e-13)


def test_outside_of_collect_dw_runs_at_once():
    plain, store = nn.Linear(6, 3).double(), WeightGradStore()
    split = copy.deepcopy(plain)
    split_weight_grads(split, store)
    x = torch.randn(7, 6, dtype=torch.float64)
    for module in (plain, split):
        module(x.clone().requires_grad_()).square().sum().backward()
    assert store.num_waiting == 0
    torch.testing.assert_close(split.weight.grad, plain.weight.grad, rtol=1e-13, atol=1e-13)


def test_hooks_on_the_accumulation_node_fire_at_w():
    """The place where data-parallel wrappers hook."""
    weight, store, fired = nn.Parameter(torch.randn(3, 4)), WeightGradStore(), []
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: fired.append(weight.grad.clone()))
    with store.collect() as queue:
        split_linear(torch.randn(2, 4, requires_grad=True), weight, store).sum().backward()
    assert fired == []
    store.run(queue)
    assert len(fired) == 1 and torch.equal(fired[0], weight.grad)


def test_many_weights_in_one_closure_and_frozen_ones():
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    weights[2].requires_grad_(False)
    store = WeightGradStore()
    with store.collect() as queue:
        store.put_many(weights, lambda: [torch.full((2,), 1.0), torch.full((3,), 2.0), torch.full((2,), 9.0)])
        store.put(weights[0], lambda: torch.full((2,), 10.0))
        store.put(weights[2], lambda: pytest.fail("a frozen weight needs no gradient"))
    store.run(queue)
    assert weights[0].grad.tolist() == [11.0, 11.0] and weights[1].grad.tolist() == [2.0] * 3
    assert weights[2].grad is None
    with pytest.raises(WeightGradError, match="1 gradients were computed for 3 weights"):
        store.put_many(weights, lambda: [torch.zeros(2)])


def test_order_of_delivery_is_the_order_of_the_backward():
    layers, store = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)]), WeightGradStore()
    fired = record_hooks(layers)
    with split_weight_grads(layers, store), store.collect() as queue:
        layers(torch.randn(2, 4, requires_grad=True)).sum().backward()
    store.run(queue)
    assert fired == ["2.weight", "1.weight", "0.weight"]


def test_two_stores_are_apart_and_collect_does_not_nest():
    one, other = WeightGradStore(), WeightGradStore()
    with one.collect() as queue:
        other.put(nn.Parameter(torch.zeros(1)), lambda: torch.ones(1))
        with pytest.raises(WeightGradError, match="inside itself"), one.collect():
            pass
    assert len(queue) == 0 and other.num_waiting == 0


@pytest.mark.parametrize("case", ["no gradients", "frozen weight", "autocast"])
def test_where_deferring_would_lose_something_the_ordinary_function_runs(case):
    store = WeightGradStore()
    weight = nn.Parameter(torch.randn(3, 4), requires_grad=case != "frozen weight")
    x = torch.randn(2, 4, requires_grad=True)
    with torch.set_grad_enabled(case != "no gradients"), torch.autocast("cpu", enabled=case == "autocast"):
        y = split_linear(x, weight, store)
    assert y.dtype == (torch.bfloat16 if case == "autocast" else torch.float32)
    if case == "no gradients":
        assert not y.requires_grad
        return
    with store.collect() as queue:
        y.sum().backward()
    assert len(queue) == 0 and (weight.grad is not None) == (case != "frozen weight")


def test_revert_and_foreign_forwards():
    class Own(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    model, store = nn.Sequential(nn.Linear(2, 2), Own(2, 2)), WeightGradStore()
    patch = split_weight_grads(model, store)
    assert patch.modules == [model[0]] and split_weight_grads(model, store).modules == []
    patch.revert()
    patch.revert()
    assert "forward" not in model[0].__dict__
    with store.collect() as queue:
        model(torch.randn(3, 2, requires_grad=True)).sum().backward()
    assert len(queue) == 0
