"""The keys of an erasure: parsing, reading from a file, and the fingerprints that are stored."""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

from tieringd.errors import ConfigError


class KeyEncoding(StrEnum):
    """How a key, which is bytes, is written as text."""

    TEXT = "text"
    """UTF-8."""
    HEX = "hex"
    BASE64 = "base64"


def decoded_key(text: str, encoding: KeyEncoding) -> bytes:
    """
    Return the key that *text* encodes. An empty text is the empty key.

    Raises:
        ConfigError: The text is not valid in this encoding. The message may be logged, and has no key in it.
    """
    try:
        match encoding:
            case KeyEncoding.HEX:
                return bytes.fromhex(text)
            case KeyEncoding.BASE64:
                return binascii.a2b_base64(text, strict_mode=True)
            case _:
                return text.encode()
    except ValueError as error:
        raise ConfigError(f"a key is not in {encoding}: {error}") from None


def read_keys(path: Path, encoding: KeyEncoding) -> frozenset[bytes]:
    """
    Return the keys in a file, one in each line.

    Raises:
        ConfigError: The file cannot be read, a line is empty or not valid in this encoding, or the file
            begins with a byte order mark, which some editors write.
    """
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the keys cannot be read from {path}: {error}") from error
    if text.startswith("\ufeff"):
        raise ConfigError(
            f"{path} begins with a byte order mark, which would become a part of the first key",
            hint="Store the file as UTF-8 without the mark; give a key that begins with these bytes in hex",
        )
    # Only \n and \r\n end a line. A key may contain the other characters that `splitlines` splits at.
    keys: set[bytes] = set()
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
    for number, line in enumerate(lines, 1):
        # `bytes.fromhex` ignores blanks, so that a line of blanks would be the empty key.
        if not (line if encoding is KeyEncoding.TEXT else line.strip()):
            raise ConfigError(
                f"line {number} of {path} is empty",
                hint="Remove it; the empty key is given by --key ''",
            )
        try:
            keys.add(decoded_key(line, encoding))
        except ConfigError as error:
            raise ConfigError(f"line {number} of {path}: {error}") from None
    return frozenset(keys)


def fingerprints(keys: Collection[bytes]) -> tuple[str, ...]:
    """Return the SHA-256 of each key in hex, ascending. Records store these instead of the keys."""
    return tuple(sorted(hashlib.sha256(key).hexdigest() for key in keys))
