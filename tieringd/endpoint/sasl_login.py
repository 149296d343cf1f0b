"""
The login of one client of an archive endpoint: SASL/PLAIN and SCRAM, or the client's certificate.

A client logs in once. A login that fails is answered, and the connection closes, as a broker's does. The
answer does not say what was wrong. An unknown user takes the same steps and time as a wrong password.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from datetime import timedelta
from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.static.primitive import i64Timedelta

from tieringd.endpoint.endpoint_settings import ApiKey
from tieringd.endpoint.users_file import MECHANISMS, ScramCredential, UserDirectory
from tieringd.errors import ProtocolViolation
from tieringd.formats.kafka_wire.messages import made, response_module
from tieringd.formats.kafka_wire.request_header import RequestHead
from tieringd.formats.kafka_wire.sasl import PlainToken, ScramFinal, ScramFirst, mechanism_of, token_of
from tieringd.metrics.readers import ANONYMOUS

PLAIN: Final = "PLAIN"
BEFORE_LOGIN: Final = frozenset({ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE})
"""The requests that a client may send before it has logged in."""
_NO_LIFETIME: Final = i64Timedelta.parse(timedelta(0))
"""A login lasts as long as its connection."""
_NONCE_BYTES: Final = 24
_NONCE_MAX: Final = 256


class SaslLogin:
    """The login of one client, and its principal from then on."""

    def __init__(self, users: UserDirectory, *, certified: str | None, offers_plain: bool) -> None:
        """Keep the arguments. *certified* is the principal of a client's certificate."""
        self._users = users
        self._mechanisms = (*((PLAIN,) if offers_plain else ()), *MECHANISMS)
        self.mechanism: str | None = None
        """The mechanism that the client has chosen."""
        self._scram: tuple[ScramFirst, ScramCredential, str, bool] | None = None
        """The client's first message, the credential, the server's message, and whether the user exists."""
        self._credential: tuple[str, ScramCredential] | None = None
        """The user's name, and the credential that its login has used."""
        self._is_certified = certified is not None
        self.principal = certified or ANONYMOUS
        self.has_failed = False
        """Whether the connection is to be closed after the answer."""

    @property
    def is_done(self) -> bool:
        """
        Say whether the client has logged in, or has no need to.

        A user that was removed, or whose password was changed, has to log in again.
        """
        if not self._users.has_users:
            return True
        if self._credential is None:
            return self._is_certified
        user, used = self._credential
        return self._users.credential(user, used.mechanism) == used

    async def handshake(self, head: RequestHead, frame: memoryview) -> Any:
        """Answer SaslHandshake: the client names a mechanism."""
        module: Any = response_module(ApiKey.SASL_HANDSHAKE, head.version)
        mechanism = mechanism_of(frame)
        error = ErrorCode.none
        if head.version == 0:
            # After this version, tokens come without Kafka's frames.
            error = ErrorCode.unsupported_version
        elif not self._users.has_users or self._credential is not None or self.mechanism is not None:
            error = ErrorCode.illegal_sasl_state
        elif mechanism not in self._mechanisms:
            error = ErrorCode.unsupported_sasl_mechanism
        else:
            self.mechanism = mechanism
        self.has_failed = error != ErrorCode.none
        return made(module.SaslHandshakeResponse, error_code=error, mechanisms=self._mechanisms)

    async def authenticate(self, head: RequestHead, frame: memoryview) -> Any:
        """Answer SaslAuthenticate: a token of the mechanism."""
        module: Any = response_module(ApiKey.SASL_AUTHENTICATE, head.version)
        error, answer = ErrorCode.none, b""
        if self.mechanism is None or self._credential is not None:
            error = ErrorCode.illegal_sasl_state
        else:
            try:
                token = token_of(frame, head)
                found = await self._plain(token) if self.mechanism == PLAIN else self._scram_step(token)
            except ProtocolViolation:
                found = None
            if found is None:
                error = ErrorCode.sasl_authentication_failed
            answer = found or b""
        self.has_failed = error != ErrorCode.none
        return made(
            module.SaslAuthenticateResponse,
            error_code=error,
            error_message="Authentication failed" if self.has_failed else None,
            auth_bytes=answer,
            session_lifetime=_NO_LIFETIME,
        )

    async def _plain(self, token: bytes) -> bytes | None:
        given = PlainToken.read(token)
        mechanism = next(
            (one for one in MECHANISMS if self._users.credential(given.user, one)), next(iter(MECHANISMS))
        )
        known = self._users.credential(given.user, mechanism)
        credential = known or self._users.decoy(given.user, mechanism)
        is_right = await self._users.has_password(credential, given.password)
        if known is None or not is_right or given.authorization_id not in {"", given.user}:
            return None
        self._succeed(given.user, known)
        return b""

    def _scram_step(self, token: bytes) -> bytes | None:
        assert self.mechanism is not None, "a handshake comes first"
        if self._scram is None:
            first = ScramFirst.read(token)
            if len(first.nonce) > _NONCE_MAX or first.authorization_id not in {"", first.user}:
                return None
            known = self._users.credential(first.user, self.mechanism)
            credential = known or self._users.decoy(first.user, self.mechanism)
            nonce = first.nonce + secrets.token_urlsafe(_NONCE_BYTES)
            salt = base64.b64encode(credential.salt).decode()
            said = f"r={nonce},s={salt},i={credential.iterations}"
            self._scram = first, credential, said, known is not None
            return said.encode()
        (first, credential, said, is_known), self._scram = self._scram, None
        final = ScramFinal.read(token)
        nonce = said[len("r=") : said.index(",")]
        message = f"{first.bare},{said},{final.without_proof}".encode()
        is_right = credential.has_proof(final.proof, message)
        is_right &= hmac.compare_digest(final.nonce.encode(), nonce.encode())
        is_right &= hmac.compare_digest(final.binding, first.header.encode())
        if not is_right or not is_known:
            return None
        self._succeed(first.user, credential)
        return b"v=" + base64.b64encode(credential.signature(message))

    def _succeed(self, user: str, credential: ScramCredential) -> None:
        self._credential, self.principal = (user, credential), f"User:{user}"
