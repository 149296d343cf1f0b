"""Brokers that several integration tests share; they start once, when a test first asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from tests.support.kafka import KafkaCluster, Listener

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KafkaCluster]:
    """Give two brokers with a SASL listener, whose user "reader" has no rights."""
    jaas = 'org.apache.kafka.common.security.plain.PlainLoginModule required user_reader="right";'
    cluster = await KafkaCluster.start(
        tmp_path_factory.mktemp("guarded"),
        brokers=2,
        heap_mib=384,
        properties={
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.guarded.plain.sasl.jaas.config": jaas,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        },
        listeners=[Listener("GUARDED", "SASL_PLAINTEXT")],
    )
    yield cluster
    await cluster.kill()
