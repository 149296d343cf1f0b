"""The keys of an erasure: read from a file, and what is noted of them."""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

from tieringd.errors import ConfigError


class KeyEncoding(StrEnum):
    """How a key, which is bytes, is written in a line of text."""

    TEXT = "text"
    """UTF-8."""
    HEX = "hex"
    BASE64 = "base64"


def decoded_key(text: str, encoding: KeyEncoding) -> bytes:
    """
    Return the key that *text* stands for; an empty text is the empty key.

    Raises:
        ConfigError: It is not in this encoding. What it says does not tell the key: it may be logged.
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
        ConfigError: The file cannot be read, has an empty line, or one that is not in this encoding; or it
            begins with a mark of the order of bytes, which some editors put there.
    """
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the keys cannot be read from {path}: {error}") from error
    if text.startswith("\ufeff"):
        raise ConfigError(
            f"{path} begins with a byte order mark, which would count as a part of the first key",
            hint="Store it as UTF-8 without one; a key that begins so can be given in hex",
        )
    # Only the ends of lines that every system has: a key may hold other characters that break lines.
    keys: set[bytes] = set()
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
    for number, line in enumerate(lines, 1):
        # In hex blanks mean nothing, and a line of them would be the empty key.
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
    """Return the SHA-256 of each key in hex, ascending: what may be noted of it."""
    return tuple(sorted(hashlib.sha256(key).hexdigest() for key in keys))
