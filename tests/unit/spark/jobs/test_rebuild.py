"""Rebuild without Spark: what comes back, what is left alone, and what a crash in between leaves."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from crc32c import crc32c

from tests.fakes.dying_store import Killed
from tests.fakes.spilling import make_parts_small
from tests.unit.spark.jobs.shelf import spread
from tieringd.errors import ObjectNotFound, StorageUnavailable
from tieringd.formats.manifest_codec import encode_manifest
from tieringd.formats.object_keys import TopicKey, damaged_copy_key, manifest_key, parse_data_key
from tieringd.formats.sidecar import decode_sidecar, encode_sidecar
from tieringd.formats.topic_manifest import decode_topic_manifest, encode_topic_manifest
from tieringd.model.segment import NO_TIMESTAMP, BrokerIndexes
from tieringd.spark.bucket import bucket_of
from tieringd.spark.jobs.rebuild import GAP_REASON, UNDECIDED, Rebuild, RebuildOptions
from tieringd.spark.jobs.rebuild_report import rebuild_report
from tieringd.spark.jobs.scrub import scrubbed

if TYPE_CHECKING:
    from tests.fakes.log_writer import LogWriter

SAME_OF_A_MANIFEST = ("start_offset", "next_offset", "epochs", "gaps")
NOT_THE_SAME = {"uploaded_at_ms": 0, "broker_timestamp_ms": 0}
"""What only the lost manifest knew."""


def rebuild(shelf, *topics, spread=spread, **options):
    """Return the outcomes and the report of a rebuild."""
    whole = Rebuild(shelf.config, bucket_of(shelf.config), RebuildOptions(**options), spread)
    partitions, of_topics = whole.run(topics)
    report = rebuild_report(partitions, of_topics, is_written=options.get("write", False), seconds=1.0)
    return report, json.loads(report.as_json())


def outcomes(document) -> dict[tuple[str, int], str]:
    return {(row["topic"], row["partition"]): row["outcome"] for row in document["tables"]["partitions"]}


def lose_manifests(shelf) -> None:
    """Remove everything but data objects and their indexes."""
    for key in shelf.keys():  # noqa: SIM118 a method, not a mapping's
        if "/meta/" in key or key.startswith("meta/"):
            shelf.remove(key)


def rows(manifest) -> list:
    return [replace(one, **NOT_THE_SAME) for one in manifest.segments]


@pytest.fixture
def life(shelf) -> LogWriter:
    """Give the log of a partition with transactions over segments' ends, and two leaders."""
    writer = shelf.writer()
    writer.append(b"a", producer_id=1)
    writer.append(b"plain")
    writer.roll()
    writer.append(b"b", producer_id=1)
    writer.append(b"kept", producer_id=2)
    writer.roll()
    writer.abort(1)
    writer.begin_epoch(4)
    writer.append(b"new", b"leader")
    writer.commit(2)
    writer.roll()
    writer.append(b"no time", timestamp_ms=-1)
    writer.roll()
    shelf.archive(writer, leader_epoch=4)
    return writer


def test_archive_of_which_a_part_was_kept_reads_back_as_before(shelf):
    """The head of a split segment, and a segment with another index, are taken before the older objects."""
    writer = shelf.writer()
    writer.append(b"early", producer_id=1)
    writer.append(b"plain")
    writer.roll()
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.commit(1)
    writer.roll()
    shelf.archive(writer)
    writer.truncate(divergence)
    writer.begin_epoch(4)
    writer.roll()
    writer.abort(1)
    writer.closed_segment(b"new leader's")
    while writer.bases_on_disk[0] < divergence:
        writer.drop_head()
    before = shelf.archive(writer, leader_epoch=4, looks=3)
    assert [one.leader_epoch for one in before.segments] == [4, 4, 4]
    values = {level: shelf.values(writer, read_committed=level) for level in (False, True)}
    assert b"early" not in values[True].values()
    lose_manifests(shelf)

    report, _ = rebuild(shelf, write=True)

    assert report.faults == ()
    assert rows(shelf.manifest(writer)) == rows(before)
    assert {level: shelf.values(writer, read_committed=level) for level in (False, True)} == values


def test_archive_reads_back_as_before(shelf, life):
    """Offsets, times, epochs and transactions come back from the objects alone."""
    shelf.fill("other", 2, segments=3)
    before = {name: shelf.manifest(one) for name, one in shelf.writers.items()}
    values = {level: shelf.values(life, read_committed=level) for level in (False, True)}
    lose_manifests(shelf)

    report, document = rebuild(shelf, write=True)

    assert report.faults == ()
    assert outcomes(document) == {("orders", 0): "written", ("other", 2): "written"}
    assert {row["topic"]: row["outcome"] for row in document["tables"]["topics"]} == dict.fromkeys(
        ("orders", "other"), "written"
    )
    for name, writer in shelf.writers.items():
        found, known = shelf.manifest(writer), before[name]
        assert rows(found) == rows(known)
        for field in SAME_OF_A_MANIFEST:
            assert getattr(found, field) == getattr(known, field), field
        # Of transactions that were committed over a segment's end no index tells.
        assert found.crossing == tuple(one for one in known.crossing if one.producer_id == 1)
        assert found.leader_epoch == known.leader_epoch
        assert found.trimmed_offset == found.next_offset
    assert {level: shelf.values(life, read_committed=level) for level in (False, True)} == values
    assert values[True] != values[False]
    assert scrubbed(shelf.config, spread, topics=(), with_orphans=True, cores=2).faults == ()


def test_daemon_goes_on_from_a_rebuilt_manifest(shelf, life):
    """The leader claims the rebuilt manifest, and appends what is new."""
    lose_manifests(shelf)
    rebuild(shelf, write=True)
    life.append(b"later")
    life.roll()

    manifest = shelf.archive(life, leader_epoch=4)

    assert manifest.next_offset == life.next_offset
    assert shelf.values(life) == life.values()


def test_dry_run_changes_nothing_and_tells_all(shelf, life):
    """The figures are those of the run that writes."""
    lose_manifests(shelf)
    before = shelf.contents()

    _, dry = rebuild(shelf)
    assert shelf.contents() == before
    assert outcomes(dry) == {("orders", 0): "would be written"}
    assert [row["outcome"] for row in dry["tables"]["topics"]] == ["would be written"]

    _, wet = rebuild(shelf, write=True)
    for name in ("segments", "size_bytes", "gap_offsets", "objects_left_out", "objects_unusable"):
        assert dry["figures"][name] == wet["figures"][name]
    assert (dry["figures"]["partitions_to_write"], wet["figures"]["partitions_written"]) == (1, 1)


def test_second_run_finds_what_is_done(shelf, life):
    """Nothing is read again, and nothing is written."""
    lose_manifests(shelf)
    rebuild(shelf, write=True)
    before = shelf.contents()
    asked = []

    def counting(what, tasks, work):
        asked.extend(tasks)
        return spread(what, tasks, work)

    _, document = rebuild(shelf, spread=counting, write=True)

    assert outcomes(document) == {("orders", 0): "left alone"}
    assert (shelf.contents(), asked) == (before, [])


def test_readable_manifest_is_left_alone(shelf, life):
    """A readable manifest is rebuilt only with `--replace`, and keeps the facts that only it has."""
    known = shelf.manifest(life)
    _, document = rebuild(shelf, write=True)
    assert outcomes(document) == {("orders", 0): "left alone"}
    assert shelf.manifest(life) == known

    _, document = rebuild(shelf, write=True, replace=True)
    assert outcomes(document) == {("orders", 0): "written"}
    found = shelf.manifest(life)
    assert rows(found) == rows(known)
    assert found.began_at_ms == known.began_at_ms
    assert found.commit_number == known.commit_number + 1
    assert found.writer_id == f"{known.writer_id}+edit"


def test_what_is_committed_while_the_bucket_is_listed_is_not_left_out(shelf, life):
    """A manifest that is written over was read before the objects were."""

    class Slow(Rebuild):
        async def _partition_state(self, partition):
            life.append(b"late")
            life.roll()
            await asyncio.to_thread(shelf.archive, life, leader_epoch=4)
            return await super()._partition_state(partition)

    options = RebuildOptions(write=True, replace=True)
    Slow(shelf.config, bucket_of(shelf.config), options, spread).run(())

    found = shelf.manifest(life)
    assert found.writer_id.endswith("+edit")
    assert found.gaps == ()
    assert list(shelf.values(life).values())[-1] == b"late"


def test_damaged_manifests_are_kept_and_replaced(shelf, life):
    """The damaged bytes lie under another key afterwards."""
    keys = (manifest_key(life.identified), shelf.topic_manifest_key(life))
    values = shelf.values(life)
    damaged = {key: shelf.read(key)[:-3] for key in keys}
    for key, data in damaged.items():
        shelf.write(key, data)

    report, document = rebuild(shelf)
    assert (report.faults, document["figures"]["manifests_damaged"]) == ((), 1)
    assert {key: shelf.read(key) for key in keys} == damaged

    rebuild(shelf, write=True)
    for key, data in damaged.items():
        assert shelf.read(damaged_copy_key(key, crc32c=crc32c(data))) == data
    assert shelf.values(life) == values
    assert scrubbed(shelf.config, spread, topics=(), with_orphans=True, cores=2).faults == ()


@pytest.mark.parametrize("is_written", [False, True])
def test_damaged_manifest_of_a_partition_without_objects_is_a_fault(shelf, life, is_written):
    """There is nothing to rebuild it from, and the fault says what an operator can do, in each run."""
    for key in shelf.data_keys(life):
        shelf.remove(key)
    key = manifest_key(life.identified)
    shelf.write(key, b"damaged")

    reports = [rebuild(shelf, write=is_written) for _ in range(2)]

    for report, document in reports:
        (fault,) = report.faults
        assert f"has no data object to rebuild it from. Bring back an older version of {key}" in fault
        assert outcomes(document) == {("orders", 0): "left alone"}
    assert shelf.read(key) == b"damaged"


def test_topic_manifest_of_another_topic_is_replaced(shelf, life):
    """A topic manifest that was copied from another topic's is a scrub's finding until it is made again."""
    key = shelf.topic_manifest_key(life)
    sound, other = decode_topic_manifest(shelf.read(key)), TopicKey("cluster", "another", "id")
    shelf.write(key, encode_topic_manifest(replace(sound, key=other)))
    (finding,) = scrubbed(shelf.config, spread, topics=(), with_orphans=True, cores=2).faults
    assert "holds a manifest of another" in str(finding)

    rebuild(shelf, write=True)
    assert decode_topic_manifest(shelf.read(key)).key == sound.key
    assert scrubbed(shelf.config, spread, topics=(), with_orphans=True, cores=2).faults == ()


def test_broken_spillover_is_a_fault_until_it_is_replaced(shelf, monkeypatch):
    """A live manifest whose older part is lost can be read, and tells no more than its own part."""
    make_parts_small(monkeypatch)
    writer = shelf.fill(segments=6)
    values = shelf.values(writer)
    for _ in range(4):
        writer.drop_head()
    shelf.archive(writer, spill=True)
    lost = next(key for key in shelf.keys() if "/manifest." in key)  # noqa: SIM118 a method
    shelf.remove(lost)

    report, document = rebuild(shelf, write=True)
    assert outcomes(document) == {("orders", 0): "left alone"}
    assert "--replace" in report.faults[0]

    report, _ = rebuild(shelf, write=True, replace=True)
    assert report.faults == ()
    assert shelf.values(writer) == values


def test_long_history_spills(shelf, monkeypatch):
    """The live manifest is as small as it should be, and the whole archive is read through its parts."""
    make_parts_small(monkeypatch, rows=8, remembered=4)
    writer = shelf.fill(segments=300)
    values = shelf.values(writer)
    lose_manifests(shelf)

    rebuild(shelf, write=True)

    manifest = shelf.manifest(writer)
    assert manifest.spillover is not None
    assert len(shelf.read(manifest_key(writer.identified))) <= 4096
    assert shelf.values(writer) == values
    assert scrubbed(shelf.config, spread, topics=(), with_orphans=True, cores=2).faults == ()


def test_lost_index_is_made_again_under_a_new_name(shelf, life):
    """A lost index is made again with the transactions that end in later segments without an index."""
    values = {level: shelf.values(life, read_committed=level) for level in (False, True)}
    keys = shelf.data_keys(life)
    lose_manifests(shelf)
    for key in keys[:3]:
        shelf.remove(f"{key}.index")
    before = shelf.contents()

    _, dry = rebuild(shelf)
    assert shelf.contents() == before
    report, document = rebuild(shelf, write=True)

    assert (report.faults, document["figures"]["segments"]) == ((), len(keys))
    assert dry["figures"]["size_bytes"] == document["figures"]["size_bytes"]
    assert {level: shelf.values(life, read_committed=level) for level in (False, True)} == values
    assert before.items() <= shelf.contents().items()
    assert scrubbed(shelf.config, spread, topics=(), with_orphans=True, cores=2).faults == ()

    # A crash before the manifest was written: what was stored is found, and not stored again.
    lose_manifests(shelf)
    stored, read = shelf.contents(), []

    def noting(what, tasks, work):
        read.extend(one.key for task in tasks for one in task.segments)
        return spread(what, tasks, work)

    rebuild(shelf, spread=noting, write=True)
    assert sorted(read) == sorted(shelf.data_keys(life))
    assert [key for key in shelf.contents() if key not in stored and "meta/" not in key] == []


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda own, _: own[:-1] + bytes([own[-1] ^ 1]), id="bit"),
        pytest.param(lambda _, other: other, id="another's"),
        pytest.param(
            lambda own, _: encode_sidecar(replace(decode_sidecar(own), broker=BrokerIndexes())),
            id="other bytes",
        ),
    ],
)
def test_damaged_index_counts_as_lost(shelf, damage):
    """The name says what checksum it has to have."""
    writer = shelf.fill(segments=3)
    values, keys = shelf.values(writer), shelf.data_keys(writer)
    shelf.write(f"{keys[1]}.index", damage(*(shelf.read(f"{key}.index") for key in keys[1:])))
    lose_manifests(shelf)

    report, _ = rebuild(shelf, write=True)

    assert (report.faults, shelf.values(writer)) == ((), values)
    assert shelf.data_keys(writer)[1] != keys[1]
    assert scrubbed(shelf.config, spread, topics=(), with_orphans=True, cores=2).faults == ()


def test_transaction_that_nothing_ends_leaves_its_segment_out(shelf, life):
    """
    A segment without its index is left out if no later segment ends its transaction.

    It is unknown whether its records count.
    """
    keys = shelf.data_keys(life)
    lose_manifests(shelf)
    shelf.remove(f"{keys[1]}.index")
    for key in keys[2:]:
        shelf.remove(key)

    report, document = rebuild(shelf, write=True)

    assert UNDECIDED in report.faults[0]
    (row,) = document["tables"]["partitions"]
    assert (row["segments"], row["unusable"], row["next_offset"]) == (1, 1, 2)


def test_missing_data_is_a_recorded_gap(shelf):
    """Offsets that no object holds are never passed over in silence."""
    writer = shelf.fill(segments=4)
    values, keys = shelf.values(writer), shelf.data_keys(writer)
    gone = parse_data_key(keys[1])
    lose_manifests(shelf)
    shelf.remove(keys[1])

    report, document = rebuild(shelf, write=True)

    assert report.faults == ()
    (gap,) = shelf.manifest(writer).gaps
    assert (gap.base_offset, gap.last_offset, gap.reason) == (gone.base_offset, gone.last_offset, GAP_REASON)
    assert [row["base_offset"] for row in document["tables"]["gaps"]] == [gone.base_offset]
    assert shelf.values(writer) == {
        offset: value
        for offset, value in values.items()
        if not gone.base_offset <= offset <= gone.last_offset
    }


def with_epoch(data: bytes, epoch: int) -> bytes:
    """Return a segment whose last batch is of another leader epoch, which no batch's checksum covers."""
    begin = at = 0
    while at < len(data):
        begin, at = at, at + 12 + int.from_bytes(data[at + 8 : at + 12], "big")
    return data[: begin + 12] + epoch.to_bytes(4, "big") + data[begin + 16 :]


@pytest.mark.parametrize(
    ("damage", "deep", "words"),
    [
        pytest.param(lambda data: data[:-1], False, "but its name has another size", id="cut"),
        pytest.param(lambda data: data[:-1] + bytes([data[-1] ^ 1]), False, "batch CRC", id="end"),
        pytest.param(
            lambda data: data[:70] + bytes([data[70] ^ 1]) + data[71:], True, "batch CRC", id="deep"
        ),
        pytest.param(
            lambda data: with_epoch(data, 1), True, "its checksum is not the one in its index", id="epoch"
        ),
    ],
)
def test_damaged_data_is_left_out_and_is_a_fault(shelf, damage, deep, words):
    """The offsets of damaged data become a gap, and the report names the object."""
    writer = shelf.fill(segments=3)
    for number in range(300):  # A last index entry that is not the first batch's.
        writer.append(b"%d" % number * 100)
    writer.roll()
    shelf.archive(writer)
    key = shelf.data_keys(writer)[3]
    lose_manifests(shelf)
    shelf.write(key, damage(shelf.read(key)))

    report, document = rebuild(shelf, write=True, deep=deep)

    (fault,) = report.faults
    assert key in fault
    assert words in fault
    assert document["figures"]["segments"] == 3


def test_deep_rebuild_finds_the_same(shelf, life):
    """Times are those of every batch, not of the first and last only."""
    writer = shelf.writer("times")
    for number, time_ms in enumerate((500, 90, 900, 200)):
        writer.append(b"%d" % number, timestamp_ms=time_ms)
    writer.roll()
    shelf.archive(writer)
    known = shelf.manifest(writer)
    lose_manifests(shelf)
    before = shelf.contents()

    rebuild(shelf, write=True, deep=True)
    assert rows(shelf.manifest(writer)) == rows(known)
    assert shelf.manifest(life).segments[-1].max_timestamp_ms == NO_TIMESTAMP

    shelf.restore(before)
    rebuild(shelf, write=True)
    assert shelf.manifest(writer).segments[0].base_timestamp_ms == 500
    assert shelf.manifest(writer).segments[0].max_timestamp_ms == 900


def test_manifest_that_comes_meanwhile_stays(shelf, life):
    """The manifest that was stored first stays; the others are written all the same."""
    other = shelf.fill("other", segments=2)
    stored = {one: shelf.read(manifest_key(one.identified)) for one in (life, other)}
    lose_manifests(shelf)

    def daemon_begins(what, tasks, work):
        shelf.write(manifest_key(life.identified), stored[life])
        return spread(what, tasks, work)

    report, document = rebuild(shelf, spread=daemon_begins, write=True)

    assert outcomes(document) == {("orders", 0): "not written", ("other", 0): "written"}
    assert "another daemon" in report.faults[0]
    assert shelf.read(manifest_key(life.identified)) == stored[life]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_manifest_that_changes_meanwhile_stays(shelf, life, is_damaged):
    """One that was damaged and is whole again, and one that is to be replaced and is committed again."""
    key, known = manifest_key(life.identified), shelf.manifest(life)
    later = encode_manifest(replace(known, commit_number=77))
    if is_damaged:
        shelf.write(key, shelf.read(key)[:-1])

    def daemon_commits(what, tasks, work):
        shelf.write(key, later)
        return spread(what, tasks, work)

    report, document = rebuild(shelf, spread=daemon_commits, write=True, replace=not is_damaged)

    assert outcomes(document) == {("orders", 0): "not written"}
    assert "during the rebuild" in report.faults[0]
    assert shelf.read(key) == later


def test_topic_that_is_being_purged_is_left_alone(shelf, life):
    """The objects of the topic are going, and so are the rest of its manifests."""
    key = shelf.topic_manifest_key(life)
    shelf.write(key, shelf.read(key).replace(b'"live"', b'"purging"'))
    shelf.remove(manifest_key(life.identified))
    before = shelf.contents()

    _, document = rebuild(shelf, write=True)

    assert (document["figures"]["manifests_leaving"], shelf.contents()) == (1, before)


def test_closed_manifest_is_left_alone(shelf, life):
    """The archive was moved: no process may write here."""
    closed = replace(shelf.manifest(life), leader_epoch=2**31 - 1)
    shelf.write(manifest_key(life.identified), encode_manifest(closed))
    _, document = rebuild(shelf, write=True, replace=True)
    assert outcomes(document) == {("orders", 0): "left alone"}
    assert shelf.manifest(life) == closed


def test_topic_manifest_that_leads_to_too_few_partitions_is_mended(shelf):
    """The other settings of the topic stay."""
    writer = shelf.fill("orders", 3)
    key = shelf.topic_manifest_key(writer)
    before = json.loads(shelf.read(key))
    shelf.write(key, json.dumps(before | {"partition_count": 1, "archiving": "paused"}).encode())

    rebuild(shelf, write=True)

    assert json.loads(shelf.read(key)) == before | {"archiving": "paused"}


def test_topics_are_chosen_by_pattern(shelf, life):
    """The others stay as they are."""
    shelf.fill("other")
    lose_manifests(shelf)
    assert outcomes(rebuild(shelf, "oth*", write=True)[1]) == {("other", 0): "written"}
    with pytest.raises(ObjectNotFound, match="no object of a topic that matches nothing"):
        rebuild(shelf, "nothing", "other")


def die_at_write(patched, store, dies_at: int, *, after_effect: bool) -> None:
    """Let the process end at the n-th request that stores something, before or after its effect."""
    left = dies_at

    def dying(method):
        async def write(*arguments, **options):
            nonlocal left
            left -= 1
            is_last = left == 0
            if is_last and not after_effect:
                raise Killed
            result = await method(*arguments, **options)
            if is_last:
                raise Killed
            return result

        return write

    for name in ("put", "join"):
        patched.setattr(store, name, dying(getattr(store, name)))


@pytest.mark.parametrize("after_effect", [False, True])
def test_crash_at_any_write_is_made_good_by_the_next_run(shelf, life, monkeypatch, after_effect):
    """The second run ends where an undisturbed run does, whatever was stored before the crash."""
    make_parts_small(monkeypatch, rows=8, remembered=4)
    shelf.fill("long", segments=90)
    values = {name: shelf.values(one) for name, one in shelf.writers.items()}
    keys = shelf.data_keys(life)
    lose_manifests(shelf)
    shelf.remove(f"{keys[0]}.index")
    before, deaths = shelf.contents(), 0
    while True:
        shelf.restore(before)
        try:
            with monkeypatch.context() as patched:
                die_at_write(patched, bucket_of(shelf.config).store, deaths + 1, after_effect=after_effect)
                rebuild(shelf, write=True)
            break
        except Killed:
            deaths += 1
        report, _ = rebuild(shelf, write=True)
        assert report.faults == ()
        assert {name: shelf.values(one) for name, one in shelf.writers.items()} == values
    assert deaths > 5


def test_store_that_does_not_answer_ends_a_rebuild(shelf, life):
    """Nothing is taken for lost that could not be asked for."""
    lose_manifests(shelf)

    async def away(*_, **__):
        raise StorageUnavailable("the disk does not answer")

    bucket_of(shelf.config).store.list_page = away
    with pytest.raises(StorageUnavailable, match="does not answer"):
        rebuild(shelf, write=True)


def test_tasks_survive_a_pickle(shelf, life):
    """The objects that go to executors and come back are plain."""

    def by_mail(what, tasks, work):
        return [
            pickle.loads(pickle.dumps(work(pickle.loads(pickle.dumps(task)))))
            for task in pickle.loads(pickle.dumps(tasks))
        ]

    keys = shelf.data_keys(life)
    lose_manifests(shelf)
    shelf.remove(f"{keys[0]}.index")
    assert rebuild(shelf, spread=by_mail, write=True)[0].faults == ()
