"""Random calls, valid and invalid mixed, on three ranks: the right result or an error on all, and nobody hangs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from comm_core import layout
from comm_core.backends import registry
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

    def swapped(*args: Any) -> layout.SendPlan:
        plan = plan_send(*args)
        return replace(plan, send_token=plan.send_token.flip(0))

    layout.plan_send = swapped
    try:
        talk(rank, backend, seed, 100)
    finally:
        layout.plan_send = plan_send


def test_a_planted_fault_is_found(fresh_random_data: int) -> None:
    with pytest.raises(RankFailure, match=r"call \d+ \((dispatch|prepare)\): "):
        run_ranks(3, _with_a_fault, "collective", fresh_random_data)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", registry.names_for("cpu"))
def test_10000_calls(backend: str, fresh_random_data: int) -> None:
    _converse(backend, fresh_random_data, 10_000, 1150.0)
