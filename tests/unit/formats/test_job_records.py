"""The record of a rewriting: what was written is read, and anything else is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.make_own_golden import OWN, PARTITION, REWRITING
from tieringd.errors import CorruptDataError
from tieringd.formats.job_records import decode_rewriting, encode_rewriting
from tieringd.model.segment import Rewriting, RewritingKind, SegmentIdentity

GOLDEN = OWN / "rewriting.v1.json"

numbers = st.integers(0, 2**63 - 1)
identities = st.builds(SegmentIdentity, numbers, numbers, numbers, numbers, st.just("rewritten-0a"))


def test_golden_record_is_written_and_read():
    """The record of an older release is understood."""
    assert encode_rewriting(PARTITION, REWRITING) == GOLDEN.read_bytes()
    assert decode_rewriting(GOLDEN.read_bytes(), source="golden") == (PARTITION, REWRITING)


@given(
    st.sampled_from(RewritingKind),
    st.lists(identities).map(tuple),
    st.lists(identities, min_size=1).map(tuple),
)
def test_every_rewriting_is_read_as_it_was_written(kind, replaced, stored):
    """All kinds, and all numbers."""
    rewriting = Rewriting(kind, replaced, stored)
    assert decode_rewriting(encode_rewriting(PARTITION, rewriting), source="x") == (PARTITION, rewriting)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"version": 2}, "version 2", id="newer"),
        pytest.param({"kind": "sorted"}, "damaged", id="unknown kind"),
        pytest.param({"stored": []}, "names no segment", id="empty"),
        pytest.param({"stored": [[1, 2, 3]]}, "damaged", id="short row"),
        pytest.param({"replaced": 5}, "damaged", id="no rows"),
        pytest.param({"partition": "x"}, "damaged", id="no partition"),
    ],
)
def test_other_documents_are_refused(changes, words):
    """The error has the name of the object."""
    document = json.loads(GOLDEN.read_bytes()) | changes
    with pytest.raises(CorruptDataError, match=words) as caught:
        decode_rewriting(json.dumps(document).encode(), source="its/key")
    assert caught.value.source == "its/key"


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", GOLDEN.read_bytes()[:-9]])
def test_what_is_no_document_is_refused(data):
    """A part of one as well."""
    with pytest.raises(CorruptDataError, match="not a rewriting record"):
        decode_rewriting(data, source="x")
