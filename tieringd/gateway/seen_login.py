"""
The principal of a client, from its certificate or from a login that the gateway forwards to the broker.

The gateway grants no access by this name. It uses the name to count reads, and to give each principal its
budget of archived records. A name counts once the broker has accepted the login. A login by PLAIN or SCRAM
shows the user's name. Clients with other mechanisms (OAUTHBEARER, GSSAPI) stay `ANONYMOUS`. Passwords are
neither kept nor logged.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final

from cryptography import x509

from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.sasl import PlainToken, ScramFirst, is_accepted, mechanism_of, token_of
from tieringd.metrics.readers import ANONYMOUS, Reader

if TYPE_CHECKING:
    import socket

    from tieringd.formats.kafka_wire.request_header import RequestHead

_ANSWERS: Final = {"PLAIN": 1, "SCRAM-SHA-256": 2, "SCRAM-SHA-512": 2}
"""How many answers without an error end a login."""


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


class SeenLogin:
    """The principal of one connection."""

    def __init__(self, principal: str = ANONYMOUS) -> None:
        """Begin with the principal of the client's certificate, if it has one."""
        self.principal = principal
        self._mechanism = ""
        self._claimed: str | None = None
        self._left = 0
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

    def see_token(self, frame: memoryview, head: RequestHead) -> None:
        """Take a whole SaslAuthenticate request. The broker judges it."""
        if self._claimed is not None or self._mechanism not in _ANSWERS:
            return
        try:
            token = token_of(frame, head)
            user = PlainToken.read(token).user if self._mechanism == "PLAIN" else ScramFirst.read(token).user
        except ProtocolViolation:
            return
        self._claimed, self._left = user, _ANSWERS[self._mechanism]

    def see_answer(self, frame: memoryview, version: int) -> None:
        """Take the broker's whole response to SaslAuthenticate."""
        try:
            accepted = is_accepted(frame, version)
        except ProtocolViolation:
            accepted = False
        if not accepted:
            self._claimed = None
        if self._claimed is None:
            return
        self._left -= 1
        if not self._left:
            self.principal, self._claimed, self._reader = f"User:{self._claimed}", None, None
