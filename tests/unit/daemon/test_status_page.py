"""The overview of a daemon, the status page, and the folded errors on it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest
import structlog

from tests.fakes.archive import archive_in, reconciler_of, tiered_config
from tests.fakes.log_writer import LogWriter
from tests.fakes.memory_store import MemoryStore
from tests.fakes.uploads import settle
from tieringd.archiving.partition_status import PartitionFault, PartitionStatus
from tieringd.cli.status import screen
from tieringd.daemon.overview import MOST_PARTITIONS, DaemonFacts, OverviewMaker, PartitionLine
from tieringd.daemon.recent_errors import RecentErrors, remembering
from tieringd.daemon.status_page import page, scaled
from tieringd.daemon.workers.worker_status import WorkerStatus
from tieringd.metrics.partition_figures import PartitionFigures
from tieringd.model.human_units import duration, size
from tieringd.model.partition import NO_TOPIC_ID, Leadership, TopicIdPartition, TopicPartition

VOID = {"meta", "rect", "br"}
LINE = PartitionLine("orders", 0, "", "segment 3 is active", 0.0, 0, None, (0, 50), (40, 100))


class Parsed(HTMLParser):
    """The elements of a page: that they are closed in order, their ids, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.ids, self.text = [], [], {}, ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids |= {dict(attrs)["id"]: tag} if "id" in dict(attrs) else {}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


class Space:
    """A space manager that has not measured yet."""

    reports = ()


class Writes:
    """A store with one write under way."""

    def writes_in_flight(self, now):
        return [("data/orders/0.log", 2.5, 3)]


class Statuses:
    """A reconciler with partitions of its own choosing."""

    snapshot, problems, paused_topics = None, {}, ()

    def __init__(self, statuses, reasons=None):
        self._statuses, self._reasons = statuses, reasons or {"store": ""}

    def statuses(self):
        return self._statuses

    def readiness(self):
        return self._reasons


def led(number, topic="orders"):
    return Leadership(TopicIdPartition("cluster", topic, NO_TOPIC_ID, number), 0)


class StoppedWorkers:
    """A pool whose only worker waits to be started."""

    fault = "none of the 1 workers of the gateway serves clients; worker 0 was the last to end, by SIGKILL"

    def status(self):
        return (WorkerStatus(0, None, False, 0, 3.0, 4, "by SIGKILL"),)


def maker(metrics, reconciler, errors=None, workers=None):
    return OverviewMaker(
        DaemonFacts("aws bucket", "kafka"),
        metrics=metrics,
        reconciler=reconciler,
        store=Writes(),
        space=Space(),
        errors=errors or RecentErrors(),
        workers=workers,
    )


@pytest.fixture
def writer(tmp_path):
    """Give a partition with a closed segment, and a record after it."""
    writer = LogWriter(tmp_path)
    writer.closed_segment()
    writer.append(b"d")
    return writer


async def test_overview_of_a_daemon_says_what_its_metrics_say(tmp_path, broker, metrics, log):
    """One figure, one source: what the page shows is what a scrape finds."""
    archive = archive_in(MemoryStore())
    reconciler = reconciler_of(tiered_config(tmp_path, interval_ms=1), archive, broker, metrics=metrics)
    run = asyncio.create_task(reconciler.run())
    await log.said("segment durable")
    await reconciler.next_scan()
    await settle()
    found = maker(metrics, reconciler).make()
    reconciler.stop()
    await run
    value = metrics.registry.get_sample_value
    assert found.led_partitions == 1
    assert found.archived_bytes == value("tieringd_daemon_archive_bytes") > 0
    assert found.local_bytes == value("tieringd_daemon_local_log_bytes") > 0
    assert found.pending_segments == value("tieringd_daemon_upload_pending_segments") == 0
    (line,) = found.partitions
    assert (line.remote, line.local) == ((0, 3), (0, 4))
    assert line.because == "segment 3 is active"
    Parsed(page(found))


def test_ten_thousand_partitions_are_twenty_lines_the_worst_first(metrics):
    """
    A fault that stays comes first, then one that may end, then the nearest loss, then the oldest wait.

    Waits of one minute stay in order from one look to the next. The page does not grow.
    """
    statuses = {led(number): PartitionStatus() for number in range(10_000)}
    statuses[led(77)] = PartitionStatus(fault="batch CRC", fault_kind=PartitionFault.CORRUPT)
    statuses[led(9000)] = PartitionStatus(fault="no answer", fault_kind=PartitionFault.STORE)
    for number in range(10_000):
        figures = PartitionFigures(lag_seconds=number, pending_bytes=1)
        loss = 60.0 if number == 5 else float("inf")
        metrics.partitions.show(TopicPartition("orders", number), replace(figures, seconds_to_loss=loss))
    found = maker(metrics, Statuses(statuses)).make()
    assert len(found.partitions) == MOST_PARTITIONS
    assert [one.partition for one in found.partitions][:5] == [77, 9000, 5, 9960, 9961]
    assert found.seconds_to_loss == 60
    assert found.faults == {"corrupt": 1, "store": 1}
    assert [one.what.split(":")[0] for one in found.tasks] == [
        "in 1 min the broker deletes data of orders-5 that is not durable",
        "orders-77",
        "a closed segment of orders-9999 has waited for 2 h 46 min",
    ]
    assert len(page(found)) < 50_000


def test_loss_of_partitions_whose_manifest_is_not_known_is_not_called_far(metrics):
    """The page and the terminal say for how many partitions nothing is known, and what the others have."""
    metrics.unknown_loss_partitions.set(3)
    seen = maker(metrics, Statuses({})).make()
    text = "\n".join(screen(seen))
    assert "until loss: unknown for 3 partitions, for the others not near; archive" in text
    assert "waiting at least 0 B in 0 segments" in text
    assert "unknown for 3 partitions, for the others not near" in page(seen)
    metrics.unknown_loss_partitions.set(0)
    assert "until loss: not near; archive" in "\n".join(screen(maker(metrics, Statuses({})).make()))


def test_reason_that_many_partitions_share_is_told_once_on_a_terminal(metrics):
    """An outage is the reason of each, and there is one screen."""
    away = PartitionStatus(fault="the bucket is away", fault_kind=PartitionFault.STORE)
    statuses = {led(number): away for number in range(3)} | {led(3): PartitionStatus()}
    for number in range(4):
        metrics.partitions.show(TopicPartition("orders", number), PartitionFigures())
    lines = list(screen(maker(metrics, Statuses(statuses)).make()))
    assert lines.count("    store: the bucket is away") == 1
    assert lines.count("    as above") == 2


def test_workers_that_do_not_serve_make_the_state_bad(metrics):
    """Page and terminal say that the daemon is not ready, and why. The archiving has no reason of its own."""
    found = maker(metrics, Statuses({}), workers=StoppedWorkers()).make()
    assert found.reasons == {"gateway_workers": StoppedWorkers.fault}
    assert found.tasks == ()
    assert "Not ready" in page(found)
    first, *lines = screen(found)
    assert "NOT READY" in first
    assert "by SIGKILL" in " ".join(lines)


def test_page_is_whole_and_loads_nothing(metrics):
    """Text from outside is escaped, and no element runs a script or asks for another address."""
    errors = RecentErrors()
    errors(
        None,
        "error",
        {"event": "<script>alert(1)</script>", "error": "a & b", "topic": "<b>", "partition": 1},
    )
    statuses = {led(0): PartitionStatus(fault="</td><script>", fault_kind=PartitionFault.OTHER)}
    found = Parsed(page(maker(metrics, Statuses(statuses, {"store": "<img src=x>"}), errors).make()))
    assert not {tag for tag, _ in found.tags} & {"script", "link", "img", "iframe", "form", "a"}
    assert not [attributes for _, attributes in found.tags if {"src", "href"} & attributes.keys()]
    assert {"state", "figures", "tasks", "partitions", "disks", "uploads", "errors"} == found.ids.keys()
    for part in ("Not ready", "<img src=x>", "<script>alert(1)</script>", "a & b", "</td><script>"):
        assert part in found.text


def test_ranges_are_drawn_to_one_scale():
    """Both bars share one axis; where nothing is, there is no length."""
    assert scaled(LINE) == ((0.0, 0.5), (0.4, 0.6))
    assert scaled(replace(LINE, remote=(0, 0))) == ((0.0, 0.0), (0.4, 0.6))
    assert scaled(replace(LINE, remote=(0, 0), local=(0, 0))) == ((0.0, 0.0), (0.0, 0.0))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.4, "0.4 s"), (59, "59 s"), (61, "1 min 1 s"), (3600, "1 h"), (90_061, "1 d 1 h")],
)
def test_durations_have_two_units_at_most(seconds, text):
    """A person reads them at night."""
    assert duration(seconds) == text


def test_sizes_are_decimal():
    """Sizes have decimal units, as the other commands print them."""
    assert [size(one) for one in (0, 999, 1500, 10**13)] == ["0 B", "999 B", "1.5 kB", "10 TB"]


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self):
        return self.now


def test_repeats_are_one_line_with_their_number():
    """240 of the same in five minutes are one, with the last example, its place and a remedy."""
    clock = Clock()
    errors = RecentErrors(clock)
    for number in range(240):
        clock.now += 1
        errors(
            None, "warning", {"event": "archiver step failed", "error": f"e{number}", "partition": "orders-1"}
        )
    errors(None, "info", {"event": "segment durable"})
    (found,) = errors.folded()
    assert (found.times, found.example, found.where) == (240, "e239", "orders-1")
    assert "tieringd explain" in found.remedy


def test_errors_are_forgotten_after_five_minutes_and_bounded():
    """An error of yesterday is not recent, and a thousand texts do not stay in memory."""
    clock = Clock()
    errors = RecentErrors(clock)
    for number in range(1000):
        errors(None, "error", {"event": f"e{number}", "hint": "mend it"})
    assert len(errors.folded()) == 100
    assert errors.folded()[0].remedy == "mend it"
    clock.now += 301
    assert errors.folded() == []


def test_loggers_that_are_bound_already_are_remembered_too():
    """Each part of the daemon binds its logger when it is made; afterwards nothing is remembered."""
    errors, bound = RecentErrors(), structlog.get_logger().bind(topic="orders")
    with remembering(errors):
        bound.warning("trim refused", reason="no")
    bound.warning("later")
    assert [one.event for one in errors.folded()] == ["trim refused"]


def test_overview_is_plain_data(metrics):
    """The overview is sent as JSON, so it holds nothing else."""
    found = maker(metrics, Statuses({led(0): PartitionStatus()})).make()
    assert json.loads(json.dumps(asdict(found)))["uploads"] == [
        {"key": "data/orders/0.log", "seconds": 2.5, "attempts": 3}
    ]
