"""`tieringd run --once`: one pass, and an exit code that says whether anything is left."""

from __future__ import annotations

from tests.fakes.log_writer import LogWriter
from tests.support.daemon import directory_config, write_config
from tests.unit.cli.commands import TOPIC, tieringd


def test_run_once_archives_everything_and_then_has_nothing_to_do(own_site):
    """The first pass uploads both closed segments, the second none, and both exit 0."""
    first = tieringd("run", "--once", "-c", own_site.config)
    assert (first.exit_code, first.output) == (0, "")
    assert "1 partitions: 2 segments uploaded, 0 trimmed, 0 partitions unfinished" in first.errors
    assert len(own_site.objects("*.log")) == len(own_site.objects("*.log.index")) == 2

    second = tieringd("run", "--once", "-c", own_site.config)
    assert (second.exit_code, second.output) == (0, "")
    assert "1 partitions: 0 segments uploaded, 0 trimmed, 0 partitions unfinished" in second.errors


def test_run_once_exits_1_and_names_the_partition_that_is_left(own_site):
    """A corrupt segment is not uploaded; what is before it is, and the exit code tells."""
    path = own_site.partition_directory / f"{12:020d}.log"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    done = tieringd("run", "--once", "-c", own_site.config)

    assert (done.exit_code, done.output) == (1, "")
    assert "1 segments uploaded, 0 trimmed, 1 partitions unfinished" in done.errors
    assert f"  {TOPIC}-0: " in done.errors
    assert len(own_site.objects("*.log")) == 1


def test_topic_with_the_longest_name_is_archived_and_read(tmp_path):
    """Kafka takes names of 249 characters. Every command finds the topic in a file store."""
    topic = "t._-" + "9" * 245
    writer = LogWriter(tmp_path / "logs", topic)
    base_offset = writer.closed_segment()
    config = write_config(
        tmp_path / "t.yaml", directory_config([tmp_path / "logs"], tmp_path / "archive", tmp_path / "state")
    )
    assert tieringd("run", "--once", "-c", config).exit_code == 0
    assert tieringd("run", "--once", "-c", config).exit_code == 0
    (row,) = tieringd("archive", "topics", "-c", config, "-f", "json").json()
    assert (row["topic"], row["segments"]) == (topic, 1)
    assert [row["topic"] for row in tieringd("recover", "list", "-c", config, "-f", "json").json()] == [topic]
    read = tieringd("read", topic, "-p", "0", "--archive-only", "-c", config)
    assert (read.exit_code, len(read.output.splitlines())) == (0, writer.local_log().segments[1].base_offset)
    assert base_offset == 0
    scrubbed = tieringd("archive", "scrub", "--deep", "-c", config, "-f", "json")
    assert scrubbed.exit_code == 0, scrubbed.output
    assert tieringd("topic", "pause", topic, "-c", config).exit_code == 0
