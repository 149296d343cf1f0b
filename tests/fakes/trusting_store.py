"""A bucket that does not verify checksums of uploads, as some S3 servers do not."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from crc32c import crc32c as crc32c_of

from tests.fakes.memory_store import MemoryStore
from tieringd.storage.base import FileSlice

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieringd.storage.base import Body, Condition, ObjectInfo


class TrustingStore(MemoryStore):
    """Stores the bytes that arrive. With *tells*, answers have the checksum of these bytes."""

    def __init__(
        self,
        *,
        tells: bool = False,
        may_damage: Callable[[str], bool] = lambda key: not key.startswith("tieringd-probe/"),
    ) -> None:
        super().__init__()
        self.may_damage = may_damage
        self._tells = tells
        self.flips = 0
        """The number of next objects that get a flipped bit on the way."""
        self.damaged: list[str] = []

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """Store an object without comparing its checksum."""
        data = os.pread(body.fd, body.size_bytes, body.position) if isinstance(body, FileSlice) else body
        if self.flips and self.may_damage(key):
            self.flips -= 1
            self.damaged.append(key)
            data = data[:-1] + bytes([data[-1] ^ 1])
        del crc32c
        info = await super().put(key, data, crc32c=crc32c_of(data), condition=condition)
        return info if self._tells else replace(info, crc32c=None)
