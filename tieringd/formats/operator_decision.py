"""
The decision of an operator, as JSON beside the partition's manifest, and its two records under `audit/`.

The command stores the first record and then the decision. The archiver stores the second record, first
before its commit and once more after it, and then deletes the decision. A decision itself never changes.
"""

from __future__ import annotations

from dataclasses import asdict, astuple
from typing import Any

from tieringd.formats.json_document import decode_document, encode_document
from tieringd.model.operator_decision import (
    DecisionOutcome,
    DecisionState,
    ManifestVersion,
    OperatorDecision,
)
from tieringd.model.partition import TopicIdPartition
from tieringd.model.segment import CrossingTransaction

DECISION_VERSION = 1
_COMMITTED, _ABORTED = "committed", "aborted"


def encode_decision(decision: OperatorDecision) -> bytes:
    """Return the decision; the first record has the same bytes."""
    return encode_document(_document(decision))


def encode_decision_outcome(decision: OperatorDecision, outcome: DecisionOutcome) -> bytes:
    """Return the second record. It includes the decision."""
    told = {
        "state": outcome.state.value,
        "at_ms": outcome.at_ms,
        "by_leader_epoch": outcome.leader_epoch,
        "by_writer_id": outcome.writer_id,
        "detail": outcome.detail,
        "voided": [list(astuple(one)) for one in outcome.voided],
    }
    return encode_document(_document(decision) | {"outcome": told})


def decode_decision(data: bytes) -> OperatorDecision:
    """
    Return the decision in *data*.

    Raises:
        CorruptDataError: The bytes are no decision, or one of another version.
    """
    return decode_document(data, _decision, kind="an operator's decision", versions={DECISION_VERSION})


def decode_decision_outcome(data: bytes) -> DecisionOutcome:
    """
    Return what the second record says.

    Raises:
        CorruptDataError: The bytes are no such record, or one of another version.
    """
    return decode_document(
        data, _outcome, kind="the record of an operator's decision", versions={DECISION_VERSION}
    )


def _document(decision: OperatorDecision) -> dict[str, Any]:
    partition = decision.partition
    return {
        "version": DECISION_VERSION,
        "cluster": partition.cluster,
        "topic": partition.topic,
        "topic_id": partition.topic_id,
        "partition": partition.partition,
        "decision_id": decision.decision_id,
        "decided_at_ms": decision.decided_at_ms,
        "decided_by": decision.decided_by,
        "made_for": asdict(decision.made_for),
        "transactions": {
            str(producer_id): _ABORTED if is_aborted else _COMMITTED
            for producer_id, is_aborted in decision.is_aborted.items()
        },
        "give_up": list(decision.give_up) if decision.give_up else None,
        "keep": decision.keep,
    }


def _decision(document: dict[str, Any]) -> OperatorDecision:
    made_for = document["made_for"]
    give_up = document["give_up"]
    first, last = give_up or (0, 0)
    return OperatorDecision(
        TopicIdPartition(
            document["cluster"], document["topic"], document["topic_id"], int(document["partition"])
        ),
        str(document["decision_id"]),
        int(document["decided_at_ms"]),
        str(document["decided_by"]),
        ManifestVersion(
            int(made_for["leader_epoch"]), str(made_for["writer_id"]), int(made_for["commit_number"])
        ),
        {int(producer): _is_aborted(outcome) for producer, outcome in document["transactions"].items()},
        None if give_up is None else (int(first), int(last)),
        keep=bool(document["keep"]),
    )


def _is_aborted(outcome: str) -> bool:
    if outcome not in {_COMMITTED, _ABORTED}:
        raise ValueError(f"a transaction is {_COMMITTED} or {_ABORTED}, not {outcome}")
    return outcome == _ABORTED


def _outcome(document: dict[str, Any]) -> DecisionOutcome:
    told = document["outcome"]
    return DecisionOutcome(
        DecisionState(told["state"]),
        int(told["at_ms"]),
        int(told["by_leader_epoch"]),
        str(told["by_writer_id"]),
        str(told["detail"]),
        tuple(
            CrossingTransaction(int(producer), int(first), int(marker), int(epoch))
            for producer, first, marker, epoch in told["voided"]
        ),
    )
