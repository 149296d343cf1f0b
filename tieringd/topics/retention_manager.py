"""
Managed retention: takes over a topic's retention from the broker, and gives it back.

A broker deletes by its retention whether or not the data is durable. For a topic with
`tieringd.managed.retention` the broker's retention is set to unlimited, and only tieringd trims local
data. The previous values are stored in the topic manifest first: nothing is lost when the daemon dies in
between, and `tieringd topic release` restores them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import structlog

from tieringd.broker.base import EFFECT_WITHIN_SECONDS, Broker, topic_settings
from tieringd.config import TopicConfig, broker_limits
from tieringd.errors import BrokerDenied, ObjectNotFound
from tieringd.formats.object_keys import TopicKey
from tieringd.formats.topic_manifest import OriginalRetention, TopicManifest
from tieringd.policies.local_retention import UNLIMITED
from tieringd.topics.each_topic import each_topic
from tieringd.topics.topic_registry import TopicRegistry

log = structlog.get_logger(__name__)

_QUESTIONS_OF_RELEASE: Final = 2
"""How often a release asks for the topic's id, where the answer comes late."""

ORDER_WITHIN_SECONDS: Final = 60.0
"""
Maximum time between the start of recording a topic's retention and the request that sets it on the broker.
"""
RETENTION_SETTINGS: Final = ("retention.ms", "retention.bytes")
_UNLIMITED: Final = dict.fromkeys(RETENTION_SETTINGS, "-1")


class RetentionManager:
    """
    Take over the retention of topics whose partition 0 this broker leads.

    An operator who changes the retention of a managed topic on the broker changes the total
    retention: the new value is recorded, and the broker's set to unlimited again.
    """

    def __init__(self, broker: Broker, registry: TopicRegistry) -> None:
        self._broker = broker
        self._registry = registry
        self._denied: set[TopicKey] = set()

    async def step(self, managed: Mapping[TopicKey, TopicConfig]) -> None:
        """
        Take over those of *managed* that still have a retention limit on the broker.

        Raises:
            BrokerUnavailable: Try again in the next round.
            StorageUnavailable: Try again in the next round.
            TopicFaults: The retention of these topics is not managed; all others are seen to.
        """
        self._denied &= managed.keys()

        async def manage(key: TopicKey) -> None:
            config = managed[key]
            has_limit = config.broker_retention_ms is not None or config.broker_retention_bytes is not None
            known = self._registry.manifest(key)
            is_released = known is not None and known.retention_released
            if has_limit and not is_released and key not in self._denied:
                await self._take_over(key, config)

        await each_topic(managed, manage)

    async def _take_over(self, key: TopicKey, config: TopicConfig) -> None:
        """Take over the retention of one topic, unless it is another one by now than at the last scan."""
        manifest = self._registry.manifest(key)
        known = manifest.original_retention if manifest is not None else None
        found = await self._broker.topic_overrides(key.topic)
        effective_ms, effective_bytes = config.broker_retention_ms, config.broker_retention_bytes
        told = await topic_settings(self._broker, key.topic)
        if broker_limits(told) != (effective_ms, effective_bytes):
            # Otherwise the limit of before would be the total retention for good. The next scan sees the new
            # one.
            log.info("retention has changed since the last scan; it is taken over later", topic=key.topic)
            return
        original = OriginalRetention(
            found.get("retention.ms"),
            found.get("retention.bytes"),
            effective_ms=_or_unlimited(effective_ms),
            effective_bytes=_or_unlimited(effective_bytes),
        )

        merged = _merged(known, original)

        def record(manifest: TopicManifest) -> TopicManifest:
            # Another daemon may have recorded a newer retention while this process was stopped.
            if manifest.retention_released or manifest.original_retention != known:
                return manifest
            return replace(manifest, original_retention=merged)

        # An operator may release the topic while this process is stopped; *send_by* keeps a late request
        # from being sent.
        send_by = asyncio.get_running_loop().time() + ORDER_WITHIN_SECONDS
        recorded = await self._registry.change(key, record)
        if recorded.retention_released:
            # This process may have read the topic's manifest before the release.
            return
        if recorded.original_retention != merged:
            log.info("another daemon has recorded a retention; it is taken over later", topic=key.topic)
            return
        if await self._broker.topic_overrides(key.topic) != found:
            # Storing the record may have taken long. The next round records the new values.
            return
        send_by = min(send_by, asyncio.get_running_loop().time() + EFFECT_WITHIN_SECONDS)
        if not await _is_current(self._broker, key):
            log.info(
                "retention is not taken over: a broker has another topic of this name, or none",
                topic=key.topic,
            )
            return
        try:
            await self._broker.alter_topic(key.topic, _UNLIMITED, send_by=send_by)
        except BrokerDenied as error:
            self._denied.add(key)
            log.error("retention cannot be managed", topic=key.topic, error=str(error))  # noqa: TRY400 its text is enough
            return
        log.info(
            "retention is managed from here on",
            topic=key.topic,
            retention_ms=original.retention_ms,
            retention_bytes=original.retention_bytes,
        )


async def release(broker: Broker, key: TopicKey, original: OriginalRetention) -> None:
    """
    Restore a topic's original retention on the broker.

    Raises:
        ObjectNotFound: The cluster has no topic with this id, or one of its brokers has another one.
        BrokerUnavailable: A broker does not answer.
        BrokerDenied: tieringd lacks the permission.
    """
    now = asyncio.get_running_loop().time
    # The first question opens a connection to each broker, which may take longer than the answer counts.
    for _ in range(_QUESTIONS_OF_RELEASE):
        send_by = now() + EFFECT_WITHIN_SECONDS
        if not await _is_current(broker, key):
            raise ObjectNotFound(
                f"the cluster has no topic {key.topic} with the id {key.topic_id}: its retention is not "
                "restored",
                hint="A topic that was created again has its own retention. Otherwise try again: the "
                "cluster's brokers have to agree",
            )
        if now() < send_by:
            break
    values = (original.retention_ms, original.retention_bytes)
    await broker.alter_topic(key.topic, dict(zip(RETENTION_SETTINGS, values, strict=True)), send_by=send_by)


async def _is_current(broker: Broker, key: TopicKey) -> bool:
    """Say whether each live broker has the topic under this id: a request to alter it goes by its name."""
    return (await broker.topic_ids([key.topic])).get(key.topic) == frozenset({key.topic_id})


def _merged(known: OriginalRetention | None, found: OriginalRetention) -> OriginalRetention:
    """Return the values to restore: the current ones, or the recorded ones where tieringd set those."""
    if known is None:
        return found
    ours = ("-1", None)
    is_ms_ours, is_bytes_ours = found.retention_ms in ours, found.retention_bytes in ours
    return OriginalRetention(
        known.retention_ms if is_ms_ours else found.retention_ms,
        known.retention_bytes if is_bytes_ours else found.retention_bytes,
        known.effective_ms if is_ms_ours else found.effective_ms,
        known.effective_bytes if is_bytes_ours else found.effective_bytes,
    )


def _or_unlimited(limit: int | None) -> int:
    return UNLIMITED if limit is None else limit
