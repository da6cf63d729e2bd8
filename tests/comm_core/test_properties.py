"""Properties of dispatch and combine for any routing: of the definition, of the local order, of buffers on 3 ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from comm_core import ElasticBuffer, fp8, layout, reference
from comm_core.backends import registry
from tests.comm_core.cases import same_bytes
from tests.pool import RankFailure, run_ranks
from tests.strategies import Routing, routings

RANKS, HIDDEN = 3, 136


def _numbers(ids: list[torch.Tensor], hidden: int = 8) -> list[torch.Tensor]:
    """Small whole numbers, whose sums are exact in any order; no two rows of all ranks are alike."""
    rows = [torch.arange(mine.shape[0] * float(hidden)).view(-1, hidden) % 61 - 30 for mine in ids]
    for rank, mine in enumerate(rows):
        mine[:, 0], mine[:, 1] = rank, torch.arange(mine.shape[0])
    return rows


@given(routings(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_rows_sent_and_returned_as_they_are_add_up(routing: Routing, multiple: bool) -> None:
    ids, num_experts, alignment = routing
    x, num_local = _numbers(ids), num_experts // len(ids)
    for do_expand in (False, True):
        there = reference.dispatch(x, ids, num_experts=num_experts, expert_alignment=alignment, do_expand=do_expand)
        back = reference.combine([item.recv_x for item in there], there, multiple_reduction=multiple)
        for mine, rows, (total, _) in zip(ids, x, back, strict=True):
            assert torch.equal(total, rows * _copies(mine, num_local, do_expand))
        # Every (token, expert) pair is somewhere, once.
        assert sum(sum(item.expert_counts) for item in there) == sum(int((mine >= 0).sum()) for mine in ids)


@given(routings(num_ranks=1), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_permuting_and_back_is_the_identity(routing: Routing, num_ranks: int) -> None:
    (ids,), num_experts, alignment = routing
    num_experts *= num_ranks  # of which the first rank, this one, has its part
    ids = ids[(ids >= 0).any(1)]
    plan = layout.plan_recv(ids, torch.tensor([len(ids)] + [0] * (num_ranks - 1)), num_experts, 0, alignment)
    rows = _numbers([ids])[0]
    lines, lanes = (plan.expand_row >= 0).nonzero(as_tuple=True)
    places = plan.expand_row[lines, lanes]
    permuted = rows[plan.expand_src.clamp_min(0)].index_fill(0, plan.gap_rows, 0)
    assert torch.equal(permuted[places], rows[lines])
    # Each place is taken once, the gaps are all the others, and experts lie side by side, in order, aligned.
    assert sorted([*places.tolist(), *plan.gap_rows.tolist()]) == list(range(plan.num_expanded))
    assert torch.equal(plan.expand_lane[places], lanes)
    for e, (start, count) in enumerate(zip(plan.expert_starts.tolist(), plan.expert_counts.tolist(), strict=True)):
        assert start % alignment == 0
        assert (plan.local_idx[lines, lanes] == e).tolist() == ((places >= start) & (places < start + count)).tolist()


def _copies(ids: torch.Tensor, num_local: int, do_expand: bool) -> torch.Tensor:
    """How often a token comes home: once from each rank of its experts, or from each expert; [tokens, 1]."""
    if do_expand:
        return (ids >= 0).sum(1, keepdim=True)
    return torch.tensor([[len({e // num_local for e in line if e >= 0})] for line in ids.tolist()]).view(-1, 1)


@dataclass(frozen=True)
class Example:
    """One routing and how it is sent."""

    routing: Routing
    multiple: bool
    do_expand: bool
    static: bool
    prepared: bool
    packed: bool

    @property
    def options(self) -> dict[str, Any]:
        _, num_experts, alignment = self.routing
        options = {"num_experts": num_experts, "expert_alignment": alignment, "do_expand": self.do_expand}
        return options | {"num_max_tokens_per_rank": 6}


def _holds(buffer: ElasticBuffer, it: Example) -> list[str]:
    """The properties of one example that do not hold on this rank."""
    ids, num_experts, _ = it.routing
    all_x, num_local = _numbers(ids, HIDDEN), num_experts // RANKS
    mine, x, options = ids[buffer.rank], all_x[buffer.rank], it.options
    weights = mine + 0.5
    padded = {"do_zero_padding": it.do_expand}  # every row is looked at, those behind the real ones too
    fresh = buffer.dispatch(x, mine, weights, do_cpu_sync=not it.static, **padded, **options)
    recv_x, recv_idx, recv_weights, handle, _ = fresh
    known = buffer.prepare(mine, **options) if it.prepared else handle
    again = buffer.dispatch(x, topk_weights=weights, handle=known, **padded)
    num_rows = again[0].shape[0]  # without the tail of a static shape where it is not known to be one
    cached = same_bytes(again[0], recv_x[:num_rows]) and same_bytes(again[2], recv_weights[:num_rows])
    if recv_idx is not None:
        cached = cached and same_bytes(again[1], recv_idx[:num_rows])
    total, home, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
    properties = {
        "cached equals fresh": cached,
        "identity in between adds up": torch.equal(total, x * _copies(mine, num_local, it.do_expand)),
        "weights come home": torch.equal(home, weights.masked_fill(mine < 0, 0)),
        "every pair arrives once": _arrived(buffer.rank, it, recv_x, recv_idx, handle) == _sent(buffer.rank, it),
        "FP8 within the bound": _fp8_holds(buffer, it, handle),
    }
    return [name for name, good in properties.items() if not good]


def _sent(rank: int, it: Example) -> list[tuple[int, int, int]]:
    """(source rank, token, expert) of every lane that this rank's experts are named in."""
    ids, num_experts, _ = it.routing
    num_local = num_experts // RANKS
    return sorted(
        (src, token, e)
        for src, lines in enumerate(ids)
        for token, line in enumerate(lines.tolist())
        for e in line
        if e >= 0 and e // num_local == rank
    )


def _arrived(rank: int, it: Example, recv_x: torch.Tensor, recv_idx: Any, handle: Any) -> list[tuple[int, int, int]]:
    """The same, read from what arrived: rows say who they are, and their place or ids to which expert they belong."""
    first = rank * handle.num_local_experts
    who = [(int(row[0]), int(row[1])) for row in recv_x]
    if not it.do_expand:
        return sorted((*who[row], first + e) for row, line in enumerate(recv_idx.tolist()) for e in line if e >= 0)
    counts, ends = handle.num_unaligned_recv_tokens_per_expert_list, handle.psum_num_recv_tokens_per_expert.tolist()
    return sorted(
        (*who[row], first + e)
        for e, (count, end) in enumerate(zip(counts, ends, strict=True))
        for row in range(end - count, end)
    )


def _fp8_holds(buffer: ElasticBuffer, it: Example, handle: Any) -> bool:
    """Rows cast, sent and cast back are where the plain rows are, as far off as the format allows."""
    if buffer.device.type not in buffer._backend.capabilities.fp8_kinds:
        return True
    x = _numbers(it.routing[0], HIDDEN)[buffer.rank] * 1.37
    pair = fp8.per_token_cast(x, round_scale=it.packed, packed=it.packed)
    plain, (data, scales) = (
        buffer.dispatch(sent, handle=handle, do_zero_padding=it.do_expand)[0] for sent in (x, pair)
    )
    back = fp8.per_token_cast_back(data, scales, torch.float32)
    columns = fp8.num_blocks(HIDDEN, 128)
    wide = fp8.unpack_ue8m0(scales, columns) if it.packed else scales
    wide = wide.repeat_interleave(128, 1)[:, :HIDDEN]
    return bool(((back - plain).abs() <= fp8.round_trip_bound(plain, wide)).all())


def _everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


def _together(rank: int, backend: str, start: int, num_examples: int, *phases: Phase) -> None:
    """Rank 0 lets hypothesis draw and shrink; all ranks carry each example out, and all say what does not hold."""
    options: dict[str, Any] = {"backend": backend, "num_cpu_timeout_secs": 20}
    with ElasticBuffer(allow_multiple_reduction=False, **options) as single, ElasticBuffer(**options) as double:

        def judge(example: Example | None) -> list[Any]:
            told: list[Any] = [example]
            dist.broadcast_object_list(told, src=0)
            return [] if told[0] is None else _everywhere(_holds(double if told[0].multiple else single, told[0]))

        if rank:
            while judge(None):
                pass
            return

        @seed(start)
        @settings(
            max_examples=num_examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=phases or (Phase.generate, Phase.shrink),
        )
        @given(st.builds(Example, routings(num_ranks=RANKS), *[st.booleans()] * 5))
        def property_(example: Example) -> None:
            found = judge(example)
            assert found == [[]] * RANKS, found

        try:
            property_()
        finally:
            judge(None)


@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_buffers_have_them_too(backend: str, fresh_random_data: int) -> None:
    run_ranks(RANKS, _together, backend, fresh_random_data, 40, timeout=120.0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_buffers_have_them_too_for_many_routings(backend: str, fresh_random_data: int) -> None:
    run_ranks(RANKS, _together, backend, fresh_random_data, 800, timeout=280.0)


def _loses_a_pair(rank: int, start: int) -> None:
    """Where a rank expands, its last row shows what the first one shows."""
    plan_recv: Callable[..., layout.RecvPlan] = layout.plan_recv

    def forgetful(*args: Any) -> layout.RecvPlan:
        plan = plan_recv(*args)
        real, rows = (plan.expand_src >= 0).nonzero()[:, 0], plan.expand_src.clone()
        rows[real[-1:]] = rows[real[:1]]
        return replace(plan, expand_src=rows)

    layout.plan_recv = forgetful
    try:
        _together(rank, "posix", start, 60, Phase.generate)
    finally:
        layout.plan_recv = plan_recv


def test_a_pair_that_is_lost_is_noticed(fresh_random_data: int) -> None:
    with pytest.raises(RankFailure, match="every pair arrives once"):
        run_ranks(RANKS, _loses_a_pair, fresh_random_data)
