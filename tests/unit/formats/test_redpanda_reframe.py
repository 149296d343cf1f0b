"""Whole Redpanda segments re-framed: what comes out, and every fault that must not pass."""

from __future__ import annotations

import itertools

import pytest
from aiokafka.record import MemoryRecords
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import DEFAULT_TIME_MS
from tests.redpanda_builders import (
    ARCHIVAL,
    CONFIGURATION,
    PLACEHOLDER,
    TX_FENCE,
    RedpandaLog,
    Segment,
    raw_batch,
)
from tieringd.errors import CorruptDataError
from tieringd.formats.compression import Codec
from tieringd.formats.record_batch import ABORT_MARKER, NewRecord, encode_batch, parse_header
from tieringd.formats.redpanda_batch import UnsupportedBatchTypeError
from tieringd.formats.redpanda_reframe import Reframing, SegmentReframer
from tieringd.formats.segment_scan import EndedBy, SegmentScanner
from tieringd.model.offset_translation import OffsetTranslation

ALL_BATCHES = 1 << 62
"""A next offset that bounds nothing."""


def reframe(
    segment: Segment,
    *,
    next_offset: int | None = ALL_BATCHES,
    chunk_bytes: int = 1 << 20,
    translation: OffsetTranslation | None = None,
) -> tuple[bytes, Reframing]:
    """Feed as a reader of a file does: always from the first byte that was not consumed."""
    place = translation or OffsetTranslation(segment.raw_base_offset, segment.delta)
    reframer = SegmentReframer(place, next_offset, leader_epoch=segment.term, source=segment.name)
    view, position, out = memoryview(segment.data), 0, bytearray()
    while not reframer.is_done and position < len(view):
        chunk = view[position : position + max(chunk_bytes, reframer.wanted_bytes)]
        consumed = reframer.feed(chunk, out)
        if not consumed and reframer.wanted_bytes > len(view) - position:
            break
        position += consumed
    return bytes(out), reframer.finish(view[position:])


def headers_of(data: bytes):
    headers, position = [], 0
    while position < len(data):
        headers.append(parse_header(data, position))
        position += headers[-1].size_bytes
    return headers


records = st.lists(
    st.builds(
        NewRecord,
        value=st.none() | st.binary(max_size=20),
        key=st.none() | st.binary(max_size=5),
        timestamp_ms=st.integers(0, 2 * DEFAULT_TIME_MS),
        headers=st.lists(st.tuples(st.text(max_size=4), st.binary(max_size=4)), max_size=2).map(tuple),
        offset_delta=st.none(),  # Not given, Hypothesis draws any whole number: it reads the annotation.
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def logs(draw: st.DrawFn, *, with_holes: bool = True) -> RedpandaLog:
    """Draw a log of a few segments and terms with batches of all kinds in any order."""
    log = RedpandaLog().roll(term=draw(st.integers(0, 3)))
    kinds = ["data", "data", "own", "roll", "elected", "marker"] + ["fence", "hole"] * with_holes
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=10)):
        match kind:
            case "data":
                codec = draw(st.sampled_from(Codec))
                log.data(draw(records), codec=codec, producer_id=draw(st.integers(-1, 3)))
            case "own":
                log.bookkeeping(
                    draw(st.sampled_from((CONFIGURATION, ARCHIVAL))), records=draw(st.integers(1, 3))
                )
            case "fence":
                log.bookkeeping(draw(st.sampled_from((TX_FENCE, PLACEHOLDER))))
            case "marker":
                log.marker(draw(st.integers(0, 3)), draw(st.integers(0, 1)))
            case "hole":
                log.hole(draw(st.integers(1, 3)))
            case "roll":
                log.roll()
            case "elected":
                log.roll(term=log.term + 1)
    return log


@given(logs(), st.integers(1, 400))
def test_reframed_segments_are_a_kafka_log(log, chunk_bytes):
    """Each segment's data comes out in Kafka's form, however it is fed, and the delta carries on."""
    place = OffsetTranslation(log.segments[0].raw_base_offset, 0)
    for segment in log.segments:
        # A hole at the end of a segment moves the next one's base and leaves the delta.
        place = OffsetTranslation(segment.raw_base_offset, place.delta)
        assert place.kafka_offset == segment.base_offset
        out, done = reframe(segment, translation=place, chunk_bytes=chunk_bytes)
        assert out == segment.kafka
        assert (done.read_bytes, done.size_bytes) == (len(segment.data), len(out))
        assert done.batch_count == len(segment.served)
        assert done.dropped_batches == len(segment.batches) - len(segment.served)
        assert done.ended_by is EndedBy.END_OF_FILE
        place = done.translation
    assert place.delta == log.delta


@given(logs())
def test_reframed_segments_pass_the_scan_of_an_upload(log):
    """Our own scanner accepts each segment inside its Kafka bounds, under its term."""
    bases = [*(segment.base_offset for segment in log.segments[1:]), log.next_offset]
    for segment, next_offset in zip(log.segments, bases, strict=True):
        out, _ = reframe(segment, next_offset=next_offset)
        scanner = SegmentScanner(segment.base_offset, next_offset)
        assert scanner.feed(memoryview(out)) == len(out)
        found = scanner.finish()
        assert found.batch_count == len(segment.served)
        assert found.epochs == (((segment.term, segment.base_offset),) if out else ())


@given(logs(with_holes=False))
def test_a_client_s_library_reads_contiguous_offsets_and_the_same_records(log):
    """The aiokafka parser finds sound checksums, every offset in turn, and what was written."""
    stream = b"".join(reframe(segment)[0] for segment in log.segments)
    written = [
        (record.key, record.value, record.timestamp, tuple(record.headers))
        for kafka in log.served
        for record in MemoryRecords(kafka).next_batch()
    ]
    offsets, read = [], []
    parser = MemoryRecords(stream)
    while parser.has_next():
        batch = parser.next_batch()
        assert batch.validate_crc()
        for record in batch:
            offsets.append(record.offset)
            read.append((record.key, record.value, record.timestamp, tuple(record.headers)))
    assert offsets == list(range(log.next_offset))
    assert read == written


def test_written_records_reach_a_client_s_library():
    """Keys, values, headers and times are those of the producer, in every codec."""
    rows = [
        NewRecord(b"v%d" % number, b"k", DEFAULT_TIME_MS + number, (("h", b"x"), ("n", None)))
        for number in range(3)
    ]
    log = RedpandaLog().roll(term=5)
    for codec in Codec:
        log.data(rows, codec=codec)
    out, _ = reframe(log.segments[0])
    parser, found = MemoryRecords(out), []
    while parser.has_next():
        found += [
            (each.offset, each.key, each.value, each.timestamp, each.headers) for each in parser.next_batch()
        ]
    assert found == [
        (offset, b"k", row.value, row.timestamp_ms, [("h", b"x"), ("n", None)])
        for offset, row in enumerate(rows * len(Codec))
    ]


def test_batches_that_count_leave_holes_and_the_others_leave_none():
    """A transaction's fence takes a Kafka offset that no client gets; a configuration takes none."""
    log = RedpandaLog().roll(term=1).data([b"a"]).bookkeeping(TX_FENCE).data([b"b"])
    log.bookkeeping(CONFIGURATION, records=4).data([b"c"]).bookkeeping(PLACEHOLDER, records=0)
    out, done = reframe(log.segments[0])
    assert [header.base_offset for header in headers_of(out)] == [0, 2, 3]
    assert done.translation == OffsetTranslation(10, 5)


def test_transactions_keep_their_markers():
    """Markers are served to clients, and end what they ended."""
    log = RedpandaLog().roll(term=1).bookkeeping(TX_FENCE)
    log.data([b"a", b"b"], producer_id=9, is_transactional=True).marker(9, ABORT_MARKER)
    out, _ = reframe(log.segments[0])
    scanner = SegmentScanner(0, log.next_offset)
    scanner.feed(memoryview(out))
    assert [(one.producer_id, one.first_offset, one.last_offset) for one in scanner.finish().aborted] == [
        (9, 1, 3)
    ]


def test_every_flipped_byte_is_found_and_placed():
    """One wrong byte anywhere in a closed segment, its zero tail included, is an error that says where."""
    log = RedpandaLog().roll(term=1).data([b"a", b"b"]).bookkeeping(ARCHIVAL).data([b"c"]).allocated(130)
    segment = log.segments[0]
    ends = list(itertools.accumulate(map(len, segment.batches)))
    offsets = [0, 0, 2, 2, 3]
    for position in range(len(segment.data)):
        batch = sum(end <= position for end in ends)
        for mask in (1 << position % 8, 0xFF):
            with pytest.raises(CorruptDataError) as caught:
                reframe(segment.damaged(position, mask))
            assert caught.value.source == "0-1-v1.log"
            assert caught.value.position == ([0, *ends])[batch]
            assert caught.value.offset == offsets[batch]


def test_every_truncation_of_a_closed_segment_is_found_or_reported():
    """A segment that is cut raises, or ends before the offset that it should reach."""
    log = RedpandaLog().roll(term=1).data([b"a", b"b"]).data([b"c"])
    segment = log.segments[0]
    whole = [0, *itertools.accumulate(map(len, segment.batches))]
    for length in range(len(segment.data)):
        cut = Segment(0, 0, 1, segment.data[:length])
        if length in whole:
            assert reframe(cut)[1].translation.raw_offset < log.next_raw_offset
        else:
            with pytest.raises(CorruptDataError, match="cut"):
                reframe(cut)


@pytest.mark.parametrize("room", [1, 60, 61, 200, 9000])
@pytest.mark.parametrize("chunk_bytes", [61, 100, 1 << 20])
@pytest.mark.parametrize("next_offset", [ALL_BATCHES, None])
def test_allocated_room_ends_a_segment(room, chunk_bytes, next_offset):
    """Zeros to the end of the file are no part of the log, whether it is closed or active."""
    log = RedpandaLog().roll(term=1).data([b"a"])
    size_bytes = len(log.segments[0].data)
    out, done = reframe(log.allocated(room).segments[0], next_offset=next_offset, chunk_bytes=chunk_bytes)
    assert out == log.segments[0].kafka
    assert (done.read_bytes, done.ended_by) == (size_bytes, EndedBy.ZERO_TAIL)


def test_batch_after_allocated_room_is_an_error():
    """Data behind zeros means that something in between was lost."""
    log = RedpandaLog().roll(term=1).data([b"a"]).allocated(61).data([b"b"])
    size_bytes = sum(map(len, log.segments[0].batches[:-1]))
    with pytest.raises(CorruptDataError, match="data follows") as caught:
        reframe(log.segments[0])
    assert (caught.value.position, caught.value.offset) == (size_bytes, 1)


def test_active_segment_ends_before_a_batch_that_is_being_written():
    """Only whole batches come out, and the end is known, wherever the last batch is cut."""
    log = RedpandaLog().roll(term=1).data([b"a"]).data([b"b" * 40])
    segment = log.segments[0]
    first = len(segment.data) - len(segment.batches[-1])
    # The batch's own last byte is zero: with room behind it, nothing is missing without it.
    for length in range(first + 1, len(segment.data) - 1):
        for tail in (b"", bytes(500)):
            torn = Segment(0, 0, 1, segment.data[:length] + tail)
            out, done = reframe(torn, next_offset=None)
            assert out == segment.served[0]
            assert done.ended_by in {EndedBy.TORN_TAIL, EndedBy.ZERO_TAIL}
            assert done.translation == OffsetTranslation(2, 1)


def test_done_reframer_takes_no_more():
    """A reframer consumes nothing after the end of an active segment."""
    log = RedpandaLog().roll(term=1).allocated(100)
    reframer = SegmentReframer(OffsetTranslation(0, 0), None, leader_epoch=1)
    out = bytearray()
    reframer.feed(memoryview(log.segments[0].data), out)
    assert reframer.is_done
    assert reframer.feed(memoryview(log.data([b"a"]).segments[0].batches[1]), out) == 0
    assert out == b""


def test_wanted_bytes_names_the_batch_that_does_not_fit():
    """A batch larger than the view is asked for in its full size, once its length can be believed."""
    data = memoryview(RedpandaLog().data([b"v" * 1000]).segments[0].data)
    reframer = SegmentReframer(OffsetTranslation(0, 0), 12, leader_epoch=0)
    out = bytearray()
    assert reframer.wanted_bytes == 61
    assert reframer.feed(data[:100], out) == 0
    assert reframer.wanted_bytes == len(data)
    assert reframer.feed(data, out) == len(data)
    assert reframer.wanted_bytes == 61


@pytest.mark.parametrize(
    ("place", "next_offset", "fault", "is_second"),
    [
        (OffsetTranslation(8, 0), ALL_BATCHES, "raw batch offset 5 is out of order: 8 comes next", False),
        (OffsetTranslation(5, 2), 7, "batch offset 7 is beyond the segment's last offset 6", True),
    ],
)
def test_batches_stand_inside_their_segment(place, next_offset, fault, is_second):
    """A batch before its segment's base or after its end is not taken."""
    first = raw_batch(encode_batch(0, [NewRecord(b"a")] * 3), raw_offset=5)
    second = raw_batch(encode_batch(0, [NewRecord(b"a")] * 2), raw_offset=8)
    with pytest.raises(CorruptDataError, match=fault) as caught:
        reframe(Segment(5, 0, 1, first + second), translation=place, next_offset=next_offset)
    assert caught.value.position == len(first) * is_second


def test_bookkeeping_may_end_a_segment_at_its_last_offset():
    """Batches without Kafka offsets need no room below the next segment's base."""
    log = RedpandaLog().roll(term=1).data([b"a"]).bookkeeping(ARCHIVAL, records=5)
    out, done = reframe(log.segments[0], next_offset=1)
    assert len(headers_of(out)) == 1
    assert done.translation.kafka_offset == 1


def test_unknown_batch_type_keeps_its_own_error():
    """A type that a newer Redpanda writes has an error other than damage, with a place and a hint."""
    unknown = raw_batch(encode_batch(0, [NewRecord(b"a")]), raw_offset=3, batch_type=99)
    log = RedpandaLog().roll(term=1).data([b"a", b"b"])
    segment = Segment(0, 0, 1, log.segments[0].data + unknown)
    for next_offset in (ALL_BATCHES, None):
        with pytest.raises(UnsupportedBatchTypeError) as caught:
            reframe(segment, next_offset=next_offset)
        assert (caught.value.position, caught.value.offset) == (len(log.segments[0].data), 2)
        assert caught.value.hint
