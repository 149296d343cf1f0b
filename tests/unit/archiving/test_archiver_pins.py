"""An archiver whose broker has deleted the log's head: what pins hold is archived as if it were there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.fakes.archive import archived, archiver_of, observed, values_in, written_below
from tieringd.broker.pins import PinDirectory, with_true_ends
from tieringd.policies.pinning import judged, plan_pins
from tieringd.policies.upload_plan import UploadLimits

if TYPE_CHECKING:
    from tieringd.archiving.observer import Observation
    from tieringd.model.segment import LocalSegment


class Pinned:
    """A log whose closed segments were pinned before the broker deleted them, and forgot their epochs."""

    def __init__(self, writer, directory: PinDirectory) -> None:
        self.writer = writer
        self._directory = directory

    def pin(self) -> None:
        """Pin what is closed, as a round of the daemon's does."""
        log = self.writer.local_log()
        self._directory.note(log)
        for segment in log.closed_segments:
            self._directory.make(self.writer.partition, segment)

    def pin_open(self, active: LocalSegment) -> None:
        """Pin the active segment, with the end that the broker has told."""
        self._directory.note(self.writer.local_log())
        self._directory.make(self.writer.partition, active, is_open=True)

    def delete(self) -> None:
        """Delete all but the active segment, as Kafka does."""
        while len(self.writer.bases_on_disk) > 1:
            self.writer.drop_head()
        newest, _ = self.writer.epochs[-1]
        self.writer.epochs = [(newest, self.writer.log_start_offset)]
        self.writer._write_epochs()

    def observed(self) -> Observation:
        """Return an observation of both."""
        found, log = self._directory.found(self.writer.partition), self.writer.local_log()
        log, pins = judged(log, with_true_ends(log, found))
        return replace(observed(self.writer), log=log, pins=pins)


@pytest.fixture
def pinned(writer, tmp_path):
    return Pinned(writer, PinDirectory(str(tmp_path / "pins")))


async def stepped(archiver, pinned):
    while (await archiver.step(pinned.observed())).uploaded:
        pass
    return archiver.manifest


@pytest.mark.parametrize("is_noted", [True, False])
async def test_leader_epochs_of_what_only_pins_hold_are_archived(writer, pinned, archive, broker, is_noted):
    """The broker has forgotten them; they were noted beside the pins, and the batches tell them as well."""
    writer.closed_segment()
    writer.begin_epoch(2)
    writer.closed_segment()
    pinned.pin()
    pinned.delete()
    seen = pinned.observed()
    if not is_noted:
        seen = replace(seen, log=writer.local_log())
    assert [each.base_offset for each in seen.uploadable.segments] == [0, 3, 6]

    archiver = archiver_of(writer, archive, broker, leader_epoch=2)
    await archiver.step(seen)

    manifest = archiver.manifest
    assert manifest.epochs == ((0, 0), (2, 3))
    assert await values_in(archive, manifest) == written_below(writer, 6)


async def test_pins_wait_for_the_leader_s_own_epoch(writer, pinned, archive, broker):
    """A history without it may be of a log that the broker, as a follower, is giving up."""
    writer.closed_segment()
    pinned.pin()
    pinned.delete()
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)

    result = await archiver.step(pinned.observed())
    assert result.uploaded == 0
    assert "ends with epoch 0" in result.waits_because

    writer.begin_epoch(1)
    manifest = await stepped(archiver, pinned)
    assert await values_in(archive, manifest) == written_below(writer, 3)


async def test_archive_off_the_lineage_is_found_by_the_history_of_the_pins(writer, pinned, archive, broker):
    """The rest of the log begins after the archive's end, and says nothing of what lies before."""
    writer.closed_segment()
    kept_end = writer.closed_segment(b"lost", b"too")
    before = await archived(writer, archive)
    writer.truncate(kept_end)
    writer.begin_epoch(1)
    writer.closed_segment(b"another leader's")
    writer.closed_segment()
    writer.closed_segment()
    pinned.pin()
    pinned.delete()
    writer.begin_epoch(3)
    assert writer.log_start_offset > before.next_offset

    manifest = await stepped(archiver_of(writer, archive, broker, leader_epoch=3), pinned)

    replaced = [(one.base_offset, one.last_offset) for one in manifest.replacements]
    assert replaced == [(kept_end, before.next_offset - 1)]
    assert (manifest.epochs, manifest.gaps) == (((0, 0), (1, kept_end)), ())
    assert await values_in(archive, manifest) == written_below(writer, writer.log_start_offset)
    assert not (await archive.verifier.verify(manifest, deep=True)).faults


async def test_pin_of_a_segment_that_was_rolled_before_its_end_was_asked_is_archived(
    writer, pinned, archive, broker
):
    """A scan reads the files, the broker rolls and appends, and then tells the end of the next segment."""
    writer.append()
    active = writer.local_log().segments[-1]
    writer.roll()
    writer.append()
    told_end = writer.bounds().log_end_offset
    assert told_end == 6
    pinned.pin_open(replace(active, next_offset=told_end))
    writer.roll()
    pinned.delete()

    manifest = await stepped(archiver_of(writer, archive, broker), pinned)

    # The broker deleted the next segment before a scan saw it closed.
    assert [(one.base_offset, one.last_offset) for one in manifest.segments] == [(0, 2)]
    assert await values_in(archive, manifest) == written_below(writer, 3)


@pytest.mark.parametrize("durable_end", [3, 6])
async def test_damage_in_a_pin_of_a_grown_active_segment_is_reported(
    writer, pinned, archive, broker, durable_end
):
    """What lies before the damage may be durable, in part or all of it. The rest is not taken for durable."""
    for _ in range(3):
        writer.append()
    pinned.pin_open(replace(writer.local_log().segments[-1], next_offset=3))
    writer.high_watermark = durable_end
    archiver = archiver_of(writer, archive, broker, limits=UploadLimits(max_interval_ms=0))
    await archiver.step(observed(writer))
    assert archiver.manifest.next_offset == durable_end
    writer.high_watermark = None
    size_bytes = len(writer.data_of(0)) // 3
    writer.roll()
    with writer.log_path(0).open("r+b") as file:
        file.seek(2 * size_bytes + 8)
        file.write(b"\xff\xff\xff\xff")
    pinned.delete()

    seen = pinned.observed()
    assert [one.next_offset for one in seen.uploadable.segments] == [7, None]
    assert plan_pins(seen.log, seen.pins, next_offset=durable_end).release == ()
    await archiver.step(seen)
    assert archiver.manifest.next_offset == durable_end
    assert "impossible" in archiver.quarantine_fault


async def test_pin_of_an_active_segment_that_an_earlier_release_made_is_archived(
    writer, pinned, archive, broker, tmp_path
):
    """The release had no mark for it, and the broker has appended since and deleted the segment."""
    writer.append()
    pinned.pin_open(replace(writer.local_log().segments[-1], next_offset=3))
    for path in list((tmp_path / "pins").rglob("*-open.*")):
        path.rename(path.with_name(path.name.replace("-open", "")))
    writer.append()
    writer.roll()
    pinned.delete()
    seen = pinned.observed()
    assert plan_pins(seen.log, seen.pins, next_offset=3).release == ()

    manifest = await stepped(archiver_of(writer, archive, broker), pinned)

    assert await values_in(archive, manifest) == written_below(writer, 6)
