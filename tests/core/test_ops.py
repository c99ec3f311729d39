"""Ops: text form and parser are inverses; everything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spipe.errors import SpipeError
from spipe.ops import COLLECTIVES, WEIGHT_OPS, Kind, Op


@given(st.sampled_from(list(Kind)), st.sampled_from("FB"), st.integers(0, 300), st.integers(0, 300), st.integers(0, 50))
def test_text_and_parser_are_inverses(kind: Kind, letter: str, stage: int, index: int, visit: int) -> None:
    op = Op(
        kind,
        f"R{stage}" if kind in COLLECTIVES else f"{letter}{stage}",
        0 if kind in COLLECTIVES or kind is Kind.FREE else index,
        visit if kind in (Kind.FETCH, Kind.FREE) else 0,
    )
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (Op(Kind.FORWARD, "F3", 2), "FORWARD F3 m2"),
        (Op(Kind.FETCH, "B5", 0, 1), "FETCH B5 b0 v1"),
        (Op(Kind.FREE, "B5", 0, 2), "FREE B5 v2"),
        (Op(Kind.STEP, "B5", 4), "STEP B5 b4"),
        (Op(Kind.VALIDATE, "R2"), "VALIDATE R2"),
        (Op(Kind.SEND_GRADIENT, "B1", 0), "SEND_GRADIENT B1 m0"),
    ],
)
def test_text_form(op: Op, text: str) -> None:
    assert str(op) == text
    assert Op.parse(text) == op


@pytest.mark.parametrize(
    "text", ["", "FORWARD", "FORWARD F3", "FORWARD F3 b2", "FORWARD X3 m2", "JUMP F3 m2", "STEP B5 m1", "FETCH B5 b0"]
)
def test_what_is_not_an_op_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(SpipeError, match="not an op"):
        Op.parse(text)


def test_weight_ops_are_counted_in_buckets() -> None:
    assert {str(Op(kind, "B0", 7)).split()[2] for kind in WEIGHT_OPS} == {"b7"}
