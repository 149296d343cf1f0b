"""
The messages of a login: SaslHandshake, SaslAuthenticate, and the tokens of PLAIN, SCRAM and OAUTHBEARER.

Everything here is read before a login, so every length is bounded. No error quotes a token: it may hold a
password.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass, field
from typing import Final

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.cursor import SIZE_BYTES, Cursor
from tieringd.formats.kafka_wire.request_header import HEAD, RequestHead

FIRST_FLEXIBLE_AUTHENTICATE: Final = 2
"""The first version of SaslAuthenticate with compact lengths and tagged fields."""
TOKEN_BYTES_MAX: Final = 16 << 10
"""The largest token that is read. A user name and a password are far smaller."""
BEARER: Final = "OAUTHBEARER"
_CORRELATION_ID_BYTES: Final = 4
_PLAIN_FIELDS: Final = 3
_SEPARATOR: Final = "\1"
_CREDENTIALS: Final = re.compile(r"bearer +([-_.A-Za-z0-9]+)", re.IGNORECASE)
"""The value of `auth`, as Kafka's broker reads it."""
_JWT_PARTS: Final = 3


def mechanism_of(frame: memoryview) -> str:
    """
    Return the mechanism that a whole SaslHandshake request of version 0 or 1 names.

    Raises:
        ProtocolViolation: It is no such request.
    """
    cursor = Cursor(frame, HEAD.size)
    cursor.string(compact=False)
    return (cursor.string(compact=False) or b"").decode(errors="replace")


def token_of(frame: memoryview, head: RequestHead) -> bytes:
    """
    Return the token in a whole SaslAuthenticate request.

    Raises:
        ProtocolViolation: It is no such request.
    """
    compact = head.version >= FIRST_FLEXIBLE_AUTHENTICATE
    cursor = Cursor(frame, HEAD.size)
    cursor.string(compact=False)
    if compact:
        cursor.skip_tags()
    size = cursor.uvarint() - 1 if compact else cursor.int32()
    begin = cursor.at
    cursor.skip(max(size, 0))
    return bytes(frame[begin : cursor.at])


def is_accepted(frame: memoryview, version: int, mechanism: str) -> bool:
    """
    Say whether a whole SaslAuthenticate response, with its size, accepts a token of *mechanism*.

    A refused token of OAUTHBEARER is answered with a text about what is wrong, and without an error code.

    Raises:
        ProtocolViolation: It is no such response.
    """
    compact = version >= FIRST_FLEXIBLE_AUTHENTICATE
    cursor = Cursor(frame, SIZE_BYTES + _CORRELATION_ID_BYTES)
    if compact:
        cursor.skip_tags()
    if cursor.int16() != 0:
        return False
    if mechanism != BEARER:
        return True
    cursor.string(compact=compact)
    return (cursor.uvarint() - 1 if compact else cursor.int32()) <= 0


@dataclass(frozen=True, slots=True)
class PlainToken:
    """The token of PLAIN (RFC 4616)."""

    user: str
    password: str = field(repr=False)
    authorization_id: str = ""

    @classmethod
    def read(cls, token: bytes) -> PlainToken:
        """
        Read a token.

        Raises:
            ProtocolViolation: It is not one.
        """
        parts = _text(token).split("\0")
        if len(parts) != _PLAIN_FIELDS or not parts[1] or not parts[2]:
            raise ProtocolViolation("a token of SASL/PLAIN cannot be read")
        return cls(parts[1], parts[2], parts[0])


@dataclass(frozen=True, slots=True)
class ScramFirst:
    """A client's first message of SCRAM (RFC 5802)."""

    user: str
    nonce: str
    header: str
    """The GS2 header, which the client repeats in its last message."""
    bare: str
    """The message without that header."""
    authorization_id: str = ""

    @classmethod
    def read(cls, token: bytes) -> ScramFirst:
        """
        Read a token.

        Raises:
            ProtocolViolation: It is not one, asks for channel binding, or has a mandatory extension.
        """
        text = _text(token)
        flag, _, rest = text.partition(",")
        authorization_id, comma, bare = rest.partition(",")
        fields = bare.split(",")
        is_sound = (
            flag in {"n", "y"}
            and comma
            and (not authorization_id or authorization_id.startswith("a="))
            and len(fields) > 1
            and fields[0].startswith("n=")
            and fields[1].startswith("r=")
            and len(fields[0]) > len("n=")
            and len(fields[1]) > len("r=")
        )
        if not is_sound:
            raise ProtocolViolation("the first message of SCRAM cannot be read")
        header = text[: len(text) - len(bare)]
        return cls(_unescaped(fields[0][2:]), fields[1][2:], header, bare, _unescaped(authorization_id[2:]))


@dataclass(frozen=True, slots=True)
class ScramFinal:
    """A client's last message of SCRAM."""

    binding: bytes
    nonce: str
    proof: bytes = field(repr=False)
    without_proof: str

    @classmethod
    def read(cls, token: bytes) -> ScramFinal:
        """
        Read a token.

        Raises:
            ProtocolViolation: It is not one.
        """
        without_proof, found, proof = _text(token).rpartition(",p=")
        fields = without_proof.split(",")
        if not found or len(fields) <= 1 or fields[0][:2] != "c=" or fields[1][:2] != "r=":
            raise ProtocolViolation("the last message of SCRAM cannot be read")
        try:
            return cls(
                base64.b64decode(fields[0][2:], validate=True),
                fields[1][2:],
                base64.b64decode(proof, validate=True),
                without_proof,
            )
        except (binascii.Error, ValueError):
            raise ProtocolViolation("the last message of SCRAM cannot be read") from None


@dataclass(frozen=True, slots=True)
class BearerToken:
    """
    The token of OAUTHBEARER (RFC 7628), where it is a JSON Web Token (RFC 7519).

    Its signature is not checked: what it says holds once a broker has accepted it.
    """

    subject: str
    """The claim `sub`. Kafka and Redpanda take it for the user's name unless they are told otherwise."""

    @classmethod
    def read(cls, token: bytes) -> BearerToken:
        """
        Read a client's first message.

        Raises:
            ProtocolViolation: It is not one, or does not have exactly one JSON Web Token with a subject.
        """
        header, *pairs = _text(token).split(_SEPARATOR)
        # With two of them a broker may take the other one.
        credentials = [pair[5:] for pair in pairs if pair.lower().startswith("auth=")]
        found = _CREDENTIALS.fullmatch(credentials[0]) if len(credentials) == 1 else None
        if found is None or not header.startswith("n,"):
            raise ProtocolViolation("the first message of OAUTHBEARER cannot be read")
        subject = _claims(found[1]).get("sub")
        if not isinstance(subject, str) or not subject:
            raise ProtocolViolation("a token of OAUTHBEARER names no subject")
        return cls(subject)


def _claims(token: str) -> dict[str, object]:
    """Return the claims of a JSON Web Token."""
    parts = token.split(".")
    if len(parts) == _JWT_PARTS:
        try:
            claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        except (ValueError, RecursionError):
            claims = None
        if isinstance(claims, dict):
            return claims
    raise ProtocolViolation("a token of OAUTHBEARER is no JSON Web Token")


def _text(token: bytes) -> str:
    if len(token) > TOKEN_BYTES_MAX:
        raise ProtocolViolation(f"a token of {len(token)} bytes is too large")
    try:
        return token.decode()
    except UnicodeDecodeError:
        raise ProtocolViolation("a token is not UTF-8") from None


def _unescaped(name: str) -> str:
    """Return a name of SCRAM, in which a comma and an equals sign are escaped."""
    plain = name.replace("=2C", "").replace("=3D", "")
    if "=" in plain:
        raise ProtocolViolation("a name in a message of SCRAM cannot be read")
    return name.replace("=2C", ",").replace("=3D", "=")
