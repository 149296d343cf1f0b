"""
The records that share groups (KIP-932) of the cluster still need, for the trims of all partitions.

A share group reads from the broker alone, which skips what was trimmed: a group that lags behind a trim loses
records, and no client is told. `ShareGroups.hold` says what a trim has to leave.

The brokers are asked only when something is to be trimmed, and at most once in `FRESH_SECONDS`. When they
cannot tell, everything is held, and they are asked again after `FAILED_PAUSE_SECONDS`: the archive has the
records, but a share group cannot read them there.
Each hold ends `hold_ms` after the upload of a segment, so no group keeps a disk full for ever.

The needs of a group are forgotten when its coordinator has said twice that the group needs nothing there,
`FORGET_AFTER_SECONDS` apart. While the coordination moves, no broker can say so.

A daemon that starts in such a moment would know of no group to ask for by its name. So the state directory
has a note of the groups and their partitions (`GroupsNote`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

import structlog

from tieringd.broker.base import Broker
from tieringd.errors import BrokerDenied, BrokerUnavailable, CorruptDataError
from tieringd.formats.json_document import decode_document
from tieringd.metrics import Metrics
from tieringd.model.partition import TopicPartition
from tieringd.policies.trim_target import ShareGroupHold
from tieringd.storage.known_roots import write_note

log = structlog.get_logger(__name__)

FRESH_SECONDS = 5.0
FAILED_PAUSE_SECONDS = 30.0
"""A broker that does not answer takes a request timeout each time, and the steps of archivers wait for it."""
FORGET_AFTER_SECONDS = 600.0

NOTE_VERSION: Final = 1
_NOT_BEGUN: Final = -1

_Partitions: TypeAlias = Mapping[str, Mapping[str, list[int]]]
"""The partitions that groups need: numbers by group and topic."""


class GroupsNote:
    """The note of the groups that are known, in the file at *path*. Calls block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> _Partitions:
        """Return the partitions that groups needed; none where the note is missing or cannot be read."""
        try:
            data = self._path.read_bytes()
            return decode_document(
                data,
                lambda document: {
                    str(group): {
                        str(topic): [int(number) for number in numbers] for topic, numbers in topics.items()
                    }
                    for group, topics in document["groups"].items()
                },
                kind="note of share groups",
                versions=(NOTE_VERSION,),
            )
        except FileNotFoundError:
            return {}
        except (OSError, CorruptDataError) as error:
            log.warning("note of share groups is not used", path=str(self._path), error=str(error))
            return {}

    def write(self, groups: _Partitions) -> None:
        """Write the note; without it, only the next start knows less."""
        try:
            write_note(self._path, {"version": NOTE_VERSION, "groups": groups}, replaces=True)
        except OSError as error:
            log.warning("share groups cannot be noted", path=str(self._path), error=str(error))


@dataclass(frozen=True, slots=True)
class _Need:
    start: int
    """The first offset that the group needs; negative where it has not begun."""
    absent_since: float = math.inf
    """When the group was first said not to need the partition any more; infinite while it does."""


class ShareGroups:
    """
    The share groups of the cluster, as of a moment ago. Shared by the archivers of one daemon.

    It belongs to the event loop.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        metrics: Metrics,
        steady_ms: Callable[[], int],
        hold_ms: int,
        note: GroupsNote | None = None,
    ) -> None:
        """
        Take the collaborators. Without *note* nothing is known of the time before this process.

        *hold_ms* is how long after its upload a segment is held at most; 0 holds nothing.
        """
        self._unknown = metrics.health.share_groups_unknown
        self._broker = broker
        self._steady_ms = steady_ms
        self.hold_ms = hold_ms
        self._needs: dict[TopicPartition, dict[str, _Need]] = {}
        """By partition and group."""
        self._note = note
        self._is_note_read = False
        self._noted: _Partitions | None = None
        """The content of the note; None until the note is read, and during a write."""
        self._asked_at = -math.inf
        self._fault = ""
        self._asking = asyncio.Lock()

    async def hold(self, partition: TopicPartition, *, now_ms: int) -> ShareGroupHold | None:
        """
        Return what share groups still need of *partition*; None where they need nothing.

        Args:
            partition: A partition that this broker leads.
            now_ms: The time that ages count to.
        """
        if not self.hold_ms:
            if self._fault:
                # No trim waits for the brokers any more. They are asked first if that is changed back.
                self._fault, self._asked_at = "", -math.inf
                self._unknown.set(0)
            return None
        called_at = self._now()
        async with self._asking:
            # An answer that took long is no reason to ask again for each partition that waits for it.
            if called_at - self._asked_at >= (FAILED_PAUSE_SECONDS if self._fault else FRESH_SECONDS):
                await self._ask()
        kept_from_ms = now_ms - self.hold_ms
        if self._fault:
            because = f"share groups may need it, and their offsets are not known: {self._fault}"
            return ShareGroupHold(0, because, kept_from_ms)
        starts = {group: need.start for group, need in self._needs.get(partition, {}).items()}
        if not starts:
            return None
        group = min(starts, key=lambda name: (starts[name], name))
        begins = f"needs offset {starts[group]} and later" if starts[group] >= 0 else "has not begun to read"
        return ShareGroupHold(max(0, starts[group]), f"share group {group} {begins}", kept_from_ms)

    async def _ask(self) -> None:
        if self._note is not None and not self._is_note_read:
            self._recall(await asyncio.to_thread(self._note.read))
        asked_at = self._now()
        known = {group for needs in self._needs.values() for group in needs}
        try:
            starts = await self._broker.share_group_starts(known=known)
        except (BrokerUnavailable, BrokerDenied) as error:
            if self._fault != str(error):
                log.warning("offsets of share groups are not known", error=str(error))
            self._fault = str(error)
            self._unknown.set(1)
            self._asked_at = self._now()
        else:
            if self._fault:
                log.info("offsets of share groups are known again", groups=len(starts))
            self._fault = ""
            self._unknown.set(0)
            self._take(starts, asked_at)
            self._asked_at = asked_at
            await self._write_down()

    def _recall(self, noted: _Partitions) -> None:
        """Hold what groups needed before this process began, until the brokers tell of them."""
        self._is_note_read, self._noted = True, noted
        for group, topics in noted.items():
            for topic, numbers in topics.items():
                for number in numbers:
                    self._needs.setdefault(TopicPartition(topic, number), {})[group] = _Need(_NOT_BEGUN)

    async def _write_down(self) -> None:
        """Note the groups and their partitions, if they have changed."""
        groups: dict[str, dict[str, list[int]]] = {}
        for partition, needs in sorted(self._needs.items()):
            for group in needs:
                groups.setdefault(group, {}).setdefault(partition.topic, []).append(partition.partition)
        if self._note is None or groups == self._noted:
            return
        # This may be cancelled while the thread goes on. The next time writes again then.
        self._noted = None
        await asyncio.to_thread(self._note.write, groups)
        self._noted = groups

    def _take(self, starts: Mapping[str, Mapping[TopicPartition, int]], asked_at: float) -> None:
        """Use what was asked for at *asked_at*, and keep for a while what is not needed any more."""
        needs: dict[TopicPartition, dict[str, _Need]] = {}
        for group, partitions in starts.items():
            for partition, start in partitions.items():
                needs.setdefault(partition, {})[group] = _Need(start)
        now = self._now()
        for partition, before in self._needs.items():
            for group, need in before.items():
                # The earlier answer counts from when it had come, and this one from when it was asked for.
                if asked_at - need.absent_since < FORGET_AFTER_SECONDS:
                    absent = replace(need, absent_since=min(need.absent_since, now))
                    needs.setdefault(partition, {}).setdefault(group, absent)
        self._needs = needs

    def _now(self) -> float:
        return self._steady_ms() / 1000
