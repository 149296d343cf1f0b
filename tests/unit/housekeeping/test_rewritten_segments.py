"""A job took records out of the archive: the daemon trims its log all the same, and puts nothing back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in, archived, archiver_of, observed, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.metric_values import value_of
from tests.unit.housekeeping.test_merging import Merging
from tests.unit.housekeeping.test_reupload import Reuploading
from tieringd.archive.segment_rewriter import SegmentRewriter
from tieringd.archive.segment_swap import SegmentSwap
from tieringd.errors import LocalFileError, StorageUnavailable
from tieringd.formats.object_keys import data_key, parse_data_key
from tieringd.housekeeping.healer import IndexRebuilder
from tieringd.housekeeping.reupload import ATTEMPTS_MAX
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
    """Only the rewritten one of two pieces of a file is taken on trust. The other is compared."""
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
    """The rest of the file after the last compared piece is not taken for too much."""
    await filled(writer, archive)
    writer.compact(0, 2, without=())
    await rewrite(store, writer, 2, without={3}, tmp_path=tmp_path)

    await trim_all(writer, store)

    assert writer.bases_on_disk == [6]


async def test_rewritten_segment_is_no_proof_without_a_history_of_leader_epochs(
    writer, store, archive, tmp_path
):
    """Another leader has written other records at its offsets, and no other check notices that."""
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
    # What was replaced is held until no election can bring it back, and nothing is merged over its bounds.
    swap = SegmentSwap(store, archive.manifests, now_ms=lambda: 8, target_manifest_bytes=1 << 20)
    await swap.release(writer.identified)
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


async def follow(store, writer):
    """Let a daemon's re-upload do all it finds; return how often it replaced something."""
    reuploading = Reuploading(store, writer, writer_id="c3")
    counts = []
    while not counts or counts[-1]:
        counts.append(await reuploading.step())
    assert (
        reuploading.reuploader.plan(stored_manifest(store, writer), observed(writer)).beside_rewritten == ()
    )
    return sum(counts)


@pytest.mark.parametrize(
    ("without", "parts", "left"),
    [
        pytest.param({0, 4}, 2, {1, 3, 5}, id="beginnings"),
        pytest.param({1, 5}, 2, {0, 3, 4}, id="ends"),
        pytest.param({2, 3, 5}, 1, {0, 1, 3, 4}, id="all that the file has of what was rewritten"),
        pytest.param({4}, 1, {0, 1, 3, 5}, id="one is as it was"),
    ],
)
async def test_file_that_joins_what_was_rewritten_with_others_is_trimmed(  # noqa: PLR0917 - fixtures
    writer, store, archive, tmp_path, without, parts, left
):
    """The others get what the cleaner left of them; what the job took out stays out, though it is there."""
    await filled(writer, archive)
    await rewrite(store, writer, 2, without={2}, tmp_path=tmp_path)
    rewritten = stored_manifest(store, writer).segments[1]
    writer.compact(0, 2, 4, without=without)
    await trim_all(writer, store)
    assert writer.bases_on_disk == [0, 6]

    assert await follow(store, writer) == parts

    after = stored_manifest(store, writer)
    assert (bases(store, writer), after.segments[1]) == ([0, 2, 4], rewritten)
    assert await values_in(archive_in(store), after) == {number: b"%d" % number for number in left}
    assert not (await archive_in(store).verifier.verify(after, deep=True)).faults
    await trim_all(writer, store)
    assert writer.bases_on_disk == [6]


@pytest.mark.parametrize("without", [{0, 1, 4}, {0, 4, 5}])
async def test_nothing_takes_the_place_of_a_segment_of_which_the_file_has_nothing(
    writer, store, archive, tmp_path, without
):
    """The segment's own file may be lost, so the archive keeps what may be all there is. So does the disk."""
    await filled(writer, archive)
    await rewrite(store, writer, 2, without={2}, tmp_path=tmp_path)
    writer.compact(0, 2, 4, without=without)

    assert await follow(store, writer) == 1

    found = await values_in(archive_in(store), stored_manifest(store, writer))
    emptied = 0 if 1 in without else 4
    assert {emptied, emptied + 1} <= found.keys()
    await trim_all(writer, store)
    assert writer.bases_on_disk == [0, 6]


async def test_log_that_is_not_trimmed_is_not_compared_in_parts(writer, store, archive, tmp_path):
    """Nothing waits for it."""
    await filled(writer, archive)
    await rewrite(store, writer, 2, without={2}, tmp_path=tmp_path)
    writer.compact(0, 2, 4, without={0})
    assert await Reuploading(store, writer).step(never_trimmed_because="a test") == 0


async def test_batch_over_the_end_of_a_segment_replaces_nothing(writer, store, archive, tmp_path):
    """
    A batch over a segment's end is of another log, because no cleaner joins batches.

    It counts as a failure, and replaces nothing.
    """
    before = await filled(writer, archive)
    await rewrite(store, writer, 2, without={2}, tmp_path=tmp_path)
    writer.truncate(0)
    writer.append(b"0")
    writer.append(b"1", b"2")
    writer.append(b"3")
    writer.append(b"4")
    writer.append(b"5")
    writer.roll()
    reuploading = Reuploading(store, writer)

    assert await reuploading.step() == 0

    assert stored_manifest(store, writer).segments[0] == before.segments[0]
    failures = reuploading.metrics.reuploaded.failures.labels("orders", "CorruptDataError")
    assert value_of(failures) == 1
    assert await reuploading.step() == 0
    assert value_of(failures) == 1


def flip_last_byte(data):
    return data[:-1] + bytes([data[-1] ^ 0xFF])


def zero_second_batch(data):
    size_bytes = len(data) // 4
    return data[:size_bytes] + bytes(size_bytes) + data[2 * size_bytes :]


@pytest.mark.parametrize(
    "damage",
    [
        flip_last_byte,
        zero_second_batch,
        pytest.param(lambda data: data[:-5], id="torn"),
        pytest.param(lambda data: data[: len(data) // 4].ljust(len(data), b"\0"), id="zeros to the end"),
    ],
)
async def test_damaged_file_replaces_nothing_that_is_whole(writer, store, archive, tmp_path, damage):
    """A torn batch ends the scan of an active segment, but not that of a part of a closed one."""
    await filled(writer, archive)
    await rewrite(store, writer, 4, without={4}, tmp_path=tmp_path)
    writer.compact(0, 2, 4, without={4, 5})
    path = writer.log_path(0)
    path.write_bytes(damage(path.read_bytes()))
    reuploading = Reuploading(store, writer, writer_id="c3")

    assert await reuploading.step() == 0

    found = await values_in(archive_in(store), stored_manifest(store, writer))
    assert found == {number: b"%d" % number for number in (0, 1, 2, 3, 5)}
    failures = reuploading.metrics.reuploaded.failures.labels("orders", "CorruptDataError")
    assert value_of(failures) == 1
    assert (
        reuploading.reuploader.plan(stored_manifest(store, writer), observed(writer)).beside_rewritten == ()
    )


async def test_file_that_cannot_be_read_just_now_is_not_given_up(writer, store, archive, tmp_path):
    """Each of its parts has attempts of its own."""
    for number in range(2 * ATTEMPTS_MAX + 4):
        writer.append(b"%d" % number)
        if number % 2:
            writer.roll()
    await archived(writer, archive)
    closed = [one.base_offset for one in writer.local_log().segments][:-1]
    await rewrite(store, writer, closed[-1], without={closed[-1]}, tmp_path=tmp_path)
    writer.compact(*closed, without=closed[:-1])
    reuploading = Reuploading(store, writer)
    manifest, seen = stored_manifest(store, writer), observed(writer)
    (file,) = reuploading.reuploader.plan(manifest, seen).beside_rewritten
    parts = await reuploading.reuploader.parts_to_go(file)
    assert len(parts) > ATTEMPTS_MAX
    path = writer.log_path(0)
    away = path.rename(path.with_suffix(".away"))
    for part in parts:
        with pytest.raises(LocalFileError):
            await reuploading.reuploader.prepare(seen, part)
    away.rename(path)

    assert reuploading.reuploader.plan(manifest, seen).beside_rewritten == (file,)


async def test_file_that_stays_is_read_once_though_the_log_goes_on(writer, store, archive, tmp_path):
    """Nothing is planned while a closed segment waits for its upload, and what was read is not forgotten."""
    await filled(writer, archive)
    await rewrite(store, writer, 2, without={2}, tmp_path=tmp_path)
    writer.compact(0, 2, 4, without={0, 1})
    reuploading = Reuploading(store, writer, writer_id="a1")
    while await reuploading.step():
        pass
    assert not reuploading.reuploader.plan(stored_manifest(store, writer), observed(writer)).beside_rewritten

    writer.closed_segment(b"more")
    assert not reuploading.reuploader.plan(stored_manifest(store, writer), observed(writer)).beside_rewritten
    await archived(writer, archive)

    assert not reuploading.reuploader.plan(stored_manifest(store, writer), observed(writer)).beside_rewritten


async def test_index_of_a_part_is_built_again_from_the_log(writer, store, archive, tmp_path):
    """The index is built from the log, even if the part has a hole at its end."""
    await filled(writer, archive)
    await rewrite(store, writer, 2, without={2}, tmp_path=tmp_path)
    writer.compact(0, 2, 4, without={1, 5})
    assert await follow(store, writer) == 2
    rebuilder = IndexRebuilder(store, archive.reader, archive.manifests.spillovers, layout=archive.layout)

    found = [
        await rebuilder.from_log(writer.identified, one, writer.local_log()) is not None
        for one in stored_manifest(store, writer).segments
    ]

    assert found == [True, False, True]


def write_any(writer, random) -> dict[int, list[int]]:
    """Write a few segments, and return the batches of records in each, by their base offsets."""
    batches: dict[int, list[int]] = {}
    open_producers: set[int] = set()
    for _ in range(random.randint(3, 6)):
        base_offset = writer.next_offset
        batches[base_offset] = []
        for _ in range(random.randint(2, 5)):
            producer_id = random.choice([None, None, 7, 8])
            values = [random.randbytes(random.randint(0, 40)) for _ in range(random.randint(1, 3))]
            batches[base_offset].append(writer.append(*values, producer_id=producer_id))
            open_producers |= {producer_id} - {None}
            if open_producers and random.random() < 0.4:
                end_any(writer, random, open_producers)
        writer.roll()
    while open_producers:
        end_any(writer, random, open_producers)
    return batches


def end_any(writer, random, open_producers):
    """End one of the transactions that are open, well or not."""
    producer_id = random.choice(sorted(open_producers))
    open_producers.remove(producer_id)
    random.choice([writer.commit, writer.abort])(producer_id)


def clean_any(writer, random, batches, rewritten):
    """Join the segments in a few files; of those that are not *rewritten* something is left."""
    bases = sorted(batches)
    while bases:
        group, bases = bases[: (count := random.randint(1, len(bases)))], bases[count:]
        without: set[int] = set()
        for base in group:
            most = len(batches[base]) - (base not in rewritten)
            without.update(random.sample(batches[base], k=random.randint(0, most)))
        writer.compact(*group, without=without)


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_is_rewritten_and_joined_reads_as_it_should(writer, store, archive, tmp_path, seed):
    """
    Pieces that were not rewritten read as the broker gives them, in both isolation levels, for any log.

    Transactions go over the ends of segments, with any rewriting and any cleaning.
    """
    random = Random(seed)
    batches = write_any(writer, random)
    await archived(writer, archive)
    chosen = sorted(random.sample(sorted(batches), k=random.randint(1, len(batches) - 1)))
    cut = {random.choice(batches[base]) for base in chosen}
    await rewrite(store, writer, *chosen, without=cut, tmp_path=tmp_path)
    rewritten = stored_manifest(store, writer)
    clean_any(writer, random, batches, chosen)

    await follow(store, writer)

    after = stored_manifest(store, writer)
    assert after.faults() == ()
    assert not (await archive_in(store).verifier.verify(after, deep=True)).faults
    pieces = [one for one in rewritten.segments if not one.is_rewritten]
    plain = {offset for one in pieces for offset in range(one.base_offset, one.next_offset)}
    for committed in (False, True):
        found = await values_in(archive_in(store), after, read_committed=committed)
        expected = await values_in(archive_in(store), rewritten, read_committed=committed)
        local = writer.values(read_committed=committed)
        assert {at: value for at, value in found.items() if at in plain} == {
            at: value for at, value in local.items() if at in plain
        }
        assert {at: value for at, value in found.items() if at not in plain} == {
            at: value for at, value in expected.items() if at not in plain
        }
    await trim_all(writer, store)
    assert writer.bases_on_disk == [after.next_offset]
