"""Programs written for the upstream `dualpipe` package, on gloo: what its examples assert, and its other promises."""

from __future__ import annotations

import copy
import random
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm_core.runtime.errors import UsageError
from dualpipe import (
    DualPipe,
    DualPipeV,
    WeightGradStore,
    add_mirrored_gradients,
    set_p2p_tensor_dtype,
    set_p2p_tensor_shapes,
)
from tests.dualpipe.pipelines import groups_of_four
from tests.pool import run_ranks

HIDDEN, ROWS, CHUNKS = 32, 3, 20


class Linear(torch.autograd.Function):
    """A linear layer in the upstream style: its dW is computed at once, or put as a closure."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight

        def add() -> None:
            dw = grad.flatten(0, -2).t() @ x.flatten(0, -2)
            weight.grad = dw if weight.grad is None else weight.grad + dw

        if WeightGradStore.enabled:
            Stage.deferred += 1
            WeightGradStore.put(add)
        else:
            add()
        return grad @ weight, None


class Stage(nn.Module):
    """A stage with the hook for overlapped pairs."""

    pairs = deferred = 0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return Linear.apply(nn.functional.gelu(Linear.apply(x, self.up.weight)), self.down.weight)

    @classmethod
    def overlapped_forward_backward(
        cls, module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1
    ) -> Any:
        Stage.pairs += 1
        assert not WeightGradStore.enabled
        assert (loss1 is None) != (outputs1 is None) and (outputs1 is None) == (output_grads1 is None)
        outputs0 = module0(*inputs0)
        outputs0 = [outputs0] if isinstance(outputs0, Tensor) else outputs0
        loss0 = None if criterion0 is None else criterion0(*outputs0, *labels0)
        if loss1 is not None:
            loss1.backward()
            loss1.detach_()
        else:
            torch.autograd.backward(outputs1, output_grads1)
        return outputs0, loss0


class PlainStage(Stage):
    """The same without a hook, and two tensors between stages of which the second has another shape."""

    overlapped_forward_backward = None

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        scale = x.new_ones(ROWS, 1) if scale is None else scale
        y = super().forward(x) * scale
        return y, scale + y.mean(1, keepdim=True)


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target).clone()


def criterion_of_two(output: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output * scale, target)


def serial(stages: list[Any], x: Tensor, y: Tensor, chunks: int, criterion: Any) -> tuple[Tensor, list[Tensor]]:
    losses, outputs = [], []
    for rows, target in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        parts: Any = (rows,)
        for stage in stages:
            result = stage(*parts)
            parts = (result,) if isinstance(result, Tensor) else result
        losses.append(criterion(*parts, target))
        outputs.append([part.detach() for part in parts])
        if torch.is_grad_enabled():
            losses[-1].backward()
    return torch.stack(losses).detach(), [torch.cat(parts) for parts in zip(*outputs, strict=True)]


def difference(a: Tensor, b: Tensor) -> float:
    """1 - 2ab / (aa + bb), as the examples measure it."""
    a, b = a.detach().double(), b.detach().double()
    return 1 - float(2 * (a * b).sum() / (a * a + b * b).sum())


def example(group: Any, cls: Any, stage_cls: Any, seed: int, mapping: Any = None) -> dict[str, Any]:
    """One training step and one inference step; what was found on this rank."""
    ranks = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    rank = rank if mapping is None else mapping[rank]
    torch.manual_seed(seed)
    two_way, criteria = cls is DualPipe, {Stage: criterion, PlainStage: criterion_of_two}[stage_cls]
    full = [stage_cls() for _ in range(ranks if two_way else 2 * ranks)]
    held = (rank, len(full) - 1 - rank)
    mine = [copy.deepcopy(full[stage]) for stage in held]
    x, y = torch.randn(2, CHUNKS * ROWS, HIDDEN)
    set_p2p_tensor_shapes([(ROWS, HIDDEN)] if stage_cls is Stage else [(ROWS, HIDDEN), (ROWS, 1)])
    set_p2p_tensor_dtype(torch.float32)
    losses, outputs = serial(full, x, y, CHUNKS, criteria)
    half, n = CHUNKS // 2, CHUNKS * ROWS // 2
    first, last = rank == 0, rank == ranks - 1
    if two_way:
        inputs = [x[:n]] if first else [x[n:]] if last else []
        labels = [y[n:]] if first else [y[:n]] if last else []
        wanted = losses[half:] if first else losses[:half] if last else None
        wanted_out = [o[n:] for o in outputs] if first else [o[:n] for o in outputs] if last else None
    else:
        inputs, labels = ([x], [y]) if first else ([], [])
        wanted, wanted_out = (losses, outputs) if first else (None, None)
    pipe = cls(tuple(mine), process_group=group, rank_mapping=mapping)
    Stage.pairs = Stage.deferred = 0
    found: dict[str, Any] = {}
    for _ in range(2):  # the second step starts from clean state
        pipe.zero_grad()
        loss, nothing = pipe.step(*inputs, num_chunks=CHUNKS, criterion=criteria, labels=labels)
        found["loss"] = loss is None if wanted is None else torch.equal(loss, wanted)
        assert nothing is None and not WeightGradStore.cache and WeightGradStore.funcs_queue.empty()
    found["pairs"], found["deferred"] = Stage.pairs, Stage.deferred
    if two_way:
        found["half"] = worst_gradient(mine, held, full)
        add_mirrored_gradients(pipe.module, group=pipe.group, rank_mapping=pipe.rank_mapping)
    found["grads"] = worst_gradient(mine, held, full)
    with torch.no_grad():
        loss, out = pipe.step(*inputs, num_chunks=CHUNKS, criterion=criteria, labels=labels, return_outputs=True)
    found["inference"] = loss is None if wanted is None else torch.equal(loss, wanted)
    out = [out] if isinstance(out, Tensor) else out
    same = out is None if wanted_out is None else all(map(torch.equal, out, wanted_out))
    found["outputs"] = same
    pipe.close()
    return found


def worst_gradient(mine: list[Any], held: Any, full: list[Any]) -> float:
    pairs = [
        both
        for module, stage in zip(mine, held, strict=True)
        for both in zip(module.parameters(), full[stage].parameters(), strict=True)
    ]
    return max(difference(p.grad, q.grad) for p, q in pairs)


CASES = [("V", 2), ("V", 3), ("V", 4), ("two-way", 2), ("two-way", 4)]


def every_case(rank: int, seed: int) -> dict[Any, Any]:
    groups, found = groups_of_four(rank), {}
    for name, ranks in CASES:
        if ranks in groups:
            cls = DualPipeV if name == "V" else DualPipe
            found[name, ranks] = example(groups[ranks], cls, Stage, seed)
    found["mapped"] = example(groups[4], DualPipeV, Stage, seed, mapping=[2, 0, 3, 1])
    found["two tensors"] = example(groups[4], DualPipeV, PlainStage, seed)
    found["two ways, mapped"] = example(groups[4], DualPipe, Stage, seed, mapping=[2, 0, 3, 1])
    found["two tensors, two ways"] = example(groups[2], DualPipe, PlainStage, seed)
    found["wrong shape"] = wrong_shape(groups[2])
    return found


def wrong_shape(group: Any) -> str:
    """Rank 0 is told of another shape than its stage returns: every rank ends with an error."""
    set_p2p_tensor_shapes([(ROWS, HIDDEN + dist.get_rank(group))])
    pipe = DualPipeV((Stage(), Stage()), process_group=group)
    inputs = [torch.randn(8 * ROWS, HIDDEN)] if dist.get_rank(group) == 0 else []
    if dist.get_rank(group) == 0:
        set_p2p_tensor_shapes([(ROWS, HIDDEN + 1)])
    try:
        pipe.step(*inputs, num_chunks=8, criterion=criterion, labels=inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    seed = random.SystemRandom().randrange(2**31)
    print(f"model and data seed {seed}")
    return run_ranks(4, every_case, seed, timeout=240)


def check(answer: dict[str, Any], *, hooked: bool = True) -> None:
    assert answer["loss"] and answer["inference"] and answer["outputs"]
    assert answer["grads"] < 1e-13
    assert (answer["pairs"] > 0) == hooked and answer["deferred"] > 0
    assert answer.get("half", 1) > 1e-3  # each copy alone has half of the chunks


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_what_the_upstream_examples_assert(found, name, ranks):
    answers = [answer[name, ranks] for answer in found if (name, ranks) in answer]
    assert len(answers) == (3 if ranks == 3 else 4)
    for answer in answers:
        check(answer)


def test_the_v_on_one_rank_without_a_group(fresh_random_data):
    check(example(None, DualPipeV, Stage, fresh_random_data))


def test_rank_mapping(found):
    for answer in found:
        check(answer["mapped"])
        check(answer["two ways, mapped"])


def test_two_tensors_a_hop_and_no_hook(found):
    for answer in found:
        check(answer["two tensors"], hooked=False)
        check(answer["two tensors, two ways"], hooked=False)


def test_a_wrong_shape_ends_every_rank(found):
    assert "UsageError: stage 0 returned (3, 32) torch.float32" in found[0]["wrong shape"]
    assert found[1]["wrong shape"].startswith("CommError")


def test_the_store_of_weight_gradients():
    done: list[int] = []
    WeightGradStore.put(lambda: done.append(1))
    WeightGradStore.put(lambda: done.append(2))
    WeightGradStore.flush()
    WeightGradStore.put(lambda: done.append(3))
    WeightGradStore.flush()
    WeightGradStore.pop()
    assert done == [1, 2]
    WeightGradStore.pop()
    assert done == [1, 2, 3]
    with pytest.raises(UsageError, match="flush"):
        WeightGradStore.pop()
    WeightGradStore.put(lambda: done.append(4))
    WeightGradStore.clear()
    assert not WeightGradStore.cache and WeightGradStore.funcs_queue.empty() and WeightGradStore.enabled is False


def test_mistakes(monkeypatch):
    monkeypatch.setattr("dualpipe.compat._shapes", None)
    pipe = DualPipeV((Stage(), Stage()))
    x = torch.randn(4 * ROWS, HIDDEN)
    with pytest.raises(UsageError, match="set_p2p_tensor_shapes"):
        pipe.step(x, num_chunks=4, criterion=criterion, labels=[x])
    set_p2p_tensor_shapes([(ROWS, HIDDEN)])
    set_p2p_tensor_dtype(torch.float32)
    with pytest.raises(UsageError, match="criterion None"):
        pipe.step(x, num_chunks=4)
    with pytest.raises(UsageError, match="microbatches 0"):
        pipe.step(x)
    with pytest.raises(UsageError, match="an even number of ranks"):
        DualPipe((Stage(), Stage()))
    with pytest.raises(UsageError, match=r"rank_mapping \[1\]"):
        DualPipeV((Stage(), Stage()), rank_mapping=[1])
    with pytest.raises(UsageError, match="1 modules"):
        DualPipeV((Stage(),))


@pytest.mark.parametrize("kept", [False, True])
def test_outputs_that_went_on_are_free_before_their_backward(kept, fresh_random_data, monkeypatch):
    """Unless the modules have a hook for pairs, which is given the outputs."""
    set_p2p_tensor_shapes([(ROWS, HIDDEN)])
    set_p2p_tensor_dtype(torch.float64)
    outputs, alive = [], []

    class First(nn.Linear):
        """Saves nothing of its output; remembers it, and which of all outputs are alive when it runs."""

        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(ref() is not None for ref in outputs))
            y = 2.0 * super().forward(x)
            outputs.append(weakref.ref(y))
            return y

    if kept:  # a planted fault
        monkeypatch.setattr("dualpipe.compat_stages._edges", list)
    pipe = DualPipeV((First(HIDDEN, HIDDEN).double(), nn.Linear(HIDDEN, HIDDEN).double()))
    x = torch.randn(4 * ROWS, HIDDEN, dtype=torch.float64)
    pipe.step(x, num_chunks=4, criterion=criterion, labels=[x])
    assert (max(alive) > 0) == kept
    pipe.close()
