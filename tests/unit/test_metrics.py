"""The list of metrics: names, labels, and what becomes of a partition's series."""

from __future__ import annotations

import math
import re
from operator import attrgetter
from pathlib import Path

import pytest
from cryptography import x509
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.certificate import key_and_certificate
from tieringd.metrics import Metrics
from tieringd.metrics.gateway import GatewayCollector
from tieringd.metrics.merged import NOTHING, MergedPage, added, figures_of
from tieringd.metrics.partition_figures import SERIES, PartitionFigures
from tieringd.model.partition import TopicPartition
from tieringd.policies.prices import Prices

GONE, KEPT = TopicPartition("orders", 12), TopicPartition("orders", 4)
PROCESS_NAMES = {
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds",
    "process_open_fds",
    "process_max_fds",
}
REDPANDA_NAMES = ("vectorized_ntp_archiver_pending", "redpanda_storage_", "redpanda_cloud_")


def labels_of(metric) -> set[str]:
    return set(metric._labelnames)


def all_of(metrics: Metrics) -> list:
    """Return every metric object that `Metrics` has as a field, or in a group of them."""
    groups = [getattr(value, "all", (value,)) for value in vars(metrics).values()]
    return [metric for group in groups for metric in group if hasattr(metric, "_labelnames")]


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return what a scrape of the registry finds."""
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_metric_is_in_the_registry_under_a_name_of_ours():
    """Names begin with tieringd_, except those that dashboards of Redpanda, or of any process, know."""
    metrics = Metrics()
    collected = list(metrics.registry.collect())
    families = [family for family in collected if family.name not in PROCESS_NAMES]
    assert {family.name for family in collected} >= PROCESS_NAMES
    for family in families:
        assert family.name.startswith(REDPANDA_NAMES) or re.fullmatch(r"tieringd_[a-z_]+", family.name)
        assert len(family.documentation) > 10


@pytest.mark.parametrize("metric", all_of(Metrics()), ids=lambda metric: metric._name)
def test_only_gauges_carry_the_partition(metric):
    """A counter or histogram with a partition in it would be a hundred thousand series."""
    if not isinstance(metric, Gauge):
        assert not labels_of(metric) & {"partition", "namespace"}
    if isinstance(metric, Counter):
        assert len(labels_of(metric)) <= 2


def test_two_daemons_in_one_process_have_metrics_of_their_own():
    """Each `Metrics` has its own registry, so nothing is counted twice or refused."""
    one, other = Metrics(), Metrics()
    one.uploads.labels("orders").inc()
    assert ("tieringd_uploads_total", (("topic", "orders"),)) in samples(one)
    assert ("tieringd_uploads_total", (("topic", "orders"),)) not in samples(other)


def test_metrics_go_to_the_registry_they_are_given():
    """A caller with a registry of its own finds everything in it."""
    registry = CollectorRegistry()
    Metrics(registry).led_partitions.set(7)
    assert registry.get_sample_value("tieringd_led_partitions") == 7


def test_forgotten_partition_leaves_no_series_of_any_gauge():
    """All series of the partition go, whichever gauge they belong to; its neighbour's stay as they are."""
    metrics = Metrics()
    metrics.partitions.show(GONE, figures(1))
    metrics.partitions.show(KEPT, figures(2))
    metrics.forget_partition(GONE)
    left = {key: value for key, value in samples(metrics).items() if dict(key[1]).get("partition")}
    assert {dict(labels)["partition"] for _, labels in left} == {"4"}
    assert list(left.values()) == [2] * len(SERIES)
    assert len(left) > 3


def figures(value: int) -> PartitionFigures:
    """Return figures that are all the same."""
    return PartitionFigures(**dict.fromkeys(SERIES, value))


def test_text_of_the_partitions_is_what_the_library_would_write():
    """The text is made by hand because there is much of it, and has the same names, labels and numbers."""
    metrics = Metrics()
    metrics.partitions.show(GONE, PartitionFigures(lag_seconds=1.5, pending_bytes=10**15, held_seconds=0.1))
    metrics.partitions.show(TopicPartition("a.topic_with-all", 0), PartitionFigures(seconds_to_loss=0))
    text = "".join(metrics.partitions.text())
    registry = CollectorRegistry()
    registry.register(metrics.partitions)

    def parsed(page: str) -> list[tuple]:
        return [
            (
                family.name,
                family.documentation,
                family.type,
                sorted((sorted(one.labels.items()), float(one.value)) for one in family.samples),
            )
            for family in text_string_to_metric_families(page)
        ]

    assert parsed(text) == parsed(generate_latest(registry).decode())
    assert 'tieringd_seconds_to_loss{partition="12",topic="orders"} +Inf' in text


@pytest.mark.parametrize("page", ["deploy/prometheus/scrape_partitions.yml", "docs/metrics.md"])
def test_number_of_series_of_a_partition_is_told_to_who_scrapes_them(page):
    """A scrape with more samples than its limit is refused as a whole."""
    text = (Path(__file__).parents[2] / page).read_text()
    assert f"{len(SERIES)} series for each partition" in text
    if told := re.search(r"more than some ([\d,]+) partitions", text):
        (limit,) = re.findall(r"sample_limit: (\d+)", text)
        assert int(told[1].replace(",", "")) * len(SERIES) < int(limit)


def test_default_page_of_ten_thousand_partitions_has_under_two_thousand_series():
    """The number of series does not grow with topics or partitions. Each topic has every counter."""
    pages = []
    for topics in (100, 1000):
        metrics = Metrics()
        for number in range(topics):
            for partition in range(10_000 // topics):
                metrics.partitions.show(TopicPartition(f"topic{number}", partition), figures(number))
            for counter in topic_counters(metrics):
                others = dict.fromkeys(labels_of(counter) - {"topic"}, "x")
                counter.labels(**{"topic": f"topic{number}"} | others).inc()
        page = generate_latest(metrics.default_page).decode()
        pages.append([line for line in page.splitlines() if not line.startswith("#")])
    few, many = map(len, pages)
    assert few == many < 2000
    topics = {line.split('topic="')[1].split('"')[0] for line in pages[1] if 'topic="' in line}
    assert topics == {f"topic{number}" for number in range(950, 1000)}, "the largest topics"


def topic_counters(metrics: Metrics) -> list[Counter]:
    return [one for one in all_of(metrics) if isinstance(one, Counter) and "topic" in labels_of(one)]


def test_sizes_of_a_topic_are_the_sums_of_its_partitions_under_both_names():
    """Redpanda's dashboards ask by their own names and labels."""
    metrics = Metrics()
    for number in range(3):
        metrics.partitions.show(
            TopicPartition("orders", number),
            PartitionFigures(archived_bytes=5, archived_segments=2, local_bytes=1),
        )
    metrics.upload_bytes.labels("orders").inc(7)
    found = samples(metrics)
    ours = (("topic", "orders"),)
    theirs = (("redpanda_namespace", "kafka"), ("redpanda_topic", "orders"))
    assert found["tieringd_topic_archive_bytes", ours] == 15
    assert found["tieringd_topic_archive_segments", ours] == 6
    assert found["tieringd_topic_local_bytes", ours] == 3
    assert found["redpanda_cloud_storage_cloud_log_size", theirs] == 15
    assert found["redpanda_cloud_storage_segments", theirs] == 6
    assert found["redpanda_cloud_storage_uploaded_bytes", theirs] == 7


def test_number_of_topics_with_series_can_be_chosen():
    """The number of topics may be zero."""
    metrics = Metrics()
    for name in ("a", "b", "c"):
        metrics.partitions.show(TopicPartition(name, 0), PartitionFigures(archived_bytes=1))
    for count in (2, 0):
        metrics.max_topics = count
        topics = {
            dict(labels).get("topic")
            for name, labels in samples(metrics)
            if name.startswith("tieringd_topic")
        }
        assert topics == set("ab"[:count])


def test_redpandas_totals_are_what_ours_are():
    """Counters have no `_total` where Redpanda has none, and errors have a direction."""
    metrics = Metrics()
    for operation, outcome in (
        ("put", "ok"),
        ("get", "ok"),
        ("get_range", "StoreFull"),
        ("put", "StoreFull"),
    ):
        metrics.record_store_request(operation, outcome, 0.1, 1)
    metrics.record_store_request("get", "ObjectNotFound", 0.1, 1)
    metrics.cache.hits.labels("chunk").inc(3)
    found = samples(metrics)
    assert found["redpanda_cloud_storage_cache_op_hit", ()] == 3
    assert found["redpanda_cloud_client_uploads", ()] == 1
    assert found["redpanda_cloud_client_downloads", ()] == 1
    assert found["redpanda_cloud_client_not_found", ()] == 1
    for direction in ("rx", "tx"):
        assert found["redpanda_cloud_storage_errors_total", (("redpanda_direction", direction),)] == 1


def test_cost_of_the_store_is_what_its_prices_say():
    """Every attempt counts, a listing costs as a write does, and a day of storage is a part of a month."""
    metrics = Metrics()
    for operation in ("put", "put", "list_page", "get", "head"):
        metrics.record_store_request(operation, "ok", 0.1, 1)
    metrics.partitions.show(KEPT, PartitionFigures(archived_bytes=3 << 30))
    assert not [name for name, _ in samples(metrics) if "dollars" in name], "without prices there is none"
    metrics.watch_cost(Prices("", "USD", storage_gib_month=10, writes_1000=1000, reads_1000=500))
    found = samples(metrics)
    assert found["tieringd_store_request_cost_dollars_total", (("kind", "write"),)] == 3
    assert found["tieringd_store_request_cost_dollars_total", (("kind", "read"),)] == 1
    assert found["tieringd_store_storage_cost_dollars_per_day", ()] == pytest.approx(1)


def test_only_the_configuration_in_use_is_shown():
    """The hash of the configuration before a reload has no series."""
    metrics = Metrics()
    metrics.health.show_config("one")
    metrics.health.show_config("two")
    assert [labels for name, labels in samples(metrics) if name == "tieringd_config_info"] == [
        (("hash", "two"),)
    ]


@pytest.mark.parametrize(
    ("field", "name", "labels"),
    [
        ("followed_partitions", "tieringd_followed_partitions", set()),
        ("upload_share", "tieringd_upload_share_ratio", set()),
        ("paused_topics", "tieringd_paused_topics", set()),
        ("pinned_bytes", "tieringd_pinned_bytes", set()),
        ("pinned_segments", "tieringd_pinned_segments", set()),
        ("pin_failures", "tieringd_pin_failures", set()),
        ("pins_given_up", "tieringd_pins_given_up", set()),
        ("replaced_offsets", "tieringd_archive_replaced_offsets", {"topic"}),
        ("upload_shares", "tieringd_upload_shares", set()),
        ("upload_controller_error", "tieringd_upload_controller_error", set()),
        ("upload_backlog_bytes", "tieringd_upload_backlog_bytes", set()),
        ("upload_held_seconds", "tieringd_upload_held_seconds", {"by"}),
        ("degraded_brokers", "tieringd_degraded_brokers", set()),
        ("producers_held_back", "tieringd_producers_held_back", set()),
        ("ballast.size_bytes", "tieringd_ballast_bytes", set()),
        ("ballast.wanted_bytes", "tieringd_ballast_wanted_bytes", set()),
    ],
)
def test_metric_that_alerts_and_dashboards_name_keeps_its_name(field, name, labels):
    """A name is an interface: rules and dashboards of operators hold it."""
    metric = attrgetter(field)(Metrics())
    assert metric._name == name
    assert labels_of(metric) == labels


@pytest.mark.parametrize("kind", ["disk", "cache_disk"])
def test_disk_has_the_same_values_under_both_names_until_it_is_forgotten(kind):
    """Dashboards of Redpanda go on working; a disk that is gone has no series, and its neighbour's stay."""
    metrics = Metrics()
    gauges = getattr(metrics, kind)
    gauges.set("/a", total_bytes=100, free_bytes=7, state=1)
    gauges.set("/b", total_bytes=50, free_bytes=50, state=0)
    for prefix in (f"redpanda_storage_{kind}", f"tieringd_{kind}"):
        for name, values in (
            ("total_bytes", (100, 50)),
            ("free_bytes", (7, 50)),
            ("free_space_alert", (1, 0)),
        ):
            found = samples(metrics)
            assert tuple(found[f"{prefix}_{name}", (("directory", one),)] for one in ("/a", "/b")) == values
    gauges.forget("/a")
    assert {dict(labels).get("directory") for _, labels in samples(metrics)} == {"/b", None}


def test_metrics_without_labels_begin_at_zero():
    """A counter of nothing is 0 and not absent, so that a rule that compares with it works from the start."""
    found = samples(Metrics())
    for name in ("pin_failures_total", "pins_given_up_total", "pinned_bytes", "upload_backlog_bytes"):
        assert found[f"tieringd_{name}", ()] == 0
    totals = {name: value for (name, _), value in found.items() if name.startswith("tieringd_daemon_")}
    assert totals.pop("tieringd_daemon_seconds_to_loss") == math.inf
    assert set(totals.values()) == {0}
    assert len(totals) == 14 + len(topic_counters(Metrics()))


def test_totals_of_the_daemon_are_what_its_series_come_to():
    """Sums of counters, the oldest wait, and the nearest loss of what is waiting; the rest is left out."""
    metrics = Metrics()
    for topic, partition, pending, lag, loss in (("a", 0, 10, 30, 500), ("b", 1, 5, 70, 900)):
        metrics.partitions.show(
            TopicPartition(topic, partition),
            PartitionFigures(pending_bytes=pending, lag_seconds=lag, seconds_to_loss=loss),
        )
    metrics.partitions.show(
        TopicPartition("held", 0), PartitionFigures(held_bytes=7, held_seconds=20, seconds_to_loss=400)
    )
    metrics.partitions.show(TopicPartition("idle", 0), PartitionFigures(seconds_to_loss=1))
    metrics.gaps.labels("a").inc()
    metrics.gaps.labels("b").inc(2)
    metrics.trim_failures.labels("a", "BrokerDenied").inc()
    metrics.trim_failures.labels("a", "LeadershipChanged").inc()
    for outcome in ("ok", "ObjectNotFound", "PreconditionFailed", "cancelled", "timeout", "StorageDenied"):
        metrics.record_store_request("put", outcome, 0.1, 1)
    metrics.cache.corrupt.labels("file").inc()
    for reason in ("full", "enospc"):
        metrics.cache.put_failures.labels(reason).inc()
    found = samples(metrics)

    def total(name: str) -> float:
        return found[f"tieringd_daemon_{name}", ()]

    assert (total("upload_pending_bytes"), total("upload_lag_seconds")) == (15, 70)
    assert (total("seconds_to_loss"), total("held_by_transaction_seconds")) == (400, 20)
    assert (total("archive_gaps_total"), total("trims_denied_total")) == (3, 1)
    assert (total("store_requests_total"), total("store_failures_total")) == (6, 2)
    assert total("cache_faults_total") == 2


def test_no_series_tells_when_a_counter_began():
    """Such series would double the counters, and no rule reads them."""
    metrics = Metrics()
    metrics.uploads.labels("orders").inc()
    metrics.record_store_request("put", "ok", 0.1, 1)
    assert not [name for name, _ in samples(metrics) if name.endswith("_created")]


def test_end_of_the_store_s_credentials_has_a_series_where_there_is_one():
    """Keys without an end have none: 0 would be an end long ago."""
    metrics, ends = Metrics(), [None, 4000.5]
    metrics.watch_credentials(lambda: ends[0])
    name = ("tieringd_store_credentials_expiry_timestamp_seconds", ())
    assert name not in samples(metrics)
    ends.pop(0)
    assert samples(metrics)[name] == 4000.5


def test_end_of_a_certificate_is_read_again_when_its_file_changes(tmp_path):
    """A renewed file is seen without a restart, and one that cannot be read counts as ended."""
    certificates = [key_and_certificate(days=days)[1] for days in (1, 2)]
    file, metrics = tmp_path / "shown.pem", Metrics()
    metrics.watch_certificates(lambda: [file])

    def end() -> float:
        return samples(metrics)["tieringd_certificate_expiry_timestamp_seconds", (("file", str(file)),)]

    assert end() == 0
    for number, certificate in enumerate(certificates):
        renewed = tmp_path / f"renewed-{number}"
        renewed.write_bytes(certificate)
        renewed.replace(file)
        assert end() == x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()
    file.write_text("no certificate")
    assert end() == 0


def test_forgetting_a_partition_keeps_the_counters_of_its_topic():
    """The counts stay when a partition moves to another broker."""
    metrics = Metrics()
    metrics.uploads.labels("orders").inc(5)
    metrics.forget_partition(GONE)
    assert samples(metrics)["tieringd_uploads_total", (("topic", "orders"),)] == 5


def test_forgetting_an_unknown_partition_is_nothing():
    """A partition that never had a series can be forgotten, once and again."""
    metrics = Metrics()
    before = samples(metrics).keys()
    metrics.forget_partition(GONE)
    metrics.forget_partition(GONE)
    assert samples(metrics).keys() == before


def test_store_request_is_counted_timed_and_weighed():
    """One attempt adds one to its outcome, its seconds to the histogram and its bytes to the operation."""
    metrics = Metrics()
    metrics.record_store_request("put", "ok", 0.3, 1000)
    metrics.record_store_request("put", "timeout", 2.0, 24)
    metrics.record_store_request("get", "ok", 0.001, 5)
    found = samples(metrics)

    def value(name: str, **labels: str) -> float:
        return found[f"tieringd_store_{name}", tuple(sorted(labels.items()))]

    assert value("requests_total", operation="put", outcome="ok") == 1
    assert value("requests_total", operation="put", outcome="timeout") == 1
    assert value("bytes_total", operation="put") == 1024
    assert value("bytes_total", operation="get") == 5
    assert value("request_seconds_count", operation="put") == 2
    assert value("request_seconds_sum", operation="put") == pytest.approx(2.3)
    assert value("request_seconds_bucket", operation="put", le="0.25") == 0
    assert value("request_seconds_bucket", operation="put", le="0.5") == 1
    assert value("request_seconds_bucket", operation="put", le="2.5") == 2


class Gateway:
    """The counts and the state of a gateway."""

    def __init__(self) -> None:
        self.open_connections = 3
        self.buffered_bytes = 4096
        self.counts = {name: 7 + number for number, name in enumerate(GatewayCollector.COUNTS)}


def test_gateway_is_read_when_a_scrape_comes():
    """The gateway's counts are counters and its state gauges. An unwatched gateway has no series."""
    metrics = Metrics()
    before = samples(metrics).keys()
    gateway = Gateway()
    metrics.watch_gateway(gateway)
    gateway.open_connections = 5
    found = {key: value for key, value in samples(metrics).items() if key not in before}
    refused = "tieringd_gateway_refused_connections_total"
    reasons = GatewayCollector.REFUSALS.items()
    assert {dict(labels)["reason"]: value for (name, labels), value in found.items() if name == refused} == {
        reason: gateway.counts[name] for reason, name in reasons
    }
    assert {name: value for (name, labels), value in found.items() if not labels} == {
        "tieringd_gateway_connections": 5,
        "tieringd_gateway_buffered_bytes": 4096,
        **{f"tieringd_gateway_{name}_total": gateway.counts[name] for name in GatewayCollector.COUNTERS},
    }


def test_groups_of_an_endpoint_are_those_of_all_its_workers():
    """Groups and members are added up. Each worker sees all endpoints: the most that one sees is shown."""
    figures = NOTHING
    for number in (1, 2):
        worker = Metrics()
        worker.groups.groups.set(number)
        worker.groups.members.set(10 * number)
        worker.groups.endpoints.set(4 - number)
        figures = added(figures, figures_of((worker.default_page, worker.by_topic)))
    page = generate_latest(MergedPage(Metrics().default_page, lambda: figures)).decode()
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    names = ("groups", "group_members", "live_endpoints")
    assert [found[f"tieringd_endpoint_{name}"] for name in names] == [3, 30, 3]


def test_connections_to_the_store_are_counted_over_all_processes():
    """Each process has connections of its own: what is under way is compared with all of them."""
    figures, daemon = NOTHING, Metrics()
    workers = [Metrics(), Metrics()]
    for each in (daemon, *workers):
        each.store_in_flight.set(15)
        each.store_connections.set(20)
    for worker in workers:
        figures = added(figures, figures_of((worker.default_page, worker.by_topic)))
    page = generate_latest(MergedPage(daemon.default_page, lambda: figures)).decode()
    assert "\ntieringd_store_requests_in_flight 45.0\n" in page
    assert "\ntieringd_store_connections_limit 60.0\n" in page


def test_forgotten_topic_leaves_no_series_of_any_counter():
    """All that was counted for a topic goes, by error as well; its neighbour's stays as it is."""
    metrics = Metrics()
    by_topic = [one for one in all_of(metrics) if "topic" in labels_of(one) - {"partition"}]
    counters = [one for one in by_topic if "partition" not in labels_of(one)]
    for counter in counters:
        for topic in ("gone", "kept"):
            counter.labels(**({"topic": topic} | dict.fromkeys(labels_of(counter) - {"topic"}, "x"))).inc()
    metrics.forget_topic("gone")
    metrics.forget_topic("gone")
    topics = [dict(labels)["topic"] for _, labels in samples(metrics) if "topic" in dict(labels)]
    assert len(counters) > 15
    assert set(topics) == {"kept"}


def test_totals_do_not_fall_when_a_topic_is_forgotten():
    """A total that falls would look like a restart, and rules would count what is left as new."""
    metrics = Metrics()
    counters = topic_counters(metrics)
    for counter in counters:
        for topic, count in (("gone", 5), ("kept", 3)):
            labels = {"topic": topic} | dict.fromkeys(labels_of(counter) - {"topic"}, "BrokerDenied")
            counter.labels(**labels).inc(count)
    before = totals_of(metrics)
    assert before["tieringd_daemon_archive_gaps_total"] == before["tieringd_daemon_trims_denied_total"] == 8
    metrics.forget_topic("gone")
    assert totals_of(metrics) == before
    metrics.gaps.labels("gone").inc()
    metrics.forget_topic("gone")
    assert totals_of(metrics)["tieringd_daemon_archive_gaps_total"] == 9


def totals_of(metrics: Metrics) -> dict[str, float]:
    """Return the counters of the default page that sum up counters of topics, under both kinds of names."""
    return {
        name: value
        for (name, labels), value in samples(metrics).items()
        if name.startswith(("tieringd_daemon_", "redpanda_cloud_storage_")) and not labels
    }
