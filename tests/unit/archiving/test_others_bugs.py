"""Bugs that other systems had (docs/reliability.md), as scenarios of one partition's archiver."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in, archived, archiver_of, observed, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.store import store_unavailable
from tieringd.archive.record_deletion import delete_archived
from tieringd.errors import StorageUnavailable
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.policies.total_retention import RetentionPace, TotalRetention

MINUTE_MS = 60_000
PACE = RetentionPace(interval_ms=MINUTE_MS, delete_delay_ms=10 * MINUTE_MS)


def observe(writer, *, limit_bytes=None, **changes):
    total = TotalRetention(limit_ms=None, limit_bytes=limit_bytes)
    return observed(writer, total=total, retention_pace=PACE, **changes)


def written(writer, segments: int) -> int:
    """Write closed segments and an active one; return the bytes of all."""
    for number in range(segments):
        writer.closed_segment(b"%d" % number)
    writer.append(b"active")
    return sum(len(writer.data_of(base)) for base in writer.bases)


async def test_new_leader_counts_what_is_in_both_tiers_once(writer, archive, broker, store, clock):
    """A new leader knows the whole archive from the start: size retention deletes nothing too early."""
    size_bytes = written(writer, 6)
    manifest = await archived(writer, archive)
    writer.begin_epoch(1)
    successor = archiver_of(
        writer, archive_in(store, writer_id="b1", now_ms=clock), broker, leader_epoch=1, now_ms=clock
    )
    for _ in range(5):
        await successor.step(observe(writer, limit_bytes=size_bytes))
        clock.now_ms += MINUTE_MS
    assert bases(store, writer) == [one.base_offset for one in manifest.segments]
    assert (writer.log_start_offset, broker.trims) == (0, [])


async def test_failed_copies_let_nothing_go_early(writer, archive, broker, store, clock):
    """Fifty uploads fail while the topic is over its limit: only what is archived may be let go."""
    archiver = archiver_of(writer, archive, broker, now_ms=clock)
    size_bytes = written(writer, 6)
    for _ in range(50):
        store.fail_next("put", lambda: store_unavailable("put"))
        with pytest.raises(StorageUnavailable):
            await archiver.step(observe(writer, limit_bytes=size_bytes // 2))
        clock.now_ms += MINUTE_MS
    assert (writer.log_start_offset, broker.trims) == (0, [])
    on_disk = writer.bases_on_disk
    for _ in range(2):
        await archiver.step(observe(writer))
    assert bases(store, writer) == on_disk[:-1]


async def test_search_by_time_never_leads_below_a_start_inside_a_batch(writer, archive):
    """A user deleted records up to the middle of a batch, and then seeks by the time of its first record."""
    writer.append(b"a", b"b", b"c", timestamp_ms=DEFAULT_TIME_MS)
    writer.append(b"d", timestamp_ms=DEFAULT_TIME_MS + 1000)
    writer.roll()
    await archived(writer, archive)
    stored = await delete_archived(
        archive.manifests, writer.identified, RecordDeletion(2, 0), now_ms=lambda: DEFAULT_TIME_MS
    )
    manifest = stored.existing
    assert manifest.start_offset == 2
    for time_ms in (0, DEFAULT_TIME_MS, DEFAULT_TIME_MS + 1):
        assert await archive.records.offset_for_time(manifest, time_ms) == 2
    assert await archive.records.offset_for_time(manifest, DEFAULT_TIME_MS + 3) == 3


async def test_deletion_while_a_topic_was_paused_is_no_stall(writer, archive, broker, store):
    """DeleteRecords cuts into a segment that was not archived yet; archiving goes on after it."""
    writer.closed_segment(b"first")
    await archived(writer, archive)
    paused = [writer.closed_segment(b"x%d" % number, b"y%d" % number, b"z%d" % number) for number in range(3)]
    start_offset = paused[1] + 1
    writer.drop_head()
    writer.drop_head()

    def after_deletion():
        seen = observe(writer)
        return replace(seen, bounds=replace(seen.bounds, log_start_offset=start_offset))

    archiver = archiver_of(writer, archive, FakeBroker(writer))
    for _ in range(4):
        await archiver.step(after_deletion())
    manifest = stored_manifest(store, writer)
    assert manifest.next_offset == writer.bases[-1]
    assert manifest.faults() == ()
    found = await values_in(archive, manifest, from_offset=start_offset)
    assert found == {offset: value for offset, value in writer.values().items() if offset >= start_offset}
