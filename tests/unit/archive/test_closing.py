"""Closing a manifest: it is closed with the last commit in it, whichever process commits meanwhile."""

from __future__ import annotations

import pytest

from tests.fakes.archive import archive_in, archived, archiver_of, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.store import store_unavailable
from tieringd.archive.manifest_store import closed
from tieringd.errors import FencedError, StorageUnavailable
from tieringd.model.manifest import CLOSED_EPOCH, PartitionManifest


@pytest.fixture
async def held(writer, archive):
    """Give the manifest of an archived log."""
    writer.closed_segment(b"one")
    return await archived(writer, archive)


class Racing:
    """A manifest store in which another process commits after the first read."""

    def __init__(self, manifests, commit) -> None:
        self._manifests, self._commit = manifests, commit

    async def load(self, partition):
        found = await self._manifests.load(partition)
        commit, self._commit = self._commit, None
        if commit is not None:
            await commit(found)
        return found

    def __getattr__(self, name):
        return getattr(self._manifests, name)


async def test_closed_manifest_fences_every_leader(writer, archive, store, held):
    """An archiver of any epoch stops; what it held is as it was."""
    found = await closed(archive.manifests, writer.identified)
    assert (found.existing.is_closed, found.existing.segments) == (True, held.segments)
    for epoch in (0, CLOSED_EPOCH - 1):
        late = archiver_of(writer, archive_in(store, writer_id="c3"), FakeBroker(writer), leader_epoch=epoch)
        with pytest.raises(FencedError, match="in this bucket is closed"):
            await late.step(observed(writer))


async def test_closing_again_changes_nothing(writer, archive, held):
    """The version is the one that was closed first."""
    first = await closed(archive.manifests, writer.identified)
    assert await closed(archive.manifests, writer.identified) == first
    assert held.leader_epoch == 0


async def test_commit_that_comes_in_between_is_in_the_closed_version(writer, archive, store, held):
    """A deposed leader's commit is as good as any, as long as it came first."""
    other = archive_in(store, writer_id="c3").manifests

    async def commit(found) -> None:
        longer = PartitionManifest.begin(writer.identified, start_offset=0, now_ms=1)
        await other.commit(found, longer, leader_epoch=3)

    found = await closed(Racing(archive.manifests, commit), writer.identified)
    assert (found.existing.is_closed, found.existing.began_at_ms) == (True, 1)
    assert held.began_at_ms != 1


async def test_two_that_close_at_once_are_content(writer, archive, store, held):
    """The second takes what the first has closed."""
    other = archive_in(store, writer_id="c3").manifests

    async def commit(found) -> None:
        await other.commit(found, found.existing, leader_epoch=CLOSED_EPOCH)

    found = await closed(Racing(archive.manifests, commit), writer.identified)
    assert (found.existing.writer_id, found.existing.segments) == ("c3", held.segments)


async def test_partition_without_a_manifest_is_closed_only_with_one_to_begin_with(writer, archive):
    """A partition without a manifest stays without one, unless a manifest to begin with is given."""
    assert (await closed(archive.manifests, writer.identified)).manifest is None
    begin = PartitionManifest.begin(writer.identified, start_offset=0)
    assert (await closed(archive.manifests, writer.identified, begin=begin)).existing.is_closed


async def test_store_that_is_away_is_an_error(writer, archive, store, held):
    """Nothing is taken for closed then."""
    store.fail_next("put", lambda: store_unavailable("put"))
    with pytest.raises(StorageUnavailable):
        await closed(archive.manifests, writer.identified)
    assert (await archive.manifests.load(writer.identified)).existing == held
