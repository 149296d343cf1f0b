"""Documents that people may read in the bucket: indented JSON with a version."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from tieringd.errors import CorruptDataError

T = TypeVar("T")

MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""The errors that reading a malformed document may raise. Deep nesting ends in a RecursionError."""


def encode_document(document: Mapping[str, Any]) -> bytes:
    """Return *document*, which holds its version, with its keys in order."""
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


def decode_document(
    data: bytes, make: Callable[[dict[str, Any]], T], *, kind: str, versions: Collection[int]
) -> T:
    """
    Return what *make* makes of the document in *data*.

    Raises:
        CorruptDataError: The bytes are not a document of this *kind*, in one of *versions*.
    """
    try:
        document = json.loads(data)
        # The version is checked first: a newer document may hold unknown fields.
        version = document["version"]
        if version not in versions:
            raise CorruptDataError(
                f"{kind} has version {version}; this release reads {', '.join(map(str, versions))}",
                hint="Upgrade tieringd on this host",
            )
        return make(document)
    except MALFORMED as error:
        raise CorruptDataError(f"{kind} cannot be read: {error}") from error
