"""
The owners of an archive: the clusters whose daemons write there, as JSON in the bucket.

A cluster with a broker is its own owner, because every daemon of that cluster learns the same id from its
broker. Without a broker the cluster's name is a setting, `local` by default, so two hosts may have the same
one. There the owner is a random id from the state directory of the host's daemon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tieringd.formats.json_document import decode_document, encode_document

ARCHIVE_OWNERS_KEY: Final = "owners/clusters.json"
"""It is outside `meta/`, where a cluster of any name has its keys."""
VERSION: Final = 1
BROKER: Final = "broker"
"""The owner of a cluster whose id a broker tells, or the files of one."""


@dataclass(frozen=True, slots=True)
class ArchiveOwners:
    """The owner of each cluster: `BROKER`, or the id of a host; None until its daemon starts again."""

    of_cluster: Mapping[str, str | None]


def encode_archive_owners(owners: ArchiveOwners) -> bytes:
    """Return the owners as indented JSON, for people to read in the bucket."""
    return encode_document({"version": VERSION, "clusters": dict(owners.of_cluster)})


def decode_archive_owners(data: bytes) -> ArchiveOwners:
    """
    Return the owners in *data*.

    Raises:
        CorruptDataError: The bytes are not a record of owners of a known version.
    """
    return decode_document(data, _owners, kind="record of the archive's owners", versions=(VERSION,))


def _owners(document: dict[str, Any]) -> ArchiveOwners:
    clusters = document["clusters"].items()
    return ArchiveOwners({cluster: None if owner is None else str(owner) for cluster, owner in clusters})
