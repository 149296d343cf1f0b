"""One topic that cannot be read: commands report it, and go on with the others."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.fakes.log_writer import LogWriter
from tests.support.daemon import directory_config, write_config
from tests.unit.cli.commands import invoked, tieringd

DAMAGED, SOUND = "audit", "orders"
"""The damaged topic comes first in every listing."""
IDS = {DAMAGED: "AAAAAAAAAAAAAAAAAAAAAQ", SOUND: "AAAAAAAAAAAAAAAAAAAAAg"}


class Place:
    """An archive of two topics, one of which cannot be read, and the log that it was made of."""

    def __init__(self, root, *, damaged_file):
        self.root, self.archive = root, root / "archive"
        for topic, topic_id in IDS.items():
            LogWriter(root / "logs", topic, topic_id=topic_id).closed_segment()
        self.config = write_config(
            root / "t.yaml", directory_config([root / "logs"], self.archive, root / "state")
        )
        assert self.run().exit_code == 0
        (path,) = (one for one in self.archive.rglob(damaged_file) if DAMAGED in str(one))
        path.write_bytes(path.read_bytes()[:-20])

    def run(self):
        return tieringd("run", "--once", "--config", self.config)

    def topics_with(self, name):
        """Return the topics that have an object of this name."""
        return {topic for topic in (*IDS, "zebra") for one in self.archive.rglob(name) if topic in str(one)}


@pytest.fixture(params=["topic_manifest.json", "manifest"])
def place(tmp_path, request):
    return Place(tmp_path, damaged_file=request.param)


def assert_left_out(done):
    assert done.exit_code == 1
    assert f"topic {DAMAGED} of cluster " in done.errors
    assert f"topic {SOUND} of cluster " not in done.errors
    assert "1 topics are left out" in done.errors


@pytest.mark.parametrize("command", [("archive", "topics"), ("recover", "list")])
def test_listing_has_the_others(place, command):
    """The exit code and standard error say that one is left out."""
    done = invoked(*command, "-c", place.config, "-f", "json")
    assert_left_out(done)
    assert [row["topic"] for row in json.loads(done.output)] == [SOUND]


@pytest.mark.parametrize("command", [("archive", "topics"), ("archive", "verify"), ("recover", "list")])
def test_unreadable_topic_is_not_taken_for_a_mistyped_one(place, command):
    """The bucket has a topic of that name, and the reason why it is left out is told."""
    done = invoked(*command, DAMAGED, SOUND, "-c", place.config, "-f", "json")
    assert_left_out(done)
    assert "no topic" not in done.errors
    assert "no archived topic" not in done.errors


def test_verify_checks_the_others(place):
    """The other topics are checked and sound, and yet the command does not report success."""
    done = invoked("archive", "verify", "-c", place.config, "-f", "json")
    assert_left_out(done)
    report = json.loads(done.output)
    assert ([row["topic"] for row in report["partitions"]], report["faults"]) == ([SOUND], 0)


def test_sound_topic_is_read_without_the_other(place):
    """A command for one topic, or for some, does not load the others."""
    pattern = ("recover", "list", "--topics", SOUND, "-c", place.config, "-f", "json")
    assert [row["topic"] for row in invoked(*pattern).json()] == [SOUND]
    assert invoked("archive", "describe", SOUND, "-c", place.config).exit_code == 0


@pytest.mark.parametrize("chosen", [("--topics", ".*"), (DAMAGED, SOUND)], ids=" ".join)
def test_restore_of_all_restores_the_others(place, tmp_path, chosen):
    """The broker that comes back has what is sound."""
    logs = tmp_path / "new" / "logs"
    logs.mkdir(parents=True)
    (logs / "meta.properties").write_text("version=1\ncluster.id=new\nnode.id=1\n")
    for topic in IDS:
        LogWriter(logs, topic, topic_id="AAAAAAAAAAAAAAAAAAAAAw")
    done = invoked("recover", "directory", logs, *chosen, "-c", place.config, "-f", "json")
    assert_left_out(done)
    assert [row["topic"] for row in json.loads(done.output)] == [SOUND]
    assert any(one.stat().st_size for one in (logs / f"{SOUND}-0").glob("*.log"))


def test_move_of_all_moves_the_others(tmp_path):
    """The damaged one stays where it is, and is named once."""
    place = Place(tmp_path, damaged_file="topic_manifest.json")
    target = write_config(
        tmp_path / "target.yaml",
        directory_config([tmp_path / "logs"], tmp_path / "target", tmp_path / "state"),
    )
    invoked("archive", "init", "-c", target)
    done = invoked("archive", "move", "--to", target, "-c", place.config, "-f", "json")
    assert_left_out(done)
    assert [row["topic"] for row in json.loads(done.output)["partitions"]] == [SOUND]
    assert done.errors.count(f"topic {DAMAGED} of cluster ") == 1


def test_daemon_archives_new_topics_beside_it(tmp_path):
    """A topic that comes later in the order has its topic manifest before its segments can be trimmed."""
    place = Place(tmp_path, damaged_file="topic_manifest.json")
    shutil.copytree(tmp_path / "logs" / f"{SOUND}-0", tmp_path / "logs" / "zebra-0")
    (tmp_path / "logs" / "zebra-0" / "partition.metadata").write_text(
        "version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAABA"
    )
    done = place.run()
    assert "zebra" in place.topics_with("topic_manifest.json")
    assert "zebra" in place.topics_with("*.log*")
    assert f"topic {DAMAGED}: " in done.errors
