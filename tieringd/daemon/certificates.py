"""Which files hold certificates of ours, so that their end can be seen coming."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tieringd.config import Config


def certificate_files(config: Config) -> tuple[Path, ...]:
    """Return the PEM files with a certificate that is shown to others: to the broker, and to clients."""
    found = (config.broker.security.ssl_cert_file, config.gateway.tls_cert_file)
    return tuple(dict.fromkeys(one for one in found if one is not None))
