"""
One HTTP request to a store: what it is about, and which error a missing or partial response means.

This module knows aiohttp and no cloud. Each cloud has a table of what its responses mean, in its `errors`
module (`gcs_responses` for `gcs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar

import aiohttp

from tieringd.clock import wall_clock_ms
from tieringd.errors import StorageUnavailable

TRUST_HINT = "check cloud_storage_trust_file"
THROTTLING_STATUSES = frozenset({429, 503})
"""A store that gets too many requests sends one of these: Too Many Requests, or Service Unavailable."""
_REFUSED_FROM_SECONDS = 900
"""S3 and Azure refuse a request whose time is this far from their own."""


@dataclass(slots=True)
class Call:
    """One request, as its errors describe it."""

    noun: ClassVar[str] = "bucket"
    """What the cloud calls a bucket."""

    operation: str
    bucket: str
    key: str | None = None
    is_conditional_put: bool = False
    may_have_effect: Callable[[], bool] = bool
    """Whether the store may have acted without our knowledge. It is called when no response came."""

    @property
    def subject(self) -> str:
        """Return what the request was about, in words."""
        what = self.operation if self.key is None else f"{self.operation} {self.key}"
        return f"{what} in {self.noun} {self.bucket}"


def unanswered(call: Call, cause: BaseException) -> StorageUnavailable:
    """Return the error for a request without a whole response; *cause* is aiohttp's or the system's."""
    is_never_sent = isinstance(cause, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
    return StorageUnavailable(
        f"{call.subject}: {type(cause).__name__} {cause}".rstrip(),
        outcome_unknown=not is_never_sent and call.may_have_effect(),
        hint=TRUST_HINT if isinstance(cause, aiohttp.ClientSSLError) else None,
    )


def require(call: Call, answer: Mapping[str, Any], name: str) -> Any:
    """
    Return a field, or a header, that every response of a store has.

    Raises:
        StorageUnavailable: It is missing: a proxy or another server responded in the store's place.
    """
    if name in answer:
        return answer[name]
    raise StorageUnavailable(
        f"{call.subject}: the response has no {name}, so it does not come from an object store",
        outcome_unknown=call.may_have_effect(),
        hint="check cloud_storage_api_endpoint, and proxies in between",
    )


def require_whole(call: Call, received_bytes: int, headers: Mapping[str, str]) -> None:
    """
    Check that a body is whole. *headers* are found by names in lower case.

    Raises:
        StorageUnavailable: It ended early, or nothing tells where it ends.
    """
    if "content-length" not in headers and "chunked" in headers.get("transfer-encoding", "").lower():
        # The HTTP client has seen the last chunk, which marks the end.
        return
    expected_bytes = int(require(call, headers, "content-length"))
    if received_bytes != expected_bytes:
        raise StorageUnavailable(f"{call.subject}: received {received_bytes} of {expected_bytes} bytes")


def retry_after_seconds(value: str | None) -> float | None:
    """Return the seconds that a Retry-After header (seconds, or a date) asks for; None if unreadable."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def clock_hint(date: str | None, *, is_certain: bool = False) -> str:
    """
    Return what to do where this machine's clock is why a store refused a request; empty where it is not.

    *date* is the Date header of the refusal. *is_certain* says that the store itself names the clock.
    """
    error_seconds = 0.0
    if date:
        with suppress(ValueError):  # A Date that cannot be read tells nothing.
            error_seconds = wall_clock_ms() / 1000 - parsedate_to_datetime(date).timestamp()
    if not is_certain and abs(error_seconds) < _REFUSED_FROM_SECONDS:
        return ""
    side = "behind" if error_seconds < 0 else "ahead of"
    return f"set this machine's clock: it is {abs(error_seconds):.0f} s {side} the store's"


def send_once(session: aiohttp.ClientSession) -> None:
    """
    Make a session send each request once.

    By default aiohttp repeats a GET, PUT or DELETE whose connection ended without a response. That
    attempt would not be counted. A conditional PUT that took effect would also fail against its own
    first attempt, and the writer would conclude that another writer had come first.
    """
    session._retry_connection = False  # noqa: SLF001 - there is no public way
