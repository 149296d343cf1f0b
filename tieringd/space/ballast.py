"""
The ballast keeper: creates the ballast file while there is room, and deletes it when needed.

`policies.disk_alert` decides when, and `broker.ballast_file` does it. An operator's commands use the same
code, so a file that was released by hand comes back only when the disk is all right with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from tieringd.broker.ballast_file import BallastFile, find_ballast_path
from tieringd.broker.disk_use import Filesystems
from tieringd.errors import LocalFileError, TieringError
from tieringd.metrics import Metrics
from tieringd.policies.disk_alert import (
    AlertSettings,
    BallastAction,
    DiskReading,
    has_room,
    judge_disk,
    plan_ballast,
)
from tieringd.space.disk_monitor import Rounds

log = structlog.get_logger(__name__)

INTERVAL_SECONDS: Final = 30.0
"""How often to check whether there is room again; a change of a disk's state starts a round at once."""


@dataclass(frozen=True, slots=True)
class BallastSettings:
    """The size of the ballast file, and when it is released."""

    size_bytes: int
    alerts: AlertSettings
    releases: bool
    """Whether it is released automatically when its disk is degraded."""


@dataclass(frozen=True, slots=True)
class BallastStatus:
    """The state of the ballast file."""

    path: str
    held_bytes: int
    size_bytes: int


class Ballast:
    """The ballast file for one broker's log directories. One task at a time uses it."""

    def __init__(
        self,
        candidates: Sequence[str],
        *,
        log_dirs: Sequence[str],
        filesystems: Filesystems,
        settings: BallastSettings,
        metrics: Metrics,
        grow: Callable[[BallastFile], int] = BallastFile.grow,
    ) -> None:
        """Take the possible paths of the file, the best one first. *grow* does one piece of its growth."""
        self._candidates = tuple(candidates)
        self._log_dirs = tuple(log_dirs)
        self._filesystems = filesystems
        self._settings = settings
        self._metrics = metrics
        self._grow_file = grow
        self._rounds = Rounds()
        self._fault = ""

    def set_settings(self, settings: BallastSettings) -> None:
        """Use *settings* from the next round on."""
        self._settings = settings

    def hint(self) -> None:
        """Start the next round now: the state of a disk has changed."""
        self._rounds.hint()

    async def run(self, *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        """Do a round now, at once on a hint, and every interval, until cancelled."""
        self._metrics.health.loop_succeeded("ballast")
        await self._rounds.run(self.step, interval_seconds=interval_seconds)

    async def step(self) -> None:
        """Do one round; a failure is logged once, and the next round tries again."""
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
        Return the state of the ballast file.

        Raises:
            ConfigError: There is no place for it, or its place is taken by something else.
            LocalFileError: It cannot be inspected.
        """
        file = await self._file()
        return BallastStatus(file.path, await asyncio.to_thread(file.held_bytes), file.size_bytes)

    async def create(self) -> BallastStatus:
        """
        Create the file now, if the disk would be all right with it.

        Raises:
            ConfigError: There is no place for it, or its place is taken by something else.
            LocalFileError: There is no room for it, or it cannot be written.
        """
        file = await self._file()
        held = await asyncio.to_thread(file.held_bytes)
        await self._require_room(file, held)
        await self._grow(file)
        return await self.show()

    async def release(self) -> int:
        """
        Delete the file now; return how many bytes that frees.

        Raises:
            ConfigError: There is no place for it, or its place is taken by something else.
            LocalFileError: It cannot be deleted.
        """
        return await asyncio.to_thread((await self._file()).release)

    async def _round(self) -> None:
        # Set before anything can fail, so that a ballast that cannot be created shows as missing as well.
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
        """
        Let the file have its whole size, and return that.

        Raises:
            LocalFileError: The disk has no room for all of it any more. What is written stays, as a smaller
                ballast.
        """
        while (held := await asyncio.to_thread(self._grow_file, file)) < file.size_bytes:
            # Writing the whole file may take long. In pieces, a cancellation waits for one piece only.
            self._metrics.ballast.size_bytes.set(held)
            # Producers write meanwhile.
            await self._require_room(file, held)
        return held

    async def _require_room(self, file: BallastFile, held: int) -> None:
        missing_bytes = file.size_bytes - held
        if not has_room(await self._reading(file), self._settings.alerts, missing_bytes):
            raise LocalFileError(
                f"the ballast file {file.path} does not get its whole size: with {missing_bytes} bytes more, "
                "its disk would be low on space",
                path=file.path,
                hint="Free some disk space, or set a smaller ballast_file_size",
            )

    async def _file(self) -> BallastFile:
        path = await asyncio.to_thread(find_ballast_path, self._candidates, self._log_dirs)
        return BallastFile(path, self._settings.size_bytes)

    async def _reading(self, file: BallastFile) -> DiskReading:
        """Return how full the ballast's disk is; the file's directory may not exist yet."""
        directory = next(parent for parent in Path(file.path).parents if parent.is_dir())
        measurement = await self._filesystems.measure([f"{directory}"])
        for problem in measurement.problems.values():
            raise problem
        found = measurement.readings[0]
        return DiskReading(file.path, total_bytes=found.total_bytes, free_bytes=found.free_bytes)
