"""Components that integration tests share; each starts once, when a test first asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from tests.support.kafka import KafkaCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def kafka(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KafkaCluster]:
    """Give one running Kafka broker; a test that stops it starts it again."""
    cluster = await KafkaCluster.start(tmp_path_factory.mktemp("kafka"))
    yield cluster
    await cluster.stop()
