"""`tieringd topic`: what an operator decides of a topic."""

from __future__ import annotations

from tests.unit.cli.commands import TOPIC, tieringd


def test_paused_topic_is_neither_uploaded_nor_trimmed(own_site):
    """A pass does nothing while a topic is paused. A resume reports the coverage, and the next pass works."""
    config = ("--config", own_site.config)
    assert tieringd("run", "--once", *config).exit_code == 0
    before = tieringd("archive", "describe", TOPIC, *config, "--format", "json").json()
    paused = tieringd("topic", "pause", TOPIC, *config)
    assert (paused.exit_code, "is paused" in paused.output) == (0, True)
    assert tieringd("topic", "show", TOPIC, *config, "--format", "json").json()["archiving"] == "paused"

    done = tieringd("run", "--once", *config)
    assert "0 partitions: 0 segments uploaded, 0 trimmed" in done.errors
    assert tieringd("archive", "describe", TOPIC, *config, "--format", "json").json() == before

    (row,) = tieringd("topic", "resume", TOPIC, *config, "--format", "json").json()
    assert row == {
        "partition": 0,
        "archive_next_offset": before[0]["next_offset"],
        "local_first_offset": row["local_first_offset"],
        "missing_offsets": 0,
    }
    assert "1 partitions: 0 segments uploaded" in tieringd("run", "--once", *config).errors


def test_unknown_topic_is_said(site):
    """A topic that the bucket does not hold cannot be paused."""
    done = tieringd("topic", "pause", "nothing", "--config", site.config)
    assert (done.exit_code, done.output) == (1, "")
    assert "no topic named nothing" in done.errors


def test_retention_that_is_not_managed_cannot_be_released(own_site):
    """There is nothing to give back, and the error says so."""
    tieringd("run", "--once", "--config", own_site.config)
    done = tieringd("topic", "release", TOPIC, "--config", own_site.config)
    assert done.exit_code == 2
    assert "is not managed" in done.errors
    assert (
        "manage its retention again if"
        in tieringd("topic", "manage", TOPIC, "--config", own_site.config).output
    )
