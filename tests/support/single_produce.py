"""Send one Produce request, and read the broker's throttle time, which no client library returns."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from aiokafka.conn import create_conn
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

if TYPE_CHECKING:
    from tests.support.kafka import KafkaBrokerProcess

_OF_ALL_IN_SYNC = -1
_TIMEOUT_MS = 30_000


async def throttle_ms_of(leader: KafkaBrokerProcess, topic: str, value: bytes) -> int:
    """
    Write one record to partition 0 as a client with a new name; return the throttle time of the answer.

    When this returns, every in-sync replica has the record.
    """
    batch = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=2 * len(value) + 1024,
    )
    assert batch.append(0, timestamp=None, key=None, value=value, headers=[]) is not None
    request = ProduceRequest(None, _OF_ALL_IN_SYNC, _TIMEOUT_MS, [(topic, [(0, bytes(batch.build()))])])
    connection = await create_conn("127.0.0.1", leader.port, client_id=uuid.uuid4().hex)
    try:
        answer = await connection.send(request)
    finally:
        connection.close()
    ((_, ((_, error_code, *_),)),) = answer.topics
    assert error_code == 0, f"{topic} does not take a record: error {error_code}"
    return int(answer.throttle_time_ms)
