"""The records of an erasure and of a deletion by offset: what they say, and that they hold no key."""

from __future__ import annotations

import json

from tests.golden.make_own_golden import (
    DELETION_OUTCOME,
    DELETION_REQUEST,
    ERASURE_OUTCOME,
    ERASURE_REQUEST,
    OWN,
)
from tieringd.formats.job_records import (
    encode_deletion_outcome,
    encode_deletion_request,
    encode_erasure_outcome,
    encode_erasure_request,
)


def test_records_are_written_as_the_golden_ones():
    """Audits may rely on every field of the records."""
    begun, done = OWN / "erasure-begun.v2.json", OWN / "erasure-done.v2.json"
    assert encode_erasure_request(ERASURE_REQUEST) == begun.read_bytes()
    assert encode_erasure_outcome(ERASURE_REQUEST, ERASURE_OUTCOME) == done.read_bytes()


def test_last_record_says_what_the_first_one_does():
    """Each of the two records has all fields, so one is enough."""
    begun = json.loads(encode_erasure_request(ERASURE_REQUEST))
    done = json.loads(encode_erasure_outcome(ERASURE_REQUEST, ERASURE_OUTCOME))
    assert begun.items() <= done.items()
    assert done["partitions"][0]["partition"]["topic"] == "pay.ments_eu-1"


def test_records_of_a_deletion_are_written_as_the_golden_ones():
    """The outcome has all fields of the request, and one result for each partition."""
    begun, done = OWN / "deletion-begun.v1.json", OWN / "deletion-done.v1.json"
    assert encode_deletion_request(DELETION_REQUEST) == begun.read_bytes()
    assert encode_deletion_outcome(DELETION_REQUEST, DELETION_OUTCOME) == done.read_bytes()
    assert json.loads(begun.read_bytes()).items() <= json.loads(done.read_bytes()).items()
