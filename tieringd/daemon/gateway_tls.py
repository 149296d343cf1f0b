"""
The TLS contexts of a listener, and the renewal of their certificates while it runs.

Certificates are valid for weeks, so a restart for each would be too much. The files are checked every few
seconds. When all files of a certificate can be used, later handshakes use them. Open connections go on.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from tieringd.config import Config
from tieringd.errors import ConfigError

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 10.0
"""Seconds between two checks of the files."""


@dataclass(frozen=True, slots=True)
class _Certificate:
    """A certificate that one of our contexts presents."""

    name: str
    """The property that names it."""
    context: ssl.SSLContext
    cert_file: Path
    key_file: Path | None

    def version(self) -> tuple[tuple[int, int, int], ...]:
        """
        Return a value that changes with the files.

        Raises:
            OSError: A file cannot be read.
        """
        files = (self.cert_file, self.key_file or self.cert_file)
        return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in (file.stat() for file in files))

    def load(self) -> None:
        """
        Present the certificate in the files from now on.

        Raises:
            OSError: The files cannot be used. What was presented before stays.
        """
        # A failed load would leave the context with a certificate and no key, so it is tried on another one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert_file, self.key_file)
        self.context.load_cert_chain(self.cert_file, self.key_file)


class GatewayTls:
    """The contexts towards clients and towards the broker; None where connections are not encrypted."""

    def __init__(self, config: Config, *, has_broker: bool) -> None:
        """
        Read the files that the gateway's properties name.

        Raises:
            ConfigError: A file cannot be used.
        """
        gateway = config.gateway
        self.clients: ssl.SSLContext | None = None
        self.broker: ssl.SSLContext | None = None
        self._certificates: list[_Certificate] = []
        if gateway.tls_cert_file is not None:
            self.clients = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._add("tls_cert_file", self.clients, gateway.tls_cert_file, gateway.tls_key_file)
            if gateway.tls_client_ca_file is not None:
                self._ask_for_certificates(self.clients, gateway.tls_client_ca_file)
        if has_broker and gateway.broker_tls:
            try:
                self.broker = ssl.create_default_context(cafile=gateway.broker_tls_ca_file)
            except OSError as error:
                raise ConfigError(
                    f"gateway.broker_tls_ca_file {gateway.broker_tls_ca_file} cannot be used: {error}"
                ) from error
            if gateway.broker_tls_cert_file is not None:
                files = (gateway.broker_tls_cert_file, gateway.broker_tls_key_file)
                self._add("broker_tls_cert_file", self.broker, *files)
        self._versions = [self._version_of(one) for one in self._certificates]

    async def run(self, *, interval_seconds: float = LOOK_SECONDS) -> None:
        """Look at the files until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds)
            await asyncio.to_thread(self.renew)

    def renew(self) -> None:
        """Present what has changed in the files. Files that cannot be used are logged once per change."""
        for number, one in enumerate(self._certificates):
            version = self._version_of(one)
            if version == self._versions[number]:
                continue
            self._versions[number] = version
            try:
                one.load()
            except OSError as error:
                log.error(  # noqa: TRY400 its text is enough
                    "a renewed certificate cannot be used; the one before it is still presented",
                    property=f"gateway.{one.name}",
                    path=str(one.cert_file),
                    error=str(error),
                )
            else:
                log.info("certificate renewed", property=f"gateway.{one.name}", path=str(one.cert_file))

    def _ask_for_certificates(self, context: ssl.SSLContext, ca_file: Path) -> None:
        # The default context for servers trusts no authority, so these are the only ones.
        try:
            context.load_verify_locations(ca_file)
        except OSError as error:
            raise ConfigError(f"gateway.tls_client_ca_file {ca_file} cannot be used: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED

    def _add(self, name: str, context: ssl.SSLContext, cert_file: Path, key_file: Path | None) -> None:
        one = _Certificate(name, context, cert_file, key_file)
        try:
            one.load()
        except OSError as error:
            key_name = name.replace("cert", "key")
            raise ConfigError(
                f"gateway.{name} {cert_file} cannot be used: {error}",
                hint=f"Set gateway.{name} and gateway.{key_name} to the PEM files of one certificate",
            ) from error
        self._certificates.append(one)

    def _version_of(self, one: _Certificate) -> tuple[tuple[int, int, int], ...] | None:
        try:
            return one.version()
        except OSError:
            # The files are being replaced: the next check finds the new one.
            return None
