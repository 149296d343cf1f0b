"""Keys of an erasure, as people write them."""

from __future__ import annotations

import hashlib

import pytest

from tieringd.errors import ConfigError
from tieringd.spark.jobs.erased_keys import KeyEncoding, decoded_key, fingerprints, read_keys


@pytest.mark.parametrize(
    ("text", "encoding", "key"),
    [
        ("alice@example.org", KeyEncoding.TEXT, b"alice@example.org"),
        ("é ", KeyEncoding.TEXT, "é ".encode()),
        ("00ff", KeyEncoding.HEX, b"\x00\xff"),
        ("AP8=", KeyEncoding.BASE64, b"\x00\xff"),
        ("", KeyEncoding.TEXT, b""),
        ("", KeyEncoding.HEX, b""),
        ("", KeyEncoding.BASE64, b""),
    ],
)
def test_key_is_what_the_text_stands_for(text, encoding, key):
    """Byte for byte: spaces count, and an empty text is the empty key."""
    assert decoded_key(text, encoding) == key


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("0f0", KeyEncoding.HEX),
        ("xy", KeyEncoding.HEX),
        ("AP8", KeyEncoding.BASE64),
        ("!", KeyEncoding.BASE64),
    ],
)
def test_text_in_another_encoding_is_refused(text, encoding):
    """The error tells the encoding, and not the key, which may be secret."""
    with pytest.raises(ConfigError, match=f"a key is not in {encoding}: ") as raised:
        decoded_key(text, encoding)
    assert text not in str(raised.value).removeprefix(f"a key is not in {encoding}: ").split()


def test_line_in_another_encoding_is_told_by_its_number(tmp_path):
    """The error does not show the line's content."""
    path = tmp_path / "keys"
    path.write_text("00\nsomeone\n")
    with pytest.raises(ConfigError, match=f"line 2 of {path}: a key is not in hex") as raised:
        read_keys(path, KeyEncoding.HEX)
    assert "someone" not in str(raised.value)


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"", []),
        (b"a\nb\na\n", [b"a", b"b"]),
        (b"a\r\nb", [b"a", b"b"]),
        (b" a \n", [b" a "]),
        ("a\u2028b\n".encode(), ["a\u2028b".encode()]),
        (b"a\x0bb\n", [b"a\x0bb"]),
    ],
)
def test_file_has_a_key_in_each_line(tmp_path, data, keys):
    """Only the ends of lines part them: a key may hold other characters that break lines."""
    path = tmp_path / "keys"
    path.write_bytes(data)
    assert read_keys(path, KeyEncoding.TEXT) == frozenset(keys)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a\n\nb\n", "line 2 of .* is empty"),
        (b"\n", "line 1 of .* is empty"),
        (b"\xff\n", "cannot be read"),
        (b"\xef\xbb\xbfa\n", "byte order mark"),
    ],
)
def test_file_that_may_mean_something_else_is_refused(tmp_path, data, said):
    """An empty line is no empty key, and bytes that are no text are not guessed at."""
    path = tmp_path / "keys"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        read_keys(path, KeyEncoding.TEXT)


def test_blanks_are_no_key_in_hex(tmp_path):
    """Blanks mean nothing in hex, and an empty key has to be asked for."""
    path = tmp_path / "keys"
    path.write_bytes(b"6b 65\n \n")
    with pytest.raises(ConfigError, match=r"line 2 of .* is empty"):
        read_keys(path, KeyEncoding.HEX)


def test_file_that_is_missing_is_told(tmp_path):
    """The error names it."""
    with pytest.raises(ConfigError, match="nowhere"):
        read_keys(tmp_path / "nowhere", KeyEncoding.HEX)


def test_fingerprint_tells_keys_apart_and_tells_none():
    """Fingerprints are checksums that can be computed from a known key."""
    assert fingerprints([b"b", b"a"]) == tuple(
        sorted(hashlib.sha256(key).hexdigest() for key in (b"a", b"b"))
    )
