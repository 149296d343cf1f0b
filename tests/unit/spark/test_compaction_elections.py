"""Compaction and unclean elections: the last surviving version of a key is in a tier, whatever is cut off."""

from __future__ import annotations

import pytest

from tests.fakes.archive import Clock, archive_in, archived, archiver_of, observed, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import stored_manifest
from tests.unit.spark.rewriting import Job
from tieringd.archive.retired_objects import delete_retired
from tieringd.formats.object_keys import data_key
from tieringd.model.manifest_parts import Unsettled
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.model.tail_cut import cut_back
from tieringd.policies.total_retention import RetentionPace

PACE = RetentionPace(interval_ms=1_000, delete_delay_ms=0)


@pytest.fixture
def writer(tmp_path):
    """Give a log in which a key is overwritten, by a record that a lagging replica does not have."""
    writer = LogWriter(tmp_path / "old")
    writer.append(b"A-old", b"other", keys=[b"A", b"B"])
    writer.roll()
    writer.append(b"A-new", b"C1", keys=[b"A", b"C"])
    writer.roll()
    writer.append(b"x", keys=[b"X"])
    writer.roll()
    return writer


@pytest.fixture
def lagging(tmp_path):
    """Give the log of a replica that was elected uncleanly, and has gone on since."""
    lagging = LogWriter(tmp_path / "new")
    lagging.append(b"A-old", b"other", keys=[b"A", b"B"])
    lagging.roll()
    lagging.begin_epoch(1)
    lagging.append(b"Y", keys=[b"Y"])
    lagging.roll()
    return lagging


async def lead(store, writer, *, steps=4, leader_epoch=1, clock=None, **topic):
    """Let the archiver of a leader make some observations of its log, and return it."""
    archive = archive_in(store, writer_id="f0", now_ms=clock)
    archiver = archiver_of(writer, archive, FakeBroker(writer), leader_epoch=leader_epoch, now_ms=clock)
    for _ in range(steps):
        await archiver.step(observed(writer, retention_pace=PACE, **topic))
    return archiver


async def archive_gives(store, writer) -> dict[int, bytes | None]:
    return await values_in(archive_in(store), stored_manifest(store, writer))


async def test_election_during_a_compaction_refuses_it(store, writer):
    """The segment of a winner is cut off before the swap, and no segment that is rewritten."""
    await archived(writer, archive_in(store))
    job = Job(store, writer.identified)
    manifest = await job.manifest()
    prepared = await job.compacted(manifest)
    assert [one.parts[0].base_offset for one in prepared] == [0]

    async def cut(found):
        return cut_back(found, 2, leader_epoch=1, now_ms=9)

    await job.archive.manifests.edit(writer.identified, cut)
    swapped = await job.swap_in(manifest, prepared)

    assert (swapped.done, swapped.left) == ((), 1)
    assert "election" in swapped.left_because
    assert await archive_gives(store, writer) == {0: b"A-old", 1: b"other"}


async def test_election_after_a_compaction_brings_back_what_went(store, writer, lagging):
    """The winner is cut off; the original takes its place again, and only then is the log trimmed."""
    await archived(writer, archive_in(store))
    await Job(store, writer.identified).compact()
    assert 0 not in await archive_gives(store, writer)

    archiver = await lead(store, lagging, target_bytes=0)

    assert await archive_gives(store, writer) == {0: b"A-old", 1: b"other", 2: b"Y"}
    assert lagging.log_start_offset == archiver.manifest.next_offset == 3


async def test_original_comes_back_where_no_log_has_it(store, writer, lagging):
    """All replicas had trimmed it before the compaction."""
    manifest = await archived(writer, archive_in(store))
    await Job(store, writer.identified).compact()
    for one in (writer, lagging):
        one.log_start_offset = 2
        one.trim_file(0)
    await lead(store, writer, leader_epoch=0)
    await lead(store, lagging)
    assert await archive_gives(store, writer) == {0: b"A-old", 1: b"other", 2: b"Y"}
    assert stored_manifest(store, writer).segments[0] == manifest.segments[0]


async def test_original_comes_back_where_its_place_is_spilled(store, writer, lagging):
    """The manifest takes back the spilled segments for that."""
    await archived(writer, archive_in(store))
    job = Job(store, writer.identified)
    await job.compact()
    manifest = await job.manifest()
    part = part_to_spill(manifest, 1)
    name = await job.archive.manifests.spillovers.put(part)

    async def spill(found):
        return spilled(found, part, name)

    await job.archive.manifests.edit(writer.identified, spill)
    await lead(store, lagging)
    assert await archive_gives(store, writer) == {0: b"A-old", 1: b"other", 2: b"Y"}


async def test_originals_go_when_no_election_can_lose_a_winner(store, writer):
    """Originals go once two observations have the log behind all winners, and not before."""
    original = (await archived(writer, archive_in(store))).segments[0]
    await Job(store, writer.identified).compact()
    manifests, clock = archive_in(store).manifests, Clock()
    key = data_key(writer.identified, original)

    assert await delete_retired(store, manifests, writer.identified, retired_until_ms=2**60) == ()
    await lead(store, writer, leader_epoch=0, clock=clock)
    writer.log_start_offset = 5
    await lead(store, writer, leader_epoch=0, clock=clock, steps=1)
    assert key in store.objects
    await lead(store, writer, leader_epoch=0, clock=clock, steps=3)

    assert key not in store.objects
    assert stored_manifest(store, writer).retired == ()


async def test_originals_go_at_once_where_there_is_no_log(store, writer):
    """No broker has the topic any more: a job deletes them."""
    original = (await archived(writer, archive_in(store))).segments[0]
    await Job(store, writer.identified).compact()
    manifests = archive_in(store).manifests
    deleted = await delete_retired(
        store, manifests, writer.identified, retired_until_ms=2**60, keeps_held=False
    )
    assert deleted == (original,)
    assert stored_manifest(store, writer).retired == ()


async def test_log_that_is_never_trimmed_takes_the_place_of_originals(store, writer, lagging):
    """The originals go. After an election, the new leader's log is archived as far back as needed."""
    await archived(writer, archive_in(store))
    await Job(store, writer.identified).compact()
    compact_only = {"is_compact_only": True, "never_trimmed_because": "it is compacted"}
    await lead(store, writer, leader_epoch=0, **compact_only)
    assert stored_manifest(store, writer).retired == ()
    assert stored_manifest(store, writer).unsettled == Unsettled(0, 5)

    await lead(store, lagging, **compact_only)

    assert await archive_gives(store, writer) == {0: b"A-old", 1: b"other", 2: b"Y"}
    assert stored_manifest(store, writer).unsettled is None


@pytest.mark.parametrize("is_found", [True, False])
async def test_erased_records_do_not_come_back_with_an_election(store, writer, lagging, is_found):
    """An erasure ends the holding of what a compaction replaced, also where no segment had the key."""
    await archived(writer, archive_in(store))
    job = Job(store, writer.identified)
    await job.compact()
    if is_found:
        await job.erase([b"A"])
    else:
        await job.swap.release(writer.identified)
    lagging.log_start_offset = 2
    lagging.trim_file(0)
    await lead(store, lagging)
    assert await archive_gives(store, writer) == {1: b"other", 2: b"Y"}
