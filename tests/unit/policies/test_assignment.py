"""Assignment: which archivers start and stop when leadership changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.policies.upload_plan import AssignmentPlan, plan_assignment

TOPIC_ID, OTHER_ID = "A" * 22, "B" * 22


def led(topic: str = "a", partition: int = 0, epoch: int = 1, topic_id: str = TOPIC_ID) -> Leadership:
    return Leadership(TopicIdPartition("c", topic, topic_id, partition), epoch)


@pytest.mark.parametrize(
    ("wanted", "running", "fenced", "stop", "start"),
    [
        pytest.param([], [], [], [], [], id="nothing"),
        pytest.param([led()], [], [], [], [led()], id="new"),
        pytest.param([led()], [led()], [], [], [], id="goes on"),
        pytest.param([], [led()], [], [led()], [], id="lost"),
        pytest.param([led(epoch=2)], [led(epoch=1)], [], [led(epoch=1)], [led(epoch=2)], id="new epoch"),
        pytest.param(
            [led(topic_id=OTHER_ID)], [led()], [], [led()], [led(topic_id=OTHER_ID)], id="topic created again"
        ),
        pytest.param([led()], [], [led()], [], [], id="fenced"),
        pytest.param([led(epoch=2)], [], [led(epoch=1)], [], [led(epoch=2)], id="back under a new epoch"),
        pytest.param([led()], [led()], [led()], [], [], id="fenced, but not stopped yet"),
        pytest.param([], [led()], [led()], [led()], [], id="fenced and lost"),
    ],
)
def test_assignment_starts_and_stops(wanted, running, fenced, stop, start):
    """Unwanted archivers that run stop, and wanted ones that do not run start, unless fenced."""
    found = plan_assignment(set(wanted), set(running), set(fenced))
    assert found == AssignmentPlan(stop=tuple(stop), start=tuple(start))


def test_assignment_is_in_partition_order():
    """Topics go by name, partitions by number, and an older epoch first."""
    ordered = (led("a", 2), led("a", 10), led("b", 0, 3), led("b", 0, 4), led("b", 1, 1))
    assert plan_assignment(set(ordered), set(), set()).start == ordered
    assert plan_assignment(set(), set(ordered), set()).stop == ordered


leaderships = st.builds(
    led, st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 2), st.sampled_from([TOPIC_ID, OTHER_ID])
)


@given(st.sets(leaderships), st.sets(leaderships), st.sets(leaderships))
def test_assignment_leads_to_what_is_wanted(wanted, running, fenced):
    """The plan stops what is not wanted, and starts what is wanted and not fenced. A second plan is empty."""
    found = plan_assignment(wanted, running, fenced)
    after = (running - set(found.stop)) | set(found.start)
    assert wanted - fenced <= after <= wanted
    assert not fenced & set(found.start)
    assert not running & set(found.start)
    again = plan_assignment(wanted, after, fenced)
    assert again == AssignmentPlan((), ())
