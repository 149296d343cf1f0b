"""The history of restored topics: linked once, found again, and never in a circle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.archive import archive_in, archived, archiver_of, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.fakes.spilling import filled, make_parts_small
from tests.fakes.store import restore, rot
from tieringd.archive.record_deletion import delete_archived
from tieringd.errors import ConfigError, CorruptDataError, ObjectNotFound, StorageUnavailable
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.object_keys import TopicKey, data_key, history_link_key, index_key, manifest_key
from tieringd.model.manifest_parts import Gap, RecordDeletion
from tieringd.model.topic_lifecycle import Deletion, Lifecycle
from tieringd.policies.chunk_layout import GONE
from tieringd.reading.history import FORGOTTEN_AFTER_MS, LINKS_MAX, REFRESH_AFTER_MS, History, LogReader

IDS = [f"AAAAAAAAAAAAAAAAAAAAA{letter}" for letter in "BCDEFGHIJKLMNOPQRSTUVWXYZ"]


def key_of(number):
    return TopicKey(f"cluster-{number}", "orders", IDS[number])


def linked(number, start, *, history=None):
    return HistoryLink(key_of(number), key_of(number - 1 if history is None else history), ((0, start),))


@pytest.fixture
def history(store, archive, clock):
    return History(store, archive.manifests, now_ms=clock)


async def old_archive(tmp_path, store, number, *, first_offset=0, segments=2):
    """Archive a topic in a cluster of its own; return its writer and its manifest."""
    writer = LogWriter(tmp_path / str(number), topic_id=IDS[number], first_offset=first_offset)
    writer.identified = replace(writer.identified, cluster=key_of(number).cluster)
    writer.begin_epoch(10 - number)
    for _ in range(segments):
        writer.closed_segment()
    return writer, await archived(writer, archive_in(store))


async def test_topic_without_a_link_has_no_history(writer, history):
    """Most have none."""
    assert await history.parts(writer.identified, start_offset=5) == ()


async def test_history_goes_back_over_several_restores(tmp_path, store, history):
    """Oldest first, each up to where the next one begins."""
    first, _ = await old_archive(tmp_path, store, 0)
    second, _ = await old_archive(tmp_path, store, 1, first_offset=6)
    third, _ = await old_archive(tmp_path, store, 2, first_offset=12)
    await history.link(linked(1, 6))
    await history.link(linked(2, 12))
    parts = await history.parts(third.identified, start_offset=12)
    assert [one.partition for one in parts] == [first.identified, second.identified]
    assert [(one.start_offset, one.next_offset) for one in parts] == [(0, 6), (6, 12)]


async def test_link_is_written_once(store, history):
    """The same again is no change; another is refused."""
    await history.link(linked(1, 6))
    before = dict(store.objects)
    await history.link(linked(1, 6))
    assert store.objects == before
    with pytest.raises(
        ConfigError, match="already continues another archive, or the same one from another offset"
    ):
        await history.link(linked(1, 7))
    assert store.objects == before


async def test_circle_is_refused(history):
    """A circle of several topics is refused, and so is a topic that is its own history."""
    await history.link(linked(1, 6))
    await history.link(linked(2, 6))
    for link in (linked(0, 6, history=2), linked(3, 6, history=3)):
        with pytest.raises(ConfigError, match="be circular"):
            await history.link(link)


async def test_circle_that_is_there_is_an_error(tmp_path, store, archive, clock):
    """No process writes one; a copied bucket might hold it."""
    writer, _ = await old_archive(tmp_path, store, 0, first_offset=6)
    await old_archive(tmp_path, store, 1, first_offset=6)
    await History(store, archive.manifests, now_ms=clock).link(linked(1, 6))
    donated = MemoryStore()
    donor = History(donated, archive.manifests, now_ms=clock)
    await donor.link(linked(0, 6, history=1))
    restore(store, {**store.objects, **donated.objects})
    with pytest.raises(CorruptDataError, match="does not end after"):
        await History(store, archive.manifests, now_ms=clock).parts(writer.identified, start_offset=6)


async def test_too_many_restores_are_refused(history):
    """The link of a restore too many is refused before it is written."""
    for number in range(1, LINKS_MAX + 1):
        await history.link(linked(number, 6))
    with pytest.raises(ConfigError, match=f"more than {LINKS_MAX} restores"):
        await history.link(linked(LINKS_MAX + 1, 6))


async def test_missing_link_is_read_again_after_a_while(tmp_path, store, archive, clock, history):
    """A restore may come while the daemon runs."""
    await old_archive(tmp_path, store, 0)
    new = LogWriter(tmp_path / "new", topic_id=IDS[1], first_offset=6)
    name = replace(new.identified, cluster=key_of(1).cluster)
    assert await history.parts(name, start_offset=6) == ()
    await History(store, archive.manifests, now_ms=clock).link(linked(1, 6))
    clock.now_ms += REFRESH_AFTER_MS - 1
    assert await history.parts(name, start_offset=6) == ()
    clock.now_ms += 1
    assert len(await history.parts(name, start_offset=6)) == 1


async def test_log_that_does_not_begin_there_has_no_history(tmp_path, store, history):
    """A link of a restore that was never finished: the log began at 0, and has these offsets itself."""
    await old_archive(tmp_path, store, 0)
    await history.link(linked(1, 6))
    new = LogWriter(tmp_path / "new", topic_id=IDS[1])
    assert await history.parts(replace(new.identified, cluster="cluster-1"), start_offset=0) == ()


async def test_damaged_link_is_named(store, history):
    """The error names the key of a damaged link. The topic would seem to begin anew without it."""
    await history.link(linked(1, 6))
    key = history_link_key(key_of(1))
    rot(store, key)
    with pytest.raises(CorruptDataError, match="history_link"):
        await history.link(linked(1, 7))


async def test_lost_manifest_of_an_older_archive_is_named(tmp_path, store, archive, history):
    """The log would seem to begin anew without it. Readers that begin behind that archive do not need it."""
    old, _ = await old_archive(tmp_path, store, 0)
    new, _ = await old_archive(tmp_path, store, 1, first_offset=6)
    await archive.manifests.ensure_topic(key_of(0), partition_count=1)
    await history.link(linked(1, 6))
    key = manifest_key(old.identified)
    store.remove(key)

    async def read(offset):
        reader = LogReader(
            new.identified,
            manifests=archive.manifests,
            records=archive.records,
            from_offset=offset,
            on_gap=lambda _: None,
            history=history,
        )
        return [one.offset async for one in reader.records(read_committed=True)]

    for offset in (0, 5):
        with pytest.raises(ObjectNotFound, match=f"{key} is missing.*before offset 6"):
            await read(offset)
    assert await read(6) == [*range(6, 12)]
    assert await history.parts(new.identified, start_offset=6, deleted_before=6) == ()
    with pytest.raises(ObjectNotFound, match=key):
        await history.parts(new.identified, start_offset=6, deleted_before=5)


async def test_archive_between_is_read_where_the_one_before_it_is_lost(tmp_path, store, archive, history):
    """A reader that begins in the archive between needs no older one."""
    first, _ = await old_archive(tmp_path, store, 0)
    await old_archive(tmp_path, store, 1, first_offset=6)
    third, _ = await old_archive(tmp_path, store, 2, first_offset=12)
    await history.link(linked(1, 6))
    await history.link(linked(2, 12))
    await archive.manifests.ensure_topic(key_of(0), partition_count=1)
    store.remove(manifest_key(first.identified))
    reader = LogReader(
        third.identified,
        manifests=archive.manifests,
        records=archive.records,
        from_offset=6,
        on_gap=lambda _: None,
        history=history,
    )
    assert [one.offset async for one in reader.records(read_committed=True)] == [*range(6, 18)]


async def test_archive_of_which_the_bucket_has_no_topic_is_no_history(tmp_path, store, archive, history):
    """A topic that was moved to this bucket came without an older archive that had been purged."""
    old, _ = await old_archive(tmp_path, store, 0)
    new, _ = await old_archive(tmp_path, store, 1, first_offset=6)
    await history.link(linked(1, 6))
    store.remove(manifest_key(old.identified))
    assert (await archive.manifests.load_topic(key_of(0))) is None
    assert await history.parts(new.identified, start_offset=6) == ()


async def test_purged_archive_is_no_history(tmp_path, store, archive, history):
    """Its manifests were deleted on purpose, and the topic's own says so."""
    old, _ = await old_archive(tmp_path, store, 0)
    new, _ = await old_archive(tmp_path, store, 1, first_offset=6)
    await history.link(linked(1, 6))
    store.remove(manifest_key(old.identified))
    await archive.manifests.change_topic(
        key_of(0), lambda found: replace(found, lifecycle=Lifecycle.PURGED, deletion=Deletion(0, "", ""))
    )
    assert await history.parts(new.identified, start_offset=6) == ()


@pytest.mark.parametrize("read_committed", [True, False])
async def test_reading_begins_in_the_history(tmp_path, store, archive, history, read_committed):
    """
    A read goes over the seam to the old log, and over the head that retention took from the new one.

    Aborted records are hidden as ever.
    """
    old = LogWriter(tmp_path / "0", topic_id=IDS[0])
    old.identified = replace(old.identified, cluster="cluster-0")
    old.append(b"kept")
    old.append(b"aborted later", producer_id=7)
    end = old.roll()
    old.abort(7)
    old.closed_segment()
    await archived(old, archive)
    old_values = {
        offset: value for offset, value in old.values(read_committed=read_committed).items() if offset < end
    }
    new, manifest = await old_archive(tmp_path, store, 1, first_offset=end)
    await history.link(linked(1, end))
    gaps = []

    async def read(offset):
        reader = LogReader(
            new.identified,
            manifests=archive.manifests,
            records=archive.records,
            from_offset=offset,
            on_gap=gaps.append,
            history=history,
        )
        return {one.offset: one.value async for one in reader.records(read_committed=read_committed)}

    assert await read(0) == old_values | new.values()
    assert await read(end) == new.values()
    assert gaps == []
    stored = await archive.manifests.load(new.identified)
    await archive.manifests.commit(stored, manifest.expired(1, now_ms=1), leader_epoch=10**6)
    left = {offset: value for offset, value in new.values().items() if offset >= end + 3}
    assert await read(0) == old_values | left
    assert gaps == [Gap(end, end + 2, GONE, 0)]


async def test_outage_leaves_what_is_known_of_links(writer, store, history, clock):
    """A known absence of links is still given during an outage. Nothing is known before the first read."""
    failed = []

    def away() -> StorageUnavailable:
        failed.append("get")
        return StorageUnavailable("away")

    store.fail_next("get", away)
    with pytest.raises(StorageUnavailable):
        await history.parts(writer.identified, start_offset=5)
    assert await history.parts(writer.identified, start_offset=5) == ()
    clock.now_ms += REFRESH_AFTER_MS
    store.fail_next("get", away)
    assert await history.parts(writer.identified, start_offset=5) == ()
    assert failed == ["get"] * 2


@pytest.mark.parametrize("end", [4, 5, 8, 9, 10, 12])
async def test_spilled_history_is_read_to_its_end(tmp_path, store, archive, history, monkeypatch, *, end):
    """The old cluster may have gone on, and spilled, since; what is spilled before the end stays so."""
    make_parts_small(monkeypatch)
    old = LogWriter(tmp_path / "0", topic_id=IDS[0])
    old.identified = replace(old.identified, cluster="cluster-0")
    await filled(old, archiver_of(old, archive, FakeBroker(old)))
    assert (await archive.manifests.load(old.identified)).existing.live_offset == 8
    new, _ = await old_archive(tmp_path, store, 1, first_offset=end)
    await history.link(linked(1, end))
    (part,) = await history.parts(new.identified, start_offset=end)
    assert (part.start_offset, part.next_offset) == (0, end)
    assert sorted(await values_in(archive, part)) == list(range(end))
    assert await archive.records.first_offset(part) == 0
    assert part.live_offset == min(8, end - 1 - (end - 1) % 2)


async def test_manifests_without_requests_are_forgotten(tmp_path, store, history, clock):
    """A history that was purged, or whose reader has gone, takes no memory for ever."""
    await old_archive(tmp_path, store, 0)
    second, _ = await old_archive(tmp_path, store, 1, first_offset=6)
    third, _ = await old_archive(tmp_path, store, 2, first_offset=12)
    await history.link(linked(1, 6))
    await history.link(linked(2, 12))
    await history.parts(third.identified, start_offset=12)
    assert len(history._known) == 2
    clock.now_ms += FORGOTTEN_AFTER_MS
    await history.parts(second.identified, start_offset=6)
    assert (len(history._known), len(history._asking)) == (1, 0)


async def test_links_of_the_topics_asked_for_last_are_kept(writer, store, archive, clock):
    """A process that lives through many topics remembers some of them."""
    history = History(store, archive.manifests, now_ms=clock, links_kept_max=3)

    async def requests_for(*numbers):
        store.requests.clear()
        for number in numbers:
            await history.parts(replace(writer.identified, topic=f"topic-{number}"), start_offset=5)
        return len(store.requests)

    assert await requests_for(*range(9)) == 9
    assert await requests_for(6, 7, 8) == 0
    assert await requests_for(5) == 1


def reader_from_the_start(own, archive, history) -> LogReader:
    """Return a reader of a partition and the archives before it."""
    return LogReader(
        own,
        manifests=archive.manifests,
        records=archive.records,
        from_offset=0,
        on_gap=lambda gap: None,
        history=history,
    )


@pytest.mark.parametrize("before_offset", [2, 6, 9, 12, 20])
async def test_reader_skips_only_what_a_user_deletes_meanwhile(
    tmp_path, store, archive, clock, before_offset
):
    """Archives that a deletion takes out of the history do not move the reader past those after them."""
    history = History(store, archive.manifests, now_ms=clock)
    for number in range(4):
        writer, _ = await old_archive(tmp_path, store, number, first_offset=6 * number)
        if number:
            await history.link(linked(number, 6 * number))
    own, found = writer.identified, []
    reader = reader_from_the_start(own, archive, history)
    async for record in reader.records(read_committed=False):
        found.append(record.offset)
        if record.offset == 2:
            deletion = RecordDeletion(before_offset, 1 << 20)
            await delete_archived(archive.manifests, own, deletion, now_ms=clock)
    # The archive that is being read is read to its end.
    assert found == [offset for offset in range(24) if offset < 6 or offset >= before_offset]
    assert reader.next_offset == 24


async def test_reader_goes_on_with_the_next_archive_when_an_object_of_a_deleted_one_is_gone(
    tmp_path, store, archive, clock
):
    """The newest list no longer has the archive that is being read."""
    history = History(store, archive.manifests, now_ms=clock)
    manifests = []
    for number in range(3):
        writer, manifest = await old_archive(tmp_path, store, number, first_offset=6 * number)
        manifests.append(manifest)
        if number:
            await history.link(linked(number, 6 * number))
    own, found = writer.identified, []
    reader = reader_from_the_start(own, archive, history)
    async for record in reader.records(read_committed=False):
        found.append(record.offset)
        if record.offset == 2:
            await delete_archived(archive.manifests, own, RecordDeletion(6, 1 << 20), now_ms=clock)
            oldest = manifests[0]
            for name in (data_key, index_key):
                await store.delete_many([name(oldest.partition, oldest.segments[1])])
    assert found == [0, 1, 2, *range(6, 18)]


@pytest.mark.parametrize("before_offset", [4, 6, 8, 12, 14])
@pytest.mark.parametrize("has_followed", [True, False])
async def test_deletion_outlives_the_next_restore(
    tmp_path, store, archive, clock, *, before_offset, has_followed
):
    """A deletion through a restored topic hides the records of older archives from a topic after it too."""
    history = History(store, archive.manifests, now_ms=clock)
    for number in range(3):
        writer, _ = await old_archive(tmp_path, store, number, first_offset=6 * number)
        if number:
            await history.link(linked(number, 6 * number))
        if number == 1:
            second = writer.identified
    deletion = RecordDeletion(before_offset, 1 << 20)
    if has_followed:
        await delete_archived(archive.manifests, second, deletion, now_ms=clock)
    else:
        # The archive's start follows later, as while segments are spilled.
        stored = await archive.manifests.load(second)
        recorded = stored.existing.with_deletion(deletion)
        await archive.manifests.commit(stored, recorded, leader_epoch=stored.existing.leader_epoch)
    parts = await history.parts(writer.identified, start_offset=12)
    left = range(min(before_offset, 12), 18)
    assert (*parts, (await archive.manifests.load(writer.identified)).existing)[0].start_offset == left[0]
    reader = reader_from_the_start(writer.identified, archive, history)
    assert [one.offset async for one in reader.records(read_committed=False)] == list(left)
