"""The walk over headers alone."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import OLD_MESSAGE_V0, OLD_MESSAGE_V1, batch, golden_log, segment_bytes
from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import (
    CONTROL_FLAG,
    NewRecord,
    OldMagicError,
    encode_batch,
    encode_marker,
    parse_header,
    sealed,
)
from tieringd.formats.segment_scan import EndedBy, HeaderWalk, SegmentScanner
from tieringd.formats.transactions import MarkerSearch, TransactionTracker

SOUND = segment_bytes(0, batches=4)
BATCH_BYTES = len(SOUND) // 4


class Reads:
    """Bytes to walk over, which remember how much of them was read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.read_bytes = 0

    def __call__(self, position: int, size_bytes: int) -> bytes:
        self.read_bytes += size_bytes
        return self.data[position : position + size_bytes]


def walk(data: bytes, **options) -> HeaderWalk:
    options = {"size_bytes": len(data), "base_offset": 0} | options
    return HeaderWalk(Reads(data), **options)


@pytest.mark.parametrize("topic", ["codec-gzip", "transactions", "compacted"])
def test_walk_finds_what_a_scan_finds(topic):
    """End, transactions and batches are the same as those of a full scan."""
    data = golden_log(topic)
    scanner = SegmentScanner(0, 24)
    scanner.feed(memoryview(data))
    scan = scanner.finish()
    walked = walk(data)
    assert tuple(walked.follow_transactions(TransactionTracker(0))) == scan.aborted
    assert (walked.position, walked.next_offset - 1) == (scan.size_bytes, scan.last_offset_found)
    assert len(list(walk(data).batches())) == scan.batch_count


def test_walk_skips_the_bodies_of_large_batches():
    """A megabyte of records costs a page for each header."""
    reads = Reads(segment_bytes(0, batches=4, records_per_batch=1, value=bytes(250_000)))
    walked = HeaderWalk(reads, size_bytes=len(reads.data), base_offset=0)
    assert [header.base_offset for _, header in walked.batches()] == [0, 1, 2, 3]
    assert reads.read_bytes <= 4 * 4096


def test_walk_goes_on_from_a_position():
    """A later walk begins where an earlier one ended."""
    walked = walk(SOUND, position=2 * BATCH_BYTES, base_offset=6)
    assert [(at, header.base_offset) for at, header in walked.batches()] == [
        (2 * BATCH_BYTES, 6),
        (3 * BATCH_BYTES, 9),
    ]
    assert (walked.position, walked.next_offset) == (len(SOUND), 12)


@pytest.mark.parametrize(
    ("data", "batches", "ended_by"),
    [
        pytest.param(SOUND, 4, EndedBy.END_OF_FILE, id="whole"),
        pytest.param(b"", 0, EndedBy.END_OF_FILE, id="empty"),
        pytest.param(SOUND + bytes(9000), 4, EndedBy.ZERO_TAIL, id="zeros"),
        pytest.param(SOUND + bytes(9), 4, EndedBy.ZERO_TAIL, id="few-zeros"),
        pytest.param(SOUND[:-1], 3, EndedBy.TORN_TAIL, id="torn-body"),
        pytest.param(SOUND[: -BATCH_BYTES + 60], 3, EndedBy.TORN_TAIL, id="torn-header"),
    ],
)
def test_walk_ends_after_the_last_whole_batch(data, batches, ended_by):
    """A cut batch or allocated zeros end the walk, and it says which."""
    walked = walk(data)
    assert len(list(walked.batches())) == batches
    assert (walked.position, walked.next_offset, walked.ended_by) == (
        batches * BATCH_BYTES,
        batches * 3,
        ended_by,
    )


@pytest.mark.parametrize("message", [OLD_MESSAGE_V0, OLD_MESSAGE_V1], ids=["v0", "v1"])
def test_walk_over_old_messages_says_so(message):
    """Formats v0 and v1 are not taken for corruption."""
    with pytest.raises(OldMagicError):
        list(walk(message * 3).batches())


@pytest.mark.parametrize("tail", [b"", batch(3)], ids=["last", "before-another"])
def test_walk_tells_a_damaged_magic_from_old_messages(tail):
    """A batch whose magic alone is damaged is corrupt, and so is one that ends early."""
    whole = batch(0)
    for data in (whole[:16] + b"\1" + whole[17:] + tail, whole[:16] + b"\1" + whole[17:-1]):
        with pytest.raises(CorruptDataError, match="magic is 1, not 2") as caught:
            list(walk(data).batches())
        assert not isinstance(caught.value, OldMagicError)


def test_walk_reports_offsets_out_of_order():
    """A batch that does not follow the one before it is corrupt, and located."""
    with pytest.raises(CorruptDataError, match="3 is out of order: 6 comes next") as caught:
        list(walk(batch(3) + batch(3), source="t-0/0.log").batches())
    assert (caught.value.source, caught.value.position) == ("t-0/0.log", len(batch(3)))


def test_walk_reports_an_impossible_header():
    """A header that no batch can have is corrupt."""
    bad = sealed(parse_header(batch())._replace(record_count=-1), b"")
    with pytest.raises(CorruptDataError, match="-1 records"):
        list(walk(bad).batches())


@pytest.mark.parametrize(
    ("body", "words"), [(b"x", "does not fit"), (bytes(70_000), "70061 bytes is impossible")]
)
def test_walk_reports_a_marker_it_cannot_read(body, words):
    """A control batch without a readable marker is corrupt, and a huge one is not even read."""
    plain = parse_header(encode_marker(5, producer_id=1))
    bad = sealed(plain._replace(attributes=CONTROL_FLAG | 0x10), body)
    with pytest.raises(CorruptDataError, match=words) as caught:
        walk(bad).follow_transactions(TransactionTracker(0))
    assert (caught.value.position, caught.value.offset) == (0, 5)


def test_walk_goes_on_behind_a_marker_that_the_cleaner_emptied():
    """An emptied marker is a fault, with its place, only while its transaction still has records."""
    data = encode_batch(0, [NewRecord(b"a")], producer_id=2, is_transactional=True)
    emptied = sealed(parse_header(encode_marker(1, producer_id=1))._replace(record_count=0), b"")
    walked = walk(data + emptied + encode_marker(2, producer_id=2, marker=0))
    assert [one.producer_id for one in walked.follow_transactions(TransactionTracker(0))] == [2]
    assert walked.next_offset == 3

    with pytest.raises(CorruptDataError, match="removed by the cleaner") as caught:
        walk(emptied).follow_transactions(MarkerSearch(TransactionTracker.with_open({1: 0})))
    assert (caught.value.position, caught.value.offset) == (0, 1)


@given(st.binary(max_size=300))
def test_walk_over_arbitrary_bytes_ends_or_is_corrupt(data):
    """No bytes raise anything but CorruptDataError."""
    walked = walk(SOUND + data)
    with contextlib.suppress(CorruptDataError):
        walked.follow_transactions(TransactionTracker(0))
    assert walked.position >= len(SOUND)
