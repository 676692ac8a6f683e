"""The text of an action names it and reads back to the same action; anything beyond the grammar is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopiper.errors import PlanError
from autopiper.plan import Action, Wait
from autopiper.plan.actions import COMPUTE_KINDS, TRANSFER_KINDS, parse_action

number = st.integers(0, 999)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from([*COMPUTE_KINDS, *TRANSFER_KINDS, "REDUCE_GRAD", "UPDATE", "LOSS", "NORM"]))
    waits = tuple(
        Wait(action=f"{s}B{m}", block=b)
        for s, m, b in draw(st.lists(st.tuples(number, number, st.none() | number), max_size=3))
    )
    if kind in COMPUTE_KINDS or kind in TRANSFER_KINDS:
        pipeline = draw(number)
        start, length = draw(number), draw(st.integers(1, 64))
        transfer = kind in TRANSFER_KINDS
        return Action(
            kind=kind, stream="s", pipeline=pipeline, stage=draw(number), micro_batch=draw(number),
            peer=draw(number) if transfer else None, samples=(start, start + length) if transfer else None,
            prefix=draw(st.sampled_from(["", f"p{pipeline}:"])), waits=waits,
        )  # fmt: skip
    if kind == "REDUCE_GRAD":
        return Action(kind=kind, stream="s", gradient_block=draw(number), bucket=draw(number), waits=waits)
    if kind == "UPDATE":
        return Action(kind=kind, stream="s", gradient_block=draw(number), waits=waits)
    return Action(kind=kind, stream="s", waits=waits)


@given(actions())
def test_text_reads_back(action: Action) -> None:
    assert parse_action(action.text, stream="s", waits=action.waits, pipeline=action.pipeline) == action


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(kind="F", stream="s", stage=2, micro_batch=5), "2F5"),
        (Action(kind="B", stream="s", stage=1, micro_batch=2, pipeline=1, prefix="p1:"), "p1:1B2"),
        (Action(kind="SEND_F", stream="s", stage=0, micro_batch=0, peer=2, samples=(0, 3)), "0SEND_F0>2[0:3]"),
        (Action(kind="RECV_F", stream="s", stage=1, micro_batch=0, peer=0, samples=(0, 3)), "1RECV_F0<0[0:3]"),
        (Action(kind="REDUCE_GRAD", stream="s", gradient_block=3, bucket=0), "g3.0REDUCE_GRAD"),
        (Action(kind="UPDATE", stream="s", gradient_block=3), "g3UPDATE"),
        (Action(kind="LOSS", stream="s"), "LOSS"),
    ],
)
def test_text_is_the_published_one(action: Action, text: str) -> None:
    assert action.text == text


@given(actions(), st.text(min_size=1, max_size=4))
def test_trailing_rubbish_is_refused_or_another_action(action: Action, rubbish: str) -> None:
    text = action.text + rubbish
    if rubbish.isascii() and rubbish.isdigit() and action.kind in COMPUTE_KINDS:
        read = parse_action(text, stream="s", pipeline=action.pipeline)
        assert read.micro_batch == int(f"{action.micro_batch}{rubbish}")
    else:
        with pytest.raises(PlanError) as fault:
            parse_action(text, stream="s", pipeline=action.pipeline)
        assert str(fault.value).startswith(f"'{text}' is not an action; expected e.g. 2F5")


@pytest.mark.parametrize(
    "text", ["", "F", "2X5", "2F", "F5", "2F-1", " 2F5", "2F5\n", "g3REDUCE_GRAD", "g3.UPDATE", "0SEND_F0>2", "loss"]
)
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(PlanError, match="is not an action; expected"):
        parse_action(text, stream="s")


@pytest.mark.parametrize("text", ["0SEND_F0<2[0:3]", "1RECV_B0>2[0:3]"])
def test_arrows_say_which_way(text: str) -> None:
    with pytest.raises(PlanError, match="a SEND points with '>', a RECV with '<'"):
        parse_action(text, stream="s")


def test_wait_text() -> None:
    assert Wait(action="1B7").text == "1B7"
    assert Wait(action="1B7", block=5).text == "1B7@5"
