"""
The broker decides what each client may see: every request gets its own answer through the gateway too.

The matrix has principals with their rules, topics, the operations on them, and every version that both sides
offer. Each request goes to the broker and through the gateway, byte for byte the same, and every field of the
two answers is compared. They differ only where the broker has let the principal in, and only in what the
gateway exists for: records of a trimmed topic come from the archive where the broker says that an offset is
out of range, its log begins where the archive begins, and the tiered offsets and directories of a topic are
the archive's.
"""

from __future__ import annotations

import asyncio
import uuid
from base64 import urlsafe_b64decode
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from confluent_kafka.admin import AclOperation, ResourceType
from kio.schema.errors import ErrorCode

from tests.e2e.archives import base_of_first, until_trimmed
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import SEGMENTS
from tests.support.daemon import Daemon, kafka_config, running_daemon, write_config
from tests.support.gateway_clients import fetched
from tests.support.gateways import LISTENER, BrokerBehind
from tests.support.kafka_users import add_rules, broker_properties, log_in, remove_rules, rule
from tests.support.raw_kafka import connected
from tests.support.request_matrix import (
    TOGETHER,
    WRITES,
    Api,
    Path,
    Question,
    Topic,
    answers_to,
    frames_of,
    offered_versions,
    questions,
    read,
    until_group_is_known,
    versions_of,
)
from tieringd.broker.log_dir import read_topic_id
from tieringd.formats.record_batch import parse_header
from tieringd.gateway.ahead import PERMIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

TRIMMED, WHOLE, UNTIERED, UNKNOWN = "orders-trimmed", "orders-whole", "plain", "unknown"
_PREFIX = "orders-"
_VALUES = [bytes([number]) * 100_000 for number in range(35)]
_LAST = len(_VALUES) - 1
"""The last offset before what the matrix writes, which is on the broker."""
_READ, _WRITE, _DESCRIBE, _ALL = (
    AclOperation.READ,
    AclOperation.WRITE,
    AclOperation.DESCRIBE,
    AclOperation.ALL,
)
RULES = {
    "owner": [
        rule("owner", _ALL, "*"),
        rule("owner", _DESCRIBE, "*", of=ResourceType.GROUP),
        rule("owner", _DESCRIBE, "kafka-cluster", of=ResourceType.BROKER),
    ],
    "reader-of-all": [
        rule("reader-of-all", _READ, "*"),
        rule("reader-of-all", _DESCRIBE, "*", of=ResourceType.GROUP),
    ],
    "reader-of-one": [rule("reader-of-one", _READ, TRIMMED)],
    "reader-of-prefix": [
        rule("reader-of-prefix", _READ, _PREFIX, is_prefix=True),
        rule("reader-of-prefix", _DESCRIBE, "*", of=ResourceType.GROUP),
    ],
    "writer": [rule("writer", _WRITE, "*")],
    "describer": [
        rule("describer", _DESCRIBE, "*"),
        rule("describer", _DESCRIBE, "*", of=ResourceType.GROUP),
    ],
    "denied-to-read": [
        rule("denied-to-read", _READ, "*"),
        rule("denied-to-read", _READ, TRIMMED, is_denied=True),
    ],
    "denied-all": [
        rule("denied-all", _ALL, "*"),
        rule("denied-all", _ALL, _PREFIX, is_prefix=True, is_denied=True),
        rule("denied-all", _DESCRIBE, "*", of=ResourceType.GROUP),
    ],
    "stranger": [],
}
"""The principals and their rules. No principal may join a group, so the broker refuses every member."""
READERS = {"owner", "reader-of-all", "reader-of-one", "reader-of-prefix"}
"""The principals that may read the trimmed topic."""
KNOWERS = READERS | {"writer", "describer", "denied-to-read"}
"""The principals that may know that it exists."""
_NEVER_THE_SAME = {"throttle_time", "total_bytes", "usable_bytes", "base_offset"}
"""What each answer has anew: a delay, a disk's space, the offset of the record that was just written."""
_OFFSETS = {"offset", "timestamp", "leader_epoch"}
_LOG_STARTS = {
    Api.FETCH: {"log_start_offset"},
    Api.PRODUCE: {"log_start_offset"},
    Api.DELETE_RECORDS: {"low_watermark"},
}
_LATEST, _EARLIEST_LOCAL = -1, -4
_TIERED = {-5, -6}
"""What ListOffsets looks for where only the archive knows the answer: last tiered, earliest not tiered."""
_PARTITION_DEPTH = 4
"""How many steps lead from an answer to one of its partitions: the topics, one, its partitions, one."""


@dataclass(frozen=True)
class Matrix:
    """A broker with rules, the daemon whose gateway is before it, and everything that is asked."""

    behind: BrokerBehind
    daemon: Daemon
    reads: Sequence[Question]
    writes: Sequence[Question]

    @property
    def ports(self) -> tuple[int, int]:
        """Return the port of the broker and that of the gateway."""
        return self.behind.cluster.broker.listener_ports[LISTENER], self.behind.port


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def matrix(tmp_path_factory, seaweedfs):
    """Give the broker and the daemon, once one topic is trimmed and another is archived."""
    directory = tmp_path_factory.mktemp("matrix")
    behind = await BrokerBehind.start(
        directory / "broker", protocol="SASL_PLAINTEXT", properties=broker_properties(LISTENER, RULES)
    )
    cluster = behind.cluster
    try:
        add_rules(cluster.bootstrap, [each for rules in RULES.values() for each in rules])
        for topic in (TRIMMED, WHOLE, UNTIERED):
            await cluster.create_topic(topic, configs=SEGMENTS)
            await cluster.produce(topic, _VALUES, max_batch_size=200_000)
        async with connected(cluster.broker.port) as client:
            await until_group_is_known(client)
        tiered = {"remote.storage.enable": True}
        config = kafka_config(
            cluster,
            seaweedfs,
            directory / "state",
            bucket=BUCKET,
            prefix="e2e/matrix",
            topics={TRIMMED: tiered | {"local.retention.bytes": 1 << 20}, WHOLE: tiered},
            gateway=behind.gateway_config,
        )
        with running_daemon(write_config(directory / "tieringd.yaml", config)) as daemon:
            until_trimmed(daemon)
            daemon.until(lambda: daemon.next_offset(WHOLE), "the other topic is archived")
            # The broker tells the size of its log, and removes what was trimmed a while later.
            start = daemon.events("local log trimmed")[-1]["log_start_offset"]
            log = cluster.log_dir() / f"{TRIMMED}-0"
            daemon.until(lambda: base_of_first(log) == start, "the broker has removed what was trimmed")
            asked = await _everything(behind)
            reads = [each for each in asked if each.api not in WRITES]
            yield Matrix(behind, daemon, reads, [each for each in asked if each.api in WRITES])
    finally:
        await cluster.kill()


async def _everything(behind):
    """Return every question in every version that the broker and the gateway offer."""
    offers = []
    for port in (behind.cluster.broker.listener_ports[LISTENER], behind.port):
        async with connected(port) as client:
            await log_in(client, "owner")
            offers.append(await offered_versions(client))
    names = (TRIMMED, WHOLE, UNTIERED)
    paths = {name: str(behind.cluster.log_dir() / f"{name}-0") for name in names}
    ids = {
        name: uuid.UUID(bytes=urlsafe_b64decode(read_topic_id(path) + "==")) for name, path in paths.items()
    }
    topics = [Topic(name, ids[name], _LAST) for name in names]
    topics.append(Topic(UNKNOWN, uuid.UUID(int=0xA5), _LAST))
    asked = []
    for api in Api:
        both = set(offers[0][api]) & set(offers[1][api])
        # Versions before the first that can be asked are offered for old clients, and refused.
        assert max(both) in versions_of(api), f"nothing can ask {api.name} version {max(both)}"
        asked += questions(api, sorted(both & versions_of(api)), topics)
    # After a Fetch of every topic the gateway asks for less, and so do later answers.
    return sorted(asked, key=lambda question: question.what == TOGETHER)


@pytest.mark.parametrize("principal", RULES)
async def test_every_answer_is_the_brokers(matrix, principal):
    """Only a principal that may read the trimmed topic gets anything that the broker does not give."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(port)) for port in matrix.ports]
        for client in clients:
            await log_in(client, principal)
        answers = []
        # What changes later answers comes last, to the broker and then through the gateway.
        for asked in (matrix.reads, matrix.writes):
            direct, through = [await answers_to(client, frames_of(asked)) for client in clients]
            answers += zip(asked, direct, through, strict=True)

    wrong: list[str] = []
    archived: Counter[tuple[Api, int]] = Counter()
    for question, direct, through in answers:
        if direct == through:
            continue
        found = _differences(question, read(question, direct), read(question, through))
        if found.wrong and question.api is Api.FETCH:
            found = await _asked_anew(matrix, principal, question)
        wrong += (f"{principal}: {question.title}: {each}" for each in found.wrong)
        archived[question.api, question.version] += found.archived
    assert not wrong, "\n".join(wrong[:30])

    fetched = _counts_of(Api.FETCH, matrix, archived)
    assert all(fetched) if principal in READERS else not any(fetched), fetched
    listed = _counts_of(Api.LIST_OFFSETS, matrix, archived)
    assert all(listed) if principal in KNOWERS else not any(listed), listed


async def test_reader_whose_rule_is_removed_reads_no_further(matrix):
    """A reader loses access on its open connection too, even if its next Fetch was prepared."""
    cluster = matrix.behind.cluster
    async with AsyncExitStack() as stack:
        direct, through = [await stack.enter_async_context(connected(port)) for port in matrix.ports]
        for client in (direct, through):
            await log_in(client, "reader-of-one")
        next_offset = 0
        for _ in range(6):
            # Once a client reads on, its next Fetch is prepared.
            code, next_offset = await _fetched(through, next_offset)
            assert code == ErrorCode.none
        await asyncio.to_thread(remove_rules, cluster.bootstrap, RULES["reader-of-one"])
        stack.callback(add_rules, cluster.bootstrap, RULES["reader-of-one"])
        async with asyncio.timeout(180):
            # Controller and broker take a moment to remove the rule.
            while (await _fetched(direct, _LAST))[0] != ErrorCode.topic_authorization_failed:
                pass
        # The broker's last permission holds for this long.
        await asyncio.sleep(PERMIT_SECONDS)
        for offset in (next_offset, 0, next_offset + 1, _LAST):
            assert await _fetched(through, offset) == (ErrorCode.topic_authorization_failed, offset)


async def _asked_anew(matrix, principal, question):
    """
    Ask for records again, each time on new connections, and return the differences of the last time.

    Where the archive is late, an answer has only the broker's records. The answer to the same question on the
    same connection then has only the archive's, which were read for it ahead.
    """
    for _ in range(20):
        async with AsyncExitStack() as stack:
            answers = []
            for port in matrix.ports:
                client = await stack.enter_async_context(connected(port))
                await log_in(client, principal)
                answers += await answers_to(client, frames_of([question]))
        found = _differences(question, *(read(question, each) for each in answers))
        if not found.wrong:
            break
    return found


async def _fetched(client, offset):
    """Fetch the batch at an offset. Return the error and the next offset, the first again after the last."""
    partition = await fetched(client, TRIMMED, offset)
    if partition.error_code != ErrorCode.none:
        assert not partition.records
        return partition.error_code, offset
    last = parse_header(partition.records).last_offset
    return partition.error_code, last + 1 if last < _LAST else 0


def _counts_of(api: Api, matrix: Matrix, archived: Counter[tuple[Api, int]]) -> list[int]:
    """Return how much of the archive was told in each version of an API."""
    versions = {question.version for question in matrix.reads if question.api == api}
    return [archived[api, version] for version in sorted(versions)]


@dataclass
class _Found:
    """How two answers differ."""

    wrong: list[str]
    archived: int
    """How many partitions of the archive are told of, and may be."""


def _differences(question: Question, direct: dict[Path, Any], through: dict[Path, Any]) -> _Found:
    found = _Found([], 0)
    for path in direct.keys() | through.keys():
        said, told = direct.get(path), through.get(path)
        if said == told or path[-1] in _NEVER_THE_SAME:
            continue
        if _is_of_the_archive(question, path, direct, through):
            # Log starts that differ are no answer of the archive yet.
            found.archived += path[-1] in {"error_code", "offset"}
        else:
            found.wrong.append(
                f"{'.'.join(map(str, path))} is {told!r:.60}, and the broker says {said!r:.60}"
            )
    return found


def _is_of_the_archive(
    question: Question, path: Path, direct: dict[Path, Any], through: dict[Path, Any]
) -> bool:
    """Say whether a difference is one that the archive makes for a principal that the broker has accepted."""
    if question.api == Api.DESCRIBE_LOG_DIRS:
        return _is_a_remote_directory(path, direct)
    topic = question.topic_at(path)
    if topic not in {TRIMMED, WHOLE} or len(path) != _PARTITION_DEPTH + 1:
        return False
    entry = path[:_PARTITION_DEPTH]
    said, told = direct[*entry, "error_code"], through[*entry, "error_code"]
    if question.api == Api.FETCH and said == ErrorCode.offset_out_of_range:
        has_records = bool(through[*entry, "records"])
        return topic == TRIMMED and told == ErrorCode.none and (has_records or question.what == TOGETHER)
    if (said, told) != (ErrorCode.none, ErrorCode.none):
        return False
    if question.api == Api.LIST_OFFSETS:
        where = {TRIMMED, WHOLE} if question.timestamp in _TIERED else {TRIMMED}
        is_of_the_log = question.timestamp not in {_LATEST, _EARLIEST_LOCAL}
        return path[-1] in _OFFSETS and topic in where and is_of_the_log
    return topic == TRIMMED and path[-1] in _LOG_STARTS.get(question.api, ())


def _is_a_remote_directory(path: Path, direct: dict[Path, Any]) -> bool:
    """Say whether a field is part of a directory of the archive, beside one that the broker shows."""
    size = direct["results", "size"]
    return bool(size) and (path == ("results", "size") or str(path[1]).startswith("remote://"))
