"""The rates of archived records, to all clients together and to one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.gateway_peers import TopicArchive, fetch, fetched, partition_of, plain_request, running
from tests.support.archive_endpoints import until
from tests.support.raw_kafka import connected
from tieringd.gateway.read_rates import AHEAD_SECONDS, ANSWER_BYTES_MAX, WAIT_SECONDS_MAX, ReadRates

ARCHIVED = {"old": {0: {"error_code": 1}}}


def test_without_a_limit_no_client_is_delayed():
    """The size of an answer has a broker's limit alone."""
    rates = ReadRates()
    assert rates.answer_bytes(now=5.0) == ANSWER_BYTES_MAX
    assert rates.spend("a", 1 << 40, now=5.0) == 0


@pytest.mark.parametrize(
    ("spent", "waits"),
    [
        ([(0.0, 100)], [0]),
        ([(0.0, 100), (0.0, 50)], [0, 0.5]),
        ([(0.0, 300), (1.0, 100), (9.0, 10)], [2, 2, 0]),
        ([(0.0, 100_000)], [WAIT_SECONDS_MAX]),
    ],
)
def test_client_waits_until_its_bytes_are_earned(spent, waits):
    """A client may be a second ahead of its rate, and never waits for long."""
    rates = ReadRates(client_bytes_per_second=100)
    assert [rates.spend("a", size, now=now) for now, size in spent] == waits


def test_limit_for_each_leaves_the_others_alone():
    """The common limit holds for every client, and the stricter limit counts."""
    rates = ReadRates(bytes_per_second=1000, client_bytes_per_second=100)
    assert rates.answer_bytes(now=0.0) == 100
    assert rates.spend("greedy", 900, now=0.0) == 8
    assert rates.spend("other", 100, now=0.0) == 0
    assert rates.spend("third", 100, now=0.0) == pytest.approx(0.1)


def test_other_limits_hold_for_what_was_overspent_before():
    """Twice the rate leaves half the wait. A limit that is taken away leaves none, also of a day's."""
    rates = ReadRates(client_bytes_per_second=100, principal_dollars_per_day=1.0)
    assert rates.spend("a", 500, now=0.0, principal="p") == 4
    rates.charge("p", 1.5, now=0.0)
    assert rates.answer_bytes(now=0.0, host="a", principal="p") == 1
    limits = {"bytes_per_second": None, "principal_bytes_per_second": None}
    rates.set_limits(client_bytes_per_second=200, principal_dollars_per_day=3.0, now=0.0, **limits)
    assert rates.spend("a", 1, now=0.0, principal="p") == pytest.approx(1.505)
    rates.set_limits(client_bytes_per_second=None, principal_dollars_per_day=None, now=0.0, **limits)
    assert rates.spend("a", 1 << 40, now=0.0, principal="p") == 0
    assert rates.answer_bytes(now=0.0, host="a", principal="p") == ANSWER_BYTES_MAX
    rates.set_limits(client_bytes_per_second=100, principal_dollars_per_day=1.0, now=5.0, **limits)
    assert rates.spend("a", 100, now=5.0, principal="p") == 0


def test_answer_is_never_larger_than_a_brokers():
    """A Fetch may allow 2 GiB, and cached partitions may have it. No response can be that large."""
    assert ReadRates().answer_bytes(now=0.0) == 55 << 20
    rates = ReadRates(bytes_per_second=1 << 40)
    assert rates.answer_bytes(now=0.0) == 55 << 20
    rates.spend("a", 1 << 42, now=0.0)
    assert rates.answer_bytes(now=0.0) == 55 << 20


@given(
    rate=st.integers(1, 10**6),
    spent=st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**5)), max_size=30),
)
def test_client_that_waits_gets_no_more_than_its_rate(rate, spent):
    """A client gets at most its rate over its whole time, besides a second's worth and its last answer."""
    rates, now, total = ReadRates(client_bytes_per_second=rate), 0.0, 0
    for pause, wanted_bytes in spent:
        size_bytes = min(wanted_bytes, int(rates.answer_bytes(now=now)))
        total += size_bytes
        wait = rates.spend("a", size_bytes, now=now)
        assert wait <= AHEAD_SECONDS + 1e-6
        now += wait + pause
    assert total <= rate * (now + 2 * AHEAD_SECONDS) * (1 + 1e-9)


def test_many_readers_together_keep_to_the_limit():
    """Each waits no longer than a client's patience, and gets less the more there are."""
    rates, total = ReadRates(bytes_per_second=1000), 0
    due = [0.0] * 100
    while (now := min(due)) < 600:
        size_bytes = int(rates.answer_bytes(now=now))
        total += size_bytes
        due[due.index(now)] = now + max(rates.spend("a", size_bytes, now=now), 0.01)
    assert total < 1000 * 600 * 1.2


@pytest.mark.parametrize("limit", ["client_bytes_per_second", "principal_bytes_per_second"])
def test_many_connections_of_one_client_keep_to_its_limit(limit):
    """Each of them waits the longest pause at most, so their answers shrink."""
    rates, total = ReadRates(**{limit: 1000}), 0
    due = [0.0] * 100
    while (now := min(due)) < 600:
        size_bytes = int(rates.answer_bytes(now=now, host="a", principal="User:a"))
        total += size_bytes
        due[due.index(now)] = now + max(rates.spend("a", size_bytes, now=now, principal="User:a"), 0.01)
    assert total < 1000 * 600 * 1.2
    assert rates.answer_bytes(now=600, host="b", principal="User:b") == 1000


@pytest.mark.parametrize("others", [{}, {"bytes_per_second": 100}])
def test_answers_of_a_principal_that_has_spent_its_dollars_are_small(others):
    """A first batch is in them, so it goes on. At least one byte, so a Fetch at the log's end still waits."""
    rates = ReadRates(principal_dollars_per_day=1.0, **others)
    rates.charge("User:a", 1.5, now=0.0)
    assert rates.answer_bytes(now=0.0, principal="User:a") == 1
    assert rates.answer_bytes(now=0.0, principal="User:b") == others.get("bytes_per_second", ANSWER_BYTES_MAX)


def test_debt_of_clients_that_have_gone_is_forgotten():
    """A client that stays waits no longer for the bytes of others than for its own."""
    rates = ReadRates(bytes_per_second=1000)
    for _ in range(500):
        rates.spend("gone", 1000, now=0.0)
    assert rates.spend("left", 1, now=0.0) == WAIT_SECONDS_MAX
    assert rates.spend("left", 1, now=WAIT_SECONDS_MAX + 1) == 0


def test_clients_that_have_earned_everything_are_forgotten():
    """Few clients are kept, however many there were."""
    rates = ReadRates(client_bytes_per_second=100)
    for number in range(5000):
        rates.spend(f"host-{number}", 10, now=float(number))
    assert len(rates._clients._accounts) < 2000


async def test_client_that_was_sent_too_much_is_not_read_from(broker):
    """The client's connection stays and is served when its time has come. Those of others go on."""
    archive = TopicArchive()
    async with (
        running(broker, archive, archive_bytes_per_second=60) as server,
        connected(server.port) as client,
        connected(server.port) as other,
    ):
        client.send(fetch())
        head, _, answers = await broker.next()
        answers.write(fetched(head, ARCHIVED))
        assert partition_of(await client.answer(fetch()), "old").records == b"archived"
        assert archive.questions[0].max_bytes == 60
        await until(lambda: server.counters.delayed_answers == 1)
        client.writer.write(plain_request(5))
        other.writer.write(plain_request(6))
        assert [(await broker.next())[0].correlation_id for _ in range(2)] == [6, 5]
