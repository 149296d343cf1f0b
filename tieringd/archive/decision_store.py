"""
Operators' decisions in the bucket: stored by the command, carried out by the partition's archiver.

A decision has a name of its own, so no process deletes one that it has not read. The order of effects is:
first record, decision (the command); second record as `committing`, commit, second record again, deletion of
the decision (the archiver). So no decision takes effect without a record. After a crash the next process
finds the decision, and learns from the manifest whether the commit was made.

A manifest's version never comes back. So a decision that was made for an earlier version can never be
carried out, and any process may refuse and delete it. No leadership is needed for that.
"""

from __future__ import annotations

from crc32c import crc32c

from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.object_keys import (
    DECISIONS_PREFIX,
    decision_key,
    decision_prefix,
    decision_record_key,
    is_decision_key,
)
from tieringd.formats.operator_decision import (
    decode_decision,
    decode_decision_outcome,
    encode_decision,
    encode_decision_outcome,
)
from tieringd.model.operator_decision import DecisionOutcome, OperatorDecision
from tieringd.model.partition import TopicIdPartition
from tieringd.storage.base import ObjectStore
from tieringd.storage.listing import list_objects

_BEGUN = "-begun.json"


class OperatorDecisions:
    """Read and write the decisions of one bucket. Keeps no state."""

    def __init__(self, store: ObjectStore, *, writer_id: str) -> None:
        self._store = store
        self.writer_id = writer_id
        """The process that carries decisions out, for their records."""

    async def add(self, decision: OperatorDecision) -> str:
        """
        Store the first record and then the decision; return the record's key.

        Raises:
            StorageUnavailable: The decision may be stored, or not.
        """
        data = encode_decision(decision)
        record = _record_key(decision, is_done=False)
        for key in (record, decision_key(decision.partition, decision.decision_id)):
            await self._store.put(key, data, crc32c=crc32c(data))
        return record

    async def of(self, partition: TopicIdPartition) -> tuple[list[OperatorDecision], list[CorruptDataError]]:
        """
        Return the decisions for a partition, oldest first, and an error for each that cannot be read.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        found: list[OperatorDecision] = []
        faults: list[CorruptDataError] = []
        async for info in list_objects(self._store, decision_prefix(partition)):
            if not is_decision_key(partition, info.key):
                continue
            try:
                found.append(await self._load(info.key))
            except ObjectNotFound:
                continue  # Another process has ended it.
            except CorruptDataError as error:
                faults.append(error.located(info.key))
        return sorted(found, key=lambda one: (one.decided_at_ms, one.decision_id)), faults

    async def open_since(self, since_ms: int) -> list[OperatorDecision]:
        """
        Return the decisions for any partition that were made at *since_ms* or later and have not ended.

        A record that cannot be read is passed over: the partition's archiver reports the decision.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        found: list[OperatorDecision] = []
        start_after = decision_record_key(decided_at_ms=since_ms, decision_id="", is_done=False)
        async for info in list_objects(self._store, DECISIONS_PREFIX, start_after=start_after):
            if not info.key.endswith(_BEGUN):
                continue
            try:
                data, _ = await self._store.get(info.key)
                decision = decode_decision(data)
                await self._store.head(decision_key(decision.partition, decision.decision_id))
            except (ObjectNotFound, CorruptDataError):
                continue
            found.append(decision)
        return found

    async def _load(self, key: str) -> OperatorDecision:
        data, _ = await self._store.get(key)
        decision = decode_decision(data)
        if decision_key(decision.partition, decision.decision_id) != key:
            raise CorruptDataError("the object holds the decision of another name")
        return decision

    async def outcome_of(self, decision: OperatorDecision) -> DecisionOutcome | None:
        """
        Return what the second record of a decision says; None where there is none, or it cannot be read.

        Raises:
            StorageUnavailable: The store does not answer.
        """
        try:
            data, _ = await self._store.get(_record_key(decision, is_done=True))
            return decode_decision_outcome(data)
        except (ObjectNotFound, CorruptDataError):
            return None

    async def note(self, decision: OperatorDecision, outcome: DecisionOutcome) -> None:
        """
        Store the second record of a decision, in the place of an earlier one.

        Raises:
            StorageUnavailable: It may be stored, or not.
        """
        data = encode_decision_outcome(decision, outcome)
        await self._store.put(_record_key(decision, is_done=True), data, crc32c=crc32c(data))

    async def remove(self, decision: OperatorDecision) -> None:
        """
        Delete a decision that has ended. Its records stay.

        Raises:
            StorageUnavailable: It may be deleted, or not.
        """
        await self._store.delete_many([decision_key(decision.partition, decision.decision_id)])


def _record_key(decision: OperatorDecision, *, is_done: bool) -> str:
    return decision_record_key(
        decided_at_ms=decision.decided_at_ms, decision_id=decision.decision_id, is_done=is_done
    )
