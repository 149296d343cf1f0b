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
    """A broker; *before_trim* hears of each trim when it is asked for: broker, partition and offset."""

    def __init__(
        self, *arguments: Any, before_trim: Callable[[int, Replication, int], None], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._before_trim = before_trim

    async def trim(
        self, leadership: Leadership, log: LocalLog, *, before_offset: int, needs_every_replica: bool = False
    ) -> int:
        """See `ClusterBroker.trim`."""
        partition = self._partitions[leadership.partition.topic_partition]
        self._before_trim(self._number, partition, before_offset)
        return await super().trim(
            leadership, log, before_offset=before_offset, needs_every_replica=needs_every_replica
        )
