"""The three products that training of the experts needs, over all groups of rows at once, by libraries that have them.

For rows x in expert-major groups and one weight matrix W an expert:

    forward        y  = x @ W.T
    input_grad     dx = dy @ W
    weight_grad    dW = dy.T @ x        one matrix an expert, packed in one tensor

Weights are borrowed: one packed tensor [num_local_experts, out, in] or one tensor [out, in] an expert. What a library
needs packed is packed without a copy where the matrices lie at equal distances in one storage (`packed_view`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from comm_core.runtime import trace
from mt_moe import clearing
from mt_moe.expert_call import Weights
from mt_moe.expert_linear import grouped_product


@dataclass(frozen=True, slots=True)
class Groups:
    """Which rows are whose.

    Attributes:
        ends: int32 [num_local_experts] on the device, the row after the last of each group; a group begins where the
            one before ends. Rows behind the last are nobody's.
        on_host: the same numbers where the host knows them, else None: nothing then waits for the device.
    """

    ends: Tensor
    on_host: tuple[int, ...] | None

    def bounds(self) -> list[tuple[int, int]]:
        """(first row, end) of each group; waits for the device where the host does not know."""
        ends = self.ends.tolist() if self.on_host is None else self.on_host
        return list(itertools.pairwise((0, *ends)))


class Products(Protocol):
    """A library's way to compute them; results have as many rows as what they are computed from."""

    name: str

    def forward(self, x: Tensor, weights: Weights, groups: Groups, *, clear: bool = True) -> Tensor:
        """[num_rows, in] to [num_rows, out]; rows in no group come out as zero, or as anything without `clear`."""
        ...

    def input_grad(self, grad: Tensor, weights: Weights, groups: Groups, *, clear: bool = True) -> Tensor:
        """[num_rows, out] to [num_rows, in]; rows in no group as in `forward`."""
        ...

    def weight_grad(self, grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
        """[num_local_experts, out, in]; zero for a group without rows."""
        ...


def listed(weights: Weights) -> Sequence[Tensor]:
    """One matrix an expert."""
    return weights.unbind(0) if isinstance(weights, Tensor) else weights


def packed_view(weights: Sequence[Tensor]) -> Tensor | None:
    """The matrices as one tensor over their own memory, where they lie at equal distances in it; None elsewhere."""
    first, last = weights[0], weights[-1]
    at = first.data_ptr()
    step = weights[1].data_ptr() - at if len(weights) > 1 else first.nbytes
    if step < first.nbytes or step % first.itemsize or not first.is_contiguous():
        return None
    # Addresses between those of two tensors of one storage are addresses of that storage.
    if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    for weight in weights:
        if weight.data_ptr() != at or not weight.is_contiguous():
            return None
        at += step
    form = (step // first.itemsize, *first.stride())
    return first.detach().as_strided((len(weights), *first.shape), form, first.storage_offset())


def packed(weights: Weights) -> Tensor:
    """All matrices in one tensor, copied only where they do not lie so already."""
    if isinstance(weights, Tensor):
        return weights
    view = packed_view(weights)
    return torch.stack(list(weights)) if view is None else view


class LoopProducts:
    """One plain product an expert, for any dtype. Reads the bounds of the groups on the host."""

    name = "loop"

    def forward(self, x: Tensor, weights: Weights, groups: Groups, *, clear: bool = True) -> Tensor:
        """See `Products`."""
        y = x.new_empty(x.shape[0], listed(weights)[0].shape[0])
        return self._fill(y, x, [weight.t() for weight in listed(weights)], groups)

    def input_grad(self, grad: Tensor, weights: Weights, groups: Groups, *, clear: bool = True) -> Tensor:
        """See `Products`."""
        grad_x = grad.new_empty(grad.shape[0], listed(weights)[0].shape[1])
        return self._fill(grad_x, grad, listed(weights), groups)

    def weight_grad(self, grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
        """See `Products`."""
        total = grad.new_empty(len(groups.bounds()), grad.shape[1], x.shape[1])
        for matrix, (first, end) in zip(total, groups.bounds(), strict=True):
            torch.mm(grad[first:end].t(), x[first:end], out=matrix)
        return total

    @staticmethod
    def _fill(out: Tensor, rows: Tensor, matrices: Sequence[Tensor], groups: Groups) -> Tensor:
        bounds = groups.bounds()
        for matrix, (first, end) in zip(matrices, bounds, strict=True):
            torch.mm(rows[first:end], matrix, out=out[first:end])
        out[bounds[-1][1] :].zero_()
        return out


class TorchProducts:
    """torch's grouped product, one kernel for all experts. Needs the ends on the device alone."""

    name = "torch"

    def forward(self, x: Tensor, weights: Weights, groups: Groups, *, clear: bool = True) -> Tensor:
        """See `Products`."""
        return self._rows(x, packed(weights).transpose(-2, -1), groups, clear)

    def input_grad(self, grad: Tensor, weights: Weights, groups: Groups, *, clear: bool = True) -> Tensor:
        """See `Products`."""
        return self._rows(grad, packed(weights), groups, clear)

    def weight_grad(self, grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
        """See `Products`."""
        if _nothing(groups):
            return grad.new_zeros(groups.ends.shape[0], grad.shape[1], x.shape[1])
        total = _grouped_product()(grad.t(), x, offs=groups.ends)
        # A group without rows is a product over an empty axis, which device kernels may leave unwritten.
        if groups.on_host is None:
            clearing.clear_empty(total, groups.ends)
        else:
            for matrix, (first, end) in zip(total, groups.bounds(), strict=True):
                if first == end:
                    matrix.zero_()
        return total

    @staticmethod
    def _rows(rows: Tensor, matrices: Tensor, groups: Groups, clear: bool) -> Tensor:
        if _nothing(groups) or rows.shape[0] == 0:  # grouped kernels refuse an empty product
            return rows.new_zeros(rows.shape[0], matrices.shape[2])
        out = _grouped_product()(rows, matrices, offs=groups.ends)
        if groups.on_host is None:
            if clear:
                clearing.clear_tail(out, groups.ends)
        elif groups.on_host[-1] < rows.shape[0]:
            out[groups.on_host[-1] :].zero_()
        return out


def _nothing(groups: Groups) -> bool:
    return groups.on_host is not None and groups.on_host[-1] == 0


@functools.cache
def _grouped_product() -> Callable[..., Tensor]:
    product = grouped_product()
    assert product is not None, "used without asking why_not"
    return product


@functools.cache
def why_not(products: Products, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a library can not be used: tries the products on a tiny example and compares them with plain ones."""
    generator = torch.Generator().manual_seed(0)
    x, grad, weight = (
        torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((32, 32), (32, 64), (3, 64, 32))
    )
    bounds = (16, 16, 32)
    groups = Groups(torch.tensor(bounds, dtype=torch.int32, device=device), bounds)
    plain = LoopProducts()
    try:
        pairs = [
            (products.forward(x, weight, groups), plain.forward(x, weight, groups)),
            (products.input_grad(grad, weight, groups), plain.input_grad(grad, weight, groups)),
            (products.weight_grad(grad, x, groups), plain.weight_grad(grad, x, groups)),
        ]
        for got, want in pairs:
            torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-1)
    except Exception as error:  # whatever a library that does not fit raises
        detail = (str(error).splitlines() or [type(error).__name__])[0]
        return f"{products.name}'s grouped product does not work for {dtype} on {device.type}: {detail}"
    return None


@contextlib.contextmanager
def leaving_sms(num_sms: int) -> Iterator[None]:
    """Products in the block leave this many multiprocessors to others, where torch knows how; 0 changes nothing.

    A product's kernel takes every multiprocessor and divides its work among them evenly; where a communication kernel
    holds some, it would wait for those to become free.
    """
    setter: Any = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if num_sms == 0 or setter is None:
        yield
        return
    before = torch._C._get_sm_carveout_experimental()
    setter(num_sms)
    try:
        yield
    finally:
        setter(before)


def span(name: str, rows: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A span of a trace around products of some rows."""
    return trace.span(name, "moe", num_rows=rows.shape[0])
