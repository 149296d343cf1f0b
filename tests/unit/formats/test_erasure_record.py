"""The records of an erasure and of a deletion by offset: what they say, and that they hold no key."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.golden.make_own_golden import (
    DELETION_OUTCOME,
    DELETION_REQUEST,
    ERASURE_OUTCOME,
    ERASURE_REQUEST,
    OWN,
)
from tests.unit.model.values import PARTITION, remote
from tieringd.errors import CorruptDataError
from tieringd.formats.job_records import (
    decode_erasure,
    encode_deletion_outcome,
    encode_deletion_request,
    encode_erasure_outcome,
    encode_erasure_request,
)
from tieringd.formats.object_keys import data_key
from tieringd.model.segment import Rewriting, RewritingKind


def test_records_are_written_as_the_golden_ones():
    """Audits may rely on every field of the records."""
    begun, done = OWN / "erasure-begun.v3.json", OWN / "erasure-done.v3.json"
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


OLD, NEW = remote(0, 9, writer_id="0a"), remote(0, 9, writer_id="rewritten-0123456789abcdef", size_bytes=61)
OUTCOME = replace(
    ERASURE_OUTCOME,
    partitions=(
        replace(
            ERASURE_OUTCOME.partitions[0],
            partition=PARTITION,
            replaced=(data_key(PARTITION, OLD), data_key(PARTITION, replace(NEW, writer_id="rewritten-0b"))),
            stored=(data_key(PARTITION, NEW),),
        ),
    ),
)


def test_rebuild_reads_what_was_replaced_and_gone_over():
    """The last record has both. The first one only says that an erasure had begun."""
    done = decode_erasure(encode_erasure_outcome(ERASURE_REQUEST, OUTCOME), source="test")
    assert (done.job_id, done.topics) == (ERASURE_REQUEST.job_id, ERASURE_REQUEST.topics)
    assert done.gone_over == OUTCOME.gone_over
    (one,) = done.rewritten
    assert (one.partition, one.retired_at_ms) == (PARTITION, OUTCOME.partitions[0].retired_at_ms)
    assert one.rewriting == Rewriting.of(
        RewritingKind.REWRITTEN, (OLD, replace(NEW, writer_id="rewritten-0b")), (NEW,)
    )
    begun = decode_erasure(encode_erasure_request(ERASURE_REQUEST), source="test")
    assert (begun.key_sha256, begun.rewritten, begun.gone_over) == (done.key_sha256, (), ())


def test_record_of_version_1_does_not_say_what_was_gone_over():
    """That is not the same as nothing."""
    document = json.loads(encode_erasure_outcome(ERASURE_REQUEST, OUTCOME))
    for name in ("gone_over", "objects_left", "kept_by_store"):
        del document[name]
    old = decode_erasure(json.dumps(document | {"version": 1}).encode(), source="test")
    assert old.gone_over is None
    assert old.rewritten


def test_record_of_version_2_does_not_say_that_anything_had_expired():
    """A record of version 2 leaves no older object out."""
    document = json.loads(encode_erasure_outcome(ERASURE_REQUEST, OUTCOME))
    new = decode_erasure(json.dumps(document).encode(), source="test")
    assert [one.has_expired for one in new.gone_over or ()] == [True]
    del document["gone_over"][0]["has_expired"]
    old = decode_erasure(json.dumps(document | {"version": 2}).encode(), source="test")
    assert [one.has_expired for one in old.gone_over or ()] == [False]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda _: b"junk", id="no JSON"),
        pytest.param(lambda _: b"[]", id="no object"),
        pytest.param(lambda document: _changed(document, version=4), id="newer version"),
        pytest.param(lambda document: _changed(document, topics=None), id="no topics"),
        pytest.param(lambda document: _changed(document, gone_over=[{"partition": 1}]), id="no range"),
        pytest.param(lambda document: _with_stored(document, []), id="nothing stored"),
        pytest.param(lambda document: _with_stored(document, ["another/key"]), id="no data object"),
    ],
)
def test_record_that_is_damaged_is_named(damage):
    """A rebuild tells of it, and passes nothing over in silence."""
    document = json.loads(encode_erasure_outcome(ERASURE_REQUEST, OUTCOME))
    with pytest.raises(CorruptDataError, match=r"record of an erasure.*audit/erasures/x"):
        decode_erasure(damage(document), source="audit/erasures/x")


def _changed(document, **changes):
    return json.dumps(document | changes).encode()


def _with_stored(document, stored):
    return _changed(document, partitions=[document["partitions"][0] | {"stored": stored}])
