"""The records of an erasure: what they say, and that they hold no key."""

from __future__ import annotations

import json

from tests.golden.make_own_golden import ERASURE_OUTCOME, ERASURE_REQUEST, OWN
from tieringd.formats.job_records import encode_erasure_outcome, encode_erasure_request


def test_records_are_written_as_the_golden_ones():
    """Someone's audit may rest on every field of them."""
    begun, done = OWN / "erasure-begun.v2.json", OWN / "erasure-done.v2.json"
    assert encode_erasure_request(ERASURE_REQUEST) == begun.read_bytes()
    assert encode_erasure_outcome(ERASURE_REQUEST, ERASURE_OUTCOME) == done.read_bytes()


def test_last_record_says_what_the_first_one_does():
    """Whoever has one of them needs not look for the other."""
    begun = json.loads(encode_erasure_request(ERASURE_REQUEST))
    done = json.loads(encode_erasure_outcome(ERASURE_REQUEST, ERASURE_OUTCOME))
    assert begun.items() <= done.items()
    assert done["partitions"][0]["partition"]["topic"] == "pay.ments_eu-1"
