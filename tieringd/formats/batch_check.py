"""
A check of a run of stored batches: whole, in order, and with the right checksums.

It proves that the bytes may be sent to clients unchanged. `BatchCheck` takes them in pieces of any size, as
they arrive, and keeps no more of them than a batch's header. It does not read the records:
`formats.segment_scan` does that, once, before the upload.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from crc32c import crc32c

from tieringd.compiled.walks import BatchWalk, CheckWalk
from tieringd.errors import CorruptDataError
from tieringd.formats.batch_offsets import BatchPlace, ExpectedBatches, OffsetCheck
from tieringd.formats.record_batch import (
    CRC_STARTS_AT,
    HEADER_BYTES,
    LENGTH_STARTS_AT,
    MAGIC,
    MAX_BATCH_BYTES,
    MIN_LENGTH,
    check_crc,
    parse_header,
    require_crc,
)

_WINDOW_BYTES = 1 << 20
_FIELDS = struct.Struct(">qi4xbI2xi")
"""The fields of a header that the check needs: base offset, length, magic, checksum, last offset delta."""
_MAX_LENGTH = MAX_BATCH_BYTES - LENGTH_STARTS_AT


def check_batches(data: memoryview, expected: ExpectedBatches, *, walk: BatchWalk | None = None) -> None:
    """
    Check that *data* is whole batches, and those that are *expected*.

    Raises:
        CorruptDataError: It is not; with the position in *data*.
    """
    check = BatchCheck(expected, walk=walk)
    check.take(data)
    check.end()


def check_batches_in(
    read_at: Callable[[int, int], bytes],
    size_bytes: int,
    expected: ExpectedBatches,
    *,
    window_bytes: int = _WINDOW_BYTES,
    walk: BatchWalk | None = None,
) -> None:
    """
    Check *size_bytes* bytes as `check_batches` does. *read_at* gets a position and a size.

    At most *window_bytes* are read at once.

    Raises:
        CorruptDataError: They are not such batches, or end inside one.
    """
    check = BatchCheck(expected, walk=walk)
    position = 0
    while position < size_bytes:
        window = memoryview(read_at(position, min(window_bytes, size_bytes - position)))
        if not window:
            check.end()
            raise _cut(0, position, check.expected_offset)
        check.take(window)
        position += len(window)
    check.end()


@dataclass(slots=True)
class _Begun:
    """A batch of which only the first bytes were taken."""

    position: int
    header: bytes
    left_bytes: int
    checksum: int
    """Of its bytes until now that the batch's own checksum covers."""


class BatchCheck:
    """
    Check batches that arrive in pieces: call `take` with each piece in order, then `end`.

    Positions in errors count from the first byte of the first piece. After an error the check is used up.
    """

    def __init__(self, expected: ExpectedBatches, *, walk: BatchWalk | None = None) -> None:
        """Check what is *expected*; *walk* passes over right batches, and gives the same results."""
        self._expected = expected
        self._offsets = OffsetCheck(expected)
        self._walk: CheckWalk | None = None
        if walk is not None:
            named = expected.positions, expected.offsets
            self._walk = walk.check_of(*named, is_dense=expected.is_dense)
        self._position = 0
        """The position of the next byte to take."""
        self._head = b""
        """The first bytes of a batch, fewer than a header."""
        self._begun: _Begun | None = None
        self._checksum = 0

    @property
    def expected_offset(self) -> int:
        """Return the lowest base offset that the next batch may have."""
        return self._offsets.expected_offset

    @property
    def passed(self) -> tuple[int, int]:
        """Return the size of the whole batches that were taken, and the offset after them. All are right."""
        size_bytes = self._position - len(self._head) if self._begun is None else self._begun.position
        return size_bytes, self._offsets.expected_offset

    def take(self, data: memoryview) -> None:
        """
        Check the next bytes.

        Raises:
            CorruptDataError: They cannot follow those before them, or a batch is damaged.
        """
        if self._expected.checksum is not None:
            self._checksum = crc32c(data, self._checksum)
        at = self._go_on(data) if self._begun or self._head else 0
        at = self._check_whole(data, at)
        if len(data) - at >= HEADER_BYTES:
            self._begin(self._position + at, bytes(data[at : at + HEADER_BYTES]))
            at = self._fill(data, at + HEADER_BYTES)
        elif at < len(data):
            self._head = bytes(data[at:])
        self._position += len(data)

    def end(self) -> None:
        """
        Check that nothing is missing after the last byte.

        Raises:
            CorruptDataError: The last batch is cut, or the checksum of all bytes together is another one.
        """
        if self._begun is not None:
            begun = self._begun
            raise _cut(self._position - begun.position, begun.position, self.expected_offset)
        if self._head:
            raise _cut(len(self._head), self._position - len(self._head), self.expected_offset)
        if self._expected.checksum is not None:
            self._expected.require_checksum(self._checksum)

    def _check_whole(self, view: memoryview, at: int) -> int:
        """Check the batches that lie whole in *view* from *at* on; return where they end."""
        if self._walk is not None:
            walked = self._walk.walk(view[at:], self._position + at, self._offsets.place)
            self._offsets.place = walked
            at += walked.size_bytes
        unpack_from, checksum, passes = _FIELDS.unpack_from, crc32c, self._offsets.passes
        size, start = len(view), self._position
        last_header = size - HEADER_BYTES
        while at <= last_header:
            offset, length, magic, crc, delta = unpack_from(view, at)
            end = at + LENGTH_STARTS_AT + length
            is_possible = magic == MAGIC and MIN_LENGTH <= length <= _MAX_LENGTH
            if is_possible and end > size:
                break
            if not (
                is_possible and offset >= 0 and delta >= 0 and checksum(view[at + CRC_STARTS_AT : end]) == crc
            ):
                raise _moved(_fault(view, at), start)
            if not passes(start + at, offset, offset + delta + 1):
                self._offsets.require(BatchPlace(start + at, offset, offset + delta + 1))
            at = end
        return at

    def _go_on(self, data: memoryview) -> int:
        """Take the rest of the batch that was begun; return where it ends in *data*."""
        if self._begun is not None:
            return self._fill(data, 0)
        missing = HEADER_BYTES - len(self._head)
        begun_at = self._position - len(self._head)
        self._head += bytes(data[:missing])
        if len(data) < missing:
            return len(data)
        header, self._head = self._head, b""
        self._begin(begun_at, header)
        return self._fill(data, missing)

    def _begin(self, position: int, header: bytes) -> None:
        _, length, magic, _, _ = _FIELDS.unpack_from(header)
        if not (magic == MAGIC and MIN_LENGTH <= length <= _MAX_LENGTH):
            raise _moved(_fault(memoryview(header), 0), position)
        left_bytes = LENGTH_STARTS_AT + length - HEADER_BYTES
        self._begun = _Begun(position, header, left_bytes, crc32c(header[CRC_STARTS_AT:]))

    def _fill(self, data: memoryview, at: int) -> int:
        """Take bytes of the batch that was begun, and check it once it is whole; return where they end."""
        begun = self._begun
        assert begun is not None, "a batch has begun"
        end = min(len(data), at + begun.left_bytes)
        begun.checksum = crc32c(data[at:end], begun.checksum)
        begun.left_bytes -= end - at
        if not begun.left_bytes:
            self._begun = None
            self._require(begun)
        return end

    def _require(self, batch: _Begun) -> None:
        offset, _, _, crc, delta = _FIELDS.unpack_from(batch.header)
        if not (offset >= 0 and delta >= 0 and batch.checksum == crc):
            raise _moved(_fault_of_whole(batch.header, batch.checksum), batch.position)
        self._offsets.require(BatchPlace(batch.position, offset, offset + delta + 1))


def _fault_of_whole(header: bytes, checksum: int) -> CorruptDataError:
    """Return the fault of a batch with this header, whose bytes have this checksum."""
    try:
        require_crc(parse_header(header), checksum)
    except CorruptDataError as error:
        return error
    raise AssertionError("the check refuses a batch that parse_header and require_crc take")


def _fault(view: memoryview, at: int) -> CorruptDataError:
    """Return the fault of the batch at *at*, found by a slower, detailed check."""
    try:
        header = parse_header(view, at)
        check_crc(view, header, at)
    except CorruptDataError as error:
        return error
    raise AssertionError("the check refuses a batch that parse_header and check_crc take")


def _moved(error: CorruptDataError, position: int) -> CorruptDataError:
    """Return *error* with its position counted from *position* bytes before."""
    error.position = position + (error.position or 0)
    return error


def _cut(left_bytes: int, position: int, offset: int) -> CorruptDataError:
    return CorruptDataError(
        f"the last batch is cut short: {left_bytes} bytes are left over", position=position, offset=offset
    )
