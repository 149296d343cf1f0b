"""Scans of log directories, on real directories in every state a broker leaves them in."""

from __future__ import annotations

import os
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tieringd.broker.log_dir import LogDirScan, read_leader_epochs, read_local_log, scan_log_dirs
from tieringd.errors import LocalFileError
from tieringd.formats.checkpoints import encode_epoch_checkpoint, encode_partition_metadata
from tieringd.formats.log_names import LogFileKind, encode_file_name
from tieringd.model.local_log import LocalPartition
from tieringd.model.partition import NO_TOPIC_ID, TopicPartition
from tieringd.model.segment import LocalSegment

_TOPIC_ID = "W1xNUlUlTfigw_K-dvdxsA"
_META = "version=1\ncluster.id=caWW3wCbQLCABqXYeVVqAA\nnode.id=7\ndirectory.id=3d1GWpWEe978Vtq3Hhkb-Q\n"


def make_partition(log_dir: Path, name: str, *, topic_id: str | None = _TOPIC_ID) -> LocalPartition:
    path = log_dir / name
    path.mkdir(parents=True)
    if topic_id is not None:
        (path / "partition.metadata").write_bytes(encode_partition_metadata(topic_id))
    topic, _, number = name.rpartition("-")
    partition = TopicPartition(topic, int(number))
    return LocalPartition(partition, topic_id or NO_TOPIC_ID, str(path), str(log_dir))


def add_segment(partition: LocalPartition, base_offset: int, data: bytes = b"batches") -> Path:
    path = Path(partition.path) / encode_file_name(base_offset, LogFileKind.LOG)
    path.write_bytes(data)
    for kind in (LogFileKind.OFFSET_INDEX, LogFileKind.TIME_INDEX, LogFileKind.PRODUCER_SNAPSHOT):
        (path.parent / encode_file_name(base_offset, kind)).touch()
    return path


def segment_of(path: Path, next_offset: int | None) -> LocalSegment:
    status = path.stat()
    base_offset = int(path.stem)
    return LocalSegment(
        base_offset, next_offset, status.st_size, str(path), status.st_ino, status.st_mtime_ns
    )


@pytest.mark.parametrize(
    ("name", "partition"),
    [
        pytest.param("orders-0", TopicPartition("orders", 0), id="plain"),
        pytest.param("a.b_c-d-11", TopicPartition("a.b_c-d", 11), id="dots-underscores-dashes"),
        pytest.param("orders-delete-3", TopicPartition("orders-delete", 3), id="topic-that-ends-in-delete"),
        pytest.param("__consumer_offsets-49", TopicPartition("__consumer_offsets", 49), id="internal"),
    ],
)
def test_scan_finds_partitions_whatever_their_topic_is_called(tmp_path, name, partition):
    """The number after the last dash is the partition; all before it is the topic."""
    made = make_partition(tmp_path, name)

    scan = scan_log_dirs([str(tmp_path)])

    assert scan == LogDirScan((made,), None, None, (), ())
    assert scan.partitions[0].topic_partition == partition


@pytest.mark.parametrize(
    "name",
    [
        "orders-0.55ed0a3bd2b34ae5b5f2bd4bf2bd0a3b-delete",
        "orders-0.55ed0a3bd2b34ae5b5f2bd4bf2bd0a3b-stray",
        "orders-0.55ed0a3bd2b34ae5b5f2bd4bf2bd0a3b-future",
        "__cluster_metadata-0",
        "remote-log-index-cache",
        "lost+found",
        ".snapshot",
        "orders",
    ],
)
def test_scan_leaves_directories_alone_that_are_no_partitions(tmp_path, name):
    """A directory in passing, the metadata log and strangers are named, and not partitions."""
    orders = make_partition(tmp_path, "orders-0")
    (tmp_path / name).mkdir()

    scan = scan_log_dirs([str(tmp_path)])

    assert scan == LogDirScan((orders,), None, None, (str(tmp_path / name),), ())


def test_scan_says_nothing_of_files_in_a_log_directory(tmp_path):
    """The broker's checkpoints beside the partitions are neither partitions nor left alone."""
    (tmp_path / "recovery-point-offset-checkpoint").touch()
    (tmp_path / "orders-0").touch()

    assert scan_log_dirs([str(tmp_path)]) == LogDirScan((), None, None, (), ())


def test_scan_reads_the_owner_of_all_log_directories(tmp_path):
    """The cluster and node ids come from meta.properties; a directory without one agrees."""
    for name in ("a", "b", "c"):
        make_partition(tmp_path / name, f"{name}-0")
    for name in ("a", "b"):
        (tmp_path / name / "meta.properties").write_text(_META)

    scan = scan_log_dirs([str(tmp_path / name) for name in "abc"])

    assert (scan.cluster_id, scan.node_id, scan.problems) == ("caWW3wCbQLCABqXYeVVqAA", 7, ())
    assert [each.topic_partition.topic for each in scan.partitions] == ["a", "b", "c"]


def test_scan_of_log_directories_of_two_brokers_is_a_problem(tmp_path):
    """Directories of different brokers are refused, and the scan says so."""
    for name, meta in (("a", _META), ("b", _META.replace("node.id=7", "node.id=8"))):
        make_partition(tmp_path / name, f"{name}-0")
        (tmp_path / name / "meta.properties").write_text(meta)

    scan = scan_log_dirs([str(tmp_path / "a"), str(tmp_path / "b")])

    assert (scan.cluster_id, scan.node_id) == (None, None)
    assert "belong to different brokers" in str(scan.problems[0])


def test_scan_goes_on_past_a_log_directory_that_is_not_there(tmp_path):
    """A missing log directory is a problem that names it; the others are scanned."""
    orders = make_partition(tmp_path / "there", "orders-0")

    scan = scan_log_dirs([str(tmp_path / "missing"), str(tmp_path / "there")])

    assert scan.partitions == (orders,)
    assert [problem.path for problem in scan.problems] == [str(tmp_path / "missing")]


@pytest.mark.parametrize("damage", ["directory", "empty", "garbage"])
def test_scan_goes_on_past_an_unreadable_topic_id(tmp_path, damage):
    """A partition.metadata that cannot be read or understood costs that partition only."""
    good = make_partition(tmp_path, "good-0")
    bad = make_partition(tmp_path, "bad-0", topic_id=None)
    metadata = Path(bad.path) / "partition.metadata"
    if damage == "directory":
        metadata.mkdir()
    else:
        metadata.write_bytes(b"" if damage == "empty" else b"\xff\x00")

    scan = scan_log_dirs([str(tmp_path)])

    assert scan.partitions == (good,)
    assert [problem.path for problem in scan.problems] == [str(metadata)]
    assert scan.topic_of_problem[str(metadata)] in metadata.parent.name


def test_scan_goes_on_past_an_unreadable_owner(tmp_path):
    """A damaged meta.properties is a problem that names the file."""
    make_partition(tmp_path, "orders-0")
    (tmp_path / "meta.properties").write_text("version=9\n")

    scan = scan_log_dirs([str(tmp_path)])

    assert [problem.path for problem in scan.problems] == [str(tmp_path / "meta.properties")]
    assert scan.topic_of_problem == {}


def test_scan_gives_no_topic_id_where_the_file_is_not_written_yet(tmp_path):
    """A partition without partition.metadata is found, under the zero topic id."""
    fresh = make_partition(tmp_path, "fresh-0", topic_id=None)

    assert scan_log_dirs([str(tmp_path)]).partitions == (fresh,)
    assert fresh.topic_id == NO_TOPIC_ID


def test_scan_takes_a_partition_in_two_log_directories_for_neither(tmp_path):
    """A partition seen twice is being moved: a problem for now, and no partition."""
    first = make_partition(tmp_path / "a", "orders-0")
    second = make_partition(tmp_path / "b", "orders-0")

    scan = scan_log_dirs([str(tmp_path / "a"), str(tmp_path / "b")])

    assert scan.partitions == ()
    assert first.path in str(scan.problems[0])
    assert second.path in str(scan.problems[0])
    assert scan.topic_of_problem == {scan.problems[0].path: first.topic_partition.topic}


def test_scan_survives_directories_that_vanish_meanwhile(tmp_path):
    """Directories that stay are always found, however many others come and go during scans."""
    stays = [make_partition(tmp_path, f"stays-{number}") for number in range(50)]
    seen_problem = False
    scans, deadline = 0, time.monotonic() + 120
    with churning(tmp_path):
        # On a busy machine the other thread may stand still for many scans.
        while scans < 200 or (not seen_problem and time.monotonic() < deadline):
            scans += 1
            scan = scan_log_dirs([str(tmp_path)])
            assert {each for each in scan.partitions if each.topic_partition.topic == "stays"} == set(stays)
            for problem in scan.problems:
                seen_problem = True
                assert Path(problem.path).name.startswith("churns-")
                assert "vanished" in str(problem)
    assert seen_problem


def test_read_local_log_gives_the_segments_in_order(tmp_path):
    """Segments ascend, each ends where the next begins, and the last one is active."""
    orders = make_partition(tmp_path, "orders-0")
    paths = [add_segment(orders, base, b"x" * size) for base, size in ((2048, 1), (0, 3), (1024, 2))]
    (Path(orders.path) / "leader-epoch-checkpoint").write_bytes(encode_epoch_checkpoint([(0, 0), (3, 1024)]))

    log = read_local_log(orders)

    assert log.segments == (
        segment_of(paths[1], 1024),
        segment_of(paths[2], 2048),
        segment_of(paths[0], None),
    )
    assert log.epochs == ((0, 0), (3, 1024))
    assert log.partition == orders


def test_read_local_log_ignores_files_that_are_not_settled(tmp_path):
    """Deleted, cleaned and temporary files, and names of others, are no segments."""
    orders = make_partition(tmp_path, "orders-0")
    path = add_segment(orders, 100)
    for name in (
        "00000000000000000000.log.deleted",
        "00000000000000000000.log.cleaned",
        "leader-epoch-checkpoint.tmp",
        "0.log",
        "notes.log",
    ):
        (Path(orders.path) / name).touch()

    assert read_local_log(orders).segments == (segment_of(path, None),)


def test_read_local_log_of_an_empty_directory_has_no_segments(tmp_path):
    """A directory in which the broker has not made a file yet is an empty log."""
    log = read_local_log(make_partition(tmp_path, "orders-0", topic_id=None))

    assert (log.segments, log.epochs) == ((), ())


def test_read_local_log_waits_while_segments_are_being_replaced(tmp_path):
    """A log is not read while compacted segments are swapped in, because no listing is true then."""
    orders = make_partition(tmp_path, "orders-0")
    add_segment(orders, 0)
    add_segment(orders, 200)
    swap = Path(orders.path) / "00000000000000000100.log.swap"
    swap.touch()

    with pytest.raises(LocalFileError, match="replacing segments") as caught:
        read_local_log(orders)
    assert caught.value.path == str(swap)


def test_read_local_log_scans_again_when_the_directory_changed_meanwhile(tmp_path):
    """A segment that rolls during the scan is in the result: what is listed was there together."""
    orders = make_partition(tmp_path, "orders-0")
    for base in (0, 100):
        add_segment(orders, base)

    def roll(checkpoint: Path) -> None:
        add_segment(orders, 200)
        checkpoint.write_bytes(encode_epoch_checkpoint([(1, 0)]))

    with changing_during_read(orders, roll):
        log = read_local_log(orders)

    assert [segment.base_offset for segment in log.segments] == [0, 100, 200]
    assert log.epochs == ((1, 0),)


def test_read_local_log_gives_up_on_a_directory_that_never_rests(tmp_path):
    """A directory that changes during every scan is an error for now."""
    orders = make_partition(tmp_path, "orders-0")
    add_segment(orders, 0)

    with (
        changing_during_read(orders, os.mkfifo, os.mkfifo, Path.touch),
        pytest.raises(LocalFileError, match="changed while it was read") as caught,
    ):
        read_local_log(orders)
    assert caught.value.path == orders.path


@pytest.mark.parametrize("stand_in", ["dangling-link", "directory"])
def test_read_local_log_names_the_segment_that_cannot_be_read(tmp_path, stand_in):
    """A `.log` that is no readable file is an error that names it."""
    orders = make_partition(tmp_path, "orders-0")
    add_segment(orders, 0)
    bad = Path(orders.path) / encode_file_name(100, LogFileKind.LOG)
    if stand_in == "directory":
        bad.mkdir()
    else:
        bad.symlink_to(tmp_path / "nowhere")

    with pytest.raises(LocalFileError) as caught:
        read_local_log(orders)
    assert caught.value.path == str(bad)


def test_read_local_log_names_a_damaged_epoch_checkpoint(tmp_path):
    """A leader-epoch-checkpoint that cannot be parsed is an error that names it."""
    orders = make_partition(tmp_path, "orders-0")
    add_segment(orders, 0)
    checkpoint = Path(orders.path) / "leader-epoch-checkpoint"
    checkpoint.write_text("0\n2\n0 0\n")

    with pytest.raises(LocalFileError, match="cannot be parsed") as caught:
        read_local_log(orders)
    assert caught.value.path == str(checkpoint)
    with pytest.raises(LocalFileError):
        read_leader_epochs(orders.path)


def test_read_local_log_of_a_vanished_directory_is_an_error(tmp_path):
    """A partition that went since the scan is an error that names its directory."""
    orders = make_partition(tmp_path, "orders-0")
    shutil.rmtree(orders.path)

    with pytest.raises(LocalFileError) as caught:
        read_local_log(orders)
    assert caught.value.path == orders.path


def test_scans_leave_no_descriptor_open(tmp_path):
    """Every descriptor is closed, after errors too."""
    orders = make_partition(tmp_path, "orders-0")
    add_segment(orders, 0)
    (Path(orders.path) / "leader-epoch-checkpoint").mkdir()
    before = sorted(each.name for each in Path("/proc/self/fd").iterdir())

    scan_log_dirs([str(tmp_path), str(tmp_path / "missing")])
    with pytest.raises(LocalFileError) as caught:
        read_local_log(orders)

    assert caught.value.path == f"{orders.path}/leader-epoch-checkpoint"
    assert sorted(each.name for each in Path("/proc/self/fd").iterdir()) == before


@contextmanager
def changing_during_read(partition: LocalPartition, *changes):
    """
    Make each of *changes* in the middle of one scan of *partition*.

    The leader epoch checkpoint is read after the names and is a pipe here: the scan waits for
    its text, which comes when the change is done. A change gets the path of the pipe, which is
    unlinked by then, and makes what the next scan finds there.
    """
    pipe = Path(partition.path) / "leader-epoch-checkpoint"
    os.mkfifo(pipe)
    # Where directory times are coarse, the change must not fall into the tick of the set-up.
    os.utime(partition.path, (0, 0))

    def serve() -> None:
        for change in changes:
            with pipe.open("wb") as writer:
                pipe.unlink()
                change(pipe)
                writer.write(encode_epoch_checkpoint([(0, 0)]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def churning(log_dir: Path):
    """Create and delete partitions in *log_dir* until the block ends."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for number in range(20):
                os.mkdir(log_dir / f"churns-{number}")  # noqa: PTH102
            for number in range(20):
                os.rmdir(log_dir / f"churns-{number}")  # noqa: PTH106

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
