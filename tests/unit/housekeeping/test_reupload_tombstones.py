"""Re-upload of compacted segments loses no tombstone that still hides something, and no latest record."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from tests.builders import batch
from tests.fakes.archive import SCAN_NUMBERS, archive_in, archived, archiver_of, observed, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import stored_manifest
from tests.golden.make_own_golden import HISTORY_LINK
from tests.unit.housekeeping.test_reupload import NEVER_TRIMMED, Reuploading
from tieringd.archive.archive_reader import Batch
from tieringd.archive.segment_swap import load_rewriting
from tieringd.archiving.tombstone_keeper import TombstoneCut
from tieringd.errors import CorruptDataError
from tieringd.formats.compression import Codec
from tieringd.formats.history_link import encode_history_link
from tieringd.formats.object_keys import history_link_key, rewriting_prefix, topic_key
from tieringd.formats.record_batch import NewRecord, encode_batch, parse_header
from tieringd.formats.records import iter_records
from tieringd.model.manifest_parts import Unsettled
from tieringd.model.segment import RewritingKind
from tieringd.model.tail_cut import cut_back


@pytest.fixture
def writer(tmp_path):
    """Give a log in which a key is written, and deleted in the next segment."""
    writer = LogWriter(tmp_path / "old")
    writer.append(b"secret", keys=[b"k"])
    writer.roll()
    writer.append(b"other", keys=[b"x"])
    writer.append(None, keys=[b"k"])
    writer.roll()
    writer.append(b"last", keys=[b"y"])
    writer.roll()
    return writer


async def trimmed(writer, store):
    """Archive the log, and trim its first segment before a cleaner comes."""
    await archived(writer, archive_in(store))
    writer.log_start_offset = 1
    writer.trim_file(0)


async def archive_gives(store, writer) -> dict[int, bytes | None]:
    return await values_in(archive_in(store), stored_manifest(store, writer))


async def records_of_rewritings(store, writer):
    page = await store.list_page(rewriting_prefix(writer.identified))
    return [
        await load_rewriting(store, writer.identified, one.key, size_bytes=one.size_bytes)
        for one in page.objects
    ]


async def test_tombstone_stays_while_the_archive_has_what_it_hides(store, writer):
    """The cleaner dropped it, as the log below had the key no more; the rest that it dropped goes."""
    await trimmed(writer, store)
    writer.compact(1, without=[1, 2])

    assert await Reuploading(store, writer).step() == 1

    assert await archive_gives(store, writer) == {0: b"secret", 2: None, 3: b"last"}
    manifest = stored_manifest(store, writer)
    (rewriting,) = await records_of_rewritings(store, writer)
    assert rewriting.kind is RewritingKind.COMPACTED
    assert [one.writer_id for one in rewriting.stored] == [manifest.segments[1].writer_id]
    assert (await archive_in(store).verifier.verify(manifest, deep=True)).faults == ()
    assert await Reuploading(store, writer, writer_id="c3").step() == 0


async def test_segment_with_a_kept_tombstone_is_trimmed(store, writer):
    """The file lacks the tombstone, and has nothing that the archive does not have."""
    await trimmed(writer, store)
    writer.compact(1, without=[2])
    await Reuploading(store, writer).step()
    archive = archive_in(store, writer_id="b2")
    await archiver_of(writer, archive, FakeBroker(writer)).step(observed(writer, target_bytes=0))
    assert writer.log_start_offset == 4


async def test_segments_without_a_lost_tombstone_are_copied(store, writer):
    """The file takes the place of its original as it is."""
    await trimmed(writer, store)
    writer.compact(1, without=[1])
    assert await Reuploading(store, writer).step() == 1
    assert await archive_gives(store, writer) == {0: b"secret", 2: None, 3: b"last"}
    assert [one.writer_id for one in stored_manifest(store, writer).segments] == ["a1", "b2", "a1"]


async def test_tombstone_goes_after_what_it_hides(store, writer):
    """The first run goes alone and then the tombstone, if the log has all that the archive has."""
    await archived(writer, archive_in(store))
    writer.compact(0, without=[0])
    writer.compact(1, without=[2])
    reuploading = Reuploading(store, writer)

    assert await reuploading.step() == 1
    assert await archive_gives(store, writer) == {1: b"other", 2: None, 3: b"last"}
    assert await reuploading.step() == 1
    assert await archive_gives(store, writer) == {1: b"other", 3: b"last"}
    assert not any(one.is_rewritten for one in stored_manifest(store, writer).segments)


async def test_tombstone_stays_where_an_older_archive_comes_before(store, writer):
    """The topic was restored without its history, which may hold what the tombstone hides."""
    await archived(writer, archive_in(store))
    key = topic_key(writer.identified)
    link = encode_history_link(HISTORY_LINK)
    await store.put(history_link_key(key), link, crc32c=crc32c(link))
    writer.compact(0, 1, without=[0, 2])
    assert await Reuploading(store, writer).step() == 1
    assert await archive_gives(store, writer) == {1: b"other", 2: None, 3: b"last"}


async def test_election_after_a_reupload_brings_back_what_went(store, tmp_path):
    """The new leader lacks the record that the old one's cleaner dropped another one for."""
    writer = LogWriter(tmp_path / "leader")
    lagging = LogWriter(tmp_path / "lagging")
    for one in (writer, lagging):
        one.append(b"A-old", keys=[b"A"])
        one.append(b"B", keys=[b"B"])
        one.roll()
    writer.append(b"A-new", keys=[b"A"])
    writer.roll()
    await archived(writer, archive_in(store))
    writer.compact(0, without=[0])
    assert await Reuploading(store, writer).step() == 1
    assert await archive_gives(store, writer) == {1: b"B", 2: b"A-new"}
    for one in (writer, lagging):
        one.log_start_offset = 2
        one.trim_file(0)
    lagging.begin_epoch(1)
    lagging.append(b"C", keys=[b"C"])
    lagging.roll()

    archive = archive_in(store, writer_id="c3")
    await archiver_of(lagging, archive, FakeBroker(lagging), leader_epoch=1).step(observed(lagging))

    assert await archive_gives(store, writer) == {0: b"A-old", 1: b"B", 2: b"C"}


async def test_what_is_held_is_released_by_two_scans(store, writer):
    """A log start may come back lower. The second scan may be one that finds nothing new."""
    await archived(writer, archive_in(store))
    writer.compact(0, without=[0])
    assert await Reuploading(store, writer).step() == 1
    assert any(one.is_held for one in stored_manifest(store, writer).retired)
    writer.log_start_offset = 4
    archiver = archiver_of(writer, archive_in(store, writer_id="c3"), FakeBroker(writer))
    seen = observed(writer)
    for _ in range(3):
        await archiver.step(seen)
    assert any(one.is_held for one in archiver.manifest.retired)
    assert not archiver.is_at_rest(seen)
    await archiver.step(seen.renumbered(next(SCAN_NUMBERS)))
    assert not any(one.is_held for one in archiver.manifest.retired)


async def test_what_every_replica_has_is_not_held(store, writer):
    """Nothing trims the log: after an election it would take the place of the archive's tail."""
    await archived(writer, archive_in(store))
    writer.compact(0, without=[0])
    await Reuploading(store, writer).step(**NEVER_TRIMMED)
    manifest = stored_manifest(store, writer)
    assert manifest.unsettled == Unsettled(0, 4)
    assert not any(one.is_held for one in manifest.retired)


async def test_reupload_is_given_up_where_its_winners_are_cut_off(store, writer):
    """The archive was cut back between the copy and the commit."""
    await archived(writer, archive_in(store))
    writer.compact(0, without=[0])
    reuploading = Reuploading(store, writer)
    stored = await reuploading.claim.current(lambda: pytest.fail("there is a manifest"))
    seen = observed(writer)
    (run,) = reuploading.reuploader.plan(stored.existing, seen).reuploads
    change = await reuploading.reuploader.prepare(seen, run)
    stored = await reuploading.claim.commit(stored, cut_back(stored.existing, 1, leader_epoch=0, now_ms=9))
    assert await change.commit(reuploading.claim, stored) is stored


class Left:
    """What a cleaner left of batches, by their base offsets."""

    def __init__(self, batches):
        self._batches = batches

    def take(self, archived):
        left = self._batches.get(archived.base_offset)
        return None if left is None else memoryview(left)


def archived_batch(*records, base_offset=10) -> Batch:
    """Return a batch of (key, value) as the archive has it."""
    values, keys = [value for _, value in records], [key for key, _ in records]
    data = memoryview(batch(base_offset, values, keys=keys, codec=Codec.GZIP))
    return Batch(parse_header(data), data, 0)


def test_batch_keeps_what_the_cleaner_left_and_its_tombstones():
    """Values that went are gone; offsets and the batch's own bounds stay."""
    whole = archived_batch((b"a", b"1"), (b"b", None), (b"c", b"3"), (None, None))
    narrowed = encode_batch(10, [NewRecord(b"3", key=b"c", offset_delta=2)], last_offset_delta=3)
    cut = TombstoneCut(Left({10: narrowed}))
    left = cut.left_of(whole)
    assert [(one.offset, one.key, one.value) for one in iter_records(memoryview(left))] == [
        (11, b"b", None),
        (12, b"c", b"3"),
    ]
    assert (parse_header(left).base_offset, parse_header(left).last_offset) == (10, 13)
    assert (cut.kept_tombstones, cut.removed_records) == (1, 2)


def test_batch_of_which_nothing_is_left_goes():
    """A batch with a tombstone stays."""
    cut = TombstoneCut(Left({}))
    assert cut.left_of(archived_batch((b"a", b"1"))) is None
    assert len(list(iter_records(memoryview(cut.left_of(archived_batch((b"a", b"1"), (b"b", None))))))) == 1
    assert (cut.kept_tombstones, cut.removed_records) == (1, 2)


def test_batch_that_the_cleaner_left_alone_stays_as_it_is():
    """A batch without records stays as well."""
    whole = archived_batch((b"a", b"1"))
    assert TombstoneCut(Left({10: b""})).left_of(whole) is whole.data


def test_records_that_the_archive_does_not_have_are_no_compaction_of_it():
    """The file cannot be what was left of the archived segment: it is not touched."""
    cut = TombstoneCut(Left({10: batch(10, [b"1", b"2"])}))
    with pytest.raises(CorruptDataError, match="does not have"):
        cut.left_of(archived_batch((b"a", b"1")))
