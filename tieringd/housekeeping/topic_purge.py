"""
The archives of deleted topics, as a job of housekeeping: note the deletion, wait, purge, look once more.

Each turn looks at the bucket's topic manifests and at what the cluster says of their names. What follows is
decided in `policies.topic_lifecycle`, and recorded by compare-and-swap, so any number of daemons may do
this at once: one purges, and the others see its lease. Two that purge the same topic, because a clock is
wrong, do no harm: what one has deleted is gone for the other.

An archive from which a restored topic goes on is never purged. The link is looked for after the claim is
stored, and a restore looks for a claim after its link is stored, so one of them sees the other.
"""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

import structlog

from tieringd.housekeeping.job import JobTurn
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.policies import topic_lifecycle
from tieringd.policies.topic_lifecycle import CONFIRM_AFTER_MS, PurgeStep, plan_presence, plan_purge

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from tieringd.broker.base import Broker
    from tieringd.formats.object_keys import TopicKey
    from tieringd.formats.topic_manifest import TopicManifest
    from tieringd.housekeeping.topic_purger import TopicPurger
    from tieringd.metrics.archive_work import PurgeMetrics
    from tieringd.reading.history import History
    from tieringd.storage.archive_clock import ArchiveClock
    from tieringd.topics.topic_registry import TopicRegistry

log = structlog.get_logger(__name__)

_TOPICS_AT_ONCE = 100
"""They share one listing of the bucket."""
_KEYS_IN_A_PAGE = 1000


class TopicPurge:
    """
    One daemon's part in it; a `HousekeepingJob`.

    *registry* is its own. A turn may be cancelled at any await: what was begun is begun again.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        registry: TopicRegistry,
        purger: TopicPurger,
        history: History,
        owner: str,
        grace_ms: int,
        is_to_stay: Callable[[str], bool],
        clock: ArchiveClock,
        metrics: PurgeMetrics,
    ) -> None:
        """Take the parts; *owner* is the daemon's writer id, and names it in leases."""
        self._broker = broker
        self._registry = registry
        self._purger = purger
        self._history = history
        self._owner = owner
        self._now_ms = clock
        self._clock = clock
        self._metrics = metrics
        self._absent_since_ms: dict[TopicKey, int] = {}
        """Since when topics that are live in the bucket are missing, by the steady clock."""
        self._gone: frozenset[TopicKey] = frozenset()
        self._said = self._doubt = ""
        self._batch: tuple[TopicKey, ...] = ()
        self._work: AsyncGenerator[int] | None = None
        self.grace_ms = grace_ms
        """How long a deleted topic's archive can be brought back."""
        self.is_to_stay = is_to_stay
        """Whether the configuration of now says of a name that the archives of its deleted topics stay."""

    @property
    def name(self) -> str:
        """Return what it is called in metrics and logs."""
        return "topic_purge"

    async def turn(self, *, requests_max: int) -> JobTurn:
        """
        Note what was deleted, and go on with a purge, if there is one.

        Raises:
            TieringError: The bucket or the broker is in the way; the next turn goes on.
        """
        cluster = await self._broker.cluster_id()
        await self._registry.refresh(cluster)
        used = 1 + len(self._registry.manifests) // _KEYS_IN_A_PAGE
        used += await self._look()
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

    async def _look(self) -> int:
        """Compare the bucket with the cluster, and record what is certain; return the requests."""
        manifests = self._registry.manifests
        names = {one.key.topic for one in manifests if one.lifecycle not in topic_lifecycle.BEYOND_RETURN}
        plan = plan_presence(manifests, await self._broker.topic_ids(sorted(names)) if names else {})
        if plan.nothing_known_because != self._said and plan.nothing_known_because:
            log.error("topics that are missing are not taken for deleted", reason=plan.nothing_known_because)
        self._said, self._gone = plan.nothing_known_because, plan.gone
        now_ms, steady_ms = self._now_ms(), self._clock.steady_ms()
        since_ms = {key: self._absent_since_ms.get(key, steady_ms) for key in plan.absent}
        self._absent_since_ms = since_ms
        used = 0
        for key in sorted(plan.present, key=_order):
            used += await self._change(key, topic_lifecycle.seen_again)
        for key, first_ms in since_ms.items():
            if steady_ms - first_ms >= CONFIRM_AFTER_MS:
                noted = partial(
                    topic_lifecycle.noted_as_gone,
                    now_ms=now_ms,
                    by=self._owner,
                    is_to_stay=self.is_to_stay(key.topic),
                )
                used += await self._change(key, noted)
        return used

    async def _begin(self) -> int:
        """Claim what is due, and begin to purge it; return the requests."""
        used = await self._redate()
        judgement = self._clock.judgement()
        doubt = judgement.doubt
        if doubt != self._doubt and doubt:
            log.error("no archive of a deleted topic is purged: the time is not certain", reason=doubt)
        self._doubt = doubt
        if doubt:
            return used
        # One reading for all: what a later one shows may not be certain any more.
        now_ms = judgement.now_ms
        due = [
            one.key
            for one in self._registry.manifests
            if plan_purge(one, now_ms=now_ms, by=self._owner, grace_ms=self.grace_ms).step
            is not PurgeStep.NOTHING
            # An operator may have ordered it of a topic that lives; until that is told, nothing begins.
            and (one.lifecycle is not Lifecycle.DELETED or one.key in self._gone)
        ]
        batch: list[TopicManifest] = []
        for key in sorted(due, key=_order)[:_TOPICS_AT_ONCE]:
            used += await self._change(key, self._claimed_at(now_ms))
            manifest = self._registry.manifest(key)
            if manifest is not None and topic_lifecycle.holds_lease(manifest, by=self._owner):
                batch.append(manifest)
        batch, requests = await self._without_history(batch)
        if batch:
            self._batch = tuple(one.key for one in batch)
            self._work = self._purger.purge(batch, count=self._count)
        return used + requests

    async def _redate(self) -> int:
        """Let a grace begin anew whose beginning was noted under a wrong clock; return the requests."""
        used, judgement = 0, self._clock.judgement()
        if judgement.doubt:
            return used
        now_ms = judgement.now_ms
        for one in self._registry.manifests:
            if topic_lifecycle.is_misdated(one, now_ms=now_ms):
                log.warning(
                    "a topic's deletion was noted under a wrong clock; its grace begins now",
                    topic=one.key.topic,
                    topic_id=one.key.topic_id,
                )
                used += await self._change(one.key, partial(topic_lifecycle.redated, now_ms=now_ms))
        return used

    async def _without_history(self, batch: Sequence[TopicManifest]) -> tuple[list[TopicManifest], int]:
        """Keep those that a restored topic goes on from; return the others, and the requests."""
        if not batch:
            return [], 0
        users = await self._history.users()
        left: list[TopicManifest] = []
        for manifest in batch:
            user = next(iter(users.get(manifest.key, ())), None)
            # Once something may be deleted, a link that came too late was refused.
            if user is None or manifest.deletion is None or manifest.deletion.segments is not None:
                left.append(manifest)
                continue
            reason = f"topic {user.topic} ({user.topic_id}) goes on from this archive"
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
        # Whatever ends the piece early ends the work: the next turn begins it again, with what is left.
        self._work = None
        try:
            used += await anext(work)
        except StopAsyncIteration:
            return used + await self._finish()
        self._work = work
        return used

    async def _renew(self) -> int:
        """See that the leases last; where one is lost, or its topic is not to be purged, begin anew."""
        used, now_ms = 0, self._now_ms()
        for key in self._batch:
            known = self._registry.manifest(key)
            if known is not None and topic_lifecycle.lease_is_short(known, now_ms=now_ms):
                used += await self._change(key, self._claimed_at(now_ms))
                known = self._registry.manifest(key)
            if known is None or not topic_lifecycle.holds_lease(known, by=self._owner):
                log.warning("another daemon purges this topic now", topic=key.topic, topic_id=key.topic_id)
                await self.close()
                break
        return used

    async def close(self) -> None:
        """Let go of work under way; it is begun again."""
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

    def _claimed_at(self, now_ms: int) -> Callable[[TopicManifest], TopicManifest]:
        """Return the change that claims a topic, by one reading of the clock."""
        return partial(topic_lifecycle.claimed, now_ms=now_ms, by=self._owner, grace_ms=self.grace_ms)

    async def _count(self, key: TopicKey, segments: int, size_bytes: int) -> None:
        await self._change(
            key,
            partial(topic_lifecycle.counted, by=self._owner, segments=segments, size_bytes=size_bytes),
        )

    async def _change(self, key: TopicKey, change: Callable[[TopicManifest], TopicManifest]) -> int:
        """Change a topic manifest, and say what its state is when that is another; return the requests."""
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
        return 2

    def _publish(self) -> None:
        found = Counter(one.lifecycle for one in self._registry.manifests if one.partition_count)
        for lifecycle in Lifecycle:
            self._metrics.topics.labels(lifecycle.value).set(found[lifecycle])


def _order(key: TopicKey) -> tuple[str, str]:
    return key.topic, key.topic_id
