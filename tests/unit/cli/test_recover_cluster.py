"""`tieringd recover cluster` into a cluster in memory: what is due, and never the same twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest
import yaml

from tests.fakes.archive import archive_in
from tests.fakes.log_writer import TOPIC_ID, LogWriter
from tests.fakes.target_cluster import FakeTargetCluster
from tests.support.daemon import directory_config, write_config
from tests.unit.cli.commands import invoked, tieringd
from tieringd.cli.recover import cluster as into_cluster
from tieringd.errors import ConfigError, CorruptDataError
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.recovery_mark import RecoveryMark
from tieringd.model.spilling import part_to_spill, spilled
from tieringd.model.tail_cut import cut_back
from tieringd.policies.recovery import KEEPING
from tieringd.recovery.republisher import Republisher
from tieringd.storage.file import FileStore

NEW_ID = "AAAAAAAAAAAAAAAAAAAAAQ"


class Place:
    """An archive of a topic with two partitions, and a cluster that it goes to."""

    def __init__(self, root, cluster):
        self.root = root
        self.cluster = cluster
        self.writers = [LogWriter(root / "old", "orders", number) for number in range(2)]
        self.config = self.archived(self.writers)
        document = yaml.safe_load(self.config.read_text())
        document["broker"] = {
            "kind": "kafka",
            "log_dirs": [str(root / "broker")],
            "bootstrap": ["127.0.0.1:1"],
        }
        self.config = write_config(root / "cluster.yaml", document)

    def archived(self, writers, name="old"):
        """Archive a segment more of each partition."""
        for writer in writers:
            writer.closed_segment()
        config = write_config(
            self.root / f"{name}.yaml",
            directory_config([self.root / name], self.root / "archive", self.root / "state"),
        )
        assert tieringd("run", "--once", "--config", config).exit_code == 0
        return config

    def continued(self, *, segments=1):
        """Archive a new topic that continues the old one, and return its logs."""
        (listed,) = invoked("recover", "list", "--config", self.config, "--format", "json").json()
        ends = [writer.next_offset for writer in self.writers]
        new = [
            LogWriter(self.root / "new", "orders", number, topic_id=NEW_ID, first_offset=ends[number])
            for number in range(2)
        ]
        for _ in range(segments):
            self.archived(new, "new")

        async def link():
            new_topic, old_topic = (
                TopicKey(listed["cluster"], "orders", topic_id) for topic_id in (NEW_ID, listed["topic_id"])
            )
            store = FileStore(self.root / "archive")
            await archive_in(store).history.link(HistoryLink(new_topic, old_topic, tuple(enumerate(ends))))
            await store.close()

        asyncio.run(link())
        return new

    def recover(self, *options):
        """Return the rows of a recovery, by partition."""
        done = invoked(
            *("recover", "cluster", "--topics", "orders", "--config", self.config),
            *("--format", "json", *options),
        )
        return {row["partition"]: row for row in done.json()}

    def holds_all_once(self, topic="orders"):
        """Say whether each partition has what was archived of it, once."""
        return all(
            self.cluster.values[topic, number] == list(writer.values().values())
            for number, writer in enumerate(self.writers)
        )


@pytest.fixture
def cluster(monkeypatch):
    cluster = FakeTargetCluster()
    # The command connects to the cluster of its configuration; tests/e2e has it with a real one.
    monkeypatch.setattr(into_cluster, "TargetCluster", lambda _settings: cluster)
    return cluster


@pytest.fixture
def place(tmp_path, cluster):
    return Place(tmp_path, cluster)


def test_run_again_writes_only_what_is_new(place):
    """A second run writes only new records, as the marks say."""
    place.recover()
    assert place.holds_all_once()
    place.archived(place.writers)
    rows = place.recover()
    assert place.holds_all_once()
    assert [(rows[number]["records"], rows[number]["new_records"]) for number in (0, 1)] == [(6, 3)] * 2


def test_partition_whose_mark_was_forgotten_is_not_written_again(place, cluster):
    """A partition without its mark holds unknown records. It is refused with a way out."""
    place.recover()
    before = dict(cluster.commits)
    cluster.forget("orders", 0)
    with pytest.raises(ConfigError, match=r"partitions 0 hold records.*Delete the topic and begin again"):
        place.recover()
    assert place.holds_all_once()
    assert cluster.commits == {("orders", 1): before["orders", 1]}
    cluster.values["orders", 0].clear()
    place.recover()
    assert place.holds_all_once()


def test_marks_of_all_partitions_age_together(place, cluster):
    """Each run commits each of them, also where nothing is new."""
    place.recover()
    finished = cluster.commit_count
    place.recover()
    assert [number > finished for number, _ in cluster.commits.values()] == [True, True]


def test_attempt_that_began_at_the_same_time_keeps_its_marks(place, cluster):
    """Marks and records of the other attempt since the first look are not set back."""
    cluster.add("orders", 2, KEEPING)
    values = list(place.writers[0].values().values())

    def other_attempt(_name):
        cluster.before_writer = lambda _name: None
        cluster.values["orders", 0] = list(values)
        cluster.commit(
            "orders", {0: RecoveryMark(len(values), "id-of-orders", "read_committed", len(values))}
        )

    cluster.before_writer = other_attempt
    rows = place.recover("--into-existing")
    assert place.holds_all_once()
    assert (rows[0]["new_records"], rows[1]["new_records"]) == (0, 3)


def test_attempt_with_another_isolation_at_the_same_time_is_refused(place, cluster):
    """The topic would hold a mixture."""
    cluster.add("orders", 2, KEEPING)

    def other_attempt(_name):
        cluster.before_writer = lambda _name: None
        cluster.commit("orders", {0: RecoveryMark(0, "id-of-orders", "read_uncommitted")})

    cluster.before_writer = other_attempt
    with pytest.raises(ConfigError, match="was begun with --isolation read_uncommitted"):
        place.recover("--into-existing")


def test_what_has_been_written_does_not_count_against_the_targets_limits(place, cluster):
    """An operator may set the retention that is wanted before the last records have come."""
    place.recover()
    topic = cluster.topics["orders"]
    cluster.topics["orders"] = replace(topic, settings={**topic.settings, "retention.bytes": "1"})
    place.recover()
    place.archived(place.writers)
    with pytest.raises(ConfigError, match=r"retention\.bytes=1"):
        place.recover()


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_archive_that_was_cut_back_since_is_refused_before_anything_is_written(place, cluster, options):
    """One partition's archive lost records that are written to an election. No partition gets more."""
    place.recover()
    place.archived(place.writers)
    store = FileStore(place.root / "archive")

    async def elect():
        async def deposed(manifest):
            return cut_back(manifest, 0, leader_epoch=1, now_ms=0)

        archive = archive_in(store)
        topic = await archive.catalog.topic("orders")
        await archive.manifests.edit(topic.partitions[1].partition, deposed)
        await store.close()

    asyncio.run(elect())
    commits, values = dict(cluster.commits), {key: list(each) for key, each in cluster.values.items()}
    with pytest.raises(ConfigError, match=r"recovery of orders-1 cannot continue: records from offset 0 on"):
        place.recover(*options)
    assert (cluster.commits, cluster.values) == (commits, values)


def test_history_of_a_restored_topic_comes_first(place, cluster):
    """A topic that goes on from an older archive is written from the beginning of that one."""
    new = place.continued()
    place.recover("--topic-id", NEW_ID)
    for number in range(2):
        values = [*place.writers[number].values().values(), *new[number].values().values()]
        assert cluster.values["orders", number] == values


def test_spilled_history_counts_against_the_targets_retention(place, cluster):
    """The oldest record is in a spilled segment of the older archive, and the broker would delete it."""
    place.archived(place.writers)
    place.continued()

    async def spill():
        store = FileStore(place.root / "archive")
        archive = archive_in(store)
        async for topic in archive.catalog.archived_topics(lambda key: key.topic_id == TOPIC_ID):
            for manifest in topic.partitions:
                part = part_to_spill(manifest, 1)
                edited = partial(_without, part, await archive.manifests.spillovers.put(part))
                await archive.manifests.edit(manifest.partition, edited)
        await store.close()

    asyncio.run(spill())
    with pytest.raises(ConfigError, match=r"retention\.bytes=200, but 273 bytes"):
        place.recover("--topic-id", NEW_ID, "--topic-config", "retention.bytes=200")
    assert cluster.topics == {}


async def _without(part, name, manifest):
    return spilled(manifest, part, name)


@pytest.mark.parametrize(("last_bytes", "older"), [("1GiB", 3), ("200", 1), ("100", 0)])
def test_newest_part_reaches_into_the_history(place, cluster, last_bytes, older):
    """A limit counts back over the segments of the older archive, where the topic's own are fewer."""
    for _ in range(2):
        place.archived(place.writers)
    new = place.continued()
    rows = place.recover("--topic-id", NEW_ID, "--last-bytes", last_bytes)
    for number in range(2):
        left_out = 9 - 3 * older
        values = [*place.writers[number].values().values()][left_out:]
        assert cluster.values["orders", number] == values + list(new[number].values().values())
        assert rows[number]["records"] == 3 * older + 3


def test_lost_manifest_of_the_history_is_refused_or_left_out(place, cluster):
    """A recovery without a check writes the topic's own part, and says what is left out."""
    new = place.continued()
    for number in range(2):
        (manifest,) = place.root.glob(f"archive/**/orders/{number}_{TOPIC_ID}/manifest")
        manifest.unlink()
    told = r"incomplete: orders-0: .*/manifest is missing.*; orders-1: .*--validate no_check"
    with pytest.raises(CorruptDataError, match=told):
        place.recover("--topic-id", NEW_ID)
    assert (cluster.topics, cluster.values) == ({}, {})
    done = invoked(
        *("recover", "cluster", "--topics", "orders", "--config", place.config, "--topic-id", NEW_ID),
        *("--validate", "no_check"),
    )
    assert "orders-1: the records before offset 3 are left out: " in done.errors
    for number in range(2):
        assert cluster.values["orders", number] == list(new[number].values().values())


def test_changed_header_names_are_told(place, monkeypatch):
    """The message names the partition and the number. Partitions without one have no message."""

    class Changing(Republisher):
        async def republish(self, partition, *arguments, **options):
            done = await super().republish(partition, *arguments, **options)
            return replace(done, changed_names=2 * partition.partition)

    monkeypatch.setattr(into_cluster, "Republisher", Changing)
    done = invoked("recover", "cluster", "--topics", "orders", "--config", place.config)
    assert "orders-1: 2 header names that are not UTF-8 were written with U+FFFD" in done.errors
    assert "orders-0: " not in done.errors


def test_dry_run_into_a_cluster_changes_nothing(place, cluster):
    """
    The rows of a dry run say where each partition would begin and end.

    No topic is made, no mark stored.
    """
    before = {path: path.read_bytes() for path in place.root.rglob("*") if path.is_file()}
    planned = place.recover("--dry-run")
    assert cluster.values == {}
    after = {path: path.read_bytes() for path in place.root.rglob("*") if path.is_file()}
    assert {path for path in after if path.suffix != ".lock"} == {
        path for path in before if path.suffix != ".lock"
    }
    done = place.recover()
    assert place.holds_all_once()
    for number, row in planned.items():
        assert row["first_source"] == 0
        names = ("from_topic", "next_source", "validation")
        assert {name: row[name] for name in names} == {name: done[number][name] for name in names}
