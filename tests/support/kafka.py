"""
Real Kafka brokers on loopback, for tests, the demo and benchmarks.

Plain functions and classes, independent of pytest. Each node is a KRaft broker and controller in one process,
with its log, configuration and data under the caller's directory. A cluster keeps no reference to the event
loop that started it.
"""

from __future__ import annotations

import asyncio
import base64
import signal
import subprocess
import time
import uuid
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as ClientPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.conn import create_conn
from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataRequest

from tests.support.class_data import kafka_archive, options_with
from tests.support.components import used
from tests.support.kafka_jars import KAFKA_VERSION, program, require_jars
from tests.support.ports import free_ports
from tests.support.processes import pause

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

_READY_TIMEOUT_SECONDS = 240
_STOP_TIMEOUT_SECONDS = 180
_POLL_SECONDS = 0.1

_PROPERTIES = {
    # Retention and deletion within a second instead of minutes.
    "log.retention.check.interval.ms": "500",
    "log.initial.task.delay.ms": "500",
    "log.segment.delete.delay.ms": "500",
    # Compaction within a second; tests that must not be compacted set min.compaction.lag.ms.
    "log.cleaner.backoff.ms": "500",
    # Internal topics as small as possible.
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",
    # Kafka's own session. On a busy machine a JVM may stand still for four seconds, and loses no leadership.
    "broker.session.timeout.ms": "9000",
    "broker.heartbeat.interval.ms": "500",
    "log.message.timestamp.after.max.ms": "9223372036854775807",
}

_ALONE = {
    # No other node reads the heartbeats and the no-op records, which are a third of an idle broker's CPU.
    "broker.heartbeat.interval.ms": "2000",
    "metadata.max.idle.interval.ms": "0",
}
"""Properties of a broker without others beside it, in place of those above."""


class KafkaStartError(RuntimeError):
    """A broker ended, or did not become ready in time. The message ends with the broker's log."""


@dataclass(frozen=True)
class Listener:
    """A listener in addition to the plain one, which is called PLAINTEXT."""

    name: str
    protocol: str = "PLAINTEXT"
    advertised_ports: tuple[int, ...] = ()
    """The port on loopback that each node advertises to clients of this listener; empty for its own port."""
    ports: tuple[int, ...] = ()
    """The port that each node listens on; empty for free ports."""


@dataclass
class KafkaBrokerProcess:
    """One broker: its directory, its port and, while it runs, its process."""

    node_id: int
    port: int
    directory: Path
    jars: Path
    listener_ports: dict[str, int] = field(default_factory=dict)
    """The ports of the additional listeners, by name."""
    more_log_dirs: tuple[str, ...] = ()
    """The names of log directories in addition to `log_dir`, below the broker's directory."""
    heap_mib: int = 512
    java_options: Sequence[str] = ()
    """Additional Java options for the broker itself."""
    virtual_machine: Sequence[str] | None = None
    """Options in place of those for a quick start, where a benchmark wants those of production."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def log_dir(self) -> Path:
        """Return the broker's log directory, which contains the partitions; the first one of several."""
        return self.directory / "data"

    @property
    def log_dirs(self) -> list[Path]:
        """Return all log directories of the broker."""
        return [self.log_dir, *(self.directory / name for name in self.more_log_dirs)]

    @property
    def output(self) -> Path:
        """Return the file with all output of the broker."""
        return self.directory / "broker.log"

    @property
    def bootstrap(self) -> str:
        """Return `host:port`."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Return the process id; the broker must be running."""
        assert self.process is not None, f"broker {self.node_id} is not running"
        return self.process.pid

    def command(self, main_class: str, *arguments: str) -> list[str]:
        """Return the command line of one of Kafka's own main classes."""
        quick = options_with(kafka_archive())
        options = (
            f"-Xmx{self.heap_mib}m",
            *(quick if self.virtual_machine is None else self.virtual_machine),
        )
        logging = "-Dorg.apache.logging.log4j.level=INFO"
        properties = ("-cp", f"{self.jars}/*", main_class, *arguments)
        return [program("java"), *options, logging, *properties]

    def launch(self) -> None:
        """Start the process, without waiting for it."""
        assert self.process is None, f"broker {self.node_id} is already running"
        java, *rest = self.command("kafka.Kafka", str(self.directory / "server.properties"))
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [java, *self.java_options, *rest],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                # In a session of its own the broker gets no Ctrl-C. The tests stop it.
                start_new_session=True,
            )

    async def wait_until_ready(self, brokers: int) -> None:
        """
        Return when the broker answers Metadata and sees *brokers* brokers.

        Raises:
            KafkaStartError: The broker ended, or was not ready in time.
        """
        deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
        while not await self._sees(brokers):
            if self.process is None or self.process.poll() is not None:
                raise KafkaStartError(f"broker {self.node_id} ended while starting:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise KafkaStartError(f"broker {self.node_id} is not ready:\n{self._log_tail()}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _sees(self, brokers: int) -> bool:
        metadata = await self.metadata([])
        return metadata is not None and len(metadata.brokers) == brokers

    async def metadata(self, topics: Sequence[str]) -> Any:
        """
        Return what this node itself answers about *topics*, or None when it does not answer.

        An admin client sends a question to any node of the cluster, whichever its bootstrap address names.
        """
        try:
            connection = await create_conn("127.0.0.1", self.port, request_timeout_ms=10_000)
        except (OSError, KafkaError, TimeoutError):
            return None
        try:
            return await connection.send(MetadataRequest(list(topics)))
        except (OSError, KafkaError, TimeoutError):
            return None
        finally:
            await connection.close()

    def _log_tail(self) -> str:
        return self.output.read_text(errors="replace")[-3000:]

    async def stop(self) -> None:
        """Shut the broker down cleanly (SIGTERM), and wait for its end."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """End the broker at once (SIGKILL), as a crash does."""
        await self._end(signal.SIGKILL)

    async def _end(self, number: signal.Signals) -> None:
        process = self.process
        if process is None:
            return
        # A paused process would handle a SIGTERM only later.
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            await asyncio.to_thread(process.wait, _STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.process = None

    def pause(self) -> None:
        """Stop the broker's execution (SIGSTOP). Its connections stay open, and it answers nothing."""
        pause(self.pid)

    def resume(self) -> None:
        """Continue a paused broker."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def admin_of(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """Open an admin client of one broker."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


class KafkaCluster:
    """Some brokers on this machine, started together and stopped together."""

    def __init__(self, cluster_id: str, brokers: list[KafkaBrokerProcess]) -> None:
        self.cluster_id = cluster_id
        self.brokers = brokers

    @classmethod
    async def start(
        cls,
        directory: Path,
        *,
        brokers: int = 1,
        heap_mib: int = 512,
        properties: Mapping[str, str] | None = None,
        listeners: Sequence[Listener] = (),
        controller_ports: Sequence[int] = (),
        more_log_dirs: tuple[str, ...] = (),
        cluster_id: str = "",
        java_options: Sequence[str] = (),
        virtual_machine: Sequence[str] | None = None,
    ) -> KafkaCluster:
        """
        Format and start a new cluster under *directory*; return when every node is ready.

        *properties* are added to every node's configuration, and override it. *controller_ports* has the
        port that each node's controller listens on; without it the ports are free ones. *more_log_dirs* has
        names of further log directories. Without *cluster_id* the cluster has a new id; a test that replaces
        a lost cluster gives that one's id. *java_options* are added to those of the brokers;
        *virtual_machine* replaces those for a quick start.

        Raises:
            KafkaStartError: A node did not become ready. All nodes are ended.
        """
        jars = require_jars()
        used(f"Apache Kafka {KAFKA_VERSION}")
        ports = iter(free_ports((2 + len(listeners)) * brokers))
        cluster_id = cluster_id or _random_id()
        nodes = [
            KafkaBrokerProcess(
                number,
                next(ports),
                directory / f"broker-{number}",
                jars,
                more_log_dirs=more_log_dirs,
                heap_mib=heap_mib,
                java_options=java_options,
                virtual_machine=virtual_machine,
            )
            for number in range(1, brokers + 1)
        ]
        controllers = {
            node.node_id: f"127.0.0.1:{port}"
            for node, port in zip(nodes, controller_ports or [next(ports) for _ in nodes], strict=True)
        }
        voters = ",".join(f"{node_id}@{address}" for node_id, address in controllers.items())
        for node in nodes:
            node.directory.mkdir(parents=True, exist_ok=True)
            node.listener_ports = {
                one.name: one.ports[node.node_id - 1] if one.ports else next(ports) for one in listeners
            }
            settings = {
                **(_ALONE if brokers == 1 else {}),
                "controller.quorum.voters": voters,
                **_listener_settings(node, controllers[node.node_id], listeners),
                **(properties or {}),
            }
            _write_properties(node, settings)
            await asyncio.to_thread(_format, node, cluster_id, settings)
        cluster = cls(cluster_id, nodes)
        try:
            await cluster.launch()
        except BaseException:
            await cluster.kill()
            raise
        return cluster

    @property
    def bootstrap(self) -> str:
        """Return every node's `host:port`, joined by commas."""
        return ",".join(node.bootstrap for node in self.brokers)

    @property
    def broker(self) -> KafkaBrokerProcess:
        """Return the first node, which is the only one in most clusters."""
        return self.brokers[0]

    async def launch(self) -> None:
        """Start every node that is not running, and return when all are ready."""
        for node in self.brokers:
            if node.process is None:
                node.launch()
        for node in self.brokers:
            await node.wait_until_ready(len(self.brokers))

    async def stop(self) -> None:
        """Stop all nodes at once. A controller quorum that loses one node after another would end slowly."""
        async with asyncio.TaskGroup() as group:
            for node in self.brokers:
                group.create_task(node.stop())

    async def kill(self) -> None:
        """Kill every node."""
        for node in self.brokers:
            await node.kill()

    async def restart(self) -> None:
        """Stop every node and start it again on the same ports and directories."""
        await self.stop()
        await self.launch()

    def log_dir(self, node_id: int = 1) -> Path:
        """Return a node's log directory."""
        return self.brokers[node_id - 1].log_dir

    async def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        replication: int = 1,
        replicas: Sequence[Sequence[int]] = (),
        configs: Mapping[str, str] | None = None,
    ) -> None:
        """
        Create a topic, and return when every partition has a leader.

        *replicas* has the nodes of each partition, the preferred leader first. It replaces *partitions* and
        *replication*.
        """
        topic = NewTopic(name, partitions, replication, topic_configs=dict(configs or {}))
        if replicas:
            partitions = len(replicas)
            topic = NewTopic(name, -1, -1, dict(enumerate(replicas)), dict(configs or {}))
        async with self.admin() as admin:
            response = await admin.create_topics([topic])
            for _, code, message in (error[:3] for error in response.topic_errors):
                assert code == 0, f"topic {name} was not created: error {code}, {message}"
        await asyncio.gather(*(self._until_led(node, name, partitions) for node in self.brokers))

    async def delete_topic(self, name: str) -> None:
        """
        Delete a topic, and return when no broker knows it. The brokers remove its directories soon after.

        A broker that has not heard of the deletion yet still takes records for the topic, also when another
        one of its name has been created since.
        """
        async with self.admin() as admin:
            response = await admin.delete_topics([name])
            assert all(code == 0 for _, code, *_ in response.topic_error_codes), response
        await asyncio.gather(*(self._until_led(node, name, 0) for node in self.brokers))

    async def delete_all_topics(self) -> None:
        """Delete every topic but Kafka's internal ones; return when they are no longer listed."""
        async with self.admin() as admin:
            while names := [name for name in await admin.list_topics() if not name.startswith("__")]:
                await admin.delete_topics(names)

    async def _until_led(self, node: KafkaBrokerProcess, name: str, partitions: int) -> None:
        """Wait until a broker has learned of so many partitions, and of the leader of each."""
        if node.process is None:
            return
        deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
        while True:
            answer = await node.metadata([name])
            if answer is not None:
                (topic,) = answer.to_object()["topics"]
                if [each["leader"] >= 0 for each in topic["partitions"]] == [True] * partitions:
                    return
            told = f"broker {node.node_id} does not know {partitions} partitions of {name} and their leaders"
            assert time.monotonic() < deadline, f"{told}: {answer}"
            await asyncio.sleep(_POLL_SECONDS)

    async def until_stable(self, topic: str, partition: int = 0) -> None:
        """Wait until no transaction is open. Its marker is written after the producer gets the answer."""
        name = ClientPartition(topic, partition)
        deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
        async with AsyncExitStack() as stack:
            ends = []
            for isolation in ("read_committed", "read_uncommitted"):
                consumer = AIOKafkaConsumer(bootstrap_servers=self.bootstrap, isolation_level=isolation)
                await consumer.start()
                stack.push_async_callback(consumer.stop)
                ends.append(consumer.end_offsets)
            while True:
                stable, end = [(await end_offsets([name]))[name] for end_offsets in ends]
                if stable == end:
                    return
                assert time.monotonic() < deadline, f"{topic}-{partition} is stable up to {stable}, not {end}"
                await asyncio.sleep(_POLL_SECONDS)

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        """Open an admin client."""
        async with admin_of(self.bootstrap) as admin:
            yield admin

    @asynccontextmanager
    async def producer(self, **settings: Any) -> AsyncIterator[AIOKafkaProducer]:
        """Open a producer; give it `transactional_id` for transactions. It waits for all replicas in sync."""
        # The library's default is one replica, where an acknowledged record may lie past the high watermark.
        producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap, **({"acks": "all"} | settings))
        await producer.start()
        try:
            yield producer
        finally:
            await producer.stop()

    async def produce(
        self,
        topic: str,
        values: Iterable[bytes],
        *,
        partition: int = 0,
        timestamp_ms: int | None = None,
        **settings: Any,
    ) -> int:
        """Append *values* to a partition, wait for all of them, and return the last one's offset."""
        async with self.producer(**settings) as producer:
            sent = [
                await producer.send(topic, value, partition=partition, timestamp_ms=timestamp_ms)
                for value in values
            ]
            return [(await each).offset for each in sent][-1]


def _random_id() -> str:
    """Return a random UUID in Kafka's form. It never begins with `-`, which would look like an option."""
    first, *rest = uuid.uuid4().bytes
    return base64.urlsafe_b64encode(bytes([first & 0x7F, *rest])).decode().rstrip("=")


def _listener_settings(
    node: KafkaBrokerProcess, controller: str, listeners: Sequence[Listener]
) -> dict[str, str]:
    listening = [f"PLAINTEXT://127.0.0.1:{node.port}", f"CONTROLLER://{controller}"]
    advertised = [f"PLAINTEXT://127.0.0.1:{node.port}"]
    protocols = ["PLAINTEXT:PLAINTEXT", "CONTROLLER:PLAINTEXT"]
    for listener in listeners:
        port = node.listener_ports[listener.name]
        listening.append(f"{listener.name}://127.0.0.1:{port}")
        if listener.advertised_ports:
            port = listener.advertised_ports[node.node_id - 1]
        advertised.append(f"{listener.name}://127.0.0.1:{port}")
        protocols.append(f"{listener.name}:{listener.protocol}")
    return {
        "listeners": ",".join(listening),
        "advertised.listeners": ",".join(advertised),
        "listener.security.protocol.map": ",".join(protocols),
        "inter.broker.listener.name": "PLAINTEXT",
    }


def _write_properties(node: KafkaBrokerProcess, settings: Mapping[str, str]) -> None:
    own = {
        "process.roles": "broker,controller",
        "node.id": str(node.node_id),
        "controller.listener.names": "CONTROLLER",
        "log.dirs": ",".join(map(str, node.log_dirs)),
    }
    text = "".join(f"{name}={value}\n" for name, value in (_PROPERTIES | own | dict(settings)).items())
    (node.directory / "server.properties").write_text(text)


_formatted: dict[tuple[Path, bool], bytes] = {}
"""
The checkpoint that Kafka's tool writes into a new log directory, by the directory of the tool's jars, and
whether it takes features that are previews.
"""


def _format(node: KafkaBrokerProcess, cluster_id: str, settings: Mapping[str, str]) -> None:
    """
    Format the log directories of a node.

    Kafka's tool formats the first node of this process. The checkpoint that it writes has the feature
    levels of these jars, and nothing of the node or the cluster. So later nodes get a copy, without
    starting a JVM.
    """
    checkpoint = node.log_dir / "bootstrap.checkpoint"
    kind = node.jars, settings.get("unstable.feature.versions.enable") == "true"
    if kind not in _formatted:
        _format_with_kafka(node, cluster_id)
        _formatted[kind] = checkpoint.read_bytes()
        return
    named = settings.get("log.dirs")
    for log_dir in map(Path, named.split(",")) if named else node.log_dirs:
        # A test may have mounted a file system there.
        log_dir.mkdir(exist_ok=True)
        properties = {
            "version": "1",
            "cluster.id": cluster_id,
            "node.id": str(node.node_id),
            "directory.id": _random_id(),
        }
        text = "".join(f"{name}={value}\n" for name, value in properties.items())
        (log_dir / "meta.properties").write_text(text)
    checkpoint.write_bytes(_formatted[kind])


def _format_with_kafka(node: KafkaBrokerProcess, cluster_id: str) -> None:
    configuration = str(node.directory / "server.properties")
    command = node.command("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", configuration)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise KafkaStartError(f"broker {node.node_id} could not be formatted:\n{done.stdout}{done.stderr}")
