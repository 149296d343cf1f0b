"""Ask a broker for the bounds of logs as the daemon does, with the leader epochs that it just reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tieringd.broker.base import Broker
    from tieringd.errors import TieringError
    from tieringd.model.local_log import LocalLog
    from tieringd.model.partition import LogBounds, TopicPartition


async def bounds_of(broker: Broker, *logs: LocalLog) -> Mapping[TopicPartition, LogBounds | TieringError]:
    """Return the bounds of each log. A log that the broker does not know is asked for with epoch 0."""
    known = (await broker.replicas([log.partition for log in logs])).replicas
    names = [log.partition.topic_partition for log in logs]
    epochs = {name: known[name].leader_epoch if name in known else 0 for name in names}
    return await broker.log_bounds(logs, leader_epochs=epochs)
