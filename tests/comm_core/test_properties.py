"""Properties of dispatch and combine for any routing: of the definition on many ranks, of a buffer on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm_core import ElasticBuffer, reference
from tests.comm_core.cases import same_bytes
from tests.comm_core.test_layout import routings

Routing = tuple[list[torch.Tensor], int, int]


def _numbers(ids: list[torch.Tensor]) -> list[torch.Tensor]:
    """Small whole numbers, whose sums are exact in any order."""
    return [torch.arange(mine.shape[0] * 8.0).view(-1, 8) % 61 - 30 for mine in ids]


@given(routings(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_rows_sent_and_returned_as_they_are_add_up(routing: Routing, multiple: bool) -> None:
    ids, num_experts, alignment = routing
    x, num_local = _numbers(ids), num_experts // len(ids)
    for do_expand in (False, True):
        there = reference.dispatch(x, ids, num_experts=num_experts, expert_alignment=alignment, do_expand=do_expand)
        back = reference.combine([item.recv_x for item in there], there, multiple_reduction=multiple)
        for mine, rows, (total, _) in zip(ids, x, back, strict=True):
            copies = (mine >= 0).sum(1)
            if not do_expand:
                copies = torch.tensor([len({e // num_local for e in line if e >= 0}) for line in mine.tolist()])
            assert torch.equal(total, rows * copies.view(-1, 1))
        # Every (token, expert) pair is somewhere, once.
        assert sum(sum(item.expert_counts) for item in there) == sum(int((mine >= 0).sum()) for mine in ids)


@pytest.fixture(scope="module", params=[True, False], ids=["two reductions", "one reduction"])
def buffer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticBuffer]:
    store = Path(tmp_path_factory.mktemp("group")) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with ElasticBuffer(allow_multiple_reduction=request.param, backend="collective") as made:
        yield made
    dist.destroy_process_group()


@given(routings(), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_buffer_has_them_too(buffer: ElasticBuffer, routing: Routing, do_expand: bool, static: bool) -> None:
    (ids, *_), num_experts, alignment = routing
    (x,) = _numbers([ids])
    options = {"num_experts": num_experts, "expert_alignment": alignment, "do_expand": do_expand}
    recv_x, recv_idx, weights, handle, _ = buffer.dispatch(
        x, ids, ids.float(), num_max_tokens_per_rank=6, do_cpu_sync=not static, **options
    )
    again = buffer.dispatch(x, handle=handle, topk_weights=ids.float())
    assert same_bytes(again[0], recv_x)
    assert same_bytes(again[1], recv_idx)
    assert same_bytes(again[2], weights)
    assert int(handle.num_unaligned_recv_tokens_per_expert.sum()) == int((ids >= 0).sum())
    total, home, _ = buffer.combine(recv_x, handle, topk_weights=weights)
    copies = (ids >= 0).sum(1) if do_expand else (ids >= 0).any(1)
    assert torch.equal(total, x * copies.view(-1, 1))
    assert torch.equal(home, ids.float().masked_fill(ids < 0, 0))
