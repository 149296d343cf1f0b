"""
The demo's proof: read everything back from the bucket and the local disk, and compare it with the journal.

The comparison reads the objects and files themselves, and relies on no report of the daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from tieringd.archive.archive_reader import whole_batches_bytes
from tieringd.cli.demo.journal import PartitionJournal, record_digest
from tieringd.cli.demo.view import PartitionView
from tieringd.daemon.archive import Archive
from tieringd.formats.object_keys import data_key
from tieringd.formats.record_batch import HEADER_BYTES, check_crc, parse_header
from tieringd.formats.records import Record, iter_records
from tieringd.model.local_log import LocalLog
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap


@dataclass(slots=True)
class Comparison:
    """Counts of what was read back, and every difference from what was written."""

    archived_records: int = 0
    local_records: int = 0
    segments: int = 0
    """Stored segments of which every byte was read and checked."""
    equal_segments: int = 0
    """Stored segments with the same SHA-256 as the file that the writer closed."""
    archived_bytes: int = 0
    trimmed_bytes: int = 0
    differences: list[str] = field(default_factory=list)


async def compare(
    archive: Archive, view: PartitionView, written: PartitionJournal, total: Comparison
) -> None:
    """Read one partition back, and add the counts and differences to *total*."""
    manifest = view.manifest
    if manifest is None:
        total.differences.append(f"{view.partition}: the archive holds nothing of the partition")
        return
    report = await archive.verifier.verify(manifest, deep=True)
    total.differences.extend(report.faults)
    total.segments += report.segments
    total.archived_bytes += report.size_bytes
    total.trimmed_bytes += view.trimmed_bytes
    if view.local_start_offset > manifest.next_offset:
        total.differences.append(
            f"{view.partition}: the archive ends at {manifest.next_offset} and the local log begins at "
            f"{view.local_start_offset}"
        )
    total.equal_segments += await _compare_segments(archive, manifest, written, total)

    expected = iter(written.records.items())
    total.archived_records += await _compare_archived(archive, manifest, expected, total)
    tail = await asyncio.to_thread(_local_records, view.log, manifest.next_offset)
    total.local_records += _compare_records(tail, expected, f"{view.partition} on the local disk", total)
    left = sum(1 for _ in expected)
    if left:
        total.differences.append(
            f"{view.partition}: {left} records are neither in the archive nor on the local disk"
        )


async def _compare_segments(
    archive: Archive, manifest: PartitionManifest, written: PartitionJournal, total: Comparison
) -> int:
    equal = 0
    for segment in manifest.segments:
        digest = written.segments.get(segment.base_offset)
        if digest is None:
            continue
        key, found = data_key(manifest.partition, segment), sha256()
        index = await archive.remote_log.index_of(manifest.partition, segment)
        async for batch in archive.reader.batches(key, index, from_offset=0):
            found.update(batch.data)
        if found.digest() == digest:
            equal += 1
        else:
            total.differences.append(f"{key}: the bytes differ from the segment that was written")
    return equal


async def _compare_archived(
    archive: Archive, manifest: PartitionManifest, expected: Iterator[tuple[int, bytes]], total: Comparison
) -> int:
    def on_gap(gap: Gap) -> None:
        total.differences.append(
            f"{manifest.partition}: offsets {gap.base_offset} to {gap.last_offset} are missing"
        )

    records = [
        record
        async for record in archive.records.records(
            manifest, from_offset=0, read_committed=False, on_gap=on_gap
        )
    ]
    return _compare_records(iter(records), expected, f"{manifest.partition} in the archive", total)


def _compare_records(
    found: Iterator[Record], expected: Iterator[tuple[int, bytes]], where: str, total: Comparison
) -> int:
    equal = 0
    for record in found:
        offset, digest = next(expected, (-1, b""))
        if offset != record.offset:
            total.differences.append(f"{where}: found offset {record.offset}, expected {offset}")
            return equal
        if digest != record_digest(record.timestamp_ms, record.key, record.value, tuple(record.headers)):
            total.differences.append(
                f"{where}: the record at offset {offset} differs from the one that was written"
            )
        else:
            equal += 1
    return equal


def _local_records(log: LocalLog, from_offset: int) -> Iterator[Record]:
    for segment in log.segments:
        data = Path(segment.path).read_bytes()
        view = memoryview(data)[: whole_batches_bytes(data)]
        at = 0
        # A broker may preallocate the active segment: zeros follow its data.
        while any(view[at : at + HEADER_BYTES]):
            header = parse_header(view, at)
            check_crc(view, header, at)
            if header.last_offset >= from_offset and not header.is_control:
                batch = view[at : at + header.size_bytes]
                yield from (record for record in iter_records(batch) if record.offset >= from_offset)
            at += header.size_bytes
