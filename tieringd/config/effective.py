"""
The configuration in effect: each property with its value and the origin of the value.

A value comes from a line of the file, from the environment through such a line, from other properties
that imply it, or from the default. Secrets are never shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tieringd.config.access import GCS_ENDPOINT
from tieringd.config.describe import values_of
from tieringd.config.load import Loaded, Origin
from tieringd.config.model import Config
from tieringd.config.yaml_source import Place

Source: TypeAlias = Literal["file", "environment", "inferred", "default"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A property in effect."""

    place: Place
    value: Any
    """The value as JSON holds it."""
    shown: str
    """The value as an operator would write it."""
    source: Source
    line: int | None = None
    variables: tuple[str, ...] = ()
    inferred_from: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Return the origin of the value, in words."""
        match self.source:
            case "file":
                return f"line {self.line}"
            case "environment":
                return f"line {self.line}, from {', '.join(f'${{{name}}}' for name in self.variables)}"
            case "inferred":
                return f"inferred from {', '.join(self.inferred_from)}"
            case "default":
                return "default"


def effective_settings(loaded: Loaded) -> Iterator[Setting]:
    """Yield every property with its value, in the order of the reference page."""
    inferred = dict(_inferred(loaded.config))
    for place, one, value in values_of(loaded.config):
        origin = _written(place, loaded.origins)
        if value is None and place[-1] in inferred and len(place) == 1:
            found, names = inferred[str(place[0])]
            yield Setting(place, found, found, "inferred", inferred_from=names)
        elif origin is None:
            yield Setting(place, one.plain(value), one.show(value), "default")
        else:
            source: Source = "environment" if origin.variables else "file"
            yield Setting(
                place, one.plain(value), one.show(value), source, line=origin.line, variables=origin.variables
            )


def _written(place: Place, origins: Mapping[Place, Origin]) -> Origin | None:
    """Return the line of a property, with all variables in it, also those in the items of a list."""
    own = origins.get(place)
    if own is None:
        return None
    below = [origin for other, origin in origins.items() if other[: len(place)] == place]
    names = dict.fromkeys(name for origin in below for name in origin.variables)
    return type(own)(own.line, tuple(names))


def _inferred(config: Config) -> Iterator[tuple[str, tuple[str, tuple[str, ...]]]]:
    """Yield each inferred property, with its value and the properties that imply it."""
    backend = config.backend
    if backend is None:
        return
    if config.backend_inferred_from:
        yield "cloud_storage_backend", (backend, config.backend_inferred_from)
    if backend == "file":
        return
    has_own_host = config.cloud_storage_api_endpoint is not None
    names = ("cloud_storage_api_endpoint",) if has_own_host else ("cloud_storage_backend",)
    yield "cloud_storage_url_style", (config.url_style, names)
    if backend == "google":
        yield "cloud_storage_api_endpoint", (GCS_ENDPOINT, ("cloud_storage_backend",))
    if backend == "aws" and config.cloud_storage_region is not None:
        host = f"s3.{config.cloud_storage_region}.amazonaws.com"
        yield "cloud_storage_api_endpoint", (host, ("cloud_storage_region",))
    if backend == "azure" and config.cloud_storage_azure_storage_account is not None:
        host = config.azure_account_url.partition("://")[2].partition(":")[0]
        has_adls = config.cloud_storage_azure_adls_endpoint is not None
        name = "adls_endpoint" if has_adls else "storage_account"
        yield "cloud_storage_api_endpoint", (host, (f"cloud_storage_azure_{name}",))
