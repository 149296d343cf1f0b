"""A bucket in a directory, as Spark's side opens it."""

from __future__ import annotations

import pytest

from tieringd.config import parse_config
from tieringd.spark.bucket import Bucket
from tieringd.storage.file_root import make_marker


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
