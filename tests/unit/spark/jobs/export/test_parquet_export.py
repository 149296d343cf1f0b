"""Export to Parquet: what a plain reader sees, after any process was killed at any point."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from itertools import count

import pytest

from tests.fakes.dying_store import Dying, Killed
from tests.support.exports import ArchivedLogs, ParquetDirectory, exported, in_this_process
from tieringd.errors import ConfigError, TieringError


@pytest.fixture
def logs(tmp_path):
    logs = ArchivedLogs.made(tmp_path / "source", partitions=2)
    yield logs
    logs.bucket.close()


@pytest.fixture
def directory(tmp_path):
    directory = ParquetDirectory.made(tmp_path / "target")
    yield directory
    directory.bucket.close()


async def test_export_has_every_record_once_where_its_day_is(logs, directory):
    """The columns are those of Spark's Kafka source, and the topic's name is in the path."""
    await logs.fill()

    outcome = exported(logs, directory.topic())

    assert directory.seen() == logs.written()
    assert outcome.commits == 1
    assert outcome.reached == {0: 18, 1: 18}
    for row in directory.rows():
        assert row["key"].startswith(b"k")
        assert row["timestampType"] == 0
        assert row["headers"] is None
    days = {path.parent.name for path in directory.paths()}
    assert days == {"date=2023-11-14", "date=2023-11-15"}
    for path in directory.paths():
        assert path.parent.parent.name == "topic=orders"


async def test_second_run_adds_only_what_is_new(logs, directory):
    """Files that are there stay as they are."""
    await logs.fill()
    exported(logs, directory.topic())
    before = {path: path.stat().st_mtime_ns for path in directory.paths()}
    await logs.fill(2)

    outcome = exported(logs, directory.topic())

    assert directory.seen() == logs.written()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert outcome.begun_at == {0: 18, 1: 18}
    assert outcome.reached == {0: 30, 1: 30}
    assert exported(logs, directory.topic()).commits == 0


@pytest.mark.parametrize("after_effect", [False, True])
async def test_killed_at_any_request_nothing_is_seen_twice_and_nothing_is_missing_after_the_next_run(
    tmp_path, after_effect
):
    """The next run finds a longer archive with other segments, and has another idea of portions."""
    for dies_at in count(1):
        logs = ArchivedLogs.made(tmp_path / f"source-{dies_at}", partitions=2)
        directory = ParquetDirectory.made(tmp_path / f"target-{dies_at}")
        await logs.fill()
        dying = Dying(directory.bucket.store, dies_at, after_effect=after_effect)
        with suppress(Killed):
            exported(logs, directory.topic(store=dying), portion_bytes=150, round_bytes=600)

        seen = directory.seen()
        assert max(seen.values(), default=1) == 1
        assert seen <= logs.written()
        await logs.merge()
        await logs.fill(2)
        exported(logs, directory.topic(), portion_bytes=100_000)
        assert directory.seen() == logs.written()
        logs.bucket.close()
        directory.bucket.close()
        if dying.left > 0:
            break
    assert dies_at > 20


async def test_any_number_of_killed_runs_is_made_up_for(tmp_path):
    """Each goes on where the one before had come to, if only by one request."""
    logs = ArchivedLogs.made(tmp_path / "source")
    directory = ParquetDirectory.made(tmp_path / "target")
    await logs.fill(4)
    for dies_at in count(1):
        if dies_at % 5 == 0:
            await logs.merge()
            await logs.fill(1)
        dying = Dying(directory.bucket.store, dies_at, after_effect=dies_at % 2 == 0)
        try:
            outcome = exported(
                logs, directory.topic(store=dying), portion_bytes=250 + dies_at * 50, round_bytes=1000
            )
        except Killed:
            assert max(directory.seen().values(), default=1) == 1
            continue
        break

    assert outcome.reached == {0: logs.writers[0].bases[-1]}
    assert directory.seen() == logs.written()
    logs.bucket.close()
    directory.bucket.close()


async def test_runs_at_once_count_each_record_once(logs, directory):
    """One finds what the other has begun, and writes the same files; only one of them commits."""
    await logs.fill()
    inner = []

    def run(work, portions):
        written = in_this_process(work, portions)
        if not inner:
            inner.append(exported(logs, directory.topic()))
        return written

    outer = exported(logs, directory.topic(), run=run)

    assert (inner[0].commits, outer.commits) == (1, 0)
    assert outer.reached == {0: 18, 1: 18}
    assert directory.seen() == logs.written()


async def test_run_that_was_overtaken_goes_on_with_what_is_left(logs, directory):
    """The other one was killed after its first round, and this one does the second."""
    await logs.fill(4)
    rounds = []
    halves = [sum(one.segments.head(2).column("size_bytes")) for one in logs.topic().partitions]
    rules = {"portion_bytes": max(halves), "round_bytes": sum(halves)}

    def dying_run(work, portions):
        rounds.append(portions)
        if len(rounds) == 2:
            in_this_process(work, portions[:1])
            raise Killed
        return in_this_process(work, portions)

    def run(work, portions):
        if not rounds:
            with pytest.raises(Killed):
                exported(logs, directory.topic(), run=dying_run, **rules)
            assert directory.topic().checkpoint().state.offsets == {0: 12, 1: 12}
            assert directory.seen().total() == 30
        return in_this_process(work, portions)

    outcome = exported(logs, directory.topic(), run=run, **rules)

    assert outcome.commits == 2
    assert outcome.reached == {0: 24, 1: 24}
    assert directory.seen() == logs.written()


async def test_tasks_done_twice_write_the_same_files(logs, directory):
    """The same files are written if Spark runs a task twice, as it does when it thinks that one hangs."""
    await logs.fill()

    exported(logs, directory.topic(), run=lambda work, portions: in_this_process(work, portions * 2)[2:])

    assert directory.seen() == logs.written()


async def test_failed_round_does_not_count(logs, directory):
    """The records of a failed round are written again."""
    await logs.fill()

    def run(work, portions):
        in_this_process(work, portions[:1])
        raise TieringError("an executor is out of memory")

    with pytest.raises(TieringError, match="out of memory"):
        exported(logs, directory.topic(), run=run)
    assert 0 < directory.seen().total() < logs.written().total()
    assert directory.topic().checkpoint().state.offsets == {0: 0, 1: 0}

    exported(logs, directory.topic())
    assert directory.seen() == logs.written()


@pytest.mark.parametrize(
    ("partition_by", "parts"),
    [
        pytest.param("none", {"topic=orders"}, id="none"),
        pytest.param("hour", {"hour=22", "hour=23", "hour=01", "hour=02"}, id="hour"),
    ],
)
async def test_directories_are_as_asked_for(logs, directory, partition_by, parts):
    """Files are in a directory for each topic, or for each hour, as asked for."""
    await logs.fill(2)

    exported(logs, directory.topic(partition_by=partition_by))

    assert {path.parent.name for path in directory.paths()} == parts
    assert directory.seen() == logs.written()


async def test_aborted_records_are_in_it_only_uncommitted(tmp_path, directory):
    """A consumer of the same isolation level sees the same."""
    logs = ArchivedLogs.made(tmp_path / "source")
    (writer,) = logs.writers
    writer.append(b"gone", producer_id=7)
    writer.append(b"kept", producer_id=8)
    writer.roll()
    writer.append(b"gone too", producer_id=7)
    writer.abort(7)
    writer.commit(8)
    writer.closed_segment(b"plain")
    await logs.archive()
    uncommitted = ParquetDirectory.made(tmp_path / "uncommitted")

    exported(logs, directory.topic(), portion_bytes=1)
    exported(logs, uncommitted.topic(), isolation="read_uncommitted")

    assert sorted(value for _, _, value in directory.seen()) == [b"kept", b"plain"]
    assert uncommitted.seen() == logs.written(read_committed=False)
    with pytest.raises(ConfigError, match="begun with read_committed"):
        exported(logs, directory.topic(), isolation="read_uncommitted")
    uncommitted.bucket.close()
    logs.bucket.close()


async def test_offsets_without_records_are_passed(tmp_path, directory):
    """A round of markers and aborted records has no file, and the next run does not read it again."""
    logs = ArchivedLogs.made(tmp_path / "source")
    (writer,) = logs.writers
    writer.append(b"gone", producer_id=7)
    writer.abort(7)
    writer.roll()
    await logs.archive()

    outcome = exported(logs, directory.topic())

    assert (directory.paths(), outcome.reached, outcome.commits) == ([], {0: 2}, 1)
    assert exported(logs, directory.topic()).commits == 0
    logs.bucket.close()


async def test_topic_created_anew_is_an_error_unless_it_is_to_be_appended(tmp_path, logs, directory):
    """The new topic's offsets begin again, and its files have names of their own."""
    await logs.fill()
    exported(logs, directory.topic())
    before = directory.seen()
    again = ArchivedLogs.made(tmp_path / "again", topic_id="BBBBBBBBBBBBBBBBBBBBBA")
    await again.fill()

    with pytest.raises(ConfigError, match="created again"):
        exported(again, directory.topic())
    assert directory.seen() == before

    outcome = exported(again, directory.topic(), recreated="append")
    assert directory.seen() == before + again.written()
    assert (outcome.begun_at, outcome.reached) == ({}, {0: 18})
    again.bucket.close()


@pytest.mark.parametrize("recreated", ["error", "append"])
async def test_topic_that_another_was_appended_to_is_not_exported_again(tmp_path, logs, directory, recreated):
    """The name falls back to the older topic if the newer one is purged; its records are in the target."""
    again = ArchivedLogs.made(tmp_path / "again", topic_id="BBBBBBBBBBBBBBBBBBBBBA")
    await logs.fill(2)
    await again.fill(1)
    exported(logs, directory.topic())
    exported(again, directory.topic(), recreated="append")
    before = directory.seen()
    await logs.fill(1)

    with pytest.raises(ConfigError, match="has records already"):
        exported(logs, directory.topic(), recreated=recreated, portion_bytes=300)

    assert directory.seen() == before
    again.bucket.close()


async def test_what_a_killed_run_began_of_a_topic_that_was_created_anew_is_left_alone(
    tmp_path, logs, directory
):
    """The rest of a killed run is of the old topic, whose archive may be gone."""
    await logs.fill()
    dying = Dying(directory.bucket.store, 5, after_effect=True)
    with pytest.raises(Killed):
        exported(logs, directory.topic(store=dying), portion_bytes=300)
    before = directory.seen()
    again = ArchivedLogs.made(tmp_path / "again", topic_id="BBBBBBBBBBBBBBBBBBBBBA")
    await again.fill(2)

    exported(again, directory.topic(), recreated="append")

    assert before
    assert directory.seen() == before + again.written()
    again.bucket.close()


async def test_topic_that_was_moved_is_a_fault_that_names_the_other_bucket(logs, directory):
    """The bucket is exported first; after that each run has only the fault to report."""
    await logs.fill(1)
    topic = logs.topic().topic.key
    await logs.services.manifests.change_topic(topic, lambda one: replace(one, moved_to="s3://elsewhere"))

    first, second = (exported(logs, directory.topic()) for _ in range(2))

    assert directory.seen() == logs.written()
    (fault,) = first.faults
    assert "was moved to s3://elsewhere" in fault
    assert (second.commits, second.faults) == (0, [fault])


async def test_target_with_files_and_no_state_is_refused(logs, directory):
    """The records in such files are unknown."""
    await logs.fill()
    exported(logs, directory.topic())
    state = directory.root / "_tieringd" / "orders.json"
    text = state.read_text()
    state.unlink()

    with pytest.raises(ConfigError, match="no state that records how far"):
        exported(logs, directory.topic())

    state.write_text(text)
    assert exported(logs, directory.topic()).commits == 0


async def test_target_goes_on_as_it_was_begun(logs, directory):
    """Files by day and by hour in one directory are none that Spark can read."""
    await logs.fill()
    exported(logs, directory.topic())

    with pytest.raises(ConfigError, match="begun with day"):
        exported(logs, directory.topic(partition_by="hour"))


async def test_damaged_state_stops_the_export(logs, directory):
    """The error says where the state lies."""
    await logs.fill()
    exported(logs, directory.topic())
    state = directory.root / "_tieringd" / "orders.json"
    document = json.loads(state.read_text())

    for damage in (b"", b"{}", json.dumps(document | {"version": 2}).encode(), b"[1]", b"null"):
        state.write_bytes(damage)
        with pytest.raises(TieringError, match="_tieringd/orders"):
            directory.topic().checkpoint()


async def test_garbage_times_are_filed_under_the_nearest_day(tmp_path, directory):
    """One that is missing is of the last day of 1969, and one that no microseconds can hold of none."""
    logs = ArchivedLogs.made(tmp_path / "source")
    (writer,) = logs.writers
    writer.append(b"none", timestamp_ms=-1)
    writer.append(b"microseconds", timestamp_ms=1_700_000_000_000_000)
    writer.append(b"nanoseconds", timestamp_ms=1_700_000_000_000_000_000)
    writer.roll()
    await logs.archive()

    exported(logs, directory.topic())

    days = {path.parent.name for path in directory.paths()}
    assert days == {"date=1969-12-31", "date=9999-12-31", "date=__HIVE_DEFAULT_PARTITION__"}
    assert directory.seen() == logs.written()
    logs.bucket.close()
