"""
Blocks that the service itself copies from other blobs (Put Block From URL).

The service reads the source by its URL, so the request must prove that this is allowed. With a shared
key the URL carries a signature for that one blob, which expires within the hour. With an identity the
request carries its token a second time, for the source. If the service accepts neither (an account may
forbid signatures, and an emulator may not know the request), nothing is copied, and the caller is told.

A block is checked by the MD5 that the service keeps of a blob that was put in one request. The service
keeps no MD5 of a blob that was put in blocks: a copy of such a blob is not proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

from tieringd.errors import ChecksumRejected
from tieringd.storage.at_once import at_once
from tieringd.storage.azure.azure_requests import Requests
from tieringd.storage.azure.errors import AzureCall, from_answer
from tieringd.storage.azure.listing import parse_crc32c
from tieringd.storage.base import JoinSource
from tieringd.storage.calls import require

_OK = frozenset({HTTPStatus.OK})
_ANSWERS = frozenset(
    {
        HTTPStatus.CREATED,
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.CONFLICT,
        HTTPStatus.PRECONDITION_FAILED,
        HTTPStatus.NOT_IMPLEMENTED,
    }
)
_UNREADABLE = "CannotVerifyCopySource"


@dataclass(frozen=True, slots=True)
class _Found:
    """What the service reports about a source."""

    name: str
    version: str
    md5: str | None


class BlockCopies:
    """Copies blobs of one container into blocks, through its requests."""

    def __init__(self, requests: Requests, *, container: str, key_prefix: str) -> None:
        self._requests = requests
        self._container = container
        self._prefix = key_prefix
        self.can_copy = True
        """False once the service reported that it does not know the request."""

    async def stage(self, key: str, sources: Sequence[JoinSource], names: Sequence[str]) -> bool | None:
        """
        Copy each source into a block of the blob *key*, under its block name in *names*.

        Returns whether all blocks are proven; None when the service cannot copy.

        Raises:
            ObjectNotFound: A source is gone.
            ChecksumRejected: A source has another size or checksum than expected.
        """
        found = await at_once(sources, self._require_expected)
        # The first copy alone shows whether the service can copy at all.
        if not await self._copy(key, found[0], names[0]):
            return None
        rest = list(zip(found[1:], names[1:], strict=True))
        if not all(await at_once(rest, lambda each: self._copy(key, *each))):
            return None
        return all(source.md5 is not None for source in found)

    async def _require_expected(self, source: JoinSource) -> _Found:
        call = AzureCall("join", self._container, source.key)
        answer = await self._requests.send(call, "HEAD", self._prefix + source.key, accept=_OK)
        size_bytes = int(require(call, answer.headers, "Content-Length"))
        crc32c = parse_crc32c(answer.headers.get("x-ms-meta-crc32c"))
        if size_bytes != source.size_bytes or crc32c not in {None, source.crc32c}:
            raise ChecksumRejected(
                f"{call.subject}: the source object has {size_bytes} bytes instead of {source.size_bytes}",
                key=source.key,
            )
        version = require(call, answer.headers, "ETag")
        return _Found(self._prefix + source.key, version, answer.headers.get("Content-MD5") or None)

    async def _copy(self, key: str, source: _Found, name: str) -> bool:
        """Copy one source; return False when the service cannot."""
        call = AzureCall("join", self._container, key)
        url, headers = await self._requests.readable(source.name)
        headers |= {"x-ms-copy-source": url, "x-ms-source-if-match": source.version}
        if source.md5 is not None:
            headers["x-ms-source-content-md5"] = source.md5
        answer = await self._requests.send(
            call,
            "PUT",
            self._prefix + key,
            query=f"?comp=block&blockid={name}",
            headers=headers,
            content=b"",
            accept=_ANSWERS,
        )
        code = answer.headers.get("x-ms-error-code") or ""
        if answer.status == HTTPStatus.CREATED:
            return True
        if answer.status == HTTPStatus.NOT_IMPLEMENTED:
            self.can_copy = False
            return False
        if code == _UNREADABLE:
            return False
        if answer.status == HTTPStatus.PRECONDITION_FAILED:
            raise ChecksumRejected(f"{call.subject}: {source.name} was replaced during the join", key=key)
        raise from_answer(call, answer.status, answer.headers)
