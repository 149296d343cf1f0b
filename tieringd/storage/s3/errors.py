"""
What the failure of an S3 request means to a caller: one translation, used by every operation.

Callers of this module see nothing of botocore or aiohttp. Servers differ in the codes they send: a known
code decides, otherwise the HTTP status.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProxyConnectionError,
    SSLError,
)

from tieringd.errors import (
    BucketNotFound,
    ChecksumRejected,
    ObjectNotFound,
    PreconditionFailed,
    StorageDenied,
    StorageError,
    StorageUnavailable,
    TieringError,
)
from tieringd.storage.calls import THROTTLING_STATUSES, TRUST_HINT, Call, clock_hint, retry_after_seconds

_CHECKSUM_CODES = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_MISSING_CODES = {"NoSuchKey", "NotFound", "404"}
_DENIED_CODES = {
    "AccessDenied",
    "AuthorizationHeaderMalformed",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
}
_CLOCK_CODES = {"RequestExpired", "RequestTimeTooSkewed"}
_EXPIRED_CODES = {"ExpiredToken", "RequestExpired", "TokenRefreshRequired"}
# The server sends these when it refused to begin or did not receive the whole body. A multipart upload
# that is gone was cleaned up by another process: the whole put begins anew.
_NOT_DONE_CODES = {
    "ConditionalRequestConflict",
    "IncompleteBody",
    "NoSuchUpload",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
}
_THROTTLING_CODES = {"RequestLimitExceeded", "SlowDown", "Throttling", "ThrottlingException"}
_NOT_DONE_STATUSES = {429}  # A 503 without a code comes from a gateway, perhaps after the write.
_FAILED_CODES = {"InternalError", "OperationAborted"}
# Two requests for one key collided, and the server refused this one. That says nothing about the
# condition: the other request may have failed as well. Some servers send a 409 with another code for an
# object that exists.
_CONFLICT = 409
_CONFLICT_CODES = {"", "409", "ConditionalRequestConflict", "OperationAborted"}
_RETRYABLE_STATUSES = {408, 409, 429}
_FAILED_FROM = 500
_NOT_IMPLEMENTED = 501  # Final: the server does not know a header that we send.

_CREDENTIALS_HINT = (
    "check cloud_storage_access_key, cloud_storage_secret_key and cloud_storage_region (or the role, where "
    "there are no keys), and that its policy allows this"
)


@contextmanager
def translated(call: Call) -> Iterator[None]:
    """Raise the errors of the block as errors of our tree."""
    try:
        yield
    except ClientError as error:
        raise from_answer(call, error.response) from error
    except (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError) as error:
        raise StorageDenied(
            f"{call.subject}: no credentials ({error})", key=call.key, hint=_CREDENTIALS_HINT
        ) from error
    except (BotoCoreError, aiohttp.ClientError, OSError) as error:
        raise _unanswered(call, error) from error


def from_answer(call: Call, answer: dict[str, Any]) -> TieringError:
    """Return the error that an S3 error document (or a bare status) stands for."""
    details = answer.get("Error", {})
    metadata = answer.get("ResponseMetadata", {})
    code, status = str(details.get("Code", "")), int(metadata.get("HTTPStatusCode", 0))
    text = f"{call.subject}: {code or status} {details.get('Message', '')}".rstrip()
    if code == "NoSuchBucket":
        return bucket_not_found(call)
    is_lost = status == _CONFLICT and code not in _CONFLICT_CODES
    if status == 412 or (call.is_conditional_put and (is_lost or code in _MISSING_CODES)):  # noqa: PLR2004
        return PreconditionFailed(f"{call.subject}: another writer came first", key=call.key)
    if code in _MISSING_CODES:
        return ObjectNotFound(f"{call.subject}: there is no such object", key=call.key)
    if code in _DENIED_CODES or code in _EXPIRED_CODES or status in {401, 403}:
        # The response to a HEAD has no code, and the store's time says as much.
        date = metadata.get("HTTPHeaders", {}).get("date")
        is_clock = code in _CLOCK_CODES
        clock = clock_hint(date, is_certain=is_clock) if is_clock or code in {"", "403"} else ""
        return StorageDenied(
            text,
            key=call.key,
            hint=clock or _CREDENTIALS_HINT,
            # Expired credentials are those of a role, which its service renews.
            may_pass=bool(clock) or code in _EXPIRED_CODES,
        )
    if (
        code in _NOT_DONE_CODES
        or code in _FAILED_CODES
        or status in _RETRYABLE_STATUSES
        or (status >= _FAILED_FROM and status != _NOT_IMPLEMENTED)
    ):
        is_not_done = code in _NOT_DONE_CODES or status in _NOT_DONE_STATUSES
        return StorageUnavailable(
            text,
            retry_after_seconds=retry_after_seconds(metadata.get("HTTPHeaders", {}).get("retry-after")),
            outcome_unknown=not is_not_done and call.may_have_effect(),
            is_throttling=code in _THROTTLING_CODES or status in THROTTLING_STATUSES,
        )
    return (ChecksumRejected if code in _CHECKSUM_CODES else StorageError)(text, key=call.key)


def is_expired(error: StorageError) -> bool:
    """
    Return whether the store refused a request because its credentials have expired.

    A response to HEAD has no code. AWS sends 400 for an expired token, and for hardly anything else.
    """
    answer = getattr(error.__cause__, "response", {})
    return answer.get("Error", {}).get("Code") in _EXPIRED_CODES | {"400"}


def bucket_not_found(call: Call) -> BucketNotFound:
    """Return the error that names the bucket and the remedies."""
    return BucketNotFound(
        f"{call.subject}: there is no bucket {call.bucket}",
        key=call.key,
        hint="create it, or check cloud_storage_bucket, cloud_storage_region and cloud_storage_api_endpoint",
    )


def _unanswered(call: Call, error: Exception) -> StorageUnavailable:
    """Return the error for a request without a whole response."""
    cause = getattr(error, "kwargs", {}).get("error", error)
    never_sent = isinstance(error, (ConnectTimeoutError, ProxyConnectionError, SSLError)) or isinstance(
        cause, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
    )
    return StorageUnavailable(
        f"{call.subject}: {error or type(error).__name__} ({type(cause).__name__}: {cause})",
        outcome_unknown=not never_sent and call.may_have_effect(),
        hint=TRUST_HINT if isinstance(error, SSLError) else None,
    )
