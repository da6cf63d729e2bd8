"""Weight gradients apart from input gradients over a zoo of modules: in one process, and on two ranks of threads."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comm_core.runtime.errors import CommTimeoutError, UsageError
from dualpipe import split_functions, weight_grad
from dualpipe.module_stages import ModuleStages
from dualpipe.pipeline import Pipeline
from dualpipe.schedule import build
from dualpipe.split_modules import SplitWeightGrads
from dualpipe.weight_grad import WeightGradQueue, WeightGradStore
from tests.dualpipe import zoo
from tests.dualpipe.threads import run_threads

RANKS, MICROBATCHES, ROWS = 2, 5, 3
TOLERANCE = 1e-12
# What autograd computes in I: weights of kinds that do not defer, those shared with them, and biases and norms.
IN_I = {zoo.TiedToEmbedding: {"table.weight"}, zoo.Mixed: {"conv.weight", "heads"}}


@pytest.fixture
def seed():
    value = random.SystemRandom().randrange(2**31)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value


def watch(module):
    """The hooks that ran, and what must be kept so that they do."""
    fired, nodes = [], []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            # The node on which data-parallel wrappers hook, which runs for a gradient of None as well.
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, name=name: fired.append(name))
            nodes.append(node)
    return fired, nodes


def apart(module, *inputs):
    """(hooks that fired in I, hooks that fired in W); gradients are left in the module."""
    store = WeightGradStore()
    fired, _nodes = watch(module)
    with SplitWeightGrads(module, store):
        out = module(*inputs)
        with store.collect() as queue:
            (out if isinstance(out, torch.Tensor) else torch.stack(out)).square().sum().backward()
        early = list(fired)
        store.run(queue)
    assert store.num_waiting == 0
    return early, fired[len(early) :]


@pytest.mark.parametrize("needs_grad", [True, False], ids=["", "input without gradient"])
@pytest.mark.parametrize("block", zoo.BLOCKS, ids=lambda block: block.__name__)
def test_hooks_fire_once_and_for_weights_at_w(block, needs_grad, seed):
    plain = block().double()
    split = copy.deepcopy(plain)
    x = torch.randn(ROWS, zoo.WIDTH, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(needs_grad) for _ in range(2)]
    plain(inputs[0]).square().sum().backward()
    early, late = apart(split, inputs[1])
    assert zoo.difference(split, plain) < TOLERANCE
    if needs_grad:
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-12, atol=1e-12)
    trained = [name for name, p in split.named_parameters() if p.requires_grad]
    assert sorted(early + late) == sorted(trained)
    matrices = {name for name, p in split.named_parameters() if p.requires_grad and p.dim() > 1} - IN_I.get(
        block, set()
    )
    if block is not zoo.Normed:  # there the gain of the norm, a column, comes with the weight
        assert set(late) == matrices
    assert late or block is zoo.TiedToEmbedding


def test_grouped_products_are_split(seed):
    plain = zoo.Grouped().double()
    split = copy.deepcopy(plain).float()
    x = torch.randn(7, 16)
    torch.stack(plain(x.double())).square().sum().backward()
    early, late = apart(split, x)
    assert early == ["first.bias"] and sorted(late) == ["down", "first.weight", "up"]
    assert zoo.difference(split, plain) < 1e-5 and split.up.grad[1].abs().max() == 0


def test_a_grouped_product_that_is_none_of_ours_is_left_alone(seed):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 16, 16))
            self.first, self.second = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            offs = torch.tensor([2, 4], dtype=torch.int32)
            computed = F.grouped_mm(x, torch.stack([self.first, self.second]), offs=offs)
            return computed + F.grouped_mm(x.view(2, 2, 16), self.weight).view(4, 16)

    plain = Own()
    split = copy.deepcopy(plain)
    x = torch.randn(4, 16)
    plain(x.clone().requires_grad_()).square().sum().backward()
    early, late = apart(split, x.clone().requires_grad_())
    assert sorted(early) == ["first", "second", "weight"] and late == []
    assert zoo.difference(split, plain) < 1e-5


def train(stages, name, width=zoo.WIDTH, dtype=torch.float64):
    """The stages on two ranks of threads by a schedule with I and W apart; the distance of gradients from serial."""
    schedule = build(name, RANKS, MICROBATCHES)
    reference = [copy.deepcopy(stage).double() for stage in stages]
    x, y = torch.randn(2, MICROBATCHES, ROWS, width, dtype=torch.float64)
    for part, label in zip(x, y, strict=True):
        values = (part,)
        for stage in reference:
            values = stage(*values)
        zoo.criterion(*values, label).backward()

    def rank_work(rank, executor, _):
        keys = schedule.stages_of(rank)
        mine = {key: stages[key.stage] for key in keys}
        patches = [SplitWeightGrads(module, executor.store) for module in mine.values()]
        programs = ModuleStages(
            mine,
            num_stages=schedule.num_stages,
            inputs={m: [x[m].to(dtype)] for m in range(MICROBATCHES)},
            labels={m: [y[m].to(dtype)] for m in range(MICROBATCHES)},
            criterion=zoo.criterion,
        )
        executor.run(schedule, programs)
        for patch in patches:
            patch.revert()
        return executor.store.num_waiting

    answers = run_threads(RANKS, rank_work)
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    for error in sorted(errors, key=lambda error: isinstance(error, CommTimeoutError)):
        raise error  # that of the rank the others waited for
    return max(zoo.difference(stage, other) for stage, other in zip(stages, reference, strict=True))


def draw(seed, count):
    """Stages of random blocks."""
    chosen = random.Random(seed)
    return [zoo.ZooStage(*[block() for block in chosen.sample(zoo.BLOCKS, 3)]).double() for _ in range(count)]


@pytest.mark.parametrize("name", ["zbv", "dualpipev", "zb1p"])
def test_random_stages_train_as_serially(name, seed):
    num_stages = build(name, RANKS, MICROBATCHES).num_stages
    for turn in range(2):
        assert train(draw(seed + turn, num_stages), name) < TOLERANCE


def test_grouped_stages_train_as_serially(seed):
    stages = [zoo.Grouped() for _ in range(4)]
    assert train(stages, "zbv", 16, torch.float32) < 1e-4


@pytest.mark.parametrize("fault", ["lost", "doubled", "grouped"])
def test_a_planted_fault_is_found(fault, seed, monkeypatch):
    if fault == "grouped":
        whole = split_functions._grouped_weight_grad
        monkeypatch.setattr(split_functions, "_grouped_weight_grad", lambda *a: whole(*a) * 1.01)
        assert train([zoo.Grouped() for _ in range(4)], "zbv", 16, torch.float32) > 1e-3
        return
    put = WeightGradStore.put

    def faulty(self, weight, compute):
        for _ in range(0 if fault == "lost" else 2):
            put(self, weight, compute)

    monkeypatch.setattr(WeightGradStore, "put", faulty)
    assert train(draw(seed, 4), "zbv") > 1e-3


class Bare(nn.Module):
    """Uses the weight of a linear without calling the linear, too."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(zoo.WIDTH, zoo.WIDTH, bias=False)

    def forward(self, x):
        return F.linear(torch.tanh(self.inner(x)), self.inner.weight)


def test_a_weight_that_is_deferred_and_seen_by_autograd_is_refused(seed, monkeypatch):
    x = torch.randn(ROWS, zoo.WIDTH, requires_grad=True)
    with pytest.raises(UsageError, match=r"inner\.weight: used in a layer that defers .* and elsewhere"):
        apart(Bare(), x)

    class Cast(zoo.Twice):
        def forward(self, x):
            with torch.autocast("cpu"):
                y = self.shared(x)
            return self.shared(y.float())

    with pytest.raises(UsageError, match="outside of autocast"):
        apart(Cast(), x)
    # Without the refusal hooks run twice.
    monkeypatch.setattr(WeightGradQueue, "check", lambda self: None)
    assert apart(Bare(), x) == (["inner.weight"], ["inner.weight"])


def test_two_views_of_one_weight_are_delivered_together(seed, monkeypatch):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 16, 16))

        def forward(self, x):
            offs = torch.tensor([2, 4], dtype=torch.int32)
            return F.grouped_mm(F.grouped_mm(x, self.weight, offs=offs), self.weight.transpose(1, 2), offs=offs)

    plain = Views()
    split = copy.deepcopy(plain)
    x = torch.randn(4, 16)
    plain(x.clone().requires_grad_()).square().sum().backward()
    assert apart(split, x.clone().requires_grad_()) == ([], ["weight"])
    assert zoo.difference(split, plain) < 1e-5
    monkeypatch.setattr(weight_grad, "leaf_of", lambda weight: weight)
    assert apart(copy.deepcopy(plain), x.clone().requires_grad_())[1] == ["weight", "weight"]


def test_a_stage_under_fsdp_is_refused(monkeypatch):
    import torch.distributed.fsdp as fsdp

    class Sharded(nn.Linear):
        pass

    monkeypatch.setattr(fsdp, "FSDPModule", Sharded)
    with pytest.raises(UsageError, match="under FSDP"):
        SplitWeightGrads(nn.Sequential(Sharded(2, 2)), WeightGradStore())


def test_a_pipeline_that_is_refused_leaves_its_modules_as_they_were():
    class Old(nn.Linear):
        wgrad_store = None

        def backward_dw(self):
            pass

    first, second = nn.Linear(2, 2), Old(2, 2)
    with pytest.raises(UsageError, match=r"Old without delay_wgrad_compute"):
        Pipeline([first, second])
    assert "forward" not in first.__dict__
