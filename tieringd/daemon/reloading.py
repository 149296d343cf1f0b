"""
A reload: the configuration is read again on request, and what may change while the process runs changes.

A daemon and an archive-only endpoint reload alike, on SIGHUP or POST /reload. Each says what it applies, and
its workers apply the same.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from tieringd.config import Config
from tieringd.config.describe import config_hash
from tieringd.config.reload import compare_configs
from tieringd.daemon.service_manager import ServiceManager
from tieringd.errors import ConfigError
from tieringd.metrics.health import HealthGauges

log = structlog.get_logger(__name__)


class Reloader:
    """
    Hold the configuration in use, and change it on request.

    An invalid configuration changes nothing. Changes that a running process cannot take over are logged, and
    wait for a restart; the declarations of the properties say which these are.
    """

    def __init__(
        self,
        config: Config,
        *,
        load: Callable[[], Config],
        apply: Callable[[Config], None],
        health: HealthGauges,
        manager: ServiceManager,
    ) -> None:
        """Take the collaborators; *load* reads the file again, *apply* gets the configuration in use."""
        self.config = config
        self._load = load
        self._apply = apply
        self._health = health
        self._manager = manager

    async def run(self, asked: asyncio.Event) -> None:
        """Reload each time *asked* is set, until cancelled."""
        while True:
            await asked.wait()
            asked.clear()
            self._manager.reloading()
            self._manager.ready(await self.reload())

    async def reload(self) -> str:
        """
        Read the configuration again, and return the outcome as one line.

        The configuration in use changes only if all of the new one is valid.
        """
        try:
            found = await asyncio.to_thread(self._load)
        except ConfigError as error:
            log.error(  # noqa: TRY400 its text is enough
                "configuration is not reloaded: the new one is wrong",
                error=str(error),
                problems=error.problems,
            )
            self._health.reload_succeeded.set(0)
            return f"running; the last reload changed nothing: {error}"
        plan = compare_configs(self.config, found)
        self.config = plan.config
        self._health.show_config(config_hash(plan.config))
        self._apply(plan.config)
        for change in plan.applied:
            log.info("configuration changed", change=str(change))
        for change in plan.needs_restart:
            log.warning("configuration change waits for a restart", change=str(change))
        for warning in found.warnings:
            log.warning("configuration", warning=warning)
        self._health.reload_succeeded.set(1)
        log.info("configuration reloaded", applied=len(plan.applied), waiting=len(plan.needs_restart))
        return "running"


@asynccontextmanager
async def on_hangup(act: Callable[[], object]) -> AsyncIterator[None]:
    """Call *act* at each SIGHUP for the time of the context. Unhandled, the signal ends a process."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
