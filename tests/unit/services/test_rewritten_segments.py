"""A job took records out of the archive: the daemon trims its log all the same, and puts nothing back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in, archived, archiver_of, observed, values_in
from tests.fakes.broker import FakeBroker
from tests.unit.services.manifests import bases, stored_manifest
from tests.unit.services.test_compacted_reuploader import Reuploading
from tests.unit.services.test_segment_merger import Merging
from tieringd.archive.segment_rewriter import SegmentRewriter
from tieringd.archive.segment_swap import SegmentSwap
from tieringd.errors import StorageUnavailable
from tieringd.formats.object_keys import data_key, parse_data_key
from tieringd.model.segment import REWRITER_PREFIX
from tieringd.policies.segment_merge import MergeLimits


class BatchCut:
    """Take out the batches that begin at some offsets."""

    keeps_aborted = True

    def __init__(self, without):
        self._without = without
        self.removed_records = 0

    def begin(self, index):
        pass

    def left_of(self, batch):
        if batch.header.base_offset in self._without:
            self.removed_records += batch.header.record_count
            return None
        return batch.data


async def rewrite(store, writer, *base_offsets, without, tmp_path) -> None:
    """Rewrite the segments at *base_offsets*, each without the batches at *without*."""
    archive = archive_in(store, writer_id="0b")
    rewriter = SegmentRewriter(
        store, archive.reader, writer_id=f"{REWRITER_PREFIX}0b", work_directory=Path(tmp_path)
    )
    swap = SegmentSwap(store, archive.manifests, now_ms=lambda: 7, target_manifest_bytes=1 << 20)
    table = stored_manifest(store, writer).segments
    successors = [
        await rewriter.rewrite(writer.identified, (table.covering(base),), BatchCut(without))
        for base in base_offsets
    ]
    assert all(one.removed_records for one in successors)
    swapped = await swap.rewrite(writer.identified, successors, is_whole=True)
    assert swapped.left == 0


async def filled(writer, archive):
    """Archive three segments of two batches each: 0 and 1, 2 and 3, 4 and 5."""
    for number in range(6):
        writer.append(b"%d" % number)
        if number % 2:
            writer.roll()
    return await archived(writer, archive)


async def trim_all(writer, store):
    """Let the archiver of a daemon trim what it may; return what it logged."""
    archiver = archiver_of(writer, archive_in(store), FakeBroker(writer))
    with capture_logs() as logs:
        for _ in range(4):
            try:
                await archiver.step(observed(writer, target_bytes=0))
            except StorageUnavailable:
                continue
    return logs


async def test_rewritten_segments_are_trimmed_like_others(writer, store, archive, tmp_path):
    """The local files have what was taken out; that is no reason to keep them."""
    await filled(writer, archive)
    await rewrite(store, writer, 0, 4, without={0, 5}, tmp_path=tmp_path)

    logs = await trim_all(writer, store)

    assert writer.bases_on_disk == [6]
    assert not [one for one in logs if "differs" in one["event"]]
    after = stored_manifest(store, writer)
    assert await values_in(archive_in(store), after) == {1: b"1", 2: b"2", 3: b"3", 4: b"4"}


async def test_rest_of_a_local_segment_is_compared_as_ever(writer, store, archive, tmp_path):
    """Of a file that the archive has in two pieces, only the one that was rewritten is taken on trust."""
    await filled(writer, archive)
    writer.compact(0, 2, without=())
    await rewrite(store, writer, 0, without={1}, tmp_path=tmp_path)
    # The last byte is of batch 3, in the piece that is as it was.
    writer.flip_byte(0)

    logs = await trim_all(writer, store)
    assert writer.bases_on_disk == [0, 4, 6]
    assert [one["event"] for one in logs if "differs" in one["event"]]

    writer.flip_byte(0)
    await trim_all(writer, store)
    assert writer.bases_on_disk == [6]


async def test_last_piece_of_a_local_segment_may_be_the_rewritten_one(writer, store, archive, tmp_path):
    """What the file has after the last piece that is compared is not taken for too much."""
    await filled(writer, archive)
    writer.compact(0, 2, without=())
    await rewrite(store, writer, 2, without={3}, tmp_path=tmp_path)

    await trim_all(writer, store)

    assert writer.bases_on_disk == [6]


async def test_rewritten_segment_is_no_proof_without_a_history_of_leader_epochs(
    writer, store, archive, tmp_path
):
    """Another leader has written other records at its offsets: nobody else would notice."""
    await filled(writer, archive)
    await rewrite(store, writer, 0, without={0}, tmp_path=tmp_path)
    writer.truncate(0)
    for number in range(6):
        writer.append(b"other" if number < 2 else b"%d" % number)
        if number % 2:
            writer.roll()

    archiver = archiver_of(writer, archive_in(store, writer_id="c3"), FakeBroker(writer), leader_epoch=1)
    for _ in range(4):
        seen = observed(writer, target_bytes=0)
        await archiver.step(replace(seen, log=replace(seen.log, epochs=())))

    assert writer.bases_on_disk == [0, 2, 4, 6]


async def test_batch_over_the_end_of_a_rewritten_piece_is_another_log_s(writer, store, archive, tmp_path):
    """The archive has no such batch: the file stays, and the archiver goes on with all else."""
    await filled(writer, archive)
    await rewrite(store, writer, 0, without={0}, tmp_path=tmp_path)
    writer.truncate(0)
    writer.append(b"0", b"1", b"2", b"3")
    writer.roll()
    writer.append(b"4", b"5")
    writer.closed_segment()

    logs = await trim_all(writer, store)

    assert writer.bases_on_disk[0] == 0
    (difference, *_) = [one["difference"] for one in logs if "differs" in one["event"]]
    assert "is inside the batch from 0 to 3" in difference


async def test_daemon_s_merge_stays_known_for_what_was_rewritten(writer, store, archive, tmp_path):
    """Another broker may hold the log from before it, and lead one day."""
    manifest = await filled(writer, archive)
    await rewrite(store, writer, 2, without={2}, tmp_path=tmp_path)
    limits = MergeLimits(manifest.size_bytes, manifest.size_bytes // 2)

    assert await Merging(store, writer, tmp_path).all_steps(limits) == 1

    after = stored_manifest(store, writer)
    (merged,) = after.segments
    assert merged.is_rewritten
    assert parse_data_key(data_key(writer.identified, merged)) is not None
    assert not (await archive_in(store).verifier.verify(after, deep=True)).faults
    await trim_all(writer, store)
    assert writer.bases_on_disk == [6]


@pytest.mark.parametrize("is_trimmed", [False, True])
async def test_compacted_local_segment_does_not_take_its_place(writer, store, archive, tmp_path, is_trimmed):
    """A broker's cleaner has made the file smaller, or not: it may hold what the job took out."""
    await filled(writer, archive)
    await rewrite(store, writer, 0, 2, without={0, 2}, tmp_path=tmp_path)
    before = stored_manifest(store, writer)
    # Smaller than the archive has it, and as large.
    writer.compact(0, without=[0, 1])
    writer.compact(2, without=[3])
    writer.compact(4, without=[4])
    never = "" if is_trimmed else "a test"

    replaced = await Reuploading(store, writer).step(never_trimmed_because=never)

    after = stored_manifest(store, writer)
    assert replaced == 1
    assert bases(store, writer) == [0, 2, 4]
    assert list(after.segments)[:2] == list(before.segments)[:2]
    assert await values_in(archive_in(store), after) == {1: b"1", 3: b"3", 5: b"5"}
