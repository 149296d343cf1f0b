"""Tasks that end by a defect are counted and started again; errors of our own tree end them."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from tieringd.errors import ConfigError
from tieringd.metrics import Metrics
from tieringd.metrics.restarts import restarted


async def test_task_is_started_again_after_each_defect():
    """The task ends when it returns. Each failure is logged and counted."""
    metrics = Metrics()
    faults = [KeyError("Unknown tagged field tag: 50"), ExceptionGroup("two", [ValueError(), TypeError()])]

    async def run():
        if faults:
            raise faults.pop()

    with capture_logs() as logs:
        await restarted("scan", run, on_failure=metrics.health.task_failed, pause_seconds=0)
    assert faults == []
    assert metrics.registry.get_sample_value("tieringd_task_failures_total", {"task": "scan"}) == 2
    assert [each["task"] for each in logs if each["log_level"] == "error"] == ["scan", "scan"]


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ConfigError("the port is taken"), id="one"),
        pytest.param(ExceptionGroup("tasks", [KeyError(), ConfigError("the port is taken")]), id="group"),
    ],
)
async def test_error_that_an_operator_must_act_on_ends_the_task(error):
    """The error is raised as it is, and not counted. A group of tasks raises it in a group."""
    failures = []

    async def run():
        raise error

    with pytest.raises(type(error)) as caught:
        await restarted("gateway", run, on_failure=failures.append)
    assert caught.value is error
    assert failures == []


async def test_cancelled_task_is_not_started_again():
    """A cancelled task ends, even in the pause after a defect."""
    failures = asyncio.Queue()

    async def run():
        raise RuntimeError("a defect")

    task = asyncio.create_task(restarted("scan", run, on_failure=failures.put_nowait, pause_seconds=1000))
    await failures.get()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
