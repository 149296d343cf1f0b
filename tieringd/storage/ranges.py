"""What an answer to a request for a range holds, whichever of HTTP's ways a server chose to give it."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from tieringd.errors import StorageUnavailable

if TYPE_CHECKING:
    from tieringd.storage.calls import Call


def ranged(
    call: Call, data: bytes, *, status: int, content_range: str | None, position: int, size_bytes: int
) -> bytes:
    """
    Return those of *size_bytes* from *position* that the object has.

    Raises:
        StorageUnavailable: The answer holds other bytes, fewer or more.
    """
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return b""
    if status != HTTPStatus.PARTIAL_CONTENT:
        # A server may answer with the whole object instead.
        return data[position : position + size_bytes]
    span, _, total = (content_range or "").removeprefix("bytes ").partition("/")
    first = span.partition("-")[0]
    if not (first.isdecimal() and total.isdecimal()):
        raise StorageUnavailable(
            f"{call.subject}: the answer does not say which range it is ({content_range!r})",
            hint="check cloud_storage_api_endpoint, and proxies on the way",
        )
    expected = min(size_bytes, int(total) - position)
    if (int(first), len(data)) != (position, expected):
        raise StorageUnavailable(
            f"{call.subject}: {len(data)} bytes from {first} arrived, not {expected} from {position}"
        )
    return data
