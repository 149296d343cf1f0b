"""
The disk state: the state of a broker's disks, as JSON in the bucket for the other brokers' daemons.

A daemon writes its own disk state and reads those of its peers. A disk state holds no history. The
reader decides when a state that is no longer written counts as outdated.

The record of lowered client quotas is JSON in the bucket as well: the previous quotas, and the phase of
the change. It is stored before a quota is changed, and it is never deleted: stores have no conditional
delete, and a late delete could remove a newer record. A finished record has the phase `restored`, and
still holds the other fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tieringd.formats.json_document import decode_document, encode_document
from tieringd.model.disk_state import DiskState, QuotaChange, QuotaEntity

QUOTA_VERSION = 1

VERSION = 1


class QuotaPhase(StrEnum):
    """The phase of a quota record."""

    LOWERED = "lowered"
    """The quotas are lowered, or about to be."""
    RESTORING = "restoring"
    """The previous quotas are being restored."""
    RESTORED = "restored"
    """The previous quotas are restored."""


@dataclass(frozen=True, slots=True)
class QuotaRecord:
    """The lowered quotas, their rate, and the last writer of the record."""

    phase: QuotaPhase
    rate: int
    changes: tuple[QuotaChange, ...]
    node_id: int
    """The broker whose daemon wrote the record."""
    changed_at_ms: int


def encode_quota_record(record: QuotaRecord) -> bytes:
    """Return the record as indented JSON, for people to read in the bucket."""
    document = {
        "version": QUOTA_VERSION,
        "phase": record.phase,
        "producer_byte_rate": record.rate,
        "node_id": record.node_id,
        "changed_at_ms": record.changed_at_ms,
        "changes": [{"entity": dict(one.entity.parts), "previous": one.previous} for one in record.changes],
    }
    return encode_document(document)


def decode_quota_record(data: bytes) -> QuotaRecord:
    """
    Return the record in *data*.

    Raises:
        CorruptDataError: The bytes are not a record of a known version.
    """
    return decode_document(data, _record, kind="record of client quotas", versions=(QUOTA_VERSION,))


def _record(document: dict[str, Any]) -> QuotaRecord:
    return QuotaRecord(
        phase=QuotaPhase(document["phase"]),
        rate=int(document["producer_byte_rate"]),
        changes=tuple(_change(one) for one in document["changes"]),
        node_id=int(document["node_id"]),
        changed_at_ms=int(document["changed_at_ms"]),
    )


def _change(document: dict[str, Any]) -> QuotaChange:
    previous = document["previous"]
    return QuotaChange(
        QuotaEntity(tuple(sorted(document["entity"].items()))), None if previous is None else float(previous)
    )


@dataclass(frozen=True, slots=True)
class PublishedDiskState:
    """A daemon's report about the broker beside it."""

    cluster: str
    node_id: int
    state: DiskState
    """The worst state of its log directories."""
    published_at_ms: int


def encode_disk_state(published: PublishedDiskState) -> bytes:
    """Return the state as indented JSON, for people to read in the bucket."""
    document = {
        "version": VERSION,
        "cluster": published.cluster,
        "node_id": published.node_id,
        "state": published.state.name.lower(),
        "published_at_ms": published.published_at_ms,
    }
    return encode_document(document)


def decode_disk_state(data: bytes) -> PublishedDiskState:
    """
    Return the state in *data*.

    Raises:
        CorruptDataError: The bytes are not a disk state of a known version.
    """
    return decode_document(data, _published, kind="disk state", versions=(VERSION,))


def _published(document: dict[str, Any]) -> PublishedDiskState:
    return PublishedDiskState(
        cluster=document["cluster"],
        node_id=int(document["node_id"]),
        state=DiskState[document["state"].upper()],
        published_at_ms=int(document["published_at_ms"]),
    )
