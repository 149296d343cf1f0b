"""Restoring a partition into a stopped broker's log directory, whatever came before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.archive import archived
from tests.fakes.log_writer import LogWriter
from tieringd.broker.log_dir import read_local_log, read_topic_id
from tieringd.broker.restored_log import RestoredLog, require_stopped
from tieringd.errors import ConfigError, CorruptDataError, LocalFileError, ObjectNotFound
from tieringd.formats.object_keys import data_key
from tieringd.formats.record_batch import parse_header
from tieringd.model.partition import TopicPartition
from tieringd.policies.restore import RestoreLimits, plan_restore
from tieringd.services.restorer import Restorer

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

    async def restore(self, manifest, limits=ALL, *, target=None):
        plan = plan_restore(manifest, limits)
        return await self._restorer.restore(manifest, plan, target or self._target)


@pytest.fixture
def site(tmp_path, archive, writer):
    site = Site(tmp_path, archive, writer.name)
    assert files_of(site.place) == {}
    return site


def files_of(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.log") if path.stat().st_size}


def written(writer, segments) -> dict[str, bytes]:
    return {f"{one.base_offset:020d}.log": writer.data_of(one.base_offset) for one in segments}


async def test_log_is_what_it_was(writer, archive, site):
    """Bytes, side files and epochs are the old ones; the topic's id is the one that the new cluster gave."""
    writer.closed_segment()
    writer.begin_epoch(3)
    writer.closed_segment(), writer.closed_segment()
    manifest = await archived(writer, archive)

    done = await site.restore(manifest)

    place = site.place
    assert files_of(place) == written(writer, manifest.segments)
    assert read_topic_id(str(place)) == NEW_ID
    log = read_local_log(_local(site.place, writer))
    assert log.epochs == ((0, 0), (3, 3))
    assert (place / f"{0:020d}.index").read_bytes() == (writer.path / f"{0:020d}.index").read_bytes()
    assert (place / f"{3:020d}.snapshot").is_file()
    assert (done.start_offset, done.next_offset, done.segments, done.records) == (0, 9, 3, 9)
    assert (done.found_segments, done.ended_transactions, done.left_segments) == (0, 0, 0)
    assert sorted(one.name for one in site.directory.parent.iterdir()) == ["logs", "staging"]
    assert list((site.staging).iterdir()) == []


def _local(place, writer):
    return replace(writer.partition, path=str(place), log_dir=str(place.parent))


@pytest.mark.parametrize("ended_as", ["commit", "abort"])
async def test_transaction_over_the_end_gets_its_end(writer, archive, site, ended_as):
    """Its marker was not archived, and without one nobody could read past it."""
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
    assert (header.base_offset, header.producer_id, header.is_control) == (end, 7, True)
    assert data[-6 - 8 :].find(b"\x00\x00\x00" + (b"\x01" if ended_as == "commit" else b"\x00")) >= 0


async def test_interrupted_attempt_is_gone_on_with(writer, archive, site, store):
    """What is there and right is not fetched again; what is there and wrong is."""
    for _ in range(3):
        writer.closed_segment()
    manifest = await archived(writer, archive)
    last = data_key(writer.identified, manifest.segments[2])
    whole = store._objects.pop(last)
    with pytest.raises(ObjectNotFound):
        await site.restore(manifest)
    assert files_of(site.place) == {}
    store._objects[last] = whole
    second = site.staging / str(writer.name) / f"{3:020d}.log"
    second.write_bytes(bytes(len(second.read_bytes())))

    done = await site.restore(manifest)

    assert (done.segments, done.found_segments) == (3, 1)
    assert files_of(site.place) == written(writer, manifest.segments)


async def test_smaller_attempt_after_a_larger_one_leaves_nothing_of_it(writer, archive, site, store):
    """Segments that an earlier attempt fetched and this one does not want are not put in place."""
    for _ in range(3):
        writer.closed_segment()
    manifest = await archived(writer, archive)
    last = data_key(writer.identified, manifest.segments[2])
    whole = store._objects.pop(last)
    with pytest.raises(ObjectNotFound):
        await site.restore(manifest)
    store._objects[last] = whole

    await site.restore(manifest, RestoreLimits(last_bytes=1))

    assert files_of(site.place) == written(writer, [manifest.segments[2]])


async def test_damaged_object_is_not_put_in_place(writer, archive, site, store):
    """The broker's directory is as it was, and the error names the object."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    key = data_key(writer.identified, manifest.segments[0])
    data, *rest = store._objects[key]
    store._objects[key] = (data[:-1] + bytes([data[-1] ^ 1]), *rest)
    with pytest.raises(CorruptDataError, match=key.rpartition("/")[2]):
        await site.restore(manifest)
    assert files_of(site.place) == {}


async def test_log_with_records_is_never_replaced(writer, archive, site):
    """However few they are."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    site.log.append(b"mine")
    with pytest.raises(ConfigError, match="holds records"):
        await site.restore(manifest)
    assert files_of(site.place) == {f"{0:020d}.log": site.log.data_of(0)}


async def test_partition_that_the_broker_does_not_know_is_refused(writer, archive, site, tmp_path):
    """Kafka would take its directory for a stray one, and set it aside."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    target = RestoredLog(site.directory, tmp_path / "staging", TopicPartition("unknown", 5))
    with pytest.raises(ConfigError, match="the broker knows of no partition"):
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


def test_log_directory_is_one_of_a_broker_that_is_stopped(site, tmp_path):
    """It has a broker's files, and a lock that nobody holds (a held one is seen beside a real broker)."""
    require_stopped(site.directory)
    with pytest.raises(ConfigError, match="is not the log directory of a Kafka broker"):
        require_stopped(tmp_path)
    lock = site.directory / ".lock"
    lock.touch()
    require_stopped(site.directory)


async def test_full_disk_is_an_error_and_leaves_the_place_as_it_was(writer, archive, site):
    """A place that cannot be built in is said with its path."""
    writer.closed_segment()
    manifest = await archived(writer, archive)
    blocked = site.staging
    blocked.write_text("a file in the way")
    with pytest.raises(LocalFileError, match="staging"):
        await site.restore(manifest)
    assert files_of(site.place) == {}
