"""Deletion by age while a host's clock is wrong, and after it was: what is kept, and what goes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.builders import DEFAULT_TIME_MS
from tests.fakes.archive import archive_in, archiver_of, observed, tiered_config
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.unit.model.values import remote
from tieringd.archiving.archive_retention import REMEMBERED_MAX, UploadTimes
from tieringd.daemon.scrubbing import scrub_parts
from tieringd.errors import StorageUnavailable
from tieringd.formats.object_keys import TopicKey, data_key
from tieringd.housekeeping.scrub import WholeScrub
from tieringd.metrics import Metrics
from tieringd.model.corrections import with_upload_times
from tieringd.model.segment import NO_TIMESTAMP
from tieringd.policies.retention_time import NOTHING_IS_OLD_MS
from tieringd.policies.total_retention import RetentionPace, TotalRetention
from tieringd.storage.archive_clock import ArchiveClock

if TYPE_CHECKING:
    from pathlib import Path

    from tieringd.housekeeping.scrub import ScrubReport
    from tieringd.model.segment import RemoteSegment

DAY_MS = 86_400_000
WEEK = TotalRetention(limit_ms=7 * DAY_MS, limit_bytes=None)
PACE = RetentionPace(interval_ms=300_000, delete_delay_ms=600_000)
BOOTED_WITHOUT_A_CLOCK_MS = 1_000_000_000
"""In January 1970."""


class Host:
    """A daemon's host: time passes, and its clock and the store's show it with an error."""

    def __init__(self, directory: Path, *, store_tells: bool = True) -> None:
        self.passed_ms = 0
        self.error_ms = 0
        self.total = WEEK
        self.store_error_ms = 0
        self.metrics = Metrics()
        self.store = MemoryStore(now_ms=lambda: self.right_ms() + self.store_error_ms)
        self.store.has_own_clock = store_tells
        self.writer = LogWriter(directory)
        self.broker = FakeBroker(self.writer)
        self.start()

    def start(self) -> None:
        """Start a daemon, as after a crash: what the one before knew is gone."""
        self.clock = ArchiveClock(
            metrics=self.metrics, wall_ms=self.wall_ms, steady_seconds=lambda: self.passed_ms / 1000
        )
        if self.store.has_own_clock:
            self.clock.listen_to(self.store)
        self.archive = archive_in(self.store, clock=self.clock)
        self.archiver = archiver_of(self.writer, self.archive, self.broker, metrics=self.metrics)

    def right_ms(self) -> int:
        return DEFAULT_TIME_MS + self.passed_ms

    def wall_ms(self) -> int:
        return self.right_ms() + self.error_ms

    def write(self, segments: int = 3, *, ahead_ms: int = 0) -> None:
        for _ in range(segments):
            self.writer.append(timestamp_ms=self.right_ms() + ahead_ms)
            self.writer.roll()

    async def step(self, *, after_ms: int = PACE.interval_ms, target_ms: int | None = None) -> None:
        self.passed_ms += after_ms
        while (await self.archiver.step(self._seen(target_ms))).uploaded:
            pass

    async def steps(self, count: int = 6, *, target_ms: int | None = None) -> None:
        for _ in range(count):
            await self.step(target_ms=target_ms)

    async def redate(self, uploaded_at_ms: int) -> None:
        """Let the manifest say that everything was uploaded then, as a wrong clock would have it."""
        stored = await self.archive.manifests.load(self.writer.identified)
        manifest = stored.existing
        times = {one.base_offset: uploaded_at_ms for one in manifest.segments}
        wrong = replace(manifest, segments=with_upload_times(manifest.segments, times))
        await self.archive.manifests.commit(stored, wrong, leader_epoch=0)
        self.start()

    def _seen(self, target_ms: int | None):
        return observed(self.writer, target_ms=target_ms, total=self.total, retention_pace=PACE)

    @property
    def start_offset(self) -> int:
        return self.archiver.manifest.start_offset

    @property
    def data_objects(self) -> int:
        return sum(key.endswith(".log") for key in self.store.objects)

    @property
    def is_doubted(self) -> bool:
        return self.metrics.registry.get_sample_value("tieringd_host_clock_doubted") == 1


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


@pytest.mark.parametrize("store_tells", [True, False], ids=["store-tells-time", "store-without-a-clock"])
async def test_what_was_uploaded_without_a_clock_outlives_the_clock_being_set(tmp_path, store_tells):
    """Fresh records that a host uploaded in 1970 stay in both tiers when NTP sets its clock."""
    host = Host(tmp_path, store_tells=store_tells)
    host.write()
    host.error_ms = BOOTED_WITHOUT_A_CLOCK_MS - host.right_ms()
    await host.step()
    host.error_ms = 0
    await host.steps(target_ms=DAY_MS)
    assert (host.start_offset, host.data_objects) == (0, 3)
    assert (host.writer.log_start_offset, len(host.writer.bases_on_disk)) == (0, 4)


@pytest.mark.parametrize("store_tells", [True, False], ids=["store-tells-time", "store-without-a-clock"])
async def test_an_archive_from_1970_is_not_emptied(tmp_path, store_tells):
    """Segments that an older version dated at 1970 are looked up, dated anew, and go when they are old."""
    host = Host(tmp_path, store_tells=store_tells)
    host.write()
    await host.step()
    await host.redate(BOOTED_WITHOUT_A_CLOCK_MS)
    await host.steps(target_ms=DAY_MS)
    assert (host.start_offset, host.writer.log_start_offset) == (0, 0)
    assert min(one.uploaded_at_ms for one in host.archiver.manifest.segments) >= DEFAULT_TIME_MS
    await host.step(after_ms=8 * DAY_MS, target_ms=DAY_MS)
    await host.steps(target_ms=DAY_MS)
    assert host.start_offset == host.writer.log_start_offset == host.archiver.manifest.next_offset
    assert host.data_objects == 0


async def test_a_directory_that_was_dated_by_the_same_wrong_clock(host):
    """Segments count from when the wrong dates are found, if both files and objects are dated 1970."""
    host.store.has_own_clock, host.store.now_ms = False, host.wall_ms
    host.start()
    host.write()
    host.error_ms = BOOTED_WITHOUT_A_CLOCK_MS - host.right_ms()
    await host.step()
    host.error_ms = 0
    host.start()
    await host.steps(target_ms=DAY_MS)
    assert (host.start_offset, host.data_objects, host.writer.log_start_offset) == (0, 3, 0)


async def test_scrub_takes_nothing_for_old_by_a_wrong_clock(host, tmp_path):
    """A host that is a year ahead finds no orphans, and empties no quarantine; with its clock set it does."""
    config = tiered_config(tmp_path)
    parts = scrub_parts(config, host.archive, writer_id="c3", local_log=lambda _: None)

    async def scrub() -> ScrubReport:
        return await WholeScrub(parts, host.store, host.archive.manifests).run(
            deep=False, fix=True, expire_before_ms=lambda: host.clock.ages_ms() - 7 * DAY_MS
        )

    host.write()
    one = host.writer.identified
    await host.archive.manifests.ensure_topic(
        TopicKey(one.cluster, one.topic, one.topic_id), partition_count=1
    )
    await host.step()
    segment = host.archiver.manifest.segments[0]
    host.store.add(data_key(one, replace(segment, writer_id="dead0001")), b"uploaded a moment ago")
    host.error_ms = 400 * DAY_MS
    assert (await scrub()).orphans == []
    host.error_ms = 0
    host.passed_ms += 40 * DAY_MS
    assert len((await scrub()).moved) == 1
    host.error_ms = 400 * DAY_MS
    assert (await scrub()).expired.deleted == ()
    host.error_ms = 0
    host.passed_ms += 8 * DAY_MS
    assert len((await scrub()).expired.deleted) == 1


async def test_an_upload_dated_days_too_early_is_looked_up(host):
    """A clock that was a month behind at the upload is found out by what the store says of the object."""
    host.write()
    await host.step()
    await host.redate(host.right_ms() - 30 * DAY_MS)
    await host.steps(target_ms=DAY_MS)
    assert (host.start_offset, host.writer.log_start_offset) == (0, 0)


async def test_an_upload_dated_in_the_future_does_not_keep_data_for_ever(host):
    """The store's date of the object counts if records and upload are dated years ahead."""
    host.write(ahead_ms=4000 * DAY_MS)
    await host.step()
    await host.redate(host.right_ms() + 3000 * DAY_MS)
    await host.steps()
    assert host.start_offset == 0
    await host.step(after_ms=8 * DAY_MS)
    await host.steps(3)
    assert host.start_offset == host.archiver.manifest.next_offset


async def test_records_dated_in_the_future_go_a_retention_after_the_upload(host):
    """The store confirms the upload time once, and such records go no later than that plus retention."""
    host.write(ahead_ms=4 * DAY_MS)
    await host.step()
    await host.step(after_ms=7 * DAY_MS + 1)
    await host.step()
    assert host.start_offset == host.archiver.manifest.next_offset


@pytest.mark.parametrize("error_ms", [400 * DAY_MS, -400 * DAY_MS, 61_000 + PACE.interval_ms])
async def test_nothing_goes_by_age_while_the_clock_is_off(host, error_ms):
    """A clock that is off is reported, new objects get no date that is too early, and what is old stays."""
    host.write()
    await host.step()
    host.passed_ms += 8 * DAY_MS
    host.error_ms = error_ms
    host.write()
    await host.steps(target_ms=DAY_MS)
    assert (host.start_offset, host.writer.log_start_offset, host.is_doubted) == (0, 0, True)
    late_ms = host.archiver.manifest.segments[5].uploaded_at_ms - host.right_ms()
    assert -DAY_MS < late_ms <= max(error_ms, 0)
    host.error_ms = 0
    await host.steps(target_ms=DAY_MS)
    assert (host.start_offset, host.is_doubted) == (9, False)


async def test_objects_on_the_way_out_wait_for_a_certain_clock(host):
    """A jump of the clock does not cut a reader's time short: the delay of retired objects goes on."""
    host.write()
    await host.step()
    host.passed_ms += 8 * DAY_MS
    await host.steps(2)
    assert (len(host.archiver.manifest.retired), host.data_objects) == (1, 3)
    host.error_ms = 400 * DAY_MS
    await host.steps(4)
    assert host.data_objects == 3
    host.error_ms = 0
    await host.steps(2)
    assert host.data_objects == 0


async def test_objects_retired_in_the_future_go_all_the_same(host):
    """A mark that a clock set years ahead has left does not keep objects for years."""
    host.write()
    await host.step()
    stored = await host.archive.manifests.load(host.writer.identified)
    manifest = stored.existing.expired(1, now_ms=host.right_ms() + 3000 * DAY_MS)
    await host.archive.manifests.commit(stored, manifest, leader_epoch=0)
    host.start()
    await host.step()
    assert host.data_objects == 3, "the delay begins when the mark is found"
    await host.steps(3)
    assert host.data_objects == 2


async def test_a_clock_set_forward_beside_a_store_without_one(tmp_path):
    """No age is certain after a jump of the host's clock if no other clock tells the time."""
    host = Host(tmp_path, store_tells=False)
    host.write()
    await host.step()
    host.error_ms = 400 * DAY_MS
    await host.steps(target_ms=DAY_MS)
    assert (host.start_offset, host.writer.log_start_offset, host.is_doubted) == (0, 0, True)


async def test_a_clock_behind_the_last_commit(tmp_path):
    """The last commit shows that a host's clock is behind if no other clock does. Nothing is deleted."""
    host = Host(tmp_path, store_tells=False)
    host.write()
    await host.step()
    host.passed_ms += 30 * DAY_MS
    host.write(1)
    await host.step()
    stored = await host.archive.manifests.load(host.writer.identified)
    gone = stored.existing.expired(1, now_ms=DEFAULT_TIME_MS)
    await host.archive.manifests.commit(stored, gone, leader_epoch=0)
    host.error_ms = -10 * DAY_MS
    host.start()
    await host.steps()
    assert host.data_objects == 4


async def test_no_upload_time_is_looked_up_at_rest(host):
    """A partition whose records are dated in the future is asked for once, not at each check."""
    host.write(ahead_ms=4 * DAY_MS)
    await host.steps(2, target_ms=DAY_MS)
    before = len(host.store.requests)
    for _ in range(5):
        await host.step(after_ms=PACE.interval_ms, target_ms=DAY_MS)
    listings = [one for one in host.store.requests[before:] if one[0] == "list_page"]
    assert listings == []


async def test_local_data_waits_while_upload_times_cannot_be_looked_up(host):
    """A store that answers no listing leaves local retention by time alone; the step goes on."""
    host.write()
    await host.step()
    await host.redate(host.right_ms() - 30 * DAY_MS)
    host.store.fail_next("list_page", lambda: StorageUnavailable("away"), times=2)
    await host.step(target_ms=DAY_MS)
    assert host.writer.log_start_offset == 0


async def test_a_store_that_was_behind_makes_nothing_old(host):
    """Fresh data that was uploaded while the store's clock was a year behind stays when that is set right."""
    host.store_error_ms = -365 * DAY_MS
    host.write()
    await host.step()
    assert host.is_doubted
    host.store_error_ms = 0
    await host.steps(target_ms=DAY_MS)
    assert (host.start_offset, host.writer.log_start_offset, host.data_objects) == (0, 0, 3)


@pytest.mark.parametrize("is_at_once", [True, False], ids=["at-once", "one-after-the-other"])
async def test_clocks_of_host_and_store_that_are_set_together(host, is_at_once):
    """A store on the same host has the same clock: that the two agree after a jump proves nothing."""
    host.write()
    await host.step()
    host.store_error_ms = 400 * DAY_MS
    if not is_at_once:
        await host.step(target_ms=DAY_MS)
    host.error_ms = 400 * DAY_MS
    await host.steps(target_ms=DAY_MS)
    assert (host.start_offset, host.writer.log_start_offset, host.is_doubted) == (0, 0, True)
    host.error_ms = host.store_error_ms = 0
    await host.steps(target_ms=DAY_MS)
    assert (host.start_offset, host.is_doubted) == (0, False)


async def test_small_corrections_of_the_clock_do_not_add_up(tmp_path):
    """A clock that is set by seconds again and again, as after short pauses of its host, is believed."""
    host = Host(tmp_path, store_tells=False)
    host.write()
    for _ in range(10):
        await host.step()
        host.error_ms += 50_000
    assert not host.is_doubted


async def test_no_age_is_certain_before_the_stores_first_answer(host):
    """A host that starts with a wrong clock does not go by it until the store has told the time."""
    host.error_ms = 400 * DAY_MS
    host.start()
    assert host.clock.ages_ms() == NOTHING_IS_OLD_MS
    await host.step()
    assert host.clock.ages_ms() == NOTHING_IS_OLD_MS
    host.error_ms = 0
    await host.step()
    assert host.clock.ages_ms() == host.right_ms()


async def test_a_store_whose_answers_have_no_date(host):
    """Retention goes by the host's clock if the store's answers have no date."""
    host.store.now_ms = None
    host.start()
    host.write()
    await host.step()
    host.passed_ms += 8 * DAY_MS
    await host.steps()
    assert (host.start_offset, host.is_doubted) == (9, False)


async def test_a_commit_in_the_future_is_reported_and_does_not_block_for_ever(tmp_path):
    """A manifest that a wrong clock dated years ahead holds retention up for an hour; the metric says so."""
    host = Host(tmp_path, store_tells=False)
    host.write()
    await host.step()
    stored = await host.archive.manifests.load(host.writer.identified)
    host.passed_ms += 8 * DAY_MS
    host.error_ms = 3000 * DAY_MS
    await host.archive.manifests.commit(stored, stored.existing, leader_epoch=0)
    host.error_ms = 0
    host.start()
    await host.steps(2)
    assert (host.start_offset, host.is_doubted) == (0, True)
    await host.steps(12)
    assert (host.start_offset, host.is_doubted) == (9, False)


async def test_a_clock_that_is_set_back_prolongs_no_rest(tmp_path):
    """A rest that began while the clock was years ahead does not last for years once it is set right."""
    host = Host(tmp_path, store_tells=False)
    host.write()
    await host.steps(3)
    host.error_ms = 3000 * DAY_MS
    host.start()
    seen = observed(host.writer, retention_pace=PACE)
    for _ in range(3):
        host.passed_ms += PACE.edits_interval_ms
        await host.archiver.step(seen)
    assert host.archiver.is_at_rest(seen)
    host.error_ms = 0
    host.passed_ms += PACE.edits_interval_ms
    assert not host.archiver.is_at_rest(seen)


async def test_a_refused_trim_is_asked_for_again_when_the_clock_was_set_back(tmp_path):
    """The pause after a refusal is five minutes of time that passes, whatever the clock shows."""
    host = Host(tmp_path, store_tells=False)
    host.write()
    host.broker.denied.add("orders")
    host.error_ms = 3000 * DAY_MS
    host.start()
    await host.step()
    await host.archiver.step(observed(host.writer, target_bytes=0))
    host.broker.denied.clear()
    host.error_ms = 0
    host.passed_ms += 600_000
    await host.archiver.step(observed(host.writer, target_bytes=0))
    assert host.writer.log_start_offset == 9


async def test_looked_up_upload_times_are_not_remembered_for_ever(host):
    """A topic whose records have no timestamps is asked for segment by segment, as each is about to go."""

    class Objects:
        async def stored_at_ms(self, _partition: object, segment: RemoteSegment) -> int:
            return segment.uploaded_at_ms

    times = UploadTimes(host.writer.identified, claim=None, remote_log=Objects(), clock=host.clock)
    for base in range(0, 3 * REMEMBERED_MAX, 64):
        some = [remote(one, one, max_timestamp_ms=NO_TIMESTAMP) for one in range(base, base + 64)]
        assert await times.corrections(some, now_ms=host.right_ms()) == {}
    assert len(times._proven) == REMEMBERED_MAX


@pytest.mark.parametrize("jump_ms", [0, 2 * PACE.interval_ms, -2 * PACE.interval_ms])
async def test_clock_that_is_set_puts_no_interval_between_two_observations(host, jump_ms):
    """A retention.bytes that is wrong for a moment expires nothing, though the clock is set meanwhile."""
    host.write()
    await host.step()
    host.total = TotalRetention(limit_ms=None, limit_bytes=1)
    await host.step()
    host.error_ms = jump_ms
    await host.step(after_ms=1000)
    assert host.start_offset == 0
    host.total = WEEK
    await host.steps()
    assert (host.start_offset, host.data_objects) == (0, 3)


@pytest.mark.parametrize("jump_ms", [0, 2 * PACE.interval_ms, -2 * PACE.interval_ms])
async def test_clock_that_is_set_does_not_put_retention_off(host, jump_ms):
    """What two observations an interval apart agree on goes when that interval has passed."""
    host.write()
    await host.step()
    host.total = TotalRetention(limit_ms=None, limit_bytes=1)
    await host.step()
    host.error_ms = jump_ms
    await host.step(after_ms=PACE.interval_ms - 1)
    assert host.start_offset == 0
    await host.step(after_ms=1)
    assert host.start_offset > 0
