"""The record of an erasure: it is stored, and says what became of objects that were replaced."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.fakes.archive import archive_in
from tests.fakes.local_spark import LocalSpark
from tests.fakes.memory_store import MemoryStore
from tests.unit.spark.rewriting import Job
from tieringd.archive.object_joiner import ObjectJoiner, index_of_parts, store_merged
from tieringd.archive.segment_swap import held_in
from tieringd.errors import StorageDenied, StorageUnavailable, TieringError
from tieringd.formats.job_records import ErasureRequest
from tieringd.formats.object_keys import data_key, manifest_key
from tieringd.model.manifest import CLOSED_EPOCH
from tieringd.model.tail_cut import cut_back
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.spark.jobs.erase import _store_record, erase
from tieringd.spark.jobs.key_search import search
from tieringd.storage.file import FileStore
from tieringd.storage.resilient import ResilientStore, StoreLimits


class LostAnswer(MemoryStore):
    """Stores the first object, and does not say so."""

    async def put(self, key, body, *, crc32c, condition=None):
        is_first = not self.objects
        info = await super().put(key, body, crc32c=crc32c, condition=condition)
        if is_first:
            raise StorageUnavailable("no answer", outcome_unknown=True)
        return info


def test_record_whose_answer_was_lost_is_stored():
    """All that the record reports is done by then: a job that failed over it would leave no trace of that."""
    backend = LostAnswer()
    limits = StoreLimits(initial_backoff_seconds=0.001, max_backoff_seconds=0.001)
    bucket = SimpleNamespace(store=ResilientStore(backend, limits), run=asyncio.run)
    request = ErasureRequest("0a", 7, "dpo", "", ("orders",), ())

    _store_record(bucket, request, b"told", is_done=True)

    assert [data for data, *_ in backend.objects.values()] == [b"told"]


def erased(shelf, *topics, spark=None, keys=(b"k0",), **options):
    """Erase keys; return the report and the record of it."""
    report = erase(
        spark or LocalSpark(),
        shelf.config,
        topics=topics or ("orders",),
        keys=keys,
        requested_by="me",
        **options,
    )
    return report, json.loads(shelf.read(report.figures["record"]))


def edit(shelf, writer, change):
    """Replace a partition's manifest by what *change* makes of it."""

    async def changed(manifest):
        return change(manifest)

    asyncio.run(archive_in(FileStore(shelf.root)).manifests.edit(writer.identified, changed))


def close(shelf, writer):
    manifests = archive_in(FileStore(shelf.root)).manifests

    async def work():
        loaded = await manifests.load(writer.identified)
        await manifests.commit(loaded, loaded.existing, leader_epoch=CLOSED_EPOCH)

    asyncio.run(work())


def purge(shelf, writer):
    manifests = archive_in(FileStore(shelf.root)).manifests
    asyncio.run(
        manifests.change_topic(shelf.topic_key(writer), lambda one: replace(one, lifecycle=Lifecycle.PURGING))
    )


@pytest.mark.parametrize("after_ms", [None, 0, 1])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_record_says_deleted_only_where_nothing_is_left(shelf, after_ms, is_damaged):
    """The record does not say `deleted` if a manifest cannot be read: its objects may still have the keys."""
    writers = [shelf.fill(partition=number) for number in range(2)]
    if is_damaged:
        shelf.write(manifest_key(writers[0].identified), b"damaged")

    report, record = erased(shelf, delete_after_ms=after_ms)

    assert (record["deleted_at_ms"] is not None) == (after_ms == 0 and not is_damaged)
    assert bool(report.faults) == is_damaged
    assert record["faults"] == list(report.faults)


def test_record_says_how_far_each_partition_was_gone_over(shelf):
    """Offsets archived later were not searched, and a partition with a fault is not in the record."""
    shelf.fill(partition=0, segments=2)
    damaged = shelf.fill(partition=1)
    shelf.writer(partition=2)
    shelf.write(shelf.data_keys(damaged)[1], b"damaged")

    report, record = erased(shelf)

    assert [
        (one["partition"]["partition"], one["start_offset"], one["next_offset"])
        for one in record["gone_over"]
    ] == [(0, 0, 6)]
    assert report.figures["partitions_gone_over"] == 1
    assert len(report.faults) == 1


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        pytest.param(
            lambda shelf, writer: shelf.remove(manifest_key(writer.identified)),
            "its manifest is missing",
            id="no manifest",
        ),
        pytest.param(close, "its archive is closed", id="closed"),
        pytest.param(
            lambda shelf, writer: shelf.remove(shelf.topic_manifest_key(writer)),
            "no topic manifest names it",
            id="no topic manifest",
        ),
        pytest.param(purge, "its topic is being purged", id="purged"),
    ],
)
def test_partition_that_has_objects_and_was_not_gone_over_is_a_fault(shelf, lose, why):
    """Nothing leads to it, and its objects may have the keys; a dry run says so as well."""
    shelf.fill("other")
    writer = shelf.fill("orders", segments=2)
    lose(shelf, writer)

    found = search(LocalSpark(), shelf.config, topics=["o*"], keys=[b"k0"])
    report, record = erased(shelf, "o*", delete_after_ms=0)

    (fault,) = report.faults
    assert fault.startswith("orders-0 (topic id W1xNUlUlTfigw_K-dvdxsA): its 2 objects were not searched")
    assert why in fault
    assert found.faults == report.faults
    assert (record["deleted_at_ms"], record["faults"]) == (None, [fault])
    assert report.figures["records_removed"] > 0, "the other topic was gone over"


@pytest.mark.parametrize("place", ["", "quarantine/objects/"])
@pytest.mark.parametrize("damages", [False, True])
def test_object_that_no_manifest_names_is_searched(shelf, place, damages):
    """A merge that was overtaken has left a copy, or scrub has moved one: the record names it."""
    writer = shelf.writer()
    for name in (b"k0", b"k1"):
        writer.append(b"value", keys=[name])
        writer.roll()
    shelf.archive(writer)
    key, other = shelf.data_keys(writer)
    copy = (
        f"{place}{data_key(writer.identified, replace(shelf.manifest(writer).segments[0], writer_id='a2'))}"
    )
    shelf.write(copy, shelf.read(key) if not damages else b"damaged")
    harmless = data_key(writer.identified, replace(shelf.manifest(writer).segments[1], writer_id="a2"))
    shelf.write(harmless, shelf.read(other))
    shelf.write(f"{harmless}.index", b"no records are in an index")

    report, record = erased(shelf, delete_after_ms=0)

    assert report.figures["unnamed_objects"] + report.figures["quarantined_objects"] == 2
    assert report.figures["objects_left"] == 1
    fault, advice = report.faults
    assert fault.startswith(f"orders-0: no manifest names {copy}, and the object ")
    assert (
        "the object cannot be read" if damages else "the object has a record with one of the keys"
    ) in fault
    assert "run the job again" in advice
    assert (record["deleted_at_ms"], record["objects_left"]) == (None, [copy])


def test_merge_that_erasure_overtakes_leaves_nothing_in_silence(shelf):
    """The daemon has stored the merged object, and cannot name it: the record does not say deleted."""
    writer = shelf.writer()
    for number in range(4):
        writer.append(b"secret%d" % number, keys=[b"k0"])
        writer.roll()
    manifest = shelf.archive(writer)

    async def prepare():
        store = FileStore(shelf.root)
        archive, parts = archive_in(store), tuple(manifest.segments)[:2]
        index = await index_of_parts(archive.remote_log, writer.identified, parts)
        joiner = ObjectJoiner(store, work_directory=shelf.directory)
        await store_merged(store, joiner, writer.identified, parts, index, leader_epoch=0, writer_id="a1")

    asyncio.run(prepare())

    report, record = erased(shelf, delete_after_ms=0)

    left = [key for key, data in shelf.contents().items() if b"secret" in data]
    assert record["objects_left"] == left
    assert len(left) == 1
    assert (record["deleted_at_ms"], len(report.faults)) == (None, 2)


@pytest.mark.parametrize("after_ms", [None, 0])
def test_held_original_goes_also_where_no_segment_is_left(shelf, after_ms):
    """A user deleted all records after a compaction: an election could still put its originals back."""
    writer = shelf.fill(segments=3)
    job = Job(FileStore(shelf.root), writer.identified)
    asyncio.run(job.compact())
    edit(shelf, writer, lambda manifest: manifest.expired(len(manifest.segments), now_ms=1))
    before = shelf.manifest(writer)
    originals = [data_key(before.partition, one) for each in held_in(before) for one in each.segments]
    assert originals
    assert not before.segments

    report, record = erased(shelf, delete_after_ms=after_ms)

    assert report.faults == ()
    assert held_in(shelf.manifest(writer)) == []
    left = [key for key in originals if (shelf.root / key).exists()]
    assert left == ([] if after_ms == 0 else originals)
    assert (record["deleted_at_ms"] is not None) == (after_ms == 0)
    assert [one["partition"]["partition"] for one in record["gone_over"]] == [0]


def test_what_another_leader_puts_in_its_place_was_not_gone_over(shelf):
    """An unclean election while the job runs: the record does not say that it searched those records."""
    writer = shelf.fill(segments=2)

    def elect():
        if not shelf.manifest(writer).replacements:
            edit(shelf, writer, lambda manifest: cut_back(manifest, 3, leader_epoch=1, now_ms=1))

    report, record = erased(shelf, spark=LocalSpark(elect), keys=[b"none"], delete_after_ms=0)

    assert [(one["start_offset"], one["next_offset"]) for one in record["gone_over"]] == [(0, 3)]
    assert any("records of another leader replaced those from offset 3 on" in one for one in report.faults)
    assert record["deleted_at_ms"] is None


@pytest.mark.parametrize("cannot_tell", [False, True])
def test_store_that_keeps_what_is_deleted_is_named_instead(shelf, monkeypatch, cannot_tell):
    """The bytes are there as an older version, for all that is known: the record does not say deleted."""

    async def kept(_store, key):
        assert shelf.read(key), "it is an object that was stored lately"
        if cannot_tell:
            raise StorageDenied("GetBucketVersioning: AccessDenied")
        return ("the bucket keeps versions",)

    # The job opens its store itself, and a directory never keeps what is deleted.
    monkeypatch.setattr(FileStore, "kept_after_delete", kept)
    shelf.fill()

    report, record = erased(shelf, delete_after_ms=0)

    told = "the bucket keeps versions"
    if cannot_tell:
        told = "it is not known whether the store keeps deleted objects: GetBucketVersioning: AccessDenied"
    assert (record["kept_by_store"], record["deleted_at_ms"]) == ([told], None)
    assert (report.figures["kept_by_store"], report.faults) == (told, ())


@pytest.fixture
def failing_spark(shelf):
    """Give a Spark at the end of whose tasks no record of an erasure can be stored any more."""
    shelf.fill()
    records = shelf.root / "audit" / "erasures"

    def take_away() -> None:
        records.rename(shelf.root / "audit" / "elsewhere")
        records.write_bytes(b"no directory")

    return LocalSpark(take_away)


def test_erasure_whose_record_cannot_be_stored_at_its_end_reports(shelf, failing_spark):
    """The records are gone: a job that failed here would tell neither which ones nor by whose request."""
    report = erase(failing_spark, shelf.config, topics=["orders"], keys=[b"k0"], requested_by="me")

    assert report.figures["records_removed"] > 0
    assert report.figures["record"] is None
    (fault,) = report.faults
    assert fault.startswith("the record of the erasure is not stored; run the job again: ")


def test_erasure_that_has_replaced_nothing_fails_with_its_store(shelf, failing_spark):
    """There is nothing to report."""
    with pytest.raises(TieringError):
        erase(failing_spark, shelf.config, topics=["orders"], keys=[b"none"], requested_by="me")
