"""
Degraded mode: who of the cluster acts, and which producers' quotas are lowered and put back.

A quota holds back what clients write and leaves replication alone. Of the quotas that fit a
client Kafka takes the most special one, so lowering the default is not enough: each one that goes
before it, and allows more, is lowered as well. One that is set to less already stays as it is.

What an operator sets meanwhile is never undone: only what still is as we made it is put back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.model.client_quota import EVERY_PRODUCER, QuotaChange
from tieringd.model.disk_state import DiskState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tieringd.model.client_quota import QuotaEntity


def degraded_nodes(states: Mapping[int, DiskState]) -> tuple[int, ...]:
    """Return the brokers that are known to be degraded; the first of them acts for all."""
    return tuple(sorted(node for node, state in states.items() if state is DiskState.DEGRADED))


def plan_lowering(current: Mapping[QuotaEntity, float], rate: int) -> tuple[QuotaChange, ...]:
    """Return the quotas to lower so that no producer may write more than *rate*."""
    found = {entity: value for entity, value in current.items() if _goes_first(entity) and value > rate}
    changes = [QuotaChange(entity, value) for entity, value in sorted(found.items(), key=_by_name)]
    if EVERY_PRODUCER not in current:
        changes.append(QuotaChange(EVERY_PRODUCER, None))
    return tuple(changes)


def plan_additions(
    changes: Iterable[QuotaChange], current: Mapping[QuotaEntity, float], rate: int
) -> tuple[QuotaChange, ...]:
    """Return what came since *changes* were recorded, and is to be lowered as well."""
    known = {change.entity for change in changes}
    return tuple(one for one in plan_lowering(current, rate) if one.entity not in known)


def still_to_lower(
    changes: Iterable[QuotaChange], current: Mapping[QuotaEntity, float], rate: int
) -> dict[QuotaEntity, float | None]:
    """Return what to set where the quota is still what it was before."""
    return {one.entity: rate for one in changes if current.get(one.entity) == one.previous}


def still_to_restore(
    changes: Iterable[QuotaChange], current: Mapping[QuotaEntity, float], rate: int
) -> dict[QuotaEntity, float | None]:
    """Return what to set where the quota is still at *rate*; None takes a quota away."""
    return {one.entity: one.previous for one in changes if current.get(one.entity) == rate}


def _goes_first(entity: QuotaEntity) -> bool:
    """Say whether Kafka prefers an entity's quota to, or takes it for, that of every producer."""
    kinds = dict(entity.parts)
    return "user" in kinds and (kinds["user"] is not None or "client-id" in kinds)


def _by_name(item: tuple[QuotaEntity, float]) -> str:
    return str(item[0])
