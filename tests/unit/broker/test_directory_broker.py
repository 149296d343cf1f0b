"""DirectoryBroker on real log directories, without a broker."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import batch
from tests.support.file_calls import counted_file_calls
from tests.unit.broker.test_disk_use import settle
from tieringd.broker.directory_broker import DirectoryBroker
from tieringd.broker.log_dir import read_local_log
from tieringd.errors import (
    BrokerDenied,
    BrokerUnavailable,
    CorruptDataError,
    LeadershipChanged,
    LocalFileError,
)
from tieringd.formats.checkpoints import encode_epoch_checkpoint
from tieringd.formats.log_names import LogFileKind, encode_file_name
from tieringd.formats.record_batch import ABORT_MARKER, encode_marker
from tieringd.model.disk_state import quota_entity
from tieringd.model.local_log import NO_BROKER, LocalLog, LocalPartition, LogDirSizes, ReplicaSize
from tieringd.model.partition import (
    NO_TOPIC_ID,
    ClusterView,
    Leadership,
    LogBounds,
    Replica,
    TopicIdPartition,
    TopicPartition,
)

_TOPIC_ID = "W1xNUlUlTfigw_K-dvdxsA"
_NAME = TopicPartition("orders", 0)
_IDENTIFIED = TopicIdPartition("cluster", "orders", _TOPIC_ID, 0)
_KINDS = (
    LogFileKind.OFFSET_INDEX,
    LogFileKind.TIME_INDEX,
    LogFileKind.TRANSACTION_INDEX,
    LogFileKind.PRODUCER_SNAPSHOT,
    LogFileKind.LOG,
)


@pytest.fixture
def orders(tmp_path):
    """Give an empty partition directory."""
    path = tmp_path / "orders-0"
    path.mkdir()
    return LocalPartition(_NAME, _TOPIC_ID, str(path), str(tmp_path))


@pytest.fixture
async def broker(tmp_path):
    broker = DirectoryBroker([str(tmp_path)])
    yield broker
    await broker.close()


def log_file(orders: LocalPartition, base_offset: int) -> Path:
    return Path(orders.path) / encode_file_name(base_offset, LogFileKind.LOG)


def write_segment(orders: LocalPartition, base_offset: int, *batches: bytes) -> Path:
    """Write a segment with all of its side files."""
    for kind in _KINDS:
        (Path(orders.path) / encode_file_name(base_offset, kind)).write_bytes(b"")
    path = log_file(orders, base_offset)
    path.write_bytes(b"".join(batches))
    return path


def append(path: Path, *batches: bytes) -> None:
    with path.open("ab") as file:
        file.write(b"".join(batches))


def open_batch(base_offset: int, producer_id: int = 7) -> bytes:
    return batch(base_offset, producer_id=producer_id, producer_epoch=0, is_transactional=True)


def names_in(orders: LocalPartition) -> set[str]:
    return {each.name for each in Path(orders.path).iterdir()}


def recreate(orders: LocalPartition) -> None:
    shutil.rmtree(orders.path)
    Path(orders.path).mkdir()


@contextmanager
def locked(path: Path):
    """Hold the lock on *path* in another process, as a broker does on its log directory."""
    holder = (
        "import fcntl, sys; lock = open(sys.argv[1], 'r+b'); fcntl.lockf(lock, fcntl.LOCK_EX);"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield
        process.stdin.close()


async def bounds_of(broker: DirectoryBroker, orders: LocalPartition):
    return (await broker.log_bounds([read_local_log(orders)], leader_epochs={_NAME: 0}))[_NAME]


async def test_cluster_id_comes_from_the_log_directory(broker, tmp_path):
    """The cluster id is the one in meta.properties if none is configured."""
    (tmp_path / "meta.properties").write_text("version=1\ncluster.id=from-disk\nnode.id=1\n")

    assert await broker.cluster_id() == "from-disk"
    assert await DirectoryBroker([str(tmp_path)], cluster_id="configured").cluster_id() == "configured"


async def test_topic_ids_are_told_of_what_is_there_and_of_nothing_else(broker, orders):
    """A directory that is missing does not say that a topic is gone."""
    (Path(orders.path) / "partition.metadata").write_text(f"version: 0\ntopic_id: {_TOPIC_ID}")
    name = orders.topic_partition.topic
    assert await broker.topic_ids([name, "missing"]) == {name: frozenset({_TOPIC_ID})}


async def test_topic_id_is_read_once_for_all_partitions_of_a_topic(broker, tmp_path):
    """One that has no id yet leaves it to the next, and what is being deleted is not asked."""
    ids = {"a-b-0": "", "a-b-1": _TOPIC_ID, "a-b-2": _TOPIC_ID, "a-b-3.abc-delete": "x", "other-0": "x"}
    for name, topic_id in ids.items():
        (tmp_path / name).mkdir()
        if topic_id:
            (tmp_path / name / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id}\n")
    with counted_file_calls() as calls:
        assert await broker.topic_ids(["a-b"]) == {"a-b": frozenset({_TOPIC_ID})}
    assert calls["open"] <= 2
    assert calls["scandir"] == 1


async def test_topic_ids_follow_the_names_in_the_log_directory(broker, tmp_path):
    """What the names mean is kept while they are the same, and the ids are read anew."""
    for number in range(2):
        (tmp_path / f"orders-{number}").mkdir()
    assert await broker.topic_ids(["orders"]) == {"orders": frozenset({NO_TOPIC_ID})}
    (tmp_path / "orders-1" / "partition.metadata").write_text(f"version: 0\ntopic_id: {_TOPIC_ID}\n")
    assert await broker.topic_ids(["orders"]) == {"orders": frozenset({_TOPIC_ID})}
    (tmp_path / "orders-1").rename(tmp_path / "payments-1")
    assert await broker.topic_ids(["orders", "payments"]) == {
        "orders": frozenset({NO_TOPIC_ID}),
        "payments": frozenset({_TOPIC_ID}),
    }
    (tmp_path / "orders-0").rmdir()
    assert await broker.topic_ids(["orders"]) == {}


async def test_missing_cluster_id_is_denied(broker):
    """The operator has to name a cluster id if there is none, because it is part of every key."""
    with pytest.raises(BrokerDenied, match="Set cluster_id"):
        await broker.cluster_id()


async def test_replicas_takes_the_epoch_from_the_checkpoint(broker, orders):
    """Every partition is led, under the last epoch of its checkpoint, or 0 without one."""
    assert (await broker.replicas([orders])).replicas == {_NAME: Replica(0, is_leader=True)}
    checkpoint = Path(orders.path) / "leader-epoch-checkpoint"
    checkpoint.write_bytes(encode_epoch_checkpoint([(0, 0), (5, 10)]))

    assert (await broker.replicas([orders])).replicas == {_NAME: Replica(5, is_leader=True)}


async def test_replicas_without_a_broker_are_the_whole_cluster(broker, orders):
    """Each topic has as many partitions as there are on disk."""
    more = [replace(orders, topic_partition=TopicPartition(*name)) for name in (("orders", 4), ("clicks", 0))]
    view = await broker.replicas([orders, *more])
    led = Replica(0, is_leader=True)
    assert view == ClusterView(
        {_NAME: led, TopicPartition("orders", 4): led, TopicPartition("clicks", 0): led},
        {"orders": 2, "clicks": 1},
    )
    assert await broker.replicas([]) == ClusterView({}, {})


async def test_topics_without_a_broker_have_no_settings_and_take_none(broker):
    """Topics without a broker have no settings, and setting one is refused by name."""
    assert await broker.topic_configs(["orders"]) == {"orders": {}}
    assert await broker.topic_overrides("orders") == {}
    with pytest.raises(
        BrokerDenied, match=r"retention\.ms of topic orders cannot be set: broker.kind is none"
    ):
        await broker.alter_topic("orders", {"retention.ms": "-1"})


async def test_directory_without_a_broker_has_no_id_and_no_clients(broker):
    """A directory without a broker has no id and no client quotas. Each request is refused by name."""
    with pytest.raises(BrokerDenied, match=r"the broker has no id: broker\.kind is none"):
        await broker.node_id()
    with pytest.raises(BrokerDenied, match=r"client quotas cannot be read: broker\.kind is none"):
        await broker.client_quotas()
    with pytest.raises(
        BrokerDenied, match="client quotas of user alice cannot be set: broker\\.kind is none"
    ):
        await broker.alter_client_quotas({quota_entity(user="alice"): {"producer_byte_rate": 1.0}})


async def test_replicas_leaves_a_damaged_checkpoint_to_the_scan_of_the_log(broker, orders, tmp_path):
    """A damaged checkpoint costs its own partition only: the scan of its log fails and names the file."""
    other = tmp_path / "payments-0"
    other.mkdir()
    (other / "leader-epoch-checkpoint").write_text("nonsense")
    payments = LocalPartition(TopicPartition("payments", 0), _TOPIC_ID, str(other), str(tmp_path))

    write_segment(payments, 0, batch(0))

    view = await broker.replicas([orders, payments])
    led = Replica(0, is_leader=True)
    assert view.replicas == {_NAME: led, payments.topic_partition: led}
    with pytest.raises(LocalFileError, match="leader-epoch-checkpoint"):
        read_local_log(payments)


async def test_log_bounds_reach_from_the_first_base_to_the_last_batch(broker, orders):
    """The log begins at the first base on disk and ends after the last batch."""
    write_segment(orders, 100, batch(100), batch(103))
    write_segment(orders, 200, batch(200))

    assert await bounds_of(broker, orders) == LogBounds(100, 203, 203)


async def test_log_bounds_of_an_empty_active_segment_end_at_its_base(broker, orders):
    """A segment that just rolled ends where it begins."""
    write_segment(orders, 100, batch(100))
    write_segment(orders, 200)

    assert await bounds_of(broker, orders) == LogBounds(100, 200, 200)


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param(batch(3)[:-1], id="body-cut"),
        pytest.param(batch(3)[:30], id="header-cut"),
        pytest.param(bytes(4096), id="zeros"),
    ],
)
async def test_log_bounds_end_before_a_torn_tail(broker, orders, tail):
    """An incomplete batch at the end of the active segment is not in the log yet."""
    path = write_segment(orders, 0, batch(0))
    append(path, tail)

    assert await bounds_of(broker, orders) == LogBounds(0, 3, 3)


async def test_log_bounds_follow_the_log_as_it_grows_and_rolls(broker, orders):
    """Later scans see what was appended, in the same segment and in new ones."""
    path = write_segment(orders, 0, batch(0))
    assert await bounds_of(broker, orders) == LogBounds(0, 3, 3)

    append(path, batch(3)[:40])
    assert await bounds_of(broker, orders) == LogBounds(0, 3, 3)
    append(path, batch(3)[40:])
    assert await bounds_of(broker, orders) == LogBounds(0, 6, 6)
    append(path, batch(6))
    write_segment(orders, 9, batch(9))
    assert await bounds_of(broker, orders) == LogBounds(0, 12, 12)


async def test_log_bounds_do_not_walk_again_what_was_walked(broker, orders):
    """A later scan reads on from where the last one ended."""
    path = write_segment(orders, 0, batch(0), batch(3))
    write_segment(orders, 6, batch(6))
    await bounds_of(broker, orders)
    # Damage that only a second walk over the same bytes would meet.
    path.write_bytes(b"x" * path.stat().st_size)
    append(log_file(orders, 6), batch(9))

    assert await bounds_of(broker, orders) == LogBounds(0, 12, 12)


async def test_log_bounds_that_need_no_walk_are_still_of_one_epoch(broker, orders):
    """A log that is as it was when it was walked has no bounds under an epoch that its files do not have."""
    write_segment(orders, 0, batch(0))
    (Path(orders.path) / "leader-epoch-checkpoint").write_bytes(encode_epoch_checkpoint([(4, 0)]))
    settle(Path(orders.path))
    log = read_local_log(orders)
    for epoch, led in ((4, True), (4, True), (3, False), (4, True)):
        bounds = (await broker.log_bounds([log], leader_epochs={_NAME: epoch}))[_NAME]
        assert isinstance(bounds, LogBounds if led else LeadershipChanged)


def replace_checkpoint(partition, *epochs):
    """Replace a partition's checkpoint as a broker does, which does not write to it."""
    recreated = Path(partition.log_dir) / "checkpoint.tmp"
    recreated.write_bytes(encode_epoch_checkpoint(epochs))
    recreated.replace(Path(partition.path) / "leader-epoch-checkpoint")


async def test_replicas_of_a_scan_are_the_same_object_until_something_changes(broker, orders, tmp_path):
    """An unchanged view is the same object, so that callers keep what follows from it."""
    other = replace(orders, topic_partition=TopicPartition("orders", 1), path=str(tmp_path / "orders-1"))
    replace_checkpoint(orders, (4, 0))
    settle(Path(orders.path))
    first = await broker.replicas([orders], held=())
    assert await broker.replicas([orders], held=()) is first
    replace_checkpoint(orders, (4, 0), (6, 0))
    assert (await broker.replicas([orders], held=())).replicas == {_NAME: Replica(6, is_leader=True)}
    assert set((await broker.replicas([other], held=())).replicas) == {other.topic_partition}


async def test_checkpoint_of_a_directory_without_a_change_is_not_looked_at(broker, orders):
    """A scan knows the epoch of a directory in which no name has changed, once it was read."""
    replace_checkpoint(orders, (4, 0))
    settle(Path(orders.path))
    held = {orders.path}
    first = await broker.replicas([orders], held=held)
    with counted_file_calls() as calls:
        assert await broker.replicas([orders], held=held) is first
    assert calls == Counter()
    replace_checkpoint(orders, (4, 0), (6, 0))
    assert (await broker.replicas([orders], held=())).replicas == {_NAME: Replica(6, is_leader=True)}
    assert (await broker.replicas([orders], held=held)).replicas == {_NAME: Replica(6, is_leader=True)}


async def test_question_about_some_partitions_leaves_the_others_known(broker, orders, tmp_path):
    """A reader asks for its partition alone: the next scan walks no log again, and reads no checkpoint."""
    other = replace(orders, topic_partition=TopicPartition("orders", 1), path=str(tmp_path / "orders-1"))
    (tmp_path / "orders-1").mkdir()
    for each in (orders, other):
        write_segment(each, 0, batch(0))
        replace_checkpoint(each, (4, 0))
        settle(Path(each.path))
    first = await broker.replicas([orders, other], held=())
    logs = [read_local_log(each) for each in (orders, other)]
    epochs = dict.fromkeys(first.replicas, 4)
    await broker.log_bounds(logs, leader_epochs=epochs)
    assert set((await broker.replicas([other])).replicas) == {other.topic_partition}
    with counted_file_calls() as calls:
        assert await broker.replicas([orders, other], held=()) is first
        bounds = await broker.log_bounds(logs, leader_epochs=epochs)
    assert bounds == dict.fromkeys(first.replicas, LogBounds(0, 3, 3))
    assert calls == Counter(stat=2)


async def test_log_bounds_hold_the_stable_offset_back_at_an_open_transaction(broker, orders):
    """The last stable offset is the first of the oldest open transaction, whichever segment it is in."""
    write_segment(orders, 0, batch(0), open_batch(3, producer_id=7))
    path = write_segment(orders, 6, open_batch(6, producer_id=8), encode_marker(9, producer_id=8))

    assert await bounds_of(broker, orders) == LogBounds(0, 3, 10)
    append(path, encode_marker(10, producer_id=7, marker=ABORT_MARKER))
    assert await bounds_of(broker, orders) == LogBounds(0, 11, 11)


async def test_log_bounds_begin_anew_when_the_log_shrank(broker, orders):
    """A truncated log ends where it ends now, and its open transactions are those still in it."""
    path = write_segment(orders, 0, batch(0), open_batch(3))
    assert await bounds_of(broker, orders) == LogBounds(0, 3, 6)

    os.truncate(path, len(batch(0)))
    assert await bounds_of(broker, orders) == LogBounds(0, 3, 3)
    append(path, batch(3), batch(6))
    assert await bounds_of(broker, orders) == LogBounds(0, 9, 9)


async def test_log_bounds_begin_anew_when_other_bytes_took_the_place(broker, orders):
    """A file that was truncated and written again between two scans is not taken for the old one."""
    path = write_segment(orders, 0, batch(0), open_batch(3))
    await bounds_of(broker, orders)

    with path.open("r+b") as file:
        file.truncate()
        # Batches of the same sizes: the place where the last scan ended is a batch's beginning.
        file.write(batch(0, [b"x", b"y", b"z"]) + batch(3) + batch(6))

    assert await bounds_of(broker, orders) == LogBounds(0, 9, 9)


async def test_log_bounds_begin_anew_when_the_old_place_makes_no_sense(broker, orders):
    """A log is read from its start if the end of the last scan may now be inside a batch."""
    path = write_segment(orders, 0, batch(0), batch(3))
    await bounds_of(broker, orders)

    with path.open("r+b") as file:
        file.truncate()
        file.write(batch(0, [b"other"] * 20) + batch(20, [b"other"] * 20))

    assert await bounds_of(broker, orders) == LogBounds(0, 40, 40)


async def test_log_bounds_begin_anew_when_the_directory_was_created_again(broker, orders):
    """A partition that was deleted and created again has bounds of its own."""
    write_segment(orders, 0, batch(0), batch(3))
    await bounds_of(broker, orders)
    recreate(orders)
    write_segment(orders, 0, batch(0))

    assert await bounds_of(broker, orders) == LogBounds(0, 3, 3)


async def test_log_bounds_of_a_corrupt_closed_segment_are_its_error(broker, orders, tmp_path):
    """Damage in a closed segment is an error of that log alone, which names the file and place."""
    path = write_segment(orders, 0, batch(0), b"damage" * 20)
    write_segment(orders, 100, batch(100))
    other = tmp_path / "payments-0"
    other.mkdir()
    payments = LocalPartition(TopicPartition("payments", 0), _TOPIC_ID, str(other), str(tmp_path))
    write_segment(payments, 0, batch(0))

    bounds = await broker.log_bounds(
        [read_local_log(orders), read_local_log(payments)],
        leader_epochs={_NAME: 0, payments.topic_partition: 0},
    )

    error = bounds[_NAME]
    assert isinstance(error, CorruptDataError)
    assert (error.source, error.position) == (str(path), len(batch(0)))
    assert bounds[payments.topic_partition] == LogBounds(0, 3, 3)


async def test_log_bounds_of_a_cut_closed_segment_are_its_error(broker, orders):
    """A closed segment has no excuse for a cut batch at its end."""
    write_segment(orders, 0, batch(0), batch(3)[:-1])
    write_segment(orders, 100, batch(100))

    assert isinstance(await bounds_of(broker, orders), CorruptDataError)


async def test_log_bounds_of_a_vanished_log_are_its_error(broker, orders):
    """A log that went since it was listed has an error that names the file."""
    path = write_segment(orders, 0, batch(0))
    local = read_local_log(orders)
    path.unlink()

    error = (await broker.log_bounds([local], leader_epochs={_NAME: 0}))[_NAME]
    assert isinstance(error, LocalFileError)
    assert error.path == str(path)


async def test_log_bounds_of_a_log_without_segments_are_an_error(broker, orders):
    """A directory in which no segment is yet has no bounds, and says so."""
    error = (await broker.log_bounds([LocalLog(orders, (), ())], leader_epochs={_NAME: 0}))[_NAME]

    assert isinstance(error, LocalFileError)
    assert "holds no segment" in str(error)


async def test_topic_configs_are_empty_for_every_topic(broker):
    """Topics without a broker have no configuration."""
    assert await broker.topic_configs(["orders", "payments"]) == {"orders": {}, "payments": {}}


async def test_trim_unlinks_whole_segments_from_the_head(broker, orders):
    """Segments below the offset go with all their side files; the rest stays whole."""
    for base_offset in (0, 100, 200):
        write_segment(orders, base_offset, batch(base_offset))
    checkpoint = Path(orders.path) / "leader-epoch-checkpoint"
    checkpoint.write_bytes(encode_epoch_checkpoint([(0, 0)]))

    assert await broker.trim(Leadership(_IDENTIFIED, 0), read_local_log(orders), before_offset=100) == 100

    left = {encode_file_name(base, kind) for base in (100, 200) for kind in _KINDS}
    assert names_in(orders) == {*left, checkpoint.name}
    assert await bounds_of(broker, orders) == LogBounds(100, 203, 203)


async def test_trim_never_takes_the_active_segment(broker, orders):
    """The active segment stays, however high the offset is."""
    for base_offset in (0, 100):
        write_segment(orders, base_offset, batch(base_offset))

    assert await broker.trim(Leadership(_IDENTIFIED, 0), read_local_log(orders), before_offset=10_000) == 100
    assert await broker.trim(Leadership(_IDENTIFIED, 0), read_local_log(orders), before_offset=10_000) == 100
    assert log_file(orders, 100).exists()


async def test_trim_inside_a_segment_leaves_it_whole(broker, orders):
    """A segment that reaches past the offset is not cut."""
    for base_offset in (0, 100):
        write_segment(orders, base_offset, batch(base_offset))

    assert await broker.trim(Leadership(_IDENTIFIED, 0), read_local_log(orders), before_offset=99) == 0
    assert log_file(orders, 0).exists()


async def test_trim_ends_what_a_crash_left_half_done(broker, orders):
    """A segment whose side files are gone already is still a segment, and the next trim takes it."""
    for base_offset in (0, 100):
        write_segment(orders, base_offset, batch(base_offset))
    for kind in _KINDS[:-1]:
        (Path(orders.path) / encode_file_name(0, kind)).unlink()

    assert await bounds_of(broker, orders) == LogBounds(0, 103, 103)
    assert await broker.trim(Leadership(_IDENTIFIED, 0), read_local_log(orders), before_offset=100) == 100


async def test_trim_refuses_segments_that_changed(broker, orders):
    """Nothing is unlinked unless the files are those that were observed."""
    for base_offset in (0, 100):
        write_segment(orders, base_offset, batch(base_offset))
    local = read_local_log(orders)
    append(log_file(orders, 0), b"more")

    with pytest.raises(BrokerUnavailable, match="changed since"):
        await broker.trim(Leadership(_IDENTIFIED, 0), local, before_offset=100)
    assert log_file(orders, 0).exists()


async def test_trim_is_denied_while_a_broker_holds_its_lock(broker, orders, tmp_path):
    """Nothing is unlinked under a running broker. Trimming works when the broker is gone."""
    for base_offset in (0, 100):
        write_segment(orders, base_offset, batch(base_offset))
    (tmp_path / ".lock").touch()
    with locked(tmp_path / ".lock"):
        with pytest.raises(BrokerDenied, match="a broker is running"):
            await broker.trim(Leadership(_IDENTIFIED, 0), read_local_log(orders), before_offset=100)
        assert log_file(orders, 0).exists()

    assert await broker.trim(Leadership(_IDENTIFIED, 0), read_local_log(orders), before_offset=100) == 100
    with (tmp_path / ".lock").open("r+b") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def test_trim_names_the_file_that_cannot_be_deleted(broker, orders):
    """A file that cannot be unlinked is an error that names it, and the segment stays."""
    for base_offset in (0, 100):
        write_segment(orders, base_offset, batch(base_offset))
    stuck = Path(orders.path) / encode_file_name(0, LogFileKind.TIME_INDEX)
    stuck.unlink()
    stuck.mkdir()

    with pytest.raises(LocalFileError) as caught:
        await broker.trim(Leadership(_IDENTIFIED, 0), read_local_log(orders), before_offset=100)
    assert caught.value.path == str(stuck)
    assert log_file(orders, 0).exists()


async def test_log_dir_sizes_are_those_of_the_files(tmp_path):
    """Each log directory tells its `.log` bytes by partition, and whose it was."""
    for name, base_offset in (("orders-0", 0), ("orders-1", 7)):
        directory = tmp_path / "one" / name
        directory.mkdir(parents=True)
        (directory / encode_file_name(base_offset, LogFileKind.LOG)).write_bytes(bytes(100))
        (directory / encode_file_name(base_offset + 3, LogFileKind.LOG)).write_bytes(bytes(20))
        (directory / encode_file_name(base_offset, LogFileKind.OFFSET_INDEX)).write_bytes(bytes(999))
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "meta.properties").write_text("version=1\ncluster.id=c\nnode.id=4\n")
    broker = DirectoryBroker([str(tmp_path / "one"), str(tmp_path / "two")])
    one, two = await broker.log_dir_sizes()
    assert sorted(one.replicas, key=lambda each: each.topic_partition) == [
        ReplicaSize(TopicPartition("orders", 0), 120),
        ReplicaSize(TopicPartition("orders", 1), 120),
    ]
    assert (one.broker, one.path, one.error) == (4, str(tmp_path / "one"), "")
    assert two == LogDirSizes(NO_BROKER, str(tmp_path / "two"))


async def test_log_dir_sizes_name_what_cannot_be_read(orders, tmp_path):
    """A directory that is not there, and a partition that cannot be read, are errors beside the rest."""
    write_segment(orders, 0, batch())
    (tmp_path / "broken-0").mkdir()
    (tmp_path / "broken-0" / encode_file_name(0, LogFileKind.LOG)).mkdir()
    broker = DirectoryBroker([str(tmp_path), str(tmp_path / "nowhere")])
    here, nowhere = await broker.log_dir_sizes()
    assert [each.topic_partition for each in here.replicas] == [_NAME]
    assert "is not a regular file" in here.error
    assert str(tmp_path / "nowhere") in nowhere.error
    assert nowhere.replicas == ()


async def test_log_that_a_broker_has_led_since_is_neither_trimmed_nor_bounded(broker, orders):
    """A log whose newest leader epoch has changed since it was observed is neither trimmed nor bounded."""
    for base in (0, 100):
        write_segment(orders, base, batch(base))
    epochs_file = Path(orders.path) / "leader-epoch-checkpoint"
    epochs_file.write_bytes(encode_epoch_checkpoint([(4, 0)]))
    assert (await broker.replicas([orders])).replicas == {_NAME: Replica(4, is_leader=True)}
    log = read_local_log(orders)
    epochs_file.write_bytes(encode_epoch_checkpoint([(4, 0), (6, 103)]))

    bounds = await broker.log_bounds([log], leader_epochs={_NAME: 4})
    assert isinstance(bounds[_NAME], LeadershipChanged)
    with pytest.raises(LeadershipChanged, match="has leader epoch 6 now, not 4"):
        await broker.trim(Leadership(_IDENTIFIED, 4), log, before_offset=100)
    assert log_file(orders, 0).exists()
    assert await broker.trim(Leadership(_IDENTIFIED, 6), log, before_offset=100) == 100


async def test_epoch_that_could_not_be_read_is_asked_for_again_where_no_name_changes(broker, orders):
    """A file may be unreadable for another reason than its contents, which no change of a name shows."""
    checkpoint = Path(orders.path) / "leader-epoch-checkpoint"
    checkpoint.write_text("nonsense")
    found, held = (orders,), frozenset({orders.path})
    assert (await broker.replicas(found, held=held)).replicas == {_NAME: Replica(0, is_leader=True)}
    checkpoint.write_bytes(encode_epoch_checkpoint([(5, 0)]))
    second = await broker.replicas(found, held=held)
    assert second.replicas == {_NAME: Replica(5, is_leader=True)}
    assert await broker.replicas(found, held=held) is second


async def test_epoch_of_a_changed_directory_is_read_also_where_the_partitions_are_the_same(broker, orders):
    """The other epochs stay as they were read."""
    checkpoint = Path(orders.path) / "leader-epoch-checkpoint"
    checkpoint.write_bytes(encode_epoch_checkpoint([(5, 0)]))
    found, held = (orders,), frozenset({orders.path})
    await broker.replicas(found, held=held)
    checkpoint.write_bytes(encode_epoch_checkpoint([(5, 0), (6, 0)]))
    assert (await broker.replicas(found, held=held)).replicas == {_NAME: Replica(5, is_leader=True)}
    assert (await broker.replicas(found, held=())).replicas == {_NAME: Replica(6, is_leader=True)}
    checkpoint.write_text("nonsense")
    assert (await broker.replicas(found, held=())).replicas == {_NAME: Replica(0, is_leader=True)}


async def test_bounds_of_logs_that_are_all_as_they_were_are_the_same_object(broker, orders):
    """The caller sees without a comparison that nothing is new. Another log or epoch gives another answer."""
    write_segment(orders, 0, batch(0))
    settle(Path(orders.path))
    logs, epochs = [read_local_log(orders)], {_NAME: 0}
    await broker.log_bounds(logs, leader_epochs=epochs)
    first = await broker.log_bounds(logs, leader_epochs=epochs)
    assert await broker.log_bounds(list(logs), leader_epochs=dict(epochs)) is first
    (refused,) = (await broker.log_bounds(logs, leader_epochs={_NAME: 7})).values()
    assert isinstance(refused, LeadershipChanged)
    write_segment(orders, 3, batch(3))
    settle(Path(orders.path))
    logs = [read_local_log(orders)]
    assert await broker.log_bounds(logs, leader_epochs=epochs) == {_NAME: LogBounds(0, 6, 6)}


async def test_fault_is_not_kept_for_the_next_question(broker, orders):
    """The same log is asked for again, and its file says another epoch by then."""
    write_segment(orders, 0, batch(0))
    checkpoint = Path(orders.path) / "leader-epoch-checkpoint"
    checkpoint.write_bytes(encode_epoch_checkpoint([(4, 0)]))
    settle(Path(orders.path))
    logs, epochs = [read_local_log(orders)], {_NAME: 5}
    for _ in range(2):
        (refused,) = (await broker.log_bounds(logs, leader_epochs=epochs)).values()
        assert isinstance(refused, LeadershipChanged)
    checkpoint.write_bytes(encode_epoch_checkpoint([(4, 0), (5, 0)]))
    assert await broker.log_bounds(logs, leader_epochs=epochs) == {_NAME: LogBounds(0, 3, 3)}
