"""`tieringd recover` where no broker is needed: what is checked first, and what a report says."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from tests.builders import batch
from tests.fakes.log_writer import LogWriter
from tests.support.daemon import directory_config, write_config
from tests.support.small_disks import second_mount_at, small_disk_at
from tests.unit.cli.commands import invoked, tieringd
from tieringd.cli.recover.recovery_progress import ByteProgress, RecordProgress
from tieringd.errors import ConfigError, CorruptDataError, ObjectNotFound
from tieringd.formats.index_files import parse_transaction_index
from tieringd.formats.record_batch import ABORT_MARKER, check_crc, encode_marker, parse_header
from tieringd.formats.records import Record
from tieringd.model.partition import TopicIdPartition

DEEP = ("--validate", "check_manifest_and_segment_metadata")
PARTITIONS = 3
NEW_ID = "AAAAAAAAAAAAAAAAAAAAAQ"


class Place:
    """An archive of a topic with three partitions, and a stopped broker that knows the topic."""

    def __init__(self, root):
        self.root = root
        self.archive = root / "archive"
        self.old = [LogWriter(root / "old", "orders", number) for number in range(PARTITIONS)]
        for writer in self.old:
            for _ in range(4):
                writer.closed_segment()
        self.config = write_config(
            root / "t.yaml", directory_config([root / "old"], self.archive, root / "state")
        )
        assert tieringd("run", "--once", "--config", self.config).exit_code == 0
        self.logs = root / "new" / "logs"
        self.logs.mkdir(parents=True)
        (self.logs / "meta.properties").write_text("version=1\ncluster.id=new\nnode.id=1\n")
        for number in range(PARTITIONS):
            LogWriter(self.logs, "orders", number, topic_id=NEW_ID)

    def recover(self, *options):
        """Return the exit code and the rows, by partition."""
        done = invoked(
            *("recover", "directory", self.logs, "--topics", "orders", "--config", self.config),
            *("--format", "json", *options),
        )
        return done.exit_code, {row["partition"]: row for row in json.loads(done.output)}

    def object_of(self, number, name):
        """Return the path of an object of a partition."""
        (path,) = (one for one in self.archive.rglob(name) if f"/{number}_" in str(one))
        return path

    def restored(self, number):
        """Return how many bytes the new broker has of a partition."""
        return sum(one.stat().st_size for one in (self.logs / f"orders-{number}").glob("*.log"))


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.mark.parametrize("options", [(), ("--shallow",)], ids=["whole", "shallow"])
def test_file_that_opens_the_bucket_is_enough_for_a_directory(place, options):
    """A file without a broker section restores as the file of the lost broker does."""
    whole = yaml.safe_load(place.config.read_text())
    del whole["broker"], whole["log_retention_ms"]
    place.config = write_config(place.root / "bucket.yaml", whole)
    code, rows = place.recover(*options)
    assert code == 0
    assert set(rows) == set(range(PARTITIONS))
    assert all((place.restored(number) > 0) == (not options) for number in rows)


@pytest.mark.parametrize("validate", [(), DEEP, (*DEEP, "--validation-depth", "0")])
def test_sound_archive_passes(place, validate):
    """Each partition is restored, and its row says that it was checked."""
    code, rows = place.recover(*validate)
    assert code == 0
    assert [rows[number]["validation"] for number in range(PARTITIONS)] == ["passed"] * PARTITIONS
    assert [rows[number]["records"] for number in range(PARTITIONS)] == [12] * PARTITIONS


def test_missing_manifest_is_refused_or_reported(place):
    """
    Nothing is restored if a manifest is missing. The other partitions are, if nothing is checked.

    The report names the partition without a manifest.
    """
    place.object_of(1, "manifest").unlink()
    with pytest.raises(CorruptDataError, match="1 of 3 partitions have no manifest"):
        place.recover()
    assert not any(map(place.restored, range(PARTITIONS)))
    code, rows = place.recover("--validate", "no_check")
    assert code == 0
    assert (rows[1]["validation"], rows[1]["segments"]) == ("missing_manifest", 0)
    assert (rows[0]["validation"], rows[2]["records"]) == ("not_checked", 12)


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_partition_whose_manifest_is_damaged_is_refused_or_reported(place, options):
    """A damaged manifest keeps its topic from being restored. With no_check it keeps its partition only."""
    path = place.object_of(1, "manifest")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ObjectNotFound, match="no archived topic that can be read"):
        place.recover(*options)
    assert not any(map(place.restored, range(PARTITIONS)))
    code, rows = place.recover("--validate", "no_check", *options)
    assert code == 1
    assert [rows[number]["segments"] for number in range(PARTITIONS)] == [4, 0, 4]
    assert "manifest" in rows[1]["failure"]
    assert rows[1]["validation"] == "not_checked"
    restored = [bool(place.restored(number)) for number in range(PARTITIONS)]
    assert restored == ([False] * 3 if options else [True, False, True])


def test_shallow_restore_leaves_out_a_topic_with_a_damaged_manifest(place):
    """A link to an archive stays for good, and would lack the partition that cannot be read."""
    path = place.object_of(1, "manifest")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ObjectNotFound, match="no archived topic that can be read"):
        place.recover("--validate", "no_check", "--shallow")
    assert not list(place.archive.rglob("history_link"))


@pytest.mark.parametrize("options", [(), ("--shallow",), ("--dry-run",)], ids=str)
def test_name_that_matches_nothing_is_refused(place, options):
    """Nothing is restored: the broker would make the mistyped topic anew, without a record."""
    words = ("recover", "directory", place.logs, "orders", "paymnets", "--config", place.config, *options)
    with pytest.raises(ObjectNotFound, match="no archived topic that can be read matches paymnets"):
        invoked(*words)
    assert not any(map(place.restored, range(PARTITIONS)))
    assert not list(place.archive.rglob("history_link"))


def test_missing_object_is_found_before_anything_is_restored(place):
    """A missing object is found before anything is restored if segments are checked, and else on the way."""
    place.object_of(1, "9-11-*.log").unlink()
    with pytest.raises(CorruptDataError, match="the archive is incomplete: orders-1: "):
        place.recover(*DEEP)
    assert not any(map(place.restored, range(PARTITIONS)))
    with pytest.raises(ObjectNotFound):
        place.recover()
    assert place.restored(0)


@pytest.mark.parametrize("has_transaction", [False, True])
def test_run_that_ended_between_two_partitions_is_gone_on_with(place, has_transaction):
    """The partitions that it has put in their place are checked, and stay as they are."""
    if has_transaction:
        writer = place.old[0]
        writer.append(b"x", producer_id=7), writer.roll(), writer.commit(7)
        assert tieringd("run", "--once", "--config", place.config).exit_code == 0
    lost = place.object_of(1, "9-11-*.log")
    data = lost.read_bytes()
    lost.unlink()
    with pytest.raises(ObjectNotFound):
        place.recover()
    before = files_below(place.logs / "orders-0")
    assert place.restored(0)
    lost.write_bytes(data)
    code, rows = place.recover()
    assert code == 0
    assert [rows[number]["found_segments"] for number in range(PARTITIONS)] == [4 + has_transaction, 3, 0]
    assert [rows[number]["records"] for number in range(PARTITIONS)] == [12 + has_transaction, 12, 12]
    assert rows[0]["ended_transactions"] == has_transaction
    assert files_below(place.logs / "orders-0") == before
    assert all(map(place.restored, range(PARTITIONS)))


def test_only_the_newest_segments_are_checked(place):
    """The check covers as many of the newest segments as the depth says. 0 means all."""
    place.object_of(1, "0-2-*.log").unlink()
    with pytest.raises(CorruptDataError, match="is incomplete"):
        place.recover(*DEEP, "--validation-depth", "4")
    with pytest.raises(CorruptDataError, match="is incomplete"):
        place.recover(*DEEP, "--validation-depth", "0")
    code, rows = place.recover(*DEEP, "--validation-depth", "3", "--last-bytes", "1")
    assert code == 0
    assert rows[1]["validation"] == "passed"


def test_partition_that_cannot_be_read_leaves_the_others_alone_without_a_check(place):
    """The row of an unreadable partition has the reason, and the command fails at its end."""
    place.object_of(1, "3-5-*.log").unlink()
    code, rows = place.recover("--validate", "no_check")
    assert code == 1
    assert "3-5-" in rows[1]["failure"]
    assert (rows[0]["failure"], rows[2]["failure"]) == (None, None)
    assert (bool(place.restored(0)), bool(place.restored(1)), bool(place.restored(2))) == (True, False, True)


def test_no_link_is_written_where_a_later_topic_is_refused(place):
    """A link cannot be taken back, and would come to life when the log is trimmed past it."""
    LogWriter(place.root / "old", "payments").closed_segment()
    assert tieringd("run", "--once", "--config", place.config).exit_code == 0
    with pytest.raises(ConfigError, match="the broker has no partition payments-0"):
        place.recover("--shallow", "--topics", "orders|payments")
    assert not list(place.archive.rglob("history_link"))


def test_full_restore_refuses_the_id_that_a_shallow_one_was_begun_for(place):
    """The link of the shallow restore would put old records before the restored ones one day."""
    assert place.recover("--shallow")[0] == 0
    with pytest.raises(ConfigError, match="a shallow restore of topic orders was begun for its id"):
        place.recover()
    assert not any(map(place.restored, range(PARTITIONS)))


def test_full_restore_refuses_a_topic_with_a_history(place, tmp_path):
    """A full restore would bring back the newer part alone, and report it as everything."""
    assert place.recover("--shallow")[0] == 0
    for number in range(PARTITIONS):
        writer = LogWriter(tmp_path / "second", "orders", number, topic_id=NEW_ID, first_offset=12)
        writer.closed_segment()
    (tmp_path / "second" / "meta.properties").write_text("version=1\ncluster.id=new\nnode.id=1\n")
    config = directory_config([tmp_path / "second"], place.archive, tmp_path / "state-second")
    second = write_config(tmp_path / "second.yaml", config)
    assert tieringd("run", "--once", "--config", second).exit_code == 0
    with pytest.raises(ConfigError, match="continues an older archive, of cluster"):
        place.recover("--from-cluster", "new")
    assert not any(map(place.restored, range(PARTITIONS)))


@pytest.mark.parametrize(
    ("mount", "options"), [("another disk", ()), ("the same disk again", ("--shallow",))]
)
def test_staging_that_cannot_be_moved_from_is_refused_before_a_download(place, tmp_path, mount, options):
    """Nothing is left behind there or in the log directory, and there is a way out."""
    beside = tmp_path / "beside"
    beside.mkdir()
    before = files_below(place.logs)
    mounted = (
        small_disk_at(tmp_path / "disk", 1 << 20)
        if mount == "another disk"
        else second_mount_at(tmp_path / "again", beside)
    )
    with mounted as disk:
        with pytest.raises(ConfigError, match="are on different file systems"):
            place.recover("--staging", disk / "not" / "there", *options)
        assert list(disk.iterdir()) == []
    assert files_below(place.logs) == before
    assert not list(place.archive.rglob("history_link"))
    inside = place.logs / ".restore"
    assert place.recover("--staging", inside, *options)[0] == 0
    assert not inside.exists()


@pytest.mark.parametrize("has_begun", [False, True])
def test_partition_without_a_record_leaves_no_staging_directory(place, has_begun):
    """
    A broker does not start on a mount point with a staging directory, so that a restore leaves none.

    An earlier release began a directory there.
    """
    LogWriter(place.root / "old", "orders", PARTITIONS)
    assert tieringd("run", "--once", "--config", place.config).exit_code == 0
    LogWriter(place.logs, "orders", PARTITIONS, topic_id=NEW_ID)
    before = files_below(place.logs / f"orders-{PARTITIONS}")
    inside = place.logs / ".restore"
    if has_begun:
        (inside / f"orders-{PARTITIONS}").mkdir(parents=True)
    code, rows = place.recover("--staging", inside)
    assert (code, rows[PARTITIONS]["segments"], rows[0]["segments"]) == (0, 0, 4)
    assert not inside.exists()
    assert files_below(place.logs / f"orders-{PARTITIONS}") == before


def test_refused_restore_leaves_nothing_beside_the_log_directory(place):
    """A refused restore leaves nothing, although its first places were free."""
    (place.logs / f"orders-{PARTITIONS - 1}" / f"{0:020d}.log").write_bytes(b"record")
    before = files_below(place.root)
    with pytest.raises(ConfigError, match="holds records"):
        place.recover()
    assert files_below(place.root) == before


def files_below(directory):
    """Return every path below a directory with its bytes; the broker's lock is no part of it."""
    paths = (one for one in directory.rglob("*") if one.name != ".lock")
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def test_restored_log_that_went_on_is_restored_again(tmp_path):
    """Producers of two clusters keep different ids, in batches, markers and indexes alike."""
    first = LogWriter(stopped_broker(tmp_path, "first"), "orders")
    first.append(b"a", producer_id=7), first.abort(7), first.append(b"b", producer_id=8)
    first.roll()
    first.abort(8)
    config = archived_from(tmp_path, "first")
    LogWriter(stopped_broker(tmp_path, "second"), "orders", topic_id=NEW_ID)
    restore(tmp_path, config, "first", "second")
    place = tmp_path / "second" / "orders-0"
    assert producers_in(place) == [7 + RESTORED, 7 + RESTORED, 8 + RESTORED, 8 + RESTORED]
    new = [batch(4, [b"c"], producer_id=7, producer_epoch=0, base_sequence=0, is_transactional=True)]
    new.append(encode_marker(5, producer_id=7, marker=ABORT_MARKER))
    (place / f"{4:020d}.log").write_bytes(b"".join(new))
    (place / f"{6:020d}.log").write_bytes(b"")
    config = archived_from(tmp_path, "second")
    LogWriter(stopped_broker(tmp_path, "third"), "orders")

    restore(tmp_path, config, "second", "third")

    place = tmp_path / "third" / "orders-0"
    ids = [7 + 2 * RESTORED, 8 + 2 * RESTORED, 7 + RESTORED]
    assert producers_in(place) == [one for one in ids for _ in range(2)]
    entries = [
        entry
        for path in sorted(place.glob("*.txnindex"))
        for entry in parse_transaction_index(path.read_bytes())
    ]
    assert [one[:3] for one in entries] == [(ids[0], 0, 1), (ids[1], 2, 3), (ids[2], 4, 5)]


RESTORED = 2**56
"""What a restore adds to a producer's id."""


def stopped_broker(root, cluster):
    """Return the log directory of a cluster's broker, without a topic."""
    (root / cluster).mkdir()
    (root / cluster / "meta.properties").write_text(f"version=1\ncluster.id={cluster}\nnode.id=1\n")
    return root / cluster


def archived_from(root, cluster):
    """Archive what a cluster's broker has, all clusters into one bucket; return the configuration."""
    state = root / f"state-{cluster}"
    config = write_config(
        root / f"{cluster}.yaml", directory_config([root / cluster], root / "archive", state)
    )
    assert tieringd("run", "--once", "--config", config).exit_code == 0
    return config


def restore(root, config, source, target):
    options = ("--topics", "orders", "--config", config, "--from-cluster", source)
    assert invoked("recover", "directory", root / target, *options).exit_code == 0


def producers_in(place):
    """Return the producer id of each batch in a partition's directory."""
    found = []
    for path in sorted(place.glob("*.log")):
        data = path.read_bytes()
        while data:
            header = parse_header(data)
            check_crc(memoryview(data), header)
            found.append(header.producer_id)
            data = data[header.size_bytes :]
    return found


def test_cluster_recovery_needs_a_cluster(place):
    """The configuration's broker section names it."""
    with pytest.raises(ConfigError, match="names no cluster to restore into"):
        invoked("recover", "cluster", "--topics", ".*", "--config", place.config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rename", "abc"), "is not REGEX=REPLACEMENT"),
        (("--rename", "(=x"), "is not a regular expression"),
        (("--topic-config", "abc"), "is not NAME=VALUE"),
        (("--topic-config", "retention.ms=7d"), "retention.ms: '7d' is not a whole number (milliseconds,"),
        (("--topic-config", "retention.bytes="), "retention.bytes: '' is not a whole number (bytes,"),
        (("--topics", "("), "is not a regular expression"),
        (("--parallel", "0"), "--parallel"),
    ],
)
def test_option_that_makes_no_sense_is_refused(place, options, message):
    """The option is refused before anything is opened."""
    done = invoked("recover", "cluster", "--topics", ".*", "--config", place.config, *options)
    assert done.exit_code == 2
    assert message in " ".join(done.errors.split())


def test_progress_in_bytes_is_told_at_each_tenth(monkeypatch, capsys):
    """Nothing is printed in between."""
    # Progress is shown on a terminal only, and the tests have none.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = ByteProgress(100)
    for _ in range(100):
        progress.note(1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1].endswith("restored")


def test_progress_in_records_is_told_every_few_seconds(monkeypatch, capsys):
    """Progress shows the share of all partitions together, and how long the rest will take."""
    # Progress is shown on a terminal only, and the tests have none.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    now = [0.0]
    one, other = (TopicIdPartition("c", "t", "i", number) for number in range(2))
    progress = RecordProgress({one: 100, other: 0}, 200 + 100, clock=lambda: now[0])
    record = Record(0, 0, 0, None, b"x" * 1024, ())
    progress.note(one, [record], 110)
    now[0] = 4.0
    progress.note(one, [record, record], 150)
    progress.note(other, [record], 50)
    now[0] = 8.0
    progress.note(other, [], 50)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "3 records written (25%), 768B/s, about 12 s left"
    assert second.startswith("4 records written (50%), ")
    assert second.endswith("about 8 s left")


def sizes(root):
    """Return the files under *root* with their sizes, but for locks: a broker could start meanwhile."""
    return {
        path: path.stat().st_size
        for path in root.rglob("*")
        if path.is_file() and not path.name.endswith(".lock")
    }


def test_dry_run_into_a_directory_changes_nothing(place):
    """The rows of a dry run are those of the recovery, and the same checks refuse it."""
    before = sizes(place.root)
    code, planned = place.recover("--dry-run")
    assert code == 0
    assert sizes(place.root) == before
    _, done = place.recover()
    names = ("start_offset", "next_offset", "segments", "size_bytes", "left_segments", "validation")
    for number in range(PARTITIONS):
        assert {name: planned[number][name] for name in names} == {name: done[number][name] for name in names}
