"""What is refused: writing, groups, and everything that is no request."""

from __future__ import annotations

import asyncio
import struct

import pytest
from kio.schema.errors import ErrorCode

from tests.support.archive_endpoints import (
    CALLS_IN_A_TURN,
    archive_topic,
    asking,
    listed,
    most_calls_in_a_turn,
    running_endpoint,
    until,
)
from tests.support.certificate import write_certificate
from tests.support.kafka_messages import (
    PRODUCE_VERSIONS,
    fetch_request,
    fields_of,
    framed,
    milliseconds,
    request_module,
    topic_fields,
)
from tests.support.raw_kafka import connected
from tests.support.tls_relay import trusting
from tieringd.endpoint.refusals import READ_ONLY
from tieringd.formats.kafka_wire.cursor import uvarint

PATIENCE_SECONDS = 20


def produce_request(version, *, acks=-1):
    module = request_module(0, version)
    topic = module.TopicProduceData(
        **topic_fields(module.TopicProduceData, None if version >= 13 else "orders"),
        partition_data=(module.PartitionProduceData(index=3, records=b"r" * 100),),
    )
    return module.ProduceRequest(
        **fields_of(module.ProduceRequest, transactional_id=None),
        acks=acks,
        timeout=milliseconds(100),
        topic_data=(topic,),
    )


async def closed(client):
    """Return what comes until the connection is closed."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        try:
            return await client.reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
async def test_produce_is_refused_for_good(archive, tmp_path, version):
    """The refusal has its reason if the version has room for it, and the connection goes on."""
    async with asking(archive, tmp_path / "state") as client:
        for _ in range(2):
            answer = await client.ask(produce_request(version))
            (partition,) = answer.responses[0].partition_responses
            assert (partition.index, partition.error_code) == (3, ErrorCode.policy_violation)
            if version >= 8:
                assert partition.error_message == READ_ONLY


async def test_write_without_acknowledgement_closes_the_connection(archive, tmp_path):
    """There is no answer in which it could be refused."""
    async with asking(archive, tmp_path / "state") as client:
        client.send(produce_request(9, acks=0))
        assert await closed(client) == b""


@pytest.mark.parametrize("version", range(7))
async def test_coordinator_of_a_group_is_this_node(archive, tmp_path, version):
    """Clients would otherwise look for one for ever. A transaction has none."""
    schema = request_module(10, version).FindCoordinatorRequest
    async with running_endpoint(archive, tmp_path / "state") as endpoint:
        port = endpoint.server.port
        async with connected(port) as client:
            for key_type in range(2 if version else 1):
                request = schema(**fields_of(schema, key="g", key_type=key_type, coordinator_keys=("g",)))
                answer = await client.ask(request)
                found = answer if version < 4 else answer.coordinators[0]
                if key_type:
                    assert found.error_code == ErrorCode.transactional_id_authorization_failed
                    assert found.error_message == READ_ONLY
                else:
                    assert found.error_code == ErrorCode.none
                    assert (found.node_id, found.host, found.port) == (0, "127.0.0.1", port)


@pytest.mark.parametrize("version", range(10))
async def test_no_client_joins_a_group(archive, tmp_path, version):
    """The error of the refusal ends the consumer's attempt to join."""
    schema = request_module(11, version).JoinGroupRequest
    fields = fields_of(
        schema,
        group_id="g",
        session_timeout=milliseconds(1000),
        rebalance_timeout=milliseconds(1000),
        member_id="",
        group_instance_id=None,
        protocol_type="consumer",
        protocols=(),
        reason=None,
    )
    async with asking(archive, tmp_path / "state") as client:
        answer = await client.ask(schema(**fields))
    assert answer.error_code == ErrorCode.group_authorization_failed


@pytest.mark.parametrize("version", range(7))
@pytest.mark.parametrize("transactional_id", [None, "t"])
async def test_producer_id_is_good_for_nothing(archive, tmp_path, version, transactional_id):
    """An idempotent producer gets one, and its refusal with the reason; a transactional one gets none."""
    schema = request_module(22, version).InitProducerIdRequest
    fields = fields_of(
        schema,
        transactional_id=transactional_id,
        transaction_timeout=milliseconds(1000),
        producer_id=-1,
        producer_epoch=-1,
        enable2_pc=False,
        keep_prepared_txn=False,
    )
    async with asking(archive, tmp_path / "state") as client:
        answer = await client.ask(schema(**fields))
    if transactional_id is None:
        assert (answer.error_code, answer.producer_id, answer.producer_epoch) == (ErrorCode.none, 0, 0)
    else:
        assert answer.error_code == ErrorCode.transactional_id_authorization_failed


@pytest.mark.parametrize("version", range(2, 11))
async def test_no_offset_is_kept(archive, tmp_path, version):
    """A commit that seems to succeed would lose records."""
    module = request_module(8, version)
    partition = module.OffsetCommitRequestPartition(
        **fields_of(
            module.OffsetCommitRequestPartition,
            partition_index=2,
            committed_offset=5,
            committed_leader_epoch=-1,
            committed_metadata="",
        )
    )
    schema = module.OffsetCommitRequestTopic
    topic = schema(**fields_of(schema, name="orders", topic_id=None), partitions=(partition,))
    schema = module.OffsetCommitRequest
    fields = fields_of(
        schema,
        group_id="g",
        generation_id_or_member_epoch=-1,
        member_id="",
        group_instance_id=None,
        retention_time=milliseconds(1),
    )
    async with asking(archive, tmp_path / "state") as client:
        answer = await client.ask(schema(topics=(topic,), **fields))
    (found,) = answer.topics[0].partitions
    assert (found.partition_index, found.error_code) == (2, ErrorCode.group_authorization_failed)


@pytest.mark.parametrize("version", range(1, 11))
async def test_no_offset_is_known(archive, tmp_path, version):
    """A consumer that asks does not begin at the wrong place without an error."""
    module = request_module(9, version)
    schema = module.OffsetFetchRequest
    if version >= 8:
        group = module.OffsetFetchRequestGroup(
            **fields_of(
                module.OffsetFetchRequestGroup, group_id="g", member_id=None, member_epoch=-1, topics=None
            )
        )
        request = schema(**fields_of(schema, groups=(group,), require_stable=False))
    else:
        topic = module.OffsetFetchRequestTopic(name="orders", partition_indexes=(0,))
        request = schema(**fields_of(schema, group_id="g", topics=(topic,), require_stable=False))
    async with asking(archive, tmp_path / "state") as client:
        answer = await client.ask(request)
    found = answer.groups[0] if version >= 8 else answer.topics[0].partitions[0]
    assert found.error_code == ErrorCode.group_authorization_failed


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(struct.pack(">ihhi", 2**31 - 1, 3, 9, 1), id="two-gibibytes"),
        pytest.param(struct.pack(">ihhi", -1, 3, 9, 1), id="negative-size"),
        pytest.param(struct.pack(">ihhi", 3, 3, 9, 1), id="too-small"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: archive\r\n\r\n", id="http"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50), id="tls"),
        pytest.param(struct.pack(">ihhih", 10, 999, 0, 1, -1), id="unknown-api"),
        pytest.param(struct.pack(">ihhih", 10, 3, 99, 1, -1), id="unknown-version"),
        pytest.param(struct.pack(">ihhih", 10, 19, 5, 1, -1), id="not-offered"),
        pytest.param(struct.pack(">ihhih", 10, 17, 0, 1, -1), id="sasl"),
        pytest.param(struct.pack(">ihhih", 10, 3, 1, 1, -1), id="ends-inside"),
        pytest.param(struct.pack(">ihhihi", 14, 3, 1, 1, -1, 2**30), id="lying-length"),
    ],
)
async def test_what_is_no_request_ends_its_own_connection(writer, archive, tmp_path, sent):
    """The connections of other clients stay open, whatever length the request announced."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    async with running_endpoint(archive, tmp_path / "state") as endpoint:
        port = endpoint.server.port
        async with connected(port) as other, connected(port) as bad:
            bad.writer.write(sent)
            assert await closed(bad) == b""
            assert (await listed(other, "orders", -1))[0].offset == 3
        assert endpoint.server.counters.broken_connections == 1


async def test_announced_bytes_take_no_memory(archive, tmp_path):
    """Half-open connections cost what they have sent."""
    async with running_endpoint(archive, tmp_path / "state") as endpoint:
        port = endpoint.server.port
        async with connected(port) as first, connected(port) as second:
            for client in (first, second):
                client.writer.write(struct.pack(">ihhi", 4 << 20, 3, 9, 1) + bytes(1000))
                await client.writer.drain()
            await until(lambda: endpoint.server.counters.from_client_bytes == 2 * 1012)
            assert endpoint.server.buffered_bytes == 2 * 1012


async def test_requests_wait_while_the_budget_is_spent(archive, tmp_path):
    """A request that holds nothing is read all the same, and none is cut for another's greed."""
    async with running_endpoint(archive, tmp_path / "state", buffer_bytes=1 << 20) as endpoint:
        port = endpoint.server.port
        async with (
            connected(port) as first,
            connected(port) as second,
            connected(port) as third,
            connected(port) as small,
        ):
            for client in (first, second, third):
                client.writer.write(struct.pack(">ihhi", 1_000_000, 3, 9, 1) + bytes(900_000))
            await until(lambda: endpoint.server.budget.is_spent)
            for _ in range(5):
                assert (await small.ask(fetch_request(12, {}, max_bytes=1))).responses == ()
            assert endpoint.server.buffered_bytes < (1 << 20) + (256 << 10)
            assert endpoint.server.counters.broken_connections == 0


@pytest.mark.parametrize(("api_key", "size"), [(3, 5 << 20), (2, 5 << 20), (32, 2 << 20), (1, 5 << 20)])
async def test_request_has_a_limit_that_fits_its_kind(archive, tmp_path, api_key, size):
    """A request is refused by its announced size, before its bytes come."""
    async with asking(archive, tmp_path / "state") as client:
        client.writer.write(struct.pack(">ihhi", size, api_key, 4, 1))
        assert await closed(client) == b""


async def test_request_of_too_many_partitions_is_refused(archive, tmp_path):
    """A request of too many partitions is refused even within the limit of bytes."""
    async with asking(archive, tmp_path / "state") as client:
        client.writer.write(offsets_of(60_000))
        assert await closed(client) == b""


@pytest.mark.parametrize(("api_key", "version", "count"), [(1, 12, 100_000), (3, 12, 5_000), (2, 7, 100_000)])
async def test_request_with_many_tagged_fields_is_refused(archive, tmp_path, api_key, version, count):
    """The header is not walked over: it has room for two million empty fields."""
    async with asking(archive, tmp_path / "state") as client:
        head = struct.pack(">hhih", api_key, version, 1, -1)
        client.writer.write(framed(head, uvarint(count), b"\x7f\0" * count))
        end = asyncio.create_task(closed(client))
        assert await most_calls_in_a_turn(end) < CALLS_IN_A_TURN
        assert end.result() == b""


async def test_message_with_many_tagged_fields_is_refused(archive, tmp_path):
    """The limit holds for the fields behind the header too."""
    async with asking(archive, tmp_path / "state") as client:
        head = struct.pack(">hhih", 3, 12, 1, -1) + b"\0"
        client.writer.write(framed(head, b"\0\0\0", uvarint(5_000), b"\x7f\0" * 5_000))
        end = asyncio.create_task(closed(client))
        assert await most_calls_in_a_turn(end) < CALLS_IN_A_TURN
        assert end.result() == b""


def offsets_of(count, *, time_ms=-1):
    """Return a request for the offsets of *count* partitions of one topic."""
    partitions = b"".join(struct.pack(">iiq", index, -1, time_ms) + b"\0" for index in range(count))
    topics = uvarint(2) + uvarint(2) + b"t" + uvarint(count + 1) + partitions + b"\0\0"
    return framed(struct.pack(">hhih", 2, 7, 1, -1), b"\0", struct.pack(">ib", -1, 0), topics)


def offsets_at_times_of(count):
    """Return a request for the offsets of a time in *count* partitions of one topic."""
    return offsets_of(count, time_ms=5)


def epoch_ends_of(count):
    """Return a request for the end of an epoch in *count* partitions of one topic."""
    partitions = b"".join(struct.pack(">iii", index, -1, 3) + b"\0" for index in range(count))
    topics = uvarint(2) + uvarint(2) + b"t" + uvarint(count + 1) + partitions + b"\0\0"
    return framed(struct.pack(">hhih", 23, 4, 1, -1), b"\0", struct.pack(">i", -1), topics)


@pytest.mark.parametrize(
    ("request_of", "answer_bytes"), [(offsets_of, 20), (offsets_at_times_of, 20), (epoch_ends_of, 18)]
)
async def test_large_request_does_not_stop_the_loop(archive, tmp_path, request_of, answer_bytes):
    """A large request is decoded in a thread, and other clients have their turn while it is answered."""
    async with running_endpoint(archive, tmp_path / "state") as endpoint:
        port = endpoint.server.port
        async with connected(port) as large, connected(port) as small:
            await small.ask(fetch_request(12, {}, max_bytes=1))
            large.writer.write(request_of(40_000))
            size = asyncio.create_task(large.reader.readexactly(4))
            assert await most_calls_in_a_turn(size) < CALLS_IN_A_TURN
            assert len(await large.reader.readexactly(int.from_bytes(size.result()))) > 40_000 * answer_bytes
            await small.ask(fetch_request(12, {}, max_bytes=1))


async def test_connections_beyond_the_limit_are_closed(archive, tmp_path):
    """Open connections go on."""
    async with running_endpoint(archive, tmp_path / "state", max_connections=1) as endpoint:
        port = endpoint.server.port
        async with connected(port) as first:
            await first.ask(fetch_request(12, {}, max_bytes=1))
            async with connected(port) as second:
                assert await closed(second) == b""
            await first.ask(fetch_request(12, {}, max_bytes=1))


async def test_requests_that_come_together_are_answered_in_order(writer, archive, tmp_path):
    """Requests are answered in order, even if the first waits at the end of the archive."""
    writer.closed_segment()
    await archive_topic(writer, archive)
    requests = [
        fetch_request(12, {"orders": {0: {"fetch_offset": 3}}}, max_bytes=1, max_wait=milliseconds(50)),
        *(fetch_request(12, {"orders": {0: {"fetch_offset": n}}}, max_bytes=1) for n in range(3)),
    ]
    async with asking(archive, tmp_path / "state") as client:
        sent = [client.send(request) for request in requests]
        came = [int.from_bytes((await client.frame())[4:8]) for _ in requests]
    assert came == sent


async def test_clients_meet_tls_where_there_is_a_certificate(writer, archive, tmp_path):
    """A client gets TLS by the gateway's own properties, and records go through the cipher."""
    certificate = write_certificate(tmp_path / "pem")
    writer.append(b"v" * 300_000)
    writer.roll()
    await archive_topic(writer, archive)
    settings = {"tls_cert_file": certificate, "tls_key_file": certificate}
    async with (
        running_endpoint(archive, tmp_path / "state", **settings) as endpoint,
        connected(endpoint.server.port, tls=trusting(certificate)) as client,
    ):
        answer = await client.ask(fetch_request(12, {"orders": {0: {}}}, max_bytes=1 << 20))
    assert len(answer.responses[0].partitions[0].records) > 300_000
