"""
Names of files in the chunk cache: built here, parsed here, and nowhere else.

    {segment key}_chunks/{position}     a chunk: the bytes of the data object from this position on
    {segment key}.index                 its index sidecar
    {manifest key}.{more}               a spillover manifest

A name is the object's key, so that an operator finds one by the other. With a number of buckets, the first
part of the name (the eight hex digits that spread load over an object store) becomes that hash modulo the
number, for filesystems that do not like many directories. A name that does not parse is not ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

import xxhash

from tieringd.formats.object_keys import WRITER_PATTERN

MAX_BUCKETS = 1_000_000
"""A bucket's number is shorter than a hash, so that neither is mistaken for the other."""

_HASH = r"[0-9a-f]{8}"
_PARTITION = r"[^/\0]+/[^/\0]+/\d+_[^/\0]{22}"
_SEGMENT = rf"\d+-\d+-\d+-\d+-{WRITER_PATTERN}(?:-{_HASH})?"
_NAME = re.compile(
    rf"(?P<first>{_HASH}|0|[1-9]\d{{0,5}})/"
    rf"(?:(?P<data>{_PARTITION}/{_SEGMENT}\.log)(?:_chunks/(?P<position>0|[1-9]\d*)|\.index)"
    r"|(?P<manifest>[^/\0]+/meta/[^/\0]+/\d+_[^/\0]{22}/manifest(?:\.\d+)+))"
)
_ODD_PARTS = frozenset((".", ".."))


class CacheFileKind(Enum):
    """The kinds of cached files."""

    CHUNK = "chunk"
    INDEX = "index"
    MANIFEST = "manifest"


@dataclass(frozen=True, slots=True)
class CacheName:
    """The parts of a cached file's name."""

    kind: CacheFileKind
    segment: str
    """The key of the data object that a chunk or an index belongs to; empty for a manifest."""
    position: int | None
    """Position of a chunk in the data object."""
    is_reachable: bool
    """Whether lookups use this name; false for a name from another number of buckets."""


def chunk_name(key: str, position: int, *, buckets: int) -> str:
    """Return the name of the chunk at *position* of the data object *key*."""
    return f"{cached_name(key, buckets=buckets)}_chunks/{position}"


def cached_name(key: str, *, buckets: int) -> str:
    """Return the name of a whole object: an index, or a manifest."""
    if not buckets:
        return key
    first, _, rest = key.partition("/")
    return f"{int(first, 16) % buckets}/{rest}"


def parse_cache_name(name: str, *, buckets: int) -> CacheName | None:
    """Return the parts of *name*; None for a name that this cache never gave."""
    found = _NAME.fullmatch(name)
    if found is None or _ODD_PARTS.intersection(name.split("/")):
        return None
    first = found["first"]
    if found["manifest"]:
        is_reachable = len(first) == 8 if not buckets else len(first) < 8 and int(first) < buckets  # noqa: PLR2004
        return CacheName(CacheFileKind.MANIFEST, "", None, is_reachable)
    # An object's key begins with the hash of the rest, as in `formats.object_keys`.
    segment = f"{xxhash.xxh32_intdigest(found['data'].encode()):08x}/{found['data']}"
    is_reachable = cached_name(segment, buckets=buckets).partition("/")[0] == first
    if found["position"] is None:
        return CacheName(CacheFileKind.INDEX, segment, None, is_reachable)
    return CacheName(CacheFileKind.CHUNK, segment, int(found["position"]), is_reachable)
