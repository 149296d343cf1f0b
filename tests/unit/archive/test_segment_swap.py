"""New segments in the places of old ones: in one commit, spilled or not, and only where these still are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.archive import archive_in
from tests.fakes.dying_store import Dying, Killed
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import restore, store_unavailable
from tests.unit.housekeeping.test_merging import both_ways, filled
from tieringd.archive.archive_reader import SegmentIndexes
from tieringd.archive.object_joiner import ObjectJoiner, index_of_parts, store_merged
from tieringd.archive.retired_objects import delete_retired, unnamed
from tieringd.archive.scrub.orphan_search import OwnerLookup
from tieringd.archive.segment_swap import SegmentSwap, Successor
from tieringd.errors import FencedError, StorageUnavailable
from tieringd.formats.job_records import decode_rewriting
from tieringd.formats.object_keys import data_key, index_key, manifest_key, rewriting_prefix
from tieringd.model.manifest import CLOSED_EPOCH
from tieringd.model.segment import Rewriting, RewritingKind, SegmentIdentity
from tieringd.model.segment_table import SegmentTable
from tieringd.model.spilling import part_to_spill, spilled, spillover_expired
from tieringd.policies.segment_merge import plan_merges

PLENTY = 1 << 30


def swap_in(store, *, target_manifest_bytes=PLENTY) -> SegmentSwap:
    archive = archive_in(store, writer_id="0b")
    return SegmentSwap(
        store, archive.manifests, now_ms=lambda: 5_000, target_manifest_bytes=target_manifest_bytes
    )


async def prepared(
    store, manifest, limits, tmp_path, *, writer_id="spark-0b", is_recorded=True
) -> list[Successor]:
    """Store what each run of a plan becomes."""
    found = []
    for run in plan_merges(manifest, limits).runs:
        parts = manifest.segments.overlapping(run.base_offset, run.next_offset)
        merge = await store_merged(
            store,
            ObjectJoiner(store, work_directory=tmp_path),
            manifest.partition,
            parts,
            await index_of_parts(SegmentIndexes(store), manifest.partition, parts),
            leader_epoch=max(part.leader_epoch for part in parts),
            writer_id=writer_id,
            is_recorded=is_recorded,
        )
        found.append(Successor(merge.parts, merge.segment))
    return found


async def merge_all(store, writer, limits, tmp_path, *, writer_id="spark-0b"):
    archive = archive_in(store)
    stored = await archive.manifests.load(writer.identified)
    manifest = await archive.manifests.spillovers.with_history(stored.existing)
    successors = await prepared(store, manifest, limits, tmp_path, writer_id=writer_id)
    return await swap_in(store).merge(writer.identified, successors)


async def test_merged_segments_are_named_together(store, writer, tmp_path):
    """One commit names all of them in the archiver's name, and reading gives the same."""
    manifest, limits = await filled(writer, store)
    before = await both_ways(archive_in(store), manifest)

    swapped = await merge_all(store, writer, limits, tmp_path)

    after = stored_manifest(store, writer)
    assert (len(swapped.done), swapped.left, swapped.manifest) == (2, 0, after)
    assert bases(store, writer) == [0, 6, 10]
    assert [one.writer_id for one in after.segments] == ["spark-0b", "spark-0b", "a1"]
    assert (after.writer_id, after.commit_number) == ("a1+edit", manifest.commit_number + 1)
    assert {one.retired_at_ms for one in after.retired} == {5_000}
    assert await both_ways(archive_in(store), after) == before
    assert (await archive_in(store).verifier.verify(after, deep=True)).faults == ()


async def test_run_that_was_replaced_meanwhile_is_left(store, writer, tmp_path):
    """The others are independent of it."""
    manifest, limits = await filled(writer, store)
    successors = await prepared(store, manifest, limits, tmp_path)
    others = await prepared(store, manifest, limits, tmp_path, writer_id="spark-0c")
    await swap_in(store).merge(writer.identified, others[:1])

    swapped = await swap_in(store).merge(writer.identified, successors)

    assert (swapped.done, swapped.left) == ((successors[1],), 1)
    assert list(stored_manifest(store, writer).segments)[:2] == [others[0].segment, successors[1].segment]


async def test_nothing_that_fits_is_no_commit(store, writer, tmp_path):
    """A swap that was done before is none either: it counts as done."""
    manifest, limits = await filled(writer, store)
    successors = await prepared(store, manifest, limits, tmp_path)
    await swap_in(store).merge(writer.identified, successors)
    before = stored_manifest(store, writer)

    again = await swap_in(store).merge(writer.identified, successors)
    other = await prepared(store, manifest, limits, tmp_path, writer_id="spark-0c")
    overtaken = await swap_in(store).merge(writer.identified, other)

    assert (again.done, again.left) == (tuple(successors), 0)
    assert (overtaken.done, overtaken.left) == ((), 2)
    assert stored_manifest(store, writer) == before


async def test_swap_whose_answer_was_lost_is_done(store, writer, tmp_path):
    """A swap that never arrived has changed nothing, and can be tried again."""
    manifest, limits = await filled(writer, store)
    successors = await prepared(store, manifest, limits, tmp_path)
    unknown = lambda: store_unavailable("put", True)  # noqa: E731
    store.fail_next("put", unknown)
    with pytest.raises(StorageUnavailable):
        await swap_in(store).merge(writer.identified, successors)
    assert stored_manifest(store, writer) == manifest

    store.fail_next("put", unknown, after_effect=True)
    swapped = await swap_in(store).merge(writer.identified, successors)

    assert len(swapped.done) == 2
    assert bases(store, writer) == [0, 6, 10]


async def test_closed_archive_is_not_changed(store, writer, tmp_path):
    """The archive goes on in another bucket, so no merge changes it here."""
    manifest, limits = await filled(writer, store)
    successors = await prepared(store, manifest, limits, tmp_path)
    archive = archive_in(store)
    stored = await archive.manifests.load(writer.identified)
    await archive.manifests.commit(stored, stored.existing, leader_epoch=CLOSED_EPOCH)

    with pytest.raises(FencedError, match="is closed"):
        await swap_in(store).merge(writer.identified, successors)


@pytest.mark.parametrize("spilled_rows", [(2,), (3, 2), (1, 1, 1)])
async def test_runs_over_the_end_of_what_is_spilled_are_merged(store, writer, tmp_path, spilled_rows):
    """Parts are taken back as far as they are needed; the archive has the same records and bytes."""
    manifest, limits = await filled(writer, store)
    before = await both_ways(archive_in(store), manifest)
    archive = archive_in(store)
    stored = await archive.manifests.load(writer.identified)
    live = stored.existing
    for rows in spilled_rows:
        part = part_to_spill(live, rows)
        live = spilled(live, part, await archive.manifests.spillovers.put(part))
    await archive.manifests.commit(stored, live, leader_epoch=0)

    swapped = await merge_all(store, writer, limits, tmp_path)

    after = stored_manifest(store, writer)
    assert len(swapped.done) == 2
    assert (after.segment_count, after.size_bytes) == (3, manifest.size_bytes)
    assert await both_ways(archive_in(store), after) == before
    assert (await archive_in(store).verifier.verify(after, deep=True)).faults == ()


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
async def test_crash_at_any_request_loses_nothing(tmp_path, after_effect):
    """A merge of spilled history that dies at any request leaves all readable."""
    died = 0
    for number in range(1, 300):
        store, writer = MemoryStore(), LogWriter(tmp_path / f"{number}")
        manifest, limits = await filled(writer, store)
        before = await both_ways(archive_in(store), manifest)
        archive = archive_in(store)
        stored = await archive.manifests.load(writer.identified)
        part = part_to_spill(stored.existing, 4)
        live = spilled(stored.existing, part, await archive.manifests.spillovers.put(part))
        await archive.manifests.commit(stored, live, leader_epoch=0)
        dying = Dying(store, number, after_effect=after_effect)
        dying.join = dying.join
        try:
            await merge_all(dying, writer, limits, tmp_path)
            await delete_retired(
                dying, archive_in(dying).manifests, writer.identified, retired_until_ms=5_000
            )
        except Killed:
            died += 1
        assert await both_ways(archive_in(store), stored_manifest(store, writer)) == before
        await merge_all(store, writer, limits, tmp_path, writer_id="spark-0c")
        await delete_retired(store, archive_in(store).manifests, writer.identified, retired_until_ms=5_000)
        after = stored_manifest(store, writer)
        assert (after.segment_count, after.retired) == (3, ())
        assert await both_ways(archive_in(store), after) == before
        assert (await archive_in(store).verifier.verify(after, deep=True)).faults == ()
        if died < number:
            break
    else:
        pytest.fail("it never came to an end")
    assert died >= 15


async def test_only_what_is_due_is_deleted(store, writer, tmp_path):
    """The oldest first, as far as they are old enough; the rest is due another time."""
    manifest, limits = await filled(writer, store)
    successors = await prepared(store, manifest, limits, tmp_path)
    await swap_in(store).merge(writer.identified, successors[:1])
    later = SegmentSwap(
        store, archive_in(store).manifests, now_ms=lambda: 6_000, target_manifest_bytes=PLENTY
    )
    await later.merge(writer.identified, successors[1:])
    manifests = archive_in(store).manifests

    deleted = await delete_retired(store, manifests, writer.identified, retired_until_ms=5_999)

    assert deleted == successors[0].parts
    assert [one.retired_at_ms for one in stored_manifest(store, writer).retired] == [6_000]
    gone = {data_key(writer.identified, part) for part in successors[0].parts}
    assert gone.isdisjoint(store.objects)
    assert all(data_key(writer.identified, part) in store.objects for part in successors[1].parts)


@pytest.mark.parametrize("until_ms", [4, 5, 6])
async def test_what_expired_of_the_spilled_segments_is_deleted_as_well(store, writer, until_ms):
    """Total retention released it in steps; where no daemon runs any more the job deletes it."""
    manifest, _ = await filled(writer, store)
    archive = archive_in(store)
    segments, spillovers = list(manifest.segments), archive.manifests.spillovers
    for _ in range(2):
        part = part_to_spill(manifest, 2)
        manifest = spilled(manifest, part, await spillovers.put(part))
    manifest = spillover_expired(manifest, SegmentTable.of(segments[:2]), now_ms=5)
    manifest = spillover_expired(manifest, SegmentTable.of(segments[2:3]), now_ms=6)
    stored = await archive.manifests.load(writer.identified)
    await archive.manifests.commit(stored, manifest, leader_epoch=0)
    gone = {4: [], 5: segments[:2], 6: segments[:3]}[until_ms]

    deleted = await delete_retired(
        store, archive_in(store).manifests, writer.identified, retired_until_ms=until_ms
    )

    assert list(deleted) == gone
    after = stored_manifest(store, writer)
    assert after.faults() == ()
    assert [one.retired_at_ms for one in after.spillover.retired] == [one for one in (5, 6) if one > until_ms]
    left = {data_key(writer.identified, one) in store.objects for one in segments[len(gone) :]}
    assert left == {True}
    assert not any(data_key(writer.identified, one) in store.objects for one in gone)
    owner = await OwnerLookup(store, archive_in(store).manifests).owner(writer.identified)
    assert owner.findings == ()
    listed = await archive_in(store).manifests.spillovers.ending_before(writer.identified, 10**9)
    assert len(listed) == (2 if until_ms == 4 else 1)


async def test_name_that_is_held_again_is_not_deleted(store, writer):
    """An archive that began anew may hold the same bytes under the same name."""
    manifest, _ = await filled(writer, store)
    first, second = list(manifest.segments)[:2]
    assert unnamed(manifest.expired(1, now_ms=0), [first, second]) == [first]


async def rewritten(store, manifest) -> list[Successor]:
    """Store an empty segment for each row, as a job does that takes everything out."""
    found = []
    for row, part in enumerate(manifest.segments):
        segment = replace(part, size_bytes=0, crc32c=0, writer_id="rewritten-0e", index_crc32c=row)
        for name in (data_key, index_key):
            await store.put(name(manifest.partition, segment), b"", crc32c=0)
        found.append(Successor((part,), segment))
    return found


def recorded(store, partition) -> list[Rewriting]:
    keys = [key for key in store.objects if key.startswith(rewriting_prefix(partition))]
    return [decode_rewriting(store.objects[key][0], source=key)[1] for key in keys]


@pytest.mark.parametrize("is_whole", [False, True])
async def test_record_names_just_what_took_its_place(store, writer, is_whole):
    """Another process commits in between: then a compaction records nothing, and an erasure the rest."""
    manifest, _ = await filled(writer, store)
    successors = await rewritten(store, manifest)
    swap = swap_in(store)

    class Overtaken:
        """A store in which another job is faster, once."""

        is_over = False

        def __getattr__(self, name):
            return getattr(store, name)

        async def put(self, key, data, **options):
            if key == manifest_key(manifest.partition) and not self.is_over:
                self.is_over = True
                assert len(recorded(store, manifest.partition)) == 1
                other = Successor(
                    successors[1].parts, replace(successors[1].segment, writer_id="rewritten-0f")
                )
                for name in (data_key, index_key):
                    await store.put(name(manifest.partition, other.segment), b"", crc32c=0)
                await swap.rewrite(manifest.partition, [other], is_whole=False)
            return await store.put(key, data, **options)

    swapped = await swap_in(Overtaken()).rewrite(manifest.partition, successors, is_whole=is_whole)

    done = [] if is_whole else [successors[0], *successors[2:]]
    assert swapped.done == tuple(done)
    found = {one.writer_id: one for one in recorded(store, manifest.partition)}
    other = replace(SegmentIdentity.of(successors[1].segment), writer_id="rewritten-0f")
    assert found.pop("rewritten-0f").stored == (other,)
    assert [one.stored for one in found.values()] == (
        [tuple(SegmentIdentity.of(one.segment) for one in done)] if done else []
    )


async def test_merge_of_rewritten_segments_is_recorded_when_it_takes_their_places(store, writer, tmp_path):
    """
    A merge is recorded when it takes its parts' places, not when it is stored.

    Another job has replaced some of the parts in between, and its record counts.
    """
    manifest, limits = await filled(writer, store)
    partition = manifest.partition
    erased = [
        Successor((part,), replace(part, writer_id="rewritten-0e")) for part in list(manifest.segments)[:2]
    ]
    for one in erased:
        for name in (data_key, index_key):
            data, info = await store.get(name(partition, one.parts[0]))
            await store.put(name(partition, one.segment), data, crc32c=info.crc32c)
    await swap_in(store).rewrite(partition, erased, is_whole=False)
    before = recorded(store, partition)
    listed = stored_manifest(store, writer)
    late, in_time = await prepared(store, listed, limits, tmp_path, is_recorded=False)
    assert late.segment.is_rewritten
    again = Successor(late.parts[:1], replace(late.parts[0], writer_id="rewritten-0f"))
    for name in (data_key, index_key):
        data, info = await store.get(name(partition, late.parts[0]))
        await store.put(name(partition, again.segment), data, crc32c=info.crc32c)
    unchanged = dict(store.objects)
    await swap_in(store).rewrite(partition, [again], is_whole=False)

    swapped = await swap_in(store).merge(partition, [late, in_time])

    assert (swapped.done, swapped.left) == ((in_time,), 1)
    assert {one.writer_id for one in recorded(store, partition)} == {"rewritten-0e", "rewritten-0f"}
    restore(store, unchanged)
    await swap_in(store).merge(partition, [late, in_time])
    (merged,) = [one for one in recorded(store, partition) if one not in before]
    assert merged == Rewriting.of(RewritingKind.MERGED, late.parts, (late.segment,))
