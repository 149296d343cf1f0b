"""Looking a timestamp up in batches that unpack to far more than they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tieringd.archive.record_reader import _first_record_in
from tieringd.formats.compression import Codec
from tieringd.formats.record_batch import NewRecord, encode_batch, parse_header


def batch_of(*records, codec):
    data = encode_batch(7, records, codec=codec)
    return SimpleNamespace(data=memoryview(data), header=parse_header(data), position=0)


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.GZIP, Codec.LZ4])
def test_batch_that_unpacks_to_more_than_64_mib_is_not_unpacked(codec):
    """A reader begins at its first offset, and loses nothing by that."""
    bomb = batch_of(NewRecord(bytes(70 << 20), timestamp_ms=5), codec=codec)
    assert len(bomb.data) < 1 << 20
    assert _first_record_in(bomb, "key", 0, 5).offset == 7
    assert _first_record_in(bomb, "key", 9, 5).offset == 9


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.GZIP, Codec.LZ4, Codec.NONE])
def test_ordinary_batch_has_the_first_record_of_that_time(codec):
    """The first record as late as the time is found, or none."""
    batch = batch_of(*(NewRecord(b"v", timestamp_ms=time) for time in (1, 5, 9)), codec=codec)
    assert _first_record_in(batch, "key", 0, 4).offset == 8
    assert _first_record_in(batch, "key", 9, 4).offset == 9
    assert _first_record_in(batch, "key", 0, 10) is None
