"""The experts: a named seam of implementations that compute on borrowed weights.

`expert_mlp` owns no parameter. Under Megatron the weights are the stock modules' own, so that checkpoints load
unchanged; in `MoELayer` they are those of `Experts` below. For each row of expert e, with routing weight p:

    gated:   y = (act(gate) * up * p) @ fc2[e].T     where  gate || up = row @ fc1[e].T
    plain:   y = (act(row @ fc1[e].T) * p) @ fc2[e].T

The routing weight stands before fc2 because combine adds the rows of a token without weights. The product with p is
taken in the wider of the two dtypes and rounded to the activation's dtype.

    "loop"     one expert after the other: the reference. The same operations on the same shapes as Megatron's local
               sequential experts (gated unit, no bias, no fusion), hence the same bits.
    "grouped"  one grouped matrix product for all experts, where torch has it for the device and dtype, in one autograd
               node with the fused activation (`grouped_mlp`).
    "te"       the same node over Transformer Engine's grouped product, which takes one tensor an expert as it is.
    "auto"     grouped on an accelerator that has it, else loop (on a CPU torch's grouped product is itself a loop).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comm_core.runtime import trace
from comm_core.runtime.errors import UsageError
from mt_moe import grouped_mlp, te_products
from mt_moe.config import MoEConfig
from mt_moe.expert_call import ExpertCall, Implementation, Named, Rows, Unit, Weights
from mt_moe.expert_linear import Collector, Defer, anchored, collected_linear, linear
from mt_moe.fp8_experts import recipe_implementation
from mt_moe.init import seeded_normal
from mt_moe.products import LoopProducts, Products, TorchProducts, why_not

TORCH, LOOP = TorchProducts(), LoopProducts()


def _run_loop(call: ExpertCall) -> Tensor:
    """The reference. Splits, computes each expert on its own rows, concatenates; no operation spans two experts."""
    rows, layout, row_weights, fc1, fc2, unit = (
        call.rows, call.host_layout(), call.row_weights, call.fc1, call.fc2, call.unit,
    )  # fmt: skip
    firsts, seconds = _linears(fc1, unit.defer), _linears(fc2, unit.defer)

    def one(expert: int, part: Tensor, weights: Tensor) -> Tensor:
        return seconds[expert](unit(firsts[expert](part), weights))

    if len(layout.sections) == 1 and layout.sections[0][0] is not None:
        return one(0, rows, row_weights)
    lengths = [length for _, length in layout.sections]
    parts = zip(layout.sections, torch.split(rows, lengths), torch.split(row_weights, lengths), strict=True)
    outputs = [
        one(expert, part, weights) if expert is not None else torch.zeros_like(part)
        for (expert, _), part, weights in parts
    ]
    return torch.cat(outputs, dim=0)


def _linears(weights: Weights, defer: Defer | None) -> list[Callable[[Tensor], Tensor]]:
    """One product an expert, over per-expert views; the deferred gradients of a layer leave together."""
    listed = weights.unbind(0) if isinstance(weights, Tensor) else weights
    if defer is None or not listed[0].requires_grad:
        return [functools.partial(linear, weight=weight) for weight in listed]
    collector = Collector(weights, defer)
    return [
        functools.partial(collected_linear, weight=weight, add=collector.slot(expert))
        for expert, weight in enumerate(listed)
    ]


def _run_grouped(call: ExpertCall) -> Tensor:
    """By torch's grouped product; on a CPU that has it not for this dtype, by plain products in the same node."""
    return grouped_mlp.run(call, _products_of(call.rows.device, call.rows.dtype))


def _products_of(device: torch.device, dtype: torch.dtype) -> Products:
    return TORCH if device.type != "cpu" or why_not(TORCH, device, dtype) is None else LOOP


def _grouped_unavailable(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> str | None:
    if _products_of(device, dtype) is LOOP:
        return None
    return why_not(TORCH, device, dtype) or _odd_width(dtype, widths)


def _odd_width(dtype: torch.dtype, widths: Sequence[int]) -> str | None:
    odd = [width for width in widths if width * dtype.itemsize % 16]
    return f"width {odd[0]} in {dtype} is no multiple of 16 bytes, which the grouped product needs" if odd else None


def _run_te(call: ExpertCall) -> Tensor:
    return grouped_mlp.run(call, te_products.PRODUCTS)


def _te_unavailable(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> str | None:
    missing = te_products.missing(device)
    return missing or why_not(te_products.PRODUCTS, device, dtype) or _odd_width(dtype, widths)


_IMPLEMENTATIONS: dict[str, Implementation] = {
    "loop": Named("loop", _run_loop, lambda device, dtype, widths: None),
    "grouped": Named("grouped", _run_grouped, _grouped_unavailable),
    "te": Named("te", _run_te, _te_unavailable),
}


def implementations() -> tuple[str, ...]:
    """The names that `implementation=` takes besides "auto"."""
    return tuple(_IMPLEMENTATIONS)


def unavailable(name: str, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
    """Why an implementation can not run on this device with this dtype and these widths; None where it can.

    Raises:
        UsageError: no implementation has this name.
    """
    if name not in _IMPLEMENTATIONS:
        raise UsageError(
            f"experts implementation {name!r}",
            allowed=", ".join(["auto", *_IMPLEMENTATIONS]),
            fix="choose one of them",
        )
    return _IMPLEMENTATIONS[name].unavailable(device, dtype, widths)


def resolve(name: str, device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> str:
    """The implementation that `name` ("auto" included) means here.

    Raises:
        UsageError: an unknown name, or one that can not run here, with the reason.
    """
    if name == "auto":
        wanted = device.type != "cpu" and unavailable("grouped", device, dtype, widths) is None
        return "grouped" if wanted else "loop"
    reason = unavailable(name, device, dtype, widths)
    if reason is not None:
        raise UsageError(f"experts implementation {name!r}: {reason}", allowed="auto or loop here", fix="choose one")
    return name


def expert_mlp(
    rows: Tensor,
    counts: Sequence[int] | None,
    row_weights: Tensor,
    fc1: Weights,
    fc2: Weights,
    *,
    expert_alignment: int = 1,
    activation: Callable[[Tensor], Tensor] = F.silu,
    gated: bool = True,
    defer: Defer | None = None,
    implementation: str = "auto",
    recipe: Implementation | None = None,
    ends: Tensor | None = None,
    recompute: str = "activation",
    rows_again: Callable[[], Tensor] | None = None,
    spare_sms: int = 0,
    release: bool = False,
    quantised: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Every row through its expert.

    Args:
        rows: [num_rows, hidden], expert-major; the group of an expert starts at a multiple of `expert_alignment`,
            padding rows are zero.
        counts: rows of each local expert, unaligned, on the host; None where only the device knows, by `ends`.
        row_weights: [num_rows] fp32 or fp64, the routing weight of each row.
        fc1: one [2 * ffn, hidden] (gate above up) or, plain, [ffn, hidden] an expert; or all packed in one tensor.
        fc2: one [hidden, ffn] an expert; or all packed in one tensor.
        expert_alignment: that of the dispatch handle.
        activation: elementwise; the gate's where `gated`.
        gated: whether fc1 holds gate and up (SwiGLU with silu) or one plain projection.
        defer: takes the weight gradients out of backward: called once for fc2, then once for fc1, each with the weights
            of all experts as given and a closure that computes their gradients (zero for an expert without rows).
        implementation: "auto", "loop", "grouped" or "te".
        recipe: computes instead of an implementation by name; it gets the whole `ExpertCall`.
        ends: where the device has them, see `ExpertCall`; else they are copied from the host where needed.
        recompute: for a grouped implementation, as the next three; see `ExpertCall`.
        rows_again: "auto" means "grouped" with it.
        spare_sms: see `ExpertCall`.
        release: where there is no `defer`.
        quantised: for a recipe; see `ExpertCall`.

    Returns:
        [num_rows, hidden] in the dtype of rows; padding rows are zero.

    Raises:
        UsageError: shapes or counts that do not fit together, or an implementation that can not run here.
    """
    layout = None if counts is None else Rows.of(counts, expert_alignment, rows.shape[0])
    _check_shapes(rows, len(counts) if counts is not None else _known(ends), row_weights, fc1, fc2, gated)
    widths = (rows.shape[1], *_matrix(fc1)[:1], *_matrix(fc2)[1:])
    chosen = _chosen(implementation, recipe, rows, widths, rows_again is not None)
    if defer is not None:
        rows = anchored(anchored(rows, fc1), fc2)
    whole = (Unit(activation, gated, defer), ends, recompute, rows_again, spare_sms, release, quantised)
    call = ExpertCall(rows, layout, row_weights, fc1, fc2, *whole)
    with trace.span("experts", "moe", num_rows=rows.shape[0], implementation=chosen.name):
        return chosen.run(call)


def _chosen(
    implementation: str, recipe: Implementation | None, rows: Tensor, widths: Sequence[int], asks_again: bool
) -> Implementation:
    """What computes: the recipe where there is one.

    Raises:
        UsageError: it can not run here.
    """
    if recipe is None:
        if asks_again:
            implementation = _able_to_ask_again(implementation)
        return _IMPLEMENTATIONS[resolve(implementation, rows.device, rows.dtype, widths)]
    reason = recipe.unavailable(rows.device, rows.dtype, widths)
    if reason is not None:
        raise UsageError(f"recipe {recipe.name}: {reason}", allowed="a recipe that runs here", fix="choose another")
    return recipe


def _able_to_ask_again(implementation: str) -> str:
    """An implementation that does not save its rows."""
    if implementation == "loop":
        raise UsageError(
            'rows_again (save_dispatched "redispatch") with experts implementation "loop"',
            allowed="auto, grouped or te, which can do without saved rows",
            fix="choose one of them, or keep the rows",
        )
    return "grouped" if implementation == "auto" else implementation


def _known(ends: Tensor | None) -> int:
    """Number of local experts by what the device knows."""
    if ends is None:
        raise UsageError("counts=None without ends", allowed="one of them", fix="pass the counts of the handle")
    return ends.shape[0]


def _matrix(weights: Weights) -> tuple[int, ...]:
    """The shape of one expert's matrix, without indexing a packed tensor, which is work for autograd."""
    return tuple(weights.shape[1:] if isinstance(weights, Tensor) else weights[0].shape)


def _shapes(weights: Weights) -> set[tuple[int, ...]]:
    return {_matrix(weights)} if isinstance(weights, Tensor) else {weight.shape for weight in weights}


def _check_shapes(rows: Tensor, num_experts: int, row_weights: Tensor, fc1: Weights, fc2: Weights, gated: bool) -> None:
    if num_experts == 0 or len(fc1) != num_experts or len(fc2) != num_experts:
        raise UsageError(
            f"{num_experts} counts, {len(fc1)} fc1 and {len(fc2)} fc2 weights",
            allowed="one of each for every local expert, at least one expert",
            fix="pass the counts and the weights of the same experts",
        )
    hidden, ffn = _matrix(fc2)
    first = ((2 if gated else 1) * ffn, hidden)
    if _shapes(fc1) | {(first[0], rows.shape[1])} != {first} or _shapes(fc2) != {(hidden, ffn)}:
        raise UsageError(
            f"rows {tuple(rows.shape)}, fc1 {_matrix(fc1)}, fc2 {_matrix(fc2)}, gated={gated}",
            allowed="rows [num_rows, hidden], fc1 [2 * ffn if gated else ffn, hidden], fc2 [hidden, ffn], each",
            fix="check hidden, ffn and gated",
        )
    if tuple(row_weights.shape) != (rows.shape[0],):
        raise UsageError(
            f"row_weights {tuple(row_weights.shape)} for {rows.shape[0]} rows",
            allowed="one weight a row",
            fix="pass the row weights of the same dispatch",
        )


class Experts(nn.Module):
    """The local experts of one rank with weights of their own, packed in one tensor a layer.

    `fc1` [num_local_experts, 2 * ffn or ffn, hidden] and `fc2` [num_local_experts, hidden, ffn] are drawn by
    `seeded_normal` from the seed, the name and the global expert number, so that they do not depend on `ep_size`.

    Args:
        config: sizes, activation, seed and implementation.
        first_expert: global number of the first local expert.
        num_local_experts: experts held here.
        name: prefix of the names that the initial weights depend on.
        dtype: of the weights.
        device: of the weights.

    Attributes:
        recipe: computes the experts instead of `config.experts` where one is set; `config.recipe`'s to begin with.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        first_expert: int,
        num_local_experts: int,
        name: str = "experts",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        self.recipe: Implementation | None = recipe_implementation(config.recipe)
        self.first_expert = first_expert
        width = (2 if config.gated else 1) * config.ffn
        shapes = {"fc1": (width, config.hidden), "fc2": (config.hidden, config.ffn)}
        packed = {
            kind: torch.stack(
                [
                    seeded_normal(shape, config.init_std, seed=config.seed, name=f"{name}.{kind}", index=expert)
                    for expert in range(first_expert, first_expert + num_local_experts)
                ]
            ).to(device, dtype)
            for kind, shape in shapes.items()
        }
        self.fc1 = nn.Parameter(packed["fc1"])
        self.fc2 = nn.Parameter(packed["fc2"])

    def forward(
        self,
        rows: Tensor,
        counts: Sequence[int] | None,
        row_weights: Tensor,
        *,
        defer: Defer | None = None,
        ends: Tensor | None = None,
        rows_again: Callable[[], Tensor] | None = None,
        quantised: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Dispatched rows to output rows; see `expert_mlp`."""
        config = self.config
        return expert_mlp(
            rows,
            counts,
            row_weights,
            self.fc1,
            self.fc2,
            expert_alignment=config.expert_alignment,
            activation=config.activation_function(),
            gated=config.gated,
            defer=defer,
            implementation=config.experts,
            recipe=self.recipe,
            ends=ends,
            recompute=config.data_path.recompute,
            rows_again=rows_again,
            spare_sms=config.data_path.gemm_spare_sms,
            release=config.data_path.release,
            quantised=quantised,
        )
