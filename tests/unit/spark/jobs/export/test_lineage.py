"""Unclean elections around an export: no record of a deposed leader is in a target unnamed."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.fakes.dying_store import Killed
from tests.support.exports import ArchivedLogs, ParquetDirectory, counted, exported, in_this_process
from tests.support.iceberg import rows_of_table, running_catalog
from tests.unit.model.values import PARTITION, remote, stored
from tieringd.errors import TieringError
from tieringd.formats.object_keys import topic_key
from tieringd.model.corrections import with_marks_redated
from tieringd.model.manifest_parts import Replacement
from tieringd.spark.jobs.export.iceberg_target import IcebergTopic
from tieringd.spark.jobs.export.job import report_of
from tieringd.spark.jobs.export.state import ExportState, ReplacedOffsets, parse_state, pinned, replaced_since

NUMBER = PARTITION.partition
REPLACED = (
    "orders-0 offsets 6 to 11 were replaced by another leader's records after the export: the target may "
    "have the records of the deposed leader"
)


@pytest.fixture
def logs(tmp_path):
    logs = ArchivedLogs.made(tmp_path / "source")
    yield logs
    logs.bucket.close()


@pytest.fixture
def directory(tmp_path):
    directory = ParquetDirectory.made(tmp_path / "target")
    yield directory
    directory.bucket.close()


def deposing(logs, cut):
    """Return what does tasks, and has an unclean election after the first of them."""
    elections = []

    def run(work, portions):
        written = in_this_process(work, portions)
        if not elections:
            elections.append(logs.bucket.run(logs.depose(cut)))
        return written

    return run


def archived_values(cut):
    """Return what the archive has after an election that cut it back to *cut*."""
    old = {(0, offset, b"0-%d" % offset) for offset in range(cut)}
    return old | {(0, offset, b"new%d" % offset) for offset in range(cut, cut + 8)}


async def test_election_between_reading_and_commit_is_named_where_files_are_seen(logs, directory):
    """Stores have no rename: the deposed leader's records are in the directory, and the report says where."""
    await logs.fill(2)

    outcome = exported(logs, directory.topic(), run=deposing(logs, 6))

    assert outcome.faults == [REPLACED]
    assert {(0, offset, b"0-%d" % offset) for offset in range(12)} <= directory.seen().keys()
    again = report_of([exported(logs, directory.topic())])
    assert again.faults == ()
    assert again.figures["replaced_offsets"] == 6
    assert again.tables[-1].rows == (("orders", 0, 6, 12, 1),), "the target's state keeps it for good"


async def test_election_between_reading_and_commit_has_a_table_s_round_done_anew(tmp_path, logs):
    """Nothing of the round was in the table: the deposed leader's records never are."""
    await logs.fill(2)
    with running_catalog(tmp_path / "warehouse") as catalog:
        name = ("redpanda", "orders")
        target = IcebergTopic(catalog, name, partition_by="hour")

        outcome = exported(logs, target, run=deposing(logs, 6))

        assert (outcome.commits, outcome.faults) == (1, [])
        seen = counted(rows_of_table(catalog.load_table(name)))
    # The run goes up to where the archive ended when it began.
    assert seen.keys() == {one for one in archived_values(6) if one[1] < 12}
    assert max(seen.values()) == 1


async def test_election_after_a_killed_run_is_named_by_the_run_that_ends_its_round(logs, directory):
    """The killed one has written files already, and they are never replaced."""
    await logs.fill(2)

    def killed(work, portions):
        in_this_process(work, portions)
        raise Killed

    with suppress(Killed):
        exported(logs, directory.topic(), run=killed)
    await logs.depose(6)

    assert exported(logs, directory.topic()).faults == [REPLACED]
    assert exported(logs, directory.topic()).faults == []


@pytest.mark.parametrize("portion_bytes", [300, 1 << 20])
async def test_killed_run_s_portions_end_where_the_archive_was_cut_back(logs, directory, portion_bytes):
    """
    A killed run has begun offsets up to 17, and the archive then ends at 14.

    The run waits for the archive, or gives up what is not there, once, and later runs go on past it.
    """
    await logs.fill(3)

    def killed(work, portions):
        in_this_process(work, portions[:1])
        raise Killed

    with suppress(Killed):
        exported(logs, directory.topic(), run=killed, portion_bytes=portion_bytes)
    await logs.depose(6)

    with pytest.raises(TieringError, match=r"offsets 14 to 17: .* once the archive reaches past them"):
        exported(logs, directory.topic())

    outcome = exported(logs, directory.topic(), fails_on_gap=False)
    assert outcome.faults == [REPLACED.replace("11", "17")]
    assert [(one.from_offset, one.next_offset) for one in outcome.lost] == [(14, 18)]
    assert (outcome.commits, outcome.reached) == (1, {0: 18})
    seen = Counter((row["offset"], row["value"]) for row in directory.rows("offset", "value"))
    assert max(seen.values()) == 1
    again = exported(logs, directory.topic(), fails_on_gap=False)
    assert (again.commits, again.faults, again.lost) == (0, [], [])
    with pytest.raises(TieringError, match="was cut back to the log of another leader"):
        exported(logs, directory.topic())


async def test_killed_run_s_portions_are_written_once_the_archive_reaches_past_them(logs, directory):
    """The new leader's log has grown past them, so nothing is lost, and no gap has to be allowed."""
    await logs.fill(2)

    def killed(work, portions):
        raise Killed

    with suppress(Killed):
        exported(logs, directory.topic(), run=killed)
    await logs.depose(6)

    assert exported(logs, directory.topic()).lost == []
    assert directory.seen().keys() == archived_values(6)


async def test_run_that_began_later_and_exported_more_is_no_election(logs, directory):
    """The other run has seen more of the archive, which still has all that both have exported."""
    await logs.fill(1)
    inner = []

    def overtaken(work, portions):
        written = in_this_process(work, portions)
        if not inner:
            logs.bucket.run(logs.fill(1))
            inner.append(exported(logs, directory.topic()))
        return written

    outer = exported(logs, directory.topic(), run=overtaken)

    assert (inner[0].reached, outer.reached, outer.faults) == ({0: 12}, {0: 12}, [])
    assert directory.seen() == logs.written()


async def test_no_clock_has_a_say(logs, directory):
    """The clock of the broker's host is years behind that of the export's driver."""
    await logs.fill(2)
    exported(logs, directory.topic())
    await logs.depose(6, now_ms=1)

    assert exported(logs, directory.topic()).faults == [REPLACED]


async def test_election_before_the_export_is_no_fault(logs, directory):
    """The records that were read are those of the log."""
    await logs.fill(2)
    await logs.depose(6)

    assert exported(logs, directory.topic()).faults == []
    assert directory.seen().keys() == archived_values(6)


def replaced_manifest(*replacements):
    return replace(stored([remote(0, 99)]), replacements=replacements)


def test_what_was_replaced_above_what_was_read_is_none_of_it():
    """Such offsets are read later, from the log that has them now."""
    state = ExportState(topic_key(PARTITION), "read_committed", {NUMBER: 10})
    manifest = replaced_manifest(Replacement(4, 30, 2, 7), Replacement(10, 20, 3, 7))

    assert replaced_since(state, [manifest], state.offsets) == (ReplacedOffsets(NUMBER, 4, 10, 2),)


def test_replacement_that_was_only_dated_anew_is_known():
    """A daemon corrects a time that its host's wrong clock has recorded; the records stay as they are."""
    topic = topic_key(PARTITION)
    manifest = replaced_manifest(Replacement(4, 9, 2, 2**50))
    state = pinned(ExportState(topic, "read_committed", {NUMBER: 10}), [manifest])
    redated = with_marks_redated(manifest, lambda time_ms: time_ms > 1000, now_ms=1000)
    assert redated.replacements == (Replacement(4, 9, 2, 1000),)
    assert replaced_since(state, [redated], state.offsets) == ()
    assert pinned(state, [redated]) == state


def test_state_of_an_earlier_release_goes_by_its_time():
    """The state has no pins: that release has reported replacements before its last commit."""
    state = ExportState(topic_key(PARTITION), "read_committed", {NUMBER: 10}, "run", 7, None)
    text = state.as_json().replace(',"replacements":{},"replaced":[]', "")
    assert parse_state(text, source="test") == state
    manifest = replaced_manifest(Replacement(4, 30, 2, 7), Replacement(5, 30, 3, 8))

    assert replaced_since(state, [manifest], state.offsets) == (ReplacedOffsets(NUMBER, 5, 10, 3),)


def test_pins_stay_and_are_read_as_they_were_written():
    """A run with an older manifest does not forget what another one has pinned."""
    old, new = Replacement(4, 30, 2, 7), Replacement(5, 30, 3, 8)
    noted = ReplacedOffsets(NUMBER, 5, 10, 3)
    state = pinned(
        ExportState(topic_key(PARTITION), "read_committed"), [replaced_manifest(old, new)], [noted]
    )

    again = pinned(parse_state(state.as_json(), source="test"), [replaced_manifest(old)], [noted])

    assert again == state
    assert (again.replacements, again.replaced) == ({NUMBER: (old, new)}, (noted,))
