"""A manifest that spills, through the archiver's step: readers, retention, elections and crashes."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from crc32c import crc32c as crc32c_of

from tests.fakes.archive import archive_in, archived, archiver_of, observed, values_in, written_below
from tests.fakes.broker import FakeBroker
from tests.fakes.hydration import Host, read_batches, running
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.metric_values import value_of
from tests.fakes.spilling import (
    MINUTE_MS,
    PACE,
    data_keys,
    expect_all,
    filled,
    make_parts_small,
    observe,
    spilled_names,
)
from tests.fakes.store import rot
from tieringd.archive.retired_objects import delete_retired
from tieringd.archive.spillover_manifests import SpilloverManifests
from tieringd.errors import CorruptDataError, FencedError, ObjectNotFound
from tieringd.formats.object_keys import data_key, spillover_key
from tieringd.formats.record_batch import parse_header
from tieringd.metrics import Metrics
from tieringd.model.operator_decision import ManifestVersion, OperatorDecision
from tieringd.policies.total_retention import RetentionPace, TotalRetention
from tieringd.reading.index_cache import CachedFiles
from tieringd.reading.partition_reader import PartitionReader


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Make each segment that may spill a part of its own."""
    make_parts_small(monkeypatch)


@pytest.fixture
def archiver(writer, archive, broker, metrics, clock):
    return archiver_of(writer, archive, broker, metrics=metrics, now_ms=clock)


async def test_what_the_local_log_lets_go_of_spills(writer, archive, archiver, store):
    """The live manifest keeps what is local; readers find the rest as before."""
    await filled(writer, archiver)
    manifest = stored_manifest(store, writer)
    expected = {
        offset: b"%s%d" % ((b"a", b"b")[offset % 2], offset // 2) for offset in range(manifest.next_offset)
    }
    assert bases(store, writer) == [8, 10]
    assert manifest.segment_count == 6
    assert [name.base_offset for name in spilled_names(store, writer)] == [0, 2, 4, 6]
    assert manifest.spillover.newest == spilled_names(store, writer)[-1]
    await expect_all(archive_in(store), manifest, expected)


async def test_manifest_is_whole_for_every_reader(writer, archive, archiver, store):
    """Lists, reads at an offset, by time and the first offset go back to the archive's start."""
    await filled(writer, archiver)
    partition = writer.identified
    reader = archive_in(store)
    manifest = (await reader.manifests.load(partition)).existing
    listed = await reader.remote_log.list_segments(partition)
    assert [one.base_offset for one in listed] == [0, 2, 4, 6, 8, 10]
    assert [
        one.base_offset for one in await reader.remote_log.list_segments(partition, min_base_offset=5)
    ] == [
        6,
        8,
        10,
    ]
    assert await reader.remote_log.earliest_offset(partition) == 0
    assert b"a1" in await reader.remote_log.read(partition, offset=2, size_bytes_max=1)
    times = {record.offset: record.timestamp_ms async for record in _records(reader, manifest)}
    for offset, time_ms in times.items():
        first = min(other for other, when in times.items() if when >= time_ms)
        assert await reader.records.offset_for_time(manifest, time_ms) == first, offset
    assert await reader.records.offset_for_time(manifest, max(times.values()) + 1) == manifest.next_offset
    assert (await reader.records.latest_record(manifest)).timestamp_ms == max(times.values())
    assert await reader.records.first_offset(manifest) == 0


async def _records(reader, manifest):
    async for record in reader.records.records(
        manifest, from_offset=0, read_committed=False, on_gap=lambda _: None
    ):
        yield record


async def test_small_manifest_or_a_local_one_spills_nothing(writer, archive, archiver, store):
    """Segments that the local log holds stay in the manifest, and so do all of a small manifest."""
    await filled(writer, archiver, local=6)
    assert spilled_names(store, writer) == []
    writer.drop_head()
    await archiver.step(observed(writer))
    assert spilled_names(store, writer) == []
    await archiver.step(observe(writer))
    assert len(spilled_names(store, writer)) == 1


async def test_archive_without_a_spill_is_read_without_a_listing(writer, archive, archiver, store):
    """A bucket is listed only for what is spilled."""
    await filled(writer, archiver, local=6)
    store.list_page = None
    manifest = stored_manifest(store, writer)
    assert len(await values_in(archive_in(store), manifest)) == 12


async def test_superfluous_part_of_the_same_offsets_is_not_taken_for_history(
    writer, archive, archiver, store
):
    """The later part says which of two that end at one offset is the real one."""
    await filled(writer, archiver)
    manifest = stored_manifest(store, writer)
    expected = await values_in(archive_in(store), manifest)
    spillovers = archive.manifests.spillovers
    for name in spilled_names(store, writer)[:-1]:
        part = await spillovers.load(writer.identified, name)
        wrong = part.segments.head(0).appended([replace(one, writer_id="f" * 16) for one in part.segments])
        await spillovers.put(replace(part, segments=wrong))
    assert len(spilled_names(store, writer)) == 7
    await expect_all(archive_in(store), manifest, expected)


async def test_part_that_is_missing_is_said_to_be(writer, archiver, store):
    """A reader that needs the part has to read the manifest again, and never takes it for empty."""
    await filled(writer, archiver)
    manifest = stored_manifest(store, writer)
    gone = spilled_names(store, writer)[1]
    store.remove(spillover_key(writer.identified, gone))
    with pytest.raises(ObjectNotFound, match=r"the bucket has no .*manifest\.2\.3\."):
        await values_in(archive_in(store), manifest)
    report = await archive_in(store).verifier.verify(manifest, deep=False)
    assert len(report.faults) == 1
    assert "older segments cannot be checked" in report.faults[0]
    assert len(await values_in(archive_in(store), manifest, from_offset=4)) == 8


async def test_part_that_is_damaged_is_said_to_be(writer, archiver, store):
    """The error names the part, whose name has its checksum."""
    await filled(writer, archiver)
    manifest = stored_manifest(store, writer)
    key = spillover_key(writer.identified, spilled_names(store, writer)[1])
    rot(store, key)
    with pytest.raises(CorruptDataError, match="spillover manifest has a wrong checksum") as caught:
        await values_in(archive_in(store), manifest)
    assert caught.value.source == key


async def test_deposed_leader_spills_nothing_that_counts(writer, archiver, store, clock, broker):
    """The commit of a deposed leader is refused, and the parts that it stored before count for nothing."""
    await filled(writer, archiver, local=6)
    successor = archiver_of(writer, archive_in(store, writer_id="b2"), broker, leader_epoch=1, now_ms=clock)
    kept = observed(writer)
    for _ in range(3):
        writer.drop_head()
    before = observe(writer)
    writer.begin_epoch(1)
    await successor.step(replace(kept, log=replace(kept.log, epochs=tuple(writer.epochs))))
    with pytest.raises(FencedError):
        await archiver.step(before)
    assert len(spilled_names(store, writer)) == 3
    manifest = stored_manifest(store, writer)
    assert manifest.spillover is None
    assert len(await values_in(archive_in(store), manifest)) == 12


async def test_leader_with_a_longer_local_log_takes_back_what_that_holds(writer, archiver, store, tmp_path):
    """Another replica kept more: it can trim all that is durable, wherever the manifest keeps that."""
    await filled(writer, archiver)
    expected = await values_in(archive_in(store), stored_manifest(store, writer))
    other = LogWriter(tmp_path / "other")
    for number in range(6):
        other.closed_segment(b"a%d" % number, b"b%d" % number)
    other.begin_epoch(1)
    for _ in range(2):
        other.drop_head()
    broker = FakeBroker(other)
    successor = archiver_of(other, archive_in(store, writer_id="b2"), broker, leader_epoch=1)
    await successor.step(observe(other, target_bytes=0))
    assert broker.trims
    assert other.bounds().log_start_offset == 12
    manifest = stored_manifest(store, writer)
    assert bases(store, writer) == [4, 6, 8, 10]
    assert manifest.spillover.segments == 2
    await expect_all(archive_in(store), manifest, expected)


@pytest.mark.parametrize("cut", [2, 5, 9], ids=lambda cut: f"at {cut}")
async def test_new_lineage_replaces_spilled_segments(writer, archiver, store, tmp_path, cut):
    """An unclean election cuts below the live part: the archive is what the new leader has."""
    await filled(writer, archiver)
    before = await values_in(archive_in(store), stored_manifest(store, writer))

    other = LogWriter(tmp_path / "other")
    for offset in range(0, cut - cut % 2, 2):
        other.closed_segment(before[offset], before[offset + 1])
    if cut % 2:
        other.append(before[cut - 1])
    other.begin_epoch(1)
    for number in range(4):
        other.closed_segment(b"new%d" % number)
    successor = archiver_of(other, archive_in(store, writer_id="b2"), FakeBroker(other), leader_epoch=1)
    result = await successor.step(observe(other))
    while result.uploaded or result.needs_another_scan:
        result = await successor.step(observe(other))
    manifest = stored_manifest(store, other)
    expected = written_below(other, manifest.next_offset)
    assert manifest.next_offset == other.bases[-1]
    await expect_all(archive_in(store), manifest, expected)
    assert manifest.replacements


async def test_log_that_began_anew_costs_a_spilled_archive_nothing_until_an_operator_decides(
    writer, archiver, store, tmp_path
):
    """A partition that waits reads no spilled part. Then all go, and the new log is archived."""
    await filled(writer, archiver)
    before = stored_manifest(store, writer)
    other = LogWriter(tmp_path / "other")
    other.begin_epoch(1)
    for number in range(3):
        other.closed_segment(b"new%d" % number)
    archive = archive_in(store, writer_id="b2")
    successor = archiver_of(other, archive, FakeBroker(other), leader_epoch=1)
    keys = [spillover_key(writer.identified, name) for name in spilled_names(store, writer)]
    away = {key: store.remove(key) for key in keys}
    for _ in range(4):
        await successor.step(observe(other))
    assert (len(away) > 1, successor.operator_wait.last_offset) == (True, before.next_offset - 1)

    whole = (before.start_offset, before.next_offset - 1)

    async def give_up(decision_id):
        version = ManifestVersion.of(stored_manifest(store, writer))
        decision = OperatorDecision(writer.identified, decision_id, 7, "ann", version, give_up=whole)
        await archive.manifests.decisions.add(decision)
        for _ in range(4):
            await successor.step(observe(other))

    # A decision that cannot be carried out is refused, and says why.
    await give_up("d1")
    assert "there is no such object" in successor.operator_wait.refused
    for key, (data, info) in away.items():
        store.place(key, data, info)
    await give_up("d2")
    manifest = stored_manifest(store, other)
    assert (successor.operator_wait, manifest.faults()) == (None, ())
    assert [(one.base_offset, one.last_offset) for one in manifest.replacements] == [whole]
    await expect_all(archive_in(store), manifest, written_below(other, manifest.next_offset))
    assert manifest.next_offset == other.bases[-1]


async def test_new_lineage_replaces_all_that_is_live_after_a_gap(writer, archiver, store, tmp_path):
    """The live part begins with a gap, and an election cuts right after it: no live segment stays."""
    for number in range(4):
        writer.closed_segment(b"a%d" % number, b"b%d" % number)
    while (await archiver.step(observe(writer))).uploaded:
        pass
    writer.closed_segment(b"lost", b"lost")
    for _ in range(5):
        writer.drop_head()
    for number in range(2):
        writer.closed_segment(b"c%d" % number, b"d%d" % number)
    for _ in range(4):
        await archiver.step(observe(writer))
    before = stored_manifest(store, writer)
    assert (before.live_offset, before.gaps[0].base_offset, bases(store, writer)) == (8, 8, [10, 12])
    kept = await values_in(archive_in(store), before)

    other = LogWriter(tmp_path / "other")
    for offset in range(0, 10, 2):
        other.closed_segment(kept.get(offset, b"lost"), kept.get(offset + 1, b"lost"))
    other.begin_epoch(1)
    for number in range(4):
        other.closed_segment(b"new%d" % number)
    successor = archiver_of(other, archive_in(store, writer_id="b2"), FakeBroker(other), leader_epoch=1)
    while (await successor.step(observe(other))).uploaded:
        pass

    manifest = stored_manifest(store, other)
    assert manifest.next_offset == other.bases[-1]
    assert manifest.replacements[0].base_offset == 10
    written = written_below(other, manifest.next_offset)
    await expect_all(archive_in(store), manifest, {one: written[one] for one in written if one not in {8, 9}})


async def test_spilled_segments_expire_with_their_manifests(writer, archive, archiver, store, clock):
    """Spilled segments go in order: the archive's start moves, then objects go, then spillover manifests."""
    await filled(writer, archiver)
    manifest = stored_manifest(store, writer)
    third = manifest.size_bytes // 3
    limits = TotalRetention(limit_ms=None, limit_bytes=manifest.size_bytes - third + 61)
    for _ in range(6):
        await archiver.step(observe(writer, total=limits))
        clock.now_ms += MINUTE_MS
    after = stored_manifest(store, writer)
    assert after.start_offset > 0
    assert after.spillover.retired
    assert len(spilled_names(store, writer)) == 4
    assert len(data_keys(store)) == 6
    assert len(await values_in(archive_in(store), manifest)) == 12, "a reader with the old manifest goes on"

    for _ in range(12):
        clock.now_ms += MINUTE_MS
        await archiver.step(observe(writer, total=limits))
    after = stored_manifest(store, writer)
    assert after.spillover.retired == ()
    gone = after.start_offset // 2
    assert len(data_keys(store)) == 6 - gone
    assert [name.base_offset for name in spilled_names(store, writer)] == [0, 2, 4, 6][gone:]
    assert sorted(await values_in(archive_in(store), after)) == list(range(after.start_offset, 12))


async def test_deletion_takes_its_time_and_goes_on_where_it_was(writer, archiver, store, clock):
    """Each check has a limit of parts, and each step a limit of segments. None is left out."""
    pace = replace(PACE, spilled_parts_max=1, deleted_at_once_max=1)
    await filled(writer, archiver)
    limits = TotalRetention(limit_ms=None, limit_bytes=stored_manifest(store, writer).size_bytes // 2)
    starts, left = [0], [6]
    for _ in range(40):
        await archiver.step(observe(writer, total=limits, retention_pace=pace))
        clock.now_ms += MINUTE_MS
        starts.append(stored_manifest(store, writer).start_offset)
        left.append(len(data_keys(store)))
    assert {later - start for start, later in pairwise(starts)} == {0, 2}
    assert {before - after for before, after in pairwise(left)} == {0, 1}
    assert (starts[-1], left[-1]) == (6, 3)
    assert [name.base_offset for name in spilled_names(store, writer)] == [6]


async def test_archiver_rests_until_spilled_objects_are_due(writer, archiver, store, clock):
    """Expired segments are deleted when their delay is over, though nothing else happens."""
    await filled(writer, archiver)
    limits = TotalRetention(limit_ms=None, limit_bytes=stored_manifest(store, writer).size_bytes - 1)
    while stored_manifest(store, writer).start_offset == 0:
        clock.now_ms += MINUTE_MS
        await archiver.step(observe(writer, total=limits))
    seen = observe(writer)
    clock.now_ms += MINUTE_MS
    while not archiver.is_at_rest(seen):
        await archiver.step(seen)
    (mark,) = stored_manifest(store, writer).spillover.retired
    clock.now_ms = mark.retired_at_ms + PACE.delete_delay_ms - MINUTE_MS
    while not archiver.is_at_rest(seen):
        await archiver.step(seen)
    clock.now_ms = mark.retired_at_ms + PACE.delete_delay_ms - 1
    assert archiver.is_at_rest(seen)
    clock.now_ms += 1
    assert not archiver.is_at_rest(seen)
    await archiver.step(seen)
    assert len(data_keys(store)) == 5


async def test_everything_spilled_expires_and_spilling_goes_on(writer, archive, archiver, store, clock):
    """The manifest names no spillover once all spilled objects are gone, and the next spill begins anew."""
    await filled(writer, archiver)
    nothing = TotalRetention(limit_ms=None, limit_bytes=1)
    for _ in range(40):
        await archiver.step(observe(writer, total=nothing))
        clock.now_ms += MINUTE_MS
    manifest = stored_manifest(store, writer)
    assert manifest.spillover is None
    assert data_keys(store) == []
    assert spilled_names(store, writer) == []

    await filled(writer, archiver, segments=4, local=1)
    manifest = stored_manifest(store, writer)
    assert manifest.spillover.segments > 0
    values = await values_in(archive_in(store), manifest, from_offset=manifest.start_offset)
    assert sorted(values) == list(range(manifest.start_offset, manifest.next_offset))


async def test_archived_log_is_read_alike_by_old_and_new_processes(writer, archive, store):
    """A manifest that an earlier process wrote whole spills with the next one's first step."""
    for number in range(5):
        writer.closed_segment(b"v%d" % number)
    expected = await values_in(archive, await archived(writer, archive))
    for _ in range(4):
        writer.drop_head()
    await archiver_of(writer, archive_in(store), FakeBroker(writer)).step(observe(writer))
    manifest = stored_manifest(store, writer)
    assert manifest.spillover is not None
    assert await values_in(archive_in(store), manifest) == expected


async def test_gateway_reads_on_through_the_parts(writer, archiver, store, tmp_path):
    """Batches of every offset, spilled or live, are those of the log, one answer after another."""
    await filled(writer, archiver)
    manifest = stored_manifest(store, writer)
    host = Host(tmp_path / "cache", store)
    spillovers = SpilloverManifests(store)
    async with running(host) as hydrator:
        spillovers.use_files(CachedFiles(host.keeper))
        reader = PartitionReader(hydrator, spillovers)
        for offset in range(manifest.next_offset):
            found = await read_batches(reader, manifest, offset, size_bytes_max=1 << 20, needs_a_batch=True)
            data = os.pread(found.file.fd, found.size_bytes, found.file.position)
            found.close()
            assert parse_header(data).base_offset <= offset <= parse_header(data).last_offset
        assert (
            await read_batches(reader, manifest, manifest.next_offset, size_bytes_max=1, needs_a_batch=True)
            is None
        )
    cached = [path for path in host.directory.path.rglob("manifest.*") if path.is_file()]
    assert len(cached) == 4


async def test_gap_that_is_taken_back_is_not_announced_again(writer, archiver, store, tmp_path, metrics):
    """A gap is announced once, when it is recorded."""
    writer.closed_segment(b"a0", b"b0")
    await archiver.step(observe(writer))
    for number in (1, 2):
        writer.closed_segment(b"a%d" % number, b"b%d" % number)
    writer.drop_head()
    writer.drop_head()
    for number in (3, 4, 5):
        writer.closed_segment(b"a%d" % number, b"b%d" % number)
    for _ in range(4):
        await archiver.step(observe(writer))
    for _ in range(2):
        writer.drop_head()
    await archiver.step(observe(writer))
    manifest = stored_manifest(store, writer)
    assert (manifest.gaps, manifest.live_offset) == ((), 8)
    assert value_of(metrics.gaps.labels("orders")) == 1

    other = LogWriter(tmp_path / "other")
    for number in range(6):
        other.closed_segment(b"a%d" % number, b"b%d" % number)
    other.begin_epoch(1)
    theirs = Metrics()
    await archiver_of(
        other, archive_in(store, writer_id="b2"), FakeBroker(other), leader_epoch=1, metrics=theirs
    ).step(observe(other))
    assert [gap.base_offset for gap in stored_manifest(store, writer).gaps] == [2]
    assert value_of(theirs.gaps.labels("orders")) == 0


@pytest.mark.parametrize("is_damaged", [False, True], ids=["missing", "damaged"])
async def test_part_that_cannot_be_read_holds_up_no_upload(
    writer, archiver, store, clock, *, tmp_path, is_damaged
):
    """Retention deletes nothing then, and brokers with these segments trim nothing; all else goes on."""
    await filled(writer, archiver)
    (_, second, *_), before = spilled_names(store, writer), data_keys(store)
    key = spillover_key(writer.identified, second)
    if is_damaged:
        rot(store, key)
    else:
        store.remove(key)
    nothing = TotalRetention(limit_ms=None, limit_bytes=1)
    fresh = archiver_of(writer, archive_in(store), FakeBroker(writer), now_ms=clock)
    for _ in range(16):
        writer.closed_segment()
        assert (await fresh.step(observe(writer, total=nothing))).uploaded == 1
        clock.now_ms += MINUTE_MS
    assert stored_manifest(store, writer).start_offset == 0
    assert set(before) <= set(data_keys(store))

    other = LogWriter(tmp_path / "other")
    for number in range(6):
        other.closed_segment(b"a%d" % number, b"b%d" % number)
    for _ in range(17):
        other.closed_segment()
    other.begin_epoch(1)
    broker = FakeBroker(other)
    successor = archiver_of(other, archive_in(store, writer_id="b2"), broker, leader_epoch=1, now_ms=clock)
    assert (await successor.step(observe(other, target_bytes=0))).uploaded == 1
    assert broker.trims == []


async def test_deletion_that_a_successor_overtakes_leaves_its_spilled_parts(writer, archiver, store, clock):
    """A successor that began anew at lower offsets has spilled there when a stopped process goes on."""
    await filled(writer, archiver)
    (first, *_) = spilled_names(store, writer)
    content, _ = store.objects[spillover_key(writer.identified, first)]
    theirs = spillover_key(writer.identified, replace(first, crc32c=first.crc32c ^ 1))
    whole = await SpilloverManifests(store).with_history(stored_manifest(store, writer))
    oldest = data_key(writer.identified, whole.segments[0])
    put, has_spilled = store.put, False

    async def overtaken(key, body, *, crc32c, condition=None):
        nonlocal has_spilled
        info = await put(key, body, crc32c=crc32c, condition=condition)
        if key.endswith("/manifest") and oldest not in store.objects and not has_spilled:
            # The oldest segment's objects are deleted, and this commit says so.
            has_spilled = True
            await put(theirs, content, crc32c=crc32c_of(content))
        return info

    store.put = overtaken
    for _ in range(30):
        await archiver.step(observe(writer, total=TotalRetention(limit_ms=None, limit_bytes=1)))
        clock.now_ms += MINUTE_MS
        if has_spilled:
            break
    assert theirs in store.objects
    assert first not in spilled_names(store, writer)


async def test_deposed_leader_deletes_no_spilled_segment(writer, archiver, store, clock):
    """Expired segments are the successor's to delete, from its claim on."""
    await filled(writer, archiver)
    expired = TotalRetention(limit_ms=None, limit_bytes=1)
    while stored_manifest(store, writer).start_offset == 0:
        await archiver.step(observe(writer, total=expired))
        clock.now_ms += MINUTE_MS
    # Between two looks for edits the archiver does not ask for the manifest by itself.
    pace = RetentionPace(interval_ms=1000 * MINUTE_MS, delete_delay_ms=10 * MINUTE_MS)
    await archiver.step(observe(writer, total=expired, retention_pace=pace))
    new = archive_in(store, writer_id="b1", now_ms=clock)
    stored = await new.manifests.load(writer.identified)
    assert stored.existing.spillover.retired
    await new.manifests.commit(stored, stored.existing, leader_epoch=1)
    before = set(data_keys(store))
    clock.now_ms += 20 * MINUTE_MS
    with suppress(FencedError):
        for _ in range(3):
            await archiver.step(observe(writer, total=expired, retention_pace=pace))
    assert set(data_keys(store)) == before


async def test_job_s_deletion_that_a_daemon_overtakes_leaves_its_spilled_parts(
    writer, archiver, store, clock
):
    """Parts that are stored after the job's edit took effect are not the job's to delete."""
    await filled(writer, archiver)
    (first, *_) = spilled_names(store, writer)
    content, _ = store.objects[spillover_key(writer.identified, first)]
    theirs = spillover_key(writer.identified, replace(first, crc32c=first.crc32c ^ 1))
    while stored_manifest(store, writer).start_offset == 0:
        await archiver.step(observe(writer, total=TotalRetention(limit_ms=None, limit_bytes=1)))
        clock.now_ms += MINUTE_MS
    put = store.put

    async def overtaken(key, body, *, crc32c, condition=None):
        info = await put(key, body, crc32c=crc32c, condition=condition)
        await put(theirs, content, crc32c=crc32c_of(content))
        return info

    store.put = overtaken
    manifests = archive_in(store).manifests
    assert await delete_retired(store, manifests, writer.identified, retired_until_ms=clock())
    assert theirs in store.objects
    assert first not in spilled_names(store, writer)
