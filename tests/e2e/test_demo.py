"""`tieringd demo`: it runs as a newcomer would run it, and it would notice if something were wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.daemon import directory_config, run_json, run_well, write_config
from tieringd.cli.demo.comparison import Comparison, compare
from tieringd.cli.demo.demo_session import summary
from tieringd.cli.demo.journal import Journal
from tieringd.cli.demo.view import partition_views
from tieringd.cli.demo.writer import LogDirectoryWriter, PartitionWriter
from tieringd.config import load_config
from tieringd.daemon.archive import opened_archive
from tieringd.metrics import Metrics
from tieringd.model.partition import TopicPartition

_EMBEDDED = Path(__file__).parents[2] / "config" / "embedded.yaml"
_ORDERS = TopicPartition("orders", 0)


def test_demo_verifies_and_leaves_an_archive_behind(tmp_path, monkeypatch):
    """The demo ends well, says what it verified, and leaves an archive that can be inspected as it says."""
    directory = tmp_path / "demo"
    output = run_well(
        "demo", "--config", str(_EMBEDDED), "--directory", str(directory), "--seconds", "4"
    ).decode()
    assert "Verified\n" in output
    assert "with exit code 0" in output
    monkeypatch.setenv("TIERINGD_DEMO_DIR", str(directory))
    partitions = run_json("archive", "describe", "orders", "--config", str(_EMBEDDED))
    assert [row["partition"] for row in partitions] == [0, 1]


async def test_writer_whose_time_is_over_closes_a_segment_of_each_partition_first(tmp_path):
    """A machine that stands still leaves the demo something to archive, and the pages something to read."""
    journal = Journal([_ORDERS, TopicPartition("orders", 1)])
    await LogDirectoryWriter(tmp_path / "logs", journal, seconds=0, pause_seconds=0).write()
    assert all(one.segments for one in journal.partitions.values())


@pytest.fixture
def journal():
    """Give the journal of one partition."""
    return Journal([_ORDERS])


@pytest.fixture
def config(tmp_path, journal):
    """Give a written and archived log, its configuration as a file."""
    writer = PartitionWriter(tmp_path / "logs" / "orders-0", _ORDERS, journal, seed=1)
    for _ in range(120):
        writer.append()
    writer.close()
    document = directory_config([tmp_path / "logs"], tmp_path / "archive", tmp_path / "state")
    path = write_config(tmp_path / "tieringd.yaml", document)
    run_well("run", "--once", "--config", str(path))
    return path


async def compared(config: Path, journal: Journal) -> Comparison:
    loaded, total = load_config(config, environ={}), Comparison()
    async with opened_archive(loaded, Metrics()) as archive:
        for view in await partition_views(loaded, archive, journal):
            await compare(archive, view, journal.partitions[view.partition], total)
    return total


async def test_comparison_finds_everything_that_was_written(config, journal):
    """Archived and local records together are the journal's, and closed segments are byte for byte equal."""
    total = await compared(config, journal)
    assert total.differences == []
    assert total.archived_records + total.local_records == len(journal.partitions[_ORDERS].records)
    assert (total.segments, total.equal_segments) == (len(journal.partitions[_ORDERS].segments),) * 2
    assert summary(total, seconds=1).startswith("Verified")


@pytest.mark.leaves_damage("the changed byte stays")
async def test_comparison_notices_a_changed_byte(config, journal, tmp_path):
    """A stored segment with one other byte is a difference."""
    (stored, *_) = sorted((tmp_path / "archive").rglob("0-*.log"))
    data = bytearray(stored.read_bytes())
    # In a record. A batch's CRC does not cover the first bytes of its header, and times move the batches.
    data[-10] ^= 1
    stored.write_bytes(data)
    with pytest.raises(Exception, match=r"CRC") as raised:
        await compared(config, journal)
    assert stored.name in str(raised.value)


async def test_comparison_notices_a_record_that_was_not_written(config, journal):
    """A record that is not the journal's, and one that is nowhere, are differences."""
    records = journal.partitions[_ORDERS].records
    records[5] = bytes(16)
    records[len(records)] = bytes(16)
    total = await compared(config, journal)
    assert [one.partition(":")[2] for one in total.differences] == [
        " the record at offset 5 differs from the one that was written",
        " 1 records are neither in the archive nor on the local disk",
    ]
    assert summary(total, seconds=1).startswith("DIFFERENCES")
