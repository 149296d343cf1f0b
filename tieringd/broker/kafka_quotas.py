"""
Client quotas in Kafka's messages: requests, and what their responses say.

This module has the messages only; `broker.kafka` sends them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from kio.schema.errors import ErrorCode

from tieringd.broker.kafka_protocol import ALTER_CLIENT_QUOTAS, DESCRIBE_CLIENT_QUOTAS, KafkaRequest
from tieringd.errors import BrokerDenied, BrokerUnavailable, TieringError
from tieringd.model.disk_state import QuotaEntity

_FINAL: Final = {
    ErrorCode.cluster_authorization_failed: "Grant this user the ACLs DESCRIBE_CONFIGS and ALTER_CONFIGS on "
    "the cluster, or set storage_degraded_action to alert",
    ErrorCode.invalid_request: "This broker does not take such quotas; set storage_degraded_action to alert",
    ErrorCode.unsupported_version: "This broker has no such quotas; set storage_degraded_action to alert",
}


def describe_request() -> KafkaRequest:
    """Return the request for every quota that is set."""

    def build(module: ModuleType) -> Any:
        return module.DescribeClientQuotasRequest(components=(), strict=False)

    return KafkaRequest(DESCRIBE_CLIENT_QUOTAS, build)


def described(response: Any) -> dict[QuotaEntity, dict[str, float]]:
    """
    Return the quotas in a response.

    Raises:
        BrokerDenied: This user may not ask.
        BrokerUnavailable: The broker cannot answer now.
    """
    if response.error_code is not ErrorCode.none:
        raise _error("to tell the client quotas", response.error_code, response.error_message)
    return {
        _entity(entry.entity): {value.key: float(value.value) for value in entry.values}
        for entry in response.entries or ()
    }


def alter_request(
    changes: Mapping[QuotaEntity, Mapping[str, float | None]], *, send_by: float = math.inf
) -> KafkaRequest:
    """Return the request to set quotas. None removes a quota, and all others stay as they are."""

    def build(module: ModuleType) -> Any:
        entries = tuple(
            module.EntryData(
                entity=tuple(
                    module.EntityData(entity_type=kind, entity_name=name) for kind, name in entity.parts
                ),
                ops=tuple(
                    module.OpData(key=key, value=0.0 if value is None else float(value), remove=value is None)
                    for key, value in values.items()
                ),
            )
            for entity, values in changes.items()
        )
        return module.AlterClientQuotasRequest(entries=entries, validate_only=False)

    return KafkaRequest(ALTER_CLIENT_QUOTAS, build, send_by=send_by)


def check_altered(response: Any) -> None:
    """
    Check that every entity's change was applied.

    Raises:
        BrokerDenied: A change was refused; others may have been applied.
        BrokerUnavailable: A change cannot be applied now.
    """
    for entry in response.entries:
        if entry.error_code is not ErrorCode.none:
            raise _error(
                f"to set the quota of {_entity(entry.entity)}", entry.error_code, entry.error_message
            )


def _entity(parts: Any) -> QuotaEntity:
    return QuotaEntity(tuple(sorted((part.entity_type, part.entity_name) for part in parts)))


def _error(subject: str, code: ErrorCode, message: str | None) -> TieringError:
    reason = f"{code.name.upper()}{f' ({message})' if message else ''}"
    if code in _FINAL:
        return BrokerDenied(f"the broker refuses {subject}: {reason}", hint=_FINAL[code])
    return BrokerUnavailable(f"the broker refuses {subject} now: {reason}")
