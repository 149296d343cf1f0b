"""Consumer groups against a model of what their members believe: whatever happens, in whatever order."""

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
)
from tieringd.policies.group_deadlines import Sightings, due_now
from tieringd.policies.group_membership import (
    GroupError,
    GroupLimits,
    JoinReply,
    JoinRequest,
    SyncRequest,
    begun_generation,
    end_round,
    heartbeat,
    join,
    join_answer,
    leave,
    prepared,
    sync,
    sync_answer,
    without_members,
)
from tieringd.policies.group_offsets import (
    CommitRequest,
    commit,
    deleted,
    offset_of,
    without_expired,
    without_offsets,
)

TOPIC = GroupTopic("orders", "A" * 22)
PARTITIONS = 5
LIMITS = GroupLimits(members=4, first_round_ms=0)
ENDPOINTS = ("one", "two")


def member_of(member_id, *, instance_id=None, protocols=("range",), endpoint="one", **changes):
    """Return a member that has just come."""
    return GroupMember(
        member_id,
        instance_id,
        "client",
        "10.0.0.1",
        endpoint,
        **({"session_timeout_ms": 10_000, "rebalance_timeout_ms": 60_000} | changes),
        protocols=tuple((name, name.encode()) for name in protocols),
    )


def joining(member, *, is_new=True, protocol_type="consumer"):
    """Return a request to join."""
    return JoinRequest(member, is_new=is_new, protocol_type=protocol_type)


def committing(member_id, generation, offset, *, partition=0, endpoint="one", instance_id=None, topic=TOPIC):
    """Return a request to commit one offset."""
    one = CommittedOffset(offset, 0, "", 1000)
    return CommitRequest(member_id, instance_id, generation, endpoint, {topic: {partition: one}})


@dataclass
class Client:
    """A consumer, and what it believes."""

    member_id: str
    instance_id: str | None
    pending: JoinReply | None = None
    generation: int = -1
    has_assignment: bool = False
    owned: set[int] = field(default_factory=set)
    led: tuple[str, ...] = ()


class GroupRules(RuleBasedStateMachine):
    """One group, its consumers, and the offsets that were acknowledged."""

    clients = Bundle("clients")

    def __init__(self):
        super().__init__()
        self.group = ConsumerGroup("group")
        self.acknowledged = {}
        self.all_clients = []
        self.seen_generation = 0
        self.owners = {}

    def make(self, transition):
        """Make a step twice, as an endpoint does that does not know whether the first one was stored."""
        first = transition(self.group)
        again = transition(first.group)
        assert again.group == first.group, "a step that is made again changes nothing more"
        self.group = first.group
        return first.reply

    @rule(
        target=clients,
        endpoint=st.sampled_from(ENDPOINTS),
        instance_id=st.sampled_from([None, None, "static"]),
        protocols=st.sampled_from([("range",), ("range", "sticky"), ("sticky", "range")]),
    )
    def come(self, endpoint, instance_id, protocols):
        """Let a consumer join for the first time."""
        client = Client(f"member-{len(self.all_clients)}", instance_id)
        member = member_of(client.member_id, instance_id=instance_id, protocols=protocols, endpoint=endpoint)
        known = instance_id is not None and self.group.static_member(instance_id) is not None
        is_full = len(self.group.members) >= LIMITS.members and not known
        reply = self.make(lambda group: join(group, joining(member), LIMITS))
        assert reply.error is (GroupError.GROUP_MAX_SIZE_REACHED if is_full else GroupError.NONE)
        self.all_clients.append(client)
        client.pending = None if is_full else reply
        return client

    @rule(client=clients, endpoint=st.sampled_from(ENDPOINTS))
    def come_again(self, client, endpoint):
        """Let a consumer join the next generation."""
        known = self.group.members.get(client.member_id)
        protocols = ("range",) if known is None else tuple(name for name, _ in known.protocols)
        member = member_of(
            client.member_id, instance_id=client.instance_id, protocols=protocols, endpoint=endpoint
        )
        reply = self.make(lambda group: join(group, joining(member, is_new=False), LIMITS))
        if known is None:
            assert reply.error in {GroupError.UNKNOWN_MEMBER_ID, GroupError.FENCED_INSTANCE_ID}
        else:
            assert reply.error is GroupError.NONE
            client.pending = reply

    @rule(client=clients)
    def learn_generation(self, client):
        """Let a consumer that joined look for its answer."""
        if client.pending is None:
            return
        answer = join_answer(self.group, client.member_id, client.pending, instance_id=client.instance_id)
        if answer is None:
            assert self.group.state is GroupState.PREPARING
            return
        client.pending = None
        if answer.error is not GroupError.NONE:
            assert client.member_id not in self.group.members
            return
        client.generation, client.has_assignment = answer.generation, False
        client.led = tuple(one.member_id for one in answer.members)

    @rule(client=clients, endpoint=st.sampled_from(ENDPOINTS))
    def synchronise(self, client, endpoint):
        """Let a consumer ask for its partitions; a leader assigns them to the members that it was told of."""
        assignments = {
            name: bytes(number for number in range(PARTITIONS) if number % len(client.led) == at)
            for at, name in enumerate(client.led)
        }
        request = SyncRequest(
            client.member_id, client.instance_id, client.generation, None, None, endpoint, assignments
        )
        error = self.make(lambda group: sync(group, request, LIMITS))
        if error is not GroupError.NONE:
            return
        answer = sync_answer(self.group, client.member_id, client.generation, instance_id=client.instance_id)
        if answer is not None and answer[0] is GroupError.NONE:
            client.has_assignment, client.owned = True, set(answer[1])

    @rule(client=clients, partition=st.integers(0, PARTITIONS - 1), offset=st.integers(0, 50))
    def commit(self, client, partition, offset):
        """Let a consumer commit, whatever it believes."""
        request = committing(
            client.member_id, client.generation, offset, partition=partition, instance_id=client.instance_id
        )
        is_simple = client.generation < 0 and not self.group.members
        is_current = (
            client.member_id in self.group.members
            and client.generation == self.group.generation
            and self.group.state is not GroupState.COMPLETING
        )
        before = self.group.offsets
        error = self.make(lambda group: commit(group, request))
        assert (error is GroupError.NONE) == (is_simple or is_current)
        if error is GroupError.NONE:
            self.acknowledged[partition] = offset
        else:
            assert self.group.offsets == before

    @rule(client=clients, endpoint=st.sampled_from(ENDPOINTS))
    def beat(self, client, endpoint):
        """Let a consumer send a heartbeat."""
        error = self.make(
            lambda group: heartbeat(group, client.member_id, client.instance_id, client.generation, endpoint)
        )
        is_current = client.member_id in self.group.members and client.generation == self.group.generation
        assert (error in {GroupError.NONE, GroupError.REBALANCE_IN_PROGRESS}) == is_current

    @rule(client=consumes(clients))
    def go(self, client):
        """Let a consumer leave."""
        leaving = [(client.member_id, client.instance_id)]
        self.group = leave(self.group, leaving, now_ms=5).group

    @rule(client=clients)
    def expire(self, client):
        """Remove a consumer that has gone silent."""
        self.group = without_members(self.group, {client.member_id}, now_ms=5)

    @rule()
    def end_the_round(self):
        """Let the time of the current round be over."""
        generation, state = self.group.generation, self.group.state
        self.group = end_round(self.group, generation=generation, state=state, now_ms=5)

    @invariant()
    def acknowledged_offsets_are_there(self):
        """What was acknowledged last is what the next consumer gets."""
        for partition in range(PARTITIONS):
            found = offset_of(self.group, TOPIC, partition)
            assert (None if found is None else found.offset) == self.acknowledged.get(partition)

    @invariant()
    def generations_only_grow(self):
        """No generation comes back."""
        assert self.group.generation >= self.seen_generation
        self.seen_generation = self.group.generation

    @invariant()
    def one_member_has_each_partition(self):
        """One member of a generation owns each partition, and no two members commit for the same one."""
        for client in self.all_clients:
            if client.has_assignment:
                owners = self.owners.setdefault(client.generation, {})
                for partition in client.owned:
                    owner = client.instance_id or client.member_id
                    assert owners.setdefault(partition, owner) == owner
        if self.group.state is GroupState.STABLE:
            assigned = [number for one in self.group.members.values() for number in one.assignment]
            assert sorted(assigned) == list(range(PARTITIONS))

    @invariant()
    def state_fits_members(self):
        """An empty group has no members, and a generation has a leader."""
        group = self.group
        assert (group.state is GroupState.EMPTY) == (not group.members)
        assert len(group.members) <= LIMITS.members
        if group.state in {GroupState.COMPLETING, GroupState.STABLE}:
            assert group.leader in group.members
            assert group.protocol is not None


GroupRules.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=60, deadline=None)
TestGroupRules = GroupRules.TestCase


def joined(group, *members, limits=LIMITS, **request):
    """Let members join one after another."""
    for member in members:
        group = join(group, joining(member, **request), limits).group
    return group


def stable(*members):
    """Return a group whose leader has assigned one partition to each member."""
    group = joined(ConsumerGroup("group"), *members)
    for name in group.members:
        known = group.members[name]
        group = join(group, joining(known, is_new=False), LIMITS).group
    assert group.state is GroupState.COMPLETING
    assignments = {name: bytes([number]) for number, name in enumerate(group.members)}
    asked = SyncRequest(group.leader, None, group.generation, None, None, "one", assignments)
    return sync(group, asked, LIMITS).group


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"session_timeout_ms": 5999}, GroupError.INVALID_SESSION_TIMEOUT),
        ({"session_timeout_ms": 1_800_001}, GroupError.INVALID_SESSION_TIMEOUT),
        ({"protocols": ()}, GroupError.INCONSISTENT_GROUP_PROTOCOL),
        ({"protocols": ("other",)}, GroupError.INCONSISTENT_GROUP_PROTOCOL),
    ],
)
def test_join_is_refused(changes, error):
    """A session timeout out of bounds, no strategy, and none that the others know."""
    group = stable(member_of("a"))
    step = join(group, joining(member_of("b", **changes)), LIMITS)
    assert (step.reply.error, step.group) == (error, group)


def test_members_of_another_kind_are_refused():
    """A group of consumers takes no other members, until it is empty."""
    group = stable(member_of("a"))
    asked = joining(member_of("b"), protocol_type="connect")
    assert join(group, asked, LIMITS).reply.error is GroupError.INCONSISTENT_GROUP_PROTOCOL
    empty = leave(group, [("a", None)], now_ms=5).group
    assert join(empty, asked, LIMITS).reply.error is GroupError.NONE


def test_large_metadata_is_refused():
    """The limit holds for a member's metadata and for an assignment."""
    large = replace(member_of("a"), protocols=(("range", b"x" * LIMITS.member_bytes),))
    error = join(ConsumerGroup("group"), joining(large), LIMITS).reply.error
    assert error is GroupError.GROUP_MAX_SIZE_REACHED
    group = joined(ConsumerGroup("group"), member_of("a"))
    asked = SyncRequest("a", None, 1, None, None, "one", {"a": b"x" * (LIMITS.member_bytes + 1)})
    assert sync(group, asked, LIMITS).reply is GroupError.GROUP_MAX_SIZE_REACHED


def test_strategy_with_most_votes_is_chosen():
    """Only strategies that all members know are counted."""
    group = ConsumerGroup("group", GroupState.PREPARING, protocol_type="consumer")
    for name, protocols in (("a", ("x", "y", "z")), ("b", ("y", "x")), ("c", ("z", "y", "x"))):
        member = replace(member_of(name, protocols=protocols), has_joined=True)
        group = group.with_member(member)
    # The one who prefers z knows y better than x.
    assert begun_generation(group).protocol == "y"


def test_group_that_was_empty_waits_for_more_members():
    """The first generation begins when the time is over, with all that have come."""
    limits = replace(LIMITS, first_round_ms=3000)
    group = joined(ConsumerGroup("group"), member_of("a"), member_of("b"), limits=limits)
    assert (group.state, group.generation) == (GroupState.PREPARING, 0)
    seen = Sightings("one", {"a": 0, "b": 0}, lambda _: None, round_seen_ms=0, now_ms=2999)
    assert not due_now(group, seen, limits)
    assert due_now(group, replace(seen, now_ms=3000), limits).is_round_over
    begun = end_round(group, generation=0, state=GroupState.PREPARING, now_ms=5)
    assert (begun.state, begun.generation, set(begun.members)) == (GroupState.COMPLETING, 1, {"a", "b"})


def test_round_ends_without_those_that_do_not_come():
    """A dynamic member is dropped, and a static one stays, since it may be starting again."""
    group = prepared(stable(member_of("a"), member_of("b"), member_of("c", instance_id="c")))
    group = join(group, joining(group.members["a"], is_new=False), LIMITS).group
    assert group.state is GroupState.PREPARING
    ended = end_round(group, generation=group.generation, state=group.state, now_ms=5)
    assert set(ended.members) == {"a", "c"}
    assert ended.leader == "a"


def test_leader_that_assigns_nothing_is_dropped():
    """The others then choose another."""
    group = prepared(stable(member_of("a"), member_of("b")))
    for name in ("a", "b"):
        group = join(group, joining(group.members[name], is_new=False), LIMITS).group
    assert (group.state, group.leader) == (GroupState.COMPLETING, "a")
    ended = end_round(group, generation=group.generation, state=group.state, now_ms=5)
    assert (ended.state, set(ended.members)) == (GroupState.PREPARING, {"b"})


def test_static_member_comes_back_to_its_partitions():
    """It gets them without a new generation, and its former process gets an error: it was replaced."""
    group = stable(member_of("a"), member_of("b", instance_id="static"))
    back = member_of("b2", instance_id="static")
    step = join(group, joining(back), LIMITS)
    assert step.reply.is_replaced
    assert step.group.generation == group.generation
    assert step.group.members["b2"].assignment == group.members["b"].assignment
    old = commit(step.group, committing("b", group.generation, 7, instance_id="static"))
    assert old.reply is GroupError.FENCED_INSTANCE_ID
    other = replace(back, member_id="b3", protocols=(("range", b"other topics"),))
    assert join(group, joining(other), LIMITS).group.state is GroupState.PREPARING


def test_static_member_that_was_replaced_while_it_waits_is_fenced():
    """It would join anew otherwise, and fence the process that has come in its place."""
    group = prepared(stable(member_of("a"), member_of("b", instance_id="static")))
    old = join(group, joining(group.members["b"], is_new=False), LIMITS)
    assert join_answer(old.group, "b", old.reply, instance_id="static") is None
    back = join(old.group, joining(member_of("b2", instance_id="static")), LIMITS)
    answer = join_answer(back.group, "b", old.reply, instance_id="static")
    assert answer.error is GroupError.FENCED_INSTANCE_ID
    begun = join(back.group, joining(group.members["a"], is_new=False), LIMITS).group
    assert begun.state is GroupState.COMPLETING
    assert sync_answer(begun, "b2", begun.generation, instance_id="static") is None
    gone = join(begun, joining(member_of("b3", instance_id="static")), LIMITS).group
    error, _ = sync_answer(gone, "b2", begun.generation, instance_id="static")
    assert error is GroupError.FENCED_INSTANCE_ID
    # A member that was removed joins anew.
    assert join_answer(group, "c", old.reply, instance_id="other").error is GroupError.UNKNOWN_MEMBER_ID


def test_write_of_a_static_leader_that_comes_back_may_be_made_again():
    """An endpoint that does not know whether its write was stored makes it again: the group goes on."""
    group = stable(member_of("a", instance_id="static"), member_of("b"))
    assert group.leader == "a"
    back = joining(member_of("a2", instance_id="static"))
    first = join(group, back, LIMITS)
    again = join(first.group, back, LIMITS)
    assert again.group == first.group
    assert again.group.state is GroupState.STABLE
    # The leader must not assign partitions to the members of a generation that has them.
    assert again.reply.is_replaced
    assert again.reply.is_due


def test_members_expire_where_they_are_watched():
    """The last heartbeat counts for members connected here, the lease of their endpoint for others."""
    group = stable(member_of("a"), member_of("b", endpoint="two"), member_of("c", endpoint="three"))
    seen = Sightings("one", {"a": 0}, {"two": None, "three": 1000}.__getitem__, 0, now_ms=10_999)
    assert due_now(group, replace(seen, now_ms=9999), LIMITS).expired == frozenset()
    assert due_now(group, seen, LIMITS).expired == {"a"}
    assert due_now(group, replace(seen, now_ms=11_000), LIMITS).expired == {"a", "c"}


def test_simple_consumer_commits_only_without_members():
    """A tool that sets offsets does not get between members."""
    assert commit(ConsumerGroup("group"), committing("", -1, 5)).reply is GroupError.NONE
    assert commit(stable(member_of("a")), committing("", -1, 5)).reply is GroupError.UNKNOWN_MEMBER_ID


def test_topic_that_was_created_again_has_no_offsets():
    """Offsets of its predecessor would skip its records."""
    group = commit(ConsumerGroup("group"), committing("", -1, 50)).group
    again = GroupTopic("orders", "B" * 22)
    assert offset_of(group, again, 0) is None
    group = commit(group, committing("", -1, 3, topic=again)).group
    assert (offset_of(group, again, 0).offset, offset_of(group, TOPIC, 0)) == (3, None)


def test_offsets_expire_after_the_group_is_empty():
    """Counted from the last commit, and from when the last member left; a group with members keeps all."""
    group = commit(stable(member_of("a")), committing("a", 1, 50)).group
    assert without_expired(group, now_ms=10**15, retention_ms=1000) == group
    empty = leave(group, [("a", None)], now_ms=5000).group
    assert without_expired(empty, now_ms=5999, retention_ms=1000) == empty
    gone = without_expired(empty, now_ms=6000, retention_ms=1000)
    assert (gone.exists, gone.generation) == (False, empty.generation)


def test_deletion():
    """Only of a group that exists and has no members. Its generation stays."""
    assert deleted(ConsumerGroup("group")).reply is GroupError.GROUP_ID_NOT_FOUND
    group = commit(stable(member_of("a")), committing("a", 1, 50)).group
    assert deleted(group).reply is GroupError.NON_EMPTY_GROUP
    empty = leave(group, [("a", None)], now_ms=5000).group
    assert without_offsets(empty, {"orders": {1}}) == empty
    assert without_offsets(empty, {"orders": {0}}).offsets == {}
    gone = deleted(empty).group
    assert (gone.exists, gone.generation) == (False, empty.generation)
