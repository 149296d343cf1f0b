"""A damaged bucket of a real S3 server: every planted fault is found and mended, and no other is reported."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import xxhash

from tests.e2e.archives import FileObjects, archived_manifest, assert_whole, segment_keys
from tests.e2e.conftest import BUCKET
from tests.e2e.log_files import write_partition
from tests.support.daemon import (
    directory_config,
    run_command,
    run_json,
    running_daemon,
    s3_properties,
    write_config,
)

if TYPE_CHECKING:
    from pathlib import Path

SEGMENTS = 6
DEADLINE_ROUNDS = 60


@pytest.fixture
def config(tmp_path, seaweedfs, prefix):
    """Give a configuration of a log directory without a broker, and this test's part of the bucket."""
    write_partition(tmp_path / "logs", "orders-0", segments=SEGMENTS)
    properties = directory_config([tmp_path / "logs"], tmp_path, tmp_path / "state")
    del properties["cloud_storage_file_root"], properties["cloud_storage_backend"]
    properties |= s3_properties(seaweedfs, bucket=BUCKET, prefix=prefix)
    properties |= {"archive_orphan_grace_ms": "1s", "archive_quarantine_ms": "1h"}
    path = write_config(tmp_path / "tieringd.yaml", properties)
    done = run_command("run", "--once", "--config", str(path))
    assert done.returncode == 0, done.stderr.decode()
    return path


def scrubbed(config: Path, *options: str) -> dict[str, Any]:
    """Return the report of a scrub, whose exit code says whether a fault is left."""
    done = run_command("archive", "scrub", *options, "--json", "--config", str(config))
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["faults"] else 0), done.stderr.decode()
    return report


def left_behind(objects, manifest) -> str:
    """Store an object that no manifest names; return its key."""
    path = segment_keys(manifest)[0].partition("/")[2].replace(manifest.segments[0].writer_id, "dead")
    key = f"{xxhash.xxh32_intdigest(path.encode()):08x}/{path}"
    objects.write(key, b"left behind")
    return key


def test_every_planted_fault_is_found_and_mended(config, objects):
    """Removed, cut, flipped and swapped objects are each named once, and come back from the local log."""
    assert scrubbed(config, "--deep")["findings"] == []
    keys = segment_keys(archived_manifest(objects, "orders"))
    everything = [*keys, *(f"{key}.index" for key in keys)]
    sound = {key: objects.read(key) for key in everything}
    objects.delete(keys[0])
    objects.write(keys[1], sound[keys[1]][:-1])
    flipped = bytearray(sound[keys[2]])
    flipped[len(flipped) // 2] ^= 1
    objects.write(keys[2], bytes(flipped))
    objects.write(keys[3], sound[keys[4]])
    objects.write(keys[4], sound[keys[3]])
    objects.delete(f"{keys[4]}.index")
    planted = {*keys[:5], f"{keys[4]}.index"}

    report = scrubbed(config, "--deep")
    assert {row["key"] for row in report["findings"]} == planted
    assert report["faults"] == len(planted)
    assert all(row["action"] for row in report["findings"])

    report = scrubbed(config, "--deep", "--fix")
    assert {row["mended"] for row in report["findings"]} == {"from this broker's log"}
    assert {key: objects.read(key) for key in everything} == sound
    assert_whole(config)


@pytest.mark.leaves_damage("the orphan is back in its place, and its grace ends within a second")
def test_orphan_goes_into_quarantine_and_back(config, objects):
    """The server copies the orphan, which leaves its place. The undo gives the same bytes."""
    manifest = archived_manifest(objects, "orders")
    named = segment_keys(manifest)
    key = left_behind(objects, manifest)
    # Its grace is a second of the server's clock: each scrub takes a part of one.
    for _ in range(DEADLINE_ROUNDS):
        if scrubbed(config, "--fix")["orphans"]:
            break
    else:
        pytest.fail("the orphan was never found")
    assert objects.read(key) is None
    assert objects.read(f"quarantine/objects/{key}") == b"left behind"
    assert [row["key"] for row in run_json("archive", "quarantine", "list", "--config", str(config))] == [key]

    done = run_command("archive", "quarantine", "restore", key, "--config", str(config))
    assert done.returncode == 0, done.stderr.decode()
    assert objects.read(key) == b"left behind"
    assert objects.read(f"quarantine/objects/{key}") is None
    assert all(objects.read(one) for one in named)


def test_directory_store_beside_a_running_daemon(tmp_path):
    """A scrub of a directory store finds nothing while a daemon uploads to it."""
    (tmp_path / "archive").mkdir()
    write_partition(tmp_path / "logs", "orders-0", segments=SEGMENTS)
    properties = directory_config([tmp_path / "logs"], tmp_path / "archive", tmp_path / "state")
    config = write_config(tmp_path / "tieringd.yaml", properties)
    objects = FileObjects(tmp_path / "archive")
    with running_daemon(config) as daemon:
        daemon.until(objects.keys, "something is archived")
        for _ in range(3):
            report = scrubbed(config, "--deep", "--fix")
            assert (report["findings"], report["orphans"], report["left"]) == ([], [], [])
