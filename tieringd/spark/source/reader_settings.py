"""
Where the archive is, and the credentials to reach it, from options or from tieringd's own configuration file.

Executors get the text of the few properties that a reader needs. Each process replaces `${NAME}` in it from
its own environment, and gets credentials such as those of an instance's role by itself. So a driver's
credentials stay with the driver. The `repr` of the settings never shows their text or values.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

import yaml

from tieringd.config import Config, parse_config
from tieringd.config.access import StoreAccess
from tieringd.errors import ConfigError
from tieringd.spark.source.option_values import ASKED, OptionValues, fault, require_hidden

_CONNECTIONS: Final = (
    "cloud_storage_max_connections",
    "cloud_storage_initial_backoff_ms",
    "cloud_storage_max_connection_idle_time_ms",
)
PROPERTIES: Final = (*StoreAccess.model_fields, *_CONNECTIONS)
"""The configuration properties that a reader uses. Each may also be given as an option."""

_SHORT: Final = {
    "region": "cloud_storage_region",
    "accessKey": "cloud_storage_access_key",
    "secretKey": "cloud_storage_secret_key",
    "credentialsSource": "cloud_storage_credentials_source",
}
"""Short option names for the properties that are set most often."""
STORE_OPTIONS: Final = ("path", "config", "endpoint", *_SHORT)

_NEEDED: Final = {"state_directory": "/nowhere", "cloud_storage_enabled": "true"}
"""
Properties that every configuration must have. A reader stores nothing locally, and always needs the store.
"""
_OPTIONS: Final = "the options"
_VARIABLE: Final = "TIERINGD_OPTION_"
_FROM_ENVIRONMENT: Final = "the value from the environment"
_NOT_SET: Final = re.compile(r"the environment variable \w+ is not set")
_PORTS: Final = {"http": "80", "https": "443"}


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The text from which each process makes its configuration. Plain, and small enough for every task."""

    source: str
    """The origin of the text, for messages."""
    text: str = field(repr=False)
    """YAML. Each property from a file keeps its line number."""
    values: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Values of options, by the names of variables under which *text* refers to them."""

    def config(self) -> Config:
        """
        Return the configuration of this process.

        Raises:
            ConfigError: The configuration is wrong, or this process's environment lacks a variable.
        """
        environ = os.environ | dict(self.values)
        asked = sorted(set(ASKED.findall(self.text)) & environ.keys())
        try:
            return _parsed(self.text, self.source, tuple((name, environ[name]) for name in asked))
        except ConfigError as error:
            raise self._explained(error) from None

    def _explained(self, error: ConfigError) -> ConfigError:
        """Return an error with every problem in its message, in terms of the options."""
        problems = tuple(_with_source(problem, self.source) for problem in error.problems)
        hint = f"Correct {self.source}"
        if any(_NOT_SET.search(problem) for problem in problems):
            hint = (
                "Each process of Spark looks in its own environment: spark.executorEnv.NAME sets a variable "
                "of the executors, and the driver's are those of the process that started Spark"
            )
        return ConfigError("; ".join(problems), problems=problems, hint=hint)


def read_settings(given: Mapping[str, str]) -> StoreSettings:
    """
    Return the settings from the options. A file named in `config` is read here, on the driver.

    Raises:
        ConfigError: No option gives the archive's place, the file cannot be read, or options contradict one
            another.
    """
    values = OptionValues(given)
    require_hidden(values)
    found = _given(values)
    path = values.text("config")
    if path is not None:
        if found:
            raise fault(
                "config",
                f"contradicts {', '.join(found)}: the configuration file already says where the archive is",
            )
        return StoreSettings(path, _store_part(_file_text(path)))
    properties: dict[str, str] = {}
    for name, one in found.items():
        for key, value in one.items():
            if key in properties:
                raise fault(name, f"another option already sets {key}; leave one of them out")
            properties[key] = value
    if not properties:
        raise fault(
            "path",
            "no option says where the archive is",
            hint='Use load("s3://bucket/prefix"), or set config to the path of a configuration file',
        )
    lines = {name: _value_text(name, value) for name, value in properties.items()}
    return StoreSettings(
        _OPTIONS,
        "".join(f"{name}: {value}\n" for name, value in (*lines.items(), *_NEEDED.items())),
        tuple((_VARIABLE + name, value) for name, value in properties.items() if "${" not in value),
    )


def _given(values: OptionValues) -> dict[str, dict[str, str]]:
    """Return the properties that each given option sets, by option name."""
    found: dict[str, dict[str, str]] = {}
    path, endpoint = values.text("path"), values.text("endpoint")
    if path is not None:
        found["path"] = _place(path)
    if endpoint is not None:
        found["endpoint"] = _address(endpoint)
    for option, name in (*_SHORT.items(), *((name, name) for name in PROPERTIES)):
        value = values.text(option)
        if value is not None:
            found[option] = {name: value}
    return found


def _place(path: str) -> dict[str, str]:
    """
    Return the properties of the archive's place that a URL means.

    Raises:
        ConfigError: The URL is not the place of an archive.
    """
    url = urlsplit(path)
    if "?" in path or "#" in path:
        # A URL parser cuts the path there, so another archive would be read. The rest may be an access token.
        raise fault(
            "path",
            "a URL with ? or # does not name an archive",
            hint="Set config to the path of a configuration file, which can name any archive",
        )
    prefix = {"cloud_storage_prefix": url.path.strip("/")} if url.path.strip("/") else {}
    match url.scheme:
        case "s3" | "s3a" if url.netloc:
            return {"cloud_storage_backend": "aws", "cloud_storage_bucket": url.netloc} | prefix
        case "gs" if url.netloc:
            return {"cloud_storage_backend": "google", "cloud_storage_bucket": url.netloc} | prefix
        case "azure" if url.netloc and prefix:
            container, _, rest = url.path.strip("/").partition("/")
            return _azure(url.netloc, container, rest)
        case "abfss" | "abfs" if url.username and url.hostname:
            return _azure(url.hostname.partition(".")[0], url.username, url.path.strip("/"))
        case "file" if not url.netloc and url.path:
            return {"cloud_storage_backend": "file", "cloud_storage_file_root": url.path}
    raise fault(
        "path",
        f"{_without_password(url)!r} does not name an archive",
        hint="Write s3://bucket/prefix, gs://bucket/prefix, azure://account/container/prefix or file:///directory",
    )


def _azure(account: str, container: str, prefix: str) -> dict[str, str]:
    return {
        "cloud_storage_backend": "azure",
        "cloud_storage_azure_storage_account": account,
        "cloud_storage_azure_container": container,
    } | ({"cloud_storage_prefix": prefix} if prefix else {})


def _address(endpoint: str) -> dict[str, str]:
    """
    Return the properties that an endpoint such as `http://host:port` means.

    Raises:
        ConfigError: The endpoint is not such a URL.
    """
    url = urlsplit(endpoint)
    try:
        port = url.port
    except ValueError:
        port = 0
    if url.scheme not in _PORTS or not url.hostname or port == 0 or url.path.strip("/") or url.username:
        raise fault("endpoint", "must be a URL such as https://host:9000")
    return {
        "cloud_storage_api_endpoint": url.hostname,
        "cloud_storage_api_endpoint_port": str(port or _PORTS[url.scheme]),
        "cloud_storage_disable_tls": "true" if url.scheme == "http" else "false",
    }


def _without_password(url: SplitResult) -> str:
    return f"{url.scheme}://{url.hostname or ''}{url.path}"


def _value_text(name: str, value: str) -> str:
    """
    Return YAML for an option's value.

    A value that refers to a variable is written as it is. For any other the text refers to a variable of
    `StoreSettings.values`.
    """
    return json.dumps(value) if "${" in value else f"${{{_VARIABLE}{name}}}"


def _file_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        hint = (
            "Spark's driver process reads it: a relative path begins at the directory where the driver was "
            "started"
        )
        raise fault("config", f"{path} cannot be read: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError:
        raise fault("config", f"{path} is not UTF-8 text") from None


def _store_part(text: str) -> str:
    """
    Return a configuration with only the lines that a reader needs, at their places; the others are empty.

    So passwords of a broker do not leave the file, and variables for them need not be set.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return text  # Parsing the configuration will report the fault.
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        return text
    lines = text.splitlines()
    begins = [key.start_mark.line for key, _ in root.value] + [len(lines)]
    kept = [""] * len(lines)
    for (key, _), begin, end in zip(root.value, begins, begins[1:], strict=False):
        if key.value in PROPERTIES:
            kept[begin:end] = lines[begin:end]
    kept += [f"{name}: {value}" for name, value in _NEEDED.items()]
    return "\n".join(kept) + "\n"


@lru_cache(maxsize=16)
def _parsed(text: str, source: str, variables: tuple[tuple[str, str], ...]) -> Config:
    return parse_config(text, source=source, environ=dict(variables), needs_broker=False)


def _with_source(problem: str, source: str) -> str:
    """Return a problem of a configuration in terms of the options."""
    if source == _OPTIONS:
        problem = re.sub(rf"^{_OPTIONS}(:\d+)?: ", "", problem)
    for option, name in _SHORT.items():
        problem = problem.replace(f"{name}: ", f"{name} (option {option}): ")
    return problem.replace(_FROM_ENVIRONMENT, "the given value")
