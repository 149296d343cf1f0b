"""The envelope of our documents: whole and right, or corrupt."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.formats.damage import flipped, truncations
from tieringd.errors import CorruptDataError
from tieringd.formats.envelope import ENVELOPE_BYTES, seal, unseal

SEALED = seal(b"TEST", 2, b"the body")


def opened(data: bytes, *, newest_version: int = 3) -> tuple[int, bytes]:
    return unseal(data, b"TEST", newest_version=newest_version, kind="test document")


@given(st.integers(1, 3), st.binary(max_size=100))
def test_sealed_body_is_unsealed(version, body):
    """Version and body come back as they went in, and the envelope takes 16 bytes."""
    sealed = seal(b"TEST", version, body)
    assert opened(sealed) == (version, body)
    assert len(sealed) == ENVELOPE_BYTES + len(body) == 16 + len(body)


def test_envelope_is_laid_out_as_documented():
    """Magic, version, zero and length are big endian, then the CRC32C of all that and the body."""
    head = b"TEST" + bytes([0, 2, 0, 0, 0, 0, 0, 8])
    assert head + struct.pack(">I", crc32c(head + b"the body")) + b"the body" == SEALED


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(b"", "test document is cut short: 0 bytes", id="nothing"),
        pytest.param(SEALED[:15], "test document is cut short: 15 bytes", id="inside the envelope"),
        pytest.param(SEALED[:16], "test document should have 24 bytes and has 16", id="no body"),
        pytest.param(SEALED[:-1], "test document should have 24 bytes and has 23", id="one byte short"),
        pytest.param(SEALED + b"x", "test document should have 24 bytes and has 25", id="one byte more"),
        pytest.param(
            seal(b"NONE", 2, b""), "this is not a test document: it begins with b'NONE'", id="other kind"
        ),
        pytest.param(SEALED[:-1] + b"Y", "test document has a wrong checksum", id="other byte"),
    ],
)
def test_damaged_envelope_is_explained(data, words):
    """The error says what kind of document it is and what is wrong with it."""
    with pytest.raises(CorruptDataError) as caught:
        opened(data)
    assert caught.value.message == words


def test_any_changed_byte_is_noticed():
    """Head, checksum and body are all covered."""
    for data in flipped(SEALED):
        with pytest.raises(CorruptDataError):
            opened(data)


def test_any_truncation_is_noticed():
    """There is no partial reading."""
    for data in truncations(SEALED):
        with pytest.raises(CorruptDataError):
            opened(data)


@pytest.mark.parametrize("version", [0, 4, 65535])
def test_version_that_we_do_not_know_is_named(version):
    """A newer release's document is refused with what to do, though it is whole."""
    with pytest.raises(CorruptDataError) as caught:
        opened(seal(b"TEST", version, b"the body"))
    assert str(caught.value) == (
        f"test document has format version {version}; this release reads 1 to 3. "
        "Upgrade tieringd on this host"
    )


def test_newest_version_is_read():
    """The bound is inclusive on both sides."""
    assert opened(seal(b"TEST", 1, b"")) == (1, b"")
    assert opened(seal(b"TEST", 3, b"")) == (3, b"")


@given(st.binary(max_size=60))
@example(SEALED)
def test_arbitrary_bytes_are_unsealed_or_corrupt(data):
    """Nothing but CorruptDataError comes of any bytes."""
    try:
        version, body = opened(data)
    except CorruptDataError:
        return
    assert seal(b"TEST", version, body) == data
