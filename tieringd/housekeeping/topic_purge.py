"""
The archives of deleted topics, as a job of housekeeping: note the deletion, wait, purge, search again.

Each turn reads the bucket's topic manifests and asks the cluster about their names.
`policies.topic_lifecycle` decides what follows, and it is recorded by compare-and-swap, so any number of
daemons may do this at once: one purges, and the others see its lease. Two that purge the same topic,
because a clock is wrong, do no harm: what one has deleted is gone for the other.

An archive that a restored topic continues is never purged. The link is searched for after the claim is
stored, and a restore searches for a claim after its link is stored, so one of them sees the other.

`TopicObjectDeleter` deletes everything that a bucket holds of deleted topics, except the topic manifest that
marks the purge. First it closes every partition's manifest: an archiver that still runs elsewhere fails
its next commit, and stops. Then it lists the whole bucket once, and deletes each object with one of the
topics' ids in its name, whether a manifest names it, or it is spilled, retired, in quarantine, or an
orphan. The live manifests are deleted last, because they keep archivers out. The name alone identifies
the owner of an object, so damaged objects are deleted as well, and leftovers of an earlier purge. A topic
that was created again has another id.

A topic without an id has the key of the purged one when it is created again, and begins once the purge is
over. A purging process that was stopped may go on then. So what changes the bucket is another piece than what
was read for it, and the lease is checked in between: what was read under the lease is of the old topic. A
manifest is closed by compare-and-swap with the version that was read, and no name of any other object is used
again. Only a live manifest is deleted by a key that the new topic has too. It is read again directly before,
and deleted if it is closed. What stays is the time from that read until the store carries the deletion out:
`ObjectStore` has no conditional deletion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeAlias

import structlog

from tieringd.archive.manifest_store import ManifestStore, StoredManifest, closed_version
from tieringd.broker.base import Broker
from tieringd.errors import CorruptDataError, StorageUnavailable
from tieringd.formats.object_keys import (
    TopicKey,
    history_link_key,
    manifest_key,
    owner_of,
    parse_quarantined_key,
    topic_key,
)
from tieringd.formats.topic_manifest import TopicManifest
from tieringd.housekeeping.partition_sweep import JobTurn
from tieringd.metrics.archive_work import PurgeMetrics
from tieringd.model.partition import NO_TOPIC_ID, TopicIdPartition
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.policies import topic_lifecycle
from tieringd.policies.topic_lifecycle import CONFIRM_AFTER_MS, PurgeStep, plan_presence, plan_purge
from tieringd.reading.history import History
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.base import ObjectStore
from tieringd.topics.each_topic import TopicFaults, each_topic
from tieringd.topics.topic_registry import TopicRegistry

log = structlog.get_logger(__name__)

TopicChange: TypeAlias = Callable[[TopicManifest], TopicManifest]

_DELETED_AT_ONCE = 1000

_TOPICS_AT_ONCE = 100
"""Topics that share one listing of the bucket."""
_KEYS_IN_A_PAGE = 1000
_REQUESTS_OF_A_CHANGE = 2
_LISTED_WITHIN_SECONDS = 30.0
"""How old a listing of the topic manifests may be: each change of one rests on the manifest as it is then."""


class TopicObjectDeleter:
    """Delete what is left of topics. Stateless: started again, it continues with what is there."""

    def __init__(self, store: ObjectStore, manifests: ManifestStore, *, metrics: PurgeMetrics) -> None:
        self._store = store
        self._manifests = manifests
        self._metrics = metrics

    async def purge(
        self,
        topics: Sequence[TopicManifest],
        *,
        count: Callable[[TopicKey, int, int], Awaitable[object]],
    ) -> AsyncGenerator[int]:
        """
        Delete everything of *topics*, piece by piece; yield the store requests that each piece took.

        A caller with a lease checks it before each piece. *count* is called with the segments and bytes of
        each topic's archive, before anything is deleted.

        Raises:
            TieringError: What is left is deleted the next time.
        """
        for steps in (self._close(topics, count), self._sweep(topics), self._delete_last(topics)):
            async with aclosing(steps) as pieces:
                async for requests in pieces:
                    yield requests

    async def _close(
        self, topics: Sequence[TopicManifest], count: Callable[[TopicKey, int, int], Awaitable[object]]
    ) -> AsyncGenerator[int]:
        """Close the partitions' manifests, and count what they hold."""
        for topic in topics:
            segments = size_bytes = 0
            for partition in topic.partitions():
                stored = await self._load(partition)
                yield 1
                while stored.manifest is not None and not stored.manifest.is_closed:
                    done = await closed_version(self._manifests, stored, stored.manifest)
                    yield 1
                    if done is None:
                        done = await self._load(partition)
                        yield 1
                    stored = done
                if stored.manifest is not None:
                    segments += stored.manifest.segment_count
                    size_bytes += stored.manifest.size_bytes
            await count(topic.key, segments, size_bytes)
            yield 2

    async def _sweep(self, topics: Sequence[TopicManifest]) -> AsyncGenerator[int]:
        """Delete all other objects of *topics* that the whole bucket has, page by page of its listing."""
        keys = frozenset(topic.key for topic in topics)
        manifests = frozenset(manifest_key(one) for topic in topics for one in topic.partitions())
        start_after: str | None = None
        while True:
            page = await self._store.list_page("", start_after=start_after)
            yield 1
            found: list[str] = []
            for info in page.objects:
                owner = owner_of(parse_quarantined_key(info.key) or info.key)
                if owner is not None and topic_key(owner) in keys and info.key not in manifests:
                    found.append(info.key)
            if found:
                await self._store.delete_many(found)
                self._metrics.purged_objects.inc(len(found))
                yield 1
            start_after = page.next_start_after
            if start_after is None:
                break

    async def _delete_last(self, topics: Sequence[TopicManifest]) -> AsyncGenerator[int]:
        """Delete the live manifests and history links of *topics*."""
        for topic in topics:
            last = [history_link_key(topic.key)]
            if topic.key.topic_id == NO_TOPIC_ID:
                for partition in topic.partitions():
                    await self._delete_closed(partition)
                    yield 2
            else:
                last += [manifest_key(one) for one in topic.partitions()]
            for begin in range(0, len(last), _DELETED_AT_ONCE):
                await self._store.delete_many(last[begin : begin + _DELETED_AT_ONCE])
                yield 1

    async def _load(self, partition: TopicIdPartition) -> StoredManifest:
        """Return a partition's manifest; a damaged one counts as none."""
        try:
            return await self._manifests.load(partition)
        except CorruptDataError as error:
            log.warning("a damaged manifest is purged unread", partition=str(partition), error=str(error))
            return StoredManifest(None, None)

    async def _delete_closed(self, partition: TopicIdPartition) -> None:
        """
        Delete a partition's live manifest, if it is closed or damaged.

        Raises:
            StorageUnavailable: It is open: a process stored it after the others were closed.
        """
        try:
            manifest = (await self._manifests.load(partition)).manifest
            if manifest is None:
                return
        except CorruptDataError:
            manifest = None
        if manifest is not None and not manifest.is_closed:
            raise StorageUnavailable(f"the manifest of {partition} was stored while its topic was purged")
        await self._store.delete_many([manifest_key(partition)])


class TopicPurgeJob:
    """
    One daemon's part in the purge of deleted topics; a `HousekeepingJob`.

    *registry* is its own. What *listed* has read lately is not read again. A turn may be cancelled at any
    await: unfinished work is started again.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        registry: TopicRegistry,
        listed: TopicRegistry,
        purger: TopicObjectDeleter,
        history: History,
        owner: str,
        grace_ms: int,
        is_to_stay: Callable[[str], bool],
        clock: ArchiveClock,
        metrics: PurgeMetrics,
    ) -> None:
        """Take the collaborators; *owner* is the daemon's writer id, which names it in leases."""
        self._broker = broker
        self._registry = registry
        self._listed = listed
        self._purger = purger
        self._history = history
        self._owner = owner
        self._now_ms = clock
        self._clock = clock
        self._metrics = metrics
        self._absent_since_ms: dict[TopicKey, int] = {}
        """First ms on the steady clock at which a topic, live in the bucket, was missing in the cluster."""
        self._gone: frozenset[TopicKey] = frozenset()
        self._faults: dict[TopicKey, str] = {}
        """Why the manifests of topics could not be changed, as far as this was logged."""
        self._said = self._doubt = ""
        self._batch: tuple[TopicKey, ...] = ()
        self._work: AsyncGenerator[int] | None = None
        self.grace_ms = grace_ms
        """How long a deleted topic's archive can be brought back."""
        self.is_to_stay = is_to_stay
        """Whether the current configuration keeps the archives of deleted topics with a given name."""

    @property
    def name(self) -> str:
        """Return its name in metrics and logs."""
        return "topic_purge"

    async def turn(self, *, requests_max: int) -> JobTurn:
        """
        Note deletions of topics, and continue or begin a purge.

        Raises:
            TieringError: The bucket or the broker failed; the next turn continues.
        """
        cluster = await self._broker.cluster_id()
        used = 0
        if not self._registry.take(self._listed, cluster, within_seconds=_LISTED_WITHIN_SECONDS):
            await self._registry.refresh(cluster)
            used += 1 + len(self._registry.manifests) // _KEYS_IN_A_PAGE
        used += await self._check_presence()
        self._publish()
        while True:
            if self._work is None:
                used += await self._begin()
                if self._work is None:
                    break
            used += await self._go_on()
            if used >= requests_max:
                break
        self._publish()
        has_more = self._work is not None
        return JobTurn(used, has_more=has_more, has_covered_all=not has_more)

    async def _check_presence(self) -> int:
        """Compare the bucket with the cluster, and record what is certain; return the requests."""
        manifests = self._registry.manifests
        names = {
            one.key.topic
            for one in manifests
            if one.lifecycle not in topic_lifecycle.BEYOND_RETURN or topic_lifecycle.may_begin_anew(one)
        }
        # The answer may be read late; absence is confirmed for the time before the question.
        asked_ms = self._clock.steady_ms()
        ids = await self._broker.topic_ids(sorted(names)) if names else {}
        now_ms, steady_ms = self._now_ms(), self._clock.steady_ms()
        plan = plan_presence(manifests, ids, now_ms=now_ms)
        if plan.nothing_known_because != self._said and plan.nothing_known_because:
            log.error("topics that are missing are not taken for deleted", reason=plan.nothing_known_because)
        self._said, self._gone = plan.nothing_known_because, plan.gone
        since_ms = {key: self._absent_since_ms.get(key, steady_ms) for key in plan.absent}
        self._absent_since_ms = since_ms
        changes: dict[TopicKey, TopicChange] = dict.fromkeys(
            sorted(plan.present, key=_order), topic_lifecycle.seen_again
        )
        begun_anew = partial(topic_lifecycle.begun_anew, now_ms=now_ms)
        changes |= dict.fromkeys(sorted(plan.again, key=_order), begun_anew)
        for key, first_ms in since_ms.items():
            if asked_ms - first_ms >= CONFIRM_AFTER_MS:
                changes[key] = partial(
                    topic_lifecycle.noted_as_gone,
                    now_ms=now_ms,
                    by=self._owner,
                    is_to_stay=self.is_to_stay(key.topic),
                )
        await self._change_each(changes)
        return _REQUESTS_OF_A_CHANGE * len(changes)

    async def _begin(self) -> int:
        """Claim the topics that are due, and begin to purge them; return the requests."""
        used = await self._redate()
        clock_status = self._clock.status()
        doubt = clock_status.doubt
        if doubt != self._doubt and doubt:
            log.error("no archive of a deleted topic is purged: the time is not certain", reason=doubt)
        self._doubt = doubt
        if doubt:
            return used
        # One clock reading for all: a later one may not be certain any more.
        now_ms = clock_status.now_ms
        due = [
            one.key
            for one in self._registry.manifests
            if plan_purge(one, now_ms=now_ms, by=self._owner, grace_ms=self.grace_ms).step
            is not PurgeStep.NOTHING
            # An operator may have ordered the purge of a live topic; it begins only when the cluster
            # reports the topic as gone.
            and (one.lifecycle is not Lifecycle.DELETED or one.key in self._gone)
        ]
        batch: list[TopicManifest] = []
        claims = dict.fromkeys(sorted(due, key=_order)[:_TOPICS_AT_ONCE], self._claimed_at(now_ms))
        used += _REQUESTS_OF_A_CHANGE * len(claims)
        for key in await self._change_each(claims):
            manifest = self._registry.manifest(key)
            if manifest is not None and topic_lifecycle.holds_lease(manifest, by=self._owner):
                batch.append(manifest)
        batch, requests = await self._without_history(batch)
        if batch:
            self._batch = tuple(one.key for one in batch)
            self._work = self._purger.purge(batch, count=self._count)
        return used + requests

    async def _redate(self) -> int:
        """Restart a grace whose beginning was noted under a wrong clock; return the requests."""
        clock_status = self._clock.status()
        if clock_status.doubt:
            return 0
        now_ms = clock_status.now_ms
        changes: dict[TopicKey, TopicChange] = {}
        for one in self._registry.manifests:
            if topic_lifecycle.is_misdated(one, now_ms=now_ms):
                log.warning(
                    "a topic's deletion was noted under a wrong clock; its grace begins now",
                    topic=one.key.topic,
                    topic_id=one.key.topic_id,
                )
                changes[one.key] = partial(topic_lifecycle.redated, now_ms=now_ms)
        await self._change_each(changes)
        return _REQUESTS_OF_A_CHANGE * len(changes)

    async def _without_history(self, batch: Sequence[TopicManifest]) -> tuple[list[TopicManifest], int]:
        """Keep the archives that a restored topic continues; return the others, and the requests."""
        if not batch:
            return [], 0
        users = await self._history.users()
        left: list[TopicManifest] = []
        for manifest in batch:
            user = next(iter(users.get(manifest.key, ())), None)
            # After the first deletion there cannot be a valid link: one that came too late was refused.
            if user is None or manifest.deletion is None or manifest.deletion.segments is not None:
                left.append(manifest)
                continue
            reason = f"topic {user.topic} ({user.topic_id}) continues this archive"
            await self._change(
                manifest.key,
                partial(topic_lifecycle.kept, now_ms=self._now_ms(), by=self._owner, reason=reason),
            )
        return left, 1 + len(users)

    async def _go_on(self) -> int:
        """Do the next piece of a purge, or end it; return the requests."""
        work = self._work
        assert work is not None, "asked while there is some"
        used = await self._renew()
        if self._work is None:
            return used
        # An error or cancellation ends the work: the next turn begins it again, with what is left.
        self._work = None
        try:
            used += await anext(work)
        except StopAsyncIteration:
            return used + await self._finish()
        self._work = work
        return used

    async def _renew(self) -> int:
        """
        Renew leases that run out. Where one is lost, or its topic is not to be purged, drop the work.

        Returns the requests.
        """
        used, now_ms = 0, self._now_ms()
        for key in self._batch:
            known = self._registry.manifest(key)
            if known is not None and topic_lifecycle.lease_is_short(known, now_ms=now_ms):
                try:
                    used += await self._change(key, self._claimed_at(now_ms))
                except CorruptDataError:
                    # The others are claimed again by the next turn, without this topic.
                    await self.close()
                    raise
                known = self._registry.manifest(key)
            if known is None or not topic_lifecycle.holds_lease(known, by=self._owner):
                log.warning("another daemon purges this topic now", topic=key.topic, topic_id=key.topic_id)
                await self.close()
                break
        return used

    async def close(self) -> None:
        """Drop the work under way; it is started again later."""
        work, self._work = self._work, None
        if work is not None:
            async with aclosing(work):
                pass

    async def _finish(self) -> int:
        for key in self._batch:
            before = self._registry.manifest(key)
            await self._change(key, partial(topic_lifecycle.finished, now_ms=self._now_ms(), by=self._owner))
            if before is not None and before.lifecycle is Lifecycle.PURGING:
                self._metrics.purged_topics.inc()
        return 2 * len(self._batch)

    def _claimed_at(self, now_ms: int) -> TopicChange:
        """Return the change that claims a topic, for one reading of the clock."""
        return partial(topic_lifecycle.claimed, now_ms=now_ms, by=self._owner, grace_ms=self.grace_ms)

    async def _count(self, key: TopicKey, segments: int, size_bytes: int) -> None:
        await self._change(
            key,
            partial(topic_lifecycle.counted, by=self._owner, segments=segments, size_bytes=size_bytes),
        )

    async def _change_each(self, changes: Mapping[TopicKey, TopicChange]) -> list[TopicKey]:
        """
        Change topic manifests; return the topics whose manifests could be changed.

        A damaged manifest is named once, and does not hold up the others.
        """
        changed: list[TopicKey] = []

        async def change(key: TopicKey) -> None:
            await self._change(key, changes[key])
            changed.append(key)
            self._faults.pop(key, None)

        try:
            await each_topic(changes, change)
        except TopicFaults as error:
            for key, fault in error.faults.items():
                if self._faults.get(key) != str(fault):
                    self._faults[key] = str(fault)
                    log.error(  # noqa: TRY400 its text is enough
                        "topic is left out of the purge: its manifest cannot be changed",
                        topic=key.topic,
                        topic_id=key.topic_id,
                        error=str(fault),
                    )
        return changed

    async def _change(self, key: TopicKey, change: TopicChange) -> int:
        """Change a topic manifest, and log its lifecycle state if that changed; return the requests."""
        before = self._registry.manifest(key)
        after = await self._registry.change(key, change)
        if before is not None and before.lifecycle is not after.lifecycle:
            deletion = after.deletion
            log.warning(
                "topic's archive has another state",
                topic=key.topic,
                topic_id=key.topic_id,
                was=before.lifecycle.value,
                lifecycle=after.lifecycle.value,
                reason=deletion.reason if deletion else "the cluster has the topic",
                segments=deletion.segments if deletion else None,
                size_bytes=deletion.size_bytes if deletion else None,
            )
        return _REQUESTS_OF_A_CHANGE

    def _publish(self) -> None:
        found = Counter(one.lifecycle for one in self._registry.manifests if one.partition_count)
        for lifecycle in Lifecycle:
            self._metrics.topics.labels(lifecycle.value).set(found[lifecycle])


def _order(key: TopicKey) -> tuple[str, str]:
    return key.topic, key.topic_id
