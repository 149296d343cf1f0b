"""
The leader epochs under which clients delete records, taken before the broker gets the request.

A recorded deletion names a leader epoch, and no record of a later epoch is deleted from the archive. The
broker's answer does not name the epoch. An epoch that is taken after the answer may be too late: the broker
may have lost the partition and lead it again, and another leader may have written records in between. So the
gateway holds a DeleteRecords request back until it knows an epoch that has begun, and passes it on then. The
broker carries the request out in that epoch or in a later one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tieringd.errors import StorageUnavailable, TieringError
from tieringd.formats.kafka_wire.messages import decode_request
from tieringd.formats.kafka_wire.request_header import RequestHead
from tieringd.gateway.archive_answers import ArchiveAnswers, PartitionKey
from tieringd.gateway.combined_answers import is_of_a_daemon


class DeletionEpochs:
    """
    The epochs for the DeleteRecords request that one connection holds back. Belongs to its loop.

    *on_known* is called when the request may be claimed again, *on_failed* after a defect of the program.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        archive: ArchiveAnswers,
        *,
        timeout_seconds: float,
        on_known: Callable[[], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._loop = loop
        self._archive = archive
        self._timeout_seconds = timeout_seconds
        self._on_known = on_known
        self._on_failed = on_failed
        self._task: asyncio.Task[Mapping[PartitionKey, int | TieringError]] | None = None
        self._known: Mapping[PartitionKey, int | TieringError] | None = None

    @property
    def is_awaited(self) -> bool:
        """Say whether `claim` held back a request, and `on_known` has not been called since."""
        return self._task is not None

    def claim(self, frame: memoryview, head: RequestHead) -> Mapping[PartitionKey, int | TieringError] | None:
        """
        Return leader epochs, or errors, for a whole DeleteRecords request that may be passed on now.

        None holds the request back: call this again with the same request after `on_known`.

        Raises:
            ProtocolViolation: The frame is no DeleteRecords request.
        """
        if self._known is not None:
            known, self._known = self._known, None
            return known
        if is_of_a_daemon(frame):
            return {}
        request: Any = decode_request(frame, head)
        keys = [
            (topic.name, partition.partition_index)
            for topic in request.topics
            for partition in topic.partitions
            if self._archive.may_have(topic.name, partition.partition_index)
        ]
        if not keys:
            return {}
        self._task = self._loop.create_task(self._ask(keys))
        self._task.add_done_callback(self._on_done)
        return None

    def close(self) -> None:
        """Forget the request. `on_known` is not called any more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _ask(self, keys: Collection[PartitionKey]) -> Mapping[PartitionKey, int | TieringError]:
        """Return the epochs. The request is passed on after an error too: the broker may accept it."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._archive.leader_epochs(keys)
        except TieringError as error:
            return dict.fromkeys(keys, error)
        except TimeoutError:
            late = StorageUnavailable("the leader epoch of a deletion was not known in time")
            return dict.fromkeys(keys, late)

    def _on_done(self, task: asyncio.Task[Mapping[PartitionKey, int | TieringError]]) -> None:
        if self._task is not task:
            return
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_failed(error)
            return
        self._known = task.result()
        self._on_known()
