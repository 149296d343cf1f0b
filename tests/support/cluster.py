"""
A cluster of several real brokers with a `tieringd run` beside each, and an operator's changes to it.

Plain functions and classes, independent of pytest. Elections, reassignments and new partitions use Kafka's
own admin messages. Daemons are real processes. A daemon that is started again has a new log file.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kio.schema.errors import ErrorCode

from tests.support.daemon import Daemon, kafka_config, write_config
from tieringd.broker.kafka_protocol import (
    INCREMENTAL_ALTER_CONFIGS,
    METADATA,
    ApiVersionRange,
    KafkaConnections,
    KafkaRequest,
    KafkaSettings,
)
from tieringd.errors import BrokerUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path
    from types import ModuleType, TracebackType

    from tests.support.kafka import KafkaBrokerProcess, KafkaCluster
    from tests.support.seaweedfs import SeaweedFS

_PATIENCE_SECONDS = 180
_POLL_SECONDS = 0.1
_ELECT_LEADERS = ApiVersionRange("ElectLeaders", 43, min_version=2, max_version=2)
_REASSIGN = ApiVersionRange("AlterPartitionReassignments", 45, min_version=0, max_version=0)
_CREATE_PARTITIONS = ApiVersionRange("CreatePartitions", 37, min_version=2, max_version=3)
_ALTER_REPLICA_LOG_DIRS = ApiVersionRange("AlterReplicaLogDirs", 34, min_version=2, max_version=2)
_WRITE_TXN_MARKERS = ApiVersionRange("WriteTxnMarkers", 27, min_version=1, max_version=1)
_PREFERRED = 0
_TIMEOUT = timedelta(seconds=60)
_TOPIC_RESOURCE = 2
_BROKER_RESOURCE = 4
_SET, _REMOVE = 0, 1

CLUSTER_PROPERTIES = {
    # Leaders move only when a test moves them.
    "auto.leader.rebalance.enable": "false",
    "min.insync.replicas": "1",
    # Defaults for topics without a setting of their own, for tests of effective settings.
    "log.retention.ms": "86400000",
    "unclean.leader.election.enable": "false",
}


class PartitionState(NamedTuple):
    """The leader and the replicas of a partition, as the cluster reports them."""

    leader: int
    """-1 without a leader."""
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


def _metadata_of(topic: str) -> Callable[[ModuleType], Any]:
    def build(module: ModuleType) -> Any:
        return module.MetadataRequest(
            topics=(module.MetadataRequestTopic(topic_id=None, name=topic),),
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        )

    return build


def _states(answer: Any) -> dict[int, PartitionState]:
    """Return the state of each partition in a Metadata answer with one topic."""
    (found,) = answer.topics
    return {
        int(one.partition_index): PartitionState(
            int(one.leader_id), tuple(map(int, one.replica_nodes)), tuple(map(int, one.isr_nodes))
        )
        for one in found.partitions
    }


class ClusterAdmin:
    """An operator's requests to a cluster. Belongs to the event loop that uses it."""

    def __init__(self, kafka: KafkaCluster, node_ids: Sequence[int] = ()) -> None:
        """Send requests only to these nodes, or to all without any. A paused node would block a request."""
        nodes = [kafka.brokers[node_id - 1] for node_id in node_ids] or kafka.brokers
        bootstrap = tuple(node.bootstrap for node in nodes)
        settings = KafkaSettings(
            bootstrap=bootstrap, client_id="tests", request_timeout_seconds=_TIMEOUT.total_seconds()
        )
        self._connections = KafkaConnections(settings)

    async def close(self) -> None:
        """Release connections."""
        await self._connections.close()

    async def partitions(self, topic: str) -> dict[int, PartitionState]:
        """Return the state of each partition of a topic; empty without such a topic."""
        return _states(await self._ask(METADATA, _metadata_of(topic)))

    async def until(
        self, topic: str, is_so: Callable[[PartitionState], object], what: str, *, number: int = 0
    ) -> PartitionState:
        """Wait until *is_so* is true for a partition's state, and return the state."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            state = (await self.partitions(topic)).get(number)
            if state is not None and is_so(state):
                return state
            assert time.monotonic() < deadline, f"it did not come that {what}: {topic}-{number} is {state}"
            await asyncio.sleep(_POLL_SECONDS)

    async def until_led_by(self, topic: str, node_id: int, *, number: int = 0) -> None:
        """Wait until a node leads a partition."""
        await self.until(topic, lambda one: one.leader == node_id, f"node {node_id} leads", number=number)

    async def until_in_sync(self, topic: str, *, number: int = 0) -> None:
        """Wait until every replica of a partition is in sync."""
        await self.until(
            topic, lambda one: set(one.in_sync) == set(one.replicas), "all are in sync", number=number
        )

    async def move_leader(self, topic: str, node_id: int, *, number: int = 0) -> None:
        """Make a node with a replica of a partition its preferred leader, and elect it."""
        state = (await self.partitions(topic))[number]
        others = [one for one in state.replicas if one != node_id]
        await self.reassign(topic, [node_id, *others], number=number)
        await self.until(topic, lambda one: node_id in one.in_sync, f"{node_id} is in sync", number=number)
        await self.elect_preferred(topic, number=number)
        await self.until_led_by(topic, node_id, number=number)

    async def elect_preferred(self, topic: str, *, number: int = 0) -> None:
        """Elect the first of a partition's replicas."""

        def build(module: ModuleType) -> Any:
            wanted = module.TopicPartitions(topic=topic, partitions=(number,))
            return module.ElectLeadersRequest(election_type=_PREFERRED, topic_partitions=(wanted,))

        answer = await self._ask(_ELECT_LEADERS, build)
        for result in answer.replica_election_results:
            for one in result.partition_result:
                assert one.error_code in {ErrorCode.none, ErrorCode.election_not_needed}, one

    async def reassign(self, topic: str, replicas: Sequence[int], *, number: int = 0) -> None:
        """Place a partition on *replicas*, the preferred leader first; return when only they hold it."""

        def build(module: ModuleType) -> Any:
            one = module.ReassignablePartition(partition_index=number, replicas=tuple(replicas))
            return module.AlterPartitionReassignmentsRequest(
                topics=(module.ReassignableTopic(name=topic, partitions=(one,)),)
            )

        answer = await self._ask(_REASSIGN, build)
        assert answer.error_code is ErrorCode.none, answer
        assert all(one.error_code is ErrorCode.none for t in answer.responses for one in t.partitions), answer
        wanted = tuple(replicas)
        await self.until(topic, lambda one: one.replicas == wanted, f"{wanted} hold it", number=number)

    async def move_log_dir(self, topic: str, directory: Path, *, number: int = 0) -> None:
        """Begin to move a partition into another log directory of this admin's first node."""

        def build(module: ModuleType) -> Any:
            moved = module.AlterReplicaLogDirTopic(name=topic, partitions=(number,))
            target = module.AlterReplicaLogDir(path=str(directory), topics=(moved,))
            return module.AlterReplicaLogDirsRequest(dirs=(target,))

        answer = await self._ask(_ALTER_REPLICA_LOG_DIRS, build)
        results = [each for one in answer.results for each in one.partitions]
        assert all(one.error_code is ErrorCode.none for one in results), answer

    async def add_partitions(self, topic: str, replicas: Sequence[Sequence[int]]) -> None:
        """Add a partition for each of *replicas*; return when every broker knows their leaders."""
        before = len(await self.partitions(topic))

        def build(module: ModuleType) -> Any:
            assignments = tuple(module.CreatePartitionsAssignment(broker_ids=tuple(one)) for one in replicas)
            grown = module.CreatePartitionsTopic(
                name=topic, count=before + len(replicas), assignments=assignments
            )
            return module.CreatePartitionsRequest(topics=(grown,), timeout=_TIMEOUT, validate_only=False)

        answer = await self._ask(_CREATE_PARTITIONS, build)
        assert all(one.error_code is ErrorCode.none for one in answer.results), answer
        for address in self._connections.bootstrap:
            await self._until_told(address, topic, before + len(replicas))

    async def _until_told(self, address: str, topic: str, count: int) -> None:
        """Wait until a broker knows the leaders of *count* partitions. A client may begin with any broker."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            answer = await self._connections.send(address, KafkaRequest(METADATA, _metadata_of(topic)))
            states = _states(answer)
            if sum(one.leader >= 0 for one in states.values()) == count:
                return
            assert time.monotonic() < deadline, f"{address} knows of {states}, and not of {count} partitions"
            await asyncio.sleep(_POLL_SECONDS)

    async def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        """Set some properties of a topic; the others stay as they are."""
        await self._alter(_TOPIC_RESOURCE, topic, settings)

    async def configure_broker(self, node_id: int, settings: Mapping[str, str | None]) -> None:
        """Set some dynamic properties of one broker, or remove those that are None."""
        address = self._connections.bootstrap[node_id - 1]
        await self._alter(_BROKER_RESOURCE, str(node_id), settings, address=address)

    async def _alter(
        self, kind: int, name: str, settings: Mapping[str, str | None], *, address: str | None = None
    ) -> None:
        def build(module: ModuleType) -> Any:
            configs = tuple(
                module.AlterableConfig(
                    name=key, config_operation=_REMOVE if value is None else _SET, value=value
                )
                for key, value in settings.items()
            )
            resource = module.AlterConfigsResource(resource_type=kind, resource_name=name, configs=configs)
            return module.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)

        request = KafkaRequest(INCREMENTAL_ALTER_CONFIGS, build)
        answer = (
            await self._ask(INCREMENTAL_ALTER_CONFIGS, build)
            if address is None
            else await self._connections.send(address, request)
        )
        assert all(one.error_code is ErrorCode.none for one in answer.responses), answer

    async def end_transaction(
        self, topic: str, numbers: Sequence[int], producer: tuple[int, int], *, is_committed: bool
    ) -> None:
        """
        Write the marker of a transaction into partitions, past its coordinator, as an operator may.

        *producer* is its id and epoch. This admin's first node must lead the partitions.
        """
        waiting = set(numbers)

        def build(module: ModuleType) -> Any:
            producer_id, producer_epoch = producer
            marker = module.WritableTxnMarker(
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                transaction_result=is_committed,
                topics=(module.WritableTxnMarkerTopic(name=topic, partition_indexes=tuple(sorted(waiting))),),
                coordinator_epoch=0,
            )
            return module.WriteTxnMarkersRequest(markers=(marker,))

        deadline = time.monotonic() + _PATIENCE_SECONDS
        while waiting:
            answer = await self._ask(_WRITE_TXN_MARKERS, build)
            results = [one for found in answer.markers for each in found.topics for one in each.partitions]
            waiting.difference_update(
                int(one.partition_index) for one in results if one.error_code is ErrorCode.none
            )
            # The metadata names a leader before its replica knows that it leads.
            late = {ErrorCode.none, ErrorCode.not_leader_or_follower}
            assert {one.error_code for one in results} <= late, answer
            assert time.monotonic() < deadline, answer
            await asyncio.sleep(_POLL_SECONDS if waiting else 0)

    async def _ask(self, api: ApiVersionRange, build: Callable[[ModuleType], Any]) -> Any:
        """Send a request to the first broker that answers."""
        failure: BrokerUnavailable | None = None
        for address in self._connections.bootstrap:
            try:
                return await self._connections.send(address, KafkaRequest(api, build))
            except BrokerUnavailable as error:
                failure = error
        assert failure is not None, "a cluster has brokers"
        raise failure


@asynccontextmanager
async def cluster_admin(kafka: KafkaCluster, *node_ids: int) -> AsyncIterator[ClusterAdmin]:
    """Open an admin in the context, for these nodes or for all."""
    admin = ClusterAdmin(kafka, node_ids)
    try:
        yield admin
    finally:
        await admin.close()


async def restart_broker(kafka: KafkaCluster, node_id: int, *, kill: bool = False) -> None:
    """Stop or kill one broker, and start it again; return when it sees all others."""
    node = kafka.brokers[node_id - 1]
    await (node.kill() if kill else node.stop())
    await start_broker(kafka, node)


async def start_broker(kafka: KafkaCluster, node: KafkaBrokerProcess) -> None:
    """Start a broker that is not running; return when it sees all others."""
    node.launch()
    await node.wait_until_ready(len(kafka.brokers))


class DaemonsBeside:
    """
    A daemon beside each broker of a cluster, all with one archive; `daemons[1]` is that of node 1.

    Leaving the context kills the daemons that still run.
    """

    def __init__(
        self,
        kafka: KafkaCluster,
        store: SeaweedFS | None,
        directory: Path,
        *,
        bucket: str = "",
        prefix: str = "",
        changes: Mapping[str, Any],
    ) -> None:
        """Write the configurations. Without *store*, *changes* have the properties of another store."""
        self._directory = directory
        self.kinds: dict[int, Callable[[Path, Path], Daemon]] = {}
        """What makes a node's daemon from its configuration and its log; `Daemon` where nothing is given."""
        self._runs: dict[int, list[Daemon]] = {}
        self._configs: dict[int, dict[str, Any]] = {
            node.node_id: kafka_config(
                kafka,
                store,
                directory / f"state-{node.node_id}",
                bucket=bucket,
                prefix=prefix,
                node_id=node.node_id,
                **changes,
            )
            for node in kafka.brokers
        }
        for node_id in self._configs:
            self._write(node_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node_id in self._runs:
            self.kill(node_id)

    def __getitem__(self, node_id: int) -> Daemon:
        return self._runs[node_id][-1]

    def config(self, node_id: int = 1) -> Path:
        """Return a node's configuration file. To read the archive, any node's file is good."""
        return self._directory / f"node-{node_id}.yaml"

    def configuration(self, node_id: int) -> Mapping[str, Any]:
        """Return a node's configuration."""
        return self._configs[node_id]

    def change(self, node_id: int, **changes: Any) -> None:
        """Change a node's configuration. Its daemon reads the change at its next launch."""
        self._configs[node_id] |= changes
        self._write(node_id)

    def launch(self, *node_ids: int) -> None:
        """Start the daemons beside these nodes, or all of them; return when they answer."""
        started = []
        for node_id in node_ids or self._configs:
            runs = self._runs.setdefault(node_id, [])
            output = self._directory / f"node-{node_id}-run-{len(runs)}.log"
            runs.append(self.kinds.get(node_id, Daemon)(self.config(node_id), output))
            runs[-1].launch()
            started.append(runs[-1])
        for daemon in started:
            daemon.wait_until_listening()

    def kill(self, node_id: int) -> None:
        """Kill a node's daemon, as a crash does, if it is running."""
        self[node_id].server.kill()

    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the log events with this text and these fields of all daemons, including ended ones."""
        daemons = [daemon for runs in self._runs.values() for daemon in runs]
        return [event for daemon in daemons for event in daemon.events(name, **fields)]

    def until_one(self, is_so: Callable[[Daemon], object], what: str) -> Daemon:
        """Wait until *is_so* is true for a running daemon, and return that daemon."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            running = [runs[-1] for runs in self._runs.values() if runs[-1].server.is_running]
            for daemon in running:
                if is_so(daemon):
                    return daemon
            assert time.monotonic() < deadline, f"it did not come that {what}:\n" + "\n".join(
                daemon.tail() for daemon in running
            )
            time.sleep(_POLL_SECONDS)

    def _write(self, node_id: int) -> None:
        write_config(self.config(node_id), self._configs[node_id])
