"""A directory in memory, and a bucket in it as Spark's side opens it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.fakes.fixtures import store, writer
from tests.support.memory_directory import memory_directory
from tieringd.config import parse_config
from tieringd.spark.bucket import Bucket
from tieringd.storage.file_root import make_marker

__all__ = ["store", "writer"]


@pytest.fixture(scope="session", autouse=True)
def plain_memory():
    """
    Take Arrow's memory from the system's allocator.

    Thousands of decoders here live for a few records. Arrow's own allocator asks for new pages for each.
    """
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    yield
    pa.set_memory_pool(before)


@pytest.fixture
def tmp_path():
    """Give a directory in memory: most of these tests store objects, and each is synced."""
    with memory_directory() as directory:
        yield directory


@pytest.fixture
def config(tmp_path):
    (tmp_path / "bucket").mkdir()
    make_marker(tmp_path / "bucket")
    return parse_config(
        f"""\
state_directory: /nowhere
cloud_storage_backend: file
cloud_storage_file_root: {tmp_path / "bucket"}
""",
        source="test",
        environ={},
        needs_broker=False,
    )


@pytest.fixture
def bucket(config):
    bucket = Bucket(config)
    yield bucket
    bucket.close()
