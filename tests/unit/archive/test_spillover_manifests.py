"""Spillover manifests in memory, in the cache and in the bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.hydration import Host, OddStore, running
from tests.fakes.virtual_loop import virtually
from tests.unit.model.values import PARTITION, remote, stored
from tieringd.archive.spillover_manifests import PART_BYTES, ROW_BYTES, SpilloverManifests
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import spillover_key
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.reading.index_cache import CachedFiles


@pytest.fixture
def store():
    return OddStore()


async def spilling(store, parts: int = 4):
    """Return a manifest of two live segments after as many spilled parts of two, and their names."""
    spillovers = SpilloverManifests(store)
    manifest = stored(remote(10 * row, 10 * row + 9, max_timestamp_ms=row) for row in range(2 * parts + 2))
    names = []
    for _ in range(parts):
        part = part_to_spill(manifest, 2)
        names.append(await spillovers.put(part))
        manifest = spilled(manifest, part, names[-1])
    return manifest, names


async def test_names_alone_tell_what_is_spilled(store):
    """One listing, however often, and nothing is loaded."""
    manifest, names = await spilling(store)
    spillovers = SpilloverManifests(store)
    for from_offset, first in ((0, 0), (19, 0), (20, 1), (79, 3)):
        assert await spillovers.names(manifest, from_offset=from_offset) == tuple(names[first:])
    assert await spillovers.names(manifest, from_offset=80) == ()
    assert store.downloads("get") == 0
    assert spillovers.held_bytes == 0


async def test_new_part_is_found_by_another_listing(store):
    """A listing that lacks the newest part is too old."""
    manifest, names = await spilling(store)
    spillovers = SpilloverManifests(store)
    assert await spillovers.names(manifest, from_offset=0) == tuple(names)
    manifest = manifest.appended([remote(100, 109), remote(110, 119)])
    for _ in range(2):
        part = part_to_spill(manifest, 1)
        names.append(await SpilloverManifests(store).put(part))
        manifest = spilled(manifest, part, names[-1])
    assert await spillovers.names(manifest, from_offset=0) == tuple(names)


async def test_what_is_not_asked_for_is_not_loaded(store):
    """A piece is read when it is its turn; one without a record as late never is."""
    manifest, _ = await spilling(store)
    spillovers = SpilloverManifests(store)
    assert (await spillovers.piece_at(manifest, 45)).start_offset == 40
    assert store.downloads("get") == 1
    late = [piece.start_offset async for piece in spillovers.pieces(manifest, reaching_ms=6)]
    assert late == [60, 80]
    assert store.downloads("get") == 2
    assert await spillovers.with_history(manifest, from_offset=80) is manifest


async def test_memory_is_bounded(store):
    """The least recently used part goes, and is loaded again."""
    manifest, names = await spilling(store)
    size_bytes = PART_BYTES + 2 * ROW_BYTES
    spillovers = SpilloverManifests(store, held_bytes_max=2 * size_bytes)
    for name in (names[0], names[1], names[0], names[2], names[0]):
        await spillovers.load(PARTITION, name)
        assert spillovers.held_bytes <= 2 * size_bytes
    assert store.downloads("get") == 3
    await spillovers.load(PARTITION, names[1])
    assert store.downloads("get") == 4
    none = SpilloverManifests(store, held_bytes_max=size_bytes - 1)
    assert len((await none.with_history(manifest)).segments) == 10
    assert none.held_bytes == 0


async def test_part_that_names_nothing_before_it_is_not_the_second(store):
    """A manifest says that there is more than the chain of its parts: that is a fault."""
    manifest, _ = await spilling(store, parts=1)
    wrong = replace(manifest, start_offset=-5, spillover=replace(manifest.spillover, begin_offset=-5))
    with pytest.raises(CorruptDataError, match="but no manifest names a spillover manifest"):
        await SpilloverManifests(store).names(wrong, from_offset=-5)


async def test_part_before_another_one_than_it_names_is_not_passed_off(store):
    """The one that is named is missing, and a superfluous one of the same offsets is not."""
    manifest, names = await spilling(store)
    part = await SpilloverManifests(store).load(PARTITION, names[1])
    other = part.segments.head(0).appended(replace(one, crc32c=1) for one in part.segments)
    await SpilloverManifests(store).put(replace(part, segments=other))
    store.remove(spillover_key(PARTITION, names[1]))
    with pytest.raises(CorruptDataError, match="names another predecessor than the one in the bucket"):
        await SpilloverManifests(store).with_history(manifest)


@virtually
async def test_parts_are_read_from_the_cache_after_a_restart(tmp_path, store):
    """The files of parts have a checksum, which their names have as well."""
    manifest, names = await spilling(store)
    for _ in range(2):
        host = Host(tmp_path / "cache", store)
        async with running(host):
            spillovers = SpilloverManifests(store)
            spillovers.use_files(CachedFiles(host.keeper))
            assert len((await spillovers.with_history(manifest)).segments) == 10
        for name in names:
            assert (host.directory.path / spillover_key(PARTITION, name)).exists()
    assert store.downloads("get") == 4


@virtually
async def test_damaged_file_of_the_cache_is_fetched_again(tmp_path, store):
    """A file of the right size and wrong bytes is discarded; the reader does not notice."""
    manifest, names = await spilling(store)
    host = Host(tmp_path / "cache", store)
    async with running(host):
        for _ in range(2):
            spillovers = SpilloverManifests(store)
            spillovers.use_files(CachedFiles(host.keeper))
            assert len((await spillovers.with_history(manifest)).segments) == 10
            path = host.directory.path / spillover_key(PARTITION, names[2])
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert store.downloads("get") == 5


async def test_deleted_part_is_gone_for_later_reads(store):
    """Deleting is by name. A reader with an old manifest gets an error."""
    manifest, names = await spilling(store)
    spillovers = SpilloverManifests(store)
    assert await spillovers.ending_before(PARTITION, 40) == tuple(names[:2])
    await spillovers.delete(PARTITION, names[:1])
    with pytest.raises(ObjectNotFound):
        await SpilloverManifests(store).with_history(manifest)
    assert len((await SpilloverManifests(store).with_history(manifest, from_offset=20)).segments) == 8
