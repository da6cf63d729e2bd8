"""Experts: against a per-row computation in float64, Megatron's arithmetic bit for bit, deferral, grouped products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comm_core.runtime import trace
from comm_core.runtime.errors import UsageError
from mt_moe import experts
from mt_moe.config import MoEConfig
from mt_moe.experts import Experts, expert_mlp
from mt_moe.products import TorchProducts, why_not

HIDDEN, FFN = 24, 40
Result = tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]


class Problem:
    """Random rows, weights and an output gradient for given counts, padding included."""

    def __init__(
        self, counts: Sequence[int], *, alignment: int = 1, tail: int = 0, dtype: torch.dtype, gated: bool = True
    ):
        self.counts, self.alignment, self.gated = list(counts), alignment, gated
        aligned = [-(-count // alignment) * alignment for count in counts]
        num_rows = sum(aligned) + tail
        self.real = torch.zeros(num_rows, dtype=torch.bool)
        self.expert_of_row = torch.zeros(num_rows, dtype=torch.long)
        start = 0
        for expert, count in enumerate(counts):
            self.real[start : start + count] = True
            self.expert_of_row[start : start + count] = expert
            start += aligned[expert]
        mask = self.real.unsqueeze(1)

        self.rows = (torch.randn(num_rows, HIDDEN) * mask).to(dtype)
        self.row_weights = torch.rand(num_rows) * self.real
        self.grad = (torch.randn(num_rows, HIDDEN) * mask).to(dtype)
        width = (2 if gated else 1) * FFN
        self.fc1 = [(torch.randn(width, HIDDEN) * HIDDEN**-0.5).to(dtype) for _ in counts]
        self.fc2 = [(torch.randn(HIDDEN, FFN) * FFN**-0.5).to(dtype) for _ in counts]

    def move(self, device: torch.device) -> None:
        """Everything an implementation is given, to another device."""
        self.rows, self.row_weights, self.grad = (
            tensor.to(device) for tensor in (self.rows, self.row_weights, self.grad)
        )
        self.fc1, self.fc2 = ([weight.to(device) for weight in weights] for weights in (self.fc1, self.fc2))

    def leaves(self) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        def leaf(tensor: Tensor) -> Tensor:
            return tensor.clone().requires_grad_()

        return leaf(self.rows), leaf(self.row_weights), [leaf(w) for w in self.fc1], [leaf(w) for w in self.fc2]

    def run(self, fn: Callable[..., Tensor]) -> Result:
        rows, row_weights, fc1, fc2 = self.leaves()
        y = fn(rows, self.counts, row_weights, fc1, fc2)
        y.backward(self.grad)
        return y.detach(), rows.grad, row_weights.grad, [w.grad for w in fc1], [w.grad for w in fc2]

    def ours(self, implementation: str, **options: object) -> Result:
        def fn(rows: Tensor, counts: list[int], row_weights: Tensor, fc1: list[Tensor], fc2: list[Tensor]) -> Tensor:
            return expert_mlp(
                rows,
                counts,
                row_weights,
                fc1,
                fc2,
                expert_alignment=self.alignment,
                gated=self.gated,
                implementation=implementation,
                **options,
            )

        return self.run(fn)

    def by_row(self) -> Result:
        """One row at a time in float64: slow, and independent of layout code."""

        def fn(rows: Tensor, counts: list[int], row_weights: Tensor, fc1: list[Tensor], fc2: list[Tensor]) -> Tensor:
            outputs = []
            for row in range(rows.shape[0]):
                if not self.real[row]:
                    outputs.append(torch.zeros(HIDDEN, dtype=torch.float64))
                    continue
                expert = int(self.expert_of_row[row])
                inner = fc1[expert].double() @ rows[row].double()
                inner = F.silu(inner[:FFN]) * inner[FFN:] if self.gated else F.silu(inner)
                outputs.append(fc2[expert].double() @ (inner * row_weights[row].double()))
            return torch.stack(outputs) if outputs else torch.zeros(0, HIDDEN, dtype=torch.float64)

        rows, row_weights, fc1, fc2 = self.leaves()
        y = fn(rows, self.counts, row_weights, fc1, fc2)
        if not y.requires_grad:  # no row at all: every gradient is zero by definition
            rows.grad, row_weights.grad = torch.zeros_like(rows), torch.zeros_like(row_weights)
        else:
            y.backward(self.grad.double())
        zeros = [torch.zeros_like(w) if w.grad is None else w.grad for w in [*fc1, *fc2]]
        return y.detach(), rows.grad, row_weights.grad, zeros[: len(fc1)], zeros[len(fc1) :]


def megatron_arithmetic(
    rows: Tensor, counts: list[int], row_weights: Tensor, fc1: list[Tensor], fc2: list[Tensor]
) -> Tensor:
    """The operations of Megatron's sequential experts in plain torch: split, fc1, glu, probs, fc2, cat.

    Its linear layers are matmul(x, w.t()), whose derivatives by autograd are the products that its backward writes out.
    """
    outputs = []
    for part, probs, w1, w2 in zip(rows.split(counts), row_weights.split(counts), fc1, fc2, strict=True):
        inner = torch.matmul(part, w1.t())
        gate, up = torch.chunk(inner, 2, dim=-1)
        inner = F.silu(gate) * (up + 0.0)
        kept = inner.dtype
        inner = inner * probs.unsqueeze(-1)
        outputs.append(torch.matmul(inner.to(kept), w2.t()))
    return torch.cat(outputs, dim=0)


def flat(result: Result) -> list[Tensor]:
    return [*result[:3], *result[3], *result[4]]


def assert_same_bits(one: Result, other: Result) -> None:
    for index, (a, b) in enumerate(zip(flat(one), flat(other), strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"tensor {index} differs by {(a - b).abs().max()}"


def assert_near(one: Result, other: Result, tolerance: float) -> None:
    for index, (a, b) in enumerate(zip(flat(one), flat(other), strict=True)):
        error = float((a.double() - b.double()).norm())
        norm = float(b.double().norm())
        assert error <= tolerance * norm, f"tensor {index}: {error} of {norm}"


CASES = [([5, 0, 9, 1], 1, 0), ([7], 1, 0), ([5, 0, 9, 3], 8, 0), ([4, 4], 4, 6), ([0, 0, 0], 1, 0), ([0, 0], 4, 3)]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("implementation", ["loop", "grouped"])
@pytest.mark.parametrize(("counts", "alignment", "tail"), CASES)
def test_equals_one_row_at_a_time(
    counts: list[int], alignment: int, tail: int, implementation: str, gated: bool
) -> None:
    problem = Problem(counts, alignment=alignment, tail=tail, dtype=torch.float32, gated=gated)
    got = problem.ours(implementation)
    assert_near(got, problem.by_row(), 2e-6)
    assert torch.all(got[0][~problem.real] == 0) and torch.all(got[1][~problem.real] == 0)


def test_a_wrong_routing_weight_is_seen() -> None:
    problem = Problem([5, 0, 9, 3], dtype=torch.float32)
    want = problem.by_row()
    problem.row_weights = problem.row_weights * 1.01
    with pytest.raises(AssertionError):
        assert_near(problem.ours("loop"), want, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[5, 0, 9, 1], [130], [64, 33, 1, 200], [0, 0]])
def test_loop_is_megatron_bit_for_bit(counts: list[int], dtype: torch.dtype) -> None:
    problem = Problem(counts, dtype=dtype)
    assert_same_bits(problem.ours("loop"), problem.run(megatron_arithmetic))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("implementation", ["loop", "grouped"])
@pytest.mark.parametrize(("counts", "alignment", "tail"), CASES)
def test_deferred_weight_gradients_are_the_same_bits(
    counts: list[int], alignment: int, tail: int, implementation: str, packed: bool
) -> None:
    problem = Problem(counts, alignment=alignment, tail=tail, dtype=torch.float32)
    want = problem.ours(implementation)
    rows, row_weights, fc1, fc2 = problem.leaves()
    pair = [torch.stack(list(w)).detach().requires_grad_() if packed else w for w in (fc1, fc2)]
    handed: list[tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]]]] = []
    y = expert_mlp(
        rows,
        counts,
        row_weights,
        *pair,
        expert_alignment=alignment,
        defer=lambda weights, compute: handed.append((weights, compute)),
        implementation=implementation,
    )
    y.backward(problem.grad)
    assert len(handed) == 2, "one call for fc2, one for fc1"
    for (weights, compute), given, direct in zip(handed, reversed(pair), (want[4], want[3]), strict=True):
        listed = [given] if packed else given
        assert all(a is b for a, b in zip(weights, listed, strict=True)), "the weights as given, by identity"
        assert all(w.grad is None for w in listed), "backward computed what it should have deferred"
        grads = compute()
        assert torch.equal(grads[0] if packed else torch.stack(list(grads)), torch.stack(direct))
    assert torch.equal(rows.grad, want[1]) and torch.equal(row_weights.grad, want[2]) and torch.equal(y, want[0])


def test_deferral_reaches_weights_when_rows_need_no_gradient() -> None:
    problem = Problem([3, 2], dtype=torch.float32)
    want = problem.ours("loop")
    _, _, fc1, fc2 = problem.leaves()
    handed: list[list[Tensor]] = []
    y = expert_mlp(
        problem.rows,
        problem.counts,
        problem.row_weights,
        fc1,
        fc2,
        defer=lambda _, compute: handed.append(list(compute())),
    )
    y.backward(problem.grad)
    assert_same_bits((want[0], want[1], want[2], handed[1], handed[0]), want)
    with torch.no_grad():
        expert_mlp(problem.rows, problem.counts, problem.row_weights, fc1, fc2, defer=lambda *_: pytest.fail("no grad"))


def test_frozen_weights() -> None:
    problem = Problem([3, 2], dtype=torch.float32)
    want = problem.ours("loop")
    handed: list[Sequence[Tensor]] = []
    for implementation in ("loop", "grouped"):
        rows, row_weights, fc1, fc2 = problem.leaves()
        for weight in fc1:
            weight.requires_grad_(False)
        y = expert_mlp(
            rows,
            problem.counts,
            row_weights,
            fc1,
            fc2,
            defer=lambda weights, _: handed.append(weights),
            implementation=implementation,
        )
        y.backward(problem.grad)
        torch.testing.assert_close(rows.grad, want[1])
    assert len(handed) == 2 and all(weights[0].shape == (HIDDEN, FFN) for weights in handed)
    fc2[0].requires_grad_(False)
    with pytest.raises(UsageError, match="1 of 2 expert weights"):
        expert_mlp(rows, problem.counts, row_weights, fc1, fc2, defer=lambda *_: None)


def test_gradcheck() -> None:
    counts, hidden, ffn = [2, 0, 3], 3, 2
    shapes = [(6, hidden), (6,), *[(2 * ffn, hidden)] * 3, *[(hidden, ffn)] * 3]
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def fn(rows: Tensor, row_weights: Tensor, *weights: Tensor) -> Tensor:
        return expert_mlp(rows, counts, row_weights, weights[:3], weights[3:], expert_alignment=2)

    assert torch.autograd.gradcheck(fn, inputs)


def test_grouped_and_loop_agree_in_bfloat16() -> None:
    problem = Problem([64, 33, 0, 100], alignment=8, dtype=torch.bfloat16)
    assert_near(problem.ours("grouped"), problem.ours("loop"), 2e-2)


def test_choice_of_implementation() -> None:
    cpu = torch.device("cpu")
    assert experts.resolve("auto", cpu, torch.float32, (8,)) == "loop"
    assert experts.resolve("grouped", cpu, torch.float64, (7,)) == "grouped"  # by plain products in the same node
    assert "does not work for torch.float64" in str(why_not(TorchProducts(), cpu, torch.float64))
    assert "needs an accelerator" in str(experts.unavailable("te", cpu, torch.float32))
    with pytest.raises(UsageError, match="Transformer Engine needs an accelerator"):
        experts.resolve("te", cpu, torch.float32, (8,))
    with pytest.raises(UsageError, match="multiple of 16 bytes"):
        experts.resolve("grouped", cpu, torch.float32, (8, 6))
    with pytest.raises(UsageError, match="allowed: auto, loop, grouped, te"):
        experts.resolve("fused", cpu, torch.float32, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": [3, 3]}, "allowed: at least 6 rows"),
        ({"counts": [5, -1]}, "counts >= 0"),
        ({"counts": [5]}, "1 counts, 2 fc1"),
        ({"gated": False}, "gated=False"),
        ({"row_weights": torch.ones(4)}, "row_weights"),
    ],
)
def test_bad_arguments(change: dict[str, object], message: str) -> None:
    problem = Problem([3, 2], dtype=torch.float32)
    arguments = {
        "rows": problem.rows,
        "counts": problem.counts,
        "row_weights": problem.row_weights,
        "fc1": problem.fc1,
        "fc2": problem.fc2,
    }
    with pytest.raises(UsageError, match=message):
        expert_mlp(**(arguments | change))


def test_spans() -> None:
    recorder = trace.Recorder(rank=0)
    with trace.recording(recorder):
        Problem([3, 2], dtype=torch.float32).ours("loop")
    spans = recorder.spans()
    assert {span.category for span in spans} == {"moe"}
    names = [span.name for span in spans]
    assert names[0] == "experts" and names.count("expert_input_grad") == 4 and names.count("expert_weight_grad") == 4


def test_initial_weights_do_not_depend_on_the_layout() -> None:
    config = MoEConfig(hidden=8, ffn=16, num_experts=4, num_topk=2, seed=7)
    whole = Experts(config, first_expert=0, num_local_experts=4)
    half = Experts(config, first_expert=2, num_local_experts=2)
    assert torch.equal(whole.fc1[2:], half.fc1) and torch.equal(whole.fc2[2:], half.fc2)
    assert not torch.equal(whole.fc1[0], whole.fc1[1]) and not torch.equal(whole.fc1[0, :8], whole.fc2[0, :, :8])
    wide = MoEConfig(hidden=64, ffn=64, num_experts=1, num_topk=1, init_std=0.1)
    fc2 = Experts(wide, first_expert=0, num_local_experts=1).fc2.detach()
    assert abs(float(fc2.std()) - 0.1) < 0.01 and abs(float(fc2.mean())) < 0.01
