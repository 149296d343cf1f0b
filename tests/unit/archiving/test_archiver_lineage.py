"""An archiver after an unclean election: what it replaces, and what reading the archive gives then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import archived, archiver_of, observed, values_in, written_below
from tests.fakes.broker import FakeBroker
from tests.fakes.log_writer import LogWriter
from tieringd.broker.log_dir import EPOCH_CHECKPOINT
from tieringd.formats.checkpoints import encode_epoch_checkpoint
from tieringd.model.operator_decision import ManifestVersion, OperatorDecision
from tieringd.model.segment import CrossingTransaction
from tieringd.policies.lineage import OperatorReason

if TYPE_CHECKING:
    from tieringd.model.manifest import PartitionManifest


@pytest.mark.parametrize("ended_as", ["commit", "abort"])
async def test_transaction_that_ends_otherwise_on_the_new_lineage_is_archived_so(
    writer, archive, broker, ended_as
):
    """The index of a segment before the divergence told how the old leader had ended it."""
    writer.append(b"transacted", producer_id=2)
    writer.append(b"plain")
    writer.roll()
    divergence = writer.append(b"lost")
    (writer.abort if ended_as == "commit" else writer.commit)(2)
    writer.roll()
    before = await archived(writer, archive)
    assert before.next_offset == writer.bases[-1]

    writer.truncate(divergence)
    writer.begin_epoch(1)
    getattr(writer, ended_as)(2)
    writer.closed_segment()
    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=1), writer)

    assert manifest.next_offset == writer.bases[-1]
    for read_committed in (False, True):
        found = await values_in(archive, manifest, read_committed=read_committed)
        assert found == written_below(writer, manifest.next_offset, read_committed=read_committed)
    assert (b"transacted" in found.values()) == (ended_as == "commit")
    assert not (await archive.verifier.verify(manifest, deep=True)).faults


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "with records"])
async def test_log_that_began_anew_takes_nothing_from_the_archive(
    writer, archive, broker, tmp_path, is_empty
):
    """A log that began anew, as where a disk was lost or is not mounted, leaves all that is archived."""
    for _ in range(4):
        writer.closed_segment()
    first = archiver_of(writer, archive, broker, leader_epoch=0)
    for _ in range(4):
        await first.step(observed(writer, target_bytes=0))
    before, segments = writer.bases[-1], list(first.manifest.segments)
    assert writer.bases_on_disk == [before]

    anew = log_begun_anew(writer, tmp_path)
    anew.begin_epoch(1)
    for _ in range(0 if is_empty else 8):
        anew.closed_segment(b"another history")
    on_disk = anew.bases_on_disk
    others = FakeBroker(anew)
    second = archiver_of(anew, archive, others, leader_epoch=1)
    first_look = await second.step(observed(anew, target_bytes=0))
    assert (first_look.needs_another_scan, second.operator_wait) == (True, None)
    with capture_logs() as lines:
        for _ in range(3):
            result = await second.step(observed(anew, target_bytes=0))
            assert result.waits_for_lineage
            assert not result.needs_another_scan
    assert len([one for one in lines if one["event"] == "the partition waits for an operator"]) == 1
    wait = second.operator_wait
    assert (wait.reason, wait.base_offset, wait.last_offset) == (
        OperatorReason.LOG_BEGAN_ANEW, 0, before - 1,
    )  # fmt: skip
    assert list(second.manifest.segments) == segments
    assert (others.trims, anew.bases_on_disk) == ([], on_disk)

    # The replica with the old log leads again, and the case has ended.
    writer.begin_epoch(2)
    writer.closed_segment()
    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=2), writer)
    assert manifest.gaps == manifest.replacements == ()
    assert list(await values_in(archive, manifest)) == list(range(writer.bases[-1]))


@pytest.mark.parametrize("is_led_since", [False, True], ids=["lost", "begun-later"])
async def test_log_without_a_history_loses_nothing_by_the_archives_start(
    writer, archive, broker, tmp_path, is_led_since
):
    """
    A log that began anew and lost its file of leader epochs keeps records that were never archived.

    A broker that leads since has noted its own epoch alone, where the log ended then.
    """
    for _ in range(6):
        writer.closed_segment()
    await stepped(archiver_of(writer, archive, broker, leader_epoch=0), writer)
    stored = await archive.manifests.load(writer.identified)
    await archive.manifests.commit(stored, stored.existing.expired(4, now_ms=1), leader_epoch=0)

    anew = log_begun_anew(writer, tmp_path)
    for _ in range(3):
        anew.closed_segment(b"never archived")
    others = FakeBroker(anew)
    others.epochs[anew.name] = 1
    (anew.path / EPOCH_CHECKPOINT).unlink()
    if is_led_since:
        (anew.path / EPOCH_CHECKPOINT).write_bytes(encode_epoch_checkpoint([(1, anew.next_offset)]))
    second = archiver_of(anew, archive, others, leader_epoch=1)
    with capture_logs() as lines:
        for _ in range(3):
            await second.step(observed(anew, target_bytes=0))

    told = [one for one in lines if "history does not reach back" in one["event"]]
    assert (len(told), second.operator_wait is not None) == ((0, True) if is_led_since else (1, False))
    assert (others.trims, anew.bases_on_disk) == ([], anew.bases)


@pytest.mark.parametrize(
    "changed", ["begins later", "retention", "more retention", "deleted records", "nothing of it is left"]
)
async def test_log_that_began_anew_takes_nothing_wherever_it_begins_by_now(
    writer, archive, tmp_path, changed
):
    """
    A new log whose beginning moves while the partition waits gets no more than it had.

    A replica that begins at the leader's log start has an empty log there. Retention, or a user, deletes the
    head of a log that cannot be archived.
    """
    for _ in range(8):
        writer.closed_segment()
    before = await archived(writer, archive)
    anew = log_begun_anew(writer, tmp_path, first_offset=12 if changed == "begins later" else 0)
    anew.begin_epoch(1)
    for _ in range(0 if changed == "begins later" else 16):
        anew.append(b"x")
        anew.closed_segment(b"y")
    archiver = archiver_of(anew, archive, FakeBroker(anew), leader_epoch=1)
    await stepped(archiver, anew)
    assert archiver.operator_wait.reason is OperatorReason.LOG_BEGAN_ANEW
    first_offset = archiver.operator_wait.base_offset
    if changed == "deleted records":
        anew.log_start_offset = 2
    is_behind = changed == "nothing of it is left"
    for _ in range({"retention": 2, "more retention": 3}.get(changed, 0)):
        anew.drop_head()
    while is_behind and anew.log_start_offset <= before.next_offset:
        anew.drop_head()
    anew.forget_epochs()
    manifest = await stepped(archiver, anew)

    assert list(manifest.segments)[: len(before.segments)] == list(before.segments)
    assert first_offset == (12 if changed == "begins later" else 0)
    # Behind the archive nothing contradicts it: what the new log lost is a gap.
    assert (archiver.operator_wait is None, bool(manifest.gaps)) == (is_behind, is_behind)


def log_begun_anew(writer, tmp_path, *, first_offset: int = 0) -> LogWriter:
    """Return an empty log of the same partition, on another disk."""
    name = writer.identified
    return LogWriter(
        tmp_path / "anew",
        name.topic,
        name.partition,
        topic_id=name.topic_id,
        cluster=name.cluster,
        first_offset=first_offset,
    )


def archived_up_to_a_marker(writer) -> int:
    """Write a segment within producer 2's transaction, which is the archive's, and return its end."""
    writer.append(b"transacted", producer_id=2)
    writer.append(b"plain")
    return writer.roll()


async def stepped(archiver, writer) -> PartitionManifest:
    """Let *archiver* do all that there is to do, and return the manifest."""
    result = await archiver.step(observed(writer))
    while result.uploaded or result.needs_another_scan:
        result = await archiver.step(observed(writer))
    assert archiver.manifest is not None
    return archiver.manifest


async def expect_as_in_the_log(archive, writer, manifest) -> None:
    for read_committed in (False, True):
        found = await values_in(archive, manifest, read_committed=read_committed)
        assert found == written_below(writer, manifest.next_offset, read_committed=read_committed)
    assert not (await archive.verifier.verify(manifest, deep=True)).faults


@pytest.mark.parametrize("ended_as", ["commit", "abort"])
@pytest.mark.parametrize("was_ended_as", ["commit", "abort"])
async def test_transaction_whose_marker_was_lost_past_the_archive_s_end_is_archived_again(
    writer, archive, broker, was_ended_as, ended_as
):
    """All archived records are on the lineage, and the index has an end that the log has no more."""
    end = archived_up_to_a_marker(writer)
    getattr(writer, was_ended_as)(2)
    before = await archived(writer, archive)
    assert before.next_offset == end

    writer.truncate(end)
    writer.begin_epoch(1)
    writer.append(b"another leader's")
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    manifest = await stepped(archiver, writer)
    assert (manifest.next_offset, manifest.crossing) == (0, ()), "nothing is decided yet"
    assert [(one.base_offset, one.last_offset) for one in manifest.replacements] == [(0, end - 1)]

    getattr(writer, ended_as)(2)
    writer.closed_segment()
    manifest = await stepped(archiver, writer)
    assert manifest.next_offset == writer.bases[-1]
    await expect_as_in_the_log(archive, writer, manifest)
    found = await values_in(archive, manifest, read_committed=True)
    assert (b"transacted" in found.values()) == (ended_as == "commit")


async def test_transaction_whose_marker_the_new_leader_has_stays_as_it_is(writer, archive, broker):
    """A clean election replaces nothing, whatever crosses the archive's end."""
    end = archived_up_to_a_marker(writer)
    writer.abort(2)
    before = await archived(writer, archive)
    assert before.crossing == (CrossingTransaction(2, 0, end, 0),)

    writer.begin_epoch(1)
    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=1), writer)
    assert (manifest.segments, manifest.replacements) == (before.segments, ())
    assert manifest.crossing == before.crossing

    writer.closed_segment()
    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=1), writer)
    assert (list(manifest.segments)[:1], manifest.crossing) == (list(before.segments), before.crossing)
    await expect_as_in_the_log(archive, writer, manifest)


async def test_transaction_beside_a_reopened_one_stays_as_it_is(writer, archive, broker):
    """A transaction that crosses the archive's end stays if the new leader has its marker."""
    writer.append(b"well ended", producer_id=3)
    writer.roll()
    begun = writer.append(b"transacted", producer_id=2)
    writer.roll()
    writer.commit(3)
    lost = writer.next_offset
    writer.abort(2)
    assert (await archived(writer, archive)).next_offset == lost - 1

    writer.truncate(lost)
    writer.begin_epoch(1)
    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=1), writer)
    assert manifest.next_offset == begun
    assert manifest.crossing == (CrossingTransaction(3, 0, lost - 1, 0),)

    writer.commit(2)
    writer.closed_segment()
    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=1), writer)
    assert manifest.next_offset == writer.bases[-1]
    await expect_as_in_the_log(archive, writer, manifest)


async def test_marker_that_a_cut_put_past_the_archive_s_end_again_may_be_lost_as_well(
    writer, archive, broker
):
    """
    Two unclean elections in a row: the first cuts the marker off, the second removes it.

    The first cuts a whole segment off, because a transaction is open where the logs part.
    """
    writer.append(b"transacted", producer_id=2)
    writer.roll()
    writer.append(b"plain")
    writer.commit(2)
    writer.append(b"open", producer_id=3)
    divergence = writer.append(b"lost")
    writer.closed_segment()
    before = await archived(writer, archive)
    assert before.crossing == (CrossingTransaction(2, 0, 2, 0),)

    writer.truncate(divergence)
    writer.begin_epoch(1)
    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=1), writer)
    assert (manifest.next_offset, manifest.crossing) == (1, before.crossing)

    writer.truncate(2)
    writer.begin_epoch(2)
    writer.append(b"another leader's")
    writer.abort(2)
    writer.closed_segment()
    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=2), writer)
    assert manifest.next_offset == writer.bases[-1]
    await expect_as_in_the_log(archive, writer, manifest)
    assert b"transacted" not in (await values_in(archive, manifest, read_committed=True)).values()


async def test_history_of_epochs_that_begins_inside_a_batch_tells_of_the_whole_batch(writer, archive, broker):
    """A user's deletion ended inside a batch, and the broker's history of epochs begins there."""
    for _ in range(3):
        writer.closed_segment()
    before = await archived(writer, archive)
    divergence = before.segments[0].next_offset
    writer.truncate(divergence)
    writer.begin_epoch(1)
    writer.append(b"deleted", b"deleted", b"kept")
    writer.closed_segment()
    writer.closed_segment()
    writer.log_start_offset = divergence + 2
    writer.forget_epochs()
    assert writer.epochs == [(1, divergence + 2)]

    # No epoch is in common any more, so an operator is asked, from the beginning of the batch on.
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    waiting = await stepped(archiver, writer)
    assert archiver.operator_wait is not None
    range_to_go = (archiver.operator_wait.base_offset, archiver.operator_wait.last_offset)
    assert range_to_go == (divergence, before.next_offset - 1)
    await archive.manifests.decisions.add(
        OperatorDecision(writer.identified, "d1", 7, "ann", ManifestVersion.of(waiting), give_up=range_to_go)
    )
    manifest = await stepped(archiver, writer)
    manifest = await stepped(archiver, writer)
    assert manifest.next_offset == writer.bases[-1]
    assert [one.base_offset for one in manifest.replacements] == [divergence]
    assert not (await archive.verifier.verify(manifest, deep=True)).faults
    found = await values_in(archive, manifest, read_committed=False)
    expected = written_below(writer, manifest.next_offset, read_committed=False)
    assert {offset: value for offset, value in found.items() if offset >= writer.log_start_offset} == {
        offset: value for offset, value in expected.items() if offset >= writer.log_start_offset
    }


@pytest.mark.parametrize("kept", ["all", "less"])
async def test_history_without_the_leader_s_epoch_holds_once_a_later_scan_shows_it_again(
    writer, archive, broker, kept
):
    """A log without a record of its leader's epoch goes on if it reaches the archive's end, else it waits."""
    writer.closed_segment(b"a")
    divergence = writer.append(b"b")
    writer.roll()
    await archived(writer, archive)
    if kept == "less":
        writer.truncate(divergence)
    else:
        writer.closed_segment(b"c")
    broker.epochs[writer.name] = 1
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    seen = observed(writer)
    for _ in range(2):
        result = await archiver.step(seen)
        assert (result.waits_for_lineage, result.needs_another_scan) == (True, True), "the same scan"

    result = await archiver.step(observed(writer))
    assert result.waits_for_lineage == (kept == "less")
    assert not result.needs_another_scan
    assert result.uploaded == (kept == "all")


async def test_history_that_may_have_changed_between_two_scans_waits(writer, archive, broker):
    """A log that grew between two scans may have a record of its leader that the history was read before."""
    writer.closed_segment(b"a")
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    broker.epochs[writer.name] = 1
    for _ in range(3):
        assert (await archiver.step(observed(writer))).waits_for_lineage
        writer.append(b"more")
