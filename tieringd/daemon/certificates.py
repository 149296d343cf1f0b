"""Which files hold certificates of this daemon, so that metrics can show when they expire."""

from __future__ import annotations

from pathlib import Path

from tieringd.config import Config


def certificate_files(config: Config) -> tuple[Path, ...]:
    """Return the PEM files with a certificate that the daemon presents: to the broker, and to clients."""
    found = (
        config.broker.security.ssl_cert_file,
        config.gateway.tls_cert_file,
        config.gateway.broker_tls_cert_file,
    )
    return tuple(dict.fromkeys(one for one in found if one is not None))
