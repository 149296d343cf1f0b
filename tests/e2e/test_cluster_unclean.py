"""Three brokers: an unclean leader election, after which the archive follows the new leader's log."""

# Long: each test lets a broker die and another one lead, and waits for real segments to be uploaded.

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokafka import TopicPartition as ClientPartition
from aiokafka.admin import RecordsToDelete

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
from tests.support.daemon import run_json, run_well
from tests.support.kafka import admin_of
from tests.support.live_alerts import until_shown
from tieringd.formats.record_batch import parse_header

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cluster import DaemonsBeside
    from tests.support.kafka import KafkaCluster

_LARGE = {"max_batch_size": 200_000}
_NO_OTHER_ELECTION = {"unclean.leader.election.enable": "false"}
"""
The start of a broker can fence another one on a busy machine. A second unclean election would give the old
leader's log back.
"""


def values(count: int, *, first: int) -> list[bytes]:
    return [bytes([number]) * 100_000 for number in range(first, first + count)]


# Long: brokers are killed until an election is unclean.
async def test_unclean_election_replaces_what_is_off_the_new_lineage(
    brokers, daemons_of, objects, topic, tmp_path
):
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
            await admin.configure(topic, _NO_OTHER_ELECTION)
        # Nothing has been written since, and the archive's tail is off the lineage already.
        daemons[2].until(lambda: daemons[2].events(_REPLACED), "the archive's tail is replaced")
        await brokers.produce(topic, new, **_LARGE)
        daemons[2].until_next_offset(topic, base_of_active(directory))
        replaced = daemons[2].metric("tieringd_archive_replaced_offsets_total", topic=topic)
        until_shown(tmp_path, daemons[2], "TieringdTailReplaced")
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
    assert (told["base_offset"], told["last_offset"], replaced) == (25, 49, 25)
    assert (replacement.base_offset, replacement.last_offset) == (25, 49)
    assert replacement.leader_epoch == manifest.leader_epoch > before.leader_epoch
    assert (manifest.gaps, manifest.faults()) == ((), ())
    closed = closed_segments(directory)
    # The good head of the segment where the logs part stays as it was; the new leader's log follows it.
    stored = stored_segments(objects, manifest)
    assert sorted(stored) == sorted({*closed, len(shared)})
    assert b"".join(stored[base_offset] for base_offset in sorted(stored)) == b"".join(closed.values())
    assert archived_bytes(daemons.config(), topic) == b"".join(closed.values())
    expected = list(enumerate(shared + new))[: manifest.next_offset]
    found = [(one.offset, one.value) for one in read_records(daemons.config(), topic)]
    assert found == expected
    # What is replaced loses its name in the manifest, and nothing more.
    assert len(unreferenced(objects, [manifest])) == 3
    assert_whole(daemons.config())


_REPLACED = "archive's tail replaced: another leader's log took its place"


PLAIN, ABORTED, UNKNOWN = NUMBERS = range(3)
"""
A partition without transactions; one whose transaction gets another marker in the new leader's log; and one
whose new leader's log was trimmed past where the logs part, and past that marker.
"""
_SMALL = {"max_batch_size": 120_000}
"""Each record is a batch, so the logs can part anywhere."""
GOOD, REPLACED, NEW = values(35, first=0), values(30, first=100), values(30, first=200)


def divergence_of(number: int) -> int:
    """Return where the logs of a partition part: after the good records, and that of the transaction."""
    return len(GOOD) + (number != PLAIN)


def bases_of(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.log"))


def producer_of(directory: Path) -> tuple[int, int]:
    """Return the id and epoch of the producer of a log's first batch."""
    header = parse_header(memoryview((directory / f"{0:020d}.log").read_bytes()), 0)
    return header.producer_id, header.producer_epoch


class Election:
    """An unclean election of node 2, whose daemon was away, and whose log begins inside archived segments."""

    def __init__(self, brokers: KafkaCluster, daemons: DaemonsBeside, topic: str) -> None:
        self.brokers = brokers
        self.daemons = daemons
        self.topic = topic
        self.old_leader, self.new_leader = brokers.brokers[:2]
        self.starts: dict[int, int] = {}
        """Where the log of each partition begins on the new leader."""
        self.producer = (-1, -1)

    def directory(self, node_id: int, number: int) -> Path:
        return self.brokers.log_dir(node_id) / f"{self.topic}-{number}"

    async def set_sizes(self, *sizes: str | None) -> None:
        """Let the two brokers roll at other sizes."""
        async with cluster_admin(self.brokers) as admin:
            for node_id, size in enumerate(sizes, start=1):
                await admin.configure_broker(node_id, {"log.segment.bytes": size})

    async def produce(self, records: list[bytes], **settings: str) -> None:
        for number in NUMBERS:
            await self.brokers.produce(self.topic, records, partition=number, **_SMALL, **settings)

    async def happen(self) -> None:
        """Write good records, records that are lost, and other ones on the new leader; trim its logs."""
        async with self.brokers.producer(
            transactional_id=self.topic, transaction_timeout_ms=900_000
        ) as producer:
            # It stays open for its coordinator. Markers are written past the coordinator.
            await producer.begin_transaction()
            for number in (ABORTED, UNKNOWN):
                await producer.send_and_wait(self.topic, b"transacted", partition=number)
            await self.produce(GOOD, acks="all")
        await self.new_leader.stop()
        self.producer = producer_of(self.directory(1, ABORTED))
        await self.end_transaction(1, is_committed=True)
        await self.produce(REPLACED)
        for number in NUMBERS:
            end = base_of_active(self.directory(1, number))
            self.daemons[1].until_next_offset(self.topic, end, number)
        await self.old_leader.kill()
        self.new_leader.launch()
        async with cluster_admin(self.brokers, 2, 3) as admin:
            for number in NUMBERS:
                await admin.until_led_by(self.topic, 2, number=number)
            await admin.configure(self.topic, _NO_OTHER_ELECTION)
        await self.end_transaction(2, is_committed=False)
        await self.produce(NEW)
        for number in NUMBERS:
            bases = bases_of(self.directory(2, number))
            self.starts[number] = (
                min(base for base in bases if base > 45)
                if number == UNKNOWN
                else max(base for base in bases if base < divergence_of(number))
            )
        async with admin_of(self.new_leader.bootstrap) as admin:
            await admin.delete_records(
                {
                    ClientPartition(self.topic, number): RecordsToDelete(offset)
                    for number, offset in self.starts.items()
                }
            )

    async def end_transaction(self, node_id: int, *, is_committed: bool) -> None:
        async with cluster_admin(self.brokers, node_id) as admin:
            await admin.end_transaction(
                self.topic, (ABORTED, UNKNOWN), self.producer, is_committed=is_committed
            )

    async def restore_brokers(self) -> None:
        for broker in (self.old_leader, self.new_leader):
            if broker.process is None:
                await start_broker(self.brokers, broker)
        await self.new_leader.wait_until_ready(len(self.brokers.brokers))
        await self.set_sizes(None, None)


# Long: one election for three partitions, whose logs are written, trimmed and archived before and after it.
async def test_good_records_that_only_the_archive_has_stay(brokers, daemons_of, objects, topic, tmp_path):
    """
    A segment is split, indexes tell a new outcome, and an operator decides what no log tells.

    Kafka lets its history of leader epochs begin where its log does. So a log that was trimmed past the place
    where it parts from the archive no longer tells that place.
    """
    configs = {"unclean.leader.election.enable": "true", "retention.ms": "-1", "file.delete.delay.ms": "100"}
    daemons = daemons_of(topic)
    election = Election(brokers, daemons, topic)
    await election.set_sizes(str(2 << 20), str(1 << 20))
    try:
        await brokers.create_topic(topic, replicas=[[1, 2]] * 3, configs=configs)
        async with cluster_admin(brokers) as admin:
            for number in NUMBERS:
                await admin.until_in_sync(topic, number=number)
        daemons.launch(1)
        await election.happen()
        before = archived_manifest(objects, topic, UNKNOWN)
        daemons.launch(2)
        for number in (PLAIN, ABORTED):
            daemons[2].until_next_offset(topic, base_of_active(election.directory(2, number)), number)
        daemons[2].until(
            lambda: daemons[2].partition(topic, UNKNOWN).get("waits_for_operator"), "it waits for an operator"
        )
        wait = daemons[2].partition(topic, UNKNOWN)["waits_for_operator"]
        until_shown(tmp_path, daemons[2], "TieringdWaitsForOperator")
        # The system chose the port; the command asks the daemon at the one of its configuration.
        daemons.change(2, admin={"port": daemons[2].admin_port})
        resolve = ("archive", "resolve", f"{topic}-{UNKNOWN}", "--config", str(daemons.config(2)))
        shown = run_json(*resolve, "--format", "json")
        assert archived_manifest(objects, topic, UNKNOWN).segments == before.segments
        given_up = (divergence_of(UNKNOWN), wait["last_offset"])
        outcome = f"{election.producer[0]}=aborted"
        run_well(*resolve, "--give-up", "{}-{}".format(*given_up), "--transaction", outcome)
        # The archive may have ended where it will end: its end tells nothing of the decision.
        daemons[2].until(
            lambda: daemons[2].metric(
                "tieringd_operator_decisions_total", topic=topic, outcome="carried_out"
            ),
            "the decision is carried out",
        )
        daemons[2].until_next_offset(topic, base_of_active(election.directory(2, UNKNOWN)), UNKNOWN)
        decided = daemons[2].metric("tieringd_operator_decisions_total", topic=topic, outcome="carried_out")
    finally:
        await election.restore_brokers()

    assert (wait["reason"], decided) == ("divergence_unknown", 1)
    assert wait["command"] == f"tieringd archive resolve {topic}-{UNKNOWN}"
    assert next(way["option"] for way in shown["ways_out"]) == "--keep"
    assert_whole(daemons.config())
    for number in NUMBERS:
        manifest = archived_manifest(objects, topic, number)
        divergence, epoch = divergence_of(number), manifest.leader_epoch
        assert manifest.faults() == ()
        assert [one.base_offset for one in manifest.replacements] == [divergence]
        head = manifest.segments.covering(divergence - 1)
        assert (head.last_offset, head.leader_epoch) == (divergence - 1, epoch)
        assert head.base_offset < election.starts[number]
        # The segment before the head has a record of the transaction, which ended in another way now.
        assert (manifest.segments[0].leader_epoch == epoch) == (number != PLAIN)
        gaps = [(gap.base_offset, gap.last_offset) for gap in manifest.gaps]
        assert gaps == ([given_up] if number == UNKNOWN else [])
        kept = NEW[election.starts[number] - divergence - 1 :] if number == UNKNOWN else NEW
        transacted = [] if number == PLAIN else [b"transacted"]
        for isolation, first in (("read_uncommitted", transacted), ("read_committed", [])):
            found = read_records(daemons.config(), topic, "--isolation", isolation, number=number)
            expected = [*first, *GOOD, *kept]
            assert [one.value for one in found] == expected[: len(found)]
            assert len(found) > len(GOOD) + 1
