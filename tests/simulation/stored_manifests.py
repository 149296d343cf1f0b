"""The manifests of a bucket as the promises read them: each version is decoded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.formats.manifest_codec import decode_manifest

if TYPE_CHECKING:
    from tests.fakes.memory_store import MemoryStore
    from tieringd.model.manifest import PartitionManifest


class StoredManifests:
    """Manifests of *store* by their keys, without a request to it."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._decoded: dict[str, tuple[bytes, PartitionManifest]] = {}

    def get(self, key: str) -> PartitionManifest | None:
        """Return the manifest under *key*, which has to be a sound one; None where there is none."""
        found = self._store.objects.get(key)
        if found is None:
            return None
        known = self._decoded.get(key)
        if known is None or known[0] is not found[0]:
            known = self._decoded[key] = found[0], decode_manifest(found[0])
        return known[1]
