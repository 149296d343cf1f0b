"""What a worker of a gateway knows: no older than a second, and without what was deleted since."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fakes.virtual_loop import virtually
from tieringd.errors import RetryableError
from tieringd.gateway.known_partitions import FORGOTTEN_AFTER_SECONDS, PublishedNames, TopicNames
from tieringd.gateway.published_partitions import KEPT_MAX, FoundPartition, PublishedPartitions
from tieringd.model.manifest import PartitionManifest
from tieringd.model.manifest_parts import RecordDeletion
from tieringd.model.partition import NO_TOPIC_ID, LogBounds, TopicIdPartition

ORDERS = TopicIdPartition("c", "orders", "AAAAAAAAAAAAAAAAAAAAAg", 0)
MANIFEST = PartitionManifest(ORDERS, 0, 100, leader_epoch=3, epochs=((3, 0),))
NAMES = PublishedNames(
    "c",
    (
        TopicNames("orders", ORDERS.topic_id, is_readable=True, numbers=(0, 1)),
        TopicNames("secret", "AAAAAAAAAAAAAAAAAAAAAw", is_readable=False, numbers=(0,)),
    ),
)


class FakeDaemon:
    """Answers each question with the manifest, as of now, and remembers what it was asked."""

    def __init__(self):
        self.manifest, self.version = MANIFEST, 1
        self.asked = []
        self.is_gone = False
        self.age_seconds = 0.0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def ask(self, name, *arguments):
        self.asked.append((name, *arguments))
        await self.go_on.wait()
        if self.is_gone:
            raise RetryableError("the daemon has ended")
        if name != "find":
            return None
        _, number, since, version = arguments
        partition = replace(ORDERS, partition=number)
        manifest = None if version == self.version else replace(self.manifest, partition=partition)
        as_of = max(since, now() - self.age_seconds)
        return FoundPartition(self.version, manifest, LogBounds(50, 120, 120), (), 0, as_of)

    @property
    def finds(self):
        """Return how often it was asked for a partition."""
        return sum(one[0] == "find" for one in self.asked)


def now():
    """Return the loop's time."""
    return asyncio.get_running_loop().time()


def worker_of(daemon, names=NAMES, deletions=None):
    """Return what a worker knows."""
    return PublishedPartitions(daemon, None, names=names, deletions=deletions or {}, now=now)


@virtually
async def test_answer_is_used_for_a_second_and_asked_for_again_before():
    """A client that reads on does not wait; a daemon that stands still is not believed for longer."""
    daemon = FakeDaemon()
    known = worker_of(daemon)
    assert (await known.find("orders", 0)).manifest is not None
    for _ in range(9):
        await asyncio.sleep(0.1)
        assert (await known.find("orders", 0)).as_of > now() - 1
    assert daemon.finds == 2, "one in the background, after half a second"
    await asyncio.sleep(0.3)
    daemon.go_on.clear()
    known_at = (await known.find("orders", 0)).as_of
    waiting = asyncio.ensure_future(known.find("orders", 0))
    await asyncio.sleep(known_at + 1 - now() + 0.01)
    late = asyncio.ensure_future(known.find("orders", 0))
    await asyncio.sleep(5)
    assert waiting.done()
    assert not late.done(), "what was known a second ago is not used"
    daemon.go_on.set()
    assert (await late).as_of > known_at + 1


@virtually
async def test_caller_gets_what_is_as_new_as_it_wants():
    """An answer that was under way before is not enough."""
    daemon = FakeDaemon()
    known = worker_of(daemon)
    daemon.age_seconds = 0.9
    await known.find("orders", 0)
    await asyncio.sleep(0.2)
    daemon.age_seconds = 0.0
    since = now()
    assert (await known.find("orders", 0, since=since)).as_of >= since
    assert daemon.finds == 2


@virtually
async def test_manifest_is_sent_once():
    """The daemon is told which version is here."""
    daemon = FakeDaemon()
    known = worker_of(daemon)
    first = await known.find("orders", 0)
    await asyncio.sleep(2)
    again = await known.find("orders", 0)
    assert again.manifest is first.manifest
    assert daemon.asked[-1][-1] == 1
    daemon.manifest, daemon.version = replace(MANIFEST, next_offset=200), 2
    await asyncio.sleep(2)
    assert (await known.find("orders", 0)).manifest.next_offset == 200


@virtually
async def test_partitions_that_may_not_be_read_are_not_asked_for():
    """A partition that no scan saw may be new: the daemon decides."""
    daemon = FakeDaemon()
    known = worker_of(daemon)
    assert await known.find("secret", 0) is None
    assert not known.may_have("secret", 0)
    assert daemon.asked == []
    assert known.may_have("new", 0)
    assert known.identified("orders", 0) == ORDERS
    assert worker_of(daemon, names=None).may_have("secret", 0), "nothing is known yet"


@virtually
async def test_deletion_counts_from_the_moment_it_is_told():
    """Also for an answer that came before it, and for one that is under way."""
    daemon = FakeDaemon()
    known = worker_of(daemon)
    await known.find("orders", 0)
    deletion = RecordDeletion(30, 3)
    known.hide(ORDERS, deletion)
    assert (await known.find("orders", 0)).deleted_before == 30
    assert known.deleted_before(ORDERS) == 30
    await asyncio.sleep(2)
    daemon.go_on.clear()
    under_way = asyncio.ensure_future(known.find("orders", 0))
    await asyncio.sleep(0)
    known.hide(ORDERS, RecordDeletion(40, 3))
    daemon.go_on.set()
    assert (await under_way).deleted_before == 40
    later = worker_of(daemon, deletions={ORDERS: (deletion,)})
    assert (await later.find("orders", 0)).deleted_before == 30, "a worker that starts is told at once"


@virtually
async def test_deletion_is_hidden_here_before_the_daemon_is_told():
    """A client does not hear that records are gone if the daemon has ended, but this worker hides them."""
    daemon = FakeDaemon()
    known = worker_of(daemon)
    await known.find("orders", 0)
    daemon.is_gone = True
    with pytest.raises(RetryableError, match="has ended"):
        await known.note_deletion(ORDERS, RecordDeletion(30, 3))
    assert known.deleted_before(ORDERS) == 30


@virtually
async def test_memory_is_bounded_and_a_noted_deletion_is_kept():
    """The manifests that were read last stay, and those whose deletion only this worker can compute."""
    daemon = FakeDaemon()
    names = PublishedNames(
        "c",
        (TopicNames("orders", ORDERS.topic_id, is_readable=True, numbers=tuple(range(KEPT_MAX + 5))),),
    )
    known = worker_of(daemon, names)
    await known.find("orders", 0)
    known.hide(ORDERS, RecordDeletion(30, 3))
    for number in range(1, KEPT_MAX + 5):
        await known.find("orders", number)
    assert len(known._kept) == KEPT_MAX
    assert known.deleted_before(ORDERS) == 30


@virtually
async def test_deletion_counts_for_a_partition_whose_manifest_was_forgotten():
    """A client reads more partitions than have room. What was prepared for it is dropped after a deletion."""
    daemon = FakeDaemon()
    numbers = tuple(range(KEPT_MAX + 5))
    topics = (TopicNames("orders", ORDERS.topic_id, is_readable=True, numbers=numbers),)
    known = worker_of(daemon, PublishedNames("c", topics))
    for number in numbers:
        await known.find("orders", number)
    known.hide(ORDERS, RecordDeletion(30, 3))
    assert known.may_be_deleted_before(ORDERS) == 30


@virtually
async def test_deletion_of_a_partition_that_is_gone_is_forgotten_in_time():
    """Topics come and go, so memory would grow. A partition that comes back in time has its deletion."""
    known = worker_of(FakeDaemon())
    without = PublishedNames("c", NAMES.topics[1:])
    known.hide(ORDERS, RecordDeletion(30, 3))
    for names, seconds, hidden in (
        (without, FORGOTTEN_AFTER_SECONDS - 1, 30),
        (NAMES, FORGOTTEN_AFTER_SECONDS, 30),
        (without, FORGOTTEN_AFTER_SECONDS, 30),
        (without, 0, 0),
    ):
        known.set_names(names)
        assert known.may_be_deleted_before(ORDERS) == hidden
        await asyncio.sleep(seconds)


@virtually
async def test_deletion_of_a_topic_without_an_id_is_forgotten_when_it_is_gone():
    """The topic of this name that comes next may be another one, whose records nobody has deleted."""
    known = worker_of(FakeDaemon())
    without_id = replace(ORDERS, topic_id=NO_TOPIC_ID)
    known.hide(without_id, RecordDeletion(30, 3))
    assert known.may_be_deleted_before(without_id) == 30
    known.set_names(NAMES)
    assert known.may_be_deleted_before(without_id) == 0
