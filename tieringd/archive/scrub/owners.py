"""
What is known of a partition now, for judging objects that are its own by their names.

What cannot be read makes an owner uncertain, and nothing of an uncertain owner is touched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tieringd.archive.scrub.spilled_chain import SpilledChain, SpilledTally
from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import manifest_key, topic_key, topic_manifest_key
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.policies.scrub import FaultKind, Finding, manifest_findings, twice_named_findings
from tieringd.policies.scrub_orphans import Owner, TopicState
from tieringd.policies.topic_lifecycle import BEYOND_RETURN

if TYPE_CHECKING:
    from tieringd.archive.manifest_store import ManifestStore
    from tieringd.formats.topic_manifest import TopicManifest
    from tieringd.model.manifest import PartitionManifest
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
        key = topic_key(partition)
        findings: list[Finding] = []
        manifest = topic = None
        # In this order: a topic says that it is leaving before its manifests go.
        try:
            manifest = (await self._manifests.load(partition)).manifest
        except CorruptDataError as error:
            kind, damaged = FaultKind.MANIFEST_DAMAGED, manifest_key(partition)
            findings.append(Finding(kind, damaged, error.message, partition))
        try:
            topic = await self._manifests.load_topic(key)
            state = _state(topic)
        except CorruptDataError as error:
            state = TopicState.LIVE
            kind, damaged = FaultKind.TOPIC_MANIFEST_DAMAGED, topic_manifest_key(key)
            findings.append(Finding(kind, damaged, error.message))
        uncertain = str(findings[0]) if findings else ""
        owner = Owner(partition, state, manifest, uncertain=uncertain, findings=tuple(findings))
        return await self._with_parts(owner, manifest) if manifest else owner

    async def _with_parts(self, owner: Owner, manifest: PartitionManifest) -> Owner:
        """Return *owner* with all that is spilled, and what is wrong with it and with *manifest*."""
        rules = manifest_findings(manifest)
        parts: list[SpilloverManifest] = []
        names: list[SpilloverName] = []
        of_parts: list[Finding] = []
        tally = SpilledTally(manifest)
        async for link in self._chain.walk(manifest):
            tally.take(link)
            names.append(link.name)
            parts += [link.part] if link.part else []
            of_parts += [link.finding] if link.finding else []
        uncertain = owner.uncertain or "; ".join(one.detail for one in rules)
        return replace(
            owner,
            parts=tuple(parts),
            part_names=frozenset(names),
            uncertain=uncertain or (str(of_parts[0]) if of_parts else ""),
            findings=(
                *owner.findings,
                *rules,
                *twice_named_findings(manifest, parts),
                *of_parts,
                *tally.findings(),
            ),
        )


def _state(topic: TopicManifest | None) -> TopicState:
    if topic is None:
        return TopicState.UNKNOWN
    if topic.lifecycle in BEYOND_RETURN:
        return TopicState.LEAVING
    return TopicState.LIVE if topic.lifecycle is Lifecycle.LIVE else TopicState.RESTORABLE
