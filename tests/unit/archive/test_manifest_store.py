"""Manifests in a bucket: compare-and-swap, fencing, and answers that never came."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from crc32c import crc32c

from tests.fakes.archive import archive_in
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import store_unavailable
from tieringd.archive.manifest_store import TOPIC_MANIFEST_TRIES, ManifestStore, StoredManifest
from tieringd.errors import (
    CorruptDataError,
    FencedError,
    PreconditionFailed,
    RetryableError,
    StorageUnavailable,
)
from tieringd.formats.manifest_codec import decode_manifest, encode_manifest
from tieringd.formats.object_keys import TopicKey, manifest_key, topic_manifest_key
from tieringd.formats.topic_manifest import TopicManifest, encode_topic_manifest
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap

_TOPIC = TopicKey("cluster", "orders", "W1xNUlUlTfigw_K-dvdxsA")
_NOTHING = StoredManifest(None, None)


def unknown() -> StorageUnavailable:
    return store_unavailable("put", True)


@pytest.fixture
def partition(writer):
    return writer.identified


@pytest.fixture
def ours(store):
    return manifests_of(store, "aa")


@pytest.fixture
def theirs(store):
    return manifests_of(store, "bb")


def manifests_of(store, writer_id: str) -> ManifestStore:
    return archive_in(store, writer_id=writer_id).manifests


def longer(stored: StoredManifest, partition, *, by: int = 10) -> PartitionManifest:
    """Return the manifest with a gap more: the smallest change there is."""
    manifest = stored.manifest or PartitionManifest.begin(partition, start_offset=0)
    return manifest.with_gap(Gap(manifest.next_offset, manifest.next_offset + by - 1, "a test", 0))


def in_bucket(store, partition) -> PartitionManifest:
    return decode_manifest(store.objects[manifest_key(partition)][0])


async def test_load_of_nothing_is_no_manifest(ours, partition):
    """A partition that was never archived has no manifest and no version."""
    assert await ours.load(partition) == _NOTHING


async def test_commit_is_what_the_next_load_finds(ours, theirs, partition):
    """Readers get what was committed, with its writer, epoch, number and time."""
    stored = await ours.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=3)

    assert await theirs.load(partition) == stored
    manifest = stored.manifest
    assert (manifest.writer_id, manifest.leader_epoch, manifest.commit_number) == ("aa", 3, 1)
    assert manifest.committed_at_ms == 1_700_000_000_000


async def test_commits_of_one_writer_follow_each_other(ours, partition):
    """Each commit swaps the one before, under a number of its own."""
    stored = _NOTHING
    for number in (1, 2, 3):
        stored = await ours.commit(stored, longer(stored, partition), leader_epoch=0)
        assert stored.manifest.commit_number == number
    assert (await ours.load(partition)).manifest.next_offset == 30


async def test_commit_numbers_go_on_from_what_is_stored(ours, theirs, partition):
    """A restarted writer counts on from the manifest that it found."""
    stored = await ours.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=0)
    stored = await ours.commit(stored, longer(stored, partition), leader_epoch=0)

    stored = await theirs.commit(stored, longer(stored, partition), leader_epoch=0)

    assert stored.manifest.commit_number == 3


@pytest.mark.parametrize("is_first", [True, False])
async def test_lost_swap_under_the_same_epoch_fences(store, ours, theirs, partition, is_first):
    """The slower of two writers under one epoch is fenced, and the winner's manifest stays."""
    stored = _NOTHING
    if not is_first:
        stored = await ours.commit(stored, longer(stored, partition), leader_epoch=1)
    won = await theirs.commit(stored, longer(stored, partition), leader_epoch=1)

    with pytest.raises(FencedError, match="another daemon \\(writer bb\\)"):
        await ours.commit(stored, longer(stored, partition, by=99), leader_epoch=1)

    assert in_bucket(store, partition) == won.manifest


async def test_lost_swap_to_a_newer_epoch_fences(store, ours, theirs, partition):
    """A deposed leader's swap fails, and the error names the epoch that owns the manifest."""
    stored = await ours.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=1)
    won = await theirs.commit(stored, longer(stored, partition), leader_epoch=2)

    with pytest.raises(FencedError, match="leader epoch 2 owns the manifest of orders-0"):
        await ours.commit(stored, longer(stored, partition), leader_epoch=1)

    assert in_bucket(store, partition) == won.manifest


async def test_lost_swap_to_an_older_epoch_is_tried_again(ours, theirs, partition):
    """The last commit of a deposed leader delays the new one, and does not fence it."""
    stored = await theirs.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=1)
    await theirs.commit(stored, longer(stored, partition), leader_epoch=1)

    with pytest.raises(RetryableError, match="leader epoch 1"):
        await ours.commit(stored, longer(stored, partition), leader_epoch=2)

    again = await ours.load(partition)
    assert (await ours.commit(again, longer(again, partition), leader_epoch=2)).manifest.next_offset == 30


async def test_manifest_of_a_newer_epoch_is_never_swapped(store, ours, theirs, partition):
    """A writer that has seen a newer epoch does not even ask the store."""
    stored = await theirs.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=5)
    store.requests.clear()

    with pytest.raises(FencedError):
        await ours.commit(stored, longer(stored, partition), leader_epoch=4)

    assert store.requests == []


@pytest.mark.parametrize("is_first", [True, False])
async def test_refusal_that_changed_nothing_is_tried_again(store, ours, partition, is_first):
    """A store may refuse a write that met another one; that says nothing of the manifest's owner."""
    stored = _NOTHING
    if not is_first:
        stored = await ours.commit(stored, longer(stored, partition), leader_epoch=1)
    store.fail_next("put", lambda: PreconditionFailed("409 Conflict"))
    with pytest.raises(StorageUnavailable, match="has not changed"):
        await ours.commit(stored, longer(stored, partition), leader_epoch=1)
    again = await ours.load(partition)
    assert again == stored
    assert (await ours.commit(again, longer(again, partition), leader_epoch=1)).manifest.next_offset > 0


async def test_removed_manifest_fences(store, ours, partition):
    """A manifest that was removed is not written anew, because the objects may have changed too."""
    stored = await ours.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=0)
    await store.delete_many([manifest_key(partition)])

    with pytest.raises(FencedError, match="was deleted from the bucket"):
        await ours.commit(stored, longer(stored, partition), leader_epoch=0)

    assert manifest_key(partition) not in store.objects


@pytest.mark.parametrize("is_first", [True, False])
async def test_own_commit_is_recognised_after_its_answer_was_lost(store, ours, partition, is_first):
    """A commit that took effect is a success, although its answer was lost."""
    stored = _NOTHING
    if not is_first:
        stored = await ours.commit(stored, longer(stored, partition), leader_epoch=0)
    store.fail_next("put", unknown, after_effect=True)

    done = await ours.commit(stored, longer(stored, partition), leader_epoch=0)

    assert done == await ours.load(partition)
    again = await ours.commit(done, longer(done, partition), leader_epoch=0)
    assert again.manifest.next_offset == done.manifest.next_offset + 10


@pytest.mark.parametrize("is_first", [True, False])
async def test_commit_without_effect_is_not_taken_for_done(store, ours, partition, is_first):
    """A commit is unavailable, not fenced, if the check afterwards shows the old version."""
    stored = _NOTHING
    if not is_first:
        stored = await ours.commit(stored, longer(stored, partition), leader_epoch=0)
    store.fail_next("put", unknown)

    with pytest.raises(StorageUnavailable):
        await ours.commit(stored, longer(stored, partition), leader_epoch=0)

    assert await ours.load(partition) == stored


async def test_known_failure_needs_no_check(store, ours, partition):
    """A write that certainly failed is reported at once."""
    store.fail_next("put", lambda: store_unavailable("put"))

    with pytest.raises(StorageUnavailable):
        await ours.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=0)

    assert [operation for operation, _ in store.requests] == ["put"]


async def test_check_after_an_unknown_outcome_may_fail_too(store, ours, partition):
    """A commit is unavailable if its check fails too, because its outcome is unknown."""
    store.fail_next("put", unknown, after_effect=True)
    store.fail_next("get", lambda: store_unavailable("get"))

    with pytest.raises(StorageUnavailable):
        await ours.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=0)


async def test_unknown_outcome_that_another_writer_overtook_fences(store, ours, theirs, partition):
    """A commit is lost and its writer fenced if the check shows another writer's manifest."""
    stored = await ours.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=0)
    await theirs.commit(stored, longer(stored, partition), leader_epoch=1)
    store.fail_next("put", unknown)

    with pytest.raises(FencedError, match="leader epoch 1"):
        await ours.commit(stored, longer(stored, partition), leader_epoch=0)


async def test_late_effect_of_an_earlier_commit_is_told_from_another_writer(store, ours, partition):
    """A commit given up for lost that lands late costs a retry, and no archiver its life."""
    first = await ours.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=0)
    store.fail_next("put", unknown)
    with pytest.raises(StorageUnavailable):
        await ours.commit(first, longer(first, partition, by=5), leader_epoch=0)
    late = longer(first, partition, by=5).committed(
        writer_id="aa", leader_epoch=0, commit_number=2, now_ms=1_700_000_000_000
    )
    store.add(manifest_key(partition), encode_manifest(late))

    with pytest.raises(StorageUnavailable, match="took effect late"):
        await ours.commit(first, longer(first, partition, by=7), leader_epoch=0)

    found = await ours.load(partition)
    assert found.manifest == late
    assert (await ours.commit(found, longer(found, partition), leader_epoch=0)).manifest.next_offset == 25


async def test_late_effect_never_passes_for_the_commit_that_followed(store, ours, partition):
    """The same change committed twice has two numbers, so one cannot be taken for the other."""
    store.fail_next("put", unknown, times=2)
    with pytest.raises(StorageUnavailable):
        await ours.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=0)
    late = longer(_NOTHING, partition).committed(
        writer_id="aa", leader_epoch=0, commit_number=1, now_ms=1_700_000_000_000
    )

    async def land() -> None:
        store.add(manifest_key(partition), encode_manifest(late))

    landing = asyncio.create_task(land())
    with pytest.raises(StorageUnavailable, match="took effect late"):
        await ours.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=0)
    await landing


async def test_load_names_the_damaged_manifest(store, ours, partition):
    """Bytes that are no manifest are an error that names the object."""
    store.add(manifest_key(partition), b"not a manifest")

    with pytest.raises(CorruptDataError) as caught:
        await ours.load(partition)
    assert caught.value.source == manifest_key(partition)


async def test_load_refuses_another_partitions_manifest(store, ours, partition, tmp_path):
    """A sound manifest in the wrong place is damage as well."""
    other = type(partition)("cluster", "orders", partition.topic_id, 9)
    store.add(manifest_key(partition), encode_manifest(PartitionManifest.begin(other, start_offset=0)))

    with pytest.raises(CorruptDataError, match="manifest of orders-0 holds a manifest of orders-9"):
        await ours.load(partition)


async def test_topic_manifest_is_created_and_only_grows(store, ours, theirs):
    """The count is that of the highest archived partition; the creation time stays."""
    await ours.ensure_topic(_TOPIC, partition_count=2)
    await theirs.ensure_topic(_TOPIC, partition_count=5)
    store.requests.clear()
    await ours.ensure_topic(_TOPIC, partition_count=3)

    assert await ours.load_topic(_TOPIC) == TopicManifest(
        _TOPIC, partition_count=5, created_at_ms=1_700_000_000_000
    )
    assert "put" not in {operation for operation, _ in store.requests}


async def test_topic_manifest_race_has_no_loser(store, ours, theirs):
    """Daemons that see a new topic at once all succeed, and the highest count stays."""
    await asyncio.gather(
        *(each.ensure_topic(_TOPIC, partition_count=n) for n, each in enumerate([ours, theirs] * 4, 1))
    )

    assert (await ours.load_topic(_TOPIC)).partition_count == 8


class ContestedStore(MemoryStore):
    """A bucket in which another process writes before each of our writes."""

    async def put(self, key, body, *, crc32c: int, condition=None):
        self.add(key, body.replace(b'"partition_count": 2', b'"partition_count": 1'))
        return await super().put(key, body, crc32c=crc32c, condition=condition)


async def test_topic_manifest_that_never_rests_is_left_for_the_next_round():
    """Endless competition ends in a retryable error."""
    store = ContestedStore()

    with pytest.raises(StorageUnavailable, match="other daemons"):
        await manifests_of(store, "aa").ensure_topic(_TOPIC, partition_count=2)

    assert [operation for operation, _ in store.requests].count("put") == TOPIC_MANIFEST_TRIES


async def test_damaged_topic_manifest_is_named(store, ours):
    """A topic manifest that cannot be read is an error that names the object."""
    store.add(topic_manifest_key(_TOPIC), b"{}")

    with pytest.raises(CorruptDataError) as caught:
        await ours.ensure_topic(_TOPIC, partition_count=1)
    assert caught.value.source == topic_manifest_key(_TOPIC)


async def test_topic_manifest_of_another_topic_is_damaged(store, ours):
    """A topic manifest under another topic's key is an error that tells both, and is not written over."""
    key, other = topic_manifest_key(_TOPIC), replace(_TOPIC, topic="another")
    store.add(key, encode_topic_manifest(TopicManifest(other, partition_count=3, created_at_ms=1)))
    before = dict(store.objects)

    for use in (ours.load_topic(_TOPIC), ours.ensure_topic(_TOPIC, partition_count=4)):
        with pytest.raises(
            CorruptDataError, match=f"topic {_TOPIC.topic} .* of another .* rebuild"
        ) as caught:
            await use
        assert caught.value.source == key
    assert store.objects == before


async def test_checksum_of_a_manifest_goes_with_it(store, ours, partition):
    """The store hears the checksum of the very bytes, and can refuse others."""
    await ours.commit(_NOTHING, longer(_NOTHING, partition), leader_epoch=0)

    data, info = store.objects[manifest_key(partition)]
    assert info.crc32c == crc32c(data)
