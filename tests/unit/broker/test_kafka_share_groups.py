"""Answers of brokers on share groups, and their meaning if brokers do not answer."""

from __future__ import annotations

from datetime import timedelta

import pytest
from kio.index import load_payload_module
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from tieringd.broker.kafka_share_groups import share_group_starts
from tieringd.errors import BrokerDenied, BrokerLacksApi, BrokerUnavailable
from tieringd.model.partition import TopicPartition

OWN, OTHER = ("own", 1), ("other", 2)
LISTING, DESCRIPTION = (
    load_payload_module(key, version, EntityType.response) for key, version in ((16, 5), (90, 0))
)
DESCRIBING = load_payload_module(90, 0, EntityType.request)
NO_TIME = {"throttle_time": timedelta()}


class Brokers:
    """The brokers of a cluster by address: groups with their start offset in one partition, or an error."""

    def __init__(self, **groups):
        self.groups = groups
        self.listing_error = self.group_error = self.partition_error = ErrorCode.none
        self.asked = []
        self.unlisted = False
        """Whether brokers list no group although they coordinate some."""
        self.coordinated = {name: set() for name in groups}
        """Groups without any offset for which a broker is the coordinator all the same."""

    async def send(self, address, request):
        name, api = address[0], request._api.name
        self.asked.append((name, api))
        groups = self.groups[name]
        if isinstance(groups, Exception):
            raise groups
        if api == "ListGroups":
            listed = tuple(
                LISTING.ListedGroup(
                    group_id=group, protocol_type="share", group_state="Stable", group_type=kind
                )
                for group, kind in [
                    *((group, "share") for group in groups if not self.unlisted),
                    ("classic group", "classic"),
                ]
            )
            return LISTING.ListGroupsResponse(error_code=self.listing_error, groups=listed, **NO_TIME)
        wanted = [one.group_id for one in request._build(DESCRIBING).groups]
        return DESCRIPTION.DescribeShareGroupOffsetsResponse(
            groups=tuple(
                self._group(group, groups[group]) if group in groups else self._no_group(name, group)
                for group in wanted
            ),
            **NO_TIME,
        )

    def _no_group(self, name, group):
        is_here = group in self.coordinated[name]
        return DESCRIPTION.DescribeShareGroupOffsetsResponseGroup(
            group_id=group,
            topics=(),
            error_code=ErrorCode.group_id_not_found if is_here else ErrorCode.not_coordinator,
        )

    def _group(self, group, start):
        partition = DESCRIPTION.DescribeShareGroupOffsetsResponsePartition(
            partition_index=3, start_offset=start, leader_epoch=0, error_code=self.partition_error
        )
        topic = DESCRIPTION.DescribeShareGroupOffsetsResponseTopic(
            topic_name="orders", topic_id=None, partitions=(partition,)
        )
        return DESCRIPTION.DescribeShareGroupOffsetsResponseGroup(
            group_id=group, topics=(topic,), error_code=self.group_error
        )


def starts_of(brokers, known=()):
    return share_group_starts(brokers, OWN, [OTHER], known=known)


async def test_groups_of_all_coordinators_are_told():
    """Each broker knows those that it coordinates."""
    brokers = Brokers(own={"a": 7}, other={"b": -1})
    name = TopicPartition("orders", 3)
    assert await starts_of(brokers) == {"a": {name: 7}, "b": {name: -1}}


async def test_broker_without_share_groups_ends_the_question():
    """Other brokers are not asked: share groups need every broker of the cluster."""
    brokers = Brokers(own=BrokerLacksApi("it does not offer it"), other={"b": 1})
    assert await starts_of(brokers) == {}
    assert brokers.asked == [("own", "ListGroups")]


async def test_brokers_without_a_group_are_not_asked_for_offsets():
    """One request each is enough."""
    brokers = Brokers(own={}, other={})
    assert await starts_of(brokers) == {}
    assert brokers.asked == [("own", "ListGroups"), ("other", "ListGroups")]


@pytest.mark.parametrize("field", ["listing_error", "group_error", "partition_error"])
@pytest.mark.parametrize(
    ("code", "error"),
    [
        pytest.param(ErrorCode.coordinator_load_in_progress, BrokerUnavailable, id="loading"),
        pytest.param(ErrorCode.not_coordinator, BrokerUnavailable, id="moved"),
        pytest.param(ErrorCode.group_authorization_failed, BrokerDenied, id="not allowed"),
    ],
)
async def test_group_whose_offsets_are_not_told_is_an_error(field, code, error):
    """No answer is not the answer that nothing is needed."""
    brokers = Brokers(own={"a": 7}, other={})
    setattr(brokers, field, code)
    with pytest.raises(error, match=code.name.upper()):
        await starts_of(brokers)


async def test_broker_that_is_away_is_an_error():
    """A broker that is away may coordinate a group, so nothing is known of any."""
    with pytest.raises(BrokerUnavailable):
        await starts_of(Brokers(own={"a": 7}, other=BrokerUnavailable("it is away")))


@pytest.mark.parametrize(
    ("field", "code"),
    [
        ("group_error", ErrorCode.group_id_not_found),
        ("partition_error", ErrorCode.unknown_topic_or_partition),
    ],
)
async def test_what_was_deleted_meanwhile_needs_nothing(field, code):
    """A group or topic that was deleted after it was listed needs nothing."""
    brokers = Brokers(own={"a": 7}, other={})
    setattr(brokers, field, code)
    assert not any((await starts_of(brokers)).values())


async def test_known_group_that_no_broker_coordinates_is_not_gone():
    """Its coordination moves: no broker lists it, and all say that another one coordinates it."""
    with pytest.raises(BrokerUnavailable, match="no broker coordinates share group a now"):
        await starts_of(Brokers(own={}, other={}), known=["a"])


async def test_known_group_that_its_coordinator_does_not_list_is_described():
    """The coordinator had not begun when it was asked for its groups."""
    brokers = Brokers(own={}, other={"a": 7})
    brokers.unlisted = True
    assert await starts_of(brokers, known=["a"]) == {"a": {TopicPartition("orders", 3): 7}}


async def test_known_group_whose_coordinator_is_not_ready_is_an_error():
    """It loads what it has to know."""
    brokers = Brokers(own={}, other={"a": 7})
    brokers.unlisted, brokers.group_error = True, ErrorCode.coordinator_load_in_progress
    with pytest.raises(BrokerUnavailable, match="COORDINATOR_LOAD_IN_PROGRESS"):
        await starts_of(brokers, known=["a"])


async def test_known_group_is_gone_when_its_coordinator_says_so():
    """Another broker's answer, that it is not the coordinator, says nothing."""
    brokers = Brokers(own={}, other={})
    brokers.coordinated["other"].add("a")
    assert await starts_of(brokers, known=["a"]) == {}
