"""Checks of arguments: each says what was given, what is allowed and what to do. None of them communicates.

`DispatchArgs` and `CombineArgs` hold the arguments of one call under the names of the interface, so that a call is
checked as a whole and then carried out from the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from comm_core import fp8, sizes
from comm_core.event import EventHandle, EventOverlap, check_events
from comm_core.handle import EPHandle
from comm_core.runtime import env
from comm_core.runtime.errors import UsageError

WEIGHT_DTYPES = (torch.float32, torch.float64)
MAX_TOPK = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """What a buffer accepts.

    Attributes:
        device: where tensors must live.
        num_ranks: size of the group.
        buffer_id: number of the buffer in its handles.
        num_max_tokens_per_rank: bound where a call gives none; 0 for none.
        dtypes: element types of rows.
        hidden_multiple: hidden must be a multiple of it.
        worst_case_outputs: do_cpu_sync=False is possible.
        fp8: x may be a pair of FP8 data and scales.
        num_bytes: size of the buffer; None for no bound.
        sizes: (hidden, num_topk) the buffer is planned for, 0 for no bound.
        multiple_reduction: the buffer's allow_multiple_reduction.
    """

    device: torch.device
    num_ranks: int
    buffer_id: int
    num_max_tokens_per_rank: int
    dtypes: tuple[torch.dtype, ...]
    hidden_multiple: int
    worst_case_outputs: bool
    fp8: bool = False
    num_bytes: int | None = None
    sizes: tuple[int, int] = (0, 0)
    multiple_reduction: bool = True

    def room(self, num_tokens: int, hidden: int, num_topk: int, row_bytes: int, num_scales: int = 0) -> None:
        """Raises where a call is larger than the buffer.

        Args:
            num_tokens: bound of tokens a rank, or this rank's where there is none.
            hidden: of the call.
            num_topk: of the call.
            row_bytes: bytes of one value of x.
            num_scales: columns of scales.
        """
        for name, value, most in (("hidden", hidden, self.sizes[0]), ("num_topk", num_topk, self.sizes[1])):
            if most and value > most:
                raise UsageError(
                    f"{name}={value}",
                    allowed=f"at most {most}, as the buffer was built",
                    fix=f"build it with {name}={value}",
                )
        if self.num_bytes is None:
            return
        sent = sizes.dispatch_bytes(
            num_tokens, hidden, num_topk, self.num_ranks, element_size=row_bytes, num_scales=num_scales
        )
        back = sizes.combine_bytes(
            num_tokens,
            hidden,
            num_topk,
            self.num_ranks,
            element_size=max(2, row_bytes),
            multiple=self.multiple_reduction,
        )
        if max(sent, back) > self.num_bytes:
            raise UsageError(
                f"{num_tokens} tokens a rank of hidden {hidden} and top-{num_topk}, which need {max(sent, back)} bytes",
                allowed=f"{self.num_bytes} bytes, as the buffer was built",
                fix="build it with num_bytes=ElasticBuffer.get_buffer_size_hint(...) for these sizes",
            )


def problem_of(check: Callable[[], object]) -> UsageError | None:
    """The mistake a check finds, as a value: the other ranks must hear of it before it is raised."""
    try:
        check()
    except UsageError as problem:
        return problem
    return None


def member_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default group for None; this process must be in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError("no process group", allowed="torch.distributed initialised", fix="call init_process_group")
    chosen: Any = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup):
        raise UsageError(
            f"group {chosen!r}", allowed="a group this process is in", fix="build the buffer on the members alone"
        )
    return chosen


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """An int not below `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name}={value!r}", allowed=f"an int of at least {least}", fix=f"pass {name} as such")
    return value


def unsupported(given: str, allowed: str) -> UsageError:
    """An option that the chosen backend does not have."""
    return UsageError(given, allowed=allowed, fix="leave the option out or use a backend that has it")


def tensor(name: str, value: Any, *, dims: int, dtypes: Sequence[torch.dtype], device: torch.device) -> torch.Tensor:
    """A contiguous tensor with the wanted number of dimensions, dtype and device."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name} is a {type(value).__name__}", allowed="a tensor", fix=f"pass {name} as a tensor")
    if value.dim() != dims:
        raise UsageError(
            f"{name} of shape {list(value.shape)}", allowed=f"{dims} dimensions", fix="reshape it before the call"
        )
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype) for dtype in dtypes)
        raise UsageError(f"{name} of {value.dtype}", allowed=names, fix=f"convert {name} before the call")
    if value.device != device:
        raise UsageError(f"{name} on {value.device}", allowed=str(device), fix="move it, or build the buffer there")
    if not value.is_contiguous():
        raise UsageError(
            f"{name} of shape {list(value.shape)} and strides {list(value.stride())}",
            allowed="contiguous memory",
            fix=f"pass {name}.contiguous()",
        )
    return value


def same_shape(name: str, value: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """A tensor of exactly `shape`."""
    if tuple(value.shape) != shape:
        raise UsageError(
            f"{name} of shape {list(value.shape)}", allowed=f"{list(shape)}, {meaning}", fix="pass the matching tensor"
        )


def rows(value: Any, num_rows: int, meaning: str, limits: Limits, *, may_be_pair: bool = False) -> torch.Tensor:
    """Data to move: [num_rows, hidden] in a dtype of the backend; where `may_be_pair`, or FP8 data with scales."""
    dtypes = limits.dtypes
    if isinstance(value, tuple):
        if not (may_be_pair and limits.fp8):
            names = ", ".join(str(dtype) for dtype in limits.dtypes)
            raise unsupported("x as a pair (FP8 data and scales)", f"one tensor of {names}")
        if len(value) != 2:
            raise UsageError(f"x with {len(value)} parts", allowed="(data, scales)", fix="pass a pair")
        _scales(value[1], num_rows, limits.device)
        value, dtypes = value[0], fp8.DTYPES
    value = tensor("x", value, dims=2, dtypes=dtypes, device=limits.device)
    if value.shape[0] != num_rows:
        raise UsageError(
            f"x with {value.shape[0]} rows", allowed=f"{num_rows} rows, {meaning}", fix="pass matching tensors"
        )
    if value.shape[1] < 1 or value.shape[1] % limits.hidden_multiple:
        raise UsageError(
            f"hidden = {value.shape[1]}",
            allowed=f"a positive multiple of {limits.hidden_multiple}",
            fix="pad the hidden dimension",
        )
    return value


def _scales(value: Any, num_rows: int, device: torch.device) -> None:
    """Scales of FP8 rows: any strides, any number of columns (one a 128 columns of data in the casts here)."""
    if not isinstance(value, torch.Tensor) or value.dtype not in fp8.SCALE_DTYPES or value.dim() != 2:
        what = f"{value.dtype} and shape {list(value.shape)}" if isinstance(value, torch.Tensor) else str(type(value))
        raise UsageError(f"scales of {what}", allowed="a matrix of fp32 or int32 (packed)", fix="see comm_core.fp8")
    if value.shape[0] != num_rows or value.shape[1] < 1 or value.device != device:
        raise UsageError(
            f"scales of shape {list(value.shape)} on {value.device}",
            allowed=f"{num_rows} rows, one a token, at least one column, on {device}",
            fix="pass the scales of this data",
        )


def weights(value: Any, shape: tuple[int, ...], meaning: str, device: torch.device) -> None:
    """Optional routing weights of exactly `shape`."""
    if value is not None:
        same_shape(
            "topk_weights",
            tensor("topk_weights", value, dims=len(shape), dtypes=WEIGHT_DTYPES, device=device),
            shape,
            meaning,
        )


def routing(
    topk_idx: Any, num_experts: Any, expert_alignment: Any, num_max_tokens_per_rank: Any, limits: Limits
) -> None:
    """Routing of this rank's tokens and what gives it a meaning; ids are checked later, when they are there."""
    if num_experts is None:
        raise UsageError("num_experts missing", allowed="the global number of experts", fix="pass num_experts")
    whole("num_experts", num_experts)
    whole("expert_alignment", expert_alignment)
    bound = whole("num_max_tokens_per_rank", num_max_tokens_per_rank, least=0)
    if num_experts % limits.num_ranks:
        raise UsageError(
            f"num_experts={num_experts} on {limits.num_ranks} ranks",
            allowed=f"a multiple of {limits.num_ranks}",
            fix="choose an expert-parallel size that divides the experts",
        )
    topk_idx = tensor("topk_idx", topk_idx, dims=2, dtypes=env.topk_idx_dtypes(), device=limits.device)
    if not 1 <= topk_idx.shape[1] <= MAX_TOPK:
        raise UsageError(f"num_topk = {topk_idx.shape[1]}", allowed=f"1 to {MAX_TOPK}", fix="choose fewer experts")
    if bound and topk_idx.shape[0] > bound:
        raise UsageError(
            f"{topk_idx.shape[0]} tokens with num_max_tokens_per_rank={bound}",
            allowed=f"at most {bound} tokens a rank",
            fix="raise num_max_tokens_per_rank on every rank",
        )


def own_handle(handle: Any, limits: Limits) -> EPHandle:
    """A handle this buffer made."""
    if not isinstance(handle, EPHandle):
        raise UsageError(f"handle is a {type(handle).__name__}", allowed="an EPHandle", fix="pass dispatch's handle")
    if handle.buffer_id != limits.buffer_id:
        raise UsageError("handle of another buffer", allowed="a handle this buffer made", fix="use the one it is from")
    return handle


@dataclass(frozen=True, slots=True)
class DispatchArgs:
    """Arguments of `ElasticBuffer.dispatch`, by its names (`do_zero_padding` decides over worst-case rows alone)."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    cumulative_local_expert_recv_stats: Any
    num_experts: Any
    num_max_tokens_per_rank: Any
    expert_alignment: Any
    num_sms: Any
    num_qps: Any
    previous_event: EventHandle | EventOverlap | None
    previous_event_before_epilogue: EventHandle | EventOverlap | None
    allocate_on_comm_stream: bool
    handle: Any
    do_handle_copy: bool
    do_cpu_sync: bool | None
    do_expand: bool
    do_zero_padding: bool
    use_tma_aligned_col_major_sf: bool

    @property
    def bound(self) -> Any:
        """The bound given, else None."""
        return self.num_max_tokens_per_rank

    def check(self, limits: Limits) -> None:
        """Everything but the values of topk_idx."""
        self._check_options(limits)
        if self.handle is not None:
            self._check_handle(own_handle(self.handle, limits))
            topk_idx = self.handle.topk_idx
        else:
            bound = limits.num_max_tokens_per_rank if self.bound is None else self.bound
            alignment = 1 if self.expert_alignment is None else self.expert_alignment
            routing(self.topk_idx, self.num_experts, alignment, bound, limits)
            topk_idx = self.topk_idx
        x = rows(self.x, topk_idx.shape[0], "one a token of topk_idx", limits, may_be_pair=True)
        weights(self.topk_weights, tuple(topk_idx.shape), "one weight a lane", limits.device)
        bound = self.layout_settings(limits)["num_max_tokens_per_rank"] if self.handle is None else 0
        num_scales = self.x[1].shape[1] if isinstance(self.x, tuple) else 0
        limits.room(max(bound, x.shape[0]), x.shape[1], topk_idx.shape[1], x.element_size(), num_scales)

    def layout_settings(self, limits: Limits) -> dict[str, int]:
        """Settings of the count exchange of a call without a handle."""
        return {
            "num_experts": self.num_experts,
            "expert_alignment": 1 if self.expert_alignment is None else self.expert_alignment,
            "do_expand": int(self.do_expand),
            "num_max_tokens_per_rank": limits.num_max_tokens_per_rank if self.bound is None else self.bound,
        }

    def _check_options(self, limits: Limits) -> None:
        check_events(self.previous_event, self.previous_event_before_epilogue)
        whole("num_sms", self.num_sms, least=0)
        whole("num_qps", self.num_qps, least=0)
        for name, value in (("do_expand", self.do_expand), ("do_zero_padding", self.do_zero_padding)):
            if not isinstance(value, int) or value not in (0, 1):
                raise UsageError(f"{name}={value!r}", allowed="True or False", fix="pass one of them")
        if self.cumulative_local_expert_recv_stats is not None:
            self._check_stats(limits)
        if self.do_cpu_sync is False and self.handle is None:
            if not limits.worst_case_outputs:
                raise unsupported("do_cpu_sync=False", "None or True: shapes are exact")
            if not (limits.num_max_tokens_per_rank if self.bound is None else self.bound):
                raise UsageError(
                    "do_cpu_sync=False without num_max_tokens_per_rank",
                    allowed="a bound of tokens a rank, from which the shapes follow",
                    fix="pass num_max_tokens_per_rank to the call or the buffer",
                )
        if self.do_cpu_sync is True and self.handle is not None:
            raise UsageError("do_cpu_sync=True with a handle", allowed="None or False", fix="the counts are known")
        if self.do_zero_padding and not (self.do_expand or getattr(self.handle, "do_expand", False)):
            raise UsageError("do_zero_padding without do_expand", allowed="both", fix="plain rows have no gaps to fill")

    def _check_stats(self, limits: Limits) -> None:
        if self.handle is not None:
            raise UsageError(
                "cumulative_local_expert_recv_stats with a handle",
                allowed="counting a routing decision once",
                fix="pass it to the call without a handle",
            )
        whole("num_experts", self.num_experts)
        stats = tensor(
            "cumulative_local_expert_recv_stats", self.cumulative_local_expert_recv_stats, dims=1,
            dtypes=(torch.int32,), device=limits.device,
        )  # fmt: skip
        shape = (self.num_experts // limits.num_ranks,)
        same_shape("cumulative_local_expert_recv_stats", stats, shape, "one count a local expert")

    def _check_handle(self, handle: EPHandle) -> None:
        """Beside a handle may stand nothing, or the values it was made with."""
        if self.topk_idx is not None:
            raise UsageError("topk_idx and a handle", allowed="one of them", fix="leave topk_idx out")
        pairs = [
            ("num_experts", self.num_experts, handle.num_experts),
            ("expert_alignment", self.expert_alignment, handle.expert_alignment),
            ("do_expand", self.do_expand or None, handle.do_expand),
            ("num_max_tokens_per_rank", self.bound, self.bound and handle.num_max_tokens_per_rank),
        ]
        for name, value, own in pairs:
            if value is not None and value != own:
                raise UsageError(
                    f"{name}={value} with a handle made with {own}", allowed=f"{own}", fix=f"leave {name} out"
                )


@dataclass(frozen=True, slots=True)
class CombineArgs:
    """Arguments of `ElasticBuffer.combine`, by its names."""

    x: Any
    handle: Any
    topk_weights: Any
    bias: Any
    num_sms: Any
    num_qps: Any
    previous_event: EventHandle | EventOverlap | None
    previous_event_before_epilogue: EventHandle | EventOverlap | None
    allocate_on_comm_stream: bool

    @property
    def biases(self) -> tuple[Any, ...]:
        """None, one tensor or a tuple of them, as a tuple."""
        return () if self.bias is None else self.bias if isinstance(self.bias, tuple) else (self.bias,)

    def needed(self, given: Any) -> Any:
        """The rows of a tensor that a combine of expanded rows reads: they are found by the handle, more may follow."""
        expanded = isinstance(given, torch.Tensor) and given.dim() and self.handle.do_expand
        return given[: self.handle.num_recv_rows] if expanded else given

    def check(self, limits: Limits) -> None:
        """Everything; waits for the counts of the handle."""
        check_events(self.previous_event, self.previous_event_before_epilogue)
        whole("num_sms", self.num_sms, least=0)
        whole("num_qps", self.num_qps, least=0)
        handle = own_handle(self.handle, limits)
        x = rows(self.needed(self.x), handle.num_recv_rows, "as dispatch returned", limits)
        limits.room(handle.num_tokens, x.shape[1], handle.num_topk, x.element_size())
        if handle.do_expand:
            given = self.needed(self.topk_weights)
            weights(given, (handle.num_expanded_tokens,), "one weight a row", limits.device)
        else:
            shape = (handle.num_recv_tokens, handle.num_topk)
            weights(self.topk_weights, shape, "one weight a lane of each row", limits.device)
        if len(self.biases) > 2:
            raise UsageError(
                f"{len(self.biases)} biases", allowed="none, one or two", fix="add them up before the call"
            )
        for item in self.biases:
            tensor("bias", item, dims=2, dtypes=(self.x.dtype,), device=limits.device)
            same_shape("bias", item, (handle.num_tokens, self.x.shape[1]), "one row a token")
