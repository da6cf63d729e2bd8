"""On ranks that each have a device, or share one: the cases of numerics, imbalance and determinism."""

from __future__ import annotations

import pytest

from comm_core.runtime import device as devices
from tests.mt_moe import test_determinism, test_imbalance, test_numerics
from tests.mt_moe.layer_cases import Place

KIND = devices.choose("auto", num_local_ranks=1)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(KIND == "cpu", reason="needs a CUDA or MUSA device"),
]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_near_float64(num_ranks: int, fresh_random_data: int) -> None:
    test_numerics.check(num_ranks, Place(KIND), fresh_random_data)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_imbalance_scenarios(num_ranks: int, fresh_random_data: int) -> None:
    test_imbalance.check_scenarios(num_ranks, Place(KIND), fresh_random_data)


def test_gradients_synchronise_under_ddp(fresh_random_data: int) -> None:
    test_imbalance.check_ddp(2, Place(KIND), fresh_random_data)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_runs_are_equal_bit_by_bit(num_ranks: int, fresh_random_data: int) -> None:
    test_determinism.check(num_ranks, Place(KIND), fresh_random_data)
