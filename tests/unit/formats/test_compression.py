"""The codecs: what fits, what is cut, and what would fill the memory."""

from __future__ import annotations

import contextlib
import gzip
import resource
import struct
from pathlib import Path

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieringd.errors import CorruptDataError
from tieringd.formats.compression import Codec, Unpacker, compress, decompress

PACKED = [codec for codec in Codec if codec is not Codec.NONE]
DATA = bytes(range(256)) * 1200


def resident_bytes() -> int:
    """Return how much memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@given(st.binary(max_size=2000), st.sampled_from(Codec))
def test_decompress_undoes_compress(data, codec):
    """Every codec returns what went in."""
    assert bytes(decompress(codec, memoryview(compress(codec, data)))) == data


@pytest.mark.parametrize("codec", PACKED)
def test_decompress_takes_more_than_one_block(codec):
    """Streams of several blocks are read whole."""
    assert bytes(decompress(codec, memoryview(compress(codec, DATA)))) == DATA


@pytest.mark.parametrize("codec", PACKED)
def test_every_truncation_is_corrupt(codec):
    """A stream that ends early is corrupt, wherever it ends."""
    packed = memoryview(compress(codec, b"some bytes, some bytes, some more"))
    for size in range(len(packed)):
        if codec is Codec.SNAPPY and size == 16:
            continue  # The bare frame of snappy-java is a whole stream of no blocks.
        with pytest.raises(CorruptDataError):
            decompress(codec, packed[:size])


@pytest.mark.parametrize("codec", PACKED)
def test_bytes_behind_the_stream_are_corrupt(codec):
    """Nothing may follow the stream."""
    with pytest.raises(CorruptDataError):
        decompress(codec, memoryview(compress(codec, b"data") + b"\xff" * 5))


@pytest.mark.parametrize("codec", PACKED)
def test_bomb_is_refused_before_it_opens(codec):
    """A stream that would unpack to more than the limit is corrupt."""
    packed = memoryview(compress(codec, bytes(3_000_000)))
    with pytest.raises(CorruptDataError, match="unpack to more than 1000000 bytes"):
        decompress(codec, packed, limit_bytes=1_000_000)
    assert len(decompress(codec, packed, limit_bytes=5_000_000)) == 3_000_000


def test_gzip_of_exactly_the_limit_is_accepted():
    """The limit itself is allowed."""
    assert len(decompress(Codec.GZIP, memoryview(gzip.compress(bytes(1000))), limit_bytes=1000)) == 1000


def test_zstd_bomb_of_repeated_bytes_is_bounded_by_its_block_headers():
    """Blocks that repeat one byte count with the size they unpack to."""
    block = struct.pack("<I", 1 << 1 | 100_000 << 3)[:3] + b"x"
    last = struct.pack("<I", 1 | 1 << 1 | 5 << 3)[:3] + b"x"
    packed = memoryview(b"\x28\xb5\x2f\xfd\x00\x70" + block * 20 + last)
    assert len(decompress(Codec.ZSTD, packed)) == 2_000_005
    with pytest.raises(CorruptDataError, match="unpack to more"):
        decompress(Codec.ZSTD, packed, limit_bytes=2_000_000)


@pytest.mark.parametrize("options", [{}, {"content_checksum": True}, {"block_linked": True}], ids=str)
def test_lz4_frames_of_other_writers_are_read(options):
    """Checksums, content sizes and linked blocks are allowed when reading."""
    compressor = cramjam.lz4.Compressor(**options)
    compressor.compress(DATA)
    assert bytes(decompress(Codec.LZ4, memoryview(bytes(compressor.finish())))) == DATA
    assert bytes(decompress(Codec.LZ4, memoryview(bytes(cramjam.lz4.compress(DATA))))) == DATA


def test_lz4_is_written_with_independent_blocks():
    """Kafka's own reader refuses linked blocks, so none are written."""
    assert compress(Codec.LZ4, DATA)[4] & 0x20


def test_snappy_without_a_frame_is_read():
    """Clients that send bare snappy are understood."""
    assert bytes(decompress(Codec.SNAPPY, memoryview(bytes(cramjam.snappy.compress_raw(DATA))))) == DATA


@pytest.mark.parametrize("size", [-1, 0, 100], ids=str)
def test_snappy_block_of_impossible_size_is_corrupt(size):
    """A framed block must have bytes, and they must be there."""
    with pytest.raises(CorruptDataError, match="does not fit"):
        decompress(
            Codec.SNAPPY,
            memoryview(b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01" + struct.pack(">i", size)),
        )


def test_no_compression_is_the_same_memory():
    """Uncompressed records are not copied."""
    view = memoryview(DATA)
    assert decompress(Codec.NONE, view).obj is DATA


@given(st.binary(max_size=300), st.sampled_from(PACKED), st.booleans())
def test_arbitrary_bytes_unpack_or_are_corrupt(data, codec, with_magic):
    """Bytes that are no stream raise CorruptDataError and nothing else."""
    magic = {
        Codec.GZIP: b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff",
        Codec.SNAPPY: b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01",
        Codec.LZ4: b"\x04\x22\x4d\x18\x60\x40\x82",
        Codec.ZSTD: b"\x28\xb5\x2f\xfd",
    }[codec]
    with contextlib.suppress(CorruptDataError):
        decompress(codec, memoryview(magic * with_magic + data))


def test_unpacker_takes_batches_of_every_codec_in_turn():
    """The same memory serves one batch after another, larger and smaller, of any codec."""
    unpacker = Unpacker()
    for size in (0, 1, 5000, 100, 300_000, 7):
        for codec in Codec:
            packed = memoryview(compress(codec, DATA[:size]))
            assert bytes(unpacker.unpack(codec, packed)) == DATA[:size]


def test_unpacker_uses_its_memory_again():
    """The next batch overwrites an unpacked one."""
    unpacker = Unpacker()
    first = unpacker.unpack(Codec.ZSTD, memoryview(compress(Codec.ZSTD, b"first" * 9)))
    unpacker.unpack(Codec.LZ4, memoryview(compress(Codec.LZ4, b"other" * 9)))
    assert bytes(first) == b"other" * 9


def test_unpacker_is_as_good_as_new_after_damage():
    """A damaged stream leaves nothing behind."""
    unpacker = Unpacker()
    for codec in PACKED:
        packed = compress(codec, DATA)
        with pytest.raises(CorruptDataError):
            unpacker.unpack(codec, memoryview(packed[: len(packed) // 2]))
        assert bytes(unpacker.unpack(codec, memoryview(packed))) == DATA


def test_memory_that_is_only_claimed_is_not_taken():
    """A frame of a kilobyte that claims a gigabyte takes no more memory than it fills."""
    frame = b"\x04\x22\x4d\x18\x60\x70\x73" + b"\x01\x00\x00\x80x" * 250 + bytes(4)
    unpacker, before = Unpacker(), resident_bytes()
    assert bytes(unpacker.unpack(Codec.LZ4, memoryview(frame))) == b"x" * 250
    assert resident_bytes() - before < 100 << 20
