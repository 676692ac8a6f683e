"""The text of an action names it and reads back to the same action; anything beyond the grammar is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopiper.errors import PlanError
from autopiper.plan import Action, Wait
from autopiper.plan.actions import (
    COMPUTE_KINDS,
    EXCHANGE_KINDS,
    GATHER_KINDS,
    KINDS,
    RELEASE_KINDS,
    TRANSFER_KINDS,
    parse_action,
)

number = st.integers(0, 999)


EACH = ("REDUCE_GRAD", *GATHER_KINDS, *RELEASE_KINDS)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(KINDS))
    waits = tuple(
        Wait(action=f"{s}B{m}", block=b)
        for s, m, b in draw(st.lists(st.tuples(number, number, st.none() | number), max_size=3))
    )
    if kind in (*COMPUTE_KINDS, *TRANSFER_KINDS, *EXCHANGE_KINDS):
        pipeline = draw(number)
        start, length = draw(number), draw(st.integers(1, 64))
        transfer = kind in TRANSFER_KINDS
        segment = 0 if transfer else draw(st.integers(1 if kind in EXCHANGE_KINDS else 0, 99))
        return Action(
            kind=kind, stream="s", pipeline=pipeline, stage=draw(number), micro_batch=draw(number),
            peer=draw(number) if transfer else None, samples=(start, start + length) if transfer else None,
            prefix=draw(st.sampled_from(["", f"p{pipeline}:"])), waits=waits, segment=segment,
        )  # fmt: skip
    if kind in EACH:
        named = draw(st.booleans()) if kind == "REDUCE_GRAD" else kind != "UNSHARD"
        return Action(
            kind=kind, stream="s", gradient_block=draw(number), bucket=draw(number), waits=waits,
            micro_batch=draw(number) if named else None,
        )  # fmt: skip
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
        (Action(kind="REDUCE_GRAD", stream="s", gradient_block=3, bucket=0, micro_batch=5), "g3.0REDUCE_GRAD5"),
        (Action(kind="UNSHARD", stream="s", gradient_block=3, bucket=1), "g3.1UNSHARD"),
        (Action(kind="UNSHARD_F", stream="s", gradient_block=3, bucket=0, micro_batch=5), "g3.0UNSHARD_F5"),
        (Action(kind="RESHARD_W", stream="s", gradient_block=3, bucket=0, micro_batch=5), "g3.0RESHARD_W5"),
        (Action(kind="F", stream="s", stage=2, micro_batch=5, segment=1), "2.1F5"),
        (Action(kind="A2A_B", stream="s", stage=2, micro_batch=5, segment=1, pipeline=1, prefix="p1:"), "p1:2.1A2A_B5"),
        (Action(kind="UPDATE", stream="s", gradient_block=3), "g3UPDATE"),
        (Action(kind="LOSS", stream="s"), "LOSS"),
    ],
)
def test_text_is_the_published_one(action: Action, text: str) -> None:
    assert action.text == text


@given(actions(), st.text(min_size=1, max_size=4))
def test_trailing_rubbish_is_refused_or_another_action(action: Action, rubbish: str) -> None:
    text = action.text + rubbish
    ends_in_number = action.kind in (*COMPUTE_KINDS, *EXCHANGE_KINDS) or (
        action.kind in EACH and action.kind != "UNSHARD"
    )
    if rubbish.isascii() and rubbish.isdigit() and ends_in_number:
        read = parse_action(text, stream="s", pipeline=action.pipeline)
        digits = "" if action.micro_batch is None else action.micro_batch
        assert read.micro_batch == int(f"{digits}{rubbish}")
    else:
        with pytest.raises(PlanError) as fault:
            parse_action(text, stream="s", pipeline=action.pipeline)
        assert str(fault.value).startswith(
            (f"'{text}' is not an action; expected e.g. 2F5", f"'{text}': UNSHARD does not name")
        )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "2X5",
        "2F",
        "F5",
        "2F-1",
        " 2F5",
        "2F5\n",
        "g3REDUCE_GRAD",
        "g3.UPDATE",
        "2.0F5",
        "g3UNSHARD",
        "0SEND_F0>2",
        "loss",
    ],
)
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(PlanError, match="is not an action; expected"):
        parse_action(text, stream="s")


@pytest.mark.parametrize("text", ["0SEND_F0<2[0:3]", "1RECV_B0>2[0:3]"])
def test_arrows_say_which_way(text: str) -> None:
    with pytest.raises(PlanError, match="a SEND points with '>', a RECV with '<'"):
        parse_action(text, stream="s")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2A2A_F5", "an all-to-all stands between two segments; name the upper one"),
        ("g3.0UNSHARD5", "UNSHARD does not name a micro-batch"),
        ("g3.0UNSHARD_F", "UNSHARD_F names a micro-batch"),
        ("g3.0RESHARD_B", "RESHARD_B names a micro-batch"),
    ],
)
def test_what_names_too_much_or_too_little(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_action(text, stream="s")


def test_wait_text() -> None:
    assert Wait(action="1B7").text == "1B7"
    assert Wait(action="1B7", block=5).text == "1B7@5"
