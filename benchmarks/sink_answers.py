"""
As much of three stores' protocols as uploads and ranged reads need: S3, Google's JSON, Azure's blobs.

A request's head is read here and answers are written. Nothing is known of sockets or of what is kept.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "benchmark"
SERVED_KEY = "served"
"""The one object that can be read, in ranges. A key of no upload."""
SERVED_BYTES = 64 << 20
TRIAL_PREFIX = "tieringd-probe/"
"""What comes below it has a wrong checksum. A store that takes it is read back, and nothing is kept here."""

_CREATED = (
    "<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{key}</Key><UploadId>1</UploadId>"
    "</InitiateMultipartUploadResult>"
)
_WRONG_CHECKSUM = "<Error><Code>BadDigest</Code><Message>the checksum is wrong</Message></Error>"
_NO_SUCH_KEY = "<Error><Code>NoSuchKey</Code><Message>nothing is kept</Message></Error>"
_EMPTY_LISTING = "<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
_COMPLETED = (
    "<CompleteMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{key}</Key><ETag>0</ETag>"
    "</CompleteMultipartUploadResult>"
)
_GOOGLE_UPLOADS = f"/upload/storage/v1/b/{BUCKET}/o"
_MOMENT = "Thu, 01 Jan 2026 00:00:00 GMT"


@dataclass(frozen=True, slots=True)
class Request:
    """A request's head."""

    method: str
    path: str
    query: dict[str, str]
    fields: dict[str, str]
    """Header fields by their names in lower case."""

    @property
    def key(self) -> str:
        """Return the key without the bucket or container."""
        return self.path.removeprefix(f"/{BUCKET}/")

    @property
    def size_bytes(self) -> int:
        """Return the body's length."""
        return int(self.fields.get("content-length", 0))

    @property
    def has_plain_body(self) -> bool:
        """Say whether the body is the object's bytes and nothing else."""
        encoding = self.fields.get("content-encoding", "")
        return "aws-chunked" not in encoding and "transfer-encoding" not in self.fields

    @property
    def is_put(self) -> bool:
        """Say whether the body is an object, or a part or a block of one."""
        return self.method == "PUT"

    @property
    def is_google_upload(self) -> bool:
        """Say whether the body is a description and an object, as Google's JSON API has it."""
        return (
            self.method == "POST"
            and self.path == _GOOGLE_UPLOADS
            and self.query.get("uploadType") == "multipart"
        )

    @property
    def is_start_of_parts(self) -> bool:
        """Say whether it begins an upload in parts."""
        return self.method == "POST" and "uploads" in self.query

    @property
    def is_end_of_parts(self) -> bool:
        """Say whether it ends an upload in parts."""
        return self.method == "POST" and "uploadId" in self.query

    def served_range(self) -> tuple[int, int] | None:
        """Return the first position and the size of what is to be read; None if it is nothing we have."""
        if self.method != "GET" or self.key != SERVED_KEY or "range" not in self.fields:
            return None
        first, _, last = self.fields["range"].removeprefix("bytes=").partition("-")
        return int(first), min(int(last), SERVED_BYTES - 1) - int(first) + 1


def parse_request(head: bytes) -> Request:
    """Return what a head says."""
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    url = urlsplit(target)
    return Request(
        method,
        unquote(url.path),
        {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()},
        {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])},
    )


def split_google_body(request: Request, begun: bytes) -> tuple[dict[str, str], int, int] | None:
    """
    Return the object's description, where its bytes begin in the body, and how many follow them.

    None when *begun*, the start of the body, does not reach so far.
    """
    description_at = begun.find(b"\r\n\r\n") + 4
    boundary = request.fields["content-type"].partition("boundary=")[2].strip('"')
    description_end = begun.find(f"\r\n--{boundary}".encode(), description_at)
    content_at = begun.find(b"\r\n\r\n", description_end) + 4
    if description_at < 4 or description_end < 0 or content_at < 4:
        return None
    description = json.loads(begun[description_at:description_end])
    return description, content_at, len(f"\r\n--{boundary}--\r\n")


def google_object(description: dict[str, str], size_bytes: int) -> bytes:
    """Answer an upload with the object's document; a trial of the store is refused."""
    if TRIAL_PREFIX in description["name"]:
        return response("400 Bad Request", "the crc32c is wrong")
    document = {
        **description,
        "size": str(size_bytes),
        "generation": "1",
        "updated": "2026-01-01T00:00:00.000Z",
    }
    return response("200 OK", json.dumps(document))


def parts_begun(request: Request) -> bytes:
    """Answer the start of an upload in parts."""
    return response("200 OK", _CREATED.format(bucket=BUCKET, key=request.key))


def parts_completed(request: Request) -> bytes:
    """Answer the end of an upload in parts."""
    return response("200 OK", _COMPLETED.format(bucket=BUCKET, key=request.key))


def stored(request: Request) -> bytes:
    """Answer a PUT: Azure's has another status. A trial of the store is refused."""
    if TRIAL_PREFIX in request.key:
        return response("400 Bad Request", _WRONG_CHECKSUM)
    return response("201 Created" if "x-ms-version" in request.fields else "200 OK")


def range_head(position: int, size_bytes: int) -> bytes:
    """Return the head of the answer to a ranged read."""
    return (
        f"HTTP/1.1 206 Partial Content\r\nContent-Length: {size_bytes}\r\n"
        f"Content-Range: bytes {position}-{position + size_bytes - 1}/{SERVED_BYTES}\r\n"
        f'ETag: "0"\r\nLast-Modified: {_MOMENT}\r\n\r\n'
    ).encode()


def other(request: Request) -> bytes:
    """Answer what asks and brings nothing: nothing is kept."""
    if request.method == "HEAD":
        return response("200 OK")
    if request.method == "GET":
        return (
            response("200 OK", _EMPTY_LISTING)
            if "list-type" in request.query
            else response("404 Not Found", _NO_SUCH_KEY)
        )
    return refused()


def refused() -> bytes:
    """Answer what no client takes for success."""
    return response("501 Not Implemented")


def wrong_checksum() -> bytes:
    """Answer as S3 does where the bytes are not those of the announced checksum."""
    return response(
        "400 Bad Request", "<Error><Code>BadDigest</Code><Message>wrong checksum</Message></Error>"
    )


def response(status: str, body: str = "") -> bytes:
    """Return a whole answer."""
    return (
        f'HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nETag: "0"\r\nLast-Modified: {_MOMENT}\r\n'
        f"x-amz-bucket-region: us-east-1\r\n\r\n{body}"
    ).encode()


@cache
def served_data() -> bytes:
    """Return the bytes of the object that can be read: the same in every process."""
    return random.Random(20260229).randbytes(SERVED_BYTES)
