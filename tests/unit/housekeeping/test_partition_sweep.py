"""Passes over partitions: all of them once, and then those that changed or have something left."""

from __future__ import annotations

import pytest

from tieringd.archiving.resting import ChangeFeed
from tieringd.errors import StorageUnavailable
from tieringd.housekeeping.partition_sweep import PartitionSweep, ShareResult
from tieringd.model.partition import Leadership, TopicIdPartition

RESTS = ShareResult(may_rest=True)


class Job:
    """A job over three partitions that notes which of them got a share."""

    def __init__(self):
        self.led = [Leadership(TopicIdPartition("cluster", "orders", "id", number), 0) for number in range(3)]
        self.partitions = {leadership: leadership for leadership in self.led}
        self.answers, self.served, self.forgotten = {}, [], []
        self.feed = ChangeFeed()
        self.sweep = PartitionSweep(
            lambda: self.partitions,
            share=self.share,
            forget=self.forgotten.append,
            changed=self.feed.reader(),
        )

    async def share(self, leadership):
        self.served.append(leadership)
        answer = self.answers.get(leadership, RESTS)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def turn(self):
        """Give a turn, and return the partitions that had a share."""
        self.served = []
        await self.sweep.turn(requests_max=100)
        return self.served


@pytest.fixture
def job():
    return Job()


async def test_first_pass_is_over_all_and_later_ones_over_what_changed(job):
    """A partition in which nothing changed is not swept again."""
    assert await job.turn() == job.led
    assert await job.turn() == []
    job.feed.note(job.led[1])
    assert await job.turn() == [job.led[1]]
    assert await job.turn() == []


@pytest.mark.parametrize("share", [ShareResult(), ShareResult(has_more=True), ShareResult(requests=1)])
async def test_partition_that_may_not_rest_is_in_each_pass(job, share):
    """A partition rests once its share allows it."""
    job.answers[job.led[2]] = share
    await job.turn()
    assert await job.turn() == await job.turn() == [job.led[2]]
    job.answers.clear()
    assert await job.turn() == [job.led[2]]
    assert await job.turn() == []


async def test_partition_whose_share_failed_is_in_the_next_pass(job):
    """The turn ends with its error, and the next one goes on with the others."""
    job.answers[job.led[1]] = StorageUnavailable("the store does not answer")
    with pytest.raises(StorageUnavailable):
        await job.turn()
    assert await job.turn() == [job.led[2]]
    job.answers.clear()
    assert await job.turn() == [job.led[1]]


async def test_partition_that_passes_over_failures_does_not_rest(job):
    """The partition is passed over for a while, and comes again."""
    job.answers[job.led[0]] = ShareResult(has_failed=True)
    assert [len(await job.turn()) for _ in range(4)] == [3, 0, 0, 1]


async def test_partition_that_is_gone_is_forgotten_and_may_come_again(job):
    """The end of a partition is a change, and so is its return."""
    await job.turn()
    gone = job.partitions.pop(job.led[0])
    job.feed.note(gone)
    assert await job.turn() == []
    assert job.forgotten == [gone]
    job.partitions[gone] = gone
    job.feed.note(gone)
    assert await job.turn() == [gone]


async def test_without_a_feed_each_pass_is_over_all(job):
    """Anything may have changed if no feed reports changes."""
    sweep = PartitionSweep(lambda: job.partitions, share=job.share, forget=job.forgotten.append)
    for _ in range(2):
        job.served = []
        await sweep.turn(requests_max=100)
        assert job.served == job.led
    del job.partitions[job.led[1]]
    await sweep.turn(requests_max=100)
    assert job.forgotten == [job.led[1]]
