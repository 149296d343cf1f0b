"""
Cloud Storage's responses: whole responses, and the facts about objects in them.

Three shapes hold the same facts: an object's JSON document, an entry of a listing, and the headers of
its bytes. A response that lacks a required fact did not come from a Cloud Storage server; the fact is
never guessed.

Failures are translated here too, by one table for every operation. Callers of this module see nothing of
aiohttp. The HTTP status decides; the reason in Google's error document is used only where one status
means several things. Responses carry no secrets. Requests are not part of any error: their headers hold
the access token.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import aiohttp

from tieringd.errors import (
    BucketNotFound,
    ChecksumRejected,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageUnavailable,
    StoreFull,
    TieringError,
)
from tieringd.storage.base import ObjectInfo
from tieringd.storage.calls import THROTTLING_STATUSES, Call, retry_after_seconds, unanswered

OBJECT_FIELDS = "size,generation,crc32c,updated"
"""The requested fields of an object. Its whole document would cost more than a small object."""

LISTED_FIELDS = f"nextPageToken,items(name,{OBJECT_FIELDS})"

_TEXT_CHARACTERS = 300

_CREDENTIALS_HINT = (
    "check cloud_storage_credentials_source and its service account, and that the account may create, read, "
    "list and delete objects in this bucket"
)

# The server refused these before it did anything (a 403 when it throttles). A 503 may follow a write.
_NOT_DONE_STATUSES = {HTTPStatus.FORBIDDEN, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
_RETRYABLE_STATUSES = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS}
_FAILED_FROM = 500
_THROTTLING_REASONS = {"rateLimitExceeded", "userRateLimitExceeded"}
_LOST_STATUSES = {HTTPStatus.NOT_MODIFIED, HTTPStatus.PRECONDITION_FAILED}

_FINAL: dict[int, tuple[type[StorageError], str]] = {
    HTTPStatus.UNAUTHORIZED: (StorageDenied, _CREDENTIALS_HINT),
    HTTPStatus.FORBIDDEN: (StorageDenied, _CREDENTIALS_HINT),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: (
        StorageError,
        "the store, or a proxy in front of it, does not accept objects of this size",
    ),
    HTTPStatus.NOT_IMPLEMENTED: (
        StorageError,
        "check that cloud_storage_api_endpoint is a Cloud Storage server",
    ),
    HTTPStatus.INSUFFICIENT_STORAGE: (StoreFull, "free some space in the store"),
}
"""Statuses with an error class and a hint of their own. A retry would not change them."""


@dataclass(frozen=True, slots=True)
class GcsResponse:
    """One whole response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def reason(self) -> str:
        """Return the first reason in Google's error document; empty if there is none."""
        return self._said()[0]

    @property
    def text(self) -> str:
        """Return the response's text about the failure, in one line."""
        return self._said()[1]

    @property
    def names_the_object(self) -> bool:
        """Return whether a 404 is explicitly about the object."""
        return "no such object" in self.text.lower()

    @property
    def names_the_bucket(self) -> bool:
        """Return whether a 404 is explicitly about the bucket."""
        return "bucket does not exist" in self.text.lower()

    def _said(self) -> tuple[str, str]:
        text = self.body[: 4 * _TEXT_CHARACTERS].decode(errors="replace")
        try:
            error = json.loads(self.body)["error"]
            text = str(error["message"])
            reason = str(error["errors"][0]["reason"])
        except (ValueError, KeyError, TypeError, IndexError):
            # Responses to media requests are plain text, and proxies send anything.
            reason = ""
        return reason, " ".join(text.split())[:_TEXT_CHARACTERS]


def document_of(call: Call, answer: GcsResponse) -> dict[str, Any]:
    """
    Return a response's JSON document.

    Raises:
        StorageUnavailable: It is not a JSON object.
    """
    try:
        document = json.loads(answer.body)
    except ValueError as error:
        raise malformed(call, "is not JSON") from error
    if not isinstance(document, dict):
        raise malformed(call, "is not a JSON object")
    return document


def info_of_document(call: Call, key: str, document: Mapping[str, Any]) -> ObjectInfo:
    """
    Return the description of an object, from its document or from its entry in a listing.

    Raises:
        StorageUnavailable: It lacks a field that every object has.
    """
    try:
        return ObjectInfo(
            key,
            int(document["size"]),
            str(int(document["generation"])),
            decoded_crc32c(document.get("crc32c")),
            _milliseconds(datetime.fromisoformat(document["updated"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise malformed(call, f"does not describe an object ({error})") from error


def info_of_media(call: Call, key: str, answer: GcsResponse) -> ObjectInfo:
    """
    Return the description of an object, from the headers of its bytes.

    Raises:
        StorageUnavailable: They lack a field that every object has.
    """
    # crc32c=AAAAAA==,md5=..., in one header or in several.
    hashes = dict(
        each.strip().partition("=")[::2] for each in answer.headers.get("x-goog-hash", "").split(",")
    )
    try:
        return ObjectInfo(
            key,
            len(answer.body),
            answer.headers["x-goog-generation"],
            decoded_crc32c(hashes.get("crc32c")),
            _milliseconds(parsedate_to_datetime(answer.headers["last-modified"])),
        )
    except (KeyError, ValueError) as error:
        raise malformed(call, f"does not describe an object ({error})") from error


def encoded_crc32c(value: int) -> str:
    """Return a checksum in Google's format: base64 of its four bytes, big-endian."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def decoded_crc32c(text: str | None) -> int | None:
    """
    Return the value of a checksum in Google's format; None for None.

    Raises:
        ValueError: The text is not a checksum.
    """
    if text is None:
        return None
    data = base64.b64decode(text, validate=True)
    if len(data) != 4:  # noqa: PLR2004 - 32 bits
        raise ValueError(f"{text} is not a CRC32C")
    return int.from_bytes(data, "big")


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def malformed(call: Call, what: str) -> StorageUnavailable:
    """Return the error for a successful response that lacks required content."""
    return StorageUnavailable(
        f"{call.subject}: the response {what}",
        outcome_unknown=call.may_have_effect(),
        hint="check that cloud_storage_api_endpoint is a Cloud Storage server",
    )


@contextmanager
def translated(call: Call) -> Iterator[None]:
    """Raise the block's errors of a missing or partial response as errors of our tree."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        raise unanswered(call, error) from error


def from_answer(call: Call, answer: GcsResponse) -> TieringError:
    """Return the error that a response stands for."""
    status, text = answer.status, f"{call.subject}: {answer.status} {answer.text}".rstrip()
    if status in _LOST_STATUSES:
        return PreconditionFailed(f"{call.subject}: another writer came first", key=call.key)
    if status == HTTPStatus.NOT_FOUND:
        if call.key is None or call.operation == "put" or answer.names_the_bucket:
            return bucket_not_found(call)
        return ObjectNotFound(f"{call.subject}: there is no such object", key=call.key)
    if _is_worth_another_try(answer):
        is_not_done = status in _NOT_DONE_STATUSES
        return StorageUnavailable(
            text,
            retry_after_seconds=retry_after_seconds(answer.headers.get("retry-after")),
            outcome_unknown=not is_not_done and call.may_have_effect(),
            is_throttling=status in THROTTLING_STATUSES or status == HTTPStatus.FORBIDDEN,
        )
    if status == HTTPStatus.BAD_REQUEST and "crc32c" in text.lower():
        return ChecksumRejected(text, key=call.key)
    kind, hint = _FINAL.get(status, (StorageError, None))
    return kind(text, key=call.key, hint=hint)


def _is_worth_another_try(answer: GcsResponse) -> bool:
    if answer.status == HTTPStatus.FORBIDDEN:
        return answer.reason in _THROTTLING_REASONS
    is_trouble = answer.status in _RETRYABLE_STATUSES or answer.status >= _FAILED_FROM
    return is_trouble and answer.status not in _FINAL


def token_refused(call: Call, answer: GcsResponse, *, may_recover: bool) -> TieringError:
    """Return the error for a 401; the token has been dropped."""
    if may_recover:
        return StorageUnavailable(f"{call.subject}: the access token has expired or was revoked")
    return from_answer(call, answer)


def bucket_not_found(call: Call) -> BucketNotFound:
    """Return the error that names the bucket and the remedies."""
    return BucketNotFound(
        f"{call.subject}: there is no bucket {call.bucket}",
        key=call.key,
        hint="create it, or check cloud_storage_bucket and cloud_storage_api_endpoint",
    )
