"""`tieringd explain`: each segment of a partition, with why it is there and what would move it."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import Clock, archive_in, tiered_config
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.support.daemon import directory_config, write_config
from tests.unit.cli.commands import TOPIC, TOPIC_ID, invoked, tieringd
from tests.unit.model.values import PARTITION
from tieringd.cli.explain import topic_facts
from tieringd.cli.topic_snapshot import PartitionSnapshot, TopicSnapshot, topic_snapshot_with
from tieringd.formats.object_keys import TopicKey
from tieringd.policies.total_retention import TotalRetention


def reconfigured(site, **changes):
    """Change the site's configuration."""
    config = directory_config([site.root / "logs"], site.archive, site.root / "state", **changes)
    write_config(site.config, config)


def explained(site, *options):
    return invoked("explain", TOPIC, 0, "-c", site.config, *options)


def states(document) -> list[tuple[str, str]]:
    return [(row["place"], row["state"]) for row in document["segments"]]


def test_explain_follows_a_segment_from_disk_to_the_archive(own_site):
    """Segments are due before a pass, in both tiers after it, and trimmed once past the local target."""
    reconfigured(own_site, cloud_storage_enable_remote_read=True)
    own_site.archive.mkdir()
    before = explained(own_site, "--format", "json").json()
    assert states(before) == [("local", "due"), ("local", "due"), ("local", "active")]
    tieringd("run", "--once", "-c", own_site.config)
    kept = explained(own_site, "--format", "json").json()
    assert states(kept) == [("both", "kept"), ("both", "kept"), ("local", "active")]
    assert "no local limit is in force" in kept["segments"][0]["reason"]
    assert kept["nothing_goes_by_age_because"] is None

    size = kept["segments"][0]["local_bytes"]
    target = {"local.retention.bytes": 2 * size}
    reconfigured(own_site, cloud_storage_enable_remote_read=True, topics={TOPIC: target})
    found = explained(own_site, "--format", "json").json()
    assert states(found) == [("both", "trimmable"), ("both", "kept"), ("local", "active")]
    assert (
        found["segments"][1]["next_step"] == f"local retention releases the segment after {size} more bytes"
    )
    assert found["local_target_bytes_source"] == f"local.retention.bytes={2 * size} in the file"
    assert (found["trim_offset"], found["never_trimmed_because"]) == (12, None)
    assert (found["topic"], found["topic_id"], found["partition"]) == (TOPIC, TOPIC_ID, 0)
    tieringd("run", "--once", "-c", own_site.config)
    trimmed = explained(own_site, "--format", "json").json()
    assert states(trimmed) == [("archive", "archived"), ("both", "kept"), ("local", "active")]


def test_explain_prints_what_holds_and_a_table(site):
    """The text has the partition's own fields, and a line for each segment with reason and next step."""
    text = explained(site, "--format", "table").output
    head, table = text.split("\n\n")
    assert "trim_because                  local retention keeps offset 0 and later" in head
    rows = table.splitlines()
    assert rows[0].split() == [
        "base_offset",
        "last_offset",
        "local_bytes",
        "archived_bytes",
        "place",
        "state",
        "reason",
        "next_step",
        "merging",
    ]
    assert len(rows) == 4
    assert rows[3].split()[:6] == ["24", "-", "364", "-", "local", "active"]
    assert "the segment is uploaded once the broker has closed it" in rows[3]


def test_explain_of_a_topic_that_is_only_written_says_why_it_is_not_trimmed(own_site):
    """The log stays for as long as the broker's own retention says."""
    reconfigured(own_site, cloud_storage_enable_remote_read=False)
    tieringd("run", "--once", "-c", own_site.config)
    found = explained(own_site, "--format", "json").json()
    assert found["never_trimmed_because"].startswith("remote read is off for the topic")
    assert found["segments"][0]["reason"] == found["never_trimmed_because"]
    assert "with remote read on" in found["segments"][0]["next_step"]


async def test_explain_tells_what_the_daemon_says_of_the_partition(own_site):
    """A fault that the daemon beside this configuration has is not to be seen in files and manifests."""
    one = {"topic": TOPIC, "partition": 0, "fault": "batch CRC", "waits_because": None}

    async def status(_request: web.Request) -> web.Response:
        return web.json_response({"partitions": [one, one | {"partition": 1, "fault": "another"}]})

    application = web.Application()
    application.add_routes([web.get("/status", status)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    own_site.archive.mkdir()
    reconfigured(own_site, admin={"port": runner.addresses[0][1]})
    done = await asyncio.to_thread(explained, own_site, "--format", "json")
    await runner.cleanup()
    assert done.json()["daemon_says"] == "batch CRC"


def facts_of(tmp_path, *, kind="kafka", problem="", is_led=True, **properties):
    """Return what decides about a topic on which the broker has *properties*."""
    config = tiered_config(tmp_path).model_copy(update={"cloud_storage_segment_max_upload_interval_sec": 60})
    config = config.model_copy(update={"broker": config.broker.model_copy(update={"kind": kind})})
    topic = config.topic("orders", {name.replace("_", "."): value for name, value in properties.items()})
    one = PartitionSnapshot(PARTITION, None, None, None, is_held=True, is_led=is_led, problem=problem)
    snapshot = TopicSnapshot(TopicKey("c", "orders", TOPIC_ID), topic, is_paused=False, partitions=(one,))
    return topic_facts(config, snapshot, one)


def test_facts_are_those_of_the_topic(tmp_path):
    """Total retention is the broker's, and a compact-only topic deletes nothing."""
    plain = facts_of(tmp_path, retention_ms="5000", retention_bytes="700", cleanup_policy="delete")
    assert plain.total == TotalRetention(5000, 700, deletes=True, is_read_remotely=True)
    assert (plain.idle_because, plain.upload_interval_ms, plain.is_compact_only) == ("", 60_000, False)
    compact = facts_of(tmp_path, cleanup_policy="compact")
    assert (compact.total.deletes, compact.is_compact_only) == (False, True)
    assert "only compact" in compact.hint_shape.never_trimmed_because


def test_facts_say_why_nothing_moves_from_here(tmp_path):
    """Another leader is named before a problem; Redpanda's segments are uploaded whole."""
    assert facts_of(tmp_path, problem="cannot be read").idle_because == "cannot be read"
    assert "another broker leads" in facts_of(tmp_path, problem="x", is_led=False).idle_because
    assert facts_of(tmp_path, kind="redpanda").upload_interval_ms is None


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"cloud_storage_enabled": False}, "remote write is off for the topic"),
        ({"topics": {TOPIC: {"redpanda.remote.write": False}}}, "remote write is off for the topic"),
    ],
)
def test_explain_of_a_topic_that_is_not_tiered_says_so(own_site, changes, because):
    """Nothing moves without tiering, and each segment names the setting to change."""
    reconfigured(own_site, **changes)
    own_site.archive.mkdir()
    found = explained(own_site, "--format", "json").json()
    assert states(found) == [("local", "waiting"), ("local", "waiting"), ("local", "active")]
    assert {row["reason"] for row in found["segments"]} == {because}
    assert found["trim_because"] == because


def test_explain_goes_by_what_the_topic_began_with(own_site):
    """The cluster's value of now is for new topics only; what is recorded in the bucket holds."""
    tieringd("run", "--once", "-c", own_site.config)
    reconfigured(own_site, cloud_storage_enable_remote_write=False)
    found = explained(own_site, "--format", "json").json()
    assert "remote write is off" not in found["trim_because"]


def test_explain_of_a_paused_topic_says_how_to_go_on(own_site):
    """A pause holds for uploads and trims."""
    tieringd("run", "--once", "-c", own_site.config)
    tieringd("topic", "pause", TOPIC, "-c", own_site.config)
    found = explained(own_site, "--format", "json").json()
    assert "tieringd topic resume" in found["segments"][0]["reason"]


def test_explain_of_a_topic_that_left_the_disk_tells_of_the_archive(own_site):
    """The bucket alone is explained where no broker has the topic."""
    tieringd("run", "--once", "-c", own_site.config)
    for path in own_site.partition_directory.iterdir():
        path.unlink()
    own_site.partition_directory.rmdir()
    found = explained(own_site, "--format", "json").json()
    assert states(found) == [("archive", "archived"), ("archive", "archived")]
    assert found["trim_because"] == "this broker has no replica of the partition"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope", 0], "neither this broker nor the bucket has a topic named nope"),
        ([TOPIC, 7], f"topic {TOPIC} has 1 partitions, and no partition 7"),
    ],
)
def test_explain_of_what_does_not_exist_exits_1(site, arguments, words):
    """The error names what was asked for."""
    done = tieringd("explain", *arguments, "-c", site.config)
    assert (done.exit_code, done.output) == (1, "")
    assert words in done.errors


async def test_explanation_says_why_nothing_goes_by_age(tmp_path):
    """The command says that due segments stay if this host's clock differs from the store's."""
    writer = LogWriter(tmp_path)
    writer.closed_segment()
    store = MemoryStore(now_ms=Clock())
    archive = archive_in(store, now_ms=Clock(DEFAULT_TIME_MS + 3_600_000))
    snapshot = await topic_snapshot_with(
        tiered_config(tmp_path), archive, FakeBroker(writer), "orders", number=0
    )
    assert snapshot.clock_doubt == "this host's clock is 3600 s ahead of the object store's clock"
