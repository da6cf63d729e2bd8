"""The drop-in layer against Megatron's own: same keys, same bits, whatever the router does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mt_moe import DataPath
from tests.dist import run_ranks
from tests.megatron_patch import megatron_case as case

pytestmark = pytest.mark.megatron

WAYS = (
    (DataPath(), "auto"),
    (DataPath(num_chunks=3), "auto"),
    (DataPath(save_dispatched="redispatch", recompute="fc1", max_tokens_per_rank=24), "grouped"),
)


def _config(**overrides: Any) -> Any:
    groups = {"model__num_groups": 4, "model__group_topk": 2}
    return case.configure(parallel__pp_size=1, parallel__schedule="1f1b", **{**groups, **overrides})


def _pair(transformer_config: Any, rank: int) -> tuple[Any, Any]:
    """A stock layer and a drop-in layer with the same weights."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_patch.moe_spec import MTMoELayer

    dtype = transformer_config.params_dtype
    submodules = case.moe_submodules(transformer_config)
    stock = MoELayer(transformer_config, submodules, layer_number=1).to(dtype)
    ours = MTMoELayer(transformer_config, submodules, layer_number=1).to(dtype)
    for layer in (stock, ours):
        if hasattr(layer.router, "_maintain_float32_expert_bias"):
            layer.router._maintain_float32_expert_bias()
    case.seed_weights(stock, rank)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    ours.load_state_dict(stock.state_dict(), strict=True)
    return stock, ours


def _run(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.train()
    x = x.clone().requires_grad_()
    y, bias = layer(x)
    assert bias is None
    y.backward(grad)
    found = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    return {"y": y.detach(), "x.grad": x.grad, **found}


def _different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in b if not torch.equal(a[name], b[name])]


def _inputs(config: Any, rank: int, dtype: torch.dtype, num_tokens: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (num_tokens // 2, 2, config.model.hidden)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))


def _bitwise(rank: int) -> list[str]:
    problems: list[str] = []
    config = _config()
    case.start(config, split=False)
    from examples import model as models
    from megatron_patch import moe_spec

    def check(label: str, transformer_config: Any, *, selected: list[int] | None = None) -> None:
        stock, ours = _pair(transformer_config, rank)
        if selected is not None:
            for layer in (stock, ours):
                # Group-limited selection adds up a group's best scores, so a large bias decides it.
                layer.router.expert_bias.fill_(-10.0)[selected] = 10.0
        x, grad = _inputs(config, rank, transformer_config.params_dtype)
        found, wanted = _run(ours, x, grad), _run(stock, x, grad)
        problems.extend(f"{label}: {name}" for name in _different(found, wanted))
        if wanted["y"].abs().max() == 0 or wanted["router.weight"].abs().max() == 0:
            problems.append(f"{label}: nothing was computed")

    fp32 = models.transformer_config(config)
    check("fp32", fp32)
    check("fp32, experts of rank 0 alone", fp32, selected=[0, 1])
    check("fp32, one expert a rank", fp32, selected=[2, 6])
    check("bf16", models.transformer_config(_config(train__dtype="bf16")))
    recompute = models.transformer_config(config)
    recompute.recompute_granularity, recompute.recompute_modules = "selective", ["moe"]
    check("moe recompute", recompute)

    original = moe_spec.topk_from_map
    moe_spec.topk_from_map = lambda *a: (original(*a)[0], original(*a)[1] * 1.01)
    before = list(problems)
    check("planted", fp32)
    planted = len(problems) - len(before)
    problems[:] = before if planted > 5 else [*before, f"a planted fault was seen in {planted} tensors only"]
    moe_spec.topk_from_map = original

    stock, ours = _pair(fp32, rank)
    for layer in (stock, ours):
        layer.router.local_tokens_per_expert.zero_()
        with torch.no_grad():
            layer.eval()(_inputs(config, rank, torch.float32)[0])
    sharded = [
        sorted(value.key for value in layer.sharded_state_dict("mlp.").values() if hasattr(value, "key"))
        for layer in (stock, ours)
    ]
    if sharded[0] != sharded[1] or not any("experts.experts.linear_fc1" in key for key in sharded[0]):
        problems.append(f"sharded keys differ: {sharded}")
    problems += _held(config, models.transformer_config(config), rank)
    problems += _capacity(config, models.transformer_config, rank)
    problems += _latent(config, models.transformer_config(config), rank)
    moe_spec.close_buffers()
    return problems


def _held(config: Any, settings: Any, rank: int) -> list[str]:
    """`backward_dw` computes what `delay_wgrad_compute` leaves over; without it the wait node has computed all."""
    _, ours = _pair(settings, rank)
    x, grad = _inputs(config, rank, torch.float32)
    want = _run(ours, x, grad)
    settings.delay_wgrad_compute = True
    ours.train()(x)[0].backward(grad)
    experts = dict(ours.experts.named_parameters())
    early = [f"{name}: a gradient before backward_dw" for name, p in experts.items() if p.grad is not None]
    ours.backward_dw()
    found = [f"backward_dw: {n}" for n, p in experts.items() if not torch.equal(p.grad, want[f"experts.{n}"])]
    return early + found + _held_by_a_schedule(ours, x, grad, want)


def _held_by_a_schedule(ours: Any, x: torch.Tensor, grad: torch.Tensor, want: dict[str, torch.Tensor]) -> list[str]:
    """What `backward_dw` would compute is done by the W of the schedule's store; nothing is left for a later call."""
    from dualpipe.delayed import delayed_in
    from dualpipe.weight_grad import WeightGradStore

    store, experts = WeightGradStore(), dict(ours.experts.named_parameters())
    for delayed in delayed_in(ours):
        store.watch(delayed)
    ours.zero_grad(set_to_none=True)
    with store.collect() as queue:
        ours(x)[0].backward(grad)
    problems = [f"{name}: a gradient before W" for name, p in experts.items() if p.grad is not None]
    if len(ours.held_weight_gradients) or len(queue) == 0:
        problems.append(f"the queue has {len(queue)}, the layer {len(ours.held_weight_gradients)}")
    store.run(queue)
    ours.backward_dw()
    return problems + [f"W: {n}" for n, p in experts.items() if not torch.equal(p.grad, want[f"experts.{n}"])]


def _capacity(config: Any, settings: Callable[[Any], Any], rank: int) -> list[str]:
    """Drops are the router's, so bits are equal; rows that pad an expert add zeros, in sums of another order."""
    problems = []
    for policy in ("probs", "position"):
        for pad in (False, True):
            capped = settings(config)
            capped.moe_expert_capacity_factor, capped.moe_token_drop_policy = 0.75, policy
            capped.moe_pad_expert_input_to_capacity = pad
            stock, ours = _pair(capped, rank)
            x, grad = _inputs(config, rank, torch.float32)
            sent: list[int] = []
            hook = ours._dispatcher.prepare
            ours._dispatcher.prepare = lambda idx, sent=sent, hook=hook: (
                sent.append(int((idx >= 0).sum())),
                hook(idx),
            )[1]
            found, wanted = _run(ours, x, grad), _run(stock, x, grad)
            limit = 1e-6 if pad else 0.0
            problems += [
                f"capacity, {policy}, pad={pad}: {name}"
                for name in wanted
                if (found[name] - wanted[name]).norm() > limit * wanted[name].norm()
            ]
            # 24 tokens with 2 experts each are sent without a capacity.
            if not 0 < sent[0] < 48:
                problems.append(f"capacity, {policy}, pad={pad}: {sent[0]} rows sent")
    return problems


class _Projection(torch.nn.Linear):
    """What the stock layer takes from Transformer Engine, on a CPU."""

    def __init__(self, width: int, out: int, *, bias: bool, **unused: Any) -> None:
        super().__init__(width, out, bias=bias)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


def _latent(config: Any, settings: Any, rank: int) -> list[str]:
    from megatron.core.transformer.moe import moe_layer

    moe_layer.HAVE_TE, moe_layer.TELinear = True, _Projection
    settings.moe_latent_size = settings.hidden_size // 2
    stock, ours = _pair(settings, rank)
    x, grad = _inputs(config, rank, torch.float32)
    found, wanted = _run(ours, x, grad), _run(stock, x, grad)
    assert found["experts.local_experts.0.linear_fc1.weight"].shape[1] == settings.moe_latent_size
    return [f"latent: {name}" for name in _different(found, wanted)]


def test_equal_to_the_stock_layer_bit_by_bit() -> None:
    assert run_ranks(2, _bitwise, timeout=120) == [[], []]


def _many_lanes(rank: int) -> list[float]:
    config = _config(model__num_topk=4, model__group_topk=2)
    case.start(config, split=True)
    from examples import model as models
    from megatron_patch import moe_spec

    stock, ours = _pair(models.transformer_config(config).__class__(**_double(models.transformer_config(config))), rank)
    x, grad = _inputs(config, rank, torch.float32)
    b = _run(stock, x, grad)
    found = []
    for data_path, implementation in WAYS:
        options = {"data_path": data_path, "experts_implementation": implementation}
        way = moe_spec.MTMoELayer(ours.config, ours.submodules, 1, **options)
        way.load_state_dict(stock.state_dict())
        a = _run(way, x, grad)
        found += [float((a[name] - b[name]).norm() / b[name].norm().clamp_min(1e-20)) for name in b]
    moe_spec.close_buffers()
    return found


def _double(config: Any) -> dict[str, Any]:
    return {
        name: getattr(config, name) for name in config.__dataclass_fields__ if config.__dataclass_fields__[name].init
    }


def test_sums_of_four_lanes_differ_by_rounding_alone() -> None:
    for errors in run_ranks(2, _many_lanes, timeout=90):
        assert max(errors) < 1e-6 and len(errors) > 5 * len(WAYS)


class _Linear(torch.nn.Module):
    """What Transformer Engine's grouped linear looks like to us."""

    def __init__(self, out: int, width: int) -> None:
        super().__init__()
        self.num_gemms = 3
        for index in range(3):
            self.register_parameter(f"weight{index}", torch.nn.Parameter(torch.randn(out, width)))


def test_parameters_of_a_grouped_linear_become_views_of_one_tensor() -> None:
    import types

    from megatron_patch.borrowed import BorrowedExperts, pack
    from mt_moe import DataPath
    from mt_moe.products import packed_view

    module = torch.nn.Module()
    module.linear_fc1, module.linear_fc2 = _Linear(8, 6), _Linear(6, 4)
    config = types.SimpleNamespace(
        add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu, fp8=None
    )
    assert BorrowedExperts.why_not(module, config) is None
    config.fp8 = "hybrid"
    assert BorrowedExperts.why_not(module, config) == "fp8='hybrid'"
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for parameters in BorrowedExperts(module, DataPath(), "auto").weights():
        assert packed_view(parameters) is None and pack(parameters)
        view = packed_view(parameters)
        assert view is not None and torch.equal(view, torch.stack(parameters))
        with torch.no_grad():
            view += 1
    after = module.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name] + 1) for name in before)
    # In the memory of somebody else, backwards: they stay where they are.
    whole = torch.randn(3, 4, 5)
    others = [torch.nn.Parameter(whole[index]) for index in (2, 1, 0)]
    assert not pack(others) and others[0].data_ptr() == whole[2].data_ptr()


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap=True"),
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input=True"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size=2 without sequence_parallel"),
        ({}, "expert_tensor_parallel_size=2"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(settings: dict[str, Any], given: str) -> None:
    import types

    import megatron_patch
    from comm_core.runtime.errors import UsageError

    megatron_patch.apply("cpu", split_weight_grad=False)
    from megatron_patch.moe_spec import MTMoELayer

    megatron_patch.revert()
    config = types.SimpleNamespace(**{"tensor_model_parallel_size": 1, "sequence_parallel": False, **settings})
    groups = types.SimpleNamespace(expt_tp=types.SimpleNamespace(size=lambda: 2))
    with pytest.raises(UsageError, match=given):
        MTMoELayer(config, pg_collection=groups)
