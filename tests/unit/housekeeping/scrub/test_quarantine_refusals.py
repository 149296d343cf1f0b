"""What the quarantine leaves alone: bytes that are damaged, and partitions of which too little is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.store import rot
from tests.unit.housekeeping.scrub.buckets import DAY_MS, left_behind
from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import QUARANTINE_REPORTS_PREFIX, manifest_key, quarantined_key
from tieringd.model.topic_lifecycle import Lifecycle


async def test_orphan_that_cannot_be_copied_stays_and_the_others_go(bucket):
    """Bytes that rotted cost their own move only, and the report says which it was and why."""
    orphans = list(await left_behind(bucket))
    rot(bucket.store, orphans[1])

    report = await bucket.scrub(fix=True)

    assert {one.stored.key for one in report.moved} == {orphans[0], orphans[2]}
    ((key, reason),) = report.left
    assert key == orphans[1]
    assert "cannot be copied" in reason
    assert key in bucket.store.objects


@pytest.mark.parametrize("damage", ["rotten", "gone"])
async def test_named_object_that_cannot_go_back_is_left_and_the_others_are_deleted(bucket, damage):
    """A damaged copy, or one that was removed meanwhile, does not stop the deletion of the others."""
    orphans = await left_behind(bucket)
    await bucket.scrub(fix=True)
    partition, key = bucket.writer.identified, (await bucket.data_keys())[1]
    if damage == "rotten":
        bucket.store.add(quarantined_key(key), bucket.store.bytes_of(key))
        rot(bucket.store, quarantined_key(key))
    bucket.store.remove(key)

    expired = await bucket.parts.expiry.delete(partition, [key, *orphans])

    assert expired.deleted == tuple(orphans)
    assert [one for one, _ in expired.left] == [key]
    assert not [one for one in orphans if quarantined_key(one) in bucket.store.objects]
    assert (quarantined_key(key) in bucket.store.objects) == (damage == "rotten")


async def test_nothing_is_deleted_while_the_manifest_cannot_be_read(bucket):
    """Nothing is moved either: the objects that it names are unknown."""
    orphans = await left_behind(bucket)
    await bucket.scrub(fix=True)
    more = bucket.orphan(7)
    key = manifest_key(bucket.writer.identified)
    bucket.store.add(key, bucket.store.bytes_of(key)[:-1])
    bucket.clock.now_ms += 30 * DAY_MS

    report = await bucket.scrub(fix=True)

    assert (report.moved, report.expired.deleted) == ([], ())
    assert more in bucket.store.objects
    assert all(quarantined_key(one) in bucket.store.objects for one in orphans)
    assert bucket.writer.identified in report.uncertain
    assert len(report.left) == len(orphans)


async def test_nothing_is_moved_while_the_manifest_is_missing(bucket):
    """Objects of a partition without its manifest may be all that is left of it: that is a fault."""
    await left_behind(bucket)
    bucket.store.remove(manifest_key(bucket.writer.identified))
    before = dict(bucket.store.objects)
    report = await bucket.scrub(fix=True)
    assert [one.kind.value for one in report.findings] == ["manifest_missing"]
    assert (report.orphans, bucket.store.objects) == ([], before)


@pytest.mark.parametrize("lifecycle", [Lifecycle.KEPT, Lifecycle.DELETED])
async def test_nothing_goes_while_the_manifest_of_a_restorable_topic_is_missing(bucket, lifecycle):
    """Objects that may still be restored are neither moved nor deleted: they may be all there is."""
    orphans = await left_behind(bucket)
    await bucket.scrub(fix=True)
    await bucket.archive.manifests.change_topic(
        bucket.topic_key, lambda found: replace(found, lifecycle=lifecycle)
    )
    bucket.store.remove(manifest_key(bucket.writer.identified))
    bucket.clock.now_ms += 30 * DAY_MS
    before = dict(bucket.store.objects)

    report = await bucket.scrub(fix=True)

    assert [one.kind.value for one in report.findings] == ["manifest_missing"]
    assert (report.orphans, report.expired.deleted) == ([], ())
    assert {key for key, _ in report.left} == set(orphans)
    assert before.keys() - bucket.store.objects.keys() == {
        key for key in before if key.startswith(QUARANTINE_REPORTS_PREFIX)
    }


async def test_other_bytes_in_the_place_are_not_written_over(bucket):
    """An undo refuses where another object has taken the key meanwhile."""
    (key,) = await left_behind(bucket, 1)
    await bucket.scrub(fix=True)
    bucket.store.add(key, b"something else")
    with pytest.raises(CorruptDataError, match="another object has this key"):
        await bucket.parts.quarantine.restore(key)
    assert bucket.store.bytes_of(key) == b"something else"
    assert quarantined_key(key) in bucket.store.objects
