"""A single pass over everything: what it finishes, what it tells, and when it ends."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.archive import archive_in, archiver_of, observed
from tests.fakes.broker import broker_unavailable
from tests.fakes.daemons import Daemon
from tests.fakes.store import store_unavailable
from tests.fakes.virtual_loop import virtually
from tieringd.archiving.partition_status import PartitionStatus
from tieringd.errors import BrokerUnavailable, LocalFileError
from tieringd.formats.object_keys import topic_key, topic_manifest_key
from tieringd.model.partition import Leadership


@virtually
async def test_run_once_leaves_nothing_eligible(tmp_path, store, writers):
    """One call uploads all that is eligible, trims all that may go, and tells the sums."""
    daemon = Daemon(tmp_path, store, writers, target_bytes=1)
    for _ in range(6):
        writers[0].closed_segment()

    done = await daemon.reconciler.run_once()

    assert len(daemon.archived()["orders-0"]) == 7
    status = done.statuses[Leadership(writers[0].identified, 0)]
    assert (status.uploaded, status.pending_segments, status.fault) == (7, 0, "")
    assert status.trimmed == 7 - (len(writers[0].bases_on_disk) - 1) >= 6
    assert done.statuses[Leadership(writers[1].identified, 0)].uploaded == 1
    assert done.problems == {}


@virtually
async def test_run_once_tries_again_while_others_make_progress(daemon, store):
    """A partition that failed in the first pass is tried again in the next."""
    failing = daemon.writers[0]
    put, failed = store.put, []

    async def fail_once(key, body, *, crc32c, condition=None):
        if not failed and key.endswith(".log") and "/0_" in key:
            failed.append(key)
            raise store_unavailable("put")
        return await put(key, body, crc32c=crc32c, condition=condition)

    store.put = fail_once

    done = await daemon.reconciler.run_once()

    assert failed
    assert done.statuses[Leadership(failing.identified, 0)] == PartitionStatus(uploaded=1)


@virtually
async def test_run_once_ends_when_nothing_moves(daemon, store):
    """A fault that stays is reported, and does not keep the call from returning."""
    put = store.put

    async def never_first(key, body, *, crc32c, condition=None):
        if key.endswith(".log") and "/0_" in key:
            raise store_unavailable("put")
        return await put(key, body, crc32c=crc32c, condition=condition)

    store.put = never_first

    done = await daemon.reconciler.run_once()

    assert "does not answer" in done.statuses[Leadership(daemon.writers[0].identified, 0)].fault
    assert daemon.archived().keys() == {"orders-1", "orders-2"}


@virtually
async def test_run_once_records_a_gap(daemon):
    """The second observation that a gap needs is taken in the same call."""
    writer = daemon.writers[0]
    await daemon.reconciler.run_once()
    writer.closed_segment()
    kept = writer.closed_segment()
    writer.drop_head()
    writer.drop_head()

    done = await daemon.reconciler.run_once()

    assert daemon.archived()["orders-0"] == [0, kept]
    assert done.statuses[Leadership(writer.identified, 0)] == PartitionStatus(uploaded=1)


@virtually
async def test_run_once_tells_what_it_could_not_scan(daemon):
    """A pass that left something out says so."""
    daemon.broker.bounds_errors[daemon.writers[0].name] = LocalFileError("unreadable", path="x")

    done = await daemon.reconciler.run_once()

    assert done.problems == {str(daemon.writers[0].path): "unreadable"}


@virtually
async def test_run_once_of_a_fenced_partition_ends(daemon, store):
    """A partition that another writer owns is reported and left, and the others are done."""
    other = archiver_of(daemon.writers[0], archive_in(store, writer_id="b2"), daemon.broker, leader_epoch=5)
    await other.step(observed(daemon.writers[0]))

    done = await daemon.reconciler.run_once()

    assert "leader epoch 5 owns" in done.statuses[Leadership(daemon.writers[0].identified, 0)].fault
    assert daemon.archived()["orders-1"] == [0]


@virtually
async def test_run_once_without_a_broker_raises(daemon):
    """An error reaches the caller if nothing can be scanned."""
    daemon.broker.fail_next("log_bounds", broker_unavailable("log_bounds"))

    with pytest.raises(BrokerUnavailable):
        await daemon.reconciler.run_once()


@virtually
async def test_stopped_run_once_returns_after_the_step_in_hand(daemon, store):
    """Stopping ends the work between two steps, with what was done told."""
    store.latency_seconds = 1
    for _ in range(9):
        daemon.writers[0].closed_segment()
    work = asyncio.create_task(daemon.reconciler.run_once())
    await asyncio.sleep(5.5)

    daemon.reconciler.stop()
    done = await work

    assert done.statuses[Leadership(daemon.writers[0].identified, 0)].uploaded == 3


@virtually
async def test_run_once_that_is_stopped_at_its_first_segment_has_stored_the_topic_manifest(daemon, store):
    """A restore finds topics by them, so they come before any segment."""
    daemon.writers[0].closed_segment()
    key = topic_manifest_key(topic_key(daemon.writers[0].identified))
    put, seen = store.put, []

    async def noted(name, body, **options):
        if name.endswith(".log"):
            seen.append(key in store.objects)
            daemon.reconciler.stop()
        return await put(name, body, **options)

    store.put = noted
    await daemon.reconciler.run_once()
    assert seen
    assert all(seen)
