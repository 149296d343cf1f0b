"""
The daemon's side of a gateway with two real worker processes, in front of a broker that answers by script.

The reconciler, its archivers and the archive are real; each Fetch is out of the broker's range.
"""

# Long: workers start as new interpreters.

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack, asynccontextmanager

from kio.schema.errors import ErrorCode

from tests.fakes.daemons import Daemon
from tests.fakes.fixtures import writers
from tests.fakes.gateway_peers import produce
from tests.fakes.scripted_broker import scripted_broker
from tests.support.daemon import run_well, write_config
from tests.support.kafka_messages import fetch_request, fetch_response, response_frame
from tests.support.processes import pause, wait_until_ended
from tests.support.raw_kafka import connected
from tests.unit.gateway.test_telling_log_starts import deleted, deletion
from tieringd.cli.gateway_worker import WORKER_COMMAND
from tieringd.config import load_config
from tieringd.daemon.read_cache import ReadCache
from tieringd.daemon.workers.gateway_workers import GatewayWorkers
from tieringd.gateway.readable_partitions import ReadablePartitions
from tieringd.metrics import Metrics
from tieringd.storage.at_once import cancelled
from tieringd.storage.file import FileStore

__all__ = ["writers"]

FETCH = 1


async def out_of_range(broker):
    """Answer each Fetch with an offset out of range, and each deletion with its offset."""
    while True:
        head, _, answers = await broker.requests.get()
        if head.api_key == FETCH:
            partition = {"error_code": ErrorCode.offset_out_of_range}
            said = fetch_response(head.version, {"orders": {0: partition}})
        else:
            said = deleted(head.version, orders=DELETED[-1])
        answers.write(response_frame(said, correlation_id=head.correlation_id))


DELETED = [0]
"""The offsets that clients asked the broker to delete before; it tells the last one."""


IS_FULL = [False]
"""Whether the disks are full, by the last entry."""
LOGGED = []
"""The level and the fields of each warning of a worker."""


class Gateway:
    """A gateway with two workers, and clients of it."""

    def __init__(self, workers, config):
        self.workers = workers
        self.config = config

    @property
    def serving(self):
        """Return the status of the workers that serve."""
        return [one for one in self.workers.pool.status() if one.is_serving]

    async def until(self, is_so):
        """Return when *is_so* is true."""
        async with asyncio.timeout(180):
            while not is_so():  # noqa: ASYNC110 processes report no events
                await asyncio.sleep(0.02)

    async def fetched(self, client, offset):
        """Fetch from an offset until there are records or an error; return the error's number."""
        for _ in range(50):
            request = fetch_request(12, {"orders": {0: {"fetch_offset": offset}}}, max_bytes=1000)
            (partition,) = (await client.ask(request)).responses[0].partitions
            if partition.records or partition.error_code.value == ErrorCode.offset_out_of_range.value:
                return partition.error_code.value
        raise AssertionError(f"no records came: {partition}")

    async def clients_of_both(self, stack, *, first_offset=0):
        """Connect until each worker has a client, and read on each connection. Few are needed."""
        clients = []
        for _ in range(50):
            clients.append(await stack.enter_async_context(connected(self.workers.pool.port)))
            assert await self.fetched(clients[-1], first_offset) == 0
            if len(self.serving) == 2 and all(one.connections for one in self.serving):
                return clients
        raise AssertionError(f"one worker takes all clients: {self.serving}")


@asynccontextmanager
async def gateway_of(tmp_path, writers, **changes):
    """Run a daemon with a gateway of two workers."""
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(scripted_broker())
        answering = asyncio.create_task(out_of_range(broker))
        stack.push_async_callback(cancelled, (answering,))
        path = write_config(
            tmp_path / "tieringd.yaml",
            {
                "broker": {
                    "kind": "kafka",
                    "log_dirs": [str(tmp_path / "log")],
                    "bootstrap": ["127.0.0.1:1"],
                },
                "state_directory": str(tmp_path / "state"),
                "cloud_storage_enabled": True,
                "cloud_storage_backend": "file",
                "cloud_storage_file_root": str(tmp_path / "archive"),
                "cloud_storage_single_writer": True,
                "storage_min_free_bytes": 0,
                "gateway": {
                    "enabled": True,
                    "host": "127.0.0.1",
                    "port": 0,
                    "broker": f"127.0.0.1:{broker.port}",
                    "workers": 2,
                }
                | changes,
            },
        )
        (tmp_path / "archive").mkdir()
        await asyncio.to_thread(run_well, "archive", "init", "--config", str(path))
        config, metrics = load_config(path, environ={}), Metrics()
        store = FileStore(tmp_path / "archive", prefix="", has_single_writer=True)
        stack.push_async_callback(store.close)
        daemon = Daemon(tmp_path, store, writers)
        await stack.enter_async_context(daemon.running())
        partitions = ReadablePartitions(
            daemon.reconciler,
            daemon.archive.manifests,
            daemon.archive.history,
            now=lambda: asyncio.get_running_loop().time(),
            now_ms=daemon.archive.clock,
            broker=daemon.broker,
        )
        stack.push_async_callback(partitions.close)
        cache = ReadCache(config, daemon.archive, metrics)
        stack.push_async_callback(cache.hydrator.close)
        workers = GatewayWorkers(
            config,
            WORKER_COMMAND,
            partitions=partitions,
            reconciler=daemon.reconciler,
            cache=cache,
            may_produce=lambda: not IS_FULL[-1],
            on_logged=lambda *event: LOGGED.append(event),
            metrics=metrics,
        )
        stack.push_async_callback(workers.close)
        await workers.listen()
        running = asyncio.create_task(workers.run())
        stack.push_async_callback(cancelled, (running,))
        yield Gateway(workers, config)


async def test_deletion_through_one_worker_is_seen_by_all_at_once(tmp_path, writers):
    """No client of any worker gets a deleted record once the client that deleted has its answer."""
    async with gateway_of(tmp_path, writers) as gateway, AsyncExitStack() as stack:
        clients = await gateway.clients_of_both(stack)
        for number, before in enumerate((1, 2)):
            DELETED.append(before)
            (told,) = (await clients[number].ask(deletion(2, orders=before))).topics[0].partitions
            assert (told.error_code, told.low_watermark) == (ErrorCode.none, before)
            for client in clients:
                assert await gateway.fetched(client, before - 1) == ErrorCode.offset_out_of_range.value
                assert await gateway.fetched(client, before) == 0
        os.kill(gateway.serving[0].pid, signal.SIGKILL)
        await gateway.until(
            lambda: any(one.restarts for one in gateway.serving) and len(gateway.serving) == 2
        )
        for client in await gateway.clients_of_both(stack, first_offset=2):
            assert await gateway.fetched(client, 1) == ErrorCode.offset_out_of_range.value


async def test_worker_that_does_not_confirm_a_deletion_is_killed(tmp_path, writers):
    """It might serve what was deleted. The client that deletes waits until it is gone."""
    async with gateway_of(tmp_path, writers) as gateway, AsyncExitStack() as stack:
        clients = await gateway.clients_of_both(stack)
        number, stuck = gateway.serving[0].number, gateway.serving[0].pid
        pause(stuck)
        DELETED.append(1)
        asking = [asyncio.ensure_future(client.ask(deletion(2, orders=1))) for client in clients]
        done, late = await asyncio.wait(asking, timeout=180)
        assert not late
        assert any(task.exception() is None for task in done)
        await asyncio.to_thread(wait_until_ended, [stuck])
        await gateway.until(lambda: len(gateway.serving) == 2)
        # On a busy machine the other one may be late for another reason.
        (end,) = [one.last_end for one in gateway.serving if one.number == number]
        assert end == "killed: it did not confirm that records were deleted"


async def test_workers_are_told_of_full_disks_and_of_a_reload(tmp_path, writers):
    """
    Produce is refused while a disk is full. A lower rate holds for connections that are open.

    A worker that is replaced begins with the new settings.
    """
    async with gateway_of(tmp_path, writers) as gateway, AsyncExitStack() as stack:
        clients = await gateway.clients_of_both(stack)
        IS_FULL.append(True)
        # The daemon looks four times a second. A worker has taken what came before an answer of its own.
        await asyncio.sleep(1)
        for worker in gateway.workers.pool.workers:
            await worker.link.ask("pulse")
        for client in clients:
            answer = await client.ask(produce(9, acks=-1))
            (partition,) = answer.responses[0].partition_responses
            assert partition.error_code == ErrorCode.broker_not_available
        IS_FULL.append(False)
        log = gateway.config.log.model_copy(update={"level": "error"})
        # A second's worth may go out without a wait, and the records are few.
        slow = gateway.config.gateway.model_copy(update={"archive_bytes_per_second": 2})
        request = fetch_request(12, {"orders": {0: {}}}, max_bytes=1000)
        gateway.workers.set_config(gateway.config.model_copy(update={"log": log, "gateway": slow}))
        for worker in gateway.workers.pool.workers:
            await worker.link.ask("pulse")
        for client in clients:
            async with asyncio.timeout(180):
                # An answer without records has nothing to wait for: the read took longer than the Fetch.
                while not (answer := await client.ask(request)).responses[0].partitions[0].records:
                    pass
            assert answer.throttle_time.total_seconds() > 0
        os.kill(gateway.serving[0].pid, signal.SIGKILL)
        await gateway.until(lambda: len(gateway.serving) == 2)
        assert gateway.workers._greeting(0).config.log.level == "error", "a new worker begins with it"


async def test_figures_of_the_workers_are_added(tmp_path, writers):
    """What both have answered; and no worker stays when the daemon ends."""
    async with gateway_of(tmp_path, writers) as gateway, AsyncExitStack() as stack:
        await gateway.clients_of_both(stack)
        pids = [one.pid for one in gateway.serving]
        async with asyncio.timeout(180):
            answers = 0
            # A worker that answers late is left out.
            while answers < 2:
                await gateway.workers.pool.gather_figures()
                counts = gateway.workers.pool.figures().counts
                answers = sum(counts.get("tieringd_gateway_archived_answers", {}).values())
    await asyncio.to_thread(wait_until_ended, pids)
