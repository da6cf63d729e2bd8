"""The V placement: every stage on its rank, every layer once, offsets in the order of the stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import megatron_patch
from comm_core.runtime.errors import UsageError

pytestmark = pytest.mark.megatron


@pytest.fixture
def placement() -> Iterator[Any]:
    megatron_patch.apply("cpu", split_weight_grad=False)
    from megatron_patch import placement

    yield placement
    megatron_patch.revert()


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layers_a_stage", [1, 3])
def test_layers_follow_the_v(placement: Any, pp_size: int, layers_a_stage: int) -> None:
    layout = placement.VLayout(2 * pp_size * layers_a_stage, pp_size)
    owners: dict[int, tuple[int, int]] = {}
    for rank in range(pp_size):
        for chunk in (0, 1):
            stage = rank if chunk == 0 else 2 * pp_size - 1 - rank
            assert placement.stage_of(rank, chunk, pp_size) == stage
            first = layout.get_layer_offset(vp_stage=chunk, pp_rank=rank)
            assert first == stage * layers_a_stage
            names = [kind.name for kind in layout.layout[rank][chunk]]
            assert names.count("decoder") == layers_a_stage
            assert ("embedding" in names) == placement.has_embedding(rank, chunk) == (stage == 0)
            assert ("loss" in names) == placement.has_loss(rank, chunk) == (stage == 2 * pp_size - 1)
            for layer in range(first, first + layers_a_stage):
                assert layer not in owners
                owners[layer] = (rank, chunk)
    assert sorted(owners) == list(range(2 * pp_size * layers_a_stage))


@pytest.mark.parametrize(("num_layers", "pp_size"), [(3, 2), (6, 2), (0, 1), (2, 2)])
def test_layers_that_do_not_fill_the_stages_are_refused(placement: Any, num_layers: int, pp_size: int) -> None:
    with pytest.raises(UsageError, match=rf"num_layers={num_layers}.*multiple of {2 * pp_size}"):
        placement.VLayout(num_layers, pp_size)


def test_the_embedding_group_is_rank_zero_alone(placement: Any) -> None:
    assert placement.embedding_ranks([4, 5, 6, 7], None) == [4]
