"""
Configuration: frozen, typed and strict, under the property names of Redpanda and Kafka.

`load_config` reads a file into a `Config`; `Config.topic` resolves the settings of one topic. This layer
reads one file and the environment that is passed to it, and nothing else. It does not know whether a
bucket or a broker exists.

In: a YAML file and the environment. Out: a `Config`, or one error with every fault.

Read in this order:

* `model`: the tree, composed of `properties` (a class for each subject) and `access` (the object store).
  `topic`: the settings of one topic.
* `load`: from a file to a `Config`, with `yaml_source` (the text), `fields` and `units` (single values),
  `naming` (names), `checks`, `store_checks` and `rule_violation` (rules between properties).
* `describe`: what the classes declare of each property, for `reference` (page and JSON schema),
  `effective` (`config show`) and `reload`.
"""

from tieringd.config.load import load_config, parse_config
from tieringd.config.model import AdminConfig, BrokerConfig, Config, LogConfig, Security
from tieringd.config.properties import TopicProperties
from tieringd.config.topic import TopicConfig, broker_limits

__all__ = [
    "AdminConfig",
    "BrokerConfig",
    "Config",
    "LogConfig",
    "Security",
    "TopicConfig",
    "TopicProperties",
    "broker_limits",
    "load_config",
    "parse_config",
]
