"""What is counted of each reader, what is logged of a slow one, and what a budget makes it wait."""

from __future__ import annotations

import asyncio
import base64
import json
import struct

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from tests.fakes.gateway_peers import TopicArchive, fetch, fetched, running
from tests.support.kafka_messages import request_frame, request_module
from tests.support.raw_kafka import connected
from tieringd.gateway.archive_answers import ArchivedFetch
from tieringd.gateway.frames import ClientResponse
from tieringd.gateway.read_rates import ReadRates
from tieringd.gateway.reader_records import INTERVAL_SECONDS, LINES_MAX, ReaderRecords
from tieringd.metrics.readers import OTHER, READER, READERS_MAX, Reader, ReaderCounts, Source
from tieringd.policies.prices import LIST_PRICES

ARCHIVED = {"old": {0: {"error_code": 1}}}
PLAIN, SCRAM = "PLAIN", "SCRAM-SHA-256"
BEARER = "OAUTHBEARER"
OK, REFUSED, ILLEGAL_STATE = 0, 58, 34
INVALID_TOKEN = b'{"status":"invalid_token"}'
"""The text with which a broker refuses a token of OAUTHBEARER. Its error code is 0."""


def web_token(claims):
    """Return a JSON Web Token whose signature is wrong."""
    head, payload = (
        base64.urlsafe_b64encode(json.dumps(one).encode()).decode().rstrip("=")
        for one in ({"alg": "RS256"}, claims)
    )
    return f"{head}.{payload}.c2VjcmV0"


def bearer(*tokens):
    """Return a client's first message of OAUTHBEARER."""
    return b"n,,\1" + "".join(f"auth=Bearer {token}\1" for token in tokens).encode() + b"\1"


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def counts(registry):
    return ReaderCounts(registry, CollectorRegistry())


def count(registry, name, reader=None, **labels):
    """Return a count of a reader, or of all."""
    if reader is not None:
        labels |= {"principal": reader.principal, "client_id": reader.client_id}
    return registry.get_sample_value(f"tieringd_gateway_{name}", labels) or 0


async def ask(broker, client, said=None, *, client_id="test"):
    """Fetch, have the broker answer, and return the whole frame that the client gets."""
    client.writer.write(bytes(request_frame(fetch(("old",)), client_id=client_id)))
    head, _, answers = await broker.next()
    answers.write(fetched(head, said or ARCHIVED))
    return await client.frame()


class StoredArchive(TopicArchive):
    """Has waited for the store for each answer."""

    async def fetch(self, question):
        found = await super().fetch(question)
        return ArchivedFetch(found.partitions, found.release, found.next_fetches, waited_for=("chunk",))


async def login(broker, client, mechanism, tokens, errors):
    """Log in with *tokens*. The broker answers with *errors*: codes, or texts of answers without a code."""
    handshake = request_module(17, 1).SaslHandshakeRequest(mechanism=mechanism)
    client.writer.write(bytes(request_frame(handshake)))
    head, _, answers = await broker.next()
    answers.write(struct.pack(">iihi", 10, head.correlation_id, 0, 0))
    await client.frame()
    for token, error in zip(tokens, errors, strict=True):
        message = request_module(36, 1).SaslAuthenticateRequest(auth_bytes=token)
        client.writer.write(bytes(request_frame(message)))
        head, _, answers = await broker.next()
        code, text = (error, b"") if isinstance(error, int) else (OK, error)
        said = struct.pack(">ihhi", head.correlation_id, code, -1, len(text)) + text + bytes(8)
        answers.write(struct.pack(">i", len(said)) + said)
        await client.frame()


@pytest.mark.parametrize(("archive", "source"), [(TopicArchive, "cache"), (StoredArchive, "store")])
async def test_fetches_are_counted_by_source_and_reader(broker, registry, counts, archive, source):
    """Fetches are counted with bytes and seconds, also those that the broker answers."""
    async with running(broker, archive(), counts) as server, connected(server.port) as client:
        archived = len(await ask(broker, client))
        own = len(await ask(broker, client, {"x": {0: {}}}))
    reader = Reader(client_id="test")
    for one, size in ((source, archived), ("broker", own)):
        assert count(registry, "fetch_seconds_count", source=one) == 1
        assert count(registry, "fetch_bytes_total", source=one) == size
        assert count(registry, "reader_fetches_total", reader, source=one) == 1
        assert count(registry, "reader_bytes_total", reader, source=one) == size


@pytest.mark.parametrize(
    ("mechanism", "tokens", "errors", "principal"),
    [
        (PLAIN, [b"\0alice\0secret"], [OK], "User:alice"),
        (PLAIN, [b"\0alice\0secret"], [REFUSED], "User:ANONYMOUS"),
        (PLAIN, [b"alice"], [OK], "User:ANONYMOUS"),
        (SCRAM, [b"n,,n=al=2Cice,r=abc", b"c=biws,r=abcd,p=eA=="], [OK, OK], "User:al,ice"),
        (SCRAM, [b"n,,n=alice,r=abc", b"c=biws,r=abcd,p=eA=="], [OK, REFUSED], "User:ANONYMOUS"),
        (SCRAM, [b"n,,n=alice,r=abc"], [OK], "User:ANONYMOUS"),
        (SCRAM, [b"n,,n=alice,r=abc", b"c=biws,r=abcd,p=eA=="], [b"r=abcd,s=eA==", b"v=eA=="], "User:alice"),
        (BEARER, [bearer(web_token({"sub": "alice", "azp": "app"}))], [OK], "User:alice"),
        (BEARER, [bearer(web_token({"sub": "alice"}))], [REFUSED], "User:ANONYMOUS"),
        (BEARER, [bearer(web_token({"sub": "victim"})), b"\1"], [INVALID_TOKEN, REFUSED], "User:ANONYMOUS"),
        (
            BEARER,
            [bearer(web_token({"sub": "victim"})), bearer(web_token({"sub": "alice"}))],
            [INVALID_TOKEN, OK],
            "User:alice",
        ),
        (BEARER, [bearer(web_token({"sub": "victim"}), web_token({"sub": "alice"}))], [OK], "User:ANONYMOUS"),
        (BEARER, [bearer(web_token({"sub": 7}))], [OK], "User:ANONYMOUS"),
        (BEARER, [bearer(web_token(["sub"]))], [OK], "User:ANONYMOUS"),
        (BEARER, [bearer("secret")], [OK], "User:ANONYMOUS"),
        (BEARER, [bearer("a.W1tbW1tb.c")], [OK], "User:ANONYMOUS"),
    ],
)
async def test_user_is_seen_in_a_login_that_the_broker_accepts(
    broker, registry, counts, *, mechanism, tokens, errors, principal
):
    """
    A user is seen only in a login that the broker accepts: a client could spend another user's budget.

    A broker that refuses a token of OAUTHBEARER says so in a text, with the error code 0. No token is logged.
    """
    with capture_logs() as lines:
        async with running(broker, TopicArchive(), counts) as server, connected(server.port) as client:
            await login(broker, client, mechanism, tokens, errors)
            await ask(broker, client)
    assert count(registry, "reader_fetches_total", Reader(principal, "test"), source="cache") == 1
    assert "secret" not in str(lines)


async def test_answer_to_one_login_is_not_taken_for_that_to_another(broker, registry, counts):
    """
    A client may send a second login before the first is answered.

    A broker that does not ask for logins again refuses the second one, and keeps the connection.
    """
    requests = [
        request_module(17, 1).SaslHandshakeRequest(mechanism=PLAIN),
        request_module(36, 1).SaslAuthenticateRequest(auth_bytes=b"\0alice\0secret"),
        request_module(17, 1).SaslHandshakeRequest(mechanism=PLAIN),
        request_module(36, 1).SaslAuthenticateRequest(auth_bytes=b"\0victim\0wrong"),
    ]
    async with running(broker, TopicArchive(), counts) as server, connected(server.port) as client:
        client.writer.write(b"".join(bytes(request_frame(one)) for one in requests))
        heads = [await broker.next() for _ in requests]
        for (head, _, answers), error in zip(heads, (OK, OK, ILLEGAL_STATE, ILLEGAL_STATE), strict=True):
            said = (
                struct.pack(">hi", error, 0) if head.api_key == 17 else struct.pack(">hhiq", error, -1, 0, 0)
            )
            answers.write(struct.pack(">ii", 4 + len(said), head.correlation_id) + said)
            await client.frame()
        await ask(broker, client)
    assert count(registry, "reader_fetches_total", Reader("User:alice", "test"), source="cache") == 1


def test_name_of_a_reader_is_one_line_of_what_can_be_printed():
    """A client may write any bytes into its client id, also a line break and a line of a log after it."""
    reader = Reader.of("User:a\u2028b\x1b[2J", b"app\n2026-11-25 [error] archive lost\r\0\xff")
    assert reader.principal.isprintable()
    assert reader.client_id == "app\ufffd2026-11-25 [error] archive lost\ufffd\ufffd\ufffd"
    assert Reader.of("User:Jürgen", "größe".encode()) == Reader("User:Jürgen", "größe")


async def test_reader_past_its_budget_is_told_to_wait_and_is_not_read(broker, registry, counts):
    """
    The answer past the budget has a time to wait and no error, as a broker's does.

    All connections of a reader share the budget.
    """
    settings = {"principal_bytes_per_second": 100}
    async with (
        running(broker, TopicArchive(), counts, **settings) as server,
        connected(server.port) as first,
        connected(server.port) as second,
    ):
        waits = []
        for client in (first, second):
            frame = await ask(broker, client)
            # After size, correlation id and the header's tagged fields.
            waits.append(struct.unpack_from(">i", frame, 9)[0])
        assert waits[0] == 0
        assert waits[1] > 100
        began = asyncio.get_running_loop().time()
        await ask(broker, second)
        assert asyncio.get_running_loop().time() - began > waits[1] / 1000 - 0.05
        assert server.counters.delayed_answers == 2
    assert count(registry, "reader_throttled_seconds_total", Reader(client_id="test")) > waits[1] / 1000


def test_principal_that_has_spent_its_dollars_waits_and_no_other():
    """A day's budget may be spent at once. It comes back in the course of a day."""
    rates = ReadRates(principal_dollars_per_day=86.4)
    rates.charge("greedy", 86.4, now=0.0)
    assert rates.spend("host", 1, now=0.0, principal="greedy") == 0
    rates.charge("greedy", 0.005, now=0.0)
    assert rates.spend("host", 1, now=0.0, principal="greedy") == pytest.approx(5)
    assert rates.spend("host", 1, now=5.1, principal="greedy") == 0
    assert rates.spend("host", 1, now=0.0, principal="modest") == 0


def test_requests_to_the_store_cost_the_reader_that_caused_them(registry, counts):
    """Uploads and the daemon's own reads are charged to no reader."""
    reader, spent = Reader("User:a", "c"), []
    counts.prices = LIST_PRICES["aws"]
    counts.on_cost = lambda principal, dollars: spent.append((principal, dollars))
    counts.count_fetch(reader, Source.STORE, 1, 0.1)
    counts.count_store_request("get_range")
    token = READER.set(reader)
    counts.count_store_request("get_range")
    counts.count_store_request("put")
    READER.reset(token)
    price = LIST_PRICES["aws"].read_cost(1)
    assert spent == [("User:a", price)]
    assert count(registry, "reader_store_cost_dollars_total", reader) == price


def test_number_of_readers_with_series_is_bounded_and_no_count_falls(registry, counts):
    """A heavy reader that comes late gets a place. What is counted of all together is all."""
    seen = {}
    total = 0
    for number in range(300):
        size = 1_000_000 if number == 250 else number + 1
        counts.count_fetch(Reader("User:a", f"c{number}"), Source.CACHE, size, 0.1)
        total += size
        names = {
            sample.labels["client_id"]: sample.value
            for family in counts.collect()
            for sample in family.samples
            if sample.name == "tieringd_gateway_reader_bytes_total"
        }
        assert len(names) <= READERS_MAX + 1
        assert sum(names.values()) == total
        assert names.get(OTHER, 0) >= seen.get(OTHER, 0)
        seen = names
    assert "c250" in seen


def test_slow_fetches_are_logged_with_what_they_waited_for_at_a_bounded_rate():
    """The next interval says how many were left out."""
    now = [0.0]
    records = ReaderRecords(None, slow_seconds=1.0, now=lambda: now[0])
    sent = ClientResponse((b"x",), lambda: None, archived=True, waited_for=("chunk-7",))
    with capture_logs() as lines:
        records.fetched(Reader("User:a", "c"), sent, 1, seconds=0.9)
        for _ in range(LINES_MAX + 5):
            records.fetched(Reader("User:a", "c"), sent, 1, seconds=1.5)
        now[0] = INTERVAL_SECONDS
        records.fetched(Reader("User:a", "c"), sent, 1, seconds=1.5)
    found = [one for one in lines if "was slow" in one["event"]]
    assert len(found) == LINES_MAX + 1
    assert found[0]["waited_for"] == "the object store"
    assert found[0]["principal"] == "User:a"
    assert found[-1]["left_out"] == 5
