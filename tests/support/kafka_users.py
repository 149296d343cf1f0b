"""
Users of a real broker: their authentication with two client libraries, and their permissions.

The mechanisms are those that can pass through a gateway: PLAIN, SCRAM and OAUTHBEARER.
"""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiokafka.abc import AbstractTokenProvider
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kio.schema.errors import ErrorCode

from tests.support.kafka_messages import request_module
from tests.support.tls_relay import trusting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tests.support.raw_kafka import RawKafka

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
_SCRAM = {
    "SCRAM-SHA-256": ScramMechanism.SCRAM_SHA_256,
    "SCRAM-SHA-512": ScramMechanism.SCRAM_SHA_512,
}
_SECURITY = "org.apache.kafka.common.security"
_TOKEN_SECONDS = 600
_WAIT_SECONDS = 120
_POLL_SECONDS = 0.02


def broker_properties(listener: str, users: Iterable[str], certificate: Path | None = None) -> dict[str, str]:
    """
    Return the properties of a broker whose *listener* is SASL_SSL, or SASL_PLAINTEXT without a certificate.

    An operator uses the plain listener.
    """
    name = f"listener.name.{listener.lower()}"
    passwords = " ".join(f'user_{user}="{password_of(user)}"' for user in users)
    tls = {f"{name}.ssl.keystore.type": "PEM", f"{name}.ssl.keystore.location": str(certificate)}
    return {
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
        f"{name}.plain.sasl.jaas.config": f"{_SECURITY}.plain.PlainLoginModule required {passwords};",
        f"{name}.scram-sha-256.sasl.jaas.config": f"{_SECURITY}.scram.ScramLoginModule required;",
        f"{name}.scram-sha-512.sasl.jaas.config": f"{_SECURITY}.scram.ScramLoginModule required;",
        # Without a login of its own the broker's module accepts unsigned tokens.
        f"{name}.oauthbearer.sasl.jaas.config": (
            f'{_SECURITY}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";'
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        **(tls if certificate is not None else {}),
    }


def password_of(user: str) -> str:
    """Return the password of a user."""
    return f"secret-of-{user}"


def add_scram_users(bootstrap: str, users: Iterable[str]) -> None:
    """Add SCRAM credentials for *users*."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for mechanism in _SCRAM.values():
        info = ScramCredentialInfo(mechanism, 4096)
        changes = [UserScramCredentialUpsertion(user, info, password_of(user).encode()) for user in users]
        for future in admin.alter_user_scram_credentials(changes).values():
            future.result(_WAIT_SECONDS)


def allow(bootstrap: str, user: str, *operations: AclOperation, topic: str) -> None:
    """Allow *user* these operations on *topic*."""
    add_rules(bootstrap, [rule(user, operation, topic) for operation in operations])


def rule(
    user: str,
    operation: AclOperation,
    name: str,
    *,
    of: ResourceType = ResourceType.TOPIC,
    is_prefix: bool = False,
    is_denied: bool = False,
) -> AclBinding:
    """Return a rule for *user* about a topic, or another resource; `*` names every one."""
    return AclBinding(
        of,
        name,
        ResourcePatternType.PREFIXED if is_prefix else ResourcePatternType.LITERAL,
        f"User:{user}",
        "*",
        operation,
        AclPermissionType.DENY if is_denied else AclPermissionType.ALLOW,
    )


def add_rules(bootstrap: str, rules: Sequence[AclBinding]) -> None:
    """Add rules to the broker's; return when the broker follows them."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_acls(list(rules)).values():
        future.result(_WAIT_SECONDS)
    _until(lambda: set(rules) <= _known_rules(admin), "the broker has the new rules")


def remove_rules(bootstrap: str, rules: Sequence[AclBinding]) -> None:
    """Remove rules from the broker's; return when the broker follows them no more."""
    filters = [
        AclBindingFilter(
            each.restype,
            each.name,
            each.resource_pattern_type,
            each.principal,
            each.host,
            each.operation,
            each.permission_type,
        )
        for each in rules
    ]
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.delete_acls(filters).values():
        assert future.result(_WAIT_SECONDS), "the broker has no such rule"
    _until(lambda: not set(rules) & _known_rules(admin), "the broker has forgotten the rules")


def _known_rules(admin: AdminClient) -> set[AclBinding]:
    """
    Return the rules that the broker itself goes by. These clusters have one broker.

    The controller answers a change before the broker has heard of it.
    """
    every = AclBindingFilter(
        ResourceType.ANY,
        None,
        ResourcePatternType.ANY,
        None,
        None,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    return set(admin.describe_acls(every).result(_WAIT_SECONDS))


def _until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"in {_WAIT_SECONDS} s it did not come that {what}"
        time.sleep(_POLL_SECONDS)


async def log_in(client: RawKafka, user: str) -> None:
    """Authenticate on a connection by hand, with PLAIN."""
    handshake = request_module(17, 1).SaslHandshakeRequest(mechanism="PLAIN")
    assert (await client.ask(handshake)).error_code == ErrorCode.none
    secret = f"\0{user}\0{password_of(user)}".encode()
    authentication = request_module(36, 2).SaslAuthenticateRequest(auth_bytes=secret)
    assert (await client.ask(authentication)).error_code == ErrorCode.none


@dataclass(frozen=True)
class Login:
    """A user, with the mechanism of the authentication."""

    user: str
    mechanism: str
    certificate: Path
    """The server's certificate, which clients trust."""
    password: str | None = None
    """A wrong password for a test; None is the correct one."""

    def aiokafka(self) -> dict[str, Any]:
        """Return the settings of an aiokafka client."""
        settings: dict[str, Any] = {
            "security_protocol": "SASL_SSL",
            "ssl_context": trusting(self.certificate),
            "sasl_mechanism": self.mechanism,
        }
        if self.mechanism == "OAUTHBEARER":
            return settings | {"sasl_oauth_token_provider": _Tokens(self.user)}
        return settings | {
            "sasl_plain_username": self.user,
            "sasl_plain_password": self.password or password_of(self.user),
        }

    def librdkafka(self) -> dict[str, Any]:
        """Return the settings of a librdkafka client."""
        settings: dict[str, Any] = {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.certificate),
            "sasl.mechanism": self.mechanism,
        }
        if self.mechanism == "OAUTHBEARER":
            return settings | {
                "oauth_cb": lambda _: (_token(self.user), time.time() + _TOKEN_SECONDS),
            }
        return settings | {
            "sasl.username": self.user,
            "sasl.password": self.password or password_of(self.user),
        }


class _Tokens(AbstractTokenProvider):
    def __init__(self, user: str) -> None:
        self._user = user

    async def token(self) -> str:
        """Return a fresh token."""
        return _token(self._user)


def _token(user: str) -> str:
    """Return an unsigned token, as Kafka's default validator accepts it."""
    now = int(time.time())
    head, claims = {"alg": "none"}, {"sub": user, "iat": now, "exp": now + _TOKEN_SECONDS}
    return f"{_encoded(head)}.{_encoded(claims)}."


def _encoded(part: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")
