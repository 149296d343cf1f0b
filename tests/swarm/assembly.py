"""
The parts of a swarm, and how they reach each other: brokers, daemons and gateways, and a store.

Every way between two parts that a fault may cut goes through a relay of the network. Producers, operators and
the reader past the gateways use a listener of their own, so that what the tests know is certain.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from tests.support.cluster import CLUSTER_PROPERTIES, DaemonsBeside
from tests.support.daemon import endpoint_properties
from tests.support.fault_proxy import fault_proxy
from tests.support.gateways import LISTENER
from tests.support.kafka import KafkaCluster, Listener
from tests.support.network import Network
from tests.support.ports import free_ports
from tests.support.small_disks import small_disk_at
from tests.support.stepped_clock import SteppedDaemon
from tests.swarm.ending import in_thread
from tests.swarm.faults import CLOCK_NODE, FULL_LOG_NODE, FULL_NODE, LOCAL_BYTES, NODES, Parts, topics
from tests.swarm.network_faults import BEHIND_GATEWAY, BETWEEN_BROKERS, TO_BROKER, TO_GATEWAY, TO_STORE
from tests.swarm.sharing import SHARE_PROPERTIES, SHARED, ShareGroup
from tests.swarm.stores import running_store
from tests.swarm.transactions import TRANSACTION_PARTITIONS, TRANSACTIONS
from tests.swarm.workload import TOPIC

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

_STATE_BYTES = 256 << 20
_LOG_BYTES = 192 << 20
_SECOND_LOG = "more"
_TOPIC = {
    "segment.bytes": str(1 << 20),
    "retention.ms": "-1",
    "file.delete.delay.ms": "100",
    "min.insync.replicas": "2",
}
_REPLICATION, _DAEMONS = "REPLICATION", "DAEMONS"
_CLUSTER = {
    **CLUSTER_PROPERTIES,
    **SHARE_PROPERTIES,
    # Groups and transactions survive the death of one broker.
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "inter.broker.listener.name": _REPLICATION,
    # A move between log directories takes a second or more, so that daemons meet it.
    "replica.alter.log.dirs.io.max.bytes.per.second": str(8 << 20),
}
_DAEMON = {
    # An operator's change of retention is followed while the swarm waits.
    "cloud_storage_housekeeping_interval_ms": "1s",
}
_PLACES = ([1, 2, 3], [2, 3, 1], [3, 1, 2])


async def _relays(
    stack: AsyncExitStack, network: Network, kind: str, ports: Sequence[int]
) -> tuple[int, ...]:
    """Return the port of a relay to each node's port."""
    return tuple(
        [
            await stack.enter_async_context(network.relay(kind, node_id, port))
            for node_id, port in zip(NODES, ports, strict=True)
        ]
    )


async def _cluster(stack: AsyncExitStack, network: Network, directory: Path, to_gateways: Sequence[int]):
    """Start the brokers, whose ways to each other and to the daemons are relays."""
    replication, controllers, daemons = free_ports(3), free_ports(3), free_ports(3)
    advertised = await _relays(stack, network, BETWEEN_BROKERS[0], replication)
    voters = await _relays(stack, network, BETWEEN_BROKERS[1], controllers)
    to_daemons = await _relays(stack, network, TO_BROKER, daemons)
    small = directory / f"broker-{FULL_LOG_NODE}" / _SECOND_LOG
    await in_thread(small.parent.mkdir, parents=True)
    stack.enter_context(small_disk_at(small, _LOG_BYTES))
    cluster = await KafkaCluster.start(
        directory,
        brokers=len(NODES),
        heap_mib=384,
        properties={
            **_CLUSTER,
            "controller.quorum.voters": ",".join(
                f"{node_id}@127.0.0.1:{port}" for node_id, port in zip(NODES, voters, strict=True)
            ),
        },
        listeners=[
            Listener(LISTENER, advertised_ports=tuple(to_gateways)),
            Listener(_REPLICATION, advertised_ports=advertised, ports=tuple(replication)),
            Listener(_DAEMONS, advertised_ports=to_daemons, ports=tuple(daemons)),
        ],
        controller_ports=controllers,
        more_log_dirs=(_SECOND_LOG,),
    )
    stack.push_async_callback(cluster.kill)
    return cluster, to_daemons


@asynccontextmanager
async def running_parts(directory: Path, store_name: str, broken: list[str]) -> AsyncIterator[Parts]:
    """Run store, network, brokers, daemons and share consumers under *directory* in the context."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(running_store(store_name, directory / "store"))
        proxy = await stack.enter_async_context(fault_proxy(store.url)) if store.url else None
        network = Network()
        gateways = free_ports(3)
        to_gateways = await _relays(stack, network, TO_GATEWAY, gateways)
        cluster, to_daemons = await _cluster(stack, network, directory / "brokers", to_gateways)
        behind = await _relays(
            stack, network, BEHIND_GATEWAY, [one.listener_ports[LISTENER] for one in cluster.brokers]
        )
        stack.enter_context(small_disk_at(directory / f"state-{FULL_NODE}", _STATE_BYTES))
        changes = {**store.properties, **_DAEMON, "topics": topics(LOCAL_BYTES[0])}
        daemons = DaemonsBeside(cluster, None, directory, changes=changes)
        daemons.kinds[CLOCK_NODE] = SteppedDaemon
        if proxy is not None:
            port = int(proxy.url.rpartition(":")[2])
            for node_id, to_store in zip(
                NODES, await _relays(stack, network, TO_STORE, [port] * len(NODES)), strict=True
            ):
                daemons.change(node_id, **endpoint_properties(f"http://127.0.0.1:{to_store}"))
        for node_id, bootstrap, own, broker in zip(NODES, to_daemons, gateways, behind, strict=True):
            block = {"enabled": True, "host": "127.0.0.1", "port": own, "broker": f"127.0.0.1:{broker}"}
            kafka = {**daemons.configuration(node_id)["broker"], "bootstrap": [f"127.0.0.1:{bootstrap}"]}
            daemons.change(node_id, gateway=block, broker=kafka)
        stack.enter_context(daemons)
        await cluster.create_topic(TOPIC, replicas=_PLACES, configs=_TOPIC)
        await cluster.create_topic(TRANSACTIONS, replicas=_PLACES[:TRANSACTION_PARTITIONS], configs=_TOPIC)
        await cluster.create_topic(SHARED, replicas=_PLACES[:1], configs=_TOPIC)
        await in_thread(daemons.launch)
        addresses = ",".join(f"127.0.0.1:{port}" for port in to_gateways)
        share_group = ShareGroup(cluster, directory, (addresses, cluster.bootstrap))
        await share_group.prepare()
        yield Parts(
            cluster,
            daemons,
            store,
            proxy,
            network,
            await stack.enter_async_context(share_group),
            state=lambda node_id: directory / f"state-{node_id}",
            gateways=addresses,
            broken=broken,
            previous_release=directory / "previous",
        )
