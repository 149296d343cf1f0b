"""
What an idle daemon does in an hour, and what one segment costs: counted, on a virtual clock.

A figure in seconds tells of a loss when someone measures. A count tells of it in each run of the tests. Each
number below is a constant of the design, and its reason is beside it. A change that raises one of them says
why, or is a loss.
"""

# Long: a virtual hour of a thousand partitions.

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in, reconciler_of
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.fakes.virtual_loop import virtually
from tests.support.file_calls import counted_file_calls
from tieringd.archiving.archiver import Archiver
from tieringd.archiving.listed_partitions import ListedPartitions
from tieringd.archiving.pin_rounds import PinRounds
from tieringd.archiving.reconciler import Reconciler
from tieringd.broker.disk_use import OLD_SCAN_EVERY
from tieringd.broker.log_dir import LOOK_EVERY, ReportedChanges
from tieringd.broker.pins import PinDirectory
from tieringd.config import Config, parse_config
from tieringd.daemon.housekeeping_jobs import housekeeping_of
from tieringd.formats.object_keys import manifest_key, topic_key, topic_manifest_key
from tieringd.metrics import Metrics
from tieringd.space.space_manager import SpaceManager
from tieringd.storage.archive_clock import ArchiveClock
from tieringd.storage.resilient import ResilientStore

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

PARTITIONS = 1000
HOUR, QUARTER = 3600, 900
ROUNDS = HOUR // 10
"""Of reconciliation, and as many of housekeeping: both come every ten seconds by default."""
MEASUREMENTS = HOUR // 30
"""Of the disks, by default."""
LOG_DIR_STATS = 4
"""For each measurement: the log directory, and the cache's, which is not there, with what is above it."""
OVERHEAD_BYTES = 4096
LONG_AGO_NS = DEFAULT_TIME_MS * 1_000_000

TOPICS = {
    "empty": {},
    "kept": {"local.retention.ms": "-1", "local.retention.bytes": "-1"},
    "trimmed": {"local.retention.ms": "1"},
    "compacted": {"cleanup.policy": "compact"},
}
"""Each has as many partitions. Of the first nothing is closed, the second stays, the others are trimmed."""


class Reports:
    """A kernel that reports changes in some directories."""

    def __init__(self, watched: frozenset[str]) -> None:
        self._watched = watched
        self.say_anything_may_change = True
        """Until a test says that nothing does."""

    def since_last(self, *, unwritten: Collection[str]) -> ReportedChanges:
        del unwritten
        changed = self._watched if self.say_anything_may_change else frozenset()
        return ReportedChanges(self._watched, changed, changed)


class IdleDaemon:
    """
    The services of one daemon with its defaults, over a broker that takes no more records.

    The kernel reports changes in the partitions' directories.
    """

    def __init__(self, root: Path, *, partitions: int) -> None:
        self.log_dir = root / "log"
        self.config = parse_config(
            f"""\
broker:
  kind: none
  log_dirs: [{self.log_dir}]
state_directory: {root}/state
cloud_storage_enabled: true
cloud_storage_enable_remote_write: true
cloud_storage_enable_remote_read: true
cloud_storage_backend: file
cloud_storage_file_root: /nowhere/archive
retention_local_strict: true
log_retention_ms: -1
""",
            source="test",
            environ={},
        )
        self.writers = [
            LogWriter(self.log_dir, topic, number)
            for topic in TOPICS
            for number in range(partitions // len(TOPICS))
        ]
        for writer in self.writers:
            if writer.name.topic != "empty":
                writer.append(b"closed" * 100)
                writer.roll()
        for directory in self.log_dir.iterdir():
            settle(directory)
        self.requests: Counter[str] = Counter()
        self.request_bytes = 0
        self.metrics = Metrics()
        now_ms = self.now_ms
        self.backend = backend = MemoryStore(now_ms=now_ms)
        clock = ArchiveClock(wall_ms=now_ms, steady_seconds=lambda: now_ms() / 1000)
        clock.listen_to(backend)
        self.archive = archive_in(ResilientStore(backend, on_request=self._note), clock=clock)
        self.broker = FakeBroker(*self.writers)
        self.broker.configs = {topic: dict(settings) for topic, settings in TOPICS.items()}
        pins = root / "pins"
        pins.mkdir()
        self.reports = Reports(frozenset(str(writer.path) for writer in self.writers))
        self.reconciler = reconciler_of(
            self.config,
            self.archive,
            self.broker,
            metrics=self.metrics,
            pins={str(self.log_dir): PinDirectory(str(pins))},
            reports=self.reports,
        )

    def now_ms(self) -> int:
        return DEFAULT_TIME_MS + round(asyncio.get_running_loop().time() * 1000)

    def _note(self, operation: str, outcome: str, seconds: float, size_bytes: int) -> None:
        del outcome, seconds
        self.requests[operation] += 1
        self.request_bytes += size_bytes

    @asynccontextmanager
    async def running(self):
        """Run everything that acts by itself, for the time of the context."""
        housekeeping = housekeeping_of(
            self.config,
            self.metrics,
            self.archive,
            self.broker,
            reconciler=self.reconciler,
            writer_id="a1",
        )
        space = SpaceManager(
            self.config, reconciler=self.reconciler, metrics=self.metrics, ages_ms=self.archive.clock.ages_ms
        )
        tasks = [
            asyncio.create_task(one)
            for one in (self.reconciler.run(), housekeeping.service.run(), space.run())
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def settle(directory: Path) -> None:
    """Let the files be of long ago: a scan remembers what has not changed for some seconds."""
    for each in (*directory.iterdir(), directory):
        os.utime(each, ns=(LONG_AGO_NS, LONG_AGO_NS))


@contextmanager
def counted(owner, name):
    """Count the calls of a method, which does its work all the same."""
    calls, method = [0], getattr(owner, name)

    def counting(self, *arguments, **options):
        calls[0] += 1
        return method(self, *arguments, **options)

    with patch.object(owner, name, counting):
        yield calls


@contextmanager
def counted_tasks():
    """Count the tasks that are created on the running loop."""
    calls, loop = [0], asyncio.get_running_loop()

    def create(loop, coroutine, **options):
        calls[0] += 1
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(create)
    try:
        yield calls
    finally:
        loop.set_task_factory(None)


# Long: a virtual hour of a thousand partitions.
@virtually
async def test_idle_hour_of_a_thousand_partitions(tmp_path):
    """An hour without any change costs scans of the files, polls for edits, and listings of topics."""
    daemon = IdleDaemon(tmp_path, partitions=PARTITIONS)
    async with daemon.running():
        await asyncio.sleep(QUARTER)
        assert len(list(daemon.reconciler.archived())) == PARTITIONS
        for directory in daemon.log_dir.iterdir():
            settle(directory)
        await asyncio.sleep(HOUR / MEASUREMENTS)
        daemon.reports.say_anything_may_change = False
        await asyncio.sleep(HOUR / MEASUREMENTS)
        daemon.requests.clear()
        daemon.request_bytes = 0
        with (
            counted(Archiver, "step") as steps,
            counted(Reconciler, "archived_one") as asked,
            counted(ListedPartitions, "__init__") as listings,
            counted(Config, "topic") as resolved,
            counted(PinRounds, "_planned") as planned,
            counted(PinDirectory, "found") as sought,
            counted_tasks() as tasks,
            counted_file_calls() as calls,
        ):
            await asyncio.sleep(HOUR)
    segments = sum(len(writer.bases_on_disk) for writer in daemon.writers)
    assert segments == PARTITIONS * 5 // 4
    # An archiver polls for edits of its manifest every half hour, and does nothing else.
    assert steps[0] <= 2 * PARTITIONS
    # The poll is one request. The manifest upkeep lists the topics' manifests, and the purge of deleted
    # topics takes what it found.
    assert daemon.requests.keys() <= {"head", "list_page"}
    assert daemon.requests["head"] <= 2 * PARTITIONS
    assert daemon.requests["list_page"] <= ROUNDS
    assert daemon.request_bytes == 0, "nothing was read or written"
    # Merge and re-upload plan, and then ask, once after each of the polls.
    assert asked[0] <= 2 * 2 * 2 * PARTITIONS
    # What follows from the names, the roles and the settings is kept from the last round.
    assert (listings[0], resolved[0]) == (0, 0)
    # The pins of a partition are planned in the round of each of the polls, and in the one after it: the
    # archiver's step may have changed the manifest. There are no pins to look at.
    assert planned[0] <= 2 * 2 * PARTITIONS
    assert sought[0] == 0
    # All goes on in the tasks that there are.
    assert tasks[0] == 0
    # A round asks for a fifth of the directories and segments: the kernel reports no change.
    # A measurement of the disks takes what the newest round has seen. It asks for a directory and its active
    # segment where it lists the directory.
    full_scans = PARTITIONS * MEASUREMENTS // OLD_SCAN_EVERY
    measuring = MEASUREMENTS * LOG_DIR_STATS + 2 * full_scans
    assert calls["stat"] <= ROUNDS * (PARTITIONS + segments) // LOOK_EVERY + measuring
    # The log directory is listed by each round and measurement, a partition's only when it is read whole. The
    # pins are listed by each scan and by each step of the pinner.
    assert calls["scandir"] <= 3 * ROUNDS + 2 * MEASUREMENTS + full_scans
    # A round reads meta.properties.
    assert calls["open"] <= ROUNDS


@virtually
async def test_first_start_looks_for_no_manifest_of_a_new_topic(tmp_path):
    """The claims wait for the manifests of the topics, which a restore finds partitions by."""
    count = PARTITIONS // 5
    daemon = IdleDaemon(tmp_path, partitions=count)
    daemon.backend.latency_seconds = 0.01
    async with daemon.running():
        await asyncio.sleep(QUARTER)
        assert len(list(daemon.reconciler.archived())) == count
    asked = daemon.backend.requests
    for writer in daemon.writers:
        key = manifest_key(writer.identified)
        assert ("get", key) not in asked
        topic = topic_manifest_key(topic_key(writer.identified))
        assert asked.index(("put", topic)) < asked.index(("put", key))


@virtually
async def test_requests_of_one_segment_from_closed_to_trimmed(tmp_path):
    """The requests and the bytes of one segment, in a partition that is archived already, are bounded."""
    daemon = IdleDaemon(tmp_path, partitions=len(TOPICS))
    writer = next(one for one in daemon.writers if one.name.topic == "trimmed")
    async with daemon.running():
        await asyncio.sleep(QUARTER)
        earlier = len(daemon.backend.requests)
        daemon.requests.clear()
        daemon.request_bytes = 0
        base_offset = writer.closed_segment(b"one segment" * 1000)
        size_bytes = len(writer.data_of(base_offset))
        assert await daemon.reconciler.rescan_partitions([str(writer.path)])
        await asyncio.sleep(5)
        assert base_offset not in writer.bases_on_disk
    requests = daemon.backend.requests[earlier:]
    put = {key for operation, key in requests if operation == "put" and not key.endswith("/manifest")}
    # Its data, its index, and one commit, which says as well what may be trimmed. Before the trim the
    # manifest is read: it may have another owner by now.
    listings = daemon.requests.pop("list_page", 0)
    assert daemon.requests == {"put": 3, "head": 1}
    assert listings <= 2, "a round may have come meanwhile"
    assert len(put) == 2
    # The data goes once and never comes back. All else are the index and two small manifests.
    assert size_bytes < daemon.request_bytes < size_bytes + OVERHEAD_BYTES
