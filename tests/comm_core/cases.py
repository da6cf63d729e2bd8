"""Random calls of dispatch and combine, carried out on a buffer and compared with comm_core.reference.

Every rank draws the data of all ranks from one seed, so that each can compute the whole reference by itself and compare
its own share; no test data crosses the group under test.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from comm_core import ElasticBuffer, EPHandle, EventOverlap, fp8, reference
from comm_core.layout import worst_case_rows

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
_TABLE = 1 << 12


@dataclass(frozen=True)
class Case:
    """Settings of one round trip; `tokens` has one number a rank."""

    seed: int
    tokens: tuple[int, ...]
    hidden: int
    num_topk: int
    num_local: int
    dtype: torch.dtype
    do_expand: bool = False
    alignment: int = 1
    masked: float = 0.2
    one_expert: bool = False
    weights: bool = True
    num_bias: int = 0
    asynchronous: bool = False
    prepared: bool = False
    bound: int = 0
    scales: str = ""  # "fp32" or "packed": x is FP8 with scales
    column_major: bool = False
    static: bool = False  # do_cpu_sync=False
    previous: bool = False  # pass events to wait for
    poisoned: bool = True  # memory that nobody writes holds NaN, or the largest number

    @property
    def num_experts(self) -> int:
        """Global number of experts."""
        return self.num_local * len(self.tokens)


@dataclass(frozen=True)
class Data:
    """Inputs of all ranks."""

    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    weights: list[torch.Tensor] | None
    biases: list[list[torch.Tensor]]


def draw(case: Case) -> Data:
    """The inputs of a case, the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    xs, ids, weights = [], [], []
    for num_tokens in case.tokens:
        scores = torch.rand(num_tokens, case.num_experts, generator=generator)
        if case.one_expert and num_tokens:
            scores[:, 0] = 2.0
        chosen = scores.topk(case.num_topk, dim=1).indices
        order = torch.rand(chosen.shape, generator=generator).argsort(dim=1)
        hidden_lanes = torch.rand(chosen.shape, generator=generator) < case.masked
        ids.append(chosen.gather(1, order).masked_fill(hidden_lanes, -1))
        xs.append(torch.randn(num_tokens, case.hidden, generator=generator).to(case.dtype))
        weights.append(torch.rand(chosen.shape, generator=generator))
    biases = [[order_sensitive(x.shape, generator).to(case.dtype) for x in xs] for _ in range(case.num_bias)]
    return Data(xs, ids, weights if case.weights else None, biases)


def random_case(rng: random.Random, num_ranks: int) -> Case:
    """Any allowed combination, small enough for the reference."""
    num_local = rng.choice((1, 2, 3, 5, 8))
    prepared = rng.random() < 0.5
    return Case(
        seed=rng.randrange(2**31),
        tokens=tuple(rng.choice((0, 1, 2, 5, 9, 14)) for _ in range(num_ranks)),
        hidden=rng.choice((8, 24, 40, 136, 1000)),
        num_topk=rng.randint(1, min(rng.choice((8, 32)), num_local * num_ranks)),
        num_local=num_local,
        dtype=rng.choice(DTYPES),
        do_expand=rng.random() < 0.5,
        alignment=rng.choice((1, 4, 16, 96)),
        masked=rng.choice((0.0, 0.2, 0.8)),
        one_expert=rng.random() < 0.15,
        weights=rng.random() < 0.7,
        num_bias=rng.choice((0, 0, 1, 2)),
        asynchronous=rng.random() < 0.5,
        prepared=prepared,
        bound=rng.choice((0, 16)),
        scales=rng.choice(("", "", "fp32", "packed")),
        column_major=rng.random() < 0.5,
        previous=rng.random() < 0.3,
        poisoned=rng.random() < 0.7,
    )


def order_sensitive(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Values whose fp32 sums depend on their order, also where they are held in 16 bits.

    Half of them are +-2^12 or +-2^-13, which fp32 can not hold in one sum: (a + b) - a is 0 and (a - a) + b is b.
    Sums of 32 of them stay finite in fp16.
    """
    plain = torch.randn(_TABLE, generator=generator)
    sign = torch.randint(0, 2, (_TABLE,), generator=generator) * 2 - 1
    extreme = torch.where(torch.rand(_TABLE, generator=generator) < 0.6, 2.0**12, 2.0**-13) * sign
    table = torch.where(torch.rand(_TABLE, generator=generator) < 0.5, plain, extreme)
    # Picked from a table: most rows of large shapes are padding, and four draws a value would be most of the time.
    return table[torch.randint(0, _TABLE, shape, generator=generator)]


def same_bytes(got: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    """Equal in shape, dtype and every byte."""
    if got is None or wanted is None:
        return got is wanted
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    # Copies, as a single column with a wide stride counts as contiguous but is no sequence of bytes.
    left, right = (item.cpu().clone(memory_format=torch.contiguous_format) for item in (got, wanted))
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def send(
    buffer: ElasticBuffer, case: Case, x: Any, ids: torch.Tensor, weights: torch.Tensor | None, stats: torch.Tensor
) -> tuple[Any, Any, Any, EPHandle, EventOverlap]:
    """The dispatch of a case: in one call, or prepared first."""
    if case.prepared:
        handle = buffer.prepare(
            ids,
            num_experts=case.num_experts,
            expert_alignment=case.alignment,
            do_expand=case.do_expand,
            num_max_tokens_per_rank=case.bound,
        )
        return buffer.dispatch(
            x,
            topk_weights=weights,
            handle=handle,
            async_with_compute_stream=case.asynchronous,
            use_tma_aligned_col_major_sf=case.column_major,
        )
    return buffer.dispatch(
        x,
        ids,
        weights,
        num_experts=case.num_experts,
        expert_alignment=case.alignment,
        do_expand=case.do_expand,
        num_max_tokens_per_rank=case.bound,
        async_with_compute_stream=case.asynchronous,
        cumulative_local_expert_recv_stats=stats,
        do_cpu_sync=False if case.static else None,
        do_zero_padding=case.do_expand,
        use_tma_aligned_col_major_sf=case.column_major,
        previous_event=buffer.capture() if case.previous else None,
        previous_event_before_epilogue=buffer.capture() if case.previous else None,
        allocate_on_comm_stream=case.previous,
    )


@contextlib.contextmanager
def poison(wanted: bool) -> Iterator[None]:
    """New tensors of torch hold NaN, or the largest number, until they are written: torch's own debugging aid."""
    if wanted:
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports the compiler: a second a rank
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


def run(buffer: ElasticBuffer, case: Case) -> list[str]:
    """Dispatch, cached dispatch and combine of one case on this rank; what differs from the reference."""
    with poison(case.poisoned):
        return [f"rank {buffer.rank}/{buffer.num_ranks}: {what} in {case}" for what in round_trip(buffer, case)]


def round_trip(buffer: ElasticBuffer, case: Case) -> list[str]:
    """What is wrong with a case, in words."""
    rank, device = buffer.rank, buffer.device
    data = draw(case)
    wanted = reference.dispatch(
        data.x,
        data.topk_idx,
        data.weights,
        num_experts=case.num_experts,
        expert_alignment=case.alignment,
        do_expand=case.do_expand,
    )
    mine = wanted[rank]
    # Gradients are the layer's business: rows of a tensor that wants them arrive without.
    x, ids = data.x[rank].to(device).requires_grad_(case.asynchronous), data.topk_idx[rank].to(device)
    if case.scales:
        x = cast(x.detach(), case)
    weights = None if data.weights is None else data.weights[rank].to(device)
    stats = torch.full((case.num_local,), 5, dtype=torch.int32, device=device)
    recv_x, recv_idx, recv_weights, handle, event = send(buffer, case, x, ids, weights, stats)
    event.current_stream_wait()
    bad: list[str] = []
    again = buffer.dispatch(x, handle=handle, topk_weights=weights, do_zero_padding=case.do_expand)
    bad += ["cached dispatch returned another handle"] if again[3] is not handle else []
    num_rows = mine.recv_x.shape[0]
    if case.static:
        shape = (case.bound, len(case.tokens), case.num_topk, case.num_local, case.alignment, case.do_expand)
        num_rows = worst_case_rows(*shape)
    pairs = [
        ("recv_topk_idx", recv_idx, padded(mine.recv_topk_idx, num_rows, -1)),
        ("recv_topk_weights", recv_weights, padded(mine.recv_topk_weights, num_rows)),
        ("cached recv_topk_idx", again[1], recv_idx),
        ("cached recv_topk_weights", again[2], recv_weights),
    ]
    got_parts, again_parts = (recv_x, again[0]) if case.scales else ((recv_x,), (again[0],))
    for want, have, have_again in zip(received_parts(case, data, rank), got_parts, again_parts, strict=True):
        pairs += [("recv_x", have, padded(want, num_rows)), ("cached recv_x", have_again, have)]
    if case.scales and case.column_major and recv_x[1].stride() != (1, max(4, -(-num_rows // 4) * 4)):
        bad.append(f"strides of scales {recv_x[1].stride()}")
    bad += ["recv_x wants a gradient"] if got_parts[0].requires_grad else []
    bad += [name for name, have, want in pairs if not same_bytes(have, want)]
    if not case.prepared and stats.tolist() != [5 + count for count in mine.expert_counts]:
        bad.append("cumulative_local_expert_recv_stats")
    bad += check_handle(handle, case, mine)
    bad += check_combine(buffer, case, data, wanted, handle)
    return bad


def cast(x: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 rows and scales; every other case has scales with gaps between the columns."""
    data, scales = fp8.per_token_cast(x, packed=case.scales == "packed")
    if case.seed % 2:
        scales = scales.t().repeat_interleave(2, dim=1).t()[::2]
    return data, scales


def received_parts(case: Case, data: Data, rank: int) -> list[torch.Tensor]:
    """Rows, or data and scales, as the reference receives them."""
    settings = {"num_experts": case.num_experts, "expert_alignment": case.alignment, "do_expand": case.do_expand}
    if not case.scales:
        return [reference.dispatch(data.x, data.topk_idx, **settings)[rank].recv_x]
    content, scales = zip(*(cast(x, case) for x in data.x), strict=True)
    raw = [item.view(torch.uint8) for item in content]
    return [
        reference.dispatch(raw, data.topk_idx, **settings)[rank].recv_x.view(content[0].dtype),
        reference.dispatch(scales, data.topk_idx, **settings)[rank].recv_x,
    ]


def padded(wanted: torch.Tensor | None, num_rows: int, empty: int = 0) -> torch.Tensor | None:
    """The reference's rows and, behind them, the empty rows of a static shape."""
    if wanted is None or wanted.shape[0] == num_rows:
        return wanted
    more = torch.full((num_rows - wanted.shape[0], *wanted.shape[1:]), empty).to(wanted.dtype)
    return torch.cat([wanted.view(torch.uint8), more.view(torch.uint8)]).view(wanted.dtype)


def check_combine(
    buffer: ElasticBuffer, case: Case, data: Data, wanted: list[reference.Dispatched], handle: EPHandle
) -> list[str]:
    """Combines fresh rows and weights of the received shapes."""
    event, check = start_combine(buffer, case, data, wanted, handle)
    event.current_stream_wait()
    return check()


def start_combine(
    buffer: ElasticBuffer, case: Case, data: Data, wanted: list[reference.Dispatched], handle: EPHandle
) -> tuple[EventOverlap, Callable[[], list[str]]]:
    """The same in two parts: the call, and what to call behind its event."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    multiple, rows, back = buffer.allow_multiple_reduction, [], []
    for there in wanted:
        rows.append(order_sensitive(there.recv_x.shape, generator).to(case.dtype))
        shape = (there.num_expanded,) if case.do_expand else (len(there.arrivals), case.num_topk)
        back.append(torch.rand(shape, generator=generator))
    rank = buffer.rank
    x, own = padded(rows[rank], handle.num_recv_rows), padded(back[rank], handle.num_recv_rows)
    assert x is not None and own is not None
    biases = tuple(bias[rank].to(buffer.device) for bias in data.biases)
    combined_x, combined_weights, event = buffer.combine(
        x.to(buffer.device),
        handle,
        topk_weights=own.to(buffer.device) if case.weights else None,
        bias=None if not biases else biases[0] if len(biases) == 1 else biases,
        async_with_compute_stream=case.asynchronous,
    )

    def check() -> list[str]:
        want_x, want_weights = reference.combine(
            rows, wanted, back if case.weights else None, data.biases, multiple_reduction=multiple
        )[rank]
        got, bad = combined_x.cpu(), []
        if got.dtype != want_x.dtype or not torch.equal(got, want_x):
            bad.append(f"combined_x (off by {(got.double() - want_x.double()).abs().max():.3g})")
        if not same_bytes(combined_weights, want_weights):
            bad.append("combined_topk_weights")
        return bad

    return event, check


def check_handle(handle: EPHandle, case: Case, mine: reference.Dispatched) -> list[str]:
    """Counts, prefix sums and metadata of a handle, by their descriptions."""
    align = case.alignment
    counts = list(mine.expert_counts)
    aligned = [-(-count // align) * align for count in counts]
    ends = [
        start + count if case.do_expand else sum(aligned[: e + 1])
        for e, (start, count) in enumerate(zip(mine.expert_starts, counts, strict=True))
    ]
    per_rank = [sum(arrival.src_rank <= rank for arrival in mine.arrivals) for rank in range(len(case.tokens))]
    stride = case.bound or max(1, *case.tokens)
    metadata = []
    for arrival in mine.arrivals:
        last = max(lane for lane, e in enumerate(arrival.local_idx) if e >= 0)
        rows = arrival.rows if case.do_expand else (-1,) * case.num_topk
        metadata.append([arrival.src_rank * stride + arrival.token, arrival.src_rank * case.num_topk + last, *rows])
    wanted = torch.tensor(metadata, dtype=torch.int32).reshape(-1, case.num_topk + 2)
    shape = (case.bound, len(case.tokens), case.num_topk, case.num_local, align)
    num_recv = worst_case_rows(*shape, False) if case.static else len(mine.arrivals)
    num_expanded = worst_case_rows(*shape, True) if case.static else mine.num_expanded
    checks = {
        "num_recv_tokens": handle.num_recv_tokens == num_recv,
        "num_expanded_tokens": handle.num_expanded_tokens == num_expanded and mine.num_expanded == sum(aligned),
        "aligned counts": handle.num_recv_tokens_per_expert_list == ([] if case.static else aligned),
        "real counts": handle.num_unaligned_recv_tokens_per_expert.tolist() == counts,
        "psum per expert": handle.psum_num_recv_tokens_per_expert.tolist() == ends,
        "psum per rank": handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == per_rank,
        "topk_idx": torch.equal(handle.topk_idx.cpu(), mine.topk_idx),
        "num_max_tokens_per_rank": handle.num_max_tokens_per_rank == stride,
        "recv_src_metadata": same_bytes(handle.recv_src_metadata, padded(wanted, num_recv, -1)),
        "dst_buffer_slot_idx": same_bytes(handle.dst_buffer_slot_idx, slots(handle, case, mine, stride)),
    }
    return [name for name, good in checks.items() if not good]


def slots(handle: EPHandle, case: Case, mine: reference.Dispatched, stride: int) -> torch.Tensor:
    """The destination slot of each (token, rank), at its last lane."""
    wanted = torch.full(mine.topk_idx.shape, -1, dtype=torch.int32)
    used = [0] * len(case.tokens)
    for token, ids in enumerate(mine.topk_idx.tolist()):
        owners = [e // case.num_local if e >= 0 else -1 for e in ids]
        for owner in sorted(set(owners) - {-1}):
            last = max(lane for lane, value in enumerate(owners) if value == owner)
            wanted[token, last] = handle.rank * stride + used[owner]
            used[owner] += 1
    return wanted
