"""What a reload would change, and what of it waits for a restart."""

import pytest

from tests.unit.config.texts import SMALLEST, TIERED, parsed
from tieringd.config.reload import compare_configs


def reloaded(old, new):
    return compare_configs(parsed(TIERED + old), parsed(TIERED + new))


def shown(changes):
    return [str(change) for change in changes]


def test_same_configuration_changes_nothing():
    """Lines that move, comments and other ways to write a value are no changes."""
    found = reloaded(
        "shutdown_timeout_ms: 60s\n", "# a comment\nshutdown_timeout_ms: 1m\npin_segments: true\n"
    )
    assert found.changes == ()


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("", "shutdown_timeout_ms: 1m\n", "shutdown_timeout_ms: 30s -> 1m"),
        (
            "",
            "cloud_storage_reconciliation_interval_ms: 1s\n",
            "cloud_storage_reconciliation_interval_ms: 10s -> 1s",
        ),
        ("log: {level: debug}\n", "", "log.level: debug -> info"),
        (
            "",
            "retention_local_target_ms_default: -1\n",
            "retention_local_target_ms_default: 1d -> null",
        ),
        (
            "",
            "topics: {a: {redpanda.remote.write: true}}\n",
            "topics[a].redpanda.remote.write: not set -> true",
        ),
        (
            "topics: {a: {local.retention.ms: 5h}, b: {}}\n",
            "topics: {b: {}}\n",
            "topics[a].local.retention.ms: 5h -> not set",
        ),
        (
            "cloud_storage_segment_max_upload_interval_sec: 1h\n",
            "",
            "cloud_storage_segment_max_upload_interval_sec: 1h -> null",
        ),
    ],
)
def test_live_property_is_taken_over(old, new, change):
    """A live property is in the configuration to run with, and needs no restart."""
    found = reloaded(old, new)
    assert (shown(found.applied), found.needs_restart) == ([change], ())
    assert found.config == parsed(TIERED + new)


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("", "cloud_storage_max_connections: 5\n", "cloud_storage_max_connections: 20 -> 5"),
        ("", "admin: {port: 1}\n", "admin.port: 9640 -> 1"),
        ("log: {format: console}\n", "", "log.format: console -> json"),
        ("", "cloud_storage_storage_class: COLD\n", "cloud_storage_storage_class: null -> COLD"),
    ],
)
def test_any_other_property_waits_for_a_restart(old, new, change):
    """Any other property is named, and the configuration to run with keeps the old value."""
    found = reloaded(old, new)
    assert (found.applied, shown(found.needs_restart)) == ((), [change])
    before = parsed(TIERED + old)
    assert {name: getattr(found.config, name) for name in type(before).model_fields} == {
        name: getattr(before, name) for name in type(before).model_fields
    }


def test_reload_applies_what_it_can_and_names_the_rest():
    """A mixed change is not refused as a whole; one section may hold both."""
    found = reloaded(
        "log: {format: json, level: info}\n",
        "log: {format: console, level: error}\npin_max_bytes: 0\nshutdown_timeout_ms: 5s\n",
    )
    assert shown(found.applied) == ["shutdown_timeout_ms: 30s -> 5s", "log.level: info -> error"]
    assert shown(found.needs_restart) == ["pin_max_bytes: 10GiB -> 0B", "log.format: json -> console"]
    assert (found.config.log.level, found.config.log.format) == ("error", "json")
    assert (found.config.shutdown_timeout_ms, found.config.pin_max_bytes) == (5_000, 10 * 2**30)


def test_change_of_the_broker_waits_for_a_restart():
    """Lists are compared as a whole."""
    old, new = parsed(SMALLEST), parsed(SMALLEST.replace("[/srv/logs]", "[/srv/logs, /srv/more]"))
    found = compare_configs(old, new)
    assert shown(found.needs_restart) == ["broker.log_dirs: /srv/logs -> /srv/logs, /srv/more"]
    assert found.config.broker == old.broker


def test_changed_secret_is_named_and_not_shown():
    """The change names the property, and shows neither the old nor the new secret."""
    found = reloaded("cloud_storage_secret_key: hunter1\n", "cloud_storage_secret_key: hunter2\n")
    assert shown(found.changes) == ["cloud_storage_secret_key: changed"]
    assert "hunter" not in repr(found)


def test_configuration_after_a_reload_has_the_new_remarks():
    """Warnings of the new file are those of the configuration."""
    topics = "topics: {a: {redpanda.remote.delete: true, redpanda.remote.read: false}}"
    found = reloaded("", f"{topics}\nlog.roll.ms: 5\n")
    assert len(found.config.warnings) == len(found.config.notes) == 1
    assert "redpanda.remote.delete" in found.config.warnings[0]
