"""An archiver over a log with a hole in it: one that only pins hold, and one of them is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import archived, archiver_of, observed, values_in
from tests.fakes.log_writer import LogWriter
from tieringd.archiving.missing_offsets import HoleWatch
from tieringd.broker.pins import PinDirectory
from tieringd.errors import LocalFileError
from tieringd.policies.pinning import Pin


@pytest.fixture
def writer(writer):
    """Give a transaction, its abort in the next segment, and another transaction in the third."""
    writer.append(b"first", producer_id=1)
    writer.append(b"plain")
    writer.roll()
    writer.abort(1)
    writer.roll()
    writer.append(b"second", producer_id=1)
    writer.commit(1)
    writer.roll()
    return writer


@pytest.fixture
def observe(writer, tmp_path):
    """Return a function that observes the log when the broker has deleted two segments, and at some pins."""
    directory = PinDirectory(str(tmp_path / "pins"))
    for segment in writer.local_log().closed_segments[:2]:
        directory.make(writer.partition, segment)
    writer.drop_head()
    writer.drop_head()
    pins = directory.found(writer.partition).pins
    return lambda *which: replace(observed(writer), pins=tuple(pins[one] for one in which))


async def test_transaction_whose_marker_is_lost_counts_as_aborted(writer, observe, archive, broker):
    """The outcome of such a transaction is unknown: a later transaction's marker says nothing of it."""
    archiver = archiver_of(writer, archive, broker)
    with pytest.raises(LocalFileError, match="has no marker in the local log"):
        await archiver.step(observe(0))

    with capture_logs() as lines:
        assert (await archiver.step(observe(0))).uploaded == 1
    (line,) = [one for one in lines if "count as aborted" in one["event"]]
    assert (line["producer_ids"], line["last_lost_offset"]) == ([1], 2)
    for _ in range(3):
        await archiver.step(observe(0))

    manifest = archiver.manifest
    assert [(gap.base_offset, gap.last_offset) for gap in manifest.gaps] == [(2, 2)]
    assert set((await values_in(archive, manifest)).values()) == {b"first", b"plain", b"second"}
    committed = await values_in(archive, manifest, read_committed=True)
    assert set(committed.values()) == {b"plain", b"second"}


async def test_hole_that_is_gone_at_the_next_observation_changes_nothing(writer, observe, archive, broker):
    """A hole is permanent only when two observations have it."""
    archiver = archiver_of(writer, archive, broker)
    with pytest.raises(LocalFileError):
        await archiver.step(observe(0))

    while (await archiver.step(observe(0, 1))).uploaded:
        pass
    manifest = archiver.manifest
    assert manifest.gaps == ()
    assert b"first" not in (await values_in(archive, manifest, read_committed=True)).values()
    index = await archive.remote_log.index_of(manifest.partition, manifest.segments[0])
    assert [(one.first_offset, one.last_offset) for one in index.aborted] == [(0, 2)]


async def test_one_observation_aborts_no_transaction_however_often_it_is_used(
    writer, archive, broker, tmp_path
):
    """The transaction is committed in a pin that one observation missed; the next observation has it."""
    log = LogWriter(tmp_path / "committed")
    log.append(b"data", producer_id=7)
    log.roll()
    log.commit(7)
    log.roll()
    log.closed_segment()
    whole = observed(log)
    head, _, *rest = whole.log.segments
    holed = replace(
        observed(log), log=replace(whole.log, segments=tuple(rest)), pins=(Pin(head, is_held=True),)
    )
    archiver = archiver_of(log, archive, broker)
    for _ in range(3):
        with pytest.raises(LocalFileError, match="has no marker in the local log"):
            await archiver.step(holed)
    result = await archiver.step(observed(log))
    while result.uploaded or result.needs_another_scan:
        result = await archiver.step(observed(log))
    committed = await values_in(archive, archiver.manifest, read_committed=True)
    assert b"data" in committed.values()


def test_hole_is_confirmed_by_another_observation_and_as_it_is(observe):
    """A hole that the second observation lacks is missing in one observation only."""
    watch = HoleWatch()
    seen = observe(0)
    hole, wider = (2, 3), (2, 5)
    gone = replace(observe(0), log=replace(seen.log, segments=seen.log.segments[1:]))
    found = []
    for each in (seen, seen, gone, seen, observe(0), observe(0, 1), observe(0)):
        watch.note(each)
        found.append((watch.new, watch.confirmed))
    assert found == [
        ({hole}, set()),
        ({hole}, set()),
        ({wider}, set()),
        ({hole}, set()),
        (set(), {hole}),
        (set(), set()),
        ({hole}, set()),
    ]


async def test_archive_is_not_cut_back_by_a_log_with_a_new_hole(writer, archive, broker, request):
    """Nothing is replaced while the log has a hole: an open transaction may have begun in it."""
    before = await archived(writer, archive)
    observe = request.getfixturevalue("observe")
    writer.truncate(writer.bases[-1] - 1)
    writer.begin_epoch(1)
    writer.closed_segment()
    archiver = archiver_of(writer, archive, broker, leader_epoch=1)
    holed = observe(0)
    for _ in range(3):
        result = await archiver.step(holed)
        assert (
            "offsets 2 to 2 are missing on disk; nothing is replaced until the next scan"
            in result.waits_because
        )
        assert result.needs_another_scan
    assert archiver.manifest.segments == before.segments
    await archiver.step(observe(0, 1))
    assert archiver.manifest.replacements


async def test_archive_is_not_cut_back_by_a_scan_without_the_first_files(tmp_path, archive, broker):
    """A transaction that is open at the divergence may have begun in a file that the scan has missed."""
    log = LogWriter(tmp_path / "crossing")
    log.closed_segment(b"plain")
    log.append(b"in doubt", producer_id=1)
    log.roll()
    log.closed_segment(b"before the end")
    parts_at = log.next_offset
    log.commit(1)
    log.roll()
    before = await archived(log, archive)
    log.truncate(parts_at)
    log.begin_epoch(1)
    log.abort(1)
    log.roll()
    whole = observed(log)
    torn = replace(whole, log=replace(whole.log, segments=whole.log.segments[2:]))
    archiver = archiver_of(log, archive, broker, leader_epoch=1)
    result = await archiver.step(torn)
    assert "offsets 0 to 1 are missing on disk; nothing is replaced" in result.waits_because
    assert result.needs_another_scan
    assert archiver.manifest.segments == before.segments
    result = await archiver.step(observed(log))
    while result.uploaded or result.needs_another_scan:
        result = await archiver.step(observed(log))
    committed = await values_in(archive, archiver.manifest, read_committed=True)
    assert b"in doubt" not in committed.values()
