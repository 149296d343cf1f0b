"""`tieringd run --once`: one pass, and an exit code that says whether anything is left."""

from __future__ import annotations

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
