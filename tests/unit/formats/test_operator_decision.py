"""The decision of an operator in the bucket, and the record of what became of it."""

from __future__ import annotations

import json

import pytest

from tests.golden.make_own_golden import DECISION, DECISION_OUTCOME, OWN
from tieringd.errors import CorruptDataError
from tieringd.formats.operator_decision import (
    decode_decision,
    decode_decision_outcome,
    encode_decision,
    encode_decision_outcome,
)


def test_decision_is_read_and_written_as_the_golden_one():
    """The second record has all its fields."""
    decided, done = OWN / "decision.v1.json", OWN / "decision-done.v1.json"
    assert encode_decision(DECISION) == decided.read_bytes()
    assert decode_decision(decided.read_bytes()) == DECISION
    assert encode_decision_outcome(DECISION, DECISION_OUTCOME) == done.read_bytes()
    assert decode_decision_outcome(done.read_bytes()) == DECISION_OUTCOME
    assert json.loads(decided.read_bytes()).items() <= json.loads(done.read_bytes()).items()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"version": 2}, id="newer"),
        pytest.param({"transactions": {"5": "perhaps"}}, id="no outcome"),
        pytest.param({"transactions": {"five": "aborted"}}, id="no producer"),
        pytest.param({"give_up": [1]}, id="half a range"),
        pytest.param({"made_for": None}, id="no version"),
        pytest.param({"partition": None}, id="no partition"),
    ],
)
def test_damaged_decision_decides_nothing(change):
    """A damaged decision is an error, and never another decision."""
    document = json.loads(encode_decision(DECISION)) | change
    with pytest.raises(CorruptDataError, match="an operator's decision"):
        decode_decision(json.dumps(document).encode())
