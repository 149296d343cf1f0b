"""
The body of an upload to Cloud Storage: a JSON part that describes the object, and its bytes.

Google calls it a multipart upload. It is one request, whatever its size, and the only kind that
carries the checksum with the data and whose conditions the emulators keep as well.
The bytes of a file go through `FileBody`, with its rules: they never become a Python object.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import TYPE_CHECKING

from aiohttp.payload import Payload

from tieringd.storage.body import CHUNK_BYTES, FileBody

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp.abc import AbstractStreamWriter

    from tieringd.errors import LocalFileError


class RelatedBody(Payload):
    """
    One upload's body. Its owner calls `stop` when the request is over, however it ended.

    *stall_seconds* bounds the time in which the peer takes no byte.
    """

    _autoclose = True  # It holds nothing once `stop` has returned.

    def __init__(
        self, description: Mapping[str, str], content: bytes | FileBody, *, stall_seconds: float
    ) -> None:
        # 128 random bits: no data holds them by accident, and nobody can know them before.
        boundary = secrets.token_hex(16)
        super().__init__(content, content_type=f"multipart/related; boundary={boundary}")
        self._head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(description)}"
            f"\r\n--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        ).encode()
        self._tail = f"\r\n--{boundary}--\r\n".encode()
        self._content = content
        self._stall_seconds = stall_seconds
        self._size = len(self._head) + len(content) + len(self._tail)
        self.is_sent = False
        """Whether the last byte may have left: until then, the store cannot hold the object."""

    @property
    def failure(self) -> LocalFileError | None:
        """Return why the file could not be read; aiohttp hides it behind an error of its own."""
        return self._content.failure if isinstance(self._content, FileBody) else None

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:  # noqa: ARG002
        """Refuse: a segment is not text."""
        raise TypeError("the body of an upload cannot be decoded")

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Write everything, which is what the request's headers promise."""
        assert content_length in (None, self._size), "the Content-Length header is not the body's length"
        await self.write(writer)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """
        Write everything.

        Raises:
            LocalFileError: The file is shorter than promised, or cannot be read.
            OSError: The connection failed, or the peer took nothing for too long.
        """
        await self._send(writer, self._head)
        if isinstance(self._content, FileBody):
            await self._content.write(writer)
        else:
            await self._send(writer, self._content)
        self.is_sent = True
        await self._send(writer, self._tail)

    async def stop(self) -> None:
        """Break off what is under way; afterwards no thread uses the file's descriptor."""
        if isinstance(self._content, FileBody):
            await self._content.stop()

    async def _send(self, writer: AbstractStreamWriter, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            async with asyncio.timeout(self._stall_seconds):
                await writer.write(view[start : start + CHUNK_BYTES])
