"""Rebuild after jobs that took records out: what is gone stays gone, whenever the job or the daemon died."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in
from tests.fakes.dying_store import Dying, Killed
from tests.fakes.local_spark import LocalSpark
from tests.unit.archive.test_segment_swap import merge_all
from tests.unit.spark.jobs.shelf import Shelf, spread
from tests.unit.spark.rewriting import Job, records_of
from tests.unit.spark.test_compaction import write
from tieringd.formats.manifest_codec import decode_manifest, encode_manifest
from tieringd.formats.object_keys import manifest_key, rewriting_prefix
from tieringd.policies.manifest_rebuild import EXPIRED
from tieringd.policies.segment_merge import MergeLimits
from tieringd.spark.bucket import bucket_of
from tieringd.spark.jobs.erase import erase
from tieringd.spark.jobs.rebuild import UNREAD, Rebuild, RebuildOptions
from tieringd.spark.jobs.rebuild_report import rebuild_report
from tieringd.spark.jobs.scrub import scrubbed
from tieringd.storage.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.log_writer import LogWriter
    from tieringd.model.manifest import PartitionManifest
    from tieringd.spark.jobs.report import Report

DUE_MS = DEFAULT_TIME_MS * 2
"""All tombstones go."""


def rebuild(shelf: Shelf, **options: bool) -> Report:
    """Write the manifests anew; return the report."""
    whole = Rebuild(shelf.config, bucket_of(shelf.config), RebuildOptions(write=True, **options), spread)
    partitions, topics = whole.run(())
    return rebuild_report(
        partitions, topics, damaged_erasures=whole.erasures.faults, is_written=True, seconds=1.0
    )


def lose_manifests(shelf: Shelf) -> None:
    """Remove what is written over and over; all else is there."""
    for key in shelf.keys():  # noqa: SIM118 a method, not a mapping's
        if key.endswith("/manifest") or key.startswith("meta/"):
            shelf.remove(key)


def job_on(shelf: Shelf, writer: LogWriter, job_id: str = "e1", store: object = None) -> Job:
    return Job(store or FileStore(shelf.root), writer.identified, job_id=job_id)


def readings(shelf: Shelf, writer: LogWriter) -> list[list[tuple[int, bytes | None, bytes | None]]]:
    """Return offsets, keys and values as both kinds of readers see them."""

    async def read() -> list[list[tuple[int, bytes | None, bytes | None]]]:
        archive = archive_in(FileStore(shelf.root))
        manifest = (await archive.manifests.load(writer.identified)).existing
        return [
            [
                (one.offset, one.key, one.value)
                for one in await records_of(archive, manifest, read_committed=committed)
            ]
            for committed in (False, True)
        ]

    return asyncio.run(read())


def records_in(shelf: Shelf, writer: LogWriter) -> list[str]:
    return [key for key in shelf.keys() if key.startswith(rewriting_prefix(writer.identified))]  # noqa: SIM118


def stored_objects(shelf: Shelf) -> list[str]:
    """Return the keys of all data objects, named or not."""
    return [key for key in shelf.keys() if key.endswith(".log")]  # noqa: SIM118 a method, not a mapping's


def orphans(shelf: Shelf) -> list[str]:
    report = scrubbed(shelf.config, spread, topics=(), with_orphans=True, cores=2)
    assert report.faults == ()
    return sorted(row["key"] for row in json.loads(report.as_json())["tables"]["orphans"])


def archived_secret(shelf):
    """Archive a segment with a record that is to be erased, and one that is not; return the log's writer."""
    writer = shelf.writer()
    writer.append(b"1", b"x", keys=[b"secret", b"b"])
    writer.roll()
    shelf.archive(writer)
    return writer


def test_erased_key_does_not_come_back(shelf):
    """The old objects wait for their deletion, and were merged while the job ran."""
    writer = shelf.writer()
    for value in (b"1", b"2"):
        writer.append(value, b"x", keys=[b"secret", b"b"])
        writer.roll()
    shelf.archive(writer)
    asyncio.run(job_on(shelf, writer).erase([b"secret"]))
    erased = readings(shelf, writer)
    lose_manifests(shelf)

    report = rebuild(shelf)

    assert report.faults == ()
    assert readings(shelf, writer) == erased
    assert {key for _, key, _ in erased[0]} == {b"b"}
    assert all(one.is_rewritten for one in shelf.manifest(writer).segments)


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["compact", "erase"])
def test_job_that_died_at_any_request_and_a_manifest_lost_after_it(tmp_path, kind, after_effect):
    """The rebuilt archive is as before the job or after it, and never older than its last manifest."""
    kinds, number = set(), 0
    while True:
        number += 1
        shelf = Shelf(_directory(tmp_path, number))
        writer = shelf.writer()
        write(writer, Random(4), segments=4)
        shelf.archive(writer)
        before = readings(shelf, writer)
        first = job_on(shelf, writer, "e0")
        asyncio.run(first.erase([b"c"]) if kind == "compact" else first.compact(target_bytes=300))
        between = readings(shelf, writer)
        job = job_on(shelf, writer, store=Dying(FileStore(shelf.root), number, after_effect=after_effect))
        is_dead = False
        try:
            asyncio.run(_run(job, kind))
        except Killed:
            is_dead = True
        named = readings(shelf, writer)
        aside = shelf.directory / "aside"
        shutil.copytree(shelf.root, aside)
        asyncio.run(_run(job_on(shelf, writer, "e2"), kind))
        after = readings(shelf, writer)
        # The times of objects count, so files are put back and not written anew.
        shutil.rmtree(shelf.root)
        aside.rename(shelf.root)
        lose_manifests(shelf)

        is_recorded = any("rewritten-e1" in key for key in records_in(shelf, writer))
        is_told = bool(rebuild(shelf).faults)

        assert is_told == (not is_recorded and any("rewritten-e1" in key for key in stored_objects(shelf)))
        found = readings(shelf, writer)
        assert found in ([after] if named == after else [between, after])
        assert before not in (between, after)
        kinds.add((named == after, found == after))
        if not is_dead:
            break
    assert number >= 15
    # Not begun, recorded and not swapped, and done.
    assert kinds == {(False, False), (False, True), (True, True)}


def _directory(tmp_path, number: int):
    directory = tmp_path / f"{number}"
    directory.mkdir()
    return directory


async def _run(job: Job, kind: str) -> None:
    if kind == "compact":
        await job.compact(target_bytes=300, due_before_ms=DUE_MS)
    else:
        await job.erase([b"a"])


def test_rewritten_segments_are_merged_and_merged_again(shelf, tmp_path):
    """
    Records that a job took out stay out of merged segments, whether their sources are still there or not.

    A job or a daemon merges them.
    """
    writer = shelf.writer()
    for _ in range(6):
        writer.append(b"1", b"x", keys=[b"secret", b"b"])
        writer.roll()
    shelf.archive(writer)
    asyncio.run(job_on(shelf, writer).erase([b"secret"]))
    erased = readings(shelf, writer)
    parts = shelf.data_keys(writer)
    for count, writer_id in ((3, "0c"), (6, "spark-0d")):
        min_bytes = max(one.size_bytes for one in shelf.manifest(writer).segments)
        limits = MergeLimits(target_bytes=1 << 30, min_bytes=min_bytes, run_segments_max=count)
        asyncio.run(merge_all(FileStore(shelf.root), writer, limits, tmp_path, writer_id=writer_id))
        segments = shelf.manifest(writer).segments
        marked = f"rewritten-{writer_id.removeprefix('spark-')}"
        assert marked in {one.writer_id for one in segments}
        assert all(one.is_rewritten for one in segments)
        lose_manifests(shelf)
        assert rebuild(shelf).faults == ()
        assert readings(shelf, writer) == erased
        assert shelf.manifest(writer).segment_count == len(segments)
    assert len(shelf.data_keys(writer)) == 1
    for key in parts:
        shelf.remove(key)
    lose_manifests(shelf)
    assert rebuild(shelf).faults == ()
    assert readings(shelf, writer) == erased


def test_nothing_is_written_while_a_record_cannot_be_read(shelf):
    """
    Nothing is written while the record of a rewriting is unreadable.

    The rewritten segments would count as leftovers of a killed job.
    """
    writer = archived_secret(shelf)
    before = readings(shelf, writer)
    asyncio.run(job_on(shelf, writer).erase([b"secret"]))
    (key,) = records_in(shelf, writer)
    shelf.write(key, shelf.read(key).replace(b'"rewritten"', b'"compacted"'))
    lose_manifests(shelf)
    first, second = rebuild(shelf).faults
    assert UNREAD in first
    assert key in second
    assert manifest_key(writer.identified) not in shelf.keys()  # noqa: SIM118 a method, not a mapping's
    shelf.remove(key)
    (fault,) = rebuild(shelf).faults
    assert "1 objects of offsets 0 to 1 were stored by rewritten-e1, a job that removed records" in fault
    assert readings(shelf, writer) == before


def test_erased_records_that_are_back_are_told(shelf):
    """The object that an erasure stored is damaged, and the old one waits for its deletion."""
    writer = archived_secret(shelf)
    before = readings(shelf, writer)
    asyncio.run(job_on(shelf, writer).erase([b"secret"]))
    (key,) = shelf.data_keys(writer)
    shelf.write(key, shelf.read(key)[:-1])
    lose_manifests(shelf)

    report = rebuild(shelf)

    assert "Erased records or older values may be back: run that job again" in report.faults[0]
    assert json.loads(report.as_json())["figures"]["objects_brought_back"] == 1
    assert readings(shelf, writer) == before


SECRET = b"secret"


def keyed(shelf: Shelf, *, partition: int = 0) -> LogWriter:
    """Archive segments, each with a record that is to be erased and another one, and a last one without."""
    writer = shelf.writer(partition=partition)
    for number in range(4):
        writer.append(b"%d" % number, b"x", keys=[SECRET, b"other-%d" % number])
        writer.roll()
    writer.append(b"x", keys=[b"last"])
    writer.roll()
    shelf.archive(writer)
    return writer


def edit(shelf: Shelf, writer: LogWriter, change: Callable[[PartitionManifest], PartitionManifest]) -> None:
    async def changed(manifest: PartitionManifest) -> PartitionManifest:
        return change(manifest)

    asyncio.run(archive_in(FileStore(shelf.root)).manifests.edit(writer.identified, changed))


def erased(shelf: Shelf, *keys: bytes) -> Report:
    return erase(LocalSpark(), shelf.config, topics=["order*"], keys=keys or [SECRET], requested_by="me")


def keys_read(shelf: Shelf, writer: LogWriter) -> set[bytes | None]:
    return {key for _, key, _ in readings(shelf, writer)[0]}


def audit_keys(shelf: Shelf, end: str) -> list[str]:
    return [key for key in shelf.contents() if key.startswith("audit/erasures/") and key.endswith(end)]


def test_record_of_an_erasure_is_a_second_witness(shelf):
    """The record of the rewriting is lost: the erasure's own says as well what took the place of what."""
    writer = keyed(shelf)
    assert erased(shelf).faults == ()
    after = readings(shelf, writer)
    (key,) = records_in(shelf, writer)
    shelf.remove(key)
    lose_manifests(shelf)

    assert rebuild(shelf).faults == ()
    assert readings(shelf, writer) == after
    assert SECRET not in keys_read(shelf, writer)


def test_what_had_expired_before_an_erasure_stays_out(shelf):
    """No manifest led the erasure to these objects, and they wait for their deletion."""
    writer = keyed(shelf)
    edit(shelf, writer, lambda manifest: manifest.expired(2, now_ms=1))
    assert erased(shelf).faults == ()
    assert erased(shelf, b"none").faults == (), "what a later erasure tells of the beginning is no less"
    after = readings(shelf, writer)
    lose_manifests(shelf)

    report = rebuild(shelf)

    assert report.faults == ()
    assert readings(shelf, writer) == after
    assert SECRET not in keys_read(shelf, writer)
    left_out = json.loads(report.as_json())["tables"]["left_out"]
    assert [one["reason"] for one in left_out].count(EXPIRED) == 2


def test_archive_that_began_anew_before_an_erasure_comes_back_whole(shelf):
    """A rebuild leaves nothing out that is older than a manifest which began anew: nothing had expired."""
    writer = keyed(shelf)
    before = readings(shelf, writer)

    def anew(manifest: PartitionManifest) -> PartitionManifest:
        start_offset = manifest.segments[2].base_offset
        return replace(manifest, start_offset=start_offset, segments=manifest.segments.without_head(2))

    edit(shelf, writer, anew)
    assert erased(shelf, b"none").faults == ()

    (fault,) = rebuild(shelf, replace=True).faults

    assert fault.startswith("orders-0: erasure ")
    assert "records with the erased keys may be among them. Run that erasure again" in fault
    assert readings(shelf, writer) == before
    assert erased(shelf, b"none").faults == ()
    lose_manifests(shelf)
    assert rebuild(shelf).faults == (), "an erasure of the same keys has gone over all of it since"
    assert readings(shelf, writer) == before


@pytest.mark.parametrize("is_killed", [False, True])
def test_partition_that_an_erasure_has_not_gone_over_is_told(shelf, is_killed):
    """Its manifest was lost by then, or the job was killed: what comes back has to be searched."""
    writer, other = keyed(shelf), keyed(shelf, partition=1)
    if is_killed:
        erased(shelf)
        shelf.remove(*audit_keys(shelf, "-done.json"))
    shelf.remove(manifest_key(writer.identified))
    if not is_killed:
        assert len(erased(shelf).faults) == 1

    (fault,) = rebuild(shelf).faults

    assert fault.startswith("orders-0: erasure ")
    assert "has not searched this partition" in fault
    assert SECRET not in keys_read(shelf, other)
    # What an erasure replaced before the manifest was lost are orphans now, and the report names them.
    assert bool(erased(shelf, SECRET, b"another").faults) == is_killed
    lose_manifests(shelf)
    assert rebuild(shelf).faults == (), "an erasure of the same keys has gone over it since"
    assert SECRET not in keys_read(shelf, writer)


def test_partition_that_began_after_an_erasure_is_none_of_it(shelf):
    """No object of it was there to be searched."""
    keyed(shelf, partition=1)
    assert erased(shelf).faults == ()
    begun = int(audit_keys(shelf, "-done.json")[0].removeprefix("audit/erasures/").partition("-")[0])
    writer = keyed(shelf)
    for key in stored_objects(shelf):
        if "/orders/0_" in key:
            os.utime(shelf.root / key, ((begun + 1_000) / 1_000,) * 2)
    lose_manifests(shelf)

    assert rebuild(shelf).faults == ()
    assert SECRET in keys_read(shelf, writer)


def test_record_of_an_erasure_that_cannot_be_read_is_told(shelf):
    """Nothing says what it has gone over."""
    writer = keyed(shelf)
    assert erased(shelf).faults == ()
    (key,) = audit_keys(shelf, "-done.json")
    shelf.write(key, shelf.read(key)[:-30])
    lose_manifests(shelf)

    (fault,) = rebuild(shelf).faults

    assert fault.startswith("the record of an erasure cannot be read: ")
    assert key in fault
    assert SECRET not in keys_read(shelf, writer)


def test_unfinished_rewriting_is_told_where_nothing_else_is_there(shelf):
    """The report says that old values may be back."""
    writer = archived_secret(shelf)
    (old,) = shelf.data_keys(writer)
    asyncio.run(job_on(shelf, writer).erase([b"secret"]))
    erased = readings(shelf, writer)
    for key in (*records_in(shelf, writer), old):
        shelf.remove(key)
    lose_manifests(shelf)

    report = rebuild(shelf)

    assert "no record shows that the job finished" in report.faults[0]
    assert json.loads(report.as_json())["figures"]["objects_unfinished"] == 1
    assert readings(shelf, writer) == erased


@pytest.mark.parametrize("is_spilled", [False, True])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_scrub_tells_of_a_rewritten_segment_without_a_record(shelf, is_damaged, is_spilled):
    """The manifest is all that says what took the place of what."""
    writer = keyed(shelf)
    if is_spilled:
        writer.append(b"x")
        writer.roll()
        shelf.archive(writer, spill=True)
    assert erased(shelf).faults == ()
    assert scrubbed(shelf.config, spread, topics=(), with_orphans=True, cores=2).faults == ()
    (key,) = records_in(shelf, writer)
    if is_damaged:
        shelf.write(key, b"junk")
    else:
        shelf.remove(key)

    faults = scrubbed(shelf.config, spread, topics=(), with_orphans=False, cores=2).faults

    assert len(faults) == 4
    assert all("rewriting_missing: no record names this rewritten segment" in one for one in faults)


def test_scrub_keeps_records_that_are_needed(shelf):
    """One of a job that died just before its swap is an orphan, with what it names."""
    writer = shelf.writer()
    for _ in range(2):
        writer.append(b"1", b"x", keys=[b"secret", b"b"])
        writer.roll()
    shelf.archive(writer)
    before = shelf.read(manifest_key(writer.identified))
    asyncio.run(job_on(shelf, writer).erase([b"secret"]))
    named = [key for key in shelf.keys() if "rewritten-" in key]  # noqa: SIM118
    assert len(named) == 5
    for key in named:
        os.utime(shelf.root / key, (1, 1))
    assert orphans(shelf) == []

    # What is older than the manifest is no orphan.
    older = replace(decode_manifest(before), began_at_ms=0)
    shelf.write(manifest_key(writer.identified), encode_manifest(older))
    assert orphans(shelf) == named
