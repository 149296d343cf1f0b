"""The record of an archive's owners."""

from __future__ import annotations

import pytest

from tests.golden.make_own_golden import ARCHIVE_OWNERS, OWN
from tieringd.errors import CorruptDataError
from tieringd.formats.archive_owners import decode_archive_owners, encode_archive_owners

GOLDEN = OWN / "archive-owners.v1.json"


def test_stored_record_is_read_and_written_alike():
    """The golden file is what this release writes."""
    data = GOLDEN.read_bytes()
    assert decode_archive_owners(data) == ARCHIVE_OWNERS
    assert encode_archive_owners(ARCHIVE_OWNERS) == data


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"version": 1, "clusters": 3}', b'{"version": 2, "clusters": {}}']
)
def test_other_bytes_are_refused(data):
    """Other bytes are refused, and those of a newer release as well."""
    with pytest.raises(CorruptDataError, match="record of the archive's owners"):
        decode_archive_owners(data)
