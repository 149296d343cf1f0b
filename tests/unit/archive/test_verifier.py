"""Verifying: what is missing, short, or other than the manifest says is found, and named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from crc32c import crc32c

from tests.fakes.archive import archived, archiver_of, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.store import forget_checksums
from tieringd.archive.scrub.segment_inspection import PartitionReport
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.sidecar import decode_sidecar, encode_sidecar
from tieringd.model.segment_table import SegmentTable


@pytest.fixture
async def manifest(writer, archive):
    """Archive three segments of three records each."""
    for _ in range(3):
        writer.closed_segment()
    return await archived(writer, archive)


@pytest.fixture
def key(manifest):
    """Give the key of the middle segment's data object."""
    return data_key(manifest.partition, manifest.segments[1])


@pytest.mark.parametrize("deep", [False, True])
async def test_sound_archive_has_no_faults(archive, manifest, deep):
    """Everything is counted, and a deep check counts the records too."""
    report = await archive.verifier.verify(manifest, deep=deep)

    assert report == PartitionReport(
        partition=manifest.partition,
        segments=3,
        size_bytes=manifest.segments.total_bytes,
        records=9 if deep else None,
        gap_offsets=0,
        faults=(),
    )


@pytest.mark.parametrize("deep", [False, True])
async def test_orphans_are_tolerated(archive, store, manifest, deep):
    """Objects that no manifest names are no fault: a crash may leave some."""
    store.add(data_key(manifest.partition, manifest.segments[1]).replace("-a1-", "-ff-"), b"orphan")

    assert (await archive.verifier.verify(manifest, deep=deep)).faults == ()


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", [data_key, index_key])
async def test_missing_object_is_found(archive, store, manifest, deep, name):
    """An object that is not there is named, once, and the others are checked all the same."""
    gone = name(manifest.partition, manifest.segments[1])
    await store.delete_many([gone])

    report = await archive.verifier.verify(manifest, deep=deep)

    (fault,) = report.faults
    assert gone in fault
    assert report.records == (6 if deep else None)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda _: b""])
async def test_wrong_size_is_found(archive, store, manifest, deep, change):
    """The fault of an object of another size has both sizes."""
    key = data_key(manifest.partition, manifest.segments[1])
    store.add(key, change(store.objects[key][0]))

    (fault,) = (await archive.verifier.verify(manifest, deep=deep)).faults
    assert key in fault
    assert f"the manifest says {manifest.segments[1].size_bytes}" in fault


async def test_wrong_size_of_an_index_is_found(archive, store, manifest, key):
    """An index of another size than in the manifest is a fault, although it is a whole index."""
    index = decode_sidecar(store.objects[f"{key}.index"][0])
    store.add(f"{key}.index", encode_sidecar(replace(index, entries=())))

    (fault,) = (await archive.verifier.verify(manifest, deep=False)).faults
    assert f"{key}.index" in fault
    assert f"the manifest says {manifest.segments[1].index_size_bytes}" in fault


async def test_wrong_index_of_the_same_size_is_found(archive, store, manifest, key):
    """The checksum shows an index that another upload stored, without reading it."""
    index = decode_sidecar(store.objects[f"{key}.index"][0])
    other = encode_sidecar(replace(index, record_count=index.record_count + 1))
    assert len(other) == manifest.segments[1].index_size_bytes
    store.add(f"{key}.index", other)

    (fault,) = (await archive.verifier.verify(manifest, deep=False)).faults
    assert f"{key}.index" in fault
    assert f"the manifest says {manifest.segments[1].index_crc32c:08x}" in fault


async def test_wrong_checksum_is_found_without_reading(archive, store, manifest, key):
    """Other bytes of the same size are found without a read if the store gives the checksum."""
    data = store.objects[key][0]
    store.add(key, data[:-1] + bytes([data[-1] ^ 1]))
    store.requests.clear()

    (fault,) = (await archive.verifier.verify(manifest, deep=False)).faults
    assert "checksum" in fault
    assert "get_range" not in {operation for operation, _ in store.requests}


async def test_damage_that_the_store_does_not_tell_takes_a_deep_check(archive, store, manifest, key):
    """The damage is found only by reading the bytes if the store gives no checksum."""
    data = store.objects[key][0]
    store.add(key, data[:-1] + bytes([data[-1] ^ 1]))
    forget_checksums(store)

    assert (await archive.verifier.verify(manifest, deep=False)).faults == ()
    report = await archive.verifier.verify(manifest, deep=True)
    (fault,) = report.faults
    assert key in fault
    assert report.records == 6


async def test_change_outside_of_the_batch_checksums_takes_the_objects_own(archive, store, manifest, key):
    """A leader epoch stands outside of a batch's checksum; the object's covers it."""
    data = bytearray(store.objects[key][0])
    data[15] ^= 1
    store.add(key, bytes(data))
    forget_checksums(store)

    (fault,) = (await archive.verifier.verify(manifest, deep=True)).faults
    assert "the object has checksum" in fault


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"record_count": 99}, "counts other records", id="records"),
        pytest.param({"batch_count": 99}, "counts other records", id="batches"),
        pytest.param({"epochs": ((9, 3),)}, "counts other records", id="epochs"),
        pytest.param({"entries": ()}, "entries that are not in the object", id="entries"),
    ],
)
async def test_index_that_tells_other_things_takes_a_deep_check(archive, store, manifest, change, words):
    """A whole index with wrong contents is found by comparing it with the object."""
    partition, segment = manifest.partition, manifest.segments[1]
    index = decode_sidecar(store.objects[index_key(partition, segment)][0])
    sidecar = encode_sidecar(replace(index, **change))
    # The manifest knows the index's size and checksum; here it is the contents that count.
    other = replace(segment, index_size_bytes=len(sidecar), index_crc32c=crc32c(sidecar))
    store.add(index_key(partition, other), sidecar)
    store.add(data_key(partition, other), store.objects[data_key(partition, segment)][0])
    segments = [other if each == segment else each for each in manifest.segments]

    (fault,) = (
        await archive.verifier.verify(replace(manifest, segments=SegmentTable.of(segments)), deep=True)
    ).faults
    assert words in fault


async def test_gaps_are_counted(writer, archive):
    """Recorded gaps are no faults, and the report says how many offsets are lost."""
    writer.closed_segment()
    archiver = archiver_of(writer, archive, FakeBroker(writer))
    await archiver.step(observed(writer))
    writer.closed_segment(b"a", b"b")
    writer.closed_segment()
    writer.drop_head()
    writer.drop_head()
    for _ in range(2):
        await archiver.step(observed(writer))

    report = await archive.verifier.verify(archiver.manifest, deep=True)

    assert (report.gap_offsets, report.faults) == (2, ())


async def test_manifest_that_breaks_its_rules_is_a_fault(archive, manifest):
    """A manifest's own faults are in the report."""
    report = await archive.verifier.verify(replace(manifest, next_offset=99), deep=False)

    assert any("next_offset is 99" in fault for fault in report.faults)
