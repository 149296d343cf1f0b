"""Deleted topics: nothing is lost by mistake and nothing is left behind, also when a process dies."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
from structlog.testing import capture_logs

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import Clock, archive_in, archived, archiver_of, observed, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.deleted_topics import (
    GRACE_MS,
    NEW,
    NEW_ID,
    OLD,
    OLD_ID,
    THIRD,
    DeletedTopics,
    Purging,
)
from tests.fakes.log_writer import CLUSTER, LogWriter
from tests.fakes.metric_values import value_of
from tests.fakes.store import store_unavailable
from tests.fakes.virtual_loop import run_virtual
from tests.fakes.wire import CrashingWire, Wire
from tieringd.archive.segment_swap import store_rewriting
from tieringd.errors import ConfigError, CorruptDataError, FencedError, StorageUnavailable
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.object_keys import (
    TopicKey,
    data_key,
    history_link_key,
    manifest_key,
    quarantined_key,
    topic_key,
    topic_manifest_key,
)
from tieringd.model.partition import NO_TOPIC_ID
from tieringd.model.segment import Rewriting, RewritingKind, SegmentIdentity
from tieringd.model.topic_lifecycle import Lease, Lifecycle
from tieringd.policies.topic_lifecycle import (
    CONFIRM_AFTER_MS,
    LATE_CHECK_MS,
    LEASE_MS,
    ordered_to_go,
    taken_back,
)

DAY_MS = 86_400_000
LATER = TopicKey("other-cluster", "orders", "laterlaterlaterlaterla")


@pytest.fixture
async def world(tmp_path):
    """Give a filled bucket."""
    made = DeletedTopics(tmp_path)
    await made.fill()
    return made


@pytest.fixture
def purging(world):
    """Give the job of one daemon."""
    return Purging(world, "d1")


async def test_deleted_topic_is_purged_after_the_grace(world, purging):
    """All of its objects go, what nothing names as well; the mark says what there was."""
    rewriting = Rewriting(RewritingKind.REWRITTEN, (), (SegmentIdentity(0, 9, 61, 0, "rewritten-0a"),))
    record = await store_rewriting(world.store, world.writers[0].identified, rewriting)
    assert record in world.keys_of(OLD)
    others = world.objects_of(NEW, THIRD)
    held = [(await archive_in(world.store).manifests.load(one.identified)).existing for one in world.writers]
    await purging.note()
    noted = await world.manifest(OLD)
    assert noted.lifecycle is Lifecycle.DELETED
    await purging.turn(after_ms=GRACE_MS - 1)
    assert len(world.keys_of(OLD)) > 20

    while await purging.turn(after_ms=1):
        pass

    mark = await world.manifest(OLD)
    assert world.keys_of(OLD) == set()
    assert (mark.lifecycle, mark.deletion.purged_at_ms) == (Lifecycle.PURGED, world.clock.now_ms)
    assert mark.deletion.segments == sum(one.segment_count for one in held[:2])
    assert mark.deletion.size_bytes == sum(one.size_bytes for one in held[:2])
    assert world.objects_of(NEW, THIRD) == others
    assert value_of(purging.metrics.purge.purged_topics) == 1


@pytest.mark.parametrize("error_ms", [400 * DAY_MS, -400 * DAY_MS])
async def test_wrong_clock_neither_ends_the_grace_nor_dates_it(world, purging, error_ms):
    """A daemon whose clock is off dates a deletion by the later clock, and purges nothing until it is set."""
    world.store.now_ms = right = Clock(world.clock.now_ms)
    world.clock.now_ms += error_ms
    await purging.turn()
    right.now_ms += CONFIRM_AFTER_MS
    await purging.turn(after_ms=CONFIRM_AFTER_MS)
    assert (await world.manifest(OLD)).deletion.noted_at_ms == right.now_ms + max(error_ms, 0)
    right.now_ms += GRACE_MS
    await purging.turn(after_ms=GRACE_MS)
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.DELETED
    world.clock.now_ms = right.now_ms
    await purging.turn()
    for clock in (right, world.clock):
        clock.now_ms += GRACE_MS
    await purging.work()
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.PURGED


@pytest.mark.parametrize("noted_at_ms", [1_000_000_000, DEFAULT_TIME_MS + 4000 * DAY_MS])
async def test_grace_that_cannot_be_told_begins_anew(world, purging, noted_at_ms):
    """A deletion that was noted in 1970, or years ahead, is purged a grace after that is found."""
    await purging.note()
    manifests = purging.archive.manifests

    def misdated(found):
        return replace(found, deletion=replace(found.deletion, noted_at_ms=noted_at_ms))

    await manifests.change_topic(OLD, misdated)
    await purging.turn()
    await purging.turn(after_ms=GRACE_MS - 1)
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.DELETED
    while await purging.turn(after_ms=1):
        pass
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.PURGED


async def test_lease_that_ends_years_ahead_is_no_lease(world, purging):
    """A dead daemon with a wrong clock holds up the purge for at most the length of a lease."""
    await purging.note()
    lease = Lease("dead", DEFAULT_TIME_MS + 4000 * DAY_MS)
    await purging.archive.manifests.change_topic(
        OLD, lambda found: replace(found, deletion=replace(found.deletion, lease=lease))
    )
    while await purging.turn(after_ms=GRACE_MS):
        pass
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.PURGED


async def test_topic_without_an_id_is_archived_again_after_its_purge(world, purging, tmp_path):
    """
    Such a topic has the key of the old one, so it waits for the search for late objects.

    The search would delete its objects.
    """
    (tmp_path / "plain").mkdir()
    archive = archive_in(world.store, now_ms=world.clock)
    old = LogWriter(tmp_path / "plain", "plain", 0, topic_id=NO_TOPIC_ID)
    key = topic_key(old.identified)
    old.closed_segment(b"old")
    await archive.manifests.ensure_topic(key, partition_count=1)
    await archived(old, archive)
    purging.broker.cluster_topics["plain"] = set()
    await archive.manifests.change_topic(key, partial(ordered_to_go, now_ms=world.clock()))
    while await purging.turn(after_ms=GRACE_MS):
        pass
    assert world.keys_of(key) == set()

    purging.broker.cluster_topics["plain"] = {NO_TOPIC_ID}
    await purging.turn()
    assert (await world.manifest(key)).lifecycle is Lifecycle.PURGED
    while await purging.turn(after_ms=LATE_CHECK_MS):
        pass
    await purging.turn()
    anew = await world.manifest(key)
    assert (anew.lifecycle, anew.deletion, anew.created_at_ms) == (Lifecycle.LIVE, None, world.clock())
    (tmp_path / "again").mkdir()
    new = LogWriter(tmp_path / "again", "plain", 0, topic_id=NO_TOPIC_ID)
    new.closed_segment(b"new")
    await archived(new, archive_in(world.store, writer_id="e5", now_ms=world.clock))
    await purging.turn(after_ms=LATE_CHECK_MS)
    manifest = (await archive.manifests.load(new.identified)).existing
    assert list((await values_in(archive, manifest)).values()) == [b"new"]


class StoppingWire(Wire):
    """Stops its process, as SIGSTOP does, before one request. Requests are counted from `arm` on."""

    def __init__(self):
        self.is_stopped, self.goes_on = asyncio.Event(), asyncio.Event()
        self._left = None
        self.sent = []

    def arm(self, requests: int) -> None:
        """Let the process send *requests* more."""
        self._left = requests

    async def carry(self, operation, effect, **given):
        """Carry a request at once, before and after the stop."""
        if self._left is not None:
            self._left -= 1
            if self._left == -1:
                self.is_stopped.set()
                await self.goes_on.wait()
        self.sent.append(operation)
        return await super().carry(operation, effect, **given)


REQUESTS_OF_A_LATE_SEARCH = 18


@pytest.mark.parametrize("leaves_something", [False, True], ids=["clean", "with-late-objects"])
async def test_daemon_stopped_in_its_late_search_leaves_the_next_topic_alone(tmp_path, leaves_something):
    """
    Its lease ends, another daemon ends the search, and a new topic of the same key is archived.

    That holds wherever it is stopped. One place is left out: after it read a late manifest as closed, and
    before it deletes that manifest.
    """
    stops = [
        await _stopped_late_search(tmp_path / str(number), number, leaves_something=leaves_something)
        for number in range(REQUESTS_OF_A_LATE_SEARCH)
    ]
    assert "" in stops, "the last of them was not stopped at all"
    assert {"get", "list_page", "delete_many"} <= set(stops)


async def _stopped_late_search(directory, requests: int, *, leaves_something: bool) -> str:
    """Stop a daemon after *requests* of its late search; return the request before which it was stopped."""
    world = DeletedTopics(directory)
    (directory / "plain").mkdir(parents=True)
    archive = archive_in(world.store, now_ms=world.clock)
    old = LogWriter(directory / "plain", "plain", 0, topic_id=NO_TOPIC_ID)
    key = topic_key(old.identified)
    old.closed_segment(b"old")
    await archive.manifests.ensure_topic(key, partition_count=1)
    await archived(old, archive)
    wire = StoppingWire()
    one, other = Purging(world, "d1", wire=wire), Purging(world, "d2")
    for each in (one, other):
        each.broker.cluster_topics = {"plain": set()}
    await archive.manifests.change_topic(key, partial(ordered_to_go, now_ms=world.clock()))
    while await one.turn(after_ms=GRACE_MS):
        pass
    assert (await world.manifest(key)).lifecycle is Lifecycle.PURGED
    if leaves_something:
        await archived(old, archive_in(world.store, writer_id="late", now_ms=world.clock))
    for each in (one, other):
        each.broker.cluster_topics["plain"] = {NO_TOPIC_ID}

    wire.arm(requests)
    world.clock.now_ms += LATE_CHECK_MS
    first = asyncio.create_task(one.turn())
    stopped = asyncio.create_task(wire.is_stopped.wait())
    await asyncio.wait({first, stopped}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    world.clock.now_ms += LEASE_MS + 1
    while await other.turn():
        pass
    await other.turn()
    assert (await world.manifest(key)).lifecycle is Lifecycle.LIVE
    (directory / "again").mkdir()
    new = LogWriter(directory / "again", "plain", 0, topic_id=NO_TOPIC_ID)
    new.closed_segment(b"new")
    await archived(new, archive_in(world.store, writer_id="e5", now_ms=world.clock))

    was_stopped, sent_before = wire.is_stopped.is_set(), len(wire.sent)
    wire.goes_on.set()
    stopped.cancel()
    await asyncio.gather(first, return_exceptions=True)
    found = (await archive.manifests.load(new.identified)).manifest
    request = wire.sent[sent_before] if was_stopped else ""
    is_left_out = leaves_something and request == "delete_many" and wire.sent[sent_before - 1] == "get"
    if not is_left_out:
        assert found is not None, f"the new topic's manifest is gone; stopped before {request}"
        assert not found.is_closed, f"the new topic's manifest is closed; stopped before {request}"
        assert list((await values_in(archive, found)).values()) == [b"new"]
    return request


async def test_topic_that_was_created_again_is_read_as_before(world, purging):
    """The new topic shares nothing with the old one but the name."""
    archive, writer = archive_in(world.store), world.writers[2]
    manifest = (await archive.manifests.load(writer.identified)).existing
    before = await values_in(archive, manifest)
    await purging.work()
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.PURGED
    assert (await world.manifest(NEW)).lifecycle is Lifecycle.LIVE
    assert await values_in(archive_in(world.store), manifest) == before != {}


async def test_one_observation_is_not_enough(world, purging):
    """A topic that is missing once, and there the next time, is live; and the time begins anew then."""
    await purging.turn()
    purging.broker.cluster_topics["orders"] |= {OLD_ID}
    await purging.turn(after_ms=CONFIRM_AFTER_MS)
    purging.broker.cluster_topics["orders"] -= {OLD_ID}
    await purging.turn(after_ms=CONFIRM_AFTER_MS)
    await purging.turn(after_ms=CONFIRM_AFTER_MS - 1)
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.LIVE
    await purging.turn(after_ms=1)
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.DELETED


async def test_pause_before_the_answer_is_read_confirms_nothing(world, purging):
    """The second answer is as old as the first one where the process stood still before it read it."""
    await purging.turn()
    answer = purging.broker.topic_ids

    async def read_late(topics):
        found = await answer(topics)
        world.clock.now_ms += CONFIRM_AFTER_MS
        return found

    purging.broker.topic_ids = read_late
    await purging.turn()
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.LIVE
    await purging.turn()
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.DELETED


@pytest.mark.parametrize(
    "topics", [{}, {"elsewhere": {"x" * 22}}, {"orders": {"x" * 22}, "third": {"y" * 22}}]
)
async def test_cluster_that_has_none_of_the_topics_says_nothing(world, purging, topics):
    """A broker that knows no topic yet, or a cluster that lost all of them, deletes nothing."""
    purging.broker.cluster_topics = topics
    await purging.work()
    states = {(await world.manifest(key)).lifecycle for key in (OLD, NEW, THIRD)}
    assert states == {Lifecycle.LIVE}


async def test_topic_that_is_not_told_of_is_not_gone(world, purging):
    """A topic of which the broker says nothing is not gone: its metadata may be invisible to us."""
    purging.broker.untold = {"orders"}
    await purging.work()
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.LIVE


@pytest.mark.parametrize("remote_delete", [False, None])
async def test_archive_stays_without_remote_delete(tmp_path, remote_delete):
    """The archive is marked as kept, and whole. A later order of an operator deletes it."""
    world = DeletedTopics(tmp_path)
    await world.fill(remote_delete=remote_delete)
    before, purging = world.keys_of(OLD), Purging(world, "d1")
    await purging.work()
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.KEPT
    assert world.keys_of(OLD) == before
    now_ms = world.clock.now_ms
    await purging.archive.manifests.change_topic(OLD, lambda found: ordered_to_go(found, now_ms=now_ms))
    await purging.work()
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.PURGED
    assert world.keys_of(OLD) == set()


async def test_archive_stays_where_the_configuration_of_now_says_so(world, purging):
    """The topic is on no disk any more, so nothing else than its name can be asked."""
    before = world.keys_of(OLD)
    purging.to_stay = {"orders"}
    await purging.work()
    assert ((await world.manifest(OLD)).lifecycle, world.keys_of(OLD)) == (Lifecycle.KEPT, before)


async def test_cluster_that_was_formatted_again_deletes_nothing_older(world, purging):
    """One topic with a new id is archived, and all that is older stays."""
    manifests = purging.archive.manifests
    await manifests.change_topic(THIRD, lambda found: replace(found, created_at_ms=world.clock.now_ms + 1))
    purging.broker.cluster_topics = {"third": {THIRD.topic_id}}
    await purging.work()
    assert {(await world.manifest(key)).lifecycle for key in (OLD, NEW, THIRD)} == {Lifecycle.LIVE}


async def test_ordered_purge_waits_until_the_topic_is_told_to_be_gone(world, purging):
    """
    A topic that the broker does not name may live.

    The purge begins when the broker says that it is gone.
    """
    now_ms = world.clock.now_ms
    before = world.keys_of(THIRD)
    await purging.archive.manifests.change_topic(THIRD, lambda found: ordered_to_go(found, now_ms=now_ms))
    purging.broker.untold = {"third"}
    await purging.work()
    assert ((await world.manifest(THIRD)).lifecycle, world.keys_of(THIRD)) == (Lifecycle.DELETED, before)
    purging.broker.untold = set()
    del purging.broker.cluster_topics["third"]
    await purging.work()
    assert ((await world.manifest(THIRD)).lifecycle, world.keys_of(THIRD)) == (Lifecycle.PURGED, set())


async def test_quarantined_and_half_joined_objects_of_a_purged_topic_go_too(world, purging):
    """Nothing names them; those of other topics stay."""
    keys = [next(key for key in sorted(world.keys_of(one)) if key.endswith(".log")) for one in (OLD, NEW)]
    more = {
        key: (quarantined_key(key), f"{key}.part-0-0", quarantined_key(f"{key}.part-1-0")) for key in keys
    }
    for names in more.values():
        for name in names:
            world.store.add(name, b"left")
    await purging.work()
    assert [set(more[key]) & world.store.objects.keys() for key in keys] == [set(), set(more[keys[1]])]


async def test_deletion_is_taken_back_within_the_grace(world, purging):
    """The archive is kept, although the topic stays gone."""
    await purging.note()
    manifests, now_ms = archive_in(world.store).manifests, world.clock.now_ms
    await manifests.change_topic(OLD, lambda found: taken_back(found, now_ms=now_ms))
    before = world.keys_of(OLD)
    await purging.work()
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.KEPT
    assert world.keys_of(OLD) == before


async def test_deletion_that_is_taken_back_while_a_purge_begins(world, purging):
    """The turn has read the mark of before; the claim sees that it is not to be deleted any more."""
    await purging.note()
    world.clock.now_ms += GRACE_MS
    manifests, topic_ids = archive_in(world.store).manifests, purging.broker.topic_ids
    before = world.keys_of(OLD)

    async def taken_back_now(topics):
        now_ms = world.clock.now_ms
        await manifests.change_topic(OLD, lambda found: taken_back(found, now_ms=now_ms))
        return await topic_ids(topics)

    purging.broker.topic_ids = taken_back_now
    while await purging.turn():
        pass
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.KEPT
    assert world.keys_of(OLD) == before


async def test_purge_goes_over_all_pages_of_the_bucket(world, purging):
    """A listing has a thousand keys in a page."""
    partition = world.writers[0].identified
    segment = (await archive_in(world.store).manifests.load(partition)).existing.segments[0]
    for number in range(1_500):
        left = replace(segment, base_offset=number, last_offset=number, writer_id="dead")
        world.store.add(data_key(partition, left), b"x")
    await purging.work()
    assert ((await world.manifest(OLD)).lifecycle, world.keys_of(OLD)) == (Lifecycle.PURGED, set())


async def test_archive_of_a_topic_that_the_cluster_has_is_not_deleted(world, purging):
    """An operator's order for it is taken back by the next observation."""
    now_ms = world.clock.now_ms
    await purging.archive.manifests.change_topic(NEW, lambda found: ordered_to_go(found, now_ms=now_ms))
    await purging.turn()
    assert (await world.manifest(NEW)).lifecycle is Lifecycle.LIVE


async def test_archive_that_a_restored_topic_goes_on_from_is_kept(world, purging):
    """The link decides, whichever cluster it names; the mark names the topic that continues the archive."""
    await archive_in(world.store).history.link(HistoryLink(LATER, OLD, ((0, 5),)))
    before = world.keys_of(OLD)
    await purging.work()
    mark = await world.manifest(OLD)
    assert (mark.lifecycle, world.keys_of(OLD)) == (Lifecycle.KEPT, before)
    assert mark.deletion.reason == f"topic orders ({LATER.topic_id}) continues this archive"


async def test_nothing_goes_on_from_an_archive_that_is_being_purged(world, purging):
    """A link that comes after the claim is refused, and does not stay."""
    await purging.note()
    await purging.turn(after_ms=GRACE_MS, requests_max=4)
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.PURGING
    with pytest.raises(ConfigError, match="is purging: no topic can continue it"):
        await archive_in(world.store).history.link(HistoryLink(LATER, OLD, ((0, 5),)))
    assert history_link_key(LATER) not in world.store.objects


async def test_archiver_of_a_deleted_topic_is_fenced_before_anything_goes(world, purging):
    """The next commit of the archiver fails, and so does every later one."""
    writer = world.writers[0]
    archiver = archiver_of(writer, archive_in(world.store, writer_id="late"), FakeBroker(writer))
    await archiver.step(observed(writer))
    writer.closed_segment(b"late")
    await purging.note()
    await purging.turn(after_ms=GRACE_MS, requests_max=8)
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.PURGING
    with pytest.raises(FencedError, match="is closed: it was moved to another bucket, or its topic is being"):
        await archiver.step(observed(writer))


async def test_manifests_go_last_of_all(world, purging):
    """Manifests are deleted after all other objects, because they keep archivers out."""
    manifests = {manifest_key(one.identified) for one in world.writers[:2]}
    await purging.note()
    await purging.turn(after_ms=GRACE_MS, requests_max=1)
    seen = [world.keys_of(OLD)]
    while await purging.turn(requests_max=1):
        seen.append(world.keys_of(OLD))
    assert all(manifests <= left for left in seen if left - manifests)
    assert seen.index(manifests) > 0
    assert world.keys_of(OLD) == set()


async def test_what_is_stored_after_the_purge_goes_with_the_late_check(world, purging):
    """A hung process stores objects, and even a manifest; an hour later they are found."""
    await purging.work()
    late = archive_in(world.store, writer_id="late")
    writer = world.writers[0]
    await archiver_of(writer, late, FakeBroker(writer)).step(observed(writer))
    assert manifest_key(writer.identified) in world.keys_of(OLD)
    await purging.turn(after_ms=LATE_CHECK_MS // 2)
    assert world.keys_of(OLD) != set()
    await purging.turn(after_ms=LATE_CHECK_MS)
    mark = await world.manifest(OLD)
    assert world.keys_of(OLD) == set()
    assert mark.deletion.checked_at_ms == world.clock.now_ms
    assert not await purging.turn(after_ms=10 * LATE_CHECK_MS)


async def test_two_daemons_purge_together(world):
    """One has the lease, and the other waits; the end is the same."""
    first, second = Purging(world, "d1"), Purging(world, "d2")
    for _ in range(60):
        await asyncio.gather(
            first.turn(after_ms=1_000, requests_max=4), second.turn(after_ms=1_000, requests_max=4)
        )
    mark = await world.manifest(OLD)
    assert (mark.lifecycle, world.keys_of(OLD)) == (Lifecycle.PURGED, set())
    purged = [value_of(one.metrics.purge.purged_topics) for one in (first, second)]
    assert sorted(purged) == [0, 1]


async def test_lease_of_a_dead_daemon_is_taken_over(world):
    """A lease is taken over only once it is over, and what the first daemon has noted stays."""
    first, second = Purging(world, "d1"), Purging(world, "d2")
    await first.note()
    await first.turn(after_ms=GRACE_MS, requests_max=12)
    lease = (await world.manifest(OLD)).deletion.lease
    assert lease.owner == "d1"
    await second.turn(after_ms=LEASE_MS - 1)
    assert (await world.manifest(OLD)).deletion.lease == lease
    await second.turn(after_ms=1)
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.PURGED


async def test_store_that_fails_ends_the_turn_and_not_the_purge(world, purging):
    """A step that fails is begun again with the next turn."""
    await purging.note()
    for operation in ("delete_many", "list_page", "put", "get"):
        world.store.fail_next(operation, lambda: store_unavailable("any"))
        with pytest.raises(StorageUnavailable):
            await purging.turn(after_ms=GRACE_MS)
    await purging.turn()
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.PURGED
    assert world.keys_of(OLD) == set()


async def test_damaged_manifest_does_not_keep_a_topic_from_being_purged(world, purging):
    """The purge reads from an object's key which topic it belongs to."""
    world.store.add(manifest_key(world.writers[1].identified), b"no manifest")
    await purging.work()
    assert world.keys_of(OLD) == set()


def damage_mark(world: DeletedTopics, topic: TopicKey) -> bytes:
    """Cut a topic's manifest in half; return what it was."""
    key = topic_manifest_key(topic)
    data, _ = world.store.objects[key]
    world.store.add(key, data[: len(data) // 2])
    return data


async def test_damaged_topic_manifest_does_not_keep_other_topics_from_being_purged(world, purging):
    """The damaged one is named once, and is purged once it is mended."""
    await purging.turn()
    purging.broker.cluster_topics = {"orders": {NEW_ID}, "third": set()}
    sound = damage_mark(world, OLD)
    with capture_logs() as lines:
        for _ in range(5):
            await purging.turn(after_ms=GRACE_MS)
    assert (await world.manifest(THIRD)).lifecycle is Lifecycle.PURGED
    assert world.keys_of(THIRD) == set()
    assert world.keys_of(OLD) != set()
    assert [one["event"] for one in lines if one["log_level"] == "error"] == [
        "topic manifest is damaged",
        "topic is left out of the purge: its manifest cannot be changed",
    ]
    world.store.add(topic_manifest_key(OLD), sound)
    await purging.work()
    assert (await world.manifest(OLD)).lifecycle is Lifecycle.PURGED


@pytest.mark.parametrize("turns", range(12))
async def test_topic_manifest_damaged_during_its_purge_does_not_hold_up_others(world, purging, turns):
    """A batch that meets the damage is begun anew without its topic, however far it was."""
    purging.broker.cluster_topics = {"orders": {NEW_ID}, "third": set()}
    await purging.note()
    await purging.turn(after_ms=GRACE_MS - 1)
    for _ in range(turns):
        await purging.turn(after_ms=1, requests_max=1)
    damage_mark(world, OLD)
    failed = 0
    for _ in range(30):
        try:
            await purging.turn(after_ms=LEASE_MS // 2, requests_max=1)
        except CorruptDataError:
            failed += 1
    assert failed <= 1
    assert (await world.manifest(THIRD)).lifecycle is Lifecycle.PURGED


async def crash_and_take_over(world: DeletedTopics, *, at: int) -> bool:
    """End a daemon at its *at*-th point, and let another finish; say whether it came to that point."""
    await world.fill()
    others = world.objects_of(NEW, THIRD)
    wire = CrashingWire(at)
    first = asyncio.create_task(Purging(world, "d1", wire=wire).work(minutes=2))
    crash = asyncio.create_task(wire.crashed.wait())
    await asyncio.wait({first, crash}, return_when=asyncio.FIRST_COMPLETED)
    has_crashed = not first.done()
    for task in (first, crash):
        task.cancel()
    assert [None] * (not has_crashed) == [
        one for one in await asyncio.gather(first, return_exceptions=True) if one is None
    ]
    await asyncio.gather(crash, return_exceptions=True)
    await Purging(world, "d2").work(minutes=8)
    mark = await world.manifest(OLD)
    assert (mark.lifecycle, world.keys_of(OLD)) == (Lifecycle.PURGED, set())
    assert (mark.deletion.segments, mark.deletion.lease) == (7, None)
    assert world.objects_of(NEW, THIRD) == others
    return has_crashed


def test_crash_at_every_point_of_a_purge_leaves_nothing_behind(tmp_path):
    """Another daemon ends a purge in the same state, with the same count, whichever effect was the last."""
    for at in count(1):
        world = DeletedTopics(tmp_path / str(at))
        if not run_virtual(crash_and_take_over(world, at=at), seed=at):
            break
    # Two points around each: noted, claimed, two closed, counted, swept, the manifests, finished.
    assert at == 2 * 8 + 1


async def test_topics_are_counted_by_state(world, purging):
    """A gauge says how many archives are in each state."""
    await purging.note()
    gauge = purging.metrics.purge.topics
    assert [value_of(gauge.labels(one.value)) for one in Lifecycle] == [2, 1, 0, 0, 0]
    assert NEW_ID != OLD_ID
    assert NEW.cluster == CLUSTER
