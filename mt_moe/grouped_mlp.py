"""The experts of a rank as one autograd node over grouped products: fc1, activation with routing weight, fc2.

One node instead of many says exactly what is kept and in which order backward runs. Its default, per row of width H
with an inner width of F:

    forward     h = x @ fc1.T           kept: x [H], h [2F], the weight
                a = act(h) * p          not kept
                y = a @ fc2.T           not kept
    backward    da = dy @ fc2
                dh, dp, a               one pass over h and da (`fused_activation.backward`)
                d fc2 = dy.T @ a        dy and a are free from here on
                dx = dh @ fc1
                d fc1 = dh.T @ x        or later, where `defer` takes it
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from comm_core.runtime.errors import UsageError
from mt_moe import fused_activation
from mt_moe.expert_call import ExpertCall, Unit, Weights
from mt_moe.products import Groups, Products, leaving_sms, packed_view, span


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a call does and keeps; everything but tensors that autograd follows.

    Attributes:
        num_followed: weights of fc1, then those of fc2, that autograd follows: none where their gradient is deferred.
        is_packed: whether the weights given are one packed tensor, so that their gradient is.
        defers: for fc1 and fc2, what takes the weight gradient out of backward, or None.
    """

    products: Products
    groups: Groups
    unit: Unit
    recompute: str
    rows_again: Callable[[], Tensor] | None
    spare_sms: int
    release: bool
    num_followed: tuple[int, int]
    is_packed: tuple[bool, bool]
    defers: tuple[Callable[[WeightGrad], None] | None, Callable[[WeightGrad], None] | None]

    @property
    def tail(self) -> Tensor | None:
        """The ends where rows may lie behind them that the host can not cut off."""
        return self.groups.ends if self.groups.on_host is None else None


class WeightGrad:
    """The weight gradients of one product, not computed yet. Calling it returns them in the form of the weights.

    Args:
        products: computes them.
        grad: [num_rows, out].
        x: [num_rows, in], or what gives it when it is needed.
        groups: rows of each expert.
        is_packed: the weights are one packed tensor.
        spare_sms: see `leaving_sms`; may be changed before the call.
    """

    def __init__(
        self,
        products: Products,
        grad: Tensor,
        x: Tensor | Callable[[], Tensor],
        groups: Groups,
        is_packed: bool,
        spare_sms: int,
    ) -> None:
        self._products, self._grad, self._x, self._groups = products, grad, x, groups
        self._is_packed, self.spare_sms = is_packed, spare_sms

    def _rows(self) -> Tensor:
        return self._x if isinstance(self._x, Tensor) else self._x()

    def __call__(self) -> list[Tensor]:
        """One packed gradient, or one a weight."""
        return self.split(self.packed())

    @torch.no_grad()
    def packed(self) -> Tensor:
        """[num_local_experts, out, in]."""
        with span("expert_weight_grad", self._grad), leaving_sms(self.spare_sms):
            return self._products.weight_grad(self._grad, self._rows(), self._groups)

    @staticmethod
    @torch.no_grad()
    def merged(parts: Sequence[WeightGrad]) -> WeightGrad | None:
        """The sum of several as one product over all their rows; None where the host does not know whose they are.

        Adding up products would read and write all weight gradients for each part; rows are fewer bytes, moved once.
        """
        first = parts[0]
        bounds = [part._groups.bounds() for part in parts if part._groups.on_host is not None]
        if len(bounds) < len(parts):
            return None
        ends = list(itertools.accumulate(sum(b[e][1] - b[e][0] for b in bounds) for e in range(len(bounds[0]))))
        groups = Groups(torch.tensor(ends, dtype=torch.int32, device=first._grad.device), tuple(ends))

        def by_expert(rows: Sequence[Tensor]) -> Tensor:
            return torch.cat([r[slice(*b[e])] for e in range(len(ends)) for r, b in zip(rows, bounds, strict=True)])

        grad, x = by_expert([part._grad for part in parts]), by_expert([part._rows() for part in parts])
        return WeightGrad(first._products, grad, x, groups, first._is_packed, first.spare_sms)

    def split(self, total: Tensor) -> list[Tensor]:
        """A packed gradient in the form of the weights."""
        return [total] if self._is_packed else list(total.unbind(0))


class _GroupedMlp(torch.autograd.Function):
    """See the module. Computes with `forms` of fc1 and fc2; `weights` are there for autograd to follow."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, row_weights: Tensor, plan: _Plan, forms: tuple[Weights, Weights], *weights: Tensor
    ) -> Tensor:
        (fc1, fc2), unit = forms, plan.unit
        with leaving_sms(plan.spare_sms):
            hidden = plan.products.forward(rows, fc1, plan.groups, clear=False)  # the activation reads no others
            active = fused_activation.forward(hidden, row_weights, unit.activation, unit.gated, plan.tail)
            y = plan.products.forward(active, fc2, plan.groups)
        ctx.save_for_backward(
            rows if plan.rows_again is None else None,
            row_weights,
            None if plan.recompute == "fc1" else hidden,
            active if plan.recompute == "nothing" else None,
            *_flat(fc1),
            *_flat(fc2),
        )
        ctx.plan, ctx.num_saved = plan, len(_flat(fc1))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        rows, row_weights, hidden, active, *forms = ctx.saved_tensors
        fc1, fc2 = _form(forms[: ctx.num_saved]), _form(forms[ctx.num_saved :])
        products, groups, unit, again = plan.products, plan.groups, plan.unit, plan.rows_again
        first = rows if again is None else again
        if plan.release and rows is not None:
            _check_unreleased(rows)
        needs, (count, more) = ctx.needs_input_grad, plan.num_followed
        grad = grad.contiguous()
        with leaving_sms(plan.spare_sms):
            if hidden is None:
                first = first if isinstance(first, Tensor) else first()
                hidden = products.forward(first, fc1, groups, clear=False)
            with span("expert_input_grad", grad):
                grad_active = products.input_grad(grad, fc2, groups, clear=False)
            found = fused_activation.backward(
                hidden, row_weights, grad_active, unit.activation, unit.gated, plan.tail, wants_out=active is None
            )
        grad_hidden, grad_weights = found.hidden, found.row_weights
        active = found.out if active is None else active
        assert active is not None, "asked for where it was not saved"
        taken = WeightGrad(products, grad, active, groups, plan.is_packed[1], plan.spare_sms)
        del hidden, active, grad_active, found  # what is not read again makes room for what follows
        seconds = _take(taken, plan.defers[1], any(needs[4 + count :]), more)
        del taken
        taken = WeightGrad(products, grad_hidden, first, groups, plan.is_packed[0], plan.spare_sms)
        grad_rows: Tensor | None = None
        if plan.release:
            _release(grad)
            firsts = _take(taken, None, any(needs[4 : 4 + count]), count)
            _release(rows if again is None else None)
        if needs[0]:
            with span("expert_input_grad", grad_hidden), leaving_sms(plan.spare_sms):
                grad_rows = products.input_grad(grad_hidden, fc1, groups)
        if not plan.release:
            firsts = _take(taken, plan.defers[0], any(needs[4 : 4 + count]), count)
        return grad_rows, grad_weights if needs[1] else None, None, None, *firsts, *seconds


def _release(tensor: Tensor | None) -> None:
    """Gives the memory of a tensor back, whoever still holds the tensor."""
    if tensor is not None:
        tensor.untyped_storage().resize_(0)


def _check_unreleased(rows: Tensor) -> None:
    if rows.nbytes > rows.untyped_storage().nbytes():
        raise UsageError(
            "a second backward of one graph with release=True",
            allowed="one, which gives its rows back",
            fix="run forward again, or set DataPath(release=False)",
        )


def _take(
    grads: WeightGrad, defer: Callable[[WeightGrad], None] | None, wanted: bool, count: int
) -> Sequence[Tensor | None]:
    """The weight gradients now, or None for each where they are deferred or nobody wants them."""
    if defer is not None:
        defer(grads)
    elif wanted:
        return grads()
    return [None] * count


def _form(weights: Sequence[Tensor]) -> Weights:
    """One tensor for all, where it needs no copy."""
    if weights[0].dim() == 3:
        return weights[0]
    view = packed_view(weights)
    return weights if view is None else view


def _flat(weights: Weights) -> Sequence[Tensor]:
    return [weights] if isinstance(weights, Tensor) else weights


def run(call: ExpertCall, products: Products) -> Tensor:
    """The experts by the products of a library; see `expert_mlp`."""
    given = _flat(call.fc1), _flat(call.fc2)
    defers = _deferred(given[0], call), _deferred(given[1], call)
    followed = [weights if defer is None else [] for weights, defer in zip(given, defers, strict=True)]
    plan = _Plan(
        products=products,
        groups=Groups(call.device_ends(), None if call.layout is None else call.layout.ends),
        unit=call.unit,
        recompute=call.recompute,
        rows_again=call.rows_again,
        spare_sms=call.spare_sms,
        release=call.release and defers == (None, None),
        num_followed=(len(followed[0]), len(followed[1])),
        is_packed=(isinstance(call.fc1, Tensor), isinstance(call.fc2, Tensor)),
        defers=defers,
    )
    # Outside of the node: what is not followed must not be seen by autograd.
    with torch.no_grad():
        forms = _form(given[0]), _form(given[1])
    y: Tensor = _GroupedMlp.apply(
        call.rows.contiguous(), call.row_weights.contiguous(), plan, forms, *followed[0], *followed[1]
    )
    return y


def _deferred(weights: Sequence[Tensor], call: ExpertCall) -> Callable[[WeightGrad], None] | None:
    """What hands a weight gradient with its weights, as given, to the `defer` of the call."""
    hand_over = call.unit.defer
    if hand_over is None or not weights[0].requires_grad:
        return None
    return lambda grads: hand_over(weights, grads)
