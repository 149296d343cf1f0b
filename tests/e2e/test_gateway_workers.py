"""A gateway beside a real broker, whose clients are served by two workers."""

# Long: daemons and their workers start as new interpreters.

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import AsyncExitStack, ExitStack

import pytest
from kio.schema.delete_records.v2 import request as deletion

from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import SEGMENTS, consumed
from tests.e2e.test_gateway import Through, trimmed
from tests.support.daemon import kafka_config, write_config
from tests.support.gateway_clients import fetched, read_aiokafka, read_librdkafka
from tests.support.kafka_messages import milliseconds
from tests.support.processes import wait_until_ended
from tests.support.raw_kafka import connected

_VALUES = [bytes([number]) * 100_000 for number in range(65)]
_WHOLE = list(enumerate(_VALUES))
_TIERED = {"remote.storage.enable": True, "local.retention.bytes": 1 << 20}


@pytest.fixture
def config_of(behind, seaweedfs, tmp_path, prefix):
    """Give a function that writes the configuration of a daemon whose gateway has two workers."""

    def write(topic, **changes):
        config = kafka_config(
            behind.cluster,
            seaweedfs,
            tmp_path / "state",
            bucket=BUCKET,
            prefix=prefix,
            topics={topic: _TIERED},
            gateway={**behind.gateway_config, "workers": 2} | changes,
        )
        return write_config(tmp_path / "tieringd.yaml", config)

    return write


async def written(behind, topic):
    """Create a topic with the values."""
    await behind.cluster.create_topic(topic, configs=SEGMENTS)
    await behind.cluster.produce(topic, _VALUES, max_batch_size=200_000)


def workers_of(daemon):
    """Return the entries of the workers that serve."""
    return [one for one in daemon.status()["gateway_workers"] if one["is_serving"]]


def archived_answers(daemon):
    """Return how many answers the workers have told of. A page leaves out a worker that tells late."""
    return daemon.metric("tieringd_gateway_archived_answers_total") or 0


async def clients_of_both(stack, daemon, behind, topic):
    """Connect until each worker has a client, and read the first archived record on each connection."""
    clients = []
    for _ in range(50):
        clients.append(await stack.enter_async_context(connected(behind.port)))
        assert (await fetched(clients[-1], topic, 0)).error_code.value == 0
        if all(one["connections"] for one in workers_of(daemon)):
            return clients
    raise AssertionError(f"one worker takes all clients: {workers_of(daemon)}")


@pytest.mark.parametrize("isolation", ["read_committed"])
async def test_clients_read_one_log_through_workers(behind, config_of, topic, isolation):
    """Archive and broker as one log, with two libraries; the figures of the workers are together."""
    await written(behind, topic)
    before = await consumed(behind.cluster, topic, isolation)
    with trimmed(config_of(topic)) as daemon:
        assert await consumed(Through(behind.bootstrap), topic, isolation) == before
        assert await read_aiokafka(behind.bootstrap, topic, len(_VALUES), isolation_level=isolation) == _WHOLE
        settings = {"isolation.level": isolation}
        read = await asyncio.to_thread(read_librdkafka, behind.bootstrap, topic, len(_VALUES), **settings)
        assert read == _WHOLE
        daemon.until(lambda: daemon.metric("tieringd_cache_hits_total", kind="chunk"), "the hits are told")
        daemon.until(lambda: archived_answers(daemon), "the answers are told")
        assert daemon.metric("tieringd_gateway_topic_archived_bytes_total", topic=topic)
        assert len(workers_of(daemon)) == daemon.metric("tieringd_gateway_workers") == 2


async def test_killed_worker_cuts_its_own_connections_alone(behind, config_of, topic):
    """The other client reads on, another worker takes the place, and no figure falls."""
    await written(behind, topic)
    with trimmed(config_of(topic)) as daemon:
        async with AsyncExitStack() as stack:
            clients = await clients_of_both(stack, daemon, behind, topic)
            daemon.until(lambda: archived_answers(daemon), "the answers are told")
            answers = archived_answers(daemon)
            killed, its_clients = workers_of(daemon)[0]["pid"], workers_of(daemon)[0]["connections"]
            os.kill(killed, signal.SIGKILL)
            outcomes = await asyncio.gather(
                *(fetched(client, topic, 0) for client in clients), return_exceptions=True
            )
            assert sum(isinstance(one, OSError | EOFError) for one in outcomes) == its_clients
            assert its_clients < len(clients)
            await asyncio.to_thread(
                daemon.until, lambda: len(workers_of(daemon)) == 2, "another worker serves"
            )
            assert killed not in [one["pid"] for one in workers_of(daemon)]
            daemon.until(lambda: archived_answers(daemon) > answers, "more answers are told")
            assert daemon.metric("tieringd_task_failures_total", task="gateway_worker") == 1
            (event,) = daemon.events("a worker of the gateway has ended; another one takes its place")
            assert event["how"] == "by SIGKILL"
        assert await read_aiokafka(behind.bootstrap, topic, len(_VALUES)) == _WHOLE


async def test_workers_end_when_the_daemon_is_killed(behind, config_of, topic):
    """Workers serve nothing without their daemon: what they know would grow old."""
    await written(behind, topic)
    with trimmed(config_of(topic)) as daemon:
        async with AsyncExitStack() as stack:
            clients = await clients_of_both(stack, daemon, behind, topic)
            pids = [one["pid"] for one in workers_of(daemon)]
            daemon.server.kill()
            for client in clients:
                with pytest.raises((OSError, EOFError)):
                    await fetched(client, topic, 0)
        await asyncio.to_thread(wait_until_ended, pids)


async def test_deletion_through_one_worker_is_seen_by_the_other_at_once(behind, config_of, topic):
    """The client that deleted has its answer: no client of any worker gets a deleted record any more."""
    await written(behind, topic)
    with trimmed(config_of(topic)) as daemon:
        async with AsyncExitStack() as stack:
            clients = await clients_of_both(stack, daemon, behind, topic)
            for number, before in enumerate((3, 7, 12, 15)):
                answer = await clients[number % len(clients)].ask(deletion_request(topic, before))
                (told,) = answer.topics[0].partitions
                assert (told.error_code.value, told.low_watermark) == (0, before)
                for client in clients:
                    assert (await fetched(client, topic, before - 1)).error_code.value == 1
                    assert (await fetched(client, topic, before)).error_code.value == 0


async def test_host_that_connects_too_often_is_refused_and_another_one_is_served(behind, config_of, topic):
    """Real workers share the limit's rate and the kernel's filter. The other host reads at the same time."""
    await written(behind, topic)
    with trimmed(config_of(topic, host_connections_per_second=1)) as daemon, ExitStack() as flood:

        def refused():
            return daemon.metric("tieringd_gateway_refused_connections_total", reason="host_rate")

        # They come together: on a busy machine one after another could keep to the rate.
        for _ in range(60):
            client = flood.enter_context(socket.socket())
            client.bind(("127.0.0.2", 0))
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", behind.port))
        daemon.until(refused, "a connection is refused")
        async with connected(behind.port, host="127.0.0.3") as client:
            assert (await fetched(client, topic, 0)).error_code.value == 0
        assert refused()
        assert daemon.metric("tieringd_gateway_unanswered_hosts_total")
        assert not daemon.metric("tieringd_gateway_refused_connections_total", reason="host_connections")
        events = daemon.events("a client host opens connections too often; further ones are refused")
        assert {event["client"] for event in events} == {"127.0.0.2"}


def deletion_request(topic, before):
    """Return a DeleteRecords of partition 0."""
    partition = deletion.DeleteRecordsPartition(partition_index=0, offset=before)
    return deletion.DeleteRecordsRequest(
        topics=(deletion.DeleteRecordsTopic(name=topic, partitions=(partition,)),),
        timeout=milliseconds(120_000),
    )
