"""A Redpanda data directory through the daemon's own services: re-framed, archived, trimmed, read back."""

from __future__ import annotations

import shutil

import pytest

from tests.fakes.archive import SCAN_NUMBERS, archive_clock, archive_in
from tests.fakes.memory_store import MemoryStore
from tests.fakes.topics import topic_config
from tests.redpanda_builders import RedpandaLog
from tieringd.archiving.archiver import Archiver
from tieringd.archiving.first_claims import FirstClaims
from tieringd.archiving.observer import Observation
from tieringd.archiving.share_groups import ShareGroups
from tieringd.broker.layout import RedpandaLayout
from tieringd.errors import LocalFileError
from tieringd.formats.object_keys import data_key
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership, LogBounds, TopicIdPartition
from tieringd.policies.upload_plan import UploadLimits

NOW_MS = 1_800_000_000_000


class TrimmingBroker:
    """A broker that trims whatever it is asked to, and remembers it."""

    def __init__(self):
        self.trimmed_before = []

    async def share_group_starts(self, *, known):
        assert not known
        return {}

    async def trim(self, leadership, log, *, before_offset, needs_every_replica):
        self.trimmed_before.append(before_offset)
        return before_offset


@pytest.fixture
def log():
    """Give three segments of two terms; bookkeeping lies between the records of each."""
    log = RedpandaLog().roll(term=1).data([b"a", b"b"]).bookkeeping().data([b"c"])
    log = log.roll(term=1).bookkeeping().data([b"d", b"e"]).roll(term=2).data([b"f"])
    return log.roll(term=2).data([b"g"]).allocated()


@pytest.fixture
def data_dir(tmp_path, log):
    """Give a data directory with the log in it."""
    log.write_to(tmp_path / "data" / "kafka" / "orders" / "0_27")
    return tmp_path / "data"


@pytest.fixture
def layout(tmp_path):
    return RedpandaLayout(str(tmp_path / "spool"))


def observed_in(layout, data_dir, *, known=(), target_bytes=None):
    (partition,) = layout.scan([str(data_dir)]).partitions
    local = layout.read_log(partition, known)
    end = local.segments[-1].base_offset + 1
    topic = topic_config(target_bytes=target_bytes)
    return Observation(local, LogBounds(local.first_offset, end, end), topic, scan_number=next(SCAN_NUMBERS))


def archiver_of(archive, layout, broker, partition):
    archive.remote_log._layout = archive.remote_log._copier._layout = layout
    return Archiver(
        Leadership(partition, 2),
        broker=broker,
        remote_log=archive.remote_log,
        manifests=archive.manifests,
        metrics=Metrics(),
        limits=UploadLimits(),
        clock=archive_clock(lambda: NOW_MS),
        layout=layout,
        share_groups=ShareGroups(broker, metrics=Metrics(), steady_ms=lambda: NOW_MS, hold_ms=1),
        first_claims=FirstClaims(),
    )


async def test_redpanda_segments_are_archived_as_kafka_batches_and_trimmed(log, data_dir, layout):
    """Clients see what is stored, trimming compares it, and it reads back with Kafka's offsets."""
    store, broker = MemoryStore(), TrimmingBroker()
    archive = archive_in(store)
    seen = observed_in(layout, data_dir, target_bytes=1)
    partition = TopicIdPartition("cluster", "orders", seen.log.partition.topic_id, 0)
    archiver = archiver_of(archive, layout, broker, partition)

    result = await archiver.step(seen)

    closed = log.segments[:-1]
    manifest = archiver.manifest
    assert [one.base_offset for one in manifest.segments] == [one.base_offset for one in closed]
    for segment, stored in zip(closed, manifest.segments, strict=True):
        data, _ = await store.get(data_key(partition, stored))
        assert data == segment.kafka
    assert (result.uploaded, result.trimmed) == (len(closed), len(closed))
    assert broker.trimmed_before == [log.segments[-1].base_offset]
    records = archive.records.records(manifest, from_offset=0, read_committed=True, on_gap=pytest.fail)
    assert [(one.offset, one.value) async for one in records] == list(
        enumerate([b"a", b"b", b"c", b"d", b"e", b"f"])
    )


async def test_translation_in_the_manifest_serves_a_trimmed_log(log, data_dir, tmp_path):
    """The manifest gives the Kafka offsets of a log whose head is gone, also to a new process."""
    archive = archive_in(MemoryStore())
    first = RedpandaLayout(str(tmp_path / "spool"))
    seen = observed_in(first, data_dir)
    partition = TopicIdPartition("cluster", "orders", seen.log.partition.topic_id, 0)
    archiver = archiver_of(archive, first, TrimmingBroker(), partition)
    await archiver.step(seen)
    for segment in log.segments[:-1]:
        for path in data_dir.rglob(f"{segment.raw_base_offset}-*"):
            path.unlink()

    restarted = RedpandaLayout(str(tmp_path / "spool"))
    with pytest.raises(LocalFileError, match="is unknown"):
        observed_in(restarted, data_dir)
    stored = (await archive.manifests.load(partition)).manifest

    assert (
        observed_in(restarted, data_dir, known=[stored.translation]).log.first_offset
        == log.segments[-1].base_offset
    )


async def test_segment_that_changed_is_not_trimmed(log, data_dir, layout):
    """Other bytes than the stored ones stay where they are."""
    broker = TrimmingBroker()
    archive = archive_in(MemoryStore())
    seen = observed_in(layout, data_dir)
    partition = TopicIdPartition("cluster", "orders", seen.log.partition.topic_id, 0)
    archiver = archiver_of(archive, layout, broker, partition)
    await archiver.step(seen)

    shutil.rmtree(data_dir)
    other = RedpandaLog().roll(term=1).data([b"x", b"y"]).bookkeeping().data([b"z"])
    other = other.roll(term=1).bookkeeping().data([b"d", b"e"]).roll(term=2).data([b"f"])
    other.roll(term=2).data([b"g"]).allocated().write_to(data_dir / "kafka" / "orders" / "0_27")
    await archiver.step(observed_in(layout, data_dir, target_bytes=1))

    assert broker.trimmed_before == []


def test_spool_is_named_when_it_cannot_be_used(tmp_path, data_dir):
    """A spool directory that is a file is an error with its path, and no descriptor stays open."""
    (tmp_path / "spool").write_text("")
    layout = RedpandaLayout(str(tmp_path / "spool"))
    (partition,) = layout.scan([str(data_dir)]).partitions
    segment = layout.read_log(partition, ()).segments[0]
    with pytest.raises(LocalFileError, match="spool"):
        layout.open(segment)
