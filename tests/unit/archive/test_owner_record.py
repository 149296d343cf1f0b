"""The record of an archive's owners: claimed once, by compare-and-swap, and told from the bucket."""

from __future__ import annotations

import asyncio

import pytest
from crc32c import crc32c

from tests.fakes.memory_store import MemoryStore
from tieringd.archive.owner_record import OwnerRecord, clusters_in, require_two_places
from tieringd.errors import ConfigError, CorruptDataError, StorageUnavailable
from tieringd.formats.archive_owners import ARCHIVE_OWNERS_KEY, BROKER, ArchiveOwners, decode_archive_owners
from tieringd.policies.archive_ownership import Claimant
from tieringd.storage.resilient import ResilientStore

ONE, OTHER = Claimant("one", BROKER), Claimant("other", BROKER)


async def filled(*keys: str) -> MemoryStore:
    store = MemoryStore()
    for key in keys:
        await store.put(key, b"{}", crc32c=crc32c(b"{}"))
    return store


async def recorded(store: MemoryStore) -> dict[str, str | None]:
    data, _ = await store.get(ARCHIVE_OWNERS_KEY)
    return dict(decode_archive_owners(data).of_cluster)


async def test_clusters_of_a_bucket_take_one_request_each():
    """Names that begin alike, or sort around the slash, are each found once."""
    store = await filled(
        "0a/one/t/0_x/0.log",
        *(
            f"meta/{name}/topics/t{n}_i/topic_manifest.json"
            for name in ("a", "a-b", "a.b", "ab")
            for n in (1, 2)
        ),
        "meta/z/brokers/1/disk_state.json",
        "metaphor/none",
        "meta/stray",
    )
    assert await clusters_in(store) == ["a-b", "a.b", "a", "ab", "z"]


async def test_brokers_of_a_cluster_share_the_record():
    """The first broker of a cluster writes the record, and the others find it right, at once and later."""
    store = MemoryStore()
    await asyncio.gather(*(OwnerRecord(store, place="p").claim(ONE) for _ in range(3)))
    _, info = await store.get(ARCHIVE_OWNERS_KEY)
    await OwnerRecord(store, place="p").claim(ONE)
    assert (await store.head(ARCHIVE_OWNERS_KEY)).version == info.version
    assert await recorded(store) == {"one": BROKER}


class Overtaken(MemoryStore):
    """A bucket that another cluster claims between a reading of the record and the write."""

    rival: Claimant | None = OTHER

    async def put(self, key, body, *, crc32c, condition=None):
        if key == ARCHIVE_OWNERS_KEY and self.rival is not None:
            rival, self.rival = self.rival, None
            await OwnerRecord(self, place="p").claim(rival)
        return await super().put(key, body, crc32c=crc32c, condition=condition)


async def test_of_two_clusters_at_once_one_gets_the_bucket():
    """The other one reads the record again, and is refused."""
    store = Overtaken()
    with pytest.raises(ConfigError, match="that of the cluster other"):
        await OwnerRecord(store, place="p").claim(ONE)
    assert await recorded(store) == {"other": BROKER}


async def test_requirement_writes_nothing():
    """The requirement only checks what a claim would do."""
    store = await filled("meta/other/topics/t_i/topic_manifest.json")
    with pytest.raises(ConfigError, match="that of the cluster other"):
        await OwnerRecord(store, place="p").require(ONE)
    await OwnerRecord(store, place="p").require(OTHER)
    assert list(store.objects) == ["meta/other/topics/t_i/topic_manifest.json"]


async def test_operator_shares_the_archive():
    """Both clusters claim a shared archive, and claims leave the record as it is."""
    store = await filled("meta/other/topics/t_i/topic_manifest.json")
    record = OwnerRecord(store, place="p")
    assert await record.admit(ONE) == ArchiveOwners({"other": None})
    for one in (ONE, OTHER, ONE):
        await record.claim(one)
    assert await recorded(store) == {"one": BROKER, "other": BROKER}
    assert await record.admit(ONE) == ArchiveOwners({"one": BROKER, "other": BROKER})


@pytest.mark.parametrize("data", [b"", b"[]", b'{"version": 1}', b'{"version": 2, "clusters": {}}'])
async def test_record_that_cannot_be_read_is_not_replaced(data):
    """No claim or command of an operator replaces an unreadable record: it may be a newer release's."""
    store = MemoryStore()
    await store.put(ARCHIVE_OWNERS_KEY, data, crc32c=crc32c(data))
    record = OwnerRecord(store, place="p")
    for work in (record.claim, record.admit, record.require):
        with pytest.raises(CorruptDataError, match=ARCHIVE_OWNERS_KEY):
            await work(ONE)
    assert (await store.get(ARCHIVE_OWNERS_KEY))[0] == data


async def test_two_names_of_one_place_are_told_by_an_object():
    """The object that tells it is gone afterwards, also where they are two places."""
    one, other = MemoryStore(), MemoryStore()
    await require_two_places(one, other, names=("a", "b"))
    with pytest.raises(ConfigError, match="a and b are two names of one place"):
        await require_two_places(one, one, names=("a", "b"))
    assert list(one.objects) == list(other.objects) == []


async def test_held_store_changes_nothing_but_what_is_allowed():
    """Reads go on; a held write sends no request, and does not wait."""
    backend = await filled("k")
    store = ResilientStore(backend)
    store.hold_writes("not ours yet", allowed=("free/",))
    for write in (
        lambda: store.put("k", b"2", crc32c=crc32c(b"2")),
        lambda: store.delete_many(["free/1", "k"]),
        lambda: store.join("k", [], crc32c=0),
    ):
        with pytest.raises(StorageUnavailable, match="is not changed: not ours yet"):
            await write()
    await store.put("free/1", b"1", crc32c=crc32c(b"1"))
    assert (await store.get("k"))[0] == b"{}"
    await store.delete_many(["free/1"])
    store.release_writes()
    await store.delete_many(["k"])
    assert list(backend.objects) == []
