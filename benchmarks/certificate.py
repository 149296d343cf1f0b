"""The certificate of the sink, in two files: one that clients trust, and one with the key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.certificate import key_and_certificate

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificate:
    """Two PEM files. The certificate signs itself, so clients that trust its file trust the server."""

    certificate_file: Path
    key_file: Path


def write_certificate(directory: Path) -> Certificate:
    """Write a key and a certificate for it, valid for a day."""
    private, signed = key_and_certificate()
    written = Certificate(directory / "certificate.pem", directory / "key.pem")
    written.certificate_file.write_bytes(signed)
    written.key_file.write_bytes(private)
    return written
