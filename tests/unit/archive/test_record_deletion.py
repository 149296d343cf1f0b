"""A deletion by a user as an edit of the manifest in the bucket: live and spilled segments, and repeats."""

from __future__ import annotations

from functools import partial

import pytest

from tests.fakes.archive import archive_in, archiver_of, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.manifests import stored_manifest
from tests.fakes.spilling import filled, make_parts_small
from tests.fakes.store import store_unavailable
from tieringd.archive.record_deletion import delete_archived
from tieringd.errors import FencedError, ObjectNotFound, StorageUnavailable
from tieringd.model.manifest import CLOSED_EPOCH, PartitionManifest
from tieringd.model.manifest_parts import RecordDeletion


async def delete(store, writer, before_offset, *, leader_epoch=0, clock):
    manifests = archive_in(store, writer_id="job", now_ms=clock).manifests
    deletion = RecordDeletion(before_offset, leader_epoch)
    stored = await delete_archived(manifests, writer.identified, deletion, now_ms=clock)
    return stored.existing


async def _fail(error, *_arguments, **_options):
    raise error


@pytest.fixture
async def spilled(writer, store, clock, monkeypatch):
    """Archive segments of two records each, the older ones spilled one by one."""
    make_parts_small(monkeypatch)
    archive = archive_in(store, now_ms=clock)
    await filled(writer, archiver_of(writer, archive, FakeBroker(writer), now_ms=clock))
    manifest = stored_manifest(store, writer)
    assert manifest.live_offset > 6
    return manifest


async def test_deletion_reaches_over_spilled_segments(spilled, writer, store, clock):
    """Every record at or past the offset can be read and none before it, for each offset of a deletion."""
    whole = await values_in(archive_in(store), spilled)
    for before_offset in range(1, spilled.next_offset + 1):
        manifest = await delete(store, writer, before_offset, clock=clock)
        assert manifest == stored_manifest(store, writer)
        assert manifest.start_offset == before_offset
        archive = archive_in(store)
        expected = {offset: value for offset, value in whole.items() if offset >= before_offset}
        assert await values_in(archive, manifest) == expected
        held = await archive.manifests.spillovers.with_history(manifest)
        assert manifest.segment_count == len(held.segments)
        assert (manifest.size_bytes, manifest.faults()) == (held.segments.total_bytes, ())
    assert manifest.segment_count == 0


async def test_repeated_deletion_writes_nothing(spilled, writer, store, clock):
    """A deletion that reaches less far writes nothing either."""
    first = await delete(store, writer, 4, clock=clock)
    for before_offset in (4, 2):
        assert await delete(store, writer, before_offset, clock=clock) == first


async def test_deletion_that_was_not_stored_is_told(spilled, writer, store, clock):
    """A store that is away records nothing, and says so; the next try does."""
    store.put = partial(_fail, store_unavailable("put"))
    with pytest.raises(StorageUnavailable):
        await delete(store, writer, 4, clock=clock)
    del store.put
    assert stored_manifest(store, writer) == spilled
    assert (await delete(store, writer, 4, clock=clock)).start_offset == 4


async def test_deletion_without_an_archive_or_with_a_closed_one_is_refused(writer, store, clock, archive):
    """Nothing would follow it."""
    with pytest.raises(ObjectNotFound):
        await delete(store, writer, 4, clock=clock)
    stored = await archive.manifests.load(writer.identified)
    begun = PartitionManifest.begin(writer.identified, start_offset=0)
    await archive.manifests.commit(stored, begun, leader_epoch=CLOSED_EPOCH)
    with pytest.raises(FencedError):
        await delete(store, writer, 4, clock=clock)
