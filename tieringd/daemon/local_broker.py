"""The broker of this daemon and its files' layout, opened by the configuration."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tieringd.broker.base import Broker
from tieringd.broker.directory_broker import DirectoryBroker
from tieringd.broker.layout import KafkaLayout, Layout, RedpandaLayout
from tieringd.config import Config

if TYPE_CHECKING:
    # An ordinary import would load aiokafka into processes that do not need it.
    from tieringd.broker.kafka_protocol import KafkaSettings


@asynccontextmanager
async def opened_broker(config: Config) -> AsyncIterator[Broker]:
    """Open the connection to the local broker, or the directory that replaces one."""
    broker = await _broker(config)
    try:
        yield broker
    finally:
        await broker.close()


def layout_of(config: Config) -> Layout:
    """Return the layout of the broker's files."""
    if config.broker.kind == "redpanda":
        return RedpandaLayout(str(config.state_directory / "spool"))
    return KafkaLayout()


def kafka_settings(config: Config, *, node_id: int | None = None) -> KafkaSettings:
    """Return how to reach the broker; *node_id* is the id that its files show."""
    # The protocol's schema takes a fifth of a second to import, and a directory without a broker needs none.
    from tieringd.broker.kafka_protocol import KafkaSettings  # noqa: PLC0415

    security = config.broker.security
    password = security.sasl_password
    return KafkaSettings(
        bootstrap=config.broker.bootstrap,
        has_topic_ids_on_disk=config.broker.kind != "redpanda",
        node_id=config.broker.node_id if config.broker.node_id is not None else node_id,
        security_protocol=security.protocol,
        sasl_mechanism=security.sasl_mechanism,
        sasl_username=security.sasl_username,
        sasl_password=password.get_secret_value() if password else None,
        ssl_ca_file=_text(security.ssl_ca_file),
        ssl_cert_file=_text(security.ssl_cert_file),
        ssl_key_file=_text(security.ssl_key_file),
    )


def known_cluster_id(config: Config, on_disk: str | None) -> str | None:
    """
    Return the cluster's id as far as it is known without a broker; None where only the broker knows it.

    *on_disk* is the id that the files in the log directories tell.
    """
    if config.broker.kind != "none":
        return on_disk
    # A broker's leftover files keep the cluster's own id, so that its archive continues.
    is_named = "cluster_id" in config.model_fields_set
    return config.cluster_id if is_named else on_disk or config.cluster_id


async def _broker(config: Config) -> Broker:
    log_dirs = [str(path) for path in config.broker.log_dirs]
    scan = await asyncio.to_thread(layout_of(config).scan, log_dirs)
    if config.broker.kind == "none":
        return DirectoryBroker(log_dirs, cluster_id=known_cluster_id(config, scan.cluster_id))
    from tieringd.broker.kafka import KafkaBroker  # noqa: PLC0415 as above

    return KafkaBroker(kafka_settings(config, node_id=scan.node_id))


def _text(path: os.PathLike[str] | None) -> str | None:
    return None if path is None else os.fspath(path)
