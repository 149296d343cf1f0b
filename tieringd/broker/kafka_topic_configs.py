"""
Properties of topics in Kafka's messages: what asks for them, what an answer says, what sets them.

The messages only; who sends them where is `broker.kafka`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from tieringd.broker.kafka_errors import refusal
from tieringd.broker.kafka_protocol import DESCRIBE_CONFIGS, INCREMENTAL_ALTER_CONFIGS, KafkaRequest
from tieringd.errors import BrokerUnavailable

if TYPE_CHECKING:
    from kio.schema.describe_configs.v4 import DescribeConfigsResponse

_TOPICS_PER_QUESTION: Final = 200
"""A topic has some 35 settings; decoding 200 topics holds the event loop for tens of milliseconds."""
_TOPIC_RESOURCE: Final = 2
_SET_ON_TOPIC: Final = 1
"""DescribeConfigs' source DYNAMIC_TOPIC_CONFIG; defaults of the broker have other sources."""
_EFFECTIVE_SETTINGS: Final = frozenset(
    {"cleanup.policy", "retention.ms", "retention.bytes", "unclean.leader.election.enable"}
)
"""Of these the value counts, be it the topic's own or a default of the broker."""
_SET_CONFIG: Final = 0
_DELETE_CONFIG: Final = 1


def describe_requests(topics: Sequence[str]) -> Iterator[KafkaRequest]:
    """Return the questions for the settings of all these topics, a part of them in each."""
    for first in range(0, len(topics), _TOPICS_PER_QUESTION):
        yield describe_request(topics[first : first + _TOPICS_PER_QUESTION])


def describe_request(topics: Sequence[str]) -> KafkaRequest:
    """Return the question for the settings of a few topics."""

    def build(module: ModuleType) -> Any:
        resources = tuple(
            module.DescribeConfigsResource(
                resource_type=_TOPIC_RESOURCE, resource_name=topic, configuration_keys=None
            )
            for topic in topics
        )
        return module.DescribeConfigsRequest(resources=resources)

    return KafkaRequest(DESCRIBE_CONFIGS, build)


def described(response: DescribeConfigsResponse) -> dict[str, Mapping[str, str]]:
    """
    Return what is set on each topic; and, also by default, how the broker deletes and elects leaders.

    A topic that the cluster does not know is left out.

    Raises:
        BrokerDenied: We may not ask.
        BrokerUnavailable: The broker cannot say now.
    """
    configs: dict[str, Mapping[str, str]] = {}
    for result in response.results:
        if result.error_code is ErrorCode.unknown_topic_or_partition:
            continue
        if result.error_code is not ErrorCode.none:
            # Without its settings a topic would look like one with the defaults.
            raise refusal(f"the settings of topic {result.resource_name}", result.error_code)
        configs[result.resource_name] = {
            config.name: config.value
            for config in result.configs
            if config.value is not None
            and (config.config_source == _SET_ON_TOPIC or config.name in _EFFECTIVE_SETTINGS)
        }
    return configs


def overrides(topic: str, response: DescribeConfigsResponse) -> Mapping[str, str]:
    """
    Return only what is set on the one topic that was asked about.

    Raises:
        BrokerDenied: We may not ask.
        BrokerUnavailable: The broker cannot say now.
    """
    for result in response.results:
        if result.error_code is not ErrorCode.none:
            raise refusal(f"the settings of topic {topic}", result.error_code)
        return {
            config.name: config.value
            for config in result.configs
            if config.config_source == _SET_ON_TOPIC and config.value is not None
        }
    raise BrokerUnavailable(f"the broker's answer says nothing of topic {topic}")


def alter_request(
    topic: str, changes: Mapping[str, str | None], *, send_by: float = math.inf
) -> KafkaRequest:
    """Return the order to set properties of a topic; None takes one away, and all others stay."""

    def build(module: ModuleType) -> Any:
        configs = tuple(
            module.AlterableConfig(
                name=name, config_operation=_DELETE_CONFIG if value is None else _SET_CONFIG, value=value
            )
            for name, value in changes.items()
        )
        resource = module.AlterConfigsResource(
            resource_type=_TOPIC_RESOURCE, resource_name=topic, configs=configs
        )
        return module.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)

    return KafkaRequest(INCREMENTAL_ALTER_CONFIGS, build, send_by=send_by)


def check_altered(topic: str, changes: Mapping[str, str | None], response: Any) -> None:
    """
    See that an order was carried out.

    Raises:
        BrokerDenied: It was refused.
        BrokerUnavailable: It cannot be carried out now.
    """
    for result in response.responses:
        if result.error_code is not ErrorCode.none:
            raise refusal(f"to set {', '.join(changes)} of topic {topic}", result.error_code)
