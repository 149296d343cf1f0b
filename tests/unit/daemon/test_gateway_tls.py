"""Certificates of the gateway: renewed while it runs, and presented to a broker that wants one."""

from __future__ import annotations

import asyncio
import ssl

import pytest
from structlog.testing import capture_logs

from tests.support.archive_endpoints import endpoint_config
from tests.support.certificate import key_and_certificate, write_certificate
from tests.support.connections import accepting
from tests.support.tls_relay import presenting, trusting
from tieringd.daemon.gateway_tls import GatewayTls
from tieringd.errors import ConfigError


async def shaken(server: ssl.SSLContext, client: ssl.SSLContext) -> bool:
    """Say whether a client and a server with these contexts come to terms."""

    async def handle(reader, writer):
        writer.write(await reader.read(1))
        await reader.read()

    async with accepting(handle, tls=server) as port:
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=client, server_hostname="127.0.0.1"
            )
            writer.write(b"x")
            found = await reader.read(1)
        except (OSError, ssl.SSLError):
            return False
        writer.transport.abort()
        return found == b"x"


def replaced(path):
    """Put another certificate in the place of the one at *path*."""
    other = write_certificate(path.with_suffix(".new"))
    copy = write_certificate(path.with_suffix(".copy"))
    copy.write_bytes(other.read_bytes())
    other.rename(path)
    return copy


async def test_renewed_certificate_is_presented_without_a_restart(tmp_path):
    """A new client gets the new certificate once the files have changed."""
    old = write_certificate(tmp_path / "pem")
    tls = GatewayTls(endpoint_config(tmp_path, tls_cert_file=old, tls_key_file=old), has_broker=False)
    before = trusting(old)
    assert await shaken(tls.clients, before)
    renewing = asyncio.create_task(tls.run(interval_seconds=0.01))
    new = replaced(old)
    async with asyncio.timeout(120):
        while not await shaken(tls.clients, trusting(new)):
            pass
    assert not await shaken(tls.clients, before)
    renewing.cancel()


async def test_files_that_do_not_belong_together_change_nothing(tmp_path):
    """A certificate without its key changes nothing, and is logged once. The renewal goes on with both."""
    certificate, key = tmp_path / "cert", tmp_path / "key"

    def write(files):
        key.write_bytes(files[0])
        certificate.write_bytes(files[1])

    first, second = key_and_certificate(), key_and_certificate()
    write(first)
    files = {"tls_cert_file": certificate, "tls_key_file": key}
    tls = GatewayTls(endpoint_config(tmp_path, **files), has_broker=False)
    before = trusting(certificate)
    certificate.write_bytes(second[1])
    with capture_logs() as logs:
        tls.renew()
        tls.renew()
    assert len(logs) == 1
    assert await shaken(tls.clients, before)
    write(second)
    tls.renew()
    assert await shaken(tls.clients, trusting(certificate))


async def test_broker_that_wants_a_certificate_gets_ours(tmp_path):
    """A broker that wants a certificate accepts the gateway with its own, and refuses it without one."""
    of_broker = write_certificate(tmp_path / "broker")
    ours = write_certificate(tmp_path / "ours")
    wants = presenting(of_broker)
    wants.verify_mode = ssl.CERT_REQUIRED
    wants.load_verify_locations(ours)
    to_broker = {"broker_tls": "true", "broker_tls_ca_file": of_broker}
    without = GatewayTls(endpoint_config(tmp_path, **to_broker), has_broker=True)
    assert not await shaken(wants, without.broker)
    own = {"broker_tls_cert_file": ours, "broker_tls_key_file": ours}
    with_one = GatewayTls(endpoint_config(tmp_path, **to_broker, **own), has_broker=True)
    assert await shaken(wants, with_one.broker)


def test_file_that_is_no_certificate_is_an_error_of_the_configuration(tmp_path):
    """The error names the property."""
    broken = tmp_path / "pem"
    broken.write_text("no certificate")
    config = endpoint_config(tmp_path, tls_cert_file=broken, tls_key_file=broken)
    with pytest.raises(ConfigError, match=r"gateway\.tls_cert_file"):
        GatewayTls(config, has_broker=False)
