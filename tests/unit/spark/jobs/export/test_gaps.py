"""What an archive lacks: the export stops before it writes anything, or goes on and says so."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.fakes.dying_store import Killed
from tests.support.exports import ArchivedLogs, ParquetDirectory, attempted, exported, in_this_process
from tieringd.errors import TieringError
from tieringd.formats.object_keys import manifest_key, topic_key
from tieringd.model.manifest_parts import Gap
from tieringd.model.tail_cut import cut_back
from tieringd.spark.jobs.export.job import report_of
from tieringd.spark.jobs.report import Table


@pytest.fixture
def logs(tmp_path):
    logs = ArchivedLogs.made(tmp_path / "source")
    yield logs
    logs.bucket.close()


@pytest.fixture
def directory(tmp_path):
    directory = ParquetDirectory.made(tmp_path / "target")
    yield directory
    directory.bucket.close()


async def test_gap_stops_the_export_before_anything_is_written(logs, directory):
    """The message says which offsets, and what to do."""
    await logs.fill(1)
    await logs.edit(lambda manifest: manifest.with_gap(Gap(6, 9, "the disk was full", 1)))

    with pytest.raises(TieringError, match=r"orders-0 offsets 6 to 9: a gap.*the disk was full.*Allow gaps"):
        exported(logs, directory.topic())
    assert directory.paths() == []

    outcome = exported(logs, directory.topic(), fails_on_gap=False)
    assert outcome.reached == {0: 10}
    assert directory.seen() == logs.written()
    report = report_of([outcome])
    assert report.figures["lost_offsets"] == 4
    assert report.tables[1] == Table(
        "lost offsets",
        ("topic", "partition", "from_offset", "next_offset", "reason"),
        (("orders", 0, 6, 10, "a gap in the archive: the disk was full"),),
    )
    assert exported(logs, directory.topic()).lost == []


async def test_first_export_begins_where_the_archive_does(logs, directory):
    """Offsets that expired before do not count as lost."""
    await logs.fill(3)
    await logs.edit(lambda manifest: manifest.expired(1, now_ms=1))

    outcome = exported(logs, directory.topic())

    assert outcome.written[0].portion.from_offset == 6
    assert {offset for _, offset, _ in directory.seen()} == set(range(6, 18))


@pytest.mark.parametrize("expired", [2, 4])
async def test_what_expired_before_it_was_exported_is_missed(logs, directory, expired):
    """Expired offsets are missed, even if nothing is left at all."""
    await logs.fill(1)
    exported(logs, directory.topic())
    await logs.fill(3)
    await logs.edit(lambda manifest: manifest.expired(expired, now_ms=1))

    with pytest.raises(TieringError, match="expired in the archive before they were exported"):
        exported(logs, directory.topic())

    outcome = exported(logs, directory.topic(), fails_on_gap=False)
    assert [(one.from_offset, one.next_offset) for one in outcome.lost] == [(6, expired * 6)]
    assert {offset for _, offset, _ in directory.seen()} == set(range(6)) | set(range(expired * 6, 24))


async def test_loss_is_counted_once_however_many_rounds_follow(tmp_path, directory):
    """A partition of which nothing is left to be exported has a loss in each round of the others."""
    logs = ArchivedLogs.made(tmp_path / "two", partitions=2)
    await logs.fill(1)
    exported(logs, directory.topic())
    await logs.fill(3)
    await logs.edit(lambda manifest: manifest.expired(4, now_ms=1))

    outcome = exported(logs, directory.topic(), fails_on_gap=False, portion_bytes=1, round_bytes=1)

    assert outcome.commits > 1
    assert report_of([outcome]).figures["lost_offsets"] == 18
    logs.bucket.close()


@pytest.mark.parametrize("is_archived", [True, False])
async def test_partition_that_was_empty_at_the_first_run_is_missed_when_it_expires(
    tmp_path, directory, is_archived
):
    """The export had begun: it holds the partition at 0, whether it has a manifest yet or not."""
    logs = ArchivedLogs.made(tmp_path / "two", partitions=2)
    first, second = logs.writers
    first.closed_segment(b"first")
    logs.writers = logs.writers if is_archived else [first]
    await logs.archive()
    logs.writers = [first, second]
    await logs.services.manifests.ensure_topic(topic_key(first.identified), partition_count=2)
    assert exported(logs, directory.topic()).reached == {0: 1, 1: 0}
    for value in (b"a", b"b", b"c"):
        second.closed_segment(value)
    await logs.archive()
    await logs.edit(lambda manifest: manifest.expired(2, now_ms=1), 1)

    with pytest.raises(TieringError, match="orders-1 offsets 0 to 1: expired in the archive"):
        exported(logs, directory.topic())

    outcome = exported(logs, directory.topic(), fails_on_gap=False)
    assert [(str(one.partition), one.from_offset, one.next_offset) for one in outcome.lost] == [
        ("orders-1", 0, 2)
    ]
    logs.bucket.close()


async def test_partition_that_is_added_later_is_missed_when_it_expires(tmp_path, directory):
    """All of it was to be exported, although the export did not hold it before."""
    logs = ArchivedLogs.made(tmp_path / "two", partitions=2)
    first, second = logs.writers
    first.closed_segment(b"first")
    logs.writers = [first]
    await logs.archive()
    assert exported(logs, directory.topic()).reached == {0: 1}
    logs.writers = [first, second]
    await logs.services.manifests.ensure_topic(topic_key(first.identified), partition_count=2)
    for value in (b"a", b"b", b"c"):
        second.closed_segment(value)
    await logs.archive()
    await logs.edit(lambda manifest: manifest.expired(2, now_ms=1), 1)

    with pytest.raises(TieringError, match="orders-1 offsets 0 to 1: expired in the archive"):
        exported(logs, directory.topic())
    logs.bucket.close()


async def test_topic_that_is_empty_at_the_first_run_is_begun_all_the_same(tmp_path, directory):
    """Records that come and expire before the second run count as lost."""
    logs = ArchivedLogs.made(tmp_path / "two", partitions=2)
    await logs.archive()

    assert exported(logs, directory.topic()).commits == 1
    assert directory.topic().checkpoint().state.offsets == {0: 0, 1: 0}
    assert exported(logs, directory.topic()).commits == 0
    logs.bucket.close()


async def test_loss_of_all_there_was_is_told_by_one_run(logs, directory):
    """The export passes it, and the next run does not tell it again."""
    await logs.fill(1)
    exported(logs, directory.topic())
    await logs.fill(3)
    await logs.edit(lambda manifest: manifest.expired(4, now_ms=1))

    outcome = exported(logs, directory.topic(), fails_on_gap=False)

    assert ([(one.from_offset, one.next_offset) for one in outcome.lost], outcome.reached) == (
        [(6, 24)],
        {0: 24},
    )
    assert exported(logs, directory.topic()).lost == []


@pytest.mark.parametrize("fails_on_gap", [True, False])
async def test_gap_that_arises_while_a_round_is_read_is_told(logs, directory, fails_on_gap):
    """An unclean election cuts the archive back, and the new leader's log begins later."""
    await logs.fill(2)

    def run(work, portions):
        logs.bucket.run(logs.depose(6, begins_at=10))
        return in_this_process(work, portions)

    outcome = attempted(logs, directory.topic(), run=run, fails_on_gap=fails_on_gap)

    if fails_on_gap:
        assert "orders-0 offsets 6 to 9: the archive has a recorded gap there" in str(outcome.error)
        assert outcome.commits == 0
    else:
        assert [(one.from_offset, one.next_offset) for one in outcome.lost] == [(6, 10)]
        assert directory.seen().keys() == {
            *((0, offset, b"0-%d" % offset) for offset in range(6)),
            *((0, offset, b"new%d" % offset) for offset in range(10, 12)),
        }


async def test_partition_that_has_lost_its_manifest_is_a_fault(tmp_path, directory):
    """The others are exported all the same."""
    logs = ArchivedLogs.made(tmp_path / "two", partitions=2)
    await logs.fill(1)
    exported(logs, directory.topic())
    await logs.fill(1)
    await logs.services.store.delete_many([manifest_key(logs.writers[1].identified)])

    outcome = exported(logs, directory.topic())

    assert outcome.reached == {0: 12, 1: 6}
    (fault,) = outcome.faults
    assert fault.startswith(
        "orders-1 was exported up to offset 5, but the archive no longer has its manifest"
    )
    logs.bucket.close()


class Outrun:
    """A target on which another run commits the same round first, once."""

    def __init__(self, topic, other):
        self._topic = topic
        self._other = other

    def __getattr__(self, name):
        return getattr(self._topic, name)

    def begin(self, checkpoint, state, portions):
        if self._other is None:
            return self._topic.begin(checkpoint, state, portions)
        self._other, other = None, self._other
        other()
        return self._topic.begin(checkpoint, state, portions)


async def test_loss_of_a_round_that_another_run_did_is_that_run_s(logs, directory):
    """The run that did the round reports its loss, and the other run does not."""
    await logs.fill(1)
    await logs.edit(lambda manifest: manifest.with_gap(Gap(6, 9, "the disk was full", 1)))
    others = []

    def other():
        others.append(exported(logs, directory.topic(), fails_on_gap=False))

    outcome = exported(logs, Outrun(directory.topic(), other), fails_on_gap=False)

    assert (outcome.reached, outcome.commits) == ({0: 10}, 0)
    assert report_of([outcome]).figures["lost_offsets"] == 0
    assert report_of(others).figures["lost_offsets"] == 4


async def test_loss_of_a_round_that_a_killed_run_began_is_told_by_the_run_that_ends_it(logs, directory):
    """The killed run had no time to report it. A loss after that round is reported with the next one."""
    await logs.fill(1)
    await logs.edit(lambda manifest: manifest.with_gap(Gap(6, 9, "the disk was full", 1)))

    def killed(_work, _portions):
        raise Killed

    with suppress(Killed):
        exported(logs, directory.topic(), fails_on_gap=False, run=killed)
    await logs.edit(lambda manifest: manifest.with_gap(Gap(10, 99, "later", 2)))
    outcome = exported(logs, directory.topic(), fails_on_gap=False)

    assert [one.portion.next_offset for one in outcome.written] == [10, 100]
    assert [(one.from_offset, one.next_offset) for one in outcome.lost] == [(6, 10), (10, 100)]


async def test_what_expires_while_it_is_exported_is_told(logs, directory):
    """Retention does not wait for the tasks of a round."""
    await logs.fill(3)

    def run(work, portions):
        logs.bucket.run(logs.edit(lambda manifest: manifest.expired(2, now_ms=1)))
        return in_this_process(work, portions)

    outcome = exported(logs, directory.topic(), fails_on_gap=False, run=run)

    assert [(one.from_offset, one.next_offset) for one in outcome.lost] == [(0, 12)]
    assert {offset for _, offset, _ in directory.seen()} == set(range(12, 18))


async def test_gap_that_expires_while_it_is_exported_is_told_once(logs, directory):
    """The gap was seen when the round was planned."""
    await logs.fill(1)
    await logs.edit(lambda manifest: manifest.with_gap(Gap(6, 9, "the disk was full", 1)))

    def run(work, portions):
        logs.bucket.run(logs.edit(lambda manifest: manifest.expired(1, now_ms=1)))
        return in_this_process(work, portions)

    outcome = exported(logs, directory.topic(), fails_on_gap=False, run=run)

    assert [(one.from_offset, one.next_offset) for one in outcome.lost] == [(6, 10), (0, 6)]


async def test_archive_that_ends_before_what_was_exported_is_an_error(logs, directory):
    """An unclean election: the target has records that the log does not have any more."""
    await logs.fill(2)
    exported(logs, directory.topic())
    await logs.edit(lambda manifest: cut_back(manifest, 6, leader_epoch=1, now_ms=1))

    with pytest.raises(TieringError, match="exported up to offset 11, but the archive ends at 5"):
        exported(logs, directory.topic())


async def test_replacement_of_what_was_exported_is_a_fault_of_the_next_report(logs, directory):
    """The archive is as long as before by now, and holds other records."""
    await logs.fill(2)
    exported(logs, directory.topic())
    manifest = logs.topic().partitions[0]
    segment = manifest.segments[1]
    later_ms = directory.topic().checkpoint().state.committed_at_ms + 1
    await logs.edit(
        lambda found: cut_back(found, 6, leader_epoch=1, now_ms=later_ms).appended([segment]),
    )
    await logs.fill(1)

    report = report_of([exported(logs, directory.topic())])

    (fault,) = report.faults
    assert "orders-0 offsets 6 to 11 were replaced by another leader's records" in fault
    assert report_of([exported(logs, directory.topic())]).faults == ()


async def test_report_says_what_was_done_for_each_partition(tmp_path, directory):
    """Offsets, records, files and bytes; and the same in all."""
    logs = ArchivedLogs.made(tmp_path / "two", partitions=2)
    await logs.fill(1)
    exported(logs, directory.topic())
    for number, writer in enumerate(logs.writers):
        for _ in range(number):
            writer.closed_segment(b"more")
    await logs.archive()

    report = report_of([exported(logs, directory.topic())])

    (table,) = report.tables
    assert [row[:6] for row in table.rows] == [
        ("orders", 0, 6, 6, 0, 0),
        ("orders", 1, 6, 7, 1, 1),
    ]
    assert report.figures["records"] == report.figures["files"] == report.figures["commits"] == 1
    assert report.figures["file_bytes"] == table.rows[1][6] > 0
    assert '"next_offset": 7' in report.as_json()
    logs.bucket.close()
