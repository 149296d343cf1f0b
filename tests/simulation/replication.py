"""
Leaders, followers and their progress: the part of Kafka whose effects a daemon sees.

An election is known at once to the broker that is elected, and to the others when they hear of
it: until then a deposed leader goes on as if it led, but what it appends is never replicated.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from tieringd.formats.record_batch import parse_header

if TYPE_CHECKING:
    from tests.simulation.replica import Replica
    from tieringd.model.partition import LogBounds, TopicPartition


class Replication:
    """One partition on all brokers of the cluster: replica *n* is on broker *n*."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.leader = 0
        self.leader_epoch = 0
        self.leaders = {0: 0}
        """Which broker each leader epoch belongs to."""
        self.heard = dict.fromkeys(range(len(replicas)), (0, 0))
        """What each broker believes: the leader and its epoch."""
        self.in_sync = set(range(len(replicas)))
        self.stable_to: defaultdict[int, int] = defaultdict(int)
        """Up to where each epoch's leader ever said that its log was stable."""
        self.let_go: set[tuple[int, bytes]] = set()
        """Offset and batch of each record that users may have deleted."""
        self.deleted: set[tuple[int, bytes]] = set()
        """Those whose deletion is recorded: the user has the answer. They never come back."""
        self._requested: list[tuple[int, int]] = []
        """Up to which offset users have asked for deletions, and under which leader epoch."""
        self._fetched: dict[int, int] = {}

    @property
    def name(self) -> TopicPartition:
        """Return the partition's name."""
        return self.replicas[0].name

    @property
    def log(self) -> Replica:
        """Return the leader's replica: what it holds is what the partition holds."""
        return self.replicas[self.leader]

    def believes_to_lead(self, broker: int) -> bool:
        """Say whether *broker* has not heard that another leads."""
        return self.heard[broker][0] == broker

    def bounds_at(self, broker: int) -> LogBounds:
        """Return what *broker*, which believes to lead, says of its log."""
        bounds = self.replicas[broker].bounds()
        for leader_epoch, leader in self.leaders.items():
            if leader == broker:
                self.stable_to[leader_epoch] = max(self.stable_to[leader_epoch], bounds.last_stable_offset)
        return bounds

    def advance(self) -> None:
        """Move the high watermark to what all in-sync replicas hold."""
        held = [self._fetched.get(one, 0) for one in self.in_sync - {self.leader}]
        assert self.log.high_watermark is not None
        self.log.high_watermark = max(self.log.high_watermark, min([self.log.next_offset, *held]))

    def fetch(self, follower: int, count: int = 1000) -> None:
        """Let a follower that knows its leader take up to *count* batches."""
        if follower == self.leader or self.heard[follower] != (self.leader, self.leader_epoch):
            return
        replica = self.replicas[follower]
        replica.fetch(self.log, count)
        self._fetched[follower] = replica.next_offset
        if replica.next_offset == self.log.next_offset:
            self.in_sync.add(follower)
        self.advance()

    def delete_records(self, before_offset: int) -> set[tuple[int, bytes]]:
        """Delete the leader's records before an offset, for a user; return what goes in both tiers."""
        log = self.log
        gone = {
            (offset, one.data)
            for one in log.batches
            for offset in range(one.base_offset, min(one.next_offset, before_offset))
        }
        self.let_go |= gone
        self.allow_deletion(before_offset)
        log.log_start_offset = max(log.log_start_offset, before_offset)
        log.delete_below_start(is_requested=False)
        return gone

    def allow_deletion(self, before_offset: int) -> None:
        """
        Note that a user has asked for a deletion under the present leader epoch.

        The archive may hold what the leader never had, or has no more: its log may begin later, or the
        archive has not been cut back to it yet.
        """
        self._requested.append((before_offset, self.leader_epoch))

    def may_be_deleted(self, offset: int, data: bytes) -> bool:
        """Say whether users have asked for the deletion of an archived record, in the batch *data*."""
        leader_epoch = parse_header(data, 0).leader_epoch
        return (offset, data) in self.let_go or any(
            offset < before_offset and leader_epoch <= requested_under
            for before_offset, requested_under in self._requested
        )

    def let_go_offsets(self) -> set[int]:
        """Return the offsets at which users may have deleted what the leader's log has or had."""
        return {
            offset
            for one in self.log.batches
            for offset in range(one.base_offset, one.next_offset)
            if (offset, one.data) in self.let_go
        }

    def drop_out(self, follower: int) -> None:
        """Take a follower out of the in-sync replicas: the leader goes on without it."""
        self.in_sync.discard(follower)
        self.advance()

    def elect(self, broker: int) -> None:
        """Let *broker* lead: uncleanly, when it is not in sync."""
        if broker not in self.in_sync:
            self.in_sync = {broker}
        self.leader, self.leader_epoch = broker, self.leader_epoch + 1
        self.leaders[self.leader_epoch] = broker
        self._fetched.clear()
        self.log.begin_epoch(self.leader_epoch)
        self.hear(broker)
        self.advance()

    def hear(self, broker: int) -> None:
        """Let a broker learn the leader."""
        self.heard[broker] = (self.leader, self.leader_epoch)
