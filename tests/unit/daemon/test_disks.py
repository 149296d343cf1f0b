"""What manages the disks, as a daemon puts it together: real files, one broker, a virtual clock."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import permutations

import pytest
import yaml
from structlog.testing import capture_logs

from tests.fakes.archive import Clock, archive_clock, archive_in, reconciler_of
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import CLUSTER
from tests.fakes.memory_store import MemoryStore
from tests.fakes.virtual_loop import virtually
from tieringd.config import parse_config
from tieringd.daemon.disks import disk_parts
from tieringd.formats.disk_state import decode_disk_state
from tieringd.formats.object_keys import disk_state_key
from tieringd.metrics import Metrics
from tieringd.model.disk_state import EVERY_PRODUCER, PRODUCER_BYTE_RATE, DiskState

MORE_THAN_THERE_IS = 2**60
ORDERS = list(permutations(("monitor", "degraded", "ballast", "space")))
NOTHING_IS_LOW = {"storage_min_free_bytes": 0, "storage_space_alert_free_threshold_percent": 0}


class Host:
    """One host with a log directory, and what manages its disk."""

    def __init__(self, root):
        (root / "logs").mkdir()
        self.root = root
        self.store, self.broker, self.metrics = MemoryStore(), FakeBroker(), Metrics()
        self.broker.node = 7

    def config(self, kind="kafka", **changes):
        broker = {"kind": kind, "log_dirs": [str(self.root / "logs")]}
        if kind != "none":
            broker["bootstrap"] = ["localhost:9092"]
        document = {"broker": broker, "state_directory": str(self.root / "state"), **changes}
        return parse_config(yaml.safe_dump(document), source="test", environ={})

    def parts(self, config):
        reconciler = reconciler_of(config, archive_in(self.store), self.broker, metrics=self.metrics)
        return disk_parts(
            config, self.metrics, self.store, self.broker, reconciler=reconciler, clock=archive_clock(Clock())
        )

    async def published(self):
        data, _ = await self.store.get(disk_state_key(CLUSTER, 7))
        return decode_disk_state(data).state

    @property
    def rate(self):
        return self.broker.quotas.get(EVERY_PRODUCER, {}).get(PRODUCER_BYTE_RATE)


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def started(parts):
    """Start the tasks of all parts."""
    return [asyncio.create_task(run()) for run in parts.tasks().values()]


@asynccontextmanager
async def running(tasks):
    """Cancel the tasks in the end, when each of them must still be running."""
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in ended] == [asyncio.CancelledError] * len(tasks)


@virtually
async def test_disk_that_fills_and_empties_holds_producers_back_and_lets_them_go(host):
    """A reloaded threshold reaches the published state of the disk and the broker's quotas."""
    parts = host.parts(host.config(**NOTHING_IS_LOW))
    async with running(started(parts)):
        await asyncio.sleep(2)
        assert (await host.published(), host.rate) == (DiskState.OK, None)
        parts.set_config(
            host.config(
                storage_min_free_bytes=MORE_THAN_THERE_IS, storage_degraded_producer_byte_rate=123_000
            )
        )
        await asyncio.sleep(2)
        assert (await host.published(), host.rate) == (DiskState.DEGRADED, 123_000)
        parts.set_config(
            host.config(storage_min_free_bytes=MORE_THAN_THERE_IS, storage_degraded_action="alert")
        )
        await asyncio.sleep(2)
        assert (await host.published(), host.rate) == (DiskState.DEGRADED, None)


@virtually
async def test_throttling_is_what_refusing_does_until_there_is_a_gateway(host):
    """Both hold producers back."""
    for action in ("refuse_writes", "throttle_producers"):
        host.broker.quotas.clear()
        host.store = MemoryStore()
        config = host.config(storage_min_free_bytes=MORE_THAN_THERE_IS, storage_degraded_action=action)
        async with running(started(host.parts(config))):
            await asyncio.sleep(2)
        assert host.rate == 65_536


@virtually
@pytest.mark.parametrize("kind", ["none", "redpanda"])
async def test_degraded_mode_is_for_kafka_alone(host, kind):
    """Elsewhere the disks are watched, and the bucket is not asked for anything."""
    parts = host.parts(host.config(kind, storage_min_free_bytes=MORE_THAN_THERE_IS))
    async with running(started(parts)) as tasks:
        assert len(tasks) == 2  # The monitor and the space manager.
        await asyncio.sleep(60)
    name = "redpanda_storage_disk_free_space_alert"
    assert host.metrics.registry.get_sample_value(name, {"directory": str(host.root / "logs")}) == 2
    assert host.store.requests == []


@virtually
async def test_ballast_is_kept_where_it_is_wanted_and_goes_with_the_disk_state(host):
    """The ballast is made beside the state, and deleted once the monitor finds the disk degraded."""
    wanted = {"tune_ballast_file": True, "ballast_file_size": 4096, "ballast_release_when_degraded": True}
    path = host.root / "state" / "ballast"
    assert host.parts(host.config("none")).ballast is None
    parts = host.parts(host.config("none", **NOTHING_IS_LOW, **wanted))
    async with running(started(parts)):
        await asyncio.sleep(2)
        assert path.stat().st_size == 4096
        parts.set_config(host.config("none", storage_min_free_bytes=MORE_THAN_THERE_IS, **wanted))
        await asyncio.sleep(2)
        assert not path.exists()


@virtually
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
async def test_order_in_which_the_parts_begin_decides_nothing(host, order):
    """Each waits for what it needs of the others, in any order."""
    wanted = {"tune_ballast_file": True, "ballast_file_size": 4096, "ballast_release_when_degraded": True}
    full = host.config(storage_min_free_bytes=MORE_THAN_THERE_IS, **wanted)
    roomy = host.config(**NOTHING_IS_LOW, **wanted)
    ballast, found = host.root / "state" / "ballast", []
    parts = host.parts(roomy)
    async with running([asyncio.create_task(getattr(parts, name).run()) for name in order]):
        for config in (roomy, full, roomy):
            parts.set_config(config)
            await asyncio.sleep(2)
            found.append((await host.published(), host.rate, ballast.exists()))
    assert found == [
        (DiskState.OK, None, True),
        (DiskState.DEGRADED, 65_536, False),
        (DiskState.OK, None, True),
    ]


TIERED = {"cloud_storage_enabled": True, "cloud_storage_backend": "file", "cloud_storage_file_root": "/srv/a"}


@virtually
async def test_disk_of_the_cache_is_watched_where_there_is_one(host):
    """The cache's directory is made with tiering only, and its disk never makes the broker degraded."""
    name = "tieringd_cache_disk_free_space_alert"
    cache = host.root / "fast" / "cache"
    parts = host.parts(host.config("none", cloud_storage_cache_directory=str(cache)))
    async with running(started(parts)):
        await asyncio.sleep(2)
    assert not cache.exists()
    parts = host.parts(host.config("none", cloud_storage_cache_directory=str(cache), **TIERED))
    async with running(started(parts)):
        await asyncio.sleep(2)
    assert cache.is_dir()
    assert host.metrics.registry.get_sample_value(name, {"directory": str(cache)}) is not None


@virtually
async def test_cache_directory_that_cannot_be_made_is_said_and_the_rest_goes_on(host):
    """A file is in its place."""
    (host.root / "cache").write_text("x")
    config = host.config("none", cloud_storage_cache_directory=str(host.root / "cache" / "here"), **TIERED)
    parts = host.parts(config)
    with capture_logs() as lines:
        async with running(started(parts)):
            await asyncio.sleep(2)
    assert [line["path"] for line in lines if line["event"] == "disk is not watched"] == [
        str(host.root / "cache" / "here")
    ]
    name = "tieringd_disk_free_space_alert"
    assert host.metrics.registry.get_sample_value(name, {"directory": str(host.root / "logs")}) is not None
