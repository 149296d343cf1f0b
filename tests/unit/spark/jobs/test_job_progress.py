"""The progress of Spark's tasks, on a tracker that is not Spark's."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import pytest

from tieringd.spark.jobs.job_progress import silent, watched

POLL_SECONDS = 0.01


@dataclass
class Stage:
    """Spark's word for tasks that run side by side."""

    numCompletedTasks: int = 0  # noqa: N815 - Spark's name for it
    numTasks: int = 10  # noqa: N815
    numActiveTasks: int = 2  # noqa: N815


@dataclass
class Context:
    """The part of a Spark context that progress asks for. It has a job with a stage or two for any group."""

    stage: Stage = field(default_factory=Stage)
    following: Stage | None = None
    properties: dict = field(default_factory=dict)
    polls: int = 0
    groups: list = field(default_factory=list)
    cancelled: list = field(default_factory=list)

    def statusTracker(self):  # noqa: N802 - Spark's names
        return self

    def getJobIdsForGroup(self, group):  # noqa: N802
        return [7] if group in self.groups else []

    def getJobInfo(self, _job_id):  # noqa: N802
        return self

    @property
    def stageIds(self):  # noqa: N802
        return [3, 4]

    def getStageInfo(self, stage_id):  # noqa: N802
        self.polls += stage_id == 3
        return self.stage if stage_id == 3 else self.following

    def getLocalProperty(self, name):  # noqa: N802
        return self.properties.get(name)

    def setLocalProperty(self, name, value):  # noqa: N802
        self.properties[name] = value

    def setJobGroup(self, group, description, *, interruptOnCancel):  # noqa: N802, N803
        self.groups.append(group)
        self.properties |= {
            "spark.jobGroup.id": group,
            "spark.job.description": description,
            "spark.job.interruptOnCancel": str(interruptOnCancel).lower(),
        }

    def cancelJobGroup(self, group):  # noqa: N802
        self.cancelled.append(group)


class Session:
    """A session of that context."""

    def __init__(self) -> None:
        self.sparkContext = Context()


@pytest.fixture
def session():
    return Session()


def test_every_change_is_told_once(session):
    """Each change is reported once, while the block runs and at its end."""
    told = []
    context = session.sparkContext

    with watched(session, "scrub", lambda *one: told.append(one), poll_seconds=POLL_SECONDS):
        while context.polls < 3:
            time.sleep(POLL_SECONDS)
        context.stage.numCompletedTasks = 10
    assert told == [("scrub", 0, 10), ("scrub", 10, 10)]


def test_tasks_count_from_when_their_stage_begins(session):
    """The tasks of a shuffle are many and short, and Spark skips stages whose results it has."""
    told = []
    context = session.sparkContext
    context.stage.numCompletedTasks = 10
    context.following = Stage(numTasks=200, numActiveTasks=0)
    for _ in range(2):
        with watched(session, "scrub", lambda *one: told.append(one)):
            pass
        context.following.numActiveTasks = 2
    assert told == [("scrub", 10, 10), ("scrub", 10, 210)]


def test_nothing_is_told_before_there_are_tasks(session):
    """A job whose stages have not begun says nothing."""
    session.sparkContext.stage.numTasks = 0
    told = []
    with watched(session, "scrub", lambda *one: told.append(one), poll_seconds=POLL_SECONDS):
        pass
    assert told == []


def test_group_of_the_caller_comes_back(session):
    """A notebook's cell has a group of its own, by which it is cancelled."""
    context = session.sparkContext
    context.properties = before = {"spark.jobGroup.id": "cell 4", "spark.job.description": "look"}
    with watched(session, "scrub", silent):
        assert context.properties["spark.jobGroup.id"].startswith("tieringd-")
        assert context.properties["spark.job.description"] == "scrub"
    assert context.properties == before | {"spark.job.interruptOnCancel": None}
    assert context.cancelled == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_tasks_of_a_block_that_fails_are_cancelled(session, failure):
    """Executors do not go on with tasks whose results are not used."""

    def fail():
        with watched(session, "scrub", silent):
            raise failure

    with pytest.raises(failure):
        fail()
    assert session.sparkContext.cancelled == session.sparkContext.groups != []
    assert not [one for one in threading.enumerate() if one.name == "tieringd-progress"]
