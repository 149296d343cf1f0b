"""
Degraded mode: when the disk of any broker is nearly full, no broker takes clients' writes.

Replication goes on: a broker that is full still has to follow. Each daemon publishes how its
disks are and reads its peers (`space.disk_state_board`); one acts for all, the one of the
degraded broker with the lowest node id. When no broker is known to be degraded, any daemon that
finds producers held back lets them go (`space.producer_brake`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from tieringd.errors import PreconditionFailed, TieringError
from tieringd.policies.degraded import degraded_nodes
from tieringd.space.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tieringd.metrics import Metrics
    from tieringd.model.disk_state import DiskState
    from tieringd.space.disk_state_board import DiskStateBoard
    from tieringd.space.producer_brake import ProducerBrake

log = structlog.get_logger(__name__)

INTERVAL_SECONDS: Final = 10.0
"""How often peers are looked at; a change of our own disks is told at once."""


@dataclass(frozen=True, slots=True)
class DegradedSettings:
    """What to do about a degraded disk."""

    holds_back: bool
    """False only alerts."""
    rate: int
    """Bytes a second for each producer on each broker."""
    refuses: bool = False
    """Whether the gateway takes no writes meanwhile."""


@dataclass(frozen=True, slots=True)
class DegradedParts:
    """What needs to know the cluster, and which broker of it is beside us."""

    board: DiskStateBoard
    brake: ProducerBrake


class DegradedMode:
    """Run degraded mode for one broker's daemon."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[DegradedParts]],
        *,
        own_state: Callable[[], DiskState | None],
        settings: DegradedSettings,
        metrics: Metrics,
    ) -> None:
        """Take how to *connect*, which is tried again until the broker answers."""
        self._connect = connect
        self._own_state = own_state
        self._settings = settings
        self._metrics = metrics
        self._parts: DegradedParts | None = None
        self._rounds = Rounds()
        self._degraded: tuple[int, ...] = ()
        self._fault = ""

    @property
    def is_refusing(self) -> bool:
        """Say whether clients' writes are to be refused where they pass: a broker is known to be degraded."""
        return bool(self._degraded) and self._settings.refuses

    def set_settings(self, settings: DegradedSettings) -> None:
        """Act by *settings* from the next round on."""
        self._settings = settings
        self.hint()

    def hint(self) -> None:
        """Begin the next round now: our own disks are not as they were."""
        self._rounds.hint()

    async def run(self, *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        """Look now, at once on a hint, and every interval, until cancelled."""
        self._metrics.health.loop_succeeded("degraded_mode")
        await self._rounds.run(self.step, interval_seconds=interval_seconds)

    async def step(self) -> None:
        """Do one round; what fails is said once, and tried again in the next one."""
        try:
            await self._round()
        except PreconditionFailed:
            log.info("another daemon acts on producers' quotas; looking again in the next round")
        except TieringError as error:
            if str(error) != self._fault:
                log.error("degraded mode cannot act", error=str(error))  # noqa: TRY400 its text is enough
            self._fault = str(error)
        else:
            self._fault = ""
            self._metrics.health.loop_succeeded("degraded_mode")

    async def _round(self) -> None:
        own = self._own_state()
        if own is None:
            # Whoever does not know about its own disks says nothing, and leaves all as it is.
            return
        if self._parts is None:
            self._parts = await self._connect()
        board, brake = self._parts.board, self._parts.brake
        await board.publish(own)
        view = await board.look(own)
        self._tell(degraded_nodes(view.states))
        try:
            await brake.refresh(view.quotas_version)
            if not self._degraded:
                await brake.let_go()
            elif self._degraded[0] == board.node_id:
                await (brake.hold_back(self._settings.rate) if self._settings.holds_back else brake.let_go())
        finally:
            self._metrics.producers_held_back.set(brake.is_on)

    def _tell(self, degraded: tuple[int, ...]) -> None:
        self._metrics.degraded_brokers.set(len(degraded))
        if degraded == self._degraded:
            return
        if degraded:
            log.error("cluster is degraded: brokers are out of disk space", brokers=list(degraded))
        else:
            log.info("cluster is not degraded any more")
        self._degraded = degraded
