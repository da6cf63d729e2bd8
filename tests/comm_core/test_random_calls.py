"""Random calls, valid and invalid mixed, on three ranks: the right result or an error on all, and nobody hangs."""

from __future__ import annotations

import pytest

from comm_core import layout
from comm_core.backends import registry
from comm_core.runtime import device as devices
from tests.comm_core.conformance import neighbours_swapped
from tests.comm_core.random_calls import talk
from tests.pool import RankFailure, run_ranks

ACTIONS = {"dispatch", "prepare", "cached", "combine", "barrier", "mistake", "land"}


def _converse(backend: str, seed: int, num_calls: int, timeout: float) -> None:
    answers = run_ranks(3, talk, backend, seed, num_calls, timeout=timeout)
    assert [bad for bad, _ in answers] == [[], [], []]
    tallies = [tally for _, tally in answers]
    assert tallies[0] == tallies[1] == tallies[2] and sum(tallies[0].values()) == num_calls
    assert set(tallies[0]) == ACTIONS and tallies[0]["mistake"] > num_calls // 20


@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_300_calls(backend: str, fresh_random_data: int) -> None:
    _converse(backend, fresh_random_data, 300, 60.0)


def _with_a_fault(rank: int, backend: str, seed: int) -> None:
    """Rows are sent in each other's place."""
    plan_send = layout.plan_send

    layout.plan_send = lambda *args: neighbours_swapped(plan_send(*args))
    try:
        talk(rank, backend, seed, 100)
    finally:
        layout.plan_send = plan_send


def test_a_planted_fault_is_found(fresh_random_data: int) -> None:
    with pytest.raises(RankFailure, match=r"rank \d, call \d+ \(\w+\): "):
        run_ranks(3, _with_a_fault, "collective", fresh_random_data)


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("kind", devices.KINDS[1:])
def test_300_calls_on_devices(kind: str, num_ranks: int, fresh_random_data: int) -> None:
    if devices.count(kind) == 0:
        pytest.skip(f"this machine has no {kind} device")
    for backend in set(registry.names_for(kind)) - {"collective"}:
        answers = run_ranks(num_ranks, talk, backend, fresh_random_data, 300, kind, timeout=200.0)
        assert [bad for bad, _ in answers] == [[]] * num_ranks


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_10000_calls(backend: str, fresh_random_data: int) -> None:
    _converse(backend, fresh_random_data, 10_000, 1150.0)
