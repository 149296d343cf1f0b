"""What the end of a search for keys finds in the bucket beside objects: the parts of unfinished uploads."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.fakes.archive import archive_in, archived
from tests.fakes.memory_store import MemoryStore
from tieringd.errors import StorageDenied
from tieringd.formats.object_keys import QUARANTINED_PREFIX, data_key, index_key, quarantined_key
from tieringd.spark.jobs.leftovers import SUSPECTS_TOLD_MAX, find_leftovers
from tieringd.storage.resilient import ResilientStore


class Uploading(MemoryStore):
    """A store in which processes have begun uploads that are not finished."""

    def __init__(self) -> None:
        super().__init__()
        self.unfinished: list[str] = []
        self.is_denied = False

    async def unfinished_uploads(self) -> list[str]:
        """Return the keys of unfinished uploads."""
        if self.is_denied:
            raise StorageDenied("list unfinished uploads: AccessDenied")
        return self.unfinished


@pytest.fixture
def uploading():
    """Give a store with the ability to tell of unfinished uploads."""
    return Uploading()


@pytest.fixture
async def manifest(uploading, writer):
    """Give the manifest of a partition with two segments."""
    for _ in range(2):
        writer.append(b"value", keys=[b"key"])
        writer.roll()
    return await archived(writer, archive_in(uploading))


async def faults_of(store, manifest, topics=("orders",)) -> list[str]:
    """Return the faults of a search that went over a partition."""
    resilient = ResilientStore(store)
    bucket = SimpleNamespace(store=resilient, manifests=archive_in(resilient).manifests)
    return (await find_leftovers(bucket, topics, {manifest.partition: manifest})).faults


def name_of(manifest, **changes) -> str:
    """Return the key of a data object like that of the partition's first segment."""
    return data_key(manifest.partition, replace(manifest.segments[0], writer_id="a9", **changes))


@pytest.mark.parametrize("is_moved", [False, True])
async def test_unfinished_upload_is_a_fault(uploading, manifest, is_moved):
    """A merge, or a move into quarantine, was killed: the parts have what the segments had."""
    key = name_of(manifest, last_offset=1)
    uploading.unfinished = [quarantined_key(key) if is_moved else key]

    fault, advice = await faults_of(uploading, manifest)

    assert fault == f"orders-0: the unfinished upload of {uploading.unfinished[0]} may have one of the keys"
    assert "abort them in the store" in advice


async def test_upload_of_what_came_later_is_no_fault(uploading, manifest):
    """A daemon archives on, and other keys are nothing of the topic's records."""
    later = name_of(manifest, base_offset=2, last_offset=5)
    index = index_key(manifest.partition, manifest.segments[0])
    uploading.unfinished = [later, index, "their/key"]
    assert await faults_of(uploading, manifest) == []
    uploading.unfinished.append(quarantined_key(later))
    assert len(await faults_of(uploading, manifest)) == 2, "what is moved was stored before"


async def test_unfinished_upload_of_another_topic_is_no_fault(uploading, manifest):
    """It cannot have a key of the chosen topics."""
    uploading.unfinished = [name_of(manifest)]
    resilient = ResilientStore(uploading)
    bucket = SimpleNamespace(store=resilient, manifests=archive_in(resilient).manifests)
    assert (await find_leftovers(bucket, ["others"], {})).faults == []


async def test_many_unfinished_uploads_are_told_in_a_few_lines(uploading, manifest):
    """Some are named, and the rest are counted."""
    uploading.unfinished = [name_of(manifest, size_bytes=size) for size in range(SUSPECTS_TOLD_MAX + 3)]
    *named, rest, _ = await faults_of(uploading, manifest)
    assert len(named) == SUSPECTS_TOLD_MAX
    assert rest.startswith("3 more unfinished uploads")


async def test_uploads_that_may_not_be_listed_are_a_fault(uploading, manifest):
    """Nothing is known of them then."""
    uploading.is_denied = True
    (fault,) = await faults_of(uploading, manifest)
    assert fault.startswith("it is not known whether unfinished uploads have one of the keys: list ")


async def test_store_without_such_uploads_has_none():
    """An object is whole there, or not there at all."""
    assert await ResilientStore(MemoryStore()).unfinished_uploads() == []


class Ending(Uploading):
    """A store in which an unfinished upload ends once all objects were listed."""

    async def unfinished_uploads(self) -> list[str]:
        """Return the keys of unfinished uploads."""
        return list(self.unfinished)

    async def list_page(self, prefix, *, start_after=None, limit=1000):
        """Return a page, and end the uploads after the last listing."""
        page = await super().list_page(prefix, start_after=start_after, limit=limit)
        while prefix.startswith(QUARANTINED_PREFIX) and self.unfinished:
            self.add(self.unfinished.pop(), b"merged")
        return page


async def test_upload_that_ends_during_the_search_is_a_fault(writer):
    """It is no object when the objects are listed, and no upload any more after that."""
    store = Ending()
    for _ in range(2):
        writer.append(b"value", keys=[b"key"])
        writer.roll()
    manifest = await archived(writer, archive_in(store))
    key = name_of(manifest, last_offset=1)
    store.unfinished = [key]
    fault, _ = await faults_of(store, manifest)
    assert key in fault
    assert key in store.objects
