"""The properties of disk space: what they become, what contradicts and what has no effect."""

from __future__ import annotations

import pytest
import yaml

from tests.unit.config.texts import SMALLEST, parsed, problems_of
from tieringd.config.properties import Space
from tieringd.policies.disk_alert import AlertSettings

KAFKA = SMALLEST.replace("kind: none", "kind: kafka\n  bootstrap: [localhost:9092]")
REDPANDA = KAFKA.replace("kind: kafka", "kind: redpanda")
GIB = 2**30


def warnings_of(text):
    return [warning.partition(": ")[2] for warning in parsed(text).warnings]


def test_alerts_are_made_of_their_three_properties():
    """The thresholds of the policy are those of the file, and the documents' where it says nothing."""
    assert parsed(SMALLEST).disk_alerts == AlertSettings(0, 5.0, 5 * GIB)
    text = (
        "storage_space_alert_free_threshold_bytes: 7GiB\nstorage_space_alert_free_threshold_percent: 2.5\n"
        "storage_min_free_bytes: 1GiB\n"
    )
    assert parsed(SMALLEST + text).disk_alerts == AlertSettings(7 * GIB, 2.5, GIB)


@pytest.mark.parametrize(
    ("reserved", "log", "is_refused"), [(20, 80, False), (20, 80.5, True), (100, 0, False), (0, 100, False)]
)
def test_areas_of_more_than_the_disk_are_refused(reserved, log, is_refused):
    """The log and the reservation together take the disk at most."""
    text = f"disk_reservation_percent: {reserved}\nretention_local_target_capacity_percent: {log}\n"
    if not is_refused:
        parsed(SMALLEST + text)
        return
    (problem,) = problems_of(SMALLEST + text)
    assert problem == (
        f"t.yaml:6: retention_local_target_capacity_percent: is {log}; together with "
        f"disk_reservation_percent {reserved} that is more than the whole disk"
    )


@pytest.mark.parametrize("path", ["/srv/logs", "/srv/logs/ballast"])
def test_ballast_inside_a_log_directory_is_refused(path):
    """Kafka would not start any more."""
    (problem,) = problems_of(f"{SMALLEST}tune_ballast_file: true\nballast_file_path: {path}\n")
    assert problem.startswith(f"t.yaml:6: ballast_file_path: {path} is inside the log directory /srv/logs")


def test_ballast_inside_the_archive_is_refused():
    """The directory of a file store holds nothing but the archive."""
    text = (
        "cloud_storage_enabled: true\ncloud_storage_backend: file\ncloud_storage_file_root: /srv/archive\n"
        "cloud_storage_enable_remote_write: true\ntune_ballast_file: true\n"
        "ballast_file_path: /srv/archive/ballast\n"
    )
    (problem,) = problems_of(SMALLEST + text)
    assert "/srv/archive holds /srv/archive/ballast" in problem


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("ballast_file_path", "/srv/ballast"),
        ("ballast_file_size", "2GiB"),
        ("ballast_release_when_degraded", "true"),
    ],
)
def test_ballast_that_is_not_wanted_needs_no_properties(line, value):
    """A description of a ballast file without the switch is a warning: most likely one is wanted."""
    assert warnings_of(f"{SMALLEST}{line}: {value}\n") == [
        f"{line}: has no effect while tune_ballast_file is false"
    ]
    assert warnings_of(f"{SMALLEST}tune_ballast_file: true\n{line}: {value}\n") == []


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (SMALLEST, "has no effect with broker.kind none: there are no producers"),
        (REDPANDA, "has no effect with broker.kind redpanda: Redpanda itself refuses writes"),
        (KAFKA, None),
    ],
)
@pytest.mark.parametrize(
    "line",
    ["storage_degraded_action: throttle_producers", "storage_degraded_producer_byte_rate: 1MiB"],
)
def test_degraded_mode_is_for_kafka(base, reason, line):
    """Settings of degraded mode warn without a Kafka broker, because there are no producers to throttle."""
    name = line.partition(":")[0]
    assert warnings_of(f"{base}{line}\n") == ([f"{name}: {reason}"] if reason else [])


def test_rate_has_no_effect_where_a_degraded_disk_only_alerts():
    """No producer is throttled with `alert`, so its rate has no effect."""
    text = "storage_degraded_action: alert\nstorage_degraded_producer_byte_rate: 1MiB\n"
    assert warnings_of(KAFKA + text) == [
        "storage_degraded_producer_byte_rate: has no effect while storage_degraded_action is alert"
    ]


def test_action_is_one_of_three_words():
    """Nothing else is taken for one of them."""
    (problem,) = problems_of(f"{KAFKA}storage_degraded_action: stop\n")
    assert "must be one of refuse_writes, throttle_producers, alert" in problem


def test_defaults_say_nothing_when_written_out():
    """A file that holds every default is as good as one that holds none."""
    document = {name: field.default for name, field in Space.model_fields.items()}
    for base in (SMALLEST, KAFKA, REDPANDA):
        assert parsed(base + yaml.safe_dump(document)).warnings == parsed(base).warnings
