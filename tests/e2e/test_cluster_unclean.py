"""On three brokers: an unclean leader election, after which the archive follows the new leader's log."""

from __future__ import annotations

from tests.e2e.archives import (
    archived_bytes,
    archived_manifest,
    assert_whole,
    base_of_active,
    closed_segments,
    read_records,
    stored_segments,
    unreferenced,
)
from tests.e2e.sample_topics import SEGMENTS
from tests.support.cluster import cluster_admin, start_broker

_LARGE = {"max_batch_size": 200_000}


def values(count: int, *, first: int) -> list[bytes]:
    return [bytes([number]) * 100_000 for number in range(first, first + count)]


async def test_unclean_election_replaces_what_is_off_the_new_lineage(brokers, daemons_of, objects, topic):
    """Archived records that the new leader never had give way to its own, and the range is reported."""
    await brokers.create_topic(
        topic, replicas=[[1, 2]], configs=SEGMENTS | {"unclean.leader.election.enable": "true"}
    )
    daemons = daemons_of(topic)
    daemons.launch()
    old_leader, new_leader = brokers.brokers[:2]
    shared, lost, new = values(25, first=0), values(30, first=100), values(40, first=200)
    directory = brokers.log_dir(2) / f"{topic}-0"
    try:
        async with cluster_admin(brokers) as admin:
            await admin.until_in_sync(topic)
        # A replica that is in sync may still lack what its leader alone has acknowledged.
        await brokers.produce(topic, shared, acks="all", **_LARGE)
        await new_leader.stop()
        await brokers.produce(topic, lost, **_LARGE)
        daemons[1].until_next_offset(topic, 50)
        before = archived_manifest(objects, topic)
        await old_leader.kill()
        new_leader.launch()
        async with cluster_admin(brokers, 2, 3) as admin:
            await admin.until_led_by(topic, 2)
        # Nothing has been written since, and the archive's tail is off the lineage already.
        daemons[2].until(lambda: daemons[2].events(_REPLACED), "the archive's tail is replaced")
        await brokers.produce(topic, new, **_LARGE)
        daemons[2].until_next_offset(topic, base_of_active(directory))
        replaced = daemons[2].metric("tieringd_archive_replaced_offsets_total", topic=topic)
    finally:
        for broker in (old_leader, new_leader):
            if broker.process is None:
                await start_broker(brokers, broker)
        await new_leader.wait_until_ready(len(brokers.brokers))
    async with cluster_admin(brokers) as admin:
        await admin.until_in_sync(topic)

    manifest = archived_manifest(objects, topic)
    (told,) = daemons.events(_REPLACED)
    (replacement,) = manifest.replacements
    assert (told["base_offset"], told["last_offset"], replaced) == (20, 49, 30)
    assert (replacement.base_offset, replacement.last_offset) == (20, 49)
    assert replacement.leader_epoch == manifest.leader_epoch > before.leader_epoch
    assert (manifest.gaps, manifest.faults()) == ((), ())
    closed = closed_segments(directory)
    assert stored_segments(objects, manifest) == closed
    assert archived_bytes(daemons.config(), topic) == b"".join(closed.values())
    expected = list(enumerate(shared + new))[: manifest.next_offset]
    found = [(one.offset, one.value) for one in read_records(daemons.config(), topic)]
    assert found == expected
    # What is replaced loses its name in the manifest, and nothing more.
    assert len(unreferenced(objects, [manifest])) == 3
    assert_whole(daemons.config())


_REPLACED = "archive's tail replaced: another leader's log took its place"
