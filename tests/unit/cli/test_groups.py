"""`tieringd groups`: consumer groups of a bucket, without an endpoint."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fakes.archive import archive_in
from tests.fakes.file_archive import FileArchive
from tests.golden.make_own_golden import CLASSIC_GROUP
from tests.unit.cli.commands import TOPIC, invoked, make_site, tieringd, write_bucket_config
from tieringd.errors import ConfigError
from tieringd.formats.group_documents import encode_group, group_key
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.object_keys import TopicKey
from tieringd.storage.file import FileStore


@pytest.fixture(scope="module")
def archived(tmp_path_factory):
    """Give an archive of 24 records."""
    site = make_site(tmp_path_factory.mktemp("site"))
    assert tieringd("run", "--once", "--config", site.config).exit_code == 0
    return site


def groups(site, *words):
    """Run one of the commands."""
    return invoked("groups", *words, "--config", site.config)


def test_groups_from_the_first_offset_to_the_end_of_the_group(archived):
    """A reset makes a group; it is listed, described, reset again and deleted."""
    assert groups(archived, "list", "--format", "json").json() == []
    reset = ("reset", "billing", "--topic", TOPIC, "--format", "json")
    (row,) = groups(archived, *reset, "--to", "latest", "--dry-run").json()
    assert (row["before"], row["after"]) == (None, 24)
    assert groups(archived, "list", "--format", "json").json() == []
    for target, before, after in (("7", None, 7), ("99", 7, 24), ("earliest", 24, 0)):
        (row,) = groups(archived, *reset, "--to", target).json()
        assert row == {"topic": TOPIC, "partition": 0, "before": before, "after": after}
    (row,) = groups(archived, "list", "--format", "json").json()
    assert (row["group"], row["state"], row["members"], row["offsets"]) == ("billing", "Empty", 0, 1)
    found = groups(archived, "describe", "billing", "--format", "json").json()
    (one,) = found["offsets"]
    assert (one["committed_offset"], one["archive_next_offset"], one["lag"]) == (0, 24, 24)
    assert TOPIC in groups(archived, "describe", "billing").output
    assert "nothing was changed" in groups(archived, "delete", "billing", "--dry-run").output
    assert "is deleted" in groups(archived, "delete", "billing").output
    with pytest.raises(ConfigError, match="no consumer group billing"):
        groups(archived, "delete", "billing")


def test_group_with_members_is_left_alone(archived):
    """Its consumers would go on from where they are, and commit over what was set."""
    group = replace(CLASSIC_GROUP.group, group_id="busy")
    path = archived.archive / group_key("local", "busy")
    path.parent.mkdir(parents=True, exist_ok=True)
    before = encode_group(replace(CLASSIC_GROUP, group=group))
    path.write_bytes(before)
    found = groups(archived, "describe", "busy", "--format", "json").json()
    assert [one["member_id"] for one in found["members"]] == ["app-1-00ff", "static-aa00"]
    for words in (("delete", "busy"), ("reset", "busy", "--topic", TOPIC, "--to", "earliest")):
        for options in ((), ("--dry-run",)):
            with pytest.raises(ConfigError, match="has 2 members"):
                groups(archived, *words, *options)
    assert path.read_bytes() == before


def test_reset_reaches_the_archive_that_a_topic_continues(tmp_path):
    """The offsets of the older archive are in range: an endpoint serves them too."""
    archive = FileArchive(tmp_path)
    old = archive.filled(segments=2, batches=2, cluster="old")
    new = archive.filled(
        segments=1, batches=1, first_offset=12, topic_id="AAAAAAAAAAAAAAAAAAAAAQ", cluster="new"
    )
    topic, older = (TopicKey(one.identified.cluster, "orders", one.identified.topic_id) for one in (new, old))
    history = archive_in(FileStore(archive.root)).history
    asyncio.run(history.link(HistoryLink(topic, older, ((0, old.next_offset),))))
    config = write_bucket_config(archive, tmp_path)
    reset = ("groups", "reset", "billing", "--topic", "orders", "--from-cluster", "new", "-c", config)
    for target, after in (("earliest", 0), ("5", 5), ("13", 13), ("latest", 15)):
        done = invoked(*reset, "--to", target, "--format", "json")
        assert ([row["after"] for row in done.json()], done.errors) == ([after], "")


def test_offset_outside_of_the_archive_is_named(tmp_path):
    """The group begins at the nearest offset of the archive, and standard error says so."""
    archive = FileArchive(tmp_path)
    archive.filled(segments=1, batches=1, first_offset=10)
    config = write_bucket_config(archive, tmp_path)
    for target, after in (("9", 10), ("10", 10), ("13", 13), ("14", 13)):
        reset = ("groups", "reset", "billing", "--topic", "orders", "--to", target, "-c", config)
        done = invoked(*reset, "--format", "json")
        assert [row["after"] for row in done.json()] == [after]
        told = (
            f"orders-0: the archive has the offsets 10 to 13, and not {target}: the group begins at {after}\n"
        )
        assert done.errors == ("" if target == str(after) else told)


def test_wrong_arguments_are_told(archived):
    """A topic that is not there, and a place that is none."""
    with pytest.raises(ConfigError, match="no topic nope"):
        groups(archived, "reset", "g", "--topic", "nope", "--to", "latest")
    for place in ("yesterday", "-1"):
        assert groups(archived, "reset", "g", "--topic", TOPIC, f"--to={place}").exit_code == 2
