"""The claim of a partition that is new: one request, whatever another process did meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.archive import archive_in
from tests.fakes.store import store_unavailable
from tests.unit.model.values import PARTITION
from tieringd.archive.manifest_store import NOT_STORED
from tieringd.archiving.claim import Claim
from tieringd.errors import FencedError, StorageUnavailable
from tieringd.formats.manifest_codec import decode_manifest
from tieringd.formats.object_keys import manifest_key
from tieringd.metrics import Metrics
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.model.partition import Leadership, TopicIdPartition

EPOCH = 7


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def claim(store, metrics):
    return claim_of(store, metrics)


def claim_of(store, metrics, *, is_new: bool = True) -> Claim:
    async def said(_: TopicIdPartition) -> bool:
        return is_new

    manifests = archive_in(store, writer_id="aa").manifests
    return Claim(Leadership(PARTITION, EPOCH), manifests, metrics=metrics, is_new=said)


def begin() -> PartitionManifest:
    return PartitionManifest.begin(PARTITION, start_offset=10)


async def current(claim: Claim) -> PartitionManifest:
    return (await claim.current(begin, log_start_offset=20)).existing


def in_bucket(store) -> PartitionManifest:
    return decode_manifest(store.objects[manifest_key(PARTITION)][0])


def operations(store) -> list[str]:
    return [operation for operation, _ in store.requests]


async def begun_by_another(store, *, leader_epoch: int, writer_id: str = "bb") -> PartitionManifest:
    """Store a manifest with a gap, as another process does, and return it."""
    manifests = archive_in(store, writer_id=writer_id).manifests
    manifest = begin().with_gap(Gap(10, 29, "a test", 0))
    committed = await manifests.commit(NOT_STORED, manifest, leader_epoch=leader_epoch)
    store.requests.clear()
    return committed.existing


async def test_new_partition_is_claimed_with_one_request(claim, store, metrics):
    """Its manifest is the one that is committed after a read: owner, epoch, start and trim."""
    held = await current(claim)
    assert operations(store) == ["put"]
    assert (held.writer_id, held.leader_epoch, held.start_offset, held.trimmed_offset) == (
        "aa",
        EPOCH,
        10,
        20,
    )
    assert in_bucket(store) == held == claim.held_manifest
    labels = {"topic": PARTITION.topic}
    assert metrics.registry.get_sample_value("tieringd_manifest_commits_total", labels) == 1
    other = type(store)()
    after_a_read = await current(claim_of(other, Metrics(), is_new=False))
    assert operations(other) == ["get", "put"]
    assert (after_a_read.segments, after_a_read.gaps) == (held.segments, held.gaps)
    assert (after_a_read.start_offset, after_a_read.trimmed_offset) == (10, 20)
    assert (after_a_read.leader_epoch, after_a_read.commit_number) == (EPOCH, held.commit_number)


async def test_next_commit_goes_on_from_the_first(claim, store):
    """Its number is higher, and it names the version of the first."""
    stored = await claim.current(begin)
    committed = await claim.commit(stored, stored.existing.with_gap(Gap(10, 19, "a test", 0)))
    assert committed.existing.commit_number == stored.existing.commit_number + 1
    assert operations(store) == ["put", "put"]


@pytest.mark.parametrize("writer_id", ["aa", "bb"])
@pytest.mark.parametrize("leader_epoch", [EPOCH - 1, EPOCH])
async def test_partition_that_another_process_began_keeps_what_is_stored(
    claim, store, leader_epoch, writer_id
):
    """It is taken over as after a read: an older epoch is replaced, and the epoch of a restart is held."""
    theirs = await begun_by_another(store, leader_epoch=leader_epoch, writer_id=writer_id)
    held = await current(claim)
    assert operations(store) == (["put", "get", "put"] if leader_epoch < EPOCH else ["put", "get"])
    assert held.gaps == theirs.gaps
    assert held.leader_epoch == EPOCH
    assert in_bucket(store) == held


async def test_newer_leader_fences_the_claim_of_a_new_partition(claim, store):
    """What the newer leader stored stays."""
    theirs = await begun_by_another(store, leader_epoch=EPOCH + 1)
    with pytest.raises(FencedError, match=f"leader epoch {EPOCH + 1} owns"):
        await current(claim)
    assert in_bucket(store) == theirs


@pytest.mark.parametrize("after_effect", [True, False])
async def test_first_commit_of_unknown_outcome_is_looked_at(claim, store, after_effect):
    """The claim holds it if it has taken effect, and commits after the read if it has not."""
    store.fail_next("put", lambda: store_unavailable("put", True), after_effect=after_effect)
    held = await current(claim)
    assert operations(store) == (["put", "get"] if after_effect else ["put", "get", "put"])
    assert in_bucket(store) == held == claim.manifest


async def test_first_commit_into_a_store_that_is_away_is_repeated(claim, store):
    """Nothing was stored. By then another process may have begun the partition, so the bucket is asked."""
    store.fail_next("put", lambda: store_unavailable("put", False))
    with pytest.raises(StorageUnavailable):
        await current(claim)
    assert claim.manifest is None
    theirs = await begun_by_another(store, leader_epoch=EPOCH - 1)
    held = await current(claim)
    assert operations(store) == ["get", "put"]
    assert held.gaps == theirs.gaps


async def test_cancelled_first_commit_is_found_by_the_next_step(claim, store):
    """The next step holds what is in the bucket, whether the commit took effect or not."""
    store.latency_seconds = 0.001
    for steps in range(4):
        task = asyncio.create_task(current(claim))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await current(claim) == in_bucket(store) == claim.manifest
