"""Ways to damage a document, and documents that are whole and wrong."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from tieringd.formats.envelope import seal

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_JSON_OBJECTS = (b"", b"null", b"[]", b"7", b'"text"', b"{}", b"\xff{}", b"{", b"[" * 100_000)
"""The last is nested deeper than the reader's stack."""


def flipped(data: bytes) -> Iterator[bytes]:
    """Return *data* with each byte changed in turn: one bit of it, and all of them."""
    for position in range(len(data)):
        for mask in (1 << position % 8, 0xFF):
            changed = bytearray(data)
            changed[position] ^= mask
            yield bytes(changed)


def truncations(data: bytes) -> Iterator[bytes]:
    """Return every proper beginning of *data*."""
    return (data[:length] for length in range(len(data)))


def sealed_head(magic: bytes, version: int, head: Any, rest: bytes = b"") -> bytes:
    """Return a segment index with a right checksum around any *head* (JSON, or bytes as they are)."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return seal(magic, version, struct.pack(">I", len(text)) + text + rest)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def changed_heads(draw: st.DrawFn, head: dict[str, Any]) -> dict[str, Any]:
    """Draw *head* with a few of its fields replaced by any JSON value, or left out."""
    changed = dict(head)
    for name in draw(st.lists(st.sampled_from(sorted(head)), min_size=1, max_size=3, unique=True)):
        if draw(st.booleans()):
            changed[name] = draw(json_values)
        else:
            del changed[name]
    return changed
