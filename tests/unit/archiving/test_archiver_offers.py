"""Changes of a manifest that others prepared: the archiver commits them in its step, or says why not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fakes.archive import archive_in, archiver_of, observed
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.store import store_unavailable
from tests.fakes.virtual_loop import virtually
from tieringd.archiving.claim import ended
from tieringd.errors import FencedError, RetryableError, StorageUnavailable
from tieringd.model.partition import Leadership
from tieringd.storage.background import is_background


class Mark:
    """A change that can be seen in the manifest: it sets the local retention hint."""

    def __init__(self, mark, *, saw=None):
        self.mark = mark
        self.saw = saw

    async def commit(self, claim, stored):
        if self.saw is not None:
            self.saw.append((stored.existing.next_offset, is_background()))
        return await claim.commit(stored, replace(stored.existing, allowed_local_start_offset=self.mark))


class GivesUp:
    """A change that does not fit any more."""

    async def commit(self, claim, stored):
        return stored


@pytest.fixture
def archiver(writer, archive, broker, metrics, clock):
    return archiver_of(writer, archive, broker, metrics=metrics, now_ms=clock)


async def test_offer_is_committed_after_uploads_and_before_retention(writer, archiver, store):
    """An offer sees what the step has uploaded. Its requests are no traffic, and those of the step are."""
    end = writer.closed_segment(b"a")
    saw = []
    future = archiver.offer(Mark(7, saw=saw))
    await archiver.step(observed(writer))
    assert future.done()
    assert await future is None
    assert saw == [(end + 1, True)]
    assert stored_manifest(store, writer).allowed_local_start_offset == 7
    assert not is_background()


async def test_offers_are_committed_in_their_order(writer, archiver, store):
    """The last one's word holds; one that gives up ends as well."""
    futures = [archiver.offer(one) for one in (Mark(1), Mark(2), GivesUp())]
    await archiver.step(observed(writer))
    assert [future.result() for future in futures] == [None] * 3
    assert stored_manifest(store, writer).allowed_local_start_offset == 2


async def test_archiver_at_rest_wakes_for_an_offer(writer, archiver):
    """An archiver at rest wakes for an offer, though its observation has not changed."""
    writer.closed_segment(b"a")
    seen = observed(writer)
    await archiver.step(seen)
    await archiver.step(seen)
    assert archiver.is_at_rest(seen)
    woken = []
    archiver.on_offer = lambda: woken.append(True)
    archiver.offer(GivesUp())
    assert woken == [True]
    assert not archiver.is_at_rest(seen)
    await archiver.step(seen)
    assert archiver.is_at_rest(seen)


async def test_change_is_followed_by_a_step_before_the_archiver_rests(writer, archiver):
    """A segment that a change replaced may be trimmed now, and the trim of that step came before it."""
    writer.closed_segment(b"a")
    seen = observed(writer)
    await archiver.step(seen)
    await archiver.step(seen)
    archiver.offer(Mark(archiver.manifest.allowed_local_start_offset))
    await archiver.step(seen)
    assert not archiver.is_at_rest(seen)
    await archiver.step(seen)
    assert archiver.is_at_rest(seen)


async def test_outage_before_the_change_is_told_to_the_caller(writer, archiver, store):
    """The step failed with an upload and did not come to the change; the next offer is committed."""
    await archiver.step(observed(writer))
    writer.closed_segment(b"a")
    first = archiver.offer(Mark(1))
    store.fail_next("put", lambda: store_unavailable("put"))
    with pytest.raises(StorageUnavailable):
        await archiver.step(observed(writer))
    with pytest.raises(StorageUnavailable):
        await ended(first)
    again = archiver.offer(Mark(2))
    await archiver.step(observed(writer))
    assert await ended(again)
    assert stored_manifest(store, writer).allowed_local_start_offset == 2


async def test_change_that_fails_takes_those_behind_it_along(writer, archiver, store):
    """Nothing of the manifest is known for certain then. Each change fails, and none is committed."""
    await archiver.step(observed(writer))
    futures = [archiver.offer(Mark(1)), archiver.offer(Mark(2))]
    store.fail_next("put", lambda: store_unavailable("put"))
    with pytest.raises(StorageUnavailable):
        await archiver.step(observed(writer))
    for future in futures:
        with pytest.raises(StorageUnavailable):
            await ended(future)
    assert stored_manifest(store, writer).allowed_local_start_offset is None


async def test_fenced_archiver_says_so(writer, archiver, store, broker):
    """The change is the new owner's to make, or not."""
    writer.closed_segment(b"a")
    seen = observed(writer)
    await archiver.step(seen)
    writer.begin_epoch(1)
    other = archiver_of(writer, archive_in(store, writer_id="b2"), broker, leader_epoch=1)
    await other.step(observed(writer))
    future = archiver.offer(Mark(1))
    with pytest.raises(FencedError):
        await archiver.step(seen)
    with pytest.raises(FencedError):
        await ended(future)


async def test_step_that_waits_for_its_lineage_gives_offers_back(writer, archive, broker, clock):
    """A manifest whose tail may be another leader's is not changed, and no caller waits for that."""
    writer.closed_segment(b"a")
    await archiver_of(writer, archive, broker, now_ms=clock).step(observed(writer))
    # The log does not know yet that it leads since epoch 4.
    later = archiver_of(writer, archive, broker, leader_epoch=4, now_ms=clock)
    future = later.offer(Mark(1))
    assert (await later.step(observed(writer))).waits_because
    with pytest.raises(RetryableError, match=str(writer.identified)):
        await ended(future)


async def test_end_of_the_archiver_cancels_offers(writer, archiver):
    """Waiting and later changes are cancelled; a task that waits for one is not."""
    before = archiver.offer(Mark(1))
    archiver.close()
    after = archiver.offer(Mark(2))
    assert before.cancelled()
    assert after.cancelled()
    assert not await ended(before)
    assert not await ended(after)


async def test_offer_whose_owner_has_gone_is_not_committed(writer, archiver, store):
    """A job that is cancelled while it waits withdraws its change."""
    future = archiver.offer(Mark(1))
    waiting = asyncio.create_task(ended(future))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert future.cancelled()
    await archiver.step(observed(writer))
    assert stored_manifest(store, writer).allowed_local_start_offset is None


async def test_quarantined_partition_takes_offers(writer, archiver, store):
    """Corrupt bytes on disk are no reason to leave the archive as it is."""
    base = writer.closed_segment(b"a" * 100)
    writer.flip_byte(base)
    future = archiver.offer(Mark(3))
    assert (await archiver.step(observed(writer))).fault
    assert await ended(future)
    assert bases(store, writer) == []
    assert stored_manifest(store, writer).allowed_local_start_offset == 3


@virtually
async def test_running_archiver_commits_an_offer_at_once(daemon):
    """The reconciler's next round is seconds away, and is not waited for."""
    async with daemon.running():
        ((_, archiver, seen), *_) = daemon.reconciler.archived()
        now = asyncio.get_running_loop().time
        begun = now()
        assert archiver.is_at_rest(seen)
        assert await ended(archiver.offer(GivesUp()))
        assert now() - begun < 0.5


@virtually
async def test_archiver_that_lost_its_partition_cancels_offers(daemon):
    """The reconciler ends it, and so do its offers."""
    writer = daemon.writers[1]
    async with daemon.running():
        archiver = daemon.reconciler.archiver(Leadership(writer.identified, 0))
        del daemon.broker.epochs[writer.name]
        await daemon.round()
        assert not await ended(archiver.offer(GivesUp()))


@virtually
async def test_daemon_that_stops_cancels_offers(daemon):
    """No housekeeping waits for an archiver that is no more."""
    async with daemon.running():
        ((_, archiver, _), *_) = daemon.reconciler.archived()
    assert not await ended(archiver.offer(GivesUp()))
