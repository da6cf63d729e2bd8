"""Checks of arguments: each says what was given, what is allowed and what to do. None of them communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from comm_core.backends.base import Capabilities
from comm_core.handle import EPHandle
from comm_core.runtime.errors import UsageError

TOPK_IDX_DTYPE = torch.int64
WEIGHT_DTYPES = (torch.float32, torch.float64)
MAX_TOPK = 32


def positive(name: str, value: Any, *, least: int = 1) -> int:
    """An int not below `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name}={value!r}", allowed=f"an int of at least {least}", fix=f"pass {name} as such")
    return value


def unsupported(given: str, allowed: str) -> UsageError:
    """An option that the chosen backend does not have."""
    return UsageError(given, allowed=allowed, fix="leave the option out or use a backend that has it")


def tensor(name: str, value: Any, *, dims: int, dtypes: Sequence[torch.dtype], device: torch.device) -> torch.Tensor:
    """A contiguous tensor with the wanted number of dimensions, dtype and kind of device."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name} is a {type(value).__name__}", allowed="a tensor", fix=f"pass {name} as a tensor")
    if value.dim() != dims:
        raise UsageError(
            f"{name} of shape {list(value.shape)}", allowed=f"{dims} dimensions", fix="reshape it before the call"
        )
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype) for dtype in dtypes)
        raise UsageError(f"{name} of {value.dtype}", allowed=names, fix=f"convert {name} before the call")
    if value.device.type != device.type:
        raise UsageError(f"{name} on {value.device}", allowed=str(device), fix="move it, or build the buffer there")
    if not value.is_contiguous():
        raise UsageError(
            f"{name} of shape {list(value.shape)} and strides {list(value.stride())}",
            allowed="contiguous memory",
            fix=f"pass {name}.contiguous()",
        )
    return value


def rows(name: str, value: Any, capabilities: Capabilities, device: torch.device) -> torch.Tensor:
    """Data to move: [any, hidden] in a dtype of the backend."""
    if isinstance(value, tuple):
        raise unsupported(f"{name} as a pair (FP8 data and scales)", "one tensor of " + _names(capabilities.dtypes))
    value = tensor(name, value, dims=2, dtypes=capabilities.dtypes, device=device)
    if value.shape[1] < 1 or value.shape[1] % capabilities.hidden_multiple:
        raise UsageError(
            f"hidden = {value.shape[1]}",
            allowed=f"a positive multiple of {capabilities.hidden_multiple}",
            fix="pad the hidden dimension",
        )
    return value


def topk(topk_idx: Any, num_experts: Any, num_ranks: int, bound: int, device: torch.device) -> torch.Tensor:
    """Routing of this rank's tokens, and the number of experts that gives it a meaning."""
    if num_experts is None:
        raise UsageError("num_experts missing", allowed="the global number of experts", fix="pass num_experts")
    positive("num_experts", num_experts)
    if num_experts % num_ranks:
        raise UsageError(
            f"num_experts={num_experts} on {num_ranks} ranks",
            allowed=f"a multiple of {num_ranks}",
            fix="choose an expert-parallel size that divides the experts",
        )
    topk_idx = tensor("topk_idx", topk_idx, dims=2, dtypes=(TOPK_IDX_DTYPE,), device=device)
    if not 1 <= topk_idx.shape[1] <= MAX_TOPK:
        raise UsageError(f"num_topk = {topk_idx.shape[1]}", allowed=f"1 to {MAX_TOPK}", fix="choose fewer experts")
    if bound and topk_idx.shape[0] > bound:
        raise UsageError(
            f"{topk_idx.shape[0]} tokens with num_max_tokens_per_rank={bound}",
            allowed=f"at most {bound} tokens a rank",
            fix="raise num_max_tokens_per_rank on every rank",
        )
    return topk_idx


def weights(value: Any, shape: tuple[int, ...], meaning: str, device: torch.device) -> torch.Tensor | None:
    """Optional routing weights of exactly `shape`."""
    if value is None:
        return None
    value = tensor("topk_weights", value, dims=len(shape), dtypes=WEIGHT_DTYPES, device=device)
    same_shape("topk_weights", value, shape, meaning)
    return value


def same_shape(name: str, value: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """A tensor of exactly `shape`."""
    if tuple(value.shape) != shape:
        raise UsageError(
            f"{name} of shape {list(value.shape)}", allowed=f"{list(shape)}, {meaning}", fix="pass the matching tensor"
        )


def num_tokens(x: torch.Tensor, expected: int, meaning: str) -> None:
    """As many rows as the routing has tokens."""
    if x.shape[0] != expected:
        raise UsageError(f"x with {x.shape[0]} rows", allowed=f"{expected} rows, {meaning}", fix="pass matching tensors")


def biases(value: Any, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """None, one tensor or two, shaped and typed like the combined rows."""
    given = () if value is None else value if isinstance(value, tuple) else (value,)
    if len(given) > 2:
        raise UsageError(f"{len(given)} biases", allowed="none, one or two", fix="add them up before the call")
    for item in given:
        tensor("bias", item, dims=2, dtypes=(dtype,), device=device)
        same_shape("bias", item, shape, "one row a token")
    return given


def own_handle(handle: Any, buffer_id: int) -> EPHandle:
    """A handle this buffer made."""
    if not isinstance(handle, EPHandle):
        raise UsageError(f"handle is a {type(handle).__name__}", allowed="an EPHandle", fix="pass dispatch's handle")
    if handle.buffer_id != buffer_id:
        raise UsageError("handle of another buffer", allowed="a handle this buffer made", fix="use the buffer it is from")
    return handle


def hints(**values: int) -> None:
    """Tuning hints: ints, 0 for automatic."""
    for name, value in values.items():
        positive(name, value, least=0)


def dispatch_options(
    capabilities: Capabilities,
    *,
    stats: bool,
    col_major_sf: bool,
    do_cpu_sync: bool | None,
    cached: bool,
    padding_without_expand: bool,
) -> None:
    """Options of dispatch that the backend may not have."""
    if stats:
        raise unsupported("cumulative_local_expert_recv_stats", "None (read num_unaligned_recv_tokens_per_expert)")
    if col_major_sf:
        raise unsupported("use_tma_aligned_col_major_sf=True", "False, as there are no scales")
    if do_cpu_sync is False and not cached and not capabilities.worst_case_outputs:
        raise unsupported("do_cpu_sync=False", "None or True: shapes are exact")
    if do_cpu_sync is True and cached:
        raise UsageError(
            "do_cpu_sync=True with a handle", allowed="None or False: the counts are known", fix="leave it out"
        )
    if padding_without_expand:
        raise UsageError("do_zero_padding without do_expand", allowed="both", fix="rows without expand have no gaps")


def cached(
    handle: EPHandle, topk_idx: Any, num_experts: Any, bound: Any, expert_alignment: Any, do_expand: bool
) -> None:
    """What may stand beside a handle: nothing, or the values it was made with."""
    if topk_idx is not None:
        raise UsageError("topk_idx and a handle", allowed="one of them", fix="leave topk_idx out: the handle has it")
    pairs: list[tuple[str, Any, Any]] = [
        ("num_experts", num_experts, handle.num_experts),
        ("expert_alignment", expert_alignment, handle.expert_alignment),
        ("do_expand", do_expand or None, handle.do_expand),
    ]
    if bound is not None:
        pairs.append(("num_max_tokens_per_rank", bound, handle.num_max_tokens_per_rank))
    for name, value, own in pairs:
        if value is not None and value != own:
            raise UsageError(f"{name}={value} with a handle made with {own}", allowed=f"{own}", fix=f"leave {name} out")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
