"""The parts of the swarm that decide: its schedule, what counts as a fault, and what breaks a promise."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.protocol.commit import OffsetFetchResponse_v3

from tests.support.writers import Acknowledged, Writer
from tests.swarm.checker import Progress, Resources, broken_log, grown
from tests.swarm.ending import cancelled_by_signals, in_thread
from tests.swarm.kinds import KINDS, kinds_of, slow
from tests.swarm.report import Report
from tests.swarm.schedule import Step, schedule
from tests.swarm.sharing import lacks, printed_offsets
from tests.swarm.stores import STORES
from tests.swarm.transactions import CommittedReader, Outcome, Place, broken_transactions


def test_a_seed_always_has_the_same_schedule():
    """Another seed has another one."""
    first = list(islice(schedule(1, list(KINDS)), 100))
    assert first == list(islice(schedule(1, list(KINDS)[::-1]), 100))
    assert first != list(islice(schedule(2, list(KINDS)), 100))


def test_each_kind_comes_before_any_comes_again():
    """There are more than twenty."""
    assert len(KINDS) >= 20
    assert {step.kind for step in islice(schedule(3, list(KINDS)), len(KINDS))} == set(KINDS)


def test_slow_kinds_come_in_one_round_of_six():
    """Slow kinds leave room for many faults in an hour, and each kind still comes more than once."""
    slow_kinds = slow(KINDS)
    assert slow_kinds
    once = len(KINDS)
    quick = once - len(slow_kinds)
    found = Counter(step.kind for step in islice(schedule(4, list(KINDS), slow_kinds), 2 * once + 5 * quick))
    assert {found[kind] for kind in slow_kinds} == {2}
    assert {found[kind] for kind in KINDS if kind not in slow_kinds} == {7}


def test_each_store_has_at_least_twenty_kinds():
    """A directory has no requests that could be spoiled, and has a disk."""
    assert len(kinds_of("s3")) > len(kinds_of("gcs")) > len(kinds_of("azure")) > len(kinds_of("file")) >= 20
    assert set(kinds_of("file")) - set(kinds_of("s3"))
    assert set(KINDS) == {kind for store in STORES for kind in kinds_of(store)}


def test_what_a_share_group_did_not_get_is_told():
    """An acknowledged record has to reach one of its consumers; one more is no fault."""
    writer = Writer("t", 0, [Acknowledged(0, 0), Acknowledged(1, 2)], sent=4)
    assert lacks(writer, [0, 1, 2]) == []
    (told,) = lacks(writer, [0, 2])
    assert "lacks 1 records of t-0, the first Acknowledged(offset=1, number=2)" in told


def test_log_of_a_share_consumer_may_be_printed_in_the_middle_of_a_record():
    """An hour of the swarm had this: the offset was printed, and the checker did not see it."""
    logged = b"04:20:20.145 [consumer_background_thread] INFO  Discovered group coordinator, errorCode=0\n"
    output = b"Offset:" + logged + b"19345\nOffset:193" + logged + b"47\n" + logged + b"Offset:19349\n"
    assert printed_offsets(output) == {19345, 19347, 19349}


def test_log_with_each_value_once_and_in_order_is_good():
    """A value that was sent and not acknowledged may be there or not."""
    writer = Writer("t", 0, [Acknowledged(0, 0), Acknowledged(1, 2)], sent=4)
    assert broken_log(writer, {0: 0, 1: 2, 2: 3}) == []


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({0: 0}, "acknowledged records are lost"),
        ({0: 0, 1: 3}, "acknowledged records are lost"),
        ({0: 0, 1: 2, 2: 2}, "twice"),
        ({0: 0, 1: 2, 2: 1}, "out of order"),
        ({0: 0, 1: 2, 3: 3}, "offsets are missing"),
    ],
)
def test_log_that_breaks_a_promise_is_told(numbers, says):
    """Lost, doubled, out of order, with a hole."""
    writer = Writer("t", 0, [Acknowledged(0, 0), Acknowledged(1, 2)], sent=4)
    assert any(says in one for one in broken_log(writer, numbers))


def test_fault_without_proof_does_not_count(tmp_path):
    """The page says how many there were, and keeps what is around the markers."""
    report = Report(seed=7)
    step = Step(0, "store hangs", 1, 0, 1.0)
    report.add(step, "3 requests without an answer", 2.0, 1.0)
    report.add(step, "", 9.0, None)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- swarm: begin -->\nold\n<!-- swarm: end -->\nafter\n")
    report.write_into(page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "with seed 7 and the store s3: 1 faults of 1 kinds" in text
    assert "1 more had no effect" in text
    assert "| store hangs | 1 | 3 requests without an answer | 1 s | 2 s |" in text


def test_growth_of_a_daemon_is_told():
    """Some descriptors more are its work; hundreds are a leak."""
    before = {1: Resources(Counter(socket=60, log=40), 1 << 27)}
    assert grown(before, {1: Resources(Counter(socket=110), 1 << 27)}) == []
    (told,) = grown(before, {1: Resources(Counter(socket=400), 1 << 27)})
    assert "100 descriptors (40 log, 60 socket) and 128 MiB to 400 descriptors (400 socket)" in told
    assert len(grown(before, {1: Resources(Counter(socket=60), 1 << 29)})) == 1


WHOLE = [Place(0, 0), Place(0, 1), Place(0, 2)]
OTHER = [Place(1, index) for index in range(3)]


def seen(*partitions: list[Place]) -> dict[int, dict[int, Place]]:
    return {number: dict(enumerate(places)) for number, places in enumerate(partitions)}


def test_transactions_that_readers_of_committed_records_may_see_so():
    """Committed ones as a whole, aborted ones not at all, unknown ones as a whole or not at all."""
    outcomes = [Outcome.COMMITTED, Outcome.UNKNOWN, Outcome.ABORTED]
    assert broken_transactions(outcomes, seen(WHOLE, WHOLE)) == []
    assert broken_transactions(outcomes, seen(WHOLE + OTHER, WHOLE + OTHER)) == []


@pytest.mark.parametrize(
    ("outcome", "found", "says"),
    [
        (Outcome.COMMITTED, seen(WHOLE, WHOLE[:2]), "is committed"),
        (Outcome.COMMITTED, seen(WHOLE, []), "is committed"),
        (Outcome.ABORTED, seen([], WHOLE), "is aborted"),
        (Outcome.UNKNOWN, seen(WHOLE, []), "is unknown"),
        (Outcome.UNKNOWN, seen(WHOLE[:1], WHOLE[:1]), "is unknown"),
        (Outcome.COMMITTED, seen(WHOLE, WHOLE + WHOLE), "twice"),
        (Outcome.COMMITTED, seen(WHOLE, WHOLE[::-1]), "out of order"),
    ],
)
def test_transaction_that_is_seen_otherwise_is_told(outcome, found, says):
    """
    A broken transaction is reported.

    It is seen in part, in one partition only, twice, out of order, or although it was aborted.
    """
    assert any(says in one for one in broken_transactions([outcome], found))


def test_committed_offset_that_was_never_committed_is_told():
    """An offset whose commit was asked for without an answer may be the group's or not."""
    reader = CommittedReader("reader", "", "", "group", acknowledged={0: 5, 1: 5}, asked={0: 9, 1: 9})
    for partition, found in ((0, 9), (0, 9), (1, 5)):
        reader.check_committed(partition, found)
    assert reader.broken == []
    reader.check_committed(1, 9)
    reader.check_committed(0, None)
    assert len(reader.broken) == 2


async def test_cancelled_task_waits_for_its_thread():
    """The thread could otherwise start a process after everything was ended."""
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait()
        ended.set()

    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    was_done = task.done()
    may_end.set()
    assert not was_done
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_first_signal_cancels_and_the_next_ones_do_not():
    """The clean-up is not interrupted."""
    cleaned = asyncio.Event()

    async def run() -> list[signal.Signals]:
        with cancelled_by_signals() as received:
            try:
                signal.raise_signal(signal.SIGTERM)
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                signal.raise_signal(signal.SIGINT)
                while len(received) < 2:  # noqa: ASYNC110 the loop calls the handler soon
                    await asyncio.sleep(0)
                cleaned.set()
        return received

    assert await asyncio.create_task(run()) == [signal.SIGTERM, signal.SIGINT]
    assert cleaned.is_set()


class SilentClient:
    """The client below a fetcher: node 1 leads all, and never answers."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._metadata_max_age_ms = 1000
        self.cluster = SimpleNamespace(leader_for_partition=lambda _: 1)

    async def send(self, node_id, request):
        """Wait for ever."""
        await asyncio.Event().wait()


async def until_fetching(fetcher):
    """Return when a fetcher waits for an answer."""
    while not fetcher._pending_tasks:  # noqa: ASYNC110 a fetcher has no event for it
        await asyncio.sleep(0)


async def test_fetcher_of_aiokafka_may_swallow_its_end():
    """
    The fetcher of aiokafka may swallow its end, so the swarm gives up a member that hangs there.

    No gateway and no broker is part of it.
    """
    one = TopicPartition("t", 0)
    swallowed = set()
    for turns in range(6):
        state = SubscriptionState()
        fetcher = Fetcher(SilentClient(), state, key_deserializer=None)
        state.subscribe({"t"})
        state.assign_from_subscribed([one])
        state.subscription.assignment.state_value(one).seek(5)
        await until_fetching(fetcher)
        state.unsubscribe()
        for _ in range(turns):
            await asyncio.sleep(0)
        fetcher._fetch_task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        if not fetcher._fetch_task.done():
            swallowed.add(turns)
            fetcher._fetch_task.cancel()
    assert swallowed


async def test_group_of_aiokafka_takes_an_error_for_no_offset():
    """A group of aiokafka takes error 14 for no offset, so the swarm asks again while it loads."""
    coordinator = object.__new__(GroupCoordinator)
    coordinator.group_id = "g"

    async def answered(request):
        return OffsetFetchResponse_v3(throttle_time_ms=0, topics=[], error_code=14)

    coordinator._send_req = answered
    assert await coordinator._do_fetch_commit_offsets([TopicPartition("t", 0)]) == {}


class LoadingConsumer:
    """A group's consumer whose coordinator loads the group at first."""

    def __init__(self):
        self.offsets = [None, 7]

    async def committed(self, one):
        """Return the offset as aiokafka tells it."""
        return self.offsets.pop(0)

    def seek(self, one, offset):
        """Note where the client goes on."""
        self.sought = offset


async def test_member_asks_again_while_its_group_is_loaded():
    """Committed offsets that a client learns later are no broken promise."""
    reader = CommittedReader("reader", "", "", "group", acknowledged={0: 7, 1: 7}, asked={0: 7, 1: 7})
    reader._consumer = LoadingConsumer()
    await reader.on_partitions_assigned([TopicPartition("t", 0)])
    assert (reader.broken, reader.untold, reader._consumer.sought) == ([], 1, 7)


def test_a_reader_that_goes_on_slowly_is_not_given_up():
    """Only one that stands still for minutes is: a machine with much to do breaks no promise."""
    progress = Progress(iter(range(0, 10**6, 100)).__next__)
    assert all(progress.goes_on(position) for position in range(20))
    assert not all(progress.goes_on(20) for _ in range(5))
