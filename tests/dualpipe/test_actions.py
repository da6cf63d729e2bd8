"""Actions read and write torch's notation, and torch reads ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Action, Kind, Payload, StageKey, pair, parse, recv, send

SINGLE = st.builds(
    Action,
    st.sampled_from([Kind.F, Kind.B, Kind.I, Kind.W]),
    st.integers(0, 300),
    st.just(0),
    st.integers(0, 5000),
)
PAIRS = st.builds(
    lambda f, b: pair(Action(Kind.F, *f), Action(Kind.B, *b)),
    st.tuples(st.integers(0, 40), st.just(0), st.integers(0, 99)),
    st.tuples(st.integers(0, 40), st.just(0), st.integers(0, 99)),
)
MOVES = st.builds(
    lambda make, payload, stage, microbatch: make(payload, StageKey(stage), microbatch),
    st.sampled_from([send, recv]),
    st.sampled_from(list(Payload)),
    st.integers(0, 40),
    st.integers(0, 99),
)


@given(st.one_of(SINGLE, PAIRS, MOVES))
def test_text_round_trip_and_torch_reads_it(action):
    assert parse(str(action)) == action
    assert str(_Action.from_str(str(action))) == str(action)


def test_notation():
    assert str(parse("2F0")) == "2F0"
    assert parse(" (0F7;7B3)OVERLAP_F_B ") == pair(Action(Kind.F, 0, 0, 7), Action(Kind.B, 7, 0, 3))
    assert parse("1SEND_F3") == Action(Kind.SEND, 1, 0, 3, Payload.ACTIVATION)
    assert parse("1RECV_B3") == Action(Kind.RECV, 1, 0, 3, Payload.GRADIENT)


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2F0x", "-1F0", "(0F1;1F0)OVERLAP_F_B", "(0F1)OVERLAP_F_B", "2SEND_W0", "2FB0"]
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(UsageError, match="allowed") as caught:
        parse(text)
    assert repr(text) in str(caught.value)


def test_parts_of_an_action():
    both = parse("(0F7;7B3)OVERLAP_F_B")
    assert (both.forward, both.backward) == both.parts == both.compute
    assert parse("3I1").backward == parse("3I1") and parse("3I1").forward is None
    assert parse("3W1").backward is None and parse("3W1").compute == (parse("3W1"),)
    assert parse("3SEND_F1").compute == ()
