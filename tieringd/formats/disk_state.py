"""
The disk state: how a broker's disks are, as JSON in the bucket for the daemons of the others.

A daemon writes its own and reads those of its peers. It holds no history; what becomes of a
state that is not written any more is decided by who reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tieringd.errors import CorruptDataError
from tieringd.model.disk_state import DiskState

VERSION = 1


@dataclass(frozen=True, slots=True)
class PublishedDiskState:
    """What a daemon says of the broker beside it."""

    cluster: str
    node_id: int
    state: DiskState
    """The worst of its log directories'."""
    published_at_ms: int


def encode_disk_state(published: PublishedDiskState) -> bytes:
    """Return it as indented JSON, for people to read in the bucket."""
    document = {
        "version": VERSION,
        "cluster": published.cluster,
        "node_id": published.node_id,
        "state": published.state.name.lower(),
        "published_at_ms": published.published_at_ms,
    }
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


def decode_disk_state(data: bytes) -> PublishedDiskState:
    """
    Return the state that *data* holds.

    Raises:
        CorruptDataError: The bytes are not a disk state of a version we know.
    """
    try:
        return _published(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptDataError(f"disk state cannot be read: {error}") from error


def _published(document: dict[str, Any]) -> PublishedDiskState:
    # The version comes first: what else a newer document holds is not known here.
    if document["version"] != VERSION:
        raise CorruptDataError(
            f"disk state has version {document['version']}; this release reads {VERSION}",
            hint="Upgrade tieringd on this host",
        )
    return PublishedDiskState(
        cluster=document["cluster"],
        node_id=int(document["node_id"]),
        state=DiskState[document["state"].upper()],
        published_at_ms=int(document["published_at_ms"]),
    )
