"""Properties of comm_core.layout over all routings that hypothesis can think of; one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core import layout, reference
from tests.strategies import routings


def _received(ids: list[torch.Tensor], sends: list[layout.SendPlan], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that arrive at a rank and how many came from each, by the senders' plans."""
    rows, counts = [], []
    for mine, plan in zip(ids, sends, strict=True):
        chunk = plan.send_token.split(plan.send_counts.tolist())[rank]
        rows.append(mine[chunk])
        counts.append(chunk.shape[0])
    return torch.cat(rows), torch.tensor(counts)


@given(routings())
@settings(max_examples=80, deadline=None)
def test_plans_describe_what_the_reference_does(routing: tuple[list[torch.Tensor], int, int]) -> None:
    ids, num_experts, alignment = routing
    num_ranks = len(ids)
    sends = [layout.plan_send(mine, num_experts, num_ranks) for mine in ids]
    # The row says where it comes from, so that a row in the wrong place shows.
    x = [torch.stack([torch.full((mine.shape[0],), float(rank)), torch.arange(mine.shape[0]) * 1.0], dim=1)
         for rank, mine in enumerate(ids)]  # fmt: skip
    for do_expand in (False, True):
        wanted = reference.dispatch(x, ids, num_experts=num_experts, expert_alignment=alignment, do_expand=do_expand)
        for rank, there in enumerate(wanted):
            rows, counts = _received(ids, sends, rank)
            plan = layout.plan_recv(rows, counts, num_experts, rank, alignment)
            assert plan.num_expanded == there.num_expanded
            assert plan.expert_counts.tolist() == list(there.expert_counts)
            assert plan.expert_starts.tolist() == list(there.expert_starts)
            assert plan.local_idx.tolist() == [list(arrival.local_idx) for arrival in there.arrivals]
            assert plan.expand_row.tolist() == [list(arrival.rows) for arrival in there.arrivals]
            assert counts.tolist() == [sum(a.src_rank == src for a in there.arrivals) for src in range(num_ranks)]


@given(routings())
@settings(max_examples=80, deadline=None)
def test_every_pair_travels_once(routing: tuple[list[torch.Tensor], int, int]) -> None:
    ids, num_experts, alignment = routing
    num_ranks, num_local = len(ids), num_experts // len(ids)
    sends = [layout.plan_send(mine, num_experts, num_ranks) for mine in ids]
    pairs = 0
    for rank in range(num_ranks):
        rows, counts = _received(ids, sends, rank)
        plan = layout.plan_recv(rows, counts, num_experts, rank, alignment)
        filled = (plan.expand_src >= 0).nonzero()[:, 0]
        assert sorted(filled.tolist() + plan.gap_rows.tolist()) == list(range(plan.num_expanded))
        # An expanded row points back to the row and lane that point to it, and lies inside its expert's part.
        assert torch.equal(plan.expand_row[plan.expand_src[filled], plan.expand_lane[filled]], filled)
        experts = plan.local_idx[plan.expand_src[filled], plan.expand_lane[filled]]
        assert bool((filled >= plan.expert_starts[experts]).all())
        assert bool((filled < plan.expert_starts[experts] + plan.expert_counts[experts]).all())
        assert all(start % alignment == 0 for start in plan.expert_starts.tolist())
        # Lines of reduce_terms: every expanded row exactly once, in lane order.
        assert sorted(torch.cat([rows for _, rows in plan.reduce_terms] or [filled[:0]]).tolist()) == filled.tolist()
        pairs += filled.shape[0]
    assert pairs == sum(int((mine >= 0).sum()) for mine in ids)
    for mine, plan in zip(ids, sends, strict=True):
        assert torch.equal(plan.dst_rank, torch.where(mine >= 0, mine // num_local, -1))
        total = int(plan.send_counts.sum())
        assert sorted(torch.cat([r for _, r in plan.return_terms] or [plan.send_token[:0]]).tolist()) == [*range(total)]


@given(routings())
@settings(max_examples=100, deadline=None)
def test_returned_rows_are_ordered_by_last_lane(routing: tuple[list[torch.Tensor], int, int]) -> None:
    ids, num_experts, _ = routing
    for mine in ids:
        plan = layout.plan_send(mine, num_experts, len(ids))
        order: list[list[int]] = [[] for _ in range(mine.shape[0])]
        for lines, rows in plan.return_terms:
            assert lines.tolist() == sorted(set(lines.tolist()))
            for line, row in zip(lines.tolist(), rows.tolist(), strict=True):
                order[line].append(row)
        for token, owners in enumerate(plan.dst_rank.tolist()):
            last = {owner: lane for lane, owner in enumerate(owners) if owner >= 0}
            lanes = sorted(last.values())
            assert order[token] == [int(plan.send_row[token, lane]) for lane in lanes]
            assert [bool(value) for value in plan.is_last_lane[token]] == [lane in lanes for lane in range(len(owners))]


@given(routings(), st.data())
@settings(max_examples=100, deadline=None)
def test_bad_ids_are_named(routing: tuple[list[torch.Tensor], int, int], data: st.DataObject) -> None:
    ids, num_experts, _ = routing
    mine = next((item for item in ids if item.shape[0]), None)
    if mine is None:
        assert layout.check_ids(ids[0], num_experts) is None
        return
    assert layout.check_ids(mine, num_experts) is None
    token = data.draw(st.integers(0, mine.shape[0] - 1))
    lane = data.draw(st.integers(0, mine.shape[1] - 1))
    broken = mine.clone()
    broken[token, lane] = data.draw(st.sampled_from((-2, num_experts, num_experts + 7, 2**40)))
    problem = layout.check_ids(broken, num_experts)
    assert problem is not None
    assert f"topk_idx[{token}, {lane}] = {int(broken[token, lane])}" in str(problem)
    assert f"0 to {num_experts - 1}" in str(problem)
    if mine.shape[1] > 1:
        twice = mine.clone()
        twice[token, :2] = num_experts - 1
        problem = layout.check_ids(twice, num_experts)
        assert problem is not None
        assert f"topk_idx[{token}]" in str(problem)
        assert f"expert {num_experts - 1} twice" in str(problem)


@pytest.mark.parametrize(("value", "alignment", "wanted"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 4, 8), (7, 1, 7)])
def test_align(value: int, alignment: int, wanted: int) -> None:
    assert layout.align(value, alignment) == wanted


def test_every_tensor_of_a_plan_is_listed() -> None:
    send = layout.plan_send(torch.tensor([[0, 3], [2, -1]]), 4, 2)
    listed = layout.tensors_of(send)
    assert len(listed) == 5 + 2 * len(send.return_terms)
    assert all(any(tensor is item for item in listed) for term in send.return_terms for tensor in term)
    recv = layout.plan_recv(torch.tensor([[0, 1]]), torch.tensor([1, 0]), 4, 0, 1)
    assert len(layout.tensors_of(recv)) == 8 + 2 * len(recv.reduce_terms)
