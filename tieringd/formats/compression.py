"""
The four codecs of Kafka record batches: bytes to bytes, with a limit on the output.

The output size of a batch is bounded *before* it is unpacked, from the frame's own block headers, so a
few hostile bytes cannot fill the memory. gzip has no such headers and goes through zlib, which itself
stops at a limit.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum

import cramjam

from tieringd.errors import CorruptDataError, UnpackedTooLarge

MAX_DECOMPRESSED_BYTES = 1 << 30
"""A batch that unpacks to more is treated as corrupt."""

_GZIP_WINDOW_BITS = 31
"""zlib's value for a gzip header and trailer with the largest window."""

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES = 32 * 1024
_INT32 = struct.Struct(">i")

_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_LZ4_SIZE = struct.Struct("<I")
_LZ4_STORED = 0x80000000
_LZ4_BLOCK_BYTES = {4: 1 << 16, 5: 1 << 18, 6: 1 << 20, 7: 1 << 22}

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_MAX_BLOCK_BYTES = 1 << 17
_ZSTD_DICTIONARY_ID_BYTES = (0, 1, 2, 4)
_ZSTD_CONTENT_SIZE_BYTES = (0, 2, 4, 8)
_ZSTD_RAW, _ZSTD_RLE, _ZSTD_COMPRESSED = 0, 1, 2


class Codec(IntEnum):
    """The compression of a batch: the lowest three bits of its attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


def compress(codec: Codec, data: bytes) -> bytes:
    """Return *data* packed the way Kafka's own clients pack it."""
    match codec:
        case Codec.NONE:
            return data
        case Codec.GZIP:
            return bytes(cramjam.gzip.compress(data))
        case Codec.SNAPPY:
            return b"".join(_xerial_parts(data))
        case Codec.LZ4:
            # Java's reader refuses linked blocks (KIP-57).
            compressor = cramjam.lz4.Compressor(content_checksum=False, block_linked=False)
            compressor.compress(data)
            return bytes(compressor.finish())
        case _:
            assert codec is Codec.ZSTD, "every codec is covered"
            return bytes(cramjam.zstd.compress(data))


class Unpacker:
    """
    Unpacks one batch after another into reused memory.

    Owned by one reader: a result of `unpack` is valid until the next call.
    """

    __slots__ = ("_scratch",)

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray())

    def unpack(
        self, codec: int, data: memoryview, *, limit_bytes: int = MAX_DECOMPRESSED_BYTES
    ) -> memoryview:
        """
        Return *data* unpacked; with no compression, the same memory.

        Raises:
            CorruptDataError: The codec is unknown, the stream is damaged, or it holds more than
                *limit_bytes*.
        """
        try:
            return self._unpack(codec, data, limit_bytes)
        except (cramjam.DecompressionError, zlib.error, struct.error, IndexError, KeyError) as error:
            raise CorruptDataError(f"the records cannot be decompressed: {error}") from error

    def _unpack(self, codec: int, data: memoryview, limit_bytes: int) -> memoryview:
        match codec:
            case Codec.NONE:
                return data
            case Codec.GZIP:
                return memoryview(_gunzip(data, limit_bytes))
            case Codec.SNAPPY:
                return self._unsnappy(data, limit_bytes)
            case Codec.LZ4:
                room = self._room(_lz4_bound(data), limit_bytes)
                return room[: cramjam.lz4.decompress_into(data, room)]
            case Codec.ZSTD:
                room = self._room(_zstd_bound(data), limit_bytes)
                return room[: cramjam.zstd.decompress_into(data, room)]
            case _:
                raise CorruptDataError(f"compression codec {codec} is unknown")

    def _unsnappy(self, data: memoryview, limit_bytes: int) -> memoryview:
        """Unpack snappy in snappy-java's framing, or without framing, which some clients send."""
        is_framed = data[: len(_XERIAL_MAGIC)] == _XERIAL_MAGIC
        blocks = _xerial_blocks(data) if is_framed else [data]
        sizes = list(map(cramjam.snappy.decompress_raw_len, blocks))
        room, filled = self._room(sum(sizes), limit_bytes), 0
        for block, size_bytes in zip(blocks, sizes, strict=True):
            cramjam.snappy.decompress_raw_into(block, room[filled : filled + size_bytes])
            filled += size_bytes
        return room[:filled]

    def _room(self, size_bytes: int, limit_bytes: int) -> memoryview:
        """Return memory for at least *size_bytes*. The memory returned before may be reused or dropped."""
        _check_limit(size_bytes, limit_bytes)
        if len(self._scratch) < size_bytes:
            # Frames may claim far more than they hold. A page of this memory costs nothing until it is used.
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._scratch = memoryview(mmap.mmap(-1, 1 << (size_bytes - 1).bit_length(), flags=private))
        return self._scratch


def decompress(codec: int, data: memoryview, *, limit_bytes: int = MAX_DECOMPRESSED_BYTES) -> memoryview:
    """Return *data* unpacked into memory of its own; see `Unpacker.unpack`."""
    return Unpacker().unpack(codec, data, limit_bytes=limit_bytes)


def _check_limit(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise UnpackedTooLarge(f"the records unpack to more than {limit_bytes} bytes")


def _gunzip(data: memoryview, limit_bytes: int) -> bytes:
    stream = zlib.decompressobj(_GZIP_WINDOW_BITS)
    unpacked = stream.decompress(data, limit_bytes)
    if not stream.eof:
        # Either more output follows, or the input ends early. One more byte of output distinguishes them.
        _check_limit(limit_bytes + len(stream.decompress(stream.unconsumed_tail, 1)), limit_bytes)
    if not stream.eof or stream.unused_data:
        raise CorruptDataError("the gzip stream is cut short, or bytes follow it")
    return unpacked


def _xerial_parts(data: bytes) -> Iterator[bytes]:
    yield _XERIAL_HEADER
    for start in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(data[start : start + _XERIAL_BLOCK_BYTES]))
        yield _INT32.pack(len(block))
        yield block


def _xerial_blocks(data: memoryview) -> list[memoryview]:
    """Return the packed blocks of a frame of snappy-java."""
    if len(data) < len(_XERIAL_HEADER):
        raise CorruptDataError("the snappy frame's header is cut short")
    blocks: list[memoryview] = []
    position = len(_XERIAL_HEADER)
    while position < len(data):
        (block_bytes,) = _INT32.unpack_from(data, position)
        position += _INT32.size
        if not 0 < block_bytes <= len(data) - position:
            raise CorruptDataError(f"a snappy block of {block_bytes} bytes does not fit in the batch")
        blocks.append(data[position : position + block_bytes])
        position += block_bytes
    return blocks


def _lz4_bound(data: memoryview) -> int:
    """Return an upper limit for the unpacked size of an LZ4 frame: its blocks times their largest size."""
    if data[:4] != _LZ4_MAGIC:
        raise CorruptDataError("the records are not an LZ4 frame")
    flags = data[4]
    block_limit = _LZ4_BLOCK_BYTES[data[5] >> 4 & 7]
    position = 7 + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0)
    block_checksum_bytes = 4 if flags & 0x10 else 0
    bound = 0
    while size := _LZ4_SIZE.unpack_from(data, position)[0]:
        bound += block_limit
        position += _LZ4_SIZE.size + (size & ~_LZ4_STORED) + block_checksum_bytes
    position += _LZ4_SIZE.size + (4 if flags & 0x04 else 0)
    if position != len(data):
        raise CorruptDataError(f"the LZ4 frame ends at byte {position} of {len(data)}")
    return bound


def _zstd_bound(data: memoryview) -> int:
    """Return an upper limit for the unpacked size of a Zstandard frame, from its block headers (RFC 8878)."""
    if data[:4] != _ZSTD_MAGIC:
        raise CorruptDataError("the records are not a Zstandard frame")
    descriptor = data[4]
    is_single_segment = bool(descriptor & 0x20)
    position = 5 + (0 if is_single_segment else 1)
    position += _ZSTD_DICTIONARY_ID_BYTES[descriptor & 3]
    position += _ZSTD_CONTENT_SIZE_BYTES[descriptor >> 6] or (1 if is_single_segment else 0)
    bound = 0
    is_last = False
    while not is_last:
        header = data[position] | data[position + 1] << 8 | data[position + 2] << 16
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        position += 3 + (1 if kind == _ZSTD_RLE else size)
        bound += _ZSTD_MAX_BLOCK_BYTES if kind == _ZSTD_COMPRESSED else size
    position += 4 if descriptor & 0x04 else 0
    if position != len(data):
        raise CorruptDataError(f"the Zstandard frame ends at byte {position} of {len(data)}")
    return bound
