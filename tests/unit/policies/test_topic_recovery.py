"""Topics brought into a live cluster: what they are named, and what would lose their records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.policies.recovery import KEEPING, Renaming, target_fault

NOW_MS = 1_800_000_000_000


@pytest.mark.parametrize(
    ("renaming", "name"),
    [
        pytest.param(Renaming(), "eu.orders", id="as it was"),
        pytest.param(Renaming(prefix="old-", suffix=".2"), "old-eu.orders.2", id="around it"),
        pytest.param(Renaming(r"(..)\.(.*)", r"\2-\1"), "orders-eu", id="by groups"),
        pytest.param(Renaming(r"(..)\.(.*)", r"\2", prefix="x."), "x.orders", id="both"),
        pytest.param(Renaming(r"orders", "other"), "eu.orders", id="only whole names match"),
    ],
)
def test_topic_gets_the_name_that_was_asked_for(renaming, name):
    """A pattern replaces the whole name, and what is put around it comes after."""
    assert renaming.name_of("eu.orders") == name


@pytest.mark.parametrize(
    ("renaming", "message"),
    [
        pytest.param(Renaming(suffix="/x"), "would be named 'orders/x'", id="characters"),
        pytest.param(Renaming(".*", "."), "would be named '.'", id="a dot"),
        pytest.param(Renaming(".*", ""), "would be named ''", id="nothing"),
        pytest.param(Renaming(prefix="x" * 244), "which is not a valid topic name", id="too long"),
        pytest.param(Renaming(".*", r"\3"), "cannot replace", id="no such group"),
    ],
)
def test_name_that_no_topic_may_have_is_refused(renaming, message):
    """The name is refused before anything is created."""
    with pytest.raises(ValueError, match=r"orders|replace") as error:
        renaming.name_of("orders")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        pytest.param(KEEPING, None, id="created by us"),
        pytest.param({}, None, id="nothing known"),
        pytest.param({"retention.ms": "1000"}, None, id="just young enough"),
        pytest.param({"retention.ms": "999"}, "retention.ms=999, but the oldest record is 1 s old", id="old"),
        pytest.param({"retention.ms": "999", "cleanup.policy": "compact"}, None, id="compacted only"),
        pytest.param(
            {"retention.ms": "999", "cleanup.policy": "compact,delete"}, "retention.ms=999", id="both"
        ),
        pytest.param({"retention.bytes": "500"}, None, id="just small enough"),
        pytest.param({"retention.bytes": "499"}, "retention.bytes=499, but 500 bytes", id="large"),
        pytest.param(
            {"message.timestamp.type": "LogAppendTime"}, "replace the timestamps of the records", id="stamps"
        ),
    ],
)
def test_topic_that_would_not_keep_its_records_is_a_fault(settings, fault):
    """The reason names the setting, and the hint what to set."""
    found = target_fault(settings, oldest_ms=NOW_MS - 1000, size_bytes=500, now_ms=NOW_MS)
    assert (found is None) is (fault is None)
    if found is not None:
        assert fault in found.reason
        assert "et " in found.hint


@given(st.integers(-1, 2**62), st.integers(0, 2**62))
def test_created_topic_keeps_everything(oldest_ms, size_bytes):
    """No record of the created topic is at risk, however old and large the archive is."""
    assert target_fault(KEEPING, oldest_ms=oldest_ms, size_bytes=size_bytes, now_ms=NOW_MS) is None


def test_records_without_times_are_not_old():
    """A broker that finds no time goes by that of the file."""
    assert target_fault({"retention.ms": "1"}, oldest_ms=-1, size_bytes=1, now_ms=NOW_MS) is None
