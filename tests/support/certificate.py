"""A key and a certificate for 127.0.0.1, new in each run. Only clients that are given it trust it."""

from __future__ import annotations

import datetime as dt
import ipaddress
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path


def key_and_certificate(
    *, days: int = 1, subject: str = "a server of a test or benchmark"
) -> tuple[bytes, bytes]:
    """
    Return a key and a certificate that it signs for itself, valid for *days*, each as PEM.

    A server that trusts two of them tells them apart by their subjects.

    A client that trusts the certificate trusts the server. The certificate is not marked as an authority,
    because some clients refuse a server that presents one.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = dt.datetime.now(dt.UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return private, signed.public_bytes(serialization.Encoding.PEM)


def write_certificate(path: Path) -> Path:
    """Write a PEM file with key and certificate, which the server presents and the client trusts."""
    path.write_bytes(b"".join(key_and_certificate()))
    return path
