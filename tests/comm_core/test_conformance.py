"""Every backend equals the reference on 1, 2, 3 and 4 ranks, plain and expanded, fresh, cached and prepared."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core import ElasticBuffer, layout
from comm_core.backends import registry
from comm_core.runtime import device as devices
from tests.comm_core import cases
from tests.pool import run_ranks

# The groups of one run of four processes: every size, one of them with a gap.
GROUPS = ([0, 1, 2, 3], [0, 1, 3], [1, 2], [2])


def _everything(rank: int, backend: str, seed: int, num_random: int) -> dict[str, Any]:
    """All work of this file in one run: what is wrong by group size, and the two pieces that need three ranks."""
    found: dict[str, Any] = {}
    for ranks in GROUPS:
        group = dist.new_group(ranks)
        if rank in ranks:
            found[f"{len(ranks)} ranks"] = _conform(group, backend, seed, num_random)
            if len(ranks) == 3:
                found["two buffers"] = _two_buffers(group, backend, seed)
                found["faults"] = _faults(group, backend, seed)
    return found


def _conform(
    group: dist.ProcessGroup, backend: str, seed: int, num_random: int, device: torch.device | None = None
) -> list[str]:
    rng = random.Random(seed)
    num_ranks = dist.get_world_size(group)
    todo = cases.edge_cases(seed, num_ranks) + [cases.random_case(rng, num_ranks) for _ in range(num_random)]
    if device is not None and device.type != "cpu":
        todo = [case for case in todo if not case.scales]  # pairs are refused there
    settings: dict[str, Any] = {"backend": backend, "num_cpu_timeout_secs": 30, "device": device}
    with ElasticBuffer(group, **settings) as buffer:
        bad = [line for case in todo for line in cases.run(buffer, case)]
    with ElasticBuffer(group, allow_multiple_reduction=False, **settings) as buffer:
        return bad + [line for case in todo if case.do_expand for line in cases.run(buffer, case)]


def _two_buffers(group: dist.ProcessGroup, backend: str, seed: int) -> list[str]:
    """Dispatch, dispatch, combine, combine over two buffers and several handles, consumed in another order."""
    base = cases.Case(seed, (5, 0, 7), 40, 3, 4, torch.bfloat16, num_bias=1, asynchronous=True)
    todo = [replace(base, seed=seed + i, do_expand=bool(i % 2), alignment=1 + 3 * (i % 2)) for i in range(6)]
    rng = random.Random(seed)
    bad = []
    rank = dist.get_rank(group)
    with ElasticBuffer(group, backend=backend) as first, ElasticBuffer(group, backend=backend) as second:
        started = []
        for i, case in enumerate(todo):
            buffer, data = (first, second)[i % 2], cases.draw(case)
            settings = {"num_experts": case.num_experts, "expert_alignment": case.alignment}
            handle = buffer.prepare(data.topk_idx[rank], do_expand=case.do_expand, **settings)
            started.append((buffer, case, data, handle))
        rng.shuffle(started)
        flying = []
        for buffer, case, data, handle in started:
            got = buffer.dispatch(data.x[rank], handle=handle, async_with_compute_stream=True)
            flying.append((buffer, case, data, handle, got))
        rng.shuffle(flying)
        for buffer, case, data, handle, got in flying:
            settings = {"num_experts": case.num_experts, "expert_alignment": case.alignment}
            wanted = cases.reference.dispatch(data.x, data.topk_idx, data.weights, do_expand=case.do_expand, **settings)
            got[4].current_stream_wait()
            bad += [] if cases.same_bytes(got[0], wanted[rank].recv_x) else [f"recv_x in {case}"]
            bad += cases.check_combine(buffer, case, data, wanted, handle)
    return bad


def _faults(group: dist.ProcessGroup, backend: str, seed: int) -> dict[str, int]:
    """How many cases notice each planted fault on this rank."""
    plan_send, plan_recv = layout.plan_send, layout.plan_recv

    def reversed_sums(*args: Any) -> layout.SendPlan:
        # Sums that start from the last rank: the same numbers in another order.
        plan = plan_send(*args)
        rows = torch.full((args[0].shape[0], max(1, len(plan.return_terms))), -1)
        for column, (lines, indices) in enumerate(plan.return_terms):
            rows[lines, column] = indices
        return replace(plan, return_terms=layout.terms_of(rows.flip(1)))

    def rank_ordered_sums(*args: Any) -> layout.SendPlan:
        # Sums by rank and not by last lane.
        plan = plan_send(*args)
        rows = plan.send_row.masked_fill(~plan.is_last_lane, torch.iinfo(torch.int64).max).sort(dim=1).values
        return replace(plan, return_terms=layout.terms_of(rows.masked_fill(rows > 2**40, -1)))

    def swapped_rows(*args: Any) -> layout.SendPlan:
        # The last two tokens for each rank change places.
        plan = plan_send(*args)
        return replace(plan, send_token=plan.send_token.flip(0))

    def reversed_lanes(*args: Any) -> layout.RecvPlan:
        plan = plan_recv(*args)
        return replace(plan, reduce_terms=layout.terms_of(plan.expand_row.flip(1)))

    def late_experts(*args: Any) -> layout.RecvPlan:
        # Rows of an expert in reverse order of arrival.
        plan = plan_recv(*args)
        return replace(plan, expand_src=plan.expand_src.flip(0))

    plain = cases.Case(seed, (12, 9, 14), 256, 12, 8, torch.bfloat16, masked=0.1)
    expanded = replace(plain, do_expand=True)
    caught = {}
    for case, name, fault in (
        (plain, "plan_send", reversed_sums),
        (plain, "plan_send", rank_ordered_sums),
        (plain, "plan_send", swapped_rows),
        (expanded, "plan_recv", reversed_lanes),
        (expanded, "plan_recv", late_experts),
        (plain, "plan_send", plan_send),
        (expanded, "plan_recv", plan_recv),
    ):
        good = getattr(layout, name)
        setattr(layout, name, fault)
        try:
            with ElasticBuffer(group, backend=backend) as buffer:
                caught[f"{fault.__name__} {case.do_expand}"] = len(cases.run(buffer, case))
        finally:
            setattr(layout, name, good)
    with ElasticBuffer(group, backend=backend) as buffer:
        buffer.allow_multiple_reduction = False  # the reference expects another sum than the buffer makes
        caught["two reductions for one"] = len(cases.run(buffer, expanded))
    return caught


@pytest.mark.parametrize("backend", registry.names())
def test_conformance(backend: str, fresh_random_data: int, subtests: pytest.Subtests) -> None:
    answers = run_ranks(4, _everything, backend, fresh_random_data, 20, timeout=120.0)
    by_piece = {name: [answer[name] for answer in answers if name in answer] for name in sorted(set().union(*answers))}
    for size in (1, 2, 3, 4):
        with subtests.test("equal to the reference", num_ranks=size):
            assert by_piece[f"{size} ranks"] == [[]] * size
    with subtests.test("two buffers, several handles outstanding, consumed in another order"):
        assert by_piece["two buffers"] == [[]] * 3
    for caught in by_piece["faults"]:
        with subtests.test("planted faults are caught, sound code is not"):
            assert {name for name, count in caught.items() if count == 0} == {"plan_send False", "plan_recv True"}


def _on_devices(rank: int, kind: str, seed: int) -> list[str]:
    assert dist.group.WORLD is not None
    return _conform(dist.group.WORLD, "collective", seed, 40, devices.of(kind, rank))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cuda", "musa"])
def test_conformance_on_devices(kind: str, fresh_random_data: int) -> None:
    num_ranks = min(devices.count(kind), 4)
    if num_ranks < 2:
        pytest.skip(f"needs two {kind} devices, this machine has {num_ranks}")
    assert run_ranks(num_ranks, _on_devices, kind, fresh_random_data, timeout=240.0) == [[]] * num_ranks
