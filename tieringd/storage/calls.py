"""
One request to a store over HTTP: what it is about, and what it means when no whole answer comes.

It knows aiohttp and no cloud. What an answer means is a table per store, in its `..._errors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import ClassVar

import aiohttp

from tieringd.errors import StorageUnavailable

TRUST_HINT = "check cloud_storage_trust_file"
THROTTLING_STATUSES = frozenset({429, 503})
"""Too many requests, and too busy: every store says one of them when it is asked for too much."""


@dataclass(slots=True)
class Call:
    """One request, for the words and the meaning of its errors."""

    noun: ClassVar[str] = "bucket"
    """What the cloud calls a bucket."""

    operation: str
    bucket: str
    key: str | None = None
    is_conditional_put: bool = False
    may_have_effect: Callable[[], bool] = bool
    """Whether the store may have acted without our hearing of it; asked when no answer came."""

    @property
    def subject(self) -> str:
        """Return what the request was about, in words."""
        what = self.operation if self.key is None else f"{self.operation} {self.key}"
        return f"{what} in {self.noun} {self.bucket}"


def unanswered(call: Call, cause: BaseException) -> StorageUnavailable:
    """Return the error of a request to which no whole answer came; *cause* is aiohttp's or the system's."""
    is_never_sent = isinstance(cause, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
    return StorageUnavailable(
        f"{call.subject}: {type(cause).__name__} {cause}".rstrip(),
        outcome_unknown=not is_never_sent and call.may_have_effect(),
        hint=TRUST_HINT if isinstance(cause, aiohttp.ClientSSLError) else None,
    )


def retry_after_seconds(value: str | None) -> float | None:
    """Return the wait that a Retry-After header asks for: seconds, or a date."""
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


def send_once(session: aiohttp.ClientSession) -> None:
    """
    Make a session send each request once.

    By itself aiohttp repeats a GET, PUT or DELETE whose connection ended without an answer. Nobody
    would count that attempt; and a conditional PUT that took effect would lose to its own first
    try, so that the writer would think that another had come first.
    """
    session._retry_connection = False  # noqa: SLF001 - there is no public way
