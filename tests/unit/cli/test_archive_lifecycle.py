"""`tieringd archive delete` and `undelete`: what they change, and what they refuse."""

from __future__ import annotations

import pytest

from tests.unit.cli.commands import TOPIC, TOPIC_ID, invoked, tieringd
from tieringd.errors import ConfigError, ObjectNotFound


def state_of(site) -> dict:
    (row,) = invoked("archive", "topics", "-c", site.config, "-f", "json").json()
    return row


def test_deletion_is_noted_and_taken_back(own_site):
    """The listing tells by which operator it was deleted, and when; the command itself deletes no object."""
    config = ("--config", own_site.config)
    assert tieringd("run", "--once", *config).exit_code == 0
    before = own_site.objects("*.log*")

    before_it = state_of(own_site)
    done = invoked("archive", "delete", TOPIC, "--id", TOPIC_ID, "--dry-run", *config)
    assert "nothing was changed" in done.output
    assert state_of(own_site) == before_it

    done = invoked("archive", "delete", TOPIC, "--id", TOPIC_ID, *config)
    assert "is deleted in 30 s or later" in done.output
    deleted = state_of(own_site)
    assert deleted["lifecycle"] == "deleted"
    assert "an operator deleted the archive" in deleted["remark"]

    done = invoked("archive", "undelete", TOPIC, "--id", TOPIC_ID, *config)
    assert "is kept; " in done.output
    kept = state_of(own_site)
    assert kept["lifecycle"] == "kept"
    assert "an operator took its deletion back" in kept["remark"]
    assert own_site.objects("*.log*") == before
    for options in ((), ("--dry-run",)):
        with pytest.raises(ConfigError, match="is kept: there is no deletion to cancel"):
            invoked("archive", "undelete", TOPIC, "--id", TOPIC_ID, *options, *config)


@pytest.mark.parametrize("command", ["delete", "undelete"])
def test_id_that_the_bucket_does_not_hold_is_said(site, command):
    """The error names the ids that it holds of the name."""
    with pytest.raises(ObjectNotFound, match=f"ids of that name: {TOPIC_ID}"):
        invoked("archive", command, TOPIC, "--id", "x" * 22, "--config", site.config)


@pytest.mark.parametrize("command", ["delete", "undelete"])
def test_name_alone_is_not_enough(site, command):
    """A name can stand for several topics."""
    assert invoked("archive", command, TOPIC, "--config", site.config).exit_code == 2
