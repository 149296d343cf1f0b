"""
The observer: one scan of the log directories and the broker, for all partitions together.

Each round it reads the log directories, and asks the broker for leadership, topic configurations and log
bounds. A partition that could not be read is named as such, and never taken for absent. The observer does
not wait for the object store, with one exception: the offsets of a Redpanda log without its head need the
partition's manifest.

An observation of a partition belongs to one leader epoch, or it is discarded. Leadership is asked first,
then the files are read, and at last the broker gives the bounds under exactly that epoch, or refuses.
Epochs only grow, so the files in between belong to the same one. A daemon that is stopped in the middle of
a scan, while leadership goes away and comes back, acts on nothing of it.

An `Observation` is the result of one round for one partition. Observations are numbered, because an
archiver may act on one several times: for each batch of uploads, for each offered change, and when the disk
needs room. A decision that takes two observations takes two different numbers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from operator import is_
from types import MappingProxyType
from typing import Final, TypeAlias

import structlog

from tieringd.archive.manifest_store import ManifestStore
from tieringd.archiving.listed_partitions import ListedPartitions, TieredPartitions, identify
from tieringd.archiving.pinner import Pinner
from tieringd.broker.base import Broker
from tieringd.broker.layout import Layout
from tieringd.broker.log_dir import ChangeReports, LogDirScan, NoReports
from tieringd.broker.pins import with_true_ends
from tieringd.broker.segment_file import FileEnds
from tieringd.config import Config, TopicConfig
from tieringd.errors import (
    BrokerDenied,
    CorruptDataError,
    LocalFileError,
    StorageError,
    StorageUnavailable,
    TieringError,
)
from tieringd.formats.object_keys import TopicKey, topic_key
from tieringd.formats.topic_manifest import TieringDefaults, TopicManifest
from tieringd.metrics import Metrics
from tieringd.model.local_log import LocalLog, LocalPartition
from tieringd.model.offset_translation import OffsetTranslation
from tieringd.model.partition import (
    ClusterView,
    Leadership,
    LogBounds,
    Replica,
    TopicIdPartition,
    TopicPartition,
)
from tieringd.policies.pinning import NO_PINS, Pin, PinnedLog, judged, with_pins
from tieringd.topics.topic_registry import TopicRegistry

log = structlog.get_logger(__name__)

_NOT_ON_RECORD = (
    "no topic manifest in the bucket includes this partition yet, and a restore finds partitions by the "
    "topic manifest"
)
"""Why nothing of a topic is trimmed yet."""
_REFUSED: Final = (
    "the broker does not let this user see the topic, so nothing of it is archived. Grant the user the ACLs "
    "DESCRIBE, DESCRIBE_CONFIGS and DELETE on it, or set redpanda.remote.write: false for it in the "
    "configuration"
)
"""Why a topic that was archived is left out."""
_UNTOLD: Final = (
    "the broker does not tell the topic's settings in this round, and they may keep what the defaults would "
    "delete"
)
"""Why nothing of a topic is trimmed whose settings this daemon has never read."""
_WRITTEN: Final = MappingProxyType({"redpanda.remote.write": "true"})
"""Settings of a topic that is archived, unless the file says no."""
_READ: Final = MappingProxyType({"redpanda.remote.read": "true"})
"""Settings of a topic whose archive clients read, unless the file says no."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A partition's files, bounds and configuration, all read in one round."""

    log: LocalLog
    """The broker's own files."""
    bounds: LogBounds
    topic: TopicConfig
    pins: tuple[Pin, ...] = ()
    scan_began_at: float = field(default=math.inf, compare=False)
    """Time of the scan's start, in loop time. The observation may not show effects after this time."""
    scan_number: int = field(kw_only=True, compare=False)
    """The number of the scan; a later scan has a higher one."""
    uploadable: LocalLog = field(init=False)
    """The broker's files, preceded by those that only pins hold."""

    def __post_init__(self) -> None:
        log = replace(self.log, segments=with_pins(self.log, self.pins)) if self.pins else self.log
        object.__setattr__(self, "uploadable", log)

    def renumbered(self, scan_number: int, *, scan_began_at: float = math.inf) -> Observation:
        """Return this observation for number *scan_number*, which found the same again."""
        return replace(self, scan_number=scan_number, scan_began_at=scan_began_at)

    def shows_same(self, other: Observation | None) -> bool:
        """
        Say whether no scan found a change between this observation and *other*.

        Compares identities of objects, and no files.
        """
        return other is not None and (
            self.log is other.log
            and self.bounds is other.bounds
            and self.topic is other.topic
            and self.pins is other.pins
        )


@dataclass(frozen=True, slots=True)
class FollowedPartition:
    """A partition of an archived topic that this broker does not archive, at least not in this round."""

    partition: TopicIdPartition
    log: LocalLog
    pins: tuple[Pin, ...]


@dataclass(frozen=True, slots=True)
class BrokerSnapshot:
    """The result of one scan of the log directories and the broker."""

    cluster: str
    wanted: Mapping[Leadership, Observation]
    """
    An observation for each partition to archive. The same mapping object while all observations are the same.
    """
    followed: tuple[FollowedPartition, ...]
    """Partitions that another broker leads, or whose topic is paused or closed for archiving."""
    problems: Mapping[str, str]
    """Why a path or topic was left out of this round, by its name."""
    held_back: tuple[FollowedPartition, ...] = ()
    """Partitions that this broker leads, but that lack something that archiving needs to know."""
    unnamed: tuple[LocalPartition, ...] = ()
    """Partitions on disk that the cluster does not list, such as new ones or ones being deleted."""
    untiered: tuple[LocalPartition, ...] = ()
    """Partitions of topics that are not archived."""
    unrecorded_topics: Mapping[TopicKey, TopicConfig] = field(default_factory=dict)
    """Topics whose partition 0 this broker leads, and of which the bucket has no `defaults` yet."""
    defaults: TieringDefaults | None = None
    """The cluster's tiering defaults at the time of the scan."""
    managed: Mapping[TopicKey, TopicConfig] = field(default_factory=dict)
    """Topics whose retention this daemon manages, because this broker leads their partition 0."""
    remote_delete: Mapping[TopicKey, bool] = field(default_factory=dict)
    """
    Whether deletion of a topic deletes its objects, for topics whose partition 0 this broker leads and
    whose configuration the broker returned. It is true only where the scan before has found the same.
    """
    paused: frozenset[TopicKey] = frozenset()
    led_elsewhere: int = 0
    """The number of those of `followed` that another broker leads."""
    unclear: frozenset[TopicPartition] = frozenset()
    """Partitions that could not be read: what is known of them stays as it is."""
    local: tuple[LocalPartition, ...] = ()
    """All partitions on this broker that the cluster lists, of any topic."""
    topics: Mapping[str, TopicConfig] = field(default_factory=dict)
    """The configurations of the topics of `local`, by topic name."""
    logs: Sequence[LocalLog] = ()
    """
    The logs of archived topics as this scan read them. A log is the same object as in the scan before if no
    time in its directory changed. An observation may keep an earlier one that is equal.
    """
    scan_number: int = 0
    """The number of this scan."""
    scan_began_at: float = math.inf
    """Time of this scan's start, in loop time."""
    asked_at: float = math.inf
    """
    When the broker was asked for the last time, in loop time: it led `wanted` then, under these epochs. This
    process may have been stopped since.
    """

    def confirmed(self, seen: Observation) -> Observation:
        """
        Return *seen*, one of `wanted`, with the number of this scan, which found it again.

        An unchanged observation keeps its first number in `wanted`: of ten thousand partitions nearly all
        are at rest, and only an archiver that acts has to know the number of the newest scan that found it.
        """
        return (
            seen
            if seen.scan_number >= self.scan_number
            else seen.renumbered(self.scan_number, scan_began_at=self.scan_began_at)
        )


@dataclass(frozen=True, slots=True)
class _Circumstances:
    """All that an observation depends on besides the partition's files, pins and bounds."""

    tiered: TieredPartitions
    is_known: bool
    """Whether the bucket's topic manifests were read."""
    left_alone: frozenset[TopicKey]
    """Topics that are paused, or closed for archiving."""
    counts: Mapping[tuple[str, str], int]
    """The number of partitions on record of each topic, by name and id."""


_File: TypeAlias = tuple[LocalLog, tuple[Pin, ...]]
"""A partition's log, and its pins."""


@dataclass(frozen=True, slots=True)
class _ReadFiles:
    """The files of the archived partitions at the last scan, which read all of them and knew of no pin."""

    partitions: tuple[LocalPartition, ...]
    places: Mapping[str, int]
    """The place of each partition in `files`, by its path."""
    files: list[_File]
    read_since: set[str] = field(default_factory=set)
    """The paths of partitions that were read again since."""


@dataclass(frozen=True, slots=True)
class _Logs:
    """The logs of a scan."""

    files: list[_File]
    tiered: TieredPartitions
    read: tuple[LocalLog, ...]
    """The logs of `files`."""
    led: tuple[LocalLog, ...]
    """Those of them that this broker leads."""

    @classmethod
    def of(cls, files: list[_File], tiered: TieredPartitions) -> _Logs:
        """Derive it."""
        read = tuple(one for one, _ in files)
        led = tuple(one for one in read if _name(one) not in tiered.followed) if tiered.followed else read
        return cls(files, tiered, read, led)


@dataclass(frozen=True, slots=True)
class _LastScan:
    """The files and bounds that the last scan read, and the partitions that it found to be followed."""

    files: list[_File]
    bounds: Mapping[TopicPartition, LogBounds | TieringError]
    followed: Sequence[FollowedPartition]


class Observer:
    """
    Scan the log directories and ask the broker.

    The observer remembers which problems it has logged, and the last observation of each partition. It
    returns an unchanged observation as the same object, so that an archiver sees that nothing is new.

    Nearly all of ten thousand partitions are unchanged in any one scan. What follows from their names and
    roles is kept (`listed_partitions`). A partition whose log, pins and bounds are the same, under the same
    circumstances, keeps its observation without another look at the rest. Where that holds for all of them,
    none is looked at.
    """

    def __init__(
        self,
        config: Config,
        *,
        broker: Broker,
        metrics: Metrics,
        pinner: Pinner,
        registry: TopicRegistry,
        manifests: ManifestStore,
        layout: Layout,
        reports: ChangeReports | None = None,
    ) -> None:
        """Take the collaborators; without *reports* of changes each scan looks at all files."""
        self._config = config
        self._reports = reports or NoReports()
        self._log_dirs = tuple(str(path) for path in config.broker.log_dirs)
        self._broker = broker
        self._metrics = metrics
        self._pinner = pinner
        self._pin_ends = FileEnds()
        self._registry = registry
        self._manifests = manifests
        self._layout = layout
        self._translations: dict[str, tuple[OffsetTranslation, ...]] = {}
        self._observed: dict[TopicPartition, tuple[Leadership, Observation]] = {}
        self._wanted: dict[Leadership, Observation] = {}
        """The observations in `_observed`, as the last scan returned them."""
        # A scan remembers files for the next one, so only one runs at a time.
        self._scan_lock = asyncio.Lock()
        self._topics: dict[str, TopicConfig] = {}
        self._told: dict[TopicKey, Mapping[str, str]] = {}
        """The last settings that the broker told of each topic."""
        self._resolved: dict[str, tuple[Mapping[str, str] | None, TopicManifest | None, TopicConfig]] = {}
        """
        Each topic's configuration, with the broker's settings and the record that it follows from. The
        settings are None where they were never told.
        """
        self._listed: ListedPartitions | None = None
        self._tiered: TieredPartitions | None = None
        self._circumstances: _Circumstances | None = None
        """Those of the observations in `_observed`."""
        self._read: _ReadFiles | None = None
        self._logs: _Logs | None = None
        self._last_scan: _LastScan | None = None
        """None where the last scan held partitions back, and after a scan of some partitions alone."""
        self._problems: dict[str, str] = {}
        self._topic_problems: set[str] = set()
        self._described_topics: frozenset[str] = frozenset()
        """The topics whose configuration the broker returned at the last scan."""
        self._hidden_topics: frozenset[str] = frozenset()
        """The topics whose settings this user was not allowed to read at the last scan."""
        self._found_to_go: set[TopicKey] = set()
        """The topics whose objects are deleted with them, as the last scan found."""
        self._has_scanned = False
        self._scan_count = 0

    def set_config(self, config: Config) -> None:
        """Use *config* from the next scan on; the log directories stay as they were."""
        self._config = config
        self._resolved = {}

    @property
    def problems(self) -> Mapping[str, str]:
        """Return what the last scan could not read, and why."""
        return dict(self._problems)

    @property
    def log_dir_fault(self) -> str:
        """Return why the last scan could not read a whole log directory; empty when it read them all."""
        paths = (path for log_dir in self._log_dirs for path in (log_dir, f"{log_dir}/meta.properties"))
        return next((self._problems[path] for path in paths if path in self._problems), "")

    async def scan(self) -> BrokerSnapshot:
        """
        Read the log directories and ask the broker, once for all partitions.

        Raises:
            BrokerUnavailable: The broker does not answer; archivers go on with their last observations.
            BrokerDenied: The broker refuses to answer.
        """
        async with self._scan_lock:
            return await self._scan()

    async def rescan_partitions(self, paths: Collection[str]) -> dict[Leadership, Observation] | None:
        """
        Observe some partitions again: their files and bounds.

        The cost is that of these partitions alone, so this serves partitions in which a segment was just
        closed. Configuration and leadership are those of the last scan: the broker is asked for the bounds
        under that leader epoch. Returns None when that is not enough: a path is not of an observed
        partition, its leader epochs have changed, another epoch leads it, or it cannot be read.

        Args:
            paths: Directories of partitions that the last scan observed as archived here.

        Raises:
            BrokerUnavailable: The broker does not answer.
            BrokerDenied: The broker refuses to answer.
        """
        async with self._scan_lock:
            scan_number, scan_began_at = self._next_scan()
            known = [one for one in self._observed.values() if one[1].log.partition.path in paths]
            if len(known) != len(paths):
                return None
            partitions = [seen.log.partition for _, seen in known]
            if self._read is not None:
                self._read.read_since.update(paths)
            self._layout.note_changes(self._reports)
            files, unclear = await asyncio.to_thread(self._read_some, partitions, {})
            if unclear:
                return None
            bounds = await self._broker.log_bounds(
                [local_log for local_log, _ in files],
                leader_epochs={one.partition.topic_partition: one.leader_epoch for one, _ in known},
            )
            again: dict[Leadership, Observation] = {}
            for (leadership, earlier), (local_log, pins) in zip(known, files, strict=True):
                found = bounds[local_log.partition.topic_partition]
                if local_log.epochs != earlier.log.epochs or not isinstance(found, LogBounds):
                    return None
                again[leadership] = Observation(
                    local_log, found, earlier.topic, pins, scan_began_at, scan_number=scan_number
                )
            self._last_scan = None
            self._observed |= {one.partition.topic_partition: (one, seen) for one, seen in again.items()}
            self._wanted = self._wanted | again
            return again

    def _next_scan(self) -> tuple[int, float]:
        """Return the number of a scan that begins now, and the loop time."""
        self._scan_count += 1
        return self._scan_count, asyncio.get_running_loop().time()

    async def _scan(self) -> BrokerSnapshot:
        scan_number, scan_began_at = self._next_scan()
        scan = await asyncio.to_thread(self._layout.scan, self._log_dirs)
        problems: dict[str, str] = {problem.path: str(problem) for problem in scan.problems}
        cluster = await self._broker.cluster_id()
        # Where no broker runs, the files say what is led. They are read only where a change was reported.
        self._layout.note_changes(self._reports)
        view = await self._broker.replicas(scan.partitions, held=self._layout.held())
        listed = self._listed_by(cluster, scan, view)
        tiered = self._tiered_by(listed, await self._topic_configs(cluster, listed.topic_ids, problems))
        topics, keys = tiered.topics, tiered.keys
        files, unclear = await self._files_of(tiered, problems)
        asked_at = asyncio.get_running_loop().time()
        if (logs := self._logs) is None or logs.files is not files or logs.tiered is not tiered:
            self._logs = logs = _Logs.of(files, tiered)
        bounds = await self._broker.log_bounds(logs.led, leader_epochs=listed.leader_epochs)
        paused = {key for key in keys if self._registry.is_paused(key)}
        closed = {key for key in keys if self._registry.is_closed(key)}
        problems |= {f"topic {key.topic} ({key.topic_id})": self._why_closed(key) for key in closed}
        problems |= {f"topic {name}": _REFUSED for name in self._refused(view)}
        managed = _managed(tiered, closed=closed, unclear=unclear)
        circumstances = _Circumstances(
            tiered, self._registry.is_known, frozenset(paused | closed), self._counts_on_record(keys)
        )
        observed, followed, held_back = self._judged(
            files,
            bounds,
            circumstances,
            scan_number=scan_number,
            scan_began_at=scan_began_at,
            problems=problems,
            unclear=unclear,
        )
        self._last_scan = None if held_back else _LastScan(files, bounds, followed)
        self._remember(observed, circumstances)
        self._report(problems, scan)
        self._metrics.followed_partitions.set(led_elsewhere := _led_elsewhere(view, followed))
        self._metrics.upload_share.set(_upload_share(view, {key.topic for key in keys}, led=len(logs.led)))
        self._metrics.paused_topics.set(len(paused))
        return BrokerSnapshot(
            cluster,
            self._wanted,
            tuple(followed),
            problems,
            tuple(held_back),
            listed.unnamed,
            tiered.untiered,
            self._unrecorded_topics(listed),
            self._config.tiering_defaults,
            managed,
            self._remote_delete(listed),
            frozenset(paused),
            led_elsewhere,
            frozenset(unclear),
            listed.local,
            topics,
            logs.read,
            scan_number,
            scan_began_at,
            asked_at,
        )

    def _judged(
        self,
        files: list[_File],
        bounds: Mapping[TopicPartition, LogBounds | TieringError],
        circumstances: _Circumstances,
        *,
        scan_number: int,
        scan_began_at: float,
        problems: dict[str, str],
        unclear: set[TopicPartition],
    ) -> tuple[
        dict[TopicPartition, tuple[Leadership, Observation]],
        Sequence[FollowedPartition],
        Sequence[FollowedPartition],
    ]:
        """
        Return the observations of archived partitions, and those that are followed or held back.

        Adds to *problems* and *unclear*. Where all is as in the last scan, no partition is looked at.
        """
        tiered = circumstances.tiered
        cluster, view, topics = tiered.listed.cluster, tiered.listed.view, tiered.topics
        is_same = circumstances == self._circumstances
        settled = self._observed if is_same else {}
        observed: dict[TopicPartition, tuple[Leadership, Observation]] = {}
        followed: list[FollowedPartition] = []
        held_back: list[FollowedPartition] = []
        last = self._last_scan if is_same else None
        # Both comparisons pass over objects that are the same without a call for each.
        if last is not None and files == last.files and (bounds is last.bounds or bounds == last.bounds):
            return self._observed, last.followed, held_back
        for local_log, pins in files:
            name = _name(local_log)
            if (unchanged := settled.get(name)) is not None:
                seen, found = unchanged[1], bounds[name]
                # Identity is asked first: a dataclass compares itself field by field even with itself.
                if (
                    seen.log is local_log
                    and (seen.bounds is found or seen.bounds == found)
                    and seen.pins == pins
                ):
                    observed[name] = unchanged
                    continue
            replica, topic = view.replicas[name], topics[name.topic]
            if not replica.is_leader or (
                circumstances.left_alone
                and topic_key(identify(cluster, local_log.partition)) in circumstances.left_alone
            ):
                followed.append(FollowedPartition(identify(cluster, local_log.partition), local_log, pins))
                continue
            found = bounds[name]
            overtaken = _why_overtaken(local_log, replica.leader_epoch)
            if overtaken or not isinstance(found, LogBounds):
                problems[local_log.partition.path] = overtaken or str(found)
                unclear.add(name)
            elif self._registry.is_known:
                counted = circumstances.counts[name.topic, local_log.partition.topic_id]
                topic = topic if name.partition < counted else _untrimmed(topic)
                earlier = self._observed_under(name, cluster, replica)
                if earlier is None or not _shows(earlier[1], local_log, found, topic, pins):
                    earlier = (
                        Leadership(identify(cluster, local_log.partition), replica.leader_epoch),
                        Observation(local_log, found, topic, pins, scan_began_at, scan_number=scan_number),
                    )
                observed[name] = earlier
                continue
            held_back.append(FollowedPartition(identify(cluster, local_log.partition), local_log, pins))
        return observed, followed, held_back

    def _listed_by(self, cluster: str, scan: LogDirScan, view: ClusterView) -> ListedPartitions:
        if self._listed is None or not self._listed.is_of(cluster, scan.partitions, view):
            self._listed = ListedPartitions.of(cluster, scan.partitions, view)
        return self._listed

    def _tiered_by(self, listed: ListedPartitions, topics: Mapping[str, TopicConfig]) -> TieredPartitions:
        if self._tiered is None or self._tiered.listed is not listed or self._tiered.topics is not topics:
            self._tiered = TieredPartitions.of(listed, topics)
        return self._tiered

    def _unrecorded_topics(self, listed: ListedPartitions) -> dict[TopicKey, TopicConfig]:
        if not (self._registry.is_known and self._config.cloud_storage_enabled):
            return {}
        known = {key: self._registry.manifest(key) for key in listed.led_topics}
        return {
            key: self._topics[key.topic]
            for key, manifest in known.items()
            if (manifest is None or manifest.defaults is None) and key.topic not in self._hidden_topics
        }

    def _remote_delete(self, listed: ListedPartitions) -> dict[TopicKey, bool]:
        """
        Return for each topic whether deleting it deletes its objects.

        Only topics whose configuration the broker returned are in it. A topic that is being deleted has
        no configuration any more; its last known one counts.

        A scan asks for the topics' ids first, and for their settings by name after that. A topic that is
        created again in between has the old id and the new settings in one scan. Where the next scan still
        finds the id, the settings were those of that topic. Until then its archive is not said to go.
        """
        found = {
            key: self._topics[key.topic].remote_delete
            for key in listed.led_topics
            if key.topic in self._described_topics
        }
        before, self._found_to_go = self._found_to_go, {key for key, goes in found.items() if goes}
        return {key: goes for key, goes in found.items() if not goes or key in before}

    def _refused(self, view: ClusterView) -> set[str]:
        """
        Return the archived topics on disk of which the broker tells this user nothing.

        The bucket says which topics are archived: a cluster has others that this user is meant not to see. It
        is asked by name, because no broker tells the id, and not all directories have it. A topic that the
        file takes out of archiving is not in the result.
        """
        if not view.refused:
            return set()
        return {
            key.topic
            for manifest in self._registry.manifests
            if (key := manifest.key).topic in view.refused
            and manifest.partition_count
            and not self._registry.is_closed(key)
            and self._config.topic(key.topic, _WRITTEN, manifest).remote_write
        }

    def _why_closed(self, key: TopicKey) -> str:
        manifest = self._registry.manifest(key)
        assert manifest is not None, "it is known to be closed"
        if manifest.moved_to:
            return (
                f"the archive was moved to {manifest.moved_to}: set that bucket in the configuration, and "
                "restart tieringd"
            )
        return f"the archive is {manifest.lifecycle.value}, so nothing is added to it"

    def _observed_under(
        self, name: TopicPartition, cluster: str, replica: Replica
    ) -> tuple[Leadership, Observation] | None:
        """Return a partition's last observation, if it was made under the same leadership."""
        earlier = self._observed.get(name)
        if earlier is None:
            return None
        leadership, _ = earlier
        is_same = leadership.leader_epoch == replica.leader_epoch and leadership.partition.cluster == cluster
        return earlier if is_same else None

    def _remember(
        self, observed: dict[TopicPartition, tuple[Leadership, Observation]], circumstances: _Circumstances
    ) -> None:
        """Keep the observations; `_wanted` stays the same object where all of them are the same."""
        before, self._observed, self._circumstances = self._observed, observed, circumstances
        if before is observed:
            return
        if len(before) != len(observed) or not all(map(is_, before.values(), observed.values())):
            self._wanted = dict(observed.values())

    async def _topic_configs(
        self, cluster: str, topic_ids: Mapping[str, str], problems: dict[str, str]
    ) -> dict[str, TopicConfig]:
        """
        Return the topics' configurations by name; the same object while all of them are the same.

        A topic whose settings this user may not read becomes a problem, and is not archived in this round:
        its settings may switch archiving off.

        The broker leaves out a topic that it does not know, as while it is created or deleted. Its last known
        settings count. Where there are none, nothing of it is deleted.

        Raises:
            BrokerDenied: This user may read the settings of no topic.
        """
        names = sorted(topic_ids)
        from_broker = await self._broker.topic_configs(names)
        refusals = [one for one in from_broker.values() if isinstance(one, BrokerDenied)]
        if refusals and len(refusals) == len(names):
            # This user lacks the right as such, and nothing would be archived.
            raise refusals[0]
        before, self._resolved = self._resolved, {}
        told_before, self._told = self._told, {}
        configs: dict[str, TopicConfig] = {}
        hidden = set[str]()
        for name in names:
            key = TopicKey(cluster, name, topic_ids[name])
            settings = from_broker.get(name, told_before.get(key))
            if isinstance(settings, BrokerDenied):
                problems[f"topic {name}"] = str(settings)
                hidden.add(name)
                configs[name] = self._hidden_config(name)
                if key in told_before:
                    self._told[key] = told_before[key]
                continue
            recorded = self._registry.manifest(key)
            known = before.get(name)
            # An unchanged configuration stays the same object, because it is compared for each partition.
            if known is None or (known[0], known[1]) != (settings, recorded):
                config = self._config.topic(name, settings or {}, recorded)
                if settings is None:
                    config = _deleting_nothing(config)
                earlier = self._topics.get(name)
                copied = None if settings is None else dict(settings)
                known = (copied, recorded, earlier if earlier == config else config)
            self._resolved[name] = known
            if known[0] is not None:
                self._told[key] = known[0]
            configs[name] = known[2]
        self._hidden_topics = frozenset(hidden)
        self._described_topics = frozenset(from_broker) - hidden
        if len(configs) != len(self._topics) or not all(
            config is self._topics.get(name) for name, config in configs.items()
        ):
            self._topics = configs
        faults = {fault for config in self._topics.values() for fault in config.problems}
        for fault in sorted(faults - self._topic_problems):
            log.warning("topic configuration ignored in part", fault=fault)
        self._topic_problems = faults
        return self._topics

    def _hidden_config(self, name: str) -> TopicConfig:
        """
        Return the configuration of a topic whose settings this user may not read.

        Clients read its archive, unless the file or the last settings that could be read say no: without the
        archive they would skip records. The cluster's default does not count, as the topic may have its own.
        """
        is_known = name in self._described_topics or name in self._hidden_topics
        earlier = self._topics[name] if is_known else self._config.topic(name, _READ)
        is_read = earlier.remote_read and self._config.cloud_storage_enabled
        config = replace(earlier, remote_write=False, remote_read=is_read, problems=())
        return earlier if config == earlier else config

    def _counts_on_record(self, keys: Collection[TopicKey]) -> dict[tuple[str, str], int]:
        """
        Return the number of partitions of each topic, by name and id, that its topic manifest counts.

        A topic manifest can be in the bucket and count fewer partitions than there are: another broker wrote
        it for its own, or it only records what the topic began with.
        """
        known = {key: self._registry.manifest(key) for key in keys}
        return {
            (key.topic, key.topic_id): manifest.partition_count if manifest else 0
            for key, manifest in known.items()
        }

    def _read_all(
        self, partitions: tuple[LocalPartition, ...], problems: dict[str, str]
    ) -> tuple[list[_File], set[TopicPartition]]:
        """
        Read the files of all archived partitions; see `_read_files`.

        The same list is returned while all files are the same. A partition of which nothing was reported
        since the last scan has the files of that scan, and is not looked at.
        """
        last, self._read = self._read, None
        pins_of = self._pinner.listed()
        files: list[_File] | None = None
        if last is not None and last.partitions is partitions and pins_of.is_empty:
            files = self._read_again(last, self._layout.still(last.places.keys()), pins_of)
        if last is not None and files is not None:
            places, unclear = last.places, set[TopicPartition]()
        else:
            places = {one.path: place for place, one in enumerate(partitions)}
            files, unclear = self._read_files(partitions, problems, pins_of)
        if not unclear and pins_of.is_empty:
            self._read = _ReadFiles(partitions, places, files)
        return files, unclear

    def _read_again(
        self, last: _ReadFiles, still: AbstractSet[str], pins_of: Callable[[LocalPartition], PinnedLog]
    ) -> list[_File] | None:
        """Return the files of *last*, read again but for those in *still*; None if one cannot be read."""
        paths = (last.places.keys() - still) | (last.read_since & last.places.keys())
        places = [last.places[path] for path in paths]
        found, unclear = self._read_files([last.partitions[place] for place in places], {}, pins_of)
        if unclear:
            return None
        changed = {
            place: file
            for place, file in zip(places, found, strict=True)
            if file[0] is not last.files[place][0] or file[1] != last.files[place][1]
        }
        if not changed:
            return last.files
        return [changed.get(place, file) for place, file in enumerate(last.files)]

    def _read_some(
        self, partitions: Sequence[LocalPartition], problems: dict[str, str]
    ) -> tuple[list[_File], set[TopicPartition]]:
        """Read the files of some partitions; see `_read_files`."""
        return self._read_files(partitions, problems, self._pinner.listed())

    def _read_files(
        self,
        partitions: Sequence[LocalPartition],
        problems: dict[str, str],
        pins_of: Callable[[LocalPartition], PinnedLog],
    ) -> tuple[list[_File], set[TopicPartition]]:
        """Scan each partition's directory; an unreadable one becomes a problem and does not end the scan."""
        files: list[_File] = []
        unclear: set[TopicPartition] = set()
        read_log, translations = self._layout.read_log, self._translations
        for partition in partitions:
            try:
                # Pins are read first: a file that the broker deletes in between is then at least among the
                # pins.
                pinned = pins_of(partition)
                local_log = read_log(partition, translations.get(partition.path, ()))
                if pinned is not NO_PINS:
                    pinned = with_true_ends(local_log, pinned, self._pin_ends.of)
                files.append(judged(local_log, pinned))
            except (LocalFileError, CorruptDataError) as error:
                problems[partition.path] = str(error)
                unclear.add(partition.topic_partition)
        return files, unclear

    async def _files_of(
        self, tiered: TieredPartitions, problems: dict[str, str]
    ) -> tuple[list[_File], set[TopicPartition]]:
        """Read the logs of archived topics. Returns them, and the partitions that nothing is known of."""
        # The broker was asked for its leadership before this, so these reports include all that it did to its
        # files before it led.
        self._layout.note_changes(self._reports)
        self._pin_ends.begin_scan()
        files, unclear = await asyncio.to_thread(self._read_all, tiered.archived, problems)
        if translated := await self._translated(tiered.listed.cluster, tiered.archived, unclear, problems):
            files = files + translated
        names = (one.topic_partition for one in tiered.untiered)
        return files, unclear | {name for name in names if name.topic in self._hidden_topics}

    async def _translated(
        self,
        cluster: str,
        partitions: Sequence[LocalPartition],
        unclear: set[TopicPartition],
        problems: dict[str, str],
    ) -> list[_File]:
        """Read logs again whose offsets only the archive can translate: a Redpanda log without its head."""
        if not (unclear or self._translations):
            return []
        on_disk = {one.path for one in partitions}
        self._translations = {path: known for path, known in self._translations.items() if path in on_disk}
        again: list[LocalPartition] = []
        for one in partitions:
            if one.topic_partition in unclear and self._layout.needs_archive(one):
                try:
                    manifest = (await self._manifests.load(identify(cluster, one))).manifest
                except (CorruptDataError, StorageError, StorageUnavailable) as error:
                    problems[one.path] = f"{problems[one.path]}; the archive cannot tell: {error}"
                    continue
                if manifest is not None and manifest.translation is not None:
                    self._translations[one.path] = (manifest.translation,)
                    again.append(one)
        if not again:
            return []
        for one in again:
            problems.pop(one.path, None)
            unclear.discard(one.topic_partition)
        files, still_unclear = await asyncio.to_thread(self._read_some, again, problems)
        unclear |= still_unclear
        return files

    def _report(self, problems: Mapping[str, str], scan: LogDirScan) -> None:
        """Log each problem when it is new, and when it is over."""
        for path in sorted(problems.keys() - self._problems.keys()):
            log.error("left out of this round", path=path, reason=problems[path])
        for path in sorted(self._problems.keys() - problems.keys()):
            log.info("readable again", path=path)
        self._problems = dict(problems)
        self._metrics.unreadable_paths.set(len(problems))
        if not self._has_scanned and scan.left_alone:
            log.info("directories left alone", paths=sorted(scan.left_alone))
        self._has_scanned = True


def _name(local_log: LocalLog) -> TopicPartition:
    return local_log.partition.topic_partition


def _upload_share(view: ClusterView, topics: Collection[str], *, led: int) -> float:
    """Return the part of the cluster's partitions of *topics* that this broker leads; 0 without topics."""
    in_cluster = sum(view.partition_counts[one] for one in topics)
    return led / in_cluster if in_cluster else 0.0


def _managed(
    tiered: TieredPartitions, *, closed: Collection[TopicKey], unclear: Collection[TopicPartition]
) -> dict[TopicKey, TopicConfig]:
    """
    Return the topics whose retention this daemon manages.

    Where the archive is *closed* for this cluster, the cluster that continues it manages the retention. A
    first partition in *unclear* was not read: it may be of another topic by now. Where tieringd never trims
    the log, only the broker's own retention deletes from it, and stays.
    """
    return {
        key: topic
        for key in tiered.listed.led_topics
        if (topic := tiered.topics[key.topic]).managed_retention
        and not topic.never_trimmed_because
        and key in tiered.keys
        and key not in closed
        and TopicPartition(key.topic, 0) not in unclear
    }


def _deleting_nothing(topic: TopicConfig) -> TopicConfig:
    """
    Return the configuration of a topic whose settings were never told, resolved by the defaults as *topic*.

    It may be compacted, so nothing of it is merged. What *topic* says of problems rests on the defaults.
    """
    return replace(
        topic,
        never_trimmed_because=topic.never_trimmed_because or _UNTOLD,
        total=replace(topic.total, deletes=False),
        merging=replace(topic.merging, is_enabled=False),
        problems=(),
    )


def _untrimmed(topic: TopicConfig) -> TopicConfig:
    """Return the configuration of a partition that is not trimmed before a topic manifest counts it."""
    return topic if topic.never_trimmed_because else replace(topic, never_trimmed_because=_NOT_ON_RECORD)


def _led_elsewhere(view: ClusterView, followed: Sequence[FollowedPartition]) -> int:
    """Return how many of *followed* another broker leads: others are paused or closed for archiving."""
    return sum(not view.replicas[one.log.partition.topic_partition].is_leader for one in followed)


def _why_overtaken(log: LocalLog, leader_epoch: int) -> str:
    """Return why the files of *log* are newer than *leader_epoch*; empty where they are not."""
    if log.epochs and log.epochs[-1][0] > leader_epoch:
        return (
            f"the files of the partition have leader epoch {log.epochs[-1][0]}, but this broker was last "
            f"seen leading it under epoch {leader_epoch}: this scan is discarded"
        )
    return ""


def _shows(
    seen: Observation, local_log: LocalLog, bounds: LogBounds, topic: TopicConfig, pins: tuple[Pin, ...]
) -> bool:
    """Say whether *seen* equals an observation of these parts, so that no new one is needed."""
    return (
        (seen.log is local_log or seen.log == local_log)
        and seen.bounds == bounds
        and (seen.topic is topic or seen.topic == topic)
        and seen.pins == pins
    )
