"""
The bookkeeper: what a daemon asks of the object store besides its archivers, apart from the rounds.

Topic manifests are read and kept, followed manifests kept fresh, retention taken over. All of it
may wait for a store that hangs. A round of reconciliation must not: it is what pins the files
that a broker deletes meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from tieringd.errors import TieringError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from tieringd.services.follower import Follower
    from tieringd.services.observer import World
    from tieringd.services.retention_manager import RetentionManager
    from tieringd.services.topic_registry import TopicRegistry

log = structlog.get_logger(__name__)


class Bookkeeper:
    """Do the chores of what a round saw. `step` is called by one task at a time."""

    def __init__(
        self,
        *,
        registry: TopicRegistry,
        follower: Follower,
        retention: RetentionManager,
        interval_seconds: float,
    ) -> None:
        """Take the parts; the bucket is listed for changes once in *interval_seconds*, at most."""
        self._registry = registry
        self._follower = follower
        self._retention = retention
        self._interval_seconds = interval_seconds
        self._refresh_due = 0.0
        self._faults: dict[str, str] = {}

    @property
    def fault(self) -> str:
        """Return why a chore could not be done at the last step; empty when all were."""
        return next(iter(self._faults.values()), "")

    async def step(self, world: World) -> bool:
        """Do what is due for *world*; return whether another look would find something else."""
        is_changed = await self.keep_topics(world)
        await self._follower.step([one.partition for one in world.followed])
        return is_changed

    async def keep_topics(self, world: World) -> bool:
        """Read and keep the manifests of topics, and their retention; return as `step` does."""
        is_changed = False

        async def refresh() -> None:
            nonlocal is_changed
            is_changed = await self._refresh(world.cluster)

        await self._try("topic manifests cannot be read", refresh())
        if self._registry.is_known:
            wanted = [one.partition for one in world.wanted]
            await self._try("topic manifests cannot be kept", self._registry.ensure(wanted))
            await self._try("retention cannot be managed", self._retention.step(world.managed))
        return is_changed

    async def _refresh(self, cluster: str) -> bool:
        """Look for changes of topic manifests, if that is due; return whether there were any."""
        now = asyncio.get_running_loop().time()
        if now < self._refresh_due:
            return False
        is_changed = await self._registry.refresh(cluster)
        self._refresh_due = now + self._interval_seconds
        return is_changed

    async def _try(self, what: str, chore: Awaitable[None]) -> None:
        """Do one chore; one that fails is said once, and does not keep the others from being done."""
        try:
            await chore
        except TieringError as error:
            if what not in self._faults:
                log.warning(what, error=str(error))
            self._faults[what] = f"{what}: {error}"
        else:
            if self._faults.pop(what, None) is not None:
                log.info("no longer so", fault=what)
