"""
Properties of topics in Kafka's messages: requests to read and to set them, and their responses.

This module has the messages only; `broker.kafka` sends them.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from tieringd.broker.kafka_errors import refusal
from tieringd.broker.kafka_kept import KeptQuestion
from tieringd.broker.kafka_protocol import DESCRIBE_CONFIGS, INCREMENTAL_ALTER_CONFIGS, KafkaRequest
from tieringd.errors import BrokerDenied, BrokerUnavailable

if TYPE_CHECKING:
    from kio.schema.describe_configs.v4 import DescribeConfigsResponse

_TOPICS_PER_QUESTION: Final = 200
"""A topic has some 35 settings, and decoding 200 topics holds the event loop for tens of milliseconds."""
_TOPIC_RESOURCE: Final = 2
_SET_ON_TOPIC: Final = 1
"""DescribeConfigs' source DYNAMIC_TOPIC_CONFIG; defaults of the broker have other sources."""
_EFFECTIVE_SETTINGS: Final = frozenset(
    {"cleanup.policy", "retention.ms", "retention.bytes", "unclean.leader.election.enable"}
)
"""The effective value of these is returned, be it the topic's own or a default of the broker."""
_SET_CONFIG: Final = 0
_DELETE_CONFIG: Final = 1


class ConfigsQuestions:
    """The questions for the settings of all these topics, each for some of them."""

    def __init__(self, topics: tuple[str, ...]) -> None:
        self.topics = topics
        self._questions = [
            KeptQuestion(
                DESCRIBE_CONFIGS, _description(topics[first : first + _TOPICS_PER_QUESTION]), described
            )
            for first in range(0, len(topics), _TOPICS_PER_QUESTION)
        ]

    async def asked(
        self, ask: Callable[[KafkaRequest], Awaitable[Any]]
    ) -> dict[str, Mapping[str, str] | BrokerDenied]:
        """
        Return for each topic what `described` does.

        It is the same object as before while the broker's answer is the same.

        Raises:
            BrokerUnavailable: The broker cannot answer now.
        """
        configs: dict[str, Mapping[str, str] | BrokerDenied] = {}
        for question in self._questions:
            configs |= await ask(question.request())
        return configs


def describe_request(topics: Sequence[str]) -> KafkaRequest:
    """Return the request for the settings of a few topics."""
    return KafkaRequest(DESCRIBE_CONFIGS, _description(topics))


def _description(topics: Sequence[str]) -> Callable[[ModuleType], Any]:
    def build(module: ModuleType) -> Any:
        resources = tuple(
            module.DescribeConfigsResource(
                resource_type=_TOPIC_RESOURCE, resource_name=topic, configuration_keys=None
            )
            for topic in topics
        )
        return module.DescribeConfigsRequest(resources=resources)

    return build


def described(response: DescribeConfigsResponse) -> dict[str, Mapping[str, str] | BrokerDenied]:
    """
    Return the properties set on each topic, and the effective ones for deletion and leader election.

    The latter come from the topic or from a default of the broker. A topic that the cluster does not
    know is left out. A topic whose settings this user may not read has an error instead: without them it
    would look like one with the defaults.

    Raises:
        BrokerUnavailable: The broker cannot answer now.
    """
    configs: dict[str, Mapping[str, str] | BrokerDenied] = {}
    for result in response.results:
        if result.error_code is ErrorCode.unknown_topic_or_partition:
            continue
        if result.error_code is not ErrorCode.none:
            error = refusal(f"the settings of topic {result.resource_name}", result.error_code)
            if not isinstance(error, BrokerDenied):
                raise error
            configs[result.resource_name] = error
            continue
        configs[result.resource_name] = {
            config.name: config.value
            for config in result.configs
            if config.value is not None
            and (config.config_source == _SET_ON_TOPIC or config.name in _EFFECTIVE_SETTINGS)
        }
    return configs


def overrides(topic: str, response: DescribeConfigsResponse) -> Mapping[str, str]:
    """
    Return only the properties that are set on the requested topic itself.

    Raises:
        BrokerDenied: This user may not ask.
        BrokerUnavailable: The broker cannot answer now.
    """
    for result in response.results:
        if result.error_code is not ErrorCode.none:
            raise refusal(f"the settings of topic {topic}", result.error_code)
        return {
            config.name: config.value
            for config in result.configs
            if config.config_source == _SET_ON_TOPIC and config.value is not None
        }
    raise BrokerUnavailable(f"the broker's response has no result for topic {topic}")


def alter_request(
    topic: str, changes: Mapping[str, str | None], *, send_by: float = math.inf
) -> KafkaRequest:
    """Return the request to set properties of a topic. None removes a setting, and all others stay."""

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
    Check that a change was applied.

    Raises:
        BrokerDenied: It was refused.
        BrokerUnavailable: It cannot be applied now.
    """
    for result in response.responses:
        if result.error_code is not ErrorCode.none:
            raise refusal(f"to set {', '.join(changes)} of topic {topic}", result.error_code)
