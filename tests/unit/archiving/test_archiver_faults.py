"""What an archiver can not copy: corrupt segments, offsets that are gone, formats of old."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.builders import OLD_MESSAGE_V0, OLD_MESSAGE_V1
from tests.fakes.archive import archiver_of, observed
from tests.fakes.manifests import bases, stored_manifest
from tieringd.archive.manifest_store import StoredManifest
from tieringd.archiving.archiver import StepResult
from tieringd.archiving.missing_offsets import GapRecorder
from tieringd.errors import CorruptDataError
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import Gap
from tieringd.policies.upload_plan import MissingRange, UploadLimits, plan_uploads


@pytest.fixture
def archiver(writer, archive, broker, metrics, clock):
    return archiver_of(writer, archive, broker, metrics=metrics, now_ms=clock)


def value_of(metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


async def test_corrupt_segment_is_quarantined(writer, archiver, store, broker, metrics):
    """A corrupt segment is neither uploaded nor skipped, and the fault names its file."""
    good, bad = writer.closed_segment(), writer.closed_segment()
    writer.closed_segment()
    writer.flip_byte(bad)

    result = await archiver.step(observed(writer, target_bytes=0))

    assert result.uploaded == 1
    assert str(writer.log_path(bad)) in result.fault
    assert result.fault == archiver.quarantine_fault
    assert bases(store, writer) == [good]
    assert broker.trims == []
    failures = value_of(
        metrics, "tieringd_upload_failures_total", topic="orders", error=CorruptDataError.__name__
    )
    assert failures == 1


async def test_quarantined_segment_is_not_read_again(writer, archiver, store):
    """A corrupt segment is not read again while its bytes are the same."""
    bad = writer.closed_segment()
    writer.closed_segment()
    writer.flip_byte(bad)
    await archiver.step(observed(writer))
    store.requests.clear()

    result = await archiver.step(observed(writer))

    assert result.fault
    assert result.uploaded == 0
    assert not [key for operation, key in store.requests if operation == "put"]


async def test_quarantine_is_lifted_when_the_bytes_change(writer, archiver, store):
    """A segment that was mended is uploaded, and all that waited behind it."""
    bad, behind = writer.closed_segment(), writer.closed_segment()
    writer.flip_byte(bad)
    await archiver.step(observed(writer))

    writer.flip_byte(bad)
    result = await archiver.step(observed(writer))

    assert (result.uploaded, result.fault) == (2, "")
    assert bases(store, writer) == [bad, behind]


async def test_quarantine_is_lifted_when_the_segment_is_gone(writer, archiver, store):
    """A corrupt segment that the broker deleted becomes a gap, and the rest goes on."""
    good, bad, behind = writer.closed_segment(), writer.closed_segment(), writer.closed_segment()
    writer.flip_byte(bad)
    await archiver.step(observed(writer))

    writer.drop_head()
    writer.drop_head()
    assert (await archiver.step(observed(writer))).gaps == 0
    result = await archiver.step(observed(writer))

    assert (result.gaps, result.uploaded, result.fault) == (1, 1, "")
    assert bases(store, writer) == [good, behind]


async def test_gap_is_recorded_after_two_observations(writer, archiver, store, metrics):
    """Offsets that left the disk uncopied are recorded at the second observation, not at the first."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    lost, kept = writer.closed_segment(), writer.closed_segment()
    writer.drop_head()
    writer.drop_head()

    first = await archiver.step(observed(writer))
    assert first == StepResult(pending_segments=1, needs_another_scan=True)
    assert stored_manifest(store, writer).gaps == ()

    result = await archiver.step(observed(writer))
    assert (result.gaps, result.uploaded) == (1, 1)
    (gap,) = stored_manifest(store, writer).gaps
    assert (gap.base_offset, gap.next_offset) == (lost, kept)
    assert "removed" in gap.reason
    assert value_of(metrics, "tieringd_archive_gaps_total", topic="orders") == 1
    assert value_of(metrics, "tieringd_archive_gap_offsets", topic="orders", partition="0") == kept - lost


async def test_archive_does_not_begin_after_what_one_observation_missed(writer, archiver, store):
    """The broker says where its log begins: files that the first scan missed are uploaded after the next."""
    writer.closed_segment()
    writer.closed_segment()
    seen = observed(writer)
    torn = replace(seen, log=replace(seen.log, segments=seen.log.segments[1:]))

    assert (await archiver.step(torn)).uploaded == 0
    assert (await archiver.step(observed(writer))).uploaded == 2
    manifest = stored_manifest(store, writer)
    assert (manifest.start_offset, manifest.gaps, manifest.next_offset) == (0, (), writer.bases[-1])


async def test_archive_that_holds_nothing_begins_where_the_log_does(writer, archive, broker, store):
    """Another leader's log may begin lower, with no batch boundary where the empty archive began."""
    empty = PartitionManifest.begin(writer.identified, start_offset=2)
    await archive.manifests.commit(StoredManifest(None, None), empty, leader_epoch=0)
    writer.closed_segment(b"a", b"b", b"c")

    result = await archiver_of(writer, archive, broker).step(observed(writer))

    assert (result.uploaded, result.fault) == (1, "")
    manifest = stored_manifest(store, writer)
    assert (manifest.start_offset, manifest.next_offset, manifest.gaps) == (0, 3, ())


async def test_gap_is_committed_with_what_follows_it(writer, archiver, store):
    """No gap is committed if what follows it cannot be uploaded: a later leader may have the lost offsets."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    lost = writer.closed_segment()
    kept = writer.closed_segment()
    writer.drop_head()
    writer.drop_head()
    writer.flip_byte(kept)
    for _ in range(3):
        await archiver.step(observed(writer))
    assert archiver.quarantine_fault
    assert stored_manifest(store, writer).gaps == ()
    assert stored_manifest(store, writer).next_offset == lost

    writer.flip_byte(kept)
    result = await archiver.step(observed(writer))
    assert (result.gaps, result.uploaded) == (1, 1)
    manifest = stored_manifest(store, writer)
    assert [(one.base_offset, one.next_offset) for one in manifest.gaps] == [(lost, kept)]
    assert bases(store, writer) == [0, kept]


async def test_gap_that_moved_needs_two_observations_again(writer, archiver, store):
    """A third observation is needed if more is missing at the second."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    for _ in range(3):
        writer.closed_segment()
    writer.drop_head()
    writer.drop_head()
    await archiver.step(observed(writer))
    writer.drop_head()

    assert (await archiver.step(observed(writer))).gaps == 0
    assert (await archiver.step(observed(writer))).gaps == 1


def test_gap_that_grew_downwards_needs_two_observations_again(writer):
    """An election has cut the archive back since the first one, which says nothing of what is missing now."""
    writer.closed_segment()
    recorder = GapRecorder(writer.identified, claim=None, now_ms=lambda: 7)

    def found(base_offset: int, last_offset: int) -> tuple[Gap | None, bool]:
        seen = observed(writer)
        plan = plan_uploads(seen.log, seen.bounds, next_offset=0, limits=UploadLimits())
        return recorder.missing(replace(plan, missing=MissingRange(base_offset, last_offset)), seen)

    assert found(10, 19) == (None, False)
    assert found(5, 19) == (None, False)
    gap, may_act = found(5, 19)
    assert may_act
    assert (gap.base_offset, gap.last_offset) == (5, 19)
    assert found(5, 24) == (None, False), "nor did the one before show that the log begins later"


async def test_one_observation_never_counts_as_two(writer, archiver, store):
    """An offered change makes the archiver step again on one observation; only the next one tells more."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    hidden = writer.closed_segment()
    writer.closed_segment()
    whole = observed(writer)
    first, *rest = (one for one in whole.log.segments if one.base_offset != hidden)
    holed = replace(observed(writer), log=replace(whole.log, segments=tuple(rest)))
    assert first.base_offset == 0
    for _ in range(3):
        assert await archiver.step(holed) == StepResult(pending_segments=1, needs_another_scan=True)
    while (await archiver.step(observed(writer))).uploaded:
        pass
    manifest = stored_manifest(store, writer)
    assert (manifest.gaps, manifest.next_offset) == ((), writer.bases[-1])


async def test_gap_that_closed_is_forgotten(writer, archiver, store, tmp_path):
    """Files that are back at the second observation are uploaded, and no gap is recorded."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    hidden = writer.closed_segment()
    writer.closed_segment()
    seen_whole = observed(writer)
    writer.log_path(0).unlink()
    writer.log_path(hidden).rename(tmp_path / "hidden")
    assert (await archiver.step(observed(writer))).gaps == 0

    (tmp_path / "hidden").rename(writer.log_path(hidden))
    result = await archiver.step(observed(writer))

    assert (result.gaps, result.uploaded) == (0, 2)
    assert seen_whole.log.segments[1:] == observed(writer).log.segments


async def test_gap_waits_for_data_that_follows(writer, archiver, store):
    """No gap is recorded while nothing that follows it is eligible for upload."""
    writer.closed_segment()
    await archiver.step(observed(writer))
    writer.closed_segment()
    writer.drop_head()
    writer.drop_head()

    for _ in range(3):
        assert await archiver.step(observed(writer)) == StepResult()
    assert stored_manifest(store, writer).gaps == ()


@pytest.mark.parametrize("old", [OLD_MESSAGE_V0, OLD_MESSAGE_V1], ids=["v0", "v1"])
async def test_old_message_format_is_a_gap_and_not_a_fault(writer, archiver, store, old):
    """A segment of the formats before batches can never be copied: it is recorded and passed."""
    good = writer.closed_segment()
    passed = writer.closed_segment()
    writer.closed_segment()
    writer.log_path(passed).write_bytes(old)

    result = await archiver.step(observed(writer))
    assert (result.uploaded, result.gaps, result.fault) == (1, 1, "")
    assert (await archiver.step(observed(writer))).uploaded == 1

    manifest = stored_manifest(store, writer)
    (gap,) = manifest.gaps
    assert gap.base_offset == passed
    assert "v0/v1" in gap.reason
    assert bases(store, writer) == [good, gap.next_offset]


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(lambda data: data[:16] + b"\0" + data[17:], id="one-bit"),
        pytest.param(lambda data: data[:14] + bytes(len(data) - 14), id="lost-page"),
        pytest.param(lambda data: data[:11] + b"\4" + bytes(len(data) - 12), id="lost-page-and-short"),
        pytest.param(lambda data: OLD_MESSAGE_V1[:-1] + b"y", id="damaged-old-message"),
        pytest.param(lambda data: OLD_MESSAGE_V1[:-1], id="cut-old-message"),
    ],
)
async def test_damaged_magic_is_a_fault_and_no_old_format(writer, archiver, store, damaged):
    """A batch whose magic became 0 or 1 is quarantined: another replica may still have its records."""
    good, bad = writer.closed_segment(), writer.closed_segment()
    writer.closed_segment()
    path = writer.log_path(bad)
    path.write_bytes(damaged(path.read_bytes()))

    result = await archiver.step(observed(writer))

    assert (result.uploaded, result.gaps) == (1, 0)
    assert str(path) in result.fault
    manifest = stored_manifest(store, writer)
    assert (manifest.gaps, bases(store, writer)) == ((), [good])


async def test_old_message_format_stays_on_the_broker(writer, archiver, store, broker):
    """A segment of an old format is trimmed by no local target, and neither is what follows it."""
    good, passed = writer.closed_segment(), writer.closed_segment()
    writer.closed_segment()
    writer.log_path(passed).write_bytes(writer.log_path(passed).read_bytes() + OLD_MESSAGE_V1)

    for _ in range(3):
        await archiver.step(observed(writer, target_bytes=0))

    (gap,) = stored_manifest(store, writer).gaps
    assert (gap.base_offset, bases(store, writer)) == (passed, [good, gap.next_offset])
    assert [before_offset for _, before_offset in broker.trims] == [passed]


async def test_old_message_format_behind_a_segment_makes_no_gap_of_it(writer, archiver, store):
    """A segment whose transaction ends behind messages of an old format is no gap: it has batches alone."""
    begun = writer.next_offset
    writer.append(b"a", producer_id=7)
    writer.roll()
    behind = writer.next_offset
    writer.append(b"b")
    writer.commit(7)
    writer.roll()
    writer.log_path(behind).write_bytes(OLD_MESSAGE_V1)

    result = await archiver.step(observed(writer))

    assert result.gaps == 0
    assert str(writer.log_path(behind)) in result.fault
    manifest = stored_manifest(store, writer)
    assert (manifest.gaps, manifest.next_offset) == ((), begun)


async def test_old_message_format_in_the_first_segment_begins_the_archive(writer, archiver, store):
    """An archive may begin with a gap."""
    writer.closed_segment()
    writer.log_path(0).write_bytes(OLD_MESSAGE_V0)

    await archiver.step(observed(writer))

    manifest = stored_manifest(store, writer)
    assert (manifest.start_offset, len(manifest.gaps), len(manifest.segments)) == (0, 1, 0)
    assert not manifest.faults()
