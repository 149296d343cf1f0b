"""The rules between the gateway's properties, and what it needs of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieringd.config.finding import Finding
from tieringd.config.gateway import GatewayConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tieringd.config.model import Config
    from tieringd.config.yaml_source import Place

_LAST_PORT = 65_535
_ENABLED: Place = ("gateway", "enabled")


def find_gateway_contradictions(config: Config) -> Iterator[Finding]:
    """Yield what keeps the gateway from being started."""
    gateway = config.gateway
    yield from _certificate(gateway)
    if gateway.advertised is not None and not 0 < int(gateway.advertised.rpartition(":")[2]) <= _LAST_PORT:
        yield Finding((("gateway", "advertised"),), "must have a port from 1 to 65535")
    # Without a broker section the bucket is served alone, whatever the file says of a broker's gateway.
    if not gateway.enabled or not config.has_broker_section:
        return
    if config.broker.kind == "none":
        yield Finding(
            (_ENABLED, ("broker", "kind")),
            "needs a broker behind it, and broker.kind is none; set false, and serve the bucket alone with "
            "`tieringd gateway --archive-only`",
        )
    if not config.cloud_storage_enabled:
        yield Finding(
            (_ENABLED, ("cloud_storage_enabled",)),
            "has no archive to read while cloud_storage_enabled is false; set that, or false here",
        )
    if gateway.broker in config.broker.bootstrap:
        yield Finding(
            (("gateway", "broker"), ("broker", "bootstrap")),
            "is in broker.bootstrap as well: the gateway needs the broker's second listener, which "
            "advertises the gateway, and the daemon one that does not",
        )


def _certificate(gateway: GatewayConfig) -> Iterator[Finding]:
    if (gateway.tls_cert_file is None) != (gateway.tls_key_file is None):
        names = ("tls_cert_file", "tls_key_file")
        missing, given = names if gateway.tls_cert_file is None else names[::-1]
        yield Finding(
            (("gateway", given), ("gateway", missing)), f"needs gateway.{missing} as well: set both or none"
        )


def find_gateway_doubts(config: Config) -> Iterator[Finding]:
    """Yield what has no effect as things are."""
    gateway = config.gateway
    if not config.has_broker_section:
        return
    if not gateway.enabled:
        for name in sorted(gateway.model_fields_set - {"enabled", "advertised"}):
            if getattr(gateway, name) != GatewayConfig.model_fields[name].default:
                yield Finding((("gateway", name), _ENABLED), "has no effect while gateway.enabled is false")
    elif gateway.broker_tls_ca_file is not None and not gateway.broker_tls:
        yield Finding(
            (("gateway", "broker_tls_ca_file"), ("gateway", "broker_tls")),
            "has no effect while gateway.broker_tls is false",
        )
    if gateway.enabled and gateway.advertised is not None:
        yield Finding(
            (("gateway", "advertised"), _ENABLED),
            "has no effect beside a broker, whose listener advertises the gateway; it is for "
            "`tieringd gateway --archive-only`",
        )
