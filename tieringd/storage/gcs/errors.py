"""
What a Cloud Storage request's failure means to a caller: one translation, used by every operation.

Nothing of aiohttp is visible above this page. The HTTP status decides; the reason in Google's
error document only where one status means several things. Answers carry no secrets, and
requests are not part of any error: their headers hold the access token.
"""

from __future__ import annotations

from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

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
)
from tieringd.storage.calls import THROTTLING_STATUSES, retry_after_seconds, unanswered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tieringd.errors import TieringError
    from tieringd.storage.calls import Call
    from tieringd.storage.gcs.answers import Answer

_CREDENTIALS_HINT = (
    "check cloud_storage_credentials_source and its service account, and that the account may create, read, "
    "list and delete objects in this bucket"
)

# Refused before anything was done (a 403 when it throttles). A 503 may come from behind the write.
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
        "the store, or a proxy before it, takes no object so large",
    ),
    HTTPStatus.NOT_IMPLEMENTED: (
        StorageError,
        "check that cloud_storage_api_endpoint is a Cloud Storage server",
    ),
    HTTPStatus.INSUFFICIENT_STORAGE: (StoreFull, "make room in the store"),
}
"""Statuses with a meaning and an advice of their own; another try would not change them."""


@contextmanager
def translated(call: Call) -> Iterator[None]:
    """Raise what the block raises, for want of a whole answer, as errors of our tree."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        raise unanswered(call, error) from error


def from_answer(call: Call, answer: Answer) -> TieringError:
    """Return the error that an answer stands for."""
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
            is_throttling=status in THROTTLING_STATUSES,
        )
    if status == HTTPStatus.BAD_REQUEST and "crc32c" in text.lower():
        return ChecksumRejected(text, key=call.key)
    kind, hint = _FINAL.get(status, (StorageError, None))
    return kind(text, key=call.key, hint=hint)


def _is_worth_another_try(answer: Answer) -> bool:
    if answer.status == HTTPStatus.FORBIDDEN:
        return answer.reason in _THROTTLING_REASONS
    is_trouble = answer.status in _RETRYABLE_STATUSES or answer.status >= _FAILED_FROM
    return is_trouble and answer.status not in _FINAL


def token_refused(call: Call, answer: Answer, *, may_recover: bool) -> TieringError:
    """Return the error of a 401, after which the token has been dropped."""
    if may_recover:
        return StorageUnavailable(f"{call.subject}: the access token has expired or was withdrawn")
    return from_answer(call, answer)


def bucket_not_found(call: Call) -> BucketNotFound:
    """Return the error that names the bucket and what to do about it."""
    return BucketNotFound(
        f"{call.subject}: there is no bucket {call.bucket}",
        key=call.key,
        hint="create it, or check cloud_storage_bucket and cloud_storage_api_endpoint",
    )
