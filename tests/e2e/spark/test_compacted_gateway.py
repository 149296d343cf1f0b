"""Clients of the gateway read an archive that a job has compacted and erased from, as any other."""

from __future__ import annotations

import pytest

from tests.e2e.archives import until_trimmed
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import ISOLATIONS, consumed
from tests.e2e.spark.keyed_topics import (
    SECRET,
    KeyedTopic,
    archived_records,
    assert_sound,
    config_of,
    without,
)
from tests.support.daemon import kafka_config, running_daemon, write_config
from tests.support.gateway_clients import read_librdkafka
from tests.support.gateways import LISTENER
from tests.unit.spark.rewriting import latest_of
from tieringd.spark.jobs.compact import compact
from tieringd.spark.jobs.erase import erase


@pytest.fixture
def config(behind, seaweedfs, tmp_path, prefix, topic):
    """Give the configuration of a daemon with a gateway, which keeps little of the log locally."""
    found = kafka_config(
        behind.cluster,
        seaweedfs,
        tmp_path / "state",
        bucket=BUCKET,
        prefix=prefix,
        topics={topic: {"remote.storage.enable": True, "local.retention.bytes": 1 << 20}},
        cloud_storage_enable_segment_merging=False,
        # A job's edit is noticed within half of the delay, or once in that interval.
        cloud_storage_housekeeping_interval_ms="500ms",
        archive_delete_delay_ms="4s",
        gateway={
            "enabled": True,
            "host": "127.0.0.1",
            "port": behind.port,
            "broker": f"127.0.0.1:{behind.cluster.broker.listener_ports[LISTENER]}",
        },
    )
    return write_config(tmp_path / "tieringd.yaml", found)


class Through:
    """A cluster as clients of the gateway see it."""

    def __init__(self, bootstrap):
        self.bootstrap = bootstrap


# Long: clients read while jobs of Spark compact the archive.
async def test_clients_read_on_while_the_archive_loses_records(behind, config, topic, objects, spark):
    """Two kinds of clients, in both isolation levels, from what is left of the archive into the local log."""
    keyed = KeyedTopic(behind.cluster, topic, objects)
    await keyed.create()
    await keyed.write(seed=11, records=160)
    with running_daemon(config) as daemon:
        # What is archived later could be newer than the latest records that are told here.
        daemon.until(lambda: keyed.is_archived, "all that is closed is archived")
        until_trimmed(daemon)
        archive = archived_records(config, topic)
        local = await keyed.consumed()
        assert local["read_uncommitted"][0].offset > archive["read_uncommitted"][-1].offset // 2

        who = {"requested_by": "dpo@example.org"}
        assert erase(spark, config_of(config), topics=[topic], keys=[SECRET], **who).faults == ()
        until_noticed(daemon, 1)
        left = without(archive, {SECRET})
        # The jobs may drop the last records of the archive, which are also in the local log.
        last_archived = archive["read_uncommitted"][-1].offset
        await assert_read(behind, topic, left, local, last_archived)

        assert compact(spark, config_of(config), topics=[topic]).faults == ()
        until_noticed(daemon, 2)
        latest = latest_of(left["read_committed"])
        assert len(latest) < len(left["read_committed"]) // 2
        await assert_read(behind, topic, dict.fromkeys(ISOLATIONS, latest), local, last_archived)
    assert_sound(config)


def until_noticed(daemon, edits: int) -> None:
    """
    Return when the daemon has met so many edits of jobs.

    An archiver meets an edit when it looks for one. It may also meet it at a commit of its own: when the
    objects that the previous edit replaced fall due for deletion.
    """

    def met() -> int:
        looked = daemon.events("another writer has changed the manifest; reading it again")
        return len(looked) + len(daemon.events("archiver met a job's edit"))

    daemon.until(lambda: met() >= edits, "the daemon notices what a job did")
    daemon.until_rounds(2)


async def assert_read(behind, topic, archived, local, last_archived: int) -> None:
    """
    Assert that clients of the gateway read the archive below the local log, and then the log.

    Where both have an offset an answer that began below comes from the archive, and others from the broker.
    """
    for isolation in ISOLATIONS:
        first_offset, last = local[isolation][0].offset, local[isolation][-1]
        below = [one for one in archived[isolation] if one.offset < first_offset]
        assert below
        every = {one.offset: one for one in local[isolation]} | {
            one.offset: one for one in archived[isolation]
        }
        surely = {one.offset for one in [*archived[isolation], last]}
        surely |= {one.offset for one in local[isolation] if one.offset > last_archived}

        read = await consumed(Through(behind.bootstrap), topic, isolation)
        assert read == [every[one.offset] for one in read]
        assert [one.offset for one in read] == sorted({one.offset for one in read})
        assert surely <= {one.offset for one in read}
        assert [one for one in read if one.offset < first_offset] == below

        settings = {"isolation.level": isolation}
        theirs = read_librdkafka(behind.bootstrap, topic, len(below), **settings)
        assert [one for one in theirs if one[0] < first_offset] == [(one.offset, one.value) for one in below]
