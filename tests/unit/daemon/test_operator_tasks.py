"""What needs a person: each fault has its task, with a command, and the urgent ones come first."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest

from tieringd.daemon.operator_tasks import SETTLED_SECONDS, Seen, tasks
from tieringd.metrics.partition_figures import PartitionFigures
from tieringd.model.partition import TopicPartition

AWAY = "put meta/x: gave up after 3 attempts"


@dataclass(frozen=True)
class Line:
    """A partition of the overview."""

    topic: str
    partition: int
    fault: str


@pytest.fixture
def found(metrics):
    """Give a function that returns the tasks of a daemon, as pairs of what and command."""

    def find(**changes):
        figures = metrics.partitions.known()
        seen = Seen(SETTLED_SECONDS, {}, [], figures, metrics.partitions.sums(), {}, (), 0.0)
        return [(one.what, one.command) for one in tasks(replace(seen, **changes), metrics)]

    return find


def disk_full(metrics):
    metrics.disk.free_bytes[1].labels("/logs").set(5e9)
    metrics.disk.alert[1].labels("/logs").set(2)


def disk_low(metrics):
    metrics.disk.alert[1].labels("/logs").set(1)


def held_back_for_another(metrics):
    metrics.producers_held_back.set(1)
    metrics.degraded_brokers.set(1)


def partition(**figures):
    return lambda metrics: metrics.partitions.show(TopicPartition("orders", 3), PartitionFigures(**figures))


FAULTS = {
    "disk full": (disk_full, "the disk of /logs is out of space, 5 GB free", "tieringd space plan"),
    "disk low": (disk_low, "the disk of /logs is low on space", "tieringd space plan"),
    "held back for another": (
        held_back_for_another,
        "another broker is out of disk space",
        "tieringd status",
    ),
    "held back": (lambda metrics: metrics.producers_held_back.set(1), "still held back", "journalctl"),
    "nothing to reclaim": (
        lambda metrics: metrics.space.short_bytes.labels("/logs").set(3e6),
        "the logs in /logs are 3 MB over their area",
        "tieringd space plan",
    ),
    "no ballast": (lambda metrics: metrics.ballast.wanted_bytes.set(1), "ballast", "space ballast show"),
    "loss is near": (
        partition(pending_bytes=1, seconds_to_loss=90.0),
        "in 1 min 30 s the broker deletes data of orders-3",
        "kafka-configs.sh --alter",
    ),
    "loss behind a transaction is near": (
        partition(held_bytes=1, seconds_to_loss=90.0),
        "in 1 min 30 s the broker deletes data of orders-3",
        "kafka-configs.sh --alter",
    ),
    "loss is unknown": (
        lambda metrics: metrics.unknown_loss_partitions.set(3),
        "the manifests of 3 partitions could not be read",
        "kafka-configs.sh --alter",
    ),
    "lost": (
        partition(gap_offsets=7),
        "7 offsets were lost before they could be copied: orders-3",
        "describe",
    ),
    "late": (
        partition(pending_bytes=1, lag_seconds=1000.0),
        "orders-3 has waited for 16 min 40 s",
        "tieringd explain orders 3",
    ),
    "transaction": (
        partition(held_seconds=7200.0),
        "an open transaction has held orders-3 back for 2 h",
        "kafka-transactions.sh find-hanging",
    ),
    "reload": (lambda metrics: metrics.health.reload_succeeded.set(0), "reload", "tieringd config check"),
    "no pins": (
        lambda metrics: metrics.health.pins_available.labels("/logs").set(0),
        "segments in /logs are not pinned",
        "broker.pin_directory",
    ),
    "archive": (
        lambda metrics: metrics.scrub.faults.labels("missing").set(2),
        "2 faults in the archive",
        "tieringd archive scrub",
    ),
    "stray pins": (lambda metrics: metrics.stray.pins.set(4), "4 pinned segments", "journalctl"),
    "share groups": (lambda metrics: metrics.health.share_groups_unknown.set(1), "share groups", "doctor"),
    "clock": (lambda metrics: metrics.clock.is_doubted.set(1), "the time is not certain", "timedatectl"),
    "loop": (
        lambda metrics: metrics.health.succeeded_at.labels("space").set(time.time() - 1000),
        "the loop space has not done its work for 16 min",
        "journalctl",
    ),
}


def test_daemon_that_is_well_asks_for_nothing(found, metrics):
    """Nothing is to be done for durable partitions, a disk with room, and pins and loops that work."""
    metrics.partitions.show(TopicPartition("orders", 0), PartitionFigures(seconds_to_loss=60.0))
    metrics.disk.alert[1].labels("/logs").set(0)
    metrics.health.pins_available.labels("/logs").set(1)
    metrics.health.loop_succeeded("space")
    metrics.pinned_bytes.set(100)
    assert found() == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_one_task_with_its_command(found, metrics, name):
    """The task names the fault with its place, and has the first command."""
    make, what, command = FAULTS[name]
    make(metrics)
    ((said, typed),) = found()
    assert what in said
    assert command in typed


@pytest.mark.parametrize("reason", ["store", "round", "bookkeeping", "log_directory"])
def test_what_keeps_the_daemon_from_being_ready_comes_first(found, metrics, reason):
    """Each of these tasks has its cause and its consequence. Lateness is no task beside them."""
    disk_full(metrics)
    partition(pending_bytes=1, lag_seconds=1000.0)(metrics)
    first, second = found(reasons={reason: AWAY}, oldest_upload_seconds=1000.0)
    assert first[0].endswith(f": {AWAY}")
    assert len(first[0]) > len(AWAY) + 20
    assert first[1]
    assert "out of space" in second[0]


def test_workers_that_do_not_serve_are_a_task_once_the_daemon_has_settled(found):
    """Workers take seconds to start. Their end makes no upload late, so a late upload is a task beside it."""
    fault = "none of the 2 workers of the gateway serves clients"
    assert found(uptime_seconds=10.0, gateway_fault=fault) == []
    first, second = found(gateway_fault=fault, oldest_upload_seconds=1000.0)
    assert first[0] == f"the gateway's clients are not served: {fault}"
    assert "an upload has been under way" in second[0]


def test_start_is_a_task_only_when_it_does_not_end(found, metrics):
    """The first minutes of a daemon need no person; a start that goes on for five minutes does."""
    starting = {"starting": "the first round of reconciliation has not ended yet"}
    metrics.unknown_loss_partitions.set(3)
    assert found(uptime_seconds=10.0, reasons=starting) == []
    (said, _), (unknown, _) = found(reasons=starting)
    assert "the start does not end" in said
    assert "the manifests of 3 partitions" in unknown


def test_ballast_of_a_full_disk_is_let_go_first(found, metrics):
    """The first task of a full disk is to release the ballast. A ballast that is gone is no task then."""
    disk_full(metrics)
    metrics.ballast.wanted_bytes.set(1)
    metrics.ballast.size_bytes.set(1)
    assert found()[0][1].startswith("tieringd space ballast release")
    metrics.ballast.size_bytes.set(0)
    ((_, typed),) = found()
    assert typed.startswith("tieringd space plan")


def test_pins_are_a_task_while_uploads_do_not_go_on(found, metrics):
    """A pin that outlives its segment for a moment is normal."""
    metrics.pinned_bytes.set(7e6)
    assert found() == []
    assert "only pins hold 7 MB" in found(reasons={"store": AWAY})[1][0]


def test_upload_that_hangs_is_a_task(found):
    """A hanging upload is a task of its own if nothing else says that the store is away."""
    ((said, _),) = found(oldest_upload_seconds=1000.0)
    assert "16 min 40 s" in said


def test_log_directory_that_is_gone_is_one_task(found):
    """The same fault is not told twice; other paths that cannot be read have tasks of their own."""
    gone = "the log directory /logs does not exist"
    found_tasks = found(
        reasons={"log_directory": gone}, problems={"/logs": gone, "/other/x-0": "Permission denied"}
    )
    assert [one.split(":")[0] for one, _ in found_tasks] == [
        "nothing in this log directory is uploaded or trimmed",
        "/other/x-0 cannot be read",
    ]


def test_topic_that_is_left_out_is_no_path(found):
    """There is no directory to look at; the doctor says which permission is missing."""
    assert found(problems={"topic orders": "the broker refuses its settings"}) == [
        ("topic orders is left out: the broker refuses its settings", "tieringd doctor")
    ]


def test_tasks_of_many_partitions_are_few(found):
    """Some by name, and how many there are besides."""
    lines = [Line("orders", number, "corrupt") for number in range(100)]
    found_tasks = found(partitions=lines)
    assert len(found_tasks) == 6
    assert found_tasks[-1][0].startswith("95 more partitions")


def test_partition_whose_steps_fail_is_a_task(found):
    """A partition that is not archived needs a person; one whose store fails is told of with the store."""
    ((said, typed),) = found(partitions=[Line("orders", 3, "other"), Line("orders", 4, "store")])
    assert said.startswith("orders-3: the archiver's last step failed")
    assert "journalctl" in typed


def test_paused_topics_are_one_task_whose_command_names_the_first(found):
    """A command that an operator can type as it stands is worth more than a placeholder."""
    assert found(paused_topics=("orders", "payments")) == [
        ("paused topics: orders, payments", "tieringd topic resume orders")
    ]
