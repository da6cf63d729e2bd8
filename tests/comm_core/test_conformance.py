"""Every backend equals the reference on any number of ranks, and the suite that says so finds planted faults."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core import ElasticBuffer, layout
from comm_core.backends import registry
from comm_core.backends.base import MoveJob
from comm_core.runtime import device as devices
from tests.comm_core import cases
from tests.comm_core.conformance import check, conform, neighbours_swapped
from tests.pool import run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_equal_to_the_reference(backend: str, num_ranks: int, fresh_random_data: int) -> None:
    num_random = {3: 20, 8: 3}.get(num_ranks, 6)
    reports = check(backend, "cpu", num_ranks, fresh_random_data, num_random=num_random, tiny=num_ranks == 8)
    assert [report.bad for report in reports] == [[]] * num_ranks
    assert all(report.ran > 40 and not report.left_out for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_many_random_cases(backend: str, num_ranks: int, fresh_random_data: int) -> None:
    reports = check(backend, "cpu", num_ranks, fresh_random_data, num_random=50 if num_ranks == 8 else 200)
    assert [report.bad for report in reports] == [[]] * num_ranks


def _some_ranks(rank: int, backend: str, seed: int) -> dict[str, Any] | None:
    """What is asked of three ranks that are some of four."""
    group = dist.new_group([0, 1, 3])
    if rank == 2:
        return None
    return {
        "equal": conform(group, backend, seed, num_random=3, tiny=True).bad,
        "two buffers": _two_buffers(group, backend, seed),
        "faults": _faults(group, backend, seed),
    }


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

    def one_row_elsewhere(*args: Any) -> layout.SendPlan:
        return neighbours_swapped(plan_send(*args))

    def one_expanded_row_elsewhere(*args: Any) -> layout.RecvPlan:
        # The first two rows of the first expert that has two.
        plan = plan_recv(*args)
        expert = int((plan.expert_counts > 1).nonzero()[0])
        first, rows = int(plan.expert_starts[expert]), plan.expand_src.clone()
        rows[[first, first + 1]] = rows[[first + 1, first]]
        return replace(plan, expand_src=rows)

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
        (plain, "plan_send", one_row_elsewhere),
        (expanded, "plan_recv", one_expanded_row_elsewhere),
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
    return caught | _unwritten(group, backend, plain)


def _unwritten(group: dist.ProcessGroup, backend: str, case: cases.Case) -> dict[str, int]:
    """Rows that nobody writes: zeros by chance, as fresh memory has them, must not pass."""
    case, fitted = replace(case, static=True, bound=16), MoveJob.fitted

    def unfilled(job: MoveJob) -> MoveJob:
        if job.op == "combine" or not job.handle.static_bound:
            return fitted(job)
        parts = {name: getattr(job, name) for name in ("out_x", "out_weights", "out_idx")}
        real = sum(job.handle.layout.recv_splits)
        return replace(job, **{name: None if part is None else part[:real] for name, part in parts.items()})

    with ElasticBuffer(group, backend=backend) as buffer:
        good = len(cases.run(buffer, case))
        MoveJob.fitted = unfilled  # type: ignore[method-assign]
        try:
            return {"unfilled tail": len(cases.run(buffer, case)), "filled tail": good}
        finally:
            MoveJob.fitted = fitted  # type: ignore[method-assign]


@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_some_of_the_ranks(backend: str, fresh_random_data: int, subtests: pytest.Subtests) -> None:
    answers = run_ranks(4, _some_ranks, backend, fresh_random_data, timeout=120.0)
    answers = [answer for answer in answers if answer is not None]
    with subtests.test("equal to the reference"):
        assert [answer["equal"] for answer in answers] == [[]] * 3
    with subtests.test("two buffers, several handles outstanding, consumed in another order"):
        assert [answer["two buffers"] for answer in answers] == [[]] * 3
    for answer in answers:
        with subtests.test("planted faults are caught, sound code is not"):
            sound = {"plan_send False", "plan_recv True", "filled tail"}
            assert {name for name, count in answer["faults"].items() if count == 0} == sound


ON_DEVICES = [(kind, backend) for kind in devices.KINDS[1:] for backend in registry.names_for(kind)]


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("kind", "backend"), ON_DEVICES)
def test_on_devices(kind: str, backend: str, num_ranks: int, fresh_random_data: int) -> None:
    have = devices.count(kind)
    # Collectives of a device library need a device for each rank.
    need = num_ranks if backend == "collective" else 1
    if have < need:
        pytest.skip(f"needs {need} {kind} devices, this machine has {have}")
    reports = check(backend, kind, num_ranks, fresh_random_data, num_random=40)
    print([dict(report.left_out) for report in reports])
    assert [report.bad for report in reports] == [[]] * num_ranks
