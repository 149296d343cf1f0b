"""A broker of a storm: it tells when a trim is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.cluster_broker import ClusterBroker

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.replication import Replication
    from tieringd.model.local_log import LocalLog
    from tieringd.model.partition import Leadership


class StormBroker(ClusterBroker):
    """
    A broker; *before_trim* hears of each trim when it is asked for: broker, partition and offset.

    *on_allowed* hears of each that the broker has found to be under its own leader epoch.
    """

    def __init__(
        self,
        *arguments: Any,
        before_trim: Callable[[int, Replication, int], None],
        on_allowed: Callable[[int, Replication, int], None],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._before_trim = before_trim
        self._on_allowed = on_allowed
        self._asked_before = 0

    async def trim(
        self, leadership: Leadership, log: LocalLog, *, before_offset: int, needs_every_replica: bool = False
    ) -> int:
        """See `ClusterBroker.trim`."""
        partition = self._partitions[leadership.partition.topic_partition]
        self._before_trim(self._number, partition, before_offset)
        self._asked_before = before_offset
        return await super().trim(
            leadership, log, before_offset=before_offset, needs_every_replica=needs_every_replica
        )

    def _require_leadership(self, leadership: Leadership, needs_every_replica: bool) -> None:  # noqa: FBT001 - as the request has it
        super()._require_leadership(leadership, needs_every_replica)
        partition = self._partitions[leadership.partition.topic_partition]
        self._on_allowed(self._number, partition, self._asked_before)
