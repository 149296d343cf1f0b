"""Compactions that an election undoes after the archive's start has moved into what they replaced."""

from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in, archived, archiver_of, observed, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import bases, stored_manifest
from tests.unit.housekeeping.test_reupload import Reuploading
from tieringd.archive.record_deletion import delete_archived
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.policies.total_retention import RetentionPace, TotalRetention

MINUTE_MS = 60_000


def replica(path, *, rolls_after) -> LogWriter:
    """Return a log of six records with their own keys, whose files end at these offsets."""
    writer = LogWriter(path)
    for at in range(6):
        writer.append(b"%d" % at, keys=[b"k%d" % at])
        if at in rolls_after:
            writer.roll()
    return writer


def write_winner(writer, number) -> None:
    """Write a later record of the key of record *number*."""
    writer.append(b"new %d" % number, keys=[b"k%d" % number])
    writer.roll()


async def elected(store, writer, clock, *, leader_epoch):
    """Let *writer*, which lacks the winner, lead and write a record; return the manifest after some steps."""
    writer.begin_epoch(leader_epoch)
    writer.append(b"C", keys=[b"C"])
    writer.roll()
    archive = archive_in(store, writer_id="c3", now_ms=clock)
    archiver = archiver_of(writer, archive, FakeBroker(writer), leader_epoch=leader_epoch, now_ms=clock)
    for _ in range(3):
        await archiver.step(observed(writer))
    return stored_manifest(store, writer)


async def test_originals_with_other_bounds_come_back_though_their_head_has_expired(store, tmp_path, clock):
    """The first original that comes back begins before the archive's start, inside which it lies."""
    old = replica(tmp_path / "old", rolls_after=(2, 5))
    leader = replica(tmp_path / "leader", rolls_after=(0, 5))
    lagging = replica(tmp_path / "lagging", rolls_after=(0, 5))
    for one in (old, leader):
        write_winner(one, 2)
    await archived(old, archive_in(store))
    leader.compact(1, without=[2])
    assert await Reuploading(store, leader, leader_epoch=1).step() == 1
    assert bases(store, old) == [0, 1, 6]
    for one in (leader, lagging):
        one.log_start_offset = 6
        one.trim_file(0)
        one.trim_file(1)
    leader.begin_epoch(1)
    leader.append(b"e1", keys=[b"e1"])
    archive = archive_in(store, writer_id="b9", now_ms=clock)
    archiver = archiver_of(leader, archive, FakeBroker(leader), leader_epoch=1, now_ms=clock)
    # With the record that follows it is too much by the first segment.
    archived_bytes = sum(one.size_bytes for one in stored_manifest(store, old).segments)
    total = TotalRetention(limit_ms=None, limit_bytes=archived_bytes + 10)
    pace = RetentionPace(MINUTE_MS, 10 * MINUTE_MS)
    for _ in range(3):
        clock.now_ms += MINUTE_MS
        await archiver.step(observed(leader, total=total, retention_pace=pace))
    found = stored_manifest(store, old)
    assert found.start_offset == 1
    assert any(one.is_held for one in found.retired)

    found = await elected(store, lagging, clock, leader_epoch=2)
    assert (found.start_offset, found.unsettled) == (1, None)
    left = {number: b"%d" % number for number in range(1, 6)}
    assert await values_in(archive_in(store), found) == left | {6: b"C"}


@pytest.mark.parametrize("before_offset", [1, 2, 3])
async def test_originals_come_back_as_far_as_a_user_has_not_deleted_them(
    store, tmp_path, clock, before_offset
):
    """An original that ends before the deletion does stays away, and the partition goes on."""
    leader = replica(tmp_path / "leader", rolls_after=(1, 3, 5))
    lagging = replica(tmp_path / "lagging", rolls_after=(1, 3, 5))
    write_winner(leader, 2)
    await archived(leader, archive_in(store))
    leader.compact(0, 2, without=[2])
    assert await Reuploading(store, leader).step() == 1
    assert bases(store, leader) == [0, 4, 6]
    manifests = archive_in(store, writer_id="job", now_ms=clock).manifests
    deletion = RecordDeletion(before_offset, leader_epoch=0)
    await delete_archived(manifests, leader.identified, deletion, now_ms=clock)
    for one in (leader, lagging):
        one.log_start_offset = before_offset

    found = await elected(store, lagging, clock, leader_epoch=1)
    assert (found.leader_epoch, found.next_offset, found.start_offset) == (1, 7, before_offset)
    left = {number: b"%d" % number for number in range(before_offset, 6)}
    assert await values_in(archive_in(store), found) == left | {6: b"C"}


@pytest.mark.parametrize("is_trimmed", [False, True])
async def test_originals_that_do_not_fit_give_way_to_the_leaders_log(store, tmp_path, clock, is_trimmed):
    """An error tells of it, and another one of what the log does not have either."""
    leader = replica(tmp_path / "leader", rolls_after=(1, 3, 5))
    lagging = replica(tmp_path / "lagging", rolls_after=(1, 3, 5))
    write_winner(leader, 2)
    await archived(leader, archive_in(store))
    leader.compact(0, 2, without=[2])
    reuploading = Reuploading(store, leader)
    assert await reuploading.step() == 1
    current = await reuploading.claim.current(lambda: pytest.fail("there is a manifest"))
    (held,) = current.existing.retired
    half = replace(held, segments=held.segments.head(1))
    await reuploading.claim.commit(current, replace(current.existing, retired=(half,)))
    if is_trimmed:
        lagging.log_start_offset = 4
        lagging.trim_file(0)
        lagging.trim_file(2)

    with capture_logs() as lines:
        found = await elected(store, lagging, clock, leader_epoch=1)
    errors = [line["event"].partition(";")[0] for line in lines if line["log_level"] == "error"]
    told = ["segments that a compaction replaced do not fit into their places any more"]
    if is_trimmed:
        told.append("archived records cannot be brought back after an election")
    assert errors == [*told, "archive's tail replaced: another leader's log took its place"]
    left = {number: b"%d" % number for number in range(6) if not (is_trimmed and number == 2)}
    assert await values_in(archive_in(store), found) == left | {6: b"C"}
