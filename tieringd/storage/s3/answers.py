"""
What S3's answers tell of an object, in the words of the seam.

Nothing is asked here: the store asks, and `s3_errors` reads what went wrong.
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from tieringd.clock import wall_clock_ms
from tieringd.errors import StorageUnavailable
from tieringd.storage.base import ObjectInfo
from tieringd.storage.receive import receive
from tieringd.storage.s3.errors import require
from tieringd.storage.s3.multipart import CHECKSUM_METADATA, decode_crc32c

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from tieringd.errors import StorageError
    from tieringd.storage.calls import Call


async def read_whole(
    call: Call, answer: dict[str, Any], *, executor: Executor, stall_seconds: float
) -> bytes:
    """Read an answer's body, and refuse one that ended early."""
    async with answer["Body"] as stream:
        data = await receive(stream.raw_stream, executor=executor, stall_seconds=stall_seconds)
    if len(data) != answer["ContentLength"]:
        raise StorageUnavailable(
            f"{call.subject}: {len(data)} bytes arrived of {answer['ContentLength']} announced"
        )
    return data


def info_of(call: Call, key: str, answer: dict[str, Any], *, size_bytes: int) -> ObjectInfo:
    """Return what an answer to GET or HEAD tells of its object."""
    modified_ms = milliseconds(require(call, answer, "LastModified"))
    return ObjectInfo(key, size_bytes, require(call, answer, "ETag"), _crc32c(answer), modified_ms)


def _crc32c(answer: dict[str, Any]) -> int | None:
    """
    Return the checksum of a whole object.

    Of one sent in parts a server knows what it composed of theirs, and not every server marks it as
    such: then the checksum counts that the whole had when its parts were found to add up to it.
    """
    text, kind = answer.get("ChecksumCRC32C"), answer.get("ChecksumType")
    whole = answer.get("Metadata", {}).get(CHECKSUM_METADATA)
    if whole is not None:
        return decode_crc32c(whole)
    return None if text is None or "-" in text or kind == "COMPOSITE" else decode_crc32c(text)


def milliseconds(moment: Any) -> int:
    """Return a point in time in milliseconds since 1970."""
    return int(moment.timestamp() * 1000)


def answered_at_ms(answer: dict[str, Any]) -> int:
    """Return the server's clock where it tells (a PUT's answer has no modification time), else ours."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return milliseconds(parsedate_to_datetime(date)) if date else wall_clock_ms()


def status_of(error: StorageError) -> int:
    """Return the HTTP status behind an error, 0 when there is none."""
    answer = getattr(error.__cause__, "response", {})
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
