"""Checks of the arguments of the low-latency calls; each raises a UsageError, none communicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from comm_core import layout
from comm_core.legacy.blocks import BlockHandle
from comm_core.runtime import env
from comm_core.runtime.errors import UsageError
from comm_core.validate import Limits, routing, same_shape, tensor

ROWS = (torch.bfloat16, torch.float16, torch.float32)


def status(value: Any, num_ranks: int) -> None:
    """int32 [num_ranks]."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.int32 or tuple(value.shape) != (num_ranks,):
        raise UsageError("mask_status", allowed=f"an int32 tensor of shape [{num_ranks}]", fix="pass one to be filled")


def _one_ending(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise UsageError("async_finish and return_recv_hook", allowed="one of them", fix="wait in one way")


def _cost(value: Any, num_ranks: int) -> None:
    """None, or int64 [num_ranks] of the CPU: a clock of the host can not time a device."""
    if value is not None:
        host = torch.device("cpu")
        same_shape(
            "cost stats",
            tensor("cost stats", value, dims=1, dtypes=(torch.int64,), device=host),
            (num_ranks,),
            "one a rank",
        )


@dataclass(frozen=True, slots=True)
class DispatchArgs:
    """Arguments of low_latency_dispatch."""

    x: Any
    topk_idx: Any
    bound: Any
    num_experts: Any
    stats: Any
    cost: Any
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool
    async_finish: bool
    return_recv_hook: bool

    def check(self, limits: Limits, *, values: bool = True) -> None:
        """Everything; with `values` those of topk_idx included, which waits for them."""
        _one_ending(self.async_finish, self.return_recv_hook)
        if self.bound == 0:
            raise UsageError(
                "num_max_dispatch_tokens_per_rank=0", allowed="at least 1", fix="pass the bound of tokens a rank"
            )
        routing(self.topk_idx, self.num_experts, 1, self.bound, limits)
        x = tensor("x", self.x, dims=2, dtypes=ROWS, device=limits.device)
        if x.shape[0] != self.topk_idx.shape[0] or x.shape[1] < 1:
            raise UsageError(
                f"x of shape {list(x.shape)}",
                allowed=f"[{self.topk_idx.shape[0]}, hidden], one row a token of topk_idx",
                fix="pass matching tensors",
            )
        if self.use_ue8m0 and not (self.use_fp8 and self.round_scale):
            raise UsageError(
                f"use_ue8m0 with use_fp8={self.use_fp8}, round_scale={self.round_scale}",
                allowed="all three",
                fix="an exponent can hold powers of two alone: pass use_fp8=True, round_scale=True",
            )
        if self.round_scale and not self.use_fp8:
            raise UsageError("round_scale without use_fp8", allowed="both", fix="bf16 rows have no scales")
        if self.stats is not None:
            stats = tensor("stats", self.stats, dims=1, dtypes=(torch.int32,), device=limits.device)
            same_shape(
                "cumulative_local_expert_recv_stats",
                stats,
                (self.num_experts // limits.num_ranks,),
                "one a local expert",
            )
        _cost(self.cost, limits.num_ranks)
        problem = layout.check_ids(self.topk_idx, self.num_experts) if values else None
        if problem is not None:
            raise problem


@dataclass(frozen=True, slots=True)
class CombineArgs:
    """Arguments of low_latency_combine."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    handle: Any
    use_logfmt: bool
    zero_copy: bool
    async_finish: bool
    return_recv_hook: bool
    out: Any
    cost: Any

    def check(self, device: torch.device, owner: object, *, values: bool = True) -> None:
        """Everything; with `values` those of topk_idx included, which waits for them."""
        _one_ending(self.async_finish, self.return_recv_hook)
        handle = self.handle
        if not isinstance(handle, BlockHandle) or handle.owner is not owner:
            raise UsageError(
                f"handle is a {type(handle).__name__}",
                allowed="a handle that low_latency_dispatch of this buffer returned",
                fix="pass it on as it is",
            )
        x = tensor("x", self.x, dims=3, dtypes=ROWS, device=device)
        same_shape("x", x, (*handle[0].shape, handle[3]), "the blocks of the dispatch")
        if self.zero_copy and (handle.staged is None or self.use_logfmt or x.dtype != handle.staged.dtype):
            raise UsageError(
                f"zero_copy with x of {x.dtype}, use_logfmt={self.use_logfmt}",
                allowed="bf16 rows in the tensor of get_next_low_latency_combine_buffer(handle), without use_logfmt",
                fix="ask for that tensor and fill it",
            )
        ids = tensor("topk_idx", self.topk_idx, dims=2, dtypes=env.topk_idx_dtypes(), device=device)
        same_shape("topk_idx", ids, tuple(handle.topk_idx.shape), "the ids of the dispatch")
        if values and bool(((ids != handle.topk_idx) & (ids >= 0)).any()):
            raise UsageError("topk_idx of another routing", allowed="that of the dispatch", fix="pass it again")
        weights = tensor("topk_weights", self.topk_weights, dims=2, dtypes=(torch.float32,), device=device)
        same_shape("topk_weights", weights, tuple(ids.shape), "one weight a lane")
        if self.out is not None:
            out = tensor("out", self.out, dims=2, dtypes=(x.dtype,), device=device)
            same_shape("out", out, (ids.shape[0], handle[3]), "one row a token")
        _cost(self.cost, handle[1].shape[1])
