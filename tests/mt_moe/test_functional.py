"""Launch and wait nodes: values and gradients between real processes, order in forward and backward, fan_out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm_core import ElasticBuffer
from mt_moe.aliases import fan_out
from mt_moe.functional import launch_combine, launch_dispatch, wait_combine, wait_dispatch
from tests.mt_moe.recorded import Mark, RecordedBuffer
from tests.pool import run_ranks

HIDDEN, EXPERTS, TOPK = 8, 6, 3


@dataclass
class Tokens:
    """One rank's tokens, their routing with masked lanes, and the gradient of their outputs."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    grad: Tensor

    @classmethod
    def draw(cls, num_tokens: int, generator: torch.Generator) -> Tokens:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        topk_idx = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK].contiguous()
        topk_idx[torch.rand(num_tokens, TOPK, generator=generator) < 0.3] = -1
        x, weights = normal(num_tokens, HIDDEN), normal(num_tokens, TOPK)
        return cls(x.requires_grad_(), topk_idx, weights.requires_grad_(), normal(num_tokens, HIDDEN))


def experts(rows: Tensor, row_weights: Tensor, counts: list[int], scale: Tensor, alignment: int) -> Tensor:
    """Expert e of this rank: tanh(scale[e] * row) * weight. Rows of alignment gaps become 1000: none may see them."""
    parts, start = [], 0
    for expert, count in enumerate(counts):
        part = slice(start, start + count)
        parts.append(torch.tanh(scale[expert] * rows[part]) * row_weights[part].unsqueeze(1))
        width = -(-count // alignment) * alignment
        assert torch.all(rows[start + count : start + width] == 0)
        parts.append(torch.full((width - count, HIDDEN), 1000.0, dtype=rows.dtype))
        start += width
    assert start == rows.shape[0] == row_weights.shape[0]
    return torch.cat(parts)


def through_experts(buffer: ElasticBuffer, tokens: Tokens, scale: Tensor, alignment: int) -> Tensor:
    handle = buffer.prepare(tokens.topk_idx, num_experts=EXPERTS, do_expand=True, expert_alignment=alignment)
    ticket = launch_dispatch(buffer, tokens.x, tokens.topk_weights, handle)
    rows, row_weights = wait_dispatch(ticket)
    counts = ticket.handle.num_unaligned_recv_tokens_per_expert_list
    return wait_combine(launch_combine(buffer, experts(rows, row_weights, counts, scale, alignment), ticket.handle))


def by_definition(tokens: Tokens, scale: Tensor) -> Tensor:
    """The same from this rank's tokens and all experts, one lane at a time, without communication."""
    y = torch.zeros_like(tokens.x)
    for token, lane in itertools.product(range(tokens.x.shape[0]), range(TOPK)):
        expert = int(tokens.topk_idx[token, lane])
        if expert >= 0:
            term = torch.tanh(scale[expert] * tokens.x[token]) * tokens.topk_weights[token, lane]
            y = y + torch.nn.functional.one_hot(torch.tensor(token), y.shape[0]).unsqueeze(1) * term
    return y


def taken_grads(*tensors: Tensor) -> list[Tensor]:
    grads = []
    for tensor in tensors:
        assert tensor.grad is not None, "a gradient is zero, never None"
        grads.append(tensor.grad)
        tensor.grad = None
    return grads


def check_values(rank: int, buffer: ElasticBuffer, counts: list[int], alignment: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = [Tokens.draw(count, generator) for count in counts]
    every = torch.randn(EXPERTS, generator=generator, dtype=torch.float64).requires_grad_()
    tokens, local = drawn[rank], slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
    y = through_experts(buffer, tokens, every[local], alignment)
    y.backward(tokens.grad)
    got = taken_grads(tokens.x, tokens.topk_weights, every)
    want_y = by_definition(tokens, every)
    if tokens.x.shape[0]:
        want_y.backward(tokens.grad)
        want = taken_grads(tokens.x, tokens.topk_weights, every)
    else:
        want = [torch.zeros_like(tokens.x), torch.zeros_like(tokens.topk_weights), torch.zeros_like(every)]
    assert torch.all(got[1][tokens.topk_idx < 0] == 0)
    for grad in (got[2], want[2]):  # of the experts: summed over the ranks' tokens
        dist.all_reduce(grad)
    for one, other in zip([y, *got], [want_y, *want], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def check_weight_gradient_is_exact(buffer: ElasticBuffer) -> None:
    """Whole numbers: every sum is exact, so the gradient of a weight is x . grad to the last bit, or 0."""
    tokens = Tokens.draw(9, torch.Generator().manual_seed(buffer.rank))
    x = torch.randint(-9, 10, (9, HIDDEN)).float().requires_grad_()
    weights = tokens.topk_weights.detach().float().requires_grad_()
    grad = torch.randint(-9, 10, (9, HIDDEN)).float()
    handle = buffer.prepare(tokens.topk_idx, num_experts=EXPERTS, do_expand=True)
    ticket = launch_dispatch(buffer, x, weights, handle)
    rows, row_weights = wait_dispatch(ticket)
    wait_combine(launch_combine(buffer, rows * row_weights.unsqueeze(1), ticket.handle)).backward(grad)
    want = (x * grad).sum(1, keepdim=True).detach() * (tokens.topk_idx >= 0)
    assert torch.equal(weights.grad, want)


def check_one_sided_gradients(buffer: ElasticBuffer) -> None:
    """A side that needs no gradient, or that no result depends on, changes nothing for the other."""
    generator = torch.Generator().manual_seed(buffer.rank)
    scale = torch.ones(EXPERTS, dtype=torch.float64)
    whole, tokens = Tokens.draw(5, generator), None
    through_experts(buffer, whole, scale, 1).backward(whole.grad)
    for frozen in ("x", "topk_weights"):
        tokens = Tokens(whole.x.detach().clone(), whole.topk_idx, whole.topk_weights.detach().clone(), whole.grad)
        other = "topk_weights" if frozen == "x" else "x"
        getattr(tokens, other).requires_grad_()
        through_experts(buffer, tokens, scale, 1).backward(whole.grad)
        assert getattr(tokens, frozen).grad is None
        assert torch.equal(getattr(tokens, other).grad, getattr(whole, other).grad)
    handle = buffer.prepare(whole.topk_idx, num_experts=EXPERTS, do_expand=True)
    whole.x.grad = whole.topk_weights.grad = None
    ticket = launch_dispatch(buffer, whole.x, whole.topk_weights, handle)
    rows, _ = wait_dispatch(ticket)  # the weights are not used
    wait_combine(launch_combine(buffer, rows, ticket.handle)).backward(whole.grad)
    want = whole.grad * (whole.topk_idx >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(whole.x.grad, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(whole.topk_weights.grad, torch.zeros_like(whole.topk_weights))


def check_many_in_flight(buffer: ElasticBuffer) -> None:
    """Two microbatches share one buffer; waited for and run backward in another order than launched."""
    generator = torch.Generator().manual_seed(buffer.rank)
    scale = torch.ones(EXPERTS, dtype=torch.float64)
    pair = [Tokens.draw(4 + buffer.rank, generator) for _ in range(2)]
    alone = []
    for tokens in pair:
        y = through_experts(buffer, tokens, scale, 1)
        y.backward(tokens.grad)
        alone.append([y, *taken_grads(tokens.x, tokens.topk_weights)])
    handles = [buffer.prepare(tokens.topk_idx, num_experts=EXPERTS, do_expand=True) for tokens in pair]
    tickets = [
        launch_dispatch(buffer, tokens.x, tokens.topk_weights, handle)
        for tokens, handle in zip(pair, handles, strict=True)
    ]
    combines = {}
    for index in (1, 0):
        rows, row_weights = wait_dispatch(tickets[index])
        counts = tickets[index].handle.num_unaligned_recv_tokens_per_expert_list
        combines[index] = launch_combine(buffer, experts(rows, row_weights, counts, scale, 1), tickets[index].handle)
    outputs = [wait_combine(combines[index]) for index in (0, 1)]
    for index in (0, 1):
        outputs[index].backward(pair[index].grad)
        got = [outputs[index], *taken_grads(pair[index].x, pair[index].topk_weights)]
        assert all(torch.equal(one, other) for one, other in zip(got, alone[index], strict=True))


def check_inputs_may_be_freed(buffer: ElasticBuffer) -> None:
    """Megatron frees the storage of what went into a communication."""
    generator = torch.Generator().manual_seed(buffer.rank)
    tokens = Tokens.draw(5, generator)
    handle = buffer.prepare(tokens.topk_idx, num_experts=EXPERTS, do_expand=True)
    x = tokens.x * 1.0
    ticket = launch_dispatch(buffer, x, tokens.topk_weights, handle)
    rows, row_weights = wait_dispatch(ticket)
    x.untyped_storage().resize_(0)
    weighted = rows * row_weights.unsqueeze(1)
    combine = launch_combine(buffer, weighted, ticket.handle)
    y = wait_combine(combine)
    weighted.untyped_storage().resize_(0)
    y.backward(tokens.grad)
    lanes = (tokens.topk_weights.detach() * (tokens.topk_idx >= 0)).sum(1, keepdim=True)
    torch.testing.assert_close(tokens.x.grad, lanes * tokens.grad, rtol=1e-12, atol=1e-12)


def check_gradients_numerically(buffer: ElasticBuffer) -> None:
    """Ranks perturb their own inputs in step; a rank's outputs depend on its own tokens alone."""
    tokens = Tokens.draw(2, torch.Generator().manual_seed(buffer.rank))
    scale = torch.linspace(0.5, 1.5, EXPERTS // 2, dtype=torch.float64)

    def fn(x: Tensor, topk_weights: Tensor) -> Tensor:
        return through_experts(buffer, Tokens(x, tokens.topk_idx, topk_weights, tokens.grad), scale, 2)

    assert torch.autograd.gradcheck(fn, (tokens.x, tokens.topk_weights))


def check_order(buffer: ElasticBuffer) -> None:
    """What stands between launch and wait in forward runs between launch and wait in backward."""
    log: list[str] = []
    recorded = RecordedBuffer(buffer, log)
    tokens = Tokens.draw(4, torch.Generator().manual_seed(buffer.rank))
    first, second, third = fan_out(tokens.x, 3)
    handle = buffer.prepare(tokens.topk_idx, num_experts=EXPERTS, do_expand=True)
    ticket = launch_dispatch(recorded, first, tokens.topk_weights, handle)
    beside_dispatch = Mark.apply(second, "beside dispatch", log)
    rows, row_weights = wait_dispatch(ticket)
    rows = Mark.apply(rows * row_weights.unsqueeze(1), "experts", log)
    combine = launch_combine(recorded, rows, ticket.handle)
    beside_combine = Mark.apply(third, "beside combine", log)
    y = wait_combine(combine) + beside_dispatch + beside_combine
    assert log == [
        "launch dispatch",
        "beside dispatch",
        "wait dispatch",
        "experts",
        "launch combine",
        "beside combine",
        "wait combine",
    ]
    log.clear()
    y.backward(tokens.grad)
    assert log == [
        "launch dispatch",
        "beside combine backward",
        "wait dispatch",
        "experts backward",
        "launch combine",
        "beside dispatch backward",
        "wait combine",
    ]


def run_checks(rank: int, seed: int) -> None:
    torch.manual_seed(seed + rank)
    with ElasticBuffer(None) as buffer:
        cases = [([7, 5], 1), ([7, 0], 4), ([0, 5], 1), ([0, 0], 1), ([6, 9], 4)]
        for index, (counts, alignment) in enumerate(cases):
            check_values(rank, buffer, counts, alignment, seed + 10 * index)
        check_weight_gradient_is_exact(buffer)
        check_one_sided_gradients(buffer)
        check_many_in_flight(buffer)
        check_inputs_may_be_freed(buffer)
        check_gradients_numerically(buffer)
        check_order(buffer)


def test_between_two_processes() -> None:
    run_ranks(2, run_checks, int(torch.randint(2**30, ())), timeout=120.0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_fan_out_adds_in_the_order_of_the_aliases(order: tuple[int, ...]) -> None:
    # (1e8 - 1e8) + 1 is 1, but 1e8 + (-1e8 + 1) is 0 in fp32.
    factors = [1e8, -1e8, 1.0]
    x = torch.ones(4, requires_grad=True)
    aliases = fan_out(x, 3)
    results: list[Tensor] = [x] * 3
    for index in order:
        results[index] = aliases[index] * factors[index]
    (results[order[0]] + results[order[1]] + results[order[2]]).sum().backward()
    assert torch.equal(x.grad, torch.ones(4))


def test_fan_out_without_its_fixed_order_differs() -> None:
    """The plain way gives 0 in some order: the case above can see the difference."""
    seen = set()
    for order in itertools.permutations([1e8, -1e8, 1.0]):
        x = torch.ones(1, requires_grad=True)
        sum(x * factor for factor in order).sum().backward()
        seen.add(float(x.grad))
    assert seen == {0.0, 1.0}


def test_fan_out_of_unused_aliases() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    first, _, third = fan_out(x, 3)
    assert first.data_ptr() == x.data_ptr()
    (first * 2 + third.sin()).sum().backward()
    torch.testing.assert_close(x.grad, 2 + x.detach().cos())
    assert torch.autograd.gradcheck(lambda x: torch.stack(fan_out(x, 2)).prod(0), (x,))
