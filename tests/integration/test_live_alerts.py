"""Alert rules on a real Prometheus that scrapes a real daemon, while the fault is made."""

# Long: Prometheus evaluates the rules by real time, and a broker deletes by age.

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import yaml
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AclOperation, ResourceType

from tests.e2e.log_files import RECORDS, add_segments, segment_path, write_partition
from tests.e2e.sample_topics import SEGMENTS
from tests.support.aws_metadata_server import CredentialService
from tests.support.certificate import write_certificate
from tests.support.cluster import cluster_admin
from tests.support.daemon import (
    Daemon,
    directory_config,
    endpoint_properties,
    run_well,
    running_daemon,
    write_config,
)
from tests.support.fault_proxy import RedateAnswer, StallRequest, fault_proxy
from tests.support.gateway_clients import read_librdkafka
from tests.support.kafka_users import add_rules, remove_rules, rule
from tests.support.live_alerts import (
    RULES,
    holding,
    rules,
    shortly_holding,
    until_also_holding,
    until_ended,
    until_holding,
    until_soon_ended,
    until_soon_holding,
    watching,
)
from tests.support.ports import free_ports
from tests.support.prometheus import running_prometheus
from tests.support.raw_http import serving
from tests.support.seaweedfs import FRUGAL, running_seaweedfs
from tests.support.small_disks import second_mount_at, small_disk_at

VALUES = [bytes([number]) * 100_000 for number in range(35)]
QUIET = {
    "storage_min_free_bytes": 0,
    "storage_space_alert_free_threshold_percent": 0,
    # A machine that runs tests may have a full disk.
    "space_management_enable": False,
}


@pytest.fixture
def logs(tmp_path):
    """Give a log directory with one partition of three closed segments."""
    write_partition(tmp_path / "logs", "orders-0", segments=3)
    return tmp_path / "logs"


@pytest.fixture
def config(tmp_path, logs):
    """Give a configuration with a directory for the store."""
    return write_config(
        tmp_path / "tieringd.yaml",
        directory_config([logs], tmp_path / "archive", tmp_path / "state", **QUIET),
    )


@pytest.fixture
def watch(tmp_path):
    """Give a function that runs a Prometheus with the rules beside a daemon, under a name of its own."""
    return partial(watching, tmp_path)


CLUSTER_RIGHTS = (AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS, AclOperation.ALTER_CONFIGS)
TESTS = Path(__file__).parents[1]
LIVE = [Path(__file__), TESTS / "e2e" / "test_share_groups.py", TESTS / "e2e" / "test_cluster_unclean.py"]
"""The files that show alerts on a real Prometheus."""
METRICS_PAGE = RULES.parents[2] / "docs" / "metrics.md"


def until_asked(daemon, *texts):
    """Wait until the status page asks a person for these, each with a command."""

    def asked():
        tasks = json.loads(daemon.get("/status/overview")[1])["tasks"]
        assert all(one["command"] for one in tasks)
        return [one["what"] for one in tasks]

    daemon.until(lambda: all(any(text in one for one in asked()) for text in texts), f"{texts} are asked for")


def until_nothing_asked(daemon):
    """Wait until the status page asks a person for nothing."""
    daemon.until(lambda: json.loads(daemon.get("/status/overview")[1])["tasks"] == [], "nothing is asked for")


def test_daemon_that_is_well_has_no_alert_and_one_that_is_killed_has_one(config, watch):
    """Every rule can be evaluated and none holds; with the daemon gone the one that says so does."""
    with running_daemon(config) as daemon, watch(daemon) as prometheus:
        daemon.until_next_offset("orders", 3 * RECORDS)
        until_holding(prometheus)
        groups = prometheus.get("rules")["groups"]
        until_nothing_asked(daemon)
        assert {one["name"]: one["health"] for one in groups[0]["rules"]} == dict.fromkeys(rules(), "ok")
        daemon.server.kill()
        until_holding(prometheus, "TieringdDown")


def test_store_that_is_away_from_the_start_is_seen(tmp_path, logs, watch):
    """Nothing was ever uploaded, and no partition has a series; four alerts hold all the same."""
    (port,) = free_ports(1)
    config = directory_config([logs], tmp_path, tmp_path / "state", **QUIET)
    del config["cloud_storage_file_root"]
    store = {
        "cloud_storage_backend": "aws",
        "cloud_storage_bucket": "away",
        "cloud_storage_access_key": "key",
        "cloud_storage_secret_key": "secret",
        "cloud_storage_manifest_upload_timeout_ms": 1000,
        **endpoint_properties(f"http://127.0.0.1:{port}"),
    }
    path = write_config(tmp_path / "tieringd.yaml", config | store)
    with running_daemon(path) as daemon, watch(daemon) as prometheus:
        until_holding(prometheus, "TieringdNotReady", "TieringdStoreErrors", "TieringdLossUnknown")
        until_soon_holding(prometheus, "TieringdStalled")
        prometheus.until(
            lambda: (
                {one["metric"]["reason"] for one in prometheus.query("tieringd_ready == 0")}
                == {"store", "starting"}
            ),
            "the store is the reason",
        )
        until_asked(daemon, "the object store takes nothing, and what is written waits")
        until_soon_holding(prometheus, "TieringdLoopStalled", loop="bookkeeping")
        until_soon_ended(prometheus, "TieringdLoopStalled", loop="disks")


def test_first_loss_is_seen_when_it_comes_before_the_first_scrape(config, logs, watch):
    """A daemon that finds a gap as it starts has counted it before Prometheus asks for the first time."""
    with running_daemon(config) as daemon:
        daemon.until_next_offset("orders", 3 * RECORDS)
        daemon.send_signal(signal.SIGTERM)
        daemon.wait()
    add_segments(logs / "orders-0", segments=3)
    for number in range(5):
        segment_path(logs / "orders-0", number).unlink()
    with running_daemon(config, config.with_name("again.log")) as daemon:
        daemon.until(lambda: daemon.metric("tieringd_daemon_archive_gaps_total"), "the gap is recorded")
        with watch(daemon) as prometheus:
            until_holding(prometheus, "TieringdDataLost")


def test_partition_whose_manifest_is_damaged_is_seen(config, tmp_path, watch):
    """A partition of which no step succeeds after a start has an alert, and a task."""
    with running_daemon(config) as daemon:
        daemon.until_next_offset("orders", 3 * RECORDS)
        daemon.send_signal(signal.SIGTERM)
        daemon.wait()
    (stored,) = (tmp_path / "archive").rglob("orders/0_*/manifest")
    stored.write_bytes(stored.read_bytes()[:20])
    with running_daemon(config, config.with_name("again.log")) as daemon, watch(daemon) as prometheus:
        until_holding(prometheus, "TieringdPartitionFails", "TieringdLossUnknown")
        until_asked(daemon, "orders-0: the archiver's last step failed")


def test_log_directory_that_goes_and_reload_that_fails_are_seen(config, logs, watch):
    """Each has an alert, and it ends when the fault does."""
    with running_daemon(config) as daemon, watch(daemon) as prometheus:
        daemon.until_next_offset("orders", 3 * RECORDS)
        until_holding(prometheus)
        good = config.read_text()
        config.write_text("nonsense: true")
        daemon.send_signal(signal.SIGHUP)
        until_holding(prometheus, "TieringdReloadFailed")
        until_asked(daemon, "the last reload found a fault")
        config.write_text(good)
        daemon.send_signal(signal.SIGHUP)
        until_holding(prometheus)
        shutil.move(logs, logs.with_name("away"))
        until_holding(prometheus, "TieringdNotReady", "TieringdUnreadablePaths")
        (reason,) = prometheus.until_rows("tieringd_ready == 0")
        assert reason["metric"]["reason"] == "log_directory"
        until_asked(daemon, "nothing in this log directory is uploaded or trimmed")
        shutil.move(logs.with_name("away"), logs)
        until_holding(prometheus)
        until_nothing_asked(daemon)


def test_corrupt_segment_paused_topic_and_full_disk_are_seen(tmp_path, logs, watch):
    """Each beside the others: one fault hides none of another kind."""
    directory = write_partition(logs, "damaged-0", segments=2)
    damaged = segment_path(directory, 0)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    limits = QUIET | {"storage_space_alert_free_threshold_percent": 100}
    config = write_config(
        tmp_path / "tieringd.yaml",
        directory_config([logs], tmp_path / "archive", tmp_path / "state", **limits),
    )
    with running_daemon(config) as daemon, watch(daemon) as prometheus:
        daemon.until_next_offset("orders", 3 * RECORDS)
        until_holding(prometheus, "TieringdCorruptData", "TieringdDiskLow")
        run_well("topic", "pause", "orders", "--config", str(config))
        until_holding(prometheus, "TieringdCorruptData", "TieringdDiskLow", "TieringdPausedForLong")
        until_asked(
            daemon, "damaged-0: corrupt", f"the disk of {logs} is low on space", "paused topics: orders"
        )


class Endpoint(Daemon):
    """One `tieringd gateway --archive-only`."""

    arguments = ("gateway", "--archive-only")

    def wait_until_listening(self):
        """Wait until it listens to clients too, of which it tells after the admin page."""
        super().wait_until_listening()
        self.until(lambda: self.events("archive endpoint listens"), "it listens to clients")


@contextmanager
def mounted_again(directory, root):
    """Give *directory* through a mount of its own, as a container has it: no link leads out of it."""
    directory.mkdir()
    with second_mount_at(root / "logs", directory) as logs:
        yield logs


def test_small_disk_without_pins_that_fills_is_seen(tmp_path, watch):
    """A log directory that no link leaves, a disk that fills and then is full, a ballast that is gone."""
    (port,) = free_ports(1)
    with small_disk_at(tmp_path / "disk", 64 << 20) as disk, mounted_again(disk / "logs", tmp_path) as logs:
        write_partition(logs, "orders-0", segments=1)
        config = directory_config(
            [logs],
            tmp_path / "archive",
            tmp_path / "state",
            **QUIET
            | {
                "storage_min_free_bytes": 8 << 20,
                "tune_ballast_file": True,
                "ballast_file_path": str(disk / "ballast"),
                "ballast_file_size": 4 << 20,
            },
        )
        config["broker"] |= {"kind": "kafka", "bootstrap": [f"127.0.0.1:{port}"], "node_id": 1}
        path = write_config(tmp_path / "tieringd.yaml", config)
        with running_daemon(path) as daemon, watch(daemon) as prometheus:
            until_holding(prometheus, "TieringdPinsUnavailable", "TieringdNotReady")
            until_soon_holding(prometheus, "TieringdStalled")
            # The broker is away.
            until_asked(daemon, f"the broker at 127.0.0.1:{port}", f"segments in {logs} are not pinned")
            for number in range(4):
                (disk / f"filler-{number}").write_bytes(bytes(4 << 20))
            until_also_holding(prometheus, "TieringdDiskFillsSoon")
            (disk / "filler").write_bytes(bytes(36 << 20))
            until_also_holding(prometheus, "TieringdDiskDegraded")
            until_asked(daemon, f"the disk of {logs} is out of space")
            run_well("space", "ballast", "release", "--config", str(path))
            until_also_holding(prometheus, "TieringdBallastReleased")


def test_damaged_archive_old_segments_and_few_descriptors_are_seen(tmp_path, logs, watch):
    """Scrubbing finds an object that is gone, and is overdue when the archive is away; segments then wait."""
    pace = {
        "cloud_storage_enable_scrubbing": True,
        "cloud_storage_partial_scrub_interval_ms": 200,
        "cloud_storage_full_scrub_interval_ms": 1000,
        "cloud_storage_scrubbing_interval_jitter_ms": 0,
        "cloud_storage_idle_timeout_ms": 100,
        "cloud_storage_idle_threshold_rps": 1000,
    }
    archive = tmp_path / "archive"
    config = write_config(
        tmp_path / "tieringd.yaml", directory_config([logs], archive, tmp_path / "state", **QUIET, **pace)
    )
    with running_daemon(config) as daemon, watch(daemon) as prometheus:
        daemon.until_next_offset("orders", 3 * RECORDS)
        # Scrubbing mends what this host still has, so the copy here goes as well.
        segment_path(logs / "orders-0", 0).unlink()
        (stored,) = [path for path in archive.rglob("0-*") if path.suffix != ".index"]
        stored.unlink()
        until_also_holding(prometheus, "TieringdArchiveFault")
        archive.rename(tmp_path / "away")
        add_segments(logs / "orders-0", segments=3, written_seconds=time.time() - 3600)
        until_also_holding(prometheus, "TieringdNotUploading", "TieringdScrubOverdue", "TieringdNotReady")
        (limit,) = prometheus.until_rows("process_open_fds")
        pid = daemon.server.pid
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (int(limit["value"][1]) + 5, 4096))
        until_also_holding(prometheus, "TieringdDescriptorsLow")
        prometheus.until_rows("tieringd_daemon_housekeeping_failures_total > 0")
        until_soon_holding(prometheus, "TieringdHousekeepingStalled", task="scrub")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (4096, 4096))
        (tmp_path / "away").rename(archive)
        until_soon_ended(prometheus, "TieringdHousekeepingStalled", task="scrub")


def test_daemon_that_starts_again_and_again_is_seen_and_so_is_none(tmp_path, config, watch):
    """Five starts within half an hour are a loop; a Prometheus without a target says that there is none."""
    (port,) = free_ports(1)
    config.write_text(config.read_text().replace("port: 0", f"port: {port}"))
    with running_prometheus(tmp_path / "prometheus", [f"127.0.0.1:{port}"], rules=[RULES]) as prometheus:
        for number in range(5):
            with running_daemon(config, tmp_path / f"{number}.log") as daemon:
                started = daemon.metric("process_start_time_seconds")
                prometheus.until(
                    lambda started=started: prometheus.query(f"process_start_time_seconds == {started!r}"),
                    "this start is seen",
                )
        prometheus.until(lambda: prometheus.query("up == 0"), "it is between two starts")
        until_also_holding(prometheus, "TieringdRestartLoop")
    with running_prometheus(tmp_path / "nothing", [], rules=[RULES]) as prometheus:
        until_holding(prometheus, "TieringdAbsent")


def test_gateway_that_refuses_certificate_that_ends_and_full_cache_disk_are_seen(tmp_path, config, watch):
    """An endpoint without a broker: few clients, a certificate until tomorrow, a disk without room."""
    run_well("run", "--once", "--config", str(config))
    certificate = write_certificate(tmp_path / "certificate.pem")
    gateway = {
        "port": 0,
        "max_connections": 4,
        "tls_cert_file": str(certificate),
        "tls_key_file": str(certificate),
    }
    with small_disk_at(tmp_path / "disk", 4 << 20) as disk:
        changes = {"gateway": gateway, "cloud_storage_cache_directory": str(disk / "cache")}
        path = write_config(tmp_path / "endpoint.yaml", yaml.safe_load(config.read_text()) | changes)
        with running_daemon(path, start=Endpoint) as daemon, watch(daemon) as prometheus:
            until_holding(prometheus, "TieringdCertificateEnds")
            (listening,) = daemon.events("archive endpoint listens")
            fill(disk)
            # A reader gets every record all the same.
            security = {"security.protocol": "SSL", "ssl.ca.location": str(certificate)}
            found = read_librdkafka(f"127.0.0.1:{listening['port']}", "orders", 3 * RECORDS, **security)
            assert len(found) == 3 * RECORDS
            until_holding(prometheus, "TieringdCertificateEnds", "TieringdCacheFaults")
            with ExitStack() as clients:
                for _ in range(gateway["max_connections"] + 1):
                    clients.enter_context(socket.create_connection(("127.0.0.1", listening["port"])))
                until_holding(
                    prometheus, "TieringdCertificateEnds", "TieringdCacheFaults", "TieringdGatewayRefuses"
                )


# Long: workers are killed until they are left alone.
def test_workers_that_do_not_stay_are_seen(tmp_path, config, watch):
    """An endpoint whose workers are killed has fewer than it should, until they are left alone."""
    run_well("run", "--once", "--config", str(config))
    changes = {"gateway": {"port": 0, "workers": 2}}
    path = write_config(tmp_path / "endpoint.yaml", yaml.safe_load(config.read_text()) | changes)
    missing = "TieringdGatewayWorkersMissing"

    def kill_workers(daemon):
        for one in daemon.status()["gateway_workers"]:
            if one["is_serving"]:
                # It may have ended since the status was read: this kills workers again and again.
                with suppress(ProcessLookupError):
                    os.kill(one["pid"], signal.SIGKILL)

    def failed(daemon):
        # On a machine under load a worker may be silent for so long that the endpoint starts another one.
        _, page = daemon.get("/metrics")
        return ["TieringdTaskFails"] if "tieringd_task_failures_total{" in page else []

    with running_daemon(path, start=Endpoint) as daemon, watch(daemon) as prometheus:
        prometheus.until(
            lambda: holding(prometheus) - {"TieringdDiskFillsSoon"} == set(failed(daemon)),
            lambda: f"only alerts with a reason hold; these hold: {sorted(holding(prometheus))}",
        )
        prometheus.until(lambda: kill_workers(daemon) or missing in holding(prometheus), f"{missing} holds")
        # That some have ended is a matter of its own, for a quarter of an hour.
        until_holding(prometheus, "TieringdTaskFails")


def test_group_that_cannot_be_read_is_seen(tmp_path, config, watch):
    """A group's object is damaged: its clients get no offsets, and the log names the group."""
    run_well("run", "--once", "--config", str(config))
    changes = {"gateway": {"port": 0, "consumer_groups": True}}
    path = write_config(tmp_path / "endpoint.yaml", yaml.safe_load(config.read_text()) | changes)
    with running_daemon(path, start=Endpoint) as daemon, watch(daemon) as prometheus:
        (listening,) = daemon.events("archive endpoint listens")
        consumer = Consumer(
            {"bootstrap.servers": f"127.0.0.1:{listening['port']}", "group.id": "readers"},
        )
        try:
            consumer.commit(offsets=[TopicPartition("orders", 0, 1)], asynchronous=False)
            until_holding(prometheus)
            (stored,) = (one for one in (tmp_path / "archive" / "groups").rglob("*") if "readers" in one.name)
            stored.write_bytes(b"{}")

            def ask():
                with suppress(KafkaException):
                    consumer.committed([TopicPartition("orders", 0)], timeout=1)

            prometheus.until(
                lambda: ask() or "TieringdGroupsNotStored" in holding(prometheus), "the alert holds"
            )
            (event,) = daemon.events("a group cannot be read or written")
            assert event["group"] == "readers"
        finally:
            consumer.close()


def fill(disk):
    """Write to a filesystem until it takes nothing more."""
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


async def test_clock_that_is_off_upload_that_hangs_and_credentials_that_end_are_seen(
    tmp_path, logs, watch, monkeypatch
):
    """A real S3 server behind a proxy that spoils answers, and a metadata service with the server's keys."""
    with running_seaweedfs(tmp_path / "seaweedfs", environment=FRUGAL) as server:
        server.create_bucket("alerts")
        service = CredentialService(lifetime_seconds=100, known_keys=(server.access_key, server.secret_key))
        async with fault_proxy(server.endpoint_url) as proxy, serving(service) as metadata_url:
            monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata_url)
            config = directory_config([logs], tmp_path, tmp_path / "state", **QUIET)
            del config["cloud_storage_file_root"]
            store = {
                "cloud_storage_backend": "aws",
                "cloud_storage_bucket": "alerts",
                "cloud_storage_credentials_source": "aws_instance_metadata",
                **endpoint_properties(proxy.url),
            }
            path = write_config(tmp_path / "tieringd.yaml", config | store)
            await asyncio.to_thread(until_store_is_seen, path, logs, watch, proxy, service)


def until_store_is_seen(config, logs, watch, proxy, service):
    """Make the faults one by one. It waits, and the proxy serves meanwhile, so this is another thread."""
    with running_daemon(config) as daemon, watch(daemon) as prometheus:
        daemon.until_next_offset("orders", 3 * RECORDS)
        # The service gives what ends in 100 s, and then nothing more.
        service.refusal = ("500 Internal Server Error", b"no")
        until_holding(prometheus, "TieringdCredentialsEnd")
        proxy.weather = lambda _: RedateAnswer(-7200)
        add_segments(logs / "orders-0", segments=1)
        until_holding(prometheus, "TieringdCredentialsEnd", "TieringdClockDoubted")
        proxy.weather = lambda _: None
        add_segments(logs / "orders-0", segments=1)
        until_holding(prometheus, "TieringdCredentialsEnd")
        proxy.weather = lambda one: StallRequest() if one.method == "PUT" else None
        add_segments(logs / "orders-0", segments=1)
        until_soon_holding(prometheus, "TieringdUploadHangs")


# Long: the broker deletes by age, and Prometheus evaluates the rules by real time.
async def test_loss_that_is_near_pins_and_producers_held_back_are_seen(kafka, tmp_path, watch):
    """
    Alerts fire for a near loss, for failing pins, and for a full disk that holds producers back.

    The broker's retention goes on while the archive is away. Then the disk is full.
    """
    slow, fast = (f"alerts-{uuid.uuid4().hex[:8]}-{name}" for name in ("slow", "fast"))
    archive = tmp_path / "archive"
    config = directory_config([kafka.log_dir()], archive, tmp_path / "state", **QUIET)
    config["broker"] |= {"kind": "kafka", "bootstrap": [kafka.brokers[0].bootstrap], "node_id": 1}
    config |= {
        "broker": config["broker"] | {"pin_directory": str(tmp_path / "pins")},
        "cloud_storage_enable_remote_write": False,
        "topics": {name: {"redpanda.remote.write": True} for name in (slow, fast)},
        "cloud_storage_topic_purge_grace_period_ms": "1s",
        "cloud_storage_housekeeping_interval_ms": "500ms",
    }
    path = write_config(tmp_path / "tieringd.yaml", config)
    with running_daemon(path) as daemon, watch(daemon) as prometheus:
        for name, retention_ms in ((slow, 1_800_000), (fast, 20_000)):
            await kafka.create_topic(name, configs=SEGMENTS | {"retention.ms": str(retention_ms)})
            daemon.until_next_offset(name, 0)
        until_holding(prometheus)
        archive.rename(tmp_path / "away")
        pins = tmp_path / "pins"
        # Behind a mount of its own the directory is there, and no link leads to it. It is never away: the
        # daemon would make it anew at any moment.
        with second_mount_at(pins, pins):
            await kafka.produce(slow, VALUES, max_batch_size=200_000)
            until_also_holding(prometheus, "TieringdPinsFail")
        for name in (slow, fast):
            await kafka.produce(name, VALUES, max_batch_size=200_000)
        segments = len(list((kafka.log_dir() / f"{fast}-0").glob("*.log")))
        # The active segment is pinned after half of the retention.
        daemon.until(
            lambda: len(list(pins.rglob(f"{fast}-0_*/*-*.log"))) == segments, "all segments are pinned"
        )
        async with cluster_admin(kafka) as admin:
            await admin.configure(fast, {"retention.ms": "1000"})
        until_also_holding(prometheus, "TieringdLossIsNear", "TieringdPinsHoldData")
        until_asked(daemon, "the broker deletes data of alerts-", "only pins hold")
        (tmp_path / "away").rename(archive)
        until_ended(prometheus, "TieringdLossIsNear", "TieringdPinsHoldData")
        assert not shortly_holding(prometheus, "TieringdHeldByTransaction")
        async with kafka.producer(
            transactional_id=slow, transaction_timeout_ms=300_000, max_batch_size=200_000
        ) as producer:
            async with producer.transaction():
                for value in VALUES:
                    await producer.send_and_wait(slow, value)
                until_soon_holding(prometheus, "TieringdHeldByTransaction")
            until_soon_ended(prometheus, "TieringdHeldByTransaction")
        good = path.read_text()
        path.write_text(
            good.replace("storage_min_free_bytes: 0", f"storage_min_free_bytes: {1 << 60}").replace(
                "space_management_enable: false",
                "space_management_enable: false\nstorage_degraded_action: throttle_producers",
            )
        )
        daemon.send_signal(signal.SIGHUP)
        until_also_holding(prometheus, "TieringdDiskDegraded", "TieringdProducersHeldBack")
        path.write_text(good)
        daemon.send_signal(signal.SIGHUP)
        until_ended(prometheus, "TieringdDiskDegraded", "TieringdProducersHeldBack")
        path.write_text(
            good.replace("space_management_enable: false", "retention_local_target_capacity_bytes: 1")
        )
        daemon.send_signal(signal.SIGHUP)
        # The active segment stays, whatever is asked for.
        until_also_holding(prometheus, "TieringdNothingToReclaim")
        until_asked(daemon, "over their area, and no more of them may go")
        await kafka.delete_topic(fast)
        until_also_holding(prometheus, "TieringdArchivePurged")


# Long: two brokers with users start for it, and Prometheus evaluates the rules by real time.
async def test_rights_that_are_missing_are_seen(guarded, tmp_path, watch):
    """The daemon's user may not delete; then it may no longer see groups, nor take quotas back."""
    topic = f"alerts-{uuid.uuid4().hex[:8]}"
    allowed = [rule("reader", one, topic) for one in (AclOperation.DESCRIBE, AclOperation.DESCRIBE_CONFIGS)]
    cluster = [rule("reader", one, "kafka-cluster", of=ResourceType.BROKER) for one in CLUSTER_RIGHTS]
    to_alter = cluster[-1:]
    allowed += [*cluster, rule("reader", AclOperation.DESCRIBE, "*", of=ResourceType.GROUP)]
    security = {
        "protocol": "SASL_PLAINTEXT",
        "sasl_username": "reader",
        "sasl_password": "right",
    }
    broker = {
        "kind": "kafka",
        "node_id": 1,
        "bootstrap": [f"127.0.0.1:{guarded.broker.listener_ports['GUARDED']}"],
        "log_dirs": [str(guarded.log_dir())],
        "security": security,
    }
    changes = {
        "broker": broker,
        "cloud_storage_enable_remote_write": False,
        "topics": {topic: {"redpanda.remote.write": True, "retention.local.target.bytes": 1}},
        "storage_degraded_action": "alert",
    }
    document = directory_config([guarded.log_dir()], tmp_path / "archive", tmp_path / "state", **QUIET)
    path = write_config(tmp_path / "tieringd.yaml", document | changes)
    add_rules(guarded.bootstrap, allowed)
    try:
        await guarded.create_topic(topic, replicas=[[1]], configs=SEGMENTS | {"retention.ms": "-1"})
        await guarded.produce(topic, VALUES, max_batch_size=200_000)
        with running_daemon(path) as daemon, watch(daemon) as prometheus:
            until_also_holding(prometheus, "TieringdTrimRefused")
            assert not daemon.metric("tieringd_daemon_trimmed_segments_total")
            good = path.read_text()
            full = {"storage_min_free_bytes": 1 << 60, "storage_degraded_action": "throttle_producers"}
            write_config(path, document | changes | full)
            daemon.send_signal(signal.SIGHUP)
            until_also_holding(prometheus, "TieringdProducersHeldBack")
            remove_rules(guarded.bootstrap, to_alter)
            path.write_text(good)
            daemon.send_signal(signal.SIGHUP)
            until_also_holding(prometheus, "TieringdProducersNotLetGo")
            add_rules(guarded.bootstrap, to_alter)
            until_ended(prometheus, "TieringdProducersHeldBack", "TieringdProducersNotLetGo")
    finally:
        remove_rules(guarded.bootstrap, allowed)


def test_two_daemons_under_one_epoch_are_seen(tmp_path, logs, watch):
    """Two daemons with one identity, as copies of a machine are, have one fenced within three commits."""
    configs = []
    for name in ("one", "two"):
        state = tmp_path / name
        state.mkdir()
        (state / "host.json").write_text(
            json.dumps({"version": 1, "id": "00ff" * 8, "is_first_start": False})
        )
        document = directory_config([logs], tmp_path / "archive", state, **QUIET)
        configs.append(write_config(tmp_path / f"{name}.yaml", document))
    run_well("archive", "init", "--config", str(configs[0]))
    run_well("archive", "init", "--config", str(configs[1]))
    with (
        running_daemon(configs[0]) as one,
        running_daemon(configs[1]) as two,
        watch(one, two) as prometheus,
    ):
        # Either may be fenced as early as in the first commits, which both make at their start.
        for segments in (3, 4, 5, 6):
            if segments > 3:
                add_segments(logs / "orders-0", segments=1)
            prometheus.until(
                lambda segments=segments: (
                    one.events("archiver stopped")
                    or two.events("archiver stopped")
                    or one.next_offset("orders") == two.next_offset("orders") == segments * RECORDS
                ),
                "one has stopped, or both know the segment",
            )
        until_also_holding(prometheus, "TieringdFenced")


def test_every_alert_is_seen_or_the_page_says_why_not():
    """A rule that no file of `LIVE` names is in the page's table, with its reason; no other is."""
    text = "".join(path.read_text() for path in LIVE)
    named = set(re.findall(r'"(Tieringd[A-Z]\w+)"', text)) & rules().keys()
    (section,) = re.findall(
        r"## Which alerts were seen to fire\n(.*?)\n## ", METRICS_PAGE.read_text(), re.DOTALL
    )
    assert all(f"tests/{path.parent.name}/{path.name}" in section for path in LIVE)
    excused = set(re.findall(r"Tieringd\w+", section))
    assert named | excused == set(rules())
    assert not named & excused
