"""
A walk over a message while it passes: fields are read whole, and large parts are skipped.

A walk keeps no bytes. Bytes that it did not take must be offered again with more; they are never longer
than one topic name and the fixed fields around it. So no byte is passed on before it is read. The
subclass for a message knows the meaning of the fields.
"""

from __future__ import annotations

from collections.abc import Callable

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.cursor import Cursor, IncompleteMessage
from tieringd.formats.kafka_wire.request_header import SIZE_BYTES


class Walk:
    """
    A walk over one message of *size* bytes after its size field; *position* is its progress.

    A step takes whole fields from the cursor, sets the next step, and returns how many bytes after those
    fields can be skipped. A step that finds too few bytes changes nothing.
    """

    def __init__(self, size: int, *, compact: bool) -> None:
        self.position = 0
        self.end = SIZE_BYTES + size
        self._compact = compact
        self._step: Callable[[Cursor], int] = self._finish
        self._skipping = 0
        self._tags = 0
        self._after_tags: Callable[[Cursor], int] = self._finish
        self._is_finished = False

    @property
    def is_done(self) -> bool:
        """Return whether the walk has reached the end of the message."""
        return self._is_finished

    @property
    def passing(self) -> int:
        """Return how many of the next bytes need no inspection: they may be counted by `passed` instead."""
        return self._skipping

    def passed(self, size: int) -> None:
        """Count *size* bytes, at most `passing`, that passed without being offered to `feed`."""
        assert size <= self._skipping, "bytes that must be looked at were passed"
        self._skipping -= size
        self.position += size

    def feed(self, view: memoryview) -> int:
        """
        Walk over the bytes at `position` and return how many were taken.

        *view* may hold more than this message; no byte is taken beyond its end.

        Raises:
            ProtocolViolation: It is no message of this kind and version.
        """
        begin = self.position
        view = view[: self.end - begin]
        try:
            self._walk(Cursor(view))
        except IncompleteMessage:
            if begin + len(view) == self.end:
                raise
        if self._is_finished and self.position != self.end:
            raise ProtocolViolation(f"a message is {self.end - self.position} bytes longer than its fields")
        return self.position - begin

    def _walk(self, cursor: Cursor) -> None:
        while not self._is_finished:
            if self._skipping:
                size = min(self._skipping, len(cursor.view) - cursor.at)
                if not size:
                    return
                self.passed(size)
                cursor.at += size
            else:
                before = cursor.at
                skip = self._step(cursor)
                self.position += cursor.at - before
                self._skip(skip)

    def _skip(self, size: int) -> None:
        left = self.end - self.position
        if size > left:
            raise ProtocolViolation(f"a field of {size} bytes in a message that has {left} left")
        self._skipping = size

    def _to_tags(self, after: Callable[[Cursor], int]) -> None:
        """Continue with a section of tagged fields, if this version has them, and then with *after*."""
        self._after_tags = after
        self._step = self._tag_count if self._compact else after

    def _tag_count(self, cursor: Cursor) -> int:
        self._tags = cursor.uvarint()
        self._step = self._tag if self._tags else self._after_tags
        return 0

    def _tag(self, cursor: Cursor) -> int:
        cursor.uvarint()
        size = cursor.uvarint()
        self._tags -= 1
        if not self._tags:
            self._step = self._after_tags
        return size

    def _finish(self, _cursor: Cursor) -> int:
        self._is_finished = True
        return 0
