"""An archive compared with the files that it was made from, through clients that are not ours."""

from __future__ import annotations

import base64
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tests.e2e.sample_topics import SeenRecord
from tests.support.daemon import run_json, run_well
from tieringd.formats.manifest_codec import decode_manifest
from tieringd.formats.object_keys import data_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tests.support.daemon import Daemon
    from tieringd.model.manifest import PartitionManifest


class Objects(Protocol):
    """The objects of a bucket, by key."""

    def keys(self) -> list[str]:
        """Return every key."""

    def read(self, key: str) -> bytes | None:
        """Return an object's bytes, or None."""


class FileObjects:
    """The objects of a directory that stands in for a bucket."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def keys(self) -> list[str]:
        """Return every key; what is being written lies in a hidden directory and has none."""
        # A delete removes a directory that it leaves empty. Unlike `rglob`, `walk` passes over it.
        paths = (
            Path(directory, name).relative_to(self._root)
            for directory, _, names in os.walk(self._root)
            for name in names
        )
        return sorted(str(path) for path in paths if not path.parts[0].startswith("."))

    def read(self, key: str) -> bytes | None:
        """Return an object's bytes, or None."""
        path = self._root / key
        return path.read_bytes() if path.is_file() else None


def closed_segments(directory: Path) -> dict[int, bytes]:
    """
    Return the bytes of each closed segment of a partition's directory, by base offset, ascending.

    One that the broker deletes during the scan is not there.
    """
    found: dict[int, bytes] = {}
    for path in sorted(directory.glob("*.log"))[:-1]:
        with suppress(FileNotFoundError):
            found[int(path.stem)] = path.read_bytes()
    return found


def base_of_active(directory: Path) -> int:
    """Return where the active segment of a partition's directory begins: what is closed ends there."""
    return max(int(path.stem) for path in directory.glob("*.log"))


def base_of_first(directory: Path) -> int:
    """Return where the first segment of a partition's directory begins."""
    return min(int(path.stem) for path in directory.glob("*.log"))


def until_trimmed(daemon: Daemon) -> None:
    """Return when closed segments are archived, the log is trimmed, and the daemon has seen that it is."""
    daemon.until(lambda: daemon.events("local log trimmed"), "the log is trimmed")
    daemon.until(
        lambda: daemon.metric("tieringd_upload_pending_segments") == 0, "all closed segments are archived"
    )
    trims = -1
    # A segment that is archived after the first trim is trimmed by a second one.
    while trims != len(daemon.events("local log trimmed")):
        # An archiver's step may take longer than rounds do: one that began after the last trim has to end.
        daemon.until(lambda: _is_last_trim_seen(daemon), "an archiver has seen the last trim")
        trims = len(daemon.events("local log trimmed"))
        daemon.until_rounds(3)


def _is_last_trim_seen(daemon: Daemon) -> bool:
    """
    Say whether each trimmed partition's last step has met the log's start of the last trim.

    A step shows its figures when it has trimmed, so they are read before the trims.
    """
    names = {(one["topic"], one["partition"]) for one in daemon.events("local log trimmed")}
    seen = {
        (topic, number): daemon.metric("tieringd_local_log_start_offset", topic=topic, partition=str(number))
        for topic, number in names
    }
    starts = {
        (one["topic"], one["partition"]): one["log_start_offset"]
        for one in daemon.events("local log trimmed")
    }
    return all((seen.get(name) or 0) >= start for name, start in starts.items())


def archived_manifests(objects: Objects, topic: str, number: int = 0) -> dict[str, PartitionManifest]:
    """Return the stored manifests of one partition by topic id: one for each incarnation of the topic."""
    found = {}
    for key in objects.keys():  # noqa: SIM118 a method, not a mapping's
        if f"/meta/{topic}/{number}_" in key and key.endswith("/manifest"):
            manifest = decode_manifest(objects.read(key))
            found[manifest.partition.topic_id] = manifest
    return found


def archived_manifest(objects: Objects, topic: str, number: int = 0) -> PartitionManifest:
    """Return the stored manifest of a partition whose topic was created once."""
    (manifest,) = archived_manifests(objects, topic, number).values()
    return manifest


def segment_keys(manifest: PartitionManifest) -> list[str]:
    """Return the keys of the data objects that a manifest names."""
    return [data_key(manifest.partition, segment) for segment in manifest.segments]


def stored_segments(objects: Objects, manifest: PartitionManifest) -> dict[int, bytes | None]:
    """Return the bytes of each object that the manifest names, by base offset."""
    return {
        segment.base_offset: objects.read(data_key(manifest.partition, segment))
        for segment in manifest.segments
    }


def data_keys(objects: Objects) -> list[str]:
    """Return the keys of all data objects."""
    return [key for key in objects.keys() if key.endswith(".log")]  # noqa: SIM118 a method, not a mapping's


def unreferenced(objects: Objects, manifests: Iterable[PartitionManifest]) -> list[str]:
    """Return the keys of data objects that none of the bucket's manifests names."""
    named = {key for manifest in manifests for key in segment_keys(manifest)}
    return [key for key in data_keys(objects) if key not in named]


def assert_whole(config: Path) -> Any:
    """Assert that a deep scrub finds no fault, and return its report."""
    report = run_json("archive", "verify", "--deep", "--config", str(config))
    assert report["faults"] == 0, report
    return report


def archived_bytes(config: Path, topic: str, number: int = 0) -> bytes:
    """Return what `tieringd archive cat` writes."""
    return run_well("archive", "cat", topic, str(number), "--config", str(config))


def read_records(config: Path, topic: str, *options: str, number: int = 0) -> list[SeenRecord]:
    """Return the records that `tieringd read --archive-only` prints of a partition."""
    return read_log(config, topic, "--archive-only", *options, number=number)


def read_log(config: Path, topic: str, *options: str, number: int = 0) -> list[SeenRecord]:
    """Return the records that `tieringd read` prints of a partition: the archive's, then the broker's."""
    printed = run_well("read", topic, "--partition", str(number), "--config", str(config), *options)
    return [printed_record(line) for line in printed.splitlines()]


def printed_record(line: bytes) -> SeenRecord:
    """Return the record that a line of `tieringd read` holds."""
    return _record(json.loads(line))


def _record(document: Mapping[str, Any]) -> SeenRecord:
    return SeenRecord(
        document["offset"],
        document["timestamp"],
        document["timestamp_type"],
        _bytes(document["key"]),
        _bytes(document["value"]),
        tuple((name, _bytes(value)) for name, value in document["headers"]),
    )


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
