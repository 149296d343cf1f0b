"""The reconciler over real log directories and a broker that leads, refuses and fails."""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c
from structlog.testing import capture_logs

from tests.fakes.archive import archive_in, archiver_of, observed
from tests.fakes.broker import broker_unavailable
from tests.fakes.daemons import INTERVAL_SECONDS, Daemon
from tests.fakes.log_writer import LogWriter
from tests.fakes.manifests import stored_manifest
from tests.fakes.memory_store import MemoryStore
from tests.fakes.store import AwayStore, RefusingStore, store_unavailable
from tests.fakes.virtual_loop import virtually
from tieringd.archiving.reconciler import LEADERSHIP_FRESH_SECONDS
from tieringd.errors import BrokerDenied, BrokerUnavailable
from tieringd.formats.object_keys import (
    TOPIC_MANIFESTS_PREFIX,
    TopicKey,
    data_key,
    manifest_key,
    topic_key,
    topic_manifest_key,
)
from tieringd.model.partition import Leadership
from tieringd.policies.upload_plan import UploadLimits


@virtually
async def test_every_led_partition_is_archived(daemon):
    """One round starts an archiver for each partition, and each uploads what is closed."""
    async with daemon.running():
        assert daemon.archived() == {f"orders-{number}": [0] for number in range(3)}
        assert daemon.value("tieringd_led_partitions") == 3
        assert daemon.value("tieringd_uploads_total", topic="orders") == 3
        assert set(daemon.reconciler.paths()) == {str(each.path) for each in daemon.writers}
        assert daemon.reconciler.fault == ""


@virtually
async def test_partitions_of_other_leaders_are_left_alone(daemon):
    """A follower's directory is not archived."""
    del daemon.broker.epochs[daemon.writers[1].name]

    async with daemon.running():
        assert daemon.archived().keys() == {"orders-0", "orders-2"}


@virtually
async def test_topics_without_remote_write_are_left_alone(daemon):
    """The topic's configuration counts."""
    daemon.broker.configs["orders"] = {"remote.storage.enable": "false"}

    async with daemon.running():
        assert daemon.archived() == {}
        assert daemon.reconciler.statuses() == {}


@virtually
async def test_lost_leadership_stops_the_archiver_and_its_series(daemon):
    """A partition that moved away is forgotten, metrics included."""
    labels = {"topic": "orders", "partition": "1"}
    async with daemon.running():
        assert daemon.value("tieringd_archive_next_offset", **labels) == 3
        del daemon.broker.epochs[daemon.writers[1].name]
        daemon.writers[1].closed_segment()
        await daemon.round()

        assert daemon.archived()["orders-1"] == [0]
        assert daemon.value("tieringd_archive_next_offset", **labels) is None
        assert daemon.value("tieringd_led_partitions") == 2


@pytest.mark.parametrize("operation", ["topic_configs", "log_bounds"])
def test_scan_that_the_process_stood_still_in_confirms_no_old_leadership(tmp_path, store, writers, operation):
    """The broker may have lost the leadership while the process stood still."""

    @virtually
    async def history():
        daemon = Daemon(tmp_path, store, writers)
        async with daemon.running():
            await daemon.round()
            answer, loop = getattr(daemon.broker, operation), asyncio.get_running_loop()

            async def answer_before_a_pause(*arguments, **options):
                found = await answer(*arguments, **options)
                setattr(daemon.broker, operation, answer)
                loop.pass_time(300)
                return found

            setattr(daemon.broker, operation, answer_before_a_pause)
            daemon.reconciler.hint()
            await daemon.reconciler.next_scan()
            ((_, archiver, _), *_) = daemon.reconciler.archived()
            assert archiver._uploader.is_confirmed is (operation == "topic_configs")
            # The time in which the process stood still did not make it a long scan.
            assert archiver._uploader._confirmation.until - loop.time() <= LEADERSHIP_FRESH_SECONDS
            await daemon.reconciler.next_scan()
            assert archiver._uploader.is_confirmed

    history()


@virtually
async def test_new_epoch_starts_a_new_archiver(daemon):
    """A new leader epoch gets a new archiver, which reads the manifest anew."""
    writer = daemon.writers[1]
    async with daemon.running():
        daemon.broker.epochs[writer.name] = 1
        writer.begin_epoch(1)
        second = writer.closed_segment()
        await daemon.round()

        assert daemon.archived()["orders-1"] == [0, second]
        manifest = (await daemon.archive.manifests.load(writer.identified)).manifest
        assert manifest.leader_epoch == 1
        assert Leadership(writer.identified, 0) not in daemon.reconciler.statuses()


@virtually
async def test_fence_holds_over_a_round_that_cannot_read_the_partition(daemon, store):
    """A removed manifest is not begun anew after the broker refused the partition's offsets for a round."""
    writer = daemon.writers[1]
    async with daemon.running():
        store.remove(manifest_key(writer.identified))
        writer.closed_segment()
        await daemon.round()
        daemon.broker.bounds_errors[writer.name] = BrokerUnavailable("the broker refuses the offsets for now")
        await daemon.round()
        assert daemon.value("tieringd_fenced_partitions") == 1
        daemon.broker.bounds_errors.clear()
        await daemon.round()
        await daemon.round()
        assert "was deleted from the bucket" in daemon.status(writer).fault
        assert stored_manifest(store, writer) is None

        del daemon.broker.epochs[writer.name]
        await daemon.round()
        assert daemon.value("tieringd_fenced_partitions") == 0


@virtually
async def test_removed_manifest_fences_the_next_epochs_too(daemon, store):
    """A removed manifest is not begun anew by a later epoch, and one that is put back is gone on with."""
    writer = daemon.writers[1]
    async with daemon.running():
        key = manifest_key(writer.identified)
        first = writer.closed_segment()
        await daemon.round()
        held = (await store.get(key))[0]
        store.remove(key)
        writer.closed_segment()
        await daemon.round()
        for epoch in (1, 2):
            daemon.broker.epochs[writer.name] = epoch
            writer.begin_epoch(epoch)
            writer.closed_segment()
            for _ in range(2):
                await daemon.round()
            assert stored_manifest(store, writer) is None
            assert "was deleted from the bucket" in daemon.status(writer, epoch).fault

        store.add(key, held)
        daemon.broker.epochs[writer.name] = 3
        writer.begin_epoch(3)
        for _ in range(3):
            await daemon.round()
        assert daemon.status(writer, 3).fault == ""
        assert daemon.archived()["orders-1"][:2] == [0, first]


@virtually
async def test_fenced_archiver_stays_stopped_until_a_new_epoch(daemon, store):
    """A partition lost to another writer is left to it; a new epoch is a new claim."""
    writer = daemon.writers[1]
    async with daemon.running():
        writer.closed_segment()
        other = archiver_of(writer, archive_in(store, writer_id="b2"), daemon.broker)
        await other.step(observed(writer))
        writer.closed_segment()
        await daemon.round()
        assert "this may be the last commit of a process that has ended" in daemon.status(writer).fault
        assert daemon.value("tieringd_fenced_partitions") == 0
        await other.step(observed(writer))
        writer.closed_segment()
        await daemon.round()
        assert "another daemon (writer b2)" in daemon.status(writer).fault
        await daemon.round()
        assert daemon.value("tieringd_fenced_partitions") == 1
        assert len(daemon.archived()["orders-1"]) == 3

        daemon.broker.epochs[writer.name] = 1
        writer.begin_epoch(1)
        await daemon.round()
        assert daemon.value("tieringd_fenced_partitions") == 0
        assert len(daemon.archived()["orders-1"]) == 4


@virtually
async def test_problem_of_one_partition_does_not_stop_the_others(daemon, tmp_path):
    """A partition that cannot be scanned is left out, named and counted; the others go on."""
    bad = daemon.writers[1]
    daemon.broker.bounds_errors[bad.name] = BrokerDenied("no permission to look", hint="Grant DESCRIBE")
    (daemon.writers[2].path / "leader-epoch-checkpoint").write_text("nonsense")

    async with daemon.running():
        assert daemon.archived().keys() == {"orders-0"}
        problems = daemon.reconciler.problems
        assert problems.keys() == {str(daemon.writers[1].path), str(daemon.writers[2].path)}
        assert "no permission to look" in problems[str(bad.path)]
        assert daemon.value("tieringd_unreadable_paths") == 2

        daemon.broker.bounds_errors.clear()
        await daemon.round()
        assert daemon.archived().keys() == {"orders-0", "orders-1"}
        assert daemon.reconciler.problems.keys() == {str(daemon.writers[2].path)}


@virtually
async def test_quarantine_of_one_partition_does_not_stop_the_others(daemon):
    """A corrupt segment holds back its own partition only, and shows in the metrics."""
    daemon.writers[1].flip_byte(0)

    async with daemon.running():
        assert daemon.archived().keys() == {"orders-0", "orders-2"}
        assert "batch CRC" in daemon.status(daemon.writers[1]).fault
        await daemon.round()
        assert daemon.value("tieringd_quarantined_partitions") == 1

        daemon.writers[1].flip_byte(0)
        await daemon.round()
        assert daemon.archived()["orders-1"] == [0]


@virtually
async def test_unavailable_broker_is_the_fault_of_the_round(daemon):
    """A round without a broker starts nothing and stops nothing; the next one is well again."""
    daemon.broker.fail_next("replicas", broker_unavailable("replicas"))

    async with daemon.running():
        assert "the broker does not answer" in daemon.reconciler.fault
        assert daemon.archived() == {}
        await daemon.round()
        assert daemon.reconciler.fault == ""
        assert len(daemon.archived()) == 3
        daemon.broker.fail_next("cluster_id", broker_unavailable("cluster_id"))
        await daemon.round()
        assert len(daemon.reconciler.statuses()) == 3


@virtually
async def test_failed_step_is_tried_again_in_the_next_round(daemon, store):
    """A store that fails costs a round: the archiver stays, and its fault shows."""
    async with daemon.running():
        daemon.writers[0].closed_segment()
        store.fail_next("put", lambda: store_unavailable("put"))
        await daemon.round()
        assert "the store does not answer" in daemon.status(daemon.writers[0]).fault
        failures = {"topic": "orders", "error": "StorageUnavailable"}
        assert daemon.value("tieringd_upload_failures_total", **failures) == 1

        await daemon.round()
        assert len(daemon.archived()["orders-0"]) == 2
        assert daemon.status(daemon.writers[0]).fault == ""


@virtually
async def test_failing_store_is_a_fault_of_the_daemon(daemon, store):
    """A store that takes nothing makes the daemon not ready, and says why."""
    async with daemon.running():
        daemon.writers[0].closed_segment()
        store.fail_next("put", lambda: store_unavailable("put"))
        await daemon.round()
        assert "the store does not answer" in daemon.reconciler.fault
        await daemon.round()
        assert daemon.reconciler.fault == ""


@virtually
async def test_archiver_that_fails_unexpectedly_is_started_anew(daemon, store):
    """An error of the program's own ends one archiver, is logged, and the next round starts another."""

    def bug() -> Exception:
        return RuntimeError("a bug")

    async with daemon.running():
        daemon.writers[0].closed_segment()
        store.fail_next("put", bug)
        with capture_logs() as logs:
            await daemon.round()
        assert [each["partition"] for each in logs if each["event"].startswith("archiver failed")] == [
            "orders-0"
        ]
        await daemon.round()
        assert len(daemon.archived()["orders-0"]) == 2


@virtually
async def test_defect_of_an_archiver_is_a_fault_of_its_partition_until_a_step_succeeds(daemon, store):
    """The fault stays between the archiver's end and the next one, which fails once more."""
    writer = daemon.writers[0]
    async with daemon.running():
        store.fail_next("put", lambda: KeyError("content-length"), times=2)
        writer.closed_segment()
        await daemon.round()
        for _ in range(INTERVAL_SECONDS + 5):
            assert daemon.reconciler.faults()["other"] == 1
            assert "KeyError('content-length')" in daemon.status(writer).fault
            await asyncio.sleep(1)
        await daemon.round()
        assert len(daemon.archived()["orders-0"]) == 2
        assert daemon.reconciler.faults()["other"] == 0
        assert daemon.status(writer).fault == ""


@virtually
async def test_partitions_have_an_unknown_loss_until_their_manifests_are_read(tmp_path, writers):
    """The partitions count from the first round of a restart in an outage until the store answers."""
    store = AwayStore()
    async with Daemon(tmp_path, store, writers).running():
        pass
    daemon = Daemon(tmp_path, store, writers)
    store.is_away = True
    async with daemon.running():
        for _ in range(3):
            assert daemon.value("tieringd_partitions_with_unknown_loss") == 3
            await daemon.round()
        store.is_away = False
        await daemon.round()
        await daemon.round()
        assert daemon.value("tieringd_partitions_with_unknown_loss") == 0
        store.is_away = True
        for writer in writers:
            writer.closed_segment()
        await daemon.round()
        await daemon.round()
        assert daemon.value("tieringd_partitions_with_unknown_loss") == 0, "they are known by now"


@virtually
async def test_partition_whose_manifest_is_damaged_has_an_unknown_loss(tmp_path, store, writers):
    """One partition counts, although the store answers."""
    async with Daemon(tmp_path, store, writers).running():
        pass
    store.add(manifest_key(writers[1].identified), b"{")
    daemon = Daemon(tmp_path, store, writers)
    async with daemon.running():
        await daemon.round()
        await daemon.round()
        assert daemon.value("tieringd_partitions_with_unknown_loss") == 1


@virtually
async def test_follower_that_hangs_is_no_transaction_and_ends_with_an_upload(daemon):
    """A high watermark that stands still holds a segment back for hours. When it moves, the segment goes."""
    labels = {"topic": "orders", "partition": "0"}
    writer = daemon.writers[0]
    async with daemon.running():
        writer.high_watermark = writer.next_offset
        writer.closed_segment()
        for _ in range(3):
            daemon.clock.now_ms += 3_600_000
            await daemon.round()
        assert daemon.value("tieringd_upload_held_by_transaction_seconds", **labels) == 0
        assert "its end is not replicated yet" in daemon.status(writer).waits_because
        assert len(daemon.archived()["orders-0"]) == 1
        writer.high_watermark = None
        await daemon.round()
        assert len(daemon.archived()["orders-0"]) == 2


@virtually
async def test_fault_of_a_defect_goes_with_the_leadership(daemon, store):
    """A partition that another broker leads has no fault here."""
    async with daemon.running():
        store.fail_next("put", lambda: KeyError("content-length"))
        daemon.writers[0].closed_segment()
        await daemon.round()
        assert daemon.reconciler.faults()["other"] == 1
        del daemon.broker.epochs[daemon.writers[0].name]
        await daemon.round()
        assert daemon.reconciler.faults()["other"] == 0


@virtually
async def test_round_that_fails_by_a_defect_is_followed_by_others(daemon):
    """
    A round that fails by a defect is counted, and archivers and later rounds go on.

    An example is a message of the broker that cannot be decoded.
    """
    async with daemon.running():
        second = daemon.writers[0].closed_segment()
        daemon.broker.fail_next("replicas", KeyError("Unknown tagged field tag: 50"))
        with capture_logs() as logs:
            await daemon.round()
        assert "Unknown tagged field" in daemon.reconciler.fault
        assert "reconciliation round failed by a defect" in [each["event"] for each in logs]
        failures = {"task": "reconciliation"}
        assert daemon.metrics.registry.get_sample_value("tieringd_task_failures_total", failures) == 1
        await daemon.round()
        assert daemon.reconciler.fault == ""
        assert daemon.archived()["orders-0"] == [0, second]


@virtually
async def test_hint_brings_the_round_forward(daemon):
    """A round happens at once when something changed, and only one for several hints."""
    async with daemon.running():
        rounds = daemon.reconciler.rounds
        second = daemon.writers[0].closed_segment()
        daemon.reconciler.hint()
        daemon.reconciler.hint()
        await asyncio.sleep(1)
        assert daemon.archived()["orders-0"] == [0, second]
        assert daemon.reconciler.rounds == rounds + 1


@virtually
async def test_rounds_come_at_their_interval(daemon):
    """
    A round comes every interval without hints.

    At the start two more follow: one when the bucket has answered, and one when its topics are recorded.
    """
    async with daemon.running():
        assert daemon.reconciler.rounds == 3
        await asyncio.sleep(INTERVAL_SECONDS - 2)
        assert daemon.reconciler.rounds == 3
        await asyncio.sleep(2)
        assert daemon.reconciler.rounds == 4


@virtually
async def test_interval_in_the_metrics_is_that_of_the_wait_under_way(daemon):
    """The interval that an alert allows for changes with the next round: the wait under way is not cut."""
    metric, value = "tieringd_reconcile_interval_seconds", daemon.metrics.registry.get_sample_value
    assert value(metric) == 0
    async with daemon.running():
        assert value(metric) == INTERVAL_SECONDS
        seldom = daemon.config.model_copy(update={"cloud_storage_reconciliation_interval_ms": 3_600_000})
        daemon.reconciler.set_config(seldom, UploadLimits())
        assert value(metric) == INTERVAL_SECONDS
        await asyncio.sleep(INTERVAL_SECONDS)
        assert value(metric) == 3600


class ForgetfulStore(MemoryStore):
    """Loses the topics' manifests at once."""

    async def put(self, key, body, *, crc32c, condition=None):
        stored = await super().put(key, body, crc32c=crc32c, condition=condition)
        if key.startswith(TOPIC_MANIFESTS_PREFIX):
            await self.delete_many([key])
        return stored


@virtually
async def test_store_that_loses_topic_manifests_does_not_make_round_follow_round(tmp_path, writers):
    """Each round finds them changed. Only the first few bring the next one forward."""
    daemon = Daemon(tmp_path, ForgetfulStore(), writers)
    async with daemon.running():
        await asyncio.sleep(0.9 * INTERVAL_SECONDS)
        begun = daemon.reconciler.rounds
        assert begun < 10
        await asyncio.sleep(10 * INTERVAL_SECONDS)
        assert 10 <= daemon.reconciler.rounds - begun <= 11


@virtually
async def test_stop_lets_the_step_in_hand_finish(daemon, store):
    """An archiver that has to stop commits what it has in hand, and no step follows."""
    store.latency_seconds = 1
    for _ in range(9):
        daemon.writers[0].closed_segment()
    run = asyncio.create_task(daemon.reconciler.run())
    await asyncio.sleep(3.5)

    daemon.reconciler.stop()
    await run

    assert len(daemon.archived()["orders-0"]) == 3


@virtually
async def test_backlog_longer_than_a_step_is_drained_at_once(daemon):
    """Steps follow each other on one observation while they make progress."""
    for _ in range(9):
        daemon.writers[0].closed_segment()

    async with daemon.running():
        assert len(daemon.archived()["orders-0"]) == 10
        assert daemon.reconciler.rounds == 3


@virtually
async def test_nothing_is_trimmed_that_a_restore_could_not_find(tmp_path, writers):
    """A restore finds topics by their manifests. The one of this topic cannot be stored for a while."""
    store = RefusingStore()
    daemon = Daemon(tmp_path, store, writers, target_bytes=1)
    for _ in range(3):
        writers[0].closed_segment()
    store.refused_prefix = TOPIC_MANIFESTS_PREFIX
    async with daemon.running():
        await daemon.round()
        assert daemon.archived()["orders-0"] == writers[0].bases[:4]
        assert writers[0].bases_on_disk[:4] == writers[0].bases[:4]
        store.refused_prefix = None
        await daemon.round()
        await daemon.round()
        assert len(writers[0].bases_on_disk) <= 2


@virtually
async def test_nothing_is_trimmed_of_a_partition_that_no_topic_manifest_counts(tmp_path, writers):
    """A daemon ended between recording what the topic began with and counting its partitions."""
    store = RefusingStore()
    daemon = Daemon(tmp_path, store, writers, target_bytes=1)
    key = TopicKey("cluster", "orders", writers[0].identified.topic_id)
    await daemon.archive.manifests.change_topic(key, lambda found: replace(found, remote_delete=False))
    for _ in range(3):
        writers[0].closed_segment()
    store.refused_prefix = TOPIC_MANIFESTS_PREFIX
    async with daemon.running():
        await daemon.round()
        assert daemon.archived()["orders-0"] == writers[0].bases[:4]
        assert writers[0].bases_on_disk[:4] == writers[0].bases[:4]
        store.refused_prefix = None
        await daemon.round()
        await daemon.round()
        assert len(writers[0].bases_on_disk) <= 2


@virtually
async def test_trim_with_a_backlog_asks_for_another_round(tmp_path, store, writers):
    """A trim makes an observation outdated; with more to upload the next round comes at once."""
    daemon = Daemon(tmp_path, store, writers, target_bytes=1)
    for _ in range(9):
        writers[0].closed_segment()

    async with daemon.running():
        await asyncio.sleep(5)
        assert len(daemon.archived()["orders-0"]) == 10
        assert writers[0].bases_on_disk == writers[0].bases[-1:] or len(writers[0].bases_on_disk) <= 2


@virtually
async def test_topic_manifest_counts_the_partitions(daemon, store):
    """The bucket tells the topic with its highest partition, written once and not in every round."""
    async with daemon.running():
        key = TopicKey("cluster", "orders", daemon.writers[0].identified.topic_id)
        assert (await daemon.archive.manifests.load_topic(key)).partition_count == 3
        await daemon.round()
        store.requests.clear()
        await daemon.round()
        assert not [each for _, each in store.requests if each.endswith("topic_manifest.json")]


@virtually
async def test_faults_of_topic_configuration_are_said_once(daemon):
    """A value of the broker's that cannot be parsed is reported when it is new."""
    daemon.broker.configs["orders"] = {"local.retention.ms": "soon"}
    with capture_logs() as logs:
        async with daemon.running():
            await daemon.round()
    assert [each["event"] for each in logs].count("topic configuration ignored in part") == 1
    assert len(daemon.archived()) == 3


@virtually
async def test_scan_that_takes_long_does_not_stop_the_uploads_meanwhile(daemon, store):
    """The leadership of the last scan holds for as long as the next scan may take."""
    store.latency_seconds = 10
    ask = daemon.broker.log_bounds

    async def slow(logs, *, leader_epochs):
        await asyncio.sleep(65)
        return await ask(logs, leader_epochs=leader_epochs)

    daemon.broker.log_bounds = slow
    for _ in range(9):
        daemon.writers[0].closed_segment()
    async with daemon.running():
        await asyncio.sleep(600)
        assert len(daemon.archived()["orders-0"]) == 10
    failures = {"topic": "orders", "error": "BrokerUnavailable"}
    assert daemon.value("tieringd_upload_failures_total", **failures) is None


@virtually
async def test_rounds_prolong_only_the_leadership_that_they_have_seen(daemon, store):
    """The uploads of a partition whose bounds cannot be read end, and those of the others go on."""
    store.latency_seconds = 3
    unseen, seen = daemon.writers[:2]
    for writer in (unseen, seen):
        for _ in range(29):
            writer.closed_segment()
    async with daemon.running():
        await asyncio.sleep(30)
        daemon.broker.bounds_errors[unseen.name] = broker_unavailable("log_bounds")
        await asyncio.sleep(600)
        assert 0 < len(daemon.archived()["orders-0"]) < len(daemon.archived()["orders-1"]) == 30
        daemon.broker.bounds_errors.clear()
        await asyncio.sleep(600)
        assert len(daemon.archived()["orders-0"]) == 30


@virtually
async def test_topic_that_left_the_disks_leaves_no_series(daemon):
    """A topic's counters go with its last partition, because topics come and go for years."""
    async with daemon.running():
        assert daemon.value("tieringd_uploads_total", topic="orders") == 3
        for writer in daemon.writers:
            del daemon.broker.epochs[writer.name]
            shutil.rmtree(writer.path)
        await daemon.round()
        await daemon.round()
        assert daemon.value("tieringd_uploads_total", topic="orders") is None


@virtually
async def test_partition_that_waits_for_an_operator_shows_in_status_and_metrics(daemon):
    """A waiting partition is counted by topic and reason, and the series goes when the wait ends."""
    writer, labels = daemon.writers[1], {"topic": "orders", "reason": "segment_unreadable"}
    writer.append(b"good")
    divergence = writer.append(b"lost")
    writer.roll()
    async with daemon.running():
        manifest = stored_manifest(daemon.store, writer)
        key = data_key(writer.identified, manifest.segments[1])
        data, _ = await daemon.store.get(key)
        await daemon.store.delete_many([key])
        writer.truncate(divergence)
        writer.begin_epoch(1)
        writer.roll()
        writer.closed_segment(b"another leader's")
        writer.drop_head()
        writer.drop_head()
        daemon.broker.epochs[writer.name] = 1
        for _ in range(4):
            await daemon.round()
        assert daemon.value("tieringd_partitions_waiting_for_operator", **labels) == 1
        wait = daemon.status(writer, 1).operator_wait
        assert (wait.base_offset, wait.last_offset) == (3, 3)
        assert daemon.reconciler.faults()["operator"] == 1

        await daemon.store.put(key, data, crc32c=crc32c(data))
        daemon.clock.now_ms += 10 * 60_000
        for _ in range(3):
            await daemon.round()
        assert daemon.value("tieringd_partitions_waiting_for_operator", **labels) is None
        assert daemon.status(writer, 1).operator_wait is None
        assert daemon.archived()["orders-1"] == [0, 3, 4]


@pytest.mark.parametrize("is_deleted", [True, False], ids=["the topic is deleted", "the daemon stops"])
@virtually
async def test_each_partition_manifest_has_a_topic_manifest_in_the_end(tmp_path, is_deleted):
    """A topic that is created and deleted at once, while its manifest cannot be stored, is still found."""
    store, writers = RefusingStore(), [LogWriter(tmp_path, "brief", 0)]
    store.refused_prefix = TOPIC_MANIFESTS_PREFIX
    writers[0].closed_segment()
    daemon = Daemon(tmp_path, store, writers)
    topic = topic_manifest_key(topic_key(writers[0].identified))
    async with daemon.running():
        assert manifest_key(writers[0].identified) in store.objects
        assert topic not in store.objects
        if is_deleted:
            del daemon.broker.epochs[writers[0].name]
            await daemon.round()
            store.refused_prefix = None
            await daemon.round()
            assert topic in store.objects
        store.refused_prefix = None
    assert topic in store.objects


@pytest.mark.parametrize(
    ("page", "step"),
    [
        pytest.param("docs/disk_full.md", "Lower what stays on the broker", id="full disk"),
        pytest.param("docs/migration.md", "Set the local target", id="migration"),
        pytest.param("docs/runbook.md", "shows what can be reclaimed. Lower", id="TieringdDiskLow"),
    ],
)
@virtually
async def test_setting_that_a_page_names_for_a_full_disk_trims(tmp_path, store, writers, page, step):
    """A page's first setting frees the broker's disk, with `retention_local_strict` at its default."""
    text = (Path(__file__).parents[3] / page).read_text()
    named = re.search(f"{re.escape(step)}[^`]*`([a-z.]+)`", text)
    assert named, step
    daemon = Daemon(tmp_path, store, writers, is_strict=False)
    async with daemon.running():
        await daemon.round()
        daemon.broker.configs["orders"] = {named[1]: "1"}
        for _ in range(3):
            daemon.clock.now_ms += 3_600_000
            await daemon.round()
        assert [writer.bases_on_disk[0] for writer in writers] == [3, 3, 3]
