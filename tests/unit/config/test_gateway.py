"""The gateway's section: what it needs, and what has no effect."""

from __future__ import annotations

import pytest

from tests.unit.config.texts import SMALLEST, TIERED, parsed, problems_of
from tieringd.config import parse_config
from tieringd.errors import ConfigError

KAFKA_TIERED = TIERED.replace("kind: none", "kind: kafka\n  bootstrap: ['h:1']")


def gateway(text: str, base: str = KAFKA_TIERED) -> str:
    return base + f"gateway: {{{text}}}\n"


def test_gateway_is_off_until_it_is_wanted():
    """The default addresses of a gateway need no more than the broker's second listener."""
    assert not parsed(KAFKA_TIERED).gateway.enabled
    found = parsed(gateway("enabled: true")).gateway
    assert (found.host, found.port, found.broker) == ("0.0.0.0", 9095, "localhost:9094")
    assert parsed(gateway("enabled: true")).warnings == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(
            gateway("enabled: true", TIERED), "needs a broker, but broker.kind is none", id="no-broker"
        ),
        pytest.param(
            gateway("enabled: true, tls_cert_file: /c"),
            "tls_cert_file: needs gateway.tls_key_file as well",
            id="no-key",
        ),
        pytest.param(
            gateway("enabled: true, tls_key_file: /k"),
            "tls_key_file: needs gateway.tls_cert_file as well",
            id="no-certificate",
        ),
        pytest.param(
            gateway("tls_key_file: /k"),
            "tls_key_file: needs gateway.tls_cert_file",
            id="no-certificate-alone",
        ),
        pytest.param(
            gateway("advertised: here"), "gateway.advertised: must be host:port", id="advertised-no-port"
        ),
        pytest.param(
            gateway("advertised: 'here:65536'"), "gateway.advertised: must have a port", id="advertised-port"
        ),
        pytest.param(
            gateway("enabled: true, broker: here"), "gateway.broker: must be host:port", id="no-port"
        ),
        pytest.param(gateway("enabled: true, port: 65536"), "gateway.port: ", id="port-too-high"),
        pytest.param(gateway("workers: many"), "from 0 to 64, or per-cpu", id="workers-word"),
        pytest.param(gateway("workers: 65"), "from 0 to 64, or per-cpu", id="workers-too-many"),
        pytest.param(
            gateway("workers: 4, max_connections_per_host: 3"),
            "gateway.workers: is 4, and gateway.max_connections_per_host 3 is not enough for so many",
            id="workers-without-places",
        ),
        pytest.param(
            gateway("workers: 4, buffer_bytes: 8MiB"),
            "gateway.workers: is 4, and gateway.buffer_bytes 8388608 is not enough for so many; set it to "
            "16777216 or more, or have fewer workers",
            id="workers-without-memory",
        ),
    ],
)
def test_gateway_that_cannot_work_is_refused(text, words):
    """The gateway is refused before anything starts, and the problem names the missing property."""
    (problem,) = problems_of(text)
    assert words in problem


def test_gateway_without_tiering_is_refused():
    """There is nothing that it could read."""
    off = SMALLEST.replace("kind: none", "kind: kafka\n  bootstrap: [h:1]")
    (problem,) = problems_of(gateway("enabled: true", off))
    assert "has no archive to read" in problem


def test_gateway_on_the_daemon_s_own_listener_is_refused():
    """Clients would be sent past it, or we through it."""
    text = gateway("enabled: true, broker: 'h:1'")
    (problem,) = problems_of(text)
    assert "is in broker.bootstrap as well" in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "enabled: true, advertised: 'h:9095'",
            "listener advertises the gateway; it is for `tieringd gateway --archive-only`",
        ),
        ("port: 9999", "gateway.port: has no effect while gateway.enabled is false"),
        (
            "enabled: true, broker_tls_ca_file: /ca",
            "gateway.broker_tls_ca_file: has no effect while gateway.broker_tls is false",
        ),
    ],
)
def test_property_of_the_gateway_without_effect_is_a_warning(text, words):
    """The warning names what would have to change."""
    (warning,) = parsed(gateway(text)).warnings
    assert warning.endswith(words)


def test_bucket_alone_needs_no_broker_section():
    """Only where it is asked for: a daemon beside a broker has to know it."""
    text = (
        TIERED.replace(SMALLEST, "state_directory: /srv/state\n") + "gateway: {port: 9999, enabled: true}\n"
    )
    config = parse_config(text, source="t.yaml", environ={}, needs_broker=False)
    assert not config.has_broker_section
    assert config.warnings == ()
    assert "broker: is required" in problems_of(text)[0]
    assert parse_config(TIERED, source="t.yaml", environ={}, needs_broker=False).has_broker_section


def test_faults_beside_a_missing_broker_section_are_told():
    """Faults are reported as in any other file, and none is about the missing broker section."""
    with pytest.raises(ConfigError) as error:
        parse_config("gateway: {port: -1}\n", source="t.yaml", environ={}, needs_broker=False)
    assert [line.split(": ")[1] for line in error.value.problems] == ["state_directory", "gateway.port"]


@pytest.mark.parametrize(
    ("text", "processors", "workers"),
    [
        ("workers: 0", 8, 0),
        ("workers: 3", 1, 3),
        ("workers: per-cpu", 8, 8),
        ("workers: per-cpu, max_connections_per_host: 2", 8, 2),
        ("workers: per-cpu, buffer_bytes: 12MiB", 8, 3),
    ],
)
def test_workers_for_each_processor_are_no_more_than_the_limits_allow(text, processors, workers):
    """A number is taken as it is; `per-cpu` adapts."""
    assert parsed(gateway(text)).gateway.worker_count(processors) == workers
