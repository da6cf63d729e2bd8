"""The low-latency calls on a backend with kernels for them: no host wait, two halves, the same in a captured graph.

Taken where all ranks are there and nothing is asked for that needs the host (wait costs, LogFMT, shrinking). What
differs from the general way: rows of `recv_x` and of the scales behind `recv_count` are not written, as in DeepEP; ids
are checked on the device, so a mistake is raised by the next call; at most two results may wait for their hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from comm_core import fp8, layout
from comm_core.backends.base import BlocksJob
from comm_core.backends.channel import ROW_DTYPES
from comm_core.event import EventHandle
from comm_core.legacy.blocks import BlockHandle
from comm_core.legacy.checks_low_latency import CombineArgs, DispatchArgs
from comm_core.legacy.transport import Transport

Second = Callable[[], EventHandle]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a combine needs of its dispatch, besides what the handle shows.

    Attributes:
        counts: int32 [L].
        positions: int32 [T, K], place of a lane's token among those of its rank for the same expert.
        seq: int32 [2], numbers of the calls, for the device.
    """

    counts: torch.Tensor
    positions: torch.Tensor
    seq: torch.Tensor


def possible(transport: Transport, args: DispatchArgs) -> bool:
    """True where the kernels can carry out a dispatch; the same on all ranks, as all have the same sizes."""
    if args.cost is not None:
        return False
    num_local, height = args.num_experts // transport.num_ranks, transport.num_ranks * args.bound
    return transport.elastic._backend.blocks_fit(args.topk_idx.shape[1], num_local, args.x.shape[1], height)


def dispatch(
    transport: Transport, args: DispatchArgs, handle: BlockHandle
) -> tuple[list[torch.Tensor], torch.Tensor, Second]:
    """Launches the first half: ([rows, scales with FP8], counts, what launches the second half)."""
    x, ids = args.x.detach(), args.topk_idx.detach().to(torch.int64).contiguous()
    num_local, height = handle[0].shape
    hidden = x.shape[1]
    kind = 0 if not args.use_fp8 else 3 if args.use_ue8m0 else 2 if args.round_scale else 1
    outs = [x.new_empty(num_local, height, hidden)]
    if kind:
        words = fp8.num_blocks(hidden, 4 * fp8.BLOCK if kind == 3 else fp8.BLOCK)
        scale = torch.int32 if kind == 3 else torch.float32
        outs = [
            x.new_empty(num_local, height, hidden, dtype=torch.float8_e4m3fn),
            x.new_empty(num_local, words, height, dtype=scale).transpose(1, 2),
        ]
    kept = Kept(*(torch.empty(shape, dtype=torch.int32, device=x.device) for shape in ((num_local,), ids.shape, (2,))))
    handle.fast = kept
    settings = _settings(transport, handle, ids, x) | {"num_scales": kind}
    job = BlocksJob(
        settings=settings,
        x=x,
        topk_idx=ids,
        max_tokens=args.bound,
        height=height,
        out_x=outs[0],
        src_info=handle[0],
        ranges=handle[1],
        counts=kept.counts,
        positions=kept.positions,
        seq=kept.seq,
        fp8=kind,
        out_scales=outs[1] if kind else None,
        stats=args.stats,
        problem=lambda: layout.check_ids(ids, args.num_experts),
        whole=not args.return_recv_hook,
    )
    return outs, kept.counts, transport.elastic._backend.blocks_dispatch(job)


def combine(transport: Transport, args: CombineArgs, out: torch.Tensor) -> Second:
    """Launches the first half of a combine of `handle.fast`."""
    handle: Any = args.handle
    source = handle.staged if args.zero_copy else args.x.detach()
    ids = args.topk_idx.detach().to(torch.int64).contiguous()
    job = BlocksJob(
        settings=_settings(transport, handle, ids, source),
        x=source,
        topk_idx=ids,
        max_tokens=handle[2],
        height=handle[0].shape[1],
        out_x=out,
        src_info=handle[0],
        ranges=handle[1],
        counts=handle.fast.counts,
        positions=handle.fast.positions,
        seq=handle.fast.seq,
        weights=args.topk_weights.detach().contiguous(),
        problem=lambda: layout.check_ids(ids, handle[4]),
        whole=not args.return_recv_hook,
    )
    return transport.elastic._backend.blocks_combine(job)


def _settings(transport: Transport, handle: BlockHandle, ids: torch.Tensor, x: torch.Tensor) -> dict[str, int]:
    return {
        "buffer": transport.elastic._backend.buffer_id,
        "num_experts": handle[4],
        "num_topk": ids.shape[1],
        "num_max_tokens_per_rank": handle[2],
        "hidden": handle[3],
        "dtype": ROW_DTYPES.index(x.dtype),
    }
