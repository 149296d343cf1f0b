"""
Configuration: frozen, typed and strict, under the names of the systems we implement.

`load_config` reads a file into a `Config`; what holds for one topic is `Config.topic`. This layer reads one
file and the environment it is handed, and nothing else: whether a bucket or a broker is there, it does not
know.

In: a YAML file and the environment. Out: a `Config`, or one error with every fault.

Read in this order:

* `model`: the tree, put together from `properties` (a class for each subject) and `access` (the object
  store). `topic`: what holds for one topic.
* `load`: from a file to a `Config`, by way of `yaml_source` (the text), `fields` and `units` (single
  values), `naming` (names), `checks`, `store_checks` and `finding` (rules between properties).
* `describe`: what the classes say of each property, for `reference` (page and JSON schema), `effective`
  (`config show`) and `reload`.
"""

from tieringd.config.load import load_config, parse_config
from tieringd.config.model import AdminConfig, BrokerConfig, Config, LogConfig, Security
from tieringd.config.properties import TopicProperties
from tieringd.config.topic import TopicConfig

__all__ = [
    "AdminConfig",
    "BrokerConfig",
    "Config",
    "LogConfig",
    "Security",
    "TopicConfig",
    "TopicProperties",
    "load_config",
    "parse_config",
]
