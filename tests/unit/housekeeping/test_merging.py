"""Merging one partition's segments: what is read stays the same, after a crash at any point too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.archive import Clock, archive_in, archived, archiver_of, observed, values_in
from tests.fakes.broker import FakeBroker
from tests.fakes.dying_store import Dying, Killed
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import bases, stored_manifest
from tests.fakes.memory_store import MemoryStore
from tests.fakes.metric_values import value_of
from tests.fakes.store import store_unavailable
from tieringd.archive.object_joiner import ObjectJoiner
from tieringd.archiving.claim import Claim
from tieringd.errors import FencedError, StorageDenied, StorageUnavailable
from tieringd.formats.history_link import HistoryLink
from tieringd.formats.object_keys import data_key, index_key, topic_key
from tieringd.housekeeping.merging import ATTEMPTS_MAX, DENIED_MS, SegmentMerger
from tieringd.metrics import Metrics
from tieringd.model.partition import Leadership
from tieringd.policies.segment_merge import MergeLimits
from tieringd.policies.total_retention import RetentionPace
from tieringd.reading.history import History, LogReader

DELAY_MS = 600_000
PACE = RetentionPace(interval_ms=60_000, delete_delay_ms=DELAY_MS)


class Merging:
    """One daemon process that merges one partition of a bucket."""

    def __init__(self, store, writer, tmp_path, *, writer_id="b2", leader_epoch=0, clock=None):
        self.clock = clock or Clock()
        self.metrics = Metrics()
        self.archive = archive_in(store, writer_id=writer_id, now_ms=self.clock)
        leadership = Leadership(writer.identified, leader_epoch)
        self.claim = Claim(leadership, self.archive.manifests, metrics=self.metrics)
        self.merger = SegmentMerger(
            leadership,
            store,
            joiner=ObjectJoiner(store, work_directory=tmp_path),
            writer_id=writer_id,
            metrics=self.metrics,
            now_ms=self.clock,
        )

    async def step(self, limits: MergeLimits) -> int:
        """Merge what one plan names; return how many runs that were."""
        stored = await self.claim.current(lambda: pytest.fail("there is a manifest"))
        plan = self.merger.plan(stored.existing, limits)
        done = 0
        for run in plan.runs:
            prepared = await self.merger.prepare(stored.existing, run)
            if prepared is not None:
                stored = await self.merger.commit(self.claim, stored, prepared)
                done += 1
        self.merger.note_done(plan)
        return done

    async def all_steps(self, limits: MergeLimits) -> int:
        """Merge all there is."""
        done = 0
        while count := await self.step(limits):
            done += count
        return done

    def counted(self, name: str) -> float:
        """Return a counter of the topic."""
        return (
            self.metrics.registry.get_sample_value(f"tieringd_archive_{name}_total", {"topic": "orders"}) or 0
        )


async def filled(writer, store, *, segments: int = 7):
    """Archive segments with transactions over their ends; return the manifest, and limits for short runs."""
    writer.append(b"begun", producer_id=7)
    for number in range(segments - 1):
        writer.append(b"%d" % number)
        if number == 2:
            writer.abort(7)
            writer.append(b"kept", producer_id=8)
        if number == 3:
            writer.commit(8)
        writer.roll()
    writer.append(b"large" * 100)
    writer.roll()
    manifest = await archived(writer, archive_in(store))
    small = [segment.size_bytes for segment in manifest.segments][:-1]
    target = sum(small[:3])
    return manifest, MergeLimits(target, target // 2)


async def both_ways(archive, manifest):
    return [await values_in(archive, manifest, read_committed=committed) for committed in (False, True)]


async def test_reading_gives_the_same_after_a_merge(store, writer, tmp_path):
    """Records, and what is committed of them, are the same; a deep scrub finds no fault; few rows remain."""
    manifest, limits = await filled(writer, store)
    before = await both_ways(archive_in(store), manifest)
    merging = Merging(store, writer, tmp_path)

    merges = await merging.all_steps(limits)

    merged = stored_manifest(store, writer)
    assert merges >= 2
    assert len(merged.segments) == len(manifest.segments) - merging.counted("merged_segments") + merges
    assert await both_ways(archive_in(store), merged) == before
    assert before[0] != before[1]
    report = await merging.archive.verifier.verify(merged, deep=True)
    assert report.faults == ()
    assert merging.counted("merge_host_bytes") == 0
    assert merging.counted("merged_bytes") == sum(
        one.size_bytes for one in merged.segments if one.writer_id == "b2"
    )


async def test_each_record_is_found_by_offset_and_by_time(store, writer, tmp_path):
    """Reading from any offset of a merged segment begins there."""
    manifest, limits = await filled(writer, store)
    merging = Merging(store, writer, tmp_path)
    await merging.all_steps(limits)
    merged = stored_manifest(store, writer)
    values = await values_in(archive_in(store), manifest)
    for offset in range(manifest.start_offset, manifest.next_offset):
        found = await values_in(archive_in(store), merged, from_offset=offset)
        assert found == {each: value for each, value in values.items() if each >= offset}


async def test_readers_of_the_old_manifest_have_its_objects_for_a_while(store, writer, tmp_path):
    """The parts' objects go after the delay that retention has for readers, and no others with them."""
    old, limits = await filled(writer, store)
    clock = store.now_ms = Clock()
    merging = Merging(store, writer, tmp_path, clock=clock)
    await merging.all_steps(limits)
    merged = stored_manifest(store, writer)
    before = await values_in(archive_in(store), old)
    archiver = archiver_of(
        writer, archive_in(store, writer_id="b2", now_ms=clock), FakeBroker(writer), now_ms=clock
    )

    clock.now_ms += DELAY_MS - 1
    await archiver.step(observed(writer, retention_pace=PACE))
    assert await values_in(archive_in(store), old) == before

    # A read manifest counts as in effect a second after the store's time, which has no fractions.
    clock.now_ms += 1001
    await archiver.step(observed(writer, retention_pace=PACE))
    found = stored_manifest(store, writer)
    assert found.retired == ()
    assert list(found.segments) == list(merged.segments)
    assert await values_in(archive_in(store), found) == before
    named = {name(writer.identified, one) for one in found.segments for name in (data_key, index_key)}
    assert {key for key in store.objects if key.endswith((".log", ".index"))} == named


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda store, key: store.remove(key(index_key)), id="index-is-gone"),
        pytest.param(lambda store, key: store.add(key(index_key), b"not an index"), id="index-is-corrupt"),
        pytest.param(lambda store, key: store.remove(key(data_key)), id="data-is-gone"),
        pytest.param(lambda store, key: store.add(key(data_key), b"other bytes"), id="data-is-other"),
    ],
)
async def test_run_that_cannot_be_merged_is_counted_and_never_tried_again(store, writer, tmp_path, damage):
    """The run stays as it is, without any further request. The runs beside it are merged."""
    manifest, limits = await filled(writer, store)
    damage(store, lambda name: name(writer.identified, manifest.segments[1]))
    merging = Merging(store, writer, tmp_path)

    assert await merging.all_steps(limits) >= 1

    failures = merging.metrics.merged.failures.collect()[0].samples
    assert [one.value for one in failures if one.name.endswith("_total")] == [1]
    assert bases(store, writer)[:3] == [one.base_offset for one in manifest.segments][:3]
    requests = len(store.requests)
    merging.merger.note_done(replace(merging.merger.plan(manifest, limits), resume_offset=0))
    assert await merging.step(limits) == 0
    assert all(key.endswith("manifest") for _, key in store.requests[requests:])


async def test_store_that_is_away_is_asked_again(store, writer, tmp_path):
    """A run that met an outage is not given up: the next attempt merges it."""
    manifest, limits = await filled(writer, store)
    merging = Merging(store, writer, tmp_path)
    store.fail_next("join", lambda: store_unavailable("join"))
    with pytest.raises(StorageUnavailable):
        await merging.step(limits)
    assert stored_manifest(store, writer).segments == manifest.segments
    assert await merging.all_steps(limits) >= 2
    assert merging.metrics.merged.failures.collect()[0].samples == []


async def test_store_that_denies_everything_is_for_an_operator(store, writer, tmp_path):
    """Wrong credentials are no reason to give a run up for good."""
    _, limits = await filled(writer, store)
    merging = Merging(store, writer, tmp_path)
    store.fail_next("join", lambda: StorageDenied("403"), times=ATTEMPTS_MAX + 1)
    for _ in range(ATTEMPTS_MAX + 1):
        with pytest.raises(StorageDenied):
            await merging.step(limits)
        merging.clock.now_ms += DENIED_MS
    assert await merging.all_steps(limits) >= 2


async def test_run_that_is_too_much_is_not_tried_for_ever(store, writer, tmp_path):
    """One that never gets through is passed over after some attempts, and those behind it have their turn."""
    manifest, limits = await filled(writer, store)
    merging = Merging(store, writer, tmp_path)
    store.fail_next("join", lambda: store_unavailable("join"), times=ATTEMPTS_MAX)
    for _ in range(ATTEMPTS_MAX - 1):
        with pytest.raises(StorageUnavailable):
            await merging.step(limits)
    assert await merging.all_steps(limits) == 1
    assert bases(store, writer)[:4] == [one.base_offset for one in manifest.segments][:4]
    failures = merging.metrics.merged.failures.labels("orders", "StorageUnavailable")
    assert value_of(failures) == 1


async def test_outage_is_no_attempt(store, writer, tmp_path):
    """A run is not given up while the store does not answer a read, however long that takes."""
    _, limits = await filled(writer, store)
    merging = Merging(store, writer, tmp_path)
    await merging.claim.current(lambda: pytest.fail("there is a manifest"))
    store.fail_next("get", lambda: store_unavailable("get"), times=2 * ATTEMPTS_MAX)
    for _ in range(2 * ATTEMPTS_MAX):
        with pytest.raises(StorageUnavailable):
            await merging.step(limits)
    assert await merging.all_steps(limits) >= 2
    assert merging.metrics.merged.failures.collect()[0].samples == []


async def test_merges_of_one_plan_take_one_commit(store, writer, tmp_path):
    """A merge that does not fit any more does not keep the others from being committed."""
    manifest, limits = await filled(writer, store, segments=12)
    merging = Merging(store, writer, tmp_path)
    stored = await merging.claim.current(lambda: pytest.fail("there is a manifest"))
    runs = merging.merger.plan(manifest, limits).runs
    assert len(runs) >= 3
    merges = [await merging.merger.prepare(manifest, run) for run in runs]
    stored = await merging.claim.commit(stored, stored.existing.expired(1, now_ms=0))
    puts = len([one for one in store.requests if one[0] == "put"])

    await merging.merger.commit(merging.claim, stored, *merges)

    assert len([one for one in store.requests if one[0] == "put"]) == puts + 1
    merged = stored_manifest(store, writer)
    assert [one.segment in list(merged.segments) for one in merges] == [False, *[True] * (len(runs) - 1)]
    assert merging.counted("merged_segments") == sum(run.segments for run in runs[1:])


async def test_commit_whose_answer_is_lost_is_not_done_twice(store, writer, tmp_path):
    """The commit took effect; committing the same merge once more finds it done."""
    _, limits = await filled(writer, store)
    merging = Merging(store, writer, tmp_path)
    stored = await merging.claim.current(lambda: pytest.fail("there is a manifest"))
    prepared = await merging.merger.prepare(
        stored.existing, merging.merger.plan(stored.existing, limits).runs[0]
    )
    after = await merging.merger.commit(merging.claim, stored, prepared)
    commits = len([one for one in store.requests if one[0] == "put"])
    assert await merging.merger.commit(merging.claim, after, prepared) is after
    assert len([one for one in store.requests if one[0] == "put"]) == commits


async def test_merge_that_comes_too_late_is_given_up(store, writer, tmp_path):
    """The manifest stays as it is if retention took a part meanwhile."""
    manifest, limits = await filled(writer, store)
    merging = Merging(store, writer, tmp_path)
    stored = await merging.claim.current(lambda: pytest.fail("there is a manifest"))
    prepared = await merging.merger.prepare(manifest, merging.merger.plan(manifest, limits).runs[0])
    stored = await merging.claim.commit(stored, stored.existing.expired(1, now_ms=0))
    assert await merging.merger.commit(merging.claim, stored, prepared) is stored
    assert bases(store, writer) == [one.base_offset for one in manifest.segments][1:]


async def test_deposed_writer_merges_nothing(store, writer, tmp_path):
    """A commit under an epoch that is over is refused, and the new leader's manifest holds."""
    _, limits = await filled(writer, store)
    old, new = (
        Merging(store, writer, tmp_path),
        Merging(store, writer, tmp_path, writer_id="c3", leader_epoch=1),
    )
    stored = await old.claim.current(lambda: pytest.fail("there is a manifest"))
    prepared = await old.merger.prepare(stored.existing, old.merger.plan(stored.existing, limits).runs[0])
    await new.claim.current(lambda: pytest.fail("there is a manifest"))
    held = stored_manifest(store, writer)
    with pytest.raises(FencedError):
        await old.merger.commit(old.claim, stored, prepared)
    assert stored_manifest(store, writer) == held


async def test_other_sizes_begin_the_walk_anew(store, writer, tmp_path):
    """A configuration that changes makes the walk begin anew; else it goes on where it was."""
    _, limits = await filled(writer, store)
    merging = Merging(store, writer, tmp_path)
    await merging.all_steps(limits)
    count = len(stored_manifest(store, writer).segments)
    assert await merging.step(limits) == 0
    assert await merging.all_steps(replace(limits, target_bytes=limits.target_bytes * 2)) >= 1
    assert len(stored_manifest(store, writer).segments) < count


async def test_archiving_and_trimming_go_on_after_a_merge(store, writer, tmp_path):
    """A new leader finds the archive on its lineage, and trims what merged segments hold by its bytes."""
    manifest, limits = await filled(writer, store)
    before = await values_in(archive_in(store), manifest)
    await Merging(store, writer, tmp_path).all_steps(limits)
    writer.begin_epoch(3)
    new = writer.closed_segment(b"new")
    broker = FakeBroker(writer)
    archiver = archiver_of(writer, archive_in(store, writer_id="c3"), broker, leader_epoch=3)

    for _ in range(4):
        await archiver.step(observed(writer, target_bytes=0))

    found = stored_manifest(store, writer)
    assert found.replacements == ()
    assert bases(store, writer) == [0, 6, 10, new]
    assert writer.bases_on_disk[0] >= new
    assert await values_in(archive_in(store), found) == before | {new: b"new"}


@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("same_process", [False, True], ids=["restarted", "same-writer"])
@pytest.mark.parametrize("can_join", [True, False], ids=["joins", "streams"])
async def test_crash_at_any_request_loses_nothing(tmp_path, after_effect, same_process, can_join):
    """A merge that dies at any request leaves all readable, and is done anew."""

    class Store(MemoryStore):
        if not can_join:
            join = None

    died = 0
    for number in range(1, 200):
        store, writer = Store(), LogWriter(tmp_path / f"logs-{number}")
        manifest, limits = await filled(writer, store)
        before = await both_ways(archive_in(store), manifest)
        dying = Dying(store, number, after_effect=after_effect)
        dying.join = dying.join if can_join else None
        merging = Merging(dying, writer, tmp_path)
        try:
            await merging.all_steps(limits)
        except Killed:
            died += 1
        assert await both_ways(archive_in(store), stored_manifest(store, writer)) == before
        left_over = stored_manifest(store, writer)
        again = Merging(store, writer, tmp_path, writer_id="b2" if same_process else "c3")
        await again.all_steps(limits)
        merged = stored_manifest(store, writer)
        assert bases(store, writer) == [0, 6, 10]
        assert await both_ways(archive_in(store), merged) == before
        assert await values_in(archive_in(store), left_over) == before[0]
        assert (await again.archive.verifier.verify(merged, deep=True)).faults == ()
        if died < number:
            break
    else:
        pytest.fail("it never came to an end")
    assert died >= 15


async def test_attempts_at_segments_that_expired_are_forgotten(store, writer, tmp_path):
    """A run that was tried once, and whose segments total retention took, is not counted for ever."""
    manifest, limits = await filled(writer, store)
    merging = Merging(store, writer, tmp_path)
    store.fail_next("join", lambda: store_unavailable("join"))
    with pytest.raises(StorageUnavailable):
        await merging.step(limits)
    assert len(merging.merger._attempts) == 1
    merging.merger.plan(manifest.expired(len(manifest.segments), now_ms=0), limits)
    assert len(merging.merger._attempts) == 0


async def test_merge_takes_no_history_from_a_restored_topic(store, tmp_path, clock):
    """A merge in a cluster that lives on, across the offset at which another topic continues its archive."""
    old = LogWriter(tmp_path / "old")
    new = LogWriter(tmp_path / "new", topic_id="AAAAAAAAAAAAAAAAAAAAAB", first_offset=12)
    archive = archive_in(store, now_ms=clock)
    for writer in (old, new):
        for _ in range(4):
            writer.closed_segment()
        await archived(writer, archive)
    history = History(store, archive.manifests, now_ms=clock)
    await history.link(HistoryLink(topic_key(new.identified), topic_key(old.identified), ((0, 12),)))
    for _ in range(4):
        old.closed_segment()
    size_bytes = sum(one.size_bytes for one in (await archived(old, archive)).segments)
    assert await Merging(store, old, tmp_path).all_steps(MergeLimits(size_bytes, size_bytes // 2)) == 1
    assert bases(store, old) == [0]

    gaps = []
    reader = LogReader(
        new.identified,
        manifests=archive.manifests,
        records=archive.records,
        from_offset=0,
        on_gap=gaps.append,
        history=history,
    )
    assert [one.offset async for one in reader.records(read_committed=True)] == list(range(24))
    assert gaps == []
