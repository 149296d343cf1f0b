"""Followed manifests: those of partitions that others lead, fresh enough to take over."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import Clock
from tests.unit.model.values import PARTITION, remote, stored
from tieringd.archive.manifest_store import ManifestStore, StoredManifest
from tieringd.archiving.claim import Claim
from tieringd.archiving.manifest_upkeep import (
    FAILURES_IN_A_ROW,
    REFRESH_INTERVAL_MS,
    REFRESHES_PER_STEP,
    FollowedManifests,
)
from tieringd.errors import CorruptDataError, FencedError, StorageDenied, StorageUnavailable
from tieringd.formats.object_keys import manifest_key
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership

if TYPE_CHECKING:
    from tieringd.errors import TieringError
    from tieringd.model.manifest import PartitionManifest
    from tieringd.model.partition import TopicIdPartition

TWO = replace(PARTITION, partition=4)


class CountingManifests(ManifestStore):
    """A manifest store that remembers the partitions asked for and how, and fails for those in *faults*."""

    def __init__(self, store) -> None:
        super().__init__(store, writer_id="leader", now_ms=Clock())
        self.asked: list[TopicIdPartition] = []
        self.loads = 0
        self.faults: dict[TopicIdPartition, TieringError] = {}

    async def load(self, partition) -> StoredManifest:
        self.loads += 1
        self.note(partition)
        return await super().load(partition)

    async def refreshed(self, partition, known) -> StoredManifest:
        self.note(partition)
        return await super().refreshed(partition, known)

    def note(self, partition) -> None:
        if not self.asked or self.asked[-1] != partition:
            self.asked.append(partition)
        if partition in self.faults:
            raise self.faults[partition]


@pytest.fixture
def manifests(store):
    return CountingManifests(store)


@pytest.fixture
def followed_manifests(manifests, clock):
    return FollowedManifests(manifests, steady_ms=clock)


async def commit(manifests: ManifestStore, manifest: PartitionManifest) -> StoredManifest:
    before = await ManifestStore.load(manifests, manifest.partition)
    return await manifests.commit(before, manifest, leader_epoch=5)


async def test_follower_knows_nothing_before_its_first_refresh(followed_manifests):
    """An unknown manifest is None, and neither empty nor full."""
    assert followed_manifests.manifest(PARTITION) is None
    assert followed_manifests.take(PARTITION) is None


async def test_follower_learns_where_the_archive_ends(followed_manifests, manifests):
    """A refresh tells the archive's end, and the manifest can be taken over with its version."""
    committed = await commit(manifests, stored([remote(0, 9)]))
    assert await followed_manifests.step([PARTITION]) == 1
    assert followed_manifests.manifest(PARTITION).next_offset == 10
    assert followed_manifests.take(PARTITION) == committed


async def test_follower_of_a_partition_without_a_manifest_knows_that(followed_manifests, manifests):
    """A follower knows that nothing is stored, and the next leader begins from there."""
    assert await followed_manifests.step([PARTITION]) == 1
    assert followed_manifests.manifest(PARTITION) is None
    assert followed_manifests.take(PARTITION) == StoredManifest(None, None)


async def test_manifest_that_was_removed_fences_the_next_leader(followed_manifests, manifests, clock, store):
    """A removed manifest is taken over as last known, counts for no pin meanwhile, and may come back."""
    committed = await commit(manifests, stored([remote(0, 9)]))
    await followed_manifests.step([PARTITION])
    store.remove(manifest_key(PARTITION))
    for _ in range(2):
        clock.now_ms += REFRESH_INTERVAL_MS
        assert await followed_manifests.step([PARTITION]) == 1
        assert followed_manifests.manifest(PARTITION) is None
        assert followed_manifests.take(PARTITION) == committed
    claim = Claim(
        Leadership(PARTITION, 6), manifests, metrics=Metrics(), known=followed_manifests.take(PARTITION)
    )
    with pytest.raises(FencedError, match="was deleted from the bucket"):
        await claim.current(lambda: stored([]))

    await manifests.commit(StoredManifest(None, None), stored([remote(0, 19)]), leader_epoch=6)
    clock.now_ms += REFRESH_INTERVAL_MS
    await followed_manifests.step([PARTITION])
    assert followed_manifests.manifest(PARTITION).next_offset == 20
    assert followed_manifests.take(PARTITION).manifest == followed_manifests.manifest(PARTITION)


async def test_removed_manifest_is_remembered_over_a_scan_without_its_topic(
    followed_manifests, manifests, clock, store
):
    """A partition that one scan lacks, as one that cannot be read, is fenced as before when it is back."""
    committed = await commit(manifests, stored([remote(0, 9)]))
    await followed_manifests.step([PARTITION])
    store.remove(manifest_key(PARTITION))
    clock.now_ms += REFRESH_INTERVAL_MS
    await followed_manifests.step([PARTITION])
    await followed_manifests.step([])
    for _ in range(2):
        await followed_manifests.step([PARTITION])
        assert followed_manifests.take(PARTITION) == committed
        assert followed_manifests.manifest(PARTITION) is None
        clock.now_ms += REFRESH_INTERVAL_MS
    claim = Claim(
        Leadership(PARTITION, 6), manifests, metrics=Metrics(), known=followed_manifests.take(PARTITION)
    )
    with pytest.raises(FencedError, match="was deleted from the bucket"):
        await claim.current(lambda: stored([]))


async def test_topic_that_is_created_again_is_not_fenced(followed_manifests, manifests, clock, store):
    """A topic of the same name has another id, and nothing is known of it."""
    again = replace(PARTITION, topic_id="AnotherIdAnotherIdAnoA")
    await commit(manifests, stored([remote(0, 9)]))
    await followed_manifests.step([PARTITION])
    store.remove(manifest_key(PARTITION))
    clock.now_ms += REFRESH_INTERVAL_MS
    await followed_manifests.step([PARTITION, again])
    assert followed_manifests.take(again) == StoredManifest(None, None)


async def test_follower_refreshes_a_copy_when_it_is_old_and_not_before(followed_manifests, manifests, clock):
    """One refresh a minute for each partition; a change is seen at the next."""
    await commit(manifests, stored([remote(0, 9)]))
    await followed_manifests.step([PARTITION])
    await commit(manifests, stored([remote(0, 9), remote(10, 29)]))
    clock.now_ms += REFRESH_INTERVAL_MS - 1
    assert await followed_manifests.step([PARTITION]) == 0
    assert followed_manifests.manifest(PARTITION).next_offset == 10
    clock.now_ms += 1
    assert await followed_manifests.step([PARTITION]) == 1
    assert followed_manifests.manifest(PARTITION).next_offset == 30


async def test_follower_asks_for_a_version_and_not_for_a_history(followed_manifests, manifests, clock, store):
    """A manifest that has not changed is not read again."""
    await commit(manifests, stored([remote(0, 9)]))
    await followed_manifests.step([PARTITION])
    before = followed_manifests.take(PARTITION)
    loads = manifests.loads
    clock.now_ms += REFRESH_INTERVAL_MS
    assert await followed_manifests.step([PARTITION]) == 1
    assert followed_manifests.take(PARTITION) is before
    assert manifests.loads == loads


async def test_follower_forgets_what_it_no_longer_follows(followed_manifests, manifests, clock):
    """A partition that went away, or is led from here now, is read anew when it comes back."""
    await commit(manifests, stored([remote(0, 9)]))
    await followed_manifests.step([PARTITION, TWO])
    await followed_manifests.step([TWO])
    assert followed_manifests.take(PARTITION) is None
    assert followed_manifests.take(TWO) is not None
    assert await followed_manifests.step([PARTITION, TWO]) == 1
    assert followed_manifests.manifest(PARTITION).next_offset == 10


async def test_follower_spreads_many_partitions_over_steps_oldest_first(followed_manifests, manifests, clock):
    """A step makes so many requests at most; the oldest copy goes first."""
    many = [replace(PARTITION, partition=number) for number in range(2 * REFRESHES_PER_STEP + 1)]
    found = [await followed_manifests.step(many) for _ in range(4)]
    assert found == [REFRESHES_PER_STEP, REFRESHES_PER_STEP, 1, 0]
    assert manifests.asked == many, "each once"


async def test_follower_refreshes_first_what_it_knows_least_of(followed_manifests, manifests, clock):
    """A manifest that was never read is refreshed first, and then those that were read the longest ago."""
    three, four = replace(PARTITION, partition=5), replace(PARTITION, partition=6)
    for one in ([PARTITION], [PARTITION, TWO], [PARTITION, TWO, three]):
        await followed_manifests.step(one)
        clock.now_ms += 1000
    clock.now_ms += REFRESH_INTERVAL_MS
    manifests.asked.clear()
    await followed_manifests.step([three, TWO, four, PARTITION])
    assert manifests.asked == [four, PARTITION, TWO, three]


async def test_follower_keeps_what_it_knows_while_the_store_is_away(followed_manifests, manifests, clock):
    """An old copy is better than none. The step ends after some failures in a row, and logs the first."""
    many = [replace(PARTITION, partition=number) for number in range(10)]
    await commit(manifests, replace(stored([remote(0, 9)]), partition=many[0]))
    await followed_manifests.step(many)
    clock.now_ms += REFRESH_INTERVAL_MS
    manifests.asked.clear()
    manifests.faults = dict.fromkeys(many, StorageUnavailable("the store does not answer"))
    with capture_logs() as lines:
        assert await followed_manifests.step(many) == 0
    assert followed_manifests.manifest(many[0]).next_offset == 10
    assert manifests.asked == many[:FAILURES_IN_A_ROW]
    told = [(each["event"], each["manifests"], each["partition"]) for each in lines]
    assert told == [("followed manifests are not fresh", FAILURES_IN_A_ROW, str(many[0]))]
    manifests.faults.clear()
    others = len(many) - FAILURES_IN_A_ROW
    assert await followed_manifests.step(many) == others, "they are due at once when the store is back"
    clock.now_ms += REFRESH_INTERVAL_MS
    assert await followed_manifests.step(many) == len(many)


@pytest.mark.parametrize(
    "error",
    [StorageDenied("403 for this object alone"), StorageUnavailable("too large for its deadline")],
)
async def test_follower_passes_over_a_manifest_that_always_fails(followed_manifests, manifests, clock, error):
    """A manifest that fails is asked for once a minute, and those behind it are refreshed."""
    many = [replace(PARTITION, partition=number) for number in range(5)]
    for one in many:
        await commit(manifests, replace(stored([remote(0, 9)]), partition=one))
    manifests.faults = {many[0]: error}
    steps = 6
    for _ in range(2 * steps):
        await followed_manifests.step(many)
        clock.now_ms += REFRESH_INTERVAL_MS // steps
    assert [followed_manifests.manifest(one) is not None for one in many] == [False, True, True, True, True]
    assert manifests.asked == [*many, *many]


async def test_follower_counts_what_it_refreshed_before_the_store_went_away(followed_manifests, manifests):
    """A failure in the middle of a step takes nothing back."""
    manifests.faults = {TWO: StorageUnavailable("the store does not answer")}
    assert await followed_manifests.step([PARTITION, TWO]) == 1
    assert followed_manifests.take(PARTITION) is not None
    assert followed_manifests.take(TWO) is None


async def test_follower_passes_over_a_damaged_manifest(followed_manifests, manifests, clock):
    """A damaged manifest is reported once a minute and not at every step, and the others are refreshed."""
    manifests.faults = {PARTITION: CorruptDataError("the manifest is damaged")}
    with capture_logs() as lines:
        await followed_manifests.step([PARTITION, TWO])
        await followed_manifests.step([PARTITION, TWO])
    assert [each["event"] for each in lines] == ["followed manifest is damaged"]
    assert followed_manifests.take(TWO) is not None
    assert followed_manifests.take(PARTITION) is None
    clock.now_ms += REFRESH_INTERVAL_MS
    manifests.faults.clear()
    await followed_manifests.step([PARTITION, TWO])
    assert followed_manifests.take(PARTITION) is not None


async def test_topic_that_may_not_be_read_holds_up_no_other(manifests, clock):
    """A final answer is about one manifest: a step goes on after many of them."""
    followed = FollowedManifests(manifests, steady_ms=clock)
    denied = [replace(PARTITION, topic="a", partition=number) for number in range(50)]
    others = [replace(PARTITION, topic="b", partition=number) for number in range(20)]
    manifests.faults = {one: StorageDenied("denied") for one in denied}
    assert await followed.step([*denied, *others]) == len(others)
