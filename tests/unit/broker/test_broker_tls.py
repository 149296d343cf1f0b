"""TLS towards the broker: which certificate it is shown while the files are renewed."""

from __future__ import annotations

import ssl

import pytest
from cryptography import x509
from structlog.testing import capture_logs

from tests.support.certificate import key_and_certificate, write_certificate
from tests.support.connections import accepting
from tests.support.tls_relay import presenting
from tieringd.broker.kafka import KafkaBroker
from tieringd.broker.kafka_protocol import KafkaSettings
from tieringd.errors import BrokerUnavailable


def serial_of(certificate: bytes) -> int:
    """Return the serial number of a certificate, as PEM or DER."""
    load = (
        x509.load_pem_x509_certificate if certificate.startswith(b"-----") else x509.load_der_x509_certificate
    )
    return load(certificate).serial_number


async def test_renewed_certificate_is_presented_with_the_next_connection(tmp_path):
    """A broker gets the new certificate without a restart, and the old one while the files do not match."""
    of_broker, ours = write_certificate(tmp_path / "broker"), tmp_path / "ours"
    old, new = key_and_certificate(subject="old"), key_and_certificate(subject="new")
    ours.write_bytes(b"".join(old))
    trusted = tmp_path / "trusted"
    trusted.write_bytes(old[1] + new[1])
    wants = presenting(of_broker)
    wants.verify_mode = ssl.CERT_REQUIRED
    wants.load_verify_locations(trusted)
    seen: list[int] = []

    async def handle(_reader, writer):
        seen.append(serial_of(writer.get_extra_info("ssl_object").getpeercert(binary_form=True)))
        writer.close()

    async with accepting(handle, tls=wants) as port:
        broker = KafkaBroker(
            KafkaSettings(
                bootstrap=(f"127.0.0.1:{port}",),
                security_protocol="SSL",
                ssl_ca_file=str(of_broker),
                ssl_cert_file=str(ours),
            )
        )

        async def presented() -> int:
            seen.clear()
            with pytest.raises(BrokerUnavailable):
                await broker.cluster_id()
            return seen[-1]

        assert await presented() == serial_of(old[1])
        with capture_logs() as logs:
            ours.write_bytes(old[0] + new[1])
            assert await presented() == await presented() == serial_of(old[1])
            ours.unlink()
            assert await presented() == serial_of(old[1])
            ours.write_bytes(b"".join(new))
            assert await presented() == await presented() == serial_of(new[1])
        await broker.close()
    assert [one["event"] for one in logs] == [
        "a renewed certificate cannot be used; the one before it is still presented",
        "certificate renewed",
    ]
