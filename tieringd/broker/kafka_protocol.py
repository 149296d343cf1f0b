"""
Kafka messages of kio over connections of aiokafka.

aiokafka opens a connection, authenticates it, negotiates versions and matches responses to requests; kio
encodes and decodes every message. `KafkaRequest` lets aiokafka carry kio's messages. This module lays
out no byte of Kafka's protocol by hand, and interprets no response: `broker.kafka` handles error codes
inside a response.

aiokafka's own client is not used. It keeps a second copy of the metadata of every topic, asks for it
again whenever a connection breaks, and never returns to the bootstrap addresses once all brokers that it
knows are gone.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import structlog
from aiokafka.conn import AIOKafkaConnection, CloseReason, collect_hosts
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from kio.index import load_payload_module, load_request_schema, load_response_schema
from kio.serial import entity_writer
from kio.static.constants import EntityType

from tieringd.broker.base import EFFECT_WITHIN_SECONDS
from tieringd.errors import BrokerDenied, BrokerLacksApi, BrokerUnavailable, ConfigError
from tieringd.formats.kafka_wire.kio_decoding import UNREADABLE, decoded_of_broker

if TYPE_CHECKING:
    from kio.static.protocol import RequestPayload, ResponsePayload

log = structlog.get_logger(__name__)

CLIENT_ID: Final = "tieringd"
"""The client id of every daemon."""
_SECURITY_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_SASL_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_CLOSE_TIMEOUT_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """The address of the broker beside us, and our credentials."""

    bootstrap: tuple[str, ...]
    """`host:port` of the broker beside us; further brokers only help to find it."""
    node_id: int | None = None
    """The id of the broker beside us; None finds it by its advertised address among *bootstrap*."""
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "PLAIN"
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)
    ssl_ca_file: str | None = None
    """None trusts the system's authorities."""
    ssl_cert_file: str | None = None
    ssl_key_file: str | None = None
    request_timeout_seconds: float = 10.0
    """Deadline of one connection attempt, and of one request."""
    effect_within_seconds: float = EFFECT_WITHIN_SECONDS
    """A trim is sent within this time after the question which broker leads, or not at all."""
    client_id: str = CLIENT_ID
    has_topic_ids_on_disk: bool = True
    """Whether a partition's directory holds the cluster's topic id. Redpanda's directories do not."""


@dataclass(frozen=True, slots=True)
class ApiVersionRange:
    """One kind of message, and the range of versions in which the fields that we use are the same."""

    name: str
    key: int
    min_version: int
    max_version: int


METADATA: Final = ApiVersionRange("Metadata", 3, min_version=7, max_version=13)
LIST_OFFSETS: Final = ApiVersionRange("ListOffsets", 2, min_version=4, max_version=9)
DESCRIBE_CONFIGS: Final = ApiVersionRange("DescribeConfigs", 32, min_version=1, max_version=4)
INCREMENTAL_ALTER_CONFIGS: Final = ApiVersionRange(
    "IncrementalAlterConfigs", 44, min_version=0, max_version=1
)
DELETE_RECORDS: Final = ApiVersionRange("DeleteRecords", 21, min_version=0, max_version=2)
DESCRIBE_CLIENT_QUOTAS: Final = ApiVersionRange("DescribeClientQuotas", 48, min_version=0, max_version=1)
ALTER_CLIENT_QUOTAS: Final = ApiVersionRange("AlterClientQuotas", 49, min_version=0, max_version=1)
LIST_GROUPS: Final = ApiVersionRange("ListGroups", 16, min_version=5, max_version=5)
DESCRIBE_SHARE_GROUP_OFFSETS: Final = ApiVersionRange(
    "DescribeShareGroupOffsets", 90, min_version=0, max_version=1
)


class KafkaRequest:
    """
    One request in the shape that an aiokafka connection sends, with kio's message inside.

    *build* gets kio's module of the negotiated version. The connection returns the response as bytes: if
    the connection decoded it, a response that kio cannot read would end the connection's reader task
    instead of failing the one call.
    """

    def __init__(
        self,
        api: ApiVersionRange,
        build: Callable[[ModuleType], RequestPayload],
        *,
        send_by: float = math.inf,
        only_with: ApiVersionRange | None = None,
    ) -> None:
        """
        Keep *api*, *build* and *send_by*: the loop time after which the request must not be sent.

        The request is sent only to a broker that also offers *only_with*.
        """
        self._api = api
        self._only_with = only_with
        self._build = build
        self._send_by = send_by
        self._version: int | None = None

    @property
    def version(self) -> int:
        """Return the message's version. It is known once `prepare` was called."""
        assert self._version is not None, "the request has not been sent"
        return self._version

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> KafkaRequest:
        """
        Choose the highest version that both sides know.

        The connection builds and writes the message in the same iteration of the event loop, so this is
        the last moment at which a request can be held back.

        Raises:
            BrokerLacksApi: There is no common version.
            BrokerUnavailable: It is too late for this request.
        """
        api = self._api
        if self._only_with is not None:
            _common_version(self._only_with, versions)
        late_seconds = asyncio.get_running_loop().time() - self._send_by
        if late_seconds > 0:
            raise BrokerUnavailable(
                f"{api.name} was not sent: the last check of the leadership was {late_seconds:.1f} s too "
                "long ago"
            )
        self._version = _common_version(api, versions)
        return self

    def build_request_header(self, *, correlation_id: int, client_id: str) -> _Header:
        """Return the header in the form that this version of the message has."""
        schema: Any = load_request_schema(self._api.key, self.version).__header_schema__
        header = schema(
            request_api_key=self._api.key,
            request_api_version=self.version,
            correlation_id=correlation_id,
            client_id=client_id,
        )
        return _Header(_encoded(header))

    def encode(self) -> bytes:
        """Return the message's bytes, without its header."""
        return _encoded(self._build(load_payload_module(self._api.key, self.version, EntityType.request)))

    def parse_response_header(self, frame: BytesIO) -> Any:
        """Read the header, and leave *frame* at the message that follows."""
        schema = self._response_schema().__header_schema__
        header, size = decoded_of_broker(schema, frame.getvalue())
        frame.seek(size)
        return header

    def decoded(self, answer: bytes) -> Any:
        """Return kio's response for the bytes that the connection returned."""
        response, _ = decoded_of_broker(self._response_schema(), answer)
        return response

    def _response_schema(self) -> type[ResponsePayload]:
        return load_response_schema(self._api.key, self.version)

    class RESPONSE_TYPE:  # noqa: N801  (the name under which aiokafka looks for it)
        """The decoder that the connection calls for a response."""

        @staticmethod
        def decode(frame: BytesIO) -> bytes:
            """Return what follows the header."""
            return frame.read()


def _common_version(api: ApiVersionRange, versions: Mapping[int, tuple[int, int]]) -> int:
    """Return the highest version that both sides know."""
    low, high = versions.get(api.key, (0, -1))
    version = min(high, api.max_version)
    if version < max(low, api.min_version):
        offered = f"offers versions {low} to {high}" if high >= 0 else "does not offer it"
        raise BrokerLacksApi(
            f"the broker {offered} of {api.name}; tieringd needs one of versions {api.min_version} to "
            f"{api.max_version}",
            hint="Use Apache Kafka 2.8 or newer",
        )
    return version


@dataclass(frozen=True, slots=True)
class _Header:
    data: bytes

    def encode(self) -> bytes:
        return self.data


def _encoded(entity: Any) -> bytes:
    buffer = BytesIO()
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


@dataclass(slots=True)
class _Turns:
    """The calls that want a connection to one address, one after another."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: int = 0


class KafkaConnections:
    """
    One connection per address, opened when it is needed and again after it broke.

    It belongs to the event loop that uses it. Nothing is retried here: a call that finds a broken
    connection fails with `BrokerUnavailable`, and the next one connects.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        _check(settings)
        self.bootstrap: tuple[tuple[str, int], ...] = _addresses(settings.bootstrap)
        self._settings = settings
        self._tls_version = _version_of_files(settings)
        self._tls = tls_context(settings)
        self._open: dict[tuple[str, int], AIOKafkaConnection] = {}
        self._opening: dict[tuple[str, int], _Turns] = {}
        """Only addresses to which a connection is being opened, or looked for, at this moment."""

    async def send(self, address: tuple[str, int], request: KafkaRequest) -> Any:
        """
        Send *request* to *address* and return kio's response.

        Raises:
            BrokerUnavailable: No connection, no response in time, or an unreadable one.
            BrokerDenied: The broker does not accept our credentials or our versions.
        """
        host, port = address
        async with self._translated(address):
            connection = await self._connection(address)
            try:
                answer = await connection.send(request)
            except TimeoutError:
                # Responses come in order, so a late one would delay every call after it.
                self._open.pop(address, None)
                await _closed(connection, CloseReason.CONNECTION_TIMEOUT)
                raise
            try:
                return request.decoded(answer)
            except UNREADABLE as error:
                raise BrokerUnavailable(f"a response of {host}:{port} cannot be read: {error!r}") from error

    async def _connection(self, address: tuple[str, int]) -> AIOKafkaConnection:
        # Two concurrent calls must not open two connections, one of which would be lost.
        turns = self._opening.setdefault(address, _Turns())
        turns.calls += 1
        try:
            async with turns.lock:
                connection = self._open.get(address)
                if connection is None or not connection.connected():
                    if self._tls is not None:
                        await asyncio.to_thread(self._renew_tls)
                    connection = self._new_connection(address)
                    await connection.connect()
                    self._forget_broken()
                    self._open[address] = connection
                return connection
        finally:
            turns.calls -= 1
            if not turns.calls:
                del self._opening[address]

    def _renew_tls(self) -> None:
        """Use the TLS files as they are now. Files that cannot be used are logged once per change. Blocks."""
        version = _version_of_files(self._settings)
        if version is None or version == self._tls_version:
            return
        self._tls_version = version
        files = _tls_files(self._settings)
        try:
            self._tls = tls_context(self._settings)
        except ConfigError as error:
            log.error(  # noqa: TRY400 its text is enough
                "a renewed certificate cannot be used; the one before it is still presented",
                property="broker.security",
                path=", ".join(files),
                error=str(error),
            )
        else:
            log.info("certificate renewed", property="broker.security", path=", ".join(files))

    def _forget_broken(self) -> None:
        """Forget connections that have ended: a broker that has left the cluster is never asked again."""
        self._open = {address: one for address, one in self._open.items() if one.connected()}

    def _new_connection(self, address: tuple[str, int]) -> AIOKafkaConnection:
        settings = self._settings
        host, port = address
        return AIOKafkaConnection(
            host,
            port,
            client_id=settings.client_id,
            request_timeout_ms=settings.request_timeout_seconds * 1000,
            ssl_context=self._tls,
            security_protocol=settings.security_protocol,
            sasl_mechanism=settings.sasl_mechanism,
            sasl_plain_username=settings.sasl_username,
            sasl_plain_password=settings.sasl_password,
        )

    @asynccontextmanager
    async def _translated(self, address: tuple[str, int]) -> AsyncIterator[None]:
        """Turn every foreign exception into one of ours, with the broker's address."""
        host, port = address
        try:
            yield
        except (SaslAuthenticationFailed, UnsupportedSaslMechanismError, IllegalSaslStateError) as error:
            raise BrokerDenied(
                f"the broker at {host}:{port} refuses to authenticate {self._settings.client_id}: {error}",
                hint="Check the sasl_* settings of the broker section",
            ) from error
        except ssl.SSLCertVerificationError as error:
            raise BrokerDenied(
                f"the certificate of the broker at {host}:{port} is not trusted: {error.verify_message}",
                hint="Check ssl_ca_file, and that the certificate names this host",
            ) from error
        except TimeoutError as error:
            seconds = self._settings.request_timeout_seconds
            raise BrokerUnavailable(
                f"the broker at {host}:{port} did not answer within {seconds:g} s"
            ) from error
        except (KafkaError, OSError) as error:
            reason = str(error.__cause__ or error) or type(error).__name__
            raise BrokerUnavailable(f"the broker at {host}:{port} cannot be reached: {reason}") from error

    async def close(self) -> None:
        """Close every connection; closing twice is allowed."""
        while self._open:
            _, connection = self._open.popitem()
            await _closed(connection, CloseReason.SHUTDOWN)


async def _closed(connection: AIOKafkaConnection, reason: CloseReason) -> None:
    """Close a connection and wait until its socket is closed, but not long for a peer that hangs."""
    closed: asyncio.Future[None] | None = connection.close(reason=reason)
    if closed is not None:
        await asyncio.wait([closed], timeout=_CLOSE_TIMEOUT_SECONDS)


def _check(settings: KafkaSettings) -> None:
    if settings.security_protocol not in _SECURITY_PROTOCOLS:
        raise ConfigError(
            f"broker.security.protocol is {settings.security_protocol!r}",
            hint=f"Use one of {', '.join(_SECURITY_PROTOCOLS)}",
        )
    if not settings.security_protocol.startswith("SASL_"):
        return
    if settings.sasl_mechanism not in _SASL_MECHANISMS:
        raise ConfigError(
            f"broker.security.sasl_mechanism is {settings.sasl_mechanism!r}",
            hint=f"Use one of {', '.join(_SASL_MECHANISMS)}",
        )
    if settings.sasl_username is None or settings.sasl_password is None:
        raise ConfigError(
            f"broker.security.protocol is {settings.security_protocol}, which needs a user",
            hint="Set broker.security.sasl_username and broker.security.sasl_password",
        )


def _addresses(bootstrap: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    try:
        addresses = tuple((host, port) for host, port, _ in collect_hosts(list(bootstrap), randomize=False))
    except ValueError as error:
        raise ConfigError(f"broker.bootstrap holds an address that is not host:port: {error}") from error
    if not addresses:
        raise ConfigError("broker.bootstrap is empty", hint="Name the broker beside this daemon, host:port")
    return addresses


def tls_context(settings: KafkaSettings) -> ssl.SSLContext | None:
    """Return the TLS context for the brokers; None if connections are not encrypted."""
    if not settings.security_protocol.endswith("SSL"):
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ssl_ca_file)
        if settings.ssl_cert_file is not None:
            context.load_cert_chain(settings.ssl_cert_file, settings.ssl_key_file)
    except OSError as error:
        named = ", ".join(_tls_files(settings))
        raise ConfigError(f"the TLS files of the broker section cannot be used ({named}): {error}") from error
    return context


def _tls_files(settings: KafkaSettings) -> tuple[str, ...]:
    if not settings.security_protocol.endswith("SSL"):
        return ()
    files = (settings.ssl_ca_file, settings.ssl_cert_file, settings.ssl_key_file)
    return tuple(name for name in files if name is not None)


def _version_of_files(settings: KafkaSettings) -> tuple[tuple[int, int, int], ...] | None:
    """Return a value that changes with the TLS files; None while one of them is being replaced."""
    try:
        found = [Path(name).stat() for name in _tls_files(settings)]
    except OSError:
        return None
    return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)
