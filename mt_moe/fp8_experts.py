"""The experts in FP8: forward and backward of fc1 -> SwiGLU * weight -> fc2 as one autograd node.

    forward                                      backward
    x8 = cast(x), or as it came by dispatch      dy8, dy8' = cast(dy) along columns and along tokens
    h  = x8 @ W1'          kept                  da = dy8 @ W2
    a8 = cast(silu(gate) * up * p)               dh8, dh8', a8', dp = cast(activation backward of h, da, p)
    y  = a8 @ W2'                                dx = dh8 @ W1      dW2 = dy8' @ a8'      dW1 = dh8' @ cast'(x)

One node, because what stands between two products is never needed as a tensor of its own: the activation reads h and
writes the operands of the next products. Kept for backward: h in the dtype of the rows, x in FP8 or as it came, the row
weights. The activation is computed again from h. Casts are straight-through: the gradient of a cast is the identity, as
in Megatron and Transformer Engine. Rows of alignment are zero and stay zero: a block of zeros is quantised to zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from comm_core.runtime import trace
from comm_core.runtime.errors import UsageError
from mt_moe import fp8_cast, fp8_products
from mt_moe.expert_call import ExpertCall, Implementation, Weights
from mt_moe.expert_linear import Defer
from mt_moe.fp8_operands import Groups, RowOperand, TokenOperand, WeightOperand
from mt_moe.fp8_products import Products, plain_rows, plain_tokens
from mt_moe.products import packed
from mt_moe.recipes import Recipe, recipe_of

Pair = tuple[WeightOperand, WeightOperand]


def as_given(weights: Weights) -> list[Tensor]:
    """The tensors that autograd and `defer` know: one packed, or one an expert."""
    return [weights] if isinstance(weights, Tensor) else list(weights)


def cast_weights(weights: Weights, recipe: Recipe) -> Pair:
    """The operands of `weights` for x @ W.T and for dy @ W."""
    with trace.span("expert_weight_cast", "moe"):
        return fp8_cast.weight_operands(packed(weights).detach(), recipe)


class WeightCache:
    """Quantised weights, kept while the weights they were made of stay the same.

    The same means: the same tensors, with the same version counter and storage, and no optimizer of torch (subclasses
    included) has made a step. The counter alone does not do: fused optimizers and writes through `.data` do not advance
    it. After a write that is neither an operation of autograd nor an optimizer's step, call `clear`.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[list[tuple[Any, int, int]], Recipe, Pair]] = {}
        this = weakref.ref(self)

        def stepped(*_: Any) -> None:
            cache = this()
            if cache is not None:
                cache.clear()

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        """A copy holds nothing and listens for itself."""
        return WeightCache, ()

    def clear(self) -> None:
        """Forgets everything: the weights have changed."""
        self._held.clear()

    def get(self, kind: str, weights: Weights, recipe: Recipe) -> Pair:
        """The operands of `weights` for x @ W.T and for dy @ W."""
        tensors = as_given(weights)
        held = self._held.get(kind)
        if held is not None and held[1] == recipe and len(held[0]) == len(tensors):
            pairs = zip(held[0], tensors, strict=True)
            if all(ref() is w and (version, where) == (w._version, w.data_ptr()) for (ref, version, where), w in pairs):
                return held[2]
        pair = cast_weights(weights, recipe)
        self._held[kind] = ([(weakref.ref(w), w._version, w.data_ptr()) for w in tensors], recipe, pair)
        return pair


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one call computes with; nothing in it takes part in autograd. Pairs of two: of fc1 and of fc2."""

    recipe: Recipe
    products: Products
    groups: Groups
    quantised: RowOperand | None
    pairs: tuple[Pair, Pair]
    defers: tuple[Defer | None, Defer | None]
    weights: tuple[Weights, Weights]

    def rows(self, layer: int, name: str, x: Tensor | RowOperand, *, turned: bool) -> Tensor:
        """One product of a row: x @ W.T, or x @ W where `turned`, in FP8 or plain as the recipe's field `name` says."""
        weights = self.weights[layer]
        dtype = weights[0].dtype
        if self.groups.num_rows == 0:
            return weights[0].new_zeros(0, weights[0].shape[-1 if turned else -2])
        if getattr(self.recipe, name) == "fp8":
            operand = x if isinstance(x, RowOperand) else fp8_cast.row_operand(x, self.groups, self.recipe)
            return self.products.rows(operand, self.pairs[layer][turned], self.groups, dtype)
        plain = packed(weights).detach()
        return plain_rows(self.unquantised(x, dtype), plain.transpose(1, 2) if turned else plain, self.groups)

    def tokens(self, g: Tensor | TokenOperand, x: Tensor | TokenOperand, dtype: torch.dtype) -> Tensor:
        """One weight gradient, both sides in the form that the recipe asked for."""
        with trace.span("expert_weight_grad", "moe", num_rows=self.groups.num_rows):
            if isinstance(g, TokenOperand) and isinstance(x, TokenOperand):
                if self.groups.num_rows == 0:
                    return g.data.new_zeros(len(self.groups.ends), g.num_columns, x.num_columns, dtype=dtype)
                return self.products.tokens(g, x, self.groups, dtype)
            assert isinstance(g, Tensor) and isinstance(x, Tensor), "both sides of a product in one form"
            return plain_tokens(g.contiguous(), x, self.groups)

    def unquantised(self, x: Tensor | RowOperand, dtype: torch.dtype) -> Tensor:
        """Rows as a plain tensor."""
        return x.dequantised(self.groups).to(dtype) if isinstance(x, RowOperand) else x

    def tokens_of(self, dtype_name: str, x: Tensor | RowOperand, dtype: torch.dtype) -> Tensor | TokenOperand:
        """Kept rows in the form of a weight gradient's operand."""
        if dtype_name == "fp8":
            return fp8_cast.token_operand(x, self.groups, self.recipe)
        return self.unquantised(x, dtype)


class _Experts(torch.autograd.Function):
    """rows and row weights to outputs; the weights come last, packed or one tensor an expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_weights: Tensor, plan: _Plan, *weights: Tensor) -> Tensor:
        recipe, groups = plan.recipe, plan.groups
        total = groups.num_rows
        x: Tensor | RowOperand = rows[:total] if plan.quantised is None else plan.quantised
        quantised = plan.quantised
        if quantised is None and recipe.fc1_forward == "fp8":
            quantised = fp8_cast.row_operand(rows[:total], groups, recipe)
        hidden = plan.rows(0, "fc1_forward", x if quantised is None else quantised, turned=False)
        weight = row_weights[:total]
        act: Tensor | RowOperand
        if recipe.fc2_forward == "fp8":
            act = fp8_cast.activate_row_operand(hidden, weight, groups, recipe)
        else:
            act = fp8_cast.activate(hidden, weight).to(hidden.dtype)
        y = plan.rows(1, "fc2_forward", act, turned=False)
        kept = quantised if quantised is not None and (recipe.keep == "fp8" or plan.quantised is not None) else x
        tensors = (kept.data, kept.scales) if isinstance(kept, RowOperand) else (kept,)
        ctx.save_for_backward(hidden, weight, *tensors)
        ctx.plan, ctx.num_rows, ctx.scaling = plan, rows.shape[0], recipe.scaling
        ctx.rows_dtype, ctx.row_weights_dtype, ctx.weight_dtype = rows.dtype, row_weights.dtype, weights[0].dtype
        return _padded(y, rows.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, weight, *kept = ctx.saved_tensors
        plan: _Plan = ctx.plan
        recipe, groups = plan.recipe, plan.groups
        grad = grad[: groups.num_rows].contiguous()
        rows, tokens = fp8_cast.both_operands(
            grad, groups, recipe, rows=recipe.fc2_input_grad == "fp8", tokens=recipe.fc2_weight_grad == "fp8"
        )
        with trace.span("expert_input_grad", "moe", num_rows=groups.num_rows):
            grad_act = plan.rows(1, "fc2_input_grad", grad if rows is None else rows, turned=True)
        operands, grad_weights = fp8_cast.activation_backward(hidden, grad_act, weight, groups, recipe)
        grad_rows = None
        if ctx.needs_input_grad[0]:
            with trace.span("expert_input_grad", "moe", num_rows=groups.num_rows):
                grad_rows = plan.rows(0, "fc1_input_grad", operands["grad_rows"], turned=True)
            grad_rows = _padded(grad_rows, ctx.num_rows).to(ctx.rows_dtype)
        x: Tensor | RowOperand = RowOperand(kept[0], kept[1], ctx.scaling) if len(kept) == 2 else kept[0]
        out_grad: Tensor | TokenOperand = grad if tokens is None else tokens
        grad_tokens, act_tokens = operands["grad_tokens"], operands["act_tokens"]

        def second() -> Tensor:
            return plan.tokens(out_grad, act_tokens, ctx.weight_dtype)

        def first() -> Tensor:
            x_tokens = plan.tokens_of(recipe.fc1_weight_grad, x, ctx.weight_dtype)
            return plan.tokens(grad_tokens, x_tokens, ctx.weight_dtype)

        num_fc1 = len(as_given(plan.weights[0]))
        # As everywhere: the deferred gradients leave fc2 first.
        late = _weight_grads(plan, 1, second, ctx.needs_input_grad[3 + num_fc1 :])
        early = _weight_grads(plan, 0, first, ctx.needs_input_grad[3 : 3 + num_fc1])
        grad_weights = _padded(grad_weights[:, None], ctx.num_rows).squeeze(1).to(ctx.row_weights_dtype)
        return grad_rows, grad_weights if ctx.needs_input_grad[1] else None, None, *early, *late


def _weight_grads(
    plan: _Plan, layer: int, compute: Callable[[], Tensor], needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    """The gradients of one layer's weights, or none where they are deferred or not needed."""
    tensors, defer = as_given(plan.weights[layer]), plan.defers[layer]

    # Deferred, it runs wherever its caller does, and what is kept may be a view of rows that need a gradient.
    @torch.no_grad()
    def shaped() -> list[Tensor]:
        result = compute()
        return [result] if tensors[0].dim() == 3 else list(result.unbind(0))

    if defer is not None:
        defer(tensors, shaped)
    elif any(needs):
        return shaped()
    return [None] * len(tensors)


def _padded(y: Tensor, num_rows: int) -> Tensor:
    return y if y.shape[0] == num_rows else F.pad(y, (0, 0, 0, num_rows - y.shape[0]))


class Fp8Experts:
    """An implementation of the experts: a recipe, the products found for it, and a cache of quantised weights.

    Args:
        recipe: a name or a recipe.
        cache_weights: keep quantised weights between calls until the weights change (see `WeightCache`): one cast an
            optimizer step, at 2 bytes a parameter.

    Raises:
        UsageError: recipe "bf16", which is no FP8 recipe.
    """

    def __init__(self, recipe: str | Recipe, *, cache_weights: bool = True) -> None:
        found = recipe_of(recipe)
        if found is None:
            raise UsageError(f"Fp8Experts({recipe!r})", allowed="an FP8 recipe", fix="use no recipe for bf16")
        self.recipe = found
        self.name = found.name
        self.cache = WeightCache()
        self._cache_weights = cache_weights

    def weights_changed(self) -> None:
        """To be called after a write to the weights that nothing shows; see `WeightCache`."""
        self.cache.clear()

    def unavailable(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> str | None:
        """Why the recipe can not run here."""
        unit = 128 if self.recipe.scaling == "block" else 16
        odd = [width for width in widths if width % unit]
        if odd:
            return f"width {odd[0]} is no multiple of {unit}"
        if device.type != "cpu" and dtype != torch.bfloat16:
            return f"rows of {dtype}, the products give bfloat16"
        return fp8_products.unavailable(self.recipe, device, widths)

    def run(self, call: ExpertCall) -> Tensor:
        """The output rows; see `Implementation`."""
        ends = call.host_layout().ends
        self._check(call, ends)
        groups = Groups.of(ends, call.rows.device, call.ends)
        weights = (call.fc1, call.fc2)
        tensors = [as_given(ours) for ours in weights]
        widths = (call.rows.shape[1], call.fc1[0].shape[0], call.fc2[0].shape[1])
        defers = [call.unit.defer if ours[0].requires_grad else None for ours in tensors]
        plan = _Plan(
            recipe=self.recipe,
            products=fp8_products.choose(self.recipe, call.rows.device, widths),
            groups=groups,
            quantised=self._arrived(call, groups),
            pairs=(self._cast("fc1", call.fc1), self._cast("fc2", call.fc2)),
            defers=(defers[0], defers[1]),
            weights=weights,
        )
        given = [w if defer is None else w.detach() for ours, defer in zip(tensors, defers, strict=True) for w in ours]
        y: Tensor = _Experts.apply(call.rows, call.row_weights, plan, *given)
        return y

    def _cast(self, kind: str, weights: Weights) -> Pair:
        if self._cache_weights:
            return self.cache.get(kind, weights, self.recipe)
        return cast_weights(weights, self.recipe)

    def _arrived(self, call: ExpertCall, groups: Groups) -> RowOperand | None:
        """Rows that came in FP8 as an operand."""
        pair = call.quantised
        if pair is None:
            return None
        data, scales = pair[0][: groups.num_rows], pair[1][: groups.num_rows]
        if self.recipe.scaling == "row":
            return RowOperand(data, scales[:, 0].contiguous(), "row")
        return RowOperand(data, fp8_cast.pack_row_scales(scales, groups), "block")

    def _check(self, call: ExpertCall, ends: Sequence[int]) -> None:
        needed = self.recipe.alignment
        if any(end % needed for end in ends):
            raise UsageError(
                f"groups that end at rows {list(ends)[:8]} with recipe {self.name!r}",
                allowed=f"multiples of {needed}",
                fix=f"set expert_alignment to a multiple of {needed}",
            )
        if not call.unit.gated or call.unit.activation is not F.silu:
            raise UsageError(
                f"recipe {self.name!r} with gated={call.unit.gated} and activation {call.unit.activation}",
                allowed="gated silu (SwiGLU)",
                fix='set gated=True and activation="silu", or recipe="bf16"',
            )


def recipe_implementation(recipe: str | Recipe) -> Implementation | None:
    """What `Experts` computes with under a recipe; None for "bf16"."""
    found = recipe_of(recipe)
    return None if found is None else Fp8Experts(found)
