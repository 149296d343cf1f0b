"""
The producers' brake: lowers client quotas while a disk is full, and puts them back afterwards.

What is changed is in the bucket before it is changed, and each change of a quota follows on a
compare-and-swap of that record in the same step. So of daemons that disagree one is told so, a
crash at any point leaves a record that any daemon can finish, and what was put back is looked at
for a while longer: an order that was given before may arrive after it.

It does not decide when: that is `space.degraded_mode`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog
from crc32c import crc32c

from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.disk_state import QuotaPhase, QuotaRecord, decode_quota_record, encode_quota_record
from tieringd.formats.object_keys import client_quotas_key
from tieringd.model.disk_state import PRODUCER_BYTE_RATE
from tieringd.policies.disk_alert import plan_additions, plan_lowering, still_to_lower, still_to_restore
from tieringd.storage.base import IfAbsent, IfVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tieringd.broker.base import Broker
    from tieringd.model.disk_state import QuotaEntity
    from tieringd.storage.base import ObjectStore

log = structlog.get_logger(__name__)

SETTLE_MS: Final = 600_000
"""For this long after quotas were put back it is seen to that they stay so."""
ORDER_WITHIN_SECONDS: Final = 60.0
"""
So long after its record an order may leave; far shorter than `SETTLE_MS`. What a stopped process still has to
order when it goes on is not sent, since another daemon may have put the quotas back, and looked after them.
"""
TAKE_OVER_MS: Final = 60_000
"""A daemon that is putting quotas back and does not say so for this long is helped."""


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

    @property
    def is_on(self) -> bool:
        """Say whether quotas are lowered, as far as this daemon has seen."""
        record = self._stored.record
        return record is not None and record.phase is not QuotaPhase.RESTORED

    async def refresh(self, version: str | None) -> None:
        """
        Take in the record, which a listing has seen in this *version*.

        Raises:
            CorruptDataError: It cannot be read; no quota is changed until an operator mends it.
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

    async def hold_back(self, rate: int) -> None:
        """
        See that no producer may write more than *rate*, as far as no operator has set it otherwise.

        Quotas that are lowered already keep the rate that they were lowered to.

        Raises:
            PreconditionFailed: Another daemon was faster; nothing was changed.
            StorageUnavailable: Nothing was changed, as it could not be recorded.
            BrokerUnavailable: It is gone on with in the next round.
            BrokerDenied: We may not.
        """
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
        Put quotas back where a record says that they are lowered; do nothing where none does.

        Raises:
            PreconditionFailed: Another daemon was faster; nothing was changed.
            StorageUnavailable: Nothing was changed, as it could not be recorded.
            BrokerUnavailable: It is gone on with in the next round.
            BrokerDenied: We may not.
        """
        known = self._stored.record
        if known is None or await self._settle() or known.phase is QuotaPhase.RESTORED:
            return
        is_with_another = known.phase is QuotaPhase.RESTORING and known.node_id != self._node_id
        if is_with_another and self._age_ms(known) < TAKE_OVER_MS:
            return
        await self._restore(known)

    async def _settle(self) -> bool:
        """Look once more after quotas that were put back a while ago; return whether one had to be again."""
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
        Store *record* in place of the one that is known; return until when, in loop time, it may be acted on.

        A daemon that loses the swap changes nothing.
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
