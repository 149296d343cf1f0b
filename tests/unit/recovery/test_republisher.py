"""Writing archived records elsewhere: in order, in blocks with their mark, and on from where it ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.archive import archived
from tests.fakes.log_writer import LogWriter
from tieringd.errors import BrokerUnavailable, ConfigError, ObjectNotFound
from tieringd.formats.compression import Codec
from tieringd.formats.object_keys import data_key, index_key
from tieringd.formats.recovery_mark import RecoveryMark
from tieringd.model.manifest_parts import Gap
from tieringd.model.tail_cut import cut_back
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


async def elected(writer, archive, directory, *, cut, epoch, segments):
    """Simulate an unclean election: the archive is cut back, and gets *segments* of the new leader's log."""

    async def deposed(manifest):
        return cut_back(manifest, cut, leader_epoch=epoch, now_ms=0)

    await archive.manifests.edit(writer.identified, deposed)
    leader = LogWriter(directory / f"epoch{epoch}", first_offset=cut)
    leader.begin_epoch(epoch)
    for _ in range(segments):
        leader.closed_segment(*(b"new%d" % (leader.next_offset + each) for each in range(3)))
    await archived(leader, archive)
    return leader


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


@pytest.mark.parametrize(
    ("segments", "newest", "reason"),
    [
        (1, None, "the archive ends at offset 9, and the recovery has read up to offset 12"),
        (1, (), "from offset 6 on, .*have been replaced by those of the leader of epoch 1"),
        (3, (), "from offset 6 on, .*have been replaced by those of the leader of epoch 1"),
    ],
)
async def test_archive_that_was_cut_back_below_the_mark_is_refused(
    writer, archive, elsewhere, tmp_path, *, segments, newest, reason
):
    """An election replaced records that are written: no run goes on, however far the archive grows."""
    for _ in range(4):
        writer.closed_segment()
    await archived(writer, archive)
    await republished(writer, archive, elsewhere)
    elsewhere.mark = replace(elsewhere.mark, newest_replacement=newest)
    blocks, mark = list(elsewhere.blocks), elsewhere.mark
    await elected(writer, archive, tmp_path, cut=6, epoch=1, segments=segments)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"{reason}.*begin again"):
            await republished(writer, archive, elsewhere)
    assert (elsewhere.blocks, elsewhere.mark) == (blocks, mark)


async def test_archive_that_was_cut_back_before_or_behind_what_is_written_goes_on(
    writer, archive, elsewhere, tmp_path
):
    """Only a replacement below the mark, of after the mark, matters."""
    for _ in range(4):
        writer.closed_segment()
    await archived(writer, archive)
    leader = await elected(writer, archive, tmp_path, cut=6, epoch=1, segments=2)
    await republished(writer, archive, elsewhere)
    leader.closed_segment(b"never written")
    await archived(leader, archive)
    await elected(writer, archive, tmp_path, cut=12, epoch=2, segments=1)
    await republished(writer, archive, elsewhere)
    done = await republished(writer, archive, elsewhere)
    new = [b"new%d" % offset for offset in range(6, 15)]
    assert elsewhere.values == [*list(writer.values().values())[:6], *new]
    assert (done.mark.next_offset, done.mark.records) == (15, 15)


async def test_archive_that_is_cut_back_while_it_is_written_is_told(writer, archive, elsewhere, tmp_path):
    """The run ends with the error at once. It does not wait for the next run."""
    for _ in range(4):
        writer.closed_segment()
    await archived(writer, archive)
    write = elsewhere.write

    async def write_and_elect(partition, records, mark):
        mark = await write(partition, records, mark)
        await elected(writer, archive, tmp_path, cut=6, epoch=1, segments=3)
        return mark

    elsewhere.write = write_and_elect
    with pytest.raises(ConfigError, match="from offset 6 on"):
        await republished(writer, archive, elsewhere)


async def test_mark_of_an_earlier_release_goes_on_and_learns_the_replacements(
    writer, archive, elsewhere, tmp_path
):
    """The mark does not say what had been replaced. The first run stores it, also without a new record."""
    for _ in range(4):
        writer.closed_segment()
    await archived(writer, archive)
    await republished(writer, archive, elsewhere)
    await elected(writer, archive, tmp_path, cut=6, epoch=1, segments=2)
    elsewhere.mark = replace(elsewhere.mark, newest_replacement=None)
    done = await republished(writer, archive, elsewhere)
    assert (done.records, done.mark.newest_replacement) == (0, (6, 11, 1))
    await elected(writer, archive, tmp_path, cut=9, epoch=2, segments=3)
    with pytest.raises(ConfigError, match=r"from offset 9 on.*epoch 2"):
        await republished(writer, archive, elsewhere)


async def test_header_names_that_are_not_utf8_are_counted(writer, archive, elsewhere, monkeypatch):
    """The reader replaces such bytes, so the target gets other names: the result says how many."""
    writer.closed_segment()
    await archived(writer, archive)
    read = archive.records.records
    names = {0: ("r\ufffdsum\ufffd", "plain"), 2: ("\ufffd",)}

    async def with_headers(*arguments, **options):
        async for one in read(*arguments, **options):
            yield one._replace(headers=tuple((name, b"") for name in names.get(one.offset, ())))

    monkeypatch.setattr(archive.records, "records", with_headers)
    assert (await republished(writer, archive, elsewhere)).changed_names == 2
    assert (await republished(writer, archive, elsewhere)).changed_names == 0


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
