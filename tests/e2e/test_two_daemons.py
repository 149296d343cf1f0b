"""Two daemons on one partition: one commits, the other stops and says whose the partition is."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from tests.e2e.archives import (
    archived_bytes,
    archived_manifest,
    assert_whole,
    closed_segments,
    stored_segments,
)
from tests.e2e.conftest import BUCKET
from tests.e2e.log_files import RECORDS, add_segments, write_partition
from tests.support.daemon import (
    directory_config,
    run_command,
    running_daemon,
    s3_properties,
    write_config,
)


@pytest.fixture
def config_of(seaweedfs, prefix, tmp_path):
    """
    Give a function that writes the configuration of a daemon with a state directory of its own.

    All have the id of one host, as copies of a machine have: other hosts are refused at their start.
    """

    def write(name: str, *, state: str):
        config = directory_config([tmp_path / "logs"], tmp_path, tmp_path / state)
        del config["cloud_storage_file_root"]
        (tmp_path / state).mkdir(exist_ok=True)
        host = {"version": 1, "id": "00ff" * 8, "is_first_start": False}
        (tmp_path / state / "host.json").write_text(json.dumps(host))
        return write_config(
            tmp_path / f"{name}.yaml", config | s3_properties(seaweedfs, bucket=BUCKET, prefix=prefix)
        )

    return write


def test_second_writer_is_fenced_and_names_the_first(config_of, objects, topic, tmp_path):
    """
    One of two daemons under one leader epoch goes on. The other stops and names the writer.

    The first commit of another process is taken over: it may be the last one of a process that has ended. The
    second one of the same process is not. So one of three commits fences, in any order.
    """
    directory = write_partition(tmp_path / "logs", f"{topic}-0", segments=2)
    with ExitStack() as running:
        daemons = []
        for name in ("one", "two"):
            daemons.append(running.enter_context(running_daemon(config_of(name, state=name))))
            daemons[-1].until_next_offset(topic, 2 * RECORDS)
        # Both know the same manifest, so both want each commit that follows.
        segments = 2
        while not any(daemon.events("archiver stopped") for daemon in daemons):
            assert segments < 5, "three commits fenced neither daemon"
            add_segments(directory, segments=1)
            segments += 1
            until_met(daemons, topic, segments * RECORDS)
        loser, winner = daemons if daemons[0].events("archiver stopped") else daemons[::-1]
        winner_id = winner.events("starting")[0]["writer_id"]
        winner.until_next_offset(topic, segments * RECORDS)
        loser.until_rounds(3)

        (stopped,) = loser.events("archiver stopped")
        assert f"another daemon (writer {winner_id}) archives {topic}-0" in stopped["reason"]
        assert loser.metric("tieringd_fenced_partitions") == 1
        assert winner_id in loser.partition(topic)["fault"]
        assert not winner.events("archiver stopped")

        durable = len(loser.events("segment durable"))
        add_segments(directory, segments=2)
        winner.until_next_offset(topic, (segments + 2) * RECORDS)
        assert len(loser.events("segment durable")) == durable

    manifest = archived_manifest(objects, topic)
    assert manifest.writer_id == winner_id
    assert stored_segments(objects, manifest) == closed_segments(directory)
    assert archived_bytes(config_of("three", state="three"), topic) == b"".join(
        closed_segments(directory).values()
    )
    assert_whole(config_of("three", state="three"))


def until_met(daemons, topic, next_offset):
    """Wait until each daemon has stopped, or knows of a manifest that ends at *next_offset*."""
    for daemon in daemons:
        daemon.until(
            lambda daemon=daemon: (
                daemon.events("archiver stopped") or daemon.next_offset(topic) == next_offset
            ),
            f"it stops, or knows an archive up to {next_offset}",
        )


def test_second_daemon_with_the_same_state_directory_is_refused(config_of, topic, tmp_path):
    """A second daemon on the same state directory exits 2 and says why; the first one goes on."""
    directory = write_partition(tmp_path / "logs", f"{topic}-0", segments=1)
    path = config_of("one", state="shared")
    with running_daemon(path) as first:
        for options in ((), ("--once",)):
            second = run_command("run", *options, "--config", str(path))
            assert second.returncode == 2
            assert (
                f"error: another tieringd runs with state_directory {tmp_path / 'shared'}"
                in second.stderr.decode()
            )
        add_segments(directory, segments=1)
        first.until_next_offset(topic, 2 * RECORDS)


def test_state_directory_of_a_killed_daemon_is_free(config_of, topic, tmp_path):
    """A killed daemon leaves no lock behind."""
    write_partition(tmp_path / "logs", f"{topic}-0", segments=1)
    path = config_of("one", state="shared")
    with running_daemon(path) as first:
        first.until_next_offset(topic, RECORDS)

    again = run_command("run", "--once", "--config", str(path))

    assert again.returncode == 0, again.stderr.decode()
