"""Indexes of merged segments, against a scan of the merged bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import GOLDEN, batch, golden_log
from tests.support.examples import examples
from tests.unit.model.values import remote
from tieringd.errors import CorruptDataError
from tieringd.formats.index_files import (
    TimeEntry,
    encode_time_index,
    parse_offset_index,
    parse_time_index,
    parse_transaction_index,
)
from tieringd.formats.index_merge import IndexedSegment, merged_index
from tieringd.formats.record_batch import ABORT_MARKER, COMMIT_MARKER, encode_marker, parse_header
from tieringd.formats.segment_scan import SegmentScanner
from tieringd.formats.sidecar import decode_sidecar, encode_sidecar
from tieringd.formats.transactions import MarkerSearch, ReadCommittedFilter
from tieringd.model.segment import AbortedTransaction, BrokerIndexes, SegmentIndex

INTERVAL_BYTES = 300


def scan(data: bytes, base_offset: int, next_offset: int, **options):
    scanner = SegmentScanner(base_offset, next_offset, index_interval_bytes=INTERVAL_BYTES, **options)
    return scanner.finish(len(data) - scanner.feed(memoryview(data)))


def indexed(
    data: bytes,
    base_offset: int,
    next_offset: int,
    *,
    later: bytes = b"",
    broker: BrokerIndexes | None = None,
) -> IndexedSegment:
    """Return a segment as an upload indexes it: markers are looked for in the log's *later* bytes."""
    found = scan(data, base_offset, next_offset)
    aborted = list(found.aborted)
    first_offsets = dict(found.tracker.open_transactions)
    search = MarkerSearch(found.tracker)
    for header, view in headers(later):
        if not header.is_transactional:
            continue
        if not header.is_control:
            search.note_data(header)
            continue
        ended = search.note_marker(header, "abort" if view[-1:] == b"A" else "commit")
        if ended is not None and first_offsets.get(ended.producer_id) == ended.first_offset:
            aborted.append(ended)
            del first_offsets[ended.producer_id]
    index = SegmentIndex(
        base_offset=base_offset,
        last_offset=next_offset - 1,
        size_bytes=found.size_bytes,
        crc32c=found.crc32c,
        record_count=found.record_count,
        batch_count=found.batch_count,
        epochs=found.epochs,
        aborted=tuple(aborted),
        entries=found.entries,
        broker=broker or BrokerIndexes(),
    )
    segment = remote(
        base_offset,
        next_offset - 1,
        size_bytes=found.size_bytes,
        crc32c=found.crc32c,
        base_timestamp_ms=found.base_timestamp_ms,
        max_timestamp_ms=found.max_timestamp_ms,
    )
    return IndexedSegment(segment, index)


def headers(data: bytes):
    """Yield each batch's header, and a byte that tells an abort marker from a commit marker."""
    view, at = memoryview(data), 0
    while at < len(data):
        header = parse_header(view, at)
        end = at + header.size_bytes
        is_abort = header.is_control and bytes(data[at:end]) == encode_marker(
            header.base_offset,
            producer_id=header.producer_id,
            marker=ABORT_MARKER,
            leader_epoch=header.leader_epoch,
            timestamp_ms=header.base_timestamp_ms,
        )
        yield header, b"A" if is_abort else b"C"
        at = end


@st.composite
def logs(draw):
    """Draw batches of a log with holes, epochs, transactions and odd times, and where it is cut."""
    batches, offset, epoch, is_open = [], draw(st.integers(0, 5)), 0, {}
    first = offset
    for _ in range(draw(st.integers(1, 25))):
        offset += draw(st.sampled_from([0, 0, 0, 3]))
        epoch += draw(st.sampled_from([0, 0, 0, 0, 1]))
        time_ms = 1000 * draw(st.integers(1, 9))
        producer = draw(st.integers(1, 3))
        kind = draw(st.sampled_from(["plain", "data", "abort", "commit"]))
        if kind in {"abort", "commit"}:
            marker = ABORT_MARKER if kind == "abort" else COMMIT_MARKER
            data = encode_marker(
                offset, producer_id=producer, marker=marker, leader_epoch=epoch, timestamp_ms=time_ms
            )
            is_open.pop(producer, None)
            size = 1
        else:
            size = draw(st.integers(1, 3))
            is_in = kind == "data"
            data = batch(
                offset,
                [b"v" * draw(st.sampled_from([1, 100, 400]))] * size,
                timestamp_ms=time_ms,
                leader_epoch=epoch,
                producer_id=producer if is_in else -1,
                is_transactional=is_in,
            )
            if is_in:
                is_open[producer] = True
        batches.append((offset, data))
        offset += size
    for producer in is_open:
        kind = draw(st.sampled_from([ABORT_MARKER, COMMIT_MARKER]))
        marker = encode_marker(offset, producer_id=producer, marker=kind, leader_epoch=epoch)
        batches.append((offset, marker))
        offset += 1
    cuts = draw(st.sets(st.integers(1, len(batches)), max_size=4))
    # A segment may begin in the hole before its first batch, where the one before it has ended.
    begins_early = draw(st.sets(st.sampled_from(sorted(cuts)))) if cuts else set()
    return first, offset, batches, sorted(cuts | {len(batches)}), begins_early


def parts_of(first: int, next_offset: int, batches, cuts, begins_early) -> tuple[bytes, list[IndexedSegment]]:
    parts, begin, base = [], 0, first
    for cut in cuts:
        end = batches[cut][0] if cut < len(batches) else next_offset
        if cut in begins_early:
            end = parse_header(memoryview(batches[cut - 1][1])).next_offset
        data = b"".join(data for _, data in batches[begin:cut])
        parts.append(indexed(data, base, end, later=b"".join(data for _, data in batches[cut:])))
        begin, base = cut, end
    return b"".join(data for _, data in batches), parts


@settings(max_examples=examples(300))
@given(logs())
def test_merged_index_is_that_of_the_merged_bytes(log):
    """Counts, checksum, epochs and entries are those that a scan of the whole finds."""
    data, parts = parts_of(*log)
    index = merged_index(parts)
    found = scan(
        data,
        index.base_offset,
        index.last_offset + 1,
        index_positions=[one.position for one in index.entries],
    )
    assert (index.base_offset, index.last_offset) == (log[0], log[1] - 1)
    assert (index.size_bytes, index.crc32c) == (len(data), crc32c(data))
    assert (index.record_count, index.batch_count) == (found.record_count, found.batch_count)
    assert index.epochs == found.epochs
    assert index.entries == found.entries
    assert decode_sidecar(encode_sidecar(index)) == index


@settings(max_examples=examples(300))
@given(logs())
def test_read_committed_sees_the_same_in_the_merged_segment(log):
    """Each batch is visible just when it is in a scan of the whole, and no transaction is listed twice."""
    data, parts = parts_of(*log)
    index = merged_index(parts)
    whole = ReadCommittedFilter(indexed(data, index.base_offset, index.last_offset + 1).index.aborted)
    merged = ReadCommittedFilter(index.aborted)
    for header, _ in headers(data):
        assert merged.accepts(header) == whole.accepts(header), header
    ends = [(one.last_offset, one.producer_id) for one in index.aborted]
    assert ends == sorted(set(ends))


def test_transaction_over_a_seam_is_told_of_once():
    """Both parts know an aborted transaction, each from its own first offset on; the earlier one counts."""
    first = indexed(b"", 0, 5)
    second = indexed(b"", 5, 9)
    first = replace(first, index=replace(first.index, aborted=(AbortedTransaction(7, 3, 20),)))
    other = AbortedTransaction(8, 6, 20)
    second = replace(second, index=replace(second.index, aborted=(AbortedTransaction(7, 5, 20), other)))
    assert merged_index([first, second]).aborted == (AbortedTransaction(7, 3, 20), other)


def test_entries_know_the_largest_time_before_them():
    """A part's entry counts times of the parts before it, though they are in no entry of theirs."""
    late = batch(1, [b"v"], timestamp_ms=9000)
    head = batch(0, [b"v"], timestamp_ms=1000) + late
    tail = batch(2, [b"v"], timestamp_ms=2000)
    index = merged_index([indexed(head, 0, 2), indexed(tail, 2, 3)])
    assert [(one.offset, one.position, one.max_timestamp_ms) for one in index.entries] == [
        (0, 0, 1000),
        (2, len(head), 9000),
    ]


@pytest.mark.parametrize("next_base", [4, 6])
def test_parts_that_do_not_follow_each_other_are_refused(next_base):
    """A hole or an overlap between two indexes is not papered over."""
    with pytest.raises(CorruptDataError, match=f"begins at offset {next_base}"):
        merged_index([indexed(b"", 0, 5), indexed(b"", next_base, 9)])


def test_epochs_that_go_back_are_refused():
    """An epoch lower than one before it means that one of the indexes is another log's."""
    newer = indexed(batch(0, [b"v"], leader_epoch=2), 0, 1)
    older = indexed(batch(1, [b"v"], leader_epoch=1), 1, 2)
    with pytest.raises(CorruptDataError, match="leader epoch 1 follows 2"):
        merged_index([newer, older])


def broker_files(topic: str, base_offset: int, next_offset: int) -> BrokerIndexes:
    directory = GOLDEN / topic

    def read(name: str) -> bytes | None:
        path = directory / name
        return path.read_bytes() if path.is_file() else None

    return BrokerIndexes(
        offset_index=read(f"{base_offset:020d}.index"),
        time_index=read(f"{base_offset:020d}.timeindex"),
        transaction_index=read(f"{base_offset:020d}.txnindex"),
        producer_snapshot=read(f"{next_offset:020d}.snapshot"),
    )


def golden_part(topic: str, base_offset: int, next_offset: int) -> IndexedSegment:
    data = golden_log(topic, base_offset)
    return indexed(data, base_offset, next_offset, broker=broker_files(topic, base_offset, next_offset))


def test_broker_s_own_indexes_are_put_together():
    """
    The entries of a merged index name batches of the merged file, and their times ascend.

    The parts are those of a log that a real broker rolled.
    """
    parts = [golden_part("rolled", base, base + 5) for base in (0, 5, 10)]
    data = b"".join(golden_log("rolled", base) for base in (0, 5, 10))
    index = merged_index(parts)
    offsets = parse_offset_index(index.broker.offset_index, base_offset=0)
    known = {header.last_offset for header, _ in headers(data)}
    starts = {parse_header(memoryview(data), one.position).last_offset for one in offsets}
    assert starts == {one.offset for one in offsets} <= known
    times = parse_time_index(index.broker.time_index, base_offset=0)
    assert times[-1].timestamp_ms == max(part.segment.max_timestamp_ms for part in parts)
    assert index.broker.producer_snapshot == parts[-1].index.broker.producer_snapshot is not None
    assert index.broker.transaction_index is None
    assert len(offsets) + len(times) > 3


def test_time_index_leaves_out_what_is_not_later():
    """An entry has the largest time so far, so a part with earlier times adds none."""
    parts = [
        indexed(
            batch(base, [b"v"], timestamp_ms=time_ms),
            base,
            base + 1,
            broker=BrokerIndexes(b"", encode_time_index([TimeEntry(time_ms, base)], base_offset=base)),
        )
        for base, time_ms in enumerate([2000, 1000, 2000, 3000])
    ]
    times = parse_time_index(merged_index(parts).broker.time_index, base_offset=0)
    assert times == [TimeEntry(2000, 0), TimeEntry(3000, 3)]


def test_transaction_index_keeps_its_entries():
    """The aborted transactions of every part's transaction index are in the merged one."""
    part = golden_part("transactions", 0, 10)
    empty = indexed(b"", 10, 12)
    merged = merged_index([part, empty])
    assert merged.broker.transaction_index == part.index.broker.transaction_index
    assert parse_transaction_index(merged.broker.transaction_index or b"") != []


@pytest.mark.parametrize("name", ["offset_index", "time_index", "transaction_index"])
def test_missing_broker_index_leaves_all_of_them_out(name):
    """A merged segment has no broker indexes if a part lacks one that it needs: half of one would mislead."""
    part = golden_part("transactions", 0, 10)
    broken = replace(part, index=replace(part.index, broker=replace(part.index.broker, **{name: None})))
    assert merged_index([broken, indexed(b"", 10, 12)]).broker == BrokerIndexes()
