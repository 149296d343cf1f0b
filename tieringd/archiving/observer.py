"""
The observer: one look at everything, for all partitions together.

Each round it reads the log directories, and asks the broker for leadership, topic configuration
and the bounds of the logs. What could not be looked at is named, and never taken for absent.
The object store is not asked: a round does not wait for it.

A look at a partition is of one leader epoch, or it is thrown away. Leadership is asked first, then the
files are read, and at last the broker gives the bounds under just that epoch, or refuses. Epochs only grow,
so the files in between are of the same one. A daemon that is stopped in the middle of a look, while
leadership goes away and comes back, acts on nothing of it.

An `Observation` is what one round says of one partition. Observations are numbered, because an archiver may
act on one several times: for each batch of uploads, for each offered change, and when the disk needs room.
A decision that takes two observations takes two different numbers.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from operator import is_
from typing import TYPE_CHECKING

import structlog

from tieringd.errors import CorruptDataError, LocalFileError, StorageError, StorageUnavailable
from tieringd.formats.object_keys import TopicKey, topic_key
from tieringd.model.partition import Leadership, LogBounds, TopicIdPartition
from tieringd.policies.pinning import judged, with_pins

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tieringd.archive.manifest_store import ManifestStore
    from tieringd.archiving.pinner import Pinner
    from tieringd.broker.base import Broker
    from tieringd.broker.layout import Layout
    from tieringd.broker.log_dir import LogDirScan
    from tieringd.config import Config, TopicConfig
    from tieringd.formats.topic_manifest import TieringDefaults
    from tieringd.metrics import Metrics
    from tieringd.model.local_log import LocalLog, LocalPartition
    from tieringd.model.offset_translation import OffsetTranslation
    from tieringd.model.partition import ClusterView, Replica, TopicPartition
    from tieringd.policies.pinning import Pin
    from tieringd.topics.topic_registry import TopicRegistry


log = structlog.get_logger(__name__)

_NOT_ON_RECORD = "its topic manifest is not in the bucket yet, and a restore finds topics by that"
"""Why nothing of a topic is trimmed yet."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A partition's files, bounds and configuration, all read in one round."""

    log: LocalLog
    """The broker's own files."""
    bounds: LogBounds
    topic: TopicConfig
    pins: tuple[Pin, ...] = ()
    looked_at: float = field(default=math.inf, compare=False)
    """When the look began, in loop time: what was done later may not show in it."""
    look: int = field(kw_only=True, compare=False)
    """The number of the look; a later look has a higher one."""
    uploadable: LocalLog = field(init=False)
    """The broker's files, and before them those that only pins hold."""

    def __post_init__(self) -> None:
        log = replace(self.log, segments=with_pins(self.log, self.pins)) if self.pins else self.log
        object.__setattr__(self, "uploadable", log)

    def renumbered(self, look: int, *, looked_at: float = math.inf) -> Observation:
        """Return this observation as a later look made it again: look number *look* found nothing new."""
        return replace(self, look=look, looked_at=looked_at)

    def shows_same(self, other: Observation | None) -> bool:
        """Say whether no look found a change between this observation and *other*; compares no files."""
        return other is not None and (
            self.log is other.log
            and self.bounds is other.bounds
            and self.topic is other.topic
            and self.pins is other.pins
        )


@dataclass(frozen=True, slots=True)
class Followed:
    """A partition of an archived topic that is not archived from here, at least not in this round."""

    partition: TopicIdPartition
    log: LocalLog
    pins: tuple[Pin, ...]


@dataclass(frozen=True, slots=True)
class World:
    """What one round saw."""

    cluster: str
    wanted: Mapping[Leadership, Observation]
    """An observation for each partition to archive; the same object again where all of them are the same."""
    followed: tuple[Followed, ...]
    """Those that another broker leads, or that are paused."""
    problems: Mapping[str, str]
    """Why a path or partition was left out of this round, by its name."""
    held_back: tuple[Followed, ...] = ()
    """Those that this broker leads, of which something is not known yet that archiving needs."""
    unnamed: tuple[LocalPartition, ...] = ()
    """Those on disk that the cluster does not tell of, as when they are new, or on their way out."""
    untiered: tuple[LocalPartition, ...] = ()
    """Those of topics that are not archived."""
    first_seen: Mapping[TopicKey, TopicConfig] = field(default_factory=dict)
    """Topics whose partition 0 this broker leads, and of which the bucket has no `defaults` yet."""
    defaults: TieringDefaults | None = None
    """The cluster's values at the time of the look; set where anything is first seen."""
    managed: Mapping[TopicKey, TopicConfig] = field(default_factory=dict)
    """Topics whose retention this daemon is to manage: it leads their partition 0."""
    remote_delete: Mapping[TopicKey, bool] = field(default_factory=dict)
    """What the topics whose partition 0 this broker leads say of their deletion, as far as it was told."""
    paused: frozenset[TopicKey] = frozenset()
    unclear: frozenset[TopicPartition] = frozenset()
    """Partitions that could not be looked at: what is known of them stays as it is."""
    local: tuple[LocalPartition, ...] = ()
    """All on this broker that the cluster tells of, of whatever topic."""
    topics: Mapping[str, TopicConfig] = field(default_factory=dict)
    """What is configured for their topics, by name."""
    look: int = 0
    """The number of this look."""
    looked_at: float = math.inf
    """When this look began, in loop time."""

    def confirmed(self, seen: Observation) -> Observation:
        """
        Return *seen*, one of `wanted`, under the number of this look, which found it again.

        An observation that stays the same keeps its first number in `wanted`: of ten thousand partitions
        nearly all are at rest, and only an archiver that acts has to know how often it was found.
        """
        return seen if seen.look >= self.look else seen.renumbered(self.look, looked_at=self.looked_at)


class Observer:
    """
    Look at the log directories and the broker.

    It remembers what it has reported, and the last observation of each partition: one that is as
    it was is handed on as the same object, so that an archiver knows that nothing is new.
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
    ) -> None:
        self._config = config
        self._log_dirs = tuple(str(path) for path in config.broker.log_dirs)
        self._broker = broker
        self._metrics = metrics
        self._pinner = pinner
        self._registry = registry
        self._manifests = manifests
        self._layout = layout
        self._translations: dict[str, tuple[OffsetTranslation, ...]] = {}
        self._observed: dict[TopicPartition, tuple[Leadership, Observation]] = {}
        self._wanted: dict[Leadership, Observation] = {}
        """The observations in `_observed`, as the last look handed them on."""
        # A look remembers files for the next one, so there is one at a time.
        self._looking = asyncio.Lock()
        self._topics: dict[str, TopicConfig] = {}
        self._problems: dict[str, str] = {}
        self._topic_problems: set[str] = set()
        self._told: frozenset[str] = frozenset()
        """The topics of which the broker told the configuration at the last look."""
        self._has_looked = False
        self._looks = 0

    def set_config(self, config: Config) -> None:
        """Look with *config* from the next look on; the log directories stay as they were."""
        self._config = config

    @property
    def problems(self) -> Mapping[str, str]:
        """Return what the last look could not see, and why."""
        return dict(self._problems)

    @property
    def log_dir_fault(self) -> str:
        """Return why the last look could not read a whole log directory; empty when it read them all."""
        paths = (path for log_dir in self._log_dirs for path in (log_dir, f"{log_dir}/meta.properties"))
        return next((self._problems[path] for path in paths if path in self._problems), "")

    async def look(self) -> World:
        """
        Read the log directories and ask the broker, once for all partitions.

        Raises:
            BrokerUnavailable: The broker does not answer; archivers go on with what they have.
            BrokerDenied: The broker refuses to answer.
        """
        async with self._looking:
            return await self._look()

    async def look_again(self, paths: Collection[str]) -> dict[Leadership, Observation] | None:
        """
        Look at the files and bounds of some partitions that the last look found to be archived.

        The price is that of these partitions alone, so it is for those in which a segment was just
        closed. Configuration is as the last look found it, and so is leadership: the broker is asked for
        the bounds under that leader epoch. None when that will not do: a path is another's, its leader
        epochs have changed, it is led under another epoch, or it cannot be read.

        Raises:
            BrokerUnavailable: The broker does not answer.
            BrokerDenied: The broker refuses to answer.
        """
        async with self._looking:
            look, looked_at = self._next_look()
            known = [one for one in self._observed.values() if one[1].log.partition.path in paths]
            if len(known) != len(paths):
                return None
            partitions = [seen.log.partition for _, seen in known]
            files, unclear = await asyncio.to_thread(self._read_files, partitions, {})
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
                again[leadership] = Observation(local_log, found, earlier.topic, pins, looked_at, look=look)
            self._observed |= {one.partition.topic_partition: (one, seen) for one, seen in again.items()}
            self._wanted = self._wanted | again
            return again

    def _next_look(self) -> tuple[int, float]:
        """Return the number of a look that begins now, and the time of the loop."""
        self._looks += 1
        return self._looks, asyncio.get_running_loop().time()

    async def _look(self) -> World:
        look, looked_at = self._next_look()
        scan = await asyncio.to_thread(self._layout.scan, self._log_dirs)
        problems: dict[str, str] = {problem.path: str(problem) for problem in scan.problems}
        cluster = await self._broker.cluster_id()
        view = await self._broker.replicas(scan.partitions)
        ours = [
            _with_topic_id(one, view.topic_ids.get(one.topic_partition.topic, one.topic_id))
            for one in scan.partitions
            if one.topic_partition in view.replicas
        ]
        topics = await self._topic_configs(cluster, ours)
        archived = [one for one in ours if topics[one.topic_partition.topic].remote_write]
        files, unclear = await asyncio.to_thread(self._read_files, archived, problems)
        files += await self._translated(cluster, archived, unclear, problems)
        led = [one for one, _ in files if view.replicas[one.partition.topic_partition].is_leader]
        bounds = await self._broker.log_bounds(
            led,
            leader_epochs={name: replica.leader_epoch for name, replica in view.replicas.items()},
        )
        observed: dict[TopicPartition, tuple[Leadership, Observation]] = {}
        followed: list[Followed] = []
        held_back: list[Followed] = []
        managed: dict[TopicKey, TopicConfig] = {}
        topic_ids = {(one.topic_partition.topic, one.topic_id) for one in archived}
        keys = {TopicKey(cluster, *identity) for identity in topic_ids}
        paused = {key for key in keys if self._registry.is_paused(key)}
        closed = {key for key in keys if self._registry.is_closed(key)}
        left_alone = paused | closed
        problems |= {f"topic {key.topic} ({key.topic_id})": self._why_closed(key) for key in closed}
        for local_log, pins in files:
            name = local_log.partition.topic_partition
            replica, topic = view.replicas[name], topics[name.topic]
            if replica.is_leader and name.partition == 0 and topic.managed_retention:
                key = topic_key(_identify(cluster, local_log.partition))
                # Where the archive is closed here, whoever goes on with it manages the retention.
                if key not in closed:
                    managed[key] = topic
            if not replica.is_leader or (
                left_alone and topic_key(_identify(cluster, local_log.partition)) in left_alone
            ):
                followed.append(Followed(_identify(cluster, local_log.partition), local_log, pins))
                continue
            found = bounds[name]
            overtaken = _why_overtaken(local_log, replica.leader_epoch)
            if overtaken or not isinstance(found, LogBounds):
                problems[local_log.partition.path] = overtaken or str(found)
                unclear.add(name)
            elif self._registry.is_known:
                earlier = self._observed_under(name, cluster, replica)
                if earlier is None or not _shows(earlier[1], local_log, found, topic, pins):
                    earlier = (
                        Leadership(_identify(cluster, local_log.partition), replica.leader_epoch),
                        Observation(local_log, found, topic, pins, looked_at, look=look),
                    )
                observed[name] = earlier
                continue
            held_back.append(Followed(_identify(cluster, local_log.partition), local_log, pins))
        self._remember(observed)
        self._report(problems, scan)
        archived_topics = {one.topic_partition.topic for one in archived}
        in_cluster = sum(view.partition_counts[name] for name in archived_topics)
        self._metrics.followed_partitions.set(len(followed))
        self._metrics.upload_share.set(len(led) / in_cluster if in_cluster else 0.0)
        self._metrics.paused_topics.set(len(paused))
        return World(
            cluster,
            self._wanted,
            tuple(followed),
            problems,
            tuple(held_back),
            tuple(one for one in scan.partitions if one.topic_partition not in view.replicas),
            tuple(one for one in ours if not topics[one.topic_partition.topic].remote_write),
            self._first_seen(cluster, ours, view),
            self._config.tiering_defaults,
            managed,
            self._remote_delete(cluster, ours, view),
            frozenset(paused),
            frozenset(unclear),
            tuple(ours),
            topics,
            look,
            looked_at,
        )

    def _first_seen(
        self, cluster: str, partitions: Sequence[LocalPartition], view: ClusterView
    ) -> dict[TopicKey, TopicConfig]:
        if not (self._registry.is_known and self._config.cloud_storage_enabled):
            return {}
        keys = [
            topic_key(_identify(cluster, one))
            for one in partitions
            if one.topic_partition.partition == 0 and view.replicas[one.topic_partition].is_leader
        ]
        known = {key: self._registry.manifest(key) for key in keys}
        return {
            key: self._topics[key.topic]
            for key, manifest in known.items()
            if manifest is None or manifest.defaults is None
        }

    def _remote_delete(
        self, cluster: str, partitions: Sequence[LocalPartition], view: ClusterView
    ) -> dict[TopicKey, bool]:
        """
        Return whether deleting a topic deletes its objects, of topics whose configuration was told.

        One that is being deleted has none any more, and what it was is what counts.
        """
        found: dict[TopicKey, bool] = {}
        for one in partitions:
            name = one.topic_partition
            if name.partition or name.topic not in self._told or not view.replicas[name].is_leader:
                continue
            found[topic_key(_identify(cluster, one))] = self._topics[name.topic].remote_delete
        return found

    def _why_closed(self, key: TopicKey) -> str:
        manifest = self._registry.manifest(key)
        assert manifest is not None, "it is known to be closed"
        if manifest.moved_to:
            return (
                f"its archive was moved to {manifest.moved_to}: name that in the configuration, and restart "
                "tieringd"
            )
        return f"its archive is {manifest.lifecycle.value}, so nothing is added to it"

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

    def _remember(self, observed: dict[TopicPartition, tuple[Leadership, Observation]]) -> None:
        """Keep what was observed; `_wanted` stays the same object where all of it is the same."""
        before, self._observed = self._observed, observed
        if len(before) != len(observed) or not all(map(is_, before.values(), observed.values())):
            self._wanted = dict(observed.values())

    async def _topic_configs(
        self, cluster: str, partitions: Sequence[LocalPartition]
    ) -> dict[str, TopicConfig]:
        keys = {one.topic_partition.topic: one.topic_id for one in partitions}
        names = sorted(keys)
        from_broker = await self._broker.topic_configs(names)
        self._told = frozenset(from_broker)
        configs: dict[str, TopicConfig] = {}
        for name in names:
            recorded = self._registry.manifest(TopicKey(cluster, name, keys[name]))
            config = self._config.topic(name, from_broker.get(name, {}), recorded)
            if recorded is None and not config.never_trimmed_because:
                config = replace(config, never_trimmed_because=_NOT_ON_RECORD)
            configs[name] = config
        # One that is as it was stays the same object: it is compared for each of its partitions.
        before, self._topics = self._topics, {}
        for name, new in configs.items():
            known = before.get(name)
            self._topics[name] = known if known is not None and known == new else new
        faults = {fault for config in configs.values() for fault in config.problems}
        for fault in sorted(faults - self._topic_problems):
            log.warning("topic configuration ignored in part", fault=fault)
        self._topic_problems = faults
        return self._topics

    def _read_files(
        self, partitions: Sequence[LocalPartition], problems: dict[str, str]
    ) -> tuple[list[tuple[LocalLog, tuple[Pin, ...]]], set[TopicPartition]]:
        """Scan each partition's directory; one that cannot be read is a problem, not the end."""
        files: list[tuple[LocalLog, tuple[Pin, ...]]] = []
        unclear: set[TopicPartition] = set()
        for partition in partitions:
            try:
                # The pins first: what the broker deletes in between is then at least in them.
                pinned = self._pinner.pins_of(partition)
                known = self._translations.get(partition.path, ())
                files.append(judged(self._layout.read_log(partition, known), pinned))
            except (LocalFileError, CorruptDataError) as error:
                problems[partition.path] = str(error)
                unclear.add(partition.topic_partition)
        return files, unclear

    async def _translated(
        self,
        cluster: str,
        partitions: Sequence[LocalPartition],
        unclear: set[TopicPartition],
        problems: dict[str, str],
    ) -> list[tuple[LocalLog, tuple[Pin, ...]]]:
        """Look again at logs whose offsets only the archive can tell: a Redpanda log without its head."""
        on_disk = {one.path for one in partitions}
        self._translations = {path: known for path, known in self._translations.items() if path in on_disk}
        again: list[LocalPartition] = []
        for one in partitions:
            if one.topic_partition in unclear and self._layout.needs_archive(one):
                try:
                    manifest = (await self._manifests.load(_identify(cluster, one))).manifest
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
        files, still_unclear = await asyncio.to_thread(self._read_files, again, problems)
        unclear |= still_unclear
        return files

    def _report(self, problems: Mapping[str, str], scan: LogDirScan) -> None:
        """Say what is in the way when it is new, and when it is over."""
        for path in sorted(problems.keys() - self._problems.keys()):
            log.error("left out of this round", path=path, reason=problems[path])
        for path in sorted(self._problems.keys() - problems.keys()):
            log.info("readable again", path=path)
        self._problems = dict(problems)
        self._metrics.unreadable_paths.set(len(problems))
        if not self._has_looked and scan.left_alone:
            log.info("directories left alone", paths=sorted(scan.left_alone))
        self._has_looked = True


def _why_overtaken(log: LocalLog, leader_epoch: int) -> str:
    """Return why *log* was not read under *leader_epoch*; empty where nothing says so."""
    if log.epochs and log.epochs[-1][0] > leader_epoch:
        return (
            f"its files are of leader epoch {log.epochs[-1][0]}, and this broker was seen to lead it under "
            f"epoch {leader_epoch}: this look is thrown away"
        )
    return ""


def _shows(
    seen: Observation, local_log: LocalLog, bounds: LogBounds, topic: TopicConfig, pins: tuple[Pin, ...]
) -> bool:
    """Say whether an observation is what one of these would be: that one need not be made."""
    return (
        (seen.log is local_log or seen.log == local_log)
        and seen.bounds == bounds
        and (seen.topic is topic or seen.topic == topic)
        and seen.pins == pins
    )


def _identify(cluster: str, partition: LocalPartition) -> TopicIdPartition:
    name = partition.topic_partition
    return TopicIdPartition(cluster, name.topic, partition.topic_id, name.partition)


def _with_topic_id(partition: LocalPartition, topic_id: str) -> LocalPartition:
    return partition if partition.topic_id == topic_id else replace(partition, topic_id=topic_id)
