"""The records of a portion: a range of offsets, in an archive that does not stand still."""

from __future__ import annotations

import pytest

from tests.support.exports import ArchivedLogs
from tieringd.errors import CorruptDataError, ObjectNotFound, TieringError
from tieringd.formats.object_keys import data_key
from tieringd.model.tail_cut import cut_back
from tieringd.spark.jobs.export.plan import Portion
from tieringd.spark.jobs.export.work import Losses, Work


@pytest.fixture
def logs(tmp_path):
    logs = ArchivedLogs.made(tmp_path / "source")
    yield logs
    logs.bucket.close()


def portion_of(logs, from_offset, next_offset):
    return Portion(logs.writers[0].identified, from_offset, next_offset, 0)


def offsets(batches):
    """Return the offsets of batches."""
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


def read(logs, from_offset, next_offset, *, isolation="read_committed", fails_on_gap=True, lost=None):
    """Return the batches of a range; *lost* takes the offsets that the archive has no more."""
    portion = portion_of(logs, from_offset, next_offset)
    losses = Losses(portion, fails_on_gap, [] if lost is None else lost)
    return Work(lambda: logs.bucket, None, isolation, fails_on_gap).batches(portion, losses)


async def test_portion_holds_just_its_offsets(logs):
    """
    A portion has just its offsets, wherever it begins and ends.

    Its bounds may lie between segments, between batches or inside one.
    """
    await logs.fill(3)
    for from_offset in range(18):
        for next_offset in range(from_offset + 1, 19):
            found = offsets(read(logs, from_offset, next_offset))
            assert found == list(range(from_offset, next_offset))


async def test_isolation_holds_in_every_portion(logs):
    """Isolation holds, even if a transaction began before the portion or its marker is after it."""
    (writer,) = logs.writers
    for _ in range(3):
        writer.append(b"gone", b"gone too", producer_id=7)
        writer.append(b"kept", producer_id=8)
        writer.roll()
    writer.abort(7)
    writer.commit(8)
    writer.roll()
    await logs.archive()
    committed = writer.values(read_committed=True)

    for from_offset in range(writer.next_offset):
        for next_offset in range(from_offset + 1, writer.next_offset + 1):
            span = range(from_offset, next_offset)
            assert offsets(read(logs, from_offset, next_offset)) == [one for one in span if one in committed]
            every = offsets(read(logs, from_offset, next_offset, isolation="read_uncommitted"))
            assert every == [one for one in span if one in writer.values()]


async def test_segments_that_are_merged_meanwhile_are_found_again(logs):
    """Records that were read are not read again, however often the segments are merged."""
    await logs.fill(4)
    reading = read(logs, 1, 24)
    found = offsets([next(reading)])
    await logs.merge()
    await logs.merge()
    await logs.merge()

    found += offsets(reading)

    assert found == list(range(1, 24))


async def test_segment_that_is_merged_while_it_is_read_is_gone_on_with_where_it_was(logs):
    """The segment is larger than what is fetched ahead, and nothing of it is read twice."""
    (writer,) = logs.writers
    for _ in range(6):
        writer.append(*[b"v" * 500] * 20_000)
    writer.closed_segment(b"end of the first")
    writer.closed_segment(b"second")
    await logs.archive()
    reading = read(logs, 0, writer.next_offset)
    found = offsets([next(reading)])
    await logs.merge()

    found += offsets(reading)

    assert found == list(range(writer.next_offset))


async def test_object_that_stays_away_is_an_error(logs):
    """The manifest still names it after several looks."""
    await logs.fill(2)
    segment = logs.topic().partitions[0].segments[1]
    key = data_key(logs.writers[0].identified, segment)
    (logs.config.cloud_storage_file_root / key).unlink()

    with pytest.raises(ObjectNotFound):
        offsets(read(logs, 0, 12))


async def test_damaged_bytes_are_an_error_that_names_them(logs):
    """Nothing of the batch is exported."""
    await logs.fill(1)
    segment = logs.topic().partitions[0].segments[0]
    key = data_key(logs.writers[0].identified, segment)
    path = logs.config.cloud_storage_file_root / key
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)

    with pytest.raises(CorruptDataError) as caught:
        offsets(read(logs, 0, 6))
    assert caught.value.source == key


async def test_what_expires_while_it_is_read_is_missed_only_where_that_is_allowed(logs):
    """Retention does not wait for an export."""
    await logs.fill(3)

    async def expire(manifest):
        return manifest.expired(1, now_ms=1)

    await logs.services.manifests.edit(logs.writers[0].identified, expire)

    with pytest.raises(TieringError, match="offsets 2 to 5: the archive begins at offset 6"):
        offsets(read(logs, 2, 18))
    lost = []
    assert offsets(read(logs, 2, 18, fails_on_gap=False, lost=lost)) == list(range(6, 18))
    assert [(one.from_offset, one.next_offset) for one in lost] == [(2, 6)]
    assert offsets(read(logs, 2, 4, fails_on_gap=False, lost=lost)) == []
    assert (lost[1].from_offset, lost[1].next_offset) == (2, 4)


async def test_archive_that_was_cut_back_is_an_error(logs):
    """The planned segments are gone, and it is unknown what takes their place."""
    await logs.fill(2)

    async def cut(manifest):
        return cut_back(manifest, 6, leader_epoch=1, now_ms=1)

    await logs.services.manifests.edit(logs.writers[0].identified, cut)

    with pytest.raises(TieringError, match="no longer reaches offset 11"):
        offsets(read(logs, 0, 12))
