"""
A change of one partition's manifest, made beside its archiver and committed by it.

Whoever makes one has stored every object that it names. The archiver commits it between two of its own
commits, under the claim that it holds: so housekeeping and uploads of one partition never race.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tieringd.archive.manifest_store import StoredManifest
    from tieringd.archiving.claim import Claim


class ManifestChange(Protocol):
    """A prepared merge, or a compacted segment that takes the place of others."""

    async def commit(self, claim: Claim, stored: StoredManifest) -> StoredManifest:
        """
        Commit it on *stored*, or give it up and return *stored* when the manifest has changed there.

        Raises:
            FencedError: Another writer owns the manifest now.
            StorageUnavailable: The claim reads it again; then this may be called again.
        """
        ...
