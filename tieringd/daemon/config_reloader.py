"""
SIGHUP: read the configuration again, and take over what can change while the daemon runs.

An invalid configuration changes nothing: the one in use stays. Changes that a running daemon cannot take
over are logged, and wait for a restart. The declarations of the properties say which is which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tieringd.config import Config
from tieringd.config.reload import compare_configs
from tieringd.daemon.assembly import DaemonParts, apply_config
from tieringd.errors import ConfigError
from tieringd.metrics import Metrics

log = structlog.get_logger(__name__)


class Reloader:
    """Hold the configuration in use, and change it on request."""

    def __init__(
        self,
        config: Config,
        parts: DaemonParts,
        *,
        load: Callable[[], Config],
        on_change: Callable[[Config], None],
        metrics: Metrics,
    ) -> None:
        """Take the collaborators; *load* reads the file again, *on_change* gets the configuration in use."""
        self.config = config
        self._parts = parts
        self._load = load
        self._on_change = on_change
        self._metrics = metrics

    async def run(self, asked: asyncio.Event) -> None:
        """Reload each time *asked* is set, until cancelled."""
        while True:
            await asked.wait()
            asked.clear()
            await self.reload()

    async def reload(self) -> None:
        """Read the configuration again; the one in use changes only if all of the new one is valid."""
        try:
            found = await asyncio.to_thread(self._load)
        except ConfigError as error:
            log.error(  # noqa: TRY400 its text is enough
                "configuration is not reloaded: the new one is wrong",
                error=str(error),
                problems=error.problems,
            )
            self._metrics.health.reload_succeeded.set(0)
            return
        plan = compare_configs(self.config, found)
        self.config = plan.config
        self._on_change(plan.config)
        apply_config(plan.config, self._parts)
        for change in plan.applied:
            log.info("configuration changed", change=str(change))
        for change in plan.needs_restart:
            log.warning("configuration change waits for a restart", change=str(change))
        for warning in found.warnings:
            log.warning("configuration", warning=warning)
        self._metrics.health.reload_succeeded.set(1)
        log.info("configuration reloaded", applied=len(plan.applied), waiting=len(plan.needs_restart))
        self._parts.reconciler.hint()
