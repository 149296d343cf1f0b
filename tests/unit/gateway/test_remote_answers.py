"""What the archive of a broker answers: which partitions it speaks for, and what it says of them."""

from __future__ import annotations

import asyncio
import os
import pickle
from base64 import urlsafe_b64decode
from contextlib import asynccontextmanager
from dataclasses import replace
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in, archived, archiver_of, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.daemons import INTERVAL_SECONDS, Daemon
from tests.fakes.hydration import Host, running
from tests.fakes.log_writer import CLUSTER, TOPIC_ID, LogWriter
from tests.fakes.manifests import stored_manifest
from tests.fakes.store import RefusingStore
from tests.fakes.virtual_loop import virtually
from tieringd.daemon.workers.gateway_workers import partition_handlers
from tieringd.daemon.workers.link import error_of, error_parts
from tieringd.errors import StorageUnavailable, TieringError
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.kafka_wire.fetch import AskedPartition
from tieringd.formats.kafka_wire.pieces import FileRegion, size_of
from tieringd.formats.object_keys import TopicKey, data_key, manifest_key
from tieringd.formats.record_batch import parse_header
from tieringd.formats.topic_manifest import Archiving
from tieringd.gateway import readable_partitions
from tieringd.gateway.archive_answers import (
    EARLIEST,
    EARLIEST_PENDING_UPLOAD,
    LATEST_TIERED,
    MAX_TIMESTAMP,
    TRY_AGAIN,
    EpochEnd,
    FetchQuestion,
    ListedOffset,
)
from tieringd.gateway.client_log import LINES_PER_ADDRESS
from tieringd.gateway.published_partitions import PublishedPartitions
from tieringd.gateway.readable_partitions import FRESH_SECONDS, ReadablePartitions
from tieringd.gateway.remote_answers import ERROR_PAUSE_SECONDS, RemoteAnswers
from tieringd.gateway.wire import MemoryBudget
from tieringd.metrics.readers import Source
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.model.partition import Leadership
from tieringd.model.tail_cut import cut_back
from tieringd.policies.cache_trim import TrimLimits
from tieringd.reading.hydrator import HydrationLimits
from tieringd.reading.partition_reader import PartitionReader

IDENTITY = UUID(bytes=urlsafe_b64decode(TOPIC_ID + "=="))
FIRST_MS = 1_700_000_000_000


PLACES = ("daemon", "worker")
place = PLACES[0]
"""Where the answers are made: in the daemon's loop, or in a worker, by what the daemon tells it."""


@pytest.fixture(params=PLACES, autouse=True)
def where(request):
    """Run each test for both places."""
    global place  # noqa: PLW0603 all helpers of the test read it
    place = request.param
    yield place
    place = PLACES[0]


@pytest.fixture
def pin_root(tmp_path):
    """Give a directory for pins, beside the log directory."""
    root = tmp_path.parent / f"{tmp_path.name}-pins"
    root.mkdir()
    return root


class Wire:
    """The link of a worker, in one process: everything that passes is pickled."""

    def __init__(self, handlers):
        self._handlers = handlers

    async def ask(self, name, *arguments):
        """Return the daemon's answer, or raise its error, a turn of the loop later."""
        await asyncio.sleep(0)
        found = self._handlers[name](*pickle.loads(pickle.dumps(arguments)))
        try:
            answer = await found if asyncio.iscoroutine(found) else found
        except TieringError as error:
            raise error_of(*pickle.loads(pickle.dumps(error_parts(error)))) from None
        return pickle.loads(pickle.dumps(answer))


def published(partitions: ReadablePartitions, daemon: Daemon) -> PublishedPartitions:
    """Return what a worker knows of *partitions*, told after each scan."""
    told = []

    def publish():
        names = partitions.published()
        if names is not None and [names] != told[-1:]:
            told.append(names)
            worker.set_names(pickle.loads(pickle.dumps(names)))

    async def note_deletion(partition, deletion):
        partitions.hide(partition, deletion)

    async def tell():
        while True:
            await daemon.reconciler.next_scan()
            publish()

    wire = Wire({**partition_handlers(partitions, publish), "note_deletion": note_deletion})
    worker = PublishedPartitions(
        wire,
        daemon.archive.manifests,
        names=partitions.published(),
        deletions={},
        now=lambda: asyncio.get_running_loop().time(),
    )
    worker.telling = asyncio.ensure_future(tell())
    return worker


class Behind:
    """A daemon, and the answers of its archive."""

    def __init__(self, daemon: Daemon, host: Host) -> None:
        self.daemon = daemon
        self.partitions = ReadablePartitions(
            daemon.reconciler,
            daemon.archive.manifests,
            daemon.archive.history,
            now=lambda: asyncio.get_running_loop().time(),
            now_ms=daemon.archive.clock,
            broker=daemon.broker,
        )
        if place == "worker":
            self.partitions = published(self.partitions, daemon)
        self.host = host
        self.budget = MemoryBudget(256 << 20)
        self.answers = self.made()

    def made(self, *, bucket: str | None = "bucket", **others) -> RemoteAnswers:
        archive = self.daemon.archive
        return RemoteAnswers(
            self.partitions,
            PartitionReader(self.host.hydrator, archive.manifests.spillovers),
            records=archive.records,
            history=archive.history,
            bucket=bucket,
            may_produce=lambda: True,
            budget=self.budget,
            now=lambda: asyncio.get_running_loop().time(),
            **others,
        )

    async def fetch(self, *offsets: int, max_bytes: int = 1 << 20, **changes) -> dict[int, list[int] | str]:
        """
        Return the base offsets of what is answered, by partition; offset n is asked of partition n.

        Asked twice: what comes late is there the second time.
        """
        await self.fetch_once(*offsets, max_bytes=max_bytes, **changes)
        return await self.fetch_once(*offsets, max_bytes=max_bytes, **changes)

    async def fetch_once(
        self, *offsets: int, max_bytes: int = 1 << 20, **changes
    ) -> dict[int, list[int] | str]:
        """Return what one Fetch is answered."""
        asked = {("orders", number): AskedPartition(offset, 1 << 20) for number, offset in enumerate(offsets)}
        fields = {"needs_a_batch": True, "read_committed": False} | changes
        found = await self.answers.fetch(FetchQuestion(asked, max_bytes, **fields))
        try:
            return {
                key[1]: "try again" if answer.error_code == TRY_AGAIN.value else bases_in(answer.records)
                for key, answer in found.partitions.items()
            }
        finally:
            found.release()

    async def next_fetches(self, offset: int, *, max_bytes: int = 1 << 20, needs_a_batch: bool = True):
        """Return how the answer to a fetch of partition 0 goes on, once it is cached."""
        await self.fetch_once(offset)
        asked = {("orders", 0): AskedPartition(offset, 1 << 20)}
        question = FetchQuestion(asked, max_bytes, needs_a_batch=needs_a_batch, read_committed=False)
        found = await self.answers.fetch(question)
        found.release()
        return {number: (one.next_offset, one.last_offset) for (_, number), one in found.next_fetches.items()}

    async def deleted(self, before: dict, meanwhile=None) -> dict:
        """Delete as the gateway does. *meanwhile* runs between the request to the broker and its answer."""
        leader_epochs = await self.answers.leader_epochs(before)
        if meanwhile is not None:
            await meanwhile()
        return dict(await self.answers.delete_records(before, leader_epochs))

    async def listed(self, timestamp: int, number: int = 0) -> ListedOffset | None:
        asked = {("orders", number): timestamp}
        found = (await self.answers.list_offsets(asked, read_committed=False)).get(("orders", number))
        if isinstance(found, TieringError):
            raise found
        return found


def bases_in(pieces) -> list[int]:
    """Return the base offset of every batch."""
    data = b"".join(
        os.pread(one.descriptor, one.length, one.position) if isinstance(one, FileRegion) else bytes(one)
        for one in pieces
    )
    bases, at = [], 0
    while at < len(data):
        header = parse_header(data, at)
        bases.append(header.base_offset)
        at += header.size_bytes
    return bases


@asynccontextmanager
async def serving(tmp_path, store, daemon):
    """Run the daemon and what answers for it."""
    host = Host(tmp_path / "cache", store)
    async with running(host), daemon.running():
        yield Behind(daemon, host)


@virtually
async def test_partitions_are_found_by_name_and_by_id(tmp_path, store, daemon):
    """A partition is found with its archiver's manifest and the bounds of the broker's own log."""
    async with serving(tmp_path, store, daemon) as behind:
        for topic in ("orders", IDENTITY):
            found = await behind.partitions.find(topic, 2)
            assert found.manifest.partition == daemon.writers[2].identified
            assert (found.manifest.next_offset, found.bounds) == (3, daemon.writers[2].bounds())
            assert behind.partitions.may_have(topic, 2)
            # It may have come to this broker since the last round.
            assert behind.partitions.may_have(topic, 3)
            with pytest.raises(StorageUnavailable, match=r"did not find orders-3|did not find .*-3"):
                await behind.partitions.find(topic, 3)


@virtually
async def test_topic_named_like_the_id_of_another_is_another(tmp_path, store):
    """A client that may read one of them cannot read the other by the id."""
    secret = LogWriter(tmp_path, "orders", 0)
    mine = LogWriter(tmp_path, TOPIC_ID, 0, topic_id="CAAAAAAAAAAAAAAAAAAAAA")
    for writer, value in ((secret, b"secret"), (mine, b"mine")):
        writer.closed_segment(value)
    async with serving(tmp_path, store, Daemon(tmp_path, store, [secret, mine])) as behind:
        assert (await behind.partitions.find(TOPIC_ID, 0)).manifest.partition == mine.identified
        assert (await behind.partitions.find(IDENTITY, 0)).manifest.partition == secret.identified
        assert (await behind.partitions.find("orders", 0)).manifest.partition == secret.identified


async def only_pinned(daemon, store, writer):
    """Let a pin alone have the segment from offset 3: the store is away, and the broker deletes it."""
    await daemon.round()
    for _ in range(200):
        store.fail_next("put", lambda: StorageUnavailable("away"))
    writer.closed_segment()
    await daemon.round()
    assert daemon.pinned(writer) == [3]
    writer.drop_head()
    writer.drop_head()
    await daemon.round()


@virtually
async def test_offset_that_only_a_pin_has_is_waited_for(tmp_path, store, writers, pin_root):
    """The broker has deleted it and it is not uploaded yet; afterwards the archive has it."""
    daemon = Daemon(tmp_path, store, writers, pin_root=pin_root)
    async with serving(tmp_path, store, daemon) as behind:
        writer = writers[0]
        await only_pinned(daemon, store, writer)
        found = await behind.partitions.find("orders", 0)
        assert found.manifest.next_offset == 3
        assert found.is_pinned(4)
        assert not found.is_pinned(6)
        assert await behind.fetch(4) == {0: "try again"}


@virtually
async def test_offset_of_a_time_that_only_a_pin_has_is_waited_for(tmp_path, store, writers, pin_root):
    """A later offset of the broker's log would have the client skip what the archive has later."""
    daemon = Daemon(tmp_path, store, writers, pin_root=pin_root)
    async with serving(tmp_path, store, daemon) as behind:
        writer = writers[0]
        await only_pinned(daemon, store, writer)
        for timestamp in (FIRST_MS + 4, MAX_TIMESTAMP):
            with pytest.raises(StorageUnavailable, match="only a pin has"):
                await behind.listed(timestamp)
        assert await behind.listed(FIRST_MS + 2) == ListedOffset(2, FIRST_MS + 2, 0)
        assert (await behind.listed(EARLIEST)).offset == 0


@pytest.mark.parametrize("is_claimed", [True, False])
@virtually
async def test_head_that_only_a_pin_has_is_waited_for(tmp_path, store, writers, is_claimed, pin_root):
    """The store took no segment since the topic began, and the broker has deleted the head of the log."""
    daemon = Daemon(tmp_path, store, writers, pin_root=pin_root)
    writer, put, is_away = writers[0], store.put, True

    async def put_if_there(key, *arguments, **options):
        if is_away and not (is_claimed and key.endswith("/manifest")):
            raise StorageUnavailable("away")
        return await put(key, *arguments, **options)

    store.put = put_if_there
    async with serving(tmp_path, store, daemon) as behind:
        for _ in range(6):
            await daemon.round()
        assert daemon.pinned(writer) == [0]
        writer.drop_head()
        writer.append()
        await daemon.round()
        assert (await behind.fetch(0), writer.log_start_offset) == ({0: "try again"}, 3)
        for timestamp in (EARLIEST, FIRST_MS + 1):
            with pytest.raises(StorageUnavailable, match="pin"):
                await behind.listed(timestamp)
        assert await told(behind, 3) == (-1, -1)
        is_away = False
        await archived_to(daemon, writer, 3)
        assert await behind.fetch(0) == {0: [0]}
        assert (await behind.listed(EARLIEST)).offset == 0
        assert (await told(behind, 3))[1] == 0


@virtually
async def test_pin_of_a_segment_that_the_log_still_has_is_not_waited_for(tmp_path, store, writers, pin_root):
    """A user deletes records inside a segment that is not archived yet: the broker has all that is left."""
    daemon = Daemon(tmp_path, store, writers, pin_root=pin_root)

    async def put(*arguments, **options):
        raise StorageUnavailable("away")

    store.put = put
    async with serving(tmp_path, store, daemon) as behind:
        for _ in range(6):
            await daemon.round()
        assert daemon.pinned(writers[0]) == [0]
        writers[0].log_start_offset = 1
        await daemon.round()
        assert await behind.listed(EARLIEST) is None
        assert await behind.listed(FIRST_MS + 1) is None


async def archived_to(daemon, writer, next_offset):
    """Run rounds until the archive of *writer* ends at *next_offset*."""
    while (found := stored_manifest(daemon.store, writer)) is None or found.next_offset < next_offset:
        await daemon.round()
        await asyncio.sleep(30)


async def lost_segment(daemon, writer):
    """Let the broker's retention delete the segment from offset 3 before it is archived. No other follows."""
    await daemon.round()
    writer.closed_segment()
    while writer.log_start_offset < writer.next_offset:
        writer.drop_head()
    writer.append()
    assert writer.bounds().log_start_offset == 6


@virtually
async def test_client_is_moved_past_offsets_that_are_lost(tmp_path, store, daemon):
    """
    Offsets that neither the archive nor the broker has are passed over, once two scans have missed them.

    Until then the client tries again: the broker's answer would make it read the whole archive again.
    """
    writer = daemon.writers[0]
    async with serving(tmp_path, store, daemon) as behind:
        await lost_segment(daemon, writer)
        await asyncio.sleep(FRESH_SECONDS + 0.1)
        found = await behind.partitions.find("orders", 0)
        assert (found.manifest.next_offset, found.bounds.log_start_offset) == (3, 6)
        # No scan has seen the broker's deletion.
        assert await behind.fetch(4) == {0: "try again"}
        await daemon.round()
        # One scan has.
        assert await behind.fetch(4) == {0: "try again"}
        await daemon.round()
        assert await passage_of(behind, 4) == (4, 5)
        assert await passage_of(behind, 3) == (3, 5)
        assert await behind.fetch(6) == {}
        assert stored_manifest(store, writer).gaps == ()
        writer.roll()
        await daemon.round()
        await daemon.round()
        assert stored_manifest(store, writer).gap_offsets == 3
        assert await behind.fetch(4) == {0: [6]}


async def passage_of(behind, offset):
    """Return the first and the last offset of the only batch that a Fetch of partition 0 gets."""
    asked = {("orders", 0): AskedPartition(offset, 1 << 20)}
    found = await behind.answers.fetch(
        FetchQuestion(asked, 1 << 20, needs_a_batch=True, read_committed=False)
    )
    (answer,) = found.partitions.values()
    data = b"".join(answer.records)
    found.release()
    header = parse_header(data)
    assert header.size_bytes == len(data)
    assert header.is_control
    return header.base_offset, header.last_offset


@virtually
async def test_client_is_moved_no_further_than_to_the_next_pin(tmp_path, store, writers, pin_root):
    """The records of a pin are archived once the store is back, and the client waits for them."""
    daemon, writer = Daemon(tmp_path, store, writers, pin_root=pin_root), writers[0]
    async with serving(tmp_path, store, daemon) as behind:
        await lost_segment(daemon, writer)
        writer.roll()
        for _ in range(200):
            store.fail_next("put", lambda: StorageUnavailable("away"))
        await daemon.round()
        assert daemon.pinned(writer) == [6]
        writer.drop_head()
        for _ in range(2):
            writer.append()
            await daemon.round()
        found = await behind.partitions.find("orders", 0)
        assert (found.manifest.next_offset, found.bounds.log_start_offset) == (3, 9)
        assert await passage_of(behind, 3) == (3, 5)
        assert await behind.fetch(6) == {0: "try again"}


@virtually
async def test_offsets_that_an_upload_still_has_open_are_not_passed_over(tmp_path, store, daemon):
    """The broker has deleted the segment while it was uploaded; the archive has it in the end."""
    writer = daemon.writers[0]
    async with serving(tmp_path, store, daemon) as behind:
        await daemon.round()
        store.latency_seconds = 3 * INTERVAL_SECONDS
        writer.closed_segment()
        await daemon.round()
        writer.drop_head()
        writer.drop_head()
        seen = set()
        for _ in range(100):
            answer = (await behind.fetch_once(4, wait_seconds=1))[0]
            seen.add(str(answer))
            if answer == [3]:
                break
            await asyncio.sleep(1)
        assert seen == {"try again", "[]", "[3]"}
        assert stored_manifest(store, writer).gaps == ()


@virtually
async def test_lost_offsets_are_looked_up_again_after_an_election(tmp_path, store, daemon):
    """The archiver of the new leader epoch has missed nothing yet: its log may have other records there."""
    writer = daemon.writers[0]
    async with serving(tmp_path, store, daemon) as behind:
        await lost_segment(daemon, writer)
        for _ in range(2):
            await daemon.round()
        assert await passage_of(behind, 4) == (4, 5)
        daemon.broker.epochs[writer.name] = 1
        await asyncio.sleep(FRESH_SECONDS + 0.1)
        # No archiver under this epoch: the broker's answer is right as far as is known.
        assert await behind.fetch(4) == {}
        writer.begin_epoch(1)
        await daemon.round()
        assert await behind.fetch(4) == {0: "try again"}
        await daemon.round()
        assert await passage_of(behind, 4) == (4, 5)


@virtually
async def test_late_read_that_found_lost_offsets_is_not_taken_over(tmp_path, store, daemon):
    """A passage rests on what was known at that moment. The broker may have the offsets at the next Fetch."""
    writer = daemon.writers[0]
    async with serving(tmp_path, store, daemon) as behind:
        await lost_segment(daemon, writer)
        for _ in range(2):
            await daemon.round()
        store.latency_seconds = 2
        assert await behind.fetch_once(4, wait_seconds=0.5) == {0: []}
        await asyncio.sleep(10)
        store.latency_seconds = 0
        # The log of the next leader begins earlier.
        writer.log_start_offset = 3
        await asyncio.sleep(FRESH_SECONDS + 0.1)
        assert await behind.fetch_once(4) == {}


@pytest.mark.parametrize("fault", ["settings are hidden", "checkpoint is damaged"])
@virtually
async def test_offset_that_only_a_pin_has_is_waited_for_while_the_partition_is_unclear(
    tmp_path, store, writers, fault, pin_root
):
    """What is known of a partition that could not be read stays as it is, and its pins stay as well."""
    # Where no topic's settings can be read, the round fails as a whole.
    other = LogWriter(writers[0].partition.log_dir, "other")
    daemon = Daemon(tmp_path, store, [*writers, other], pin_root=pin_root)
    async with serving(tmp_path, store, daemon) as behind:
        writer = writers[0]
        await only_pinned(daemon, store, writer)
        assert await behind.fetch(4) == {0: "try again"}
        if fault == "settings are hidden":
            daemon.broker.hidden = {"orders"}
        else:
            writer.closed_segment()
            (writer.path / "leader-epoch-checkpoint").write_text("nonsense")
        for _ in range(3):
            await daemon.round()
            assert writer.name in daemon.reconciler.snapshot.unclear
            assert daemon.pinned(writer) == [3]
            assert await behind.fetch(4) == {0: "try again"}


async def told(behind, broker_offset, number=0):
    """Return the known log start at once, and after the look-up."""
    at_once = behind.answers.log_start("orders", number, broker_offset)
    await asyncio.sleep(0.1)
    return at_once, behind.answers.log_start("orders", number, broker_offset)


async def shortened(daemon, writer, segments=1):
    """Let retention take the first segments of an archive, behind the daemon's back."""
    stored = await daemon.archive.manifests.load(writer.identified)
    later = stored.existing.expired(segments, now_ms=1)
    await daemon.archive.manifests.commit(stored, later, leader_epoch=0)


@virtually
async def test_log_start_is_the_archives_from_the_first_answer_on(tmp_path, store, daemon):
    """
    An archive that was never shortened begins with the log: nothing is looked up in the bucket.

    A worker asks the daemon, and says that the start is unknown until it has the answer. It looks once for an
    older archive that this one continues.
    """
    async with serving(tmp_path, store, daemon) as behind:
        requests = len(store.requests)
        if place == "worker":
            assert behind.answers.log_start("orders", 1, 3) == readable_partitions.UNKNOWN
            await asyncio.sleep(0.1)
        assert behind.answers.log_start("orders", 1, 3) == 0
        assert behind.answers.log_start(IDENTITY, 1, 3) == 0
        await asyncio.sleep(1)
        looked_up = ["history_link"] if place == "worker" else []
        assert [key.rpartition("/")[2] for _, key in store.requests[requests:]] == looked_up


@virtually
async def test_log_start_of_a_followed_partition_is_looked_up_once(tmp_path, store, writers):
    """
    The start is unknown until the look-up ends.

    Many callers cause one request, and a later one when it is old.
    """
    writer = writers[0]
    await archived(writer, archive_in(store))
    daemon = Daemon(tmp_path, store, writers)
    daemon.broker.followed = {one.name: 0 for one in writers}
    daemon.broker.epochs.clear()
    async with serving(tmp_path, store, daemon) as behind:
        requests = len(store.requests)
        assert [behind.answers.log_start("orders", 0, 3) for _ in range(9)] == [-1] * 9
        await asyncio.sleep(0.1)
        manifest_reads = [one for one in store.requests[requests:] if "manifest" in one[1]]
        assert len(manifest_reads) == 1
        assert [behind.answers.log_start("orders", 0, offset) for offset in (3, 2, 9)] == [0, 0, 0]
        assert len(store.requests) == requests + 2, "the manifest, and whether an older archive is before it"
        await asyncio.sleep(readable_partitions.START_FRESH_SECONDS + 1)
        assert await told(behind, 3) == (0, 0)
        assert len(store.requests) > requests + 2


@virtually
async def test_log_start_follows_retention(tmp_path, store, writers):
    """An archive that was shortened begins where its manifest says."""
    writer = writers[0]
    for _ in range(3):
        writer.closed_segment()
    await archived(writer, archive_in(store))
    daemon = Daemon(tmp_path, store, writers)
    await shortened(daemon, writer)
    async with serving(tmp_path, store, daemon) as behind:
        assert await told(behind, 9) == (-1, 3)
        assert await told(behind, 2) == (2, 2), "never after the broker's own"
        assert (await behind.listed(EARLIEST)).offset == 3


@virtually
async def test_log_start_is_unknown_while_the_store_is_away(tmp_path, store, writers):
    """The broker's would be taken for the whole log's; a second later it is tried again."""
    await archived(writers[0], archive_in(store))
    daemon = Daemon(tmp_path, store, writers)
    daemon.broker.configs["orders"] = {"redpanda.remote.write": "false", "redpanda.remote.read": "true"}
    async with serving(tmp_path, store, daemon) as behind:
        store.fail_next("get", lambda: StorageUnavailable("away"))
        assert await told(behind, 3) == (-1, -1)
        assert await told(behind, 3) == (-1, -1), "not at once"
        await asyncio.sleep(readable_partitions.RETRY_SECONDS)
        assert await told(behind, 3) == (-1, 0)


@virtually
async def test_log_without_an_archive_begins_where_the_broker_says(tmp_path, store, daemon):
    """
    The log of an unarchived topic begins where the broker says, as long as it begins there.

    Records that the broker deletes later may be archived by then.
    """
    writer = daemon.writers[0]
    daemon.broker.configs["orders"] = {"redpanda.remote.write": "false", "redpanda.remote.read": "true"}
    async with serving(tmp_path, store, daemon) as behind:
        assert await told(behind, 2) == (-1, 2)
        await archived(writer, archive_in(store))
        assert await told(behind, 2) == (2, 2)
        await asyncio.sleep(FRESH_SECONDS)
        assert await told(behind, 3) == (-1, 0)
    daemon.broker.configs["orders"] = {"redpanda.remote.read": "false"}
    async with serving(tmp_path, store, Daemon(tmp_path, store, daemon.writers)) as behind:
        behind.daemon.broker.configs["orders"] = {"redpanda.remote.read": "false"}
        await behind.daemon.round()
        assert await told(behind, 2) == (2, 2)


@virtually
async def test_partition_that_no_round_has_seen_brings_a_round_forward(tmp_path, store, daemon):
    """The gateway asks for a round, and then answers that there is no archive yet."""
    async with serving(tmp_path, store, daemon) as behind:
        loop = asyncio.get_running_loop()
        writer = LogWriter(tmp_path, "orders", 3)
        writer.append(b"active")
        daemon.broker.add(writer)
        daemon.writers.append(writer)
        began, rounds = loop.time(), daemon.reconciler.rounds
        assert behind.answers.log_start("orders", 3, 1) == -1
        assert await behind.listed(FIRST_MS, 3) is None
        assert 3 not in await behind.fetch_once(0, 0, 0, 9)
        assert (await behind.answers.offset_for_leader_epoch({("orders", 3): 0})) == {}
        assert loop.time() - began < INTERVAL_SECONDS / 2
        # The second round is due to the topic manifest, which counts the new partition now.
        assert daemon.reconciler.rounds - rounds == 2
        assert behind.answers.log_start("orders", 3, 1) == 1


@virtually
async def test_partition_that_rounds_do_not_find_brings_no_more_forward(tmp_path, store, daemon):
    """Two rounds are enough for a while, whatever asks; the others have their answers."""
    async with serving(tmp_path, store, daemon) as behind:
        rounds = daemon.reconciler.rounds
        asked = {("orders", 0): EARLIEST, ("orders", 3): EARLIEST}
        for _ in range(5):
            found = await behind.answers.list_offsets(asked, read_committed=False)
            assert found["orders", 0].offset == 0
            assert isinstance(found["orders", 3], StorageUnavailable)
        assert daemon.reconciler.rounds - rounds == 2


@virtually
async def test_archive_that_hangs_is_an_error_of_its_own(tmp_path, store, daemon):
    """The partitions whose manifests are known here are answered."""
    daemon.broker.followed[daemon.writers[2].name] = daemon.broker.epochs.pop(daemon.writers[2].name)
    async with serving(tmp_path, store, daemon) as behind:
        await behind.listed(EARLIEST)
        store.latency_seconds = 1000
        asked = {("orders", 2): EARLIEST, ("orders", 0): EARLIEST}
        found = await behind.answers.list_offsets(asked, read_committed=False)
        assert found["orders", 0].offset == 0
        assert isinstance(found["orders", 2], StorageUnavailable)


@virtually
async def test_what_a_client_has_deleted_is_hidden_at_once(tmp_path, store, writers):
    """Deleted records are hidden from reads, times and the log's start, in a segment and at its end."""
    writer = writers[0]
    for _ in range(3):
        writer.closed_segment()
    await archived(writer, archive_in(store))
    daemon = Daemon(tmp_path, store, writers)
    key = ("orders", 0)
    async with serving(tmp_path, store, daemon) as behind:
        assert await behind.fetch(1) == {0: [0]}
        assert await behind.deleted({key: 4}) == {key: 4}
        assert behind.answers.log_start("orders", 0, 9) == 4
        assert await behind.fetch(3) == {}
        assert await behind.fetch(4) == {0: [3]}
        assert (await behind.listed(EARLIEST)).offset == 4
        assert (await behind.listed(0)).offset == 4
        assert await behind.deleted({key: 2}) == {key: 4}, "never back"
        assert await behind.deleted({key: 6}) == {key: 6}
        await daemon.round()
        assert await behind.fetch(5) == {}
        assert await behind.fetch(6) == {0: [6]}
        end = (await behind.partitions.find(*key)).manifest.next_offset
        assert await behind.deleted({key: end}) == {}
        assert await behind.listed(EARLIEST) is None
        assert await behind.fetch(end - 1) == {}
        assert await behind.fetch(0, 0) == {1: [0]}


@virtually
async def test_what_a_client_has_deleted_stays_deleted_after_a_restart(tmp_path, store, writers):
    """
    The bucket has a deletion before the client is answered, and the archiver goes on from there.

    This holds at a segment's base too.
    """
    writer = writers[0]
    for _ in range(3):
        writer.closed_segment()
    await archived(writer, archive_in(store))
    daemon, key = Daemon(tmp_path, store, writers), ("orders", 0)
    async with serving(tmp_path, store, daemon) as behind:
        for before_offset in (3, 5, 6):
            assert await behind.deleted({key: before_offset}) == {key: before_offset}
            manifest = stored_manifest(store, writer)
            assert manifest.start_offset == before_offset
            assert manifest.deletions == (RecordDeletion(before_offset, leader_epoch=0),)
        writer.closed_segment()
        await daemon.round()
        await daemon.round()
        assert stored_manifest(store, writer).next_offset == writer.next_offset
    async with serving(tmp_path, store, Daemon(tmp_path, store, writers)) as behind:
        assert await behind.fetch(5) == {}
        assert await behind.fetch(6) == {0: [6]}
        assert (await behind.listed(EARLIEST)).offset == 6


@virtually
async def test_deletion_that_the_bucket_does_not_have_is_an_error(tmp_path, store, writers):
    """The client tries again; until then this gateway does not serve the records, and forgets nothing."""
    writer = writers[0]
    writer.closed_segment()
    await archived(writer, archive_in(store))
    daemon, key = Daemon(tmp_path, store, writers), ("orders", 0)
    async with serving(tmp_path, store, daemon) as behind:
        store.fail_next("put", lambda: StorageUnavailable("away"))
        answered = await behind.deleted({key: 3})
        assert isinstance(answered[key], StorageUnavailable)
        assert stored_manifest(store, writer).deletions == ()
        assert await behind.fetch(1) == {}
        assert await behind.deleted({key: 3}) == {key: 3}
        assert stored_manifest(store, writer).start_offset == 3


@virtually
async def test_deletion_is_not_forgotten_when_a_scan_misses_the_partition(tmp_path, store, writers):
    """A log directory that cannot be read for a moment, or a partition that is being moved, is seen again."""
    writer = writers[0]
    writer.closed_segment()
    await archived(writer, archive_in(store))
    daemon, key = Daemon(tmp_path, store, writers), ("orders", 0)
    async with serving(tmp_path, store, daemon) as behind:
        store.fail_next("put", lambda: StorageUnavailable("away"))
        assert isinstance((await behind.deleted({key: 3}))[key], StorageUnavailable)
        elsewhere = writer.path.with_name("elsewhere")
        writer.path.rename(elsewhere)
        await daemon.round()
        await daemon.round()
        assert behind.partitions.identified(*key) is None
        elsewhere.rename(writer.path)
        await daemon.round()
        await daemon.round()
        assert behind.partitions.identified(*key) is not None
        assert await behind.fetch(1) == {}


@virtually
async def test_deletion_of_a_partition_that_is_not_archived_any_more_is_recorded(tmp_path, store, writers):
    """No archiver of this daemon commits to its manifest; the epoch is the manifest's own."""
    writer = writers[0]
    writer.closed_segment()
    await archived(writer, archive_in(store))
    daemon, key = Daemon(tmp_path, store, writers), ("orders", 0)
    daemon.broker.configs["orders"] = {"redpanda.remote.write": "false", "redpanda.remote.read": "true"}
    async with serving(tmp_path, store, daemon) as behind:
        assert await behind.deleted({key: 2}) == {key: 2}
    assert stored_manifest(store, writer).deletions == (RecordDeletion(2, leader_epoch=0),)


async def overwrite(daemon, writer, *, leader_epoch):
    """Let a new leader, which has other records from offset 3 on, commit to the archive."""
    stored = await daemon.archive.manifests.load(writer.identified)
    cut = cut_back(stored.existing, 3, leader_epoch=leader_epoch, now_ms=0)
    segment = replace(stored.existing.segments[1], leader_epoch=leader_epoch)
    grown = cut.appended([segment], [(leader_epoch, segment.base_offset)])
    await daemon.archive.manifests.commit(stored, grown, leader_epoch=leader_epoch)


@virtually
async def test_deletion_of_a_partition_never_led_names_no_later_leader_either(tmp_path, store, writers):
    """The manifest's epoch is taken before the broker gets the request as well."""
    writer = writers[0]
    writer.closed_segment()
    writer.closed_segment()
    await archived(writer, archive_in(store))
    daemon, key = Daemon(tmp_path, store, writers), ("orders", 0)
    daemon.broker.configs["orders"] = {"redpanda.remote.write": "false", "redpanda.remote.read": "true"}
    async with serving(tmp_path, store, daemon) as behind:

        async def overtaken():
            await overwrite(daemon, writer, leader_epoch=1)
            await asyncio.sleep(2 * FRESH_SECONDS)

        assert await behind.deleted({key: 5}, overtaken) == {key: 3}
    manifest = stored_manifest(store, writer)
    assert manifest.deletions == (RecordDeletion(5, leader_epoch=0),)
    assert manifest.start_offset == 3


@virtually
async def test_deletion_without_a_known_epoch_is_not_recorded(tmp_path, store, writers):
    """The client has to try again, and its next request has a known epoch."""
    writer = writers[0]
    writer.closed_segment()
    await archived(writer, archive_in(store))
    daemon, key = Daemon(tmp_path, store, writers), ("orders", 0)
    async with serving(tmp_path, store, daemon) as behind:
        for epochs in ({}, {key: StorageUnavailable("away")}):
            answered = await behind.answers.delete_records({key: 2}, epochs)
            assert isinstance(answered[key], StorageUnavailable)
        assert stored_manifest(store, writer).deletions == ()
        assert await behind.deleted({key: 2}) == {key: 2}


@virtually
@pytest.mark.parametrize("leads_again", [False, True])
async def test_deletion_names_no_later_leader_than_the_broker_that_deleted(
    tmp_path, store, writers, leads_again
):
    """Another broker has led by the time that the deletion is recorded: its records stay."""
    writer = writers[0]
    writer.closed_segment()
    writer.closed_segment()
    await archived(writer, archive_in(store))
    daemon, key = Daemon(tmp_path, store, writers), ("orders", 0)
    async with serving(tmp_path, store, daemon) as behind:
        epochs = daemon.broker.epochs

        async def overtaken():
            daemon.broker.followed[writer.name] = epochs.pop(writer.name) + 1
            await daemon.round()
            await overwrite(daemon, writer, leader_epoch=1)
            if leads_again:
                epochs[writer.name] = daemon.broker.followed.pop(writer.name) + 1
                await daemon.round()
                assert (await behind.partitions.find(*key)).manifest.leader_epoch == 2

        assert behind.answers.may_have(*key)
        assert await behind.deleted({key: 5}, overtaken) == {key: 3}
    manifest = stored_manifest(store, writer)
    assert manifest.deletions == (RecordDeletion(5, leader_epoch=0),)
    assert manifest.start_offset == 3


@virtually
async def test_before_the_first_round_no_client_is_told_that_there_is_no_archive(tmp_path, store, daemon):
    """A client has to try again; an answer without the archive would make it skip records."""
    host = Host(tmp_path / "cache", store)
    async with running(host):
        behind = Behind(daemon, host)
        assert behind.partitions.may_have("orders", 0)
        assert await behind.fetch(0) == {0: "try again"}
        with pytest.raises(StorageUnavailable, match="first round"):
            await behind.listed(EARLIEST)


@virtually
@pytest.mark.parametrize(
    "properties", [{"redpanda.remote.write": "false", "redpanda.remote.read": "true"}, "paused"]
)
async def test_topic_that_is_not_archived_any_more_is_still_read(tmp_path, store, writers, properties):
    """The archived part of a paused or no longer written topic is still a part of its log."""
    for writer in writers:
        await archived(writer, archive_in(store))
    daemon = Daemon(tmp_path, store, writers)
    if properties == "paused":
        key = TopicKey(CLUSTER, "orders", TOPIC_ID)
        await daemon.archive.manifests.change_topic(
            key, lambda found: replace(found, archiving=Archiving.PAUSED)
        )
    else:
        daemon.broker.configs["orders"] = properties
    async with serving(tmp_path, store, daemon) as behind:
        await daemon.round()
        assert daemon.reconciler.statuses() == {}
        found = await behind.partitions.find("orders", 0)
        assert (found.manifest.next_offset, found.bounds) == (3, daemon.writers[0].bounds())
        assert await behind.fetch(0, 1, 2) == {0: [0], 1: [0], 2: [0]}
        assert (await behind.listed(EARLIEST)).offset == 0


@virtually
async def test_topic_without_remote_read_has_no_answer(tmp_path, store, daemon):
    """The topic is archived all the same."""
    daemon.broker.configs["orders"] = {"redpanda.remote.write": "true", "redpanda.remote.read": "false"}
    async with serving(tmp_path, store, daemon) as behind:
        assert daemon.archived()
        assert not behind.partitions.may_have("orders", 0)
        assert await behind.fetch(0) == {}
        assert await behind.listed(EARLIEST) is None


@virtually
async def test_topic_that_was_never_archived_has_no_answer(tmp_path, store, daemon):
    """The broker's own answer is right for a topic without a manifest."""
    daemon.broker.configs["orders"] = {"redpanda.remote.write": "false", "redpanda.remote.read": "true"}
    async with serving(tmp_path, store, daemon) as behind:
        assert await behind.partitions.find("orders", 0) is None
        assert await behind.fetch(0) == {}


@virtually
async def test_new_leader_answers_by_what_the_last_one_did(tmp_path, store, writers):
    """A new leader asks the bucket within a second, before its own round has told it that it leads."""
    await archived(writers[0], archive_in(store))
    daemon = Daemon(tmp_path, store, writers)
    daemon.broker.followed = {one.name: 0 for one in writers}
    daemon.broker.epochs.clear()
    other = archiver_of(writers[0], archive_in(store, writer_id="b2"), FakeBroker(writers[0]))
    async with serving(tmp_path, store, daemon) as behind:
        assert (await behind.partitions.find("orders", 0)).manifest.next_offset == 3
        writers[0].closed_segment()
        await archived_by(other, writers[0])
        # The offset is read at once: it was stored before it was trimmed.
        assert await behind.fetch(4) == {0: [3]}
        assert (await behind.partitions.find("orders", 0)).manifest.next_offset == 3
        await asyncio.sleep(FRESH_SECONDS + 0.1)
        requests = len(store.requests)
        for _ in range(5):
            assert (await behind.partitions.find("orders", 0)).manifest.next_offset == 6
        assert len(store.requests) - requests == 2


@virtually
async def test_archive_that_began_within_the_last_second_is_read(tmp_path, store, writers):
    """A broker's log that begins later has been archived and trimmed since no archive was found."""
    daemon = Daemon(tmp_path, store, writers)
    daemon.broker.followed = {one.name: 0 for one in writers}
    daemon.broker.epochs.clear()
    other = archiver_of(writers[0], archive_in(store, writer_id="b2"), FakeBroker(writers[0]))
    async with serving(tmp_path, store, daemon) as behind:
        assert await behind.partitions.find("orders", 0) is None
        await archived_by(other, writers[0])
        assert await behind.fetch_once(0) == {0: [0]}


@virtually
async def test_deletion_is_recorded_in_an_archive_that_began_within_the_last_second(tmp_path, store, writers):
    """The client is told to try again: no leader epoch of the archive was known before the deletion."""
    daemon = Daemon(tmp_path, store, writers)
    daemon.broker.followed = {one.name: 0 for one in writers}
    daemon.broker.epochs.clear()
    other = archiver_of(writers[0], archive_in(store, writer_id="b2"), FakeBroker(writers[0]))
    async with serving(tmp_path, store, daemon) as behind:
        assert await behind.partitions.find("orders", 0) is None
        await archived_by(other, writers[0])
        assert isinstance((await behind.deleted({("orders", 0): 2}))["orders", 0], StorageUnavailable)
        assert await behind.deleted({("orders", 0): 2}) == {("orders", 0): 2}
        assert stored_manifest(store, writers[0]).deletions == (RecordDeletion(2, leader_epoch=0),)


@virtually
async def test_broker_that_leads_again_answers_by_what_was_archived_meanwhile(tmp_path, store, writers):
    """No scan has seen the later epoch, and the archiver of the earlier one knows an old manifest."""
    writer = writers[0]
    daemon = Daemon(tmp_path, store, writers)
    async with serving(tmp_path, store, daemon) as behind:
        assert (await behind.listed(FIRST_MS)).offset == 0
        assert await behind.listed(FIRST_MS + 3) is None
        await archived_elsewhere(writer, store)
        daemon.broker.epochs[writer.name] = 2
        await asyncio.sleep(0.1)
        assert (await behind.listed(FIRST_MS + 3)).offset == 3
        await asyncio.sleep(FRESH_SECONDS + 0.1)
        assert (await behind.partitions.find("orders", 0)).manifest.next_offset == 6


@virtually
async def test_records_deleted_while_another_broker_led_are_not_served(tmp_path, store, writers):
    """The broker leads again, no scan has seen it, and the manifest of before still has the records."""
    writer = writers[0]
    for _ in range(2):
        writer.closed_segment()
    daemon = Daemon(tmp_path, store, writers)
    async with serving(tmp_path, store, daemon) as behind:
        assert (await behind.listed(EARLIEST)).offset == 0
        await shortened(daemon, writer)
        daemon.broker.epochs[writer.name] = 2
        await asyncio.sleep(0.1)
        assert (await behind.listed(EARLIEST)).offset == 3
        await asyncio.sleep(FRESH_SECONDS + 0.1)
        assert await behind.fetch(0) == {}


@virtually
async def test_new_leader_whose_archiver_has_not_read_the_bucket_reads_it(tmp_path, store, writers):
    """The archiver has only the manifest that this daemon read as a follower, for the store is away."""
    writer = writers[0]
    await archived(writer, archive_in(store))
    daemon = Daemon(tmp_path, store, writers)
    daemon.broker.followed = {one.name: 0 for one in writers}
    daemon.broker.epochs.clear()
    async with serving(tmp_path, store, daemon) as behind:
        await daemon.round()
        assert await behind.listed(FIRST_MS + 3) is None
        await archived_elsewhere(writer, store)
        daemon.broker.followed.clear()
        daemon.broker.epochs |= {one.name: 2 for one in writers}
        # The archiver's look at the manifest fails. It looks again in the next round.
        store.fail_next("head", lambda: StorageUnavailable("away"), times=9)
        await daemon.round()
        store._faults["head"].clear()
        leadership = Leadership(writer.identified, 2)
        assert daemon.reconciler.last_manifest(leadership) is not None
        assert daemon.reconciler.held_manifest(leadership) is None
        assert (await behind.listed(FIRST_MS + 3)).offset == 3


@virtually
async def test_segment_that_is_archived_and_trimmed_within_a_second_is_listed(tmp_path, store, writers):
    """The broker's answer is newer than the trim, so what was known of the archive before does not count."""
    writer = writers[0]
    daemon = Daemon(tmp_path, store, writers)
    async with serving(tmp_path, store, daemon) as behind:
        assert await behind.listed(FIRST_MS + 3) is None
        writer.closed_segment()
        daemon.reconciler.hint()
        await asyncio.sleep(0.4)
        assert stored_manifest(store, writer).next_offset == 6
        assert (await behind.listed(FIRST_MS + 3)).offset == 3


async def archived_elsewhere(writer, store) -> None:
    """Archive one more segment as the leader of epoch 1, another broker."""
    writer.begin_epoch(1)
    writer.closed_segment()
    elsewhere = archiver_of(writer, archive_in(store, writer_id="b2"), FakeBroker(writer))
    await archived_by(elsewhere, writer)
    assert stored_manifest(store, writer).next_offset == 6


async def archived_by(archiver, writer) -> None:
    while (await archiver.step(observed(writer))).uploaded:
        pass


@virtually
async def test_store_that_is_away_is_an_error_and_no_answer(tmp_path, store, writers):
    """The gateway claims neither that there are no records, nor that there is no archive."""
    await archived(writers[0], archive_in(store))
    daemon = Daemon(tmp_path, store, writers)
    daemon.broker.configs["orders"] = {"redpanda.remote.write": "false", "redpanda.remote.read": "true"}
    async with serving(tmp_path, store, daemon) as behind:
        for operation in ("get", "get_range"):
            store.fail_next(operation, lambda: StorageUnavailable("away"))
            assert await behind.fetch_once(0) == {0: "try again"}
        assert await behind.fetch_once(0) == {0: [0]}


@virtually
async def test_object_that_has_gone_leads_to_the_manifest_again(tmp_path, store, daemon):
    """Retention took a segment between the read of the manifest and that of the segment."""
    async with serving(tmp_path, store, daemon) as behind:
        writer = daemon.writers[0]
        before = (await behind.partitions.find("orders", 0)).manifest
        writer.closed_segment()
        await daemon.round()
        found = await behind.partitions.find("orders", 0)
        assert found.manifest.next_offset == 6
        await store.delete_many([data_key(before.partition, before.segments[0])])
        stored = await daemon.archive.manifests.load(before.partition)
        later = stored.existing.expired(1, now_ms=1)
        await daemon.archive.manifests.commit(stored, later, leader_epoch=0)
        assert await behind.fetch(0) == {}
        assert await behind.fetch(3) == {0: [3]}


@virtually
async def test_partitions_of_one_fetch_share_its_limit(tmp_path, store, daemon):
    """The first gets a batch whatever its size, the others only what is left."""
    async with serving(tmp_path, store, daemon) as behind:
        assert await behind.fetch(0, 0, 0) == {0: [0], 1: [0], 2: [0]}
        assert await behind.fetch(0, 0, 0, max_bytes=1) == {0: [0], 1: [], 2: []}
        assert await behind.fetch(0, 0, 0, max_bytes=0, needs_a_batch=False) == {0: [], 1: [], 2: []}
        assert await behind.fetch(3, 0) == {1: [0]}


@virtually
async def test_records_are_counted_when_their_answer_goes_to_a_client(tmp_path, store, daemon):
    """A prepared answer may be dropped; its records were never sent."""
    counted = []
    async with serving(tmp_path, store, daemon) as behind:
        await behind.fetch(0, 0)
        answers = behind.made(on_topic=lambda *read: counted.append(read))
        asked = {("orders", number): AskedPartition(0, 1 << 20) for number in range(2)}
        question = FetchQuestion(asked, 1 << 20, needs_a_batch=True, read_committed=False)
        sizes = []
        for _ in range(2):
            found = await answers.fetch(question)
            sizes = [size_of(one.records) for one in found.partitions.values() if one.records]
            assert counted == []
            found.release()
        found.on_sent()
        assert sizes
        assert counted == [("orders", Source.CACHE, size) for size in sizes]
        await answers.close()


@virtually
async def test_where_an_answer_goes_on_is_told_only_below_the_local_log(tmp_path, store, writers):
    """Records that the broker has itself, or may have, are not asked for ahead."""
    daemon = Daemon(tmp_path, store, writers)
    writer = writers[0]
    for _ in range(3):
        writer.closed_segment()
    async with serving(tmp_path, store, daemon) as behind:
        await daemon.round()
        for _ in range(2):
            writer.drop_head()
        await daemon.round()
        assert writer.bounds().log_start_offset == 6
        assert await behind.next_fetches(0) == {0: (3, 5)}
        assert await behind.next_fetches(3) == {}
        assert await behind.next_fetches(0, max_bytes=0, needs_a_batch=False) == {0: (0, 5)}


@virtually
async def test_nothing_is_served_past_the_end_of_the_brokers_log(tmp_path, store, writers):
    """An election has cut the log off, and no round has seen it: the broker's answer is right."""
    writer = writers[0]
    for _ in range(3):
        writer.closed_segment()
    daemon = Daemon(tmp_path, store, writers)
    async with serving(tmp_path, store, daemon) as behind:
        await daemon.round()
        assert (await behind.partitions.find("orders", 0)).manifest.next_offset == writer.next_offset
        writer.truncate(6)
        writer.begin_epoch(1)
        daemon.broker.epochs[writer.name] = 1
        await asyncio.sleep(2)
        assert await behind.fetch(6) == {}
        assert await behind.fetch(9) == {}
        # Only whole batches before the end are served.
        assert await behind.fetch(3) == {0: [3]}


@pytest.mark.parametrize("log_start_offset", [6, 9, 10, 12])
@virtually
async def test_no_batch_past_the_start_of_the_brokers_log_is_served(tmp_path, store, log_start_offset):
    """
    The broker has what follows, and after an unclean election it may have other records there.

    A batch that the log begins in is whole. The index has no entry for each of these batches.
    """
    writer = LogWriter(tmp_path, "orders", 0)
    for _ in range(5):
        writer.append()
    writer.roll()
    daemon = Daemon(tmp_path, store, [writer])
    async with serving(tmp_path, store, daemon) as behind:
        behind.host.hydrator.set_limits(HydrationLimits())
        await daemon.round()
        assert await behind.fetch(3) == {0: [3, 6, 9, 12]}
        assert len(await index_of(behind)) < 5
        # The replica that leads now parts from the archive at 12, and has written past the archive's end.
        writer.truncate(12)
        writer.begin_epoch(1)
        for _ in range(4):
            writer.append(b"x", b"y", b"z")
        writer.log_start_offset = log_start_offset
        daemon.broker.epochs[writer.name] = 1
        await asyncio.sleep(FRESH_SECONDS + 0.1)
        found = await behind.partitions.find("orders", 0)
        assert (found.manifest.next_offset, found.bounds.log_start_offset) == (15, log_start_offset)
        assert await behind.fetch(3) == {0: [base for base in (3, 6, 9) if base < log_start_offset]}
        two = [base for base in (3, 6) if base < log_start_offset]
        assert await behind.fetch(3, max_bytes=200) == {0: two}


async def index_of(behind):
    """Return the entries of the index of the only segment."""
    manifest = (await behind.partitions.find("orders", 0)).manifest
    return (await behind.host.hydrator.index(manifest.partition, manifest.segments[0])).entries


@virtually
async def test_no_offset_past_the_end_of_the_brokers_log_is_listed(tmp_path, store, writers):
    """An election has cut the log off, and the archive is not cut back yet: the broker's answer is right."""
    writer = writers[0]
    for _ in range(3):
        writer.closed_segment()
    daemon = Daemon(tmp_path, store, writers)
    async with serving(tmp_path, store, daemon) as behind:
        await daemon.round()
        # The whole log is archived.
        assert (await behind.listed(EARLIEST_PENDING_UPLOAD)).offset == writer.next_offset == 12
        writer.truncate(6)
        writer.begin_epoch(1)
        daemon.broker.epochs[writer.name] = 1
        assert (await behind.partitions.find("orders", 0)).manifest.next_offset == 12
        assert (await behind.listed(FIRST_MS + 5)).offset == 5
        assert (await behind.listed(EARLIEST)).offset == 0
        for timestamp in (FIRST_MS + 6, FIRST_MS + 7, MAX_TIMESTAMP, LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
            assert await behind.listed(timestamp) is None


@virtually
async def test_batch_that_ends_past_the_end_of_the_brokers_log_is_not_served(tmp_path, store, writers):
    """The client tries again, until the archive is cut back."""
    writer = writers[0]
    writer.closed_segment()
    daemon = Daemon(tmp_path, store, writers)
    async with serving(tmp_path, store, daemon) as behind:
        await daemon.round()
        writer.high_watermark = 1
        await asyncio.sleep(2)
        assert await behind.fetch(0) == {0: "try again"}


@virtually
async def test_error_of_a_log_that_ends_before_the_archive_is_held_back(tmp_path, store, writers):
    """A client that asks again at once gets no more than an answer a second, and fills no log."""
    writer = writers[0]
    writer.closed_segment()
    daemon = Daemon(tmp_path, store, writers)
    async with serving(tmp_path, store, daemon) as behind:
        await daemon.round()
        writer.high_watermark = 1
        await asyncio.sleep(2)
        now = asyncio.get_running_loop().time
        with capture_logs() as events:
            await behind.fetch(0)
            began = now()
            for _ in range(10):
                assert await behind.fetch_once(0, wait_seconds=5.0) == {0: "try again"}
        assert now() - began >= 10 * ERROR_PAUSE_SECONDS
        told = [one for one in events if "reason" in one]
        assert [one["log_level"] for one in told] == ["warning"] * LINES_PER_ADDRESS


@virtually
async def test_bounds_of_an_answer_are_those_that_the_broker_tells(tmp_path, store, daemon):
    """The broker is asked for bounds once a second, even for a topic that no round reads any more."""
    async with serving(tmp_path, store, daemon) as behind:
        writer = daemon.writers[0]
        for _ in range(3):
            writer.append()
        writer.high_watermark = writer.next_offset - 1
        await asyncio.sleep(2)
        before = daemon.broker.calls["log_bounds"]
        for _ in range(3):
            asked = {("orders", number): AskedPartition(0, 1 << 20) for number in range(3)}
            found = await behind.answers.fetch(
                FetchQuestion(asked, 1 << 20, needs_a_batch=True, read_committed=False)
            )
            found.release()
        said = found.partitions["orders", 0]
        assert (said.high_watermark, said.last_stable_offset) == (
            writer.high_watermark,
            writer.last_stable_offset,
        )
        assert daemon.broker.calls["log_bounds"] == before + 1


@virtually
async def test_topic_that_was_created_again_gets_no_records_of_the_old_one(tmp_path, store, daemon):
    """Read by its name, before a round has seen the new topic. A scan is brought forward."""
    async with serving(tmp_path, store, daemon) as behind:
        assert await behind.fetch(0) == {0: [0]}
        daemon.broker.created_again.add("orders")
        await asyncio.sleep(1.1)
        rounds = daemon.reconciler.rounds
        fetching = asyncio.create_task(behind.fetch_once(0, 0))
        await asyncio.sleep(0.5)
        assert daemon.reconciler.rounds == rounds + 1
        assert await fetching == {0: "try again", 1: "try again"}


@virtually
@pytest.mark.parametrize(("asks", "seconds"), [((0.6, True), 0.6), ((30.0, True), 1.0), ((30.0, False), 0.4)])
async def test_answer_of_errors_alone_waits_as_long_as_its_client(tmp_path, store, daemon, asks, seconds):
    """
    A damaged object would be downloaded again and again. Records of the broker wait for no error.

    The store is asked again for 0.4 s before the object counts as missing.
    """
    wait_seconds, needs_a_batch = asks
    async with serving(tmp_path, store, daemon) as behind:
        manifest = (await behind.partitions.find("orders", 0)).manifest
        store.remove(data_key(manifest.partition, manifest.segments[0]))
        began = asyncio.get_running_loop().time()
        fields = {"wait_seconds": wait_seconds, "needs_a_batch": needs_a_batch}
        assert await behind.fetch_once(0, **fields) == {0: "try again"}
        assert asyncio.get_running_loop().time() - began == pytest.approx(seconds, abs=0.05)


@virtually
async def test_partition_that_is_late_keeps_no_other_waiting(tmp_path, store, daemon):
    """The late partition has no records in this answer and no error, and the next Fetch waits for it."""
    async with serving(tmp_path, store, daemon) as behind:
        await behind.fetch_once(0)
        store.latency_seconds = 2
        began = asyncio.get_running_loop().time()
        assert await behind.fetch_once(0, 0) == {0: [0], 1: []}
        # As long as it takes to open a file, and no longer.
        assert asyncio.get_running_loop().time() - began < 0.01
        assert await behind.fetch_once(0, 0) == {0: [0], 1: [0]}
        assert asyncio.get_running_loop().time() - began > 2
        (late,) = (one for one in store.requests if one[0] == "get_range" and "/1_" in one[1])
        assert late


@virtually
async def test_read_that_takes_longer_than_the_client_waits_goes_on(tmp_path, store, daemon):
    """The client's next Fetch has its records, and each object is downloaded once."""
    async with serving(tmp_path, store, daemon) as behind:
        store.latency_seconds = 2
        loop = asyncio.get_running_loop()
        answers = []
        question = FetchQuestion(
            {("orders", 1): AskedPartition(0, 1 << 20)},
            1 << 20,
            needs_a_batch=True,
            read_committed=False,
            wait_seconds=0.5,
        )
        with capture_logs() as logs:
            assert (await behind.answers.fetch(question)).has_unread
        assert [(one["partition"], one["waits_for"]) for one in logs if "waits_for" in one] == [
            ("orders-1", "the store")
        ]
        for _ in range(20):
            began = loop.time()
            answers.append(await behind.fetch_once(0, wait_seconds=0.5))
            assert loop.time() - began < 0.6
            if answers[-1] != {0: []}:
                break
        assert answers[0] == {0: []}
        assert answers[-1] == {0: [0]}
        reads = [request for request in store.requests if request[0] == "get_range"]
        assert reads
        assert len(reads) == len(set(reads))
        await behind.answers.close()


@virtually
async def test_read_that_no_fetch_takes_over_ends(tmp_path, store, daemon):
    """Such a read gives back what it holds, and leaves nothing when the gateway closes."""
    async with serving(tmp_path, store, daemon) as behind:
        store.latency_seconds = 2
        assert await behind.fetch_once(0, wait_seconds=0.5) == {0: []}
        await asyncio.sleep(20)
        assert behind.host.keeper.open_chunks.in_use()
        await asyncio.sleep(20)
        assert behind.host.keeper.open_chunks.in_use() == frozenset()
        assert await behind.fetch_once(0, 0, wait_seconds=0.5) == {0: [0], 1: []}
        await behind.answers.close()


@virtually
async def test_late_partitions_come_where_nothing_is_cached(tmp_path, store, daemon):
    """Each is waited for in its turn, so that none is late for ever."""
    host = Host(tmp_path / "cache", store, limits=TrimLimits(size_bytes=0, objects=10))
    async with running(host), daemon.running():
        behind = Behind(daemon, host)
        store.latency_seconds = 1
        seen = set()
        for _ in range(2):
            answer = await behind.fetch_once(0, 0, 0)
            seen |= {number for number, bases in answer.items() if bases}
        assert seen == {0, 1, 2}


@virtually
async def test_one_partition_that_cannot_be_read_spoils_no_other(tmp_path, store, daemon):
    """The error is that partition's own, and a client goes on with the others."""
    async with serving(tmp_path, store, daemon) as behind:
        broken = (await behind.partitions.find("orders", 1)).manifest
        key = data_key(broken.partition, broken.segments[0])
        store.add(key, bytes(broken.segments[0].size_bytes))
        assert await behind.fetch(0, 0, 0) == {0: [0], 1: "try again", 2: [0]}


@virtually
async def test_partition_that_hangs_holds_the_others_up_for_a_while_only(tmp_path, store, daemon):
    """The others get their records every time, although one partition is late again and again."""
    async with serving(tmp_path, store, daemon) as behind:
        await behind.fetch_once(0)
        store.latency_seconds = 1000
        loop = asyncio.get_running_loop()
        for _ in range(3):
            began = loop.time()
            assert await behind.fetch_once(0, 0) == {0: [0], 1: []}
            assert loop.time() - began <= 5.1


@virtually
async def test_client_that_leaves_takes_its_reads_along(tmp_path, store, daemon):
    """Nothing stays open; the download is finished for the next one."""
    async with serving(tmp_path, store, daemon) as behind:
        await behind.fetch_once(0)
        store.latency_seconds = 5
        fetch = asyncio.create_task(behind.fetch_once(1 << 40, 0))
        await asyncio.sleep(1)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch


@virtually
async def test_offsets_are_listed(tmp_path, store):
    """The first, the last that is archived, the first that is not, and those of times."""
    writer = LogWriter(tmp_path, "orders", 0)
    for number in range(4):
        writer.append(b"one", timestamp_ms=FIRST_MS + 100 * number)
        writer.roll()
    writer.begin_epoch(3)
    writer.append(b"late", timestamp_ms=FIRST_MS + 250)
    writer.roll()
    async with serving(tmp_path, store, Daemon(tmp_path, store, [writer])) as behind:
        assert await behind.listed(EARLIEST) == ListedOffset(0, leader_epoch=0)
        assert await behind.listed(LATEST_TIERED) == ListedOffset(4, leader_epoch=3)
        assert await behind.listed(EARLIEST_PENDING_UPLOAD) == ListedOffset(5)
        assert await behind.listed(MAX_TIMESTAMP) == ListedOffset(3, FIRST_MS + 300, 0)
        assert await behind.listed(FIRST_MS + 101) == ListedOffset(2, FIRST_MS + 200, 0)
        assert await behind.listed(FIRST_MS - 5) == ListedOffset(0, FIRST_MS, 0)
        assert await behind.listed(FIRST_MS + 301) is None
        assert await behind.listed(-4) is None


@virtually
async def test_epochs_end_where_the_archive_knows(tmp_path, store):
    """All but the newest one, which may go on at the broker."""
    writer = LogWriter(tmp_path, "orders", 0)
    writer.append(b"a", b"b")
    writer.roll()
    writer.begin_epoch(3)
    writer.append(b"c")
    writer.roll()
    async with serving(tmp_path, store, Daemon(tmp_path, store, [writer])) as behind:

        async def end_of(epoch):
            key = ("orders", 0)
            return (await behind.answers.offset_for_leader_epoch({key: epoch})).get(key)

        assert await end_of(0) == EpochEnd(0, 2)
        assert await end_of(2) == EpochEnd(0, 2)
        assert await end_of(3) is None
        assert await end_of(4) is None


@virtually
async def test_log_directory_shows_what_is_archived_from_here(tmp_path, store, daemon):
    """Partitions that another broker leads are in that one's answer."""
    writer = daemon.writers[1]
    daemon.broker.followed[writer.name] = daemon.broker.epochs.pop(writer.name)
    async with serving(tmp_path, store, daemon) as behind:
        (row,) = await behind.answers.describe_log_dirs()
        assert row.name == "remote://bucket"
        assert row.partition_bytes == {
            ("orders", number): len(daemon.writers[number].data_of(0)) for number in (0, 2)
        }


@virtually
async def test_log_directory_is_not_shown_where_it_is_not_wanted(tmp_path, store, daemon):
    """`kafka_enable_describe_log_dirs_remote_storage` says so."""
    async with serving(tmp_path, store, daemon) as behind:
        assert await behind.made(bucket=None).describe_log_dirs() == ()


@virtually
async def test_restored_log_goes_on_from_its_old_archive(tmp_path, store):
    """Old records come under the first epoch, and their times are found. Their epochs are not served."""
    old = LogWriter(tmp_path / "old", "orders", 0, topic_id="BAAAAAAAAAAAAAAAAAAAAA")
    old.identified = replace(old.identified, cluster="old")
    old.begin_epoch(37)
    for number in range(3):
        old.append(b"old", timestamp_ms=FIRST_MS + 100 * number)
        old.roll()
    await archived(old, archive_in(store))
    new = LogWriter(tmp_path / "new", "orders", 0, first_offset=3)
    daemon = Daemon(tmp_path / "new", store, [new])
    key, history_key = (
        TopicKey(CLUSTER, "orders", TOPIC_ID),
        TopicKey("old", "orders", old.identified.topic_id),
    )
    await daemon.archive.history.link(HistoryLink(key, history_key, ((0, 3),)))
    async with serving(tmp_path, store, daemon) as behind:
        assert await told(behind, 3) == (-1, 0)
        # Nothing of the new log is archived yet.
        assert await behind.fetch(1) == {0: [1]}
        new.append(b"new", timestamp_ms=FIRST_MS + 250)
        new.roll()
        await daemon.round()
        assert await behind.fetch(0) == {0: [0]}
        assert await behind.fetch(2) == {0: [2]}
        assert await behind.fetch(3) == {0: [3]}
        asked = {("orders", 0): AskedPartition(1, 1 << 20)}
        found = await behind.answers.fetch(
            FetchQuestion(asked, 1 << 20, needs_a_batch=True, read_committed=True)
        )
        (answer,) = found.partitions.values()
        assert parse_header(b"".join(answer.records)).leader_epoch == 0
        assert answer.log_start_offset == 0
        assert await told(behind, 9) == (0, 0)
        assert answer.high_watermark >= 3
        found.release()
        assert await behind.listed(EARLIEST) == ListedOffset(0)
        assert await behind.listed(FIRST_MS + 150) == ListedOffset(2, FIRST_MS + 200)
        assert await behind.listed(MAX_TIMESTAMP) == ListedOffset(3, FIRST_MS + 250, 0)
        assert await behind.listed(LATEST_TIERED) == ListedOffset(3, leader_epoch=0)
        assert await behind.answers.offset_for_leader_epoch({("orders", 0): 37}) == {}


async def restored(tmp_path, store, *, partition_count: int = 1) -> LogWriter:
    """Return a log that begins at offset 3, where an archive of three segments ends that it continues."""
    old = LogWriter(tmp_path / "old", "orders", 0, topic_id="BAAAAAAAAAAAAAAAAAAAAA")
    for _ in range(3):
        old.append(b"old")
        old.roll()
    archive = archive_in(store)
    await archived(old, archive)
    key, old_key = (TopicKey(CLUSTER, "orders", one) for one in (TOPIC_ID, old.identified.topic_id))
    starts = tuple((number, 3) for number in range(partition_count))
    await archive.history.link(HistoryLink(key, old_key, starts))
    return LogWriter(tmp_path / "new", "orders", 0, first_offset=3)


@virtually
@pytest.mark.parametrize("partition_count", [1, 0])
async def test_history_is_not_passed_over_before_the_first_claim(tmp_path, partition_count):
    """A client in the history of a restored log waits for the log's manifest; others hear the broker."""
    store = RefusingStore()
    new = await restored(tmp_path, store, partition_count=partition_count)
    daemon = Daemon(tmp_path / "new", store, [new])
    store.refused_prefix = manifest_key(new.identified)
    async with serving(tmp_path, store, daemon) as behind:
        if partition_count:
            assert await behind.fetch_once(1) == {0: "try again"}
            with pytest.raises(StorageUnavailable, match="continues an older archive"):
                await behind.listed(EARLIEST)
        else:
            # The partition was added after the restore.
            assert await behind.fetch_once(1) == {}
        store.refused_prefix = None
        await daemon.round()
        if partition_count:
            assert await behind.fetch(1) == {0: [1]}
            assert await behind.listed(EARLIEST) == ListedOffset(0)


@virtually
async def test_restored_topic_that_is_not_archived_has_the_broker_s_answers(tmp_path, store):
    """No claim ever comes, so a client that waited for one could not read the log that there is."""
    new = await restored(tmp_path, store)
    new.closed_segment()
    daemon = Daemon(tmp_path / "new", store, [new])
    daemon.broker.configs["orders"] = {"redpanda.remote.write": "false", "redpanda.remote.read": "true"}
    async with serving(tmp_path, store, daemon) as behind:
        assert await behind.fetch(1) == {}
        assert await behind.listed(EARLIEST) is None


@virtually
async def test_old_archive_that_is_away_costs_the_new_one_nothing(tmp_path, store):
    """The old archive is asked only for what lies before the new one."""
    new = LogWriter(tmp_path / "new", "orders", 0, first_offset=3)
    new.closed_segment()
    daemon = Daemon(tmp_path / "new", store, [new])
    async with serving(tmp_path, store, daemon) as behind:
        assert await behind.fetch_once(3) == {0: [3]}
        # The start of the log is looked up after that answer, and fails.
        store.fail_next("get", lambda: StorageUnavailable("away"))
        assert await behind.fetch_once(3) == {0: [3]}
        store.fail_next("get", lambda: StorageUnavailable("away"))
        assert await behind.fetch_once(1) == {0: "try again"}
        assert await behind.fetch_once(1) == {}
