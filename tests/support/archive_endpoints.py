"""An archive endpoint over the services of a test's bucket, and short functions for requests to it."""

from __future__ import annotations

import asyncio
import base64
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

from tests.fakes.archive import archived
from tests.support.counted_calls import counted_calls
from tests.support.kafka_messages import fetch_request, fields_of, milliseconds, request_module
from tests.support.raw_kafka import connected
from tieringd.config import parse_config
from tieringd.daemon.archive_endpoint import archive_endpoint_of
from tieringd.formats.object_keys import TopicKey
from tieringd.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from pathlib import Path

    from tests.fakes.log_writer import LogWriter
    from tests.support.raw_kafka import RawKafka
    from tieringd.config import Config
    from tieringd.daemon.archive import Archive
    from tieringd.daemon.archive_endpoint import ArchiveEndpoint
    from tieringd.model.manifest import PartitionManifest

LIST_OFFSETS, METADATA, OFFSET_FOR_LEADER_EPOCH = 2, 3, 23
EARLIEST, LATEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED = -2, -1, -3, -4, -5
CALLS_IN_A_TURN = 10_000
"""More than a turn makes for a part of a large request. The whole request takes 100,000 and more."""


def endpoint_config(state: Path, **gateway: Any) -> Config:
    """Return a configuration without a broker. The bucket in it is not opened."""
    settings = {"port": 0, **gateway}
    changes = {name: settings.pop(name) for name in list(settings) if name.startswith("cloud_storage")}
    lines = [
        f"state_directory: {state}",
        "cloud_storage_enabled: true",
        "cloud_storage_backend: file",
        "cloud_storage_file_root: /nowhere/archive",
        "storage_min_free_bytes: 0",
        *(f"{name}: {value}" for name, value in changes.items()),
        "gateway:",
        *(f"  {name}: {value}" for name, value in settings.items()),
    ]
    return parse_config("\n".join(lines) + "\n", source="test", environ={}, needs_broker=False)


@asynccontextmanager
async def running_endpoint(
    archive: Archive,
    state: Path,
    *,
    from_cluster: str | None = None,
    metrics: Metrics | None = None,
    **gateway: Any,
) -> AsyncIterator[ArchiveEndpoint]:
    """Run an endpoint. At the end, check that no connection, buffer or descriptor is left open."""
    config = endpoint_config(state, **gateway)
    before = open_files()
    metrics = metrics or Metrics()
    async with archive_endpoint_of(config, archive, metrics, from_cluster=from_cluster) as endpoint:
        yield endpoint
    assert endpoint.server.open_connections == 0
    assert endpoint.server.buffered_bytes == 0
    # Threads of librdkafka in this process close their sockets a moment after their client has ended.
    await until(lambda: open_files() <= before)


def open_files() -> int:
    """Return the number of open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a path of the kernel


@asynccontextmanager
async def asking(archive: Archive, state: Path, **gateway: Any) -> AsyncIterator[RawKafka]:
    """Run an endpoint, and yield a connection to it."""
    async with (
        running_endpoint(archive, state, **gateway) as endpoint,
        connected(endpoint.server.port) as client,
    ):
        yield client


async def until(is_so: Callable[[], bool]) -> None:
    """Return when *is_so* is true. Polls, because a server reports no event for bytes that it receives."""
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110 there is no event to wait for
            await asyncio.sleep(0.005)


async def most_calls_in_a_turn(work: asyncio.Task[Any]) -> int:
    """Return how many functions the loop's thread called at most between two turns, until *work* is done."""
    most = 0
    with counted_calls() as calls:
        while not work.done():
            before = calls()
            await asyncio.sleep(0)
            most = max(most, calls() - before)
    return most


async def archive_topic(
    writer: LogWriter, archive: Archive, *, partitions: int | None = None
) -> PartitionManifest:
    """Archive the closed segments of *writer*'s log, with the topic's manifest."""
    one = writer.identified
    count = one.partition + 1 if partitions is None else partitions
    await archive.manifests.ensure_topic(
        TopicKey(one.cluster, one.topic, one.topic_id), partition_count=count
    )
    return await archived(writer, archive)


def topic_uuid(writer: LogWriter) -> UUID:
    """Return a topic's id in the form of the Kafka protocol."""
    return UUID(bytes=base64.urlsafe_b64decode(writer.identified.topic_id + "=="))


async def fetched(client: RawKafka, topic: Any, offset: int, *, version: int = 12, **values: Any) -> Any:
    """Fetch from partition 0 at *offset*, and return the partition's part of the answer."""
    asked = {"fetch_offset": offset} | {
        name: values.pop(name) for name in list(values) if name == "partition_max_bytes"
    }
    defaults = {"max_wait": milliseconds(0), "max_bytes": 1 << 20, "isolation_level": 0}
    request = fetch_request(version, {topic: {0: asked}}, **(defaults | values))
    answer = await client.ask(request)
    return answer.responses[0].partitions[0]


async def listed(
    client: RawKafka, topic: str, *timestamps: int, version: int = 10, partition: int = 0
) -> list[Any]:
    """Ask for the offsets of *timestamps*, and return the partition's part of each answer."""
    return [
        (await listed_together(client, topic, timestamp, [partition], version=version))[0]
        for timestamp in timestamps
    ]


async def listed_together(
    client: RawKafka, topic: str, timestamp: int, partitions: Iterable[int], *, version: int = 10
) -> Sequence[Any]:
    """Ask for the offset of *timestamp* in several partitions at once, and return the part of each."""
    module = request_module(LIST_OFFSETS, version)
    asked = tuple(
        module.ListOffsetsPartition(
            **fields_of(
                module.ListOffsetsPartition,
                partition_index=partition,
                current_leader_epoch=-1,
                timestamp=timestamp,
            )
        )
        for partition in partitions
    )
    request = module.ListOffsetsRequest(
        **fields_of(
            module.ListOffsetsRequest,
            replica_id=-1,
            isolation_level=0,
            topics=(module.ListOffsetsTopic(name=topic, partitions=asked),),
            timeout=milliseconds(1000),
        )
    )
    return (await client.ask(request)).topics[0].partitions


async def epoch_ends(
    client: RawKafka, topic: str, *epochs: int, version: int = 4
) -> list[tuple[int, int, int]]:
    """Ask where leader epochs of partition 0 end. Return errors, epochs and end offsets."""
    module = request_module(OFFSET_FOR_LEADER_EPOCH, version)
    found = []
    for epoch in epochs:
        schema = module.OffsetForLeaderPartition
        asked = schema(**fields_of(schema, partition=0, current_leader_epoch=-1, leader_epoch=epoch))
        request = module.OffsetForLeaderEpochRequest(
            **fields_of(
                module.OffsetForLeaderEpochRequest,
                replica_id=-1,
                topics=(module.OffsetForLeaderTopic(topic=topic, partitions=(asked,)),),
            )
        )
        one = (await client.ask(request)).topics[0].partitions[0]
        found.append((one.error_code, one.leader_epoch, one.end_offset))
    return found


async def metadata(client: RawKafka, *topics: Any, version: int = 12, everything: bool = False) -> Any:
    """Ask for Metadata of names and ids, or of every topic."""
    module = request_module(METADATA, version)
    schema = module.MetadataRequestTopic
    asked = tuple(
        schema(
            **fields_of(
                schema,
                name=None if isinstance(one, UUID) else one,
                topic_id=one if isinstance(one, UUID) else None,
            )
        )
        for one in topics
    )
    request = module.MetadataRequest(
        **fields_of(
            module.MetadataRequest,
            topics=(() if version == 0 else None) if everything else asked,
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=True,
        )
    )
    return await client.ask(request)
