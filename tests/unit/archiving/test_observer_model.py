"""
An observer that has scanned before returns what one returns that scans for the first time.

Files, leadership, topic configurations, topic manifests and pins change at random between the scans. The
kernel reports to the first observer what changes in the directories, as it does to a daemon.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fakes.archive import archive_in
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import CLUSTER, LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.support.examples import examples
from tieringd.archiving.observer import Observer
from tieringd.archiving.pinner import PinFacts, Pinner
from tieringd.broker.directory_broker import DirectoryBroker
from tieringd.broker.layout import KafkaLayout
from tieringd.broker.pins import PinDirectory
from tieringd.broker.watch import DirectoryWatch
from tieringd.config import parse_config
from tieringd.errors import BrokerUnavailable, LocalFileError
from tieringd.formats.object_keys import topic_key
from tieringd.formats.topic_manifest import Archiving, TieringDefaults
from tieringd.metrics import Metrics
from tieringd.topics.topic_registry import TopicRegistry, partition_counts

if TYPE_CHECKING:
    from tieringd.broker.log_dir import ChangeReports

SETTINGS = ({}, {"local.retention.bytes": "77"}, {"redpanda.remote.write": "false"}, {"retention.ms": "5000"})
OVERRIDES = (
    "{}",
    "{orders: {tieringd.managed.retention: true}}",
    "{payments: {redpanda.remote.write: false}}",
)


class World:
    """A log directory, a broker and a bucket, which any of the changes below may change."""

    def __init__(self, root: Path, *, has_broker: bool, watch_after: int) -> None:
        self.watch_after = watch_after
        """The number of the round from which on partitions' directories are watched."""
        self.has_broker = has_broker
        self.log_dir = root / "logs"
        self.metrics = Metrics()
        self.writers = [
            LogWriter(self.log_dir, topic, number) for topic in ("orders", "payments") for number in range(2)
        ]
        for writer in self.writers:
            writer.closed_segment()
        self.broker = FakeBroker(*self.writers)
        self.archive = archive_in(MemoryStore(now_ms=lambda: 0))
        self.registry = TopicRegistry(self.archive.store, self.archive.manifests)
        (root / "pins").mkdir()
        self.pinner = Pinner(
            {str(self.log_dir): PinDirectory(str(root / "pins"))}, budget_bytes=10**9, metrics=self.metrics
        )
        self.config = self.config_with("{}")
        self.numbers = count(10)
        self.watch = DirectoryWatch([str(self.log_dir)])
        self.observer = self.new_observer(self.watch)

    def config_with(self, topics: str):
        text = f"""\
broker: {{kind: none, log_dirs: [{self.log_dir}]}}
state_directory: /nowhere/state
cloud_storage_enabled: true
cloud_storage_enable_remote_write: true
cloud_storage_enable_remote_read: true
cloud_storage_backend: file
cloud_storage_file_root: /nowhere/archive
log_retention_ms: -1
topics: {topics}
"""
        return parse_config(text, source="test", environ={})

    def new_observer(self, reports: ChangeReports | None = None) -> Observer:
        return Observer(
            self.config,
            broker=self.broker
            if self.has_broker
            else DirectoryBroker([str(self.log_dir)], cluster_id=CLUSTER),
            metrics=self.metrics,
            pinner=self.pinner,
            registry=self.registry,
            manifests=self.archive.manifests,
            layout=KafkaLayout(),
            reports=reports,
        )

    def watch_directories(self, number: int) -> None:
        """Watch each partition's directory after the scan of round *number*, as the daemon does."""
        if number >= self.watch_after:
            self.watch.follow(tuple(str(writer.path) for writer in self.writers))

    def writer(self, number: int) -> LogWriter:
        return self.writers[number % len(self.writers)]

    # Each method below is a change, and takes a number to choose by.

    async def append(self, number: int) -> None:
        self.writer(number).append()

    async def roll(self, number: int) -> None:
        self.writer(number).closed_segment()

    async def drop_head(self, number: int) -> None:
        if len(self.writer(number).bases_on_disk) > 1:
            self.writer(number).drop_head()

    async def truncate(self, number: int) -> None:
        writer = self.writer(number)
        offset = writer.batch_bases[len(writer.batch_bases) // 2]
        if offset >= writer.bases_on_disk[0]:
            writer.truncate(offset)

    async def lead_anew(self, number: int) -> None:
        """The broker leads under the next epoch, and writes so into its files."""
        await self.write_epoch(number)
        await self.ask_for_leader(number)

    async def write_epoch(self, number: int) -> None:
        """The files are ahead of what the broker answers."""
        self.writer(number).begin_epoch(next(self.numbers))

    async def ask_for_leader(self, number: int) -> None:
        """The broker answers with the epoch of the files."""
        writer = self.writer(number)
        self.broker.followed.pop(writer.name, None)
        self.broker.epochs[writer.name] = writer.epochs[-1][0]

    async def follow(self, number: int) -> None:
        name = self.writer(number).name
        self.broker.epochs.pop(name, None)
        self.broker.followed[name] = next(self.numbers)

    async def unlist(self, number: int) -> None:
        """The cluster no longer names this broker a replica."""
        name = self.writer(number).name
        self.broker.epochs.pop(name, None)
        self.broker.followed.pop(name, None)

    async def lag(self, number: int) -> None:
        self.broker.lagging ^= {self.writer(number).name}

    async def add(self, number: int) -> None:
        writer = LogWriter(self.log_dir, ("orders", "payments")[number % 2], next(self.numbers))
        self.writers.append(writer)
        self.broker.add(writer)

    async def create_again(self, number: int) -> None:
        """The topic's partition is deleted, and another one of the same name begins."""
        old = self.writer(number)
        # The old directory stays on disk, so that no inode of it is used again.
        old.path.rename(self.log_dir / f"{old.name}.{next(self.numbers):032x}-delete")
        new = LogWriter(
            self.log_dir,
            old.name.topic,
            old.name.partition,
            topic_id=f"W1xNUlUlTfigw_K-dv{next(self.numbers):04}",
        )
        self.writers[self.writers.index(old)] = new
        self.broker.add(new)

    async def remove(self, number: int) -> None:
        """The broker deletes the partition's directory, which has another name first."""
        if len(self.writers) == 1:
            return
        writer = self.writer(number)
        await self.unlist(number)
        self.writers.remove(writer)
        writer.path.rename(self.log_dir / f"{writer.name}.{next(self.numbers):032x}-delete")

    async def damage(self, number: int) -> None:
        path = self.writer(number).path / "leader-epoch-checkpoint"
        replaced = path.with_suffix(".tmp")
        replaced.write_text("nonsense")
        replaced.rename(path)

    async def fail_bounds(self, number: int) -> None:
        name = self.writer(number).name
        if self.broker.bounds_errors.pop(name, None) is None:
            self.broker.bounds_errors[name] = BrokerUnavailable("NOT_LEADER_OR_FOLLOWER")

    async def open_transaction(self, number: int) -> None:
        self.writer(number).append(producer_id=7)

    async def hold_back(self, number: int) -> None:
        """The high watermark stays behind, which no file shows."""
        writer = self.writer(number)
        writer.high_watermark = None if writer.high_watermark is not None else writer.log_start_offset

    async def configure(self, number: int) -> None:
        topic = self.writer(number).name.topic
        self.broker.configs.setdefault(topic, {}).clear()
        self.broker.configs[topic].update(SETTINGS[number // 4])

    async def say_nothing_of(self, number: int) -> None:
        self.broker.untold ^= {self.writer(number).name.topic}

    async def set_config(self, number: int) -> None:
        self.config = self.config_with(OVERRIDES[number % len(OVERRIDES)])
        self.observer.set_config(self.config)

    async def pause(self, number: int) -> None:
        key = topic_key(self.writer(number).identified)
        archiving = (Archiving.PAUSED, Archiving.ON)[number % 2]
        await self.archive.manifests.change_topic(key, lambda found: replace(found, archiving=archiving))
        await self.registry.refresh(CLUSTER)

    async def record(self, number: int) -> None:
        """The bucket records what the topic began with."""
        defaults = TieringDefaults(remote_write=number % 2 == 0, remote_read=True, local_target_bytes=number)
        key = topic_key(self.writer(number).identified)
        await self.registry.change(key, lambda found: replace(found, defaults=defaults))

    async def count(self, number: int) -> None:
        await self.registry.refresh(CLUSTER)
        await self.registry.ensure(partition_counts([self.writer(number).identified]))

    async def pin(self, number: int) -> None:
        await self.step_pins(number, next_offset=None)

    async def release(self, number: int) -> None:
        await self.step_pins(number, next_offset=self.writer(number).next_offset)

    async def rescan(self, number: int) -> None:
        await self.observer.rescan_partitions([str(self.writer(number).path)])

    def step_pins(self, number: int, *, next_offset: int | None):
        """Return a step of the pinner that takes a partition to be durable below *next_offset*."""
        writer = self.writer(number)
        pins = self.pinner.pins_of(writer.partition).pins
        with suppress(LocalFileError):
            return self.pinner.step([PinFacts(writer.local_log(), pins, next_offset)], is_complete=False)
        # A damaged log has no observation, and the pinner does nothing with it.
        return asyncio.sleep(0)


CHANGES = [name for name, member in vars(World).items() if asyncio.iscoroutinefunction(member)]
ROUNDS = st.lists(
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 15)), max_size=3), min_size=1, max_size=8
)


def shown(snapshot) -> dict[str, object]:
    """
    Return all that a snapshot says, without the number and the time of its scan.

    `remote_delete` is left out: what it says takes two scans.
    """
    return {
        name: getattr(snapshot, name)
        for name in snapshot.__dataclass_fields__
        if name not in {"scan_number", "scan_began_at", "asked_at", "remote_delete"}
    }


@pytest.mark.parametrize("has_broker", [True, False])
@given(rounds=ROUNDS, watch_after=st.integers(0, 3))
@example(
    rounds=[[("count", 1), ("count", 3)], [("append", 0)], [("lead_anew", 0)], [], [("configure", 2)]],
    watch_after=0,
)
@example(rounds=[[("count", 1)], [], [("write_epoch", 0)], [("ask_for_leader", 0)]], watch_after=0)
@example(
    rounds=[[("count", 1)], [("hold_back", 0)], [("configure", 4)], [("configure", 8)], [("pause", 0)]],
    watch_after=0,
)
@example(
    rounds=[[("count", 1)], [("record", 0)], [("record", 1)], [("remove", 0), ("add", 0)]], watch_after=0
)
@example(
    rounds=[[("count", 1)], [("pin", 0)], [("drop_head", 0)], [("release", 0)], [("create_again", 0)]],
    watch_after=0,
)
@example(
    rounds=[[("count", 1)], [("rescan", 0)], [("roll", 0), ("rescan", 0)], [("append", 0)]], watch_after=0
)
@settings(max_examples=examples(60), deadline=None)
def test_observer_that_remembers_returns_what_a_new_one_returns(has_broker, rounds, watch_after):
    """A scan that keeps what is unchanged says the same, after any changes, as one that knows nothing."""

    async def run(root: Path) -> None:
        world = World(root, has_broker=has_broker, watch_after=watch_after)
        for round_number, changes in enumerate(rounds):
            for name, number in changes:
                await getattr(world, name)(number)
            if "create_again" in dict(changes):
                # A read notices another topic's directory, and the scan after it finds the topic.
                await world.observer.scan()
            remembered = await world.observer.scan()
            new_observer = world.new_observer()
            # The last settings of a topic that the broker leaves out are all that a new one cannot know.
            new_observer._told = dict(world.observer._told)
            assert shown(remembered) == shown(await new_observer.scan())
            # With nothing in between, a scan says the same and shows by identity that it does.
            again = await world.observer.scan()
            assert shown(again) == shown(remembered)
            assert again.remote_delete == (await new_observer.scan()).remote_delete
            assert again.wanted is remembered.wanted
            assert again.local is remembered.local
            world.watch_directories(round_number)
        world.watch.close()

    # The messages of a thousand scans would be all that a failure shows.
    with (
        tempfile.TemporaryDirectory() as directory,
        structlog.testing.capture_logs() as logs,
    ):
        asyncio.run(run(Path(directory)))
    assert not any("not reported" in line["event"] for line in logs)
