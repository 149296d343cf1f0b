"""The scan of a whole segment: what it finds, and every fault it must not miss."""

from __future__ import annotations

import itertools
import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import DEFAULT_TIME_MS, OLD_MESSAGE_V1, batch, golden_log, segment_bytes
from tieringd.errors import CorruptDataError
from tieringd.formats.record_batch import (
    CONTROL_FLAG,
    OldMagicError,
    encode_batch,
    parse_header,
    sealed,
)
from tieringd.formats.segment_scan import EndedBy, SegmentScan, SegmentScanner
from tieringd.model.segment import NO_TIMESTAMP, IndexEntry

ROLLED_BASES = (0, 5, 10)


def run(scanner: SegmentScanner, data: bytes, chunk_bytes: int = 1 << 20) -> SegmentScan:
    """Feed as a reader of a file does: always from the first byte that was not consumed."""
    view, position = memoryview(data), 0
    while not scanner.is_done and position < len(view):
        chunk = view[position : position + max(chunk_bytes, scanner.wanted_bytes)]
        consumed = scanner.feed(chunk)
        if not consumed and scanner.wanted_bytes > len(view) - position:
            break
        position += consumed
    return scanner.finish(len(view) - position)


def scan(data: bytes, base_offset: int = 0, next_offset: int | None = 12, **options) -> SegmentScan:
    chunk_bytes = options.pop("chunk_bytes", 1 << 20)
    return run(SegmentScanner(base_offset, next_offset, **options), data, chunk_bytes)


def comparable(found: SegmentScan):
    return {name: getattr(found, name) for name in SegmentScan.__slots__ if name != "tracker"}


def test_scan_finds_everything_an_upload_needs():
    """A plain segment's size, checksum, times, counts, epochs and index come from one pass."""
    first = batch(100, [b"x"] * 3, timestamp_ms=5000, leader_epoch=3)
    second = batch(103, [b"y"] * 2, timestamp_ms=4000, leader_epoch=3)
    third = batch(107, [b"z"] * 3, timestamp_ms=4500, leader_epoch=5)
    data = first + second + third
    found = scan(data, 98, 120, index_interval_bytes=len(first) + 1)
    assert found.tracker.open_transactions == {}
    assert comparable(found) == {
        "size_bytes": len(data),
        "crc32c": crc32c(data),
        "base_timestamp_ms": 4000,
        "max_timestamp_ms": 5002,
        "record_count": 8,
        "batch_count": 3,
        "epochs": ((3, 98), (5, 107)),
        "entries": (IndexEntry(100, 0, 5002), IndexEntry(107, len(first + second), 5002)),
        "last_offset_found": 109,
        "has_transactions": False,
        "aborted": (),
        "ended_by": EndedBy.END_OF_FILE,
    }


def test_scan_of_an_empty_segment_finds_nothing():
    """A segment without bytes is sound and has no times."""
    found = scan(b"")
    assert (found.size_bytes, found.crc32c, found.batch_count, found.last_offset_found) == (0, 0, 0, None)
    assert (found.base_timestamp_ms, found.max_timestamp_ms) == (NO_TIMESTAMP, NO_TIMESTAMP)
    assert (found.epochs, found.entries) == ((), ())


@pytest.mark.parametrize("base_offset", ROLLED_BASES)
def test_scan_of_a_broker_s_segments_agrees_with_its_epochs(base_offset):
    """Each golden segment holds five records under one leader epoch."""
    found = scan(golden_log("rolled", base_offset), base_offset, base_offset + 5)
    assert (found.record_count, found.batch_count) == (5, 5)
    assert found.epochs == (({0: 0, 5: 2, 10: 4}[base_offset], base_offset),)


def test_scan_of_a_compacted_segment_keeps_its_holes():
    """Batches without records count as batches and give no times; a delete horizon is no time either."""
    data = golden_log("compacted")
    found = scan(data, 0, 20)
    assert found.size_bytes == len(data)
    assert (found.record_count, found.batch_count) == (4, 8)
    headers = []
    for _ in range(8):
        headers.append(parse_header(data, sum(header.size_bytes for header in headers)))
    kept = [header.max_timestamp_ms for header in headers[4:]]
    assert (found.base_timestamp_ms, found.max_timestamp_ms) == (min(kept), max(kept))


def test_scan_of_batches_without_records_has_no_times():
    """Nothing is known of time when no record is left."""
    found = scan(encode_batch(0, [], last_offset_delta=3))
    assert (found.batch_count, found.record_count, found.last_offset_found) == (1, 0, 3)
    assert (found.base_timestamp_ms, found.max_timestamp_ms) == (NO_TIMESTAMP, NO_TIMESTAMP)


def test_delete_horizon_is_not_taken_for_a_record_s_time():
    """The horizon stands in the base timestamp's place, so the maximum bounds it."""
    plain = batch(0, timestamp_ms=1000)
    header = parse_header(plain)
    marked = header._replace(attributes=0x40, base_timestamp_ms=9000)
    assert scan(sealed(marked, plain[61:])).base_timestamp_ms == 1002


def test_records_without_timestamps_leave_the_others_alone():
    """A client that sent no timestamp does not make the segment look timeless."""
    found = scan(batch(0, [b"a"], timestamp_ms=-1) + batch(1, [b"b"], timestamp_ms=7))
    assert (found.base_timestamp_ms, found.max_timestamp_ms) == (7, 7)


def test_unstamped_epochs_say_nothing():
    """Batches without a leader epoch neither begin an epoch nor end one."""
    data = b"".join(
        batch(offset, [b"v"], leader_epoch=epoch) for offset, epoch in enumerate((-1, 2, -1, 2, 4))
    )
    assert scan(data).epochs == ((2, 0), (4, 4))


@given(st.integers(1, 400), st.sampled_from(["codec-none", "codec-zstd", "transactions", "compacted"]))
def test_chunks_of_any_size_give_the_same_scan(chunk_bytes, topic):
    """How the bytes arrive makes no difference."""
    data = golden_log(topic)
    whole = scan(data, 0, 24, index_interval_bytes=200)
    assert comparable(scan(data, 0, 24, index_interval_bytes=200, chunk_bytes=chunk_bytes)) == comparable(
        whole
    )


@given(st.lists(st.integers(61, 500), max_size=12), st.integers(0, 300))
def test_index_entries_are_never_closer_than_the_interval(sizes, interval):
    """The first batch has an entry, and each other entry stands at least an interval behind."""
    batches = [batch(number, [b"v" * size]) for number, size in enumerate(sizes)]
    found = scan(b"".join(batches), index_interval_bytes=interval)
    positions = [entry.position for entry in found.entries]
    assert positions[:1] == ([0] if batches else [])
    if interval <= 61:
        assert len(positions) == len(batches)
    assert all(b - a >= interval for a, b in itertools.pairwise(positions))
    for entry in found.entries:
        assert parse_header(b"".join(batches), entry.position).base_offset == entry.offset


def test_wanted_bytes_names_the_batch_that_does_not_fit():
    """A batch larger than the view is asked for in its full size."""
    data = batch(0, [b"v" * 1000])
    scanner = SegmentScanner(0, 12)
    assert scanner.wanted_bytes == 61
    assert scanner.feed(memoryview(data)[:100]) == 0
    assert scanner.wanted_bytes == len(data)
    assert scanner.feed(memoryview(data)) == len(data)
    assert scanner.finish().batch_count == 1


def test_transactions_of_a_broker_s_segment_are_found():
    """The golden log has two aborted transactions and none open."""
    found = scan(golden_log("transactions"), 0, 10)
    assert found.has_transactions
    assert [(one.first_offset, one.last_offset) for one in found.aborted] == [(0, 4), (8, 9)]
    assert found.tracker.open_transactions == {}


def test_unreadable_marker_is_corrupt_and_located():
    """A control batch that holds no marker names file, position and offset."""
    plain = batch(3, [b"v"], is_transactional=True, producer_id=1)
    broken = sealed(parse_header(plain)._replace(attributes=CONTROL_FLAG | 0x10), plain[61:])
    first = batch(0)
    with pytest.raises(CorruptDataError, match="holds no marker") as caught:
        scan(first + broken, source="t-0/0.log")
    assert (caught.value.source, caught.value.position, caught.value.offset) == ("t-0/0.log", len(first), 3)


SOUND = segment_bytes(0, batches=4)
BATCH_BYTES = len(SOUND) // 4


def edited(number: int, **fields) -> bytes:
    """Return SOUND with one batch's header changed and its checksum right again."""
    start = number * BATCH_BYTES
    header = parse_header(SOUND, start)
    changed = sealed(header._replace(**fields), SOUND[start + 61 : start + BATCH_BYTES])
    return SOUND[:start] + changed + SOUND[start + BATCH_BYTES :]


def with_length(number: int, length: int) -> bytes:
    data = bytearray(SOUND)
    struct.pack_into(">i", data, number * BATCH_BYTES + 8, length)
    return bytes(data)


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20], ids=["by-batch", "one-shot"])
@pytest.mark.parametrize(
    ("data", "words", "position", "offset"),
    [
        pytest.param(SOUND[:-1], "last batch is cut", 3, 9, id="cut-body"),
        pytest.param(
            SOUND[: -BATCH_BYTES + 30], "last batch is cut: only 30 of at least 61", 3, 9, id="cut-header"
        ),
        pytest.param(SOUND + bytes(500), "zero tail of 500 bytes; preallocated", 4, 12, id="zero-tail"),
        pytest.param(SOUND + bytes(60), "zero tail of 60 bytes", 4, 12, id="short-zero-tail"),
        pytest.param(
            SOUND[:BATCH_BYTES] + bytes(200) + SOUND[BATCH_BYTES:], "data follows", 1, 3, id="zero-hole"
        ),
        pytest.param(edited(1, record_count=9), "9 records", 1, 3, id="count"),
        pytest.param(edited(1, base_offset=2), "2 is out of order: 3 comes next", 1, 2, id="overlap"),
        pytest.param(edited(2, base_offset=1), "1 is out of order: 6 comes next", 2, 1, id="back"),
        pytest.param(
            edited(3, last_offset_delta=3), "12 is beyond the segment's last offset 11", 3, 9, id="beyond"
        ),
        pytest.param(with_length(1, 10), "length 10 is impossible", 1, 3, id="short-length"),
        pytest.param(with_length(1, -5), "length -5 is impossible", 1, 3, id="negative-length"),
        pytest.param(with_length(1, 2**31 - 1), "length 2147483647 is impossible", 1, 3, id="huge-length"),
        pytest.param(with_length(2, 5000), "last batch is cut", 2, 6, id="length-past-end"),
    ],
)
def test_fault_of_a_closed_segment_is_named_and_located(data, words, position, offset, chunk_bytes):
    """Each fault says what it is, at which byte and offset, however the bytes arrive."""
    with pytest.raises(CorruptDataError, match=words) as caught:
        scan(data, chunk_bytes=chunk_bytes, source="t-0/0.log")
    assert (caught.value.source, caught.value.position, caught.value.offset) == (
        "t-0/0.log",
        position * BATCH_BYTES,
        offset,
    )


def test_checksum_fault_shows_both_checksums():
    """A flipped bit in a record names the batch and both checksums."""
    data = bytearray(SOUND)
    data[2 * BATCH_BYTES - 1] ^= 1
    with pytest.raises(
        CorruptDataError, match=r"batch CRC is [0-9a-f]{8} and should be [0-9a-f]{8}"
    ) as caught:
        scan(bytes(data))
    assert (caught.value.position, caught.value.offset) == (BATCH_BYTES, 3)


def test_batch_before_the_segment_is_corrupt():
    """Offsets below the segment's base do not belong to it."""
    with pytest.raises(CorruptDataError, match="offset 0 is before the segment's base offset 3"):
        scan(SOUND, 3)


def test_epoch_that_goes_back_is_corrupt():
    """Leader epochs of a log only rise."""
    data = batch(0, leader_epoch=5) + batch(3, leader_epoch=4)
    with pytest.raises(CorruptDataError, match="leader epoch 4 follows 5") as caught:
        scan(data)
    assert caught.value.offset == 3


def test_old_messages_are_told_from_corruption():
    """A segment in format v1 raises the error that the archiver treats as a gap."""
    for chunk_bytes in (1, 62, 1000):
        with pytest.raises(OldMagicError, match="v1 is not supported") as caught:
            scan(OLD_MESSAGE_V1 + SOUND, chunk_bytes=chunk_bytes, source="t-0/0.log")
        assert caught.value.source == "t-0/0.log"


@pytest.mark.parametrize("magic", [b"\0", b"\1"])
def test_damaged_magic_is_told_from_old_messages(magic):
    """A batch whose magic alone is damaged is corrupt: the magic is outside the batch's checksum."""
    data = SOUND[: BATCH_BYTES + 16] + magic + SOUND[BATCH_BYTES + 17 :]
    for chunk_bytes in (1, 62, 1000):
        with pytest.raises(CorruptDataError, match=f"magic is {magic[0]}, not 2") as caught:
            scan(data, chunk_bytes=chunk_bytes)
        assert not isinstance(caught.value, OldMagicError)
        assert (caught.value.position, caught.value.offset) == (BATCH_BYTES, 3)


@pytest.mark.parametrize("topic", ["codec-gzip", "transactions", "rolled", "compacted"])
def test_every_truncation_of_a_golden_segment_is_detected(topic):
    """A closed segment that ends inside a batch never passes."""
    data = golden_log(topic)
    ends, position = {0}, 0
    while position < len(data):
        position += parse_header(data, position).size_bytes
        ends.add(position)
    for size in range(len(data)):
        if size in ends:
            assert scan(data[:size], 0, 24).size_bytes == size
        else:
            with pytest.raises(CorruptDataError):
                scan(data[:size], 0, 24)


@pytest.mark.parametrize("topic", ["codec-lz4", "transactions", "compacted"])
def test_every_flipped_byte_of_a_golden_segment_is_detected(topic):
    """Any change behind the leader epoch of any batch is found; in front of it, by order or length."""
    data = golden_log(topic)
    position = 0
    while position < len(data):
        size_bytes = parse_header(data, position).size_bytes
        for place in range(position + 16, position + size_bytes):
            flipped = bytearray(data)
            flipped[place] ^= 0x55
            with pytest.raises(CorruptDataError):
                scan(bytes(flipped), 0, 24)
        position += size_bytes


@given(st.binary(max_size=300), st.booleans(), st.integers(1, 100))
def test_arbitrary_bytes_are_corrupt_or_an_end(data, is_active, chunk_bytes):
    """No bytes raise anything but CorruptDataError, behind sound batches or alone."""
    for prefix in (b"", SOUND):
        try:
            found = scan(prefix + data, 0, None if is_active else 1000, chunk_bytes=chunk_bytes)
        except CorruptDataError:
            continue
        assert found.size_bytes >= len(prefix)


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20], ids=["by-batch", "one-shot"])
@pytest.mark.parametrize(
    ("data", "stop_offset", "batches", "ended_by"),
    [
        pytest.param(SOUND, None, 4, EndedBy.END_OF_FILE, id="whole"),
        pytest.param(SOUND, 12, 4, EndedBy.END_OF_FILE, id="stop-at-end"),
        pytest.param(SOUND, 9, 3, EndedBy.STOP_OFFSET, id="stop-between"),
        pytest.param(SOUND, 11, 3, EndedBy.STOP_OFFSET, id="stop-inside-a-batch"),
        pytest.param(SOUND, 0, 0, EndedBy.STOP_OFFSET, id="stop-at-start"),
        pytest.param(SOUND[:-5], None, 3, EndedBy.TORN_TAIL, id="torn-body"),
        pytest.param(SOUND[: -BATCH_BYTES + 20], None, 3, EndedBy.TORN_TAIL, id="torn-header"),
        pytest.param(SOUND + bytes(4000), None, 4, EndedBy.ZERO_TAIL, id="allocated"),
        pytest.param(SOUND + bytes(10), None, 4, EndedBy.ZERO_TAIL, id="allocated-little"),
        pytest.param(SOUND[:-5] + bytes(400), None, 3, EndedBy.TORN_TAIL, id="torn-in-allocated"),
        pytest.param(SOUND[:-5] + bytes(5), None, 3, EndedBy.TORN_TAIL, id="torn-at-the-end-of-allocated"),
        pytest.param(
            SOUND[: -BATCH_BYTES + 20] + bytes(400), None, 3, EndedBy.TORN_TAIL, id="torn-header-in-allocated"
        ),
        pytest.param(
            SOUND[: -BATCH_BYTES + 20] + bytes(41), None, 3, EndedBy.TORN_TAIL, id="torn-header-at-end"
        ),
        pytest.param(
            SOUND[: -BATCH_BYTES + 8] + bytes(400), None, 3, EndedBy.TORN_TAIL, id="torn-offset-in-allocated"
        ),
        pytest.param(
            SOUND[: -BATCH_BYTES + 8] + bytes(60), None, 3, EndedBy.TORN_TAIL, id="torn-offset-at-end"
        ),
        pytest.param(SOUND + b"\xff" * 200, 12, 4, EndedBy.STOP_OFFSET, id="not-looked-at-behind-stop"),
    ],
)
def test_scan_of_an_active_segment_ends_at_its_last_stable_batch(
    data, stop_offset, batches, ended_by, chunk_bytes
):
    """A part that the broker may still write is an end and not a fault. Whole batches before it count."""
    found = scan(data, 0, None, stop_offset=stop_offset, chunk_bytes=chunk_bytes)
    prefix = SOUND[: batches * BATCH_BYTES]
    assert (found.batch_count, found.size_bytes, found.crc32c) == (batches, len(prefix), crc32c(prefix))
    assert found.ended_by is ended_by


def test_scan_that_is_done_takes_nothing_more():
    """A scan consumes no bytes after it has found its end."""
    scanner = SegmentScanner(0, None, stop_offset=3)
    assert scanner.feed(memoryview(SOUND)) == BATCH_BYTES
    assert scanner.is_done
    assert scanner.feed(memoryview(SOUND)[BATCH_BYTES:]) == 0


@pytest.mark.parametrize("stop_offset", [None, 12], ids=["unknown-end", "stable"])
def test_damage_inside_an_active_segment_is_corrupt(stop_offset):
    """A wrong checksum with whole batches behind it was not left by an unfinished write."""
    data = bytearray(SOUND)
    data[BATCH_BYTES + 70] ^= 1
    with pytest.raises(CorruptDataError, match="batch CRC"):
        scan(bytes(data), 0, None, stop_offset=stop_offset)


def test_bad_header_inside_an_active_segment_is_corrupt():
    """An impossible header with data behind it is a fault even where the broker writes."""
    with pytest.raises(CorruptDataError, match="length 10"):
        scan(with_length(1, 10), 0, None)


def test_times_of_the_builder_are_what_the_scan_finds():
    """The builder's default time is the base of every test segment."""
    assert scan(SOUND).base_timestamp_ms == DEFAULT_TIME_MS
