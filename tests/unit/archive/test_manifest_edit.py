"""A job edits a manifest while an archiver commits to it, and fences no archiver."""

from __future__ import annotations

import pytest

from tests.fakes.archive import archive_in
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import store_unavailable
from tieringd.archive.manifest_store import EDIT_MARK, EDIT_TRIES, StoredManifest
from tieringd.errors import FencedError, ObjectNotFound, StorageUnavailable
from tieringd.formats.manifest_codec import decode_manifest
from tieringd.formats.object_keys import manifest_key
from tieringd.model.manifest import CLOSED_EPOCH, PartitionManifest
from tieringd.model.manifest_parts import Gap

_NOTHING = StoredManifest(None, None)


def unknown() -> StorageUnavailable:
    return store_unavailable("put", True)


@pytest.fixture
def partition(writer):
    return writer.identified


@pytest.fixture
def archiver(store):
    return archive_in(store, writer_id="aa").manifests


@pytest.fixture
def job(store):
    return archive_in(store, writer_id="job").manifests


def grown(manifest: PartitionManifest) -> PartitionManifest:
    """Return the manifest with a gap more: the smallest change there is."""
    return manifest.with_gap(Gap(manifest.next_offset, manifest.next_offset + 9, "a test", 0))


async def grow(manifest: PartitionManifest) -> PartitionManifest:
    return grown(manifest)


def in_bucket(store, partition) -> PartitionManifest:
    return decode_manifest(store.objects[manifest_key(partition)][0])


async def begun(archiver, partition, *, leader_epoch: int = 3) -> StoredManifest:
    begin = PartitionManifest.begin(partition, start_offset=0)
    return await archiver.commit(_NOTHING, begin, leader_epoch=leader_epoch)


async def test_archiver_goes_on_after_an_edit(store, archiver, job, partition):
    """The archiver loses its next commit, reads the manifest again, and commits under the same epoch."""
    stored = await begun(archiver, partition)
    await job.edit(partition, grow)

    with pytest.raises(StorageUnavailable, match="a job edited the manifest of orders-0"):
        await archiver.commit(stored, grown(stored.existing), leader_epoch=3)
    again = await archiver.load(partition)
    committed = await archiver.commit(again, grown(again.existing), leader_epoch=3)

    assert committed.existing.next_offset == 20
    assert in_bucket(store, partition).writer_id == "aa"


async def test_restarted_archiver_goes_on_after_an_edit(store, archiver, job, partition):
    """One of another name under the same epoch does so too: the edit is not another daemon's commit."""
    await begun(archiver, partition)
    restarted = archive_in(store, writer_id="bb").manifests
    stored = await restarted.load(partition)
    await job.edit(partition, grow)

    with pytest.raises(StorageUnavailable, match="a job edited"):
        await restarted.commit(stored, grown(stored.existing), leader_epoch=3)
    again = await restarted.load(partition)
    assert (await restarted.commit(again, grown(again.existing), leader_epoch=3)).existing.writer_id == "bb"


async def test_edit_of_a_newer_leaders_manifest_still_fences(archiver, store, job, partition):
    """A deposed leader stays deposed, whichever process wrote last."""
    stored = await begun(archiver, partition)
    newer = archive_in(store, writer_id="bb").manifests
    await newer.commit(await newer.load(partition), grown(stored.existing), leader_epoch=4)
    await job.edit(partition, grow)

    with pytest.raises(FencedError, match="leader epoch 4 owns"):
        await archiver.commit(stored, grown(stored.existing), leader_epoch=3)


async def test_edits_keep_the_owner(store, archiver, job, partition):
    """The epoch and the name of the writer stay, with one mark however many edits there are."""
    await begun(archiver, partition)
    for _ in range(3):
        await job.edit(partition, grow)

    found = in_bucket(store, partition)
    assert (found.writer_id, found.leader_epoch, found.commit_number) == (f"aa{EDIT_MARK}", 3, 4)


async def test_edit_that_is_overtaken_is_made_again(store, archiver, job, partition):
    """The change is made once more, of what the archiver has committed meanwhile."""
    stored = await begun(archiver, partition)
    seen = []

    async def change(manifest: PartitionManifest) -> PartitionManifest:
        seen.append(manifest.next_offset)
        if len(seen) == 1:
            await archiver.commit(stored, grown(stored.existing), leader_epoch=3)
        return grown(manifest)

    edited = await job.edit(partition, change)

    assert seen == [0, 10]
    assert edited.existing == in_bucket(store, partition)
    assert edited.existing.next_offset == 20


async def test_edit_that_changes_nothing_writes_nothing(store, archiver, job, partition):
    """A change that returns None leaves the bucket as it was."""
    stored = await begun(archiver, partition)

    async def leave(_manifest: PartitionManifest) -> None:
        return None

    assert (await job.edit(partition, leave)).version == stored.version
    assert in_bucket(store, partition).writer_id == "aa"


async def test_edit_whose_answer_was_lost_is_recognised(store, archiver, job, partition):
    """The edit took effect once, and is not made a second time."""
    await begun(archiver, partition)
    store.fail_next("put", unknown, after_effect=True)

    edited = await job.edit(partition, grow)

    assert edited.existing == in_bucket(store, partition)
    assert edited.existing.next_offset == 10


async def test_edit_that_never_arrived_is_told(store, archiver, job, partition):
    """The manifest stays as it was."""
    await begun(archiver, partition)
    store.fail_next("put", unknown, times=2)

    with pytest.raises(StorageUnavailable):
        await job.edit(partition, grow)
    assert in_bucket(store, partition).next_offset == 0


async def test_edit_of_what_is_not_there(job, partition):
    """An error names the object that is missing."""
    with pytest.raises(ObjectNotFound, match="the bucket has no "):
        await job.edit(partition, grow)


async def test_closed_manifest_is_not_edited(archiver, job, partition):
    """A manifest that was moved elsewhere, or is being purged, stays as it is."""
    await begun(archiver, partition, leader_epoch=CLOSED_EPOCH)

    with pytest.raises(FencedError, match="is closed"):
        await job.edit(partition, grow)


class ContestedStore(MemoryStore):
    """A bucket in which each manifest is written once more before it can be swapped."""

    async def put(self, key, body, *, crc32c: int, condition=None):
        if condition is not None and key in self.objects:
            self.add(key, self.objects[key][0])
        return await super().put(key, body, crc32c=crc32c, condition=condition)


async def test_manifest_that_never_rests_is_told(partition):
    """Endless competition ends in a retryable error."""
    store = ContestedStore()
    await begun(archive_in(store, writer_id="aa").manifests, partition)

    with pytest.raises(StorageUnavailable, match="changes too often"):
        await archive_in(store, writer_id="job").manifests.edit(partition, grow)
    assert [operation for operation, _ in store.requests].count("put") == 1 + EDIT_TRIES
