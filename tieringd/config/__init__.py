"""
Configuration: frozen, typed and strict, under the names of the systems we implement.

`load_config` reads a file into a `Config`; what holds for one topic is `Config.topic`. This
layer reads one file and the environment it is handed, and nothing else: whether a bucket or a
broker is there, it does not know.
"""

from tieringd.config.load import load_config, parse_config
from tieringd.config.model import AdminConfig, BrokerConfig, Config, LogConfig, Security
from tieringd.config.topic import TopicConfig
from tieringd.config.topic_properties import TopicProperties

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
