"""
Walk over batches in machine code: the plain ones only, each with its checksum.

A walk stops before the first batch that is anything but plain and right: damaged, out of order, cut, of a
transaction, of another leader epoch than those before it. The caller goes on from there in Python, which
knows what each of these means. So the two can never disagree about a fault: the walk says only that batches
have none.

The bytes may be hostile, and machine code checks no address by itself: every length is compared with the end
of the bytes before it is used. Tests compare the results with those of the loops in `formats`.

A batch's checksum is computed in three streams, because the processor's instruction has a latency of three
cycles. The checksum of all bytes together follows from those of the batches, so no byte is read twice.

All compiled code is in this file, because numba's cache notices changes in no other file. The constants are
those of `formats.record_batch`; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numba
import numpy as np
from llvmlite.ir import FunctionType, IntType
from numba.core import cgutils, types
from numba.core.registry import cpu_target

from tieringd.compiled.machine_code import compiled, helper, instruction
from tieringd.compiled.walks import Checked, Scanned

if TYPE_CHECKING:
    from numpy.typing import NDArray

Long: TypeAlias = Any
"""An int64. Before compilation it is an integer of Python or numpy."""
Word: TypeAlias = Any
"""A uint64, likewise."""

HEADER_BYTES: Final = 61
LENGTH_STARTS_AT: Final = 12
CRC_STARTS_AT: Final = 21
MIN_LENGTH: Final = 49
MAX_LENGTH: Final = (256 << 20) - 12
MAGIC: Final = 2
TRANSACTIONAL_FLAG: Final = 0x10
LOG_APPEND_TIME_FLAG: Final = 0x08
DELETE_HORIZON_FLAG: Final = 0x40
NO_TIMESTAMP: Final = -1
NEVER: Final = (1 << 63) - 1
"""Stands for no limit, and for no timestamp yet. A walk stops before a batch that has it."""

EXPECTED, LIMIT, EPOCH, INDEX_AT, INTERVAL, BASE_MS, MAX_MS, RECORDS, BATCHES, ENTRIES, CHECKSUM = range(11)
"""The fields of a scan's state: see `scan_plain`."""
SCAN_FIELDS: Final = 11
NEXT, IS_EXACT, IS_DENSE, SECTION_END, SECTION_LIMIT, ROW = range(6)
"""The fields of a check's state: see `check_plain`."""
CHECK_FIELDS: Final = 6

_STREAM_BYTES: Final = 1024
_WORD_BYTES: Final = 8
_ALL_ONES: Final = np.uint64(0xFFFFFFFF)
_POLYNOMIAL: Final = np.uint64(0x82F63B78)
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_BYTE: Final = np.uint64(255)
_FIRST_BIT: Final = np.uint64(31)


def is_possible() -> bool:
    """
    Say whether numba compiles, and for a processor that has the instruction for CRC32C that the code needs.

    Ask before compiling: without the instruction LLVM raises nothing, and ends the process. What numba
    compiles for may be less than this processor: an operator can choose it (NUMBA_CPU_NAME).
    """
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    has_instruction = triple.startswith("x86_64") and "+sse4.2" in features.split(",")
    return has_instruction and not numba.config.DISABLE_JIT


def _product(one: int, other: int) -> int:
    """Return the product of two polynomials modulo that of CRC32C, bits reflected."""
    product = 0
    for place in range(31, -1, -1):
        if one >> place & 1:
            product ^= other
        other = other >> 1 ^ (int(_POLYNOMIAL) if other & 1 else 0)
    return product


def _powers() -> NDArray[np.uint64]:
    """
    Return what a checksum is multiplied by when zeros follow.

    Item `256 * place + digit` is for `digit << 8 * place` bytes.
    """
    found = np.zeros(1024, dtype=np.uint64)
    step = 1 << 31
    for _ in range(8):
        step = step >> 1 ^ (int(_POLYNOMIAL) if step & 1 else 0)
    for place in range(4):
        power = 1 << 31
        for digit in range(256):
            found[256 * place + digit] = power
            power = _product(power, step)
        step = power
    return found


def _stream_shifts(powers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the checksum of each byte, in each of four places, with a stream of zeros after it."""
    power = int(powers[256 + _STREAM_BYTES // 256])
    shifts = [_product(byte << 8 * place, power) for place in range(4) for byte in range(256)]
    return np.array(shifts, dtype=np.uint64)


_POWERS: Final = _powers()
_SHIFTS: Final = _stream_shifts(_POWERS)


@instruction
def _byte(_typing: Any, _address: Any) -> Any:
    """Return the byte at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.zext(
            builder.load(builder.inttoptr(arguments[0], IntType(8).as_pointer())), IntType(64)
        )

    return types.uint64(types.int64), generate


@instruction
def _word(_typing: Any, _address: Any) -> Any:
    """Return the eight bytes at an address, in the machine's byte order."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        found = builder.load(builder.inttoptr(arguments[0], IntType(64).as_pointer()))
        found.align = 1
        return found

    return types.uint64(types.int64), generate


@instruction
def _int64(_typing: Any, _address: Any) -> Any:
    """Return the big-endian int64 at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        found = builder.load(builder.inttoptr(arguments[0], IntType(64).as_pointer()))
        found.align = 1
        return builder.bswap(found)

    return types.int64(types.int64), generate


@instruction
def _int32(_typing: Any, _address: Any) -> Any:
    """Return the big-endian int32 at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        found = builder.load(builder.inttoptr(arguments[0], IntType(32).as_pointer()))
        found.align = 1
        return builder.sext(builder.bswap(found), IntType(64))

    return types.int64(types.int64), generate


@instruction
def _add_word(_typing: Any, _checksum: Any, _word: Any) -> Any:
    """Return a checksum after eight more bytes."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = FunctionType(IntType(64), [IntType(64), IntType(64)])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse42.crc32.64.64")
        return builder.call(function, arguments)

    return types.uint64(types.uint64, types.uint64), generate


@instruction
def _add_byte(_typing: Any, _checksum: Any, _byte: Any) -> Any:
    """Return a checksum after one more byte."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = FunctionType(IntType(32), [IntType(32), IntType(8)])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse42.crc32.32.8")
        checksum, byte = arguments
        found = builder.call(
            function, [builder.trunc(checksum, IntType(32)), builder.trunc(byte, IntType(8))]
        )
        return builder.zext(found, IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


@helper
def _after_stream(checksum: Word) -> Word:
    """Return *checksum* with the bytes of a stream as zeros after it."""
    return (
        _SHIFTS[checksum & _BYTE]
        ^ _SHIFTS[256 + ((checksum >> np.uint64(8)) & _BYTE)]
        ^ _SHIFTS[512 + ((checksum >> np.uint64(16)) & _BYTE)]
        ^ _SHIFTS[768 + (checksum >> np.uint64(24))]
    )


@helper
def _sum(at: Long, end: Long, checksum: Word) -> Word:
    """Return *checksum*, not inverted, after the bytes from *at* up to *end*."""
    while end - at >= 3 * _STREAM_BYTES:
        first, second, third = checksum, _ZERO, _ZERO
        stop = at + _STREAM_BYTES
        while at < stop:
            first = _add_word(first, _word(at))
            second = _add_word(second, _word(at + _STREAM_BYTES))
            third = _add_word(third, _word(at + 2 * _STREAM_BYTES))
            at += _WORD_BYTES
        checksum = _after_stream(_after_stream(first) ^ second) ^ third
        at += 2 * _STREAM_BYTES
    while end - at >= _WORD_BYTES:
        checksum = _add_word(checksum, _word(at))
        at += _WORD_BYTES
    while at < end:
        checksum = _add_byte(checksum, _byte(at))
        at += 1
    return checksum


@helper
def _multiplied(one: Word, other: Word) -> Word:
    """See `_product`."""
    product = _ZERO
    for place in range(32):
        bit = (one >> (_FIRST_BIT - np.uint64(place))) & _ONE
        product ^= other & (_ZERO - bit)
        other = (other >> _ONE) ^ (_POLYNOMIAL & (_ZERO - (other & _ONE)))
    return product


@helper
def _after(checksum: Word, size: Long) -> Word:
    """Return *checksum* with *size* zero bytes after it."""
    place = 0
    while size:
        digit = size & 255
        if digit:
            checksum = _multiplied(checksum, _POWERS[place + digit])
        size >>= 8
        place += 256
    return checksum


def _scan_plain(  # noqa: C901 - flat on purpose: a call with an array costs more than a batch's header
    address: Long, size: Long, state: NDArray[np.int64], entries: NDArray[np.int64]
) -> Long:
    """
    Scan the plain batches at the front of some bytes; return their size.

    *entries* gets a row for each index entry: offset, position and greatest timestamp until there.
    """
    expected, limit, epoch = state[EXPECTED], state[LIMIT], state[EPOCH]
    index_at, interval = state[INDEX_AT], state[INTERVAL]
    base_ms, max_ms = state[BASE_MS], state[MAX_MS]
    records, batches, rows = state[RECORDS], state[BATCHES], state[ENTRIES]
    whole = np.uint64(state[CHECKSUM]) ^ _ALL_ONES
    position = np.int64(0)
    while size - position >= HEADER_BYTES:
        at = address + position
        offset, length, delta = _int64(at), _int32(at + 8), _int32(at + 23)
        flags, count = _int32(at + 21) >> 16, _int32(at + 57)
        if not (
            _byte(at + 16) == MAGIC
            and expected <= offset
            and 0 <= delta < limit - offset
            and MIN_LENGTH <= length <= MAX_LENGTH
            and 0 <= count <= delta + 1
            and (epoch < 0 or _int32(at + 12) == epoch)
            and not flags & TRANSACTIONAL_FLAG
        ):
            break
        end = position + LENGTH_STARTS_AT + length
        if end > size:
            break
        first_ms, last_ms = _int64(at + 27), _int64(at + 35)
        if flags & LOG_APPEND_TIME_FLAG:
            first_ms = last_ms
        elif flags & DELETE_HORIZON_FLAG:
            first_ms = min(first_ms, last_ms)
        if first_ms == NEVER or (position >= index_at and rows == len(entries)):
            break
        found = _sum(at + CRC_STARTS_AT, address + end, _ALL_ONES)
        if (found ^ _ALL_ONES) != np.uint64(_int32(at + 17)) & _ALL_ONES:
            break
        # With a checksum of zero before them the bytes would have this one; what came before is added to it.
        before = _sum(at, at + CRC_STARTS_AT, whole)
        whole = _after(before ^ _ALL_ONES, end - position - CRC_STARTS_AT) ^ found
        if epoch < 0:
            epoch = max(epoch, _int32(at + 12))
        if count:
            if NO_TIMESTAMP < first_ms < base_ms:
                base_ms = first_ms
            max_ms = max(max_ms, last_ms)
            records += count
        if position >= index_at:
            entries[rows, 0], entries[rows, 1], entries[rows, 2] = offset, position, max_ms
            rows += 1
            index_at = position + interval
        batches += 1
        expected = offset + delta + 1
        position = end
    state[EPOCH] = epoch
    state[EXPECTED], state[INDEX_AT], state[BASE_MS], state[MAX_MS] = expected, index_at, base_ms, max_ms
    state[RECORDS], state[BATCHES], state[ENTRIES] = records, batches, rows
    state[CHECKSUM] = np.int64(whole ^ _ALL_ONES)
    return position


def _check_plain(  # noqa: PLR0917 - machine code is called by position
    address: Long,
    size: Long,
    start: Long,
    state: NDArray[np.int64],
    positions: NDArray[np.int64],
    offsets: NDArray[np.int64],
) -> Long:
    """
    Check the batches at the front of some bytes; return the size of the right ones. The first is at *start*.

    *positions* and *offsets* are of the batches that an index names.
    """
    expected, is_exact, is_dense = state[NEXT], state[IS_EXACT], state[IS_DENSE]
    section_end, limit, row = state[SECTION_END], state[SECTION_LIMIT], state[ROW]
    position = np.int64(0)
    while size - position >= HEADER_BYTES:
        at = address + position
        begins = start + position >= section_end
        least, most, is_fixed = expected, limit, is_exact
        if begins:
            # Only a batch at the next entry begins the next section here.
            if row + 1 >= len(positions) or not positions[row] == start + position < positions[row + 1]:
                break
            most = offsets[row + 1]
            least, is_fixed = min(offsets[row], most), np.int64(1)
        offset, length, delta = _int64(at), _int32(at + 8), _int32(at + 23)
        if not (
            _byte(at + 16) == MAGIC
            and MIN_LENGTH <= length <= MAX_LENGTH
            and offset >= 0
            and (offset == least or (offset > least and not is_fixed))
            and 0 <= delta < most - offset
        ):
            break
        end = position + LENGTH_STARTS_AT + length
        if end > size:
            break
        found = _sum(at + CRC_STARTS_AT, address + end, _ALL_ONES)
        if (found ^ _ALL_ONES) != np.uint64(_int32(at + 17)) & _ALL_ONES:
            break
        if begins:
            row += 1
            section_end, limit = positions[row], most
        expected, is_exact = offset + delta + 1, is_dense
        position = end
    state[NEXT], state[IS_EXACT], state[SECTION_END], state[SECTION_LIMIT] = (
        expected,
        is_exact,
        section_end,
        limit,
    )
    state[ROW] = row
    return position


class CompiledCheck:
    """See `walks.CheckWalk`. One reader uses it."""

    def __init__(
        self,
        check: Callable[..., int],
        positions: Sequence[int],
        offsets: Sequence[int],
        *,
        is_dense: bool,
    ) -> None:
        """Check with *check*, which is `_check_plain` compiled."""
        self._check = check
        self._positions = np.array(positions, dtype=np.int64)
        self._offsets = np.array(offsets, dtype=np.int64)
        self._is_dense = is_dense
        self._state = np.zeros(CHECK_FIELDS, dtype=np.int64)

    def walk(self, view: memoryview, start: int, at: Checked) -> Checked:
        """See `walks.CheckWalk.walk`."""
        if len(view) < HEADER_BYTES or at.expected_offset < 0 or at.limit_offset < 0:
            return at._replace(size_bytes=0)
        state = self._state
        state[NEXT] = min(at.expected_offset, NEVER)
        state[IS_EXACT], state[IS_DENSE] = at.is_exact, self._is_dense
        state[SECTION_END], state[SECTION_LIMIT] = min(at.section_end, NEVER), min(at.limit_offset, NEVER)
        state[ROW] = at.row
        size = self._check(_address(view), len(view), start, state, self._positions, self._offsets)
        if not size:
            return at._replace(size_bytes=0)
        expected, is_exact, _, section_end, limit, row = state.tolist()
        if row == at.row:
            section_end, limit = at.section_end, at.limit_offset
        return Checked(expected, bool(is_exact), section_end, limit, row, size)


class CompiledWalk:
    """See `walks.BatchWalk`. Any threads use it at once. It is made only where it `is_possible`."""

    def __init__(self) -> None:
        """Compile the walks, or load what an earlier process has compiled."""
        none = np.zeros(0, dtype=np.int64)
        scanning, checking = (np.zeros(fields, dtype=np.int64) for fields in (SCAN_FIELDS, CHECK_FIELDS))
        self._scan = compiled(_scan_plain, 0, 0, scanning, np.zeros((1, 3), dtype=np.int64))
        self._check = compiled(_check_plain, 0, 0, 0, checking, none, none)

    def scan(self, view: memoryview, at: Scanned, *, limit_offset: int, interval_bytes: int) -> Scanned:
        """See `walks.BatchWalk.scan`."""
        if len(view) < HEADER_BYTES or not 0 <= at.expected_offset <= NEVER or limit_offset < 0:
            return at
        state = np.zeros(SCAN_FIELDS, dtype=np.int64)
        entries = np.empty((len(view) // max(interval_bytes, HEADER_BYTES) + 2, 3), dtype=np.int64)
        state[EXPECTED], state[LIMIT] = at.expected_offset, min(limit_offset, NEVER)
        state[EPOCH] = at.leader_epoch
        state[INDEX_AT], state[INTERVAL] = at.index_at, interval_bytes
        state[BASE_MS] = NEVER if at.base_timestamp_ms is None else at.base_timestamp_ms
        state[MAX_MS], state[CHECKSUM] = at.max_timestamp_ms, at.checksum
        size = self._scan(_address(view), len(view), state, entries)
        found = state.tolist()
        return Scanned(
            found[EXPECTED],
            found[EPOCH],
            found[CHECKSUM],
            None if found[BASE_MS] == NEVER else found[BASE_MS],
            found[MAX_MS],
            found[INDEX_AT] - size,
            size,
            found[RECORDS],
            found[BATCHES],
            entries[: found[ENTRIES]].tolist(),
        )

    def check_of(self, positions: Sequence[int], offsets: Sequence[int], *, is_dense: bool) -> CompiledCheck:
        """See `walks.BatchWalk.check_of`."""
        return CompiledCheck(self._check, positions, offsets, is_dense=is_dense)


def _address(view: memoryview) -> int:
    """Return the address of the first byte of *view*, which the caller keeps meanwhile."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
