"""Alert rules, tried by Prometheus' own promtool: each fires when it should, and not a step before."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from tests.support.promtool import require_promtool
from tieringd.metrics import Metrics

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
DIRECTORY = {"directory": "/var/lib/kafka/data"}
LOG_DIR = {"log_dir": "/var/lib/kafka/data"}
TOPIC = {"topic": "orders"}
PARTITION = TOPIC | {"partition": "3"}


@dataclass(frozen=True)
class Case:
    """What one alert says for some series, and series for which it says nothing at the same time."""

    alert: str
    fires: dict[str, str]
    """Values a minute apart, in promtool's own form, by metric."""
    quiet: dict[str, str]
    at: str
    summary: str
    labels: dict[str, str] = field(default_factory=dict)


CASES = [
    Case(
        "TieringdArchiveFault",
        {"tieringd_scrub_faults": "0x5 2x10"},
        {"tieringd_scrub_faults": "0x15"},
        "8m",
        "Scrubbing found 2 faults in the archive that it cannot mend: data_missing",
        {"kind": "data_missing"},
    ),
    Case(
        "TieringdDataLost",
        {"tieringd_archive_gaps_total": "0x5 1x10"},
        {"tieringd_archive_gaps_total": "4x15"},
        "8m",
        "Data of topic orders was gone before it could be copied",
        TOPIC,
    ),
    Case(
        "TieringdDataLost",
        {"tieringd_pins_given_up_total": "0x5 1x10"},
        {"tieringd_pins_given_up_total": "4x15"},
        "8m",
        "Data was gone before it could be copied",
    ),
    Case(
        "TieringdLossIsNear",
        {"tieringd_seconds_to_loss": "1800x10", "tieringd_upload_pending_bytes": "1x10"},
        {"tieringd_seconds_to_loss": "1800x10", "tieringd_upload_pending_bytes": "0x10"},
        "5m",
        "In 30m 0s the broker deletes data of orders-3 that is not durable",
        PARTITION,
    ),
    Case(
        "TieringdPinsHoldData",
        {"tieringd_pinned_bytes": "1048576x20"},
        {"tieringd_pinned_bytes": "1048576x10 0x10"},
        "15m",
        "1MiB that the broker has deleted are held by pins only",
    ),
    Case(
        "TieringdStrayPins",
        {"tieringd_stray_pins": "2x20"},
        {"tieringd_stray_pins": "0x20"},
        "15m",
        "2 pinned segments may be of a log that was given up, and are not uploaded",
    ),
    Case(
        "TieringdClockDoubted",
        {"tieringd_host_clock_doubted": "1x20"},
        {"tieringd_host_clock_doubted": "0x20"},
        "15m",
        "The time is not certain on a host, and nothing is deleted by age there",
    ),
    Case(
        "TieringdDiskLow",
        {"tieringd_disk_free_space_alert": "1x5"},
        {"tieringd_disk_free_space_alert": "0 0 1x5"},
        "2m",
        "The disk of /var/lib/kafka/data is low on space",
        DIRECTORY,
    ),
    Case(
        "TieringdDiskDegraded",
        {"tieringd_disk_free_space_alert": "2"},
        {"tieringd_disk_free_space_alert": "1"},
        "0m",
        "The disk of /var/lib/kafka/data is out of space",
        DIRECTORY,
    ),
    Case(
        "TieringdProducersHeldBack",
        {"tieringd_producers_held_back": "1", "tieringd_degraded_brokers": "1"},
        {"tieringd_producers_held_back": "0", "tieringd_degraded_brokers": "1"},
        "0m",
        "Clients' writes are held back, as a broker of the cluster is out of disk space",
    ),
    Case(
        "TieringdProducersNotLetGo",
        {"tieringd_producers_held_back": "1x10", "tieringd_degraded_brokers": "0x10"},
        {"tieringd_producers_held_back": "1x10", "tieringd_degraded_brokers": "1x10"},
        "5m",
        "Clients' writes are still held back, and no broker is known to be out of disk space",
    ),
    Case(
        "TieringdBallastReleased",
        {"tieringd_ballast_bytes": "0x10", "tieringd_ballast_wanted_bytes": "4096x10"},
        {"tieringd_ballast_bytes": "4096x10", "tieringd_ballast_wanted_bytes": "4096x10"},
        "5m",
        "There is no ballast file to let go, or only a part of one",
    ),
    Case(
        "TieringdBallastReleased",
        {"tieringd_ballast_bytes": "2048x10", "tieringd_ballast_wanted_bytes": "4096x10"},
        # A daemon that keeps none.
        {"tieringd_ballast_bytes": "0x10", "tieringd_ballast_wanted_bytes": "0x10"},
        "5m",
        "There is no ballast file to let go, or only a part of one",
    ),
    Case(
        "TieringdNothingToReclaim",
        {"tieringd_space_short_bytes": "1048576x10"},
        {"tieringd_space_short_bytes": "1048576x8 0 1048576"},
        "10m",
        "The logs in /var/lib/kafka/data are 1MiB over their area, and nothing more of them may go",
        LOG_DIR,
    ),
    Case(
        "TieringdTrimRefused",
        {'tieringd_trim_failures_total{error="BrokerDenied"}': "0x5 1x10"},
        {'tieringd_trim_failures_total{error="BrokerUnavailable"}': "0x5 1x10"},
        "8m",
        "The broker refuses to trim orders: its disk is not relieved",
        TOPIC | {"error": "BrokerDenied"},
    ),
    Case(
        "TieringdNotUploading",
        {"tieringd_upload_lag_seconds": "960x10"},
        {"tieringd_upload_lag_seconds": "900x10"},
        "5m",
        "A closed segment of orders-3 has waited for 16m 0s",
        PARTITION,
    ),
    Case(
        "TieringdHeldByTransaction",
        {"tieringd_upload_held_by_transaction_seconds": "3660"},
        {"tieringd_upload_held_by_transaction_seconds": "3600"},
        "0m",
        "An open transaction holds orders-3 back for 1h 1m 0s",
        PARTITION,
    ),
    Case(
        "TieringdTailReplaced",
        {"tieringd_archive_replaced_offsets_total": "0x10 10x10"},
        {"tieringd_archive_replaced_offsets_total": "10x20"},
        "12m",
        "After an unclean election 10 archived offsets of orders were replaced",
        TOPIC,
    ),
    Case(
        "TieringdCorruptData",
        {"tieringd_quarantined_partitions": "2"},
        {"tieringd_quarantined_partitions": "0"},
        "0m",
        "2 partitions hold corrupt local data and are not archived",
    ),
    Case(
        "TieringdFenced",
        {"tieringd_fenced_partitions": "3x5"},
        {"tieringd_fenced_partitions": "0 0 3x5"},
        "2m",
        "Another daemon archives 3 partitions under the same leader epoch",
    ),
    Case(
        "TieringdHousekeepingStalled",
        {"tieringd_housekeeping_last_success_timestamp_seconds": "0x400"},
        {"tieringd_housekeeping_last_success_timestamp_seconds": "0x100 6000+60x300"},
        "372m",
        "Housekeeping of the kind merge has not gone over all partitions for 6h 12m 0s",
        {"job": "merge"},
    ),
    Case(
        "TieringdStalled",
        {"tieringd_reconcile_last_success_timestamp_seconds": "0x20"},
        {"tieringd_reconcile_last_success_timestamp_seconds": "0+60x20"},
        "10m",
        "No round of reconciliation went well for 10m 0s",
    ),
]


def rules():
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def series_of(metric, labels):
    """Return a metric with the labels that its case has for it; those in its own braces stay."""
    name, _, own = metric.partition("{")
    written = [f'{key}="{value}"' for key, value in labels.items() if f"{key}=" not in own]
    return f"{name}{{{','.join([*filter(None, [own.rstrip('}')]), *written])}}}"


def promtool_test(case, values, alerts):
    """Return a test in promtool's form: at that time there are these alerts of the name and no other."""
    return {
        "interval": "1m",
        "input_series": [
            {"series": series_of(metric, case.labels), "values": text} for metric, text in values.items()
        ],
        "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": alerts}],
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}-{next(iter(case.fires))}")
def test_alert_fires_when_it_should_and_only_then(case, tmp_path):
    """With its labels and its text; and a near miss at the same moment is no alert."""
    rule = rules()[case.alert]
    expected = {
        "exp_labels": rule["labels"] | case.labels,
        "exp_annotations": {"summary": case.summary, "action": rule["annotations"]["action"]},
    }
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [promtool_test(case, case.fires, [expected]), promtool_test(case, case.quiet, [])],
    }
    path = tmp_path / "alerts_test.yml"
    path.write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [require_promtool(), "test", "rules", str(path)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case():
    """A rule that nobody has seen fire is a guess."""
    assert {case.alert for case in CASES} == set(rules())


def exported() -> dict[str, set[str]]:
    """Return the labels of every metric, by the name that a query uses."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    groups = [getattr(value, "all", (value,)) for value in vars(metrics).values()]
    labelled = [one for group in groups for one in group if hasattr(one, "_labelnames")]
    counted = {family.name for family in registry.collect() if family.type == "counter"}
    return {
        f"{one._name}_total" if one._name in counted else one._name: set(one._labelnames) for one in labelled
    }


@pytest.mark.parametrize("rule", rules().values(), ids=lambda rule: rule["alert"])
def test_alert_asks_for_metrics_that_are_exported(rule):
    """By their names, with the labels that its text shows; a renamed metric would be a silent alert."""
    known = exported()
    asked = re.findall(r"\btieringd_[a-z_]+", rule["expr"])
    assert asked
    assert set(asked) <= known.keys()
    shown = set(re.findall(r"\$labels\.([a-z_]+)", str(rule["annotations"])))
    assert shown <= set().union(*(known[name] for name in asked))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}-{next(iter(case.fires))}")
def test_case_has_the_labels_that_its_metrics_have(case):
    """A case with labels of its own invention would show nothing."""
    known = exported()
    for metric in case.fires:
        assert known[metric.partition("{")[0]] == case.labels.keys()
