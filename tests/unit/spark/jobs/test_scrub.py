"""Scrub without Spark: each planted fault is found under its own name, and no other is reported."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace

import pytest
import xxhash

from tests.fakes.spilling import make_parts_small
from tests.unit.spark.jobs.shelf import spread
from tieringd.errors import ObjectNotFound
from tieringd.formats.manifest_codec import encode_manifest
from tieringd.formats.object_keys import index_key, manifest_key, owner_of
from tieringd.model.manifest_parts import Retired
from tieringd.spark.jobs.scrub import inspect_segments, scrubbed
from tieringd.spark.jobs.segment_tasks import plan_segment_tasks


def flipped(data: bytes, at: int) -> bytes:
    """Return *data* with a bit turned."""
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


DAMAGES = {
    "removed": None,
    "emptied": lambda _: b"",
    "truncated": lambda data: data[:-2],
    "longer": lambda data: data + b"x",
    "first bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "middle bit": lambda data: flipped(data, len(data) // 2),
    "last bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Make each segment that may spill a part of its own."""
    make_parts_small(monkeypatch)


def scrub(shelf, *topics, with_orphans=True, cores=2):
    report = scrubbed(shelf.config, spread, topics=topics, with_orphans=with_orphans, cores=cores)
    return report, json.loads(report.as_json())


@pytest.fixture
def spilled(shelf):
    """Give a bucket of one partition, most of it spilled, and one small one."""
    writer = shelf.fill(segments=6)
    for _ in range(4):
        writer.drop_head()
    shelf.archive(writer, spill=True)
    shelf.fill("other", 1, segments=2)
    assert shelf.manifest(writer).spillover.segments > 1
    return shelf


def test_sound_bucket_has_no_fault(spilled):
    """All segments are read and counted, those in spilled parts as well."""
    report, document = scrub(spilled)
    manifests = [spilled.whole_manifest(one) for one in spilled.writers.values()]
    size_bytes = sum(one.size_bytes for one in manifests)
    figures = document["figures"]

    assert (report.faults, document["tables"]["findings"], document["tables"]["orphans"]) == ((), [], [])
    assert (figures["partitions"], figures["segments"]) == (2, 8)
    assert (figures["size_bytes"], figures["batches"], figures["records"]) == (size_bytes, 16, 24)
    assert figures["listed_objects"] == len([key for key in spilled.keys() if owner_of(key)])  # noqa: SIM118
    assert figures["objects"] == figures["listed_objects"]
    assert figures["read_bytes"] == size_bytes + sum(
        segment.index_size_bytes for one in manifests for segment in one.segments
    )
    assert [row["topic"] for row in document["tables"]["topics"]] == ["orders", "other"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_any_object_is_found(spilled, damage):
    """Each object in turn: one finding that names it, and no false one."""
    sound = spilled.contents()
    topic_keys = {spilled.topic_manifest_key(one) for one in spilled.writers.values()}
    for key, data in sound.items():
        if key in topic_keys and damage not in {"removed", "emptied", "truncated"}:
            continue  # JSON for people: not every byte of it counts.
        if damage == "removed":
            spilled.remove(key)
        else:
            spilled.write(key, DAMAGES[damage](data))

        report, document = scrub(spilled)

        assert {row["key"] for row in document["tables"]["findings"]} == {key}, (damage, key)
        assert len(report.faults) == len(document["tables"]["findings"])
        assert all(row["action"] for row in document["tables"]["findings"])
        assert document["tables"]["orphans"] == []
        spilled.restore(sound)


def test_swapped_objects_are_both_found(spilled):
    """Each has the other's bytes: sound ones, and not its own."""
    one, other = spilled.data_keys(spilled.writer())[1:3]
    first, second = spilled.read(one), spilled.read(other)
    spilled.write(one, second)
    spilled.write(other, first)
    spilled.write(f"{one}.index", spilled.read(f"{other}.index"))

    _, document = scrub(spilled)

    assert {row["key"] for row in document["tables"]["findings"]} == {one, other, f"{one}.index"}


def test_bit_outside_of_every_batch_checksum_is_found(shelf):
    """A leader epoch: nothing but the checksum of the whole object tells."""
    key = shelf.data_keys(shelf.fill())[0]
    data = bytearray(shelf.read(key))
    second = 12 + int.from_bytes(data[8:12], "big")
    data[second + 15] ^= 1
    shelf.write(key, bytes(data))

    (row,) = scrub(shelf)[1]["tables"]["findings"]

    assert (row["kind"], row["key"]) == ("data_checksum", key)


def test_segment_that_is_held_and_retired_is_found(spilled):
    """A manifest that names a spilled segment once more would have it deleted."""
    writer = spilled.writer()
    manifest, whole = spilled.manifest(writer), spilled.whole_manifest(writer)
    twice = whole.segments.head(1)
    broken = encode_manifest_as(manifest, retired=(Retired(twice, 1),))
    spilled.write(manifest_key(writer.identified), broken)

    _, document = scrub(spilled)

    (row,) = document["tables"]["findings"]
    assert (row["kind"], row["key"]) == ("manifest_rules", manifest_key(writer.identified))
    assert "both spilled and retired" in row["fault"]


def encode_manifest_as(manifest, **changes) -> bytes:
    return encode_manifest(replace(manifest, **changes))


def left_behind(shelf, writer, *, age_ms: int) -> str:
    """Store an object that no manifest names, of some age; return its key."""
    segment = shelf.manifest(writer).segments[0]
    path = shelf.data_keys(writer)[0].partition("/")[2].replace(f"-{segment.writer_id}-", "-dead-")
    key = f"{xxhash.xxh32_intdigest(path.encode()):08x}/{path}"
    shelf.write(key, b"left behind")
    then = (shelf.root / key).stat().st_mtime - age_ms / 1000
    os.utime(shelf.root / key, (then, then))
    return key


def test_orphan_is_listed_and_is_no_fault(shelf):
    """One that is older than the grace; what is younger may be an upload under way."""
    writer = shelf.fill()
    grace_ms = shelf.config.archive_orphan_grace_ms
    old = left_behind(shelf, writer, age_ms=2 * grace_ms)

    report, document = scrub(shelf)
    assert [row["key"] for row in document["tables"]["orphans"]] == [old]
    assert (document["figures"]["orphans"], document["figures"]["orphan_bytes"]) == (1, len(b"left behind"))
    assert report.faults == ()

    shelf.remove(old)
    left_behind(shelf, writer, age_ms=0)
    assert scrub(shelf)[1]["tables"]["orphans"] == []


def test_orphans_need_not_be_searched(shelf):
    """A scrub reads the segments also if it does not list the bucket."""
    writer = shelf.fill()
    left_behind(shelf, writer, age_ms=2 * shelf.config.archive_orphan_grace_ms)
    _, document = scrub(shelf, with_orphans=False)
    assert (document["figures"]["listed_objects"], document["tables"]["orphans"]) == (0, [])
    assert document["figures"]["segments"] == 4


def test_lost_manifest_is_not_passed_over(shelf):
    """The listing shows that it is lost. A scrub without one names the partition, which may be new."""
    shelf.fill()
    shelf.remove(manifest_key(shelf.fill("orders", 1).identified))

    report, document = scrub(shelf, with_orphans=False)
    assert report.faults == ()
    (row,) = document["tables"]["not_judged"]
    assert (row["topic"], row["partition"]) == ("orders", 1)
    assert "it is new, or the manifest is lost" in row["reason"]

    report, document = scrub(shelf)
    assert "the manifest is missing, but the bucket has objects" in report.faults[0]
    assert document["tables"]["not_judged"] == []


def test_topics_are_chosen_by_pattern(spilled):
    """Other topics are neither read nor judged. A name or pattern that matches no topic is a mistake."""
    gone = spilled.data_keys(spilled.writers["other-1"])[0]
    spilled.remove(gone)
    assert scrub(spilled, "ord*")[0].faults == ()
    (row,) = scrub(spilled, "other")[1]["tables"]["findings"]
    assert (row["key"], row["topic"], row["partition"]) == (gone, "other", 1)
    with pytest.raises(ObjectNotFound, match=r"no topic that matches nothing, no\*"):
        scrub(spilled, "nothing", "other", "no*")


def test_tasks_are_small_and_find_the_same(spilled):
    """Tasks find the same faults, however many there are, and also after pickling."""
    manifest = spilled.whole_manifest(spilled.writer())
    gone = index_key(manifest.partition, manifest.segments[2])
    spilled.remove(gone)
    for cores in (1, 3, 100):
        tasks = plan_segment_tasks([(manifest.partition, manifest.segments)], cores=cores)
        data = pickle.dumps(tasks)
        found = [inspect_segments(spilled.config, task) for task in pickle.loads(data)]
        assert [finding.key for one in found for finding in one.findings] == [gone]
        assert sum(count.segments for one in found for _, count in one.counts) == 6
        assert len(data) < 2000


def test_partition_that_leaves_during_the_scrub_has_no_fault(spilled):
    """The topic is marked as being purged before any object goes."""
    writer = spilled.writers["other-1"]

    def purge_first(what, tasks, work):
        key = spilled.topic_manifest_key(writer)
        spilled.write(key, spilled.read(key).replace(b'"live"', b'"purging"'))
        for gone in spilled.data_keys(writer):
            spilled.remove(gone)
        return spread(what, tasks, work)

    report = scrubbed(spilled.config, purge_first, topics=(), with_orphans=True, cores=2)
    assert report.faults == ()


def test_segment_that_retention_took_meanwhile_is_no_fault(shelf):
    """The manifest is read again before anything is reported."""
    writer = shelf.fill(segments=4)
    before = shelf.manifest(writer)

    def expire_first(what, tasks, work):
        after = before.expired(2, now_ms=9).forgotten(2)
        shelf.write(manifest_key(writer.identified), encode_manifest(after))
        for key in data_keys[:2]:
            shelf.remove(key)
            shelf.remove(f"{key}.index")
        return spread(what, tasks, work)

    data_keys = shelf.data_keys(writer)
    report = scrubbed(shelf.config, expire_first, topics=(), with_orphans=True, cores=2)
    assert report.faults == ()
    assert report.figures["segments"] == 4
