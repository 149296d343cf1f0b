"""
A survey of a whole bucket by its manifests and its listing. No segment is read.

It finds the partitions and their content, faults of manifests, and objects that no manifest names.
Archives change meanwhile. So faults are checked twice, and objects are judged by manifests that were
read after the objects were listed.

`ScrubbedTopics` lists the topics of a bucket whose partitions a scrub scans. Partitions of a topic that
is being purged are left out: their manifests name objects that are already deleted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from tieringd.archive.manifest_store import ManifestStore
from tieringd.archive.scrub.orphan_search import NamedObjects, OrphanSearch, OwnerLookup
from tieringd.archive.scrub.rewriting_records import unrecorded_findings
from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import (
    TOPIC_MANIFESTS_PREFIX,
    TopicKey,
    parse_topic_manifest_key,
    topic_key,
    topic_manifest_key,
)
from tieringd.model.partition import TopicIdPartition
from tieringd.policies.scrub import FaultKind, Finding, Orphan, Owner, has_rewritten
from tieringd.policies.topic_lifecycle import BEYOND_RETURN
from tieringd.storage.at_once import at_once
from tieringd.storage.base import ObjectStore
from tieringd.storage.listing import list_objects
from tieringd.storage.threads import in_thread

PARTITIONS_AT_ONCE: Final = 16
NEW_OR_LOST: Final = (
    "it has no manifest: it is new, or the manifest is lost. A scrub that also lists the bucket tells which"
)
PREFIXES: Final = tuple("0123456789abcdef")
"""Every key of a partition's object begins with one of these. Each prefix is listed separately."""


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
        Yield the partitions in the topic manifests. Damaged topic manifests are added to *findings*.

        The partitions of a damaged topic manifest are found by their own manifests.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        async for info in list_objects(self._store, TOPIC_MANIFESTS_PREFIX):
            key = parse_topic_manifest_key(info.key)
            if key is not None and self._is_wanted(key.topic):
                for partition in await self._partitions_of(findings, key):
                    yield partition

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
            # A damaged topic manifest is a finding of its own.
            return False
        return topic is not None and topic.lifecycle in BEYOND_RETURN


@dataclass(slots=True)
class Survey:
    """The result of one survey of a bucket."""

    owners: list[Owner] = field(default_factory=list)
    """One for each partition, even if nothing else is known of it; in no order."""
    findings: list[Finding] = field(default_factory=list)
    """Faults of manifests, each once."""
    orphans: list[Orphan] = field(default_factory=list)
    uncertain: dict[TopicIdPartition, str] = field(default_factory=dict)
    """Partitions whose objects cannot be judged, and why."""
    listed_objects: int = 0

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings, each once."""
        known = set(self.findings)
        self.findings += [one for one in dict.fromkeys(findings) if one not in known]


class Surveyor:
    """Survey one bucket, or those of its topics whose names are wanted. Reads only."""

    def __init__(
        self,
        store: ObjectStore,
        manifests: ManifestStore,
        *,
        is_wanted: Callable[[str], bool],
        grace_ms: int,
        ages_ms: Callable[[], int],
    ) -> None:
        """
        Keep the arguments.

        An object that is younger than *grace_ms* at the time of *ages_ms* is no orphan.
        """
        self._store = store
        self._owners = OwnerLookup(store, manifests)
        self._topics = ScrubbedTopics(store, manifests, is_wanted=is_wanted)
        self._search = OrphanSearch(store, manifests, grace_ms=grace_ms, ages_ms=ages_ms)
        self._is_wanted = is_wanted

    async def survey(self, *, with_orphans: bool) -> Survey:
        """
        Return the bucket's content and the faults of its manifests.

        With *with_orphans* the whole bucket is listed. The listing also finds partitions that are in no
        topic manifest, and lost manifests. Without it, a partition without a manifest is uncertain.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        survey = Survey()
        of_topics: list[Finding] = []
        known = [one async for one in self._topics.partitions(of_topics)]
        survey.add(of_topics)
        await self._inspect(survey, known)
        if with_orphans:
            found = await self._list(survey)
            others = [one for one in dict.fromkeys(found) if one not in set(known)]
            await self._inspect(survey, [one for one in others if not await self._topics.is_leaving(one)])
        else:
            lost = (owner for owner in survey.owners if owner.is_manifest_missing and not owner.findings)
            survey.uncertain |= {owner.partition: NEW_OR_LOST for owner in lost}
        survey.findings = list(await self.confirmed(survey.findings))
        return survey

    async def confirmed(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """
        Return *findings* without those of partitions whose topic is being purged by now.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        wanted = tuple(findings)
        partitions = list({one.partition for one in wanted if one.partition is not None})
        answers = await at_once(partitions, self._topics.is_leaving, count=PARTITIONS_AT_ONCE)
        leaving = {one for one, is_leaving in zip(partitions, answers, strict=True) if is_leaving}
        return tuple(one for one in wanted if one.partition not in leaving)

    async def _inspect(self, survey: Survey, partitions: list[TopicIdPartition]) -> None:
        owners = await at_once(partitions, self._owner, count=PARTITIONS_AT_ONCE)
        survey.owners += owners
        survey.add(finding for owner in owners for finding in owner.findings)

    async def _owner(self, partition: TopicIdPartition) -> Owner:
        """Return what is known of a partition. Only faults found in two reads count."""
        first = await self._with_records(await self._owners.owner(partition))
        if not first.findings:
            return first
        second = await self._with_records(await self._owners.owner(partition))
        return replace(second, findings=tuple(one for one in second.findings if one in first.findings))

    async def _with_records(self, owner: Owner) -> Owner:
        """Return *owner* with a finding for each rewritten segment that no record names."""
        segments = (one for table in owner.held if has_rewritten(table) for one in table)
        found, _ = await unrecorded_findings(self._store, owner.partition, segments)
        return replace(owner, findings=(*owner.findings, *found)) if found else owner

    async def _list(self, survey: Survey) -> list[TopicIdPartition]:
        """List the bucket and judge its objects. Return the partitions that have a manifest."""
        named = NamedObjects()
        for owner in survey.owners:
            await in_thread(named.add, owner)
        await in_thread(named.seal)
        found: list[TopicIdPartition] = []

        async def list_prefix(prefix: str) -> None:
            pages = self._search.pages(
                named, is_ours=lambda partition: self._is_wanted(partition.topic), prefix=prefix
            )
            async for page in pages:
                survey.listed_objects += page.objects
                survey.add(page.findings)
                survey.orphans += page.orphans
                survey.uncertain |= page.uncertain
                found.extend(page.partitions)

        await at_once(PREFIXES, list_prefix, count=len(PREFIXES))
        return found
