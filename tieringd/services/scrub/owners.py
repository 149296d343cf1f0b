"""
What is known of a partition now, for judging objects that are its own by their names.

What cannot be read makes an owner uncertain, and nothing of an uncertain owner is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import TopicKey
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.policies.scrub_orphans import Owner, TopicState
from tieringd.policies.topic_lifecycle import BEYOND_RETURN
from tieringd.services.scrub.spilled_chain import SpilledChain

if TYPE_CHECKING:
    from tieringd.archive.manifest_store import ManifestStore
    from tieringd.formats.topic_manifest import TopicManifest
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.spillover import SpilloverManifest, SpilloverName
    from tieringd.storage.base import ObjectStore


class Owners:
    """Look owners up in the bucket, each time anew."""

    def __init__(self, store: ObjectStore, manifests: ManifestStore) -> None:
        self._manifests = manifests
        self._chain = SpilledChain(store)

    async def owner(self, partition: TopicIdPartition) -> Owner:
        """
        Return what is known of a partition now: all that its manifests name.

        Raises:
            StorageUnavailable: The store does not answer; nothing is known.
        """
        key = TopicKey(partition.cluster, partition.topic, partition.topic_id)
        try:
            # In this order: a topic says that it is leaving before its manifests go.
            manifest = (await self._manifests.load(partition)).manifest
            topic = await self._manifests.load_topic(key)
        except CorruptDataError as error:
            return Owner(partition, TopicState.LIVE, None, uncertain=str(error))
        state = _state(topic)
        if manifest is None:
            return Owner(partition, state, None)
        uncertain = "; ".join(manifest.faults())
        parts: list[SpilloverManifest] = []
        names: list[SpilloverName] = []
        async for link in self._chain.walk(manifest):
            names.append(link.name)
            parts += [link.part] if link.part else []
            uncertain = uncertain or (str(link.finding) if link.finding else "")
        return Owner(partition, state, manifest, tuple(parts), frozenset(names), uncertain)


def _state(topic: TopicManifest | None) -> TopicState:
    if topic is None:
        return TopicState.UNKNOWN
    if topic.lifecycle in BEYOND_RETURN:
        return TopicState.LEAVING
    return TopicState.LIVE if topic.lifecycle is Lifecycle.LIVE else TopicState.RESTORABLE
