"""
The producers' brake: lowers client quotas while a disk is full, and restores them afterwards.

Each change is recorded in the bucket before it is made, and each change of a quota follows a
compare-and-swap of that record in the same step. So of daemons that disagree one fails the swap, and a
crash at any point leaves a record that any daemon can complete. Restored quotas are checked for a while
longer: an earlier request to the broker may arrive after the restoration.

`space.degraded_mode` decides when to act.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog
from crc32c import crc32c

from tieringd.broker.base import Broker
from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.disk_state import QuotaPhase, QuotaRecord, decode_quota_record, encode_quota_record
from tieringd.formats.object_keys import client_quotas_key
from tieringd.model.disk_state import PRODUCER_BYTE_RATE, QuotaEntity
from tieringd.policies.disk_alert import plan_additions, plan_lowering, still_to_lower, still_to_restore
from tieringd.storage.base import IfAbsent, IfVersion, ObjectStore

log = structlog.get_logger(__name__)

SETTLE_MS: Final = 600_000
"""How long restored quotas are checked and, if need be, restored again."""
ORDER_WITHIN_SECONDS: Final = 60.0
"""
Maximum time between storing a record and sending its request to the broker; far shorter than `SETTLE_MS`. A
process that was stopped and goes on does not send a late request, because another daemon may meanwhile have
restored the quotas and finished checking them.
"""
TAKE_OVER_MS: Final = 60_000
"""A restoration that makes no progress for this long is taken over by another daemon."""


@dataclass(frozen=True, slots=True)
class _Stored:
    record: QuotaRecord | None
    version: str | None


class ProducerBrake:
    """The client quotas of one cluster, for the daemon of one broker. One task at a time uses it."""

    def __init__(
        self, store: ObjectStore, broker: Broker, *, cluster: str, node_id: int, now_ms: Callable[[], int]
    ) -> None:
        self._store = store
        self._broker = broker
        self._key = client_quotas_key(cluster)
        self._node_id = node_id
        self._now_ms = now_ms
        self._stored = _Stored(None, None)
        self._left_since: float | None = None
        """Since when (loop time) quotas are still to be lowered, while another daemon acts for all."""

    @property
    def holder(self) -> int | None:
        """Return the broker whose daemon wrote the record last; None without a record."""
        record = self._stored.record
        return None if record is None else record.node_id

    @property
    def is_on(self) -> bool:
        """Say whether quotas are lowered, as far as this daemon knows."""
        record = self._stored.record
        return record is not None and record.phase is not QuotaPhase.RESTORED

    async def refresh(self, version: str | None) -> None:
        """
        Read the record, unless *version*, the listed one, is known already.

        Raises:
            CorruptDataError: It cannot be decoded; no quota is changed until an operator repairs it.
            StorageUnavailable: Try again in the next round.
        """
        if version == self._stored.version:
            return
        try:
            data, info = await self._store.get(self._key)
        except ObjectNotFound:
            self._stored = _Stored(None, None)
            return
        try:
            self._stored = _Stored(decode_quota_record(data), info.version)
        except CorruptDataError as error:
            raise error.located(self._key) from error

    async def hold_back(self, rate: int, *, after_seconds: float = 0) -> None:
        """
        Limit every producer to *rate*, unless an operator has set its quota otherwise.

        Quotas that are lowered already keep the rate that they were lowered to. What there is to lower is
        left to another daemon for *after_seconds*.

        Raises:
            PreconditionFailed: Another daemon was faster; nothing was changed.
            StorageUnavailable: It could not be recorded, so nothing was changed.
            BrokerUnavailable: The next round continues.
            BrokerDenied: tieringd lacks the permission.
        """
        if after_seconds and not await self._is_left_for(after_seconds, rate):
            return
        self._left_since = None
        if await self._settle():
            return
        current = await self._quotas()
        known = self._stored.record
        if known is None or known.phase is QuotaPhase.RESTORED:
            changes = plan_lowering(current, rate)
            if not changes:
                return
            record = QuotaRecord(QuotaPhase.LOWERED, rate, changes, self._node_id, self._now_ms())
        else:
            added = plan_additions(known.changes, current, known.rate)
            record = replace(self._signed(known), phase=QuotaPhase.LOWERED, changes=known.changes + added)
        orders = still_to_lower(record.changes, current, record.rate)
        if orders or (known is not None and known.phase is QuotaPhase.RESTORING):
            order_by = await self._commit(record)
            await self._order(orders, order_by)
            log.warning(
                "producers are held back", bytes_per_second=record.rate, quotas=[str(one) for one in orders]
            )

    async def let_go(self) -> None:
        """
        Restore quotas where a record says that they are lowered; do nothing without such a record.

        Raises:
            PreconditionFailed: Another daemon was faster; nothing was changed.
            StorageUnavailable: It could not be recorded, so nothing was changed.
            BrokerUnavailable: The next round continues.
            BrokerDenied: tieringd lacks the permission.
        """
        self._left_since = None
        known = self._stored.record
        if known is None or await self._settle() or known.phase is QuotaPhase.RESTORED:
            return
        is_with_another = known.phase is QuotaPhase.RESTORING and known.node_id != self._node_id
        if is_with_another and self._age_ms(known) < TAKE_OVER_MS:
            return
        # A daemon whose broker has stopped must not begin: the record would keep the other daemons waiting.
        await self._quotas()
        await self._restore(known)

    async def _is_left_for(self, seconds: float, rate: int) -> bool:
        """Say whether there has been something to lower for *seconds*, and no other daemon has done it."""
        current, known = await self._quotas(), self._stored.record
        if known is None or known.phase is QuotaPhase.RESTORED:
            is_left = bool(plan_lowering(current, rate))
        else:
            changes = known.changes + plan_additions(known.changes, current, known.rate)
            is_left = bool(still_to_lower(changes, current, known.rate))
        now = asyncio.get_running_loop().time()
        if not is_left:
            self._left_since = None
        elif self._left_since is None:
            self._left_since = now
        return self._left_since is not None and now - self._left_since >= seconds

    async def _settle(self) -> bool:
        """Check quotas that were restored recently; return whether one had to be restored again."""
        known = self._stored.record
        if known is None or known.phase is not QuotaPhase.RESTORED or self._age_ms(known) >= SETTLE_MS:
            return False
        if not still_to_restore(known.changes, await self._quotas(), known.rate):
            return False
        await self._restore(known)
        return True

    async def _restore(self, known: QuotaRecord) -> None:
        order_by = await self._commit(replace(self._signed(known), phase=QuotaPhase.RESTORING))
        orders = still_to_restore(known.changes, await self._quotas(), known.rate)
        await self._order(orders, order_by)
        await self._commit(replace(self._signed(known), phase=QuotaPhase.RESTORED))
        log.info("producers are not held back any more", quotas=[str(one) for one in orders])

    async def _quotas(self) -> dict[QuotaEntity, float]:
        found = await self._broker.client_quotas()
        return {
            entity: values[PRODUCER_BYTE_RATE]
            for entity, values in found.items()
            if PRODUCER_BYTE_RATE in values
        }

    async def _order(self, orders: Mapping[QuotaEntity, float | None], order_by: float) -> None:
        if orders:
            await self._broker.alter_client_quotas(
                {entity: {PRODUCER_BYTE_RATE: value} for entity, value in orders.items()}, send_by=order_by
            )

    async def _commit(self, record: QuotaRecord) -> float:
        """
        Store *record* in place of the known one; return until when (loop time) it may be acted on.

        Raises:
            PreconditionFailed: Another daemon has replaced the record; nothing was changed.
        """
        order_by = asyncio.get_running_loop().time() + ORDER_WITHIN_SECONDS
        data = encode_quota_record(record)
        version = self._stored.version
        condition = IfAbsent() if version is None else IfVersion(version)
        info = await self._store.put(self._key, data, crc32c=crc32c(data), condition=condition)
        self._stored = _Stored(record, info.version)
        return order_by

    def _signed(self, record: QuotaRecord) -> QuotaRecord:
        return replace(record, node_id=self._node_id, changed_at_ms=self._now_ms())

    def _age_ms(self, record: QuotaRecord) -> int:
        return abs(self._now_ms() - record.changed_at_ms)
