"""
Objects that the server itself makes of several: an upload whose parts are copies (UploadPartCopy).

Every part but the last must have at least 5 MiB. A smaller source is read and sent by this host,
together with the first bytes of the next source up to 5 MiB. All other bytes are copied by the server.

Copies are checked by what the server reports of each part: its CRC32C if the server computes one, else
its MD5. The MD5 is the ETag of a part, as it is of an object that was put whole. The copy request names
the version that was read before. If a server reports neither, the caller has to read the object.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from crc32c import crc32c as crc32c_of

from tieringd.errors import ChecksumRejected, PreconditionFailed
from tieringd.formats.crc32c_combine import combined_crc32c
from tieringd.storage.at_once import at_once
from tieringd.storage.base import JoinSource, ObjectInfo
from tieringd.storage.calls import Call, require
from tieringd.storage.s3.multipart import MultipartUploads, decode_crc32c, encode_crc32c, step_of

PART_BYTES_MIN = 5 << 20
"""The minimum for every part but the last: Amazon's limit, which other servers adopted."""
_MD5_ETAG = re.compile(r'"?[0-9a-f]{32}"?')


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a source."""

    source: JoinSource
    position: int
    size_bytes: int

    @property
    def is_whole(self) -> bool:
        """Return whether the piece is all of the source."""
        return self.size_bytes == self.source.size_bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """A part that the server copies."""

    piece: Piece

    @property
    def size_bytes(self) -> int:
        """Return the size of the part."""
        return self.piece.size_bytes


@dataclass(frozen=True, slots=True)
class Stream:
    """A part that this host reads and sends."""

    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Return the size of the part: less than twice `PART_BYTES_MIN`."""
        return sum(piece.size_bytes for piece in self.pieces)


Part: TypeAlias = Copy | Stream


def parts_of(sources: Sequence[JoinSource]) -> list[Part]:
    """Return the parts that *sources* are joined from. As many bytes as possible are copied."""
    parts: list[Part] = []
    held: list[Piece] = []
    held_bytes = 0
    for source in sources:
        is_last = source is sources[-1]
        taken = min(source.size_bytes, PART_BYTES_MIN - held_bytes) if held else 0
        rest = source.size_bytes - taken
        if rest < PART_BYTES_MIN and not is_last:
            # The rest cannot be a part of its own.
            taken, rest = source.size_bytes, 0
        if taken:
            held.append(Piece(source, 0, taken))
            held_bytes += taken
        if held_bytes >= PART_BYTES_MIN:
            parts.append(Stream(tuple(held)))
            held, held_bytes = [], 0
        if rest:
            parts.append(Copy(Piece(source, taken, rest)))
    if held:
        parts.append(Stream(tuple(held)))
    return parts


@dataclass(frozen=True, slots=True)
class _Sent:
    """A part that the server has received."""

    entry: dict[str, Any]
    """The part's fields in the completing request."""
    crc32c: int | None
    """The CRC32C of the part's bytes; None if the server did not report it."""


@dataclass(frozen=True, slots=True)
class PartJoin:
    """Joins objects of one store, by its multipart uploads, its `head` and its reads of ranges."""

    uploads: MultipartUploads
    place_of: Callable[[str], Mapping[str, str]]
    head: Callable[[str], Awaitable[ObjectInfo]]
    read: Callable[[Piece], Awaitable[bytes]]

    async def join(
        self,
        call: Call,
        key: str,
        sources: Sequence[JoinSource],
        *,
        crc32c: int,
        condition: Mapping[str, str],
        attributes: Mapping[str, str],
    ) -> tuple[dict[str, Any], bool, int]:
        """
        Join *sources* into the object *key*.

        *crc32c* is that of the whole. The server decides about *condition* when the upload completes.
        *attributes* tell how the object is kept.

        Returns:
            The completing request's response, whether the object is proven, and the bytes this host sent.

        Raises:
            ChecksumRejected: A source, or the whole, has another size or checksum, or a source was replaced.
        """
        found = await at_once(sources, lambda source: self._require_expected(call, source))
        versions = {source.key: info.version for source, info in zip(sources, found, strict=True)}
        parts = parts_of(sources)
        numbered = list(enumerate(parts, 1))
        async with self.uploads.begun(
            call, place=self.place_of(key), crc32c=crc32c, attributes=attributes
        ) as upload:
            sent = await at_once(
                numbered, lambda each: self._send(call, {**upload, "PartNumber": each[0]}, each[1], versions)
            )
            is_proven = _require_checksum(call, parts, sent, crc32c)
            answer = await self.uploads.complete(call, upload, [each.entry for each in sent], condition)
        streamed = sum(part.size_bytes for part in parts if isinstance(part, Stream))
        return answer, is_proven, streamed

    async def _require_expected(self, call: Call, source: JoinSource) -> ObjectInfo:
        info = await self.head(source.key)
        if info.size_bytes != source.size_bytes or info.crc32c not in {None, source.crc32c}:
            raise ChecksumRejected(
                f"{call.subject}: {source.key} has {info.size_bytes} bytes instead of {source.size_bytes}",
                key=source.key,
            )
        return info

    async def _send(
        self, call: Call, parameters: dict[str, Any], part: Part, versions: Mapping[str, str]
    ) -> _Sent:
        if isinstance(part, Copy):
            return await self._copy(call, parameters, part.piece, versions[part.piece.source.key])
        data = b"".join([await self.read(piece) for piece in part.pieces])
        if len(data) != part.size_bytes:
            raise ChecksumRejected(f"{call.subject}: a source became shorter during the join", key=call.key)
        checksum = await asyncio.to_thread(crc32c_of, data)
        answer = await self.uploads.ask(
            step_of(call),
            self.uploads.client.upload_part,
            **parameters,
            Body=data,
            ChecksumCRC32C=encode_crc32c(checksum),
        )
        return _Sent(_entry(call, parameters, answer, encode_crc32c(checksum)), checksum)

    async def _copy(self, call: Call, parameters: dict[str, Any], piece: Piece, version: str) -> _Sent:
        whole: dict[str, str] = {}
        if not piece.is_whole:
            last = piece.position + piece.size_bytes - 1
            whole["CopySourceRange"] = f"bytes={piece.position}-{last}"
        try:
            answer = await self.uploads.ask(
                step_of(call),
                self.uploads.client.upload_part_copy,
                **parameters,
                **whole,
                CopySource=dict(self.place_of(piece.source.key)),
                CopySourceIfMatch=version,
            )
        except PreconditionFailed as error:
            raise ChecksumRejected(
                f"{call.subject}: {piece.source.key} was replaced during the join", key=piece.source.key
            ) from error
        result = require(call, answer, "CopyPartResult")
        told = result.get("ChecksumCRC32C")
        crc32c = None if told is None else decode_crc32c(told)
        if crc32c is None and piece.is_whole and _is_same_md5(version, require(call, result, "ETag")):
            crc32c = piece.source.crc32c
        return _Sent(_entry(call, parameters, result, told), crc32c)


def _entry(
    call: Call, parameters: Mapping[str, Any], answer: dict[str, Any], checksum: str | None
) -> dict[str, Any]:
    entry = {"PartNumber": parameters["PartNumber"], "ETag": require(call, answer, "ETag")}
    return entry if checksum is None else {**entry, "ChecksumCRC32C": checksum}


def _is_same_md5(version: str, etag: str) -> bool:
    return _MD5_ETAG.fullmatch(version) is not None and version.strip('"') == etag.strip('"')


def _require_checksum(call: Call, parts: Sequence[Part], sent: Sequence[_Sent], crc32c: int) -> bool:
    """
    Return whether all checksums of the parts are known.

    Raises:
        ChecksumRejected: They are known, and do not combine to *crc32c*.
    """
    pieces = [
        (each.crc32c, part.size_bytes)
        for each, part in zip(sent, parts, strict=True)
        if each.crc32c is not None
    ]
    if len(pieces) < len(parts):
        return False
    if combined_crc32c(pieces) != crc32c:
        raise ChecksumRejected(
            f"{call.subject}: the checksum of the sources' bytes is not the expected one", key=call.key
        )
    return True
