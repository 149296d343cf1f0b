"""
What the failure of an Azure Blob request means to a caller: one table, used by every operation.

Callers of this module see nothing of the SDK or aiohttp. The service sends an error code in a header,
for HEAD as well: a known code decides, otherwise the HTTP status.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError

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
from tieringd.storage import calls

_LOST_CODES = {
    "BlobAlreadyExists",
    "BlobNotFound",  # A conditional replacement of a blob that is gone: If-Match needs one.
    "ConditionNotMet",
    "ResourceNotFound",
    "TargetConditionNotMet",
}
_LOST_STATUSES = {409, 412}
_MISSING_CODES = {"BlobNotFound", "PathNotFound", "ResourceNotFound"}
_NO_CONTAINER_CODES = {"ContainerBeingDeleted", "ContainerNotFound", "FilesystemNotFound"}
_CHECKSUM_CODES = {"Crc64Mismatch", "Md5Mismatch"}
_DENIED_CODES = {
    "AccountIsDisabled",
    "AuthenticationFailed",
    "AuthorizationFailure",
    "BlobImmutableDueToPolicy",
    "ContainerDisabled",
    "InsufficientAccountPermissions",
    "InvalidAuthenticationInfo",
    "KeyBasedAuthenticationNotPermitted",
    "NoAuthenticationInformation",
    "PublicAccessNotPermitted",
    "UnauthorizedBlobOverwrite",
}
_DENIED_STATUSES = {401, 403}
_SIGNATURE_CODES = {"", "AuthenticationFailed"}
"""Codes for a wrong signature; that of a request whose time is too far off is one of them."""
# The service sends these when it refused to begin, or when it cannot do the request as it stands.
_NOT_DONE_CODES = {
    "AccountBeingCreated",
    "IncompleteBody",
    "InvalidBlobOrBlock",
    "InvalidBlockList",  # Another commit to the same blob dropped our blocks: upload them again.
    "ServerBusy",
}
_THROTTLED = 429
_FAILED_CODES = {"InternalError", "OperationTimedOut"}
_RETRYABLE_STATUSES = {408, 429}
_REFUSED_FROM = 400
_FAILED_FROM = 500

_HINTS = {
    "AuthorizationPermissionMismatch": "assign the role Storage Blob Data Contributor to the identity",
    "BlobArchived": "the blob is in the archive tier: rehydrate it, and keep lifecycle rules off the prefix",
    "BlobImmutableDueToPolicy": (
        "an immutability policy protects the blob: exempt the prefix, or keep objects longer than the policy"
    ),
    "KeyBasedAuthenticationNotPermitted": (
        "the account refuses shared keys: set cloud_storage_credentials_source to an identity"
    ),
    "LeaseIdMissing": "another client holds a lease on the blob: release the lease",
    "SnapshotsPresent": "the blob has snapshots, which tieringd does not delete: delete them first",
}
_CREDENTIALS_HINT = (
    "check cloud_storage_azure_storage_account, cloud_storage_azure_shared_key (or the identity's role, "
    "where there is no key), the account's network rules and this machine's clock"
)


class AzureCall(calls.Call):
    """One request; Azure calls a bucket a container."""

    noun = "container"


@contextmanager
def translated(call: AzureCall) -> Iterator[None]:
    """Raise the errors of the block as errors of our tree."""
    try:
        yield
    except HttpResponseError as error:
        response: Any = error.response
        if response is not None and response.status_code >= _REFUSED_FROM:
            raise from_answer(call, response.status_code, response.headers) from error
        if isinstance(error, ClientAuthenticationError):
            raise StorageDenied(
                f"{call.subject}: the request could not be signed", key=call.key, hint=_CREDENTIALS_HINT
            ) from error
        raise calls.unanswered(call, error.__cause__ or error) from error
    except (AzureError, aiohttp.ClientError, OSError) as error:
        raise calls.unanswered(call, error.__cause__ or error) from error


def from_answer(call: AzureCall, status: int, headers: Mapping[str, str], said: str = "") -> TieringError:
    """Return the error that a status, and the code among the headers, stand for."""
    code = headers.get("x-ms-error-code") or ""
    if code in _NO_CONTAINER_CODES:
        return container_not_found(call, code)
    if call.is_conditional_put and (code in _LOST_CODES or (not code and status in {404, *_LOST_STATUSES})):
        return PreconditionFailed(f"{call.subject}: another writer came first", key=call.key)
    if code in _MISSING_CODES or (not code and status == 404):  # noqa: PLR2004
        return ObjectNotFound(f"{call.subject}: there is no such object", key=call.key)
    return _by_class(call, code, status, headers, said)


def _by_class(call: AzureCall, code: str, status: int, headers: Mapping[str, str], said: str) -> TieringError:
    text = f"{call.subject}: {code or status} {said}".rstrip()
    if code in _CHECKSUM_CODES:
        return ChecksumRejected(text, key=call.key, hint="nothing was stored")
    if (
        code in _NOT_DONE_CODES
        or code in _FAILED_CODES
        or status in _RETRYABLE_STATUSES
        or status >= _FAILED_FROM
    ):
        # A busy service refused to begin. A 503 without a code comes from a gateway, which may have lost
        # the service's response.
        is_not_done = code in _NOT_DONE_CODES or status == _THROTTLED
        return StorageUnavailable(
            text,
            retry_after_seconds=retry_after_seconds(headers),
            outcome_unknown=not is_not_done and call.may_have_effect(),
            is_throttling=status in calls.THROTTLING_STATUSES,
        )
    if code in _DENIED_CODES or status in _DENIED_STATUSES:
        clock = calls.clock_hint(headers.get("Date")) if code in _SIGNATURE_CODES else ""
        hint = clock or _HINTS.get(code, _CREDENTIALS_HINT)
        return StorageDenied(text, key=call.key, hint=hint, may_pass=bool(clock))
    return StorageError(text, key=call.key, hint=_HINTS.get(code))


def container_not_found(call: AzureCall, code: str) -> BucketNotFound:
    """Return the error that names the container and the remedies."""
    state = "is being deleted" if code == "ContainerBeingDeleted" else "does not exist"
    return BucketNotFound(
        f"{call.subject}: the container {call.bucket} {state}",
        key=call.key,
        hint="create it, or check cloud_storage_azure_container and cloud_storage_azure_storage_account",
    )


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a response asks to wait (in ms, in seconds, or as a date), if it does."""
    milliseconds = headers.get("x-ms-retry-after-ms") or headers.get("retry-after-ms") or ""
    if milliseconds.strip().isdigit():
        return int(milliseconds) / 1000
    return calls.retry_after_seconds(headers.get("Retry-After"))
