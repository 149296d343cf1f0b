"""
What is known of a client that does not go on: where each of its tasks waits, and where it is in the log.

The same questions are put to the brokers, past the gateways. So the report of a run says whether the client,
the gateway or the broker holds up a reader.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokafka import TopicPartition


def waits_of(task: asyncio.Task[Any]) -> str:
    """Return the functions that a task is in, the outermost first, and what the innermost one awaits."""
    found = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            found.append(repr(awaited))
            break
        found.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return " > ".join(found)


def waits_of_client(consumer: AIOKafkaConsumer) -> list[str]:
    """Return where each background task of a consumer waits."""
    coordinator, fetcher, client = consumer._coordinator, consumer._fetcher, consumer._client
    tasks = {
        "coordination": getattr(coordinator, "_coordination_task", None),
        "heartbeat": getattr(coordinator, "_heartbeat_task", None),
        "committed offsets": getattr(coordinator, "_commit_refresh_task", None),
        "fetcher": getattr(fetcher, "_fetch_task", None),
        "metadata": client._sync_task,
        **{f"fetch {n}": task for n, task in enumerate(getattr(fetcher, "_pending_tasks", ()))},
    }
    told = [
        f"{name}: {'ended ' + repr(task) if task.done() else waits_of(task)}"
        for name, task in tasks.items()
        if task is not None
    ]
    for (node_id, group), connection in client._conns.items():
        idle = time.monotonic() - connection._last_action
        asked = [type(one[1]).__name__ for one in connection._requests]
        told.append(
            f"connection to {node_id} ({group}), connected {connection.connected()}: "
            f"waits for {asked}, last answer {idle:.1f} s ago"
        )
    return told


def place_of_client(consumer: AIOKafkaConsumer, partitions: Iterable[TopicPartition]) -> list[str]:
    """Return the position of a consumer in each partition, and what it was told last."""
    subscription = consumer._subscription.subscription
    assignment = None if subscription is None else subscription.assignment
    if assignment is None:
        return ["no partition is assigned"]
    told = []
    for one in partitions:
        if one not in assignment.tps:
            told.append(f"{one.topic}-{one.partition} is not assigned")
            continue
        state = assignment.state_value(one)
        position = state.position if state.has_valid_position else None
        told.append(
            f"{one.topic}-{one.partition}: position {position}, awaits a reset {state.awaiting_reset}, "
            f"high watermark {state.highwater}, last stable offset {state.lso}, told at {state.timestamp} ms"
        )
    return told


async def place_at_brokers(
    brokers: str, group: str | None, partitions: Sequence[TopicPartition]
) -> list[str]:
    """Return what the brokers answer about each partition, past the gateways."""
    consumer = AIOKafkaConsumer(bootstrap_servers=brokers, group_id=group, enable_auto_commit=False)
    try:
        async with asyncio.timeout(30):
            await consumer.start()
            consumer.assign(partitions)
            starts = await consumer.beginning_offsets(partitions)
            ends = await consumer.end_offsets(partitions)
            return [
                f"{one.topic}-{one.partition} at the brokers: log {starts[one]} to {ends[one]}, "
                f"committed {await consumer.committed(one) if group else None}"
                for one in partitions
            ]
    except (KafkaError, OSError, TimeoutError) as error:
        return [f"the brokers do not answer: {error!r}"]
    finally:
        await consumer.stop()
