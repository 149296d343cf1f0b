"""How to export, whatever the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

from tieringd.errors import ConfigError
from tieringd.spark.jobs.export.state import Isolation, OnRecreated

PORTION_BYTES: Final = 128 << 20
ROUND_BYTES: Final = 16 << 30


@dataclass(frozen=True, slots=True)
class ExportRules:
    """
    The options of an export.

    Raises:
        ConfigError: One of them is not possible.
    """

    isolation: Isolation = "read_committed"
    fails_on_gap: bool = True
    """Whether to stop, before anything is written, where the archive lacks what was to be exported."""
    recreated: OnRecreated = "error"
    """What to do where the target holds an earlier incarnation of the topic."""
    portion_bytes: int = PORTION_BYTES
    """About how much of the archive goes into one file; what is by hour or day gets smaller ones."""
    round_bytes: int = ROUND_BYTES
    """About how much of the archive goes into one commit."""

    def __post_init__(self) -> None:
        for name in ("portion_bytes", "round_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, not {getattr(self, name)}")
        for name, known in (("isolation", Isolation), ("recreated", OnRecreated)):
            if getattr(self, name) not in get_args(known):
                raise ConfigError(
                    f"{name}: must be {' or '.join(get_args(known))}, not {getattr(self, name)}"
                )
