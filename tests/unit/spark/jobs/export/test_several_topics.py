"""Exports of several topics: one that cannot be exported, and a report of what was done all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.archive import Clock, archive_in
from tests.support.exports import (
    ArchivedLogs,
    ParquetDirectory,
    attempted,
    exported,
    file_config,
    in_this_process,
)
from tieringd.errors import ConfigError, StorageUnavailable, TieringError
from tieringd.formats.object_keys import TopicKey, manifest_key
from tieringd.spark.jobs.export.job import WITHOUT_MANIFEST, export, export_each, report_of
from tieringd.spark.jobs.export.parquet_target import ParquetTarget
from tieringd.spark.jobs.export.rounds import TopicOutcome
from tieringd.storage.file import FileStore

TOPICS = ("a", "b", "c", "d", "e")


def ends_with(errors, *, commits=0):
    """Return an export of one topic that ends with the error that *errors* has for it, if any."""

    def export_one(name):
        outcome = TopicOutcome(name, error=errors.get(name))
        outcome.commits = commits if outcome.error else 1
        return outcome

    return export_one


def test_topic_that_cannot_be_exported_does_not_keep_the_others_from_it():
    """The topic is a fault of the report."""
    outcomes = export_each(TOPICS, ends_with({"a": ConfigError("it holds something else")}))

    assert [one.topic for one in outcomes] == list(TOPICS)
    report = report_of(outcomes)
    assert report.faults == ("topic a was not exported completely: it holds something else",)
    assert report.figures["commits"] == 4


def test_store_that_is_away_ends_the_run():
    """Each of the others would wait for it; the report names them."""
    outcomes = export_each(TOPICS, ends_with(dict.fromkeys("bcd", StorageUnavailable("no answer"))))

    assert [one.topic for one in outcomes] == ["a", "b", "c", "d"]
    assert report_of(outcomes, left=["e"]).faults[-2:] == (
        "topic d was not exported completely: no answer",
        "the export stopped, so these topics were not processed: e. Export again",
    )


def test_one_topic_whose_place_is_away_keeps_no_others_from_it():
    """Topics that cannot reach their places end the run only if there are several of them in a row."""
    away = {name: StorageUnavailable("no answer") for name in "abde"}
    assert len(export_each(TOPICS, ends_with(away))) == len(TOPICS)


def test_run_that_has_done_nothing_is_an_error():
    """The first one is raised, for its exit code."""
    errors = {name: ConfigError(f"{name} is elsewhere") for name in TOPICS}

    with pytest.raises(ConfigError, match="a is elsewhere"):
        export_each(TOPICS, ends_with(errors))
    assert len(export_each(TOPICS, ends_with(errors, commits=1))) == len(TOPICS)


@pytest.fixture
def logs(tmp_path):
    logs = ArchivedLogs.made(tmp_path / "source")
    yield logs
    logs.bucket.close()


async def test_what_was_committed_before_an_error_is_told(tmp_path, logs):
    """Offsets reached, records and files; the next run adds the rest."""
    directory = ParquetDirectory.made(tmp_path / "target")
    await logs.fill(4)
    rounds = []

    def failing(work, portions):
        rounds.append(portions)
        if len(rounds) == 3:
            raise TieringError("the disk of an executor is full")
        return in_this_process(work, portions)

    outcome = attempted(logs, directory.topic(), run=failing, portion_bytes=1, round_bytes=1)

    assert str(outcome.error) == "the disk of an executor is full"
    assert outcome.commits == 2
    next_offset = rounds[1][-1].next_offset
    assert outcome.reached == {0: next_offset}
    report = report_of([outcome])
    assert report.figures["records"] == next_offset
    assert report.tables[0].rows[0][:4] == ("orders", 0, 0, next_offset)
    exported(logs, directory.topic())
    assert directory.seen() == logs.written()
    directory.bucket.close()


async def test_partition_without_a_manifest_is_in_the_report(tmp_path):
    """The partition is new, or its manifest is lost: that is no fault before anything of it was exported."""
    logs = ArchivedLogs.made(tmp_path / "source", partitions=2)
    directory = ParquetDirectory.made(tmp_path / "target")
    await logs.fill(1)
    assert [one.title for one in report_of([exported(logs, directory.topic())]).tables] == ["partitions"]
    lost = logs.config.cloud_storage_file_root / manifest_key(logs.writers[1].identified)
    lost.unlink()
    other = ParquetDirectory.made(tmp_path / "other")

    first = report_of([exported(logs, other.topic())])
    assert (first.faults, first.tables[-1].title) == ((), WITHOUT_MANIFEST)
    assert first.tables[-1].rows == (("orders", 1),)
    again = report_of([exported(logs, directory.topic())])
    assert "no longer has its manifest" in again.faults[0]
    assert [one.title for one in again.tables] == ["partitions"]
    for one in (logs, directory, other):
        one.bucket.close()


async def test_topics_of_one_name_that_are_not_exported_are_in_the_report(tmp_path):
    """Topics of one name: the one that was created last is exported, and the report lists the others."""
    config, clock = file_config(tmp_path / "archive"), Clock()
    manifests = archive_in(FileStore(config.cloud_storage_file_root), now_ms=clock).manifests
    deleted, newest = (TopicKey("ours", "orders", f"{letter}AAAAAAAAAAAAAAAAAAAAA") for letter in "AB")
    theirs, alone = TopicKey("theirs", "orders", deleted.topic_id), TopicKey("ours", "audit", newest.topic_id)
    for key in (deleted, theirs, newest, alone):
        clock.now_ms += 1
        await manifests.ensure_topic(key, partition_count=1)
    # Nothing of them is archived, so no task has to run on Spark.
    no_spark: Any = None
    target = ParquetTarget(f"file://{tmp_path}/target")

    report = export(no_spark, config, topics=["*"], target=target)

    assert report.figures["topics"] == 2
    exported_ids = {
        path.stem: json.loads(path.read_text())["state"]["topic_id"]
        for path in tmp_path.rglob("_tieringd/*.json")
    }
    assert exported_ids == {"orders": newest.topic_id, "audit": alone.topic_id}
    (passed_over,) = [one for one in report.tables if "earlier topics" in one.title]
    assert passed_over.rows == (("orders", "ours", deleted.topic_id), ("orders", "theirs", theirs.topic_id))
    again = export(no_spark, config, topics=["audit"], target=target)
    assert [one.title for one in again.tables] == ["partitions", WITHOUT_MANIFEST]
