"""
Managed retention: the broker's own retention of a topic, taken over and given back.

A broker deletes by its retention whether or not the data is durable. On a topic that says so
(`tieringd.managed.retention`) it is set to unlimited, and only tieringd lets go of local data.
What was set before is in the topic manifest first: nothing is lost when the daemon dies in
between, and `tieringd topic release` puts it back.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog

from tieringd.errors import BrokerDenied
from tieringd.formats.topic_manifest import OriginalRetention, TopicManifest
from tieringd.policies.local_retention import UNLIMITED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieringd.broker.base import Broker
    from tieringd.config import TopicConfig
    from tieringd.formats.object_keys import TopicKey
    from tieringd.topics.topic_registry import TopicRegistry

log = structlog.get_logger(__name__)

ORDER_WITHIN_SECONDS: Final = 60.0
"""So long after a round began to record a topic's retention it may set it on the broker."""
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
        Take over those of *managed* whose retention the broker still has.

        Raises:
            BrokerUnavailable: Try again in the next round.
            StorageUnavailable: Likewise.
        """
        self._denied &= managed.keys()
        for key, config in managed.items():
            has_limit = config.broker_retention_ms is not None or config.broker_retention_bytes is not None
            known = self._registry.manifest(key)
            is_released = known is not None and known.retention_released
            if has_limit and not is_released and key not in self._denied:
                await self._take_over(key, config)

    async def _take_over(self, key: TopicKey, config: TopicConfig) -> None:
        found = await self._broker.topic_overrides(key.topic)
        original = OriginalRetention(
            found.get("retention.ms"),
            found.get("retention.bytes"),
            effective_ms=_or_unlimited(config.broker_retention_ms),
            effective_bytes=_or_unlimited(config.broker_retention_bytes),
        )

        def record(manifest: TopicManifest) -> TopicManifest:
            return replace(manifest, original_retention=_merged(manifest.original_retention, original))

        # An operator may release the topic while this process is stopped: then nothing is set afterwards.
        send_by = asyncio.get_running_loop().time() + ORDER_WITHIN_SECONDS
        await self._registry.change(key, record)
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


async def release(broker: Broker, topic: str, original: OriginalRetention) -> None:
    """
    Put a topic's original retention back on the broker.

    Raises:
        BrokerUnavailable: The broker does not answer.
        BrokerDenied: We may not.
    """
    values = (original.retention_ms, original.retention_bytes)
    await broker.alter_topic(topic, dict(zip(RETENTION_SETTINGS, values, strict=True)))


def _merged(known: OriginalRetention | None, found: OriginalRetention) -> OriginalRetention:
    """Return what to put back: what is set now, and where that is ours, what was recorded before."""
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
