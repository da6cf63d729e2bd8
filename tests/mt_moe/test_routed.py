"""Ways of the data path on two ranks: each gives the results of the plain one, in the order it promises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from comm_core import ElasticBuffer
from comm_core.runtime.errors import UsageError
from mt_moe import DataPath, MoEConfig, MoELayer
from mt_moe.products import LoopProducts
from mt_moe.routed import chunk_sizes
from tests.dist import run_ranks as run_fresh_ranks
from tests.mt_moe.layer_cases import Place
from tests.mt_moe.recorded import Mark, RecordedBuffer
from tests.pool import run_ranks
from tests.twin.torch_musa import played, why_not

CONFIG = MoEConfig(
    hidden=16, ffn=8, num_experts=6, num_topk=2, shared_ffn=8, expert_alignment=4, init_std=0.5, seed=5,
    experts="grouped",
)  # fmt: skip
PLAIN = DataPath(delay_wgrad=False)
# Ways that compute the same sums, and ways that add up chunk by chunk.
SAME_BITS = {
    "delayed": DataPath(),
    "redispatch": DataPath(save_dispatched="redispatch"),
    "redispatch at once": DataPath(save_dispatched="redispatch", delay_wgrad=False),
    "copy": DataPath(save_dispatched="copy", recompute="nothing"),
    "fc1 again": DataPath(recompute="fc1"),
    "least memory": DataPath(recompute="fc1", save_dispatched="redispatch"),
    "release": DataPath(delay_wgrad=False, release=True),
    "release, redispatch": DataPath(delay_wgrad=False, release=True, save_dispatched="redispatch", recompute="fc1"),
    "worst case": DataPath(max_tokens_per_rank=14),
    "worst case, redispatch": DataPath(max_tokens_per_rank=14, save_dispatched="redispatch"),
}
NEAR = {
    "2 chunks": DataPath(num_chunks=2),
    "3 chunks, at once": DataPath(num_chunks=3, delay_wgrad=False),
    "4 chunks, redispatch": DataPath(num_chunks=4, save_dispatched="redispatch", comm_sms=2, gemm_spare_sms=2),
    "2 chunks, worst case": DataPath(num_chunks=2, max_tokens_per_rank=15),
}


def outcome(buffer: Any, config: MoEConfig, num_tokens: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + buffer.rank)
    x, grad = torch.randn(2, num_tokens, config.hidden, generator=generator, dtype=torch.float64)
    x, grad = (tensor.to(buffer.device, dtype) for tensor in (x, grad))
    with MoELayer(config, buffer=buffer, dtype=dtype) as layer:
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(grad)
        assert leaf.grad is not None
        grads = {name: p.grad for name, p in layer.named_parameters()}
    missing = [name for name, value in grads.items() if value is None]
    assert not missing, f"no gradient of {missing}"
    return {"y": y.detach(), "x": leaf.grad, **grads}


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest distance relative to a tensor's norm; 0 for equal bits."""
    return max(
        0.0 if torch.equal(got[name], want[name]) else float((got[name] - want[name]).norm() / want[name].norm())
        for name in want
    )


def compare(rank: int, seed: int, place: Place, dtype: torch.dtype, few: bool = False) -> dict[str, float]:
    """By case, the distance of its results from those of the plain way; `few` for the four that differ most from it."""
    found: dict[str, float] = {}
    with place.buffer(rank) as buffer:
        if few:
            want = outcome(buffer, replace(CONFIG, data_path=PLAIN), 13 - 4 * rank, dtype, seed)
            for name in ("delayed", "worst case, redispatch", "4 chunks, redispatch", "2 chunks, worst case"):
                config = replace(CONFIG, data_path={**SAME_BITS, **NEAR}[name])
                found[name] = differences(outcome(buffer, config, 13 - 4 * rank, dtype, seed), want)
            return found
        for tokens in ((13, 9), (14, 0)):
            want = outcome(buffer, replace(CONFIG, data_path=PLAIN), tokens[rank], dtype, seed)
            for name, data_path in {**SAME_BITS, **NEAR}.items():
                got = outcome(buffer, replace(CONFIG, data_path=data_path), tokens[rank], dtype, seed)
                found[f"{name}, {tokens}"] = differences(got, want)
        loop = replace(CONFIG, experts="loop", data_path=PLAIN)
        want = outcome(buffer, loop, 11, torch.bfloat16, seed)
        got = outcome(buffer, replace(loop, data_path=DataPath()), 11, torch.bfloat16, seed)
        found["loop, delayed"] = differences(got, want)
        got = outcome(buffer, replace(loop, data_path=DataPath(num_chunks=2)), 11, torch.float64, seed)
        want = outcome(buffer, loop, 11, torch.float64, seed)
        found["loop, 2 chunks"] = differences(got, want)
        if place.kind == "cpu":
            check_wrong_sum_is_seen(buffer, seed)
    return found


def check_wrong_sum_is_seen(buffer: Any, seed: int) -> None:
    want = outcome(buffer, replace(CONFIG, data_path=PLAIN), 12, torch.float64, seed)
    original = LoopProducts.weight_grad
    LoopProducts.weight_grad = lambda self, grad, x, groups: original(self, grad * 1.01, x, groups)  # type: ignore[method-assign]
    try:
        got = outcome(buffer, replace(CONFIG, data_path=DataPath(num_chunks=2)), 12, torch.float64, seed)
    finally:
        LoopProducts.weight_grad = original  # type: ignore[method-assign]
    assert differences(got, want) > 1e-3


def check(place: Place, dtype: torch.dtype, near: float, seed: int) -> None:
    """All ways on two ranks; `near` is the limit for those that add up in another order."""
    by_rank = run_ranks(2, compare, seed, place, dtype, timeout=120.0)
    for found in by_rank:
        assert len(found) == 2 * len({**SAME_BITS, **NEAR}) + 2
        for name, distance in found.items():
            limit = near if any(name.startswith(other) for other in NEAR) else 0.0
            limit = 1e-13 if name == "loop, 2 chunks" else limit
            assert distance <= limit, f"{name}: {distance}"


class _Shared(Place):
    """Ranks that share the first device: autograd has threads for as many as the double has at first."""

    def device(self, rank: int) -> torch.device:
        return torch.device(self.kind, 0)


def _played(rank: int, seed: int) -> dict[str, float]:
    with played():
        return compare(rank, seed, _Shared("musa"), torch.float32, few=True)


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_over_a_played_device(fresh_random_data: int) -> None:
    """By the kernels' doubles, which also find what is read before it is there or written while it is read."""
    for found in run_fresh_ranks(2, _played, fresh_random_data, timeout=120.0):
        assert len(found) == 4 and max(found.values()) < 1e-6, found


def test_every_way_gives_the_same(fresh_random_data: int) -> None:
    check(Place(), torch.float64, 1e-13, fresh_random_data)


@contextmanager
def weight_gradients_noted(log: list[str]) -> Iterator[None]:
    """Writes down each weight gradient as it is computed; that of fc2 has as many rows as the hidden width."""
    original = LoopProducts.weight_grad

    def noting(self: LoopProducts, grad: Tensor, *args: Any) -> Tensor:
        log.append(f"compute {'fc2' if grad.shape[1] == CONFIG.hidden else 'fc1'}")
        return original(self, grad, *args)

    LoopProducts.weight_grad = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        LoopProducts.weight_grad = original  # type: ignore[method-assign]


def order(rank: int, data_path: DataPath) -> list[str]:
    log: list[str] = []
    config = replace(CONFIG, ffn=12, shared_ffn=0, data_path=data_path)
    with ElasticBuffer(None) as buffer:
        layer = MoELayer(config, buffer=RecordedBuffer(buffer, log), dtype=torch.float64)  # type: ignore[arg-type]
        layer.experts.register_forward_hook(lambda _, __, out: Mark.apply(out, "experts", log))
        with weight_gradients_noted(log):
            layer(torch.randn(6, config.hidden, dtype=torch.float64, requires_grad=True)).sum().backward()
    return log


def test_order_of_two_chunks() -> None:
    """One chunk's rows are computed while another's travel; weight gradients behind the last launch."""
    log = run_ranks(2, order, DataPath(num_chunks=2), timeout=60.0)[0]
    forward = log.index("wait combine") + 2
    assert log[:forward] == [
        "launch dispatch",
        "launch dispatch",
        "wait dispatch",
        "experts",
        "launch combine",
        "wait dispatch",
        "experts",
        "launch combine",
        "wait combine",
        "wait combine",
    ]
    assert log[forward:] == [
        "launch dispatch",
        "launch dispatch",
        "wait dispatch",
        "experts backward",
        "launch combine",
        "wait dispatch",
        "experts backward",
        "launch combine",
        "compute fc2",
        "compute fc1",
        "wait combine",
        "wait combine",
    ]


def test_order_of_a_resend() -> None:
    log = run_ranks(2, order, DataPath(save_dispatched="redispatch"), timeout=60.0)[0]
    assert log[log.index("wait combine") + 1 :] == [
        "launch dispatch",
        "launch dispatch",
        "wait dispatch",
        "experts backward",
        "compute fc2",
        "launch combine",
        "wait dispatch",
        "compute fc1",
        "wait combine",
    ]


def test_sizes_of_chunks() -> None:
    assert chunk_sizes(7, 3) == [3, 2, 2] and chunk_sizes(1, 4) == [1, 0, 0, 0] and chunk_sizes(0, 2) == [0, 0]


def test_refusals() -> None:
    with pytest.raises(UsageError, match=r"num_chunks = 0; allowed: a whole number, 1 or more"):
        DataPath(num_chunks=0)
    with pytest.raises(UsageError, match=r"num_chunks = 1\.5; allowed: a whole number"):
        DataPath(num_chunks=1.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="save_dispatched = 'slot'; allowed: keep, copy, redispatch"):
        DataPath(save_dispatched="slot")
    with pytest.raises(UsageError, match="release = True; allowed: True with delay_wgrad=False alone"):
        DataPath(release=True)
    with MoELayer(replace(CONFIG, data_path=DataPath(release=True, delay_wgrad=False))) as layer:
        y = layer(torch.randn(3, CONFIG.hidden, requires_grad=True))
        y.sum().backward(retain_graph=True)
        with pytest.raises(UsageError, match="a second backward of one graph with release=True"):
            y.sum().backward()
    config = replace(CONFIG, experts="loop", data_path=DataPath(save_dispatched="redispatch"))
    with MoELayer(config) as layer, pytest.raises(UsageError, match="allowed: auto, grouped or te"):
        layer(torch.randn(3, CONFIG.hidden, requires_grad=True))
