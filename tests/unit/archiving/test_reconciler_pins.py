"""Pins within rounds: whatever the object store does, what is not known to be durable is held on to."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager

import pytest

from tests.fakes.archive import values_in, written_below
from tests.fakes.daemons import Daemon
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import stored_manifest
from tests.fakes.virtual_loop import virtually
from tieringd.archiving.manifest_upkeep import REFRESH_INTERVAL_MS
from tieringd.archiving.pinner import PIN_UNKNOWN_AFTER_SECONDS
from tieringd.errors import BrokerDenied

HANGS_SECONDS = 600


@pytest.fixture
def make_daemon(tmp_path, store, writers):
    def make() -> Daemon:
        root = tmp_path.parent / f"{tmp_path.name}-pins"
        root.mkdir(exist_ok=True)
        return Daemon(tmp_path, store, writers, pin_root=root)

    return make


@asynccontextmanager
async def hanging(daemon: Daemon):
    """Run a daemon whose store does not answer, and give it up in the end."""
    daemon.store.latency_seconds = HANGS_SECONDS
    run = asyncio.create_task(daemon.reconciler.run())
    try:
        yield
    finally:
        run.cancel()
        await asyncio.wait([run])


@virtually
async def test_store_that_hangs_from_the_start_does_not_keep_segments_from_being_pinned(make_daemon):
    """The daemon does not know what is paused or durable, so it pins every closed segment."""
    daemon = make_daemon()
    async with hanging(daemon):
        await asyncio.sleep(1)
        assert daemon.pinned(daemon.writers[0]) == []
        await daemon.round()
        assert [daemon.pinned(each) for each in daemon.writers] == [[0], [0], [0]]


@virtually
async def test_start_with_a_store_that_answers_pins_nothing_that_is_durable(make_daemon):
    """The store has a while to tell what is durable, before each file is linked and let go again."""
    daemon = make_daemon()
    async with daemon.running():
        await daemon.round()
    again = make_daemon()
    async with again.running():
        assert PIN_UNKNOWN_AFTER_SECONDS > 1
        assert again.value("tieringd_pinned_segments") == 0
        assert [again.pinned(each) for each in again.writers] == [[], [], []]


@virtually
async def test_store_that_hangs_in_a_commit_does_not_keep_segments_from_being_pinned(make_daemon):
    """
    Segments that were durable before the commit are known.

    Those closed since are pinned in the next round.
    """
    daemon = make_daemon()
    writer = daemon.writers[0]
    async with daemon.running():
        await daemon.round()
        daemon.store.latency_seconds = HANGS_SECONDS
        first = writer.closed_segment()
        await daemon.round()
        assert daemon.pinned(writer) == [first]
        second = writer.closed_segment()
        await daemon.round()
        assert daemon.pinned(writer) == [first, second]
        daemon.store.latency_seconds = 0
        await asyncio.sleep(5 * HANGS_SECONDS)
        assert daemon.pinned(writer) == []


def hang_commits(store) -> None:
    """Let every put of a partition's manifest wait for as long as its caller does."""
    put = store.put

    async def slow(key, body, *, crc32c, condition=None):
        if key.endswith("/manifest"):
            await asyncio.sleep(HANGS_SECONDS)
        return await put(key, body, crc32c=crc32c, condition=condition)

    store.put = slow


@virtually
async def test_commit_that_hangs_leaves_known_what_was_durable_before(make_daemon):
    """Only what came since is held on to."""
    daemon = make_daemon()
    writer = daemon.writers[0]
    async with daemon.running():
        await daemon.round()
        hang_commits(daemon.store)
        closed = writer.closed_segment()
        for _ in range(3):
            await daemon.round()
        assert daemon.pinned(writer) == [closed]
        await asyncio.sleep(HANGS_SECONDS)


@virtually
async def test_pins_of_a_partition_that_cannot_be_read_stay(make_daemon):
    """A round that could not scan everything takes nothing for deleted."""
    daemon = make_daemon()
    writer = daemon.writers[0]
    async with hanging(daemon):
        await asyncio.sleep(1)
        await daemon.round()
        (writer.path / "leader-epoch-checkpoint").write_text("nonsense")
        for _ in range(3):
            await daemon.round()
        assert daemon.pinned(writer) == [0]


@virtually
async def test_followed_partition_is_pinned_although_its_manifest_cannot_be_read(make_daemon):
    """A followed partition is pinned while the store is away, so that a new leader has its own pins."""
    daemon = make_daemon()
    name = daemon.writers[0].name
    daemon.broker.followed[name] = daemon.broker.epochs.pop(name)
    async with hanging(daemon):
        await asyncio.sleep(1)
        await daemon.round()
        assert daemon.pinned(daemon.writers[0]) == [0]


@virtually
async def test_partition_whose_bounds_are_unknown_is_pinned(make_daemon):
    """A leader that is not asked for its log's end still deletes from its head."""
    daemon = make_daemon()
    writer = daemon.writers[0]
    async with daemon.running():
        daemon.broker.bounds_errors[writer.name] = BrokerDenied(
            "no permission to look", hint="Grant DESCRIBE"
        )
        await daemon.round()
        await daemon.round()
        assert daemon.pinned(writer) == [0]


@virtually
async def test_partition_that_the_cluster_does_not_name_keeps_its_pins(make_daemon):
    """A partition with a directory is not deleted: the metadata of a broker that restarts may lack it."""
    daemon = make_daemon()
    writer = daemon.writers[0]
    async with hanging(daemon):
        await asyncio.sleep(1)
        await daemon.round()
        daemon.broker.epochs.pop(writer.name)
        for _ in range(3):
            await daemon.round()
        assert daemon.pinned(writer) == [0]


@virtually
async def test_pins_of_a_topic_whose_archiving_is_off_for_some_rounds_stay(make_daemon):
    """They alone hold what the broker's retention has deleted, and the setting may be a mistake."""
    daemon = make_daemon()
    writer = daemon.writers[0]
    async with daemon.running():
        await daemon.round()
        daemon.store.latency_seconds = HANGS_SECONDS
        closed = writer.closed_segment()
        await daemon.round()
        writer.drop_head()
        writer.drop_head()
        writer.forget_epochs()
        daemon.broker.configs["orders"] = {"redpanda.remote.write": "false"}
        for _ in range(4):
            await daemon.round()
        assert daemon.pinned(writer) == [closed]
        assert daemon.value("tieringd_pinned_segments") == 1
        daemon.broker.configs["orders"] = {}
        daemon.store.latency_seconds = 0
        await asyncio.sleep(5 * HANGS_SECONDS)
        assert daemon.archived()["orders-0"] == [0, closed]
        assert daemon.pinned(writer) == []
        assert daemon.value("tieringd_pins_given_up_total") == 0


@virtually
async def test_active_segment_that_expires_while_the_store_hangs_is_pinned(make_daemon):
    """Kafka closes and deletes it in one go, so there is no round that sees it closed."""
    daemon = make_daemon()
    writer = daemon.writers[0]
    daemon.broker.configs["orders"] = {"retention.ms": "10000"}
    async with daemon.running():
        await daemon.round()
        daemon.store.latency_seconds = HANGS_SECONDS
        writer.append(b"last", b"words")
        active = writer.bases[-1]
        await daemon.round()
        assert daemon.pinned(writer) == []
        daemon.clock.now_ms += 6_000
        await daemon.round()
        assert daemon.pinned(writer) == [active]
        writer.roll()
        writer.drop_head()
        writer.drop_head()
        writer.forget_epochs()
        daemon.store.latency_seconds = 0
        await asyncio.sleep(5 * HANGS_SECONDS)
        assert daemon.archived()["orders-0"] == [0, active]
        assert daemon.pinned(writer) == []


@virtually
async def test_active_segment_that_grows_after_its_pin_is_archived_whole(make_daemon):
    """The broker appends to it, closes it and deletes it while no scan looks, as beside a stopped daemon."""
    daemon = make_daemon()
    writer = daemon.writers[0]
    daemon.broker.configs["orders"] = {"retention.ms": "10000"}
    async with daemon.running():
        await daemon.round()
        daemon.store.latency_seconds = HANGS_SECONDS
        writer.append(b"last", b"words")
        active = writer.bases[-1]
        daemon.clock.now_ms += 6_000
        await daemon.round()
        assert daemon.pinned(writer) == [active]
        writer.append(b"and", b"more")
        end = writer.roll()
        writer.drop_head()
        writer.drop_head()
        writer.forget_epochs()
        daemon.store.latency_seconds = 0
        await asyncio.sleep(5 * HANGS_SECONDS)
        assert daemon.status(writer).fault == ""
        manifest = stored_manifest(daemon.store, writer)
        assert (manifest.next_offset, manifest.gaps) == (end, ())
        assert await values_in(daemon.archive, manifest) == written_below(writer, end)
        assert daemon.pinned(writer) == []


@virtually
async def test_replica_with_corrupt_data_is_replaced_without_a_loss(make_daemon, tmp_path, store):
    """
    A corrupt partition's pins become durable at another leader; then its replica may be deleted.

    These are the runbook's steps for TieringdCorruptData. A replica that is deleted while it has pins loses
    what they hold.
    """
    here = make_daemon()
    bad = here.writers[1]
    logs, pin_root = tmp_path.parent / f"{tmp_path.name}-other", tmp_path.parent / f"{tmp_path.name}-held"
    pin_root.mkdir()
    good = LogWriter(logs, *bad.name)
    good.closed_segment()
    other = Daemon(logs, store, [good], pin_root=pin_root)
    other.broker.followed[good.name] = other.broker.epochs.pop(good.name)
    async with here.running(), other.running():
        await here.round()
        first = bad.closed_segment()
        bad.flip_byte(first)
        good.closed_segment()
        for _ in range(4):
            bad.closed_segment()
            good.closed_segment()
        for _ in range(3):
            await here.round()
        assert here.status(bad).fault
        for _ in range(4):
            bad.drop_head()
            good.drop_head()
        for _ in range(3):
            await here.round()
        assert here.pinned(bad)[0] == first
        assert here.value("tieringd_pinned_bytes") > 0
        # Leadership moves, and the pins are waited for.
        for writer in (bad, good):
            writer.begin_epoch(1)
        del here.broker.epochs[bad.name], other.broker.followed[good.name]
        here.broker.followed[bad.name] = other.broker.epochs[good.name] = 1
        for _ in range(3):
            await here.round()
        here.clock.now_ms += REFRESH_INTERVAL_MS
        for _ in range(3):
            await here.round()
        assert here.value("tieringd_pinned_bytes") == 0
        # The replica is deleted, and takes longer to come back than two scans.
        del here.broker.followed[bad.name]
        shutil.rmtree(bad.path)
        for _ in range(4):
            await here.round()
        assert here.value("tieringd_pins_given_up_total") == 0
        manifest = stored_manifest(store, good)
        assert manifest.gaps == ()
        assert await values_in(other.archive, manifest) == written_below(good, good.bases[-1])
