"""A damaged bucket: every planted fault is found under its own name, and no other is reported."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from tests.fakes.store import forget_checksums, restore, rot
from tests.unit.spark.rewriting import Job
from tieringd.formats.manifest_codec import encode_manifest
from tieringd.formats.object_keys import manifest_key, topic_manifest_key
from tieringd.policies.scrub import FaultKind

DAMAGES = {
    "removed": lambda store, key: store.remove(key),
    "emptied": lambda store, key: store.add(key, b""),
    "truncated": lambda store, key: store.add(key, store.bytes_of(key)[:-2]),
    "longer": lambda store, key: store.add(key, store.bytes_of(key) + b"x"),
    "first bit": lambda store, key: store.add(
        key, bytes([store.bytes_of(key)[0] ^ 1]) + store.bytes_of(key)[1:]
    ),
    "last bit": lambda store, key: store.add(
        key, store.bytes_of(key)[:-1] + bytes([store.bytes_of(key)[-1] ^ 1])
    ),
}


def kinds_of(bucket, key, damage) -> set[FaultKind]:
    """Return the kinds of findings that an object may have."""
    is_gone = damage == "removed"
    if key == topic_manifest_key(bucket.topic_key):
        return {FaultKind.TOPIC_MANIFEST_MISSING if is_gone else FaultKind.TOPIC_MANIFEST_DAMAGED}
    if key == manifest_key(bucket.writer.identified):
        return {FaultKind.MANIFEST_MISSING if is_gone else FaultKind.MANIFEST_DAMAGED}
    if "/meta/" in key:
        return {FaultKind.SPILLOVER_MISSING if is_gone else FaultKind.SPILLOVER_DAMAGED}
    part = "index" if key.endswith(".index") else "data"
    if is_gone:
        return {FaultKind(f"{part}_missing")}
    return {FaultKind(f"{part}_{fault}") for fault in ("size", "checksum", "content")}


@pytest.mark.parametrize("deep", [False, True])
async def test_sound_bucket_has_no_faults(bucket, deep):
    """Segments that are live, spilled or local, and what they are found by, are as they should be."""
    await bucket.fill(6, local=2)
    assert len([key for key in bucket.store.stored_keys() if "/meta/" in key]) > 2

    report = await bucket.scrub(deep=deep)

    assert (report.findings, report.orphans, report.left, report.uncertain) == ([], [], [], {})
    (stretch,) = report.partitions
    assert (stretch.segments, stretch.records) == (6, 12 if deep else 0)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("deep", [False, True])
async def test_damage_of_any_object_is_found(bucket, deep, damage):
    """Each object of the bucket in turn: one finding, which names it, and no orphan of what it held."""
    await bucket.fill(6, local=2)
    sound = dict(bucket.store.objects)
    for key in bucket.store.stored_keys():
        if damage in {"last bit", "first bit", "longer"} and key == topic_manifest_key(bucket.topic_key):
            continue  # JSON for people: not every byte of it counts.
        restore(bucket.store, sound)
        DAMAGES[damage](bucket.store, key)
        bucket.clock.now_ms += 10 * 86_400_000

        report = await bucket.scrub(deep=deep)

        assert {one.key for one in report.findings} == {key}, damage
        assert {one.kind for one in report.findings} <= kinds_of(bucket, key, damage)
        assert report.orphans == []


@pytest.mark.parametrize("deep", [False, True])
async def test_two_faults_are_both_found(bucket, deep):
    """Both of any two removed objects are named."""
    await bucket.fill(4, local=1)
    sound = dict(bucket.store.objects)
    keys = [*(await bucket.data_keys()), *(await bucket.index_keys())]
    for pair in combinations(keys, 2):
        restore(bucket.store, sound)
        for key in pair:
            bucket.store.remove(key)
        assert {one.key for one in (await bucket.scrub(deep=deep)).findings} == set(pair)


@pytest.mark.parametrize("tells_checksums", [True, False])
@pytest.mark.parametrize("deep", [True, False])
async def test_swapped_objects_are_found(bucket, deep, tells_checksums):
    """Two objects of one size in each other's place are both found, by checksum or by reading."""
    await bucket.fill(4, local=1)
    keys = [await bucket.data_keys(), await bucket.index_keys()]
    for some in keys:
        first, second = some[0], some[2]
        one, other = bucket.store.bytes_of(first), bucket.store.bytes_of(second)
        assert len(one) == len(other)
        bucket.store.add(first, other)
        bucket.store.add(second, one)
        if not tells_checksums:
            forget_checksums(bucket.store)

        found = {finding.key for finding in (await bucket.scrub(deep=deep)).findings}

        is_hidden = not deep and not tells_checksums and some is keys[0]
        assert found == (set() if is_hidden else {first, second})
        bucket.store.add(first, one)
        bucket.store.add(second, other)


async def test_rot_behind_a_right_checksum_takes_a_deep_scrub(bucket):
    """A deep scrub does not trust a store that reports the checksum from before its bytes changed."""
    await bucket.fill(4, local=1)
    sound = dict(bucket.store.objects)
    for key in [*(await bucket.data_keys()), *(await bucket.index_keys())]:
        for at in (0, 15, 20, 60, -1):
            restore(bucket.store, sound)
            rot(bucket.store, key, at)
            assert (await bucket.scrub(deep=False)).findings == []
            assert {one.key for one in (await bucket.scrub(deep=True)).findings} == {key}


async def test_findings_tell_offsets_and_what_to_do(bucket):
    """A finding has the object's key, its offsets, what is wrong, and an operator's next step."""
    await bucket.fill(3)
    key = (await bucket.data_keys())[1]
    bucket.store.remove(key)

    (finding,) = (await bucket.scrub()).findings

    assert str(finding) == f"the object is missing (in {key}, offsets 2 to 3)"
    assert "archive scrub --fix" in finding.action
    assert (finding.segment.base_offset, finding.segment.last_offset) == (2, 3)


async def test_older_parts_are_scrubbed_past_a_missing_one(bucket):
    """Parts before a missing spillover manifest are scrubbed too, if only one part can be meant."""
    await bucket.fill(6, local=2)
    parts = [
        key
        for key in bucket.store.stored_keys()
        if ".log" not in key and "manifest." in key and "/topics/" not in key
    ]
    middle = next(key for key in parts if "manifest.4.5." in key)
    oldest = (await bucket.data_keys())[0]
    bucket.store.remove(middle)
    bucket.store.remove(oldest)

    assert {one.key for one in (await bucket.scrub()).findings} == {middle, oldest}


async def test_parts_that_hold_other_counts_than_said_are_found(bucket):
    """A live manifest that says otherwise of its spilled part than that itself disagrees with it."""
    await bucket.fill(6, local=2)
    manifest = bucket.manifest
    wrong = replace(manifest, spillover=replace(manifest.spillover, size_bytes=1))
    bucket.store.add(manifest_key(bucket.writer.identified), encode_manifest(wrong))

    (finding,) = (await bucket.scrub()).findings

    assert finding.kind is FaultKind.SPILLOVER_DISAGREES
    assert "spilled segments of 1 bytes" in finding.detail


@pytest.mark.parametrize("damage", ["removed", "truncated"])
@pytest.mark.parametrize("dropped", [0, 3], ids=["live", "spilled"])
async def test_record_of_a_rewriting_that_is_lost_is_stored_again(bucket, damage, dropped):
    """Scrub stores it again: a rebuild of a lost manifest would bring back what an erasure removed."""
    writer = bucket.writer
    for number in range(4):
        writer.append(b"secret", b"x", keys=[b"secret", b"other-%d" % number])
        writer.roll()
    await bucket.fill(0)
    for _ in range(dropped):
        writer.drop_head()
    await bucket.step()
    assert (bucket.manifest.spillover is not None) == bool(dropped)
    await Job(bucket.store, writer.identified).erase([b"secret"])
    sound = await bucket.scrub(deep=False)
    assert (sound.findings, sound.orphans) == ([], [])
    (record,) = [key for key in bucket.store.stored_keys() if "/rewriting." in key]
    DAMAGES[damage](bucket.store, record)

    report = await bucket.scrub(deep=False, fix=True)

    assert {one.kind for one in report.findings} == {FaultKind.REWRITING_MISSING}
    assert len(report.findings) == 4
    assert report.mended.keys() == set(report.findings)
    assert (await bucket.scrub(deep=False)).findings == []
