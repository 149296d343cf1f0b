"""
The topics of a bucket as a scrub goes by them: those that have partitions to be looked at.

Partitions of a topic that is being purged are not: their manifests name what is gone already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import (
    TOPIC_MANIFESTS_PREFIX,
    TopicKey,
    parse_topic_manifest_key,
    topic_key,
    topic_manifest_key,
)
from tieringd.policies.scrub import FaultKind, Finding
from tieringd.policies.topic_lifecycle import BEYOND_RETURN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tieringd.archive.manifest_store import ManifestStore
    from tieringd.model.partition import TopicIdPartition
    from tieringd.storage.base import ObjectStore


class ScrubbedTopics:
    """Find the partitions of those topics whose names are wanted. Keeps no state."""

    def __init__(
        self,
        store: ObjectStore,
        manifests: ManifestStore,
        *,
        is_wanted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._store = store
        self._manifests = manifests
        self._is_wanted = is_wanted

    async def partitions(self, findings: list[Finding]) -> AsyncIterator[TopicIdPartition]:
        """
        Yield the partitions that topic manifests lead to; damaged ones of those come to *findings*.

        The partitions of a damaged one are found by their own manifests.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        start_after: str | None = None
        while True:
            page = await self._store.list_page(TOPIC_MANIFESTS_PREFIX, start_after=start_after)
            for info in page.objects:
                key = parse_topic_manifest_key(info.key)
                if key is not None and self._is_wanted(key.topic):
                    for partition in await self._partitions_of(findings, key):
                        yield partition
            start_after = page.next_start_after
            if start_after is None:
                return

    async def _partitions_of(self, findings: list[Finding], key: TopicKey) -> tuple[TopicIdPartition, ...]:
        try:
            topic = await self._manifests.load_topic(key)
        except CorruptDataError as error:
            findings.append(Finding(FaultKind.TOPIC_MANIFEST_DAMAGED, topic_manifest_key(key), error.message))
            return ()
        return topic.partitions() if topic and topic.lifecycle not in BEYOND_RETURN else ()

    async def is_leaving(self, partition: TopicIdPartition) -> bool:
        """Say whether the partition's topic is being purged now."""
        try:
            topic = await self._manifests.load_topic(topic_key(partition))
        except CorruptDataError:
            # That is a finding of its own.
            return False
        return topic is not None and topic.lifecycle in BEYOND_RETURN
