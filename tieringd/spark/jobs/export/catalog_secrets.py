"""What a catalogue's properties hold that no error may tell: catalogues put them into theirs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_IS_SECRET: Final = re.compile(r"secret|token|passw|credential|connection|key|sas|auth", re.IGNORECASE)
"""In a property's name. What is hidden without need does little harm."""


def without_secrets(text: str, properties: Mapping[str, Any]) -> str:
    """Return *text* with asterisks for the secrets of *properties*, and of properties in them."""
    for secret in sorted({*_secrets(properties)}, key=len, reverse=True):
        for written in (secret, repr(secret)[1:-1], quote(secret, safe="")):
            text = text.replace(written, "***")
    return text


def _secrets(properties: Mapping[str, Any]) -> Iterator[str]:
    for name, value in properties.items():
        if isinstance(value, dict):
            yield from _secrets(value)
            continue
        if _IS_SECRET.search(name) and value:
            yield str(value)
        try:
            password = urlsplit(str(value)).password
        except ValueError:
            continue
        if password:
            yield password
            yield unquote(password)
