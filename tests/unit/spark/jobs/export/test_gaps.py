"""What an archive lacks: the export stops before it writes anything, or goes on and says so."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.fakes.dying_store import Killed
from tests.support.exports import ArchivedLogs, ParquetDirectory, exported, in_this_process
from tieringd.errors import TieringError
from tieringd.model.manifest_parts import Gap
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


async def edit(logs, change):
    """Replace the manifest by what *change* makes of it."""

    async def changed(manifest):
        return change(manifest)

    await logs.services.manifests.edit(logs.writers[0].identified, changed)


async def test_gap_stops_the_export_before_anything_is_written(logs, directory):
    """The message says which offsets, and what to do."""
    await logs.fill(1)
    await edit(logs, lambda manifest: manifest.with_gap(Gap(6, 9, "the disk was full", 1)))

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
    """What expired before is nobody's loss."""
    await logs.fill(3)
    await edit(logs, lambda manifest: manifest.expired(1, now_ms=1))

    outcome = exported(logs, directory.topic())

    assert outcome.written[0].portion.from_offset == 6
    assert {offset for _, offset, _ in directory.seen()} == set(range(6, 18))


@pytest.mark.parametrize("expired", [2, 4])
async def test_what_expired_before_it_was_exported_is_missed(logs, directory, expired):
    """Also where nothing is left at all."""
    await logs.fill(1)
    exported(logs, directory.topic())
    await logs.fill(3)
    await edit(logs, lambda manifest: manifest.expired(expired, now_ms=1))

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
    await edit(logs, lambda manifest: manifest.expired(4, now_ms=1))

    outcome = exported(logs, directory.topic(), fails_on_gap=False, portion_bytes=1, round_bytes=1)

    assert outcome.commits > 1
    assert report_of([outcome]).figures["lost_offsets"] == 18
    logs.bucket.close()


class Outrun:
    """A target on which another run commits the same round first, once."""

    def __init__(self, topic, other):
        self._topic = topic
        self._other = other

    def __getattr__(self, name):
        return getattr(self._topic, name)

    def begin(self, standing, state, portions):
        if self._other is None:
            return self._topic.begin(standing, state, portions)
        self._other, other = None, self._other
        other()
        return self._topic.begin(standing, state, portions)


async def test_loss_of_a_round_that_another_run_did_is_that_run_s(logs, directory):
    """Each is told by one of them."""
    await logs.fill(1)
    await edit(logs, lambda manifest: manifest.with_gap(Gap(6, 9, "the disk was full", 1)))
    others = []

    def other():
        others.append(exported(logs, directory.topic(), fails_on_gap=False))

    outcome = exported(logs, Outrun(directory.topic(), other), fails_on_gap=False)

    assert (outcome.reached, outcome.commits) == ({0: 10}, 0)
    assert report_of([outcome]).figures["lost_offsets"] == 0
    assert report_of(others).figures["lost_offsets"] == 4


async def test_loss_of_a_round_that_a_killed_run_began_is_told_by_the_run_that_ends_it(logs, directory):
    """The killed one had no time for it; what is lost after that round is told with the next one."""
    await logs.fill(1)
    await edit(logs, lambda manifest: manifest.with_gap(Gap(6, 9, "the disk was full", 1)))

    def killed(_work, _portions):
        raise Killed

    with suppress(Killed):
        exported(logs, directory.topic(), fails_on_gap=False, run=killed)
    await edit(logs, lambda manifest: manifest.with_gap(Gap(10, 99, "later", 2)))
    outcome = exported(logs, directory.topic(), fails_on_gap=False)

    assert [one.portion.next_offset for one in outcome.written] == [10, 100]
    assert [(one.from_offset, one.next_offset) for one in outcome.lost] == [(6, 10), (10, 100)]


async def test_what_expires_while_it_is_exported_is_told(logs, directory):
    """Retention does not wait for the tasks of a round."""
    await logs.fill(3)

    def run(work, portions):
        logs.bucket.run(edit(logs, lambda manifest: manifest.expired(2, now_ms=1)))
        return in_this_process(work, portions)

    outcome = exported(logs, directory.topic(), fails_on_gap=False, run=run)

    assert [(one.from_offset, one.next_offset) for one in outcome.lost] == [(0, 12)]
    assert {offset for _, offset, _ in directory.seen()} == set(range(12, 18))


async def test_gap_that_expires_while_it_is_exported_is_told_once(logs, directory):
    """It was seen when the round was planned."""
    await logs.fill(1)
    await edit(logs, lambda manifest: manifest.with_gap(Gap(6, 9, "the disk was full", 1)))

    def run(work, portions):
        logs.bucket.run(edit(logs, lambda manifest: manifest.expired(1, now_ms=1)))
        return in_this_process(work, portions)

    outcome = exported(logs, directory.topic(), fails_on_gap=False, run=run)

    assert [(one.from_offset, one.next_offset) for one in outcome.lost] == [(6, 10), (0, 6)]


async def test_archive_that_ends_before_what_was_exported_is_an_error(logs, directory):
    """An unclean election: the target has records that the log does not have any more."""
    await logs.fill(2)
    exported(logs, directory.topic())
    await edit(logs, lambda manifest: manifest.cut_back(6, leader_epoch=1, now_ms=1))

    with pytest.raises(TieringError, match="exported up to offset 11, and the archive ends at 5"):
        exported(logs, directory.topic())


async def test_replacement_of_what_was_exported_is_a_fault_of_the_next_report(logs, directory):
    """The archive is as long as before by now, and holds other records."""
    await logs.fill(2)
    exported(logs, directory.topic())
    manifest = logs.topic().partitions[0]
    segment = manifest.segments[1]
    later_ms = directory.topic().standing().state.committed_at_ms + 1
    await edit(
        logs,
        lambda found: found.cut_back(6, leader_epoch=1, now_ms=later_ms).appended([segment]),
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
