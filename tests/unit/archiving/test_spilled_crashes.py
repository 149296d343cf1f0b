"""Spilling, retention and elections with a crash after every step of each, and readers beside them."""

# Long: a crash at each step of each history, none left out.

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from tests.fakes.archive import Clock, archive_in, archiver_of, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import stored_manifest
from tests.fakes.spilling import (
    MINUTE_MS,
    PACE,
    Crash,
    CrashingStore,
    data_keys,
    filled,
    make_parts_small,
    observe,
    spilled_names,
)
from tieringd.archiving.archive_retention import ArchiveRetention, UploadTimes
from tieringd.archiving.claim import Claim
from tieringd.archiving.user_deletions import UserDeletions
from tieringd.errors import ObjectNotFound
from tieringd.formats.object_keys import data_key
from tieringd.metrics import Metrics
from tieringd.model.manifest_parts import Retired
from tieringd.model.partition import Leadership
from tieringd.model.tail_cut import cut_back
from tieringd.policies.total_retention import TotalRetention


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Make each segment that may spill a part of its own."""
    make_parts_small(monkeypatch)


class World:
    """One partition, the processes that archive it one after another, and all that was ever archived."""

    def __init__(self, directory) -> None:
        self.directory = directory
        self.store, self.clock = CrashingStore(), Clock()
        self.store.now_ms = self.clock
        self.writer = LogWriter(directory)
        self.leader_epoch = 0
        self.values: dict[int, set[bytes]] = {}
        self.crashes = 0
        self.checked: dict[str, str] = {}
        """The versions of all objects when they were last checked."""
        self.begin_process()

    def begin_process(self) -> None:
        archive = archive_in(self.store, writer_id=f"p{self.crashes}", now_ms=self.clock)
        self.archiver = archiver_of(
            self.writer,
            archive,
            FakeBroker(self.writer),
            leader_epoch=self.leader_epoch,
            now_ms=self.clock,
        )

    @property
    def manifest(self):
        return stored_manifest(self.store, self.writer)

    def note_values(self) -> None:
        for offset, value in self.writer.values().items():
            self.values.setdefault(offset, set()).add(value)

    async def step(self, seen) -> None:
        """Make one step; where the process ends in it, the next one begins."""
        try:
            await self.archiver.step(seen)
        except* Crash:
            self.crashes += 1
            self.begin_process()
        await self.check()

    async def check(self) -> None:
        """See that the bucket holds an archive without a fault, of which every record can be read."""
        if not self.has_changed():
            return
        manifest, archive = self.manifest, archive_in(self.store)
        assert (await archive.verifier.verify(manifest, deep=True)).faults == ()
        found = await values_in(archive, manifest)
        assert sorted(found) == list(range(manifest.start_offset, manifest.next_offset))
        assert all(value in self.values[offset] for offset, value in found.items())

    def has_changed(self) -> bool:
        """Say whether the bucket has changed since the last call: in one that has not, nothing can differ."""
        before = self.checked
        self.checked = {key: info.version for key, (_, info) in self.store.objects.items()}
        return self.checked != before

    async def minutes(self, number, **changes) -> None:
        for _ in range(number):
            log_start_offset = changes.get("log_start_offset")
            seen = observe(self.writer, **{name: value for name, value in changes.items() if name == "total"})
            if log_start_offset is not None:
                seen = replace(seen, bounds=replace(seen.bounds, log_start_offset=log_start_offset))
            await self.step(seen)
            self.clock.now_ms += MINUTE_MS

    async def result(self) -> tuple:
        """Return what every run of a scenario has to end with."""
        manifest, archive = self.manifest, archive_in(self.store)
        whole = await archive.manifests.spillovers.with_history(manifest)
        return (
            manifest.start_offset,
            manifest.next_offset,
            manifest.segment_count,
            [(one.base_offset, one.last_offset) for one in whole.segments],
            [one for retired in whole.retired for one in retired.segments],
        )


async def spill(world: World) -> None:
    """Delete four of six segments from the local log."""
    await filled(world.writer, world.archiver, local=6)
    world.note_values()
    for _ in range(4):
        world.writer.drop_head()


async def half_expires(world: World) -> None:
    await world.minutes(3)
    limits = TotalRetention(limit_ms=None, limit_bytes=world.manifest.size_bytes // 2)
    await world.minutes(40, total=limits)


async def all_expires(world: World) -> None:
    await world.minutes(40, total=TotalRetention(limit_ms=None, limit_bytes=1))


async def user_deletes(world: World) -> None:
    await world.minutes(40, log_start_offset=9)


async def leader_has_more(world: World) -> None:
    """Another replica held five of the six segments: three are taken back, and then spill again."""
    await world.minutes(3)
    other = LogWriter(world.directory / "other")
    for number in range(6):
        other.closed_segment(b"a%d" % number, b"b%d" % number)
    other.begin_epoch(1)
    other.drop_head()
    world.writer, world.leader_epoch = other, 1
    world.begin_process()
    await world.minutes(3)
    assert world.manifest.live_offset == 2
    for _ in range(4):
        other.drop_head()
    await world.minutes(3)


async def tail_is_replaced(world: World) -> None:
    """An unclean election cuts inside what is spilled."""
    await world.minutes(3)
    other = LogWriter(world.directory / "other")
    other.closed_segment(b"a0", b"b0")
    other.append(b"a1")
    other.begin_epoch(1)
    for number in range(4):
        other.closed_segment(b"new%d" % number)
    world.writer, world.leader_epoch = other, 1
    world.note_values()
    world.begin_process()
    await world.minutes(6)
    for _ in range(4):
        other.drop_head()
    await world.minutes(6)


SCENARIOS = {
    half_expires: 9,
    all_expires: 12,
    user_deletes: 9,
    leader_has_more: 12,
    tail_is_replaced: 21,
}
"""What happens after the first spill, and how many changes of the bucket that takes with it."""


async def run(scenario, directory, *, crash_at=None, crash_again=None, takes_effect=False) -> World:
    world = World(directory)
    await spill(world)
    store = world.store
    store.changes, store.crash_at, store.crash_again = 0, crash_at, crash_again
    store.takes_effect = takes_effect
    await scenario(world)
    return world


@pytest.mark.parametrize("takes_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
async def test_crash_at_any_change_loses_nothing(tmp_path, scenario, takes_effect):
    """Readers find all records after a crash at any change, and a successor reaches the same end."""
    whole = await run(scenario, tmp_path / "whole")
    assert whole.crashes == 0
    for crash_at in count(1):
        world = await run(scenario, tmp_path / f"{crash_at}", crash_at=crash_at, takes_effect=takes_effect)
        assert await world.result() == await whole.result()
        if not world.crashes:
            assert crash_at == SCENARIOS[scenario] + 1
            return
        assert world.crashes == 1
        if scenario is not tail_is_replaced:
            names = [(one.base_offset, one.last_offset) for one in spilled_names(world.store, world.writer)]
            assert data_keys(world.store) == data_keys(whole.store)
            assert set(names) >= {
                (one.base_offset, one.last_offset) for one in spilled_names(whole.store, whole.writer)
            }


@pytest.mark.parametrize(
    ("takes_effect", "crash_again"),
    [(True, 5), (True, 6), (True, 7), (False, 6), (False, 7), (False, 8)],
    ids=str,
)
@pytest.mark.parametrize(
    "scenario", [half_expires, all_expires, user_deletes, leader_has_more], ids=lambda one: one.__name__
)
async def test_processes_that_all_crash_get_there_together(tmp_path, scenario, takes_effect, crash_again):
    """Each makes a few changes, enough for a spill, and what it has done counts."""
    whole = await run(scenario, tmp_path / "whole")
    world = await run(
        scenario,
        tmp_path / "crashing",
        crash_at=crash_again,
        crash_again=crash_again,
        takes_effect=takes_effect,
    )
    assert world.crashes
    assert await world.result() == await whole.result()


@pytest.mark.parametrize("scenario", [half_expires, all_expires, user_deletes], ids=lambda one: one.__name__)
async def test_no_read_fails_while_retention_works(tmp_path, scenario):
    """A reader with a manifest no older than the delay finds every object that it names."""
    world = World(tmp_path)
    await spill(world)
    known = [(world.clock(), world.manifest, archive_in(world.store))]
    reads = 0
    check = world.check

    async def read_on() -> None:
        nonlocal reads
        before = world.checked
        await check()
        if world.checked == before:
            return
        known.append((world.clock(), world.manifest, archive_in(world.store)))
        for read_at_ms, manifest, archive in known:
            # One process has known the manifest for so long, another has got it a moment ago.
            for reader in (archive, archive_in(world.store)):
                if world.clock() - read_at_ms < PACE.delete_delay_ms:
                    found = await values_in(reader, manifest)
                    assert sorted(found) == list(range(manifest.start_offset, manifest.next_offset))
                    reads += 1

    world.check = read_on
    await scenario(world)
    assert world.manifest.start_offset > 0
    assert reads > 10
    with pytest.raises(ObjectNotFound):
        await values_in(archive_in(world.store), known[0][1])


@pytest.mark.parametrize("is_spilled", [True, False], ids=["spilled", "live"])
@pytest.mark.parametrize(
    ("change", "stays"),
    [({}, True), ({"uploaded_at_ms": 7}, True), ({"writer_id": "ab" * 16}, False)],
    ids=["the same", "of the same name", "of another name"],
)
async def test_what_is_held_again_under_its_name_is_not_deleted(tmp_path, is_spilled, change, stays):
    """Objects are deleted by name: the archive may have begun anew with the same bytes."""
    world = World(tmp_path)
    await spill(world)
    await world.minutes(3)
    if not is_spilled and not change:
        return  # The rules of a manifest forbid that already.
    name, archive = world.writer.identified, archive_in(world.store, now_ms=world.clock)
    spillovers = archive.manifests.spillovers
    first = await spillovers.load(name, spilled_names(world.store, world.writer)[0])
    (segment,) = first.segments
    await world.minutes(5, total=TotalRetention(limit_ms=None, limit_bytes=1))
    anew = cut_back(world.manifest, 0, leader_epoch=0, now_ms=0).appended([replace(segment, **change)])
    if not is_spilled:
        anew = replace(anew, spillover=None, retired=(Retired(first.segments, world.clock()),))
    await archive.manifests.commit(await archive.manifests.load(name), anew, leader_epoch=0)

    claim = Claim(Leadership(name, 0), archive.manifests, metrics=Metrics())
    retention = ArchiveRetention(
        name,
        claim=claim,
        remote_log=archive.remote_log,
        spillovers=spillovers,
        upload_times=UploadTimes(name, claim=claim, remote_log=archive.remote_log, clock=archive.clock),
        user_deletions=UserDeletions(name),
        metrics=Metrics(),
        clock=archive.clock,
    )
    world.clock.now_ms += PACE.delete_delay_ms + 1000
    stored = await claim.current(lambda: anew)
    for _ in range(4):
        stored, _ = await retention.step(stored, observe(world.writer))
    assert (stored.existing.retired, stored.existing.spillover) == ((), None)
    assert (data_key(name, segment) in data_keys(world.store)) is stays
