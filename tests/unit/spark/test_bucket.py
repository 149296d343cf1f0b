"""A bucket without `await`: what it yields, how it fails, and that it ends."""

from __future__ import annotations

import pickle
import threading

import pytest

from tests.fakes.archive import archive_in, archived
from tests.fakes.log_writer import LogWriter
from tieringd.config import parse_config
from tieringd.errors import ConfigError, ObjectNotFound
from tieringd.formats.object_keys import data_key
from tieringd.spark.bucket import Bucket, bucket_of
from tieringd.storage.file import FileStore


@pytest.fixture
async def manifest(tmp_path, config):
    """Give the manifest of three segments of several batches."""
    writer = LogWriter(tmp_path / "log")
    for _ in range(3):
        for _ in range(20):
            writer.append()
        writer.roll()
    return await archived(writer, archive_in(FileStore(config.cloud_storage_file_root)))


def test_runs_are_the_object_in_whole_batches(bucket, manifest, config):
    """All runs together are the object, each at its position, with any size of a run."""
    segment = manifest.segments[1]
    key = data_key(manifest.partition, segment)
    data = (config.cloud_storage_file_root / key).read_bytes()

    for chunk_bytes in (100, 1000, 1 << 20):
        runs = list(bucket.runs(key, position=0, end=len(data), chunk_bytes=chunk_bytes))
        assert b"".join(view for view, _ in runs) == data
        assert all(data[at : at + len(view)] == view for view, at in runs)


def test_reading_may_stop_in_the_middle(bucket, manifest):
    """The bytes fetched ahead are released, and the bucket is as good as before."""
    segment = manifest.segments[0]
    key = data_key(manifest.partition, segment)
    runs = bucket.runs(key, position=0, end=segment.size_bytes, chunk_bytes=200)

    first, _ = next(runs)
    runs.close()

    assert bytes(first) == bytes(
        next(bucket.runs(key, position=0, end=segment.size_bytes, chunk_bytes=200))[0]
    )


def test_error_reaches_the_caller(bucket):
    """An error is raised at the item that it concerns, as it was raised on the event loop."""
    with pytest.raises(ObjectNotFound):
        next(bucket.runs("nothing/there", position=0, end=100))


def test_records_are_read_through_the_archive(bucket, manifest):
    """The parts of the archive layer work on the loop."""
    records = bucket.iterate(
        bucket.records.records(manifest, from_offset=50, read_committed=False, on_gap=lambda _: None)
    )
    assert [record.offset for record in records] == list(range(50, 180))


def test_process_keeps_one_bucket_for_a_configuration(config):
    """A second task finds the bucket of the first."""
    assert bucket_of(config) is bucket_of(pickle.loads(pickle.dumps(config)))


def bucket_threads() -> set[threading.Thread]:
    """Return the threads of open buckets; other threads come and go by themselves."""
    return {thread for thread in threading.enumerate() if thread.name == "tieringd-bucket"}


def test_bucket_that_cannot_be_opened_leaves_no_thread():
    """The error is the store's own."""
    before = bucket_threads()
    with pytest.raises(ConfigError, match="names no object store"):
        Bucket(parse_config("state_directory: /nowhere", source="test", environ={}, needs_broker=False))
    assert bucket_threads() <= before
