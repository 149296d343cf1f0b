"""Alert rules, tried by Prometheus' own promtool: each fires when it should, and not a step before."""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from deploy.metrics_reference import complete_metrics, families
from tests.support.promtool import require_promtool
from tieringd.cli.main import COMMANDS, app, loaded_command

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
DIRECTORY = {"directory": "/var/lib/kafka/data"}
LOG_DIR = {"log_dir": "/var/lib/kafka/data"}
HOST = "broker-1:9640"
SCRAPED = {"job": "tieringd", "instance": HOST}
"""What Prometheus puts on every series."""
ROUND = 'tieringd_ready{reason="round"}'
RECONCILED = "tieringd_reconcile_last_success_timestamp_seconds"
RECONCILE_INTERVAL = "tieringd_reconcile_interval_seconds"
NO_GOOD_ROUND = {RECONCILED: "0x20", RECONCILE_INTERVAL: "0x20", ROUND: "0x20"}
SCRUB = {"tieringd_scrub_interval_seconds": "3600x90", "tieringd_led_partitions": "3x90"}
RUNBOOK = Path(__file__).parents[2] / "docs" / "runbook.md"
LONG_AGO = {"process_start_time_seconds": "-7200x900"}
FIRST_EVENTS = re.compile(r"0x(\d+) (\d+x\d+)")
"""A counter that grows by its first event: it could as well be seen first with that event in it."""
PLAIN_METRICS = {"up", "process_start_time_seconds", "process_open_fds", "process_max_fds"}
"""What Prometheus itself or every process has."""


@dataclass(frozen=True)
class Case:
    """What one alert says for some series, and series for which it says nothing at the same time."""

    alert: str
    fires: dict[str, str]
    """Values a step apart, in promtool's own form, by metric."""
    quiet: dict[str, str]
    at: str
    summary: str
    labels: dict[str, str] = field(default_factory=dict)
    step_minutes: int = 1
    """Between two values and two evaluations: a day of minutes takes promtool ten seconds."""


CASES = [
    Case(
        "TieringdArchiveFault",
        {"tieringd_scrub_faults": "0x5 2x10"},
        {"tieringd_scrub_faults": "0x15"},
        "8m",
        f"Scrubbing on {HOST} found 2 faults in the archive that it cannot mend: data_missing",
        {"kind": "data_missing"},
    ),
    Case(
        "TieringdDataLost",
        {"tieringd_daemon_archive_gaps_total": "0x5 1x10"},
        {"tieringd_daemon_archive_gaps_total": "4x15"},
        "8m",
        f"On {HOST} data was gone before it could be copied",
    ),
    Case(
        "TieringdDataLost",
        {"tieringd_pins_given_up_total": "0x5 1x10"},
        {"tieringd_pins_given_up_total": "4x15"},
        "8m",
        f"On {HOST} data was gone before it could be copied",
    ),
    Case(
        "TieringdLossIsNear",
        {"tieringd_daemon_seconds_to_loss": "1800x10"},
        {"tieringd_daemon_seconds_to_loss": "1800x2 +Inf 1800x7"},
        "5m",
        f"In 30m 0s the broker beside {HOST} deletes data that is not durable",
    ),
    Case(
        "TieringdLossUnknown",
        {"tieringd_partitions_with_unknown_loss": "3x20"},
        {"tieringd_partitions_with_unknown_loss": "3x10 0x10"},
        "15m",
        f"How soon the broker beside {HOST} deletes data that is not durable is unknown for 3 partitions",
    ),
    Case(
        "TieringdPinsHoldData",
        {"tieringd_pinned_bytes": "1048576x20"},
        {"tieringd_pinned_bytes": "1048576x10 0x10"},
        "15m",
        f"1MiB on {HOST} that the broker has deleted are held by pins only",
    ),
    Case(
        "TieringdPinsUnavailable",
        {"tieringd_pins_available": "0x10"},
        {"tieringd_pins_available": "0x3 1 0x5"},
        "7m",
        f"Segments in /var/lib/kafka/data on {HOST} cannot be pinned",
        LOG_DIR,
    ),
    Case(
        "TieringdShareGroupsUnknown",
        {"tieringd_share_group_offsets_unknown": "1x20"},
        {"tieringd_share_group_offsets_unknown": "1x10 0x10"},
        "15m",
        f"Trims wait on {HOST}: the brokers do not tell what share groups still need",
    ),
    Case(
        "TieringdShareGroupLags",
        {"tieringd_daemon_trim_held_by_share_groups_bytes": "1048576x400"},
        {"tieringd_daemon_trim_held_by_share_groups_bytes": "1048576x300 0x100"},
        "6h",
        f"1MiB on {HOST} stay on the local disk for a share group that lags",
    ),
    Case(
        "TieringdStrayPins",
        {"tieringd_stray_pins": "2x20"},
        {"tieringd_stray_pins": "0x20"},
        "15m",
        f"2 pinned segments on {HOST} may be of a log that was given up, and are not uploaded",
    ),
    Case(
        "TieringdClockDoubted",
        {"tieringd_host_clock_doubted": "1x20"},
        {"tieringd_host_clock_doubted": "0x20"},
        "15m",
        f"The time is not certain on {HOST}, and nothing is deleted by age there",
    ),
    Case(
        "TieringdDiskLow",
        {"tieringd_disk_free_space_alert": "1x5"},
        {"tieringd_disk_free_space_alert": "0 0 1x5"},
        "2m",
        f"The disk of /var/lib/kafka/data on {HOST} is low on space",
        DIRECTORY,
    ),
    Case(
        "TieringdDiskDegraded",
        {"tieringd_disk_free_space_alert": "2"},
        {"tieringd_disk_free_space_alert": "1"},
        "0m",
        f"The disk of /var/lib/kafka/data on {HOST} is out of space",
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
        f"There is no ballast file to let go on {HOST}, or only a part of one",
    ),
    Case(
        "TieringdBallastReleased",
        {"tieringd_ballast_bytes": "2048x10", "tieringd_ballast_wanted_bytes": "4096x10"},
        # A daemon that keeps none.
        {"tieringd_ballast_bytes": "0x10", "tieringd_ballast_wanted_bytes": "0x10"},
        "5m",
        f"There is no ballast file to let go on {HOST}, or only a part of one",
    ),
    Case(
        "TieringdNothingToReclaim",
        {"tieringd_space_short_bytes": "1048576x10"},
        {"tieringd_space_short_bytes": "1048576x8 0 1048576"},
        "10m",
        f"The logs in /var/lib/kafka/data on {HOST} are 1MiB over their area, and nothing more of them may "
        "go",
        LOG_DIR,
    ),
    Case(
        "TieringdTrimRefused",
        {"tieringd_daemon_trims_denied_total": "0x5 1x10"},
        {"tieringd_daemon_trims_denied_total": "3x15"},
        "8m",
        f"The broker refuses to trim on {HOST}: its disk is not relieved",
    ),
    Case(
        "TieringdNotUploading",
        {"tieringd_daemon_upload_lag_seconds": "960x10"},
        {"tieringd_daemon_upload_lag_seconds": "900x10"},
        "5m",
        f"A closed segment on {HOST} has waited for 16m 0s",
    ),
    Case(
        "TieringdHeldByTransaction",
        {"tieringd_daemon_held_by_transaction_seconds": "3660"},
        {"tieringd_daemon_held_by_transaction_seconds": "3600"},
        "0m",
        f"An open transaction holds a partition on {HOST} back for 1h 1m 0s",
    ),
    Case(
        "TieringdTailReplaced",
        {"tieringd_daemon_archive_replaced_offsets_total": "0x10 10x10"},
        {"tieringd_daemon_archive_replaced_offsets_total": "10x20"},
        "12m",
        f"After an unclean election archived offsets were replaced, by {HOST}",
    ),
    Case(
        "TieringdCorruptData",
        {"tieringd_quarantined_partitions": "2"},
        {"tieringd_quarantined_partitions": "0"},
        "0m",
        f"2 partitions on {HOST} hold corrupt local data and are not archived",
    ),
    Case(
        "TieringdWaitsForOperator",
        {"tieringd_partitions_waiting_for_operator": "2"},
        {"tieringd_partitions_waiting_for_operator": "0"},
        "0m",
        f"2 partitions of orders on {HOST} wait for an operator: segment_unreadable",
        {"topic": "orders", "reason": "segment_unreadable"},
    ),
    Case(
        "TieringdFenced",
        {"tieringd_fenced_partitions": "3x5"},
        {"tieringd_fenced_partitions": "0 0 3x5"},
        "2m",
        f"Another daemon archives 3 partitions of {HOST} under the same leader epoch",
    ),
    Case(
        "TieringdPartitionFails",
        {"tieringd_partitions_in_fault": "2x20"},
        {"tieringd_partitions_in_fault": "2x10 0 2x9"},
        "15m",
        f"2 partitions on {HOST} are not archived: their steps fail, and not because of the store",
        {"fault": "other"},
    ),
    Case(
        "TieringdPartitionFails",
        {"tieringd_partitions_in_fault": "2x20"},
        # Other kinds of faults have alerts of their own.
        {'tieringd_partitions_in_fault{fault="store"}': "2x20"},
        "15m",
        f"2 partitions on {HOST} are not archived: their steps fail, and not because of the store",
        {"fault": "other"},
    ),
    Case(
        "TieringdHousekeepingStalled",
        {"tieringd_housekeeping_last_success_timestamp_seconds": "0x40"},
        {"tieringd_housekeeping_last_success_timestamp_seconds": "0x10 6000+600x30"},
        "380m",
        f"Housekeeping of the kind merge on {HOST} has not gone over all partitions for 6h 20m 0s",
        {"task": "merge"},
        step_minutes=10,
    ),
    Case(
        "TieringdStalled",
        {RECONCILED: "1x20", RECONCILE_INTERVAL: "10x20", ROUND: "1x20"},
        {RECONCILED: "1+60x20", RECONCILE_INTERVAL: "10x20", ROUND: "1x20"},
        "10m",
        f"No round of reconciliation went well on {HOST} for 9m 59s",
    ),
    Case(
        "TieringdStalled",
        {RECONCILED: "1x20", RECONCILE_INTERVAL: "10x20", ROUND: "0x20"},
        # An archive without a broker has no rounds.
        {RECONCILED: "0x20", RECONCILE_INTERVAL: "0x20"},
        "10m",
        f"No round of reconciliation went well on {HOST} for 9m 59s",
    ),
    Case(
        # No round has gone well since the start.
        "TieringdStalled",
        NO_GOOD_ROUND | {"process_start_time_seconds": "0x20"},
        # The host has booted, and its broker takes longer than the daemon.
        NO_GOOD_ROUND | {"process_start_time_seconds": "300x20"},
        "10m",
        f"No round of reconciliation went well on {HOST} for 10m 0s",
    ),
    Case(
        "TieringdStalled",
        # A daemon of an earlier version does not tell its interval.
        {RECONCILED: "1x20", ROUND: "1x20"},
        {RECONCILED: "1+60x20", ROUND: "1x20"},
        "10m",
        f"No round of reconciliation went well on {HOST} for 9m 59s",
    ),
    Case(
        "TieringdStalled",
        {RECONCILED: "1x90", RECONCILE_INTERVAL: "3600x90", ROUND: "1x90"},
        # The round of each hour goes well, and the last one was twenty minutes ago.
        {RECONCILED: "1x60 3600x30", RECONCILE_INTERVAL: "3600x90", ROUND: "1x90"},
        "80m",
        f"No round of reconciliation went well on {HOST} for 1h 19m 59s",
    ),
    Case(
        "TieringdDown", {"up": "1x5 0x10"}, {"up": "1x8 0 0 1"}, "10m", f"tieringd on {HOST} does not answer"
    ),
    Case(
        "TieringdNotReady",
        {"tieringd_ready": "0x10"},
        {"tieringd_ready": "0x3 1 0x5"},
        "7m",
        f"tieringd on {HOST} is not ready: store",
        {"reason": "store"},
    ),
    Case(
        "TieringdLoopStalled",
        {"tieringd_loop_last_success_timestamp_seconds": "0x30"},
        {"tieringd_loop_last_success_timestamp_seconds": "0x10 600+60x20"},
        "22m",
        f"The loop disks on {HOST} has not done its work for 22m 0s",
        {"loop": "disks"},
    ),
    Case(
        "TieringdRestartLoop",
        {"process_start_time_seconds": "0 60 120 180 240 300"},
        {"process_start_time_seconds": "0 60 120 180 180 180"},
        "5m",
        f"tieringd on {HOST} was started 5 times in 30 minutes",
    ),
    Case(
        # It is between two starts, and has no series.
        "TieringdRestartLoop",
        {"process_start_time_seconds": "0 60 120 180 240 stale"},
        # Another program of this host.
        {"process_start_time_seconds": "0", 'process_start_time_seconds{job="node"}': "0 60 120 180 240 300"},
        "5m",
        f"tieringd on {HOST} was started 4 times in 30 minutes",
    ),
    Case(
        "TieringdTaskFails",
        {"tieringd_task_failures_total": "0x5 1x15"},
        # The last failure is long ago.
        {"tieringd_task_failures_total": "4x20"},
        "16m",
        f"A part of tieringd on {HOST} ended that should not, and was started again: bookkeeping",
        {"task": "bookkeeping"},
    ),
    Case(
        "TieringdPinsFail",
        {"tieringd_pin_failures_total": "0x5 1x10"},
        {"tieringd_pin_failures_total": "4x15"},
        "8m",
        f"Pins cannot be made or removed on {HOST}",
    ),
    Case(
        "TieringdDiskFillsSoon",
        {"tieringd_disk_free_bytes": "8e9-1e8x80", "tieringd_disk_free_space_alert": "0x80"},
        {"tieringd_disk_free_bytes": "8e9-1e7x80", "tieringd_disk_free_space_alert": "0x80"},
        "75m",
        f"At the pace of the last hour the disk of /var/lib/kafka/data on {HOST} is full within four hours",
        DIRECTORY,
    ),
    Case(
        "TieringdUploadHangs",
        {"tieringd_oldest_upload_in_flight_seconds": "660x5"},
        {"tieringd_oldest_upload_in_flight_seconds": "600x5"},
        "2m",
        f"An upload on {HOST} has been under way for 11m 0s",
    ),
    Case(
        "TieringdStoreErrors",
        {"tieringd_daemon_store_failures_total": "0+6x20", "tieringd_daemon_store_requests_total": "0+24x20"},
        {"tieringd_daemon_store_failures_total": "0+2x20", "tieringd_daemon_store_requests_total": "0+24x20"},
        "15m",
        f"25% of the requests to the object store fail on {HOST}",
    ),
    Case(
        # A store that answers nothing from the start.
        "TieringdStoreErrors",
        {"tieringd_daemon_store_failures_total": "4+6x20", "tieringd_daemon_store_requests_total": "4+6x20"},
        # A daemon that asks for nothing.
        {"tieringd_daemon_store_failures_total": "4x20", "tieringd_daemon_store_requests_total": "4x20"},
        "15m",
        f"100% of the requests to the object store fail on {HOST}",
    ),
    Case(
        "TieringdScrubOverdue",
        SCRUB | {"tieringd_scrub_last_full_timestamp_seconds": "0x90"},
        SCRUB | {"tieringd_scrub_last_full_timestamp_seconds": "0x30 18000+600x60"},
        "850m",
        f"A partition on {HOST} had no whole scrub for two intervals",
        step_minutes=10,
    ),
    Case(
        "TieringdScrubOverdue",
        SCRUB | {"tieringd_scrub_last_full_timestamp_seconds": "0x90"},
        # Scrubbing is off.
        SCRUB
        | {"tieringd_scrub_last_full_timestamp_seconds": "0x90", "tieringd_scrub_interval_seconds": "0x90"},
        "850m",
        f"A partition on {HOST} had no whole scrub for two intervals",
        step_minutes=10,
    ),
    Case(
        "TieringdScrubOverdue",
        SCRUB | {"tieringd_scrub_last_full_timestamp_seconds": "0x90"},
        # There is nothing to scrub: other brokers lead all partitions.
        SCRUB | {"tieringd_scrub_last_full_timestamp_seconds": "0x90", "tieringd_led_partitions": "0x90"},
        "850m",
        f"A partition on {HOST} had no whole scrub for two intervals",
        step_minutes=10,
    ),
    Case(
        "TieringdArchivePurged",
        {"tieringd_archive_purged_topics_total": "0x5 1x10"},
        {"tieringd_archive_purged_topics_total": "4x15"},
        "8m",
        f"The archive of a deleted topic was purged by {HOST}",
    ),
    Case(
        "TieringdUnreadablePaths",
        {"tieringd_unreadable_paths": "2x15"},
        {"tieringd_unreadable_paths": "2x8 0 2x6"},
        "12m",
        f"2 files, directories or topics on {HOST} cannot be read and are left out",
    ),
    Case(
        "TieringdPausedForLong",
        {"tieringd_paused_topics": "2x150"},
        {"tieringd_paused_topics": "2x70 0 2x79"},
        "24h",
        f"2 topics of {HOST} have been paused for a day",
        step_minutes=10,
    ),
    Case(
        "TieringdReloadFailed",
        {"tieringd_config_last_reload_successful": "0x10"},
        {"tieringd_config_last_reload_successful": "1x10"},
        "5m",
        f"The last reload of {HOST} found a fault: the configuration before it is in use",
    ),
    Case(
        "TieringdCertificateEnds",
        {"tieringd_certificate_expiry_timestamp_seconds": "1200000x70"},
        {"tieringd_certificate_expiry_timestamp_seconds": "1300000x70"},
        "65m",
        f"The certificate in /etc/tieringd/gateway.pem on {HOST} ends within two weeks, or cannot be read",
        {"file": "/etc/tieringd/gateway.pem"},
    ),
    Case(
        "TieringdCredentialsEnd",
        {"tieringd_store_credentials_expiry_timestamp_seconds": "480x20"},
        # Renewed in time.
        {"tieringd_store_credentials_expiry_timestamp_seconds": "480x5 4000x15"},
        "10m",
        f"The credentials of {HOST} for the object store end within two minutes, and were not renewed",
    ),
    Case(
        "TieringdCacheFaults",
        {"tieringd_daemon_cache_faults_total": "0x5 1x10"},
        {"tieringd_daemon_cache_faults_total": "4x15"},
        "8m",
        f"The chunk cache of {HOST} has faults: its disk takes nothing, or gives back other bytes",
    ),
    Case(
        "TieringdGatewayRefuses",
        {"tieringd_gateway_refused_connections_total": "0x5 1x10"},
        {"tieringd_gateway_refused_connections_total": "4x15"},
        "8m",
        f"The gateway of {HOST} turns clients away: a limit of connections is reached (host_rate)",
        {"reason": "host_rate"},
    ),
    Case(
        "TieringdGroupsNotStored",
        {"tieringd_endpoint_group_refusals_total": "0x5 1x10"},
        {"tieringd_endpoint_group_refusals_total": "4x15"},
        "8m",
        f"Consumer groups of {HOST} cannot be stored or read, so their offsets are not kept",
    ),
    Case(
        "TieringdGatewayWorkersMissing",
        {"tieringd_gateway_workers": "2x3 1x10", "tieringd_gateway_workers_wanted": "2x13"},
        # It was replaced in time.
        {"tieringd_gateway_workers": "2x3 1x1 2x9", "tieringd_gateway_workers_wanted": "2x13"},
        "8m",
        f"Workers of the gateway of {HOST} do not stay: 1 serve",
    ),
    Case(
        "TieringdDescriptorsLow",
        {"process_open_fds": "900x15", "process_max_fds": "1000x15", "tieringd_led_partitions": "3x15"},
        {"process_open_fds": "800x15", "process_max_fds": "1000x15", "tieringd_led_partitions": "3x15"},
        "12m",
        f"tieringd on {HOST} has 90% of its file descriptors open",
    ),
]


@functools.cache
def rule_group():
    """Return the only group of the rules, as Prometheus reads it."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group


def rules():
    return {rule["alert"]: rule for rule in rule_group()["rules"]}


def series_of(metric, labels):
    """Return a metric with the labels that its case has for it; those in its own braces stay."""
    name, _, own = metric.partition("{")
    written = [f'{key}="{value}"' for key, value in (SCRAPED | labels).items() if f"{key}=" not in own]
    return f"{name}{{{','.join([*filter(None, [own.rstrip('}')]), *written])}}}"


def labels_of(metric, case):
    """Return the labels of the case, for the metrics that have them."""
    known = exported().get(metric.partition("{")[0], set())
    return {key: value for key, value in case.labels.items() if key in known}


def promtool_test(case, values, alerts):
    """Return a test in promtool's form: at that time there are these alerts of the name and no other."""
    return {
        "interval": f"{case.step_minutes}m",
        "input_series": [
            {"series": series_of(metric, labels_of(metric, case)), "values": text}
            for metric, text in (LONG_AGO | values).items()
        ],
        "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": alerts}],
    }


def expected_of(case):
    rule = rules()[case.alert]
    texts = {key: rule["annotations"][key] for key in ("action", "runbook_url")}
    return {
        "exp_labels": rule["labels"] | SCRAPED | case.labels,
        "exp_annotations": {"summary": case.summary, **texts},
    }


def run_promtool(tmp_path, *tests):
    """Let promtool run *tests* over the rules that they name: it evaluates each rule at each step."""
    named = {one["alertname"] for test in tests for one in test["alert_rule_test"]}
    group = rule_group() | {"rules": [rules()[alert] for alert in sorted(named)]}
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump({"groups": [group]}))
    step = tests[0]["interval"]
    document = {
        "rule_files": [str(tmp_path / "alerts.yml")],
        "evaluation_interval": step,
        "tests": list(tests),
    }
    path = tmp_path / "alerts_test.yml"
    path.write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [require_promtool(), "test", "rules", str(path)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def from_absent(values):
    """Return the same series where the process starts, and is first seen, with its first events counted."""
    found, started = {}, None
    for metric, text in values.items():
        match = FIRST_EVENTS.fullmatch(text)
        if match is None or not metric.endswith("_total"):
            return None
        started = 60 * (int(match[1]) + 1)
        found[metric] = f"_x{match[1]} _ {match[2]}"
    return found | {"process_start_time_seconds": f"_x{started // 60} {started}x30"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}-{next(iter(case.fires))}")
def test_alert_fires_when_it_should_and_only_then(case, tmp_path):
    """
    An alert fires with its labels and its text, also for what came before the first scrape.

    A near miss fires none.
    """
    tests = [promtool_test(case, case.fires, [expected_of(case)]), promtool_test(case, case.quiet, [])]
    if (absent := from_absent(case.fires)) is not None:
        tests.append(promtool_test(case, absent, [expected_of(case)]))
    run_promtool(tmp_path, *tests)


def test_every_counter_of_an_alert_is_also_tried_from_absent_series():
    """The first event of a counter is the one that matters, and a rule could miss it."""
    tried = {case.alert for case in CASES if from_absent(case.fires)}
    assert tried == {name for name, rule in rules().items() if "increase(" in rule["expr"]}


def test_daemon_that_is_killed_leaves_one_alert(tmp_path):
    """All of its own series end, so no rule but that it is down can say anything, and that one does."""
    ended = {metric: "1x5 stale" for case in CASES for metric in case.fires if metric != "up"}
    test = {
        "interval": "1m",
        "input_series": [
            {"series": series_of(metric, {}), "values": text}
            for metric, text in (ended | {"up": "1x5 0x20"}).items()
        ],
        "alert_rule_test": [
            {
                "eval_time": "20m",
                "alertname": name,
                "exp_alerts": [
                    {
                        "exp_labels": rule["labels"] | SCRAPED,
                        "exp_annotations": rule["annotations"]
                        | {"summary": f"tieringd on {HOST} does not answer"},
                    }
                ]
                * (name == "TieringdDown"),
            }
            for name, rule in rules().items()
        ],
    }
    run_promtool(tmp_path, test)


def test_prometheus_that_scrapes_no_daemon_says_so(tmp_path):
    """A Prometheus without any series has one alert, and one with a daemon that is down has none of these."""
    rule = rules()["TieringdAbsent"]
    alert = {"exp_labels": rule["labels"] | {"job": "tieringd"}, "exp_annotations": rule["annotations"]}
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": "0x20"}],
            "alert_rule_test": [{"eval_time": "12m", "alertname": "TieringdAbsent", "exp_alerts": alerts}],
        }
        for series, alerts in (('up{job="node"}', [alert]), (series_of("up", {}), []))
    ]
    run_promtool(tmp_path, *tests)


def test_every_alert_has_a_case():
    """A rule that was never seen to fire is a guess."""
    assert {case.alert for case in CASES} | {"TieringdAbsent"} == set(rules())


@functools.cache
def exported() -> dict[str, set[str]]:
    """Return the labels of every metric of the default page, by the name that a query uses."""
    found = families(complete_metrics().default_page)
    return {name: set(labels) for name, (_, labels, _) in found.items()}


@pytest.mark.parametrize("rule", rules().values(), ids=lambda rule: rule["alert"])
def test_alert_asks_for_metrics_that_are_exported(rule):
    """An alert asks for exported metrics with the labels in its text. A renamed metric would silence it."""
    known = exported() | {name: set() for name in PLAIN_METRICS}
    asked = set(re.findall(r"\b(?:tieringd_[a-z_]+|process_[a-z_]+|up\b)", rule["expr"]))
    assert asked
    assert asked <= known.keys()
    shown = set(re.findall(r"\$labels\.([a-z_]+)", str(rule["annotations"])))
    assert shown - SCRAPED.keys() <= set().union(*(known[name] for name in asked))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}-{next(iter(case.fires))}")
def test_case_has_the_labels_that_its_metrics_have(case):
    """A case with labels of its own invention would show nothing."""
    known = exported()
    names = {metric.partition("{")[0] for metric in case.fires} - PLAIN_METRICS
    used = set().union(*(known[name] for name in names)) if names else set()
    assert case.labels.keys() <= used
    assert used - case.labels.keys() <= {"reason"}


@functools.cache
def sections() -> dict[str, str]:
    """Return the runbook's sections by their headings."""
    parts = RUNBOOK.read_text().split("\n## ")[1:]
    return {part.partition("\n")[0]: part for part in parts}


def test_runbook_has_a_section_for_each_alert_in_order():
    """The runbook has no section for an alert that is gone, and each rule links to its own section."""
    assert list(sections()) == list(rules())
    for name, rule in rules().items():
        assert rule["annotations"]["runbook_url"].endswith(f"/runbook.md#{name.lower()}")


@pytest.mark.parametrize("alert", rules())
def test_section_says_what_it_means_what_to_type_and_when_to_call(alert):
    """Three commands, and those of tieringd are commands and options that there are."""
    section = sections()[alert]
    assert f"**Meaning** ({rules()[alert]['labels']['severity']})." in section
    assert "\n**Call for help** " in section
    commands = section.split("```")[1].strip().splitlines()
    assert len(commands) == 3
    assert all(len(one) <= 110 for one in section.splitlines())
    for command in commands:
        if command.startswith("tieringd "):
            assert_is_command(command.split()[1:])


def assert_is_command(words):
    """See that *words* name a command with arguments and options that it takes; nothing is run."""
    name, *rest = words
    command = loaded_command(name) if name in COMMANDS else get_command(app).get_command(None, name)
    while isinstance(command, TyperGroup):
        name, *rest = rest
        command = command.commands[name]
    command.make_context(
        name, [re.sub("^(TOPIC|PARTITION)$", "1", word) for word in rest], resilient_parsing=False
    )
