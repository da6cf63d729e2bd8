"""The order of the parts of a pair, as data."""

from __future__ import annotations

import pytest

from mt_moe.overlap_order import GOLDEN, order, parts_of_pair

FORWARD = ["attention(F)", "dispatch(F)", "mlp(F)", "combine(F)"]
BACKWARD = ["combine(B)", "mlp(B)", "dispatch(B)", "mlp(W)", "attention(B)", "attention(W)"]


def test_the_golden_order() -> None:
    assert [str(part) for part in GOLDEN] == [
        "combine(B)", "attention(F)", "mlp(B)", "dispatch(F)", "dispatch(B)", "mlp(W)", "mlp(F)", "attention(B)",
        "attention(W)", "combine(F)",
    ]  # fmt: skip
    assert parts_of_pair(True, True) == list(GOLDEN)


def test_one_side_alone_runs_in_its_own_order() -> None:
    assert [str(part) for part in parts_of_pair(True, None)] == FORWARD
    assert [str(part) for part in parts_of_pair(None, True)] == BACKWARD
    assert [str(part) for part in parts_of_pair(False, None)] == ["attention(F)", "mlp(F)"]
    assert parts_of_pair(None, None) == []


def test_a_dense_layer_communicates_nothing() -> None:
    assert [str(part) for part in parts_of_pair(False, True)] == [
        "combine(B)", "attention(F)", "mlp(B)", "dispatch(B)", "mlp(W)", "mlp(F)", "attention(B)", "attention(W)",
    ]  # fmt: skip
    assert [str(part) for part in parts_of_pair(False, False)] == [
        "attention(F)", "mlp(B)", "mlp(W)", "mlp(F)", "attention(B)", "attention(W)",
    ]  # fmt: skip


@pytest.mark.parametrize(("ahead", "behind"), [(2, 2), (3, 1), (1, 4), (0, 2), (2, 0)])
def test_layers_meet_from_the_first_forward_and_the_last_backward(ahead: int, behind: int) -> None:
    places = order([True] * ahead, [True] * behind)
    both = min(ahead, behind)
    assert [place.part for place in places[: len(GOLDEN) * both]] == list(GOLDEN) * both
    alone = [str(place.part) for place in places[len(GOLDEN) * both :]]
    assert alone == (FORWARD * (ahead - both) if ahead > behind else BACKWARD * (behind - both))
    layers = {kind: [p.layer for p in places if str(p.part) == f"attention({kind})"] for kind in "FBW"}
    assert layers == {"F": list(range(ahead)), "B": list(range(behind))[::-1], "W": list(range(behind))[::-1]}
