"""Alert rules on a real Prometheus that scrapes a real daemon, while the fault is made."""

# Long: Prometheus evaluates the rules by real time.

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import yaml

from tests.e2e.log_files import RECORDS, add_segments, segment_path, write_partition
from tests.support.daemon import directory_config, endpoint_properties, run_well, running_daemon, write_config
from tests.support.ports import free_ports
from tests.support.prometheus import running_prometheus

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
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
    return lambda daemon: running_prometheus(
        tmp_path / "prometheus", [f"127.0.0.1:{daemon.admin_port}"], rules=[RULES]
    )


def rules():
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def holding(prometheus):
    """Return the alerts whose expression holds now, without the time that it has to hold for."""
    return {name for name, expression in rules().items() if prometheus.query(expression)}


def until_holding(prometheus, *names):
    """Wait until exactly these alerts' expressions hold."""
    prometheus.until(
        lambda: holding(prometheus) == set(names),
        lambda: f"exactly {sorted(names)} hold; these hold: {sorted(holding(prometheus))}",
    )


def test_daemon_that_is_well_has_no_alert_and_one_that_is_killed_has_one(config, watch):
    """Every rule can be evaluated and none holds; with the daemon gone the one that says so does."""
    with running_daemon(config) as daemon, watch(daemon) as prometheus:
        daemon.until_next_offset("orders", 3 * RECORDS)
        until_holding(prometheus)
        groups = prometheus.get("rules")["groups"]
        assert {one["name"]: one["health"] for one in groups[0]["rules"]} == dict.fromkeys(rules(), "ok")
        daemon.server.kill()
        until_holding(prometheus, "TieringdDown")


def test_store_that_is_away_from_the_start_is_seen(tmp_path, logs, watch):
    """Nothing was ever uploaded, and no partition has a series; three alerts hold all the same."""
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
        until_holding(prometheus, "TieringdNotReady", "TieringdStalled", "TieringdStoreErrors")
        prometheus.until(
            lambda: (
                {one["metric"]["reason"] for one in prometheus.query("tieringd_ready == 0")}
                == {"store", "starting"}
            ),
            "the store is the reason",
        )


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


def test_log_directory_that_goes_and_reload_that_fails_are_seen(config, logs, watch):
    """Each has an alert, and it ends when the fault does."""
    with running_daemon(config) as daemon, watch(daemon) as prometheus:
        daemon.until_next_offset("orders", 3 * RECORDS)
        until_holding(prometheus)
        good = config.read_text()
        config.write_text("nonsense: true")
        daemon.send_signal(signal.SIGHUP)
        until_holding(prometheus, "TieringdReloadFailed")
        config.write_text(good)
        daemon.send_signal(signal.SIGHUP)
        until_holding(prometheus)
        shutil.move(logs, logs.with_name("away"))
        until_holding(prometheus, "TieringdNotReady", "TieringdUnreadablePaths")
        (reason,) = prometheus.query("tieringd_ready == 0")
        assert reason["metric"]["reason"] == "log_directory"
        shutil.move(logs.with_name("away"), logs)
        until_holding(prometheus)


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
