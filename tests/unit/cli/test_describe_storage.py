"""`tieringd topic describe-storage`: rpk's sections and fields."""

from __future__ import annotations

import json

import pytest

from tests.builders import segment_bytes
from tests.support.daemon import directory_config, write_config
from tests.unit.cli.commands import BASES, TOPIC, TOPIC_ID, invoked, tieringd
from tests.unit.model.values import PARTITION, TIME_MS, local_log, remote, stored
from tieringd.cli.describe_storage import storage_row
from tieringd.cli.topic_snapshot import PartitionSnapshot
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import LogBounds

DESCRIBE = ("topic", "describe-storage", TOPIC)
SIZES = [len(segment_bytes(base)) for base in BASES]
NOW_MS = TIME_MS + 10_000


def snapshot(*, manifest=None, log=None, bounds=None) -> PartitionSnapshot:
    return PartitionSnapshot(
        PARTITION, manifest, log, bounds, is_held=log is not None, is_led=bounds is not None
    )


def titles(*options) -> list[str]:
    """Return the section titles that are printed."""
    lines = invoked(*DESCRIBE, *options).output.splitlines()
    return [line for line in lines if line in {"SUMMARY", "OFFSETS", "SIZE", "SYNC"}]


def test_storage_of_an_archived_topic_has_the_fields_of_rpk(site):
    """Offsets, sizes, counts and ages of both tiers, with the names that Redpanda's admin API gives them."""
    document = invoked(*DESCRIBE, "-c", site.config, "--format", "json").json()
    (row,) = document["partitions"]
    ages = [row.pop("ms_since_last_segment_upload"), row.pop("ms_since_last_manifest_upload")]
    assert row == {
        "partition": 0,
        "cloud_log_start_offset": 0,
        "cloud_log_last_offset": 23,
        "cloud_log_size_bytes": SIZES[0] + SIZES[1],
        "cloud_log_segment_count": 2,
        "local_log_start_offset": 0,
        "local_log_last_offset": 35,
        "local_log_size_bytes": sum(SIZES),
        "local_log_segment_count": 3,
        "total_log_size_bytes": sum(SIZES),
        "problem": None,
    }
    assert document.pop("partitions")
    assert document == {
        "topic": TOPIC,
        "topic_id": TOPIC_ID,
        "cloud_storage_mode": "full",
        "ms_since_last_upload": min(ages),
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param([], ["SUMMARY", "SIZE"], id="none"),
        pytest.param(["--print-all"], ["SUMMARY", "OFFSETS", "SIZE", "SYNC"], id="all"),
        pytest.param(["-s"], ["SUMMARY"], id="summary"),
        pytest.param(["-o"], ["OFFSETS"], id="offsets"),
        pytest.param(["-z"], ["SIZE"], id="size"),
        pytest.param(["-y", "-o"], ["OFFSETS", "SYNC"], id="two"),
        pytest.param(["-y", "-a"], ["SUMMARY", "OFFSETS", "SIZE", "SYNC"], id="one and all"),
    ],
)
def test_sections_are_those_that_were_asked_for(site, options, expected):
    """The summary and the sizes are printed without options, or else the sections that were asked for."""
    assert titles("-c", site.config, *options) == expected


@pytest.mark.parametrize(
    ("write", "read", "mode"),
    [
        (True, True, "full"),
        (True, False, "write_only"),
        (False, True, "read_only"),
        (False, False, "disabled"),
    ],
)
def test_mode_is_what_holds_for_the_topic(own_site, write, read, mode):
    """The mode is the topic's own, and not the cluster's."""
    own = {TOPIC: {"redpanda.remote.write": write, "redpanda.remote.read": read}}
    logs, state = own_site.root / "logs", own_site.root / "state"
    write_config(own_site.config, directory_config([logs], own_site.archive, state, topics=own))
    own_site.archive.mkdir()
    document = invoked(*DESCRIBE, "-c", own_site.config, "--format", "json").json()
    assert (document["cloud_storage_mode"], document["ms_since_last_upload"]) == (mode, None)


def test_sections_have_the_columns_of_rpk(site):
    """Each section is a table of the partitions, with rpk's headings."""
    text = invoked(*DESCRIBE, "-c", site.config, "--print-all").output
    lines = [line.split() for line in text.splitlines()]
    assert ["PARTITION", "CLOUD-START", "CLOUD-LAST", "LOCAL-START", "LOCAL-LAST"] in lines
    assert ["0", "0", "23", "0", "35"] in lines
    sizes = ["CLOUD-BYTES", "LOCAL-BYTES", "TOTAL-BYTES", "CLOUD-SEGMENTS", "LOCAL-SEGMENTS"]
    assert ["PARTITION", *sizes] in lines
    assert ["PARTITION", "LAST-SEGMENT-UPLOAD", "LAST-MANIFEST-UPLOAD"] in lines
    assert ["CLOUD-STORAGE-MODE", "full"] in lines
    human = invoked(*DESCRIBE, "-c", site.config, "-aH").output
    assert " ago" in human
    assert "1.092kB" in human


def test_bytes_in_both_tiers_count_once():
    """The total has the bytes of both tiers, with their overlap counted once."""
    manifest = stored([remote(0, 9), remote(10, 19), remote(20, 29, uploaded_at_ms=NOW_MS - 5)])
    row = storage_row(
        snapshot(manifest=manifest, log=local_log((10, 20, 30)), bounds=LogBounds(20, 33, 33)), now_ms=NOW_MS
    )
    assert (row["local_log_size_bytes"], row["cloud_log_size_bytes"]) == (3 * 1024, 3 * 1024)
    assert row["total_log_size_bytes"] == 4 * 1024
    assert (row["local_log_start_offset"], row["local_log_last_offset"]) == (20, 32)
    assert row["ms_since_last_segment_upload"] == 5


def test_bytes_on_their_way_out_do_not_count():
    """Files below the log's start that were never archived are not part of the total."""
    nothing = PartitionManifest.begin(PARTITION, start_offset=0)
    one = snapshot(manifest=nothing, log=local_log((0, 10, 20)), bounds=LogBounds(10, 25, 25))
    assert storage_row(one, now_ms=NOW_MS)["total_log_size_bytes"] == 2 * 1024


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        pytest.param(
            snapshot(manifest=stored([remote(0, 9)])), (None, None, None, 0, 9, 1024), id="not here"
        ),
        pytest.param(
            snapshot(log=local_log((5, 9))), (5, None, 2048, None, None, 2048), id="followed, no archive"
        ),
        pytest.param(
            snapshot(manifest=PartitionManifest.begin(PARTITION, start_offset=5), log=local_log((5,))),
            (5, None, 1024, None, None, 1024),
            id="nothing stored yet",
        ),
        pytest.param(
            snapshot(log=local_log((0,)), bounds=LogBounds(0, 0, 0)),
            (0, None, 1024, None, None, 1024),
            id="empty",
        ),
        pytest.param(snapshot(), (None, None, None, None, None, 0), id="nothing at all"),
    ],
)
def test_unknown_parts_are_left_out(one, expected):
    """Only a leader tells where its log ends, and only a replica what is on its disk."""
    row = storage_row(one, now_ms=NOW_MS)
    names = [
        "local_log_start_offset",
        "local_log_last_offset",
        "local_log_size_bytes",
        "cloud_log_start_offset",
        "cloud_log_last_offset",
        "total_log_size_bytes",
    ]
    assert tuple(row[name] for name in names) == expected


@pytest.mark.parametrize("options", [(), ("--format", "json")], ids=str)
def test_storage_of_a_partition_that_cannot_be_read_says_why(own_site, options):
    """One unreadable partition is named on standard error, and the others are shown. The exit code is 1."""
    tieringd("run", "--once", "-c", own_site.config)
    (own_site.partition_directory / f"{0:020d}.log").unlink()
    (own_site.partition_directory / f"{0:020d}.log").mkdir()
    done = invoked(*DESCRIBE, "-c", own_site.config, *options)
    assert done.exit_code == 1
    assert "LOCAL-BYTES" in done.output or json.loads(done.output)["partitions"][0]["problem"]
    assert done.errors.startswith(f"{TOPIC}-0: ")
    assert "is not a regular file" in done.errors
