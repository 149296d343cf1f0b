"""An archived partition beside batches that are too large to be held gets its turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kio.schema.errors import ErrorCode

from tests.fakes.gateway_peers import MIB, TopicArchive, fetch, fetched, partition_of, running
from tests.support.raw_kafka import connected
from tieringd.formats.kafka_wire.fetch import PartitionData, asked_of

BATCH = bytes(5 * MIB)
OUT_OF_RANGE = {0: {"error_code": 1}}
PAST_EVERY_LOG = 1 << 40


def responses(frame, head, order):
    """Answer as a broker does: at least one batch of "live", however little is asked for."""
    asked = asked_of(memoryview(frame), head).partitions
    is_hidden = asked["live", 0].fetch_offset > PAST_EVERY_LOG
    said = {"old": OUT_OF_RANGE, "live": OUT_OF_RANGE if is_hidden else {0: {"records": BATCH}}}
    return fetched(head, {topic: said[topic] for topic in order}), is_hidden


@pytest.mark.parametrize("order", [("old", "live"), ("live", "old")])
async def test_archived_partition_gets_its_turn_beside_large_batches(broker, order):
    """The other partition gets its turn as well. Waiting partitions are counted."""
    archive = TopicArchive()
    records = {"old": [], "live": []}
    async with running(broker, archive) as server, connected(server.port) as client:
        for _ in range(9):
            client.send(fetch(order))
            head, frame, answers = await broker.next()
            response, is_hidden = responses(frame, head, order)
            answers.write(response)
            answer = await client.answer(fetch(order))
            for topic in order:
                said = partition_of(answer, topic)
                assert said.error_code == ErrorCode.none
                records[topic].append(len(said.records))
            assert not (is_hidden and partition_of(answer, "live").records)
        assert server.counters.late_partitions == 9 - len(archive.questions)
    assert sum(size > 0 for size in records["old"]) >= 2
    assert sum(size > 0 for size in records["live"]) >= 2


class SizedArchive(TopicArchive):
    """Gives records where they fit, as the archive does: a first batch fits anyway."""

    async def fetch(self, question):
        found = await super().fetch(question)
        if question.needs_a_batch or question.max_bytes >= len(b"archived"):
            return found
        return replace(found, partitions={key: PartitionData(9, 9, 0) for key in found.partitions})


async def test_archived_partition_gets_its_turn_beside_records_that_fill_the_answer(broker):
    """A client with a small limit gets as much from the broker each time, as long as it is behind there."""
    archive, limit = SizedArchive(), 100_000
    records = {"old": [], "live": []}
    async with running(broker, archive) as server, connected(server.port) as client:
        for _ in range(9):
            request = fetch(("live", "old"), max_bytes=limit)
            client.send(request)
            head, frame, answers = await broker.next()
            asked = asked_of(memoryview(frame), head)
            is_hidden = asked.partitions["live", 0].fetch_offset > PAST_EVERY_LOG
            live = OUT_OF_RANGE if is_hidden else {0: {"records": bytes(asked.max_bytes)}}
            answers.write(fetched(head, {"live": live, "old": OUT_OF_RANGE}))
            answer = await client.answer(request)
            for topic, sizes in records.items():
                said = partition_of(answer, topic)
                assert said.error_code == ErrorCode.none
                sizes.append(len(said.records))
    assert sum(size > 0 for size in records["old"]) >= 3
    assert sum(size > 0 for size in records["live"]) >= 3
    assert max(map(sum, zip(*records.values(), strict=True))) <= limit


async def test_hidden_partition_has_nothing_new_where_the_archive_has_nothing_either(broker):
    """The client gets no error that it did not cause."""
    archive = TopicArchive()
    async with running(broker, archive) as server, connected(server.port) as client:
        for number in range(3):
            client.send(fetch(("old", "live")))
            head, frame, answers = await broker.next()
            response, is_hidden = responses(frame, head, ("old", "live"))
            assert is_hidden == (number == 2)
            if is_hidden:
                response = fetched(head, {"old": {0: {"error_code": 6}}, "live": OUT_OF_RANGE})
            answers.write(response)
            answer = await client.answer(fetch(("old", "live")))
        assert partition_of(answer, "live").error_code == ErrorCode.none
        assert partition_of(answer, "old").error_code == ErrorCode.not_leader_or_follower


async def test_bound_of_what_is_held_is_a_setting(broker):
    """The archived partition is answered at once with a larger bound."""
    archive = TopicArchive()
    async with running(broker, archive, max_held_bytes=8 * MIB) as server, connected(server.port) as client:
        for _ in range(2):
            client.send(fetch(("live", "old")))
            head, frame, answers = await broker.next()
            answers.write(responses(frame, head, ("live", "old"))[0])
            answer = await client.answer(fetch(("live", "old")))
        assert partition_of(answer, "old").records == b"archived"
        assert len(partition_of(answer, "live").records) == len(BATCH)
