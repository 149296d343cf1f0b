"""A valid configuration text, and what is wrong with others."""

from __future__ import annotations

import pytest

from tieringd.config import Config, parse_config
from tieringd.errors import ConfigError

SMALLEST = """\
broker:
  kind: none
  log_dirs: [/srv/logs]
state_directory: /srv/state
"""
"""Four lines; what a test adds begins in line 5."""
TIERED = (
    SMALLEST
    + """\
cloud_storage_enabled: true
cloud_storage_enable_remote_write: true
cloud_storage_backend: file
cloud_storage_file_root: /srv/archive
"""
)
"""Eight lines."""


def parsed(text: str, **environ: str) -> Config:
    return parse_config(text, source="t.yaml", environ=environ)


def problems_of(text: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parsed(text, **environ)
    return list(caught.value.problems)
