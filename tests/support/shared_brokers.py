"""
A pytest plugin with real brokers that all tests of one worker share. Each starts when a test first uses it.

Each test has topics of its own names. A test that stops a broker starts it again. Brokers are killed at the
end, because their data is not needed any more.

The imports are inside the fixtures, as a run of only unit tests does not need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from tests.support.gateways import BrokerBehind
    from tests.support.kafka import KafkaCluster

EAGER_CLEANER = {"log.cleaner.backoff.ms": "200", "log.cleaner.dedupe.buffer.size": str(16 << 20)}
"""Properties with which the log cleaner runs very often. Topics can delay it by min.compaction.lag.ms."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def kafka(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KafkaCluster]:
    """Yield one running broker."""
    from tests.support.kafka import KafkaCluster  # noqa: PLC0415 see above

    cluster = await KafkaCluster.start(tmp_path_factory.mktemp("kafka"))
    yield cluster
    await cluster.kill()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def brokers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KafkaCluster]:
    """Yield three running brokers of one cluster."""
    from tests.support.cluster import CLUSTER_PROPERTIES  # noqa: PLC0415 see above
    from tests.support.kafka import KafkaCluster  # noqa: PLC0415 see above

    directory = tmp_path_factory.mktemp("brokers")
    cluster = await KafkaCluster.start(directory, brokers=3, heap_mib=384, properties=CLUSTER_PROPERTIES)
    yield cluster
    await cluster.kill()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def behind(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BrokerBehind]:
    """Yield a broker whose second listener advertises a gateway, and whose log cleaner runs often."""
    from tests.support.gateways import BrokerBehind  # noqa: PLC0415 see above

    found = await BrokerBehind.start(tmp_path_factory.mktemp("behind"), properties=EAGER_CLEANER)
    yield found
    await found.cluster.kill()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def second_kafka(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KafkaCluster]:
    """Yield one running broker of another cluster, into which topics are restored."""
    from tests.support.kafka import KafkaCluster  # noqa: PLC0415 see above

    cluster = await KafkaCluster.start(tmp_path_factory.mktemp("second-kafka"))
    yield cluster
    await cluster.kill()


@pytest_asyncio.fixture
async def fresh(second_kafka: KafkaCluster) -> AsyncIterator[KafkaCluster]:
    """Yield the broker of the other cluster, without topics of other tests."""
    yield second_kafka
    await second_kafka.launch()
    await second_kafka.delete_all_topics()
