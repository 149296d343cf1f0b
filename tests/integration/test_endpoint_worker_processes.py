"""Workers of an archive-only endpoint that die, and a daemon that dies before them: real processes."""

# Long: endpoints and their workers start as new interpreters.

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from stat import S_ISREG

import pytest
import yaml
from kio.schema.errors import ErrorCode

from tests.fakes.archive import archive_in
from tests.fakes.log_writer import LogWriter
from tests.support.archive_endpoints import archive_topic
from tests.support.daemon import Daemon, run_well, write_config
from tests.support.kafka_messages import fetch_request
from tests.support.kafka_users import log_in, password_of
from tests.support.processes import wait_until_ended
from tests.support.raw_kafka import connected
from tieringd.endpoint.access import AccessRule, Operation
from tieringd.endpoint.users_file import Users
from tieringd.storage.file import FileStore

TOPIC = "orders"


class Endpoint(Daemon):
    """One `tieringd gateway --archive-only`."""

    arguments = ("gateway", "--archive-only")

    @property
    def port(self):
        """Return the port that clients connect to."""
        (event,) = self.events("archive endpoint listens")
        return int(event["port"])

    @property
    def workers(self):
        """Return the entries of the workers that serve."""
        return [one for one in self.status()["gateway_workers"] if one["is_serving"]]


@pytest.fixture
async def config(tmp_path):
    """Write the configuration of an endpoint with two workers, and an archive for it."""
    path = write_config(
        tmp_path / "endpoint.yaml",
        {
            "state_directory": str(tmp_path / "state"),
            "cloud_storage_enabled": True,
            "cloud_storage_backend": "file",
            "cloud_storage_file_root": str(tmp_path / "archive"),
            "cloud_storage_single_writer": True,
            "storage_min_free_bytes": 0,
            "gateway": {"port": 0, "workers": 2},
            "admin": {"port": 0},
        },
    )
    (tmp_path / "archive").mkdir()
    await asyncio.to_thread(run_well, "archive", "init", "--config", str(path))
    store = FileStore(tmp_path / "archive", prefix="", has_single_writer=True)
    writer = LogWriter(tmp_path / "log", TOPIC)
    for _ in range(3):
        writer.closed_segment(b"a" * 50_000, b"b" * 50_000)
    await archive_topic(writer, archive_in(store))
    await store.close()
    return path


@pytest.fixture
def endpoint(config, tmp_path):
    """Run the endpoint."""
    with running(config, tmp_path) as endpoint:
        yield endpoint


@contextmanager
def running(config, tmp_path):
    """Run an endpoint for the time of the context."""
    endpoint = Endpoint(config, tmp_path / "endpoint.log")
    endpoint.launch()
    try:
        endpoint.until(lambda: endpoint.events("archive endpoint listens"), "it listens")
        endpoint.wait_until_listening()
        yield endpoint
    finally:
        endpoint.server.kill()


async def read_first(client):
    """Fetch the first records on one connection."""
    answer = await client.ask(fetch_request(12, {TOPIC: {0: {}}}, max_bytes=1000, isolation_level=0))
    (partition,) = answer.responses[0].partitions
    assert partition.error_code.value == 0
    assert partition.records


async def clients_of_both(stack, endpoint):
    """Connect until each worker has a client, and read on each connection. Few are needed."""
    clients = []
    for _ in range(50):
        clients.append(await stack.enter_async_context(connected(endpoint.port)))
        await read_first(clients[-1])
        if len(endpoint.workers) == 2 and all(one["connections"] for one in endpoint.workers):
            return clients
    raise AssertionError(f"one worker takes all clients: {endpoint.workers}")


async def until_told(endpoint, name, value):
    """Wait until a metric has a value: a worker that answers late is left out of a page of figures."""
    await asyncio.to_thread(endpoint.until, lambda: endpoint.metric(name) == value, f"{name} is {value}")


async def test_dead_worker_takes_only_its_own_connections_along(endpoint):
    """The connections of the other one go on, a new worker comes, and no figure falls."""
    async with AsyncExitStack() as stack:
        clients = await clients_of_both(stack, endpoint)
        answers = len(clients)
        await until_told(endpoint, "tieringd_gateway_archived_answers_total", answers)
        await until_told(endpoint, "tieringd_gateway_connections", len(clients))
        killed, its_clients = endpoint.workers[0]["pid"], endpoint.workers[0]["connections"]
        os.kill(killed, signal.SIGKILL)
        outcomes = await asyncio.gather(*map(read_first, clients), return_exceptions=True)
        assert sum(isinstance(one, OSError | EOFError) for one in outcomes) == its_clients
        kept = sum(one is None for one in outcomes)
        assert kept == len(clients) - its_clients

        def others():
            return [one["pid"] for one in endpoint.workers if one["pid"] != killed]

        await asyncio.to_thread(endpoint.until, lambda: len(others()) == 2, "another worker serves")
        assert endpoint.workers[0]["last_end"] == "by SIGKILL"
        assert endpoint.metric("tieringd_gateway_worker_ends_total", how="signal") == 1
        await until_told(endpoint, "tieringd_gateway_archived_answers_total", answers + kept)
        async with connected(endpoint.port) as client:
            await read_first(client)
        await clients_of_both(stack, endpoint)


async def test_workers_end_with_their_daemon(endpoint):
    """Nothing is served after the daemon has ended, however it ended, and no process stays."""
    pids = [one["pid"] for one in endpoint.workers]
    async with connected(endpoint.port) as client:
        await read_first(client)
        endpoint.server.kill()
        with pytest.raises((OSError, EOFError)):
            await read_first(client)
    await asyncio.to_thread(wait_until_ended, pids)


async def test_signal_drains_the_workers(endpoint):
    """A service manager sends it to all processes. Answers that are due come first; the end is a good one."""
    pids = [one["pid"] for one in endpoint.workers]
    async with connected(endpoint.port) as client:
        await read_first(client)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        await read_first(client)
        at_end = fetch_request(12, {TOPIC: {0: {"fetch_offset": 6}}}, max_bytes=1000, isolation_level=0)
        client.send(at_end)
        endpoint.send_signal(signal.SIGTERM)
        assert (await client.answer(at_end)).responses[0].partitions[0].error_code.value == 0
        assert await asyncio.to_thread(endpoint.wait) == 0, endpoint.tail()
    assert endpoint.events("stopped")
    await asyncio.to_thread(wait_until_ended, pids)


async def test_cache_is_counted_once_for_both(endpoint, tmp_path):
    """Both workers read the same chunk; the daemon counts the one file, and who comes second finds it."""
    async with AsyncExitStack() as stack:
        await clients_of_both(stack, endpoint)
        directory = tmp_path / "state" / "cloud_storage_cache"

        def is_counted():
            # A worker may still be writing one, and who comes second drops its own.
            files = file_sizes(directory)
            return sum(files) > 0 and endpoint.metric("tieringd_cache_bytes") == sum(files)

        await asyncio.to_thread(endpoint.until, is_counted, "all files are counted")


def file_sizes(directory):
    """Return the sizes of the files below a directory, without those that go meanwhile."""
    found = []
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            found += [status.st_size] if S_ISREG(status.st_mode) else []
    return found


@pytest.mark.parametrize("workers", [0, 2])
async def test_reload_reaches_every_process_that_serves(config, tmp_path, workers):
    """
    A lower rate and other rules hold on the connections that are open, and none is cut.

    A reload that finds a fault changes nothing.
    """
    users_file = tmp_path / "users.yaml"
    users = Users().with_user("reader", password_of("reader"))
    rule = AccessRule("User:reader", frozenset({Operation.READ}), "*")
    replace(users, rules=(rule,)).write(users_file)
    settings = yaml.safe_load(config.read_text())
    settings["gateway"] |= {
        "workers": workers,
        "users_file": str(users_file),
        "sasl_plain": True,
        "sasl_plain_without_tls": True,
    }
    write_config(config, settings)
    with running(config, tmp_path) as endpoint:
        async with AsyncExitStack() as stack:
            clients = []
            while len(clients) < 4 or (workers and not all(one["connections"] for one in endpoint.workers)):
                clients.append(await stack.enter_async_context(connected(endpoint.port)))
                await log_in(clients[-1], "reader")
                assert await first_fetch(clients[-1]) == (0, 0)
                assert len(clients) < 50, "one worker takes all clients"

            config.write_text("gateway: {port: never}\n")
            endpoint.send_signal(signal.SIGHUP)
            said = "configuration is not reloaded: the new one is wrong"
            await asyncio.to_thread(endpoint.until, lambda: endpoint.events(said), "the fault is told")
            assert [await first_fetch(client) for client in clients] == [(0, 0)] * len(clients)

            settings["gateway"]["archive_bytes_per_second"] = 64 << 10
            write_config(config, settings)
            endpoint.send_signal(signal.SIGHUP)
            reloaded = "configuration reloaded"
            await asyncio.to_thread(endpoint.until, lambda: endpoint.events(reloaded), "it is reloaded")
            (change,) = endpoint.events("configuration changed")
            assert change["change"] == "gateway.archive_bytes_per_second: null -> 64KiB"
            for client in clients:
                async with asyncio.timeout(180):
                    while (await first_fetch(client))[1] == 0:
                        pass

            users.write(users_file)
            endpoint.send_signal(signal.SIGHUP)
            for client in clients:
                async with asyncio.timeout(180):
                    while (await first_fetch(client))[0] != ErrorCode.topic_authorization_failed.value:
                        pass


async def first_fetch(client):
    """Fetch the first records on one connection; return the partition's error and the time to wait."""
    answer = await client.ask(fetch_request(12, {TOPIC: {0: {}}}, max_bytes=1000, isolation_level=0))
    (partition,) = answer.responses[0].partitions
    return partition.error_code.value, answer.throttle_time / timedelta(milliseconds=1)


async def test_fault_of_a_worker_at_its_start_ends_the_command(config, tmp_path):
    """The error has the same words as without workers."""
    text = config.read_text().replace(
        "workers: 2", "workers: 2\n  tls_cert_file: /none\n  tls_key_file: /none"
    )
    config.write_text(text)
    endpoint = Endpoint(config, tmp_path / "endpoint.log")
    endpoint.launch()
    assert await asyncio.to_thread(endpoint.wait) == 2
    assert "gateway.tls_cert_file /none cannot be used" in endpoint.output_text()
