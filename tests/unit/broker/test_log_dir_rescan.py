"""Log directories that one daemon scans again and again: what is looked up, and what is noticed."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from unittest.mock import patch

import pytest
from structlog.testing import capture_logs

from tests.fakes.log_writer import LogWriter
from tests.support.file_calls import counted_file_calls
from tests.unit.broker.test_disk_use import settle
from tieringd.broker.layout import KafkaLayout
from tieringd.broker.log_dir import LOOK_EVERY, LogDirRescan, ReportedChanges
from tieringd.errors import LocalFileError

OLD_ID, NEW_ID = "AAAAAAAAAAAAAAAAAAAAAQ", "AAAAAAAAAAAAAAAAAAAAAg"


@pytest.fixture
def log_dir(tmp_path):
    """Give a log directory with one partition that has not changed for a while."""
    LogWriter(tmp_path, "orders", topic_id=OLD_ID).closed_segment()
    settle(tmp_path / "orders-0")
    return tmp_path


def round_of(layout, log_dir):
    """Scan, read every partition, and return the topic ids and the logs."""
    partitions = layout.scan([str(log_dir)]).partitions
    return [one.topic_id for one in partitions], [layout.read_log(one, ()) for one in partitions]


def replaced(log_dir):
    """Put the directory of another topic of the same name in the place of the first one."""
    shutil.rmtree(log_dir / "orders-0")
    LogWriter(log_dir, "orders", topic_id=NEW_ID).closed_segment()
    settle(log_dir / "orders-0")


def test_unchanged_partition_is_the_same_object(log_dir):
    """Rounds in which nothing changed return what they returned before."""
    layout = KafkaLayout()
    (_, [first]), (_, [second]), (_, [third]) = (round_of(layout, log_dir) for _ in range(3))
    assert first is second is third


def test_unchanged_partitions_of_a_scan_are_the_same_tuple(log_dir):
    """A scan that finds the same partitions says so by identity. Another partition makes another tuple."""
    layout = KafkaLayout()
    first, second = (layout.scan([str(log_dir)]).partitions for _ in range(2))
    assert first is second
    LogWriter(log_dir, "orders", 1, topic_id=OLD_ID)
    assert layout.scan([str(log_dir)]).partitions != first


def test_log_directory_with_the_same_names_is_listed_once(log_dir):
    """Its names say which partitions there are: the first listing has told files and directories apart."""
    layout = KafkaLayout()
    round_of(layout, log_dir)
    with patch.object(os, "scandir", side_effect=AssertionError("listed by kinds")):
        ids, logs = round_of(layout, log_dir)
    assert (ids, len(logs)) == ([OLD_ID], 1)


def test_directory_in_place_of_a_file_with_its_name_is_found(log_dir):
    """A listing in which a file has the name of a partition does not stand for the next one."""
    layout = KafkaLayout()
    (log_dir / "orders-7").write_bytes(b"")
    for _ in range(2):
        assert len(round_of(layout, log_dir)[0]) == 1
    (log_dir / "orders-7").unlink()
    LogWriter(log_dir, "orders", 7, topic_id=OLD_ID)
    assert len(round_of(layout, log_dir)[0]) == 2


def test_files_that_a_broker_replaces_do_not_let_a_log_directory_be_listed_again(log_dir):
    """A checkpoint has another name while it is written. A partition that is being deleted counts."""
    layout = KafkaLayout()
    round_of(layout, log_dir)
    (log_dir / "replication-offset-checkpoint.tmp").write_bytes(b"")
    with patch.object(os, "scandir", side_effect=AssertionError("listed by kinds")):
        assert layout.scan([str(log_dir)]).left_alone == ()
    (log_dir / f"orders-1.{7:032x}-delete").mkdir()
    assert len(layout.scan([str(log_dir)]).left_alone) == 1


def test_partition_whose_topic_id_cannot_be_read_is_a_problem_in_each_scan(log_dir):
    """The same names do not hide it, and it is found when the file is whole again."""
    layout = KafkaLayout()
    path = LogWriter(log_dir, "orders", 1, topic_id=OLD_ID).path / "partition.metadata"
    before = path.read_text()
    path.write_text("no such thing")
    for _ in range(3):
        scan = layout.scan([str(log_dir)])
        assert (len(scan.partitions), len(scan.problems)) == (1, 1)
        round_of(layout, log_dir)
    path.write_text(before)
    assert len(layout.scan([str(log_dir)]).partitions) == 2


def test_log_is_of_the_partition_that_is_asked_for(log_dir):
    """A caller may know another id of the topic than the files have: the cluster's."""
    layout = KafkaLayout()
    (partition,) = layout.scan([str(log_dir)]).partitions
    first = layout.read_log(partition, ())
    asked = replace(partition, topic_id=NEW_ID)
    assert layout.read_log(asked, ()) == replace(first, partition=asked)
    assert layout.read_log(partition, ()) == first


@pytest.mark.parametrize("rounds_before", [1, 2, 3])
def test_topic_that_was_created_again_is_found_after_one_round_at_most(log_dir, rounds_before):
    """The first round finds it, or says that it cannot read the partition. The second one finds it."""
    layout = KafkaLayout()
    for _ in range(rounds_before):
        assert round_of(layout, log_dir)[0] == [OLD_ID]
    replaced(log_dir)
    try:
        ids, _ = round_of(layout, log_dir)
    except LocalFileError:
        ids, _ = round_of(layout, log_dir)
    assert ids == [NEW_ID]


@pytest.mark.parametrize("rounds_before", [0, 1, 2])
def test_log_is_never_read_under_another_topic_s_id(log_dir, rounds_before):
    """A directory that is replaced between scan and read belongs to a topic that the scan did not see."""
    layout = KafkaLayout()
    for _ in range(rounds_before):
        round_of(layout, log_dir)
    (partition,) = layout.scan([str(log_dir)]).partitions
    replaced(log_dir)
    with pytest.raises(LocalFileError, match="another topic"):
        layout.read_log(partition, ())


def test_topic_id_of_a_partition_that_is_not_read_any_more_is_looked_up(log_dir):
    """Only a read notices a new directory, so a partition that was not read is asked for its topic id."""
    layout = KafkaLayout()
    round_of(layout, log_dir)
    layout.scan([str(log_dir)])
    layout.scan([str(log_dir)])
    replaced(log_dir)
    (partition,) = layout.scan([str(log_dir)]).partitions
    assert partition.topic_id == NEW_ID


def test_partition_that_a_broker_moves_is_read_between_scans(log_dir, tmp_path):
    """
    A partition that is in two log directories is left out of scans.

    An earlier observation is still read.
    """
    other = tmp_path / "other"
    other.mkdir()
    layout = KafkaLayout()
    (partition,) = layout.scan([str(log_dir), str(other)]).partitions
    layout.read_log(partition, ())
    shutil.copytree(log_dir / "orders-0", other / "orders-0")
    for _ in range(2):
        assert layout.scan([str(log_dir), str(other)]).partitions == ()
        for _ in range(2):
            layout.read_log(partition, ())
    shutil.rmtree(other / "orders-0")
    assert layout.scan([str(log_dir), str(other)]).partitions == (partition,)


class Reports:
    """A kernel that reports what a test says."""

    def __init__(self, watched):
        self.watched = frozenset(watched)
        self.renamed, self.written, self.idle = set(), set(), set()

    def since_last(self, *, unwritten):
        self.idle = (self.idle | unwritten) - self.written
        renamed, self.renamed, self.written = frozenset(self.renamed), set(), set()
        return ReportedChanges(self.watched, renamed, self.watched - self.idle)


class WatchedLogs:
    """Ten partitions in one log directory, the changes that the kernel reports, and the daemon's rescans."""

    def __init__(self, root):
        self.writers = [LogWriter(root, "orders", number, topic_id=OLD_ID) for number in range(10)]
        for writer in self.writers:
            writer.closed_segment()
        self.root = str(root)
        self.rescan = LogDirRescan()
        self.reports = Reports(str(writer.path) for writer in self.writers)

    def rename(self, change, *writers):
        """Let the names in the directories of *writers* change, and report it."""
        for writer in writers:
            change(writer)
            self.reports.renamed.add(str(writer.path))

    def put_another_in_place_of_first(self):
        """Let another directory have the first one's name, and report nothing. Return its writer."""
        first = self.writers[0]
        first.path.rename(first.path.with_suffix(".abc-delete"))
        other = LogWriter(first.path.parent, "orders", 0, topic_id=OLD_ID)
        other.closed_segment()
        other.begin_epoch(7)
        return other

    def write(self, *writers):
        """Append to the logs of *writers*, and report it."""
        for writer in writers:
            writer.append()
            self.reports.written.add(str(writer.path))

    def read(self):
        """Read all logs; return them by partition, and how many files and directories were looked at."""
        partitions = self.rescan.scan([self.root]).partitions
        self.rescan.note_changes(self.reports)
        with counted_file_calls() as calls:
            logs = {one.path: self.rescan.read(one) for one in partitions}
        return logs, calls["stat"]

    def fresh(self):
        """Return what a daemon reads that has just started."""
        rescan = LogDirRescan()
        return {one.path: rescan.read(one) for one in rescan.scan([self.root]).partitions}


LOOK_AT_ALL = 10 * 3
"""Ten directories, with a closed and an active segment each."""


@pytest.fixture
def watched(tmp_path):
    """Give ten partitions that are watched, and that the kernel reports nothing of."""
    logs = WatchedLogs(tmp_path)
    for _ in range(4):
        logs.read()
    return logs


@pytest.fixture
def active(watched):
    """Give the same, with writes that are not reported because there are so many."""
    watched.write(*watched.writers)
    watched.read()
    return watched


def test_partitions_without_a_reported_change_are_looked_at_in_one_of_five_scans(watched):
    """Each partition is looked at once in five scans, and not at all in between."""
    looks = [watched.read()[1] for _ in range(2 * LOOK_EVERY)]
    assert sum(looks[:LOOK_EVERY]) == sum(looks[LOOK_EVERY:]) == LOOK_AT_ALL


def test_change_that_was_looked_at_meanwhile_is_not_held_once(watched):
    """What depends on the names of a directory is read again, also where the logs were read twice since."""
    first, *others = watched.writers
    watched.rescan.held()
    watched.rename(lambda writer: writer.begin_epoch(7), first)
    watched.rescan.note_changes(watched.reports)
    # The logs are read, and the changed one is read again before the next scan.
    partitions = watched.rescan.scan([watched.root]).partitions
    for _ in range(3):
        for one in partitions:
            watched.rescan.read(one)
    answers = []
    for _ in range(LOOK_EVERY):
        answers.append(watched.rescan.held())
        watched.rescan.scan([watched.root])
    assert str(first.path) not in answers[0]
    assert any(str(first.path) in one for one in answers[1:])
    assert all(str(one.path) in each for each in answers for one in others)


def test_still_logs_count_as_read(watched):
    """A scan need not read them, no topic id of theirs is looked up, and none stays so for long."""
    logs, _ = watched.read()
    read = []
    for _ in range(LOOK_EVERY):
        with counted_file_calls() as calls:
            partitions = watched.rescan.scan([watched.root]).partitions
            watched.rescan.note_changes(watched.reports)
            still = watched.rescan.still(logs.keys())
            again = {one.path: watched.rescan.read(one) for one in partitions if one.path not in still}
        assert calls["open"] == 1, "meta.properties, and no topic's id"
        assert all(log is logs[path] for path, log in again.items())
        read += again
    assert sorted(read) == sorted(logs), "each in its turn"


def test_log_with_a_reported_change_is_not_still(watched):
    """Neither is one that is written to, until it was looked at twice without a change."""
    written, renamed, *_ = watched.writers
    changed = {str(written.path), str(renamed.path)}
    watched.write(written)
    watched.rename(lambda writer: writer.begin_epoch(7), renamed)
    for _ in range(2):
        watched.rescan.scan([watched.root])
        watched.rescan.note_changes(watched.reports)
        assert not watched.rescan.still(changed)
    for _ in range(4):
        logs, _ = watched.read()
    assert logs == watched.fresh()
    still = set()
    for _ in range(2):
        watched.rescan.scan([watched.root])
        watched.rescan.note_changes(watched.reports)
        still |= watched.rescan.still(changed)
    assert still == changed


def test_log_that_was_not_asked_for_does_not_count_as_read(watched):
    """Its topic is not archived any more: the next scan looks up which topic its directory is of."""
    first = watched.writers[0]
    path = first.path
    others = {str(one.path) for one in watched.writers[1:]}
    for _ in range(2):
        watched.rescan.scan([watched.root])
        watched.rescan.note_changes(watched.reports)
        assert str(path) not in watched.rescan.still(others)
        (path / "partition.metadata").write_text(f"version: 0\ntopic_id: {NEW_ID}\n")
    found = watched.rescan.scan([watched.root]).partitions
    assert [one.topic_id for one in found if one.path == str(path)] == [NEW_ID]


def test_unchanged_log_is_the_same_object_whether_it_is_looked_at_or_not(watched):
    """The same object shows that nothing which follows from the log is to be made anew."""
    first = watched.read()[0]
    for _ in range(LOOK_EVERY):
        assert all(log is first[path] for path, log in watched.read()[0].items())


def test_log_that_is_not_looked_at_is_of_the_partition_that_is_asked_for(watched):
    """A caller may know another id of the topic than the files have, and gets the same object each time."""
    (first, *_) = watched.rescan.scan([watched.root]).partitions
    asked = replace(first, topic_id=NEW_ID)
    found = watched.rescan.read(asked)
    assert found.partition is asked
    assert watched.rescan.read(asked) is found


def test_segments_of_a_partition_that_is_written_to_are_looked_at_in_every_scan(active):
    """Further writes may not be reported after one that was. The names still hold."""
    writer = active.writers[0]
    looks = []
    for _ in range(2 * LOOK_EVERY):
        writer.append()
        logs, seen = active.read()
        assert logs == active.fresh()
        looks.append(seen)
    # The segments, and of those that changed the directory.
    assert min(looks) >= 2 + 1


def test_partitions_that_nothing_watches_are_looked_at_in_every_scan(tmp_path):
    """A change shows in the files alone where nothing reports it."""
    logs = WatchedLogs(tmp_path)
    logs.reports.watched = frozenset()
    logs.read()
    assert [logs.read()[1] for _ in range(3)] == [LOOK_AT_ALL] * 3


@pytest.mark.parametrize("logs", ["watched", "active"])
def test_reported_change_is_seen_by_the_next_read(logs, request):
    """An append, a roll, a new leader epoch and the head's deletion are each seen as soon as reported."""
    logs = request.getfixturevalue(logs)
    first, second, third, fourth = logs.writers[:4]
    logs.rename(LogWriter.closed_segment, first)
    logs.rename(lambda writer: writer.begin_epoch(7), second)
    logs.rename(LogWriter.drop_head, third)
    logs.write(fourth)
    assert logs.read()[0] == logs.fresh()
    for _ in range(4):
        logs.read()
    look_at_all = sum(1 + len(log.segments) for log in logs.fresh().values())
    assert sum(logs.read()[1] for _ in range(LOOK_EVERY)) == look_at_all


@pytest.mark.parametrize("is_roll", [True, False])
def test_change_that_was_reported_to_a_scan_that_failed_is_seen_by_the_next_one(watched, is_roll):
    """A broker that does not answer ends a scan between the report and the reads."""
    if is_roll:
        watched.rename(LogWriter.closed_segment, watched.writers[0])
    else:
        watched.write(watched.writers[0])
    watched.rescan.note_changes(watched.reports)
    watched.rescan.note_changes(watched.reports)
    assert watched.read()[0] == watched.fresh()


def test_change_before_a_directory_was_watched_is_seen(tmp_path):
    """A watch reports nothing of what came before it."""
    logs = WatchedLogs(tmp_path)
    all_paths, logs.reports.watched = logs.reports.watched, frozenset()
    for _ in range(4):
        logs.read()
    logs.writers[0].begin_epoch(7)
    logs.reports.watched = all_paths
    assert logs.read()[0] == logs.fresh()


def test_write_between_two_reports_of_idleness_is_seen(tmp_path):
    """A partition counts as idle only from a look on that came after its writes began to be reported."""
    logs = WatchedLogs(tmp_path)
    for _ in range(2):
        logs.read()
    logs.writers[0].append()
    assert logs.read()[0] == logs.fresh()


@pytest.mark.parametrize("is_write", [True, False])
def test_directory_whose_watch_has_ended_is_looked_at_in_every_scan(watched, is_write):
    """A directory that is no longer watched may change without a report, also once it is watched again."""
    first, all_paths = watched.writers[0], watched.reports.watched

    def change(number):
        first.append() if is_write else first.begin_epoch(number)

    watched.reports.watched = all_paths - {str(first.path)}
    change(7)
    assert watched.read()[0] == watched.fresh()
    change(8)
    watched.reports.watched = frozenset([*all_paths])
    assert watched.read()[0] == watched.fresh()


def test_segment_that_changed_lets_its_directory_be_looked_at(active):
    """A truncation replaces files, and its report may come after the scan has begun."""
    for writer in active.writers:
        writer.closed_segment()
    assert active.read()[0] == active.fresh()


@pytest.mark.parametrize("change", ["append", "begin_epoch", "drop_head"])
def test_change_that_is_not_reported_is_seen_within_five_scans_and_ends_the_trust(watched, change):
    """A filesystem that reports nothing costs some rounds once, and one line of the log."""
    first = watched.writers[0]
    getattr(first, change)(*([7] if change == "begin_epoch" else []))
    with capture_logs() as logs:
        for _ in range(LOOK_EVERY):
            found, _ = watched.read()
    assert found == watched.fresh()
    assert [(line["event"].split(";")[0], line["path"]) for line in logs] == [
        ("a change in a watched directory was not reported", str(first.path))
    ]
    first.begin_epoch(8)
    first.append()
    assert watched.read()[0] == watched.fresh()
    looks = {watched.read()[1] for _ in range(LOOK_EVERY)}
    assert len(looks) == 1, "all are looked at in every scan"


@pytest.mark.parametrize("is_write", [True, False])
def test_change_that_came_while_the_logs_were_read_is_no_fault_of_the_reports(watched, is_write):
    """A report that comes with the next answer is in time: the change is newer than this answer."""
    first = watched.writers[0]
    if is_write:
        first.append()
        os.utime(first.log_path(first.bases_on_disk[-1]))
    else:
        first.begin_epoch(7)
        os.utime(first.path)
    with capture_logs() as logs:
        for _ in range(LOOK_EVERY):
            found, _ = watched.read()
    assert found == watched.fresh()
    assert logs == []


def test_directory_of_another_topic_is_no_fault_of_the_reports(watched):
    """A new directory under an old name is another directory: nothing watched it."""
    watched.put_another_in_place_of_first()
    with capture_logs() as logs:
        for _ in range(LOOK_EVERY + 1):
            found, _ = watched.read()
    assert found == watched.fresh()
    assert logs == []


def test_time_of_a_directory_is_no_fault_of_the_reports(watched):
    """A copy sets it (`cp -p`, `rsync -t`), and no name has changed."""
    settle(watched.writers[0].path)
    with capture_logs() as logs:
        for _ in range(LOOK_EVERY):
            watched.read()
    assert logs == []


def test_reports_of_an_earlier_directory_are_not_taken_for_those_of_its_successor(watched):
    """A mount over the log directory, for example, is reported by nothing. Its partitions are other ones."""
    other = watched.put_another_in_place_of_first()
    for _ in range(LOOK_EVERY + 1):
        watched.read()
    for epoch in range(8, 8 + LOOK_EVERY):
        other.begin_epoch(epoch)
        other.append()
        assert watched.read()[0] == watched.fresh()
    # A watch that begins anew says that anything may have changed, and counts from then on.
    watched.rename(lambda writer: None, other)
    for _ in range(4):
        watched.read()
    assert sum(watched.read()[1] for _ in range(LOOK_EVERY)) == LOOK_AT_ALL
