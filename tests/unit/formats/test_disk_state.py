"""What brokers' daemons say of their disks, and of the quotas they lowered: JSON in the bucket."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.make_own_golden import DISK_STATE, OWN, QUOTA_RECORD, files
from tests.unit.formats.damage import NOT_JSON_OBJECTS, changed_heads, truncations
from tieringd.errors import CorruptDataError
from tieringd.formats.disk_state import (
    PublishedDiskState,
    QuotaPhase,
    QuotaRecord,
    decode_disk_state,
    decode_quota_record,
    encode_disk_state,
    encode_quota_record,
)
from tieringd.model.disk_state import DiskState, QuotaChange, QuotaEntity

FORMATS = {
    "disk-state.v1.json": (decode_disk_state, DISK_STATE, "disk state"),
    "quota-record.v1.json": (decode_quota_record, QUOTA_RECORD, "record of client quotas"),
}
DOCUMENTS = {name: json.loads((OWN / name).read_bytes()) for name in FORMATS}
each_format = pytest.mark.parametrize("name", FORMATS)

names = st.none() | st.text(max_size=5)
entities = st.dictionaries(st.sampled_from(["user", "client-id", "ip"]), names, min_size=1).map(
    lambda parts: QuotaEntity(tuple(sorted(parts.items(), key=lambda one: one[0])))
)
changes = st.builds(QuotaChange, entities, st.none() | st.floats(1, 1e18))


@given(
    st.builds(
        PublishedDiskState,
        st.text(max_size=9),
        st.integers(0, 2**31 - 1),
        st.sampled_from(DiskState),
        st.integers(0, 2**62),
    )
)
def test_disk_state_survives_encoding(published):
    """Every field comes back, and the text is ASCII that ends with a line break."""
    data = encode_disk_state(published)
    assert decode_disk_state(data) == published
    assert data.isascii()
    assert data.endswith(b"}\n")


@given(
    st.builds(
        QuotaRecord,
        st.sampled_from(QuotaPhase),
        st.integers(1, 2**62),
        st.lists(changes, max_size=3).map(tuple),
        st.integers(0, 2**31 - 1),
        st.integers(0, 2**62),
    )
)
def test_quota_record_survives_encoding(record):
    """Defaults stay different from names, and what was not set before from what was."""
    data = encode_quota_record(record)
    assert decode_quota_record(data) == record
    assert data.isascii()


@each_format
def test_golden_file_is_read_and_written(name):
    """The golden file of version 1 decodes to its values, and encodes to the same bytes."""
    decode, value, _ = FORMATS[name]
    data = (OWN / name).read_bytes()
    assert decode(data) == value
    assert files()[name] == data


@each_format
def test_document_of_a_newer_version_says_what_to_do(name):
    """The version is looked at first, because a newer document may hold other fields."""
    decode, _, what = FORMATS[name]
    with pytest.raises(CorruptDataError) as caught:
        decode(b'{"version": 2, "name": "fields that we do not know"}')
    assert str(caught.value) == f"{what} has version 2; this release reads 1. Upgrade tieringd on this host"


@each_format
def test_document_without_a_field_is_corrupt(name):
    """Every field is needed, and the error names the one that is missing."""
    decode, _, what = FORMATS[name]
    for field in DOCUMENTS[name]:
        document = {key: value for key, value in DOCUMENTS[name].items() if key != field}
        with pytest.raises(CorruptDataError, match=f"{what} cannot be read: '{field}'"):
            decode(json.dumps(document).encode())


@each_format
@pytest.mark.parametrize("data", NOT_JSON_OBJECTS, ids=range(len(NOT_JSON_OBJECTS)))
def test_bytes_that_are_no_json_object_are_corrupt(name, data):
    """Anything but a JSON object with the right fields is corrupt data."""
    with pytest.raises(CorruptDataError):
        FORMATS[name][0](data)


@each_format
def test_any_truncated_document_is_corrupt(name):
    """Only the last byte, the line break, can be missed without a trace."""
    for data in truncations((OWN / name).read_bytes()[:-1]):
        with pytest.raises(CorruptDataError):
            FORMATS[name][0](data)


@each_format
@given(data=st.data())
def test_document_with_any_other_value_is_read_or_corrupt(name, data):
    """A document with a field of any other type is read or raises CorruptDataError."""
    document = data.draw(changed_heads(DOCUMENTS[name]))
    with contextlib.suppress(CorruptDataError):
        FORMATS[name][0](json.dumps(document).encode())


def test_unknown_state_is_corrupt():
    """A word that is no state is not taken for one."""
    document = DOCUMENTS["disk-state.v1.json"] | {"state": "fine"}
    with pytest.raises(CorruptDataError, match="FINE"):
        decode_disk_state(json.dumps(document).encode())
