"""
The principal of a client, from its certificate or from a login that the gateway forwards to the broker.

The gateway grants no access by this name. It uses the name to count reads, and to give each principal its
budget of archived records. A name counts once the broker has accepted the login. A login by PLAIN or SCRAM
shows the user's name. A token of OAUTHBEARER has it in the claim `sub`, which brokers take by default too.
Clients stay `ANONYMOUS` with GSSAPI, and with a token that is no JSON Web Token. Passwords and tokens are
neither kept nor logged.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cryptography import x509

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.sasl import (
    BEARER,
    BearerToken,
    PlainToken,
    ScramFirst,
    is_accepted,
    mechanism_of,
    token_of,
)
from tieringd.metrics.readers import ANONYMOUS, Reader

if TYPE_CHECKING:
    import socket

    from tieringd.formats.kafka_wire.request_header import RequestHead

_PLAIN: Final = "PLAIN"
_SCRAM: Final = frozenset({"SCRAM-SHA-256", "SCRAM-SHA-512"})


def certified_principal(sock: socket.socket) -> str | None:
    """Return the principal of a client's certificate, as Kafka writes it; None without a certificate."""
    if not isinstance(sock, ssl.SSLSocket):
        return None
    encoded = sock.getpeercert(binary_form=True)
    if encoded is None:
        return None
    try:
        return f"User:{x509.load_der_x509_certificate(encoded).subject.rfc4514_string()}"
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class ClaimedLogin:
    """A user that has logged in once the broker accepts one SaslAuthenticate request."""

    user: str
    mechanism: str


class SeenLogin:
    """The principal of one connection."""

    def __init__(self, principal: str = ANONYMOUS) -> None:
        """Begin with the principal of the client's certificate, if it has one."""
        self.principal = Reader.of(principal, None).principal
        """The name that counts and budgets have, which is shorter for very long names."""
        self._mechanism = ""
        self._claimed: ClaimedLogin | None = None
        """The user in the first message of SCRAM; the second one follows."""
        self._reader: tuple[bytes | None, Reader] | None = None

    def reader(self, client_id: bytes | None) -> Reader:
        """Return the reader with *client_id*."""
        if self._reader is None or self._reader[0] != client_id:
            self._reader = client_id, Reader.of(self.principal, client_id)
        return self._reader[1]

    def see_handshake(self, frame: memoryview) -> None:
        """Take a whole SaslHandshake request."""
        try:
            self._mechanism = mechanism_of(frame)
        except ProtocolViolation:
            self._mechanism = ""
        self._claimed = None

    def see_token(self, frame: memoryview, head: RequestHead) -> ClaimedLogin | None:
        """
        Take a whole SaslAuthenticate request.

        Return the user that has logged in once the broker accepts just this request. A client may send
        further ones before that.
        """
        claimed, self._claimed = self._claimed, None
        mechanism = self._mechanism
        if claimed is not None or (mechanism not in {_PLAIN, BEARER} and mechanism not in _SCRAM):
            return claimed
        try:
            token = token_of(frame, head)
            if mechanism == _PLAIN:
                return ClaimedLogin(PlainToken.read(token).user, mechanism)
            if mechanism == BEARER:
                return ClaimedLogin(BearerToken.read(token).subject, mechanism)
            self._claimed = ClaimedLogin(ScramFirst.read(token).user, mechanism)
        except ProtocolViolation:
            pass
        return None

    def see_answer(self, frame: memoryview, version: int, claimed: ClaimedLogin | None) -> None:
        """Take the broker's whole response to the SaslAuthenticate request with this claim."""
        if claimed is None:
            return
        try:
            accepted = is_accepted(frame, version, claimed.mechanism)
        except ProtocolViolation:
            accepted = False
        if accepted:
            self.principal, self._reader = Reader.of(f"User:{claimed.user}", None).principal, None
