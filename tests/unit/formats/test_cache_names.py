"""Names in the cache: what they say, and that nothing else is taken for one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tieringd.formats.cache_names import CacheFileKind, cached_name, chunk_name, parse_cache_name
from tieringd.formats.object_keys import data_key, index_key
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import RemoteSegment

PARTITION = TopicIdPartition("east", "orders", "AAAAAAAAAAAAAAAAAAAAAQ", 3)
SEGMENT = RemoteSegment(100, 199, 4096, 1, 0, 0, 7, "ab12", 0, 50)
KEY = data_key(PARTITION, SEGMENT)
KEY_WITH_INDEX = data_key(PARTITION, replace(SEGMENT, index_crc32c=0xAB))
MANIFEST = "0123abcd/east/meta/orders/3_AAAAAAAAAAAAAAAAAAAAAQ/manifest.0.99.1700.1800"


@pytest.mark.parametrize(
    "segment",
    [
        SEGMENT,
        replace(SEGMENT, index_crc32c=0xB3EA2417),
        replace(SEGMENT, index_crc32c=0xB3EA2417, writer_id="rewritten-ab12"),
    ],
)
@pytest.mark.parametrize("buckets", [0, 1, 7, 1_000_000])
def test_names_say_what_they_were_made_of(segment, buckets):
    """The segment is found again whatever its bucket, and whether its name has its index's checksum."""
    key = data_key(PARTITION, segment)
    name = chunk_name(key, 4096, buckets=buckets)
    assert name.endswith(f"{key[9:]}_chunks/4096")
    found = parse_cache_name(name, buckets=buckets)
    assert (found.kind, found.segment, found.position, found.is_reachable) == (
        CacheFileKind.CHUNK,
        key,
        4096,
        True,
    )
    index = parse_cache_name(cached_name(index_key(PARTITION, segment), buckets=buckets), buckets=buckets)
    assert (index.kind, index.segment, index.position, index.is_reachable) == (
        CacheFileKind.INDEX,
        key,
        None,
        True,
    )
    manifest = parse_cache_name(cached_name(MANIFEST, buckets=buckets), buckets=buckets)
    assert (manifest.kind, manifest.segment, manifest.is_reachable) == (CacheFileKind.MANIFEST, "", True)


@pytest.mark.parametrize("suffix", ["_chunks/0", ".index"])
def test_key_that_holds_the_checksum_of_its_index_is_a_name_too(suffix):
    """A key with the checksum of its index, as it is written now, is parsed as well."""
    assert KEY_WITH_INDEX.endswith("-000000ab.log")
    assert parse_cache_name(f"{KEY_WITH_INDEX}{suffix}", buckets=0).segment == KEY_WITH_INDEX


def test_without_buckets_a_name_is_the_objects_key():
    """The name of the object tells the name of the file."""
    assert chunk_name(KEY, 0, buckets=0) == f"{KEY}_chunks/0"
    assert cached_name(MANIFEST, buckets=0) == MANIFEST


@pytest.mark.parametrize(("made", "asked"), [(0, 16), (16, 0), (16, 17)])
@pytest.mark.parametrize("key", [f"{KEY}_chunks/0", f"{KEY}.index"])
def test_name_under_another_number_of_buckets_is_ours_and_out_of_reach(key, made, asked):
    """A name under another number of buckets is not looked for, but its segment is still known."""
    found = parse_cache_name(cached_name(key, buckets=made), buckets=asked)
    assert found is not None
    assert found.segment == KEY
    assert not found.is_reachable


@pytest.mark.parametrize(
    ("name", "buckets", "is_reachable"),
    [(MANIFEST, 16, False), (cached_name(MANIFEST, buckets=16), 0, False), (f"20{MANIFEST[8:]}", 16, False)],
)
def test_manifest_under_another_number_of_buckets_is_out_of_reach(name, buckets, is_reachable):
    """The directory of such a manifest is not among those in use."""
    assert parse_cache_name(name, buckets=buckets).is_reachable is is_reachable


@pytest.mark.parametrize(
    "name",
    [
        "",
        "access_times",
        "incoming/12-ab.part",
        KEY,
        f"{KEY}_chunks",
        f"{KEY}_chunks/",
        f"{KEY}_chunks/01",
        f"{KEY}_chunks/-1",
        f"{KEY}_chunks/0.part",
        f"{KEY}_chunks/0/1",
        f"x{KEY}_chunks/0",
        f"/{KEY}_chunks/0",
        f"{KEY}_chunks/0\n",
        f"1234567{KEY[8:]}_chunks/0",
        f"00{KEY[8:]}_chunks/0",
        f"{KEY}.index2",
        f"{KEY[:9]}../orders/{KEY[21:]}.index",
        KEY.replace("/orders/", "/../") + ".index",
        KEY.replace("/east/", "/./") + ".index",
        MANIFEST.removesuffix(".0.99.1700.1800"),
        MANIFEST + "/x",
    ],
)
def test_other_names_are_unknown(name):
    """The cache neither counts nor deletes what it did not name."""
    assert parse_cache_name(name, buckets=0) is None
