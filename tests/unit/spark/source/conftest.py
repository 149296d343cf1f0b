"""An archive in a directory, and what a Spark driver has of it."""

from __future__ import annotations

import pytest
import structlog

from tests.fakes.file_archive import FileArchive
from tieringd.spark.bucket import Bucket
from tieringd.spark.source.reader_settings import read_settings


@pytest.fixture
def archive(tmp_path):
    """Give an empty archive."""
    return FileArchive(tmp_path)


@pytest.fixture
def bucket(archive):
    """Give the archive's bucket, opened."""
    bucket = Bucket(read_settings({"path": archive.url}).config())
    yield bucket
    bucket.close()


@pytest.fixture
def warnings():
    """Give what was logged as a warning so far."""
    with structlog.testing.capture_logs() as lines:
        yield Warnings(lines)


class Warnings:
    """Warnings of this package, while they are collected."""

    def __init__(self, lines):
        self._lines = lines

    def events(self):
        """Return what was said."""
        return [line["event"] for line in self._lines if line["log_level"] == "warning"]

    def of(self, event):
        """Return the fields of each warning that says *event*."""
        return [
            {name: value for name, value in line.items() if name not in {"event", "log_level"}}
            for line in self._lines
            if line["event"] == event and line["log_level"] == "warning"
        ]
