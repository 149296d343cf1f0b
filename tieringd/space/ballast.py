"""
The ballast keeper: makes the ballast file while there is room, and lets it go when told to.

When is decided by `policies.disk_alert`, and how by `broker.ballast_file`. An operator's commands go
the same way, so a file that was let go by hand comes back only when the disk is all right with it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from tieringd.broker.ballast_file import BallastFile, find_ballast_path
from tieringd.errors import LocalFileError, TieringError
from tieringd.policies.disk_alert import BallastAction, DiskReading, has_room, judge_disk, plan_ballast
from tieringd.space.disk_monitor import Rounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.broker.disk_use import Filesystems
    from tieringd.metrics import Metrics
    from tieringd.policies.disk_alert import AlertSettings

log = structlog.get_logger(__name__)

INTERVAL_SECONDS: Final = 30.0
"""How often it is seen whether there is room again; a change of a disk's state is told at once."""


@dataclass(frozen=True, slots=True)
class BallastSettings:
    """What the ballast is to be, and when it goes."""

    size_bytes: int
    alerts: AlertSettings
    releases: bool
    """Whether it goes by itself when its disk is degraded."""


@dataclass(frozen=True, slots=True)
class BallastStatus:
    """What there is of the ballast."""

    path: str
    held_bytes: int
    size_bytes: int


class Ballast:
    """The ballast file beside one broker's log directories. One task at a time uses it."""

    def __init__(
        self,
        candidates: Sequence[str],
        *,
        log_dirs: Sequence[str],
        filesystems: Filesystems,
        settings: BallastSettings,
        metrics: Metrics,
    ) -> None:
        """Take the paths where it may be, the best one first."""
        self._candidates = tuple(candidates)
        self._log_dirs = tuple(log_dirs)
        self._filesystems = filesystems
        self._settings = settings
        self._metrics = metrics
        self._rounds = Rounds()
        self._fault = ""

    def set_settings(self, settings: BallastSettings) -> None:
        """Act by *settings* from the next round on."""
        self._settings = settings

    def hint(self) -> None:
        """Begin the next round now: a disk is not as it was."""
        self._rounds.hint()

    async def run(self, *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        """Look now, at once on a hint, and every interval, until cancelled."""
        self._metrics.health.loop_succeeded("ballast")
        await self._rounds.run(self.step, interval_seconds=interval_seconds)

    async def step(self) -> None:
        """Do one round; what fails is said once, and tried again in the next one."""
        try:
            await self._round()
        except TieringError as error:
            if str(error) != self._fault:
                log.error("ballast file is not as it should be", error=str(error))  # noqa: TRY400 its text is enough
            self._fault = str(error)
        else:
            self._fault = ""
            self._metrics.health.loop_succeeded("ballast")

    async def show(self) -> BallastStatus:
        """
        Return what there is.

        Raises:
            ConfigError: There is no place for it, or something else is in its place.
            LocalFileError: It cannot be looked at.
        """
        file = await self._file()
        return BallastStatus(file.path, await asyncio.to_thread(file.held_bytes), file.size_bytes)

    async def create(self) -> BallastStatus:
        """
        Make it now, if the disk would be all right with it.

        Raises:
            ConfigError: There is no place for it, or something else is in its place.
            LocalFileError: There is no room for it, or it cannot be written.
        """
        file = await self._file()
        held = await asyncio.to_thread(file.held_bytes)
        if not has_room(await self._reading(file), self._settings.alerts, file.size_bytes - held):
            raise LocalFileError(
                f"the ballast file {file.path} is not made: with {file.size_bytes} bytes more, "
                "its disk would be low on space",
                path=file.path,
                hint="Make room, or set ballast_file_size to less",
            )
        await self._grow(file)
        return await self.show()

    async def release(self) -> int:
        """
        Let it go now; return how many bytes that gives back.

        Raises:
            ConfigError: There is no place for it, or something else is in its place.
            LocalFileError: It cannot be deleted.
        """
        return await asyncio.to_thread((await self._file()).release)

    async def _round(self) -> None:
        # Before anything can fail: a ballast that cannot be made is missing as well.
        self._metrics.ballast.wanted_bytes.set(self._settings.size_bytes)
        file = await self._file()
        held = await asyncio.to_thread(file.held_bytes)
        reading = await self._reading(file)
        settings = self._settings
        action = plan_ballast(
            reading,
            settings.alerts,
            state=judge_disk(reading, settings.alerts).state,
            held_bytes=held,
            size_bytes=file.size_bytes,
            releases=settings.releases,
        )
        if action is BallastAction.RELEASE:
            freed = await asyncio.to_thread(file.release)
            log.warning("ballast file is let go: its disk is degraded", path=file.path, freed_bytes=freed)
            held = 0
        elif action is BallastAction.CREATE:
            held = await self._grow(file)
            log.info("ballast file is made", path=file.path, size_bytes=held)
        self._metrics.ballast.size_bytes.set(held)

    async def _grow(self, file: BallastFile) -> int:
        while (held := await asyncio.to_thread(file.grow)) < file.size_bytes:
            # Writing it may take long. Whoever cancels waits for one part of it only.
            self._metrics.ballast.size_bytes.set(held)
        return held

    async def _file(self) -> BallastFile:
        path = await asyncio.to_thread(find_ballast_path, self._candidates, self._log_dirs)
        return BallastFile(path, self._settings.size_bytes)

    async def _reading(self, file: BallastFile) -> DiskReading:
        """Return how full the ballast's disk is; the directory it is in may have to be made yet."""
        directory = next(parent for parent in Path(file.path).parents if parent.is_dir())
        look = await self._filesystems.look([f"{directory}"])
        for problem in look.problems.values():
            raise problem
        found = look.readings[0]
        return DiskReading(file.path, total_bytes=found.total_bytes, free_bytes=found.free_bytes)
