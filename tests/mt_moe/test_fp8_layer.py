"""Recipes in the layer: what travels in FP8 arrives as it was cast, on one rank and on two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from comm_core.runtime.errors import UsageError
from mt_moe import MoEConfig, MoELayer
from mt_moe.data_path import DataPath
from mt_moe.recipes import Recipe, emulated
from tests.dist import run_ranks

CONFIG = MoEConfig(hidden=256, ffn=128, num_experts=4, num_topk=2, expert_alignment=128, init_std=0.06)
BLOCK, ROW = emulated("blockwise"), emulated("rowwise")
TRAVEL = replace(BLOCK, dispatch_grad="fp8")


def results(recipe: Recipe | str, tokens: Tensor, grad: Tensor, **data_path: int) -> list[Tensor]:
    """y, dx and the weight gradients of a layer on this process' ranks."""
    config = replace(CONFIG, recipe=recipe, data_path=DataPath(**data_path))
    with MoELayer(config, dtype=torch.bfloat16) as layer:
        x = tokens.clone().requires_grad_()
        y = layer(x)
        y.backward(grad)
        return [y.detach(), x.grad, *[weight.grad for weight in layer.parameters()]]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def tokens_and_grad(num_tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_tokens, 256, dtype=torch.bfloat16), torch.randn(num_tokens, 256, dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe", [BLOCK, replace(ROW, keep="fp8")])
def test_tokens_cast_before_they_travel_give_the_same_bits(recipe: Recipe) -> None:
    given = tokens_and_grad(50)
    there, here = (results(replace(recipe, dispatch=dtype), *given) for dtype in ("fp8", "bf16"))
    assert all(torch.equal(one, other) for one, other in zip(there, here, strict=True))


def test_gradients_that_travel_in_fp8() -> None:
    given = tokens_and_grad(50)
    exact, cast = (results(replace(BLOCK, dispatch_grad=dtype), *given) for dtype in ("bf16", "fp8"))
    assert torch.equal(exact[0], cast[0])
    assert all(relative(one, other) < 5e-2 for one, other in zip(cast, exact, strict=True))
    plain = results("bf16", *given)
    errors = [relative(one, other) for one, other in zip(cast, plain, strict=True)]
    assert all(1e-3 < error < 0.15 for error in errors), errors


def test_chunks() -> None:
    given = tokens_and_grad(50)
    whole, chunked = results(BLOCK, *given), results(BLOCK, *given, num_chunks=2)
    assert torch.equal(whole[0], chunked[0])
    assert all(relative(one, other) < 2e-2 for one, other in zip(chunked, whole, strict=True))


def test_no_library_no_fp8() -> None:
    with pytest.raises(UsageError, match="recipe blockwise: torch: "):
        results("blockwise", *tokens_and_grad(3))


def _both_ranks(rank: int, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    tokens, grad = tokens_and_grad(60)
    mine = slice(0, 40) if rank == 0 else slice(40, 60)
    return [value.float().numpy() for value in results(TRAVEL, tokens[mine], grad[mine])]


def test_two_ranks_compute_what_one_does() -> None:
    seed = int(torch.randint(2**31, ()))
    first, second = ([torch.from_numpy(value) for value in part] for part in run_ranks(2, _both_ranks, seed))
    torch.manual_seed(seed)
    want = results(TRAVEL, *tokens_and_grad(60))
    assert relative(torch.cat((first[0], second[0])), want[0]) < 5e-3
    assert relative(torch.cat((first[1], second[1])), want[1]) < 5e-3
    for index in (3, 4):
        assert relative(torch.cat((first[index], second[index])), want[index]) < 5e-3


@pytest.mark.parametrize("recipe", [TRAVEL, replace(ROW, dispatch="fp8", dispatch_grad="fp8", keep="fp8")])
def test_parts_without_tokens(recipe: Recipe) -> None:
    """A rank, or a chunk, may have none: the other ranks wait for its part of the exchange."""
    for num_tokens, num_chunks in ((0, 1), (0, 2), (2, 5)):
        given = tokens_and_grad(num_tokens)
        whole, parts = results(recipe, *given), results(recipe, *given, num_chunks=num_chunks)
        assert parts[0].shape == (num_tokens, CONFIG.hidden) and parts[1].shape == parts[0].shape
        assert torch.equal(whole[0], parts[0])
        assert all(bool(grad.any()) == bool(num_tokens) for grad in parts[2:])
