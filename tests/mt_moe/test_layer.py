"""MoELayer on 1, 2 and 4 processes against one token at a time in float64: outputs and every gradient."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm_core import ElasticBuffer
from comm_core.runtime.errors import UsageError
from mt_moe import MoEConfig, MoELayer
from mt_moe.router import Routing
from tests.mt_moe.recorded import Mark, RecordedBuffer
from tests.mt_moe.reference import balance_loss_of, moe_token
from tests.pool import run_ranks

FULL = MoEConfig(
    hidden=10,
    ffn=6,
    num_experts=8,
    num_topk=3,
    shared_ffn=7,
    num_groups=4,
    num_topk_groups=2,
    routed_scaling_factor=2.5,
    bias_update_rate=0.01,
    aux_loss_coefficient=0.1,
    expert_alignment=4,
    init_std=0.5,
    seed=3,
)
PLAIN = replace(
    FULL, score="softmax", num_groups=1, num_topk_groups=1, shared_ffn=0, activation="gelu", gated=False,
    aux_loss_coefficient=0.0, normalize_weights=False, expert_alignment=1,
)  # fmt: skip
NUM_TOKENS = 16
# Tokens of each rank; some ranks have none.
SPLITS = {1: ([16], [16]), 2: ([11, 5], [16, 0]), 4: ([6, 0, 7, 3], [0, 0, 9, 7])}
UNUSED = 3  # an expert no token chooses
Results = dict[str, Tensor]


@dataclass
class Batch:
    """All ranks' tokens, the gradients of their outputs, a mask and the router's bias; the same on every rank."""

    x: Tensor
    grad: Tensor
    mask: Tensor
    bias: Tensor

    @classmethod
    def of(cls, seed: int, dtype: torch.dtype = torch.float64, hidden: int = FULL.hidden) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        x, grad = torch.randn(2, NUM_TOKENS, hidden, generator=generator, dtype=torch.float64).to(dtype)
        bias = torch.randn(FULL.num_experts, generator=generator) * 0.1
        bias[UNUSED] = -100.0
        mask = torch.rand(NUM_TOKENS, generator=generator) < 0.8
        return cls(x, grad, mask, bias)


def own(tensor: Tensor, splits: Sequence[int], rank: int) -> Tensor:
    return tensor.split(list(splits))[rank]


def gradients(layer: MoELayer) -> Results:
    result = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{name}: a gradient is zero, never None"
        result[name] = parameter.grad.clone()
    return result


def run_case(
    rank: int, buffer: ElasticBuffer | None, config: MoEConfig, splits: Sequence[int], seed: int, fault: float
) -> Results:
    """One forward and backward, then once more with deferred weight gradients, which must be the same bits."""
    batch = Batch.of(seed)
    masked = not config.shared_ffn
    with MoELayer(config, buffer=buffer, dtype=torch.float64) as layer:
        layer.router.expert_bias.copy_(batch.bias)
        if fault != 1.0:
            layer.router.register_forward_hook(lambda _, __, out: out._replace(topk_weights=out.topk_weights * fault))
        outcomes = []
        for deferred in (False, True):
            layer.zero_grad()
            x = own(batch.x, splits, rank).clone().requires_grad_()
            handed: list[tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]]]] = []
            losses: list[Tensor] = []
            y = layer(
                x,
                token_mask=own(batch.mask, splits, rank) if masked else None,
                aux_losses=losses,
                defer=(lambda *pair, handed=handed: handed.append(pair)) if deferred else None,
            )
            ((y * own(batch.grad, splits, rank)).sum() + sum(losses)).backward()
            for weights, compute in handed:
                for weight, grad in zip(weights, compute(), strict=True):
                    assert weight.grad is None
                    weight.grad = grad
            assert len(handed) == (0 if not deferred else 4 if config.shared_ffn else 2)
            outcomes.append({"y": y.detach(), "x": x.grad, **gradients(layer)})
        for name, value in outcomes[0].items():
            assert torch.equal(value, outcomes[1][name]), f"deferring changed {name}"
        layer.update_expert_bias()
        return outcomes[0] | {"bias": layer.router.expert_bias.clone()}


class Given(torch.nn.Module):
    """A router whose decision for the whole batch is known, so that only the way of the tokens differs."""

    def __init__(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        super().__init__()
        self.topk_idx, self.topk_weights = topk_idx, topk_weights

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Routing:
        return Routing(self.topk_idx, self.topk_weights, self.topk_weights)


def run_given_routing(
    rank: int, buffer: ElasticBuffer | None, splits: Sequence[int], seed: int, dtype: torch.dtype
) -> Results:
    """Outputs and gradients for a known decision.

    Two experts a token, as every order of two summands gives the same sum; rows of whole cache lines, as a matrix
    product of the CPU library may depend on the alignment of its rows, which differs between layouts.
    """
    config = replace(PLAIN, num_topk=2, hidden=32, ffn=32)
    batch = Batch.of(seed, dtype, config.hidden)
    generator = torch.Generator().manual_seed(seed)
    topk_idx = torch.rand(NUM_TOKENS, 8, generator=generator).argsort(dim=1)[:, :2]
    weights = torch.rand(NUM_TOKENS, 2, generator=generator)
    topk_idx[torch.rand(NUM_TOKENS, 2, generator=generator) < 0.2] = -1
    with MoELayer(config, buffer=buffer, dtype=dtype) as layer:
        layer.router = Given(own(topk_idx, splits, rank).contiguous(), own(weights, splits, rank))
        x = own(batch.x, splits, rank).clone().requires_grad_()
        y = layer(x)
        y.backward(own(batch.grad, splits, rank))
        return {
            "y": y.detach(),
            "x": x.grad,
            "experts.fc1": layer.experts.fc1.grad,
            "experts.fc2": layer.experts.fc2.grad,
        }


def run_all(rank: int, num_ranks: int, seed: int) -> list[dict[str, Any]]:
    """Every case of one number of ranks, so that processes start once. As float64 arrays, which cross processes."""
    first, second = SPLITS[num_ranks]
    # A buffer shared by layers on several processes; on one, each layer makes its own and a group with it.
    with ElasticBuffer(None) if num_ranks > 1 else contextlib.nullcontext() as buffer:
        results = [
            run_case(rank, buffer, FULL, first, seed, 1.0),
            run_case(rank, buffer, PLAIN, second, seed, 1.0),
            run_given_routing(rank, buffer, first, seed, torch.float32),
            run_given_routing(rank, buffer, second, seed, torch.bfloat16),
            run_case(rank, buffer, FULL, first, seed, 1.01),
        ]
    if num_ranks == 2:
        check_order(rank)
        check_refusals(rank)
    return [{name: value.double().numpy() for name, value in result.items()} for result in results]


def check_order(rank: int) -> None:
    """The shared expert runs between launch and wait of the dispatch, its backward between those of the gradient."""
    log: list[str] = []
    assert dist.group.WORLD is not None
    with MoELayer(FULL, group=dist.group.WORLD) as owner:
        buffer = owner.buffer
        layer = MoELayer(replace(FULL, aux_loss_coefficient=0.0), buffer=RecordedBuffer(buffer, log))  # type: ignore[arg-type]
        for name in ("shared", "experts"):
            module = getattr(layer, name)
            module.register_forward_hook(lambda _, __, out, name=name: Mark.apply(out, name, log))
        y = layer(torch.randn(3 * rank, FULL.hidden, requires_grad=True))
        y.sum().backward()
        layer.close()  # the buffer is not the layer's
        buffer.prepare(torch.zeros(1, 1, dtype=torch.int64), num_experts=8).layout  # noqa: B018  waits
    assert log == [
        "launch dispatch",
        "shared",
        "wait dispatch",
        "experts",
        "launch combine",
        "wait combine",
        "launch dispatch",
        "wait dispatch",
        "experts backward",
        "launch combine",
        "shared backward",
        "wait combine",
    ]


def check_refusals(rank: int) -> None:
    with pytest.raises(UsageError, match="num_experts = 5 on 2 ranks; allowed: a multiple of 2"):
        MoELayer(MoEConfig(hidden=4, ffn=4, num_experts=5, num_topk=1))
    with ElasticBuffer(None) as buffer, pytest.raises(UsageError, match="group and buffer"):
        MoELayer(FULL, buffer=buffer, group=dist.group.WORLD)


def joined(results: Sequence[dict[str, Any]]) -> Results:
    """The ranks' results as one: tokens and experts put together, what every rank holds summed."""
    out = {}
    for name in results[0]:
        parts = [torch.from_numpy(result[name]) for result in results]
        if name in ("y", "x") or name.startswith("experts."):
            out[name] = torch.cat(parts)
        elif name == "bias":
            assert all(torch.equal(part, parts[0]) for part in parts)
            out[name] = parts[0]
        else:
            out[name] = torch.stack(parts).sum(0)
    return out


def by_definition(config: MoEConfig, splits: Sequence[int], seed: int) -> Results:
    batch = Batch.of(seed)
    with MoELayer(config, dtype=torch.float64) as layer:
        weights = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    bias = batch.bias.tolist()
    x = batch.x.clone().requires_grad_()
    routed = [bool(flag) or bool(config.shared_ffn) for flag in batch.mask]
    tokens = [x[t] for t in range(NUM_TOKENS)]
    y = torch.stack([moe_token(x_t, weights, bias, config, r) for x_t, r in zip(tokens, routed, strict=True)])
    loss = (y * batch.grad).sum()
    if config.aux_loss_coefficient:
        start = 0
        for length in splits:
            if length:  # each rank's tokens are one sequence
                loss = loss + balance_loss_of(tokens[start : start + length], weights["router.weight"], config)
            start += length
    loss.backward()
    return {"y": y.detach(), "x": x.grad, **{name: weight.grad for name, weight in weights.items()}}


def assert_equal_to_definition(got: Results, want: Results) -> None:
    assert set(want) == set(got) - {"bias"}
    for name, value in want.items():
        error, norm = float((got[name] - value).norm()), float(value.norm())
        assert norm > 0 and error <= 1e-12 * norm, f"{name}: error {error} of {norm}"


@pytest.fixture(scope="module")
def seed() -> int:
    return int(torch.randint(2**30, (), generator=torch.Generator().manual_seed(torch.seed())))


@pytest.fixture(scope="module")
def alone(seed: int) -> list[Results]:
    """The results of one process, without any process group of the caller."""
    print(f"seed {seed}")
    return [joined([results]) for results in run_all_alone(seed)]


def run_all_alone(seed: int) -> list[dict[str, Any]]:
    assert not dist.is_initialized()
    torch.set_num_threads(1)  # as in the processes it is compared with: threads change the order of sums
    results = run_all(0, 1, seed)
    assert not dist.is_initialized(), "close() leaves the process as it was"
    return results


@pytest.fixture(params=[1, 2, 4])
def cases(request: pytest.FixtureRequest, seed: int, alone: list[Results]) -> Iterator[tuple[int, list[Results]]]:
    num_ranks = request.param
    if num_ranks == 1:
        yield 1, alone
        return
    by_rank = run_ranks(num_ranks, run_all, num_ranks, seed, timeout=120.0)
    yield num_ranks, [joined(list(results)) for results in zip(*by_rank, strict=True)]


def test_equals_the_definition(cases: tuple[int, list[Results]], seed: int, alone: list[Results]) -> None:
    num_ranks, (full, plain, given32, given16, faulty) = cases
    first, second = SPLITS[num_ranks]
    want = by_definition(FULL, first, seed)
    assert_equal_to_definition(full, want)
    assert_equal_to_definition(plain, by_definition(PLAIN, second, seed))
    assert torch.all(full["experts.fc1"][UNUSED] == 0) and torch.all(full["experts.fc2"][UNUSED] == 0)
    with pytest.raises(AssertionError, match="error"):
        assert_equal_to_definition(faulty, want)
    # The same tokens in the same order meet each expert on any number of ranks, and the bias sees the same counts.
    for got, one in ((given32, alone[2]), (given16, alone[3])):
        for name in one:
            assert torch.equal(got[name], one[name]), f"{name} differs from one process"
    assert torch.equal(full["bias"], alone[0]["bias"]) and not torch.equal(full["bias"], Batch.of(seed).bias.double())


def test_shapes_and_refusals() -> None:
    with MoELayer(FULL) as layer:
        losses: list[Tensor] = []
        assert layer(torch.randn(2, 3, 5, FULL.hidden), aux_losses=losses).shape == (2, 3, 5, FULL.hidden)
        assert layer(torch.randn(FULL.hidden), aux_losses=losses).shape == (FULL.hidden,)
        assert layer(torch.randn(4, 0, FULL.hidden), aux_losses=losses).shape == (4, 0, FULL.hidden)
        assert len(losses) == 3 and all(loss.dim() == 0 for loss in losses) and float(losses[2].detach()) == 0
        with pytest.raises(UsageError, match=r"call layer\(x, aux_losses=losses\)"):
            layer(torch.randn(3, FULL.hidden))
        with pytest.raises(UsageError, match=r"x of shape \[3, 4\]; allowed: \[..., 10\]"):
            layer(torch.randn(3, 4), aux_losses=losses)
        with pytest.raises(UsageError, match="token_mask"):
            layer(torch.randn(3, FULL.hidden), aux_losses=losses, token_mask=torch.ones(4, dtype=torch.bool))
        with pytest.raises(UsageError, match=r"x of torch.bfloat16 and weights of torch.float32; allowed: one dtype"):
            layer(torch.randn(3, FULL.hidden).bfloat16(), aux_losses=losses)
        layer.eval()
        assert layer(torch.randn(3, FULL.hidden)).shape == (3, FULL.hidden)


@pytest.mark.parametrize("experts", ["loop", "grouped"])
def test_autocast_changes_nothing(experts: str) -> None:
    """Rounded logits would send tokens elsewhere; and products rounded forward would meet others in backward."""
    config = replace(FULL, hidden=16, ffn=8, experts=experts, shared_gate=True)
    x = torch.randn(9, config.hidden)
    found: list[list[Tensor]] = []
    for enabled in (False, True):
        with MoELayer(config) as layer:
            leaf = x.clone().requires_grad_()
            losses: list[Tensor] = []
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                y = layer(leaf, aux_losses=losses)
            (y.square().sum() + sum(losses)).backward()
            found.append([y, leaf.grad, *losses, *[weight.grad for weight in layer.parameters()]])
    assert all(torch.equal(plain, cast) for plain, cast in zip(*found, strict=True))


def test_a_copy_shares_the_buffer_alone() -> None:
    """As an average of models makes one; the first layer still closes what it made."""
    x = torch.randn(5, FULL.hidden)
    with MoELayer(FULL) as layer:
        layer.eval()
        with copy.deepcopy(layer) as other:
            assert other.buffer is layer.buffer is other.dispatcher.buffer and torch.equal(other(x), layer(x))
            with torch.no_grad():
                other.experts.fc1.zero_()
            assert layer.experts.fc1.any() and not torch.equal(other(x), layer(x))
        assert layer(x).shape == x.shape
    assert not dist.is_initialized()


def test_each_sequence_of_a_batch_has_its_loss() -> None:
    x = torch.randn(3, 5, FULL.hidden, dtype=torch.float64)
    with MoELayer(FULL, dtype=torch.float64) as layer:
        losses: list[Tensor] = []
        layer(x, aux_losses=losses)
        want = [balance_loss_of(list(sequence), layer.router.weight, FULL) for sequence in x]
    torch.testing.assert_close(losses[0], torch.stack(want).mean(), rtol=1e-12, atol=0)


def test_layers_start_alike_by_number_only() -> None:
    with MoELayer(FULL) as one, MoELayer(FULL) as same, MoELayer(FULL, layer_number=1) as other:
        states: list[dict[str, Any]] = [layer.state_dict() for layer in (one, same, other)]
    assert set(states[0]) == {
        "router.weight", "router.expert_bias", "experts.fc1", "experts.fc2", "shared.fc1", "shared.fc2"
    }  # fmt: skip
    for name in set(states[0]) - {"router.expert_bias"}:
        assert torch.equal(states[0][name], states[1][name]) and not torch.equal(states[0][name], states[2][name])


def test_no_silent_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="no process group in one of 4 processes"):
        MoELayer(FULL)
    assert not dist.is_initialized()
