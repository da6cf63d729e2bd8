"""Router: against one token at a time, group limits, the bias that only chooses, its update, the balance loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from comm_core.runtime.errors import UsageError
from mt_moe.config import MoEConfig
from mt_moe.router import Router
from mt_moe.routing import choose
from tests.mt_moe.reference import balance_loss_of, route_token
from tests.pool import run_ranks

BASE = MoEConfig(hidden=12, ffn=8, num_experts=16, num_topk=4, init_std=0.5, routed_scaling_factor=2.5)
LIMITED = replace(BASE, num_groups=4, num_topk_groups=2)


def router_with_bias(config: MoEConfig, dtype: torch.dtype = torch.float64) -> Router:
    router = Router(config, dtype=dtype)
    router.expert_bias.copy_(torch.randn(config.num_experts) * 0.2)
    return router


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("limits", [(1, 1), (4, 2), (4, 4), (8, 2), (16, 6)])
def test_equals_one_token_at_a_time(limits: tuple[int, int], normalize: bool, score: str) -> None:
    config = replace(BASE, score=score, normalize_weights=normalize, num_groups=limits[0], num_topk_groups=limits[1])
    router = router_with_bias(config)
    x = torch.randn(40, config.hidden, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(40, config.num_topk, dtype=torch.float64)
    topk_idx, topk_weights, _ = router(x)
    topk_weights.backward(grad)
    got = x.grad, router.weight.grad
    x.grad = router.weight.grad = None
    for token in range(40):
        experts, weights = route_token(router.weight @ x[token], router.expert_bias.tolist(), config)
        assert topk_idx[token].tolist() == experts
        row = torch.stack(weights)
        torch.testing.assert_close(topk_weights[token], row, rtol=1e-12, atol=0)
        row.backward(grad[token])
    torch.testing.assert_close(got[0], x.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got[1], router.weight.grad, rtol=1e-10, atol=1e-12)
    assert router.expert_bias.grad is None


def test_types_and_shapes() -> None:
    router = router_with_bias(BASE, torch.bfloat16)
    for num_tokens in (5, 0):
        topk_idx, topk_weights, logits = router(torch.randn(num_tokens, BASE.hidden, dtype=torch.bfloat16))
        assert topk_idx.dtype == torch.int64 and topk_idx.shape == (num_tokens, BASE.num_topk)
        assert topk_weights.dtype == torch.float32 and topk_weights.shape == (num_tokens, BASE.num_topk)
        assert logits.dtype == torch.float32 and logits.shape == (num_tokens, BASE.num_experts)
    x = torch.randn(64, BASE.hidden, dtype=torch.bfloat16)
    wide = x.float() @ router.weight.detach().float().t()
    torch.testing.assert_close(router(x).logits.detach(), wide, rtol=1e-6, atol=1e-6)
    exact = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(one, other) for one, other in zip(router(x), exact, strict=True))


def test_the_bias_chooses_and_never_weighs() -> None:
    router = router_with_bias(replace(BASE, normalize_weights=False, routed_scaling_factor=1.0))
    x = torch.randn(30, BASE.hidden, dtype=torch.float64)
    router.expert_bias.zero_()
    router.expert_bias[5] = 10.0
    topk_idx, topk_weights, logits = router(x)
    assert torch.all(topk_idx[:, 0] == 5)
    assert torch.equal(topk_weights, torch.sigmoid(logits).gather(1, topk_idx))
    router.expert_bias[5] = -10.0
    assert not torch.any(router(x).topk_idx == 5)


def test_group_limit_uses_the_sum_of_the_two_best() -> None:
    config = replace(LIMITED, num_topk=2, num_topk_groups=1)
    scores = torch.full((1, 16), 0.1)
    scores[0, 0] = 0.9  # one star: 0.9 + 0.1
    scores[0, 4:6] = 0.6  # a pair: 1.2, the better group
    assert sorted(choose(scores, None, config)[0].tolist()) == [4, 5]
    scores[0, 1] = 0.35  # now 1.25 against 1.2
    assert sorted(choose(scores, None, config)[0].tolist()) == [0, 1]
    unlimited = replace(config, num_topk_groups=4)
    assert sorted(choose(scores, None, unlimited)[0].tolist())[0] == 0


def test_no_token_leaves_its_groups() -> None:
    router = router_with_bias(LIMITED)
    router.expert_bias.sub_(5.0)  # negative choices: a mask by zeros would let experts of other groups in
    groups = router(torch.randn(200, LIMITED.hidden, dtype=torch.float64)).topk_idx // 4
    assert max(len(set(row)) for row in groups.tolist()) == 2


def test_masked_tokens() -> None:
    router = router_with_bias(BASE)
    x = torch.randn(6, BASE.hidden, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False, True, True, False, True])
    topk_idx, topk_weights, _ = router(x, mask)
    whole = router(x)
    assert torch.all(topk_idx[~mask] == -1) and torch.all(topk_weights[~mask] == 0)
    assert torch.equal(topk_idx[mask], whole.topk_idx[mask]) and torch.equal(
        topk_weights[mask], whole.topk_weights[mask]
    )
    (topk_weights * torch.randn_like(topk_weights)).sum().backward()
    assert torch.all(x.grad[~mask] == 0) and torch.all(x.grad[mask].abs().sum(1) > 0)


def test_vanished_scores_stay_finite() -> None:
    router = Router(BASE, dtype=torch.float32)
    with torch.no_grad():
        router.weight.fill_(-1e4)
    x = torch.ones(2, BASE.hidden, requires_grad=True)
    weights = router(x).topk_weights
    weights.sum().backward()
    assert torch.isfinite(weights).all() and torch.isfinite(x.grad).all()


def test_counting_and_bias_update() -> None:
    router = Router(replace(BASE, bias_update_rate=0.01))
    first = router(torch.randn(20, BASE.hidden), torch.arange(20) < 15).topk_idx
    second = router(torch.randn(7, BASE.hidden)).topk_idx
    router.eval()
    router(torch.randn(50, BASE.hidden))
    want = torch.bincount(torch.cat([first[:15].flatten(), second.flatten()]), minlength=16)
    assert torch.equal(router.tokens_per_expert, want) and int(want.sum()) == 22 * BASE.num_topk
    load = torch.full((16,), 10)
    load[3], load[7] = 14, 6
    router.update_expert_bias(load)
    expected = torch.zeros(16)
    expected[3], expected[7] = -0.01, 0.01
    assert torch.equal(router.expert_bias, expected)
    assert set(router.state_dict()) == {"weight", "expert_bias"}
    with pytest.raises(UsageError, match="one count for every expert"):
        router.update_expert_bias(load[:4])


def test_the_bias_balances_a_lopsided_router() -> None:
    config = replace(BASE, bias_update_rate=0.005, num_topk=2)
    router = Router(config)
    x = torch.randn(400, config.hidden) + 1.0

    def imbalance() -> float:
        counts = torch.bincount(router(x).topk_idx.flatten(), minlength=16).double()
        return float(counts.max() / counts.mean())

    before = imbalance()
    for _ in range(250):
        router.update_expert_bias(torch.bincount(router(x).topk_idx.flatten(), minlength=16))
    assert before > 1.5 and imbalance() < 1 + (before - 1) / 3


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_balance_loss_is_the_papers(score: str) -> None:
    config = replace(BASE, score=score, aux_loss_coefficient=0.3)
    router = router_with_bias(config)
    x = torch.randn(15, config.hidden, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(15, dtype=torch.bool)
    mask[[3, 7, 11]] = False  # one of each sequence: with unequal lengths Megatron, and we, divide by their mean
    (loss,) = router.losses(router(x), num_sequences=3, token_mask=mask)
    got = torch.autograd.grad(loss, (x, router.weight))
    sequences = [[x[t] for t in range(s * 5, s * 5 + 5) if mask[t]] for s in range(3)]
    want = torch.stack([balance_loss_of(tokens, router.weight, config) for tokens in sequences]).mean()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    for one, other in zip(got, torch.autograd.grad(want, (x, router.weight)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    assert router.losses(router(x[:0]))[0].item() == 0
    with pytest.raises(UsageError, match="a divisor of the number of tokens"):
        router.losses(router(x), num_sequences=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_topk": 17}, "num_topk = 17; allowed: at most num_experts = 16"),
        ({"num_groups": 3}, "a divisor of num_experts = 16"),
        ({"num_groups": 4, "num_topk_groups": 5}, "at most num_groups = 4"),
        ({"num_groups": 8, "num_topk_groups": 1}, "at most 2, the experts of num_topk_groups"),
        ({"score": "tanh"}, "score = 'tanh'; allowed: sigmoid or softmax"),
        ({"activation": "swish"}, "silu, gelu, relu"),
        ({"hidden": 0}, "hidden = 0; allowed: a whole number, 1 or more; change hidden in MoEConfig"),
        ({"num_topk": 2.0}, "num_topk = 2.0; allowed: a whole number, 1 or more"),
        ({"ffn": True}, "ffn = True; allowed: a whole number"),
        ({"latent": "8"}, "latent = '8'; allowed: a whole number, 0 or more"),
        ({"bias_update_rate": -1.0}, "0 or more"),
        ({"router_dtype": "bf16"}, "router_dtype = 'bf16'; allowed: fp32 or fp64"),
        ({"load_balancing": "sinkhorn"}, "seq_aux_loss or aux_loss or global_aux_loss"),
        ({"drop_policy": "last"}, "probs or position"),
        ({"capacity_factor": 0.0}, "a finite number above 0, or None"),
        ({"latent": 12}, "latent = 12; allowed: less than hidden = 12, or 0 for no projections"),
        ({"shared_gate": True}, "False where shared_ffn is 0"),
        ({"score": "softmax", "num_topk": 1}, "normalize_weights = True; allowed: False for softmax scores with"),
        ({"capacity_factor": float("inf")}, "capacity_factor = inf; allowed: a finite number above 0, or None"),
    ],
)
def test_bad_settings(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(BASE, **change)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bias_and_counts_stay_fp32(dtype: torch.dtype) -> None:
    """A step of 1e-3 on a bias of 0.7 would be lost in BF16."""
    router = Router(replace(BASE, bias_update_rate=1e-3))
    bias, load = torch.rand(BASE.num_experts) + 0.5, torch.arange(BASE.num_experts)
    router.expert_bias.copy_(bias)
    router.balance_counts.fill_(257.0)
    router.to(dtype)
    assert router.weight.dtype == dtype and bool((router.balance_counts == 257).all())
    router.update_expert_bias(load)
    moved = 1e-3 * torch.sign(load.double().mean() - load)
    assert router.expert_bias.dtype == router.balance_counts.dtype == torch.float32
    torch.testing.assert_close(router.expert_bias, bias + moved.float())


def test_forced_balance() -> None:
    """Every expert gets its share, each time the same; ranks differ; the gradient passes to the logits."""
    config = replace(BASE, force_load_balancing=True, score="softmax", normalize_weights=False)
    x = torch.randn(2000, config.hidden, requires_grad=True)
    first, second = Router(config), Router(config, rank=1)
    topk_idx, topk_weights, logits = first(x)
    counts = first.tokens_per_expert.double()
    # A count is binomial: 2000 draws of 1/4, standard deviation 19.4.
    assert counts.sum() == 2000 * config.num_topk and (counts - 500).abs().max() < 6 * 19.4
    assert abs(float(logits.detach().mean())) < 0.05 and abs(float(logits.detach().std()) - 1) < 0.05
    assert torch.equal(first(x).topk_idx, topk_idx) and not torch.equal(second(x).topk_idx, topk_idx)
    topk_weights[:, 0].sum().backward()
    scores = torch.softmax(logits.detach(), dim=1)
    grad = -scores * scores.gather(1, topk_idx[:, :1])
    grad.scatter_add_(1, topk_idx[:, :1], scores.gather(1, topk_idx[:, :1]))
    torch.testing.assert_close(x.grad, 2.5 * grad @ first.weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_capacity_drops_the_rest(policy: str) -> None:
    """No expert takes more than its capacity; the kept weights are the largest; masked tokens take no place."""
    config = replace(BASE, capacity_factor=0.75, drop_policy=policy)
    router = router_with_bias(config)
    x = torch.randn(64, config.hidden, dtype=torch.float64)
    mask = torch.rand(64) < 0.8
    whole = router_with_bias(replace(config, capacity_factor=None))
    whole.load_state_dict(router.state_dict())
    before, (topk_idx, topk_weights, _) = whole(x, mask), router(x, mask)
    capacity, kept = 12, topk_idx >= 0  # 64 * 4 / 16 * 0.75
    assert not torch.any(kept & (before.topk_idx < 0)) and torch.equal(topk_idx[kept], before.topk_idx[kept])
    assert torch.equal(topk_weights, before.topk_weights * kept)
    assert torch.equal(router.tokens_per_expert, torch.bincount(topk_idx[kept], minlength=16))
    full = 0
    for expert in range(16):
        chosen = before.topk_idx == expert
        assert int((chosen & kept).sum()) == min(int(chosen.sum()), capacity)
        full += int(chosen.sum()) > capacity
        if policy == "probs" and torch.any(chosen & ~kept):
            assert before.topk_weights[chosen & kept].min() >= before.topk_weights[chosen & ~kept].max()
    assert full > 0 and router(x[:0]).topk_idx.shape == (0, 4)


def test_one_rank_alone_counts_globally_and_starts_anew() -> None:
    config = replace(BASE, aux_loss_coefficient=0.3, load_balancing="global_aux_loss")
    router = router_with_bias(config)
    one, other = torch.randn(2, 9, config.hidden, dtype=torch.float64)
    (first,) = router.losses(router(one))
    (second,) = router.losses(router(other))
    torch.testing.assert_close(first, balance_loss_of(list(one), router.weight, config))
    assert not torch.isclose(second, balance_loss_of(list(other), router.weight, config))
    router.eval()
    router.losses(router(one))
    assert router.balance_counts.tolist()[-1] == 2
    router.restart_counts()
    assert not router.balance_counts.any() and not router.tokens_per_expert.any()


def run_global_loss(rank: int, seed: int, splits: list[int]) -> tuple[float, Any]:
    """One rank's part of the global loss over two calls, and its gradient of the weight."""
    router = router_of_all(seed)
    x = tokens_of_all(seed).split(splits)[rank]
    losses = [router.losses(router(part))[0] for part in (x[: len(x) // 2], x)]
    (grad,) = torch.autograd.grad(losses[1], router.weight)
    return float(losses[1].detach()), grad.numpy()


def router_of_all(seed: int) -> Router:
    config = replace(BASE, aux_loss_coefficient=0.3, load_balancing="global_aux_loss", seed=seed)
    return Router(config, dtype=torch.float64)


def tokens_of_all(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(20, BASE.hidden, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("splits", [[13, 7], [20, 0]], ids=str)
def test_the_global_loss_counts_the_tokens_of_all_ranks(splits: list[int], fresh_random_data: int) -> None:
    """The parts of the ranks add up to the loss of one rank with all tokens, whose counts are a mean over the calls."""
    parts = run_ranks(2, run_global_loss, fresh_random_data, splits)
    router, x = router_of_all(fresh_random_data), tokens_of_all(fresh_random_data)
    halves = torch.cat([part[: len(part) // 2] for part in x.split(splits)])
    router.losses(router(halves))
    (want,) = router.losses(router(x))
    (grad,) = torch.autograd.grad(want, router.weight)
    total, total_grad = sum(part[0] for part in parts), sum(torch.from_numpy(part[1]) for part in parts)
    assert abs(total - float(want.detach())) <= 1e-12 * float(want.detach())
    torch.testing.assert_close(total_grad, grad, rtol=1e-9, atol=1e-12)
    assert router.balance_counts[:-1].sum() == (len(halves) + 20) * BASE.num_topk
