"""A follower's index of the remote log: what its leader archived, step by step."""

from __future__ import annotations

import pytest

from tests.fakes.archive import archive_in, archived
from tests.fakes.manifests import stored_manifest
from tests.fakes.store import store_unavailable
from tieringd.archiving.remote_index import RemoteIndex
from tieringd.errors import StorageUnavailable
from tieringd.formats.object_keys import index_key
from tieringd.model.spilling import part_to_spill, spilled


async def filled(writer, store, *, segments):
    for _ in range(segments):
        writer.closed_segment(b"a", b"b")
    await archived(writer, archive_in(store))


def index_in(archive, writer, *, from_offset=0):
    return RemoteIndex(
        writer.identified,
        remote_log=archive.remote_log,
        manifests=archive.manifests,
        from_offset=from_offset,
    )


async def spill(archive, writer, rows):
    known = await archive.manifests.load(writer.identified)
    part = part_to_spill(known.existing, rows)
    manifest = spilled(known.existing, part, await archive.manifests.spillovers.put(part))
    await archive.manifests.commit(known, manifest, leader_epoch=0)


async def test_index_follows_the_leader(writer, store, archive):
    """What is archived later is fetched later, once, and found by its offsets."""
    index = index_in(archive, writer)
    assert (await index.step(), index.is_complete, index.segments) == (0, True, ())
    await filled(writer, store, segments=3)
    assert await index.step() == 3
    await filled(writer, store, segments=1)
    assert await index.step() == 1
    manifest = stored_manifest(store, writer)
    assert (index.segments, index.is_complete) == (tuple(manifest.segments), True)
    for offset in range(8):
        segment, found = index.index_at(offset)
        assert segment == manifest.segments.covering(offset)
        assert found == await archive.remote_log.index_of(writer.identified, segment)
    assert index.index_at(8) is None
    assert index.index_at(-1) is None


async def test_step_takes_a_few_at_a_time(writer, store, archive):
    """A long history is fetched oldest first, and is not complete before the last one."""
    await filled(writer, store, segments=5)
    index = index_in(archive, writer)
    assert [await index.step(indexes_max=2) for _ in range(4)] == [2, 2, 1, 0]
    fresh = index_in(archive, writer)
    await fresh.step(indexes_max=2)
    assert not fresh.is_complete
    assert [one.base_offset for one in fresh.segments] == [0, 2]
    assert fresh.index_at(4) is None


async def test_step_without_news_is_one_request(writer, store, archive):
    """A manifest that has not changed is asked for its version only."""
    await filled(writer, store, segments=2)
    index = index_in(archive, writer)
    await index.step()
    requests = len(store.requests)
    assert await index.step() == 0
    assert [operation for operation, _ in store.requests[requests:]] == ["head"]


@pytest.mark.parametrize(("from_offset", "bases"), [(0, [0, 2, 4, 6]), (3, [2, 4, 6]), (5, [4, 6]), (8, [])])
async def test_spilled_segments_are_tracked_from_an_offset_on(writer, store, archive, from_offset, bases):
    """A follower that has what is older does not fetch it."""
    await filled(writer, store, segments=4)
    await spill(archive, writer, 1)
    await spill(archive, writer, 1)
    index = index_in(archive, writer, from_offset=from_offset)
    await index.step()
    assert [one.base_offset for one in index.segments] == bases


async def test_what_was_replaced_leaves_the_index(writer, store, archive):
    """A segment that compaction or retention replaced is exchanged, and the others are kept."""
    await filled(writer, store, segments=3)
    index = index_in(archive, writer)
    await index.step()
    known = await archive.manifests.load(writer.identified)
    await archive.manifests.commit(known, known.existing.expired(1, now_ms=0), leader_epoch=0)
    assert await index.step() == 0
    assert [one.base_offset for one in index.segments] == [2, 4]
    assert index.index_at(0) is None


async def test_index_that_is_gone_does_not_hold_up_the_others(writer, store, archive):
    """Its segment may have left the manifest meanwhile, which the next step reads again."""
    await filled(writer, store, segments=3)
    first = stored_manifest(store, writer).segments[0]
    kept = store._objects.pop(index_key(writer.identified, first))
    index = index_in(archive, writer)
    assert (await index.step(), index.is_complete) == (2, False)
    store._objects[index_key(writer.identified, first)] = kept
    assert (await index.step(), index.is_complete) == (1, True)


async def test_store_that_is_away_changes_nothing(writer, store, archive):
    """What is known is kept, and the next step goes on."""
    await filled(writer, store, segments=2)
    index = index_in(archive, writer)
    await index.step()
    before = index.segments
    store.fail_next("head", lambda: store_unavailable("head"))
    with pytest.raises(StorageUnavailable):
        await index.step()
    assert index.segments == before
