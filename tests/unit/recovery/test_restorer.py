"""Restoring a partition into a stopped broker's log directory, whatever came before."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.builders import GOLDEN
from tests.fakes.archive import archived
from tests.fakes.log_writer import LogWriter
from tests.fakes.store import rot
from tieringd.archive.record_deletion import delete_archived
from tieringd.broker.log_dir import read_local_log, read_topic_id
from tieringd.broker.restored_log import RestoredLog
from tieringd.broker.stopped_broker import kept_stopped
from tieringd.errors import ConfigError, CorruptDataError, LocalFileError, ObjectNotFound
from tieringd.formats.checkpoints import parse_offset_checkpoint
from tieringd.formats.index_files import EMPTY_PRODUCER_SNAPSHOT, parse_transaction_index
from tieringd.formats.object_keys import data_key
from tieringd.formats.record_batch import HEADER_BYTES, parse_header, sealed
from tieringd.formats.restored_batches import put_first_epoch
from tieringd.model.manifest_parts import Gap, RecordDeletion
from tieringd.model.partition import TopicPartition
from tieringd.model.segment import BrokerIndexes
from tieringd.policies.recovery import RestoreLimits, plan_restore
from tieringd.recovery.restorer import Restorer

NEW_ID = "AAAAAAAAAAAAAAAAAAAAAQ"
ALL = RestoreLimits()


class Site:
    """Another broker, stopped, which knows the topic and has nothing of it; and what restores there."""

    def __init__(self, tmp_path, archive, name):
        self.directory = tmp_path / "new" / "logs"
        self.directory.mkdir(parents=True)
        (self.directory / "meta.properties").write_text("version=1\ncluster.id=new\nnode.id=1\n")
        self.log = LogWriter(self.directory, topic_id=NEW_ID)
        self.staging = tmp_path / "new" / "staging"
        self.place = self.directory / str(name)
        self._target = RestoredLog(self.directory, self.staging, name)
        self._restorer = Restorer(archive.remote_log, archive.reader)

    def read_indexes_through(self, remote_log, archive):
        """Restore with the indexes that *remote_log* gives."""
        self._restorer = Restorer(remote_log, archive.reader)

    async def restore(self, manifest, limits=ALL, *, target=None):
        plan = plan_restore(manifest, limits)
        return await self._restorer.restore(manifest, plan, target or self._target)

    async def restore_shallow(self, manifest):
        return await self._restorer.restore_shallow(manifest, self._target)


class ChangedIndexes:
    """A remote log for its indexes: *before* is called at each request, and *change* with each answer."""

    def __init__(self, remote_log, *, before=lambda: None, change=lambda index: index):
        self._remote_log = remote_log
        self._before = before
        self._change = change

    async def index_of(self, partition, segment):
        self._before()
        return self._change(await self._remote_log.index_of(partition, segment))


@pytest.fixture
def site(tmp_path, archive, writer):
    site = Site(tmp_path, archive, writer.name)
    assert files_of(site.place) == {}
    return site


def files_of(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.log") if path.stat().st_size}


def new_id(producer_id):
    return producer_id if producer_id < 0 else producer_id + 2**56


def written(writer, segments) -> dict[str, bytes]:
    """Return what the broker wrote, under a topic's first leader and under ids of no cluster's producers."""
    found = {}
    for one in segments:
        data = writer.data_of(one.base_offset)
        batches = []
        while data:
            header = parse_header(data)
            new = header._replace(leader_epoch=0, producer_id=new_id(header.producer_id))
            batches.append(sealed(new, data[HEADER_BYTES : header.size_bytes]))
            data = data[header.size_bytes :]
        found[f"{one.base_offset:020d}.log"] = b"".join(batches)
    return found


async def test_log_is_what_it_was_but_for_its_epochs_and_producers(writer, archive, site):
    """Batches and side files are the old ones; epochs begin anew, and the topic's id is the new one."""
    writer.closed_segment()
    writer.begin_epoch(3)
    writer.append(producer_id=0), writer.commit(0), writer.append(), writer.roll()
    writer.closed_segment()
    manifest = await archived(writer, archive)
    assert [epoch for epoch, _ in manifest.epochs] == [0, 3]

    done = await site.restore(manifest)

    place = site.place
    assert files_of(place) == written(writer, manifest.segments)
    assert read_topic_id(str(place)) == NEW_ID
    log = read_local_log(_local(site.place, writer))
    assert log.epochs == ((0, 0),)
    assert (place / f"{0:020d}.index").read_bytes() == (writer.path / f"{0:020d}.index").read_bytes()
    assert (done.start_offset, done.next_offset, done.segments, done.records) == (0, 13, 3, 13)
    assert (done.found_segments, done.ended_transactions, done.left_segments) == (0, 0, 0)
    assert sorted(one.name for one in site.directory.parent.iterdir()) == ["logs", "staging"]
    assert list((site.staging).iterdir()) == []


def _local(place, writer):
    return replace(writer.partition, path=str(place), log_dir=str(place.parent))


async def test_shallow_restore_is_an_empty_log_where_the_archive_ends(writer, archive, site):
    """Nothing is downloaded; again it is the same, and a log with records is not replaced."""
    writer.begin_epoch(37)
    writer.closed_segment(), writer.closed_segment()
    manifest = await archived(writer, archive)
    for _ in range(2):
        done = await site.restore_shallow(manifest)
        assert (done.start_offset, done.next_offset, done.segments, done.left_segments) == (6, 6, 0, 2)
        log = read_local_log(_local(site.place, writer))
        assert [one.base_offset for one in log.segments] == [6]
        assert (log.size_bytes, log.epochs, read_topic_id(str(site.place))) == (0, ((0, 6),), NEW_ID)
    (site.place / f"{6:020d}.log").write_bytes(b"record")
    with pytest.raises(ConfigError, match="holds records"):
        await site.restore_shallow(manifest)


@pytest.mark.parametrize("ended_as", ["commit", "abort"])
async def test_transaction_over_the_end_gets_its_end(writer, archive, site, ended_as):
    """The marker was not archived, and no client could read past a transaction without one."""
    writer.append(b"in", producer_id=7)
    writer.roll()
    writer.append(b"in as well", producer_id=7)
    end = writer.roll()
    getattr(writer, ended_as)(7)
    manifest = await archived(writer, archive)
    assert manifest.next_offset == end

    done = await site.restore(manifest)

    assert done.ended_transactions == 1
    data = (site.place / f"{end:020d}.log").read_bytes()
    header = parse_header(data)
    assert (header.base_offset, header.producer_id, header.is_control) == (end, new_id(7), True)
    assert data[-6 - 8 :].find(b"\x00\x00\x00" + (b"\x01" if ended_as == "commit" else b"\x00")) >= 0


async def test_interrupted_attempt_is_gone_on_with(writer, archive, site, store):
    """Right files of the first attempt are not fetched again, and wrong ones are."""
    for _ in range(3):
        writer.closed_segment()
    manifest = await archived(writer, archive)
    last = data_key(writer.identified, manifest.segments[2])
    data, info = store.remove(last)
    with pytest.raises(ObjectNotFound):
        await site.restore(manifest)
    assert files_of(site.place) == {}
    store.place(last, data, info)
    second = site.staging / str(writer.name) / f"{3:020d}.log"
    second.write_bytes(bytes(len(second.read_bytes())))

    done = await site.restore(manifest)

    assert (done.segments, done.found_segments) == (3, 1)
    assert files_of(site.place) == written(writer, manifest.segments)


@pytest.mark.parametrize("damage", ["none", "of a batch", "old epoch", "old producer", "no batch at its end"])
async def test_file_of_an_earlier_attempt_is_judged_by_its_batches(writer, archive, site, store, damage):
    """
    A file of an earlier attempt is kept if its batches have the stored checksum under the stored epochs.

    Another file is fetched again.
    """
    writer.begin_epoch(37)
    writer.closed_segment()
    writer.append()
    writer.begin_epoch(38)
    writer.append(producer_id=5), writer.commit(5), writer.roll()
    manifest = await archived(writer, archive)
    wanted = written(writer, manifest.segments)
    name = f"{3:020d}.log"
    earlier = {
        "none": wanted[name],
        "of a batch": wanted[name][:-1] + b"?",
        "old epoch": writer.data_of(3)[:12] + bytes([0, 0, 0, 37]) + wanted[name][16:],
        "old producer": under_first_epoch(writer.data_of(3)),
        "no batch at its end": wanted[name][:-70] + bytes(70),
    }[damage]
    directory = site.staging / str(writer.name)
    directory.mkdir(parents=True)
    (directory / name).write_bytes(earlier)

    done = await site.restore(manifest)

    assert done.found_segments == (1 if damage == "none" else 0)
    assert files_of(site.place) == wanted


def under_first_epoch(data):
    """Return what a tieringd that kept the producers' ids made of a segment."""
    data = bytearray(data)
    put_first_epoch(data)
    return bytes(data)


async def test_smaller_attempt_after_a_larger_one_leaves_nothing_of_it(writer, archive, site, store):
    """Segments that an earlier attempt fetched and this one does not want are not put in place."""
    for _ in range(3):
        writer.closed_segment()
    manifest = await archived(writer, archive)
    last = data_key(writer.identified, manifest.segments[2])
    data, info = store.remove(last)
    with pytest.raises(ObjectNotFound):
        await site.restore(manifest)
    store.place(last, data, info)

    await site.restore(manifest, RestoreLimits(last_bytes=1))

    assert files_of(site.place) == written(writer, [manifest.segments[2]])


async def test_damaged_object_is_not_put_in_place(writer, archive, site, store):
    """The broker's directory is as it was, and the error names the object."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    key = data_key(writer.identified, manifest.segments[0])
    rot(store, key)
    with pytest.raises(CorruptDataError, match=key.rpartition("/")[2]):
        await site.restore(manifest)
    assert files_of(site.place) == {}


async def test_log_with_records_is_never_replaced(writer, archive, site):
    """A log with any record is never replaced."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    site.log.append(b"mine")
    with pytest.raises(ConfigError, match="holds records"):
        await site.restore(manifest)
    assert files_of(site.place) == {f"{0:020d}.log": site.log.data_of(0)}


@pytest.mark.parametrize("change", ["none", "new record", "of a batch", "of the marker", "a file more"])
async def test_log_that_an_earlier_attempt_has_placed_is_compared(writer, archive, site, change):
    """A log that an earlier attempt has put in its place is taken as it is if it is right, or refused."""
    writer.closed_segment()
    writer.append(b"in", producer_id=7)
    end = writer.roll()
    writer.commit(7)
    manifest = await archived(writer, archive)
    first = await site.restore(manifest)
    name, add = {
        "none": (f"{0:020d}.log", b""),
        "new record": (f"{end + 1:020d}.log", b"record"),
        "of a batch": (f"{0:020d}.log", b"?"),
        "of the marker": (f"{end:020d}.log", b"?"),
        "a file more": (f"{end + 2:020d}.log", b""),
    }[change]
    path = site.place / name
    data = path.read_bytes() if path.exists() else b""
    path.write_bytes(data[: len(data) - len(add)] + add)
    before = {one.name: one.read_bytes() for one in site.place.iterdir()}
    if change == "none":
        assert await site.restore(manifest) == replace(first, found_segments=2)
    else:
        with pytest.raises(ConfigError, match="holds records"):
            await site.restore(manifest)
    assert {one.name: one.read_bytes() for one in site.place.iterdir()} == before


async def test_partition_that_the_broker_does_not_know_is_refused(writer, archive, site, tmp_path):
    """Kafka would take its directory for a stray one, and set it aside."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    target = RestoredLog(site.directory, tmp_path / "staging", TopicPartition("unknown", 5))
    with pytest.raises(ConfigError, match="the broker has no partition"):
        await site.restore(manifest, target=target)


async def test_crash_between_the_two_renames_is_mended(writer, archive, site):
    """The empty directory was set aside and the new one not put in place yet."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    staging = site.staging
    staging.mkdir()
    site.place.rename(staging / f"{writer.name}.empty")
    await site.restore(manifest)
    assert files_of(site.place) == written(writer, manifest.segments)
    assert read_topic_id(str(site.place)) == NEW_ID
    assert list(staging.iterdir()) == []


async def deleted_inside(writer, archive):
    """Archive two segments, and delete what is before offset 7, inside the second; return the manifest."""
    for _ in range(2):
        writer.append(b"secret", b"secret", b"secret"), writer.append(b"secret", b"secret"), writer.roll()
    await archived(writer, archive)
    stored = await delete_archived(
        archive.manifests, writer.identified, RecordDeletion(7, 1 << 20), now_ms=lambda: 1
    )
    return stored.existing


async def test_records_that_a_user_deleted_stay_deleted(writer, archive, site):
    """A broker serves nothing before its checkpoint of log starts, and the report says the same."""
    starts = site.directory / "log-start-offset-checkpoint"
    starts.write_text("0\n1\nother 0 7\n")
    manifest = await deleted_inside(writer, archive)

    done = await site.restore(manifest)

    assert (done.start_offset, done.segments, list(files_of(site.place))) == (7, 1, [f"{5:020d}.log"])
    noted = {TopicPartition("other", 0): 7, writer.name: 7}
    assert parse_offset_checkpoint(starts.read_bytes()) == noted
    # The first attempt is taken for one of a release that did not note it.
    starts.unlink()
    await site.restore(manifest)
    assert parse_offset_checkpoint(starts.read_bytes()) == {writer.name: 7}
    # A broker ran in between, and a user deleted more.
    starts.write_text(f"0\n1\n{writer.name.topic} {writer.name.partition} 8\n")
    await site.restore(manifest)
    assert parse_offset_checkpoint(starts.read_bytes()) == {writer.name: 8}


@pytest.mark.parametrize("is_shallow", [False, True])
async def test_log_start_of_another_attempt_hides_nothing(writer, archive, site, is_shallow):
    """A log start that an attempt with another archive has noted is taken out of the checkpoint."""
    writer.closed_segment(), writer.closed_segment()
    manifest = await archived(writer, archive)
    starts = site.directory / "log-start-offset-checkpoint"
    starts.write_text(f"0\n2\nother 0 7\n{writer.name.topic} {writer.name.partition} 5\n")
    await (site.restore_shallow(manifest) if is_shallow else site.restore(manifest))
    assert parse_offset_checkpoint(starts.read_bytes()) == {TopicPartition("other", 0): 7}


async def test_damaged_checkpoint_is_named(writer, archive, site):
    """A checkpoint that cannot be read is named, and nothing is put in its place."""
    manifest = await deleted_inside(writer, archive)
    starts = site.directory / "log-start-offset-checkpoint"
    starts.write_text("1\n")
    with pytest.raises(CorruptDataError, match="log-start-offset-checkpoint"):
        await site.restore(manifest)
    assert starts.read_text() == "1\n"
    assert files_of(site.place) == {}


async def test_failed_rename_leaves_the_log_directory_as_it_was(writer, archive, site):
    """Nothing remembers a log that is not there, and the empty one is still in its place."""
    manifest = await deleted_inside(writer, archive)
    points = site.directory / "recovery-point-offset-checkpoint"
    points.write_text("0\n1\nother 0 7\n")
    starts = site.directory / "log-start-offset-checkpoint"
    in_the_way = site.staging / f"{writer.name}.empty"
    site.staging.mkdir()
    in_the_way.write_text("a file")
    with pytest.raises(LocalFileError, match="Not a directory"):
        await site.restore(manifest)
    assert points.read_text() == "0\n1\nother 0 7\n"
    assert not starts.exists()
    assert read_topic_id(str(site.place)) == NEW_ID
    assert files_of(site.place) == {}
    in_the_way.unlink()
    assert (await site.restore(manifest)).found_segments == 1


_TRY_THE_LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+b") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


def could_start(directory):
    """Say whether a broker could start: another process takes the lock as it does."""
    command = [sys.executable, "-c", _TRY_THE_LOCK, str(directory / ".lock")]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


def test_broker_cannot_start_while_its_directory_is_worked_in(site, tmp_path):
    """The lock that it would take is held, also where there was none (one that it holds is seen e2e)."""
    with (
        pytest.raises(ConfigError, match="is not the log directory of a Kafka broker"),
        kept_stopped(tmp_path),
    ):
        pass
    for _ in range(2):
        with kept_stopped(site.directory):
            assert not could_start(site.directory)
        assert could_start(site.directory)


async def test_record_that_came_during_the_restore_is_not_replaced(writer, archive, site):
    """The place is checked again before the new log takes it."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    remote_log = ChangedIndexes(archive.remote_log, before=lambda: site.log.append(b"mine"))
    site.read_indexes_through(remote_log, archive)
    with pytest.raises(ConfigError, match="holds records"):
        await site.restore(manifest)
    assert files_of(site.place) == {f"{0:020d}.log": site.log.data_of(0)}


async def test_restored_replica_has_no_producer_to_remember(writer, archive, site):
    """An empty snapshot lies at the end, where a segment of its own begins."""
    writer.append(b"a", producer_id=0)
    writer.commit(0)
    writer.roll()
    writer.closed_segment()
    manifest = await archived(writer, archive)
    end = manifest.next_offset
    (site.directory / "recovery-point-offset-checkpoint").write_text("0\n1\nother 0 7\n")

    await site.restore(manifest)

    snapshots = {path.name: path.read_bytes() for path in site.place.glob("*.snapshot")}
    assert snapshots == {f"{end:020d}.snapshot": EMPTY_PRODUCER_SNAPSHOT}
    assert (GOLDEN / "rolled" / f"{15:020d}.snapshot").read_bytes() == EMPTY_PRODUCER_SNAPSHOT
    logs = sorted(site.place.glob("*.log"))
    assert (logs[-1].name, logs[-1].stat().st_size) == (f"{end:020d}.log", 0)
    # Kafka would read all batches of a segment without one, and remember their producers.
    assert all(path.with_suffix(".index").is_file() for path in logs)
    points = parse_offset_checkpoint((site.directory / "recovery-point-offset-checkpoint").read_bytes())
    assert points == {TopicPartition("other", 0): 7, writer.name: end}


@pytest.mark.parametrize("rolls", ["", "before the marker", "at the end"])
async def test_aborted_transaction_is_in_the_index_where_its_marker_is(writer, archive, site, rolls):
    """The index has the transaction without side files in the archive, and with a marker of the restore."""
    first = writer.append(b"a", producer_id=7)
    writer.append(b"b", producer_id=7)
    if rolls:
        writer.roll()
        writer.append(b"between")
    if rolls == "at the end":
        writer.roll()
    marker = writer.next_offset
    writer.abort(7)
    if rolls != "at the end":
        writer.roll()
    manifest = await archived(writer, archive)
    bare = ChangedIndexes(archive.remote_log, change=lambda index: replace(index, broker=BrokerIndexes()))
    site.read_indexes_through(bare, archive)

    done = await site.restore(manifest)

    assert done.next_offset == marker + 1
    found = {path.name: parse_transaction_index(path.read_bytes()) for path in site.place.glob("*.txnindex")}
    base = {"": 0, "before the marker": 2, "at the end": marker}[rolls]
    ((name, (entry,)),) = found.items()
    assert name == f"{base:020d}.txnindex"
    assert entry[:3] == (new_id(7), first, marker)
    assert all(path.with_suffix(".index").is_file() for path in site.place.glob("*.log"))


@pytest.mark.parametrize("gap_before", [0, 6], ids=["no segment", "a segment"])
async def test_new_records_go_on_behind_a_gap(writer, archive, site, gap_before):
    """Offsets that were given out once are not given out again, though no segment reaches them."""
    writer.closed_segment(), writer.closed_segment()
    manifest = await archived(writer, archive)
    if not gap_before:
        manifest = manifest.begin(manifest.partition, start_offset=0)
    manifest = manifest.with_gap(Gap(gap_before, 4_999, "lost", 0))

    done = await site.restore(manifest)

    assert (done.next_offset, done.segments) == (5_000, 2 if gap_before else 0)
    log = read_local_log(_local(site.place, writer))
    assert [one.base_offset for one in log.segments] == ([0, 3, 5_000] if gap_before else [5_000])
    assert log.epochs == ((0, 0 if gap_before else 5_000),)


async def test_partition_that_never_had_a_record_is_left_alone(writer, archive, site):
    """The log begins at 0, as the broker made it."""
    writer.closed_segment()
    manifest = (await archived(writer, archive)).begin(writer.identified, start_offset=0)
    done = await site.restore(manifest)
    assert (done.start_offset, done.next_offset) == (None, 0)
    assert files_of(site.place) == {}


async def test_full_disk_is_an_error_and_leaves_the_place_as_it_was(writer, archive, site):
    """The error has the path of the place that cannot be built in."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    blocked = site.staging
    blocked.write_text("a file in the way")
    with pytest.raises(LocalFileError, match="staging"):
        await site.restore(manifest)
    assert files_of(site.place) == {}


async def test_damaged_checkpoint_of_log_starts_leaves_the_recovery_points_as_they_were(
    writer, archive, site
):
    """A log that is not in its place has no recovery point: the broker's own empty log is still there."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    (site.directory / "log-start-offset-checkpoint").write_text("nonsense")
    with pytest.raises(CorruptDataError, match=r"move the file away.*log-start-offset-checkpoint"):
        await site.restore(manifest)
    assert not (site.directory / "recovery-point-offset-checkpoint").exists()
    assert site.place.is_dir()
    (site.directory / "log-start-offset-checkpoint").unlink()
    await site.restore(manifest)
    assert files_of(site.place) == written(writer, manifest.segments)
