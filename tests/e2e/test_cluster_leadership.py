"""Three brokers: archiving while leaders move, topics come and go, a host stalls, or files are lost."""

# Long: three brokers, and elections that wait for sessions and leases.

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from tests.e2e.archives import (
    archived_bytes,
    archived_manifest,
    archived_manifests,
    assert_whole,
    base_of_active,
    closed_segments,
    data_keys,
    read_log,
    read_records,
    stored_segments,
)
from tests.e2e.sample_topics import SEGMENTS
from tests.support.cluster import cluster_admin, start_broker

if TYPE_CHECKING:
    from pathlib import Path

_LARGE = {"max_batch_size": 200_000}
_TOO_LATE = ("too long ago", "gave up after")
"""What the fault of a partition says after a pause that was longer than an upload may take."""


def values(count: int, *, first: int = 0) -> list[bytes]:
    return [bytes([number % 256]) * 100_000 for number in range(first, first + count)]


def directory_of(brokers, node_id: int, topic: str, number: int = 0) -> Path:
    return brokers.log_dir(node_id) / f"{topic}-{number}"


def until_ready(daemon) -> None:
    """A single round that fails, as on a busy machine, keeps a daemon from being ready until the next one."""
    daemon.until(lambda: daemon.get("/readyz") == (200, "ok\n"), "the daemon is ready")


def uploads(daemons, topic) -> list[int]:
    """Return the base of every segment that any daemon made durable, in the order of their logs."""
    return [event["base_offset"] for event in daemons.events("segment durable", topic=topic)]


async def test_leadership_moves_and_the_next_daemon_goes_on(brokers, daemons_of, objects, topic):
    """Only the leader's daemon archives; after each move another goes on where the first one ended."""
    await brokers.create_topic(topic, replicas=[[1, 2, 3]], configs=SEGMENTS)
    daemons = daemons_of(topic)
    daemons.launch()
    async with cluster_admin(brokers) as admin:
        for turn, node_id in enumerate((1, 2, 3, 1)):
            await admin.move_leader(topic, node_id)
            await brokers.produce(topic, values(25, first=25 * turn), **_LARGE)
            daemons[node_id].until_next_offset(topic, base_of_active(directory_of(brokers, node_id, topic)))
            for other in {1, 2, 3} - {node_id}:
                daemons[other].until(
                    lambda other=other: not daemons[other].partition(topic), "it archives nothing any more"
                )
                assert daemons[other].next_offset(topic) is None
                # A round stops archivers first, and counts what it follows at its end.
                daemons[other].until(
                    lambda other=other: daemons[other].metric("tieringd_followed_partitions") >= 1,
                    "it follows the partition",
                )

    manifest = archived_manifest(objects, topic)
    closed = closed_segments(directory_of(brokers, 1, topic))
    assert stored_segments(objects, manifest) == closed
    assert sorted(uploads(daemons, topic)) == list(closed)
    assert len(data_keys(objects)) == len(closed)
    assert len({segment.leader_epoch for segment in manifest.segments}) >= 3
    assert len({segment.writer_id for segment in manifest.segments}) == 3
    assert not daemons.events("archiver stopped")
    assert_whole(daemons.config())


async def test_topics_come_grow_and_go_while_daemons_run(brokers, daemons_of, objects, topic):
    """A topic is archived from its creation, with partitions that are added; created again, it is another."""
    daemons = daemons_of(topic)
    daemons.launch()
    async with cluster_admin(brokers) as admin:
        await brokers.create_topic(topic, replicas=[[1, 2]], configs=SEGMENTS)
        await brokers.produce(topic, values(15), **_LARGE)
        daemons[1].until_next_offset(topic, 10)
        await admin.add_partitions(topic, [[2, 3], [3, 1]])
        for number in (1, 2):
            await brokers.produce(topic, values(15), partition=number, **_LARGE)
            daemons[number + 1].until_next_offset(topic, 10, number)
        before = set(data_keys(objects))

        await brokers.delete_topic(topic)
        for node_id in (1, 2, 3):
            daemons[node_id].until(
                lambda node_id=node_id: not daemons[node_id].partition(topic, node_id - 1),
                "the deleted topic is not archived",
            )
        daemons[1].until(lambda: not directory_of(brokers, 1, topic).exists(), "its directories are gone")
        await brokers.create_topic(topic, replicas=[[2, 1]], configs=SEGMENTS)
        await brokers.produce(topic, values(25, first=100), **_LARGE)
        daemons[2].until_next_offset(topic, 20)

    ends = sorted(one.next_offset for one in archived_manifests(objects, topic).values())
    assert ends == [10, 20]
    assert before < set(data_keys(objects))
    assert not daemons.events("archiver stopped")
    for node_id in (1, 2, 3):
        until_ready(daemons[node_id])
    assert_whole(daemons.config())


async def test_reassigned_partition_is_archived_from_its_new_brokers(brokers, daemons_of, objects, topic):
    """A partition that moves to other brokers is archived on from there, and nothing goes twice."""
    await brokers.create_topic(topic, replicas=[[1, 2]], configs=SEGMENTS)
    daemons = daemons_of(topic)
    daemons.launch()
    await brokers.produce(topic, values(25), **_LARGE)
    daemons[1].until_next_offset(topic, 20)
    async with cluster_admin(brokers) as admin:
        await admin.reassign(topic, [3, 2])
        await admin.until_led_by(topic, 3)
    await brokers.produce(topic, values(20, first=25), **_LARGE)
    directory = directory_of(brokers, 3, topic)
    daemons[3].until_next_offset(topic, base_of_active(directory))
    daemons[1].until(lambda: not daemons[1].partition(topic), "the old leader's daemon has stopped")
    daemons[1].until(lambda: not directory_of(brokers, 1, topic).exists(), "its directory is gone")
    daemons[1].until_rounds(3)

    closed = closed_segments(directory)
    assert stored_segments(objects, archived_manifest(objects, topic)) == closed
    assert sorted(uploads(daemons, topic)) == list(closed)
    assert len(data_keys(objects)) == len(closed)
    until_ready(daemons[1])


# Long: a host stands still for longer than a session.
async def test_host_that_stood_still_is_fenced_and_changes_nothing(
    brokers, seaweedfs, daemons_of, objects, topic
):
    """
    A host that is paused in an upload, and goes on when another leads, leaves the archive as it is.

    The bucket fences the daemon when it commits what it had in hand. Where the pause was too long for that,
    its upload has run out of time, or the daemon stores nothing before its broker confirms that it leads, and
    this broker does not answer.
    """
    await brokers.create_topic(topic, replicas=[[1, 2, 3]], configs=SEGMENTS)
    daemons = daemons_of(topic)
    daemons.launch()
    await brokers.produce(topic, values(15), **_LARGE)
    daemons[1].until_next_offset(topic, 10)
    seaweedfs.pause()
    try:
        await brokers.produce(topic, values(30, first=15), **_LARGE)
        daemons[1].until_segment_in_flight()
        daemons[1].server.pause()
        # Its broker is stopped as well, so the daemon cannot learn that it is not the leader any more.
        brokers.brokers[0].pause()
    finally:
        seaweedfs.resume()
    try:
        async with cluster_admin(brokers, 2, 3) as admin:
            state = await admin.until(topic, lambda one: one.leader in {2, 3}, "another leads")
        leader = daemons[state.leader]
        leader.until_next_offset(topic, base_of_active(directory_of(brokers, state.leader, topic)))
        leader.until_rounds(3)
        manifest = archived_manifest(objects, topic)
        stored = stored_segments(objects, manifest)
        leader_epoch = leader.partition(topic)["leader_epoch"]

        daemons[1].server.resume()
        daemons[1].until(
            lambda: (
                daemons[1].events("archiver stopped")
                or any(text in (daemons[1].partition(topic).get("fault") or "") for text in _TOO_LATE)
            ),
            "the paused daemon is fenced, or gives up, or refuses to store",
        )
        fenced = daemons[1].events("archiver stopped")
        assert archived_manifest(objects, topic) == manifest
        assert stored_segments(objects, manifest) == stored
    finally:
        daemons[1].server.resume()
        brokers.brokers[0].resume()
    for stopped in fenced:
        assert f"leader epoch {leader_epoch} owns the manifest of {topic}-0" in stopped["reason"]
        assert "it no longer archives the partition" in stopped["reason"]
    assert manifest.leader_epoch == leader_epoch
    async with cluster_admin(brokers) as admin:
        await admin.until_in_sync(topic)
    daemons[1].until(lambda: daemons[1].get("/readyz")[0] == 200, "the daemon sees its broker again")
    daemons[1].until_rounds(3)
    assert archived_manifest(objects, topic) == manifest
    assert archived_bytes(daemons.config(), topic) == b"".join(
        closed_segments(directory_of(brokers, state.leader, topic)).values()
    )
    assert len(read_records(daemons.config(), topic)) == manifest.next_offset
    assert_whole(daemons.config())


# Long: two brokers stop and start again, and one copies a log anew.
async def test_brokers_that_lost_checkpoints_or_a_replica_are_archived_on(
    brokers, daemons_of, objects, topic
):
    """A leader forgets where its log began and what it had flushed; the next one has lost all of its log."""
    await brokers.create_topic(topic, replicas=[[1, 2, 3]], configs=SEGMENTS)
    local = {topic: {"redpanda.remote.write": True, "retention.local.target.bytes": 1 << 20}}
    daemons = daemons_of(topic, topics=local)
    daemons.launch()
    first, second = values(45), values(25, first=45)
    await brokers.produce(topic, first, **_LARGE)
    daemons[1].until(lambda: daemons[1].events("local log trimmed", topic=topic), "the log has been trimmed")
    one, two, _ = brokers.brokers

    await one.stop()
    lost = [path for path in brokers.log_dir(1).glob("*-checkpoint") if path.is_file()]
    assert {"log-start-offset-checkpoint", "recovery-point-offset-checkpoint"} <= {path.name for path in lost}
    for path in lost:
        path.unlink()
    await start_broker(brokers, one)
    async with cluster_admin(brokers) as admin:
        await admin.until_in_sync(topic)
        await admin.move_leader(topic, 1)
        await brokers.produce(topic, second, **_LARGE)
        daemons[1].until_next_offset(topic, base_of_active(directory_of(brokers, 1, topic)))

        await two.stop()
        shutil.rmtree(directory_of(brokers, 2, topic))
        await start_broker(brokers, two)
        await admin.until_in_sync(topic)
        await admin.move_leader(topic, 2)
        await brokers.produce(topic, first, **_LARGE)
    daemons[2].until_next_offset(topic, base_of_active(directory_of(brokers, 2, topic)))

    found = read_log(daemons.config(2), topic)
    assert [record.offset for record in found] == list(range(len(first + second + first)))
    assert [record.value for record in found] == first + second + first
    assert not archived_manifest(objects, topic).gaps
    # The daemon of a broker that leads no more may meet its successor's manifest before it hears of that.
    stopped = [one["reason"] for one in daemons.events("archiver stopped")]
    assert all("owns the manifest" in reason for reason in stopped), stopped
    assert_whole(daemons.config())
