"""The observer: one scan of everything, in which what could not be seen is not taken for absent."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in, archiver_of, tiered_config
from tests.fakes.broker import FakeBroker, broker_unavailable
from tests.fakes.log_writer import CLUSTER, LogWriter
from tieringd.archiving.observer import Observer
from tieringd.archiving.pinner import PinFacts, Pinner
from tieringd.broker.layout import KafkaLayout
from tieringd.broker.log_dir import LOOK_EVERY, ReportedChanges
from tieringd.broker.pins import PinDirectory
from tieringd.config import Config, parse_config
from tieringd.errors import BrokerDenied, BrokerUnavailable, LocalFileError, StorageUnavailable
from tieringd.formats.object_keys import TopicKey, manifest_key, topic_key
from tieringd.formats.topic_manifest import Archiving
from tieringd.model.manifest import PartitionManifest
from tieringd.model.offset_translation import LOG_BEGINNING
from tieringd.model.partition import Leadership
from tieringd.model.topic_lifecycle import Lifecycle
from tieringd.policies.local_retention import LocalRetentionTarget
from tieringd.topics.topic_registry import TopicRegistry, partition_counts

if TYPE_CHECKING:
    from tieringd.model.local_log import LocalPartition
    from tieringd.policies.pinning import Pin

pytestmark = pytest.mark.looptime
INTERVAL_SECONDS = 10


@pytest.fixture
def log_dir(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def writers(log_dir):
    """Give three partitions of one topic, each with a closed segment."""
    writers = [LogWriter(log_dir, "orders", number) for number in range(3)]
    for each in writers:
        each.closed_segment()
    return writers


@pytest.fixture
def broker(writers):
    return FakeBroker(*writers)


class Watch:
    """An observer with everything around it."""

    def __init__(
        self,
        log_dir,
        store,
        broker,
        metrics,
        *,
        topics: str = "",
        pin_root=None,
        layout=None,
        manifests=None,
        reports=None,
    ) -> None:
        self.archive = archive_in(store)
        self.broker = broker
        self.metrics = metrics
        directories = {str(log_dir): PinDirectory(str(pin_root))} if pin_root else {}
        self.pinner = Pinner(directories, budget_bytes=10**9, metrics=metrics)
        self.registry = TopicRegistry(store, self.archive.manifests)
        self.observer = Observer(
            config_of(log_dir, topics),
            broker=broker,
            metrics=metrics,
            pinner=self.pinner,
            registry=self.registry,
            manifests=manifests or self.archive.manifests,
            layout=layout or self.archive.layout,
            reports=reports,
        )

    async def scan(self):
        """Scan with what the bucket says of topics now."""
        await self.registry.refresh(CLUSTER)
        return await self.observer.scan()

    def value(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"tieringd_{name}")

    async def pause(self, key: TopicKey, archiving: Archiving = Archiving.PAUSED) -> None:
        """Do what an operator's command does, from another process."""
        await self.archive.manifests.change_topic(key, lambda found: replace(found, archiving=archiving))


def config_of(log_dir, topics: str) -> Config:
    ordinary = tiered_config(log_dir, interval_ms=INTERVAL_SECONDS * 1000)
    if not topics:
        return ordinary
    text = f"""\
broker: {{kind: none, log_dirs: [{log_dir}]}}
state_directory: /nowhere/state
cloud_storage_enabled: true
cloud_storage_enable_remote_write: true
cloud_storage_enable_remote_read: true
cloud_storage_backend: file
cloud_storage_file_root: /nowhere/archive
cloud_storage_reconciliation_interval_ms: {INTERVAL_SECONDS * 1000}
log_retention_ms: -1
topics: {topics}
"""
    return parse_config(text, source="test", environ={})


@pytest.fixture
def make_watch(log_dir, store, broker, metrics):
    def make(**options) -> Watch:
        return Watch(log_dir, store, broker, metrics, **options)

    return make


@pytest.fixture
def watch(make_watch):
    return make_watch()


def wanted(snapshot) -> dict[str, int]:
    """Return the epoch under which each partition is to be archived."""
    return {str(one.partition): one.leader_epoch for one in snapshot.wanted}


def seen_of(snapshot, writer):
    """Return the observation of the partition of *writer*."""
    return snapshot.wanted[Leadership(writer.identified, writer.epochs[-1][0])]


def followed(snapshot) -> list[str]:
    return sorted(str(one.partition) for one in snapshot.followed)


@pytest.mark.parametrize("is_read", [False, True])
async def test_retention_of_a_topic_that_is_never_trimmed_stays_the_brokers(make_watch, is_read):
    """Nothing would delete from its log any more, and the disk would fill."""
    managed = f"{{tieringd.managed.retention: true, redpanda.remote.read: {str(is_read).lower()}}}"
    snapshot = await make_watch(topics=f"{{orders: {managed}}}").scan()
    assert [key.topic for key in snapshot.managed] == ["orders"] * is_read


async def test_scan_has_an_observation_for_each_partition_that_is_led(watch, writers):
    """Files, bounds and configuration of each, under the epoch that the cluster names."""
    writers[1].begin_epoch(7)
    watch.broker.epochs[writers[1].name] = 7
    snapshot = await watch.scan()
    assert wanted(snapshot) == {"orders-0": 0, "orders-1": 7, "orders-2": 0}
    seen = snapshot.wanted[Leadership(writers[1].identified, 7)]
    assert (seen.log, seen.bounds, seen.pins) == (writers[1].local_log(), writers[1].bounds(), ())
    assert seen.topic.remote_write
    assert seen.topic.local_retention_target == LocalRetentionTarget(None, None)
    assert (snapshot.followed, snapshot.problems, snapshot.unclear, snapshot.managed) == (
        (),
        {},
        frozenset(),
        {},
    )


async def test_scan_follows_what_others_lead(watch, writers):
    """A follower's log is scanned, and its bounds are not asked for."""
    del watch.broker.epochs[writers[1].name]
    watch.broker.followed[writers[1].name] = 4
    snapshot = await watch.scan()
    assert wanted(snapshot) == {"orders-0": 0, "orders-2": 0}
    (one,) = snapshot.followed
    assert (one.partition, one.log) == (writers[1].identified, writers[1].local_log())
    assert watch.value("followed_partitions") == 1


async def test_scan_leaves_out_what_the_cluster_does_not_count_as_a_replica(watch, writers):
    """A directory on its way out is neither archived nor followed, and no problem."""
    del watch.broker.epochs[writers[1].name]
    snapshot = await watch.scan()
    assert wanted(snapshot) == {"orders-0": 0, "orders-2": 0}
    assert (snapshot.followed, snapshot.problems) == ((), {})


@pytest.mark.parametrize("is_leader", [True, False])
async def test_scan_leaves_out_topics_that_are_not_archived(make_watch, broker, writers, is_leader):
    """A partition that is not uploaded needs no manifest and no pins, so it is neither led nor followed."""
    if not is_leader:
        broker.followed[writers[0].name] = broker.epochs.pop(writers[0].name)
    watch = make_watch(topics="{orders: {redpanda.remote.write: false}}")
    snapshot = await watch.scan()
    assert (snapshot.wanted, snapshot.followed) == ({}, ())
    assert watch.value("upload_share_ratio") == 0


async def test_scan_takes_topic_settings_from_the_broker(watch, writers):
    """The broker's settings count, and a value that cannot be read is reported once."""
    watch.broker.configs["orders"] = {"local.retention.bytes": "77", "local.retention.ms": "soon"}
    with capture_logs() as lines:
        snapshots = [await watch.scan() for _ in range(3)]
    for snapshot in snapshots:
        assert {one.topic.local_retention_target for one in snapshot.wanted.values()} == {
            LocalRetentionTarget(None, 77)
        }
    faults = [line["fault"] for line in lines if line["event"] == "topic configuration ignored in part"]
    assert faults == ["topic orders: the broker has local.retention.ms=soon, which is not a limit"]


async def test_archived_topic_that_this_user_may_not_see_is_a_problem(log_dir, store, metrics):
    """It stops being archived; a topic that the bucket does not have is meant not to be seen."""
    archived, foreign = (LogWriter(log_dir, topic=name) for name in ("archived", "foreign"))
    for writer in (archived, foreign):
        writer.append(b"record")
    watch = Watch(log_dir, store, FakeBroker(archived, foreign), metrics)
    await watch.registry.refresh(CLUSTER)
    await watch.registry.ensure(partition_counts([archived.identified]))
    watch.broker.refused = {"foreign"}
    snapshot = await watch.scan()
    assert (wanted(snapshot), snapshot.problems) == ({"archived-0": 0}, {})

    watch.broker.refused = {"archived", "foreign"}
    with capture_logs() as lines:
        for _ in range(2):
            snapshot = await watch.scan()
            assert (wanted(snapshot), watch.value("unreadable_paths")) == ({}, 1)
            assert list(snapshot.problems) == ["topic archived"]
            assert "does not let this user see the topic" in snapshot.problems["topic archived"]
        watch.broker.refused = {"foreign"}
        snapshot = await watch.scan()
    assert (wanted(snapshot), snapshot.problems) == ({"archived-0": 0}, {})
    assert [line["event"] for line in lines] == ["left out of this round", "readable again"]


async def test_archived_topic_whose_id_is_not_on_disk_is_a_problem_where_it_is_refused(watch, writers):
    """Redpanda's directories have a revision instead, and a broker that refuses the topic tells no id."""
    key = replace(topic_key(writers[0].identified), topic_id="AnotherIdAnotherIdAnoA")
    watch.broker.refused = {"orders"}
    await watch.registry.refresh(CLUSTER)
    await watch.registry.ensure({key: 3})
    assert list((await watch.scan()).problems) == ["topic orders"]


@pytest.mark.parametrize(
    "settled",
    [
        pytest.param({"lifecycle": Lifecycle.KEPT}, id="its archive is closed"),
        pytest.param({"moved_to": "s3://new"}, id="its archive was moved"),
        pytest.param({"partition_count": 0}, id="nothing of it was archived"),
    ],
)
async def test_topic_that_this_user_need_not_see_is_no_problem(watch, writers, settled):
    """Only a topic that would be archived here has to be seen."""
    key = topic_key(writers[0].identified)
    watch.broker.refused = {"orders"}
    await watch.registry.refresh(CLUSTER)
    await watch.registry.ensure({key: 3})
    assert len((await watch.scan()).problems) == 1
    await watch.registry.change(key, lambda found: replace(found, **settled))
    assert (await watch.scan()).problems == {}


async def test_topic_that_the_file_takes_out_need_not_be_seen(make_watch, writers):
    """An operator who hides a topic from the daemon says so in the configuration."""
    watch = make_watch(topics="{orders: {redpanda.remote.write: false}}")
    watch.broker.refused = {"orders"}
    await watch.registry.refresh(CLUSTER)
    await watch.registry.ensure(partition_counts(one.identified for one in writers))
    assert (await watch.scan()).problems == {}


@pytest.mark.parametrize("is_known", [False, True])
async def test_topic_whose_settings_are_hidden_holds_up_no_other(log_dir, store, metrics, is_known):
    """It is a problem, and neither archived nor recorded nor gone: its settings may switch archiving off."""
    hidden, other = (LogWriter(log_dir, topic=name) for name in ("hidden", "other"))
    for writer in (hidden, other):
        writer.append(b"record")
    watch = Watch(log_dir, store, FakeBroker(hidden, other), metrics)
    if is_known:
        assert len((await watch.scan()).wanted) == 2
    watch.broker.hidden = {"hidden"}
    for _ in range(2):
        snapshot = await watch.scan()
        assert wanted(snapshot) == {"other-0": 0}
        assert snapshot.unclear == {hidden.name}
        assert snapshot.problems == {"topic hidden": "the settings of topic hidden are hidden"}
        assert {key.topic for key in snapshot.unrecorded_topics} == {"other"}
        assert "hidden" not in {key.topic for key in snapshot.remote_delete}
    assert {key.topic for key in snapshot.remote_delete} == {"other"}
    watch.broker.hidden = {"hidden", "other"}
    with pytest.raises(BrokerDenied, match="are hidden"):
        await watch.scan()  # Nothing would be archived, and the daemon would say that it is well.
    watch.broker.hidden = set()
    snapshot = await watch.scan()
    assert wanted(snapshot) == {"hidden-0": 0, "other-0": 0}
    assert (snapshot.problems, snapshot.unclear) == ({}, frozenset())


@pytest.fixture
def beside_another(log_dir, store, metrics, writers):
    """Return what makes a watch of the topic `orders` and another one, with settings of topics."""

    def make(topics):
        return Watch(
            log_dir, store, FakeBroker(*writers, LogWriter(log_dir, "other")), metrics, topics=topics
        )

    return make


@pytest.mark.parametrize(
    ("settings", "is_known", "is_read"),
    [
        ({"remote.storage.enable": "true"}, True, True),
        ({"remote.storage.enable": "true"}, False, True),
        ({"redpanda.remote.read": "false"}, True, False),
    ],
)
async def test_archive_of_a_topic_whose_settings_are_hidden_stays_readable(
    beside_another, settings, is_known, is_read
):
    """The cluster's default would switch reading off, and the topic's own setting decides, if it is known."""
    watch = beside_another("{orders: {tieringd.managed.retention: true}}")
    default = watch.observer._config.model_copy(
        update={"cloud_storage_enable_remote_write": False, "cloud_storage_enable_remote_read": False}
    )
    watch.observer.set_config(default)
    watch.broker.configs["orders"] = settings
    if is_known:
        assert (await watch.scan()).topics["orders"].remote_read is is_read
    watch.broker.hidden = {"orders"}
    for _ in range(2):
        topic = (await watch.scan()).topics["orders"]
        assert (topic.remote_read, topic.remote_write) == (is_read, False)
        assert topic.problems == (), "what they say rests on settings that were not read"
    watch.observer.set_config(default.model_copy(update={"cloud_storage_enabled": False}))
    assert not (await watch.scan()).topics["orders"].remote_read


async def test_file_says_whether_a_topic_whose_settings_are_hidden_is_read(beside_another):
    """It goes before the topic's own settings anyway."""
    watch = beside_another("{orders: {redpanda.remote.read: false}}")
    watch.broker.hidden = {"orders"}
    assert not (await watch.scan()).topics["orders"].remote_read


async def test_reload_in_the_middle_of_a_scan_does_not_end_it(watch, writers):
    """The scan goes on with the configuration that it began with."""
    asked = watch.broker.log_bounds

    async def log_bounds(*arguments, **named):
        watch.observer.set_config(config_of(writers[0].partition.log_dir, ""))
        return await asked(*arguments, **named)

    watch.broker.log_bounds = log_bounds
    assert (await watch.scan()).unrecorded_topics.keys() == {topic_key(writers[0].identified)}


@pytest.mark.parametrize(("led", "share"), [((0, 1, 2), 1.0), ((0,), 1 / 3), ((), 0.0)])
async def test_upload_share_is_the_part_of_the_topic_s_partitions_that_is_led(watch, writers, led, share):
    """The share is the partitions that this broker leads, of all partitions of the topic in the cluster."""
    for number in {0, 1, 2} - set(led):
        name = writers[number].name
        watch.broker.followed[name] = watch.broker.epochs.pop(name)
    await watch.scan()
    assert watch.value("upload_share_ratio") == pytest.approx(share)


async def test_bounds_that_fail_leave_out_one_partition_and_do_not_stop_its_archiver(watch, writers):
    """A partition whose bounds fail is unclear and a problem: neither wanted, nor followed, nor gone."""
    watch.broker.bounds_errors[writers[1].name] = BrokerUnavailable("NOT_LEADER_OR_FOLLOWER")
    snapshot = await watch.scan()
    assert wanted(snapshot) == {"orders-0": 0, "orders-2": 0}
    assert snapshot.unclear == {writers[1].name}
    assert snapshot.problems == {str(writers[1].path): "NOT_LEADER_OR_FOLLOWER"}
    assert snapshot.followed == ()


async def test_log_that_cannot_be_read_leaves_out_one_partition(watch, writers):
    """A damaged checkpoint is that partition's problem, as long as it lasts."""
    checkpoint = writers[1].path / "leader-epoch-checkpoint"
    sound = checkpoint.read_bytes()
    checkpoint.write_text("nonsense")
    with capture_logs() as lines:
        for _ in range(2):
            snapshot = await watch.scan()
            assert wanted(snapshot) == {"orders-0": 0, "orders-2": 0}
            assert snapshot.unclear == {writers[1].name}
            assert list(snapshot.problems) == [str(writers[1].path)]
            assert watch.observer.problems == snapshot.problems
            assert watch.value("unreadable_paths") == 1
        checkpoint.write_bytes(sound)
        snapshot = await watch.scan()
    assert len(wanted(snapshot)) == 3
    assert (snapshot.problems, snapshot.unclear, watch.value("unreadable_paths")) == ({}, frozenset(), 0)
    said = [line["event"] for line in lines if "path" in line]
    assert said == ["left out of this round", "readable again"]


async def test_broker_that_does_not_answer_ends_the_scan(watch):
    """Nothing is concluded from half a scan."""
    for operation in ("cluster_id", "replicas", "topic_configs", "log_bounds"):
        watch.broker.fail_next(operation, broker_unavailable(operation))
        with pytest.raises(BrokerUnavailable):
            await watch.scan()
    assert len(wanted(await watch.scan())) == 3


async def test_scan_that_finds_nothing_new_shows_the_same_under_another_number(watch, writers):
    """A round sees without a comparison that nothing changed; an archiver that acts gets the new number."""
    first, second = await watch.scan(), await watch.scan()
    assert second.wanted is first.wanted
    for leadership, seen in first.wanted.items():
        again = second.confirmed(second.wanted[leadership])
        assert again.shows_same(seen)
        assert again.uploadable == seen.uploadable
        assert (again.scan_number, again.scan_began_at) == (second.scan_number, second.scan_began_at)
        assert again.scan_number > seen.scan_number
    writers[0].append(b"new")
    third = await watch.scan()
    changed = {
        str(one.partition) for one, seen in third.wanted.items() if not seen.shows_same(first.wanted[one])
    }
    assert changed == {"orders-0"}
    (again,) = (await watch.observer.rescan_partitions([str(writers[0].path)])).values()
    assert again.scan_number > max(seen.scan_number for seen in third.wanted.values())


class CountedBounds(dict):
    """Bounds that count how often one is looked up."""

    looked_up = 0

    def __getitem__(self, name):
        CountedBounds.looked_up += 1
        return super().__getitem__(name)


async def test_scan_that_finds_nothing_new_looks_at_no_partition(watch, writers, monkeypatch):
    """Ten thousand idle partitions are compared as a whole. One that changed has all looked at, once."""
    log_bounds, kept = watch.broker.log_bounds, {}

    async def counted(logs, *, leader_epochs):
        found = await log_bounds(logs, leader_epochs=leader_epochs)
        # A real broker's answer has the same objects where nothing changed.
        return CountedBounds({name: kept.setdefault((name, repr(one)), one) for name, one in found.items()})

    monkeypatch.setattr(watch.broker, "log_bounds", counted)
    del watch.broker.epochs[writers[2].name]
    watch.broker.followed[writers[2].name] = 4
    await watch.scan()
    before = await watch.scan()
    CountedBounds.looked_up = 0
    again = await watch.scan()
    assert CountedBounds.looked_up == 0
    assert again.wanted is before.wanted
    assert again.scan_number > before.scan_number
    assert followed(again) == followed(before) != []

    writers[0].closed_segment()
    changed = await watch.scan()
    assert CountedBounds.looked_up >= 2
    (key,) = (key for key in changed.wanted if key.partition.topic_partition == writers[0].name)
    assert len(changed.wanted[key].log.closed_segments) == 2


async def test_scan_after_a_rescan_shows_bounds_that_went_back(watch, writers, monkeypatch):
    """A rescan saw other bounds, and the next scan those of the scan before. The newest ones count."""
    first = await watch.scan()
    (key,) = (key for key in first.wanted if key.partition.topic_partition == writers[0].name)
    log_bounds, earlier = watch.broker.log_bounds, first.wanted[key].bounds

    async def moved(logs, *, leader_epochs):
        found = await log_bounds(logs, leader_epochs=leader_epochs)
        return {name: replace(one, log_end_offset=earlier.log_end_offset - 1) for name, one in found.items()}

    with monkeypatch.context() as patched:
        patched.setattr(watch.broker, "log_bounds", moved)
        (seen,) = (await watch.observer.rescan_partitions([str(writers[0].path)])).values()
    assert seen.bounds != earlier
    assert (await watch.scan()).wanted[key].bounds == earlier


async def test_scan_has_the_pins_of_led_and_followed_partitions(make_watch, broker, writers, tmp_path):
    """Segments that only a pin holds can be uploaded, and the pinner knows those that a follower holds."""
    (tmp_path / "pins").mkdir()
    name = writers[1].name
    broker.followed[name] = broker.epochs.pop(name)
    watch = make_watch(pin_root=tmp_path / "pins")
    partitions = [PinFacts(each.local_log(), (), None) for each in writers[:2]]
    await watch.pinner.step(partitions, is_complete=False)
    writers[0].drop_head()
    snapshot = await watch.scan()
    seen = snapshot.wanted[Leadership(writers[0].identified, 0)]
    assert [each.base_offset for each in seen.log.segments] == [3]
    assert [each.base_offset for each in seen.uploadable.segments] == [0, 3]
    assert [pin.is_held for pin in seen.pins] == [True]
    assert [[pin.is_held for pin in one.pins] for one in snapshot.followed] == [[False]]
    assert snapshot.wanted[Leadership(writers[2].identified, 0)].pins == ()


async def test_scan_reads_the_end_of_a_pinned_file_once(make_watch, writers, tmp_path):
    """A file that has its time and size still is not read again, as long as each scan meets it."""
    root = tmp_path / "pins"
    root.mkdir()
    watch, writer = make_watch(pin_root=root), writers[0]
    writer.append()
    facts = PinFacts(writer.local_log(), (), None, expiring_end=6)
    await watch.pinner.step([facts], is_complete=False)
    writer.append()
    writer.roll()
    for _ in range(2):
        writer.drop_head()
    writer.forget_epochs()

    async def pin() -> Pin:
        (found,) = [one for one in (await watch.scan()).wanted[key].pins if one.segment.base_offset == 3]
        return found

    key = Leadership(writer.identified, 0)
    before = await pin()
    assert before.segment.next_offset == 9
    (path,) = root.rglob(f"{3:020d}-*.log")
    path.write_bytes(bytes(before.segment.size_bytes))
    os.utime(path, ns=(before.segment.modified_ns, before.segment.modified_ns))
    assert await pin() == before

    away = path.rename(tmp_path / "away")
    await watch.scan()
    await watch.scan()
    away.rename(path)
    assert (await pin()).segment.next_offset == 6


async def test_pin_directory_that_cannot_be_read_leaves_out_its_partition_only(make_watch, writers, tmp_path):
    """A partition whose pins cannot be read waits for another scan: its log may seem to lack segments."""
    (tmp_path / "pins").mkdir()
    (tmp_path / "pins" / f"{writers[0].name}_{writers[0].partition.topic_id}").write_bytes(b"")
    watch = make_watch(pin_root=tmp_path / "pins")
    snapshot = await watch.scan()
    assert wanted(snapshot) == {"orders-1": 0, "orders-2": 0}
    assert snapshot.unclear == {writers[0].name}
    assert "Not a directory" in snapshot.problems[str(writers[0].path)]


async def test_paused_topic_is_followed_and_not_archived(watch, writers):
    """The files and pins of a paused topic are kept, while nothing of it is uploaded or trimmed."""
    key = topic_key(writers[0].identified)
    await watch.pause(key)
    snapshot = await watch.scan()
    assert (wanted(snapshot), followed(snapshot)) == ({}, ["orders-0", "orders-1", "orders-2"])
    assert snapshot.paused == {key}
    assert watch.value("paused_topics") == 1
    # This broker leads them, so it could not take them over.
    assert watch.value("followed_partitions") == snapshot.led_elsewhere == 0


async def test_pause_and_resume_are_seen_as_the_registry_knows_them(watch, writers):
    """The scan itself asks the bucket for nothing."""
    assert len(wanted(await watch.scan())) == 3
    key = topic_key(writers[0].identified)
    await watch.pause(key)
    assert len(wanted(await watch.observer.scan())) == 3
    assert wanted(await watch.scan()) == {}
    await watch.pause(key, Archiving.ON)
    snapshot = await watch.scan()
    assert (len(wanted(snapshot)), snapshot.paused, watch.value("paused_topics")) == (3, frozenset(), 0)


async def test_pause_of_a_former_incarnation_is_not_this_topic_s(watch, writers):
    """A topic that was created again begins unpaused."""
    await watch.pause(TopicKey(CLUSTER, "orders", "another-incarnation-id"))
    assert len(wanted(await watch.scan())) == 3


async def test_nothing_is_archived_before_the_bucket_has_told_what_is_paused(watch, writers):
    """The partitions that this broker leads are held back until then, with their pins kept."""
    snapshot = await watch.observer.scan()
    assert (wanted(snapshot), followed(snapshot), snapshot.problems) == ({}, [], {})
    assert sorted(str(one.partition) for one in snapshot.held_back) == ["orders-0", "orders-1", "orders-2"]
    assert (await watch.scan()).held_back == ()


@pytest.mark.parametrize(
    ("topics", "leads", "expected"),
    [
        pytest.param("{orders: {tieringd.managed.retention: true}}", {0, 1, 2}, True, id="leads all"),
        pytest.param("{orders: {tieringd.managed.retention: true}}", {0}, True, id="leads the first"),
        pytest.param("{orders: {tieringd.managed.retention: true}}", {1, 2}, False, id="another leads it"),
        pytest.param("{orders: {tieringd.managed.retention: false}}", {0, 1, 2}, False, id="not asked for"),
    ],
)
async def test_retention_is_managed_by_the_leader_of_partition_0(
    make_watch, writers, topics, leads, expected
):
    """One daemon of the cluster manages a topic, and every daemon chooses the same."""
    watch = make_watch(topics=topics)
    for number in {0, 1, 2} - leads:
        name = writers[number].name
        watch.broker.followed[name] = watch.broker.epochs.pop(name)
    snapshot = await watch.scan()
    key = topic_key(writers[0].identified)
    assert list(snapshot.managed) == ([key] if expected else [])


async def test_managed_retention_goes_on_while_the_topic_is_paused(make_watch, writers):
    """A pause must not let the broker delete: nothing is uploaded then."""
    watch = make_watch(topics="{orders: {tieringd.managed.retention: true}}")
    await watch.pause(topic_key(writers[0].identified))
    snapshot = await watch.scan()
    assert wanted(snapshot) == {}
    assert list(snapshot.managed) == [topic_key(writers[0].identified)]


async def test_retention_is_not_managed_while_the_first_partition_cannot_be_read(make_watch, writers):
    """What cannot be read may be another topic's by now, so nothing is done to the topic's retention."""
    watch = make_watch(topics="{orders: {tieringd.managed.retention: true}}")
    (writers[0].path / "leader-epoch-checkpoint").write_text("nonsense")
    assert (await watch.scan()).managed == {}


@pytest.mark.parametrize("change", [{"lifecycle": Lifecycle.KEPT}, {"moved_to": "s3://new"}])
async def test_retention_is_not_managed_where_the_archive_is_closed(make_watch, writers, change):
    """A daemon does not manage the retention of a closed archive. The daemons of the new configuration do."""
    watch = make_watch(topics="{orders: {tieringd.managed.retention: true}}")
    assert list((await watch.scan()).managed) == [topic_key(writers[0].identified)]
    await watch.registry.change(topic_key(writers[0].identified), lambda found: replace(found, **change))
    assert (await watch.scan()).managed == {}


async def test_remote_delete_is_told_of_topics_whose_first_partition_is_led(watch, writers):
    """`remote_delete` is reported for topics whose first partition is led, as broker and file have it now."""
    key = topic_key(writers[0].identified)
    await watch.scan()
    assert (await watch.scan()).remote_delete == {key: True}
    watch.broker.configs["orders"] = {"redpanda.remote.delete": "false"}
    assert (await watch.scan()).remote_delete == {key: False}
    watch.broker.followed[writers[0].name] = watch.broker.epochs.pop(writers[0].name)
    assert (await watch.scan()).remote_delete == {}


async def test_remote_delete_of_a_topic_that_is_created_again_is_not_told_of_the_old_one(watch, writers):
    """A scan asks for ids first and for settings by name later; an archive that goes takes two scans."""
    key = topic_key(writers[0].identified)
    watch.broker.configs["orders"] = {"redpanda.remote.delete": "false"}
    assert (await watch.scan()).remote_delete == {key: False}
    # The scan in whose middle the topic is created again sees its new settings under the old id.
    watch.broker.configs["orders"] = {}
    assert (await watch.scan()).remote_delete == {}
    watch.broker.created_again.add("orders")
    assert (await watch.scan()).remote_delete == {}

    # Another scan that finds the old id shows that the settings were those of that topic.
    watch.broker.created_again.clear()
    for expected in ({}, {key: True}, {key: True}):
        assert (await watch.scan()).remote_delete == expected
    watch.broker.configs["orders"] = {"redpanda.remote.delete": "false"}
    assert (await watch.scan()).remote_delete == {key: False}


async def test_topic_without_configuration_says_nothing_of_its_deletion(watch, writers):
    """One that is being deleted is on disk for a while, and has no configuration any more."""
    watch.broker.configs["orders"] = {"redpanda.remote.delete": "false"}
    watch.broker.untold = {"orders"}
    snapshot = await watch.scan()
    assert (snapshot.remote_delete, len(snapshot.local)) == ({}, len(writers))


KEPT_LOCALLY = {"retention.local.target.bytes": "-1", "retention.local.target.ms": "-1"}


@pytest.mark.parametrize("is_known", [False, True])
async def test_answer_without_a_topic_trims_nothing_of_it(watch, writers, log_dir, is_known):
    """The topic keeps its whole log, and the cluster's default keeps one byte of it on the broker."""
    writer = writers[0]
    second = writer.closed_segment()
    watch.observer.set_config(tiered_config(log_dir, target_bytes=1))
    watch.broker.configs["orders"] = KEPT_LOCALLY
    await watch.registry.refresh(CLUSTER)
    await watch.registry.ensure({topic_key(writer.identified): 3})
    if is_known:
        await watch.scan()
    watch.broker.untold = {"orders"}
    archiver = archiver_of(writer, watch.archive, watch.broker)
    for _ in range(3):
        await archiver.step(seen_of(await watch.scan(), writer))
    assert (archiver.manifest.next_offset, writer.log_start_offset) == (writer.next_offset, 0)

    watch.broker.untold, watch.broker.configs["orders"] = set(), {}
    await archiver.step(seen_of(await watch.scan(), writer))
    assert writer.log_start_offset == second


@pytest.mark.parametrize(
    "settings",
    [
        {"cleanup.policy": "compact", "retention.ms": "1", "retention.bytes": "1"},
        {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"},
    ],
)
async def test_topic_left_out_of_an_answer_keeps_its_last_settings(watch, writers, log_dir, settings):
    """They are resolved with the present file, and count until the broker tells others."""
    watch.broker.configs["orders"] = settings
    told = (await watch.scan()).topics["orders"]
    watch.broker.untold = {"orders"}
    for _ in range(2):
        snapshot = await watch.scan()
        assert snapshot.topics["orders"] is told
    watch.observer.set_config(tiered_config(log_dir, interval_ms=7_000, target_bytes=1))
    topic = (await watch.scan()).topics["orders"]
    assert (topic.total, topic.is_compacted) == (told.total, told.is_compacted)
    assert topic.local_target != told.local_target
    watch.broker.untold, watch.broker.configs["orders"] = set(), {"retention.ms": "7"}
    assert (await watch.scan()).topics["orders"].total.limit_ms == 7


async def test_topic_whose_settings_were_never_told_loses_nothing(watch, writers):
    """It is archived; nothing of it is trimmed, expired or merged, and its retention is not managed."""
    watch.broker.untold = {"orders"}
    first = await watch.scan()
    topic = first.topics["orders"]
    assert "does not tell the topic's settings" in topic.never_trimmed_because
    assert (topic.remote_write, topic.total.deletes, topic.merge_limits) == (True, False, None)
    assert (topic.problems, first.managed) == ((), {})
    assert wanted(first) == {"orders-0": 0, "orders-1": 0, "orders-2": 0}
    again = await watch.scan()
    assert again.topics["orders"] is topic
    watch.broker.untold = set()
    topic = (await watch.scan()).topics["orders"]
    assert (topic.never_trimmed_because, topic.total.deletes) == ("", True)


async def test_topic_that_is_created_again_does_not_take_over_settings(watch, writers, log_dir):
    """The settings were told of another id."""
    watch.broker.configs["orders"] = KEPT_LOCALLY
    await watch.scan()
    for writer in writers:
        writer.path.rename(log_dir / f"{writer.name}.{'0' * 32}-delete")
        watch.broker.add(LogWriter(log_dir, "orders", writer.name.partition, topic_id="anew" + "w" * 18))
    watch.broker.untold = {"orders"}
    await watch.scan()  # It notices other directories, and the next one finds the topic.
    assert not (await watch.scan()).topics["orders"].total.deletes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lifecycle": Lifecycle.DELETED}, "the archive is deleted, so nothing is added to it"),
        ({"moved_to": "s3://new"}, "the archive was moved to s3://new: set that bucket in the configuration"),
    ],
)
async def test_topic_whose_archive_is_closed_is_not_archived(watch, writers, change, reason):
    """A closed archive is reported as a problem, and the topic's files and pins are kept."""
    key = topic_key(writers[0].identified)
    await watch.scan()
    await watch.registry.change(key, lambda found: replace(found, **change))
    snapshot = await watch.scan()
    assert (wanted(snapshot), followed(snapshot)) == ({}, ["orders-0", "orders-1", "orders-2"])
    assert reason in snapshot.problems[f"topic orders ({key.topic_id})"]
    assert snapshot.paused == frozenset()


class HeadlessLayout(KafkaLayout):
    """Stands for Redpanda's: the offsets of one log are not known without a translation."""

    def __init__(self, headless: LocalPartition) -> None:
        super().__init__()
        self.headless = headless

    def read_log(self, partition, known):
        if partition == self.headless and not tuple(known):
            raise LocalFileError("its offsets are not known", path=partition.path)
        return super().read_log(partition, known)

    def needs_archive(self, partition):
        return partition == self.headless


async def test_log_whose_offsets_only_the_archive_knows_is_scanned_again(make_watch, writers, store):
    """The manifest's translation is read once, and remembered for the scans that follow."""
    watch = make_watch(layout=HeadlessLayout(writers[0].partition))
    snapshot = await watch.scan()
    assert wanted(snapshot) == {"orders-1": 0, "orders-2": 0}
    assert snapshot.unclear == {writers[0].name}

    await archive_translation(watch, writers[0])
    for reads in (1, 0, 0):
        store.requests.clear()
        snapshot = await watch.scan()
        assert (len(wanted(snapshot)), snapshot.problems, snapshot.unclear) == (3, {}, frozenset())
        assert store.requests.count(("get", manifest_key(writers[0].identified))) == reads


async def archive_translation(watch, writer) -> None:
    """Store a manifest from which the log's offsets are known."""
    manifests = watch.archive.manifests
    begun = PartitionManifest.begin(writer.identified, start_offset=0)
    stored = await manifests.load(writer.identified)
    await manifests.commit(stored, replace(begun, translation=LOG_BEGINNING), leader_epoch=0)


class FailingManifests:
    """Manifests of a store that does not answer."""

    async def load(self, partition):
        raise StorageUnavailable(f"the store does not answer for {partition}")


async def test_store_that_is_away_costs_only_the_log_that_needs_it(make_watch, writers):
    """The other logs are scanned and pinned as ever if the archive cannot tell the offsets of one."""
    watch = make_watch(layout=HeadlessLayout(writers[0].partition), manifests=FailingManifests())
    snapshot = await watch.scan()
    assert wanted(snapshot) == {"orders-1": 0, "orders-2": 0}
    assert snapshot.unclear == {writers[0].name}
    assert snapshot.problems == {
        str(writers[0].path): "its offsets are not known; "
        "the archive cannot tell: the store does not answer for orders-0"
    }


async def test_rescan_of_some_partitions_sees_what_is_new_there(watch, writers):
    """Files and bounds of the paths that were asked for, and of no others."""
    first = await watch.scan()
    for each in writers:
        each.closed_segment()
    again = await watch.observer.rescan_partitions([str(writers[1].path)])
    leadership = Leadership(writers[1].identified, 0)
    assert again is not None
    assert list(again) == [leadership]
    assert (again[leadership].log, again[leadership].bounds) == (writers[1].local_log(), writers[1].bounds())
    assert again[leadership].topic is first.wanted[leadership].topic
    assert (await watch.scan()).wanted[leadership].shows_same(again[leadership])


async def test_rescan_gives_up_where_more_than_files_may_have_changed(watch, writers):
    """A path that is not archived, a new epoch, a fault: then a whole scan is needed."""
    path = str(writers[0].path)
    assert await watch.observer.rescan_partitions([path]) is None, "nothing was scanned yet"
    await watch.scan()
    assert await watch.observer.rescan_partitions([path, "/elsewhere/orders-9"]) is None
    watch.broker.bounds_errors[writers[0].name] = BrokerUnavailable("NOT_LEADER_OR_FOLLOWER")
    assert await watch.observer.rescan_partitions([path]) is None
    watch.broker.bounds_errors.clear()
    assert await watch.observer.rescan_partitions([path]) is not None
    writers[0].begin_epoch(3)
    assert await watch.observer.rescan_partitions([path]) is None
    await watch.scan()
    (writers[0].path / "leader-epoch-checkpoint").write_text("nonsense")
    assert await watch.observer.rescan_partitions([path]) is None


async def test_scan_whose_bounds_are_of_another_epoch_is_discarded(watch, writers):
    """Leadership came back under a later epoch while the files were read: the next scan is of one epoch."""
    await watch.scan()
    watch.broker.epochs[writers[0].name] = 2
    assert await watch.observer.rescan_partitions([str(writers[0].path)]) is None
    read = watch.archive.layout.read_log

    def overtaken(partition, translations):
        watch.broker.epochs[writers[1].name] = 2
        return read(partition, translations)

    watch.archive.layout.read_log = overtaken
    snapshot = await watch.scan()
    assert writers[1].name in snapshot.unclear
    assert "led under 2" in snapshot.problems[str(writers[1].path)]
    assert wanted(snapshot) == {"orders-0": 2, "orders-2": 0}
    watch.archive.layout.read_log = read
    assert wanted(await watch.scan()) == {"orders-0": 2, "orders-1": 2, "orders-2": 0}


async def test_scan_whose_files_are_newer_than_its_leadership_is_discarded(watch, writers):
    """The files have a later leader epoch than the broker's answer."""
    writers[1].begin_epoch(3)
    snapshot = await watch.scan()
    assert writers[1].name in snapshot.unclear
    assert "have leader epoch 3" in snapshot.problems[str(writers[1].path)]
    assert wanted(snapshot) == {"orders-0": 0, "orders-2": 0}


async def test_scan_without_any_partition_is_empty(tmp_path, store, metrics):
    """A broker that holds nothing yet is no problem, and divides by nothing."""
    (tmp_path / "logs").mkdir()
    watch = Watch(tmp_path / "logs", store, FakeBroker(), metrics)
    snapshot = await watch.scan()
    assert (snapshot.wanted, snapshot.followed, snapshot.problems) == ({}, (), {})
    assert watch.value("upload_share_ratio") == 0


async def test_topic_keeps_the_cluster_values_of_when_it_was_first_seen(watch, writers, log_dir):
    """A later change of the cluster's values is for new topics only."""
    snapshot = await watch.scan()
    (key,) = snapshot.unrecorded_topics
    assert key == topic_key(writers[0].identified)
    assert (snapshot.defaults.remote_write, len(snapshot.wanted)) == (True, 3)
    await watch.registry.record_defaults(key, snapshot.defaults)

    off = config_of(log_dir, "").model_copy(update={"cloud_storage_enable_remote_write": False})
    watch.observer.set_config(off)
    new = LogWriter(log_dir, "payments", 0)
    new.closed_segment()
    watch.broker.add(new)
    snapshot = await watch.scan()
    assert (wanted(snapshot).keys(), snapshot.unrecorded_topics) == (
        {"orders-0", "orders-1", "orders-2"},
        {topic_key(new.identified): watch.observer._topics["payments"]},
    )

    await watch.registry.record_defaults(topic_key(new.identified), snapshot.defaults)
    watch.observer.set_config(config_of(log_dir, ""))
    snapshot = await watch.scan()
    assert (wanted(snapshot).keys(), snapshot.unrecorded_topics) == ({"orders-0", "orders-1", "orders-2"}, {})


async def test_topics_first_seen_are_those_whose_partition_0_is_led(watch, writers):
    """One daemon of the cluster records a topic."""
    watch.broker.followed[writers[0].name] = watch.broker.epochs.pop(writers[0].name)
    assert (await watch.scan()).unrecorded_topics == {}


async def test_translation_of_a_partition_that_is_gone_is_forgotten(make_watch, writers, store, tmp_path):
    """A manifest's translation is remembered while the partition is on this host's disks."""
    watch = make_watch(layout=HeadlessLayout(writers[0].partition))
    await archive_translation(watch, writers[0])
    assert len(wanted(await watch.scan())) == 3
    away = writers[0].path.rename(tmp_path / "away")
    assert len(wanted(await watch.scan())) == 2
    away.rename(writers[0].path)
    store.requests.clear()
    assert len(wanted(await watch.scan())) == 3
    assert ("get", manifest_key(writers[0].identified)) in store.requests


def trimmed(wanted) -> set[str]:
    """Return the names of the partitions that the topic configuration lets be trimmed."""
    return {
        str(leadership.partition.topic_partition)
        for leadership, seen in wanted.items()
        if not seen.topic.never_trimmed_because
    }


async def test_topic_that_a_restore_could_not_find_is_not_trimmed(watch, writers):
    """A restore finds topics by their manifests: until one is stored, nothing of the topic is trimmed."""
    before = (await watch.scan()).wanted
    await watch.registry.ensure(partition_counts([writers[0].identified]))
    between = (await watch.scan()).wanted
    await watch.registry.ensure(partition_counts([one.identified for one in writers]))
    after = (await watch.scan()).wanted

    assert trimmed(before) == set()
    assert trimmed(between) == {"orders-0"}
    assert trimmed(after) == {"orders-0", "orders-1", "orders-2"}


class ReadLogs(KafkaLayout):
    """Kafka's files, and the paths of the logs that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def read_log(self, partition, known):
        self.read.add(partition.path)
        return super().read_log(partition, known)


class ReportedChangesOf:
    """A kernel that reports each write and each new name of the writers that a test changes."""

    def __init__(self, writers) -> None:
        self.changed = frozenset(str(one.path) for one in writers)
        self._watched = self.changed

    def since_last(self, *, unwritten):
        del unwritten
        changed, self.changed = self.changed, frozenset()
        return ReportedChanges(self._watched, changed, changed)

    def report(self, writer) -> None:
        self.changed |= {str(writer.path)}


@pytest.fixture
def reports(writers):
    return ReportedChangesOf(writers)


@pytest.fixture
async def still(make_watch, reports, tmp_path):
    """Give a watch that has scanned until no partition had to be read because of a report."""
    (tmp_path / "pins").mkdir()
    watch = make_watch(layout=ReadLogs(), reports=reports, pin_root=tmp_path / "pins")
    for _ in range(4):
        await watch.scan()
    return watch


async def logs_read(watch) -> int:
    """Scan, and return how many logs were read."""
    watch.observer._layout.read.clear()
    await watch.scan()
    return len(watch.observer._layout.read)


async def test_scan_reads_only_the_logs_whose_turn_it_is_and_those_with_a_report(still, writers, reports):
    """Each log is read once in as many scans as a turn takes, and a changed one at once."""
    assert sum([await logs_read(still) for _ in range(LOOK_EVERY)]) == len(writers)
    writers[1].closed_segment()
    reports.report(writers[1])
    snapshot = await still.scan()
    assert seen_of(snapshot, writers[1]).log == writers[1].local_log()
    assert {one.partition.path for one in snapshot.logs} == {str(one.path) for one in writers}


async def test_scan_after_a_rescan_has_what_the_rescan_found(still, writers, reports):
    """The rescans have read the logs until they stood still again, and the scan before had other ones."""
    for writer in writers:
        writer.closed_segment()
        reports.report(writer)
    for _ in range(4):
        assert await still.observer.rescan_partitions([str(one.path) for one in writers]) is not None
    snapshot = await still.scan()
    for writer in writers:
        assert writer.local_log() in snapshot.logs
        assert seen_of(snapshot, writer).log == writer.local_log()


async def test_log_that_cannot_be_read_is_a_problem_of_each_scan_beside_logs_that_stand_still(
    still, writers, reports
):
    """The others keep their observations, and it is observed again when it can be read."""
    checkpoint = writers[0].path / "leader-epoch-checkpoint"
    before = checkpoint.read_text()
    for text, problems in (("nonsense", [str(writers[0].path)]), (before, [])):
        checkpoint.with_suffix(".tmp").write_text(text)
        checkpoint.with_suffix(".tmp").rename(checkpoint)
        reports.report(writers[0])
        for _ in range(3):
            snapshot = await still.scan()
            assert list(snapshot.problems) == problems
            assert len(snapshot.wanted) == len(writers) - len(problems)


async def test_pins_are_seen_of_a_log_that_stands_still(still, writers):
    """A pin is made and released without a change of the partition's directory."""
    writer = writers[0]
    for next_offset, pins in ((None, 1), (writer.next_offset, 0)):
        facts = PinFacts(writer.local_log(), still.pinner.pins_of(writer.partition).pins, next_offset)
        await still.pinner.step([facts], is_complete=False)
        for _ in range(2):
            assert len(seen_of(await still.scan(), writer).pins) == pins


async def test_pins_that_are_made_while_a_scan_reads_are_gone_when_they_are_released(still, writers, reports):
    """A step of the pinner may outlive its scan, and then its pins come in the middle of another."""
    layout, pinned = still.observer._layout, list[LogWriter]()

    def read_log(partition, known):
        if not pinned:
            # The pins of this partition were asked for already, and those of the others come later.
            pinned.extend(one for one in writers if one.partition != partition)
            facts = [PinFacts(one.local_log(), (), None) for one in pinned]
            still.pinner._step(facts, (), (), is_complete=False, clock=lambda: 0.0)
        return ReadLogs.read_log(layout, partition, known)

    for writer in writers:
        reports.report(writer)
    with patch.object(layout, "read_log", read_log):
        snapshot = await still.scan()
    assert sorted(len(seen.pins) for seen in snapshot.wanted.values()) == [0, 1, 1]
    for writer in pinned:
        pins = still.pinner.pins_of(writer.partition).pins
        await still.pinner.step([PinFacts(writer.local_log(), pins, writer.next_offset)], is_complete=False)
    for _ in range(LOOK_EVERY):
        snapshot = await still.scan()
        assert {seen.pins for seen in snapshot.wanted.values()} == {()}
