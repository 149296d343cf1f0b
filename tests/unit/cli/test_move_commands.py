"""`tieringd archive copy` and `move`, from one directory to another, as an operator does it."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from tests.support.daemon import directory_config, write_config
from tests.unit.cli.commands import TOPIC, TOPIC_ID, invoked, tieringd
from tieringd.config import load_config
from tieringd.daemon.archive import opened_archive
from tieringd.errors import ConfigError
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.object_keys import TopicKey
from tieringd.metrics import Metrics
from tieringd.policies.topic_lifecycle import moved_away


@pytest.fixture
def archived(own_site):
    """Give an archived log, alone."""
    assert tieringd("run", "--once", "--config", own_site.config).exit_code == 0
    return own_site


@pytest.fixture
def elsewhere(own_site):
    """Give the configuration of another directory for the same log, where an archive was begun."""
    config = write_config(
        own_site.root / "elsewhere.yaml",
        directory_config([own_site.root / "logs"], own_site.root / "elsewhere", own_site.root / "state"),
    )
    invoked("archive", "init", "-c", config)
    return config


def contents(config) -> tuple[bytes, list]:
    described = invoked("archive", "describe", TOPIC, "-c", config, "-f", "json").json()
    records = invoked("read", TOPIC, "-p", "0", "--archive-only", "-c", config).output
    return records, [(row["start_offset"], row["next_offset"], row["size_bytes"]) for row in described]


def test_moved_archive_goes_on_where_the_configuration_says(archived, elsewhere):
    """The same records are read. The old configuration archives nothing more, and says why."""
    before = contents(archived.config)
    done = invoked("archive", "move", "--to", elsewhere, "-c", archived.config, "--verify", "-f", "json")
    outcome = done.json()
    (row,) = outcome["partitions"]
    assert (row["state"], row["copied_objects"], row["next_offset"]) == ("moved", 4, 24)
    assert (outcome["verified"], outcome["faults"]) == (True, [])
    assert outcome["target"] == f"file://{archived.root / 'elsewhere'}"
    assert "switch: " in done.errors

    assert contents(elsewhere) == contents(archived.config) == before
    old = tieringd("run", "--once", "--config", archived.config)
    assert old.exit_code == 1
    assert f"the archive was moved to {outcome['target']}" in old.errors
    assert tieringd("run", "--once", "--config", elsewhere).exit_code == 0
    (listed,) = invoked("archive", "topics", "-c", archived.config, "-f", "json").json()
    assert listed["remark"] == f"moved to {outcome['target']}"


@pytest.mark.parametrize("has_run_there", [False, True])
def test_archive_that_is_moved_back_goes_on(archived, elsewhere, has_run_there):
    """An archive that is moved away and back is archived into again, and the other bucket is closed."""
    before = contents(archived.config)
    invoked("archive", "move", "--to", elsewhere, "-c", archived.config)
    if has_run_there:
        assert tieringd("run", "--once", "--config", elsewhere).exit_code == 0
    back = invoked("archive", "move", "--to", archived.config, "-c", elsewhere, "--verify", "-f", "json")
    assert [row["state"] for row in back.json()["partitions"]] == ["moved"]
    done = tieringd("run", "--once", "--config", archived.config)
    assert done.exit_code == 0, done.errors
    assert contents(archived.config) == before
    assert tieringd("run", "--once", "--config", elsewhere).exit_code == 1


def test_source_is_deleted_only_when_asked(archived, elsewhere):
    """A second call with --delete-source leaves a mark in the source, and nothing else."""
    move = ("archive", "move", "--to", elsewhere, "-c", archived.config, "-f", "json")
    assert invoked(*move).json()["purged_topics"] == 0
    before = contents(elsewhere)
    assert len(archived.objects("*.log*")) == 4
    assert invoked(*move, "--delete-source").json()["purged_topics"] == 1
    assert archived.objects("*.log*") == archived.objects("manifest*") == []
    (listed,) = invoked("archive", "topics", "-c", archived.config, "-f", "json").json()
    assert listed["lifecycle"] == "purged"
    assert contents(elsewhere) == before


def test_two_names_of_one_directory_are_no_move(archived):
    """A move would close the only copy, and --delete-source would delete it."""
    alias = archived.root / "alias"
    alias.symlink_to(archived.archive)
    config = write_config(
        archived.root / "alias.yaml",
        directory_config([archived.root / "logs"], alias, archived.root / "state"),
    )
    before = contents(archived.config)
    for command in ("copy", "move"):
        with pytest.raises(ConfigError, match="two names of one place"):
            invoked("archive", command, "--to", config, "-c", archived.config)
    assert contents(archived.config) == before
    assert archived.objects("tieringd-probe/*") == []
    assert tieringd("run", "--once", "--config", archived.config).exit_code == 0


def test_archive_of_another_host_is_no_target(archived, elsewhere, tmp_path):
    """Both hosts have the default cluster id: their topics would meet in the target."""
    other = write_config(
        tmp_path / "other.yaml",
        directory_config([archived.root / "logs"], archived.root / "elsewhere", tmp_path / "other"),
    )
    assert tieringd("run", "--once", "--config", other).exit_code == 0
    with pytest.raises(ConfigError, match=r"is already that of a host .*nothing was copied"):
        invoked("archive", "move", "--to", elsewhere, "-c", archived.config)


def in_source(site, work):
    """Do something to the source's bucket, as another process would; return what it gives."""

    async def opened():
        async with opened_archive(
            load_config(site.config, environ={}), Metrics(), writer_id="test"
        ) as archive:
            return await work(archive)

    return asyncio.run(opened())


def test_source_that_another_topic_goes_on_from_is_not_deleted(archived, elsewhere):
    """The one that stays would lose its history; the refusal names it."""
    invoked("archive", "move", "--to", elsewhere, "-c", archived.config)
    (listed,) = invoked("archive", "topics", "-c", archived.config, "-f", "json").json()
    key = TopicKey(listed["cluster"], TOPIC, TOPIC_ID)
    user = TopicKey("other", "restored", "r" * 22)
    in_source(archived, lambda archive: archive.history.link(HistoryLink(user, key, ((0, 5),))))
    with pytest.raises(ConfigError, match=r"topic restored .* continues the archive of"):
        invoked("archive", "move", TOPIC, "--to", elsewhere, "-c", archived.config, "--delete-source")
    assert len(archived.objects("*.log*")) == 4
    (listed,) = invoked("archive", "topics", "-c", archived.config, "-f", "json").json()
    assert listed["lifecycle"] == "live"


def test_interrupted_deletion_of_the_source_goes_on(archived, elsewhere):
    """A half-deleted source is not compared any more, and the rest of it goes."""
    move = ("archive", "move", TOPIC, "--to", elsewhere, "-c", archived.config, "-f", "json")
    assert invoked(*move).json()["purged_topics"] == 0
    (listed,) = invoked("archive", "topics", "-c", archived.config, "-f", "json").json()
    key = TopicKey(listed["cluster"], TOPIC, TOPIC_ID)
    now_ms = time.time_ns() // 1_000_000
    begun = partial(moved_away, now_ms=now_ms, by="copy-interrupted")
    in_source(archived, lambda archive: archive.manifests.change_topic(key, begun))
    archived.objects("*.log")[0].unlink()

    outcome = invoked(*move, "--delete-source").json()

    assert (outcome["purged_topics"], outcome["partitions"], outcome["faults"]) == (1, [], [])
    assert archived.objects("*.log*") == archived.objects("manifest*") == []
    (listed,) = invoked("archive", "topics", "-c", archived.config, "-f", "json").json()
    assert listed["lifecycle"] == "purged"


def test_copy_leaves_the_source_open(archived, elsewhere):
    """Both hold the same, and uploads go on in the source; a second copy has nothing to do."""
    copy = ("archive", "copy", TOPIC, "--to", elsewhere, "-c", archived.config, "--deep", "-f", "json")
    assert [row["copied_objects"] for row in invoked(*copy).json()["partitions"]] == [4]
    assert contents(elsewhere) == contents(archived.config)
    assert [row["copied_objects"] for row in invoked(*copy).json()["partitions"]] == [0]
    assert tieringd("run", "--once", "--config", archived.config).exit_code == 0


def test_object_that_is_missing_in_the_target_is_found_by_verify(archived, elsewhere):
    """The exit code is 1, and the fault names the partition."""
    copy = ("archive", "copy", "--to", elsewhere, "-c", archived.config, "--verify")
    assert invoked(*copy).exit_code == 0
    next((archived.root / "elsewhere").rglob("*.log")).unlink()
    done = invoked(*copy)
    assert done.exit_code == 1
    assert f"fault: {TOPIC}-0" in done.output


def test_same_place_is_refused(archived):
    """There would be nothing to copy, and closing the source would close the target."""
    with pytest.raises(ConfigError, match="both configurations name file://"):
        invoked("archive", "move", "--to", archived.config, "-c", archived.config)
    assert TOPIC_ID in str(invoked("archive", "topics", "-c", archived.config).output)
