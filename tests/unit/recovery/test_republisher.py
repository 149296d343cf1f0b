"""Writing archived records elsewhere: in order, in blocks with their mark, and on from where it ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.archive import archived
from tieringd.errors import BrokerUnavailable, ObjectNotFound
from tieringd.formats.compression import Codec
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.recovery_mark import RecoveryMark
from tieringd.model.manifest_parts import Gap
from tieringd.recovery.republisher import BlockLimits, Republisher, first_codec

BEGIN = RecoveryMark(0, "target", "read_committed")


class Elsewhere:
    """A cluster that takes whole blocks, until it does not."""

    def __init__(self) -> None:
        self.blocks: list[list[bytes]] = []
        self.mark = BEGIN
        self.blocks_left = 10**6

    @property
    def values(self) -> list[bytes]:
        return [value for block in self.blocks for value in block]

    async def write(self, partition, records, mark):
        if not self.blocks_left:
            raise BrokerUnavailable("gone")
        self.blocks_left -= 1
        self.blocks.append([one.value for one in records])
        self.mark = replace(mark, records=mark.records + len(records))
        return self.mark


@pytest.fixture
def elsewhere():
    return Elsewhere()


async def republished(writer, archive, elsewhere, *, read_committed=True, limits=None, **options):
    republisher = Republisher(
        archive.manifests, archive.records, archive.history, block_limits=limits or BlockLimits()
    )
    return await republisher.republish(
        writer.identified, elsewhere.mark, elsewhere, read_committed=read_committed, **options
    )


async def test_records_come_in_order_and_blocks_are_bounded(writer, archive, elsewhere):
    """A block ends at its number of records or bytes, whichever comes first. The last one may be small."""
    limits = BlockLimits(size_bytes=3_000, records=4)
    for _ in range(3):
        writer.closed_segment()
    writer.closed_segment(b"x" * 2_900, b"y", b"z")
    await archived(writer, archive)
    told = []

    done = await republished(
        writer,
        archive,
        elsewhere,
        limits=limits,
        on_records=lambda *one: told.append((len(one[1]), one[2])),
    )

    assert elsewhere.values == list(writer.values().values())
    assert [len(block) for block in elsewhere.blocks] == [4, 4, 2, 2]
    assert told == [(4, 4), (4, 8), (2, 10), (2, 12)]
    assert (done.records, done.mark.next_offset, done.gaps) == (12, 12, ())


async def test_attempt_goes_on_where_the_last_one_ended(writer, archive, elsewhere):
    """Nothing twice, nothing left out, and the count is of all attempts."""
    by_two = {"limits": BlockLimits(records=2)}
    for _ in range(4):
        writer.closed_segment()
    await archived(writer, archive)
    for blocks in (1, 0, 3):
        elsewhere.blocks_left = blocks
        with pytest.raises(BrokerUnavailable):
            await republished(writer, archive, elsewhere, **by_two)
    elsewhere.blocks_left = 10**6
    done = await republished(writer, archive, elsewhere, **by_two)
    assert elsewhere.values == list(writer.values().values())
    assert (done.records, done.mark.records, done.mark.next_offset) == (4, 12, 12)
    again = await republished(writer, archive, elsewhere, **by_two)
    assert (again.records, again.mark) == (0, done.mark)


@pytest.mark.parametrize("read_committed", [True, False])
async def test_aborted_records_are_left_out_and_passed(writer, archive, elsewhere, read_committed):
    """The mark alone moves to the archive's end if nothing visible follows."""
    writer.append(b"kept")
    writer.append(b"aborted", producer_id=7)
    writer.abort(7)
    end = writer.roll()
    await archived(writer, archive)
    done = await republished(writer, archive, elsewhere, read_committed=read_committed)
    assert elsewhere.values == ([b"kept"] if read_committed else [b"kept", b"aborted"])
    assert done.mark.next_offset == elsewhere.mark.next_offset == end


async def test_archive_without_a_visible_record_moves_the_mark_alone(writer, archive, elsewhere):
    """The next attempt does not read it again."""
    writer.append(b"aborted", producer_id=7)
    writer.abort(7)
    end = writer.roll()
    await archived(writer, archive)
    done = await republished(writer, archive, elsewhere)
    assert (elsewhere.blocks, done.mark.next_offset, done.records) == ([[]], end, 0)
    await republished(writer, archive, elsewhere)
    assert elsewhere.blocks == [[]]


async def test_object_that_is_missing_ends_it_after_what_comes_before(writer, archive, store, elsewhere):
    """A missing object ends the run after the records before it. The next run goes on when it is back."""
    for _ in range(3):
        writer.closed_segment()
    manifest = await archived(writer, archive)
    key = data_key(writer.identified, manifest.segments[1])
    data, info = store.remove(key)
    by_three = {"limits": BlockLimits(records=3)}
    with pytest.raises(ObjectNotFound):
        await republished(writer, archive, elsewhere, **by_three)
    assert elsewhere.mark.next_offset == 3
    store.place(key, data, info)
    await republished(writer, archive, elsewhere, **by_three)
    assert elsewhere.values == list(writer.values().values())


async def test_gaps_are_told(writer, archive, elsewhere):
    """Offsets that are lost are skipped, and are in the result."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    gap = Gap(3, 9, "lost", 0)
    stored = await archive.manifests.load(writer.identified)
    await archive.manifests.commit(stored, manifest.with_gap(gap), leader_epoch=0)
    done = await republished(writer, archive, elsewhere)
    assert (done.gaps, done.mark.next_offset) == ((gap,), 10)


async def test_codec_of_a_partition_is_that_of_its_newest_segment(writer, archive):
    """An archive without a batch has none."""
    manifest = await archived(writer, archive)
    assert await first_codec(archive.remote_log, archive.reader, manifest) is Codec.NONE
    writer.closed_segment()
    manifest = await archived(writer, archive)
    assert await first_codec(archive.remote_log, archive.reader, manifest) is Codec.NONE


async def test_codec_of_a_segment_that_has_gone_is_none(writer, archive, store):
    """A segment whose index has gone has no known codec: retention during a recovery is no failure."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    await store.delete_many([index_key(writer.identified, manifest.segments[0])])
    assert await first_codec(archive.remote_log, archive.reader, manifest) is Codec.NONE
