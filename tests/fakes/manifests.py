"""Read a partition's manifest from the bucket directly, without the services."""

from __future__ import annotations

from tieringd.formats.manifest_codec import decode_manifest
from tieringd.formats.object_keys import manifest_key


def stored_manifest(store, writer):
    found = store.objects.get(manifest_key(writer.identified))
    return None if found is None else decode_manifest(found[0])


def bases(store, writer) -> list[int]:
    manifest = stored_manifest(store, writer)
    return [each.base_offset for each in manifest.segments] if manifest else []


def bounds_of(manifest) -> list[tuple[int, int, int]]:
    """Return the first and the last offset of each live segment, and its leader epoch."""
    return [(one.base_offset, one.last_offset, one.leader_epoch) for one in manifest.segments]
