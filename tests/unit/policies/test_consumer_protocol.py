"""The newer group protocol against a model of its members: what each reads, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.support.examples import examples
from tieringd.model.consumer_group import (
    CommittedOffset,
    ConsumerGroup,
    GroupMember,
    GroupState,
    GroupTopic,
    SubscribedTopic,
)
from tieringd.policies.consumer_protocol import (
    JOINS,
    LEAVES,
    ConsumerHeartbeat,
    HeartbeatReply,
    consumer_heartbeat,
    is_settled,
)
from tieringd.policies.group_deadlines import Sightings, due_now
from tieringd.policies.group_membership import GroupError, GroupLimits, JoinRequest, join, without_members
from tieringd.policies.group_offsets import CommitRequest, commit

LIMITS = GroupLimits(members=4)
TOPICS = {"orders": SubscribedTopic("0a" * 16, 5), "returns": SubscribedTopic("0b" * 16, 2)}
ALL = {(one.topic_id, number) for one in TOPICS.values() for number in range(one.partition_count)}


def asking(member_id, epoch, *, subscribed=None, owned=None, assignor=None, instance_id=None, endpoint="one"):
    """Return a heartbeat."""
    member = GroupMember(member_id, instance_id, "client", "10.0.0.1", endpoint, 45_000, 60_000)
    return ConsumerHeartbeat(member, epoch, subscribed, assignor, None if owned is None else frozenset(owned))


def beat(group, request, topics=TOPICS, *, is_again=False):
    """Make a step."""
    return consumer_heartbeat(group, request, topics.get, LIMITS, now_ms=5, is_again=is_again)


@dataclass
class Reader:
    """A member, and what it reads."""

    member_id: str
    epoch: int = JOINS
    owned: set = field(default_factory=set)
    is_out: bool = False
    """Whether it was told that it is no member."""


class NewerRules(RuleBasedStateMachine):
    """One group of the newer protocol."""

    readers = Bundle("readers")

    def __init__(self):
        super().__init__()
        self.group = ConsumerGroup("group")
        self.topics = dict(TOPICS)
        self.count = 0
        self.members = {}
        self.seen_epoch = 0

    def make(self, request):
        """Make a step twice: the first answer may have been lost."""
        step = beat(self.group, request, self.topics)
        if step.reply.error is GroupError.NONE and request.epoch >= 0:
            again = beat(step.group, request, self.topics, is_again=True)
            if again.reply.error is GroupError.NONE:
                assert again.group == step.group, "a step that is made again changes nothing more"
                consumer = step.group.members[request.member.member_id].consumer
                assert again.reply == HeartbeatReply(GroupError.NONE, consumer.epoch, consumer.assigned)
        self.group = step.group
        return step.reply

    @rule(
        target=readers,
        subscribed=st.sampled_from([("orders",), ("orders", "returns"), ("orders", "nothing")]),
        assignor=st.sampled_from([None, "uniform", "range"]),
        endpoint=st.sampled_from(["one", "two"]),
    )
    def come(self, subscribed, assignor, endpoint):
        """Let a member join."""
        self.count += 1
        reader = Reader(f"reader-{self.count}")
        request = asking(
            reader.member_id, JOINS, subscribed=subscribed, owned=(), assignor=assignor, endpoint=endpoint
        )
        is_full = len(self.group.members) >= LIMITS.members
        reply = self.make(request)
        assert reply.error is (GroupError.GROUP_MAX_SIZE_REACHED if is_full else GroupError.NONE)
        reader.is_out = is_full
        self.members[reader.member_id] = reader
        self.follow(reader, reply)
        return reader

    def follow(self, reader, reply):
        """Do what a reply says: partitions that are not in it are given up, new ones are read."""
        if reply.error is GroupError.NONE:
            reader.epoch = reply.epoch
            if reply.assigned is not None:
                reader.owned = set(reply.assigned)
        else:
            reader.is_out, reader.owned = True, set()

    @rule(reader=readers, tells=st.booleans(), is_lost=st.booleans())
    def speak(self, reader, tells, is_lost):
        """Let a member send a heartbeat, whose answer may be lost."""
        if reader.is_out:
            return
        reply = self.make(asking(reader.member_id, reader.epoch, owned=reader.owned if tells else None))
        if reader.member_id not in self.group.members:
            assert reply.error is GroupError.UNKNOWN_MEMBER_ID
        if not is_lost or reply.error is not GroupError.NONE:
            self.follow(reader, reply)

    @rule(reader=readers, subscribed=st.sampled_from([("orders",), ("orders", "returns")]))
    def change(self, reader, subscribed):
        """Let a member subscribe to other topics."""
        if not reader.is_out:
            request = asking(reader.member_id, reader.epoch, subscribed=subscribed, owned=reader.owned)
            self.follow(reader, self.make(request))

    @rule(reader=consumes(readers))
    def go(self, reader):
        """Let a member leave."""
        if not reader.is_out:
            self.make(asking(reader.member_id, LEAVES))
            reader.is_out, reader.owned = True, set()

    @rule(reader=readers)
    def expire(self, reader):
        """Remove a silent member. It reads on until it hears of it, and its commits are refused."""
        self.group = without_members(self.group, {reader.member_id}, now_ms=5)

    @rule(reader=readers)
    def commit(self, reader):
        """Let a member commit: only the epoch that it has reached counts."""
        one = CommittedOffset(1, 0, "", 0)
        topic = GroupTopic("orders", "A" * 22)
        asked = CommitRequest(reader.member_id, None, reader.epoch, "one", {topic: {0: one}})
        if reader.epoch < 0 or not self.group.members:
            return
        error = commit(self.group, asked).reply
        known = self.group.members.get(reader.member_id)
        assert (error is GroupError.NONE) == (known is not None and known.consumer.epoch == reader.epoch)

    @rule()
    def grow(self):
        """Give a topic one more partition."""
        known = self.topics["orders"]
        if known.partition_count < 8:
            self.topics["orders"] = replace(known, partition_count=known.partition_count + 1)

    @rule()
    def settle(self):
        """Let all members speak until nothing changes: each partition then has one reader."""
        readers = [self.members[name] for name in self.group.members]
        for _ in range(6):
            for reader in readers:
                self.follow(reader, self.make(asking(reader.member_id, reader.epoch, owned=reader.owned)))
        readers = [one for one in readers if not one.is_out]
        for reader in [self.members[name] for name in self.group.members]:
            if reader.is_out:
                self.group = without_members(self.group, {reader.member_id}, now_ms=5)
        for _ in range(6):
            for reader in readers:
                self.follow(reader, self.make(asking(reader.member_id, reader.epoch, owned=reader.owned)))
        if not readers:
            return
        assert is_settled(self.group)
        wanted = {
            (topic.topic_id, number)
            for one in self.group.members.values()
            for name in one.consumer.subscribed
            if (topic := self.topics.get(name)) is not None
            for number in range(topic.partition_count)
        }
        assert sorted(one for reader in readers for one in reader.owned) == sorted(wanted)

    @invariant()
    def no_partition_has_two_readers(self):
        """Each partition has one reader among the members. A removed member cannot commit."""
        owned = [
            one
            for reader in self.members.values()
            if reader.member_id in self.group.members and not reader.is_out
            for one in reader.owned
        ]
        assert len(owned) == len(set(owned))

    @invariant()
    def epochs_only_grow(self):
        """No epoch comes back."""
        assert self.group.generation >= self.seen_epoch
        self.seen_epoch = self.group.generation


NewerRules.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
TestNewerRules = NewerRules.TestCase


def group_of(*member_ids, subscribed=("orders",), **changes):
    """Return a group whose members have reached their targets, and what each reads."""
    group, readers = ConsumerGroup("group"), {name: Reader(name) for name in member_ids}
    for name in member_ids:
        step = beat(group, asking(name, JOINS, subscribed=subscribed, owned=(), **changes))
        group, readers[name].epoch, readers[name].owned = step.group, step.reply.epoch, step.reply.assigned
    for _ in range(5):
        for one in readers.values():
            step = beat(group, asking(one.member_id, one.epoch, owned=one.owned))
            group, one.epoch = step.group, step.reply.epoch
            one.owned = step.reply.assigned
    assert is_settled(group)
    return group, readers


def test_uniform_moves_as_few_partitions_as_possible():
    """A third member takes one partition from each of the others, or from the larger ones."""
    before, readers = group_of("a", "b", subscribed=("orders", "returns"))
    sizes = sorted(len(one.owned) for one in readers.values())
    assert sizes == [3, 4]
    after = beat(before, asking("c", JOINS, subscribed=("orders", "returns"), owned=())).group
    for name in ("a", "b"):
        assert after.members[name].consumer.target < before.members[name].consumer.assigned
    assert sorted(len(one.consumer.target) for one in after.members.values()) == [2, 2, 3]


def test_range_gives_neighbouring_partitions():
    """The range assignor divides each topic by itself."""
    _, readers = group_of("a", "b", subscribed=("orders", "returns"), assignor="range")
    orders = TOPICS["orders"].topic_id
    numbers = [sorted(n for topic, n in readers[name].owned if topic == orders) for name in "ab"]
    assert numbers == [[0, 1, 2], [3, 4]]


def test_partition_waits_for_its_first_reader():
    """A member that joins gets a partition when the one before has said that it reads it no more."""
    group, readers = group_of("a")
    step = beat(group, asking("b", JOINS, subscribed=("orders",), owned=()))
    assert step.reply.assigned == frozenset()
    told = beat(step.group, asking("a", readers["a"].epoch))
    assert len(told.reply.assigned) == 3
    assert told.reply.epoch == readers["a"].epoch, "it has not reached the new epoch"
    waits = beat(told.group, asking("b", step.reply.epoch))
    assert waits.reply.assigned is None
    done = beat(told.group, asking("a", readers["a"].epoch, owned=told.reply.assigned))
    assert done.reply.epoch == done.group.generation
    given = beat(done.group, asking("b", step.reply.epoch))
    assert given.reply.assigned == ALL - done.reply.assigned - {
        (TOPICS["returns"].topic_id, number) for number in range(2)
    }


def test_member_that_gives_nothing_up_is_removed():
    """It has its rebalance timeout, and a session timeout in which it may not have heard of the request."""
    group, _ = group_of("a")
    group = beat(group, asking("b", JOINS, subscribed=("orders",), owned=())).group
    group = beat(group, asking("a", group.members["a"].consumer.epoch)).group
    seen = Sightings("one", {"a": 105_000, "b": 105_000}, lambda _: None, round_seen_ms=0, now_ms=104_999)
    assert not due_now(group, seen, LIMITS)
    assert due_now(group, replace(seen, now_ms=105_000), LIMITS).expired == {"a"}


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (asking("a", 9), GroupError.FENCED_MEMBER_EPOCH),
        (asking("x", 1), GroupError.UNKNOWN_MEMBER_ID),
        (asking("a", 1, assignor="other"), GroupError.UNSUPPORTED_ASSIGNOR),
        (asking("a", 1, instance_id="other"), GroupError.FENCED_INSTANCE_ID),
    ],
)
def test_heartbeat_is_refused(request_, error):
    """Another epoch, an unknown member, an unknown strategy, another instance."""
    group, _ = group_of("a")
    assert beat(group, request_) == type(beat(group, request_))(group, HeartbeatReply(error))


def test_static_member_is_not_there_twice():
    """Its name is free when the first one has left or expired."""
    group = beat(
        ConsumerGroup("group"), asking("a", JOINS, subscribed=("orders",), owned=(), instance_id="i")
    ).group
    second = asking("b", JOINS, subscribed=("orders",), owned=(), instance_id="i")
    assert beat(group, second).reply.error is GroupError.UNRELEASED_INSTANCE_ID
    left = beat(group, asking("a", -2, instance_id="i")).group
    assert left.state is GroupState.EMPTY
    assert beat(left, second).reply.error is GroupError.NONE


def test_members_of_both_protocols_do_not_mix():
    """A group changes its protocol when it is empty."""
    group, _ = group_of("a")
    member = replace(group.members["a"], member_id="old", consumer=None, protocols=(("range", b""),))
    asked = JoinRequest(member, is_new=True, protocol_type="consumer")
    assert join(group, asked, LIMITS).reply.error is GroupError.INCONSISTENT_GROUP_PROTOCOL
    classic = join(ConsumerGroup("group"), asked, LIMITS).group
    step = beat(classic, asking("a", JOINS, subscribed=("orders",), owned=()))
    assert step.reply.error is GroupError.GROUP_ID_NOT_FOUND
    empty = without_members(group, {"a"}, now_ms=5)
    assert join(empty, asked, LIMITS).reply.error is GroupError.NONE


def test_endpoint_that_knows_fewer_partitions_changes_nothing():
    """Two endpoints see a topic that has grown at different times."""
    group, readers = group_of("a")
    epoch = readers["a"].epoch
    grown = TOPICS | {"orders": replace(TOPICS["orders"], partition_count=6)}
    after = beat(group, asking("a", epoch), grown).group
    assert after.generation == group.generation + 1
    assert beat(after, asking("a", after.members["a"].consumer.epoch)).group == after


class CountedMembers(dict):
    """Members of a group that count how many of them are looked at one after the other."""

    visits = 0

    def __iter__(self):
        for name in super().__iter__():
            self.visits += 1
            yield name

    def keys(self):
        return list(self)

    def values(self):
        return (self[name] for name in self)

    def items(self):
        return ((name, self[name]) for name in self)


@pytest.mark.parametrize("tells", [False, True])
def test_heartbeat_that_changes_nothing_looks_at_its_own_member_and_topics_alone(tells):
    """A large group has a hundred thousand pairs of member and topic, and heartbeats all the time."""
    asked = []

    def topic_of(name):
        asked.append(name)
        return TOPICS.get(name)

    def make(group, request):
        return consumer_heartbeat(group, request, topic_of, LIMITS, now_ms=5)

    group = ConsumerGroup("group")
    for name, topic in (("a", "orders"), ("b", "returns")):
        group = make(group, asking(name, JOINS, subscribed=(topic,), owned=())).group
    consumer = make(group, asking("a", 1, owned=())).group.members["a"].consumer
    group = make(group, asking("a", 1, owned=())).group
    assert is_settled(group)
    group = replace(group, members=CountedMembers(group.members))
    asked.clear()
    step = make(group, asking("a", 2, owned=consumer.assigned if tells else None))
    # The first member tells which protocol the group follows.
    assert (group.members.visits, asked) == (1, ["orders"])
    assert step.reply == HeartbeatReply(GroupError.NONE, 2, consumer.assigned if tells else None)
    assert step.group == group


def test_topic_that_grows_is_seen_by_the_heartbeat_of_its_reader():
    """The heartbeat of another member is not slowed down by it, and changes nothing."""
    group = ConsumerGroup("group")
    for name, topic in (("a", "orders"), ("b", "returns")):
        group = beat(group, asking(name, JOINS, subscribed=(topic,), owned=())).group
    group = beat(group, asking("a", 1, owned=())).group
    grown = TOPICS | {"orders": SubscribedTopic("0a" * 16, 6)}
    assert beat(group, asking("b", 2), grown).group == group
    step = beat(group, asking("a", 2), grown)
    assert (step.group.generation, len(step.reply.assigned)) == (3, 6)


def test_heartbeat_that_is_decided_again_does_not_fence_its_member():
    """It moved the member's epoch the first time, and the answer was lost."""
    joined = beat(ConsumerGroup("g"), asking("a", JOINS, subscribed=("orders",), owned=()))
    grown = TOPICS | {"orders": SubscribedTopic(TOPICS["orders"].topic_id, 8)}
    request = asking("a", joined.reply.epoch)
    first = beat(joined.group, request, grown)
    assert first.reply.epoch > joined.reply.epoch
    again = beat(first.group, request, grown, is_again=True)
    assert (again.group, again.reply) == (first.group, first.reply)
    assert beat(first.group, request, grown).reply.error is GroupError.FENCED_MEMBER_EPOCH


def test_member_that_has_left_may_leave_again():
    """The answer was lost, and the request is decided again."""
    joined = beat(ConsumerGroup("g"), asking("a", JOINS, subscribed=("orders",), owned=()))
    left = beat(joined.group, asking("a", LEAVES))
    again = beat(left.group, asking("a", LEAVES), is_again=True)
    assert (again.group.members, again.reply) == (left.group.members, left.reply)
    assert beat(left.group, asking("a", LEAVES)).reply.error is GroupError.UNKNOWN_MEMBER_ID
