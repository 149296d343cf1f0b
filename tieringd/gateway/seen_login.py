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


class SeenLogin:
    """The principal of one connection."""

    def __init__(self, principal: str = ANONYMOUS) -> None:
        """Begin with the principal of the client's certificate, if it has one."""
        self.principal = Reader.of(principal, None).principal
        """The name that counts and budgets have, which is shorter for very long names."""
        self._mechanism = ""
        self._claimed: str | None = None
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

    def see_token(self, frame: memoryview, head: RequestHead) -> str | None:
        """
        Take a whole SaslAuthenticate request.

        Return the user that has logged in once the broker accepts just this request. A client may send
        further ones before that.
        """
        claimed, self._claimed = self._claimed, None
        if claimed is not None or (self._mechanism != _PLAIN and self._mechanism not in _SCRAM):
            return claimed
        try:
            token = token_of(frame, head)
            if self._mechanism == _PLAIN:
                return PlainToken.read(token).user
            self._claimed = ScramFirst.read(token).user
        except ProtocolViolation:
            pass
        return None

    def see_answer(self, frame: memoryview, version: int, user: str | None) -> None:
        """Take the broker's whole response to the SaslAuthenticate request that logs *user* in."""
        try:
            accepted = is_accepted(frame, version)
        except ProtocolViolation:
            accepted = False
        if accepted and user is not None:
            self.principal, self._reader = Reader.of(f"User:{user}", None).principal, None
