"""Steps whose uploads wait in the gate's queue, as under a limit: what must not wait with them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archived, archiver_of, observed
from tests.fakes.broker import FakeBroker
from tests.fakes.daemons import Daemon
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.store import AwayStore
from tests.fakes.virtual_loop import virtually
from tieringd.archiving.claim import OFFER_SECONDS, ended
from tieringd.errors import BucketNotFound, RetryableError, StorageDenied, StorageUnavailable
from tieringd.model.partition import Leadership
from tieringd.policies.upload_control import UploadPace

FULL_PACE = UploadPace(4, None)
ONE_BYTE_PER_SECOND = UploadPace(4, None, limit_bytes_per_second=1)


@pytest.fixture
def archiver(writer, archive, broker, metrics, clock):
    return archiver_of(writer, archive, broker, metrics=metrics, now_ms=clock)


def limit_uploads(archive) -> None:
    """Let one upload begin, and no other for an hour or more."""
    archive.gate.set_pace(ONE_BYTE_PER_SECOND)


async def settle() -> None:
    await asyncio.sleep(1)


@virtually
async def test_trim_for_a_full_disk_passes_the_upload_queue(tmp_path, store, writers):
    """A request for room reaches a step that waits in the queue; what was durable goes at once."""
    for writer in writers:
        for _ in range(4):
            writer.closed_segment()
    daemon = Daemon(tmp_path, store, writers)
    async with daemon.running():
        await daemon.round()
        durable = daemon.archived()
        limit_uploads(daemon.archive)
        for writer in writers:
            for _ in range(8):
                writer.closed_segment()
        await daemon.round()
        assert daemon.archive.gate.waiting_uploads
        for writer in writers:
            daemon.reconciler.request_space(Leadership(writer.identified, 0), writer.bases[-1])
        await settle()
        assert all(writer.bases_on_disk[0] > durable[str(writer.name)][-1] for writer in writers)
        await daemon.round()
        assert daemon.archive.gate.waiting_uploads, "they have asked again"
        daemon.archive.gate.set_pace(FULL_PACE)
        await daemon.round()
        assert daemon.archived() == {str(writer.name): writer.bases[:-1] for writer in writers}


@virtually
async def test_figures_of_a_partition_go_on_while_its_step_waits_in_the_queue(tmp_path, store, writers):
    """What waits, for how long, and how near its loss is are figures of each round, not of the last step."""
    daemon = Daemon(tmp_path, store, writers)
    daemon.broker.configs["orders"] = {"retention.ms": "7200000"}
    daemon.clock.now_ms = DEFAULT_TIME_MS
    async with daemon.running():
        await daemon.round()
        limit_uploads(daemon.archive)
        for writer in writers:
            for _ in range(8):
                writer.closed_segment()
        await daemon.round()
        for minutes in (1, 2):
            daemon.clock.now_ms = DEFAULT_TIME_MS + minutes * 60_000
            await daemon.round()
            assert daemon.archive.gate.waiting_uploads
            for partition in ("0", "1", "2"):
                labels = {"topic": "orders", "partition": partition}
                assert daemon.value("tieringd_upload_pending_bytes", **labels)
                assert daemon.value("tieringd_upload_lag_seconds", **labels) == pytest.approx(
                    minutes * 60, abs=1
                )
                assert daemon.value("tieringd_seconds_to_loss", **labels) == pytest.approx(
                    7200 - minutes * 60, abs=1
                )


async def close_segments_in_an_outage(daemon: Daemon, store: AwayStore) -> None:
    """Let the store be away from now on, and each partition fail to upload eight segments."""
    store.is_away = True
    for writer in daemon.writers:
        for _ in range(8):
            writer.closed_segment()
    await daemon.round()


@virtually
async def test_outage_that_is_over_is_no_fault_of_what_waits_in_the_queue(tmp_path, writers):
    """
    A backlog waits in the queue for hours after an outage. The daemon is ready, for the store is back.

    A step that fails at the store again is a fault again.
    """
    store = AwayStore()
    daemon = Daemon(tmp_path, store, writers)
    async with daemon.running():
        await daemon.round()
        await close_segments_in_an_outage(daemon, store)
        assert daemon.reconciler.faults()["store"] == 3
        assert "store" in daemon.reconciler.fault
        store.is_away = False
        limit_uploads(daemon.archive)
        await daemon.round()
        await daemon.round()
        assert daemon.archive.gate.waiting_uploads
        assert daemon.reconciler.faults()["store"] == 0
        assert daemon.reconciler.fault == ""
        assert {status.fault for status in daemon.reconciler.statuses().values()} == {""}
        store.is_away = True
        daemon.archive.gate.set_pace(FULL_PACE)
        await daemon.round()
        assert daemon.reconciler.faults()["store"] == 3


class SlowStore(AwayStore):
    """Takes a while for each segment, and may refuse them while it answers all else, as a full one does."""

    refused = ""
    """Segments whose keys have this are refused."""

    async def put(self, key, body, **options):
        if key.endswith(".log"):
            if self.refused and self.refused in key:
                raise StorageDenied("put: the bucket takes no more")
            await asyncio.sleep(15)
        return await super().put(key, body, **options)


@virtually
async def test_outage_that_is_over_is_no_fault_of_what_is_uploaded_for_hours(tmp_path, writers):
    """One step follows another on the same observation, and a busy partition has always more to upload."""
    store = SlowStore()
    daemon = Daemon(tmp_path, store, writers)
    async with daemon.running():
        await daemon.round()
        store.is_away = True
        for writer in writers[1:]:
            for _ in range(100):
                writer.closed_segment()
        writers[0].closed_segment()
        await daemon.round()
        assert daemon.reconciler.faults()["store"] == 3
        store.is_away = False
        for number in range(40):
            writers[0].closed_segment()
            await daemon.round()
            assert number < 8 or not daemon.reconciler.fault
        assert all(bases(store, writer) != writer.bases[:-1] for writer in writers)
        assert daemon.reconciler.faults()["store"] == 0


@virtually
async def test_store_that_refuses_segments_is_a_fault_while_they_wait_in_the_queue(tmp_path, writers):
    """Each refused segment takes its part of a limit, and the next ones wait nearly all the time."""
    store = SlowStore()
    daemon = Daemon(tmp_path, store, writers)
    async with daemon.running():
        await daemon.round()
        store.refused = "/"
        for writer in writers:
            for _ in range(8):
                writer.closed_segment()
        limit_uploads(daemon.archive)
        for _ in range(120):
            await daemon.round()
        for _ in range(120):
            await daemon.round()
            assert daemon.archive.gate.waiting_uploads
            assert daemon.reconciler.faults()["store"] == 3
            assert "takes no more" in daemon.reconciler.fault


@virtually
async def test_refusal_of_one_partition_is_a_fault_while_its_segments_wait_in_the_queue(tmp_path, writers):
    """What the store takes of other partitions says nothing of it."""
    store = SlowStore()
    daemon = Daemon(tmp_path, store, writers)
    async with daemon.running():
        await daemon.round()
        store.refused = "/0_"
        daemon.archive.gate.set_pace(UploadPace(4, None, limit_bytes_per_second=3))
        for number in range(240):
            if number % 6 == 0:
                for writer in writers:
                    writer.closed_segment()
            await daemon.round()
            assert number < 60 or daemon.reconciler.faults()["store"] == 1
        daemon.archive.gate.set_pace(FULL_PACE)
        assert daemon.archived()


@virtually
async def test_status_of_a_busy_partition_goes_on(tmp_path, writers):
    """A segment that is closed during each upload gives one step after another, and no rest."""
    daemon = Daemon(tmp_path, SlowStore(), writers)
    async with daemon.running():
        await daemon.round()
        for _ in range(30):
            writers[0].closed_segment()
            await daemon.round()
        first_wait = f"segment {writers[0].bases[1]} is active"
        assert daemon.status(writers[0]).waits_because not in ("", first_wait)


@virtually
async def test_outage_shows_while_what_failed_in_it_waits_in_the_queue_too(tmp_path, writers):
    """The first uploads leave the queue and fail, and all others wait there, for hours."""
    store = AwayStore()
    daemon = Daemon(tmp_path, store, writers)
    async with daemon.running():
        await daemon.round()
        await close_segments_in_an_outage(daemon, store)
        limit_uploads(daemon.archive)
        for _ in range(3):
            await daemon.round()
            assert daemon.archive.gate.waiting_uploads
            assert daemon.reconciler.faults()["store"] == 3
        store.is_away = False
        daemon.archive.gate.set_pace(FULL_PACE)
        await daemon.round()
        assert daemon.reconciler.faults()["store"] == 0


@virtually
async def test_trim_that_was_asked_for_comes_before_the_queue(writer, archive, archiver, broker):
    """A step that knows of a full disk trims before it waits for an upload."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    limit_uploads(archive)
    for _ in range(4):
        writer.closed_segment()
    archiver.request_space(writer.bases[-1])
    step = asyncio.create_task(archiver.step(observed(writer)))
    await settle()
    assert broker.trims == [(writer.name, writer.bases[1])]
    assert (await step).trimmed == 1


@virtually
async def test_trim_that_was_refused_holds_no_upload_up(writer, archiver, store, broker):
    """A request for room that no trim can serve leaves the uploads as they are."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    writer.closed_segment()
    broker.denied.add("orders")
    archiver.request_space(writer.bases[-1])
    assert (await archiver.step(observed(writer))).uploaded == 1
    assert len(broker.trims) == 1
    assert bases(store, writer) == writer.bases[:-1]


@virtually
async def test_upload_under_way_is_waited_for_and_committed(writer, archive, archiver, store):
    """Only uploads that have not begun are taken out of the queue. They are asked for again."""
    store.latency_seconds = 5.0
    await archiver.step(observed(writer))
    limit_uploads(archive)
    for _ in range(4):
        writer.closed_segment()
    step = asyncio.create_task(archiver.step(observed(writer)))
    await settle()
    assert (archive.gate.uploads_in_flight, archive.gate.waiting_uploads) == (1, 3)
    archiver.request_space(writer.bases[-1])
    await settle()
    assert (archive.gate.uploads_in_flight, archive.gate.waiting_uploads) == (1, 0)
    assert (await step).uploaded == 1
    assert bases(store, writer) == writer.bases[:1]
    archive.gate.set_pace(FULL_PACE)
    while (await archiver.step(observed(writer))).uploaded:
        pass
    assert bases(store, writer) == writer.bases[:-1]


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("awaits", range(1, 20))
@virtually
async def test_request_for_room_at_any_moment_leaves_the_gate_whole(
    writer, archive, archiver, store, *, awaits, cancels
):
    """Uploads taken out of the queue hold no slot, also where the step is cancelled in the same moment."""
    archive.gate.set_pace(UploadPace(1, None))
    for _ in range(3):
        writer.closed_segment()
    step = asyncio.create_task(archiver.step(observed(writer)))
    for _ in range(awaits):
        await asyncio.sleep(0)
    archiver.request_space(writer.bases[-1])
    if cancels:
        step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    assert step.cancelled() == cancels
    assert (archive.gate.uploads_in_flight, archive.gate.waiting_uploads) == (0, 0)
    while (await archiver.step(observed(writer))).uploaded:
        pass
    assert bases(store, writer) == writer.bases[:-1]


class Mark:
    """A change that can be seen in the manifest: it sets the local retention hint."""

    async def commit(self, claim, stored):
        return await claim.commit(stored, replace(stored.existing, allowed_local_start_offset=7))


@virtually
async def test_offer_passes_the_upload_queue(tmp_path, store, writers):
    """A change that is offered while a step waits in the queue is committed, and the uploads ask again."""
    daemon = Daemon(tmp_path, store, writers)
    async with daemon.running():
        limit_uploads(daemon.archive)
        for _ in range(8):
            writers[0].closed_segment()
        await daemon.round()
        assert daemon.archive.gate.waiting_uploads
        archiver = daemon.reconciler.archiver(Leadership(writers[0].identified, 0))
        offer = archiver.offer(Mark())
        await settle()
        assert offer.done()
        assert await ended(offer)
        assert stored_manifest(store, writers[0]).allowed_local_start_offset == 7
        assert daemon.archive.gate.waiting_uploads, "they have asked again"
        daemon.archive.gate.set_pace(FULL_PACE)
        await daemon.round()
        assert daemon.archived()[str(writers[0].name)] == writers[0].bases[:-1]


@virtually
async def test_offer_from_before_the_step_does_not_wait_for_the_queue(writer, archive, archiver, store):
    """A step that has changes to commit uploads what the gate lets begin at once, and waits for no more."""
    await archiver.step(observed(writer))
    limit_uploads(archive)
    for _ in range(4):
        writer.closed_segment()
    offer = archiver.offer(Mark())
    async with asyncio.timeout(60):
        assert (await archiver.step(observed(writer))).uploaded == 1
    assert await ended(offer)
    assert bases(store, writer) == writer.bases[:1]
    assert archive.gate.waiting_uploads == 0


@virtually
async def test_offer_waits_no_longer_than_its_time(writer, archiver, store):
    """A job goes on without a step that takes hours, and its change is not committed any more."""
    await archiver.step(observed(writer))
    writer.closed_segment()
    store.latency_seconds = 3600.0
    step = asyncio.create_task(archiver.step(observed(writer)))
    await settle()
    now = asyncio.get_running_loop().time
    begun = now()
    with pytest.raises(RetryableError, match="has not come to this change"):
        await ended(archiver.offer(Mark()))
    assert now() - begun == pytest.approx(OFFER_SECONDS)
    assert (await step).uploaded == 1
    assert stored_manifest(store, writer).allowed_local_start_offset is None


async def test_wait_for_the_lineage_is_no_obstacle_once_it_is_over(writer, archive, store, broker, clock):
    """The rest of a step may fail for as long as the store is away, and durable segments may go meanwhile."""
    for _ in range(3):
        writer.closed_segment()
    await archived(writer, archive)
    archiver = archiver_of(writer, archive, broker, leader_epoch=4, now_ms=clock)
    assert (await archiver.step(observed(writer))).waits_for_lineage
    assert archiver.trim_obstacle is not None
    writer.begin_epoch(4)
    writer.closed_segment()
    writer.closed_segment()
    store.fail_next("put", lambda: StorageUnavailable("away"), times=60)
    with pytest.raises(StorageUnavailable):
        await archiver.step(observed(writer))
    assert archiver.trim_obstacle is None


async def test_stored_copy_that_may_not_be_read_holds_no_upload_up(tmp_path, store, archive, clock):
    """A trim that comes first, for a full disk, may fail; uploads make room in the end."""
    first, second = LogWriter(tmp_path / "first"), LogWriter(tmp_path / "second")
    for writer, rolled_after in ((first, {1, 3, 5}), (second, {0, 2, 4, 5})):
        for record in range(6):
            writer.append()
            if record in rolled_after:
                writer.roll()
    await archived(first, archive)
    second.begin_epoch(1)
    archiver = archiver_of(second, archive, FakeBroker(second), now_ms=clock)
    await archiver.step(observed(second))
    second.closed_segment()
    for operation in ("get", "get_range"):
        store.fail_next(operation, lambda: StorageDenied("the object is in an archive tier"), times=100)
    archiver.request_space(second.bases[-1])
    await archiver.step(observed(second))
    assert stored_manifest(store, second).next_offset == second.bases[-1]
    assert archiver.trim_obstacle is not None


async def test_trim_that_fails_first_holds_no_upload_up(writer, archive, archiver, store):
    """The error comes after the uploads, as it does where the trim comes last."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    writer.closed_segment()
    # The record of the trim is refused, and the upload's commit is not.
    store.fail_next("put", lambda: BucketNotFound("gone"))
    archiver.request_space(writer.bases[-1])
    with pytest.raises(BucketNotFound):
        await archiver.step(observed(writer))
    assert bases(store, writer) == writer.bases[:-1]


@virtually
async def test_requests_for_room_leave_each_partition_its_turn(tmp_path, store, writers):
    """What leaves the queue for a trim and asks again has its place, and the largest backlog does not win."""
    daemon = Daemon(tmp_path, store, writers)
    async with daemon.running():
        for writer in writers:
            writer.closed_segment()
        await daemon.round()
        await daemon.round()
        before = {name: len(found) for name, found in daemon.archived().items()}
        limit_uploads(daemon.archive)
        for count, writer in zip((8, 4, 4), writers, strict=True):
            for _ in range(count):
                writer.closed_segment()
        for number in range(450):
            if number % 9 == 0:
                writers[0].closed_segment()
            if number % 3 == 0:
                for writer in writers:
                    daemon.reconciler.request_space(Leadership(writer.identified, 0), writer.bases[1])
            await daemon.round()
        uploaded = {name: len(found) - before[name] for name, found in daemon.archived().items()}
        assert min(uploaded.values()) >= 4


@virtually
async def test_request_for_room_in_the_pause_after_a_refusal_takes_no_upload_out_of_the_queue(
    writer, archive, archiver, broker
):
    """The next step would try no trim, and the uploads would wait as if they had come last."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    broker.denied.add("orders")
    archiver.request_space(writer.bases[-1])
    await archiver.step(observed(writer))
    limit_uploads(archive)
    for _ in range(4):
        writer.closed_segment()
    step = asyncio.create_task(archiver.step(observed(writer)))
    await settle()
    waiting = archive.gate.waiting_uploads
    assert waiting
    archiver.request_space(writer.bases[-1])
    await settle()
    assert archive.gate.waiting_uploads == waiting
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
