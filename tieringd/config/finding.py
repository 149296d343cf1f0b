"""What a rule between properties found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieringd.config.yaml_source import Place


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule: shown at the first of *places*, resting on all of them."""

    places: tuple[Place, ...]
    message: str
