"""
Degraded mode: when the disk of any broker is nearly full, no broker accepts clients' writes.

Replication goes on: a broker with a full disk still has to follow. Each daemon publishes the state of its
disks and reads its peers' through a board in the bucket. One daemon acts for all: that of the degraded
broker with the lowest node id. It may not be able to, as beside a broker that its full disk has stopped. So
the daemons of the other degraded brokers see whether it does, and act themselves after a while, one after the
other. When no broker is known to be degraded, any daemon that finds producers
held back releases them (`space.producer_brake`).

The board in the bucket holds the disk state of each broker. A state counts while it is fresh: its own
timestamp is recent, or this daemon saw it change a short time ago. The second rule accepts a peer whose
clock is wrong. The first rule drops a peer that died long ago. A state that is not fresh is unknown.
A daemon whose own clock is wrong takes fresh states for old ones. So it lets no producers go before it has
watched a peer that was degraded for long enough.

While the bucket does not answer, this broker's own disks count, and what is still fresh of its peers. So the
gateway refuses writes, or takes them again, also then. Quotas stay as they are: no change can be recorded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog
from crc32c import crc32c

from tieringd.errors import CorruptDataError, ObjectNotFound, PreconditionFailed, TieringError
from tieringd.formats.disk_state import PublishedDiskState, decode_disk_state, encode_disk_state
from tieringd.formats.object_keys import (
    brokers_prefix,
    client_quotas_key,
    disk_state_key,
    parse_disk_state_key,
)
from tieringd.metrics import Metrics
from tieringd.model.disk_state import DiskState
from tieringd.policies.disk_alert import degraded_nodes
from tieringd.space.disk_monitor import Rounds
from tieringd.space.producer_brake import ProducerBrake
from tieringd.storage.base import ObjectInfo, ObjectStore
from tieringd.storage.listing import list_objects

log = structlog.get_logger(__name__)

REFRESH_SECONDS: Final = 60.0
"""An unchanged state is published again after this time."""
STALE_SECONDS: Final = 3 * REFRESH_SECONDS
"""A state that was not published for this time is unknown."""
_MS: Final = 1000

INTERVAL_SECONDS: Final = 10.0
"""How often the peers' states are read; a change of this broker's own disks starts a round at once."""

TURN_SECONDS: Final = 2 * INTERVAL_SECONDS
"""How long each degraded broker's daemon leaves it to the one before it to lower quotas."""


@dataclass(frozen=True, slots=True)
class BoardView:
    """One reading of the board."""

    states: Mapping[int, DiskState]
    """The state of each broker where it is known, this one included."""
    quotas_version: str | None
    """The version of the record of lowered quotas; None when there is none."""
    is_in_doubt: bool
    """Whether a peer whose state is unknown may still be degraded."""


@dataclass(frozen=True, slots=True)
class _Peer:
    version: str
    published: PublishedDiskState | None
    """None when it cannot be decoded."""
    seen_at: float
    """Time at which this daemon first saw this version, by its own clock."""
    has_changed: bool
    """Whether this daemon saw an earlier version, so that this one was new then."""


class DiskStateBoard:
    """The board of one cluster, for the daemon of one broker. One task at a time uses it."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        cluster: str,
        node_id: int,
        now_ms: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        """Take *now_ms*, the wall clock, and *now*, a clock in seconds that never goes back."""
        self.cluster = cluster
        self.node_id = node_id
        self._store = store
        self._now_ms = now_ms
        self._now = now
        self._own: DiskState | None = None
        self._own_at = 0.0
        self._peers: dict[int, _Peer] = {}

    async def publish(self, state: DiskState) -> None:
        """
        Publish the state of this broker's disks, if it changed or was not published for a while.

        Raises:
            StorageUnavailable: It is published in the next round.
        """
        if state is self._own and self._now() - self._own_at < REFRESH_SECONDS:
            return
        data = encode_disk_state(PublishedDiskState(self.cluster, self.node_id, state, self._now_ms()))
        await self._store.put(disk_state_key(self.cluster, self.node_id), data, crc32c=crc32c(data))
        self._own, self._own_at = state, self._now()

    async def read_board(self, own: DiskState | None) -> BoardView:
        """
        Return what is known of every broker; *own* is the state of this one.

        Raises:
            StorageUnavailable: No new state is known.
        """
        seen: dict[int, ObjectInfo] = {}
        quotas_version: str | None = None
        async for info in list_objects(self._store, brokers_prefix(self.cluster)):
            node_id = parse_disk_state_key(info.key)
            if node_id is not None and node_id != self.node_id:
                seen[node_id] = info
            if info.key == client_quotas_key(self.cluster):
                quotas_version = info.version
        for node_id, info in seen.items():
            await self._read(node_id, info)
        self._peers = {node_id: self._peers[node_id] for node_id in seen if node_id in self._peers}
        states = self.known_states(own)
        is_in_doubt = any(
            peer.published is not None
            and peer.published.state is DiskState.DEGRADED
            and node_id not in states
            and self._now() - peer.seen_at < STALE_SECONDS
            for node_id, peer in self._peers.items()
        )
        return BoardView(states, quotas_version, is_in_doubt)

    def known_states(self, own: DiskState | None) -> dict[int, DiskState]:
        """Return what is known of every broker without asking the bucket; *own* is the state of this one."""
        states = {
            node_id: peer.published.state
            for node_id, peer in self._peers.items()
            if peer.published is not None and self._is_fresh(peer, peer.published)
        }
        if own is not None:
            states[self.node_id] = own
        return states

    async def _read(self, node_id: int, info: ObjectInfo) -> None:
        known = self._peers.get(node_id)
        if known is not None and known.version == info.version:
            return
        published: PublishedDiskState | None = None
        try:
            data, read = await self._store.get(info.key)
            published = decode_disk_state(data)
        except ObjectNotFound:
            self._peers.pop(node_id, None)
            return
        except CorruptDataError as error:
            read = info
            log.error("disk state of a broker is damaged", error=str(error.located(info.key)))  # noqa: TRY400 its text is enough
        self._peers[node_id] = _Peer(read.version, published, self._now(), has_changed=known is not None)

    def _is_fresh(self, peer: _Peer, published: PublishedDiskState) -> bool:
        if peer.has_changed and self._now() - peer.seen_at < STALE_SECONDS:
            return True
        # A timestamp in the future is as little evidence as one in the past.
        return abs(self._now_ms() - published.published_at_ms) < STALE_SECONDS * _MS


@dataclass(frozen=True, slots=True)
class DegradedSettings:
    """What to do when a disk is degraded."""

    holds_back: bool
    """Whether producers are held back; False only alerts."""
    rate: int
    """Bytes per second for each producer on each broker."""
    refuses: bool = False
    """Whether the gateway refuses writes meanwhile."""


@dataclass(frozen=True, slots=True)
class DegradedParts:
    """The parts that depend on the cluster's id and this broker's node id."""

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
        """Take *connect*, which is tried again in each round until the broker answers."""
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
        """Say whether the gateway has to refuse clients' writes: a broker is known to be degraded."""
        return bool(self._degraded) and self._settings.refuses

    def set_settings(self, settings: DegradedSettings) -> None:
        """Use *settings* from the next round on."""
        self._settings = settings
        self.hint()

    def hint(self) -> None:
        """Start the next round now: the state of this broker's disks has changed."""
        self._rounds.hint()

    async def run(self, *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        """Do a round now, at once on a hint, and every interval, until cancelled."""
        self._metrics.health.loop_succeeded("degraded_mode")
        await self._rounds.run(self.step, interval_seconds=interval_seconds)

    async def step(self) -> None:
        """Do one round; a failure is logged once, and the next round tries again."""
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
            # A daemon that does not know its own disks publishes nothing, and changes nothing.
            return
        if self._parts is None:
            self._parts = await self._connect()
        board, brake = self._parts.board, self._parts.brake
        try:
            await board.publish(own)
            view = await board.read_board(own)
        except TieringError:
            # A disk fills up while the store is away. The gateway's refusal needs no record in the bucket.
            self._tell(degraded_nodes(board.known_states(own)))
            raise
        self._tell(degraded_nodes(view.states))
        try:
            await brake.refresh(view.quotas_version)
            if not self._degraded:
                if not view.is_in_doubt:
                    await brake.let_go()
            elif board.node_id in self._degraded:
                await self._act(brake, board.node_id)
        finally:
            self._metrics.producers_held_back.set(brake.is_on)

    async def _act(self, brake: ProducerBrake, node_id: int) -> None:
        """Do what the settings say while this broker is degraded, in its turn among the degraded ones."""
        turn = self._degraded.index(node_id)
        if self._settings.holds_back:
            await brake.hold_back(self._settings.rate, after_seconds=turn * TURN_SECONDS)
        elif brake.holder == node_id or (turn == 0 and brake.holder not in self._degraded):
            # Settings may differ. Quotas that another degraded broker's daemon has lowered stay lowered.
            await brake.let_go()

    def _tell(self, degraded: tuple[int, ...]) -> None:
        self._metrics.degraded_brokers.set(len(degraded))
        if degraded == self._degraded:
            return
        if degraded:
            log.error("cluster is degraded: brokers are out of disk space", brokers=list(degraded))
        else:
            log.info("cluster is not degraded any more")
        self._degraded = degraded
