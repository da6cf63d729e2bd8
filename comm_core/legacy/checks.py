"""Checks of V1's arguments; each raises a UsageError, none communicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from comm_core import layout
from comm_core.elastic import Event
from comm_core.event import check_events
from comm_core.legacy import routing
from comm_core.legacy.config import Config
from comm_core.legacy.transport import FLOATS
from comm_core.runtime import env
from comm_core.runtime.errors import CommError, UsageError
from comm_core.validate import MAX_TOPK, same_shape, tensor, whole

SCALES = (torch.float32, torch.int32)
_BOTH_OR_NONE = "topk_idx and topk_weights, or neither"


def stream_options(previous_event: Event | None, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    """V1 allocates on the comm stream only where both sides of it are events."""
    check_events(previous_event)
    if allocate_on_comm_stream and not (previous_event is not None and async_finish):
        raise UsageError(
            f"allocate_on_comm_stream=True, previous_event={previous_event}, async_finish={async_finish}",
            allowed="all three",
            fix="pass previous_event=Buffer.capture() and async_finish=True",
        )


def config_of(config: Any) -> None:
    """None or a Config."""
    if config is not None and not isinstance(config, Config):
        raise UsageError(
            f"config is a {type(config).__name__}", allowed="None or a Config", fix="use get_dispatch_config"
        )


def matrix(name: str, value: Any, device: torch.device, dtypes: Any = None) -> torch.Tensor:
    """A 2-D tensor on `device`, of `dtypes` where given."""
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.device != device:
        given = f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else value
        raise UsageError(f"{name}: {given}", allowed=f"a tensor with 2 dimensions on {device}", fix="convert it")
    if dtypes is not None and value.dtype not in dtypes:
        allowed = ", ".join(map(str, dtypes))
        raise UsageError(f"{name} of {value.dtype}", allowed=allowed, fix="convert it before the call")
    return value


# What `shape_of` returns, in words.
_SHAPE = ("the width of x", "the dtype of x", "the columns of scales", "the lanes of topk_idx")
_DTYPES = tuple(sorted({item for item in vars(torch).values() if isinstance(item, torch.dtype)}, key=str))


def shape_of(args: DispatchArgs) -> list[int]:
    """What must be the same on all ranks and shows in no count."""
    data, scales = args.x if isinstance(args.x, tuple) else (args.x, None)
    columns, lanes = (-1 if item is None else item.shape[1] for item in (scales, args.topk_idx))
    return [data.shape[1], _DTYPES.index(data.dtype), columns, lanes]


def same_on_all_ranks(shapes: list[list[int]]) -> None:
    """Compares the shapes of all ranks; each rank has all of them, so each raises."""
    for index, name in enumerate(_SHAPE):
        values = [shape[index] for shape in shapes]
        if len(set(values)) > 1:
            told = [str(_DTYPES[value]) if "dtype" in name else str(value) for value in values]
            shown = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(told))
            raise CommError(f"dispatch: the ranks disagree on {name} (-1: none): {shown}; pass the same on every rank")


def handle_of_v1(handle: Any, buffer_id: int) -> routing.BufferHandle:
    """A handle that dispatch of this buffer returned."""
    if not isinstance(handle, routing.BufferHandle):
        raise UsageError(
            f"handle is a {type(handle).__name__}",
            allowed="the object that dispatch returned",
            fix="pass it on as it is; a tuple rebuilt from its fields has lost its place",
        )
    if handle.ep.buffer_id != buffer_id:
        raise UsageError("handle of another buffer", allowed="a handle of this one", fix="use the one it is from")
    return handle


@dataclass(frozen=True, slots=True)
class DispatchArgs:
    """Arguments of `Buffer.dispatch`, by its names."""

    x: Any
    handle: Any
    num_tokens_per_rank: Any
    is_token_in_rank: Any
    num_tokens_per_expert: Any
    topk_idx: Any
    topk_weights: Any
    expert_alignment: Any
    num_worst_tokens: Any
    config: Any
    previous_event: Event | None
    async_finish: bool
    allocate_on_comm_stream: bool

    @property
    def num_experts(self) -> int:
        """Global number of experts."""
        return int(self.num_tokens_per_expert.shape[0])

    def check(self, device: torch.device, num_ranks: int, buffer_id: int) -> None:
        """Everything but values of tensors, which may not be there yet."""
        stream_options(self.previous_event, self.async_finish, self.allocate_on_comm_stream)
        config_of(self.config)
        if self.handle is not None:
            known = handle_of_v1(self.handle, buffer_id)
            beside = [*self._counts().values(), self.topk_idx, self.topk_weights, self.num_worst_tokens or None]
            if any(value is not None for value in beside):
                raise UsageError(
                    "a handle and a routing decision", allowed="one of them", fix="leave all but x and options out"
                )
            self._check_rows(device, known.ep.num_tokens)
            return
        missing = [name for name, value in self._counts().items() if value is None]
        if missing:
            raise UsageError(f"no {', '.join(missing)}", allowed="a handle or these", fix="call get_dispatch_layout")
        inside = tensor("is_token_in_rank", self.is_token_in_rank, dims=2, dtypes=(torch.bool,), device=device)
        same_shape("is_token_in_rank", inside, (inside.shape[0], num_ranks), "one column a rank")
        self._check_rows(device, inside.shape[0])
        for name in ("num_tokens_per_rank", "num_tokens_per_expert"):
            tensor(name, getattr(self, name), dims=1, dtypes=(torch.int32,), device=device)
        same_shape("num_tokens_per_rank", self.num_tokens_per_rank, (num_ranks,), "one a rank")
        if self.num_experts < 1 or self.num_experts % num_ranks:
            raise UsageError(
                f"num_tokens_per_expert with {self.num_experts} entries on {num_ranks} ranks",
                allowed=f"a multiple of {num_ranks}",
                fix="choose an expert-parallel size that divides the experts",
            )
        whole("expert_alignment", self.expert_alignment)
        whole("num_worst_tokens", self.num_worst_tokens, least=0)
        self._check_lanes(device, inside.shape[0])

    def _counts(self) -> dict[str, Any]:
        names = ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert")
        return {name: getattr(self, name) for name in names}

    def _check_rows(self, device: torch.device, num_tokens: int) -> None:
        parts = self.x if isinstance(self.x, tuple) else (self.x,)
        if len(parts) > 2:
            raise UsageError(f"x of {len(parts)} parts", allowed="rows, or (rows, scales)", fix="pass one of these")
        data = matrix("x", parts[0], device)
        if not data.is_contiguous() or data.shape[1] < 1:
            raise UsageError(
                f"x of shape {list(data.shape)} and strides {list(data.stride())}",
                allowed="contiguous rows of at least one element",
                fix="pass x.contiguous()",
            )
        for name, part in zip(("x", "the scales of x"), parts, strict=False):
            matrix(name, part, device, SCALES if name != "x" else None)
            if part.shape[0] != num_tokens:
                raise UsageError(
                    f"{name} with {part.shape[0]} rows", allowed=f"{num_tokens} rows", fix="pass matching tensors"
                )

    def _check_lanes(self, device: torch.device, num_tokens: int) -> None:
        if (self.topk_idx is None) != (self.topk_weights is None):
            raise UsageError("one of topk_idx and topk_weights", allowed=_BOTH_OR_NONE, fix="pass both")
        if self.topk_idx is None:
            if self.num_worst_tokens:
                raise UsageError(
                    "num_worst_tokens without topk_idx",
                    allowed="both",
                    fix="pass topk_idx: it marks the rows that arrived",
                )
            return
        ids = tensor("topk_idx", self.topk_idx, dims=2, dtypes=env.topk_idx_dtypes(), device=device)
        if not 1 <= ids.shape[1] <= MAX_TOPK or ids.shape[0] != num_tokens:
            raise UsageError(
                f"topk_idx of shape {list(ids.shape)}",
                allowed=f"[{num_tokens}, 1 to {MAX_TOPK}]",
                fix="pass the ids of these tokens",
            )
        weights = tensor("topk_weights", self.topk_weights, dims=2, dtypes=(torch.float32,), device=device)
        same_shape("topk_weights", weights, tuple(ids.shape), "one weight a lane")

    def routing(self, num_ranks: int) -> torch.Tensor:
        """Lanes of the routing decision, after checking its values. Waits for them."""
        inside = self.is_token_in_rank
        pairs = [("num_tokens_per_rank", self.num_tokens_per_rank, inside.sum(0, dtype=torch.int32))]
        if self.topk_idx is not None:
            problem = layout.check_ids(self.topk_idx, self.num_experts)
            if problem is not None:
                raise problem
            counts = routing.layout_of(self.topk_idx, self.num_experts, num_ranks)
            pairs.append(("num_tokens_per_expert", self.num_tokens_per_expert, counts.num_tokens_per_expert))
        for name, given, real in pairs:
            if not torch.equal(given, real):
                raise UsageError(
                    f"{name}={given.tolist()}", allowed=f"{real.tolist()}, by the routing", fix="use one layout"
                )
        return routing.lanes_of(inside, self.num_experts)


@dataclass(frozen=True, slots=True)
class CombineArgs:
    """Arguments of `Buffer.combine`, by its names."""

    x: Any
    handle: Any
    topk_weights: Any
    bias: Any
    config: Any
    previous_event: Event | None
    async_finish: bool
    allocate_on_comm_stream: bool

    @property
    def biases(self) -> tuple[Any, ...]:
        """None, one tensor or several, as a tuple."""
        return () if self.bias is None else self.bias if isinstance(self.bias, tuple) else (self.bias,)

    def check(self, device: torch.device, buffer_id: int) -> None:
        """Everything."""
        stream_options(self.previous_event, self.async_finish, self.allocate_on_comm_stream)
        config_of(self.config)
        handle = handle_of_v1(self.handle, buffer_id)
        x = tensor("x", self.x, dims=2, dtypes=FLOATS, device=device)
        self._check_height("x", x, handle)
        if self.topk_weights is not None:
            weights = tensor("topk_weights", self.topk_weights, dims=2, dtypes=(torch.float32,), device=device)
            self._check_height("topk_weights", weights, handle)
        if len(self.biases) > 2:
            raise UsageError(f"{len(self.biases)} biases", allowed="none, one or two", fix="add them up before")
        for item in self.biases:
            tensor("bias", item, dims=2, dtypes=(x.dtype,), device=device)
            same_shape("bias", item, (handle.ep.num_tokens, x.shape[1]), "one row a token")

    @staticmethod
    def _check_height(name: str, value: torch.Tensor, handle: routing.BufferHandle) -> None:
        if value.shape[0] == handle.num_rows:
            return
        rows = sorted({handle.ep.num_recv_tokens, handle.num_rows})
        if value.shape[0] not in rows:
            allowed = " or ".join(str(count) for count in rows)
            raise UsageError(
                f"{name} with {value.shape[0]} rows", allowed=f"{allowed}, as dispatch returned", fix="pass its rows"
            )
