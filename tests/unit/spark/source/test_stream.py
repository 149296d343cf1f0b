"""A streaming query as Spark drives it: offsets to a checkpoint first, then records; again after a crash."""

from __future__ import annotations

import json
import pickle
from random import Random

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

from tieringd.errors import ConfigError, DataLossError, ObjectNotFound
from tieringd.model.tail_cut import cut_back
from tieringd.spark.source.data_source import TieringdDataSource
from tieringd.spark.source.schema import schema_of

COLUMNS = schema_of(("topic", "partition", "offset", "value"))


class Query:
    """A query with its checkpoint; `restart` is what is left after the process was killed."""

    def __init__(self, archive, **options):
        # Reads are as fresh as they can be: time does not pass in a test.
        given = {"path": archive.url, "startingOffsets": "earliest", "refreshInterval": "1ms"}
        topics = {} if "subscribePattern" in options else {"subscribe": "orders"}
        self._source = TieringdDataSource(given | topics | options)
        self._ends = []
        self._done = 0
        self.records = []
        self.restart()

    def restart(self, *, available_now=False):
        """Begin again from the checkpoint."""
        self.reader = self._source.streamReader(COLUMNS)
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        self._start = None
        if self._ends:
            self._start = json.loads(self._ends[-1])

    def step(self, *, crash=False, limit=None):
        """Do one batch, or the one that was not done; return how many records came, None for no batch."""
        if self._done == len(self._ends):
            start = self._start or json.loads(json.dumps(self.reader.initialOffset()))
            limit = limit or self.reader.getDefaultReadLimit()
            end = json.loads(json.dumps(self.reader.latestOffset(start, limit)))
            if end == start:
                self._start = start
                return None
            self._ends.append(json.dumps(end))
        begin, end = self._bounds()
        if crash:
            self.restart()
            return None
        executor = pickle.loads(pickle.dumps(self._source.streamReader(COLUMNS)))
        tasks = pickle.loads(pickle.dumps(self.reader.partitions(begin, end)))
        found = [
            (row["topic"], row["partition"], row["offset"], row["value"])
            for task in tasks
            for batch in executor.read(task)
            for row in batch.to_pylist()
        ]
        self.records += found
        self._done = len(self._ends)
        self.reader.commit(end)
        self._start = end
        return len(found)

    def steps(self, *, limit=None):
        """Do batches while there is something to read; return how many records each of them had."""
        counts = []
        while (count := self.step(limit=limit)) is not None:
            counts.append(count)
        return counts

    def _bounds(self):
        begin = json.loads(self._ends[-2]) if len(self._ends) > 1 else None
        return begin or self._start or self.reader.initialOffset(), json.loads(self._ends[-1])


def written(*writers, from_offset=0):
    return [
        (writer.name.topic, writer.name.partition, offset, value)
        for writer in writers
        for offset, value in writer.values().items()
        if offset >= from_offset
    ]


def test_stream_reads_what_is_archived_and_what_is_archived_next(archive):
    """Every record once, in as many batches as there were reads with something new."""
    writer = archive.filled()
    query = Query(archive)
    assert query.steps() == [36]
    assert query.steps() == []

    writer.closed_segment(b"later")
    archive.add(writer)
    assert query.steps() == [1]
    assert query.records == written(writer)


def test_stream_begins_at_the_end_unless_told_otherwise(archive):
    """A stream begins at the end by default, as the Kafka source does."""
    writer = archive.filled()
    query = Query(archive, startingOffsets="latest")
    assert query.steps() == []
    writer.closed_segment(b"later")
    archive.add(writer)
    assert query.steps() == [1]
    assert query.records == written(writer, from_offset=36)


def test_stream_begins_at_an_offset_or_a_time(archive):
    """A stream begins at an offset or a time, in all forms that a batch takes."""
    writer = archive.filled()
    query = Query(archive, startingOffsets='{"orders": {"0": 30}}')
    assert query.steps() == [6]
    assert query.records == written(writer, from_offset=30)
    assert Query(archive, startingTimestamp="1").steps() == [36]
    with pytest.raises(ConfigError, match="startingTimestamp: no archived record"):
        Query(archive, startingTimestamp="9" * 15).steps()


def test_stream_needs_its_topic_at_the_start(archive):
    """A misspelled name would wait for ever."""
    with pytest.raises(ObjectNotFound, match="no topic named orders"):
        Query(archive).steps()


def test_trigger_takes_no_more_than_its_limit(archive):
    """Shared among the partitions by what waits there."""
    writers = [archive.filled(partition=0, segments=2), archive.filled(partition=1, segments=1)]
    query = Query(archive, maxOffsetsPerTrigger="12")
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(12)
    assert query.steps() == [12, 12, 12]
    assert sorted(query.records) == written(*writers)


def test_limit_is_left_out_when_spark_wants_all(archive):
    """The limit of a trigger does not apply if Spark asks for all records, as with the trigger `once`."""
    archive.filled()
    assert Query(archive, maxOffsetsPerTrigger="12").steps(limit=ReadAllAvailable()) == [36]


def test_trigger_waits_for_as_much_as_it_is_worth(archive):
    """A trigger waits for the least number of offsets. The first trigger does not wait."""
    writer = archive.filled()
    query = Query(archive, minOffsetsPerTrigger="10", maxTriggerDelay="1h")
    assert query.reader.getDefaultReadLimit() == ReadMinRows(10)
    assert query.steps() == [36]
    writer.closed_segment(b"little")
    archive.add(writer)
    assert query.steps() == []
    writer.closed_segment(*[b"more"] * 9)
    archive.add(writer)
    assert query.steps() == [10]
    assert query.records == written(writer)


def test_little_is_read_in_the_end(archive):
    """A few records are read after the longest delay, however few they are."""
    writer = archive.filled()
    query = Query(archive, minOffsetsPerTrigger="10", maxOffsetsPerTrigger="20", maxTriggerDelay="1ms")
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(20)
    writer.closed_segment(b"little")
    archive.add(writer)
    assert sum(query.steps()) == 37
    assert query.records == written(writer)


def test_little_is_read_at_once_when_nothing_more_will_come(archive):
    """The trigger `availableNow` does not wait for the least number of offsets."""
    archive.filled()
    query = Query(archive, minOffsetsPerTrigger="10", maxOffsetsPerTrigger="30", maxTriggerDelay="1h")
    query.restart(available_now=True)
    assert query.steps() == [30, 6]


def test_available_now_ends(archive):
    """
    A query with `availableNow` ends with what was there when it began.

    The next query goes on from there.
    """
    writer = archive.filled()
    query = Query(archive, maxOffsetsPerTrigger="30")
    query.restart(available_now=True)
    writer.closed_segment(b"later")
    archive.add(writer)
    archive.filled(partition=1, segments=1)
    assert query.steps() == [30, 6]

    query.restart(available_now=True)
    assert query.steps() == [13]


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_first_batch_is_the_same_after_a_crash(archive, start):
    """The first batch is repeated after a crash, although a new query would begin elsewhere."""
    writer = archive.filled()
    query = Query(archive, startingOffsets=start)
    if start == "latest":
        query.step()
    writer.closed_segment(b"one", b"two")
    archive.add(writer)
    query.step(crash=True)
    writer.closed_segment(b"three")
    archive.add(writer)

    assert query.steps() == ([38, 1] if start == "earliest" else [2, 1])
    assert query.records == written(writer, from_offset=0 if start == "earliest" else 36)


def test_new_partition_is_read_from_its_beginning(archive):
    """A new partition is read from its beginning, even by a batch that is done again."""
    first = archive.filled(partition=0)
    query = Query(archive)
    query.steps()
    second = archive.filled(partition=1)
    query.step(crash=True)
    second.closed_segment(b"later")
    archive.add(second)
    assert query.steps() == [36, 1]
    assert query.records == written(first, second)


def test_new_topic_of_a_pattern_is_read_from_its_beginning(archive):
    """A new topic that matches the pattern is read from its beginning once something of it is archived."""
    first = archive.filled("orders")
    query = Query(archive, subscribePattern="orders.*")
    query.steps()
    second = archive.filled("orders.new")
    assert query.steps() == [36]
    assert query.records == written(first, second)


def test_slow_stream_that_retention_overtakes(archive, warnings):
    """The stream ends with an error that names the offsets, or goes on with the first that there are."""
    writer = archive.filled()
    strict = Query(archive, maxOffsetsPerTrigger="6")
    lenient = Query(archive, maxOffsetsPerTrigger="6", failOnDataLoss="false")
    for query in (strict, lenient):
        query.step()
    archive.expire(writer, 2)

    with pytest.raises(DataLossError, match="offsets 6 to 23 of orders-0: the archive begins at offset 24"):
        strict.step()
    assert lenient.steps() == [6, 6]
    assert lenient.records == written(writer)[:6] + written(writer, from_offset=24)
    assert warnings.events() == ["records are not in the archive"]


def test_gap_is_an_error_or_is_read_across(archive, warnings):
    """A gap is an error or is read across, as in a batch query."""
    writer = archive.filled(segments=1)
    archive.lose(writer, b"x", b"y")
    writer.closed_segment(b"after")
    archive.add(writer)

    with pytest.raises(DataLossError, match="offsets 12 to 13 of orders-0: the archive has a recorded gap"):
        Query(archive).steps()
    query = Query(archive, failOnDataLoss="false")
    assert query.steps() == [13]
    assert query.records[-1] == ("orders", 0, 14, b"after")


def test_topic_that_was_created_again(archive, warnings):
    """A topic created again is another topic: none of its records continues the old one's."""
    archive.filled()
    strict, lenient = Query(archive), Query(archive, failOnDataLoss="false")
    for query in (strict, lenient):
        query.steps()
    again = archive.writer("orders", topic_id="AAAAAAAAAAAAAAAAAAAAAQ")
    again.closed_segment(b"new")
    archive.add(again, now_ms=2 * 10**12)

    with pytest.raises(DataLossError, match="orders-0: the topic was deleted and created again"):
        strict.step()
    assert lenient.steps() == [1]
    assert lenient.records[-1] == ("orders", 0, 0, b"new")


def test_topic_that_was_created_again_before_a_batch_was_read(archive):
    """A batch is offsets of the topic that was there when it was made."""
    archive.filled()
    strict, lenient = Query(archive), Query(archive, failOnDataLoss="false")
    for query in (strict, lenient):
        query.step(crash=True)
    again = archive.writer("orders", topic_id="AAAAAAAAAAAAAAAAAAAAAQ")
    again.closed_segment(b"new")
    archive.add(again, now_ms=2 * 10**12)

    with pytest.raises(DataLossError, match="offsets 0 to 35 of orders-0: the topic was deleted and created"):
        strict.step()
    assert lenient.steps() == [0, 1]


def test_manifest_that_is_lost_is_a_loss(archive, warnings):
    """A partition that was read and has no manifest any more is no new one; the others are read on."""
    zero, one = archive.filled(partition=0), archive.filled(partition=1)
    strict, lenient = Query(archive), Query(archive, failOnDataLoss="false")
    assert (strict.steps(), lenient.steps()) == ([72], [72])
    archive.forget(one)
    zero.closed_segment(b"later")
    archive.add(zero)

    with pytest.raises(DataLossError, match="offset 36 of orders-1: the bucket has no manifest of this"):
        strict.step()
    assert lenient.steps() == [1]
    (told,) = warnings.of("records are not in the archive")
    assert (told["partition"], told["base_offset"]) == ("orders-1", 36)


def test_latest_offset_is_reported(archive):
    """The latest offset is reported in the Kafka source's form, for the query's progress."""
    archive.filled()
    query = Query(archive, maxOffsetsPerTrigger="6")
    assert query.reader.reportLatestOffset() is None
    query.step()
    assert query.reader.reportLatestOffset() == {"orders": {"0": 36}}


def test_bucket_is_not_asked_each_time(archive):
    """Spark asks a hundred times a second."""
    writer = archive.filled()
    query = Query(archive, refreshInterval="1h")
    query.steps()
    writer.closed_segment(b"later")
    archive.add(writer)
    assert query.steps() == []
    query.restart()
    assert query.steps() == [1]


@pytest.mark.parametrize("seed", range(6))
def test_every_record_comes_once_whatever_happens(archive, seed):
    """Appends, merges, new partitions, crashes and restarts, with limits, in any order."""
    random = Random(seed)
    writers = [archive.filled(partition=0, segments=1)]
    query = Query(archive, maxOffsetsPerTrigger=str(random.randint(1, 20)), minPartitions="3")
    for _ in range(25):
        match random.choice(["append", "append", "step", "step", "crash", "restart", "partition", "merge"]):
            case "append":
                writer = random.choice(writers)
                writer.closed_segment(*[b"%d" % number for number in range(random.randint(1, 9))])
                archive.add(writer)
            case "step":
                query.step()
            case "crash":
                query.step(crash=True)
            case "restart":
                query.restart(available_now=random.random() < 0.5)
            case "partition":
                writers.append(archive.filled(partition=len(writers), segments=1))
            case "merge":
                writer = random.choice(writers)
                if len(archive.manifest(writer).segments) > 1:
                    archive.merge(writer)
    query.restart()
    query.steps()
    assert sorted(query.records) == written(*writers)


AHEAD = '{"orders": {"0": 40, "1": -2}}'


@pytest.mark.parametrize("fails", ["true", "false"])
def test_stream_may_begin_ahead_of_the_archive(archive, fails):
    """Such a stream reads nothing before its start, and all from there on, whatever restarts meanwhile."""
    writer, other = archive.filled(), archive.filled(partition=1, segments=1)
    query = Query(archive, startingOffsets=AHEAD, failOnDataLoss=fails)
    assert query.steps() == [12]
    query.restart()
    for value in (b"36", b"37", b"38"):
        writer.closed_segment(value)
    archive.add(writer)
    assert query.steps() == []
    other.closed_segment(b"of the other partition")
    archive.add(other)
    assert query.steps() == [1]
    query.restart()
    for value in (b"39", b"40", b"41"):
        writer.closed_segment(value)
    archive.add(writer)
    assert query.steps() == [2]
    writer.closed_segment(b"42")
    archive.add(writer)
    query.restart()
    assert query.steps() == [1]
    assert sorted(query.records) == sorted([*written(writer, from_offset=40), *written(other)])


def test_stream_may_begin_in_a_partition_that_is_not_archived_yet(archive):
    """Records that are archived before the start of the stream are not read."""
    archive.filled(partition=1, segments=1)
    query = Query(archive, startingOffsets=AHEAD)
    assert query.steps() == [12]
    writer = archive.filled(partition=0, segments=3)
    assert query.steps() == []
    writer.closed_segment(*(b"%d" % number for number in range(36, 42)))
    archive.add(writer)
    assert query.steps() == [2]


@pytest.mark.parametrize("offset", [0, 5])
def test_stream_may_begin_in_a_partition_that_the_bucket_does_not_know(archive, offset):
    """A query of Kafka's source has read a partition that was new: the archive takes over there too."""
    writer = archive.filled(segments=1)
    query = Query(archive, startingOffsets=json.dumps({"orders": {"0": 0, "1": offset}}))
    assert query.steps() == [12]
    query.restart()
    assert query.steps() == []
    later = archive.filled(partition=1, segments=1)
    assert query.steps() == [12 - offset]
    assert sorted(query.records) == sorted([*written(writer), *written(later, from_offset=offset)])


def test_archive_that_is_cut_back_after_the_start_was_reached_is_a_loss(archive):
    """The mark in the checkpoint goes when the archive reaches the start."""
    writer = archive.filled(segments=2)
    query = Query(archive, startingOffsets='{"orders": {"0": 30}}')
    assert query.steps() == [], "the query has begun, and marked what it waits for"
    writer.closed_segment(*(b"%d" % number for number in range(24, 32)))
    archive.add(writer)
    assert query.steps() == [2]
    last = archive.manifest(writer).segments[2]
    archive.edit(writer, lambda manifest: cut_back(manifest, last.base_offset, leader_epoch=1, now_ms=0))
    with pytest.raises(DataLossError, match="cut back"):
        query.steps()
