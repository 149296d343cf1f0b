"""
The board in the bucket on which each daemon says how its broker's disks are, and reads its peers.

A state counts while it is fresh: published a short time ago by its own timestamp, or seen to
change a short time ago by our own clock. The second keeps a peer whose clock is wrong from being
ignored, and the first one that died long ago from being believed. What is not fresh is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog
from crc32c import crc32c

from tieringd.errors import CorruptDataError, ObjectNotFound
from tieringd.formats.disk_state import PublishedDiskState, decode_disk_state, encode_disk_state
from tieringd.formats.object_keys import (
    brokers_prefix,
    client_quotas_key,
    disk_state_key,
    parse_disk_state_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tieringd.model.disk_state import DiskState
    from tieringd.storage.base import ObjectInfo, ObjectStore

log = structlog.get_logger(__name__)

REFRESH_SECONDS: Final = 60.0
"""A state that does not change is published again after this time."""
STALE_SECONDS: Final = 3 * REFRESH_SECONDS
"""A state that was not published again for this time is unknown."""
_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class BoardView:
    """One look at the board."""

    states: Mapping[int, DiskState]
    """Of each broker whose state is known, our own included."""
    quotas_version: str | None
    """The version of the record of lowered quotas; None when there is none."""


@dataclass(frozen=True, slots=True)
class _Peer:
    version: str
    published: PublishedDiskState | None
    """None when it cannot be read."""
    changed_at: float | None = None
    """When we saw it change, by our own clock; None while we know only the first version."""


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
        """Take the wall clock in milliseconds, and a clock in seconds that never goes back."""
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
        Say how our disks are, if that is new or was not said for a while.

        Raises:
            StorageUnavailable: It is published in the next round.
        """
        if state is self._own and self._now() - self._own_at < REFRESH_SECONDS:
            return
        data = encode_disk_state(PublishedDiskState(self.cluster, self.node_id, state, self._now_ms()))
        await self._store.put(disk_state_key(self.cluster, self.node_id), data, crc32c=crc32c(data))
        self._own, self._own_at = state, self._now()

    async def look(self, own: DiskState | None) -> BoardView:
        """
        Return what is known now of every broker; *own* is what we know of ours.

        Raises:
            StorageUnavailable: Nothing is known anew.
        """
        seen: dict[int, ObjectInfo] = {}
        quotas_version: str | None = None
        start_after: str | None = None
        while True:
            page = await self._store.list_page(brokers_prefix(self.cluster), start_after=start_after)
            for info in page.objects:
                node_id = parse_disk_state_key(info.key)
                if node_id is not None and node_id != self.node_id:
                    seen[node_id] = info
                if info.key == client_quotas_key(self.cluster):
                    quotas_version = info.version
            start_after = page.next_start_after
            if start_after is None:
                break
        for node_id, info in seen.items():
            await self._read(node_id, info)
        self._peers = {node_id: self._peers[node_id] for node_id in seen if node_id in self._peers}
        states = {
            node_id: peer.published.state
            for node_id, peer in self._peers.items()
            if peer.published is not None and self._is_fresh(peer, peer.published)
        }
        if own is not None:
            states[self.node_id] = own
        return BoardView(states, quotas_version)

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
        peer = _Peer(read.version, published)
        self._peers[node_id] = peer if known is None else replace(peer, changed_at=self._now())

    def _is_fresh(self, peer: _Peer, published: PublishedDiskState) -> bool:
        if peer.changed_at is not None and self._now() - peer.changed_at < STALE_SECONDS:
            return True
        # A timestamp from the future says as little as one from the past.
        return abs(self._now_ms() - published.published_at_ms) < STALE_SECONDS * _MS
