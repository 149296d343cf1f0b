"""An unclean election that parts the logs inside a segment: the good records before the divergence stay."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from crc32c import crc32c

from tests.fakes.archive import (
    Clock,
    archive_in,
    archived,
    archiver_of,
    observed,
    values_in,
    written_below,
)
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter, leads_from
from tests.fakes.manifests import bounds_of, stored_manifest
from tests.fakes.spilling import Crash, CrashingJoins, make_parts_small, observe
from tieringd.archiving.good_part import OperatorWait
from tieringd.formats.object_keys import data_key, index_key, parse_rewriting_key
from tieringd.model.segment import CrossingTransaction
from tieringd.policies.lineage import OperatorReason

PRODUCER = 2
CHANGES = 8
"""
How many changes of the bucket keeping a part takes in `CrashWorld`: a claim, data and index of a head and of
a renewed segment, their commit, and data and index of the segment that follows.
"""


async def stepped(archiver, writer):
    """Let *archiver* do all that there is to do, over several observations, and return the manifest."""
    for _ in range(6):
        await archiver.step(observed(writer))
    assert archiver.manifest is not None
    assert archiver.manifest.faults() == ()
    return archiver.manifest


async def spoiled(store, writer, manifest, *, is_missing: bool) -> tuple[str, bytes]:
    """Delete the first segment's object, or damage it; return its key and its bytes."""
    key = data_key(writer.identified, manifest.segments[0])
    data, _ = await store.get(key)
    damaged = data[:70] + bytes([data[70] ^ 1]) + data[71:]
    await (store.delete_many([key]) if is_missing else store.put(key, damaged, crc32c=crc32c(damaged)))
    return key, data


async def expect_as_in_the_log(archive, writer, manifest) -> None:
    assert manifest.next_offset == writer.bases[-1]
    for read_committed in (False, True):
        found = await values_in(archive, manifest, read_committed=read_committed)
        assert found == written_below(writer, manifest.next_offset, read_committed=read_committed)
    assert not (await archive.verifier.verify(manifest, deep=True)).faults


async def test_segment_is_split_at_the_divergence(writer, archive, broker):
    """The good head of a segment becomes a segment of its own, and the leader's log follows it."""
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.closed_segment(b"lost too")
    before = await archived(writer, archive)
    assert bounds_of(before) == [(0, 2, 0)]

    leads_from(writer, divergence)
    writer.closed_segment(b"another leader's")
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    first = await archiver.step(observed(writer))
    assert first.needs_another_scan
    assert first.waits_because.endswith(
        "offsets 0 to 0 exist only in the archive and are kept once another scan shows the same"
    )
    assert archiver.manifest.segments == before.segments

    manifest = await stepped(archiver, writer)
    assert bounds_of(manifest) == [(0, 0, 1), (1, 1, 1)]
    assert [(one.base_offset, one.last_offset) for one in manifest.replacements] == [(1, 2)]
    assert manifest.epochs == ((0, 0), (1, 1))
    await expect_as_in_the_log(archive, writer, manifest)


async def test_good_records_stay_when_the_log_loses_them_before_they_are_copied_again(
    writer, archive, broker
):
    """Retention, or a user, may remove the good records from the leader's log at any moment."""
    writer.append(b"good")
    writer.append(b"good too")
    divergence = writer.append(b"lost")
    writer.roll()
    await archived(writer, archive)
    writer.truncate(divergence)
    writer.begin_epoch(1)
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    await stepped(archiver, writer)

    writer.append(b"another leader's")
    writer.roll()
    writer.drop_head()
    writer.closed_segment(b"after the trim")
    manifest = await stepped(archiver, writer)
    assert await values_in(archive, manifest) == {0: b"good", 1: b"good too", 3: b"after the trim"}
    assert [(gap.base_offset, gap.last_offset) for gap in manifest.gaps] == [(2, 2)]
    assert not (await archive.verifier.verify(manifest, deep=True)).faults


async def test_log_that_has_all_replaces_a_good_part_whose_end_is_open(writer, archive, broker):
    """The archive does not tell the old leader's outcome for as long as the transaction goes on."""
    writer.append(b"transacted", producer_id=PRODUCER)
    divergence = writer.append(b"lost")
    writer.commit(PRODUCER)
    writer.roll()
    before = await archived(writer, archive)
    writer.truncate(divergence)
    writer.begin_epoch(1)
    writer.append(b"another leader's")
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    manifest = await stepped(archiver, writer)
    assert (manifest.next_offset, before.next_offset) == (0, 3)

    writer.abort(PRODUCER)
    writer.closed_segment(b"after it")
    await expect_as_in_the_log(archive, writer, await stepped(archiver, writer))


@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "damaged"])
async def test_log_that_has_all_replaces_a_good_part_that_cannot_be_read(
    writer, archive, broker, store, is_missing
):
    """An operator is asked only where the archive has the only copy."""
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.roll()
    before = await archived(writer, archive)
    await spoiled(store, writer, before, is_missing=is_missing)
    writer.truncate(divergence)
    writer.begin_epoch(1)
    writer.closed_segment(b"another leader's")
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    manifest = await stepped(archiver, writer)
    assert archiver.operator_wait is None
    await expect_as_in_the_log(archive, writer, manifest)


async def test_one_scan_does_not_count_as_two(writer, archive, broker):
    """The archiver may step several times on one observation."""
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.roll()
    before = await archived(writer, archive)
    leads_from(writer, divergence)
    writer.closed_segment(b"another leader's")
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    seen = observed(writer)
    for _ in range(3):
        assert (await archiver.step(seen)).needs_another_scan
    assert archiver.manifest.segments == before.segments


@pytest.mark.parametrize("log_start", ["below the divergence", "past it"])
async def test_head_reaches_the_divergence_wherever_the_log_begins(tmp_path, writer, archive, log_start):
    """The head has the records that the log has as well. Records lost past the divergence are a gap."""
    for value in (b"a", b"b", b"c"):
        writer.append(value)
    writer.append(b"lost")
    writer.roll()
    await archived(writer, archive)

    other = LogWriter(tmp_path / "other")
    other.append(b"a")
    other.append(b"b")
    if log_start == "below the divergence":
        other.roll()
    other.append(b"c")
    other.begin_epoch(1)
    other.append(b"new")
    if log_start == "past it":
        other.roll()
    other.append(b"newer")
    other.roll()
    other.drop_head()
    manifest = await stepped(archiver_of(other, archive, FakeBroker(other)), other)

    assert bounds_of(manifest)[0] == (0, 2, 1)
    assert manifest.next_offset == 5
    found = await values_in(archive, manifest)
    expected = written_below(other, 5)
    if log_start == "past it":
        assert [(one.base_offset, one.last_offset) for one in manifest.gaps] == [(3, 3)]
        del expected[3]
    assert found == expected
    assert not (await archive.verifier.verify(manifest, deep=True)).faults


@pytest.mark.parametrize("ended_as", ["commit", "abort"])
@pytest.mark.parametrize("was_ended_as", ["commit", "abort"])
@pytest.mark.parametrize("begins", ["in the head", "two segments before", "both"])
async def test_transaction_that_is_open_at_the_divergence_gets_its_new_outcome(
    writer, archive, broker, *, begins, was_ended_as, ended_as
):
    """The head shows it, or the manifest's list of transactions does; each index tells the new outcome."""
    if begins != "in the head":
        writer.append(b"early", producer_id=PRODUCER)
        writer.roll()
        writer.closed_segment(b"between")
    writer.append(b"plain")
    if begins != "two segments before":
        writer.append(b"transacted", producer_id=PRODUCER)
    divergence = writer.append(b"lost")
    getattr(writer, was_ended_as)(PRODUCER)
    writer.roll()
    await archived(writer, archive)

    leads_from(writer, divergence)
    writer.append(b"another leader's")
    getattr(writer, ended_as)(PRODUCER)
    writer.closed_segment(b"more")
    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=1), writer)

    await expect_as_in_the_log(archive, writer, manifest)
    found = (await values_in(archive, manifest, read_committed=True)).values()
    assert (b"early" in found or b"transacted" in found) == (ended_as == "commit")
    begun = min(offset for offset, value in writer.values().items() if value in {b"early", b"transacted"})
    assert manifest.crossing == (CrossingTransaction(PRODUCER, begun, divergence + 1, 1),)
    if begins != "in the head":
        assert manifest.segments[1].leader_epoch == 0, "no record of the transaction is in it"


@pytest.mark.parametrize("ended_as", ["commit", "abort"])
@pytest.mark.parametrize("was_ended_as", ["commit", "abort"])
async def test_reopened_transaction_that_only_the_archive_holds_gets_a_new_index(
    writer, archive, broker, was_ended_as, ended_as
):
    """Only its marker was lost, past the archive's end: all records stay, and nothing is cut off."""
    writer.append(b"transacted", producer_id=PRODUCER)
    writer.append(b"plain")
    end = writer.roll()
    getattr(writer, was_ended_as)(PRODUCER)
    before = await archived(writer, archive)
    assert before.crossing == (CrossingTransaction(PRODUCER, 0, end, 0),)

    leads_from(writer, end)
    getattr(writer, ended_as)(PRODUCER)
    writer.closed_segment()
    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=1), writer)

    await expect_as_in_the_log(archive, writer, manifest)
    assert manifest.replacements == ()
    assert manifest.segments[0].leader_epoch == (0 if was_ended_as == ended_as else 1)
    retired = [segment for one in manifest.retired for segment in one.segments]
    assert retired == ([] if was_ended_as == ended_as else list(before.segments))
    assert manifest.crossing == (CrossingTransaction(PRODUCER, 0, end, 1),)


async def test_later_transaction_of_the_producer_does_not_decide_an_earlier_one(writer, archive, broker):
    """The earlier one crosses a segment's end too, and its marker is before the divergence."""
    writer.append(b"first", producer_id=PRODUCER)
    writer.append(b"other", producer_id=3)
    writer.roll()
    writer.commit(PRODUCER)
    writer.append(b"second", producer_id=PRODUCER)
    divergence = writer.append(b"lost")
    writer.commit(PRODUCER)
    writer.commit(3)
    writer.roll()
    await archived(writer, archive)

    leads_from(writer, divergence)
    writer.abort(PRODUCER)
    writer.abort(3)
    writer.closed_segment(b"more")
    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=1), writer)
    await expect_as_in_the_log(archive, writer, manifest)
    assert b"first" in (await values_in(archive, manifest, read_committed=True)).values()


async def test_nothing_changes_while_the_transaction_is_open(writer, archive, broker):
    """How it ends decides what the index says."""
    writer.append(b"transacted", producer_id=PRODUCER)
    divergence = writer.append(b"lost")
    writer.commit(PRODUCER)
    writer.roll()
    before = await archived(writer, archive)
    leads_from(writer, divergence)
    writer.append(b"another leader's")
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    for _ in range(3):
        result = await archiver.step(observed(writer))
        assert "are kept once the last stable offset of the log, now 0, has reached 1" in result.waits_because
    assert archiver.manifest.segments == before.segments

    writer.abort(PRODUCER)
    writer.closed_segment(b"more")
    await expect_as_in_the_log(archive, writer, await stepped(archiver, writer))


async def test_lost_marker_is_for_an_operator(writer, archive, broker):
    """The log was trimmed past the divergence, so nothing tells how the transaction ended."""
    writer.append(b"transacted", producer_id=PRODUCER)
    divergence = writer.append(b"lost")
    writer.commit(PRODUCER)
    writer.roll()
    before = await archived(writer, archive)
    leads_from(writer, divergence)
    writer.abort(PRODUCER)
    writer.roll()
    writer.drop_head()
    writer.closed_segment(b"more")
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    for _ in range(3):
        result = await archiver.step(observed(writer))
    assert archiver.operator_wait.reason is OperatorReason.OUTCOME_LOST
    assert (
        "an operator has to decide: the transaction of producer 2 that began at offset 0 ended in offsets "
        "from 1 on that the log no longer has"
    ) in result.waits_because
    assert archiver.manifest.segments == before.segments


@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "damaged"])
async def test_unreadable_segment_is_for_an_operator_until_it_is_repaired(
    writer, archive, broker, *, clock, store, is_missing
):
    """A scrub may find its bytes elsewhere, so the archiver tries again."""
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.roll()
    before = await archived(writer, archive)
    key, data = await spoiled(store, writer, before, is_missing=is_missing)
    leads_from(writer, divergence)
    writer.closed_segment(b"another leader's")
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    for _ in range(3):
        await archiver.step(observed(writer))
    assert archiver.operator_wait == OperatorWait(OperatorReason.SEGMENT_UNREADABLE, clock.now_ms, 0, 0)
    assert archiver.manifest.segments == before.segments

    await store.put(key, data, crc32c=crc32c(data))
    await archiver.step(observed(writer))
    assert archiver.operator_wait is not None
    clock.now_ms += 10 * 60_000
    await expect_as_in_the_log(archive, writer, await stepped(archiver, writer))
    assert archiver.operator_wait is None


async def test_divergence_past_what_the_manifest_remembers_is_for_an_operator(writer, archive, broker):
    """A transaction may have been open there that no list names."""
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.roll()
    for number in range(33):
        writer.closed_segment(b"%d" % number)
    before = await archived(writer, archive)
    leads_from(writer, divergence)
    writer.closed_segment(b"another leader's")
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    for _ in range(3):
        await archiver.step(observed(writer))
    assert archiver.operator_wait.reason is OperatorReason.TRANSACTIONS_FORGOTTEN
    assert archiver.manifest.segments == before.segments


class CrashWorld:
    """One partition whose archivers crash, and a bucket in which an election leaves a good part."""

    def __init__(self, directory, *, crash_at: int | None = None, takes_effect: bool = False) -> None:
        self.writer = LogWriter(directory)
        self.store, self.clock = CrashingJoins(), Clock()
        self.store.now_ms = self.clock
        self.store.takes_effect = takes_effect
        self.crash_at = crash_at
        self.crashes = 0

    async def run(self) -> None:
        """Archive a tail, and let processes of another leader replace it until nothing is left to do."""
        writer = self.writer
        writer.append(b"early", producer_id=PRODUCER)
        writer.roll()
        writer.append(b"good")
        divergence = writer.append(b"lost")
        writer.commit(PRODUCER)
        writer.roll()
        writer.closed_segment(b"lost too")
        await archived(writer, archive_in(self.store, now_ms=self.clock))
        self.good = written_below(writer, divergence)
        leads_from(writer, divergence)
        writer.abort(PRODUCER)
        writer.closed_segment(b"another leader's")
        self.store.changes, self.store.crash_at = 0, self.crash_at
        archiver = self.begun()
        for _ in range(10):
            try:
                await archiver.step(observed(writer))
            except* Crash:
                self.crashes += 1
                archiver = self.begun()
            await self.check()

    def begun(self):
        archive = archive_in(self.store, writer_id=f"p{self.crashes}", now_ms=self.clock)
        return archiver_of(self.writer, archive, FakeBroker(self.writer), leader_epoch=1, now_ms=self.clock)

    async def check(self) -> None:
        """See that the archive has no fault, and that its good records can be read."""
        manifest, archive = stored_manifest(self.store, self.writer), archive_in(self.store)
        assert (await archive.verifier.verify(manifest, deep=True)).faults == ()
        assert manifest.faults() == ()
        found = await values_in(archive, manifest)
        assert {offset: found.get(offset) for offset in self.good} == self.good


@pytest.mark.parametrize("takes_effect", [False, True], ids=["before", "after"])
async def test_crash_at_any_change_loses_nothing(tmp_path, takes_effect):
    """The good records can be read after a crash at any change, and a successor reaches the same end."""
    whole = CrashWorld(tmp_path / "whole")
    await whole.run()
    await expect_as_in_the_log(
        archive_in(whole.store), whole.writer, stored_manifest(whole.store, whole.writer)
    )
    for crash_at in count(1):
        world = CrashWorld(tmp_path / f"{crash_at}", crash_at=crash_at, takes_effect=takes_effect)
        await world.run()
        manifest = stored_manifest(world.store, world.writer)
        assert bounds_of(manifest) == bounds_of(stored_manifest(whole.store, whole.writer))
        await expect_as_in_the_log(archive_in(world.store), world.writer, manifest)
        if not world.crashes:
            assert crash_at > CHANGES
            return


async def test_divergence_that_no_history_tells_is_for_an_operator(tmp_path, writer, archive):
    """The leader's history begins under an epoch that the archive never saw: they may part before it."""
    writer.append(b"good")
    writer.append(b"lost")
    writer.roll()
    before = await archived(writer, archive)

    other = LogWriter(tmp_path / "other")
    other.append(b"good or not")
    other.roll()
    other.epochs = []
    other.begin_epoch(2)
    other.closed_segment(b"another leader's")
    other.drop_head()
    archiver = archiver_of(other, archive, FakeBroker(other))
    for _ in range(3):
        await archiver.step(observed(other))
    assert archiver.operator_wait.reason is OperatorReason.DIVERGENCE_UNKNOWN
    assert archiver.manifest.segments == before.segments


async def test_part_of_a_rewritten_segment_is_marked_as_rewritten(writer, archive, broker, store):
    """A part lacks the records that a job removed, and a record tells a rebuild that it is stored whole."""
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.roll()
    before = await archived(writer, archive)
    (old,) = before.segments
    rewritten = replace(old, writer_id="rewritten-1")
    for key_of in (data_key, index_key):
        data, _ = await store.get(key_of(writer.identified, old))
        await store.put(key_of(writer.identified, rewritten), data, crc32c=crc32c(data))
    stored = await archive.manifests.load(writer.identified)
    manifest = replace(before, segments=before.segments.replaced(0, 1, rewritten))
    await archive.manifests.commit(stored, manifest, leader_epoch=0)

    leads_from(writer, divergence)
    writer.closed_segment(b"another leader's")
    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=1), writer)
    assert [one.is_rewritten for one in manifest.segments] == [True, False]
    records = [key for key in store.objects if parse_rewriting_key(writer.identified, key)]
    assert len(records) == 1
    await expect_as_in_the_log(archive, writer, manifest)


async def test_spilled_segment_is_split_as_well(tmp_path, writer, archive, broker, monkeypatch):
    """The parts before it stay spilled, or are taken back; nothing is lost on the way."""
    make_parts_small(monkeypatch)
    writer.closed_segment(b"first")
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.roll()
    for number in range(3):
        writer.closed_segment(b"%d" % number)
    archiver = archiver_of(writer, archive, broker)
    while (await archiver.step(observe(writer))).uploaded:
        pass
    for _ in range(4):
        writer.drop_head()
    await archiver.step(observe(writer))
    assert archiver.manifest.live_offset > divergence

    other = LogWriter(tmp_path / "other")
    other.closed_segment(b"first")
    other.append(b"good")
    other.roll()
    other.begin_epoch(1)
    other.closed_segment(b"another leader's")
    other.drop_head()
    other.drop_head()
    archiver = archiver_of(other, archive, FakeBroker(other))
    for _ in range(6):
        await archiver.step(observe(other))
    manifest = archiver.manifest
    assert manifest.faults() == ()
    whole = await archive.manifests.spillovers.with_history(manifest)
    assert bounds_of(whole) == [(0, 0, 0), (1, 1, 1), (2, 2, 1)]
    await expect_as_in_the_log(archive, other, manifest)
