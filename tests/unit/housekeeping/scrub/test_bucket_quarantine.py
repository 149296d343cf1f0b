"""The quarantine: there and back, a crash after each request, and what is named in the last moment."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from tests.fakes.archive import Clock
from tests.fakes.store import forget_checksums, restore, store_unavailable
from tests.unit.housekeeping.scrub.buckets import DAY_MS, HOUR_MS, Bucket, DatedStore, left_behind
from tieringd.errors import ObjectNotFound, StorageUnavailable
from tieringd.formats.object_keys import QUARANTINE_REPORTS_PREFIX, data_key, quarantined_key


class Crash(Exception):
    """The process ended."""


class CrashingStore(DatedStore):
    """Ends the process at one request, before it takes effect or after."""

    crash_at: int | None = None
    takes_effect = False
    requests_made = 0
    on_delete = None

    async def _run(self, call):
        self.requests_made += 1
        is_last = self.requests_made == self.crash_at
        if is_last and not self.takes_effect:
            raise Crash
        try:
            return await call()
        finally:
            if is_last:
                raise Crash

    async def put(self, key, body, *, crc32c, condition=None):
        return await self._run(
            lambda: super(CrashingStore, self).put(key, body, crc32c=crc32c, condition=condition)
        )

    async def get(self, key):
        return await self._run(lambda: super(CrashingStore, self).get(key))

    async def get_range(self, key, *, position, size_bytes):
        return await self._run(
            lambda: super(CrashingStore, self).get_range(key, position=position, size_bytes=size_bytes)
        )

    async def head(self, key):
        return await self._run(lambda: super(CrashingStore, self).head(key))

    async def join(self, key, sources, *, crc32c, condition=None):
        return await self._run(
            lambda: super(CrashingStore, self).join(key, sources, crc32c=crc32c, condition=condition)
        )

    async def list_page(self, prefix, *, start_after=None, limit=1000):
        return await self._run(
            lambda: super(CrashingStore, self).list_page(prefix, start_after=start_after, limit=limit)
        )

    async def delete_many(self, keys):
        if self.on_delete is not None:
            happening, self.on_delete = self.on_delete, None
            await happening()
        return await self._run(lambda: super(CrashingStore, self).delete_many(keys))


@pytest.fixture
def bucket(writer, tmp_path, clock):
    return Bucket(writer, work_directory=tmp_path, store=CrashingStore(clock))


def places(bucket, key) -> list[bytes]:
    """Return what is stored of an object, where it was and in quarantine."""
    stored = bucket.store.objects
    return [stored[one][0] for one in (key, quarantined_key(key)) if one in stored]


async def crash_everywhere(bucket, work, check) -> int:
    """Do *work* with a crash at each of its requests in turn, from the same state; return how many it has."""
    before, crashes = dict(bucket.store.objects), 0
    for takes_effect in (False, True):
        number = 0
        while True:
            number += 1
            restore(bucket.store, before)
            bucket.store.crash_at, bucket.store.takes_effect = number, takes_effect
            bucket.store.requests_made = 0
            try:
                await work()
            except Crash:
                bucket.store.crash_at = None
                await check()
                crashes += 1
            else:
                break
            finally:
                bucket.store.crash_at = None
    return crashes


async def test_orphans_go_into_quarantine_with_a_report(bucket):
    """Orphans move with their bytes into quarantine, and a report says what they are and why."""
    orphans = await left_behind(bucket)
    named = await bucket.data_keys()

    report = await bucket.scrub(fix=True)

    assert {one.stored.key for one in report.moved} == set(orphans)
    for key, data in orphans.items():
        assert key not in bucket.store.objects
        assert bucket.store.bytes_of(quarantined_key(key)) == data
    (report_key,) = (key for key in bucket.store.objects if key.startswith(QUARANTINE_REPORTS_PREFIX))
    document = json.loads(bucket.store.bytes_of(report_key))
    assert {row["key"]: row["reason"] for row in document["objects"]} == dict.fromkeys(
        orphans, "no manifest names it"
    )
    assert set(named) <= bucket.store.objects.keys()
    again = await bucket.scrub(fix=True)
    assert (again.orphans, again.findings) == ([], [])


async def test_scrub_without_fix_moves_nothing(bucket):
    """Orphans are reported, and stay where they are."""
    orphans = await left_behind(bucket)
    before = dict(bucket.store.objects)

    report = await bucket.scrub()

    assert {one.stored.key for one in report.orphans} == set(orphans)
    assert bucket.store.objects == before


async def test_young_object_is_left_alone(bucket):
    """An object younger than the grace may be an upload that is not committed yet."""
    await left_behind(bucket)
    young = bucket.orphan(9)
    bucket.clock.now_ms += DAY_MS - HOUR_MS
    report = await bucket.scrub(fix=True)
    assert young not in {one.stored.key for one in report.orphans}
    assert young in bucket.store.objects
    bucket.clock.now_ms += HOUR_MS
    assert {one.stored.key for one in (await bucket.scrub(fix=True)).moved} == {young}


async def test_object_comes_back_as_it_was(bucket):
    """The undo needs only the key, and doing it twice is an error that says so."""
    orphans = await left_behind(bucket)
    before = dict(bucket.store.objects)
    await bucket.scrub(fix=True)

    for key in orphans:
        await bucket.parts.quarantine.restore(key)

    left = {key: data for key, (data, _) in bucket.store.objects.items() if "reports/" not in key}
    assert left == {key: data for key, (data, _) in before.items()}
    with pytest.raises(ObjectNotFound):
        await bucket.parts.quarantine.restore(next(iter(orphans)))


async def test_restored_orphan_has_its_grace_once_more(bucket):
    """A restored orphan is not taken away again before its time."""
    (key,) = await left_behind(bucket, 1)
    await bucket.scrub(fix=True)
    await bucket.parts.quarantine.restore(key)
    assert (await bucket.scrub(fix=True)).moved == []
    bucket.clock.now_ms += DAY_MS
    assert [one.stored.key for one in (await bucket.scrub(fix=True)).moved] == [key]


async def test_crash_at_any_request_of_a_move_loses_nothing(bucket):
    """Each orphan is in one place or both, nothing named has gone, and the next scrub ends the move."""
    orphans = await left_behind(bucket)
    named = {
        key: bucket.store.bytes_of(key) for key in [*(await bucket.data_keys()), *(await bucket.index_keys())]
    }

    async def check():
        for key, data in orphans.items():
            assert set(places(bucket, key)) == {data}
        for key, data in named.items():
            assert bucket.store.bytes_of(key) == data
        assert (await bucket.scrub(fix=True)).findings == []
        for key, data in orphans.items():
            assert key not in bucket.store.objects
            assert bucket.store.bytes_of(quarantined_key(key)) == data

    crashes = await crash_everywhere(bucket, lambda: bucket.scrub(fix=True), check)
    assert crashes > 40


async def test_crash_at_any_request_of_the_undo_loses_nothing(bucket):
    """The object is in one place or both at any time, and doing it again ends it."""
    (key,) = await left_behind(bucket, 1)
    data = bucket.store.bytes_of(key)
    await bucket.scrub(fix=True)

    async def check():
        assert set(places(bucket, key)) == {data}
        if quarantined_key(key) in bucket.store.objects:
            await bucket.parts.quarantine.restore(key)
        assert bucket.store.bytes_of(key) == data
        assert quarantined_key(key) not in bucket.store.objects

    assert await crash_everywhere(bucket, lambda: bucket.parts.quarantine.restore(key), check) >= 8


async def test_crash_at_any_request_of_the_deletion_loses_nothing_that_is_named(bucket):
    """Objects past their time go, whole or not, and those that manifests name stay."""
    orphans = await left_behind(bucket)
    await bucket.scrub(fix=True)
    bucket.clock.now_ms += 8 * DAY_MS
    named = {
        key: bucket.store.bytes_of(key) for key in [*(await bucket.data_keys()), *(await bucket.index_keys())]
    }

    async def check():
        for key, data in named.items():
            assert bucket.store.bytes_of(key) == data
        await bucket.scrub(fix=True)
        assert not [key for key in bucket.store.objects if key.startswith("quarantine/")]

    assert await crash_everywhere(bucket, lambda: bucket.scrub(fix=True), check) > 20
    assert not orphans.keys() & bucket.store.objects.keys()


async def test_what_was_in_quarantine_long_enough_is_deleted(bucket):
    """Objects go after the second grace and not before, and their report with them."""
    orphans = await left_behind(bucket)
    await bucket.scrub(fix=True)
    bucket.clock.now_ms += 7 * DAY_MS
    assert (await bucket.scrub(fix=True)).expired.deleted == ()
    bucket.clock.now_ms += 1
    assert set((await bucket.scrub(fix=True)).expired.deleted) == set(orphans)
    assert not [key for key in bucket.store.objects if key.startswith("quarantine/")]


async def commit_orphan(bucket, key):
    """Let the partition's manifest name an orphan: the worst case of the last moment."""
    manifest = bucket.manifest
    segment = next(
        one
        for number in range(9)
        if data_key(
            manifest.partition,
            one := replace(manifest.segments[-1], base_offset=0, writer_id=f"dead{number:04x}"),
        )
        == key
    )
    gone = manifest.segments
    named = replace(manifest, segments=gone.head(0).appended([segment]))
    stored = await bucket.archive.manifests.load(manifest.partition)
    await bucket.archive.manifests.commit(stored, named, leader_epoch=manifest.leader_epoch)


async def test_object_that_is_named_before_it_is_deleted_stays(bucket):
    """The judgement just before the deletion is by a manifest read then; the copy goes in its time."""
    (key,) = await left_behind(bucket, 1)
    page = await bucket.parts.search.page(await bucket.parts.search.names([]), start_after=None)
    (orphan,) = page.orphans
    await commit_orphan(bucket, key)

    moved = await bucket.parts.quarantine.move(
        [orphan], still_orphans=lambda objects: bucket.parts.search.still_orphans(orphan.partition, objects)
    )

    assert moved.moved == ()
    assert moved.left == ((key, "the object is no longer an orphan"),)
    data = bucket.store.bytes_of(key)
    assert bucket.store.bytes_of(quarantined_key(key)) == data
    bucket.clock.now_ms += 1
    assert (await bucket.parts.expiry.expire(before_ms=bucket.clock())).put_back == (key,)
    assert places(bucket, key) == [data]
    assert quarantined_key(key) not in bucket.store.objects


async def test_object_that_two_judge_differently_is_not_lost(bucket):
    """One is about to delete it, another sees it named and stays its own move: a copy is there to go back."""
    (key,) = await left_behind(bucket, 1)
    data = bucket.store.bytes_of(key)
    (orphan,) = (await bucket.scrub()).orphans

    def move():
        return bucket.parts.quarantine.move(
            [orphan],
            still_orphans=lambda objects: bucket.parts.search.still_orphans(orphan.partition, objects),
        )

    async def other_moves():
        await commit_orphan(bucket, key)
        assert (await move()).left == ((key, "the object is no longer an orphan"),)

    bucket.store.on_delete = other_moves
    assert (await move()).left == ((key, "a manifest named the object while it was moved; it was put back"),)
    assert bucket.store.bytes_of(key) == data


async def test_object_that_cannot_go_back_after_all_is_told(bucket):
    """Another has its key meanwhile: it waits in quarantine, and the others go on."""
    keys = list(await left_behind(bucket, 2))
    orphans = (await bucket.scrub()).orphans

    judge, judged = bucket.parts.search.still_orphans, []

    async def still_orphans(objects):
        if judged:
            await commit_orphan(bucket, keys[0])
            bucket.store.add(keys[0], b"something else")
        judged.append(objects)
        return await judge(orphans[0].partition, objects)

    moved = await bucket.parts.quarantine.move(orphans, still_orphans=still_orphans)

    assert [one.stored.key for one in moved.moved] == [keys[1]]
    ((key, reason),) = moved.left
    assert key == keys[0]
    assert "cannot be put back" in reason
    assert quarantined_key(key) in bucket.store.objects


async def test_object_that_is_named_while_it_is_deleted_goes_back(bucket):
    """A manifest that comes to name it in the very last moment finds it there again."""
    (key,) = await left_behind(bucket, 1)
    data = bucket.store.bytes_of(key)
    (orphan,) = (await bucket.scrub()).orphans
    bucket.store.on_delete = lambda: commit_orphan(bucket, key)

    moved = await bucket.parts.quarantine.move(
        [orphan], still_orphans=lambda objects: bucket.parts.search.still_orphans(orphan.partition, objects)
    )

    assert moved.moved == ()
    assert moved.left == ((key, "a manifest named the object while it was moved; it was put back"),)
    assert bucket.store.bytes_of(key) == data


def move_of(bucket, orphan):
    """Return the move of an orphan, as a scrub does it."""
    return bucket.parts.quarantine.move(
        [orphan], still_orphans=lambda objects: bucket.parts.search.still_orphans(orphan.partition, objects)
    )


@pytest.mark.parametrize("command", ["purge", "restore"])
async def test_command_beside_a_move_leaves_the_copy_of_a_named_object(bucket, command):
    """The move is about to delete the object at its place, and puts it back from the copy then."""
    (key,) = await left_behind(bucket, 1)
    (orphan,) = (await bucket.scrub()).orphans

    async def meanwhile():
        await commit_orphan(bucket, key)
        if command == "purge":
            assert (await bucket.parts.expiry.delete(orphan.partition, [key])).put_back == (key,)
        else:
            assert not await bucket.parts.quarantine.restore(key)

    bucket.store.on_delete = meanwhile
    await move_of(bucket, orphan)
    assert key in bucket.store.objects


async def test_purge_beside_a_move_leaves_the_copy_of_an_orphan(bucket):
    """The orphan may be named before the move deletes it."""
    (key,) = await left_behind(bucket, 1)
    (orphan,) = (await bucket.scrub()).orphans

    async def meanwhile():
        expired = await bucket.parts.expiry.delete(orphan.partition, [key])
        assert expired.left == ((key, "the object is at its place as well: a scrub may be moving it"),)
        await commit_orphan(bucket, key)

    bucket.store.on_delete = meanwhile
    await move_of(bucket, orphan)
    assert key in bucket.store.objects


@pytest.mark.parametrize("is_named", [True, False])
async def test_expiry_leaves_a_copy_that_was_made_after_its_listing(bucket, is_named):
    """A killed scrub left an old copy, which the expiry lists; the next scrub copies the object again."""
    (key,) = await left_behind(bucket, 1)
    bucket.store.add(quarantined_key(key), bucket.store.bytes_of(key))
    bucket.clock.now_ms += 8 * DAY_MS
    (orphan,) = (await bucket.scrub()).orphans
    copied, expired = asyncio.Event(), asyncio.Event()
    owners, moves = bucket.parts.expiry._owners, []

    class Owners:
        async def owner(self, partition):
            moves.append(asyncio.create_task(move_of(bucket, orphan)))
            await copied.wait()
            return await owners.owner(partition)

    async def meanwhile():
        if is_named:
            await commit_orphan(bucket, key)
        copied.set()
        await expired.wait()

    bucket.store.on_delete = meanwhile
    bucket.parts.expiry._owners = Owners()
    found = await bucket.parts.expiry.expire(before_ms=bucket.clock() - 7 * DAY_MS)
    expired.set()
    await asyncio.gather(*moves)
    assert found.put_back == ((key,) if is_named else ())
    assert found.left == (() if is_named else ((key, "it was put into quarantine again meanwhile"),))
    assert (key if is_named else quarantined_key(key)) in bucket.store.objects


async def test_orphan_whose_copy_has_gone_stays(bucket):
    """The copy is asked for once more directly before the deletion; the next scrub moves the object."""
    (key,) = await left_behind(bucket, 1)
    (orphan,) = (await bucket.scrub()).orphans

    async def still_orphans(objects):
        if quarantined_key(key) in bucket.store.objects:
            bucket.store.remove(quarantined_key(key))
        return await bucket.parts.search.still_orphans(orphan.partition, objects)

    moved = await bucket.parts.quarantine.move([orphan], still_orphans=still_orphans)
    assert (moved.moved, moved.left) == ((), ((key, "its copy has left the quarantine meanwhile"),))
    assert key in bucket.store.objects


class ScrubbedAtThePut(DatedStore):
    """A bucket in which a scrub that began earlier deletes an object directly after it was stored again."""

    scrub = None

    async def put(self, key, body, *, crc32c, condition=None):
        info = await super().put(key, body, crc32c=crc32c, condition=condition)
        if self.scrub is not None and "/manifest." in key:
            scrub, self.scrub = self.scrub, None
            await scrub(key)
        return info


async def test_spill_of_a_part_that_is_being_moved_loses_nothing(writer, tmp_path):
    """A crash left the same part. The scrub judges and deletes between the new put and its commit."""
    store = ScrubbedAtThePut(Clock())
    bucket = Bucket(writer, work_directory=tmp_path, store=store)
    await bucket.fill(6)
    manifest = bucket.manifest
    bucket.clock.now_ms += 3 * DAY_MS
    for _ in range(4):
        writer.drop_head()

    async def scrub(key: str) -> None:
        # The scrub has read the object's age and the manifest before the put.
        data, info = store.objects[key]
        store.place(key, data, replace(info, modified_ms=info.modified_ms - 2 * DAY_MS))
        report = await bucket.scrub(fix=True)
        assert [one.stored.key for one in report.moved] == [key]
        assert bucket.manifest == manifest

    store.scrub = scrub
    await bucket.step()
    assert store.scrub is None
    assert bucket.manifest.spillover is not None
    assert (await bucket.scrub()).findings == []
    assert len((await bucket.whole_manifest()).segments) == 6


async def test_named_object_in_quarantine_is_put_back_and_never_deleted(bucket):
    """A named object that is only in quarantine is put back by the deletion, and by a scrub."""
    await bucket.fill(3)
    key = (await bucket.data_keys())[1]
    data = bucket.store.bytes_of(key)
    for mend in ("scrub", "expire"):
        bucket.store.add(quarantined_key(key), data)
        bucket.store.remove(key)
        bucket.clock.now_ms += 30 * DAY_MS
        if mend == "scrub":
            report = await bucket.scrub(fix=True)
            assert list(report.mended.values()) == ["from its copy in quarantine"]
        else:
            assert (await bucket.parts.expiry.expire(before_ms=bucket.clock())).put_back == (key,)
        assert bucket.store.bytes_of(key) == data


async def test_listing_that_breaks_off_moves_nothing_more(bucket):
    """A store that does not answer ends the scrub; what it has done already is whole."""
    orphans = await left_behind(bucket)
    for operation in ("list_page", "head", "join", "get"):
        bucket.store.fail_next(operation, lambda: store_unavailable("scrub"))
        with pytest.raises(StorageUnavailable):
            await bucket.scrub(fix=True)
        for key, data in orphans.items():
            assert set(places(bucket, key)) == {data}


async def test_checksums_that_the_store_does_not_tell_are_read(bucket):
    """Objects are moved and put back where the store keeps no checksums."""
    (key,) = await left_behind(bucket, 1)
    data = bucket.store.bytes_of(key)
    forget_checksums(bucket.store)
    assert len((await bucket.scrub(fix=True)).moved) == 1
    forget_checksums(bucket.store)
    await bucket.parts.quarantine.restore(key)
    assert bucket.store.bytes_of(key) == data
