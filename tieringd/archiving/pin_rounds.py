"""
The pins of all partitions, round by round: which of them need a plan, and what the plan follows from.

`Pinner` carries out the plans. Nearly all of ten thousand partitions have no pin and need none, so only those
are planned for which that may have changed. A partition that this broker leads is quiet after a plan with
nothing to do, and without any pin. What the plan followed from is then watched:

| what changes                                  | what ends the quiet                                    |
|-----------------------------------------------|--------------------------------------------------------|
| files, pins, offsets or settings              | the round has another observation                      |
| what is known to be durable                   | the archiver is awake, or `ChangeFeed` names it:       |
|                                               | its manifest changes only in its own steps             |
| the active segment comes near its deletion    | `Resting.due`: the plan's observation gives that time  |
| the archiver ends                             | `ChangeFeed` names it                                  |
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping

from tieringd.archiving.manifest_upkeep import FollowedManifests
from tieringd.archiving.observer import BrokerSnapshot, Observation
from tieringd.archiving.pinner import PIN_UNKNOWN_AFTER_SECONDS, PinFacts, Pinner
from tieringd.archiving.resting import ChangeFeed, Resting
from tieringd.model.manifest import PartitionManifest
from tieringd.model.partition import Leadership, TopicIdPartition
from tieringd.policies.lineage import archived_end
from tieringd.policies.pinning import plan_pins
from tieringd.policies.upload_plan import rescue_due_ms


class PinRounds:
    """Give the pinner the facts of each round. One task at a time calls `step`."""

    def __init__(
        self,
        pinner: Pinner,
        *,
        followed_manifests: FollowedManifests,
        manifest_of: Callable[[Leadership], PartitionManifest | None],
        archivers: Resting,
        changes: ChangeFeed,
        now_ms: Callable[[], int],
    ) -> None:
        """Take the collaborators; *archivers* says which are awake, *now_ms* is this host's clock."""
        self._pinner = pinner
        self._followed_manifests = followed_manifests
        self._manifest_of = manifest_of
        self._archivers = archivers
        self._changed: Callable[[], Collection[Leadership]] = tuple
        # Changes that no round reads would grow with each leadership that begins.
        if pinner.is_used:
            self._changed = changes.reader()
        self._now_ms = now_ms
        self._quiet = Resting()
        """The led partitions of the last round: those that rest here are quiet, the others are awake."""
        self._wanted: Mapping[Leadership, Observation] = {}
        """The observations of the last round."""
        self._unknown_since: dict[TopicIdPartition, float] = {}
        """Partitions whose durable offset is not known, each with the loop time since when."""

    async def step(self, snapshot: BrokerSnapshot, *, good_until: float) -> None:
        """
        Pin what is not known to be durable, whatever the state of the object store.

        Pins are released by the observations in *snapshot* until *good_until*, in loop time.
        """
        if not self._pinner.is_used:
            return
        found: list[tuple[TopicIdPartition, PinFacts]] = [
            (leadership.partition, facts)
            for leadership in self._to_plan(snapshot)
            if (facts := self._planned(leadership, snapshot.wanted[leadership], good_until)) is not None
        ]
        for one in (*snapshot.followed, *snapshot.held_back):
            manifest = self._followed_manifests.manifest(one.partition)
            durable_to = archived_end(manifest, one.log)
            gaps = manifest.gaps if manifest else ()
            found.append(
                (one.partition, PinFacts(one.log, one.pins, durable_to, gaps=gaps, good_until=good_until))
            )
        now = asyncio.get_running_loop().time()
        unknown = [partition for partition, facts in found if facts.next_offset is None]
        self._unknown_since = {one: self._unknown_since.get(one, now) for one in unknown}
        partitions = [
            facts
            for partition, facts in found
            if now - self._unknown_since.get(partition, -math.inf) >= PIN_UNKNOWN_AFTER_SECONDS
        ]
        is_complete = not snapshot.problems and len(partitions) == len(found)
        # Those of `partitions` are named twice, which does no harm.
        others = [*snapshot.unnamed, *(seen.log.partition for seen in snapshot.wanted.values())]
        await self._pinner.step(partitions, others=others, idle=snapshot.untiered, is_complete=is_complete)

    def _to_plan(self, snapshot: BrokerSnapshot) -> list[Leadership]:
        """Return the led partitions that are not quiet."""
        quiet, before, wanted = self._quiet, self._wanted, snapshot.wanted
        if wanted is not before:
            for leadership, seen in wanted.items():
                if before.get(leadership) is not seen:
                    quiet.wake(leadership)
            for gone in before.keys() - wanted.keys():
                quiet.forget(gone)
            self._wanted = wanted
        for leadership in (*self._changed(), *self._archivers.awake):
            if leadership in wanted:
                quiet.wake(leadership)
        return list(quiet.due(self._now_ms()))

    def _planned(self, leadership: Leadership, seen: Observation, good_until: float) -> PinFacts | None:
        """Return the facts of a led partition; None if it is quiet from now on."""
        manifest = self._manifest_of(leadership)
        due_ms = rescue_due_ms(seen.log, retention_ms=seen.topic.broker_retention_ms)
        is_expiring = self._now_ms() >= due_ms
        facts = PinFacts(
            seen.log,
            seen.pins,
            archived_end(manifest, seen.log),
            seen.bounds.log_end_offset if is_expiring else None,
            manifest.gaps if manifest else (),
            good_until,
        )
        if seen.pins or facts.next_offset is None or is_expiring:
            return facts
        if plan_pins(seen.log, (), next_offset=facts.next_offset, gaps=facts.gaps).make:
            return facts
        self._quiet.rest(leadership, until_ms=due_ms)
        return None
