"""The result of a rule between properties."""

from __future__ import annotations

from dataclasses import dataclass

from tieringd.config.yaml_source import Place


@dataclass(frozen=True, slots=True)
class RuleViolation:
    """A broken rule. It is shown at the first of *places*, and depends on all of them."""

    places: tuple[Place, ...]
    message: str
