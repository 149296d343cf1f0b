"""Merging beside a real broker and store: clients read the same before, while and after it."""

from __future__ import annotations

import asyncio
import signal

import pytest
import yaml

from tests.e2e.archives import (
    archived_manifest,
    assert_whole,
    base_of_active,
    data_keys,
    read_log,
    segment_keys,
    until_trimmed,
)
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import ISOLATIONS, consumed, write_transactions
from tests.support.daemon import kafka_config, run_json, running_daemon, write_config

_VALUES = [bytes([number]) * 100_000 for number in range(60)]
_DELAY = {"archive_delete_delay_ms": "10m"}
"""While a reader may still have the manifest from before a merge. Then it is shortened to _SHORT_DELAY."""
_SHORT_DELAY = {"archive_delete_delay_ms": "4s"}
_MERGES = {
    "cloud_storage_enable_segment_merging": True,
    "cloud_storage_segment_size_target": "3MiB",
    "cloud_storage_segment_size_min": "1500KiB",
    "cloud_storage_idle_timeout_ms": "200ms",
    # The readers of this test are traffic, so the turns are forced.
    "cloud_storage_idle_threshold_rps": 0,
    "cloud_storage_housekeeping_interval_ms": "500ms",
}


class Through:
    """A cluster as clients of the gateway see it."""

    def __init__(self, bootstrap):
        self.bootstrap = bootstrap


@pytest.fixture
def config(behind, seaweedfs, tmp_path, prefix, topic):
    """Give the configuration of a daemon with a gateway, which does not merge yet."""
    found = kafka_config(
        behind.cluster,
        seaweedfs,
        tmp_path / "state",
        bucket=BUCKET,
        prefix=prefix,
        topics={topic: {"remote.storage.enable": True, "local.retention.bytes": 1 << 20}},
        gateway=behind.gateway_config,
        cloud_storage_enable_segment_merging=False,
        **_DELAY,
    )
    return write_config(tmp_path / "tieringd.yaml", found)


class Readers:
    """Clients that read all of it again and again, through the gateway and by the command line."""

    def __init__(self, behind, config, topic, expected):
        self._through = Through(behind.bootstrap)
        self._config, self._topic, self._expected = config, topic, expected
        self.rounds = 0

    async def once(self):
        """Read it all in each way, and compare."""
        for isolation in ISOLATIONS:
            assert await consumed(self._through, self._topic, isolation) == self._expected[isolation]
        printed = await asyncio.to_thread(read_log, self._config, self._topic)
        assert printed == self._expected["read_uncommitted"]
        self.rounds += 1

    async def until(self, is_so):
        """Read on until *is_so*; and once more from then on."""
        async with asyncio.timeout(300):
            while not await asyncio.to_thread(is_so):
                await self.once()
        await self.once()


def merge_turns(daemon):
    """Return how many turns merging had, which were forced."""
    return daemon.metric("tieringd_housekeeping_turns_total", task="merge", reason="forced") or 0


async def test_many_small_segments_become_few_under_readers(behind, config, topic, objects):
    """No read fails or differs; the old objects go after their delay, and a deep scrub finds no fault."""
    await write_transactions(behind.cluster, topic)
    await behind.cluster.produce(topic, _VALUES, max_batch_size=200_000)
    expected = {one: await consumed(behind.cluster, topic, one) for one in ISOLATIONS}
    readers = Readers(behind, config, topic, expected)

    with running_daemon(config) as daemon:
        # All trims are over: a run that grows by a later trim would be merged twice.
        until_trimmed(daemon)
        directory = behind.cluster.log_dir() / f"{topic}-0"
        daemon.until_next_offset(topic, base_of_active(directory))
        before = archived_manifest(objects, topic)
        await readers.once()
        explained = run_json("explain", topic, "0", "--config", str(config))["segments"]
        assert "cloud_storage_enable_segment_merging is off" in {one["merging"] for one in explained}

        write_config(config, yaml.safe_load(config.read_text()) | _MERGES)
        daemon.send_signal(signal.SIGHUP)
        few = len(before.segments) - 4
        await readers.until(lambda: len(archived_manifest(objects, topic).segments) <= few)
        turns = merge_turns(daemon)
        await readers.until(lambda: merge_turns(daemon) >= turns + 2)
        write_config(config, yaml.safe_load(config.read_text()) | _SHORT_DELAY)
        daemon.send_signal(signal.SIGHUP)
        await readers.until(lambda: not archived_manifest(objects, topic).retired)

        after = archived_manifest(objects, topic)
        assert len(after.segments) <= few
        assert after.next_offset == before.next_offset
        assert readers.rounds >= 3
        gone = set(segment_keys(before)) - set(segment_keys(after))
        assert gone
        daemon.until(lambda: gone.isdisjoint(data_keys(objects)), "the old objects are deleted")
        assert sorted(data_keys(objects)) == sorted(segment_keys(after))
        merged = daemon.metric("tieringd_archive_merged_segments_total", topic=topic)
        assert merged == len(gone)
        assert merge_turns(daemon)
        assert not daemon.metric("tieringd_housekeeping_failures_total")
        explained = run_json("explain", topic, "0", "--config", str(config))["segments"]
        texts = {one["merging"] for one in explained if one["merging"]}
        assert any("on the broker's disk" in text for text in texts), texts
    assert_whole(config)
