"""Scans of Redpanda data directories, and where their Kafka offsets come from."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.redpanda_builders import ARCHIVAL, RedpandaLog, ordinary_log
from tieringd.broker.log_dir import LogDirScan
from tieringd.broker.redpanda_log_dir import (
    RedpandaLogs,
    UnknownTranslationError,
    read_raw_log,
    scan_redpanda_dirs,
)
from tieringd.broker.redpanda_segment_file import RawSegment
from tieringd.errors import CorruptDataError, LocalFileError
from tieringd.formats.redpanda_names import topic_id_of
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.partition import TopicPartition
from tieringd.model.segment import LocalSegment


def make_partition(
    data_dir: Path, topic: str = "orders", number: int = 0, revision: int = 16
) -> LocalPartition:
    path = data_dir / "kafka" / topic / f"{number}_{revision}"
    path.mkdir(parents=True)
    return LocalPartition(TopicPartition(topic, number), topic_id_of(revision), str(path), str(data_dir))


def expected_segments(log: RedpandaLog, partition: LocalPartition) -> tuple[LocalSegment, ...]:
    """Return what a scan should find: the builder's segments with those that hold nothing left out."""
    found = []
    bases = [*(segment.base_offset for segment in log.segments[1:]), None]
    for segment, next_offset in zip(log.segments, bases, strict=True):
        path = Path(partition.path) / segment.name
        if segment.base_offset != next_offset and path.exists():
            status = path.stat()
            found.append(
                LocalSegment(
                    segment.base_offset,
                    next_offset,
                    status.st_size,
                    str(path),
                    status.st_ino,
                    status.st_mtime_ns,
                )
            )
    return tuple(found)


def trimmed(log: RedpandaLog, partition: LocalPartition, count: int) -> None:
    for segment in log.segments[:count]:
        (Path(partition.path) / segment.name).unlink()


def test_scan_finds_the_partitions_of_clients_topics(tmp_path):
    """Namespace, topic, partition and revision are directories; only clients' topics are partitions."""
    made = [
        make_partition(tmp_path, "orders", 0, 16),
        make_partition(tmp_path, "orders", 1, 16),
        make_partition(tmp_path, "__consumer_offsets", 3, 20),
    ]
    (tmp_path / "redpanda/controller/0_0").mkdir(parents=True)
    (tmp_path / "kafka_internal/tx/0_9").mkdir(parents=True)
    (tmp_path / "pid.lock").touch()
    (tmp_path / "kafka/orders/stray").mkdir()
    (tmp_path / "kafka/no topic").mkdir()

    scan = scan_redpanda_dirs([str(tmp_path)])

    key = {one: number for number, one in enumerate(made)}
    assert sorted(scan.partitions, key=key.__getitem__) == made
    assert (scan.cluster_id, scan.node_id, scan.problems) == (None, None, ())
    assert set(scan.left_alone) == {
        f"{tmp_path}/{name}"
        for name in ("redpanda", "kafka_internal", "kafka/orders/stray", "kafka/no topic")
    }


@pytest.mark.parametrize("revisions", [(9, 16, 120), (120, 16, 9)])
def test_scan_takes_the_highest_revision_of_a_partition(tmp_path, revisions):
    """Directories that a deleted or moved partition left behind are not the partition."""
    made = {revision: make_partition(tmp_path, revision=revision) for revision in revisions}

    scan = scan_redpanda_dirs([str(tmp_path)])

    assert scan.partitions == (made[120],)
    assert set(scan.left_alone) == {made[9].path, made[16].path}


def test_scan_goes_on_past_a_directory_that_is_not_there(tmp_path):
    """A missing data directory is a problem that names it; one without topics is none."""
    (tmp_path / "empty").mkdir()
    orders = make_partition(tmp_path / "there")

    scan = scan_redpanda_dirs([str(tmp_path / name) for name in ("missing", "empty", "there")])

    assert scan.partitions == (orders,)
    assert [problem.path for problem in scan.problems] == [str(tmp_path / "missing")]
    assert scan_redpanda_dirs([]) == LogDirScan((), None, None, (), ())


def test_raw_log_is_the_segments_in_order(tmp_path):
    """Names sort by number, each segment ends where the next begins, and side files are none."""
    partition = make_partition(tmp_path)
    names = ["95-2-v1.log", "0-1-v1.log", "1000-2-v1.log"]
    strangers = ["0-1-v1.base_index", "0-1-v1.log.compaction.staging", "snapshot", "tx.snapshot"]
    for name in (*names, *strangers):
        (Path(partition.path) / name).write_bytes(b"x")

    found = read_raw_log(partition).segments

    assert [(one.raw_base_offset, one.next_raw_offset, one.leader_epoch) for one in found] == [
        (0, 95, 1),
        (95, 1000, 2),
        (1000, None, 2),
    ]
    assert [Path(one.path).name for one in found] == ["0-1-v1.log", "95-2-v1.log", "1000-2-v1.log"]
    status = (Path(partition.path) / "0-1-v1.log").stat()
    assert found[0].identity == (status.st_ino, 1, status.st_mtime_ns)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("5-1-v1.log.cannotrecover", "set aside by Redpanda"),
        ("5-1-v2.log", "version v2, which is not supported"),
    ],
)
def test_segment_that_cannot_be_read_is_never_left_out(tmp_path, name, fault):
    """Were it left out, the segment before it would seem to reach over the hole."""
    partition = make_partition(tmp_path)
    for each in ("0-1-v1.log", name, "9-1-v1.log"):
        (Path(partition.path) / each).touch()
    with pytest.raises(LocalFileError, match=fault) as caught:
        read_raw_log(partition)
    assert caught.value.path == f"{partition.path}/{name}"


def test_directory_that_is_gone_or_not_files_is_an_error(tmp_path):
    """A partition that was moved away meanwhile is reported by its path."""
    partition = make_partition(tmp_path)
    (Path(partition.path) / "0-1-v1.log").mkdir()
    with pytest.raises(LocalFileError, match="not a regular file"):
        read_raw_log(partition)
    (Path(partition.path) / "0-1-v1.log").rmdir()
    Path(partition.path).rmdir()
    with pytest.raises(LocalFileError, match="cannot be read") as caught:
        read_raw_log(partition)
    assert caught.value.path == partition.path


@contextmanager
def churning(path: Path):
    """Make and remove the file *path* all the time."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            path.touch()
            path.unlink()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_listing_of_a_directory_that_never_rests_is_given_up(tmp_path):
    """A scan during which anything came or went does not count; afterwards one does."""
    partition = make_partition(tmp_path)
    for base in range(2000):
        (Path(partition.path) / f"{base}-1-v1.log").touch()
    seen = ""
    with churning(Path(partition.path) / "tx.snapshot"):
        for _ in range(300):
            try:
                read_raw_log(partition)
            except LocalFileError as error:
                seen = str(error)
                break
    assert "changed while it was read" in seen
    assert len(read_raw_log(partition).segments) == 2000


def test_segment_that_goes_during_the_listing_is_no_segment(tmp_path):
    """A name whose file is gone when it is opened makes the listing untrue."""
    partition = make_partition(tmp_path)
    gone = Path(partition.path) / "0-1-v1.log"
    gone.symlink_to(tmp_path / "nowhere")
    with pytest.raises(LocalFileError, match="vanished while its directory was read") as caught:
        read_raw_log(partition)
    assert caught.value.path == str(gone)


def test_segment_that_is_missing_in_the_middle_is_found_out(tmp_path):
    """The batches of the one before it do not reach to the one after it."""
    partition = make_partition(tmp_path)
    log = ordinary_log().write_to(Path(partition.path))
    (Path(partition.path) / log.segments[1].name).unlink()
    with pytest.raises(LocalFileError, match="ends before 11, and the next segment begins at 15"):
        RedpandaLogs().read_local_log(partition)


def test_log_from_the_beginning_needs_nothing_else(tmp_path):
    """A log from raw offset 0 has every delta, so that segments and terms get Kafka offsets."""
    partition = make_partition(tmp_path)
    log = ordinary_log().write_to(Path(partition.path))

    found = RedpandaLogs().read_local_log(partition)

    assert found == LocalLog(partition, expected_segments(log, partition), ((1, 0), (3, 12)))
    assert [(one.base_offset, one.next_offset) for one in found.segments] == [(0, 8), (8, 12), (12, None)]


def test_empty_directory_is_an_empty_log(tmp_path):
    """A partition that was just made has no segment and no epoch."""
    partition = make_partition(tmp_path)
    assert RedpandaLogs().read_local_log(partition) == LocalLog(partition, (), ())


def test_segments_that_hold_nothing_of_kafka_s_are_left_out(tmp_path):
    """An election without a record is no segment and no epoch; the active segment always is one."""
    partition = make_partition(tmp_path)
    log = RedpandaLog().roll(term=1).roll(term=2).data([b"a"]).roll(term=3).roll(term=4)
    log.bookkeeping(ARCHIVAL).roll(term=5).write_to(Path(partition.path))

    found = RedpandaLogs().read_local_log(partition)

    assert found.segments == expected_segments(log, partition)
    assert [(one.base_offset, one.next_offset) for one in found.segments] == [(0, 1), (1, None)]
    assert found.epochs == ((2, 0), (5, 1))


def places_of(log: RedpandaLog) -> st.SearchStrategy[OffsetTranslation]:
    """Draw a place at any batch of the log: a true translation."""
    places = []
    for segment in log.segments:
        position, delta = segment.raw_base_offset, segment.delta
        for raw in segment.batches:
            places.append(OffsetTranslation(position, delta))
            span = int.from_bytes(raw[23:27], "little") + 1
            position += span
            delta += span if raw[16] in {2, 19} else 0
        places.append(OffsetTranslation(position, delta))
    return st.sampled_from(places)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_known_place_translates_a_trimmed_log(tmp_path_factory, data):
    """One known place in the rest of a trimmed log gives the offsets of all of the rest."""
    partition = make_partition(tmp_path_factory.mktemp("data"))
    log = RedpandaLog()
    for term in range(1, data.draw(st.integers(2, 5))):
        log.roll(term=term)
        for _ in range(data.draw(st.integers(0, 3))):
            log.data([b"a"] * data.draw(st.integers(1, 3)))
            log.bookkeeping(ARCHIVAL, records=data.draw(st.integers(1, 2)))
    log.write_to(Path(partition.path))
    gone = data.draw(st.integers(0, len(log.segments) - 1))
    trimmed(log, partition, gone)
    known = data.draw(st.lists(places_of(log), max_size=3))
    base = log.segments[gone].raw_base_offset

    if base > 0 and all(place.raw_offset < base for place in known):
        with pytest.raises(UnknownTranslationError, match=f"own offset {base},"):
            RedpandaLogs().read_local_log(partition, known)
        return
    found = RedpandaLogs().read_local_log(partition, known)
    assert found.segments == expected_segments(log, partition)


def test_known_bases_are_taken_without_reading_the_files(tmp_path):
    """Segments are not read if there is a known place for each base, as an archive keeps them."""
    partition = make_partition(tmp_path)
    log = ordinary_log().write_to(Path(partition.path))
    for segment in log.segments:
        path = Path(partition.path) / segment.name
        path.write_bytes(b"nonsense")
    known = [OffsetTranslation(segment.raw_base_offset, segment.delta) for segment in log.segments]

    assert RedpandaLogs().read_local_log(partition, known).segments == expected_segments(log, partition)


def test_files_are_counted_once_and_again_when_they_change(tmp_path):
    """A count holds as long as the file is the same one, in size and time."""
    partition = make_partition(tmp_path)
    log = ordinary_log().write_to(Path(partition.path))
    logs = RedpandaLogs()
    first = logs.read_local_log(partition)
    path = Path(partition.path) / log.segments[0].name
    status = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert logs.read_local_log(partition) == first

    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(LocalFileError, match="ends before 0"):
        logs.read_local_log(partition)

    path.write_bytes(log.segments[0].data)
    logs.read_local_log(partition)
    assert len(logs._counted[partition.path]) == 2


def test_forgotten_partition_is_counted_anew(tmp_path):
    """Nothing is kept of a partition that is not on this host any more."""
    partition = make_partition(tmp_path)
    ordinary_log().write_to(Path(partition.path))
    logs = RedpandaLogs()
    logs.read_local_log(partition)
    logs.forget_others({partition.path})
    assert logs._counted.keys() == {partition.path}
    logs.forget_others(set())
    assert logs._counted == {}


@pytest.mark.parametrize(
    ("known", "is_counted"),
    [
        pytest.param([OffsetTranslation(15, 2)], True, id="too small for what was counted"),
        pytest.param([OffsetTranslation(15, 4)], True, id="too large for what was counted"),
        pytest.param([OffsetTranslation(0, 0), OffsetTranslation(11, 4)], False, id="two of one place"),
        pytest.param([OffsetTranslation(15, 2)], False, id="falling"),
        pytest.param([OffsetTranslation(15, 8)], False, id="growing by more than there is"),
    ],
)
def test_translations_that_contradict_each_other_are_refused(tmp_path, known, is_counted):
    """A wrong delta would be wrong in the archive for good, so nothing is translated at all."""
    partition = make_partition(tmp_path)
    log = ordinary_log().write_to(Path(partition.path))
    assert [(one.raw_base_offset, one.delta) for one in log.segments] == [(0, 0), (11, 3), (15, 3)]
    logs = RedpandaLogs()
    if is_counted:
        logs.read_local_log(partition)
    with pytest.raises(CorruptDataError, match="cannot be translated") as caught:
        logs.read_local_log(partition, [*known, OffsetTranslation(11, 3)])
    assert caught.value.source


def test_translation_that_leaves_negative_offsets_is_refused(tmp_path):
    """Counting back from a wrong place must not end below zero."""
    partition = make_partition(tmp_path)
    log = ordinary_log().write_to(Path(partition.path))
    trimmed(log, partition, 1)
    with pytest.raises(CorruptDataError, match="cannot be translated"):
        RedpandaLogs().read_local_log(partition, [OffsetTranslation(18, 0)])


def test_segment_that_is_not_whole_yet_is_waited_for(tmp_path):
    """A new segment may be there before the last batches of the one before it are."""
    partition = make_partition(tmp_path)
    log = RedpandaLog().roll(term=1).data([b"a"]).bookkeeping(ARCHIVAL).roll().data([b"b"])
    log.write_to(Path(partition.path))
    first = Path(partition.path) / log.segments[0].name
    whole = log.segments[0].data
    for lacking in (b"", bytes(5000), whole[-69:-30]):
        first.write_bytes(b"".join(log.segments[0].batches[:-1]) + lacking)
        with pytest.raises(LocalFileError, match="ends before 2, and the next segment begins at 3"):
            RedpandaLogs().read_local_log(partition)
    first.write_bytes(whole + bytes(5000))
    assert RedpandaLogs().read_local_log(partition).segments == expected_segments(log, partition)


def test_compacted_segment_may_end_before_the_next_one_begins(tmp_path):
    """Compaction leaves holes, which count as Kafka's; the compaction index tells that it was one."""
    partition = make_partition(tmp_path)
    log = RedpandaLog().roll(term=1).data([b"a"]).hole(7).roll().data([b"b"])
    log.write_to(Path(partition.path))
    with pytest.raises(LocalFileError, match="ends before 2, and the next segment begins at 9"):
        RedpandaLogs().read_local_log(partition)
    (Path(partition.path) / "0-1-v1.compaction_index").touch()

    found = RedpandaLogs().read_local_log(partition)

    assert [(one.base_offset, one.next_offset) for one in found.segments] == [(0, 8), (8, None)]


@pytest.mark.parametrize("lacking", [bytes(5000), b"half a header"], ids=["zeros", "cut"])
def test_compacted_segment_ends_where_its_file_does(tmp_path, lacking):
    """A segment of a compacted topic that ends with anything but a batch is still being written."""
    partition = make_partition(tmp_path)
    log = RedpandaLog().roll(term=1).data([b"a"])
    log.segments[0].data += lacking
    log.hole(7).roll().data([b"b"]).write_to(Path(partition.path))
    (Path(partition.path) / "0-1-v1.compaction_index").touch()
    with pytest.raises(LocalFileError, match="ends before 2, and the next segment begins at 9"):
        RedpandaLogs().read_local_log(partition)


def test_segment_that_reaches_over_the_next_is_waited_for(tmp_path):
    """Two segments that are being compacted into one lie side by side for a moment, and the read waits."""
    partition = make_partition(tmp_path)
    log = RedpandaLog().roll(term=1).data([b"a"]).roll().data([b"b"]).roll().data([b"c"])
    log.write_to(Path(partition.path))
    first = Path(partition.path) / log.segments[0].name
    first.write_bytes(log.segments[0].data + log.segments[1].data)
    with pytest.raises(LocalFileError, match="reaches to 3, beyond the next segment's base 2"):
        RedpandaLogs().read_local_log(partition)
    (Path(partition.path) / log.segments[1].name).unlink()

    found = RedpandaLogs().read_local_log(partition)

    assert [(one.base_offset, one.next_offset) for one in found.segments] == [(0, 2), (2, None)]


def test_raw_segment_knows_when_its_bytes_may_have_changed():
    """Identity is inode, size and time together."""
    one = RawSegment(0, None, 1, 10, "/p", 5, 7)
    assert one.identity == (5, 10, 7)
