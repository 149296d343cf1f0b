"""
Whether a daemon may write to an archive: by the record of the archive's owners, and by what the bucket holds.

Two writers that do not know of each other mix their logs in one archive, and each deletes by its own view.
So a daemon writes only where its cluster is a recorded owner. An archive without a record is empty, or from
an older release. It is adopted where nothing contradicts that: it has objects of this cluster, and this
daemon is not on a host that runs tieringd for the first time.

A second cluster is let in by an operator: `tieringd archive claim`, or a recovery into that cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tieringd.errors import ConfigError
from tieringd.formats.archive_owners import BROKER, ArchiveOwners

_CLAIM = "tieringd archive claim --config FILE"


@dataclass(frozen=True, slots=True)
class Claimant:
    """A daemon's identity towards archives."""

    cluster: str
    owner: str
    """The owner's name, as in `ArchiveOwners`."""
    is_first_start: bool = False
    """Whether the host's state directory was empty before. Always false with the owner `BROKER`."""


def claimed(
    owners: ArchiveOwners | None, found: Collection[str], claimant: Claimant, *, place: str
) -> ArchiveOwners:
    """
    Return the owners with *claimant* among them.

    Args:
        owners: The recorded owners; None without a record.
        found: The clusters of which the bucket has objects. Only used without a record.
        claimant: The daemon that is about to write.
        place: Where the archive is, for people.

    Raises:
        ConfigError: The archive is that of another cluster or host.
    """
    known = _known(owners, found)
    cluster = claimant.cluster
    if cluster not in known:
        if known:
            raise ConfigError(
                f"the archive at {place} is that of the cluster {', '.join(sorted(known))}, and this daemon "
                f"is of the cluster {cluster}: nothing was written",
                hint="Configure a bucket or prefix for this cluster alone. If both are to share the archive, "
                f"as after a recovery into a new cluster: {_CLAIM}",
            )
    elif known[cluster] is None:
        if claimant.is_first_start:
            raise ConfigError(
                f"the archive at {place} has objects of the cluster {cluster}, but this host has never "
                "archived: its state_directory was empty. Nothing was written",
                hint=f"If another host has archived there, {_apart(cluster)}. If this host's state_directory "
                f"was lost: {_CLAIM}",
            )
    elif known[cluster] != claimant.owner:
        raise ConfigError(
            f"the archive at {place} is that of {_named(known[cluster])} with the cluster id {cluster}, and "
            f"this is {_named(claimant.owner)}: nothing was written",
            hint=f"If the other one still archives there, {_apart(cluster)}. If it does not, or this host's "
            f"state_directory was lost: {_CLAIM}",
        )
    return ArchiveOwners({**known, cluster: claimant.owner})


def admitted(owners: ArchiveOwners | None, found: Collection[str], claimant: Claimant) -> ArchiveOwners:
    """Return the owners with *claimant* among them, in place of another owner of its cluster."""
    return ArchiveOwners({**_known(owners, found), claimant.cluster: claimant.owner})


def moved_in(
    owners: ArchiveOwners | None,
    found: Collection[str],
    clusters: Mapping[str, str | None],
    *,
    place: str,
) -> ArchiveOwners:
    """
    Return the owners of an archive at *place* that gets topics of *clusters*, each with its owner.

    Raises:
        ConfigError: The archive has another owner for one of the clusters.
    """
    known = _known(owners, found)
    for cluster, owner in clusters.items():
        there = known.get(cluster)
        if owner is not None and there not in {None, owner}:
            raise ConfigError(
                f"the target {place} is already that of {_named(there)} with the cluster id {cluster}, and "
                f"the source is that of {_named(owner)}: nothing was copied",
                hint="Choose another bucket or prefix as the target",
            )
        known[cluster] = there or owner
    return ArchiveOwners(known)


def _known(owners: ArchiveOwners | None, found: Collection[str]) -> dict[str, str | None]:
    return dict.fromkeys(found) if owners is None else dict(owners.of_cluster)


def _named(owner: str | None) -> str:
    return "a broker's cluster" if owner == BROKER else f"a host without a broker (id {owner})"


def _apart(cluster: str) -> str:
    if cluster == "local":
        return "give each host its own cluster_id, and its own bucket or prefix"
    return "give this host its own bucket or prefix"
